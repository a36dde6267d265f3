//! The completer finishes what nobody runs; the reaper deletes what nobody needs any more.

use std::time::Duration;

use idempotent_core::{Engine, FlowOptions, RunError};
use serde_json::Value;
use sqlx::Row;
use tests::database::TestDatabase;
use tests::trip::{self, Act, TripError, TripFlow, key, trip_to, until};

/// An engine that runs the flow, as one process of several.
async fn engine(flow: &TripFlow, database: &TestDatabase, options: FlowOptions) -> Engine {
    let builder = Engine::builder(database.pool()).flow_with(flow.clone(), options);
    builder.build().await.unwrap()
}

/// Retries soon, so that tests need not wait.
fn quick() -> FlowOptions {
    FlowOptions::new().backoff(Duration::from_millis(10), Duration::from_millis(20))
}

const ALL_FINISHED: &str = "SELECT bool_and(finished_at IS NOT NULL) FROM idempotency_keys";

/// C21: node 1 dies for good in each phase, node 2 goes on by itself.
#[tokio::test]
async fn a_flow_whose_process_died_is_finished_without_its_client() {
    for phase in ["before pay", "pay"] {
        let database = trip::database().await;
        let flow = TripFlow::default();
        let dead = flow.run_by(database.pool()).await;
        let gate = flow.script.hold(phase);
        let _never = dead.start(key("k"), trip_to("mars")).unwrap();
        gate.reached().await;
        trip::expire_leases(&database).await;

        let alive = engine(&flow, &database, quick()).await;
        let workers = alive.workers().start();
        until(&database.pool(), "finished", ALL_FINISHED).await;
        workers.stop().await;
        assert_eq!(flow.outside.payments(), 1);
        assert_eq!(
            trip::trips(&database).await,
            [("mars".to_owned(), "paid".to_owned())]
        );
        let trips = alive.handle::<TripFlow>().unwrap();
        let late = trips.run(key("k"), trip_to("mars")).await.unwrap();
        assert!(late.is_replayed());
    }
}

/// C12: the outside is down, the client gives up; the completer finishes later.
#[tokio::test]
async fn a_flow_that_failed_is_tried_again_until_it_succeeds() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let engine = engine(&flow, &database, quick()).await;
    for _ in 0..4 {
        flow.script.next("before pay", Act::Fail(TripError::Retry));
    }
    let trips = engine.handle::<TripFlow>().unwrap();
    trips.run(key("k"), trip_to("mars")).await.unwrap_err();
    let workers = engine.workers().start();
    until(&database.pool(), "finished", ALL_FINISHED).await;
    workers.stop().await;
    assert_eq!(flow.outside.calls().len(), 1);
    let history: Value = sqlx::query_scalar("SELECT history FROM idempotency_keys")
        .fetch_one(&database.pool())
        .await
        .unwrap();
    assert_eq!(history.as_array().unwrap().len(), 4, "{history:#}");
    assert_eq!(history[0]["message"], "the outside is unwell");
}

/// C19: a poisoned flow is counted, spread out, then parked with its reason; the healthy ones beside
/// it are served.
#[tokio::test]
async fn a_poisoned_flow_ends_stuck_and_starves_nobody() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let engine = engine(&flow, &database, quick()).await;
    let trips = engine.handle::<TripFlow>().unwrap();
    let poison = || flow.script.next("create", Act::Panic);
    poison();
    trips
        .run(key("poisoned"), trip_to("mars"))
        .await
        .unwrap_err();
    (0..4).for_each(|_| poison());
    let workers = engine.workers().concurrency(1).start();
    until(
        &database.pool(),
        "stuck",
        "SELECT bool_or(stuck_at IS NOT NULL) FROM idempotency_keys",
    )
    .await;
    flow.script.next("before pay", Act::Fail(TripError::Retry));
    trips
        .run(key("healthy"), trip_to("venus"))
        .await
        .unwrap_err();
    until(
        &database.pool(),
        "the healthy one finished",
        "SELECT finished_at IS NOT NULL FROM idempotency_keys WHERE key = 'healthy'",
    )
    .await;
    workers.stop().await;

    let told = trips
        .run(key("poisoned"), trip_to("mars"))
        .await
        .unwrap_err();
    assert!(matches!(told, RunError::Stuck), "{told:?}");
    let row = sqlx::query(
        "SELECT attempts, last_error, holder IS NULL FROM idempotency_keys WHERE key = 'poisoned'",
    )
    .fetch_one(&database.pool())
    .await
    .unwrap();
    assert_eq!((row.get::<i32, _>(0), row.get::<bool, _>(2)), (5, true));
    let last_error: Value = row.get(1);
    assert_eq!(
        (&last_error["class"], &last_error["phase"]),
        (&"stop".into(), &"create".into())
    );
    assert!(
        last_error["message"]
            .as_str()
            .unwrap()
            .contains("the script says so")
    );
}

/// A retry is given up only when both its attempts and its time are used up.
#[tokio::test]
async fn a_retry_is_stuck_only_after_its_attempts_and_its_patience() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let options = FlowOptions::new().retry_attempts(3, Duration::from_secs(3600));
    let engine = engine(&flow, &database, options).await;
    let trips = engine.handle::<TripFlow>().unwrap();
    let fail = async || {
        flow.script.next("before pay", Act::Fail(TripError::Retry));
        trips.run(key("k"), trip_to("mars")).await.unwrap_err()
    };
    for _ in 0..5 {
        let told = fail().await;
        assert!(
            matches!(told, RunError::Retry { .. }),
            "patience is left: {told:?}"
        );
    }
    let long_ago = "UPDATE idempotency_keys SET last_error = last_error || jsonb_build_object('first_at', statement_timestamp() - interval '2 hours')";
    sqlx::query(long_ago)
        .execute(&database.pool())
        .await
        .unwrap();
    assert!(matches!(fail().await, RunError::Stuck));
}

/// Waiting is not failing: it is not counted, however often.
#[tokio::test]
async fn waiting_for_the_outside_is_not_counted() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let engine = engine(&flow, &database, quick().max_attempts(2)).await;
    let trips = engine.handle::<TripFlow>().unwrap();
    for _ in 0..6 {
        flow.script
            .next("before pay", Act::Fail(TripError::Pending));
        let told = trips.run(key("k"), trip_to("mars")).await.unwrap_err();
        assert_eq!(told.retry_after(), Some(Duration::from_secs(2)), "{told:?}");
    }
    let attempts: i32 = sqlx::query_scalar("SELECT attempts FROM idempotency_keys")
        .fetch_one(&database.pool())
        .await
        .unwrap();
    assert_eq!(attempts, 0);
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

/// What runs here is not taken from under itself, even when its lease looks over.
#[tokio::test]
async fn the_completer_leaves_what_runs_in_its_own_process() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let engine = engine(&flow, &database, quick()).await;
    let trips = engine.handle::<TripFlow>().unwrap();
    let gate = flow.script.hold("pay");
    let running = trips.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;
    trip::expire_leases(&database).await;
    assert_eq!(engine.complete_once().await.unwrap(), 0);
    gate.open();
    assert!(!running.wait().await.unwrap().is_replayed());
    assert_eq!(flow.outside.calls().len(), 1);
}

/// A client that comes while the completer is at work waits for it, like for any other run here.
#[tokio::test]
async fn a_client_joins_the_completer() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let engine = engine(&flow, &database, quick()).await;
    let trips = engine.handle::<TripFlow>().unwrap();
    flow.script.next("before pay", Act::Fail(TripError::Retry));
    trips.run(key("k"), trip_to("mars")).await.unwrap_err();
    let gate = flow.script.hold("pay");
    let workers = engine.workers().start();
    gate.reached().await;
    let client = trips.start(key("k"), trip_to("mars")).unwrap();
    assert!(client.is_joined());
    gate.open();
    assert_eq!(client.wait().await.unwrap().reply().status(), 201);
    workers.stop().await;
}

/// Several processes on the same rows: each flow is finished once.
#[tokio::test]
async fn many_completers_share_the_work() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let mut engines = Vec::new();
    for _ in 0..4 {
        engines.push(engine(&flow, &database, quick()).await);
    }
    let trips = engines[0].handle::<TripFlow>().unwrap();
    for n in 0..30 {
        flow.script.next("before pay", Act::Fail(TripError::Retry));
        trips
            .run(key(&format!("k{n}")), trip_to("mars"))
            .await
            .unwrap_err();
    }
    let workers: Vec<_> = engines
        .iter()
        .map(|engine| engine.workers().start())
        .collect();
    until(&database.pool(), "all finished", ALL_FINISHED).await;
    for workers in workers {
        workers.stop().await;
    }
    assert_eq!(
        (flow.outside.calls().len(), flow.outside.payments()),
        (30, 30)
    );
}

/// C18: only what is finished and past its retention; small batches; nobody waits for anybody.
#[tokio::test]
async fn the_reaper_deletes_only_what_is_past_its_retention() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let options = quick().retention(Duration::from_secs(3600)).max_attempts(1);
    let engine = engine(&flow, &database, options).await;
    let trips = engine.handle::<TripFlow>().unwrap();
    for name in ["old", "older", "locked", "young"] {
        trips.run(key(name), trip_to(name)).await.unwrap();
    }
    flow.script.next("before pay", Act::Fail(TripError::Retry));
    trips
        .run(key("unfinished"), trip_to("x"))
        .await
        .unwrap_err();
    flow.script.next("create", Act::Fail(TripError::Bug));
    trips.run(key("stuck"), trip_to("y")).await.unwrap_err();
    let pool = database.pool();
    let age = "UPDATE idempotency_keys SET created_at = created_at - interval '2 hours',
               finished_at = finished_at - interval '2 hours' WHERE key <> 'young'";
    sqlx::query(age).execute(&pool).await.unwrap();

    let mut locking = pool.begin().await.unwrap();
    let lock = "SELECT 1 FROM idempotency_keys WHERE key = 'locked' FOR UPDATE";
    sqlx::query(lock).execute(&mut *locking).await.unwrap();
    assert_eq!(engine.count_reapable().await.unwrap(), 3);
    assert_eq!(
        engine.reap_once().await.unwrap().keys,
        2,
        "the locked one is passed over"
    );
    locking.rollback().await.unwrap();
    let (first, second) = tokio::join!(engine.reap_once(), engine.reap_once());
    assert_eq!(first.unwrap().keys + second.unwrap().keys, 1);

    let left: Vec<String> = sqlx::query_scalar("SELECT key FROM idempotency_keys ORDER BY key")
        .fetch_all(&pool)
        .await
        .unwrap();
    assert_eq!(left, ["stuck", "unfinished", "young"]);
    assert_eq!(
        trip::count(&database, "trips").await,
        5,
        "no business row was touched"
    );
}
