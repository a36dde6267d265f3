//! A flow is staged with the request of another one.

#![allow(unused)]

use idempotent_core::{Reply, StageError, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

#[derive(Serialize, Deserialize)]
pub struct Letter;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    #[atomic(Started -> Finished)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Reply<()>, StageError> {
        tx.stage(PostReference, "letter", request)?;
        Ok(Reply::ok(()))
    }
}

pub struct Post;

#[idempotent_flow(name = "post")]
impl Post {
    #[atomic(Started -> Finished)]
    async fn send(&self, tx: &mut Tx<'_>, request: &Letter) -> Result<Reply<()>, StageError> {
        todo!()
    }
}

fn main() {}
