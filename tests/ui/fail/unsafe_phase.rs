//! A phase that asks for promises.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Finished)]
    async unsafe fn place(
        &self,
        tx: &mut Tx<'_>,
        request: &Order,
    ) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
