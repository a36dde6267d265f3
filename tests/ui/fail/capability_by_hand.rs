//! Nobody but the engine makes a capability.

#![allow(unused)]

use std::convert::Infallible;

use idempotent_core::{DerivedKey, External, Tx, idempotent_flow};
use serde::{Deserialize, Serialize};

fn transaction<'a>() -> Tx<'a> {
    Tx {
        connection: todo!(),
        ..todo!()
    }
}

fn call<'a>() -> External<'a> {
    External {
        key: todo!(),
        derived: todo!(),
    }
}

fn key() -> DerivedKey {
    DerivedKey { 0: todo!() }
}

fn main() {}
