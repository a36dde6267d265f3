//! Two outside calls of one name.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Held)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Held -> Charged)]
    async fn charge(&self, call: &External<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Charged -> Finished, key = "charge")]
    async fn charge_fee(&self, call: &External<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
