//! The statements of an attempt that has the lease: begin, checkpoint, finish, release, renew. Each
//! moves the row only while the holder is still the same and the flow still stands where the
//! attempt believes it to stand. The second condition matters as much as the first: without it, a
//! phase whose commit was in doubt could run twice under one holder.

use std::time::Duration;

use serde_json::Value;
use sqlx::AssertSqlSafe;
use sqlx::postgres::PgConnection;
use sqlx::{Row, SqlSafeStr};
use uuid::Uuid;

use super::{Holder, lock_timeout};
use crate::graph::Isolation;
use crate::reply::StoredReply;

/// Which row, under which holder, at which point: what every write of an attempt is conditional on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Position<'a> {
    pub(crate) id: Uuid,
    pub(crate) user: &'a str,
    pub(crate) holder: Holder,
    /// The point at which the row stands, which is the one the writing phase leaves, or the one
    /// before an external phase whose result was not stored yet.
    pub(crate) stored_point: &'a str,
}

/// Where the row moves to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Advance<'a> {
    pub(crate) point: &'a str,
    pub(crate) state: &'a Value,
}

/// The statement that begins an atomic phase: one simple query. A frozen process keeps its row
/// locks until the server ends its transaction, so the server is told when to do that.
///
/// A simple query takes no parameters. What is written into it are numbers and a UUID of ours.
/// `idempotent.holder` lives as long as this transaction, and tells the checkpoint whether it still
/// is in it.
pub(crate) fn begin(
    isolation: Option<Isolation>,
    timeout: Duration,
    lease: Duration,
    holder: Holder,
) -> impl SqlSafeStr {
    let isolation = isolation
        .map(|level| format!(" ISOLATION LEVEL {}", level.as_sql()))
        .unwrap_or_default();
    let timeout = timeout.as_millis().max(1);
    AssertSqlSafe(format!(
        "BEGIN{isolation}; SET LOCAL statement_timeout = {timeout}; \
         SET LOCAL idle_in_transaction_session_timeout = {timeout}; \
         SET LOCAL lock_timeout = '{}'; SET LOCAL idempotent.holder = '{}'",
        lock_timeout(lease),
        holder.0
    ))
}

/// Moves the flow to its next point, in the transaction that `begin` began, or in one of its own
/// where `alone`. The lease is renewed on the way: progress was made.
///
/// False: the lease is lost, the phase was done before, or the phase ended the transaction itself.
pub(crate) async fn checkpoint(
    connection: &mut PgConnection,
    position: Position<'_>,
    advance: Advance<'_>,
    lease: Duration,
    alone: bool,
) -> Result<bool, sqlx::Error> {
    let moved = sqlx::query(
        "UPDATE idempotency_keys
         SET recovery_point = $5, state = $6, attempts = 0, last_error = NULL,
             lease_expires_at = statement_timestamp() + make_interval(secs => $7)
         FROM set_config('lock_timeout', $8, true)
         WHERE id = $1 AND user_id = $2 AND holder = $3 AND recovery_point = $4
           AND ($9 OR current_setting('idempotent.holder', true) = $3::text)",
    )
    .bind(position.id)
    .bind(position.user)
    .bind(position.holder.0)
    .bind(position.stored_point)
    .bind(advance.point)
    .bind(advance.state)
    .bind(lease.as_secs_f64())
    .bind(lock_timeout(lease))
    .bind(alone)
    .execute(connection)
    .await?;
    Ok(moved.rows_affected() == 1)
}

/// Stores the reply, marks the flow finished and lets the lease go, all in one update; in the
/// transaction of the last phase, or in one of its own where `alone`.
pub(crate) async fn finish(
    connection: &mut PgConnection,
    position: Position<'_>,
    reply: &StoredReply,
    lease: Duration,
    alone: bool,
) -> Result<bool, sqlx::Error> {
    let finished = sqlx::query(
        "UPDATE idempotency_keys
         SET recovery_point = 'finished', state = '{}', holder = NULL, lease_expires_at = NULL, last_error = NULL,
             response_status = $5, response_headers = $6, response_body = $7, finished_at = statement_timestamp()
         FROM set_config('lock_timeout', $8, true)
         WHERE id = $1 AND user_id = $2 AND holder = $3 AND recovery_point = $4
           AND ($9 OR current_setting('idempotent.holder', true) = $3::text)",
    )
    .bind(position.id)
    .bind(position.user)
    .bind(position.holder.0)
    .bind(position.stored_point)
    .bind(i16::try_from(reply.status().as_u16()).unwrap_or(i16::MAX))
    .bind(reply.stored_headers())
    .bind(&reply.body()[..])
    .bind(lock_timeout(lease))
    .bind(alone)
    .execute(connection)
    .await?;
    Ok(finished.rows_affected() == 1)
}

/// Whether the connection still is in the transaction that `begin` began for this holder.
pub(crate) async fn is_own_transaction(
    connection: &mut PgConnection,
    holder: Holder,
) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar(
        "SELECT coalesce(current_setting('idempotent.holder', true) = $1::text, false)",
    )
    .bind(holder.0)
    .fetch_one(connection)
    .await
}

/// Lets the lease go after a failure, so that the next attempt need not wait for it to run out. The
/// result of an external phase that was not stored yet is stored here (`advance`).
pub(crate) async fn release(
    connection: &mut PgConnection,
    position: Position<'_>,
    advance: Advance<'_>,
    last_error: &Value,
    lease: Duration,
) -> Result<bool, sqlx::Error> {
    let released = sqlx::query(
        "UPDATE idempotency_keys
         SET holder = NULL, lease_expires_at = NULL, recovery_point = $5, state = $6, last_error = $7,
             attempts = CASE WHEN recovery_point = $5 THEN attempts ELSE 0 END
         FROM set_config('lock_timeout', $8, true)
         WHERE id = $1 AND user_id = $2 AND holder = $3 AND recovery_point = $4",
    )
    .bind(position.id)
    .bind(position.user)
    .bind(position.holder.0)
    .bind(position.stored_point)
    .bind(advance.point)
    .bind(advance.state)
    .bind(last_error)
    .bind(lock_timeout(lease))
    .execute(connection)
    .await?;
    Ok(released.rows_affected() == 1)
}

/// Renews the leases of a process in one statement, and names the holders that still had theirs.
/// The others have lost it. Asynchronous: a renewal lost in a crash only makes a lease shorter.
pub(crate) async fn renew(
    connection: &mut PgConnection,
    leases: &Renewals,
    lock_timeout: &str,
) -> Result<Vec<Holder>, sqlx::Error> {
    let rows = sqlx::query(
        "UPDATE idempotency_keys AS stored
         SET lease_expires_at = statement_timestamp() + make_interval(secs => mine.lease)
         FROM set_config('lock_timeout', $5, true) AS lock_timeout, set_config('synchronous_commit', 'off', true) AS synchronous_commit,
              unnest($1::uuid[], $2::text[], $3::uuid[], $4::float8[]) AS mine (id, user_id, holder, lease)
         WHERE stored.id = mine.id AND stored.user_id = mine.user_id AND stored.holder = mine.holder
         RETURNING stored.holder",
    )
    .bind(&leases.ids)
    .bind(&leases.users)
    .bind(&leases.holders)
    .bind(&leases.seconds)
    .bind(lock_timeout)
    .fetch_all(connection)
    .await?;
    rows.iter().map(|row| row.try_get(0).map(Holder)).collect()
}

/// The leases to renew, column by column.
#[derive(Debug, Default)]
pub(crate) struct Renewals {
    ids: Vec<Uuid>,
    users: Vec<String>,
    holders: Vec<Uuid>,
    seconds: Vec<f64>,
}

impl Renewals {
    pub(crate) fn push(&mut self, id: Uuid, user: String, holder: Holder, lease: Duration) {
        self.ids.push(id);
        self.users.push(user);
        self.holders.push(holder.0);
        self.seconds.push(lease.as_secs_f64());
    }
}
