//! A flow whose attempt is gone is taken over, and goes on from its recovery point.

use idempotent_core::{Key, RunError};
use sqlx::Row;
use tests::trip::{self, Act, TripError, TripFlow, key, trip_to};

/// Where the flow stood when its attempt died: the point, and how often the outside had been called.
const POINTS: [(&str, &str, usize); 3] = [
    ("create", "started", 0),
    ("pay", "created", 1),
    ("finish", "created", 1),
];

#[tokio::test]
async fn a_retry_after_the_lease_goes_on_from_the_recovery_point() {
    for (phase, point, calls) in POINTS {
        let database = trip::database().await;
        let flow = TripFlow::default();
        let here = flow.run_by(database.pool()).await;
        let elsewhere = flow.run_by(database.pool()).await;

        // The first attempt never comes back from its phase: it might as well be dead.
        let gate = flow.script.hold(phase);
        let dead = here.start(key("k"), trip_to("mars")).unwrap();
        gate.reached().await;
        assert_eq!(stored_point(&database).await, point, "held in {phase}");
        assert_eq!(flow.outside.calls().len(), calls);
        trip::end_frozen_transactions(&database).await;
        trip::expire_leases(&database).await;

        let answer = elsewhere.run(key("k"), trip_to("mars")).await.unwrap();
        assert_eq!(answer.reply().status(), 201);
        assert!(!answer.is_replayed());
        assert_eq!(
            flow.outside.payments(),
            1,
            "C13: every call had the same derived key"
        );
        assert_eq!(
            trip::trips(&database).await,
            [("mars".to_owned(), "paid".to_owned())]
        );
        let fence: i64 = sqlx::query_scalar("SELECT fence FROM idempotency_keys")
            .fetch_one(&database.pool())
            .await
            .unwrap();
        assert_eq!(fence, 2);
        drop(dead);
    }
}

#[tokio::test]
async fn of_many_that_try_to_take_over_one_does() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let here = flow.run_by(database.pool()).await;
    let gate = flow.script.hold("before pay");
    let _dead = here.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;
    trip::expire_leases(&database).await;

    let mut running = Vec::new();
    for _ in 0..8 {
        let process = flow.run_by(database.pool()).await;
        running.push(process.start(key("k"), trip_to("mars")).unwrap());
    }
    let mut ran = 0;
    for running in running {
        match running.wait().await {
            Ok(answer) => ran += usize::from(!answer.is_replayed()),
            Err(RunError::InProgress { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    assert_eq!((ran, flow.outside.calls().len()), (1, 1));
}

/// The clock of the database was set back: a lease that ends in the far future counts as over.
#[tokio::test]
async fn a_lease_from_the_far_future_is_over() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let here = flow.run_by(database.pool()).await;
    let gate = flow.script.hold("before pay");
    let _dead = here.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;
    let far =
        "UPDATE idempotency_keys SET lease_expires_at = statement_timestamp() + interval '1 hour'";
    sqlx::query(far).execute(&database.pool()).await.unwrap();

    let elsewhere = flow.run_by(database.pool()).await;
    assert_eq!(
        elsewhere
            .run(key("k"), trip_to("mars"))
            .await
            .unwrap()
            .reply()
            .status(),
        201
    );
}

/// C25: the key is reaped, and the client comes back.
#[tokio::test]
async fn a_retry_after_the_key_was_reaped_calls_with_the_same_derived_key() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;
    trips.run(key("k"), trip_to("mars")).await.unwrap();
    sqlx::query("DELETE FROM idempotency_keys")
        .execute(&database.pool())
        .await
        .unwrap();

    let again = trips.run(key("k"), trip_to("mars")).await.unwrap();
    assert!(!again.is_replayed(), "it is a new request");
    assert_eq!(&again.reply().body()[..], b"1", "but not a new payment");
    assert_eq!(
        (flow.outside.calls().len(), flow.outside.payments()),
        (2, 1)
    );
}

/// A point or a value that this version does not know is left, unclaimed, for the one that does.
#[tokio::test]
async fn what_this_version_cannot_read_it_does_not_claim() {
    let changes = [
        (
            "UPDATE idempotency_keys SET recovery_point = 'teleported'",
            "teleported",
        ),
        (
            r#"UPDATE idempotency_keys SET recovery_point = 'paid', state = '{"paid": {"amount": 1}}'"#,
            "`paid`",
        ),
        (
            "UPDATE idempotency_keys SET recovery_point = 'paid', state = '{}'",
            "`paid`",
        ),
    ];
    for (change, named) in changes {
        let database = trip::database().await;
        let flow = TripFlow::default();
        let trips = flow.run_by(database.pool()).await;
        flow.script.next("before pay", Act::Fail(TripError::Retry));
        trips.run(key("k"), trip_to("mars")).await.unwrap_err();
        sqlx::query(change).execute(&database.pool()).await.unwrap();

        let refused = trips.run(key("k"), trip_to("mars")).await.unwrap_err();
        let RunError::NotUnderstood { reason } = refused else {
            panic!("{refused:?}")
        };
        assert!(reason.contains(named), "{reason}");
        let row = sqlx::query("SELECT holder IS NULL, fence FROM idempotency_keys")
            .fetch_one(&database.pool())
            .await
            .unwrap();
        assert_eq!(
            (row.get::<bool, _>(0), row.get::<i64, _>(1)),
            (true, 1),
            "unclaimed"
        );
    }
}

/// A row that is reaped between the claim's two reads: claim again, never run unlocked.
#[tokio::test]
async fn a_key_that_is_being_deleted_is_claimed_anew() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;
    trips.run(key("k"), trip_to("mars")).await.unwrap();

    let pool = database.pool();
    let mut reaper = pool.begin().await.unwrap();
    sqlx::query("DELETE FROM idempotency_keys")
        .execute(&mut *reaper)
        .await
        .unwrap();
    // Not deleted yet for anybody else: a replay.
    assert!(
        trips
            .run(key("k"), trip_to("mars"))
            .await
            .unwrap()
            .is_replayed()
    );
    reaper.commit().await.unwrap();
    assert!(
        !trips
            .run(key("k"), trip_to("mars"))
            .await
            .unwrap()
            .is_replayed()
    );
}

/// C04: a client's key in odd forms is still one key; and nothing breaks out of its statement.
#[tokio::test]
async fn keys_are_data_and_nothing_else() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;
    for odd in ["'; DROP TABLE trips; --", "$1", "\\", "ключ", "a\tb"] {
        let key = Key::new("o'brien", "/trips?x='", odd).unwrap();
        assert!(
            !trips
                .run(key.clone(), trip_to(odd))
                .await
                .unwrap()
                .is_replayed()
        );
        assert!(trips.run(key, trip_to(odd)).await.unwrap().is_replayed());
    }
    assert_eq!(trip::count(&database, "trips").await, 5);
}

async fn stored_point(database: &tests::database::TestDatabase) -> String {
    sqlx::query_scalar("SELECT recovery_point FROM idempotency_keys")
        .fetch_one(&database.pool())
        .await
        .unwrap()
}
