//! Options with values that they do not have.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed, isolation = "serialisable")]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Placed -> Finished, checkpoint = "lazy", timeout = 10)]
    async fn pay(&self, call: &External<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
