//! A generic client whose trait has an `async fn`: its future may not be `Send`.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{DerivedKey, External, Reply, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub trait Payments: Send + Sync + 'static {
    async fn charge(&self, key: &DerivedKey);
}

pub struct Shop<P> {
    payments: P,
}

#[idempotent_flow(name = "shop")]
impl<P: Payments> Shop<P> {
    #[external(Started -> Finished)]
    async fn place(&self, call: &External<'_>, request: &Order) -> Result<Reply<()>, Infallible> {
        self.payments.charge(call.derived_key()).await;
        todo!()
    }
}

fn main() {}
