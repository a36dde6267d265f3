//! What a flow costs, counted on the wire: 9 round trips and 2 synchronous commits for the ride
//! flow, one statement and no write for a replay.

use std::time::Duration;

use idempotent_core::FlowOptions;
use idempotent_core::embedded::Embedded;
use sqlx::Row;
use sqlx::postgres::PgPool;
use tests::database::pool_options;
use tests::proxy::{Kind, Proxy};
use tests::trip::{self, TripFlow, key, trip_to};

#[tokio::test]
async fn a_flow_costs_nine_round_trips_and_two_commits_and_a_replay_one_statement() {
    let database = trip::database().await;
    let proxy = Proxy::start(&database.options());
    // One connection, so that it is known to have all statements prepared.
    let pool = pool_options()
        .max_connections(1)
        .connect_lazy_with(proxy.connect_options(&database.options()));
    let trips = TripFlow::default().run_by(pool).await;
    trips.run(key("warm"), trip_to("mars")).await.unwrap();

    proxy.reset();
    trips.run(key("k"), trip_to("mars")).await.unwrap();
    let flow = proxy.counts();
    assert_eq!(
        (flow.round_trips, flow.parses, flow.commits),
        (9, 0, 2),
        "{:#?}",
        proxy.transcript()
    );

    proxy.reset();
    assert!(
        trips
            .run(key("k"), trip_to("mars"))
            .await
            .unwrap()
            .is_replayed()
    );
    let replay = proxy.counts();
    assert_eq!(
        (replay.round_trips, replay.parses, replay.commits),
        (1, 0, 0),
        "{:#?}",
        proxy.transcript()
    );

    proxy.reset();
    trips.run(key("k"), trip_to("venus")).await.unwrap_err();
    assert_eq!(proxy.round_trips(), 1, "a mismatch");
}

/// What the proxy cannot see: when the log is flushed. A server of its own, in which nothing else
/// flushes or writes.
#[tokio::test]
async fn the_two_phases_wait_for_the_disk_and_the_claim_does_not_and_a_replay_writes_nothing() {
    let server = tokio::task::spawn_blocking(|| {
        let quiet = [
            ("autovacuum", "off"),
            ("wal_writer_delay", "10s"),
            ("bgwriter_lru_maxpages", "0"),
        ];
        let builder = quiet
            .iter()
            .fold(Embedded::builder(), |builder, (name, value)| {
                builder.setting(*name, *value)
            });
        builder.start().unwrap()
    });
    let server = server.await.unwrap();
    let pool = pool_options().connect_lazy_with(server.connect_options());
    idempotent_core::migrate(&pool).await.unwrap();
    sqlx::raw_sql(trip::TABLE).execute(&pool).await.unwrap();
    let flow = TripFlow::default();
    let trips = flow.run_by(pool.clone()).await;

    let created = flow.script.hold("create");
    let paid = flow.script.hold("pay");
    let running = trips.start(key("k"), trip_to("mars")).unwrap();
    created.reached().await;
    assert!(!log(&pool).await.is_flushed(), "the claim is asynchronous");
    created.open();
    paid.reached().await;
    assert!(
        log(&pool).await.is_flushed(),
        "the first phase is not, and takes the claim with it"
    );
    paid.open();
    running.wait().await.unwrap();
    assert!(log(&pool).await.is_flushed(), "nor is the last");

    // The first reads tidy up after the updates.
    for _ in 0..5 {
        trips.run(key("k"), trip_to("mars")).await.unwrap();
    }
    let before = log(&pool).await;
    for _ in 0..20 {
        assert!(
            trips
                .run(key("k"), trip_to("mars"))
                .await
                .unwrap()
                .is_replayed()
        );
    }
    assert_eq!(
        log(&pool).await,
        before,
        "no byte of the log, no transaction id"
    );
    pool.close().await;
    tokio::task::spawn_blocking(|| server.stop())
        .await
        .unwrap()
        .unwrap();
}

#[derive(Debug, PartialEq)]
struct Log {
    written: String,
    flushed: String,
    next_transaction: String,
}

impl Log {
    fn is_flushed(&self) -> bool {
        self.written == self.flushed
    }
}

async fn log(pool: &PgPool) -> Log {
    let sql = "SELECT pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn()::text,
                      pg_snapshot_xmax(pg_current_snapshot())::text";
    let row = sqlx::query(sql).fetch_one(pool).await.unwrap();
    Log {
        written: row.get(0),
        flushed: row.get(1),
        next_transaction: row.get(2),
    }
}

/// The transaction of a phase begins with one simple query, which bounds what it may hold and wait.
#[tokio::test]
async fn a_phase_begins_with_one_query_that_bounds_it() {
    let database = trip::database().await;
    let proxy = Proxy::start(&database.options());
    let pool = pool_options().connect_lazy_with(proxy.connect_options(&database.options()));
    TripFlow::default()
        .run_by(pool)
        .await
        .run(key("k"), trip_to("mars"))
        .await
        .unwrap();

    let transcript = proxy.transcript();
    let begins: Vec<_> = transcript
        .iter()
        .filter(|exchange| exchange.sql.starts_with("BEGIN"))
        .collect();
    assert_eq!(begins.len(), 2);
    for begin in begins {
        assert_eq!(begin.kind, Kind::Simple);
        for setting in [
            "statement_timeout",
            "idle_in_transaction_session_timeout",
            "lock_timeout",
        ] {
            assert!(
                begin.sql.contains(&format!("SET LOCAL {setting}")),
                "{}",
                begin.sql
            );
        }
    }
}

/// A known key in flight is answered in one statement as well, even while its row is locked by the
/// attempt that runs: it waits for nobody.
#[tokio::test]
async fn a_duplicate_does_not_wait_for_the_running_transaction() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let here = flow.run_by(database.pool()).await;
    let pool = database.pool();
    let elsewhere = flow
        .run_with(
            pool.clone(),
            FlowOptions::new().lease(Duration::from_secs(60)),
        )
        .await;
    let gate = flow.script.hold("pay");
    let running = here.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;

    // As an attempt between its checkpoint and its commit.
    let mut locking = pool.begin().await.unwrap();
    sqlx::query("UPDATE idempotency_keys SET fence = fence")
        .execute(&mut *locking)
        .await
        .unwrap();
    let told = tokio::time::timeout(
        Duration::from_secs(3),
        elsewhere.run(key("k"), trip_to("mars")),
    )
    .await;
    let told = told
        .expect("an answer well before the lock timeout of 6 s")
        .unwrap_err();
    assert!(
        matches!(told, idempotent_core::RunError::InProgress { .. }),
        "{told:?}"
    );
    locking.rollback().await.unwrap();
    gate.open();
    running.wait().await.unwrap();
}
