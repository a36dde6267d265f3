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

use super::{HISTORY, Holder, lock_timeout};
use crate::fingerprint::Fingerprint;
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

/// An update of an attempt's row in its phase's transaction, where `begin` has set the lock timeout,
/// and which must still be the transaction that `begin` began.
macro_rules! in_phase {
    ($update:expr) => {
        concat!(
            $update,
            " WHERE id = $1 AND user_id = $2 AND holder = $3 AND recovery_point = $4
                AND current_setting('idempotent.holder', true) = $3::text"
        )
    };
}

/// The same, as a transaction of its own.
macro_rules! alone {
    ($update:expr) => {
        concat!(
            $update,
            " FROM set_config('lock_timeout', $8, true)
              WHERE id = $1 AND user_id = $2 AND holder = $3 AND recovery_point = $4"
        )
    };
}

/// Makes of an update of a key the statement that also inserts the keys that its phase staged: they
/// exist if and only if the update moved the row, and cost no round trip. A staged key that is there
/// already is kept as it is.
macro_rules! with_staged {
    ($update:expr) => {
        concat!(
            "WITH moved AS (",
            $update,
            " RETURNING id, user_id),
             staged AS (
                INSERT INTO idempotency_keys (id, user_id, path, key, flow, request_hash, request,
                                              recovery_point, state, fence, attempts, parent_id, created_at)
                SELECT child.id, moved.user_id, child.path, child.key, child.flow, child.request_hash, child.request,
                       'started', '{}', 0, 0, moved.id, statement_timestamp()
                FROM moved, unnest($8::uuid[], $9::text[], $10::text[], $11::text[], $12::bytea[], $13::jsonb[])
                         AS child (id, path, key, flow, request_hash, request)
                ON CONFLICT DO NOTHING
                RETURNING 1)
             SELECT (SELECT count(*) FROM moved), (SELECT count(*) FROM staged)"
        )
    };
}

/// Where a write of an attempt is made.
#[derive(Clone, Copy)]
pub(crate) enum Within<'a> {
    /// In the transaction of a phase, which staged these.
    Phase(&'a [Staged]),
    /// In a transaction of its own.
    Itself,
}

macro_rules! checkpoint {
    () => {
        "UPDATE idempotency_keys
         SET recovery_point = $5, state = $6, attempts = 0, last_error = NULL, intent = NULL,
             lease_expires_at = statement_timestamp() + make_interval(secs => $7)"
    };
}

/// Moves the flow to its next point. The lease is renewed on the way: progress was made.
///
/// False: the lease is lost, the phase was done before, or the phase ended the transaction itself.
pub(crate) async fn checkpoint(
    connection: &mut PgConnection,
    position: Position<'_>,
    advance: Advance<'_>,
    lease: Duration,
    within: Within<'_>,
) -> Result<bool, sqlx::Error> {
    let sql = match within {
        Within::Itself => alone!(checkpoint!()),
        Within::Phase([]) => in_phase!(checkpoint!()),
        Within::Phase(_) => with_staged!(in_phase!(checkpoint!())),
    };
    let update = sqlx::query(sql)
        .bind(position.id)
        .bind(position.user)
        .bind(position.holder.0)
        .bind(position.stored_point)
        .bind(advance.point)
        .bind(advance.state)
        .bind(lease.as_secs_f64());
    moved(connection, update, lease, within).await
}

macro_rules! finish {
    () => {
        "UPDATE idempotency_keys
         SET recovery_point = 'finished', state = '{}', holder = NULL, lease_expires_at = NULL, last_error = NULL,
             intent = NULL, response_status = $5, response_headers = $6, response_body = $7,
             finished_at = statement_timestamp()"
    };
}

/// Stores the reply, marks the flow finished and lets the lease go, all in one update.
pub(crate) async fn finish(
    connection: &mut PgConnection,
    position: Position<'_>,
    reply: &StoredReply,
    lease: Duration,
    within: Within<'_>,
) -> Result<bool, sqlx::Error> {
    let sql = match within {
        Within::Itself => alone!(finish!()),
        Within::Phase([]) => in_phase!(finish!()),
        Within::Phase(_) => with_staged!(in_phase!(finish!())),
    };
    let update = sqlx::query(sql)
        .bind(position.id)
        .bind(position.user)
        .bind(position.holder.0)
        .bind(position.stored_point)
        .bind(i16::try_from(reply.status().as_u16()).unwrap_or(i16::MAX))
        .bind(reply.stored_headers())
        .bind(&reply.body()[..]);
    moved(connection, update, lease, within).await
}

/// A key of another flow, to be inserted together with the move of its parent.
#[derive(Clone)]
pub(crate) struct Staged {
    pub(crate) id: Uuid,
    pub(crate) path: String,
    pub(crate) key: String,
    pub(crate) flow: &'static str,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) request: Value,
}

type Update<'q> = sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>;

async fn moved(
    connection: &mut PgConnection,
    update: Update<'_>,
    lease: Duration,
    within: Within<'_>,
) -> Result<bool, sqlx::Error> {
    let staged = match within {
        Within::Itself => {
            let updated = update.bind(lock_timeout(lease)).execute(connection).await?;
            return Ok(updated.rows_affected() == 1);
        }
        Within::Phase([]) => return Ok(update.execute(connection).await?.rows_affected() == 1),
        Within::Phase(staged) => staged,
    };
    let hashes = staged.iter().map(|child| child.fingerprint.as_bytes());
    let row = update
        .bind(staged.iter().map(|child| child.id).collect::<Vec<_>>())
        .bind(
            staged
                .iter()
                .map(|child| &child.path[..])
                .collect::<Vec<_>>(),
        )
        .bind(
            staged
                .iter()
                .map(|child| &child.key[..])
                .collect::<Vec<_>>(),
        )
        .bind(staged.iter().map(|child| child.flow).collect::<Vec<_>>())
        .bind(hashes.collect::<Vec<_>>())
        .bind(
            staged
                .iter()
                .map(|child| child.request.clone())
                .collect::<Vec<_>>(),
        )
        .fetch_one(connection)
        .await?;
    let (moved, inserted): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
    if moved == 1 && usize::try_from(inserted).ok() != Some(staged.len()) {
        tracing::warn!(
            staged = staged.len(),
            inserted,
            "a staged key was there already; it is kept as it is"
        );
    }
    Ok(moved == 1)
}

/// Announces an outside call that may not be repeated, before it is made: whoever finds this later,
/// and no result, knows that the call may have happened.
pub(crate) async fn announce(
    connection: &mut PgConnection,
    position: Position<'_>,
    call: &str,
    lease: Duration,
) -> Result<bool, sqlx::Error> {
    let announced = sqlx::query(
        "UPDATE idempotency_keys
         SET intent = jsonb_build_object('call', $5::text, 'holder', $3, 'at', statement_timestamp())
         FROM set_config('lock_timeout', $6, true)
         WHERE id = $1 AND user_id = $2 AND holder = $3 AND recovery_point = $4",
    )
    .bind(position.id)
    .bind(position.user)
    .bind(position.holder.0)
    .bind(position.stored_point)
    .bind(call)
    .bind(lock_timeout(lease))
    .execute(connection)
    .await?;
    Ok(announced.rows_affected() == 1)
}

/// Locks the row for the transaction of a phase that works on a snapshot: a renewal or a takeover
/// after the snapshot would make its checkpoint fail for certain. False: the lease is lost.
pub(crate) async fn lock(
    connection: &mut PgConnection,
    position: Position<'_>,
) -> Result<bool, sqlx::Error> {
    let locked = sqlx::query(
        "SELECT FROM idempotency_keys
         WHERE id = $1 AND user_id = $2 AND holder = $3 AND recovery_point = $4 FOR NO KEY UPDATE",
    )
    .bind(position.id)
    .bind(position.user)
    .bind(position.holder.0)
    .bind(position.stored_point)
    .execute(connection)
    .await?;
    Ok(locked.rows_affected() == 1)
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

/// Why an attempt parts with its lease, and what follows from it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parting<'a> {
    /// `retry`, `wait`, `stop`; `park`: stuck at once; or `release`: handed on without a failure.
    pub(crate) class: &'static str,
    pub(crate) phase: &'a str,
    /// Storable: without NUL, and not endless.
    pub(crate) message: &'a str,
    /// The least time until the completer tries again.
    pub(crate) not_before: Duration,
    /// From 0.5 to 1, so that flows that failed together do not come back together.
    pub(crate) jitter: f64,
    pub(crate) limits: &'a Limits,
}

impl<'a> Parting<'a> {
    /// The flow is handed on to whoever can go on with it.
    pub(crate) fn without_failure(limits: &'a Limits) -> Self {
        Self {
            class: "release",
            phase: "",
            message: "handed on",
            not_before: Duration::ZERO,
            jitter: 1.0,
            limits,
        }
    }
}

/// When a failing flow is parked as stuck, and how its retries are spread until then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Attempts that stopped (a bug, a panic) at one point.
    pub(crate) max_attempts: u32,
    /// Attempts that asked for a retry at one point; only together with `patience`.
    pub(crate) retry_attempts: u32,
    /// How long a point may keep failing, counted from its first failure.
    pub(crate) patience: Duration,
    /// How long an outside may say "pending".
    pub(crate) max_wait: Duration,
    /// The first pause of the completer, doubled with each attempt.
    pub(crate) backoff: Duration,
    /// The longest pause of the completer.
    pub(crate) longest_backoff: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_attempts: 5,
            retry_attempts: 20,
            patience: Duration::from_secs(24 * 3600),
            max_wait: Duration::from_secs(7 * 24 * 3600),
            backoff: Duration::from_secs(1),
            longest_backoff: Duration::from_secs(600),
        }
    }
}

/// When this point first failed: kept from failure to failure, and begun anew with each point.
macro_rules! first_at {
    () => {
        "CASE WHEN recovery_point = $5 AND last_error ? 'first_at' THEN last_error->>'first_at'
              ELSE to_json(statement_timestamp())#>>'{}' END"
    };
}

/// Lets the lease go after a failure, so that the next attempt need not wait for it to run out, and
/// parks the flow as stuck where its attempts are used up: in one update, so that no crash between
/// the two makes a poisoned flow immortal. The result of an external phase that was not stored yet
/// is stored here (`advance`).
///
/// The attempt that came to a point and failed there is the first at it, although it was granted before.
///
/// None: the lease was not ours any more. Else whether the flow is stuck.
pub(crate) async fn release(
    connection: &mut PgConnection,
    position: Position<'_>,
    advance: Advance<'_>,
    parting: Parting<'_>,
    lease: Duration,
) -> Result<Option<bool>, sqlx::Error> {
    let limits = parting.limits;
    let rows = sqlx::query(concat!(
        "UPDATE idempotency_keys
         SET holder = NULL, lease_expires_at = NULL, recovery_point = $5, state = $6,
             attempts = CASE WHEN recovery_point <> $5 THEN 1 WHEN $7 IN ('wait', 'release') THEN greatest(attempts - 1, 0) ELSE greatest(attempts, 1) END,
             last_error = CASE WHEN $7 = 'release' THEN last_error ELSE jsonb_build_object('class', $7::text, 'phase', $8::text, 'message', $9::text,
                 'at', statement_timestamp(), 'first_at', ", first_at!(), ") END,
             history = ", history_with!("$10", "jsonb_build_object('event', $7::text, 'phase', $8::text,
                     'message', left($9::text, 200), 'attempt', greatest(attempts, 1), 'fence', fence,
                     'at', statement_timestamp())"), ",
             next_attempt_at = statement_timestamp() + make_interval(secs => greatest($11,
                 CASE WHEN $7 IN ('wait', 'release') THEN 0 ELSE least($12, $13 * 2 ^ least(attempts, 30)) * $14 END)),
             stuck_at = CASE WHEN CASE $7::text
                 WHEN 'release' THEN false
                 WHEN 'park' THEN true
                 WHEN 'stop' THEN greatest(attempts, 1) >= $15
                 WHEN 'wait' THEN (", first_at!(), ")::timestamptz + make_interval(secs => $16) < statement_timestamp()
                 ELSE attempts >= $17 AND (", first_at!(), ")::timestamptz + make_interval(secs => $18) < statement_timestamp()
                 END THEN statement_timestamp() END
         FROM set_config('lock_timeout', $19, true)
         WHERE id = $1 AND user_id = $2 AND holder = $3 AND recovery_point = $4
         RETURNING stuck_at IS NOT NULL"
    ))
    .bind(position.id)
    .bind(position.user)
    .bind(position.holder.0)
    .bind(position.stored_point)
    .bind(advance.point)
    .bind(advance.state)
    .bind(parting.class)
    .bind(parting.phase)
    .bind(parting.message)
    .bind(HISTORY)
    .bind(parting.not_before.as_secs_f64())
    .bind(limits.longest_backoff.as_secs_f64())
    .bind(limits.backoff.as_secs_f64())
    .bind(parting.jitter)
    .bind(i64::from(limits.max_attempts))
    .bind(limits.max_wait.as_secs_f64())
    .bind(i64::from(limits.retry_attempts))
    .bind(limits.patience.as_secs_f64())
    .bind(lock_timeout(lease))
    .fetch_all(connection)
    .await?;
    rows.first().map(|row| row.try_get(0)).transpose()
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
