//! The service: its routes, and what they share. The handler that matters, `create_ride`, is a
//! few lines: who asks, under which key, for what; the flow does the rest.

use axum::Router;
use axum::body::Body;
use axum::extract::{FromRef, Path, State};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use http::StatusCode;
use idempotent_core::http::{Contract, IdempotencyKey, JsonBody, Problem, Profile, Scope};
use idempotent_core::{Handle, Key, KeyError, RunError};
use serde_json::json;
use sqlx::postgres::PgPool;
use uuid::Uuid;

use crate::flow::{Payments, Place, RideFlow, RideRequest};
use crate::problems;
use crate::rides::{self, RideView};
use crate::users::User;

/// What the handlers share.
#[derive(Debug)]
pub struct App<P> {
    /// The rides' database.
    pub pool: PgPool,
    /// The way to run the ride flow.
    pub rides: Handle<RideFlow<P>>,
}

impl<P> Clone for App<P> {
    fn clone(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            rides: self.rides.clone(),
        }
    }
}

impl<P> FromRef<App<P>> for PgPool {
    fn from_ref(app: &App<P>) -> Self {
        app.pool.clone()
    }
}

/// What the service promises about keys, in the way of this profile.
pub fn contract(profile: Profile) -> Contract {
    Contract::new(profile).documented_at(problems::PAGE)
}

/// Where rides are asked for, and what their keys are unique within.
const RIDES: &str = "/api/rides";

/// How many rides a list shows.
const LIST_LIMIT: i64 = 100;

/// The service's routes, under the usual contract: a mismatch and a request in progress are both 409,
/// told apart by `code`.
pub fn router<P: Payments>(app: App<P>) -> Router {
    routes(app).layer(contract(Profile::rocket_rides()))
}

/// The service's routes, under none.
pub fn routes<P: Payments>(app: App<P>) -> Router {
    Router::new()
        .route(RIDES, post(create_ride::<P>).get(list_rides))
        .route("/api/rides/by-key/{key}", get(ride_by_key::<P>))
        .route("/api/rides/{id}", get(show_ride))
        .route(problems::PAGE, get(problems::page))
        .route("/healthz", get(async || Json(json!({"status": "ok"}))))
        .route("/readyz", get(ready))
        .fallback(async || {
            Problem::new(StatusCode::NOT_FOUND, "not_found", "There is nothing here")
        })
        .method_not_allowed_fallback(async || {
            Problem::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "The method is not allowed here",
            )
        })
        .with_state(app)
}

async fn create_ride<P: Payments>(
    State(app): State<App<P>>,
    scope: Scope<User>,
    key: IdempotencyKey,
    JsonBody(request): JsonBody<RideRequest>,
) -> Result<Response, Problem> {
    Ok(scope.run(&app.rides, key, checked(request)?).await)
}

/// For a client that gave up: where its request stands.
async fn ride_by_key<P: Payments>(
    State(app): State<App<P>>,
    scope: Scope<User>,
    Path(key): Path<String>,
) -> Result<Response, Problem> {
    let user = scope.user().id.to_string();
    let key = Key::new(user, RIDES, key).map_err(|error| key_invalid(&error))?;
    let operation = scope.contract().operation(&app.rides, &key).await;
    Ok(operation.map(Body::from))
}

async fn show_ride(
    State(pool): State<PgPool>,
    user: User,
    Path(id): Path<String>,
) -> Result<Json<RideView>, Response> {
    let unknown = || {
        Problem::new(
            StatusCode::NOT_FOUND,
            "ride_unknown",
            "There is no such ride",
        )
        .detail("Only the user who asked for a ride can see it.")
        .into_response()
    };
    let id: Uuid = id.parse().map_err(|_| unknown())?;
    let ride = rides::find(&pool, user.id, id)
        .await
        .map_err(|error| unavailable(&error))?;
    ride.map(Json).ok_or_else(unknown)
}

async fn list_rides(State(pool): State<PgPool>, user: User) -> Result<Response, Response> {
    let rides = rides::list(&pool, user.id, LIST_LIMIT)
        .await
        .map_err(|error| unavailable(&error))?;
    Ok(Json(json!({ "rides": rides })).into_response())
}

async fn ready(State(pool): State<PgPool>) -> Result<Response, Response> {
    sqlx::query("SELECT 1 FROM idempotency_keys LIMIT 0")
        .execute(&pool)
        .await
        .map_err(|error| unavailable(&error))?;
    Ok(Json(json!({"status": "ready"})).into_response())
}

/// What serde cannot check.
fn checked(request: RideRequest) -> Result<RideRequest, Problem> {
    let invalid = |why: &str| {
        Err(Problem::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            "body_invalid",
            "The body does not fit",
        )
        .detail(why))
    };
    if request.amount_cents < 1 {
        return invalid("amountCents must be an integer from 1.");
    }
    if request.currency.len() != 3
        || !request
            .currency
            .bytes()
            .all(|byte| byte.is_ascii_lowercase())
    {
        return invalid("currency must be three lower-case letters, such as usd.");
    }
    let source = &request.payment_source;
    let is_token = (1..=100).contains(&source.len())
        && source
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if !is_token {
        return invalid("paymentSource must be a token of the gateway's, such as tok_visa.");
    }
    let on_the_map = |place: &Place| {
        (-90.0..=90.0).contains(&place.lat) && (-180.0..=180.0).contains(&place.lon)
    };
    if !request.origin.iter().chain(&request.target).all(on_the_map) {
        return invalid("lat must be from -90 to 90 and lon from -180 to 180.");
    }
    Ok(request)
}

fn key_invalid(error: &KeyError) -> Problem {
    Profile::default().problem(&RunError::Invalid(error.clone().into()))
}

/// The database did not answer. What it said is for the log.
pub(crate) fn unavailable(error: &sqlx::Error) -> Response {
    tracing::warn!(%error, "the database did not answer");
    Profile::default()
        .problem(&RunError::Unavailable {
            reason: error.to_string(),
        })
        .into_response()
}
