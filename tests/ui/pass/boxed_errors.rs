//! Phases that fail in all ways, and a fn of one's own between them.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

#[derive(Serialize, Deserialize)]
pub struct Parcel;

pub struct Shop;

type Error = Box<dyn std::error::Error + Send + Sync>;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Parcel, Error> {
        todo!()
    }

    fn weights<'a>(&self, parcels: &'a [Parcel]) -> impl Iterator<Item = u32> + 'a {
        parcels.iter().map(|_| 12)
    }

    #[must_use]
    async fn later(&self) {}

    #[atomic(Placed -> Finished)]
    async fn finish(&self, tx: &mut Tx<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
