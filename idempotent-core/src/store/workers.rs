//! The statements of the workers: what nobody runs and is due, and what is past its retention.

use std::time::Duration;

use serde_json::Value;
use sqlx::Row;
use sqlx::postgres::PgConnection;
use uuid::Uuid;

use super::claim::lease_over;
use super::{Holder, Limits, lock_timeout};

/// A key that nobody runs, as the completer found it.
#[derive(Clone)]
pub(crate) struct Found {
    pub(crate) id: Uuid,
    pub(crate) user: String,
    pub(crate) path: String,
    pub(crate) key: String,
    pub(crate) flow: String,
    pub(crate) request_hash: Vec<u8>,
    pub(crate) request: Value,
    pub(crate) recovery_point: String,
    pub(crate) state: Value,
}

/// Lists keys that nobody runs and that are due, the longest due first. It locks nothing: each is
/// then claimed by the same compare-and-swap as a request's, so that any number of processes may
/// list the same ones, also on a distributed PostgreSQL.
///
/// A due time that lies further ahead than `longest_pause` doubled counts as due: the clock was set
/// back.
pub(crate) async fn list_due(
    connection: &mut PgConnection,
    flows: &[&str],
    passed_over: &[Uuid],
    longest_pause: Duration,
    limit: i64,
) -> Result<Vec<Found>, sqlx::Error> {
    let rows = sqlx::query(concat!(
        "SELECT id, user_id, path, key, flow, request_hash, request, recovery_point, state
         FROM idempotency_keys
         WHERE finished_at IS NULL AND stuck_at IS NULL AND flow = ANY($1) AND id <> ALL($2)
           AND (holder IS NULL OR ",
        lease_over!(),
        ") AND (next_attempt_at IS NULL OR next_attempt_at <= statement_timestamp()
                OR next_attempt_at > statement_timestamp() + 2 * make_interval(secs => $3))
         ORDER BY coalesce(next_attempt_at, created_at)
         LIMIT $4"
    ))
    .bind(flows)
    .bind(passed_over)
    .bind(longest_pause.as_secs_f64())
    .bind(limit)
    .fetch_all(connection)
    .await?;
    rows.iter()
        .map(|row| {
            Ok(Found {
                id: row.try_get(0)?,
                user: row.try_get(1)?,
                path: row.try_get(2)?,
                key: row.try_get(3)?,
                flow: row.try_get(4)?,
                request_hash: row.try_get(5)?,
                request: row.try_get(6)?,
                recovery_point: row.try_get(7)?,
                state: row.try_get(8)?,
            })
        })
        .collect()
}

/// An unfinished key, as a new version looks at it.
pub(crate) struct Unfinished {
    pub(crate) flow: String,
    pub(crate) recovery_point: String,
    pub(crate) state: Value,
    pub(crate) request: Value,
}

/// Lists unfinished keys, the oldest first, for the look at them when a process starts.
pub(crate) async fn list_unfinished(
    connection: &mut PgConnection,
    flows: &[&str],
    limit: i64,
) -> Result<Vec<Unfinished>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT flow, recovery_point, state, request FROM idempotency_keys
         WHERE finished_at IS NULL AND stuck_at IS NULL AND flow = ANY($1)
         ORDER BY created_at LIMIT $2",
    )
    .bind(flows)
    .bind(limit)
    .fetch_all(connection)
    .await?;
    let unfinished = rows.iter().map(|row| {
        let (flow, point) = (row.try_get(0)?, row.try_get(1)?);
        Ok(Unfinished::new(
            flow,
            point,
            row.try_get(2)?,
            row.try_get(3)?,
        ))
    });
    unfinished.collect()
}

/// Parks a flow whose attempts end without a word, because the process dies in them, when both its
/// attempts and its time are used up. By the attempt that has just taken it, before it runs.
pub(crate) async fn park_if_exhausted(
    connection: &mut PgConnection,
    id: Uuid,
    user: &str,
    holder: Holder,
    limits: &Limits,
    lease: Duration,
) -> Result<bool, sqlx::Error> {
    let parked = sqlx::query(
        "UPDATE idempotency_keys
         SET holder = NULL, lease_expires_at = NULL, stuck_at = statement_timestamp()
         FROM set_config('lock_timeout', $6, true)
         WHERE id = $1 AND user_id = $2 AND holder = $3 AND attempts > $4
           AND (last_error->>'first_at')::timestamptz + make_interval(secs => $5) < statement_timestamp()",
    )
    .bind(id)
    .bind(user)
    .bind(holder.0)
    .bind(i64::from(limits.retry_attempts))
    .bind(limits.patience.as_secs_f64())
    .bind(lock_timeout(lease))
    .execute(connection)
    .await?;
    Ok(parked.rows_affected() == 1)
}

/// Which finished keys are past their retention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expired<'a> {
    pub(crate) flow: &'a str,
    pub(crate) retention: Duration,
    /// Only ids before this one: ids grow with the time at which they were made, so this narrows the
    /// scan to the old end of the primary key. None: all.
    pub(crate) before: Option<Uuid>,
}

/// Deletes one batch of finished keys past their retention, in a transaction of its own. Time is
/// the database's: `finished_at` decides, the id only narrows the scan. Rows that somebody has
/// locked, another reaper or an operator, are passed over; and so are staged keys as long as the key
/// that staged them is there: its phase, repeated, would stage them again.
pub(crate) async fn reap(
    connection: &mut PgConnection,
    expired: Expired<'_>,
    batch: i64,
) -> Result<u64, sqlx::Error> {
    let deleted = sqlx::query(
        "DELETE FROM idempotency_keys WHERE id = ANY(ARRAY(
             SELECT id FROM idempotency_keys AS old
             WHERE flow = $1 AND finished_at < statement_timestamp() - make_interval(secs => $2)
               AND ($3::uuid IS NULL OR id < $3)
               AND (parent_id IS NULL OR NOT EXISTS (
                    SELECT 1 FROM idempotency_keys AS parent
                    WHERE parent.id = old.parent_id AND parent.user_id = old.user_id))
             ORDER BY id LIMIT $4 FOR UPDATE SKIP LOCKED))
         AND finished_at IS NOT NULL",
    )
    .bind(expired.flow)
    .bind(expired.retention.as_secs_f64())
    .bind(expired.before)
    .bind(batch)
    .execute(connection)
    .await?;
    Ok(deleted.rows_affected())
}

/// Deletes one batch of unfinished keys of handlers without phases, past their retention: nobody goes
/// on with those. One whose attempt still has its lease is left.
pub(crate) async fn reap_unfinished(
    connection: &mut PgConnection,
    guard: &str,
    retention: Duration,
    batch: i64,
) -> Result<u64, sqlx::Error> {
    let deleted = sqlx::query(concat!(
        "DELETE FROM idempotency_keys WHERE id = ANY(ARRAY(
             SELECT id FROM idempotency_keys
             WHERE flow = $1 AND finished_at IS NULL AND created_at < statement_timestamp() - make_interval(secs => $2)
               AND (holder IS NULL OR ",
        lease_over!(),
        ") ORDER BY created_at LIMIT $3 FOR UPDATE SKIP LOCKED))
         AND finished_at IS NULL AND (holder IS NULL OR ",
        lease_over!(),
        ")"
    ))
    .bind(guard)
    .bind(retention.as_secs_f64())
    .bind(batch)
    .execute(connection)
    .await?;
    Ok(deleted.rows_affected())
}

/// How many keys a reaper would delete.
pub(crate) async fn count_expired(
    connection: &mut PgConnection,
    expired: Expired<'_>,
) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar(
        "SELECT count(*) FROM idempotency_keys AS old
         WHERE flow = $1 AND finished_at < statement_timestamp() - make_interval(secs => $2)
           AND ($3::uuid IS NULL OR id < $3)
           AND (parent_id IS NULL OR NOT EXISTS (
                SELECT 1 FROM idempotency_keys AS parent
                WHERE parent.id = old.parent_id AND parent.user_id = old.user_id))",
    )
    .bind(expired.flow)
    .bind(expired.retention.as_secs_f64())
    .bind(expired.before)
    .fetch_one(connection)
    .await
}
