//! The trait of a generic client needs no bounds for the flow's sake.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub trait Payments {}

pub struct Shop<P> {
    payments: P,
}

#[idempotent_flow(name = "shop")]
impl<P: Payments> Shop<P> {
    #[atomic(Started -> Finished)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
