//! A phase takes more values than there are.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

#[derive(Serialize, Deserialize)]
pub struct Parcel;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Parcel, Infallible> {
        todo!()
    }

    #[atomic(Placed -> Finished)]
    async fn finish(
        &self,
        tx: &mut Tx<'_>,
        parcel: &Parcel,
        order: &Order,
    ) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
