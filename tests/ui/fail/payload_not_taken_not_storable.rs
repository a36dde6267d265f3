//! A value that nobody takes must be storable too.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

pub struct Parcel;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Parcel, Infallible> {
        todo!()
    }

    #[atomic(Placed -> Finished)]
    async fn finish(&self, tx: &mut Tx<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
