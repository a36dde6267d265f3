//! Calls that may not be repeated, of all shapes, and fns that ask what became of them.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reconciled, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

#[derive(Clone, Serialize, Deserialize)]
pub struct Label;

pub struct Shop<C>(C);

#[idempotent_flow(name = "shop")]
impl<C: Send + Sync + 'static> Shop<C> {
    #[external(Started -> Priced, at_most_once)]
    async fn price(&self, call: &External<'_>, request: &Order) -> Result<u64, Infallible> {
        todo!()
    }

    #[reconcile(Started)]
    async fn ask_price(&self, call: &External<'_>) -> Result<Reconciled<u64>, Infallible> {
        Ok(Reconciled::Happened(3))
    }

    #[external(Priced -> Sent | Refused, dedupes_for = "24h", retries = 3, backoff = "1s..1m")]
    async fn send(
        &self,
        call: &External<'_>,
        price: &u64,
    ) -> Result<ShopSendOutcome<Label, String>, Infallible> {
        todo!()
    }

    #[reconcile(Priced)]
    async fn ask_send(
        &self,
        call: &External<'_>,
        price: &u64,
        request: &Order,
    ) -> Result<Reconciled<ShopSendOutcome<Label, String>>, Infallible> {
        Ok(Reconciled::Happened(ShopSendOutcome::Sent(Label)))
    }

    #[external(Sent -> Finished, at_most_once, checkpoint = "eager", timeout = "1s")]
    async fn tell(&self, call: &External<'_>, label: &Label) -> Result<Reply<Label>, Infallible> {
        todo!()
    }

    #[reconcile(Sent, with(Priced))]
    async fn ask_tell(
        &self,
        call: &External<'_>,
        label: &Label,
        price: &u64,
    ) -> Result<Reconciled<Reply<Label>>, Infallible> {
        Ok(Reconciled::Happened(Reply::ok(label.clone())))
    }

    #[external(Refused -> Finished, at_most_once)]
    async fn complain(&self, call: &External<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }
}

fn main() {}
