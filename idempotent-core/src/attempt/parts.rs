//! What an attempt is made from, what it ends with, and what it knows of its surroundings.

use std::sync::Arc;
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgPool, Postgres};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::failure::Failure;
use crate::graph::{Graph, Isolation};
use crate::key::KeyInfo;
use crate::lease::Keeper;
use crate::reply::StoredReply;
use crate::signal::raised;
use crate::state::State;
use crate::store::{Holder, Intent};

/// What an attempt knows of the process that it runs in.
#[derive(Debug, Clone)]
pub(crate) struct Surroundings {
    /// Where the completer waits for work of this process.
    pub(crate) work: Arc<Notify>,
    /// Whether attempts are to hand on what they run.
    pub(crate) closing: watch::Receiver<bool>,
    /// The isolation of a transaction that does not name one; none for read committed.
    pub(crate) default_isolation: Option<Isolation>,
}

/// The end of a flow.
#[derive(Debug, Clone)]
pub(crate) struct Finished {
    pub(crate) reply: Arc<StoredReply>,
    /// By another attempt, while this one did not know whether its own commit had succeeded.
    pub(crate) by_another: bool,
}

impl Surroundings {
    /// Resolves when attempts are to hand on what they run; else never.
    pub(super) async fn closing(&self) {
        raised(&self.closing).await;
    }
}

/// Why an attempt does not go on.
#[doc(hidden)]
#[derive(Debug)]
pub struct Halt(pub(crate) Why);

#[derive(Debug)]
pub(crate) enum Why {
    /// A phase failed.
    Failed(Failure),
    /// Somebody else has the lease.
    Lost,
    /// Nobody could say what became of a commit. The lease runs out by itself.
    Unresolved(String),
    /// The process is going away.
    Closing,
}

impl Halt {
    pub(super) fn failed(failure: Failure) -> Self {
        Self(Why::Failed(failure))
    }

    pub(super) fn lost() -> Self {
        Self(Why::Lost)
    }
}

/// What an attempt is made from.
pub(crate) struct Start {
    pub(crate) pool: PgPool,
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) graph: &'static Graph,
    pub(crate) key: KeyInfo,
    pub(crate) holder: Holder,
    pub(crate) lease: Duration,
    /// The most bytes of a reply's body that are stored.
    pub(crate) reply_limit: usize,
    /// When the statement that granted the lease was sent.
    pub(crate) granted: Instant,
    pub(crate) surroundings: Surroundings,
    /// Where the row stands, by the name that is stored.
    pub(crate) stored_point: &'static str,
    /// The same point by its name of today.
    pub(crate) point: &'static str,
    pub(crate) state: State,
    pub(crate) age: Duration,
    pub(crate) is_fresh: bool,
    pub(crate) intent: Option<Intent>,
    pub(crate) connection: PoolConnection<Postgres>,
}
