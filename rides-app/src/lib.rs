//! A ride service whose requests take effect once: the example application of `idempotent-core`.
//!
//! Begin with [`flow`], which is all there is to making a ride take effect once; then [`app`] for
//! the routes, [`payments`] for the gateway's client, and [`gateway`] for the fake it talks to.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod app;
pub mod cli;
pub mod database;
pub mod flow;
pub mod gateway;
pub mod keys;
pub mod payments;
pub mod problems;
pub mod receipts;
mod rides;
pub mod serve;
pub mod users;
