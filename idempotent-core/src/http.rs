//! HTTP glue for axum (feature `axum`): the `Idempotency-Key` header as an extractor, a JSON body
//! that is read as strictly as a fingerprint needs, and answers and errors as responses. Every error
//! is a problem document (RFC 9457) with a stable `code`.
//!
//! The order of a handler is the order of its extractors: authenticate, authorise, the key, the
//! body; then [`respond`] runs the flow. A replay passes the same way as a first request.

mod body;
mod header;
mod problem;
mod respond;

pub use body::JsonBody;
pub use header::{IdempotencyKey, parse_idempotency_key};
pub use problem::Problem;
pub use respond::{DUPLICATE_WAIT, IDEMPOTENT_REPLAYED, Profile, respond};
