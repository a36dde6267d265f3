//! Two flows in one module, and one in a fn.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

mod flows {
    use super::*;

    pub struct Buy;

    pub struct Sell;

    #[idempotent_flow(name = "buy")]
    impl Buy {
        #[atomic(Started -> Finished)]
        async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Reply<()>, Infallible> {
            todo!()
        }
    }

    #[idempotent_flow(name = "sell")]
    impl Sell {
        #[atomic(Started -> Finished)]
        async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Reply<()>, Infallible> {
            todo!()
        }
    }
}

fn inside() {
    struct Local;

    #[idempotent_flow(name = "local")]
    impl Local {
        #[atomic(Started -> Finished)]
        async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Reply<()>, Infallible> {
            todo!()
        }
    }
}

fn main() {}
