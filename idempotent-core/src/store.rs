//! Every SQL statement about a key, one fn each, with why it is safe. Nothing here knows flows or
//! decides anything: a statement either did its work under its own conditions or moved no row.
//!
//! Rules that hold for all of them:
//!
//! - every write of a key's row is conditional on the holder (`AND holder = $n`), save the two that
//!   make a holder: the insert of a fresh key and the takeover of a free one; an operator's is
//!   conditional on the holder that it read, or on there being none;
//! - time is the database's, `statement_timestamp()`;
//! - no statement waits for a lock longer than a tenth of a lease: `begin` says so for a phase's
//!   transaction; elsewhere a `set_config` of the statement itself does, which is evaluated before the
//!   row is locked or inserted and ends with the statement's transaction;
//! - every statement names the user as well as the id, so that a distributed PostgreSQL can route it.

/// A key's history with one more entry, the oldest making room for it. The most entries are a
/// parameter of the statement, bound to `HISTORY`.
macro_rules! history_with {
    ($most:literal, $entry:expr) => {
        concat!(
            "CASE WHEN jsonb_array_length(history) >= ",
            $most,
            " THEN history - 0 ELSE coalesce(history, '[]') END || ",
            $entry
        )
    };
}

mod claim;
mod operator;
mod progress;
mod waiting;
mod workers;

use std::io;
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, PgPool, Postgres};
use uuid::Uuid;

use crate::graph::Isolation;

pub(crate) use claim::{
    End, Fresh, Intent, Known, Read, StoredResponse, Taken, Unfinished as UnfinishedKey,
    claim_or_read, read_by_id, read_by_key, take_over, take_over_from_myself,
};
pub(crate) use operator::{
    Change, Standing, count_keys, find_key, list_keys, read_contents, read_details, read_standing,
    release_key, resolve_key, retry_key,
};
pub(crate) use progress::{
    Advance, Limits, Parting, Position, Renewals, Staged, Within, announce, begin, checkpoint,
    finish, is_own_transaction, lock, release, renew,
};
pub(crate) use waiting::{Awaited, announce_ends, list_ended};
pub(crate) use workers::{
    Expired, Found, Unfinished, count_expired, list_due, list_unfinished, park_if_exhausted, reap,
    reap_unfinished,
};

/// The right to run: a fresh UUID per attempt. A process that lost its lease and a process that
/// got it never share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Holder(pub(crate) Uuid);

impl Holder {
    pub(crate) fn fresh() -> Self {
        Self(Uuid::new_v4())
    }
}

/// How many entries the history of a key keeps.
const HISTORY: i32 = 20;

/// No lease is longer than this. One that lies further ahead than twice as much counts as over: the
/// database's clock was set back.
pub(crate) const LONGEST_LEASE: Duration = Duration::from_secs(600);

/// How long a statement may wait for a lock: a tenth of the lease.
pub(crate) fn lock_timeout(lease: Duration) -> String {
    format!("{}ms", (lease.as_millis() / 10).max(10))
}

/// How long anybody waits for a connection, also where the pool would have them wait longer: a
/// client is better told to come back than kept.
const ACQUIRE_WITHIN: Duration = Duration::from_secs(5);

/// Takes a connection from the pool. Its error is the pool's: exhausted, closed, unreachable.
pub(crate) async fn acquire(pool: &PgPool) -> Result<PoolConnection<Postgres>, sqlx::Error> {
    tokio::time::timeout(ACQUIRE_WITHIN, pool.acquire())
        .await
        .unwrap_or(Err(sqlx::Error::PoolTimedOut))
}

/// What `synchronous_commit` is by default in this database.
pub(crate) async fn synchronous_commit(
    connection: &mut PgConnection,
) -> Result<String, sqlx::Error> {
    sqlx::query_scalar("SELECT current_setting('synchronous_commit')")
        .fetch_one(connection)
        .await
}

/// The framework's table as this connection sees it, by its oid; none where it does not.
pub(crate) async fn table(connection: &mut PgConnection) -> Result<Option<i64>, sqlx::Error> {
    sqlx::query_scalar("SELECT to_regclass('idempotency_keys')::oid::bigint")
        .fetch_one(connection)
        .await
}

/// The isolation of a transaction that does not name one.
pub(crate) async fn default_isolation(
    connection: &mut PgConnection,
) -> Result<Option<Isolation>, sqlx::Error> {
    let name: String =
        sqlx::query_scalar("SELECT current_setting('default_transaction_isolation')")
            .fetch_one(connection)
            .await?;
    Ok(match name.as_str() {
        "serializable" => Some(Isolation::Serializable),
        "repeatable read" => Some(Isolation::RepeatableRead),
        _ => None,
    })
}

/// Waits for the answer to one of the engine's own statements, for a bounded time. A database that
/// has gone silent looks like a lost connection, and is treated as one: the caller closes the
/// connection and, where it matters, finds out what became of the statement.
pub(crate) async fn bounded<T>(
    within: Duration,
    statement: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    tokio::time::timeout(within, statement)
        .await
        .unwrap_or_else(|_| Err(sqlx::Error::Io(io::ErrorKind::TimedOut.into())))
}

/// How long an answer may take: well beyond the longest wait for a lock.
pub(crate) fn answer_time(lease: Duration) -> Duration {
    (lease / 2).max(Duration::from_secs(1))
}

/// Whether a statement failed because somebody held a lock for too long.
pub(crate) fn is_lock_timeout(error: &sqlx::Error) -> bool {
    sqlstate(error).as_deref() == Some("55P03")
}

/// Whether the database asks for the statement or the transaction to be run again.
pub(crate) fn is_conflict(error: &sqlx::Error) -> bool {
    matches!(sqlstate(error).as_deref(), Some("40001" | "40P01"))
}

/// Whether the statement was refused for good by the database, so that it certainly did nothing.
/// Everything else (a lost connection, a server going away) leaves open whether it committed.
///
/// At COMMIT only classes 23 and 40 say that nothing was committed; 40003 is the exception in its
/// class, it means just that this is not known.
pub(crate) fn commit_was_refused(error: &sqlx::Error) -> bool {
    sqlstate(error)
        .is_some_and(|code| code != "40003" && (code.starts_with("23") || code.starts_with("40")))
}

/// Whether a single statement failed in a way that says nothing about the statement: the connection
/// is gone or the server is going away. It may be sent again, on another connection.
pub(crate) fn is_connection_lost(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::BeginFailed => true,
        _ => sqlstate(error).is_some_and(|code| {
            code.starts_with("08")
                || matches!(
                    code.as_str(),
                    "57P01" | "57P02" | "57P03" | "40003" | "25P03"
                )
        }),
    }
}

fn sqlstate(error: &sqlx::Error) -> Option<String> {
    error
        .as_database_error()?
        .code()
        .map(|code| code.into_owned())
}
