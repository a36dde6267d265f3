//! A capability that is not lent.

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
    async fn place(&self, tx: Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Placed -> Finished)]
    async fn pay(&self, call: &mut External<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
