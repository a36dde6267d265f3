//! What the proxy counts and remembers, and the faults that wait for their statement.

use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;

use super::batch::{Pending, Work};
use super::fault::Armed;
use super::relay::Upstream;

/// What passed since the proxy started or was last [reset](super::Proxy::reset).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Answered batches that parsed or ran SQL, by Query, Parse, Bind or Execute.
    pub round_trips: usize,
    /// Those of them that parsed: none on a connection whose statements are all prepared.
    pub parses: usize,
    /// Batches of a Sync alone: how sqlx's pool tests a connection that comes back to it.
    pub pings: usize,
    /// Batches that only closed or described something.
    pub others: usize,
    /// Commands completed with the tag COMMIT. A statement that commits by itself is not among
    /// them.
    pub commits: usize,
}

/// One batch that reached the server and parsed or ran SQL.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exchange {
    /// The connection's number, the proxy's first being 0.
    pub connection: usize,
    /// How the SQL was sent.
    pub kind: Kind,
    /// What was run, or parsed if nothing was run.
    pub sql: String,
    /// What the server says it did: `INSERT 0 1`, `COMMIT`.
    pub command_tags: Vec<String>,
    /// The SQLSTATE of the first error.
    pub error_sqlstate: Option<String>,
    /// Whether the server answered to the end, whatever became of the answer.
    pub answered: bool,
}

/// How SQL is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// As one Query, with no parameters.
    Simple,
    /// Bound to a prepared statement.
    Prepared,
    /// Prepared and not run.
    Parse,
}

/// What the test and the connections share.
pub(super) struct Shared {
    pub(super) upstream: Upstream,
    state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) counts: Counts,
    pub(super) transcript: Vec<Exchange>,
    /// Faults that have not struck, and how often each has matched.
    armed: Vec<(Arc<Armed>, usize)>,
    pub(super) latency: Duration,
}

impl Shared {
    pub(super) fn new(upstream: Upstream) -> Self {
        Self {
            upstream,
            state: Mutex::default(),
        }
    }

    pub(super) fn arm(&self, fault: &Arc<Armed>) {
        self.state().armed.push((Arc::clone(fault), 0));
    }

    /// The fault that strikes this statement. All that match count it, the first that is due takes
    /// it.
    pub(super) fn strike(&self, sql: &str, earlier: &[String]) -> Option<Arc<Armed>> {
        let mut state = self.state();
        let mut due = None;
        for (index, (armed, seen)) in state.armed.iter_mut().enumerate() {
            if armed.matches(sql, earlier) {
                *seen += 1;
                due = due.or(armed.is_due(*seen).then_some(index));
            }
        }
        let (armed, _) = state.armed.remove(due?);
        armed.strike();
        Some(armed)
    }

    pub(super) fn disarm(&self, fault: &Arc<Armed>) {
        self.state()
            .armed
            .retain(|(armed, _)| !Arc::ptr_eq(armed, fault));
    }

    /// Counts a batch that is over and writes it down.
    pub(super) fn record(&self, connection: usize, pending: Pending, answered: bool) {
        let mut state = self.state();
        if answered {
            state.counts.parses += usize::from(pending.parses);
            state.counts.commits += pending.tags.iter().filter(|tag| *tag == "COMMIT").count();
            match pending.work {
                Work::Sql(_) => state.counts.round_trips += 1,
                Work::Ping => state.counts.pings += 1,
                Work::Other => state.counts.others += 1,
            }
        }
        if let Work::Sql(kind) = pending.work {
            state.transcript.push(Exchange {
                connection,
                kind,
                sql: pending.sql,
                command_tags: pending.tags,
                error_sqlstate: pending.sqlstate,
                answered,
            });
        }
    }

    /// Waits for what is left of the latency of a batch that came at `arrived`.
    pub(super) async fn delay(&self, arrived: Instant) {
        let due = arrived + self.state().latency;
        let left = due.saturating_duration_since(Instant::now());
        // Tokio's timers count whole milliseconds; a thread sleeps more exactly.
        if !left.is_zero() {
            let _ = spawn_blocking(move || thread::sleep(left)).await;
        }
    }

    /// The transcript for a message.
    pub(super) fn describe(&self) -> String {
        self.state()
            .transcript
            .iter()
            .fold(String::new(), |mut text, exchange| {
                let Exchange {
                    connection,
                    kind,
                    sql,
                    command_tags,
                    error_sqlstate,
                    ..
                } = exchange;
                let error = error_sqlstate.as_deref().unwrap_or_default();
                let _ = writeln!(
                    text,
                    "  {connection} {kind:?} {sql} -> {command_tags:?} {error}"
                );
                text
            })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
