//! A rejection where no phase can reject.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Rejection, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Placed -> Finished)]
    async fn finish(&self, tx: &mut Tx<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }

    #[on_reject(Finished, Plaecd, Shipped)]
    async fn decline(&self, tx: &mut Tx<'_>, rejection: &Rejection) -> Result<(), Infallible> {
        todo!()
    }
}

fn main() {}
