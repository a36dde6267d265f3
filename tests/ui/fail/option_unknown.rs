//! Options that there are not.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop", colour = "red")]
impl Shop {
    #[atomic(Started -> Placed, priority = 3)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Placed -> Finished, idempotent)]
    async fn pay(&self, call: &External<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
