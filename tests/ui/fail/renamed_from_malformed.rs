//! Old names that no version can have stored.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reconciled, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed, renamed_from(Placed = "OrderTaken"))]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Placed -> Packed, renamed_from("wrapped"))]
    async fn pack(&self, tx: &mut Tx<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Packed -> Sent, renamed_from = "mailed")]
    async fn send(&self, tx: &mut Tx<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Sent -> Finished)]
    async fn finish(&self, tx: &mut Tx<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
