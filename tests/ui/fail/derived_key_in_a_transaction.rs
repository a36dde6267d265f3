//! A derived key comes only from an outside call.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{DerivedKey, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Finished)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Reply<()>, Infallible> {
        charge(tx.derived_key());
        todo!()
    }
}

fn charge(key: &DerivedKey) {}

fn main() {}
