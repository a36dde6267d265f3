//! The HTTP glue: what clients of a service see of idempotency keys, to the letter of
//! draft-ietf-httpapi-idempotency-key-header-07 where it speaks.
//!
//! There are three ways in:
//!
//! 1. **A flow behind an axum route** (feature `axum`): the extractors [`Scope`] and
//!    [`IdempotencyKey`], and [`JsonBody`] for the request.
//! 2. **Any axum handler, without phases** (feature `axum`): [`GuardLayer`].
//! 3. **Another framework**: [`Contract::incoming`] takes the parts of a request and
//!    [`Contract::answer`] gives a response, both in the types of the `http` crate.
//!
//! A [`Contract`] says what the API promises: the [`Profile`] of its errors, how long a duplicate
//! waits, where the problems are described. It is a tower layer too, which renders all problems of a
//! router alike.
//!
//! The order is the same in all three: authenticate, authorise, check the body, and only then look at
//! the key. What is refused before that uses no key up, and a replay is authorised like a first
//! request.

#[cfg(feature = "axum")]
mod axum_glue;
mod body;
mod contract;
#[cfg(feature = "axum")]
mod guard_layer;
mod header;
mod operation;
mod problem;
pub mod problems;
mod profile;

#[cfg(feature = "axum")]
pub use axum_glue::{Caller, Contracted, JsonBody, Scope};
pub use body::parse_json;
pub use contract::{Contract, IDEMPOTENT_REPLAYED, Incoming};
#[cfg(feature = "axum")]
pub use guard_layer::{Anyone, GuardLayer, Guarding, Keep};
pub use header::{IdempotencyKey, parse_idempotency_key};
pub use problem::Problem;
pub use profile::Profile;
