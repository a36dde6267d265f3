//! How long the outside remembers, said wrongly.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reconciled, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[external(Started -> Paid, dedupes_for = "0s")]
    async fn pay(&self, call: &External<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Paid -> Mailed, dedupes_for = "a day")]
    async fn mail(&self, call: &External<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Mailed -> Finished, dedupes_for = "24h")]
    async fn finish(&self, tx: &mut Tx<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
