//! A flow with a where clause, a const parameter and generic values.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop<T, const N: usize> {
    template: T,
}

#[derive(Serialize, Deserialize)]
pub struct Parcel<T> {
    content: T,
}

#[idempotent_flow(name = "shop")]
impl<T, const N: usize> Shop<T, N>
where
    T: Serialize + serde::de::DeserializeOwned + Clone + Send + Sync + 'static,
    [u8; N]: Serialize,
{
    #[atomic(Started -> Placed)]
    async fn place(&self, tx: &mut Tx<'_>, request: &Order) -> Result<Parcel<T>, Infallible> {
        todo!()
    }

    #[atomic(Placed -> Finished)]
    async fn finish<'t>(
        &self,
        tx: &mut Tx<'t>,
        parcel: &Parcel<T>,
    ) -> Result<Reply<[u8; N]>, Infallible>
    where
        T: Clone,
        [u8; N]: Serialize,
    {
        todo!()
    }
}

fn main() {}
