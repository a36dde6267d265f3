//! One flow stages others: one with a private request, in another module, and one with a generic client.
//! A flow whose request depends on its parameters has no reference, so the name is free.

#![deny(warnings)]
#![allow(dead_code, unused_variables)]

use idempotent_core::{External, FlowReference, Payload, Reply, StageError, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Order;

struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Finished)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Reply<()>, StageError> {
        tx.stage(mail::PostReference, "first", &mail::Letter)?;
        tx.stage(mail::PostReference, "second", &mail::Letter)?;
        tx.stage(ShopReference, "again", request)?;
        Ok(Reply::ok(()))
    }
}

mod mail {
    use super::*;

    #[derive(Serialize, Deserialize)]
    pub(super) struct Letter;

    pub(super) struct Post<C>(C);

    #[idempotent_flow(name = "post")]
    impl<C: Send + Sync + 'static> Post<C> {
        #[external(Started -> Finished)]
        async fn send(
            &self,
            call: &External<'_>,
            request: &Letter,
        ) -> Result<Reply<()>, StageError> {
            todo!()
        }
    }
}

struct Any<R>(R);

struct AnyReference;

#[idempotent_flow(name = "any")]
impl<R: Payload + Sync> Any<R> {
    #[atomic(Started -> Finished)]
    async fn take(&self, tx: &mut Tx<'_>, request: &R) -> Result<Reply<()>, StageError> {
        todo!()
    }
}

fn name_of<F: FlowReference>(_: F) -> &'static str {
    F::FLOW
}

fn main() {
    let reference: ShopReference = ShopReference;
    assert_eq!(name_of(reference), "shop");
    assert_eq!(name_of(mail::PostReference), "post");
}
