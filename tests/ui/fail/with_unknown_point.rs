//! `with(..)` names points that hold no value for it.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

#[derive(Serialize, Deserialize)]
pub struct Parcel;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Parcel, Infallible> {
        todo!()
    }

    #[atomic(Placed -> Finished, with(Plaecd, Started, Placed))]
    async fn finish(
        &self,
        tx: &mut Tx<'_>,
        a: &Parcel,
        b: &Order,
        c: &Parcel,
    ) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
