//! A value that was asked for by `with(..)` has another type.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

#[derive(Serialize, Deserialize)]
pub struct Parcel;

#[derive(Serialize, Deserialize)]
pub struct Letter;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Parcel, Infallible> {
        todo!()
    }

    #[atomic(Placed -> Packed)]
    async fn pack(&self, tx: &mut Tx<'_>, parcel: &Parcel) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Packed -> Finished, with(Placed))]
    async fn finish(&self, tx: &mut Tx<'_>, letter: &Letter) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
