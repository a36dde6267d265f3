//! Looking at a key without running it: for a client that gave up and wants to know, and for a request
//! that finds no place to run in but may be a duplicate of one that has.

use super::claim::{Judged, judge};
use super::{Answer, Handle, Prepared};
use crate::error::RunError;
use crate::flow::Flow;
use crate::key::Key;
use crate::reply::StoredReply;
use crate::store::{self, End, Known, bounded};

/// Where a request stands.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Operation {
    /// Whether it runs, waits, or has ended.
    pub state: OperationState,
    /// The recovery point that is stored; `finished` at the end.
    pub recovery_point: String,
    /// Which attempt this is since the flow last moved on, from 1; 0 when it has moved on and nobody
    /// runs it.
    pub attempt: u32,
}

/// Whether a request runs, waits, or has ended.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum OperationState {
    /// Somebody runs it.
    Running,
    /// Nobody runs it now: the completer will, or a retry of the client does at once.
    Waiting,
    /// It has its reply.
    Finished(StoredReply),
    /// It used up its attempts and waits for an operator.
    Stuck,
}

impl<F: Flow> Handle<F> {
    /// Where the request with this key stands; none when there is none of this flow, or not any more.
    /// It only looks: nothing is run, taken or written. The caller has authorised it like the request.
    ///
    /// # Errors
    ///
    /// [`RunError::Unavailable`] when the database does not answer.
    pub async fn look(&self, key: &Key) -> Result<Option<Operation>, RunError> {
        // The hash of nothing: that the request differs is not asked here.
        let Some(known) = self.read(key, &[]).await? else {
            return Ok(None);
        };
        if known.flow != self.graph.flow() {
            return Ok(None);
        }
        Ok(match known.end {
            End::Finished(stored) => {
                let reply = StoredReply::from_stored(stored).ok_or_else(not_a_reply)?;
                Some(Operation {
                    state: OperationState::Finished(reply),
                    recovery_point: "finished".to_owned(),
                    attempt: 0,
                })
            }
            End::NotYet(unfinished) => {
                let counted = u32::try_from(unfinished.standing.attempts).unwrap_or(0);
                let (state, attempt) = if unfinished.is_stuck {
                    (OperationState::Stuck, counted)
                } else if unfinished.is_held {
                    // Progress sets the count to 0; who made it and runs on is the first since.
                    (OperationState::Running, counted.max(1))
                } else {
                    (OperationState::Waiting, counted)
                };
                Some(Operation {
                    state,
                    recovery_point: unfinished.standing.recovery_point,
                    attempt,
                })
            }
        })
    }

    /// Answers a request from what is known of its key, where it may not run; `otherwise` when it
    /// would have to.
    pub(super) async fn answer_if_known(
        &self,
        prepared: &Prepared,
        otherwise: impl Into<RunError>,
    ) -> Result<Answer, RunError> {
        let fingerprint = prepared.fingerprint.as_bytes();
        let Some(known) = self.read(&prepared.key, fingerprint).await? else {
            return Err(otherwise.into());
        };
        match judge::<F>(self.graph, prepared, known)? {
            Judged::Finished(reply) => Ok(Answer {
                reply: reply.into(),
                replayed: true,
            }),
            Judged::Unfinished(unfinished) if unfinished.is_held => Err(RunError::InProgress {
                retry_after: unfinished.lease_left,
            }),
            Judged::Unfinished(_) => Err(otherwise.into()),
        }
    }

    async fn read(&self, key: &Key, fingerprint: &[u8]) -> Result<Option<Known>, RunError> {
        let name = (&key.user[..], &key.path[..], &key.key[..]);
        let within = store::answer_time(self.settings.lease);
        let read = async {
            let mut connection = store::acquire(&self.inner.pool).await?;
            let read = store::read_by_key(&mut connection, name, fingerprint);
            let read = bounded(within, read).await;
            if read.is_err() {
                connection.close_on_drop();
            }
            read
        };
        read.await.map_err(|error| RunError::unavailable(&error))
    }
}

pub(super) fn not_a_reply() -> RunError {
    RunError::NotUnderstood {
        reason: "the stored reply is not one".to_owned(),
    }
}
