//! What the tests of this workspace stand on: a database of their own, the real program as a child
//! process, and a proxy between the two that counts round trips and loses answers.
//!
//! Nothing here is shared between tests but plain data: each `#[tokio::test]` has its own runtime,
//! and a connection that outlives the runtime it was made on is dead.

// A test harness fails by panicking, with a message that says what did not hold.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod database;
pub mod fixture;
pub mod proxy;
pub mod raw;
pub mod server;
pub mod trip;
