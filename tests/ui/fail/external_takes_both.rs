//! An external phase that takes both capabilities.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[external(Started -> Finished)]
    async fn place(
        &self,
        call: &External<'_>,
        tx: &mut Tx<'_>,
        request: &Order,
    ) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
