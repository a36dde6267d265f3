//! Points that had other names in older versions.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reconciled, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Left | Right, retries = 1, renamed_from(Left = "west", Right = "east", Right = "orient"))]
    async fn turn(
        &self,
        tx: &mut Tx<'_>,
        request: &Order,
    ) -> Result<ShopTurnOutcome<(), ()>, Infallible> {
        todo!()
    }

    #[atomic(Left -> Arrived, renamed_from(Arrived = "there"))]
    async fn walk(&self, tx: &mut Tx<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Right -> Arrived, renamed_from(Arrived = "home"))]
    async fn drive(&self, call: &External<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Arrived -> Finished)]
    async fn finish(&self, tx: &mut Tx<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
