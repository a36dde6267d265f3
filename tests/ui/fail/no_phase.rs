//! A flow without a phase.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::idempotent_flow;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
pub struct Order;

pub struct Shop;

#[idempotent_flow(name = "shop")]
impl Shop {
    fn helper(&self) {}
}

fn main() {}
