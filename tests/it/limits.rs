//! How much a process takes on, how long it waits, and what it says where there is no place.

use std::time::{Duration, Instant};

use idempotent_core::{Engine, FlowOptions, Handle, Key, OperationState, Patience, RunError};
use tests::database::{TestDatabase, pool_options};
use tests::trip::{self, PATIENCE, TripFlow, key, trip_to, until};

async fn limited(
    flow: &TripFlow,
    database: &TestDatabase,
    limit: impl FnOnce(idempotent_core::EngineBuilder) -> idempotent_core::EngineBuilder,
) -> Handle<TripFlow> {
    let builder = limit(Engine::builder(database.pool()).flow(flow.clone()));
    builder.build().await.unwrap().handle().unwrap()
}

fn of(user: &str, key: &str) -> Key {
    Key::new(user, "/trips", key).unwrap()
}

#[tokio::test]
async fn one_user_cannot_take_all_places() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = limited(&flow, &database, |engine| engine.max_running_per_user(1)).await;
    let gate = flow.script.hold("pay");
    let running = trips.start(of("alice", "1"), trip_to("mars")).unwrap();
    gate.reached().await;

    let refused = trips.run(of("alice", "2"), trip_to("moon")).await;
    let refused = refused.unwrap_err();
    assert!(
        matches!(
            refused,
            RunError::TooManyRunning {
                of_this_user: true,
                ..
            }
        ),
        "{refused:?}"
    );
    assert!(refused.retry_after() >= Some(Duration::from_secs(1)));
    let of_bob = trips.run(of("bob", "2"), trip_to("moon")).await.unwrap();
    assert!(!of_bob.is_replayed());
    // A duplicate takes no place: it joins, and it is told of a mismatch.
    let joined = trips.start(of("alice", "1"), trip_to("mars")).unwrap();
    assert!(joined.is_joined());
    let other = trips.run(of("alice", "1"), trip_to("venus")).await;
    assert!(matches!(other, Err(RunError::Mismatch)), "{other:?}");

    gate.open();
    assert_eq!(
        running.wait().await.unwrap().reply(),
        joined.wait().await.unwrap().reply()
    );
    // The place is free again, and what was refused had begun nothing.
    let now = trips.run(of("alice", "2"), trip_to("moon")).await.unwrap();
    assert!(!now.is_replayed());
    assert_eq!(trip::count(&database, "idempotency_keys").await, 3);
}

#[tokio::test]
async fn a_full_process_still_answers_what_is_known() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let elsewhere = flow.run_by(database.pool()).await;
    let finished = elsewhere.run(key("done"), trip_to("mars")).await.unwrap();
    let gate_there = flow.script.hold("pay");
    let there = elsewhere.start(key("there"), trip_to("mars")).unwrap();
    gate_there.reached().await;

    let trips = limited(&flow, &database, |engine| engine.max_running(1)).await;
    let gate = flow.script.hold("pay");
    let running = trips.start(of("bob", "1"), trip_to("moon")).unwrap();
    gate.reached().await;

    let replay = trips.run(key("done"), trip_to("mars")).await.unwrap();
    assert!(replay.is_replayed());
    assert_eq!(replay.reply(), finished.reply());
    let mismatch = trips.run(key("done"), trip_to("moon")).await;
    assert!(matches!(mismatch, Err(RunError::Mismatch)), "{mismatch:?}");
    let in_progress = trips.run(key("there"), trip_to("mars")).await;
    assert!(
        matches!(in_progress, Err(RunError::InProgress { .. })),
        "{in_progress:?}"
    );
    let fresh = trips.run(key("fresh"), trip_to("mars")).await;
    assert!(
        matches!(
            fresh,
            Err(RunError::TooManyRunning {
                of_this_user: false,
                ..
            })
        ),
        "{fresh:?}"
    );
    gate.open();
    gate_there.open();
    running.wait().await.unwrap();
    there.wait().await.unwrap();
    trips.run(key("fresh"), trip_to("mars")).await.unwrap();
}

#[tokio::test]
async fn without_a_connection_a_request_is_told_so_and_does_not_hang() {
    let database = trip::database().await;
    // It would wait for minutes.
    let pool = pool_options()
        .max_connections(1)
        .acquire_timeout(Duration::from_secs(120))
        .connect_lazy_with(database.options());
    let trips = TripFlow::default().run_by(pool.clone()).await;
    let held = pool.acquire().await.unwrap();
    let began = Instant::now();
    let refused = trips.run(key("k"), trip_to("mars")).await.unwrap_err();
    assert!(
        matches!(refused, RunError::Unavailable { .. }),
        "{refused:?}"
    );
    assert!(
        began.elapsed() < Duration::from_secs(15),
        "{:?}",
        began.elapsed()
    );
    drop(held);
    trips.run(key("k"), trip_to("mars")).await.unwrap();
}

#[tokio::test]
async fn a_patient_duplicate_hears_of_the_end_elsewhere() {
    for notifies in [false, true] {
        let database = trip::database().await;
        let flow = TripFlow::default();
        let there = limited(&flow, &database, |engine| engine.notify(notifies)).await;
        let here = limited(&flow, &database, |engine| engine.notify(notifies)).await;
        let gate = flow.script.hold("pay");
        let running = there.start(key("k"), trip_to("mars")).unwrap();
        gate.reached().await;

        let impatient = here.run_patiently(key("k"), trip_to("mars"), Patience::none());
        let impatient = impatient.await;
        assert!(
            matches!(impatient, Err(RunError::InProgress { .. })),
            "{impatient:?}"
        );
        let other = here.run_patiently(key("k"), trip_to("moon"), Patience::of(PATIENCE));
        assert!(matches!(other.await, Err(RunError::Mismatch)));
        let waiting: Vec<_> = (0..20)
            .map(|_| {
                let here = here.clone();
                let patience = Patience::of(PATIENCE);
                tokio::spawn(async move {
                    here.run_patiently(key("k"), trip_to("mars"), patience)
                        .await
                })
            })
            .collect();
        gate.open();
        let answer = running.wait().await.unwrap();
        for waiting in waiting {
            let waited = waiting.await.unwrap().unwrap();
            assert!(waited.is_replayed());
            assert_eq!(waited.reply(), answer.reply());
        }
        assert_eq!(flow.outside.calls().len(), 1);
    }
}

#[tokio::test]
async fn a_look_says_where_a_request_stands_and_changes_nothing() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;
    assert!(trips.look(&key("k")).await.unwrap().is_none());

    let gate = flow.script.hold("pay");
    let running = trips.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;
    let before = trip::everything(&database).await;
    let look = trips.look(&key("k")).await.unwrap().unwrap();
    assert!(matches!(look.state, OperationState::Running));
    assert_eq!(look.recovery_point, "created");
    // Another user's key of the same name, another path, another flow's: none of it is here.
    for elsewhere in [of("bob", "k"), Key::new("alice", "/x", "k").unwrap()] {
        assert!(trips.look(&elsewhere).await.unwrap().is_none());
    }
    assert_eq!(trip::everything(&database).await, before);

    flow.script
        .next("before pay", trip::Act::Fail(trip::TripError::Retry));
    gate.open();
    let answer = running.wait().await.unwrap();
    let look = trips.look(&key("k")).await.unwrap().unwrap();
    let OperationState::Finished(reply) = look.state else {
        panic!("{look:?}");
    };
    assert_eq!(&reply, answer.reply());
    assert_eq!(look.recovery_point, "finished");

    trips.run(key("w"), trip_to("mars")).await.unwrap_err();
    let look = trips.look(&key("w")).await.unwrap().unwrap();
    assert!(matches!(look.state, OperationState::Waiting), "{look:?}");
    let park = "UPDATE idempotency_keys SET stuck_at = statement_timestamp() WHERE key = 'w'";
    sqlx::query(park).execute(&database.pool()).await.unwrap();
    let look = trips.look(&key("w")).await.unwrap().unwrap();
    assert!(matches!(look.state, OperationState::Stuck), "{look:?}");
}

#[tokio::test]
async fn a_reply_over_its_limit_is_given_whole_once() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    // The reply of a trip is its number: one byte.
    let trips = flow
        .run_with(database.pool(), FlowOptions::new().reply_limit(0))
        .await;
    let first = trips.run(key("k"), trip_to("mars")).await.unwrap();
    assert_eq!(&first.reply().body()[..], b"1");
    let retry = trips.run(key("k"), trip_to("mars")).await.unwrap();
    assert!(retry.is_replayed());
    assert_eq!(retry.reply().status(), first.reply().status());
    assert!(retry.reply().body().is_empty());
    let header = |name: &str| {
        let mut headers = retry.reply().headers().iter();
        headers
            .find(|(header, _)| header == name)
            .map(|(_, value)| value.clone())
    };
    assert_eq!(header("idempotent-replay-truncated").unwrap(), "true");
    assert_eq!(header("etag").unwrap(), "\"1\"");
    assert_eq!(flow.outside.calls().len(), 1);
    let waiting = "SELECT count(*) = 1 FROM idempotency_keys WHERE finished_at IS NOT NULL AND octet_length(response_body) = 0";
    until(&database.pool(), "nothing of the body is stored", waiting).await;
}
