//! A branch carries a value that the next phase does not take.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, Tx, idempotent_flow};
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
    #[external(Started -> Placed | Finished)]
    async fn place(
        &self,
        call: &External<'_>,
        request: &Order,
    ) -> Result<ShopPlaceOutcome<Letter, Reply<()>>, Infallible> {
        todo!()
    }

    #[atomic(Placed -> Finished)]
    async fn finish(&self, tx: &mut Tx<'_>, parcel: &Parcel) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
