//! What all forms have in common: the request, the ride's table, and an outside that answers at once.

use idempotent_core::Reply;
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgPool;

pub(crate) const PATH: &str = "/api/rides";

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RideRequest {
    pub(crate) amount_cents: i64,
    pub(crate) currency: String,
    pub(crate) payment_source: String,
}

impl RideRequest {
    /// What every client asks for.
    pub(crate) fn sample() -> Self {
        Self {
            amount_cents: 2000,
            currency: "usd".to_owned(),
            payment_source: "tok_visa".to_owned(),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ride {
    pub(crate) id: i64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Charge {
    pub(crate) id: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Receipt {
    pub(crate) ride_id: i64,
    pub(crate) amount: i64,
    pub(crate) charge_id: String,
}

impl Receipt {
    pub(crate) fn location(&self) -> String {
        format!("/api/rides/{}", self.ride_id)
    }

    pub(crate) fn into_reply(self) -> Reply<Self> {
        let location = self.location();
        Reply::created(self).header("location", location)
    }
}

/// The outside: it says yes at once, and does nothing.
pub(crate) async fn charge(derived_key: &str, _request: &RideRequest) -> Charge {
    Charge {
        id: format!("ch_{}", &derived_key[..24]),
    }
}

pub(crate) async fn create_table(pool: &PgPool) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(
        "CREATE TABLE rides (
            id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            key_id       uuid NOT NULL UNIQUE,
            user_id      text NOT NULL,
            amount_cents bigint NOT NULL,
            currency     text NOT NULL,
            status       text NOT NULL DEFAULT 'created',
            charge_id    text,
            created_at   timestamptz NOT NULL DEFAULT now()
        )",
    )
    .execute(pool)
    .await?;
    Ok(())
}

/// Phase one's business work, the same statement in every form.
pub(crate) const INSERT_RIDE: &str = "INSERT INTO rides (key_id, user_id, amount_cents, currency) VALUES ($1, $2, $3, $4) RETURNING id";

/// The last phase's business work, the same statement in every form.
pub(crate) const SET_CHARGED: &str = "UPDATE rides SET status = 'charged', charge_id = $2 \
     WHERE id = $1 AND status = 'created' RETURNING amount_cents";
