//! Commits whose answer was lost. What became of them is neither guessed nor looked up: the attempt
//! takes the key over from itself, which waits for the old transaction, and then stands where the
//! row does.

use std::sync::Arc;
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::Postgres;
use tokio::time::Instant;

use super::{Attempt, Finished, Halt, Why};
use crate::engine::{CONFLICTS, backoff};
use crate::failure::Failure;
use crate::phase::OpenTx;
use crate::reply::StoredReply;
use crate::state::State;
use crate::store::{self, Advance, End, Holder, Taken, Within, bounded};

/// Between two tries of something that the connection or a lock was in the way of.
pub(super) const PAUSE: Duration = Duration::from_millis(50);

/// What became of a write that was in doubt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Resolved {
    /// It did not happen: the row stands where it stood. What an external phase gave, and was not
    /// stored yet, is kept: it need not be asked for again.
    Unmoved,
    /// The row stands elsewhere, and the attempt now stands there too.
    Moved,
    /// The flow is finished.
    Finished,
}

/// A write that is a transaction of its own.
pub(super) enum Alone {
    Carried,
    Finish(Arc<StoredReply>),
    /// Of a call that may not be repeated at will.
    Announcement(&'static str),
}

/// How such a write ended, when it did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteEnd {
    Written,
    /// The attempt found itself at another point, or the flow finished.
    Elsewhere,
}

impl Attempt {
    /// Commits after the update that must be the transaction's last statement. True: committed.
    /// False: the answer was lost, and the attempt now stands wherever the row does.
    pub(super) async fn commit(
        &mut self,
        mut tx: OpenTx,
        moved: Result<bool, sqlx::Error>,
    ) -> Result<bool, Halt> {
        let phase = self.phase();
        match moved {
            Ok(true) => {}
            Ok(false) => {
                let ours = store::is_own_transaction(tx.connection(), self.kept.holder());
                let ours = bounded(self.answer_time(), ours).await;
                let why = if matches!(ours, Ok(false)) {
                    self.stop(
                        "it ended the transaction it was lent (a raw COMMIT or ROLLBACK); its writes \
                         may be committed without their recovery point",
                    )
                } else {
                    Halt::lost()
                };
                return self.give_up(tx, why).await;
            }
            Err(error) => {
                let why = Halt::failed(Failure::of(phase, &error));
                return self.give_up(tx, why).await;
            }
        }
        let error = match tx.commit(self.answer_time()).await {
            Ok(connection) => {
                self.connection = connection;
                return Ok(true);
            }
            Err(error) => error,
        };
        self.kept.wake();
        if store::commit_was_refused(&error) {
            return Err(Halt::failed(Failure::of(phase, &error)));
        }
        tracing::info!(%error, phase, "a commit is in doubt; finding out what became of it");
        match self.resolve().await? {
            Resolved::Unmoved => Err(Halt::failed(Failure::not_committed(phase, &error))),
            Resolved::Moved | Resolved::Finished => Ok(false),
        }
    }

    /// Stores the result of an external phase by itself.
    pub(super) async fn store_carried(&mut self) -> Result<(), Halt> {
        self.write_alone(Alone::Carried).await.map(|_| ())
    }

    /// Finishes the flow by itself.
    pub(super) async fn finish_alone(&mut self, reply: Arc<StoredReply>) -> Result<(), Halt> {
        self.write_alone(Alone::Finish(reply)).await.map(|_| ())
    }

    /// Repeats the write, not the call before it, until it is known to have happened or to be
    /// refused.
    pub(super) async fn write_alone(&mut self, write: Alone) -> Result<WriteEnd, Halt> {
        let target = self.point;
        let mut tries = 0;
        loop {
            let sent = Instant::now();
            let error = match self.try_alone(&write).await {
                Ok(true) => {
                    match write {
                        Alone::Announcement(_) => {}
                        Alone::Carried => {
                            self.intent = None;
                            self.is_fresh = true;
                            self.stored_point = target;
                            self.kept.renewed(sent);
                            let connection = self.connection.take();
                            self.keep_for_next_phase(connection);
                        }
                        Alone::Finish(reply) => {
                            let by_another = false;
                            self.finished = Some(Finished { reply, by_another });
                        }
                    }
                    return Ok(WriteEnd::Written);
                }
                Ok(false) => return Err(Halt::lost()),
                Err(error) => error,
            };
            let passing = store::is_conflict(&error) || store::is_lock_timeout(&error);
            let in_doubt = store::is_connection_lost(&error);
            if tries >= CONFLICTS + self.connections() || !(passing || in_doubt) {
                return Err(Halt::failed(Failure::of(self.phase(), &error)));
            }
            tries += 1;
            if in_doubt {
                tracing::info!(%error, "a write is in doubt; finding out what became of it");
                match self.resolve().await? {
                    Resolved::Unmoved => {}
                    Resolved::Moved | Resolved::Finished => {
                        if let Alone::Finish(reply) = write {
                            self.answer_whole(reply);
                        }
                        return Ok(WriteEnd::Elsewhere);
                    }
                }
            }
            tokio::time::sleep(backoff(tries.min(CONFLICTS))).await;
        }
    }

    async fn try_alone(&mut self, write: &Alone) -> Result<bool, sqlx::Error> {
        let mut connection = self.connection().await?;
        let stored = self.state.as_value();
        let written = async {
            match write {
                Alone::Carried => {
                    let advance = Advance {
                        point: self.point,
                        state: &stored,
                    };
                    let position = self.position();
                    let lease = self.lease;
                    store::checkpoint(&mut connection, position, advance, lease, Within::Itself)
                        .await
                }
                Alone::Finish(reply) => {
                    let (position, lease) = (self.position(), self.lease);
                    let kept = reply.within(self.reply_limit);
                    store::finish(&mut connection, position, &kept, lease, Within::Itself).await
                }
                Alone::Announcement(call) => {
                    store::announce(&mut connection, self.position(), call, self.lease).await
                }
            }
        };
        match bounded(self.answer_time(), written).await {
            Ok(written) => {
                self.connection = Some(connection);
                Ok(written)
            }
            Err(error) => {
                connection.close_on_drop();
                Err(error)
            }
        }
    }

    async fn resolve(&mut self) -> Result<Resolved, Halt> {
        let next = Holder::fresh();
        let give_up = Instant::now() + self.lease * 2;
        loop {
            let error = match self.take_over_from_myself(next).await {
                Ok(resolved) => return resolved,
                Err(error) => error,
            };
            if Instant::now() >= give_up {
                return Err(Halt(Why::Unresolved(error.to_string())));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn take_over_from_myself(
        &mut self,
        next: Holder,
    ) -> Result<Result<Resolved, Halt>, sqlx::Error> {
        let mut connection = store::acquire(&self.pool).await?;
        let (id, user) = (self.key.id, self.key.user.clone());
        let mine = self.kept.holder();
        let granted = Instant::now();
        let asked = async {
            let connection = &mut *connection;
            let lease = self.lease;
            let taken =
                store::take_over_from_myself(connection, id, &user, mine, next, lease).await?;
            match taken {
                Some(taken) => Ok((Some(taken), None)),
                // Finished, lost, or taken by a try of ours whose answer was lost too.
                None => Ok((None, store::read_by_id(connection, id, &user, &[]).await?)),
            }
        };
        let (taken, known) = match bounded(self.answer_time(), asked).await {
            Ok(answer) => answer,
            Err(error) => {
                connection.close_on_drop();
                return Err(error);
            }
        };
        if let Some(taken) = taken {
            return Ok(self.adopt(next, taken, granted, connection));
        }
        let Some(known) = known else {
            return Ok(Err(Halt::lost()));
        };
        Ok(match known.end {
            End::NotYet(unfinished) if unfinished.holder == Some(next) => {
                return Ok(self.adopt(next, unfinished.standing, granted, connection));
            }
            End::NotYet(_) => Err(Halt::lost()),
            End::Finished(stored) => {
                let by_another = known.fence != self.key.fence;
                match StoredReply::from_stored(stored).map(Arc::new) {
                    Some(reply) => {
                        self.finished = Some(Finished { reply, by_another });
                        Ok(Resolved::Finished)
                    }
                    None => Err(self.stop("the stored reply is not one")),
                }
            }
        })
    }

    fn adopt(
        &mut self,
        holder: Holder,
        taken: Taken,
        granted: Instant,
        connection: PoolConnection<Postgres>,
    ) -> Result<Resolved, Halt> {
        let (id, user) = (self.key.id, self.key.user.clone());
        self.kept = self.keeper.keep(id, user, holder, self.lease, granted);
        let key = Arc::make_mut(&mut self.key);
        key.fence = taken.fence;
        key.attempt = u32::try_from(taken.attempts).unwrap_or(0).max(1);
        if taken.recovery_point == self.stored_point {
            self.keep_for_next_phase(Some(connection));
            return Ok(Resolved::Unmoved);
        }
        self.intent = taken.intent;
        self.is_fresh = true;
        let point = self.graph.stored_point(&taken.recovery_point);
        match (point, State::from_stored(self.graph, taken.state)) {
            (Some((point, stored)), Ok(state)) => {
                self.point = point.name();
                self.stored_point = stored;
                self.state = state;
                self.keep_for_next_phase(Some(connection));
                Ok(Resolved::Moved)
            }
            _ => Err(self.stop("the flow was moved to a point that this version does not know")),
        }
    }
}
