//! What a person can see and do when flows need one: list, show and count keys; let a stuck flow try
//! again, finish it by hand, take a lease away.
//!
//! A change asks for the key's id and nothing that it can find itself. It is made only if the key
//! stands where that change makes sense, judged by the database in the update itself; otherwise it
//! changes nothing and says where the key stands. Each change leaves an entry in the key's history.
//!
//! Deliberately absent: a way to move a flow to another recovery point, or to edit its values. Both
//! would have to know what the phases have done, and only the phases know that. Business rows are
//! the application's: finishing a key by hand does not touch them.

mod view;

use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::PgConnection;
use uuid::Uuid;

use crate::engine::{CONFLICTS, Engine, Inner, backoff};
use crate::key::Key;
use crate::reply::StoredReply;
use crate::store::{self, Change, Standing};

pub use view::{
    Event, KeyContents, KeyCount, KeyDetails, KeyFilter, KeyState, KeySummary, LastError,
    ReplySummary, UnknownKeyState,
};

/// How long the database may take to answer an operator. Lists and counts may read a whole table.
const ANSWER_TIME: Duration = Duration::from_secs(30);

/// Sees and changes keys on behalf of a person. Made by [`Engine::operator`].
///
/// ```no_run
/// use idempotent_core::{Engine, KeyFilter, KeyState, OperatorError};
///
/// # async fn example(engine: Engine) -> Result<(), OperatorError> {
/// let operator = engine.operator().by("nina");
/// for key in operator.list(&KeyFilter::new().state(KeyState::Stuck)).await? {
///     println!("{} {}: {}", key.id, key.point, key.error.as_deref().unwrap_or("-"));
///     operator.retry(key.id, false).await?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "an operator does nothing by itself"]
pub struct Operator {
    inner: Arc<Inner>,
    by: Option<String>,
}

/// What a change did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Changed {
    /// Where the key stood.
    pub was: KeyState,
    /// Where it stands now.
    pub is: KeyState,
}

/// Why an operator was not served. Nothing was changed, save where the database did not answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OperatorError {
    /// There is no such key.
    #[error("there is no such key; it may have been reaped after its retention")]
    NotFound,
    /// The key stands where this change makes no sense.
    #[error("nothing was changed: the key is {is}, and this needs one that is {needs}{}", hint(*is, needs))]
    WrongState {
        /// Where the key stands.
        is: KeyState,
        /// Where it would have to stand.
        needs: &'static str,
    },
    /// Somebody else is changing the key.
    #[error(
        "nothing was changed: a transaction has the key locked, or it keeps changing; \
         look at it and try again"
    )]
    Busy,
    /// The database did not answer. A change may have been made: look at the key before trying again.
    #[error("the database did not answer: {0}; look at the key before trying again")]
    Database(#[from] sqlx::Error),
}

fn hint(is: KeyState, needs: &str) -> &'static str {
    match is {
        KeyState::Finished => "; it has its reply",
        KeyState::Running if needs != RELEASE => "; wait until its lease is over, or release it",
        KeyState::Due if needs == RETRY => "; the completer takes it next",
        _ => "",
    }
}

/// A change, and from where it may be made.
#[derive(Clone, Copy)]
enum Action<'a> {
    Retry { call_again: bool },
    Resolve(&'a StoredReply),
    Release,
}

const RETRY: &str = "stuck or waiting";
const RESOLVE: &str = "stuck, waiting or due";
const RELEASE: &str = "running";

impl Action<'_> {
    fn needs(self) -> (&'static str, &'static [KeyState]) {
        match self {
            Self::Retry { .. } => (RETRY, &[KeyState::Stuck, KeyState::Waiting]),
            Self::Resolve(_) => (
                RESOLVE,
                &[KeyState::Stuck, KeyState::Waiting, KeyState::Due],
            ),
            Self::Release => (RELEASE, &[KeyState::Running]),
        }
    }

    async fn apply(
        self,
        connection: &mut PgConnection,
        change: Change<'_>,
    ) -> Result<Option<KeyState>, sqlx::Error> {
        match self {
            Self::Retry { call_again } => store::retry_key(connection, change, call_again).await,
            Self::Resolve(reply) => store::resolve_key(connection, change, reply).await,
            Self::Release => store::release_key(connection, change).await,
        }
    }
}

impl Engine {
    /// What a person can see and do. Keys of flows that this engine does not know are among them.
    pub fn operator(&self) -> Operator {
        Operator {
            inner: self.inner(),
            by: None,
        }
    }
}

impl Operator {
    /// Who it is. Written to the history of what is changed, up to 100 characters.
    pub fn by(mut self, name: &str) -> Self {
        let name = name.chars().filter(|c| !c.is_control()).take(100);
        self.by = Some(name.collect()).filter(|name: &String| !name.is_empty());
        self
    }

    /// Keys, newest first.
    ///
    /// # Errors
    ///
    /// When the database does not answer.
    pub async fn list(&self, filter: &KeyFilter) -> Result<Vec<KeySummary>, OperatorError> {
        let longest_pause = self.inner.longest_pause();
        let read =
            self.ask(async |connection| store::list_keys(connection, filter, longest_pause).await);
        Ok(read.await?)
    }

    /// How many keys stand where, and how old the oldest of them is; by flow, point and state.
    ///
    /// # Errors
    ///
    /// When the database does not answer.
    pub async fn stats(&self) -> Result<Vec<KeyCount>, OperatorError> {
        let longest_pause = self.inner.longest_pause();
        let read = self.ask(async |connection| store::count_keys(connection, longest_pause).await);
        Ok(read.await?)
    }

    /// The id of a client's key: for those who know what the client sent.
    ///
    /// # Errors
    ///
    /// [`NotFound`](OperatorError::NotFound), or when the database does not answer.
    pub async fn find(&self, key: &Key) -> Result<Uuid, OperatorError> {
        let found = self.ask(async |connection| {
            store::find_key(connection, &key.user, &key.path, &key.key).await
        });
        found.await?.ok_or(OperatorError::NotFound)
    }

    /// All that is known of a key, save what the client sent and was answered.
    ///
    /// # Errors
    ///
    /// [`NotFound`](OperatorError::NotFound), or when the database does not answer.
    pub async fn show(&self, id: Uuid) -> Result<KeyDetails, OperatorError> {
        let longest_pause = self.inner.longest_pause();
        let read =
            self.ask(async |connection| store::read_details(connection, id, longest_pause).await);
        read.await?.ok_or(OperatorError::NotFound)
    }

    /// What the client sent, what the phases stored, and what was answered. Apart from
    /// [`show`](Self::show), because it is the client's.
    ///
    /// # Errors
    ///
    /// [`NotFound`](OperatorError::NotFound), or when the database does not answer.
    pub async fn contents(&self, id: Uuid) -> Result<KeyContents, OperatorError> {
        let read = self.ask(async |connection| store::read_contents(connection, id).await);
        let (request, state, reply) = read.await?.ok_or(OperatorError::NotFound)?;
        Ok(KeyContents {
            request,
            state,
            reply,
        })
    }

    /// Lets a stuck or waiting flow try again, at once and with all its attempts before it.
    ///
    /// `call_again` is for a call that must not be repeated and of which nobody knows whether it
    /// happened: it forgets that the call was begun, so that it is made anew. Find out first, and
    /// make sure that the attempt which began it is dead. Without it such a flow is parked again.
    ///
    /// # Errors
    ///
    /// See [`OperatorError`]; `WrongState` unless the key is stuck or waiting.
    pub async fn retry(&self, id: Uuid, call_again: bool) -> Result<Changed, OperatorError> {
        let changed = self.change(id, Action::Retry { call_again }).await?;
        self.inner.work().notify_one();
        Ok(changed)
    }

    /// Finishes a flow by hand: every retry gets this reply from now on. No phase runs, no business
    /// row is touched: put those right first.
    ///
    /// # Errors
    ///
    /// See [`OperatorError`]; `WrongState` when the key is finished or somebody has a live lease.
    pub async fn resolve(&self, id: Uuid, reply: &StoredReply) -> Result<Changed, OperatorError> {
        self.change(id, Action::Resolve(reply)).await
    }

    /// Takes the lease of a running flow away, so that it is due at once. Its holder is fenced off:
    /// its next write is refused. A call that it is making outside goes on; the next attempt makes
    /// it again under the same derived key.
    ///
    /// # Errors
    ///
    /// See [`OperatorError`]; `WrongState` unless the key is running.
    pub async fn release(&self, id: Uuid) -> Result<Changed, OperatorError> {
        let changed = self.change(id, Action::Release).await?;
        self.inner.work().notify_one();
        Ok(changed)
    }

    /// Reads where the key stands, and changes it on the condition that it still stands there.
    async fn change(&self, id: Uuid, action: Action<'_>) -> Result<Changed, OperatorError> {
        let (needs, from) = action.needs();
        let longest_pause = self.inner.longest_pause();
        for tries in 0..CONFLICTS {
            let read = self
                .ask(async |connection| store::read_standing(connection, id, longest_pause).await);
            let standing: Standing = read.await?.ok_or(OperatorError::NotFound)?;
            let was = standing.state;
            if !from.contains(&was) {
                return Err(OperatorError::WrongState { is: was, needs });
            }
            let change = Change {
                standing: &standing,
                by: self.by.as_deref(),
                longest_pause,
            };
            let applied = self.ask(async |connection| action.apply(connection, change).await);
            match applied.await {
                Ok(Some(is)) => {
                    let by = self.by.as_deref().unwrap_or_default();
                    tracing::info!(key_id = %id, %was, %is, by, "an operator changed a key");
                    return Ok(Changed { was, is });
                }
                // Somebody moved it in between: look again.
                Ok(None) => {}
                Err(error) if store::is_conflict(&error) => {}
                Err(error) if store::is_lock_timeout(&error) => return Err(OperatorError::Busy),
                Err(error) => return Err(error.into()),
            }
            tokio::time::sleep(backoff(tries)).await;
        }
        Err(OperatorError::Busy)
    }

    /// One statement, on a connection of the pool.
    async fn ask<T>(
        &self,
        statement: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, sqlx::Error> {
        let mut connection = store::acquire(self.inner.pool()).await?;
        let answered = store::bounded(ANSWER_TIME, statement(&mut connection)).await;
        // A statement that was not waited for to its end leaves the connection in its midst.
        if answered.as_ref().is_err_and(store::is_connection_lost) {
            connection.close_on_drop();
        }
        answered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A handler of a service must be able to wait for them.
    #[test]
    fn the_futures_can_be_sent() {
        fn sendable<T: Send>(_: T) {}
        #[allow(dead_code)]
        fn all(operator: &Operator, id: Uuid, reply: &StoredReply, key: &Key, filter: &KeyFilter) {
            sendable(operator.list(filter));
            sendable(operator.stats());
            sendable(operator.find(key));
            sendable(operator.show(id));
            sendable(operator.contents(id));
            sendable(operator.retry(id, true));
            sendable(operator.resolve(id, reply));
            sendable(operator.release(id));
        }
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        let refused = |is, needs| OperatorError::WrongState { is, needs }.to_string();
        assert_eq!(
            refused(KeyState::Running, RESOLVE),
            "nothing was changed: the key is running, and this needs one that is stuck, waiting or due; \
             wait until its lease is over, or release it"
        );
        assert!(refused(KeyState::Finished, RETRY).ends_with("; it has its reply"));
        assert!(refused(KeyState::Due, RETRY).ends_with("; the completer takes it next"));
        assert!(refused(KeyState::Stuck, RELEASE).ends_with("needs one that is running"));
    }
}
