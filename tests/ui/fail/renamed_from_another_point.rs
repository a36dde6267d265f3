//! Old names on the wrong arrow, in use today, or of two points.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reconciled, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed, renamed_from(Placed = "packed"))]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Placed -> Packed, renamed_from(Packed = "wrapped", Sent = "mailed", Pakced = "boxed"))]
    async fn pack(&self, tx: &mut Tx<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Packed -> Sent, renamed_from(Sent = "wrapped", Sent = "sent"))]
    async fn send(&self, tx: &mut Tx<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Sent -> Finished, renamed_from(Finished = "done"))]
    async fn finish(&self, tx: &mut Tx<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
