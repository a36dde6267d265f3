//! Idempotent flows on PostgreSQL: a request's work as a typed state machine that takes effect
//! once, whatever happens to the client, the process or the connection.
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
#[cfg(feature = "axum")]
pub mod http;
mod key;
mod lease;
mod migrations;
mod phase;
mod reply;
mod state;
mod store;

pub use engine::{Answer, Engine, EngineBuilder, FlowOptions, Handle, Running};
pub use error::{BuildError, InvalidRequest, NotRegistered, RunError};
pub use failure::{Disposition, PhaseFailure, Rejection};
pub use flow::{Flow, Payload, RecoveryPoint, UnknownRecoveryPoint};
pub use graph::{Graph, Isolation, OnReject, Phase, PhaseKind, Point};
pub use idempotent_macros::idempotent_flow;
pub use key::{DerivedKey, Key, KeyError, KeyInfo};
pub use migrations::{migrate, migrate_with};
pub use phase::{External, Tx};
pub use reply::{Reply, StoredReply, UnstorableReply};
