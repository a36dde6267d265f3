//! Three phases in a row, a value asked for later, business work on a rejection, a generic client.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{DerivedKey, External, Rejection, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

#[derive(Serialize, Deserialize)]
pub struct Parcel;

#[derive(Serialize, Deserialize)]
pub struct Charge;

pub trait Payments: Send + Sync + 'static {
    fn charge(&self, key: &DerivedKey) -> impl Future<Output = Charge> + Send;
}

pub struct Shop<P> {
    payments: P,
}

#[idempotent_flow(name = "shop", lease = "15s", retention = "48h")]
impl<P: Payments> Shop<P> {
    /// Stores the order.
    #[atomic(Started -> Placed)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Parcel, Infallible> {
        Ok(Parcel)
    }

    /// Charges the card.
    #[external(Placed -> Charged, timeout = "10s")]
    async fn charge(
        &self,
        call: &External<'_>,
        parcel: &Parcel,
        request: &Order,
    ) -> Result<Charge, Infallible> {
        Ok(self.payments.charge(call.derived_key()).await)
    }

    /// Ships.
    #[atomic(Charged -> Finished, with(Placed), isolation = "serializable")]
    async fn ship(
        &self,
        tx: &mut Tx<'_>,
        charge: &Charge,
        parcel: &Parcel,
    ) -> Result<Reply<u32>, Infallible> {
        Ok(Reply::ok(Self::weight(parcel)))
    }

    /// Cancels.
    #[on_reject(Placed)]
    async fn cancel(
        &self,
        tx: &mut Tx<'_>,
        parcel: &Parcel,
        rejection: &Rejection,
    ) -> Result<(), Infallible> {
        Ok(())
    }

    fn weight(parcel: &Parcel) -> u32 {
        12
    }
}

fn main() {}
