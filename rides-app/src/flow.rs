//! The ride flow: insert the ride, charge the card, store the charge with the answer. This file is
//! all there is to making it take effect once; read the arrows from top to bottom.

use http::StatusCode;
use idempotent_core::http::Problem;
use idempotent_core::{
    DerivedKey, Disposition, External, PhaseFailure, Rejection, Reply, StageError, Tx,
    idempotent_flow,
};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::payments::{Charge, ChargeRequest, GatewayClient, Handling, PaymentError};
use crate::problems;
use crate::receipts::{ReceiptFlowReference, ReceiptRequest};
use crate::rides;

/// What the outside must be able to do. A trait, so that tests can be the outside.
pub trait Payments: Send + Sync + 'static {
    /// Charges a card: once for each key, however often it is called.
    fn charge(
        &self,
        key: &DerivedKey,
        charge: &ChargeRequest,
    ) -> impl Future<Output = Result<Charge, PaymentError>> + Send;
}

impl Payments for GatewayClient {
    async fn charge(
        &self,
        key: &DerivedKey,
        charge: &ChargeRequest,
    ) -> Result<Charge, PaymentError> {
        GatewayClient::charge(self, key.as_str(), charge).await
    }
}

/// What a client sends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RideRequest {
    /// The price, in the currency's smallest unit.
    pub amount_cents: i64,
    /// An ISO 4217 code in lower case.
    #[serde(default = "default_currency")]
    pub currency: String,
    /// Where the ride begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Place>,
    /// Where the ride ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<Place>,
    /// The card, as a token of the gateway's.
    #[serde(default = "default_payment_source")]
    pub payment_source: String,
    /// Members that this version does not know. They are part of what the client asked for, so a
    /// request that differs in one of them is a different request.
    #[serde(flatten)]
    pub other: serde_json::Map<String, serde_json::Value>,
}

/// A point on the map, in degrees.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// Latitude, from -90 to 90.
    pub lat: f64,
    /// Longitude, from -180 to 180.
    pub lon: f64,
}

fn default_currency() -> String {
    "usd".to_owned()
}

fn default_payment_source() -> String {
    "tok_visa".to_owned()
}

impl RideRequest {
    /// What is sent to the gateway. From the request alone: the same in every attempt, also in one
    /// that comes after the key was reaped.
    fn charge(&self) -> ChargeRequest {
        ChargeRequest {
            amount_cents: self.amount_cents,
            currency: self.currency.clone(),
            source: self.payment_source.clone(),
            description: None,
        }
    }
}

/// The ride, as the phases ahead need to know it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Ride {
    /// The row's id.
    pub id: Uuid,
}

/// What the client gets.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Receipt {
    ride_id: Uuid,
    amount: i64,
    charge_id: String,
}

/// The flow, with the outside that it calls.
#[derive(Debug)]
pub struct RideFlow<P> {
    payments: P,
}

impl<P> RideFlow<P> {
    /// A ride flow that charges through `payments`.
    pub fn new(payments: P) -> Self {
        Self { payments }
    }
}

#[idempotent_flow(name = "ride", lease = "15s", retention = "48h")]
impl<P: Payments> RideFlow<P> {
    /// Inserts the ride.
    #[atomic(Started -> RideCreated)]
    async fn create_ride(&self, tx: &mut Tx<'_>, request: &RideRequest) -> Result<Ride, RideError> {
        let ride = Ride { id: Uuid::now_v7() };
        rides::insert(tx, ride.id, request).await?;
        Ok(ride)
    }

    /// Charges the card. The gateway sees the same key however often this runs.
    #[external(RideCreated -> ChargeCompleted, timeout = "10s", dedupes_for = "24h")]
    async fn charge(
        &self,
        call: &External<'_>,
        _ride: &Ride,
        request: &RideRequest,
    ) -> Result<Charge, RideError> {
        Ok(self
            .payments
            .charge(call.derived_key(), &request.charge())
            .await?)
    }

    /// Stores the charge and stages the receipt, in one transaction with the reply.
    #[atomic(ChargeCompleted -> Finished, with(RideCreated))]
    async fn finish(
        &self,
        tx: &mut Tx<'_>,
        charge: &Charge,
        ride: &Ride,
    ) -> Result<Reply<Receipt>, RideError> {
        let amount = rides::set_charged(tx, ride.id, &charge.id).await?;
        let receipt = ReceiptRequest::of(ride, charge);
        tx.stage(ReceiptFlowReference, "receipt", &receipt)?;
        let location = format!("/api/rides/{}", ride.id);
        let receipt = Receipt {
            ride_id: ride.id,
            amount,
            charge_id: charge.id.clone(),
        };
        Ok(Reply::created(receipt).header("location", location))
    }

    /// A declined card is a final answer: marks the ride in the transaction that stores the 402.
    #[on_reject(RideCreated)]
    async fn decline(
        &self,
        tx: &mut Tx<'_>,
        ride: &Ride,
        _rejection: &Rejection,
    ) -> Result<(), RideError> {
        Ok(rides::set_declined(tx, ride.id).await?)
    }
}

/// What can go wrong in a ride, by what it means.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RideError {
    /// The database refused or did not answer.
    #[error("the database: {0}")]
    Database(#[from] sqlx::Error),
    /// The receipt cannot be staged: a bug.
    #[error(transparent)]
    Receipt(#[from] StageError),
    /// The gateway refused or did not answer.
    #[error(transparent)]
    Payment(#[from] PaymentError),
}

impl PhaseFailure for RideError {
    fn disposition(&self) -> Disposition {
        let payment = match self {
            Self::Database(error) => return error.disposition(),
            Self::Receipt(error) => return error.disposition(),
            Self::Payment(payment) => payment,
        };
        match (payment.handling(), payment) {
            (Handling::Retry(Some(after)), _) => Disposition::retry_after(after),
            (Handling::Retry(None), _) => Disposition::retry(),
            (Handling::Decline, _) => {
                Disposition::reject(refusal("card_declined", "The card was declined", payment))
            }
            // The gateway has no such card: an answer about the client's data, not a bug of ours.
            (Handling::Stop, PaymentError::Refused { code, .. }) if code == "resource_missing" => {
                Disposition::reject(refusal(
                    "payment_source_unknown",
                    "The payment source is unknown",
                    payment,
                ))
            }
            (Handling::Stop, _) => Disposition::stop(),
        }
    }
}

fn refusal(
    code: &'static str,
    title: &'static str,
    payment: &PaymentError,
) -> Reply<serde_json::Value> {
    let why = match payment {
        PaymentError::Declined { message, .. } => message.as_str(),
        _ => "The gateway does not know it.",
    };
    Problem::new(StatusCode::PAYMENT_REQUIRED, code, title)
        .detail(format!(
            "{why} No money was taken. Use another payment source, with a new key."
        ))
        .to_reply(problems::PAGE)
}
