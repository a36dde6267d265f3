//! The integration tests: one binary, one PostgreSQL for all of them, a database for each.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "in a test a panic is the report"
)]

#[path = "../../idempotent-core/examples/booking.rs"]
#[allow(dead_code, unreachable_pub, reason = "its main is for people")]
mod booking;

mod answers;
mod chaos;
mod chaos_fleet;
mod chaos_postgres;
mod chaos_rolling;
mod conformance;
mod conformance_clients;
mod cost;
mod crash;
mod crash_points;
mod doubt;
mod embedded;
mod examples;
mod failures;
mod fencing;
mod gateway;
mod guard;
mod handing_on;
mod hardening;
mod hardening_flows;
mod leases;
mod limits;
mod neutral;
mod once;
mod operators;
mod proxy;
mod rides;
mod rides_contract;
mod start_up;
mod takeover;
mod workers;
