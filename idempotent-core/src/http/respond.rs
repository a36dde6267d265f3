//! Answers and errors of the engine as responses.

use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode};

use super::Problem;
use crate::engine::{Answer, Handle};
use crate::error::{InvalidRequest, RunError};
use crate::flow::Flow;
use crate::key::Key;

/// The header that marks a replay: `true`.
pub static IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// How long a request waits for an identical one that runs in this process, before it is told that
/// one is in progress.
pub const DUPLICATE_WAIT: Duration = Duration::from_secs(1);

/// Which statuses an API uses where the draft and the well-known APIs differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    mismatch: StatusCode,
}

impl Profile {
    /// As in draft-ietf-httpapi-idempotency-key-header: 422 for a key that was used for another
    /// request, 409 for a request in progress.
    pub const fn ietf() -> Self {
        Self {
            mismatch: StatusCode::UNPROCESSABLE_ENTITY,
        }
    }

    /// As in Rocket Rides: 409 for both, told apart by `code`.
    pub const fn rocket_rides() -> Self {
        Self {
            mismatch: StatusCode::CONFLICT,
        }
    }
}

impl Default for Profile {
    fn default() -> Self {
        Self::ietf()
    }
}

/// Runs a request through its flow and answers: the reply, the replay, or a problem.
///
/// A duplicate that finds its twin running in this process waits for its answer, for
/// [`DUPLICATE_WAIT`] at most; then it is told that the request is in progress. The twin runs on.
///
/// ```no_run
/// # mod doc_flow { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/doc_flow.rs")); }
/// # use doc_flow::{RideFlow, RideRequest};
/// use axum::response::Response;
/// use idempotent_core::http::{IdempotencyKey, JsonBody, Profile, respond};
/// use idempotent_core::{Handle, Key, KeyError};
///
/// async fn create_ride(
///     rides: Handle<RideFlow>,
///     user: String, // from the application's own authentication
///     key: IdempotencyKey,
///     JsonBody(request): JsonBody<RideRequest>,
/// ) -> Result<Response, KeyError> {
///     let key = Key::new(user, "/api/rides", key.into_string())?;
///     Ok(respond(&rides, key, request, Profile::ietf()).await)
/// }
/// ```
pub async fn respond<F: Flow>(
    flow: &Handle<F>,
    key: Key,
    request: F::Request,
    profile: Profile,
) -> Response {
    let answered = match flow.start(key, request) {
        Ok(running) if running.is_joined() => tokio::time::timeout(DUPLICATE_WAIT, running.wait())
            .await
            .unwrap_or(Err(RunError::InProgress {
                retry_after: DUPLICATE_WAIT,
            })),
        Ok(running) => running.wait().await,
        Err(error) => Err(error),
    };
    match answered {
        Ok(answer) => answer.into_response(),
        Err(error) => {
            let problem = profile.problem(&error);
            if problem.status().is_server_error() {
                tracing::warn!(flow = F::graph().flow(), %error, "the request could not be answered");
            }
            problem.into_response()
        }
    }
}

impl Profile {
    /// An error as the problem that tells the client what to do.
    pub fn problem(self, error: &RunError) -> Problem {
        let (status, code, title) = match error {
            RunError::Invalid(InvalidRequest::Key(_)) => (
                StatusCode::BAD_REQUEST,
                "key_invalid",
                "The idempotency key is not valid",
            ),
            RunError::Invalid(_) => (
                StatusCode::BAD_REQUEST,
                "body_malformed",
                "The body cannot be stored",
            ),
            RunError::Mismatch => (
                self.mismatch,
                "request_mismatch",
                "The key was used for a different request",
            ),
            RunError::InProgress { .. } => (
                StatusCode::CONFLICT,
                "request_in_progress",
                "A request with this key is in progress",
            ),
            RunError::Stuck => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "flow_stuck",
                "The request could not be completed and waits for an operator",
            ),
            RunError::Retry { .. }
            | RunError::Stopped { .. }
            | RunError::NotUnderstood { .. }
            | RunError::Unavailable { .. }
            | RunError::ShuttingDown => (
                StatusCode::SERVICE_UNAVAILABLE,
                "temporarily_unavailable",
                "The request could not be completed now",
            ),
        };
        let problem = Problem::new(status, code, title).detail(detail(error));
        match error.retry_after() {
            Some(after) => problem.retry_after(after),
            None => problem,
        }
    }
}

/// What the client is told. What went wrong inside is for the log: it may name tables or hosts.
fn detail(error: &RunError) -> String {
    match error {
        RunError::Invalid(_) | RunError::Mismatch | RunError::InProgress { .. } => error.to_string(),
        RunError::Stuck => "Nothing is lost, but a retry does not help now. Contact support and name your idempotency key; \
                            once it is resolved, the same request with the same key gets its answer. Do not send it with a new key."
            .to_owned(),
        _ => "It is safe to retry: send the same request with the same key. What was done is kept and is not done again."
            .to_owned(),
    }
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        let mut response = self.reply().to_response().map(Body::from);
        if self.is_replayed() {
            response
                .headers_mut()
                .insert(&IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"));
        }
        response
    }
}
