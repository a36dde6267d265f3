//! An atomic phase that takes an outside call.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Finished)]
    async fn place(&self, call: &External<'_>, request: &Order) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
