//! The ride by hand, in the framework's own form and on its own table: as somebody would write it
//! with sqlx who knows the protocol and needs this one flow only. Nine round trips, two synchronous
//! commits; the claim and the first phase share a connection, none is held during the call.
//!
//! Every write is conditional on the holder and on the point it leaves, and nothing waits for a lock
//! for long: a form that leaves out what makes it correct would be no measure. What is left out is
//! what a framework adds: a task for each request, renewals, sharing, commits in doubt, takeovers.

use serde_json::json;
use sha2::{Digest, Sha256};
use sqlx::postgres::{PgConnection, PgPool, PgRow};
use sqlx::types::Json;
use sqlx::{Connection, Row};
use uuid::Uuid;

use crate::contender::{Ask, Contender, Error, expect_answer};
use crate::ride::{INSERT_RIDE, PATH, Receipt, Ride, RideRequest, SET_CHARGED, charge};

pub(crate) const NAME: &str = "by_hand";
pub(crate) const REPLAY: &str = "by_hand, replay";
pub(crate) const BARE_SELECT: &str = "bare SELECT";

const LEASE_SECONDS: f64 = 15.0;

pub(crate) fn flow(pool: PgPool) -> Contender {
    contender(NAME, pool, false)
}

pub(crate) fn replay(pool: PgPool) -> Contender {
    contender(REPLAY, pool, true)
}

fn contender(name: &'static str, pool: PgPool, replayed: bool) -> Contender {
    Contender::new(name, pool.clone(), move |ask| {
        let pool = pool.clone();
        async move {
            let answer = ride(&pool, &ask, &RideRequest::sample()).await?;
            expect_answer(answer.status, answer.replayed, replayed)
        }
    })
}

/// What a replay would cost if nothing had to be decided.
pub(crate) fn bare_select(pool: PgPool) -> Contender {
    Contender::new(BARE_SELECT, pool.clone(), move |ask| {
        let pool = pool.clone();
        async move {
            let row = sqlx::query(
                "SELECT response_status, response_headers, response_body FROM idempotency_keys
                 WHERE user_id = $1 AND path = $2 AND key = $3",
            )
            .bind(&ask.user)
            .bind(PATH)
            .bind(&ask.key)
            .fetch_one(&pool)
            .await?;
            expect_answer(Stored::of(&row, 0)?.status, true, true)
        }
    })
}

struct Answer {
    status: u16,
    replayed: bool,
}

async fn ride(pool: &PgPool, ask: &Ask, request: &RideRequest) -> Result<Answer, Error> {
    let lease = Lease {
        id: Uuid::now_v7(),
        holder: Uuid::new_v4(),
    };
    let mut connection = pool.acquire().await?;
    match claim_or_read(&mut connection, &lease, ask, request).await? {
        Claim::Granted => {}
        Claim::Finished(stored) => {
            return Ok(Answer {
                status: stored.status,
                replayed: true,
            });
        }
    }

    let ride = create_ride(&mut connection, &lease, ask, request).await?;
    drop(connection);
    let charge = charge(&derived_key(ask), request).await;
    let mut connection = pool.acquire().await?;
    let status = finish(&mut connection, &lease, ask, &ride, charge.id).await?;
    Ok(Answer {
        status,
        replayed: false,
    })
}

struct Lease {
    id: Uuid,
    holder: Uuid,
}

enum Claim {
    Granted,
    Finished(Stored),
}

/// The stored answer, decoded as far as a server needs it to send it again.
struct Stored {
    status: u16,
    _headers: Vec<(String, String)>,
    _body: Vec<u8>,
}

impl Stored {
    fn of(row: &PgRow, first: usize) -> Result<Self, Error> {
        let Json(headers) = row.try_get(first + 1)?;
        let status = u16::try_from(row.try_get::<i16, _>(first)?)?;
        Ok(Self {
            status,
            _headers: headers,
            _body: row.try_get(first + 2)?,
        })
    }
}

async fn claim_or_read(
    connection: &mut PgConnection,
    lease: &Lease,
    ask: &Ask,
    request: &RideRequest,
) -> Result<Claim, Error> {
    let hash = fingerprint(request)?;
    let rows = sqlx::query(
        "WITH fresh AS (
            INSERT INTO idempotency_keys (id, user_id, path, key, flow, request_hash, request, recovery_point,
                                          holder, fence, lease_expires_at, attempts, created_at)
            SELECT $1, $2, $3, $4, 'ride', $5, $6, 'started',
                   $7, 1, statement_timestamp() + make_interval(secs => $8), 1, statement_timestamp()
            FROM set_config('synchronous_commit', 'off', true) AS commit, set_config('lock_timeout', '1500ms', true) AS patience
            WHERE NOT EXISTS (SELECT 1 FROM idempotency_keys WHERE user_id = $2 AND path = $3 AND key = $4)
            ON CONFLICT DO NOTHING
            RETURNING id)
        SELECT true, NULL, false, false, false, NULL, NULL, NULL FROM fresh
        UNION ALL
        SELECT false, request_hash, finished_at IS NOT NULL, stuck_at IS NOT NULL,
               holder IS NOT NULL AND lease_expires_at > statement_timestamp(),
               response_status, response_headers, response_body
        FROM idempotency_keys WHERE user_id = $2 AND path = $3 AND key = $4",
    )
    .bind(lease.id)
    .bind(&ask.user)
    .bind(PATH)
    .bind(&ask.key)
    .bind(&hash[..])
    .bind(Json(request))
    .bind(lease.holder)
    .bind(LEASE_SECONDS)
    .fetch_all(connection)
    .await?;

    let row = rows.first().ok_or("the key came and went: claim again")?;
    if row.try_get(0)? {
        return Ok(Claim::Granted);
    }
    if row.try_get::<&[u8], _>(1)? != hash {
        return Err("409: another request has this key".into());
    }
    if !row.try_get::<bool, _>(2)? {
        let (stuck, held): (bool, bool) = (row.try_get(3)?, row.try_get(4)?);
        return Err(format!(
            "no part of this measurement: stuck: {stuck}, held: {held}, or a takeover"
        )
        .into());
    }
    Ok(Claim::Finished(Stored::of(row, 5)?))
}

const BEGIN: &str = "BEGIN; SET LOCAL statement_timeout = 15000; \
     SET LOCAL idle_in_transaction_session_timeout = 15000; SET LOCAL lock_timeout = 1500";

async fn create_ride(
    connection: &mut PgConnection,
    lease: &Lease,
    ask: &Ask,
    request: &RideRequest,
) -> Result<Ride, Error> {
    let mut tx = connection.begin_with(BEGIN).await?;
    let id = sqlx::query_scalar(INSERT_RIDE)
        .bind(lease.id)
        .bind(&ask.user)
        .bind(request.amount_cents)
        .bind(&request.currency)
        .fetch_one(&mut *tx)
        .await?;
    let ride = Ride { id };
    let moved = sqlx::query(
        "UPDATE idempotency_keys
         SET recovery_point = 'ride_created', state = $4, attempts = 0,
             lease_expires_at = statement_timestamp() + make_interval(secs => $5)
         WHERE id = $1 AND user_id = $2 AND holder = $3 AND recovery_point = 'started'",
    )
    .bind(lease.id)
    .bind(&ask.user)
    .bind(lease.holder)
    .bind(json!({ "ride_created": &ride }))
    .bind(LEASE_SECONDS)
    .execute(&mut *tx)
    .await?;
    if moved.rows_affected() != 1 {
        return Err("the lease is lost".into());
    }
    tx.commit().await?;
    Ok(ride)
}

async fn finish(
    connection: &mut PgConnection,
    lease: &Lease,
    ask: &Ask,
    ride: &Ride,
    charge_id: String,
) -> Result<u16, Error> {
    let status = 201_u16;
    let mut tx = connection.begin_with(BEGIN).await?;
    let amount = sqlx::query_scalar(SET_CHARGED)
        .bind(ride.id)
        .bind(&charge_id)
        .fetch_one(&mut *tx)
        .await?;
    let receipt = Receipt {
        ride_id: ride.id,
        amount,
        charge_id,
    };
    let headers = [
        ["content-type", "application/json"],
        ["location", &receipt.location()],
    ];
    let finished = sqlx::query(
        "UPDATE idempotency_keys
         SET recovery_point = 'finished', state = '{}', holder = NULL, lease_expires_at = NULL,
             response_status = $4, response_headers = $5, response_body = $6, finished_at = statement_timestamp()
         WHERE id = $1 AND user_id = $2 AND holder = $3 AND recovery_point = 'ride_created'",
    )
    .bind(lease.id)
    .bind(&ask.user)
    .bind(lease.holder)
    .bind(i16::try_from(status)?)
    .bind(Json(headers))
    .bind(serde_json::to_vec(&receipt)?)
    .execute(&mut *tx)
    .await?;
    if finished.rows_affected() != 1 {
        return Err("the lease is lost".into());
    }
    tx.commit().await?;
    Ok(status)
}

/// A struct's members always come in one order, so its JSON is canonical enough for one flow.
fn fingerprint(request: &RideRequest) -> Result<[u8; 33], serde_json::Error> {
    let hash = Sha256::new_with_prefix("POST /api/rides\n")
        .chain_update(serde_json::to_vec(request)?)
        .finalize();
    let mut versioned = [1; 33];
    versioned[1..].copy_from_slice(&hash);
    Ok(versioned)
}

fn derived_key(ask: &Ask) -> String {
    let hash = Sha256::new_with_prefix("ride/charge\n")
        .chain_update(ask.user.as_bytes())
        .chain_update([0])
        .chain_update(ask.key.as_bytes())
        .finalize();
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}
