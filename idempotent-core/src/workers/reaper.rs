//! The reaper: deletes finished keys past their retention, in small batches, each a transaction of
//! its own. It never touches an unfinished or stuck key, nor a business row; and the derived keys of
//! what it deletes stay the same, so a retry that comes afterwards does not pay twice.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;
use uuid::{Timestamp, Uuid};

use super::stopped;
use crate::engine::{Inner, random};
use crate::store::{self, Expired};

const BATCH: i64 = 500;

/// Between two batches, so that requests come first.
const BREATH: Duration = Duration::from_millis(50);

/// How much later than its id says a key may have finished, for the scan by ids. What finished later
/// still is found by the full pass.
const SLACK: Duration = Duration::from_secs(3600);

/// How often all keys are looked at, and not just the old end of the table.
const FULL_PASS: Duration = Duration::from_secs(24 * 3600);

/// What a pass of the reaper did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reaped {
    /// How many keys it deleted.
    pub keys: u64,
    /// How long that took.
    pub took: Duration,
}

/// How much of the table a pass looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scan {
    /// The old end, by the ids: made by the applications' clocks, so only a hint.
    OldEnd,
    /// Everything.
    All,
}

pub(super) async fn run(inner: Arc<Inner>, every: Duration, mut stopping: watch::Receiver<bool>) {
    let mut full_pass = Instant::now() + FULL_PASS;
    // Not all at once after a deployment.
    let mut pause = every.mul_f64(random());
    loop {
        tokio::select! {
            () = stopped(&mut stopping) => return,
            () = tokio::time::sleep(pause) => {}
        }
        let scan = if Instant::now() >= full_pass {
            full_pass = Instant::now() + FULL_PASS;
            Scan::All
        } else {
            Scan::OldEnd
        };
        tokio::select! {
            () = stopped(&mut stopping) => return,
            reaped = pass(&inner, scan) => match reaped {
                Ok(reaped) => tracing::info!(keys = reaped.keys, took = ?reaped.took, "reaped"),
                Err(error) => tracing::warn!(%error, "the reaper was interrupted; it passes again later"),
            }
        }
        pause = every.mul_f64(0.9 + random() * 0.2);
    }
}

pub(super) async fn pass(inner: &Inner, scan: Scan) -> Result<Reaped, sqlx::Error> {
    let began = Instant::now();
    let mut keys = 0;
    for (flow, retention) in inner.retentions() {
        let before = (scan == Scan::OldEnd).then(|| first_id_after(retention));
        let expired = Expired {
            flow,
            retention,
            before,
        };
        loop {
            let mut connection = store::acquire(inner.pool()).await?;
            let deleted = store::reap(&mut connection, expired, BATCH).await?;
            drop(connection);
            keys += deleted;
            // A short batch may also mean that another reaper has the rest.
            if deleted < BATCH.unsigned_abs() {
                break;
            }
            tokio::time::sleep(BREATH).await;
        }
    }
    for (guard, retention) in inner.guard_retentions() {
        loop {
            let mut connection = store::acquire(inner.pool()).await?;
            let deleted = store::reap_unfinished(&mut connection, guard, retention, BATCH).await?;
            drop(connection);
            keys += deleted;
            if deleted < BATCH.unsigned_abs() {
                break;
            }
            tokio::time::sleep(BREATH).await;
        }
    }
    let took = began.elapsed();
    Ok(Reaped { keys, took })
}

pub(super) async fn count(inner: &Inner) -> Result<u64, sqlx::Error> {
    let mut keys = 0;
    let mut connection = store::acquire(inner.pool()).await?;
    for (flow, retention) in inner.retentions() {
        let expired = Expired {
            flow,
            retention,
            before: None,
        };
        let expired = store::count_expired(&mut connection, expired).await?;
        keys += u64::try_from(expired).unwrap_or(0);
    }
    Ok(keys)
}

/// An id that is greater than those of all keys made long enough ago to be past their retention.
fn first_id_after(retention: Duration) -> Uuid {
    let then = SystemTime::now()
        .checked_sub(retention)
        .and_then(|then| then.checked_add(SLACK))
        .and_then(|then| then.duration_since(SystemTime::UNIX_EPOCH).ok())
        .unwrap_or_default();
    let context = uuid::NoContext;
    Uuid::new_v7(Timestamp::from_unix(context, then.as_secs(), 0))
}
