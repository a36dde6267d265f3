//! The ride in the form of the article that made recovery points known ("Implementing Stripe-like
//! Idempotency Keys in Postgres", the Rocket Rides example): a key's row is looked up under a lock
//! and inserted, and every phase is a transaction that locks the row, works, and moves the recovery
//! point. Three transactions and three synchronous commits.
//!
//! Read committed with `SELECT FOR UPDATE`, where the article has serializable transactions: that is
//! kinder to it under load. Kinder than the article, too: no connection is held during the call, and
//! the claim and the first phase share one, as in the other forms. Its audit records and staged jobs
//! are left out: the other forms have no such work.

use serde_json::json;
use sqlx::postgres::{PgConnection, PgPool};
use sqlx::types::Json;
use sqlx::{Connection, Row};
use uuid::Uuid;

use crate::contender::{Ask, Contender, Error, expect_answer};
use crate::ride::{INSERT_RIDE, PATH, Receipt, Ride, RideRequest, SET_CHARGED, charge};

pub(crate) const NAME: &str = "article";

pub(crate) fn flow(pool: PgPool) -> Contender {
    Contender::new(NAME, pool.clone(), move |ask| {
        let pool = pool.clone();
        async move {
            let status = ride(&pool, &ask, &RideRequest::sample()).await?;
            expect_answer(status, false, false)
        }
    })
}

/// The article's table, with a uuid where it counts: the ride refers to the key in all forms alike.
pub(crate) async fn create_table(pool: &PgPool) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(
        "CREATE TABLE article_keys (
            id              uuid PRIMARY KEY,
            created_at      timestamptz NOT NULL DEFAULT now(),
            idempotency_key text NOT NULL CHECK (char_length(idempotency_key) <= 100),
            last_run_at     timestamptz NOT NULL DEFAULT now(),
            locked_at       timestamptz DEFAULT now(),
            request_method  text NOT NULL CHECK (char_length(request_method) <= 10),
            request_params  jsonb NOT NULL,
            request_path    text NOT NULL CHECK (char_length(request_path) <= 100),
            response_code   int NULL,
            response_body   jsonb NULL,
            recovery_point  text NOT NULL CHECK (char_length(recovery_point) <= 50),
            user_id         text NOT NULL
        );
        CREATE UNIQUE INDEX article_keys_user_id_idempotency_key ON article_keys (user_id, idempotency_key);",
    )
    .execute(pool)
    .await?;
    Ok(())
}

async fn ride(pool: &PgPool, ask: &Ask, request: &RideRequest) -> Result<u16, Error> {
    let mut connection = pool.acquire().await?;
    let id = lock_or_insert_key(&mut connection, ask, request).await?;
    let ride = create_ride(&mut connection, id, ask, request).await?;
    drop(connection);
    let charge = charge(&format!("rocket-rides-atomic-{id}"), request).await;
    let mut connection = pool.acquire().await?;
    finish(&mut connection, id, &ride, charge.id).await
}

async fn lock_or_insert_key(
    connection: &mut PgConnection,
    ask: &Ask,
    request: &RideRequest,
) -> Result<Uuid, Error> {
    let mut tx = connection.begin().await?;
    let known = sqlx::query(
        "SELECT id, request_params, locked_at, recovery_point, response_code, response_body FROM article_keys
         WHERE user_id = $1 AND idempotency_key = $2 FOR UPDATE",
    )
    .bind(&ask.user)
    .bind(&ask.key)
    .fetch_optional(&mut *tx)
    .await?;
    if known.is_some() {
        return Err("a known key is no part of this measurement".into());
    }
    let id = Uuid::now_v7();
    sqlx::query(
        "INSERT INTO article_keys (id, idempotency_key, locked_at, recovery_point, request_method, request_params,
                                   request_path, user_id)
         VALUES ($1, $2, now(), 'started', 'POST', $3, $4, $5)",
    )
    .bind(id)
    .bind(&ask.key)
    .bind(Json(request))
    .bind(PATH)
    .bind(&ask.user)
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(id)
}

async fn create_ride(
    connection: &mut PgConnection,
    id: Uuid,
    ask: &Ask,
    request: &RideRequest,
) -> Result<Ride, Error> {
    let mut tx = connection.begin().await?;
    lock_key(&mut tx, id, "started").await?;
    let ride_id = sqlx::query_scalar(INSERT_RIDE)
        .bind(id)
        .bind(&ask.user)
        .bind(request.amount_cents)
        .bind(&request.currency)
        .fetch_one(&mut *tx)
        .await?;
    sqlx::query("UPDATE article_keys SET recovery_point = 'ride_created' WHERE id = $1")
        .bind(id)
        .execute(&mut *tx)
        .await?;
    tx.commit().await?;
    Ok(Ride { id: ride_id })
}

async fn finish(
    connection: &mut PgConnection,
    id: Uuid,
    ride: &Ride,
    charge_id: String,
) -> Result<u16, Error> {
    let status = 201_u16;
    let mut tx = connection.begin().await?;
    lock_key(&mut tx, id, "ride_created").await?;
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
    sqlx::query(
        "UPDATE article_keys SET recovery_point = 'finished', locked_at = NULL, response_code = $2, response_body = $3
         WHERE id = $1",
    )
    .bind(id)
    .bind(i32::from(status))
    .bind(json!({ "location": receipt.location(), "body": receipt }))
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(status)
}

async fn lock_key(connection: &mut PgConnection, id: Uuid, expected: &str) -> Result<(), Error> {
    let row =
        sqlx::query("SELECT recovery_point, locked_at FROM article_keys WHERE id = $1 FOR UPDATE")
            .bind(id)
            .fetch_one(connection)
            .await?;
    let recovery_point: &str = row.try_get(0)?;
    if recovery_point != expected {
        return Err(format!("the key stands at {recovery_point}, not at {expected}").into());
    }
    Ok(())
}
