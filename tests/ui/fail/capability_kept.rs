//! A capability kept beyond its phase.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[external(Started -> Finished)]
    async fn place(&self, call: &External<'_>, request: &Order) -> Result<Reply<()>, Infallible> {
        spawn(call);
        todo!()
    }
}

fn spawn<T: Send + 'static>(work: T) {}

fn main() {}
