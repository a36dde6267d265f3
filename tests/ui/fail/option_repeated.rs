//! An option is given twice.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop", lease = "15s", lease = "30s")]
impl Shop {
    #[atomic(Started -> Finished, timeout = "1s", timeout = "2s")]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
