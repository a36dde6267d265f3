//! Seven mistakes, seven errors.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

#[derive(Serialize, Deserialize)]
pub struct Parcel;

pub struct Shop;

#[idempotent_flow(lease = "1 minute")]
impl Shop {
    #[atomic(Started -> Placed)]
    async fn place(&self, tx: &mut Tx<'_>, request: Order) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Placed -> Packed, timeuot = "1s")]
    async fn pack(&self, tx: &mut Tx<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Packed -> Paid)]
    async fn pay(&self, tx: &mut Tx<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Paid -> Shipped)]
    fn ship(&self, tx: &mut Tx<'_>) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Sent -> Finished)]
    async fn thank(&self, tx: &mut Tx<'_>, parcel: &Parcel) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
