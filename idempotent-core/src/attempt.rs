//! One attempt: the time one holder has the lease. The transitions that the macro generates are
//! written in its terms: `begin` a transaction or get the right to call outside, `enter` the user's
//! phase, then `checkpoint`, `carry` or `finish` what came back.
//!
//! An attempt that has lost its lease, or whose lease it cannot be sure of, touches nothing again:
//! every way out of here that is not progress is a [`Halt`].

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgPool, Postgres};
use tokio::time::Instant;

use crate::failure::{Disposition, Failure, Kind, PhaseFailure, Rejection};
use crate::fingerprint::holds_nul;
use crate::flow::{Payload, RecoveryPoint};
use crate::graph::{Graph, Isolation, OnReject, Phase, PhaseKind};
use crate::key::KeyInfo;
use crate::lease::{Keeper, Kept};
use crate::phase::{External, OpenTx};
use crate::reply::{Reply, StoredReply};
use crate::state::State;
use crate::store::{self, Advance, Holder, Position, Taken};

/// An attempt at a flow, while it has the lease.
#[doc(hidden)]
#[expect(
    missing_debug_implementations,
    reason = "it holds the values of a request, which stay out of logs"
)]
pub struct Attempt {
    pool: PgPool,
    keeper: Arc<Keeper>,
    kept: Kept,
    graph: &'static Graph,
    key: Arc<KeyInfo>,
    lease: Duration,
    /// The point at which the row stands.
    stored_point: &'static str,
    /// The point at which the attempt stands: ahead of the row while an external phase's result
    /// waits to be stored with the next checkpoint.
    point: &'static str,
    state: State,
    finished: Option<Finished>,
    /// A connection that is at hand from the last statement. None while something outside is called.
    connection: Option<PoolConnection<Postgres>>,
}

/// The end of a flow.
#[derive(Debug, Clone)]
pub(crate) struct Finished {
    pub(crate) reply: Arc<StoredReply>,
    /// By another attempt, while this one did not know whether its own commit had succeeded.
    pub(crate) by_another: bool,
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
}

impl Halt {
    fn failed(failure: Failure) -> Self {
        Self(Why::Failed(failure))
    }

    fn lost() -> Self {
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
    pub(crate) point: &'static str,
    pub(crate) state: State,
    pub(crate) connection: PoolConnection<Postgres>,
}

impl Attempt {
    pub(crate) fn start(start: Start) -> Self {
        let kept = start.keeper.keep(
            start.key.id,
            start.key.user.clone(),
            start.holder,
            start.lease,
        );
        let mut attempt = Self {
            pool: start.pool,
            keeper: start.keeper,
            kept,
            graph: start.graph,
            key: Arc::new(start.key),
            lease: start.lease,
            stored_point: start.point,
            point: start.point,
            state: start.state,
            finished: None,
            connection: None,
        };
        attempt.keep_for_next_phase(Some(start.connection));
        attempt
    }

    pub(crate) fn point(&self) -> &'static str {
        self.point
    }

    pub(crate) fn key(&self) -> &KeyInfo {
        &self.key
    }

    pub(crate) fn finished(&self) -> Option<&Finished> {
        self.finished.as_ref()
    }

    /// Begins the transaction of an atomic phase.
    pub async fn begin(&mut self, phase: &'static Phase) -> Result<OpenTx, Halt> {
        let isolation = match phase.kind() {
            PhaseKind::Atomic { isolation } => isolation,
            PhaseKind::External { .. } => None,
        };
        self.begin_transaction(
            phase.name(),
            isolation,
            phase.timeout().unwrap_or(self.lease),
        )
        .await
    }

    /// Begins the transaction in which a rejection is stored.
    pub async fn begin_rejection(&mut self, handler: &'static OnReject) -> Result<OpenTx, Halt> {
        self.begin_transaction(handler.name(), None, self.lease)
            .await
    }

    async fn begin_transaction(
        &mut self,
        name: &'static str,
        isolation: Option<Isolation>,
        timeout: Duration,
    ) -> Result<OpenTx, Halt> {
        let failed = |error: &sqlx::Error| Halt::failed(Failure::of(name, error));
        for stale in 0.. {
            let connection = match self.connection.take() {
                Some(connection) => connection,
                None => store::acquire(&self.pool)
                    .await
                    .map_err(|error| failed(&error))?,
            };
            let begin = store::begin(isolation, timeout, self.lease, self.kept.holder());
            match OpenTx::begin(connection, Arc::clone(&self.key), begin).await {
                Ok(tx) => return Ok(tx),
                // It had gone while it was idle, as all of the pool's have after a restart of the
                // server. Nothing was begun; take the next one.
                Err(error)
                    if store::is_connection_lost(&error)
                        && stale < self.pool.options().get_max_connections() =>
                {
                    tracing::debug!(%error, "a connection was lost before the phase began; taking another");
                }
                Err(error) => return Err(failed(&error)),
            }
        }
        unreachable!(
            "the loop ends by returning: its last pass does not ask for another connection"
        )
    }

    /// The right to call the outside, for an external phase. No connection is held meanwhile.
    pub fn external(&self, phase: &'static Phase) -> Result<External<'_>, Halt> {
        match phase.kind() {
            PhaseKind::External { call, .. } => {
                Ok(External::new(self.graph.flow(), &self.key, call))
            }
            PhaseKind::Atomic { .. } => Err(Halt::failed(Failure::stop(
                phase.name(),
                "an atomic phase may not call the outside",
            ))),
        }
    }

    /// The value with which a point was reached.
    pub fn value<T: Payload>(&self, point: impl RecoveryPoint) -> Result<T, Halt> {
        let phase = self
            .graph
            .phase_from(self.point)
            .map_or(self.point, Phase::name);
        self.state
            .decode(point.name())
            .map_err(|error| Halt::failed(Failure::stop(phase, error.to_string())))
    }

    /// Runs the user's phase: until it is done, its time is up, or the lease is lost.
    pub async fn enter<T, E: PhaseFailure>(
        &self,
        phase: &'static Phase,
        run: impl Future<Output = Result<T, E>> + Send,
    ) -> Result<T, Halt> {
        let time_is_up = async {
            match phase.timeout() {
                // The server watches over a transaction's time; only a call needs ours.
                Some(timeout) if phase.is_external() => {
                    tokio::time::sleep(timeout).await;
                    timeout
                }
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            result = run => result.map_err(|error| Halt::failed(Failure::of(phase.name(), &error))),
            () = self.kept.lost() => Err(Halt::lost()),
            timeout = time_is_up => Err(Halt::failed(Failure {
                phase: phase.name(),
                disposition: Disposition::retry(),
                message: format!("no answer within {timeout:?}; whether the call took effect is unknown"),
            })),
        }
    }

    /// Runs the user's work beside a rejection.
    pub async fn enter_rejection<E: PhaseFailure>(
        &self,
        handler: &'static OnReject,
        run: impl Future<Output = Result<(), E>> + Send,
    ) -> Result<(), Halt> {
        tokio::select! {
            biased;
            result = run => result.map_err(|error| {
                let failure = Failure::of(handler.name(), &error);
                // What is being stored already is a rejection; there is no second answer.
                Halt::failed(match failure.disposition.0 {
                    Kind::Reject(_) => Failure::stop(handler.name(), format!("rejected a rejection: {}", failure.message)),
                    _ => failure,
                })
            }),
            () = self.kept.lost() => Err(Halt::lost()),
        }
    }

    /// Ends an atomic phase: stores the point it reaches and commits.
    pub async fn checkpoint<T: Payload>(
        &mut self,
        mut tx: OpenTx,
        to: impl RecoveryPoint,
        value: T,
    ) -> Result<(), Halt> {
        let state = match self.moved_to(to.name(), &value) {
            Ok(state) => state,
            Err(halt) => return self.roll_back(tx, halt).await,
        };
        let stored = state.as_value();
        let moved = match self.refuse_open_savepoint(&mut tx) {
            Ok(()) => {
                let advance = Advance {
                    point: to.name(),
                    state: &stored,
                };
                store::checkpoint(tx.connection(), self.position(), advance, self.lease, false)
                    .await
            }
            Err(halt) => return self.roll_back(tx, halt).await,
        };
        if self.commit(tx, moved).await? {
            self.moved(to.name(), state);
        }
        Ok(())
    }

    /// Ends the last phase of a flow, when it is atomic: stores the reply and commits.
    pub async fn finish<T: Serialize + Send>(
        &mut self,
        mut tx: OpenTx,
        reply: Reply<T>,
    ) -> Result<(), Halt> {
        let reply = match self
            .stored(reply)
            .and_then(|reply| self.refuse_open_savepoint(&mut tx).map(|()| reply))
        {
            Ok(reply) => reply,
            Err(halt) => return self.roll_back(tx, halt).await,
        };
        self.finish_with(tx, reply).await
    }

    /// Stores a rejection, with the business work that was done for it, and commits.
    pub async fn store_rejection(
        &mut self,
        mut tx: OpenTx,
        rejection: &Rejection,
    ) -> Result<(), Halt> {
        if let Err(halt) = self.refuse_open_savepoint(&mut tx) {
            return self.roll_back(tx, halt).await;
        }
        self.finish_with(tx, rejection.shared_reply()).await
    }

    async fn finish_with(&mut self, mut tx: OpenTx, reply: Arc<StoredReply>) -> Result<(), Halt> {
        let finished =
            store::finish(tx.connection(), self.position(), &reply, self.lease, false).await;
        if self.commit(tx, finished).await? {
            self.finished = Some(Finished {
                reply,
                by_another: false,
            });
        }
        Ok(())
    }

    /// Gives up a phase's transaction.
    pub async fn roll_back(&mut self, tx: OpenTx, why: Halt) -> Result<(), Halt> {
        self.connection = tx.roll_back().await;
        Err(why)
    }

    /// Ends an external phase. Its result is stored by the checkpoint of the atomic phase that
    /// follows, or by itself: where the phase says so, and where another call comes next.
    pub async fn carry<T: Payload>(
        &mut self,
        to: impl RecoveryPoint,
        value: T,
    ) -> Result<(), Halt> {
        let state = self.moved_to(to.name(), &value)?;
        let leaving = self.graph.phase_from(self.point).map(Phase::kind);
        let eager = matches!(leaving, Some(PhaseKind::External { eager: true, .. }));
        let another_call = self
            .graph
            .phase_from(to.name())
            .is_some_and(Phase::is_external);
        self.point = to.name();
        self.state = state;
        if eager || another_call {
            self.store_carried().await
        } else {
            Ok(())
        }
    }

    async fn store_carried(&mut self) -> Result<(), Halt> {
        let stored = self.state.as_value();
        let written = match store::acquire(&self.pool).await {
            Ok(mut connection) => {
                let advance = Advance {
                    point: self.point,
                    state: &stored,
                };
                let moved =
                    store::checkpoint(&mut connection, self.position(), advance, self.lease, true)
                        .await;
                moved.map(|moved| (moved, connection))
            }
            Err(error) => Err(error),
        };
        match written {
            Ok((true, connection)) => {
                self.stored_point = self.point;
                self.kept.renewed();
                self.keep_for_next_phase(Some(connection));
                Ok(())
            }
            Ok((false, _)) => Err(Halt::lost()),
            Err(error) => self.resolve_unless_refused(&error).await,
        }
    }

    /// Ends a flow whose last phase is external.
    pub async fn finish_external<T: Serialize + Send>(
        &mut self,
        reply: Reply<T>,
    ) -> Result<(), Halt> {
        let reply = self.stored(reply)?;
        self.finish_alone(reply).await
    }

    /// Stores a rejection for which the flow has no work to do.
    pub async fn store_bare_rejection(&mut self, rejection: &Rejection) -> Result<(), Halt> {
        self.finish_alone(rejection.shared_reply()).await
    }

    async fn finish_alone(&mut self, reply: Arc<StoredReply>) -> Result<(), Halt> {
        let finished = match store::acquire(&self.pool).await {
            Ok(mut connection) => {
                store::finish(&mut connection, self.position(), &reply, self.lease, true).await
            }
            Err(error) => Err(error),
        };
        match finished {
            Ok(true) => {
                self.finished = Some(Finished {
                    reply,
                    by_another: false,
                });
                Ok(())
            }
            Ok(false) => Err(Halt::lost()),
            Err(error) => self.resolve_unless_refused(&error).await,
        }
    }

    /// A flow that has ended has no next phase.
    pub fn already_finished(&self) -> Halt {
        Halt::failed(Failure::stop(
            self.point,
            "the flow has finished; there is no phase to run",
        ))
    }

    /// Lets the lease go after a failure, keeping what was reached. Never hides the failure: what
    /// goes wrong here is logged, and the lease then runs out by itself.
    pub(crate) async fn release(mut self, last_error: &serde_json::Value) {
        let stored = self.state.as_value();
        for _ in 0..RELEASE_TRIES {
            let mut connection = match self.connection.take() {
                Some(connection) => connection,
                None => match store::acquire(&self.pool).await {
                    Ok(connection) => connection,
                    Err(error) => {
                        tracing::warn!(%error, "the lease was not released; it runs out by itself");
                        return;
                    }
                },
            };
            let advance = Advance {
                point: self.point,
                state: &stored,
            };
            match store::release(
                &mut connection,
                self.position(),
                advance,
                last_error,
                self.lease,
            )
            .await
            {
                Ok(true) => return,
                // Lost, or released by the try whose answer was lost.
                Ok(false) => return tracing::debug!("the lease was not ours to release any more"),
                Err(error) => {
                    tracing::warn!(%error, "the lease could not be released");
                    connection.close_on_drop();
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    fn position(&self) -> Position<'_> {
        Position {
            id: self.key.id,
            user: &self.key.user,
            holder: self.kept.holder(),
            stored_point: self.stored_point,
        }
    }

    fn moved_to<T: Payload>(&self, to: &'static str, value: &T) -> Result<State, Halt> {
        let phase = self
            .graph
            .phase_from(self.point)
            .map_or(self.point, Phase::name);
        let unstorable = |reason: String| {
            Halt::failed(Failure::stop(
                phase,
                format!("what it returned for `{to}` cannot be stored: {reason}"),
            ))
        };
        let keeps = self
            .graph
            .point(to)
            .map(|point| point.keeps())
            .unwrap_or_default();
        let state = self
            .state
            .moved_to(to, keeps, value)
            .map_err(|error| unstorable(error.to_string()))?;
        if holds_nul(&state.as_value()) {
            return Err(unstorable("a string holds a NUL character".to_owned()));
        }
        Ok(state)
    }

    fn stored<T: Serialize>(&self, reply: Reply<T>) -> Result<Arc<StoredReply>, Halt> {
        let phase = self
            .graph
            .phase_from(self.point)
            .map_or(self.point, Phase::name);
        let stored = reply
            .store()
            .map_err(|error| Halt::failed(Failure::stop(phase, error.to_string())))?;
        Ok(Arc::new(stored))
    }

    fn refuse_open_savepoint(&self, tx: &mut OpenTx) -> Result<(), Halt> {
        if tx.holds_savepoint() {
            let phase = self
                .graph
                .phase_from(self.point)
                .map_or(self.point, Phase::name);
            return Err(Halt::failed(Failure::stop(
                phase,
                "it left a savepoint open: commit or drop what `tx.begin()` gave",
            )));
        }
        Ok(())
    }

    /// Commits after the update that must be the transaction's last statement. True: committed.
    /// False: the answer was lost, and the attempt now stands wherever the row does.
    async fn commit(
        &mut self,
        mut tx: OpenTx,
        moved: Result<bool, sqlx::Error>,
    ) -> Result<bool, Halt> {
        let phase = self
            .graph
            .phase_from(self.point)
            .map_or(self.point, Phase::name);
        match moved {
            Ok(true) => {}
            Ok(false) => {
                let ours = store::is_own_transaction(tx.connection(), self.kept.holder()).await;
                let why = if matches!(ours, Ok(false)) {
                    Halt::failed(Failure::stop(
                        phase,
                        "it ended the transaction it was lent (a raw COMMIT or ROLLBACK); its writes may be committed without their recovery point",
                    ))
                } else {
                    Halt::lost()
                };
                return self.roll_back(tx, why).await.map(|()| false);
            }
            Err(error) => {
                let why = Halt::failed(Failure::of(phase, &error));
                return self.roll_back(tx, why).await.map(|()| false);
            }
        }
        match tx.commit().await {
            Ok(connection) => {
                self.connection = connection;
                Ok(true)
            }
            Err(error) if store::commit_was_refused(&error) => {
                Err(Halt::failed(Failure::of(phase, &error)))
            }
            Err(error) => {
                tracing::info!(%error, phase, "the answer to a commit was lost; finding out what became of it");
                self.resolve().await.map(|()| false)
            }
        }
    }

    fn moved(&mut self, point: &'static str, state: State) {
        self.point = point;
        self.stored_point = point;
        self.state = state;
        self.kept.renewed();
        let connection = self.connection.take();
        self.keep_for_next_phase(connection);
    }

    fn keep_for_next_phase(&mut self, connection: Option<PoolConnection<Postgres>>) {
        let calls_outside = self
            .graph
            .phase_from(self.point)
            .is_none_or(Phase::is_external);
        self.connection = connection.filter(|_| !calls_outside);
    }

    /// A write that was a transaction of its own failed: for certain, or with its answer lost.
    async fn resolve_unless_refused(&mut self, error: &sqlx::Error) -> Result<(), Halt> {
        if store::is_connection_lost(error) {
            tracing::info!(%error, "the answer to a write was lost; finding out what became of it");
            return self.resolve().await;
        }
        let phase = self
            .graph
            .phase_from(self.point)
            .map_or(self.point, Phase::name);
        Err(Halt::failed(Failure::of(phase, error)))
    }

    /// Finds out what became of a commit whose answer was lost, by taking over from itself: the
    /// update waits for the old transaction, so it never sees the old point while the commit is
    /// still on its way. Afterwards the attempt stands where the row does.
    async fn resolve(&mut self) -> Result<(), Halt> {
        let next = Holder::fresh();
        let give_up = Instant::now() + self.lease * 2;
        let mut last_error;
        loop {
            match self.take_over_from_myself(next).await {
                Ok(resolved) => return resolved,
                Err(error) => last_error = error,
            }
            if Instant::now() >= give_up {
                return Err(Halt(Why::Unresolved(last_error.to_string())));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn take_over_from_myself(
        &mut self,
        next: Holder,
    ) -> Result<Result<(), Halt>, sqlx::Error> {
        let mut connection = store::acquire(&self.pool).await?;
        let (id, user) = (self.key.id, self.key.user.clone());
        let mine = self.kept.holder();
        let tried =
            store::take_over_from_myself(&mut connection, id, &user, mine, next, self.lease).await;
        if tried.is_err() {
            connection.close_on_drop();
        }
        if let Some(taken) = tried? {
            return Ok(self.adopt(next, taken, connection));
        }
        // Finished, lost, or taken by a try of ours whose answer was lost too.
        let Some(known) = store::read_by_id(&mut connection, id, &user, &[]).await? else {
            return Ok(Err(Halt::lost()));
        };
        if known.holder == Some(next) {
            let taken = Taken {
                recovery_point: known.recovery_point,
                state: known.state.unwrap_or_default(),
                fence: known.fence,
                attempts: known.attempts,
                created_at: known.created_at,
            };
            return Ok(self.adopt(next, taken, connection));
        }
        let reply = known
            .response
            .and_then(|(status, headers, body)| StoredReply::from_stored(status, headers, body));
        Ok(match reply {
            Some(reply) => {
                let by_another = known.fence != self.key.fence;
                self.finished = Some(Finished {
                    reply: Arc::new(reply),
                    by_another,
                });
                Ok(())
            }
            None => Err(Halt::lost()),
        })
    }

    fn adopt(
        &mut self,
        holder: Holder,
        taken: Taken,
        connection: PoolConnection<Postgres>,
    ) -> Result<(), Halt> {
        let phase = self
            .graph
            .phase_from(self.point)
            .map_or(self.point, Phase::name);
        self.kept = self
            .keeper
            .keep(self.key.id, self.key.user.clone(), holder, self.lease);
        let key = Arc::make_mut(&mut self.key);
        key.fence = taken.fence;
        key.attempt = u32::try_from(taken.attempts).unwrap_or(0).max(1);
        let point = self.graph.point(&taken.recovery_point);
        match (point, State::from_stored(taken.state)) {
            (Some(point), Ok(state)) => {
                self.point = point.name();
                self.stored_point = point.name();
                self.state = state;
                self.keep_for_next_phase(Some(connection));
                Ok(())
            }
            _ => Err(Halt::failed(Failure::stop(
                phase,
                "the flow was moved to a point that this version does not know",
            ))),
        }
    }
}

/// How often a release is tried. More is not worth the wait: the lease runs out by itself.
const RELEASE_TRIES: usize = 3;

/// Between two tries of something that the connection or a lock was in the way of.
const PAUSE: Duration = Duration::from_millis(50);
