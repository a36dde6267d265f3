//! What a phase may do, as types. An atomic phase is lent a [`Tx`]: the transaction in which its
//! writes and its next recovery point commit together. An external phase is lent an [`External`]:
//! no transaction, but the derived key for the call. Only the engine makes either, and neither
//! outlives the phase, so what a phase may not do it cannot write.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, PgTransactionManager, Postgres};
use sqlx_core::transaction::TransactionManager;
use uuid::Uuid;

use crate::failure::{Disposition, PhaseFailure};
use crate::fingerprint::Fingerprint;
use crate::flow::FlowReference;
use crate::json::into_storable;
use crate::key::{DerivedKey, Key, KeyInfo};
use crate::store::{Staged, bounded};

/// The transaction of an atomic phase. Derefs to the sqlx connection; only the engine begins and
/// commits it.
///
/// A savepoint is fine (`tx.begin()`); a raw `COMMIT` or `ROLLBACK` is noticed by the checkpoint and
/// stops the flow.
///
/// ```
/// # use idempotent_core::Tx;
/// async fn insert_ride(tx: &mut Tx<'_>, cents: i64) -> Result<(), sqlx::Error> {
///     let key_id = tx.key().id();
///     sqlx::query("INSERT INTO rides (key_id, amount_cents) VALUES ($1, $2)")
///         .bind(key_id)
///         .bind(cents)
///         .execute(&mut **tx)
///         .await?;
///     Ok(())
/// }
/// ```
#[expect(
    missing_debug_implementations,
    reason = "it holds staged requests, which stay out of logs"
)]
pub struct Tx<'a> {
    connection: &'a mut PgConnection,
    key: Arc<KeyInfo>,
    phase: &'static str,
    staged: &'a mut Vec<Staged>,
}

impl Tx<'_> {
    /// The key that the phase works for.
    pub fn key(&self) -> &KeyInfo {
        &self.key
    }

    /// Stages a run of another flow: its key is inserted in this transaction, so it exists if and
    /// only if this phase commits, and the completer then runs it. The outbox, without a table of
    /// its own, and without a round trip.
    ///
    /// The staged key is named by this key, this phase and `suffix`: a phase that is repeated stages
    /// once. Different runs staged by one phase need different suffixes.
    ///
    /// # Errors
    ///
    /// When the request cannot be stored, or the suffix was used before in this phase: a bug.
    pub fn stage<R: FlowReference>(
        &mut self,
        _flow: R,
        suffix: &str,
        request: &R::Request,
    ) -> Result<(), StageError> {
        let request = serde_json::to_value(request).map_err(|error| error.to_string());
        let request =
            request.and_then(|request| into_storable(request).map_err(|error| error.to_string()));
        let request = request.map_err(|reason| StageError::Unstorable {
            flow: R::FLOW,
            reason,
        })?;
        let key = self.key.staged_key(self.phase, suffix);
        let path = format!("flow:{}", R::FLOW);
        if self
            .staged
            .iter()
            .any(|other| other.path == path && other.key == key)
        {
            let suffix = suffix.to_owned();
            return Err(StageError::Twice {
                flow: R::FLOW,
                suffix,
            });
        }
        let named = Key::staged(&self.key.user, &path, &key);
        self.staged.push(Staged {
            id: Uuid::now_v7(),
            fingerprint: Fingerprint::new(&named, &request),
            path,
            key,
            flow: R::FLOW,
            request,
        });
        Ok(())
    }
}

/// Why a flow cannot be staged. A bug of the staging phase.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// The request cannot be stored.
    #[error("flow `{flow}` cannot be staged: its request cannot be stored: {reason}")]
    Unstorable {
        /// The staged flow.
        flow: &'static str,
        /// Why.
        reason: String,
    },
    /// Two runs would have one key.
    #[error("flow `{flow}` was staged twice with the suffix {suffix:?}; each run needs its own")]
    Twice {
        /// The staged flow.
        flow: &'static str,
        /// The suffix.
        suffix: String,
    },
}

impl PhaseFailure for StageError {
    fn disposition(&self) -> Disposition {
        Disposition::stop()
    }
}

impl Deref for Tx<'_> {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.connection
    }
}

impl DerefMut for Tx<'_> {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.connection
    }
}

/// The right to call the outside world, with the key under which the outside knows the call.
///
/// ```
/// # use idempotent_core::{DerivedKey, External};
/// # struct Gateway;
/// # impl Gateway { async fn charge(&self, key: &DerivedKey, cents: i64) {} }
/// async fn charge(call: &External<'_>, gateway: &Gateway, cents: i64) {
///     gateway.charge(call.derived_key(), cents).await;
/// }
/// ```
#[derive(Debug)]
pub struct External<'a> {
    key: &'a KeyInfo,
    derived: DerivedKey,
}

impl<'a> External<'a> {
    pub(crate) fn new(flow: &str, key: &'a KeyInfo, call: &str) -> Self {
        Self {
            key,
            derived: DerivedKey::new(flow, &key.user, &key.path, &key.key, call),
        }
    }

    /// The key that the phase works for.
    pub fn key(&self) -> &KeyInfo {
        self.key
    }

    /// The idempotency key for the outside: the same however often this phase runs.
    pub fn derived_key(&self) -> &DerivedKey {
        &self.derived
    }
}

/// A transaction that the engine has begun for a phase. Dropped unfinished, it is rolled back.
#[doc(hidden)]
#[expect(
    missing_debug_implementations,
    reason = "it holds staged requests, which stay out of logs"
)]
pub struct OpenTx {
    /// None only once `commit` or `roll_back`, which consume self, have taken it.
    connection: Option<PoolConnection<Postgres>>,
    key: Arc<KeyInfo>,
    phase: &'static str,
    staged: Vec<Staged>,
}

impl OpenTx {
    pub(crate) async fn begin(
        mut connection: PoolConnection<Postgres>,
        key: Arc<KeyInfo>,
        phase: &'static str,
        begin: impl sqlx::SqlSafeStr,
        within: Duration,
    ) -> Result<Self, sqlx::Error> {
        let begun = PgTransactionManager::begin(&mut connection, Some(begin.into_sql_str()));
        if let Err(error) = bounded(within, begun).await {
            connection.close_on_drop();
            return Err(error);
        }
        Ok(Self {
            connection: Some(connection),
            key,
            phase,
            staged: Vec::new(),
        })
    }

    /// Lends the transaction to the phase.
    #[expect(
        clippy::expect_used,
        reason = "the connection is taken only by fns that consume self"
    )]
    pub fn lend(&mut self) -> Tx<'_> {
        let connection = self.connection.as_mut();
        Tx {
            connection: connection.expect("the connection is there until the transaction ends"),
            key: Arc::clone(&self.key),
            phase: self.phase,
            staged: &mut self.staged,
        }
    }

    /// What the phase has staged.
    pub(crate) fn take_staged(&mut self) -> Vec<Staged> {
        std::mem::take(&mut self.staged)
    }

    #[expect(
        clippy::expect_used,
        reason = "the connection is taken only by fns that consume self"
    )]
    pub(crate) fn connection(&mut self) -> &mut PgConnection {
        self.connection
            .as_mut()
            .expect("the connection is there until the transaction ends")
    }

    /// Whether the phase left a savepoint open. A `COMMIT` would then only release that.
    pub(crate) fn holds_savepoint(&mut self) -> bool {
        PgTransactionManager::get_transaction_depth(self.connection()) > 1
    }

    /// Commits, and gives the connection back for the next phase. On an error the connection is
    /// not used again: its state is unknown.
    pub(crate) async fn commit(
        mut self,
        within: Duration,
    ) -> Result<Option<PoolConnection<Postgres>>, sqlx::Error> {
        let committed = PgTransactionManager::commit(self.connection());
        if let Err(error) = bounded(within, committed).await {
            self.discard();
            return Err(error);
        }
        Ok(self.connection.take())
    }

    /// Rolls back now rather than when the connection is next used, so that row locks are gone
    /// before somebody else is told to try.
    pub(crate) async fn roll_back(mut self, within: Duration) -> Option<PoolConnection<Postgres>> {
        while PgTransactionManager::get_transaction_depth(self.connection()) > 0 {
            let rolled_back = PgTransactionManager::rollback(self.connection());
            if let Err(error) = bounded(within, rolled_back).await {
                // The server rolls back when the connection goes.
                tracing::debug!(%error, "the rollback was not answered; closing the connection");
                self.discard();
                return None;
            }
        }
        self.connection.take()
    }

    fn discard(&mut self) {
        if let Some(mut connection) = self.connection.take() {
            connection.close_on_drop();
        }
    }
}

impl Drop for OpenTx {
    fn drop(&mut self) {
        if let Some(connection) = &mut self.connection {
            while PgTransactionManager::get_transaction_depth(connection) > 0 {
                PgTransactionManager::start_rollback(connection);
            }
        }
    }
}
