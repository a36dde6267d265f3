//! Generated code is clean under lints that a careful crate denies.

#![deny(
    missing_docs,
    unreachable_pub,
    unused,
    unused_qualifications,
    single_use_lifetimes
)]

use std::convert::Infallible;

use idempotent_core::{External, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

/// An order.
#[derive(Serialize, Deserialize)]
pub struct Order;

/// A shop.
pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    /// Places the order.
    #[external(Started -> Placed | Finished)]
    async fn place(
        &self,
        call: &External<'_>,
        request: &Order,
    ) -> Result<ShopPlaceOutcome<(), Reply<()>>, Infallible> {
        let _ = (call.key(), request);
        Ok(ShopPlaceOutcome::Placed(()))
    }

    /// Finishes.
    #[atomic(Placed -> Finished)]
    async fn finish(&self, tx: &mut Tx<'_>) -> Result<Reply<()>, Infallible> {
        let _ = tx.key();
        Ok(Reply::ok(()))
    }
}

fn main() {}
