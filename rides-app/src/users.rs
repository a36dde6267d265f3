//! Who may ask: users with bearer tokens, which are stored hashed.

use axum::extract::{FromRef, FromRequestParts};
use axum::response::{IntoResponse, Response};
use http::request::Parts;
use http::{HeaderValue, StatusCode, header};
use idempotent_core::http::{Caller, Problem};
use sha2::{Digest, Sha256};
use sqlx::postgres::PgPool;
use uuid::Uuid;

use crate::app::unavailable;

/// The user who sent the request. As an extractor it answers 401 without a valid token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    /// The user's id.
    pub id: Uuid,
}

impl Caller for User {
    fn user_id(&self) -> String {
        self.id.to_string()
    }
}

impl<S> FromRequestParts<S> for User
where
    PgPool: FromRef<S>,
    S: Send + Sync,
{
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        let token =
            bearer_token(parts.headers.get(header::AUTHORIZATION)).ok_or_else(unauthorized)?;
        let pool = PgPool::from_ref(state);
        match find_by_token(&pool, token).await {
            Ok(Some(id)) => Ok(Self { id }),
            Ok(None) => Err(unauthorized()),
            Err(error) => Err(unavailable(&error)),
        }
    }
}

fn bearer_token(header: Option<&HeaderValue>) -> Option<&str> {
    let (scheme, token) = header?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

fn unauthorized() -> Response {
    let problem = Problem::new(
        StatusCode::UNAUTHORIZED,
        "unauthorized",
        "The request needs a valid token",
    )
    .detail("Send the header Authorization: Bearer <token>.");
    let mut response = problem.into_response();
    response
        .headers_mut()
        .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

fn hash(token: &str) -> Vec<u8> {
    Sha256::digest(token.as_bytes()).to_vec()
}

async fn find_by_token(pool: &PgPool, token: &str) -> Result<Option<Uuid>, sqlx::Error> {
    sqlx::query_scalar("SELECT id FROM users WHERE token_hash = $1")
        .bind(hash(token))
        .fetch_optional(pool)
        .await
}

/// The id of the user of that name.
pub(crate) async fn find_by_name(pool: &PgPool, name: &str) -> Result<Option<Uuid>, sqlx::Error> {
    sqlx::query_scalar("SELECT id FROM users WHERE name = $1")
        .bind(name)
        .fetch_optional(pool)
        .await
}

/// Adds a user with a token. False: there is one of that name.
pub async fn add(pool: &PgPool, name: &str, token: &str) -> Result<bool, sqlx::Error> {
    let added = sqlx::query("INSERT INTO users (id, name, token_hash) VALUES ($1, $2, $3) ON CONFLICT (name) DO NOTHING")
        .bind(Uuid::now_v7())
        .bind(name)
        .bind(hash(token))
        .execute(pool)
        .await?;
    Ok(added.rows_affected() == 1)
}

/// A token that nobody guesses: 256 bits.
pub fn new_token() -> String {
    format!(
        "rides_{}{}",
        Uuid::new_v4().simple(),
        Uuid::new_v4().simple()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_bearer_token_counts() {
        let header = |text: &str| HeaderValue::from_str(text).unwrap();
        assert_eq!(
            bearer_token(Some(&header("Bearer demo-alice"))),
            Some("demo-alice")
        );
        assert_eq!(
            bearer_token(Some(&header("bearer  demo-alice"))),
            Some("demo-alice")
        );
        for bad in ["demo-alice", "Basic demo-alice", "Bearer", "Bearer  "] {
            assert_eq!(bearer_token(Some(&header(bad))), None, "{bad}");
        }
        assert_eq!(bearer_token(None), None);
    }
}
