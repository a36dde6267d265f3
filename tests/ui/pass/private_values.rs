//! The flow is public, what it stores is not.

#![deny(warnings)]
#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[derive(Serialize, Deserialize)]
struct Parcel;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Parcel, Infallible> {
        todo!()
    }

    #[external(Placed -> Finished)]
    async fn weigh(&self, call: &External<'_>, parcel: &Parcel) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
