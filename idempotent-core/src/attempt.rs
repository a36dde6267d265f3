//! One attempt: the time one holder has the lease. The transitions that the macro generates are
//! written in its terms: `begin` a transaction or get the right to call outside, `enter` the user's
//! phase, then `checkpoint`, `carry` or `finish` what came back.
//!
//! An attempt that has lost its lease, or whose lease it cannot be sure of, touches nothing again:
//! every way out of here that is not progress is a [`Halt`].

mod doubt;
mod end;
mod intent;
mod parts;

pub use intent::{Intended, Reconciled};
pub use parts::Halt;
pub(crate) use parts::{Finished, Start, Surroundings, Why};

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgPool, Postgres};
use tokio::time::Instant;

use crate::failure::{Disposition, Failure, Kind, PhaseFailure, Rejection};
use crate::flow::{Payload, RecoveryPoint};
use crate::graph::{Graph, Isolation, OnReject, Phase, PhaseKind, Repeatable};
use crate::key::KeyInfo;
use crate::lease::{Keeper, Kept};
use crate::phase::{External, OpenTx};
use crate::reply::{Reply, StoredReply};
use crate::state::State;
use crate::store::{self, Advance, Intent, Position, Staged, Within, bounded};

/// How long a call may take where its phase does not say. A lease is renewed meanwhile, so this is
/// all that ends a call which is never answered.
const CALL_TIME: Duration = Duration::from_secs(300);

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
    /// The most bytes of a reply's body that are stored.
    reply_limit: usize,
    /// The point at which the row stands, by the name that is stored.
    stored_point: &'static str,
    /// The point at which the attempt stands: ahead of the row while an external phase's result
    /// waits to be stored with the next checkpoint.
    point: &'static str,
    state: State,
    /// How old the key was when the lease was granted, and when that was.
    age: (Duration, Instant),
    /// It was this attempt that came to this point, and nobody before it.
    is_fresh: bool,
    /// An outside call that an earlier attempt announced, and whose outcome is not stored.
    intent: Option<Intent>,
    finished: Option<Finished>,
    /// A connection that is at hand from the last statement. None while something outside is called.
    connection: Option<PoolConnection<Postgres>>,
    surroundings: Surroundings,
}

impl Attempt {
    pub(crate) fn start(start: Start) -> Self {
        let (id, user) = (start.key.id, start.key.user.clone());
        let kept = start
            .keeper
            .keep(id, user, start.holder, start.lease, start.granted);
        let mut attempt = Self {
            pool: start.pool,
            keeper: start.keeper,
            kept,
            graph: start.graph,
            key: Arc::new(start.key),
            lease: start.lease,
            reply_limit: start.reply_limit,
            stored_point: start.stored_point,
            point: start.point,
            state: start.state,
            age: (start.age, start.granted),
            is_fresh: start.is_fresh,
            intent: start.intent,
            finished: None,
            connection: None,
            surroundings: start.surroundings,
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
        let timeout = phase.timeout().unwrap_or(self.lease);
        self.begin_transaction(phase.name(), isolation, timeout)
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
        let mut stale = 0;
        let mut tx = loop {
            let connection = self.connection().await.map_err(|error| failed(&error))?;
            let begin = store::begin(isolation, timeout, self.lease, self.kept.holder());
            let (key, within) = (Arc::clone(&self.key), self.answer_time());
            match OpenTx::begin(connection, key, name, begin, within).await {
                Ok(tx) => break tx,
                // It had gone while it was idle, as all of the pool's have after a restart of the
                // server. Nothing was begun; take the next one.
                Err(error) if store::is_connection_lost(&error) && stale < self.connections() => {
                    tracing::debug!(%error, "a connection was lost before the phase began; taking another");
                    stale += 1;
                }
                Err(error) => return Err(failed(&error)),
            }
        };
        let works_on_a_snapshot = matches!(
            isolation.or(self.surroundings.default_isolation),
            Some(Isolation::RepeatableRead | Isolation::Serializable)
        );
        if works_on_a_snapshot {
            let locked = store::lock(tx.connection(), self.position());
            match bounded(self.answer_time(), locked).await {
                Ok(true) => self.kept.rest(),
                Ok(false) => return self.give_up(tx, Halt::lost()).await,
                Err(error) => return self.give_up(tx, failed(&error)).await,
            }
        }
        Ok(tx)
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
        self.state
            .decode(point.name())
            .map_err(|error| self.stop(error.to_string()))
    }

    /// Runs the user's phase: until it is done, its time is up, or the lease is lost.
    pub async fn enter<T, E: PhaseFailure>(
        &self,
        phase: &'static Phase,
        run: impl Future<Output = Result<T, E>> + Send,
    ) -> Result<T, Halt> {
        let (time, what_is_known) = if phase.is_external() {
            let time = phase.timeout().unwrap_or(CALL_TIME);
            (time, "whether the call took effect is not known")
        } else {
            let time = phase.timeout().unwrap_or(self.lease);
            (time, "its transaction is rolled back")
        };
        self.run(phase.name(), time, what_is_known, run).await
    }

    /// Runs the user's work beside a rejection.
    pub async fn enter_rejection<E: PhaseFailure>(
        &self,
        handler: &'static OnReject,
        run: impl Future<Output = Result<(), E>> + Send,
    ) -> Result<(), Halt> {
        let name = handler.name();
        match self
            .run(name, self.lease, "its transaction is rolled back", run)
            .await
        {
            // What is being stored already is a rejection; there is no second answer.
            Err(Halt(Why::Failed(failure))) if matches!(failure.disposition.0, Kind::Reject(_)) => {
                let message = format!("it rejected a rejection: {}", failure.message);
                Err(Halt::failed(Failure::stop(name, message)))
            }
            ran => ran,
        }
    }

    async fn run<T, E: PhaseFailure>(
        &self,
        name: &'static str,
        time: Duration,
        what_is_known: &str,
        run: impl Future<Output = Result<T, E>> + Send,
    ) -> Result<T, Halt> {
        tokio::select! {
            biased;
            result = run => result.map_err(|error| Halt::failed(Failure::of(name, &error))),
            () = self.kept.lost() => Err(Halt::lost()),
            () = self.surroundings.closing() => Err(Halt(Why::Closing)),
            () = tokio::time::sleep(time) => Err(Halt::failed(Failure {
                phase: name,
                disposition: Disposition::retry(),
                message: format!("it did not end within {time:?}; {what_is_known}"),
            })),
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
            Ok(state) if !tx.holds_savepoint() => state,
            Ok(_) => return self.roll_back(tx, self.open_savepoint()).await,
            Err(halt) => return self.roll_back(tx, halt).await,
        };
        let stored = state.as_value();
        let advance = Advance {
            point: to.name(),
            state: &stored,
        };
        let sent = Instant::now();
        let staged = tx.take_staged();
        let (position, lease) = (self.position(), self.lease);
        let connection = tx.connection();
        let moved = store::checkpoint(connection, position, advance, lease, Within::Phase(&staged));
        let moved = bounded(self.answer_time(), moved).await;
        if self.commit(tx, moved).await? {
            self.wake_completer(&staged);
            self.intent = None;
            self.is_fresh = true;
            self.point = to.name();
            self.stored_point = to.name();
            self.state = state;
            self.kept.renewed(sent);
            let connection = self.connection.take();
            self.keep_for_next_phase(connection);
        }
        Ok(())
    }

    /// Ends the last phase of a flow, when it is atomic: stores the reply and commits.
    pub async fn finish<T: Serialize + Send>(
        &mut self,
        tx: OpenTx,
        reply: Reply<T>,
    ) -> Result<(), Halt> {
        match self.stored(reply) {
            Ok(reply) => self.finish_with(tx, reply).await,
            Err(halt) => self.roll_back(tx, halt).await,
        }
    }

    /// Stores a rejection, with the business work that was done for it, and commits.
    pub async fn store_rejection(&mut self, tx: OpenTx, rejection: &Rejection) -> Result<(), Halt> {
        self.finish_with(tx, rejection.shared_reply()).await
    }

    async fn finish_with(&mut self, mut tx: OpenTx, reply: Arc<StoredReply>) -> Result<(), Halt> {
        if tx.holds_savepoint() {
            return self.roll_back(tx, self.open_savepoint()).await;
        }
        let staged = tx.take_staged();
        let (position, lease) = (self.position(), self.lease);
        let connection = tx.connection();
        let kept = reply.within(self.reply_limit);
        let finished = store::finish(connection, position, &kept, lease, Within::Phase(&staged));
        let finished = bounded(self.answer_time(), finished).await;
        if self.commit(tx, finished).await? {
            self.wake_completer(&staged);
            self.finished = Some(Finished {
                reply,
                by_another: false,
            });
        } else {
            self.answer_whole(reply);
        }
        Ok(())
    }

    /// The answer to this request is the whole reply, also where it was read back from the row that
    /// it was stored in, and more than is stored.
    fn answer_whole(&mut self, reply: Arc<StoredReply>) {
        let limit = self.reply_limit;
        if let Some(finished) = &mut self.finished
            && !finished.by_another
            && *finished.reply == *reply.within(limit)
        {
            finished.reply = reply;
        }
    }

    /// Gives up a phase's transaction.
    pub async fn roll_back(&mut self, tx: OpenTx, why: Halt) -> Result<(), Halt> {
        self.give_up(tx, why).await
    }

    async fn give_up<T>(&mut self, tx: OpenTx, why: Halt) -> Result<T, Halt> {
        self.connection = tx.roll_back(self.answer_time()).await;
        self.kept.wake();
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
        let leaving = self.graph.phase_from(self.point);
        let eager = leaving.is_some_and(|phase| {
            phase.repeatable() == Repeatable::Never
                || matches!(phase.kind(), PhaseKind::External { eager: true, .. })
        });
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

    /// Ends a flow whose last phase is external.
    pub async fn finish_external<T: Serialize + Send>(
        &mut self,
        reply: Reply<T>,
    ) -> Result<(), Halt> {
        let reply = self.stored(reply)?;
        self.finish_alone(reply).await
    }

    /// The same with a reply that is in its stored form already.
    pub(crate) async fn finish_with_stored(&mut self, reply: StoredReply) -> Result<(), Halt> {
        self.finish_alone(Arc::new(reply)).await
    }

    /// Stores a rejection for which the flow has no work to do.
    pub async fn store_bare_rejection(&mut self, rejection: &Rejection) -> Result<(), Halt> {
        self.finish_alone(rejection.shared_reply()).await
    }

    /// A flow that has ended has no next phase.
    pub fn already_finished(&self) -> Halt {
        self.stop("the flow has finished; there is no phase to run")
    }

    /// Waits before a phase is repeated, as long as the lease is ours and the process stays.
    pub(crate) async fn pause(&self, time: Duration) -> Result<(), Halt> {
        tokio::select! {
            () = self.kept.lost() => Err(Halt::lost()),
            () = self.surroundings.closing() => Err(Halt(Why::Closing)),
            () = tokio::time::sleep(time) => Ok(()),
        }
    }

    fn wake_completer(&self, staged: &[Staged]) {
        if !staged.is_empty() {
            self.surroundings.work.notify_one();
        }
    }

    /// The connection at hand, else one from the pool: an attempt never holds two.
    async fn connection(&mut self) -> Result<PoolConnection<Postgres>, sqlx::Error> {
        match self.connection.take() {
            Some(connection) => Ok(connection),
            None => store::acquire(&self.pool).await,
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

    /// The phase that leaves the point where the attempt stands.
    fn phase(&self) -> &'static str {
        self.graph
            .phase_from(self.point)
            .map_or(self.point, Phase::name)
    }

    fn stop(&self, message: impl Into<String>) -> Halt {
        Halt::failed(Failure::stop(self.phase(), message))
    }

    fn open_savepoint(&self) -> Halt {
        self.stop("it left a savepoint open: commit or drop what `tx.begin()` gave")
    }

    fn moved_to<T: Payload>(&self, to: &'static str, value: &T) -> Result<State, Halt> {
        let keeps = self.graph.point(to).map(|point| point.keeps());
        self.state
            .moved_to(to, keeps.unwrap_or_default(), value)
            .map_err(|reason| {
                self.stop(format!(
                    "what it returned for `{to}` cannot be stored: {reason}"
                ))
            })
    }

    fn stored<T: Serialize>(&self, reply: Reply<T>) -> Result<Arc<StoredReply>, Halt> {
        let stored = reply
            .store()
            .map_err(|error| self.stop(error.to_string()))?;
        Ok(Arc::new(stored))
    }

    fn answer_time(&self) -> Duration {
        store::answer_time(self.lease)
    }

    /// How many connections may be stale before it cannot be that.
    fn connections(&self) -> u32 {
        self.pool.options().get_max_connections()
    }

    fn keep_for_next_phase(&mut self, connection: Option<PoolConnection<Postgres>>) {
        let phase = self.graph.phase_from(self.point);
        let calls_outside = phase.is_none_or(Phase::is_external);
        self.connection = connection.filter(|_| !calls_outside);
    }
}
