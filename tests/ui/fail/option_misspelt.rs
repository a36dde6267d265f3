//! Options whose names are nearly right.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop", leese = "15s")]
impl Shop {
    #[atomic(Started -> Placed, timeuot = "1s")]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Placed -> Finished, chekpoint = "eager")]
    async fn pay(&self, call: &External<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
