//! The last phase returns no reply.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

#[derive(Serialize, Deserialize)]
pub struct Parcel;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Finished)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Parcel, Infallible> {
        todo!()
    }
}

fn main() {}
