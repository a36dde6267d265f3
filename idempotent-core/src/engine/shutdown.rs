//! Going away without leaving anybody waiting: nothing new is taken, what runs may end until a
//! deadline, and the rest is handed on at its recovery point, so that another process, or the
//! client's retry, goes on at once and need not wait for a lease to run out.

use std::time::Duration;

use tokio::sync::watch;

use super::Engine;
use crate::error::RunError;

/// How long attempts may take to hand on what they run.
const HANDING_ON: Duration = Duration::from_secs(5);

/// Whether requests are taken, how many runs there are, and whether they are to be handed on.
#[derive(Debug, Default)]
pub(super) struct Closing {
    closed: watch::Sender<bool>,
    running: watch::Sender<usize>,
    hand_on: watch::Sender<bool>,
}

/// Counts a run for as long as it lives.
#[derive(Debug)]
pub(super) struct Run(watch::Sender<usize>);

impl Closing {
    /// Enters a run, unless the engine is closed.
    pub(super) fn enter(&self) -> Result<Run, RunError> {
        // Counted first: whoever closes and then finds no run must not miss this one.
        let run = self.enter_anyway();
        if *self.closed.borrow() {
            return Err(RunError::ShuttingDown);
        }
        Ok(run)
    }

    /// Enters a run of a worker, which stops by itself.
    pub(super) fn enter_anyway(&self) -> Run {
        self.running.send_modify(|running| *running += 1);
        Run(self.running.clone())
    }

    pub(super) fn hand_on(&self) -> watch::Receiver<bool> {
        self.hand_on.subscribe()
    }

    async fn is_quiet(&self) {
        // The sender is here, so this ends only when there is no run.
        let _ = self
            .running
            .subscribe()
            .wait_for(|running| *running == 0)
            .await;
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.0.send_modify(|running| *running -= 1);
    }
}

impl Engine {
    /// Stops the engine: from now on requests are answered with [`RunError::ShuttingDown`]; what runs
    /// may end within `grace`; what does not is released at its recovery point, and whoever comes
    /// next goes on from there at once. Stop the workers first. True: everything ended by itself.
    pub async fn shutdown(&self, grace: Duration) -> bool {
        let closing = &self.inner.closing;
        closing.closed.send_replace(true);
        if tokio::time::timeout(grace, closing.is_quiet())
            .await
            .is_ok()
        {
            return true;
        }
        closing.hand_on.send_replace(true);
        if tokio::time::timeout(HANDING_ON, closing.is_quiet())
            .await
            .is_err()
        {
            tracing::warn!("some flows could not be handed on; their leases run out by themselves");
        }
        false
    }
}
