//! Options that belong to the other kind of phase.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed, key = "place")]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Placed -> Finished, isolation = "serializable")]
    async fn pay(&self, call: &External<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
