//! A phase that holds something over an await that cannot change threads.

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
        let held = std::rc::Rc::new(1);
        std::future::ready(()).await;
        drop(held);
        todo!()
    }
}

fn main() {}
