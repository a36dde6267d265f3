//! A backoff the wrong way round, one that is no range, one without retries.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reconciled, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed, retries = 3, backoff = "5s..200ms")]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Placed -> Paid, retries = 3, backoff = "5s")]
    async fn pay(&self, call: &External<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Paid -> Mailed, retries = 3, backoff = "0s..5s")]
    async fn mail(&self, call: &External<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Mailed -> Finished, backoff = "1s..5s")]
    async fn finish(&self, tx: &mut Tx<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
