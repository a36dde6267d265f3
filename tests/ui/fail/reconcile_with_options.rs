//! A fn that asks about a call has no options of its own.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reconciled, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

#[derive(Serialize, Deserialize)]
pub struct Label;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Placed -> Sent, at_most_once)]
    async fn send(&self, call: &External<'_>) -> Result<Label, Infallible> {
        todo!()
    }

    #[atomic(Sent -> Finished)]
    async fn finish(&self, tx: &mut Tx<'_>, label: &Label) -> Result<Reply<()>, Infallible> {
        todo!()
    }

    #[reconcile(Placed, timeout = "1s", renamed_from(Placed = "ordered"))]
    async fn look_up(&self, call: &External<'_>) -> Result<Reconciled<Label>, Infallible> {
        todo!()
    }
}

fn main() {}
