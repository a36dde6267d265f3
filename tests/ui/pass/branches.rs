//! Branches that join again, an early finish, finishing phases of different types.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

#[derive(Serialize, Deserialize)]
pub struct Quote;

#[derive(Serialize, Deserialize)]
pub struct Parcel;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Quoted)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Quote, Infallible> {
        todo!()
    }

    #[external(Quoted -> Held | Short | Finished, key = "hold", checkpoint = "eager")]
    async fn hold(
        &self,
        call: &External<'_>,
        quote: &Quote,
    ) -> Result<ShopHoldOutcome<Parcel, (), Reply<&'static str>>, Infallible> {
        Ok(ShopHoldOutcome::Finished(Reply::ok("closed")))
    }

    #[atomic(Held -> Settled)]
    async fn pack(&self, tx: &mut Tx<'_>, parcel: &Parcel) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Short -> Settled)]
    async fn order_more(&self, tx: &mut Tx<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Settled -> Finished, with(Quoted))]
    async fn mail(
        &self,
        call: &External<'_>,
        settled: &(),
        quote: &Quote,
        request: &Order,
    ) -> Result<Reply<u8>, Infallible> {
        Ok(Reply::created(1))
    }
}

fn main() {}
