//! A phase ends at `Started`.

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

    #[atomic(Placed -> Started)]
    async fn again(&self, tx: &mut Tx<'_>) -> Result<(), Infallible> {
        todo!()
    }
}

fn main() {}
