//! Names of the prelude that mean something else in the user's module.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[allow(non_snake_case)]
fn Ok<T>(value: T) -> std::result::Result<T, Infallible> {
    std::result::Result::Ok(value)
}

type Result<T> = std::result::Result<T, Infallible>;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Finished)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Reply<()>> {
        Ok(Reply::ok(()))
    }
}

fn main() {}
