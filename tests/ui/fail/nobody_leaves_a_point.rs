//! A branch leads to a point from which no phase goes on.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed | Refused)]
    async fn place(
        &self,
        tx: &mut Tx<'_>,
        request: &Order,
    ) -> Result<ShopPlaceOutcome<(), ()>, Infallible> {
        todo!()
    }

    #[atomic(Placed -> Finished)]
    async fn finish(&self, tx: &mut Tx<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
