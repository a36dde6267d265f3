//! How an API says no, where the draft and the well-known APIs differ.

use http::{HeaderValue, StatusCode};
use serde_json::{Value, json};

use super::Problem;

/// The statuses and the shape of an API's problems.
///
/// ```
/// use idempotent_core::RunError;
/// use idempotent_core::http::Profile;
///
/// let mismatch = RunError::Mismatch;
/// assert_eq!(Profile::ietf().problem(&mismatch).status(), 422);
/// assert_eq!(Profile::rocket_rides().problem(&mismatch).status(), 409);
/// assert_eq!(Profile::stripe().problem(&mismatch).status(), 400);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    pub(super) mismatch: StatusCode,
    shape: Shape,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// `application/problem+json`, RFC 9457.
    Problem,
    /// `{"error": {"type": …, "code": …, "message": …}}`.
    Stripe,
}

impl Profile {
    /// As in draft-ietf-httpapi-idempotency-key-header: 422 for a key that was used for another
    /// request, 409 for a request in progress.
    pub const fn ietf() -> Self {
        Self {
            mismatch: StatusCode::UNPROCESSABLE_ENTITY,
            shape: Shape::Problem,
        }
    }

    /// As in Rocket Rides: 409 for both, told apart by `code`.
    pub const fn rocket_rides() -> Self {
        Self {
            mismatch: StatusCode::CONFLICT,
            shape: Shape::Problem,
        }
    }

    /// As Stripe does: 400 for a key that was used for another request, 409 for a request in progress,
    /// and an error object that Stripe's own clients can read.
    pub const fn stripe() -> Self {
        Self {
            mismatch: StatusCode::BAD_REQUEST,
            shape: Shape::Stripe,
        }
    }

    pub(super) fn content_type(self) -> HeaderValue {
        HeaderValue::from_static(match self.shape {
            Shape::Problem => "application/problem+json",
            Shape::Stripe => "application/json",
        })
    }

    /// The document of a problem that is described at this address.
    pub(super) fn document(self, problem: &Problem, described_at: &str) -> Value {
        match self.shape {
            Shape::Problem => problem.document(described_at),
            Shape::Stripe => stripe_error(problem, described_at),
        }
    }
}

impl Default for Profile {
    fn default() -> Self {
        Self::ietf()
    }
}

fn stripe_error(problem: &Problem, described_at: &str) -> Value {
    let kind = match (problem.code(), problem.status()) {
        ("request_mismatch" | "request_in_progress", _) => "idempotency_error",
        (_, status) if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    };
    let code = match problem.code() {
        "request_in_progress" => "idempotency_key_in_use",
        code => code,
    };
    json!({
        "error": {
            "type": kind,
            "code": code,
            "message": problem.message(),
            "doc_url": described_at,
        }
    })
}
