//! Retries that are no number, or too many.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reconciled, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed, retries = 0)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Placed -> Paid, retries = "3")]
    async fn pay(&self, call: &External<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Paid -> Finished, retries)]
    async fn finish(&self, tx: &mut Tx<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
