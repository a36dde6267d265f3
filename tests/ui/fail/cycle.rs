//! A phase leads back to a point that the flow has left.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Placed -> Packed)]
    async fn pack(&self, tx: &mut Tx<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Packed -> Placed | Finished)]
    async fn check(&self, tx: &mut Tx<'_>) -> Result<ShopCheckOutcome<(), Reply<()>>, Infallible> {
        todo!()
    }
}

fn main() {}
