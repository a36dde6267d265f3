//! What goes ill together with a call that is made at most once.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reconciled, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[external(Started -> Paid, at_most_once, retries = 3, backoff = "1s..5s")]
    async fn pay(&self, call: &External<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Paid -> Mailed, dedupes_for = "24h", at_most_once)]
    async fn mail(&self, call: &External<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Mailed -> Told, at_most_once = true)]
    async fn tell(&self, call: &External<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Told -> Finished, at_most_once)]
    async fn finish(&self, tx: &mut Tx<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
