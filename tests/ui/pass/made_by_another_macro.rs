//! A flow whose types come through a `macro_rules!`.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{Reply, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

#[derive(Serialize, Deserialize)]
pub struct Parcel;

pub struct Shop;

macro_rules! flow {
    ($flow:ident, $request:ty, $value:ty, $point:ident) => {
        #[idempotent_flow(name = "shop")]
        impl $flow {
            #[atomic(Started -> $point)]
            async fn place(
                &self,
                tx: &mut Tx<'_>,
                request: &$request,
            ) -> Result<$value, Infallible> {
                todo!()
            }

            #[atomic($point -> Finished)]
            async fn finish(
                &self,
                tx: &mut Tx<'_>,
                value: &$value,
            ) -> Result<Reply<()>, Infallible> {
                todo!()
            }
        }
    };
}

flow!(Shop, Order, Parcel, Placed);

fn main() {}
