//! How the completer goes on with a flow whose client is gone: the same claim and the same loop as a
//! request's, with the stored request in the place of the client's.

use std::pin::Pin;
use std::sync::Arc;

use tokio::time::Instant;

use super::claim::{ClaimError, can_go_on};
use super::drive::Ended;
use super::{Answer, Handle, Inner};
use crate::attempt::Attempt;
use crate::error::RunError;
use crate::fingerprint::Fingerprint;
use crate::flow::Flow;
use crate::store::{self, Found, Holder, bounded};

/// What became of a flow that the completer took up.
#[derive(Debug)]
pub(crate) enum Completion {
    /// It has its reply.
    Finished,
    /// It failed again; the row says when it is due next, or that it is stuck.
    Failed,
    /// Somebody else has it.
    Taken,
    /// This version cannot go on with it: left as it is.
    NotUnderstood(String),
    /// The database did not answer.
    Unavailable(String),
}

pub(super) type Resume = fn(Arc<Inner>, Found) -> Pin<Box<dyn Future<Output = Completion> + Send>>;

/// Goes on with a flow of type `F`.
pub(super) fn resume<F: Flow>(
    inner: Arc<Inner>,
    found: Found,
) -> Pin<Box<dyn Future<Output = Completion> + Send>> {
    Box::pin(async move {
        match inner.handle::<F>() {
            Ok(handle) => handle.complete(found).await,
            Err(error) => Completion::NotUnderstood(error.to_string()),
        }
    })
}

impl<F: Flow> Handle<F> {
    async fn complete(&self, found: Found) -> Completion {
        let Some(fingerprint) = Fingerprint::from_stored(&found.request_hash) else {
            return Completion::NotUnderstood("its hash has another form".to_owned());
        };
        let (point, state) = (&found.recovery_point, &found.state);
        if let Err(reason) = can_go_on::<F>(point, state, &found.request) {
            return Completion::NotUnderstood(reason);
        }
        // So that a client's own retry joins this run; and a run of this process is never taken from
        // under it, even when its lease has run out.
        let name = (found.user.as_str(), found.path.as_str(), found.key.as_str());
        let _run = self.inner.closing.enter_anyway();
        let Some(lead) = self
            .inner
            .shared
            .lead(self.graph.flow(), name, &fingerprint)
        else {
            return Completion::Taken;
        };
        let attempt = match self.take(&found).await {
            Ok(Some(attempt)) => attempt,
            Ok(None) => {
                lead.answer(Err(RunError::InProgress {
                    retry_after: super::drive::RETRY_AFTER,
                }));
                return Completion::Taken;
            }
            Err(error) => {
                let reason = error.to_string();
                lead.answer(Err(error));
                return Completion::Unavailable(reason);
            }
        };
        let ended = self.attempt(*attempt, &found.request).await;
        let (answer, completion): (Result<Answer, RunError>, _) = match ended {
            Ok(answer) => (Ok(answer), Completion::Finished),
            Err(Ended::Failed(error)) => (Err(error), Completion::Failed),
            Err(Ended::Lost) => (
                Err(RunError::InProgress {
                    retry_after: super::drive::RETRY_AFTER,
                }),
                Completion::Taken,
            ),
        };
        lead.answer(answer);
        completion
    }

    /// Claims a free key by the same compare-and-swap as a request's.
    async fn take(&self, found: &Found) -> Result<Option<Box<Attempt>>, RunError> {
        let holder = Holder::fresh();
        let granted = Instant::now();
        let unavailable = |error: sqlx::Error| RunError::unavailable(&error);
        let mut connection = store::acquire(&self.inner.pool)
            .await
            .map_err(unavailable)?;
        let taken = self.take_over(&mut connection, found.id, &found.user, holder);
        let lease = match taken.await {
            Ok(Some(lease)) => lease,
            Ok(None) => return Ok(None),
            // Whoever holds the lock is about to change the row.
            Err(ClaimError::Database(error)) if store::is_lock_timeout(&error) => return Ok(None),
            Err(ClaimError::Database(error)) => {
                // If the claim did commit, the lease runs out by itself, and the flow is found again.
                connection.close_on_drop();
                return Err(unavailable(error));
            }
            Err(ClaimError::Refused(error)) => return Err(error),
        };
        let limits = &self.settings.limits;
        if lease.attempts() > limits.retry_attempts {
            let lease = self.settings.lease;
            let connection = &mut *connection;
            let parked =
                store::park_if_exhausted(connection, found.id, &found.user, holder, limits, lease);
            let parked = bounded(store::answer_time(lease), parked).await;
            if parked.map_err(unavailable)? {
                tracing::error!(key_id = %found.id, "the attempts of a flow end without a word; it is stuck");
                return Ok(None);
            }
        }
        let names = [&found.user, &found.path, &found.key];
        let attempt = self.begin(names, lease, holder, granted, connection);
        Ok(Some(Box::new(attempt)))
    }
}
