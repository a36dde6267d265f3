//! `with(..)` asks for a value that is not there on every way.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

#[derive(Serialize, Deserialize)]
pub struct Parcel;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[external(Started -> Held | Short)]
    async fn place(
        &self,
        call: &External<'_>,
        request: &Order,
    ) -> Result<ShopPlaceOutcome<Parcel, ()>, Infallible> {
        todo!()
    }

    #[atomic(Held -> Settled)]
    async fn pack(&self, tx: &mut Tx<'_>, parcel: &Parcel) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Short -> Settled)]
    async fn refund(&self, tx: &mut Tx<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Settled -> Finished, with(Held))]
    async fn finish(&self, tx: &mut Tx<'_>, parcel: &Parcel) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
