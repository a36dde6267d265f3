//! C14: an attempt that lost its lease while it was away writes nothing when it comes back.

use std::time::Duration;

use idempotent_core::FlowOptions;
use tests::trip::{self, TripFlow, key, trip_to};

/// In each phase: the first attempt is held, loses its lease to a second one that runs to the end,
/// and then goes on as if nothing had happened.
#[tokio::test]
async fn a_stale_attempt_is_refused_at_each_phase() {
    for phase in ["create", "before pay", "pay", "finish"] {
        let database = trip::database().await;
        let flow = TripFlow::default();
        // Renewals would find the loss first; here the fence alone must do.
        let never_renews = FlowOptions::new().lease(Duration::from_secs(600));
        let stale = flow.run_with(database.pool(), never_renews).await;
        let successor = flow.run_by(database.pool()).await;

        let gate = flow.script.hold(phase);
        let held = stale.start(key("k"), trip_to("mars")).unwrap();
        gate.reached().await;
        // A frozen transaction holds its locks until the server ends it.
        trip::end_frozen_transactions(&database).await;
        trip::expire_leases(&database).await;
        let answer = successor.run(key("k"), trip_to("mars")).await.unwrap();
        let before = trip::everything(&database).await;

        gate.open();
        let told = held.wait().await;
        assert_eq!(
            trip::everything(&database).await,
            before,
            "the zombie in {phase} changed nothing"
        );
        // It claimed again, like anybody, and so got the successor's answer; or, where its connection
        // was cut, an error that asks for a retry.
        match told {
            Ok(zombie) => {
                assert!(zombie.is_replayed());
                assert_eq!(zombie.reply(), answer.reply(), "in {phase}");
            }
            Err(error) => assert!(error.retry_after().is_some(), "{error:?}"),
        }
        assert_eq!(flow.outside.payments(), 1);
    }
}

/// The same with the successor still running: the zombie may not finish under it either.
#[tokio::test]
async fn a_stale_attempt_does_not_finish_under_its_successor() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let never_renews = FlowOptions::new().lease(Duration::from_secs(600));
    let stale = flow.run_with(database.pool(), never_renews).await;
    let successor = flow.run_by(database.pool()).await;

    let first = flow.script.hold("pay");
    let held = stale.start(key("k"), trip_to("mars")).unwrap();
    first.reached().await;
    trip::expire_leases(&database).await;
    let second = flow.script.hold("pay");
    let running = successor.start(key("k"), trip_to("mars")).unwrap();
    second.reached().await;

    first.open();
    let told = held.wait().await.unwrap_err();
    assert!(
        matches!(told, idempotent_core::RunError::InProgress { .. }),
        "{told:?}"
    );
    assert_eq!(
        trip::trips(&database).await,
        [("mars".to_owned(), "created".to_owned())]
    );

    second.open();
    assert!(!running.wait().await.unwrap().is_replayed());
    assert_eq!(flow.outside.payments(), 1);
}

/// A raw COMMIT in a phase makes its writes stand without their recovery point: noticed and named.
#[tokio::test]
async fn a_phase_that_ends_its_transaction_is_stopped() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;
    flow.script.next("create", trip::Act::Commit);

    let stopped = trips.run(key("k"), trip_to("mars")).await.unwrap_err();
    let idempotent_core::RunError::Stopped {
        phase: "create",
        point: "started",
        reason,
        ..
    } = &stopped
    else {
        panic!("{stopped:?}")
    };
    assert!(reason.contains("COMMIT"), "{reason}");
    let state: (String, bool) =
        sqlx::query_as("SELECT recovery_point, holder IS NULL FROM idempotency_keys")
            .fetch_one(&database.pool())
            .await
            .unwrap();
    assert_eq!(state, ("started".to_owned(), true));
}
