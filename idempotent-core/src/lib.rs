//! Idempotent flows on PostgreSQL: a request's work as a typed state machine that takes effect
//! once, whatever happens to the client, the process or the connection.
//!
//! A flow is an impl block of phases between recovery points. An atomic phase runs in a transaction
//! that also stores the next point; an external phase calls the outside under a derived key. The
//! engine runs the flow under a lease, from the point where the last attempt stopped, and stores the
//! answer for every retry.
//!
//! ```
//! use idempotent_core::{External, Reply, Tx, idempotent_flow};
//!
//! #[derive(serde::Serialize, serde::Deserialize)]
//! pub struct Order { cents: i64 }
//!
//! pub struct OrderFlow;
//!
//! #[idempotent_flow(name = "order", lease = "15s", retention = "48h")]
//! impl OrderFlow {
//!     #[atomic(Started -> Placed)]
//!     async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<(), sqlx::Error> {
//!         let key_id = tx.key().id();
//!         sqlx::query("INSERT INTO orders (key_id, cents) VALUES ($1, $2)")
//!             .bind(key_id)
//!             .bind(request.cents)
//!             .execute(&mut **tx)
//!             .await?;
//!         Ok(())
//!     }
//!
//!     #[external(Placed -> Finished, timeout = "10s")]
//!     async fn ship(&self, call: &External<'_>) -> Result<Reply<String>, std::convert::Infallible> {
//!         Ok(Reply::created(format!("shipped under {}", call.derived_key())))
//!     }
//! }
//! ```
//!
//! # The way through the crate
//!
//! - [`macro@idempotent_flow`] declares a flow; [`Flow`], [`Graph`] and [`RecoveryPoint`] are what it
//!   makes of it.
//! - [`Tx`] and [`External`] are what a phase may do; [`PhaseFailure`] is what its failure means.
//! - [`Engine`] and [`Handle`] run requests; [`RunError`] says why there is no answer now.
//! - [`mod@http`] is the glue for a service, for axum with the feature `axum`; `embedded` (feature `embedded`) a private
//!   PostgreSQL for development and tests.
//!
//! # What is guaranteed
//!
//! What an atomic phase writes takes effect once: it commits together with the recovery point, on
//! the condition that the attempt still has the lease. What an external phase does outside takes
//! effect once where the outside dedupes by the derived key, for as long as it remembers it: a lease
//! fences the database, not the world.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

#[doc(hidden)]
pub mod __private;
mod attempt;
#[cfg(feature = "embedded")]
pub mod embedded;
mod engine;
mod error;
mod failure;
mod fingerprint;
mod flow;
mod graph;
pub mod http;
mod json;
mod key;
mod lease;
mod migrations;
mod operator;
mod phase;
mod reply;
mod signal;
mod state;
mod store;
mod workers;

pub use attempt::Reconciled;
pub use engine::{
    Answer, Engine, EngineBuilder, FlowOptions, Guard, Handle, OnStranded, Operation,
    OperationState, Patience, Running, Stranded,
};
pub use error::{BuildError, InvalidRequest, NoSuchGuard, NotRegistered, RunError};
pub use failure::{Disposition, PhaseFailure, Rejection};
pub use flow::{Flow, FlowReference, Payload, RecoveryPoint, UnknownRecoveryPoint};
pub use graph::{
    Graph, Isolation, OnReject, Phase, PhaseKind, Point, Reconcile, Repeatable, Retries,
};
pub use idempotent_macros::idempotent_flow;
pub use key::{DerivedKey, Key, KeyError, KeyInfo};
pub use migrations::{migrate, migrate_with};
pub use operator::{
    Changed, Event, KeyContents, KeyCount, KeyDetails, KeyFilter, KeyState, KeySummary, LastError,
    Operator, OperatorError, ReplySummary, UnknownKeyState,
};
pub use phase::{External, StageError, Tx};
pub use reply::{Reply, StoredReply, UnstorableReply};
pub use workers::{Reaped, Workers, WorkersBuilder};
