//! The attribute on something else than an impl block.

#![allow(unused)]

use idempotent_core::idempotent_flow;

#[idempotent_flow(name = "shop")]
pub struct Shop;

fn main() {}
