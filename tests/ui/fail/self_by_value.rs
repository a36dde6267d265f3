//! Receivers that are not `&self`.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed)]
    async fn place(self, tx: &mut Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Placed -> Paid)]
    async fn pay(&mut self, call: &External<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Paid -> Finished)]
    async fn finish(tx: &mut Tx<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
