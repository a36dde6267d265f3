//! Questions about calls that there are not, or that are simply made again.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{External, Reconciled, Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

#[derive(Serialize, Deserialize)]
pub struct Label;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Placed)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<(), Infallible> {
        todo!()
    }

    #[external(Placed -> Sent)]
    async fn send(&self, call: &External<'_>) -> Result<Label, Infallible> {
        todo!()
    }

    #[external(Sent -> Told, at_most_once)]
    async fn tell(&self, call: &External<'_>, label: &Label) -> Result<(), Infallible> {
        todo!()
    }

    #[atomic(Told -> Finished)]
    async fn finish(&self, tx: &mut Tx<'_>) -> Result<Reply<()>, Infallible> {
        todo!()
    }

    #[reconcile(Placed)]
    async fn ask_send(&self, call: &External<'_>) -> Result<Reconciled<Label>, Infallible> {
        todo!()
    }

    #[reconcile(Told)]
    async fn ask_finish(&self, call: &External<'_>) -> Result<Reconciled<Reply<()>>, Infallible> {
        todo!()
    }

    #[reconcile(Setn)]
    async fn ask_tell(&self, call: &External<'_>) -> Result<Reconciled<()>, Infallible> {
        todo!()
    }

    #[reconcile]
    async fn ask(&self, call: &External<'_>) -> Result<Reconciled<()>, Infallible> {
        todo!()
    }
}

fn main() {}
