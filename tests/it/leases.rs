//! Leases are renewed while a phase runs, and a lost one stops the phase.

use std::time::Duration;

use idempotent_core::{FlowOptions, RunError};
use sqlx::Row;
use tests::database::{TestDatabase, pool_options};
use tests::trip::{self, TripFlow, key, trip_to};

const SHORT: Duration = Duration::from_millis(600);

fn short() -> FlowOptions {
    FlowOptions::new().lease(SHORT)
}

/// The call takes several times as long as the lease.
#[tokio::test]
async fn a_lease_outlasts_itself_while_its_phase_runs() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let here = flow.run_with(database.pool(), short()).await;
    let elsewhere = flow.run_with(database.pool(), short()).await;

    let gate = flow.script.hold("pay");
    let running = here.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;
    assert!(renewals(&database, 6).await.is_sorted());
    let refused = elsewhere.run(key("k"), trip_to("mars")).await.unwrap_err();
    assert!(
        matches!(refused, RunError::InProgress { .. }),
        "{refused:?}"
    );
    gate.open();
    assert!(!running.wait().await.unwrap().is_replayed());
    assert_eq!(flow.outside.calls().len(), 1);
}

/// Even when phases have taken every connection of the pool.
#[tokio::test]
async fn an_exhausted_pool_does_not_let_leases_run_out() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let pool = pool_options()
        .max_connections(1)
        .connect_lazy_with(database.options());
    let here = flow.run_with(pool.clone(), short()).await;

    let gate = flow.script.hold("pay");
    let running = here.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;
    let all_there_is = pool.acquire().await.unwrap();
    renewals(&database, 3).await;
    drop(all_there_is);
    gate.open();
    assert_eq!(running.wait().await.unwrap().reply().status(), 201);
}

/// A renewal that finds another holder cancels the phase: whoever waits is told at once, and the
/// renewal does not touch the successor's lease.
#[tokio::test]
async fn a_lost_lease_cancels_the_phase() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let here = flow.run_with(database.pool(), short()).await;
    let gate = flow.script.hold("pay");
    let running = here.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;

    let stolen = "UPDATE idempotency_keys SET holder = gen_random_uuid(), fence = fence + 1,
                  lease_expires_at = statement_timestamp() + interval '5 minutes'
                  RETURNING lease_expires_at::text";
    let until: String = sqlx::query_scalar(stolen)
        .fetch_one(&database.pool())
        .await
        .unwrap();
    // The gate stays shut: only the lost lease can end this.
    let told = running.wait().await.unwrap_err();
    assert!(matches!(told, RunError::InProgress { .. }), "{told:?}");
    let row = sqlx::query("SELECT lease_expires_at::text, fence FROM idempotency_keys")
        .fetch_one(&database.pool())
        .await
        .unwrap();
    assert_eq!(
        (row.get::<String, _>(0), row.get::<i64, _>(1)),
        (until, 2),
        "the successor's lease is untouched"
    );
}

/// One locked row must not cost the leases of the others.
#[tokio::test]
async fn a_locked_row_does_not_keep_the_others_from_being_renewed() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let here = flow.run_with(database.pool(), short()).await;
    let mut gates = Vec::new();
    let mut running = Vec::new();
    for name in ["a", "b", "c"] {
        let gate = flow.script.hold("pay");
        running.push(here.start(key(name), trip_to(name)).unwrap());
        gate.reached().await;
        gates.push(gate);
    }
    let pool = database.pool();
    let mut locking = pool.begin().await.unwrap();
    sqlx::query("SELECT 1 FROM idempotency_keys WHERE key = 'b' FOR UPDATE")
        .execute(&mut *locking)
        .await
        .unwrap();
    let others = "SELECT lease_expires_at::text FROM idempotency_keys WHERE key = 'a'";
    changes(&database, others, 4).await;
    let in_time: bool = sqlx::query_scalar(
        "SELECT bool_and(lease_expires_at > statement_timestamp()) FROM idempotency_keys WHERE key IN ('a', 'c')",
    )
    .fetch_one(&pool)
    .await
    .unwrap();
    assert!(in_time);
    locking.rollback().await.unwrap();
    gates.iter().for_each(trip::Gate::open);
    for running in running {
        assert_eq!(running.wait().await.unwrap().reply().status(), 201);
    }
}

/// A frozen holder's row locks end with its phase's time: the server ends its transaction.
#[tokio::test]
async fn a_frozen_phase_does_not_hold_its_locks_for_ever() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let here = flow
        .run_with(
            database.pool(),
            FlowOptions::new().lease(Duration::from_millis(300)),
        )
        .await;
    let gate = flow.script.hold("create");
    let running = here.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;
    let open = "SELECT count(*)::text FROM pg_stat_activity
                WHERE datname = current_database() AND state = 'idle in transaction'";
    // From one to none, without anybody's doing.
    changes(&database, open, 1).await;
    gate.open();
    let told = running.wait().await.unwrap_err();
    assert!(
        matches!(
            told,
            RunError::Retry {
                phase: "create",
                ..
            }
        ),
        "{told:?}"
    );
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

/// Waits until the lease of the only key was renewed so many times, and says until when it ran.
async fn renewals(database: &TestDatabase, times: usize) -> Vec<String> {
    let sql = "SELECT lease_expires_at::text FROM idempotency_keys WHERE lease_expires_at > statement_timestamp()";
    changes(database, sql, times).await
}

/// Waits until what a query says has changed so many times.
async fn changes(database: &TestDatabase, sql: &'static str, times: usize) -> Vec<String> {
    let pool = database.pool();
    let mut seen: Vec<String> = Vec::new();
    let deadline = tokio::time::Instant::now() + trip::PATIENCE;
    while seen.len() <= times {
        assert!(tokio::time::Instant::now() < deadline, "only {seen:?}");
        let now: String = sqlx::query_scalar(sql).fetch_one(&pool).await.unwrap();
        if seen.last() != Some(&now) {
            seen.push(now);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    seen
}
