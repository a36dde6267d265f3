//! An `on_reject` fn that returns a value.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Rejection, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Finished)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Reply<()>, Infallible> {
        todo!()
    }

    #[on_reject(Started)]
    async fn decline(
        &self,
        tx: &mut Tx<'_>,
        rejection: &Rejection,
    ) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
