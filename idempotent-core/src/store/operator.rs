//! The statements of an operator: where keys stand, and the three changes that a person may make.
//!
//! An operator comes from outside the protocol, so each change is conditional on the row being what
//! was read just before: the same holder (or none), the same fence, and a state that allows the
//! change, which the update judges again on the row that it locks. Whoever moved the row in between
//! wins, and the operator's update moves nothing. The reads take no locks.
//!
//! A read that knows only an id names no user; on a distributed PostgreSQL it asks every node. The
//! changes name the user that it found.

use std::time::{Duration, SystemTime};

use serde_json::{Map, Value};
use sqlx::Row;
use sqlx::postgres::{PgArguments, PgConnection, PgRow, Postgres};
use sqlx::query::Query;
use sqlx::types::Json;
use uuid::Uuid;

use super::HISTORY;
use super::Holder;
use super::StoredResponse;
use super::claim::lease_over;
use crate::operator::{
    Event, KeyCount, KeyDetails, KeyFilter, KeyState, KeySummary, LastError, ReplySummary,
};
use crate::reply::StoredReply;

/// How long an operator's change waits for somebody who has the row locked. It never makes others
/// wait: it holds the row for its own statement only.
const LOCK_TIMEOUT: &str = "500ms";

/// Where a key stands, by the same rules by which the completer chooses. The parameter is the
/// longest pause of a flow in seconds: a due time further ahead than twice that counts as due.
macro_rules! state {
    ($longest_pause:literal) => {
        concat!(
            "(CASE WHEN finished_at IS NOT NULL THEN 'finished' WHEN stuck_at IS NOT NULL THEN 'stuck' ",
            "WHEN holder IS NOT NULL AND NOT ", lease_over!(), " THEN 'running' ",
            "WHEN next_attempt_at > statement_timestamp() ",
            "AND next_attempt_at <= statement_timestamp() + 2 * make_interval(secs => ", $longest_pause, ") THEN 'waiting' ",
            "ELSE 'due' END)"
        )
    };
}

/// The columns of a summary, in the order in which `summary` reads them. $1 is the longest pause.
macro_rules! summary_columns {
    () => {
        concat!(
            "id, flow, user_id, path, recovery_point, ", state!("$1"), ", attempts, ",
            "(extract(epoch FROM lease_expires_at - statement_timestamp()) * 1000)::bigint, ",
            "(extract(epoch FROM next_attempt_at - statement_timestamp()) * 1000)::bigint, ",
            "last_error->>'message', response_status, (extract(epoch FROM created_at) * 1000000)::bigint, ",
            "(extract(epoch FROM statement_timestamp() - created_at) * 1000)::bigint"
        )
    };
}

/// One more entry of the bounded history. $5 is the longest pause, $7 who did it.
macro_rules! appended {
    ($event:literal, $more:literal) => {
        concat!(
            "history = ",
            history_with!("$9", "jsonb_strip_nulls(jsonb_build_object("),
            "'event', '", $event, "', 'by', $7::text, 'was', ", state!("$5"), ", ",
            "'point', recovery_point, 'attempt', attempts, 'fence', fence, 'at', statement_timestamp()", $more, "))"
        )
    };
}

/// What every change is conditional on: the row as it was read.
macro_rules! as_read {
    () => {
        concat!(
            "WHERE id = $1 AND user_id = $2 AND holder IS NOT DISTINCT FROM $3 AND fence = $4 AND ",
            state!("$5"),
            " = $8 RETURNING ",
            state!("$5")
        )
    };
}

/// Where a key stood when a change was about to be made.
pub(crate) struct Standing {
    pub(crate) id: Uuid,
    pub(crate) user: String,
    pub(crate) holder: Option<Holder>,
    pub(crate) fence: i64,
    pub(crate) state: KeyState,
}

/// What an operator's change is given.
#[derive(Clone, Copy)]
pub(crate) struct Change<'a> {
    pub(crate) standing: &'a Standing,
    pub(crate) by: Option<&'a str>,
    pub(crate) longest_pause: Duration,
}

/// Lists keys, newest first: by the primary key, whose ids grow with time. A filter that few keys
/// pass reads the whole table.
pub(crate) async fn list_keys(
    connection: &mut PgConnection,
    filter: &KeyFilter,
    longest_pause: Duration,
) -> Result<Vec<KeySummary>, sqlx::Error> {
    let rows = sqlx::query(concat!(
        "SELECT ",
        summary_columns!(),
        " FROM idempotency_keys
         WHERE ($2::text IS NULL OR flow = $2) AND ($3::text IS NULL OR recovery_point = $3)
           AND ($4::text IS NULL OR user_id = $4) AND ($5::text IS NULL OR ",
        state!("$1"),
        " = $5) AND ($6::float8 IS NULL OR created_at <= statement_timestamp() - make_interval(secs => $6))
         ORDER BY id DESC LIMIT $7"
    ))
    .bind(longest_pause.as_secs_f64())
    .bind(filter.flow.as_deref())
    .bind(filter.point.as_deref())
    .bind(filter.user.as_deref())
    .bind(filter.state.map(KeyState::as_str))
    .bind(filter.older_than.map(|age| age.as_secs_f64()))
    .bind(i64::from(filter.limit))
    .fetch_all(connection)
    .await?;
    rows.iter().map(summary).collect()
}

/// The id of a client's key.
pub(crate) async fn find_key(
    connection: &mut PgConnection,
    user: &str,
    path: &str,
    key: &str,
) -> Result<Option<Uuid>, sqlx::Error> {
    sqlx::query_scalar(
        "SELECT id FROM idempotency_keys WHERE user_id = $1 AND path = $2 AND key = $3",
    )
    .bind(user)
    .bind(path)
    .bind(key)
    .fetch_optional(connection)
    .await
}

/// What is known of a key, without what the client sent or was answered.
pub(crate) async fn read_details(
    connection: &mut PgConnection,
    id: Uuid,
    longest_pause: Duration,
) -> Result<Option<KeyDetails>, sqlx::Error> {
    let row = sqlx::query(concat!(
        "SELECT ",
        summary_columns!(),
        ", key, holder, fence, parent_id, intent, last_error,
         (extract(epoch FROM (last_error->>'at')::timestamptz) * 1000000)::bigint,
         (extract(epoch FROM (last_error->>'first_at')::timestamptz) * 1000000)::bigint,
         (SELECT jsonb_agg(jsonb_build_array((extract(epoch FROM (entry->>'at')::timestamptz) * 1000000)::bigint, entry - 'at') ORDER BY place)
          FROM jsonb_array_elements(history) WITH ORDINALITY AS entries (entry, place)),
         (extract(epoch FROM stuck_at) * 1000000)::bigint, (extract(epoch FROM finished_at) * 1000000)::bigint,
         octet_length(response_body)::bigint
         FROM idempotency_keys WHERE id = $2"
    ))
    .bind(longest_pause.as_secs_f64())
    .bind(id)
    .fetch_optional(connection)
    .await?;
    row.as_ref().map(details).transpose()
}

/// What the client sent, what the phases stored, and what was answered.
pub(crate) async fn read_contents(
    connection: &mut PgConnection,
    id: Uuid,
) -> Result<Option<(Value, Value, Option<StoredReply>)>, sqlx::Error> {
    let row = sqlx::query(
        "SELECT request, state, response_status, response_headers, response_body FROM idempotency_keys WHERE id = $1",
    )
    .bind(id)
    .fetch_optional(connection)
    .await?;
    let Some(row) = row else { return Ok(None) };
    let reply = match row.try_get(2)? {
        Some(status) => StoredReply::from_stored(StoredResponse {
            status,
            headers: row.try_get(3)?,
            body: row.try_get(4)?,
        }),
        None => None,
    };
    Ok(Some((row.try_get(0)?, row.try_get(1)?, reply)))
}

/// How many keys stand where, and how old the oldest of them is. Reads the whole table.
pub(crate) async fn count_keys(
    connection: &mut PgConnection,
    longest_pause: Duration,
) -> Result<Vec<KeyCount>, sqlx::Error> {
    let rows = sqlx::query(concat!(
        "SELECT flow, recovery_point, state, count(*), (extract(epoch FROM statement_timestamp() - min(created_at)) * 1000)::bigint
         FROM (SELECT flow, recovery_point, created_at, ",
        state!("$1"),
        " AS state FROM idempotency_keys) AS standing
         GROUP BY flow, recovery_point, state ORDER BY flow, recovery_point, state"
    ))
    .bind(longest_pause.as_secs_f64())
    .fetch_all(connection)
    .await?;
    rows.iter()
        .map(|row| {
            Ok(KeyCount {
                flow: row.try_get(0)?,
                point: row.try_get(1)?,
                state: key_state(row, 2)?,
                keys: count(row.try_get(3)?),
                oldest: millis(row.try_get(4)?),
            })
        })
        .collect()
}

/// Where a key stands, for the change that follows.
pub(crate) async fn read_standing(
    connection: &mut PgConnection,
    id: Uuid,
    longest_pause: Duration,
) -> Result<Option<Standing>, sqlx::Error> {
    let row = sqlx::query(concat!(
        "SELECT user_id, holder, fence, ",
        state!("$1"),
        " FROM idempotency_keys WHERE id = $2"
    ))
    .bind(longest_pause.as_secs_f64())
    .bind(id)
    .fetch_optional(connection)
    .await?;
    row.map(|row| {
        Ok(Standing {
            id,
            user: row.try_get(0)?,
            holder: row.try_get::<Option<Uuid>, _>(1)?.map(Holder),
            fence: row.try_get(2)?,
            state: key_state(&row, 3)?,
        })
    })
    .transpose()
}

/// Makes a key due at once, with all its attempts before it; where `call_again`, also the call that
/// was begun and has no known outcome.
///
/// A holder whose lease is over keeps its name on the row until somebody takes the key, as always:
/// if it wakes first with the outcome of its call, that outcome is worth having. When this point
/// first failed is forgotten, or the next "pending" would park the flow again.
///
/// None: the row is not as it was read. Else the state in which it is now.
pub(crate) async fn retry_key(
    connection: &mut PgConnection,
    change: Change<'_>,
    call_again: bool,
) -> Result<Option<KeyState>, sqlx::Error> {
    let statement = sqlx::query(concat!(
        "UPDATE idempotency_keys
         SET attempts = 0, stuck_at = NULL, next_attempt_at = statement_timestamp(), last_error = last_error - 'first_at',
             intent = CASE WHEN $10 THEN '{\"again\": true}' ELSE intent END, ",
        appended!("operator retry", ", 'call_again', $10::boolean, 'intent', CASE WHEN $10 THEN intent END"),
        " FROM set_config('lock_timeout', $6, true) ",
        as_read!()
    ));
    let rows = bound(statement, change).bind(call_again);
    moved(&rows.fetch_all(connection).await?)
}

/// Finishes a key by hand, with a reply that is stored like one of the flow's own: from now on every
/// retry gets it. Whoever held a lease that is over is fenced off. What the flow last said of its
/// failure stays readable.
///
/// None: the row is not as it was read. Else the state in which it is now.
pub(crate) async fn resolve_key(
    connection: &mut PgConnection,
    change: Change<'_>,
    reply: &StoredReply,
) -> Result<Option<KeyState>, sqlx::Error> {
    let statement = sqlx::query(concat!(
        "UPDATE idempotency_keys
         SET recovery_point = 'finished', state = '{}', holder = NULL, lease_expires_at = NULL, fence = fence + 1, intent = NULL,
             stuck_at = NULL, response_status = $10, response_headers = $11, response_body = $12, finished_at = statement_timestamp(), ",
        appended!("operator resolve", ", 'status', $10::smallint, 'intent', intent"),
        " FROM set_config('lock_timeout', $6, true) ",
        as_read!()
    ));
    let rows = bound(statement, change)
        .bind(i16::try_from(reply.status().as_u16()).unwrap_or(i16::MAX))
        .bind(reply.stored_headers())
        .bind(&reply.body()[..]);
    moved(&rows.fetch_all(connection).await?)
}

/// Takes a lease away from its holder, who finds out by its next write: that is conditional on the
/// holder, and moves nothing. The key is due at once, and the attempt is not counted.
///
/// None: the row is not as it was read. Else the state in which it is now.
pub(crate) async fn release_key(
    connection: &mut PgConnection,
    change: Change<'_>,
) -> Result<Option<KeyState>, sqlx::Error> {
    let statement = sqlx::query(concat!(
        "UPDATE idempotency_keys
         SET holder = NULL, lease_expires_at = NULL, fence = fence + 1, attempts = greatest(attempts - 1, 0),
             next_attempt_at = statement_timestamp(), ",
        appended!("operator release", ", 'holder', holder"),
        " FROM set_config('lock_timeout', $6, true) ",
        as_read!()
    ));
    moved(&bound(statement, change).fetch_all(connection).await?)
}

type Statement<'q> = Query<'q, Postgres, PgArguments>;

/// What all changes are given, from $1 to $9.
fn bound<'q>(statement: Statement<'q>, change: Change<'q>) -> Statement<'q> {
    let standing = change.standing;
    statement
        .bind(standing.id)
        .bind(&standing.user)
        .bind(standing.holder.map(|holder| holder.0))
        .bind(standing.fence)
        .bind(change.longest_pause.as_secs_f64())
        .bind(LOCK_TIMEOUT)
        .bind(change.by)
        .bind(standing.state.as_str())
        .bind(HISTORY)
}

fn moved(rows: &[PgRow]) -> Result<Option<KeyState>, sqlx::Error> {
    rows.first().map(|row| key_state(row, 0)).transpose()
}

fn summary(row: &PgRow) -> Result<KeySummary, sqlx::Error> {
    let state = key_state(row, 5)?;
    let left =
        |column: usize| Ok::<_, sqlx::Error>(row.try_get::<Option<_>, _>(column)?.map(millis));
    Ok(KeySummary {
        id: row.try_get(0)?,
        flow: row.try_get(1)?,
        user: row.try_get(2)?,
        path: row.try_get(3)?,
        point: row.try_get(4)?,
        state,
        attempts: u32::try_from(row.try_get::<i32, _>(6)?).unwrap_or(0),
        lease_left: left(7)?.filter(|_| state == KeyState::Running),
        next_attempt_in: left(8)?.filter(|_| state == KeyState::Waiting),
        error: row.try_get(9)?,
        status: status(row.try_get(10)?),
        created_at: micros(row.try_get(11)?),
        age: millis(row.try_get(12)?),
    })
}

fn details(row: &PgRow) -> Result<KeyDetails, sqlx::Error> {
    let summary = summary(row)?;
    let at = |column: usize| Ok::<_, sqlx::Error>(row.try_get::<Option<_>, _>(column)?.map(micros));
    let (stuck_at, finished_at) = (at(22)?, at(23)?);

    let mut timeline = vec![Event::new(summary.created_at, "created")];
    let history: Option<Json<Vec<Entry>>> = row.try_get(21)?;
    timeline.extend(history.into_iter().flat_map(|history| history.0).map(event));
    timeline.extend(stuck_at.map(|at| Event::new(at, "stuck")));
    timeline.extend(finished_at.map(|at| Event::new(at, "finished")));

    let last_error = row.try_get::<Option<Value>, _>(18)?.map(|error| {
        let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        Ok::<_, sqlx::Error>(LastError {
            class: text("class"),
            phase: text("phase"),
            message: text("message"),
            at: at(19)?,
            first_at: at(20)?,
        })
    });
    let bytes: Option<i64> = row.try_get(24)?;
    Ok(KeyDetails {
        key: row.try_get(13)?,
        holder: row.try_get(14)?,
        fence: row.try_get(15)?,
        parent: row.try_get(16)?,
        intent: row.try_get(17)?,
        last_error: last_error.transpose()?,
        timeline,
        stuck_at,
        finished_at,
        reply: summary.status.map(|status| ReplySummary {
            status,
            bytes: count(bytes.unwrap_or(0)),
        }),
        summary,
    })
}

/// An entry of the history: when, and the rest of it.
type Entry = (Option<i64>, Map<String, Value>);

fn event((at, mut more): Entry) -> Event {
    let event = match more.remove("event") {
        Some(Value::String(event)) => event,
        _ => "unknown".to_owned(),
    };
    Event {
        at: micros(at.unwrap_or(0)),
        event,
        more,
    }
}

fn key_state(row: &PgRow, column: usize) -> Result<KeyState, sqlx::Error> {
    let name: &str = row.try_get(column)?;
    name.parse()
        .map_err(|error| sqlx::Error::Decode(Box::new(error)))
}

fn status(stored: Option<i16>) -> Option<u16> {
    stored.and_then(|status| u16::try_from(status).ok())
}

fn count(counted: i64) -> u64 {
    u64::try_from(counted).unwrap_or(0)
}

fn millis(millis: i64) -> Duration {
    Duration::from_millis(u64::try_from(millis).unwrap_or(0))
}

fn micros(since_epoch: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_micros(u64::try_from(since_epoch).unwrap_or(0))
}
