//! The completer: lists flows that nobody runs and that are due, claims each like a request would,
//! and goes on with it. A flow that fails again is due later, and later still; it never keeps the
//! others waiting. One that this version cannot read is passed over, for the version that can.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use uuid::Uuid;

use super::stopped;
use crate::engine::{Completion, Inner};
use crate::store::{self, Found};

/// How long a flow that this version cannot read is not looked at again.
const PASSED_OVER: Duration = Duration::from_secs(60);

/// How many candidates are listed for each that can be run: other processes list the same ones, so
/// each process begins somewhere else among them.
const SPREAD: usize = 4;

/// What could not be read, and when to look again.
#[derive(Debug, Default)]
struct PassedOver(HashMap<Uuid, Instant>);

impl PassedOver {
    fn add(&mut self, id: Uuid) {
        self.0.insert(id, Instant::now() + PASSED_OVER);
    }

    fn ids(&mut self) -> Vec<Uuid> {
        let now = Instant::now();
        self.0.retain(|_, until| *until > now);
        self.0.keys().copied().collect()
    }
}

pub(super) async fn run(
    inner: Arc<Inner>,
    concurrency: usize,
    poll: Duration,
    mut stopping: watch::Receiver<bool>,
) {
    let mut running: JoinSet<(Uuid, Completion)> = JoinSet::new();
    let mut passed_over = PassedOver::default();
    let mut pause = Duration::ZERO;
    loop {
        // Registered before looking, so that a flow staged in between is not slept through.
        let woken = inner.work().notified();
        tokio::select! {
            () = stopped(&mut stopping) => break,
            () = tokio::time::sleep(jittered(pause)) => {}
            () = woken => {}
            Some(ended) = running.join_next() => {
                if let Ok((id, Completion::NotUnderstood(_))) = ended {
                    passed_over.add(id);
                }
            }
        }
        let free = concurrency - running.len();
        if free == 0 {
            pause = poll;
            continue;
        }
        match list(&inner, passed_over.ids(), free * SPREAD).await {
            Ok(mut found) => {
                // What is found comes before what may be: look again soon while there is work.
                pause = if found.is_empty() {
                    (pause * 2).clamp(Duration::from_millis(10), poll)
                } else {
                    Duration::from_millis(10)
                };
                shuffle(&mut found);
                for found in found.into_iter().take(free) {
                    running.spawn(complete(Arc::clone(&inner), found));
                }
            }
            Err(error) => {
                tracing::warn!(%error, "the completer could not look for work; trying again");
                pause = poll;
            }
        }
    }
    while running.join_next().await.is_some() {}
}

/// Goes on with all that is due now, one after the other.
pub(super) async fn pass(inner: &Arc<Inner>) -> Result<usize, sqlx::Error> {
    let mut seen = Vec::new();
    let mut finished = 0;
    loop {
        let found = list(inner, seen.clone(), 100).await?;
        if found.is_empty() {
            return Ok(finished);
        }
        for found in found {
            seen.push(found.id);
            let (_, completion) = complete(Arc::clone(inner), found).await;
            finished += usize::from(matches!(completion, Completion::Finished));
        }
    }
}

async fn list(
    inner: &Inner,
    passed_over: Vec<Uuid>,
    limit: usize,
) -> Result<Vec<Found>, sqlx::Error> {
    let flows: Vec<&str> = inner.flow_names().collect();
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let within = Duration::from_secs(10);
    let mut connection = store::acquire(inner.pool()).await?;
    let due = store::list_due(
        &mut connection,
        &flows,
        &passed_over,
        inner.longest_pause(),
        limit,
    );
    let due = store::bounded(within, due).await;
    if due.is_err() {
        connection.close_on_drop();
    }
    due
}

async fn complete(inner: Arc<Inner>, found: Found) -> (Uuid, Completion) {
    let (id, flow) = (found.id, found.flow.clone());
    let completion = inner.resume(found).await;
    match &completion {
        Completion::Finished => tracing::info!(flow, key_id = %id, "completed"),
        Completion::Failed | Completion::Taken => {}
        Completion::NotUnderstood(reason) => {
            tracing::warn!(flow, key_id = %id, reason, "this version cannot go on with a flow; left for one that can");
        }
        Completion::Unavailable(reason) => {
            tracing::warn!(flow, key_id = %id, reason, "the database did not answer the completer");
        }
    }
    (id, completion)
}

/// From half to the whole of it.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + crate::engine::random() * 0.5)
}

fn shuffle(found: &mut [Found]) {
    for last in (1..found.len()).rev() {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a short list's index, rounded down"
        )]
        let other = (crate::engine::random() * (last + 1) as f64) as usize;
        found.swap(last, other.min(last));
    }
}
