//! How an attempt parts with its lease when it did not finish its flow.

use std::time::Duration;

use tokio::time::Instant;

use super::Attempt;
use super::doubt::PAUSE;
use crate::store::{self, Advance, Parting, bounded};

/// How long the caller is kept waiting for the lease to be let go. It runs out by itself anyway.
const RELEASE_TIME: Duration = Duration::from_secs(2);

impl Attempt {
    /// Lets the lease go, keeping what was reached, and says whether the flow is now stuck. Never
    /// hides why the attempt ended: what goes wrong here is logged.
    pub(crate) async fn release(mut self, parting: Parting<'_>) -> bool {
        let give_up = Instant::now() + RELEASE_TIME;
        loop {
            let error = match self.try_release(parting, give_up).await {
                Ok(Some(is_stuck)) => return is_stuck,
                // Lost, or released by the try whose answer was lost.
                Ok(None) => {
                    tracing::debug!("the lease was not ours to release any more");
                    return false;
                }
                Err(error) => error,
            };
            if Instant::now() >= give_up {
                tracing::warn!(%error, "the lease was not released; it runs out by itself");
                return false;
            }
            tracing::debug!(%error, "the lease could not be released; trying again");
            // The pool may hold many connections that went stale together.
            let stale = store::is_connection_lost(&error);
            tokio::time::sleep(if stale { PAUSE / 10 } else { PAUSE }).await;
        }
    }

    async fn try_release(
        &mut self,
        parting: Parting<'_>,
        give_up: Instant,
    ) -> Result<Option<bool>, sqlx::Error> {
        let left = give_up.saturating_duration_since(Instant::now());
        let mut connection = bounded(left, self.connection()).await?;
        let stored = self.state.as_value();
        let advance = Advance {
            point: self.point,
            state: &stored,
        };
        let (position, lease) = (self.position(), self.lease);
        let released = store::release(&mut connection, position, advance, parting, lease);
        // Half of it, so that one silent connection leaves time for another.
        let released = bounded(RELEASE_TIME.min(left) / 2, released).await;
        if released.is_err() {
            connection.close_on_drop();
        }
        released
    }
}
