//! The statements that give somebody the right to run, and the ones that read where a key stands.

use std::time::{Duration, SystemTime};

use serde::Deserialize;
use serde_json::Value;
use sqlx::Row;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::types::Json;
use uuid::Uuid;

use super::{HISTORY, Holder, lock_timeout};
use crate::fingerprint::Fingerprint;
use crate::key::Key;

/// A lease that is over by the database's clock, or that lies so far ahead that the clock must have
/// been set back (twice `LONGEST_LEASE`).
macro_rules! lease_over {
    () => {
        "(lease_expires_at <= statement_timestamp() OR lease_expires_at > statement_timestamp() + interval '20 minutes')"
    };
}

pub(super) use lease_over;

/// The key's age; the call that was announced by whoever had the lease, its name and its age; and
/// whether an operator has said to call again.
macro_rules! age_and_intent {
    () => {
        "extract(epoch FROM statement_timestamp() - created_at)::float8, intent->>'call',
         extract(epoch FROM statement_timestamp() - (intent->>'at')::timestamptz)::float8, intent ? 'again'"
    };
}

/// The columns of a known key, in the order in which `known` reads them. What only an unfinished key
/// needs comes in one of them, so that a replay, which is read most often, computes and sends little.
macro_rules! known_columns {
    () => {
        concat!(
            "flow, request_hash, CASE WHEN request_hash <> $1 THEN request END, fence, ",
            "response_status, response_headers, response_body, ",
            "CASE WHEN finished_at IS NULL THEN jsonb_build_object('id', id, 'attempts', attempts, ",
            "'created_at', (extract(epoch FROM created_at) * 1000000)::bigint, 'point', recovery_point, 'state', state, ",
            "'holder', holder, 'is_stuck', stuck_at IS NOT NULL, 'is_held', holder IS NOT NULL AND NOT ", lease_over!(), ", ",
            "'lease_left', extract(epoch FROM lease_expires_at - statement_timestamp()), ",
            "'age', extract(epoch FROM statement_timestamp() - created_at), ",
            "'call', intent->>'call', 'call_again', intent ? 'again', ",
            "'call_age', extract(epoch FROM statement_timestamp() - (intent->>'at')::timestamptz)) END"
        )
    };
}

/// A key about to be seen for the first time.
pub(crate) struct Fresh<'a> {
    pub(crate) id: Uuid,
    pub(crate) key: &'a Key,
    pub(crate) flow: &'a str,
    pub(crate) fingerprint: &'a Fingerprint,
    pub(crate) request: &'a Value,
    pub(crate) holder: Holder,
    pub(crate) lease: Duration,
    /// Whether the claim must be on disk before the first phase runs: where that phase calls the
    /// outside. An atomic first phase's own commit flushes the claim with it.
    pub(crate) durable: bool,
}

/// What the database knows of a key.
pub(crate) enum Read {
    /// The key was fresh and is ours.
    Claimed { created_at: SystemTime },
    /// The key was known.
    Known(Box<Known>),
}

/// A known key, as it was read, without a lock.
pub(crate) struct Known {
    pub(crate) flow: String,
    pub(crate) request_hash: Vec<u8>,
    /// Only where the hash differs from the one asked with.
    pub(crate) other_request: Option<Value>,
    pub(crate) fence: i64,
    pub(crate) end: End,
}

/// Whether a known key has come to its end.
pub(crate) enum End {
    Finished(StoredResponse),
    NotYet(Box<Unfinished>),
}

/// Where an unfinished key stands.
pub(crate) struct Unfinished {
    pub(crate) id: Uuid,
    pub(crate) holder: Option<Holder>,
    /// Whether somebody has a lease that is not over.
    pub(crate) is_held: bool,
    pub(crate) lease_left: Duration,
    pub(crate) is_stuck: bool,
    /// What whoever has the lease, or gets it, goes on from.
    pub(crate) standing: Taken,
}

/// The answer of a finished key, column by column.
pub(crate) struct StoredResponse {
    pub(crate) status: i16,
    pub(crate) headers: Json<Vec<(String, String)>>,
    pub(crate) body: Vec<u8>,
}

/// An outside call that was announced, and whose outcome was not stored.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Intent {
    pub(crate) call: String,
    /// Since the first try, by the database's clock.
    pub(crate) age: Duration,
}

/// A key whose lease was just granted: everything the run needs.
pub(crate) struct Taken {
    pub(crate) recovery_point: String,
    pub(crate) state: Value,
    pub(crate) fence: i64,
    pub(crate) attempts: i32,
    pub(crate) created_at: SystemTime,
    /// Since the key was first seen, by the database's clock.
    pub(crate) age: Duration,
    pub(crate) intent: Option<Intent>,
    /// An operator knows that the call of the point did not happen.
    pub(crate) call_again: bool,
}

/// The settings are made before the row is inserted, and only then: they name no column, and come
/// after the condition that it is not known.
macro_rules! claim_or_read {
    ($asynchronous:literal) => {
        concat!(
            "WITH known AS MATERIALIZED (
                SELECT ",
            known_columns!(),
            " FROM idempotency_keys WHERE user_id = $3 AND path = $4 AND key = $5),
            fresh AS (
                INSERT INTO idempotency_keys (request_hash, id, user_id, path, key, flow, request, recovery_point, state,
                                              holder, fence, lease_expires_at, attempts, created_at)
                SELECT $1, $2, $3, $4, $5, $6, $7, 'started', '{}',
                       $8, 1, statement_timestamp() + make_interval(secs => $9), 1, statement_timestamp()
                WHERE NOT EXISTS (SELECT 1 FROM known)
                  AND set_config('lock_timeout', $10, true) IS NOT NULL ",
            $asynchronous,
            " ON CONFLICT DO NOTHING
                RETURNING id, created_at)
            SELECT true, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, created_at
            FROM fresh
            UNION ALL
            SELECT false, known.*, NULL FROM known"
        )
    };
}

/// Claims a fresh key or reads a known one, in one round trip.
///
/// A known key is answered from the table without a row lock, a transaction id or a byte of WAL:
/// `NOT EXISTS` keeps the insert from waiting for an open update of the row. `ON CONFLICT` names no
/// constraint, so that our own id claimed again after a lost acknowledgement is no error. None: a
/// concurrent insert or a reaped row fell between the two reads; ask again.
pub(crate) async fn claim_or_read(
    connection: &mut PgConnection,
    fresh: &Fresh<'_>,
) -> Result<Option<Read>, sqlx::Error> {
    let sql = if fresh.durable {
        claim_or_read!("")
    } else {
        claim_or_read!("AND set_config('synchronous_commit', 'off', true) IS NOT NULL")
    };
    let rows = sqlx::query(sql)
        .bind(fresh.fingerprint.as_bytes())
        .bind(fresh.id)
        .bind(&fresh.key.user)
        .bind(&fresh.key.path)
        .bind(&fresh.key.key)
        .bind(fresh.flow)
        .bind(fresh.request)
        .bind(fresh.holder.0)
        .bind(fresh.lease.as_secs_f64())
        .bind(lock_timeout(fresh.lease))
        // All rows: only then has the server said that the claim is committed.
        .fetch_all(connection)
        .await?;

    let Some(row) = rows.first() else {
        return Ok(None);
    };
    if row.try_get(0)? {
        let created_at = timestamp(row, 9)?;
        return Ok(Some(Read::Claimed { created_at }));
    }
    Ok(Some(Read::Known(Box::new(known(row, 1)?))))
}

/// Where a key stands. For one whose owner lost track: never to decide whether a commit happened,
/// which a plain read cannot tell while the commit is on its way.
pub(crate) async fn read_by_id(
    connection: &mut PgConnection,
    id: Uuid,
    user: &str,
    fingerprint: &[u8],
) -> Result<Option<Known>, sqlx::Error> {
    let sql = concat!(
        "SELECT ",
        known_columns!(),
        " FROM idempotency_keys WHERE id = $2 AND user_id = $3"
    );
    let row = sqlx::query(sql)
        .bind(fingerprint)
        .bind(id)
        .bind(user)
        .fetch_optional(connection)
        .await?;
    row.as_ref().map(|row| known(row, 0)).transpose()
}

/// Where the key with this name stands; none when it is not known. Without a lock and without a
/// write: for those who may not run it, or only want to know.
pub(crate) async fn read_by_key(
    connection: &mut PgConnection,
    (user, path, key): (&str, &str, &str),
    fingerprint: &[u8],
) -> Result<Option<Known>, sqlx::Error> {
    let sql = concat!(
        "SELECT ",
        known_columns!(),
        " FROM idempotency_keys WHERE user_id = $2 AND path = $3 AND key = $4"
    );
    let row = sqlx::query(sql)
        .bind(fingerprint)
        .bind(user)
        .bind(path)
        .bind(key)
        .fetch_optional(connection)
        .await?;
    row.as_ref().map(|row| known(row, 0)).transpose()
}

/// What is noted of an attempt that ended without a word: its process died, or was frozen for too
/// long, or could not reach the database.
macro_rules! note_lost_lease {
    () => {
        concat!(
            "history = CASE WHEN holder IS NULL THEN history ELSE ",
            history_with!("$6", "jsonb_build_object('event', 'lost', 'message', 'the lease ran out', 'attempt', attempts,
                'fence', fence, 'at', statement_timestamp())"),
            " END,
         last_error = CASE WHEN holder IS NULL THEN last_error ELSE jsonb_build_object('class', 'lost',
             'phase', recovery_point, 'message', 'the lease ran out', 'at', statement_timestamp(),
             'first_at', coalesce(last_error->'first_at', to_jsonb(statement_timestamp()))) END"
        )
    };
}

/// Takes a free key, or one whose lease is over: by compare-and-swap, so of many who try one gets
/// it. None: somebody else was first, or the flow ended.
pub(crate) async fn take_over(
    connection: &mut PgConnection,
    id: Uuid,
    user: &str,
    holder: Holder,
    lease: Duration,
) -> Result<Option<Taken>, sqlx::Error> {
    let rows = sqlx::query(concat!(
        "UPDATE idempotency_keys
         SET holder = $3, fence = fence + 1, attempts = attempts + 1,
             lease_expires_at = statement_timestamp() + make_interval(secs => $4), ",
        note_lost_lease!(),
        "
         FROM set_config('lock_timeout', $5, true)
         WHERE id = $1 AND user_id = $2 AND finished_at IS NULL AND stuck_at IS NULL
           AND (holder IS NULL OR ",
        lease_over!(),
        ")
         RETURNING recovery_point, state, fence, attempts, created_at, ",
        age_and_intent!()
    ))
    .bind(id)
    .bind(user)
    .bind(holder.0)
    .bind(lease.as_secs_f64())
    .bind(lock_timeout(lease))
    .bind(HISTORY)
    .fetch_all(connection)
    .await?;
    rows.first().map(taken).transpose()
}

/// Takes a key over from oneself, after a commit whose answer was lost. The update waits for the
/// old transaction, if that is still open somewhere, and so tells what became of it. None: the flow
/// finished, or the lease is lost.
pub(crate) async fn take_over_from_myself(
    connection: &mut PgConnection,
    id: Uuid,
    user: &str,
    mine: Holder,
    next: Holder,
    lease: Duration,
) -> Result<Option<Taken>, sqlx::Error> {
    let rows = sqlx::query(concat!(
        "UPDATE idempotency_keys
         SET holder = $4, fence = fence + 1, lease_expires_at = statement_timestamp() + make_interval(secs => $5)
         FROM set_config('lock_timeout', $6, true)
         WHERE id = $1 AND user_id = $2 AND holder = $3
         RETURNING recovery_point, state, fence, attempts, created_at, ",
        age_and_intent!()
    ))
    .bind(id)
    .bind(user)
    .bind(mine.0)
    .bind(next.0)
    .bind(lease.as_secs_f64())
    .bind(lock_timeout(lease))
    .fetch_all(connection)
    .await?;
    rows.first().map(taken).transpose()
}

fn taken(row: &PgRow) -> Result<Taken, sqlx::Error> {
    Ok(Taken {
        recovery_point: row.try_get(0)?,
        state: row.try_get(1)?,
        fence: row.try_get(2)?,
        attempts: row.try_get(3)?,
        created_at: timestamp(row, 4)?,
        age: seconds(row, 5)?,
        intent: intent(row, 6)?,
        call_again: row.try_get::<Option<bool>, _>(8)?.unwrap_or(false),
    })
}

fn intent(row: &PgRow, first: usize) -> Result<Option<Intent>, sqlx::Error> {
    let Some(call) = row.try_get(first)? else {
        return Ok(None);
    };
    let age = seconds(row, first + 1)?;
    Ok(Some(Intent { call, age }))
}

/// A span of time; none and what lies in the future are no time at all.
fn seconds(row: &PgRow, column: usize) -> Result<Duration, sqlx::Error> {
    let seconds: Option<f64> = row.try_get(column)?;
    Ok(Duration::try_from_secs_f64(seconds.unwrap_or_default()).unwrap_or_default())
}

fn known(row: &PgRow, first: usize) -> Result<Known, sqlx::Error> {
    let fence = row.try_get(first + 3)?;
    let end = match row.try_get::<Option<Json<UnfinishedRow>>, _>(first + 7)? {
        Some(Json(row)) => End::NotYet(Box::new(row.into_unfinished(fence)?)),
        None => End::Finished(StoredResponse {
            status: row.try_get(first + 4)?,
            headers: row.try_get(first + 5)?,
            body: row.try_get(first + 6)?,
        }),
    };
    Ok(Known {
        flow: row.try_get(first)?,
        request_hash: row.try_get(first + 1)?,
        other_request: row.try_get(first + 2)?,
        fence,
        end,
    })
}

/// What `known_columns` says of an unfinished key. Spans are in seconds, times in microseconds.
#[derive(Deserialize)]
struct UnfinishedRow {
    id: String,
    attempts: i32,
    created_at: u64,
    point: String,
    state: Value,
    holder: Option<String>,
    is_stuck: bool,
    is_held: bool,
    lease_left: Option<f64>,
    age: f64,
    call: Option<String>,
    call_again: Option<bool>,
    call_age: Option<f64>,
}

impl UnfinishedRow {
    fn into_unfinished(self, fence: i64) -> Result<Unfinished, sqlx::Error> {
        let uuid =
            |text: &str| Uuid::parse_str(text).map_err(|error| sqlx::Error::Decode(error.into()));
        let span = |seconds: Option<f64>| {
            Duration::try_from_secs_f64(seconds.unwrap_or_default()).unwrap_or_default()
        };
        let call_age = span(self.call_age);
        Ok(Unfinished {
            id: uuid(&self.id)?,
            holder: self.holder.as_deref().map(uuid).transpose()?.map(Holder),
            is_held: self.is_held,
            lease_left: span(self.lease_left),
            is_stuck: self.is_stuck,
            standing: Taken {
                recovery_point: self.point,
                state: self.state,
                fence,
                attempts: self.attempts,
                created_at: SystemTime::UNIX_EPOCH + Duration::from_micros(self.created_at),
                age: span(Some(self.age)),
                intent: self.call.map(|call| Intent {
                    call,
                    age: call_age,
                }),
                call_again: self.call_again.unwrap_or_default(),
            },
        })
    }
}

/// A `timestamptz` as PostgreSQL sends it: microseconds since the beginning of 2000. Read as the
/// number it is, so that neither side computes and no crate for dates is needed.
fn timestamp(row: &PgRow, column: usize) -> Result<SystemTime, sqlx::Error> {
    const BEGINNING_OF_2000: Duration = Duration::from_secs(946_684_800);
    let micros: i64 = row.try_get_unchecked(column)?;
    let micros = Duration::from_micros(u64::try_from(micros).unwrap_or(0));
    Ok(SystemTime::UNIX_EPOCH + BEGINNING_OF_2000 + micros)
}
