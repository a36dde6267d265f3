//! Marks that do not say where.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Rejection, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic()]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Reply<()>, Infallible> {
        todo!()
    }

    #[on_reject]
    async fn decline(&self, tx: &mut Tx<'_>, rejection: &Rejection) -> Result<(), Infallible> {
        todo!()
    }

    #[on_reject(with(Placed))]
    async fn refuse(&self, tx: &mut Tx<'_>, rejection: &Rejection) -> Result<(), Infallible> {
        todo!()
    }
}

fn main() {}
