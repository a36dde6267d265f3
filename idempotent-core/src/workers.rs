//! The workers: the completer finishes flows that nobody runs, the reaper deletes finished keys past
//! their retention. Both run in every process, any number of them, without a leader: what one of
//! them does is decided by a conditional write, so two that meet do no harm.

mod completer;
mod reaper;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::engine::{Engine, Inner};

pub use reaper::Reaped;

/// What the workers of a process are told. Made by [`Engine::workers`].
///
/// ```no_run
/// # use idempotent_core::Engine;
/// # async fn example(engine: Engine) {
/// let workers = engine.workers().concurrency(16).start();
/// // …
/// workers.stop().await;
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "workers do nothing until `start`"]
pub struct WorkersBuilder {
    inner: Arc<Inner>,
    concurrency: usize,
    poll: Duration,
    reap_every: Duration,
}

/// The running workers of a process. Dropped, they stop as soon as they can, without being waited
/// for.
#[derive(Debug)]
#[must_use = "dropping the workers stops them"]
pub struct Workers {
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Engine {
    /// The completer and the reaper for this engine's flows.
    pub fn workers(&self) -> WorkersBuilder {
        WorkersBuilder {
            inner: self.inner(),
            concurrency: 8,
            poll: Duration::from_millis(500),
            reap_every: Duration::from_secs(4 * 3600),
        }
    }

    /// One pass of the completer over what is due now; how many flows it finished.
    ///
    /// # Errors
    ///
    /// When the database does not answer. What was begun is done, or goes on elsewhere.
    pub async fn complete_once(&self) -> Result<usize, sqlx::Error> {
        completer::pass(&self.inner()).await
    }

    /// One pass of the reaper over all flows of this engine.
    ///
    /// # Errors
    ///
    /// When the database does not answer. The batches deleted until then stay deleted.
    pub async fn reap_once(&self) -> Result<Reaped, sqlx::Error> {
        reaper::pass(&self.inner(), reaper::Scan::All).await
    }

    /// How many keys a pass of the reaper would delete.
    ///
    /// # Errors
    ///
    /// When the database does not answer.
    pub async fn count_reapable(&self) -> Result<u64, sqlx::Error> {
        reaper::count(&self.inner()).await
    }
}

impl WorkersBuilder {
    /// How many flows the completer of this process runs at once. 8 unless given.
    pub fn concurrency(mut self, flows: usize) -> Self {
        self.concurrency = flows.max(1);
        self
    }

    /// How long the completer waits at the most before it looks again: from 10 ms to 5 s, 500 ms
    /// unless given.
    pub fn poll(mut self, poll: Duration) -> Self {
        self.poll = poll.clamp(Duration::from_millis(10), Duration::from_secs(5));
        self
    }

    /// How often the reaper passes. 4 hours unless given; each pause is a little shorter or longer,
    /// so that processes that started together do not reap together.
    pub fn reap_every(mut self, pause: Duration) -> Self {
        self.reap_every = pause.max(Duration::from_secs(1));
        self
    }

    /// Starts the workers.
    pub fn start(self) -> Workers {
        let (stop, stopping) = watch::channel(false);
        let complete = completer::run(
            Arc::clone(&self.inner),
            self.concurrency,
            self.poll,
            stopping.clone(),
        );
        let reap = reaper::run(self.inner, self.reap_every, stopping);
        Workers {
            stop,
            tasks: vec![tokio::spawn(complete), tokio::spawn(reap)],
        }
    }
}

impl Workers {
    /// Takes up nothing new, and waits until what the workers run has ended.
    pub async fn stop(self) {
        self.stop.send_replace(true);
        for task in self.tasks {
            if let Err(error) = task.await {
                tracing::error!(%error, "a worker had ended before its time");
            }
        }
    }
}

/// Resolves when the workers are to stop, also when nobody is left to say so.
async fn stopped(stopping: &mut watch::Receiver<bool>) {
    let _ = stopping.wait_for(|stop| *stop).await;
}
