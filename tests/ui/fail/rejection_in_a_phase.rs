//! A phase that wants to see a rejection.

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
    async fn place(
        &self,
        tx: &mut Tx<'_>,
        rejection: &Rejection,
        request: &Order,
    ) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
