//! The receipt flow: sends the customer a receipt for a ride. The ride flow stages it in the
//! transaction that stores the charge, so there is a receipt to send if and only if there is a
//! charge; and it is sent by the completer, so no client waits for it.

use idempotent_core::{DerivedKey, Disposition, External, PhaseFailure, Reply, idempotent_flow};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::flow::Ride;
use crate::payments::{Charge, GatewayClient, Handling, PaymentError};

/// Who sends receipts.
pub trait Receipts: Send + Sync + 'static {
    /// Sends one: once for each key, however often it is called.
    fn send(
        &self,
        key: &DerivedKey,
        receipt: &ReceiptRequest,
    ) -> impl Future<Output = Result<(), PaymentError>> + Send;
}

impl Receipts for GatewayClient {
    async fn send(&self, key: &DerivedKey, receipt: &ReceiptRequest) -> Result<(), PaymentError> {
        let ride = receipt.ride_id.to_string();
        self.send_receipt(key.as_str(), &receipt.charge_id, &ride)
            .await
    }
}

/// What the receipt is for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReceiptRequest {
    /// The ride.
    pub ride_id: Uuid,
    /// What was charged for it.
    pub charge_id: String,
}

impl ReceiptRequest {
    /// The receipt for a ride that was charged.
    pub fn of(ride: &Ride, charge: &Charge) -> Self {
        Self {
            ride_id: ride.id,
            charge_id: charge.id.clone(),
        }
    }
}

/// The flow, with the outside that it calls.
#[derive(Debug)]
pub struct ReceiptFlow<R> {
    receipts: R,
}

impl<R> ReceiptFlow<R> {
    /// A receipt flow that sends through `receipts`.
    pub fn new(receipts: R) -> Self {
        Self { receipts }
    }
}

#[idempotent_flow(name = "receipt", lease = "15s", retention = "48h")]
impl<R: Receipts> ReceiptFlow<R> {
    /// Sends the receipt. Nobody waits for the answer; it says who looks that the receipt is out.
    #[external(Started -> Finished, timeout = "10s")]
    async fn send(
        &self,
        call: &External<'_>,
        request: &ReceiptRequest,
    ) -> Result<Reply<&'static str>, ReceiptError> {
        self.receipts.send(call.derived_key(), request).await?;
        Ok(Reply::ok("sent"))
    }
}

/// The receipt could not be sent.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct ReceiptError(#[from] PaymentError);

impl PhaseFailure for ReceiptError {
    fn disposition(&self) -> Disposition {
        match self.0.handling() {
            Handling::Retry(Some(after)) => Disposition::retry_after(after),
            Handling::Retry(None) => Disposition::retry(),
            // Nothing can be declined here.
            Handling::Decline | Handling::Stop => Disposition::stop(),
        }
    }
}
