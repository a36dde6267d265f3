//! Every SQL statement about rides, one fn each. Those of the flow are one statement a phase: a
//! round trip is what a phase costs.

use idempotent_core::Tx;
use serde::Serialize;
use sqlx::Row;
use sqlx::postgres::{PgPool, PgRow};
use uuid::Uuid;

use crate::flow::RideRequest;

/// A ride, as its owner sees it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RideView {
    ride_id: Uuid,
    amount: i64,
    currency: String,
    charge_id: Option<String>,
    status: String,
}

/// Inserts the ride of the key that the phase works for. A second one for the same key is refused
/// by a unique constraint, whatever went wrong before.
pub(crate) async fn insert(
    tx: &mut Tx<'_>,
    id: Uuid,
    request: &RideRequest,
) -> Result<(), sqlx::Error> {
    let (key_id, user) = (tx.key().id(), tx.key().user().to_owned());
    sqlx::query(
        "INSERT INTO rides (id, key_id, user_id, amount_cents, currency, origin_lat, origin_lon, target_lat, target_lon)
         VALUES ($1, $2, $3::uuid, $4, $5, $6, $7, $8, $9)",
    )
    .bind(id)
    .bind(key_id)
    .bind(user)
    .bind(request.amount_cents)
    .bind(&request.currency)
    .bind(request.origin.map(|place| place.lat))
    .bind(request.origin.map(|place| place.lon))
    .bind(request.target.map(|place| place.lat))
    .bind(request.target.map(|place| place.lon))
    .execute(&mut **tx)
    .await?;
    Ok(())
}

/// Marks the ride as charged, and says what it cost.
pub(crate) async fn set_charged(
    tx: &mut Tx<'_>,
    id: Uuid,
    charge_id: &str,
) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar(
        "UPDATE rides SET status = 'charged', charge_id = $2 WHERE id = $1 AND status = 'created' RETURNING amount_cents",
    )
    .bind(id)
    .bind(charge_id)
    .fetch_one(&mut **tx)
    .await
}

/// Marks the ride as declined.
pub(crate) async fn set_declined(tx: &mut Tx<'_>, id: Uuid) -> Result<(), sqlx::Error> {
    sqlx::query("UPDATE rides SET status = 'declined' WHERE id = $1 AND status = 'created'")
        .bind(id)
        .execute(&mut **tx)
        .await?;
    Ok(())
}

/// One ride of a user.
pub(crate) async fn find(
    pool: &PgPool,
    user: Uuid,
    id: Uuid,
) -> Result<Option<RideView>, sqlx::Error> {
    let row = sqlx::query(
        "SELECT id, amount_cents, currency, charge_id, status FROM rides WHERE id = $1 AND user_id = $2",
    )
    .bind(id)
    .bind(user)
    .fetch_optional(pool)
    .await?;
    row.as_ref().map(view).transpose()
}

/// The latest rides of a user, newest first.
pub(crate) async fn list(
    pool: &PgPool,
    user: Uuid,
    limit: i64,
) -> Result<Vec<RideView>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT id, amount_cents, currency, charge_id, status FROM rides
         WHERE user_id = $1 ORDER BY created_at DESC, id LIMIT $2",
    )
    .bind(user)
    .bind(limit)
    .fetch_all(pool)
    .await?;
    rows.iter().map(view).collect()
}

fn view(row: &PgRow) -> Result<RideView, sqlx::Error> {
    Ok(RideView {
        ride_id: row.try_get(0)?,
        amount: row.try_get(1)?,
        currency: row.try_get(2)?,
        charge_id: row.try_get(3)?,
        status: row.try_get(4)?,
    })
}
