//! What a failing phase leaves behind: its recovery point, a free lease, and the reason.

use idempotent_core::RunError;
use serde_json::Value;
use tests::database::TestDatabase;
use tests::trip::{self, Act, TripError, TripFlow, key, trip_to};

#[tokio::test]
async fn a_retry_goes_on_where_the_failed_phase_began() {
    let steps = [
        ("create", "create", "started"),
        ("before pay", "pay", "created"),
        ("finish", "finish", "paid"),
    ];
    for (act_in, failed, at) in steps {
        let database = trip::database().await;
        let flow = TripFlow::default();
        let trips = flow.run_by(database.pool()).await;
        flow.script.next(act_in, Act::Fail(TripError::Retry));

        let told = trips.run(key("k"), trip_to("mars")).await.unwrap_err();
        let RunError::Retry { phase, point, .. } = &told else {
            panic!("{told:?}")
        };
        assert_eq!((*phase, *point), (failed, at));
        assert!(told.retry_after().is_some());
        // Free at once, at the point; an external result was stored before the lease was let go.
        let row = stored(&database).await;
        assert_eq!(
            (row["recovery_point"].as_str(), &row["holder"]),
            (Some(at), &Value::Null)
        );
        assert_eq!(row["last_error"]["class"], "retry");
        assert_eq!(row["last_error"]["message"], "the outside is unwell");

        let answer = trips.run(key("k"), trip_to("mars")).await.unwrap();
        assert!(!answer.is_replayed());
        assert_eq!(
            flow.outside.calls().len(),
            1,
            "what was paid before {failed} failed is not asked for again"
        );
        assert_eq!(stored(&database).await["last_error"], Value::Null);
    }
}

/// C01: at once on a panic.
#[tokio::test]
async fn a_panic_frees_the_key_at_once_and_keeps_the_point() {
    for (phase, at) in [
        ("create", "started"),
        ("pay", "created"),
        ("finish", "paid"),
    ] {
        let database = trip::database().await;
        let flow = TripFlow::default();
        let trips = flow.run_by(database.pool()).await;
        flow.script.next(phase, Act::Panic);

        let told = trips.run(key("k"), trip_to("mars")).await.unwrap_err();
        let RunError::Stopped { point, reason, .. } = &told else {
            panic!("{told:?}")
        };
        assert_eq!(*point, at);
        assert!(reason.contains("the script says so"), "{reason}");
        let row = stored(&database).await;
        assert_eq!(
            (row["recovery_point"].as_str(), &row["holder"]),
            (Some(at), &Value::Null)
        );
        assert_eq!(row["last_error"]["class"], "stop");

        assert_eq!(
            trips
                .run(key("k"), trip_to("mars"))
                .await
                .unwrap()
                .reply()
                .status(),
            201
        );
        assert_eq!(flow.outside.payments(), 1);
        assert_eq!(trip::count(&database, "trips").await, 1);
    }
}

#[tokio::test]
async fn a_failed_phase_leaves_nothing_of_its_own_writes() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;
    for act in [
        Act::Fail(TripError::Retry),
        Act::Fail(TripError::Bug),
        Act::Panic,
    ] {
        flow.script.next("create", act);
        trips.run(key("k"), trip_to("mars")).await.unwrap_err();
        assert_eq!(trip::count(&database, "trips").await, 0);
    }
    trips.run(key("k"), trip_to("mars")).await.unwrap();
}

#[tokio::test]
async fn a_rejection_is_final_stored_and_replayed_with_its_business_work() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;
    flow.script
        .next("before pay", Act::Fail(TripError::Declined));

    let first = trips.run(key("k"), trip_to("mars")).await.unwrap();
    assert_eq!(first.reply().status(), 402);
    let retry = trips.run(key("k"), trip_to("mars")).await.unwrap();
    assert!(retry.is_replayed());
    assert_eq!(retry.reply(), first.reply());
    assert_eq!(
        trip::trips(&database).await,
        [("mars".to_owned(), "declined".to_owned())]
    );
    assert!(flow.outside.calls().is_empty());
}

#[tokio::test]
async fn a_rejection_where_nothing_is_to_be_done_is_stored_too() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;
    flow.script.next("create", Act::Fail(TripError::Declined));

    assert_eq!(
        trips
            .run(key("k"), trip_to("mars"))
            .await
            .unwrap()
            .reply()
            .status(),
        402
    );
    assert!(
        trips
            .run(key("k"), trip_to("mars"))
            .await
            .unwrap()
            .is_replayed()
    );
    assert_eq!(
        trip::count(&database, "trips").await,
        0,
        "the rejecting phase's own writes were rolled back"
    );
}

/// A `?` must not end a flow with the money taken.
#[tokio::test]
async fn a_rejection_behind_the_outside_is_a_stop_where_nobody_takes_care_of_it() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;
    flow.script.next("finish", Act::Fail(TripError::Declined));

    let told = trips.run(key("k"), trip_to("mars")).await.unwrap_err();
    let RunError::Stopped {
        phase: "finish",
        point: "paid",
        reason,
        ..
    } = &told
    else {
        panic!("{told:?}")
    };
    assert!(reason.contains("on_reject"), "{reason}");
    assert_eq!(
        trips
            .run(key("k"), trip_to("mars"))
            .await
            .unwrap()
            .reply()
            .status(),
        201
    );
}

#[tokio::test]
async fn a_rejection_whose_business_work_fails_is_not_stored() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;

    for (act, class) in [(TripError::Retry, "retry"), (TripError::Declined, "stop")] {
        flow.script
            .next("before pay", Act::Fail(TripError::Declined));
        flow.script.next("decline", Act::Fail(act));
        trips.run(key("k"), trip_to("mars")).await.unwrap_err();
        let row = stored(&database).await;
        assert_eq!(
            (&row["finished_at"], row["last_error"]["class"].as_str()),
            (&Value::Null, Some(class))
        );
        assert_eq!(
            trip::trips(&database).await,
            [("mars".to_owned(), "created".to_owned())]
        );
    }
}

/// C15, C16: a conflict is run again, a bounded number of times, and is never the flow's end.
#[tokio::test]
async fn a_serialization_failure_is_run_again() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;
    let conflict = || Act::Fail(trip::conflict());
    for _ in 0..5 {
        flow.script.next("create", conflict());
    }
    assert_eq!(
        trips
            .run(key("k"), trip_to("mars"))
            .await
            .unwrap()
            .reply()
            .status(),
        201
    );

    for _ in 0..6 {
        flow.script.next("create", conflict());
    }
    let told = trips.run(key("l"), trip_to("venus")).await.unwrap_err();
    assert!(matches!(told, RunError::Retry { .. }), "{told:?}");
    assert_eq!(
        trips
            .run(key("l"), trip_to("venus"))
            .await
            .unwrap()
            .reply()
            .status(),
        201
    );
}

async fn stored(database: &TestDatabase) -> Value {
    sqlx::query_scalar("SELECT to_jsonb(k) FROM idempotency_keys k")
        .fetch_one(&database.pool())
        .await
        .unwrap()
}
