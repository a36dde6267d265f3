//! A flow that some builds do not have, and cfg on helpers and in bodies.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
#[cfg(all())]
impl Shop {
    #[atomic(Started -> Finished)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Reply<()>, Infallible> {
        #[cfg(unix)]
        self.helper();
        #[cfg(not(unix))]
        compile_error!("never");
        todo!()
    }

    #[cfg(unix)]
    fn helper(&self) {}
}

pub struct Nowhere;

#[idempotent_flow(name = "nowhere")]
#[cfg(any())]
impl Nowhere {
    #[atomic(Started -> Finished)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
