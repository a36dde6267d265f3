//! A real server, really killed at each statement that the framework sends: before it reaches the
//! database, and after the database has done it. Whatever the moment, another server ends with one
//! ride, one charge and one receipt.

use serde_json::json;
use tests::proxy::{Point, Proxy};

use crate::crash::{World, kill, send};

const CLAIM: &str = "INSERT INTO idempotency_keys (request_hash";
const CHECKPOINT: &str = "SET recovery_point = $5, state = $6, attempts = 0";
const FINISH: &str = "SET recovery_point = 'finished'";
const RELEASE: &str = "SET holder = NULL, lease_expires_at = NULL, recovery_point = $5";
const RENEWAL: &str = "UPDATE idempotency_keys AS stored";
const TAKEOVER: &str = "attempts = attempts + 1";

/// A name, a place in the conversation with the database, and the card with which a ride gets there.
type Place = (&'static str, fn() -> Point, &'static str);

/// Where the server dies.
fn points() -> Vec<Place> {
    vec![
        ("the claim", || CLAIM.into(), "tok_visa"),
        ("the begin of a phase", || "BEGIN".into(), "tok_visa"),
        (
            "the user's statement",
            || "INSERT INTO rides".into(),
            "tok_visa",
        ),
        ("the checkpoint", || CHECKPOINT.into(), "tok_visa"),
        (
            "the commit of a phase",
            || Point::commit().after(CHECKPOINT),
            "tok_visa",
        ),
        ("the finish", || FINISH.into(), "tok_visa"),
        (
            "the commit of the finish",
            || Point::commit().after(FINISH),
            "tok_visa",
        ),
        ("the release", || RELEASE.into(), "tok_gatewayError"),
        ("a takeover", || TAKEOVER.into(), "tok_gatewayError"),
        ("a renewal", || RENEWAL.into(), "tok_slow_1500"),
    ]
}

async fn dies_at(point: Point, card: &str, done: bool) {
    let world = World::start().await;
    let proxy = Proxy::start(&world.database.options());
    let way = proxy.url(&world.database.options());
    let mut first = world.server_at(&way, "1s").await;
    let body = json!({"amountCents": 2000, "paymentSource": card});
    let hold = if done {
        proxy.hold_answer(point)
    } else {
        proxy.hold(point)
    };
    let (_, ()) = tokio::join!(send(&first, &body), async {
        hold.reached().await;
        kill(first.pid());
    });
    first.kill();
    if done {
        // To nobody: who asked is dead.
        hold.release();
    } else {
        hold.cut().await;
    }
    let second = world.server("1s").await;
    let receipt = world.retry(&second, &body).await;
    world.holds_one_ride(&receipt).await;
}

#[tokio::test]
async fn a_server_killed_before_a_statement_is_done() {
    for (name, point, card) in points() {
        eprintln!("killed before {name}");
        dies_at(point(), card, false).await;
    }
}

#[tokio::test]
async fn a_server_killed_after_a_statement_is_done() {
    for (name, point, card) in points() {
        eprintln!("killed after {name}");
        dies_at(point(), card, true).await;
    }
}
