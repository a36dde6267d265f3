//! What is checked and done before the first request.

use std::time::Duration;

use idempotent_core::{BuildError, Engine, FlowOptions, Reply, RunError, Tx, idempotent_flow};
use sqlx::postgres::PgConnectOptions;
use tests::database::{TestDatabase, pool_options};
use tests::trip::{self, TripFlow};

struct Other;

#[idempotent_flow(name = "trip", lease = "15s", retention = "48h")]
impl Other {
    #[atomic(Started -> Finished)]
    async fn go(&self, _tx: &mut Tx<'_>, request: &i64) -> Result<Reply<i64>, sqlx::Error> {
        Ok(Reply::ok(*request))
    }
}

#[tokio::test]
async fn two_flows_of_one_name_are_refused() {
    let database = trip::database().await;
    let pool = database.pool();
    let built = Engine::builder(pool)
        .flow(TripFlow::default())
        .flow(Other)
        .build()
        .await;
    assert!(matches!(
        built.unwrap_err(),
        BuildError::DuplicateFlow("trip")
    ));
}

#[tokio::test]
async fn a_handle_needs_a_registered_flow_of_its_own_type() {
    let database = trip::database().await;
    let pool = database.pool();
    let engine = Engine::builder(pool.clone()).build().await.unwrap();
    assert!(
        engine
            .handle::<TripFlow>()
            .unwrap_err()
            .to_string()
            .contains("`trip`")
    );
    let engine = Engine::builder(pool).flow(Other).build().await.unwrap();
    assert!(
        engine.handle::<TripFlow>().is_err(),
        "the name is the same, the type is not"
    );
}

#[tokio::test]
async fn odd_leases_and_retentions_are_refused() {
    let database = trip::database().await;
    let pool = database.pool();
    for lease in [Duration::from_millis(99), Duration::from_secs(601)] {
        let options = FlowOptions::new().lease(lease);
        let built = Engine::builder(pool.clone())
            .flow_with(TripFlow::default(), options)
            .build()
            .await;
        assert!(matches!(built.unwrap_err(), BuildError::Lease { .. }));
    }
    let options = FlowOptions::new().retention(Duration::from_secs(14));
    let built = Engine::builder(pool)
        .flow_with(TripFlow::default(), options)
        .build()
        .await;
    assert!(matches!(built.unwrap_err(), BuildError::Retention { .. }));
}

#[tokio::test]
async fn an_engine_without_its_tables_says_what_to_do() {
    let database = TestDatabase::empty().await;
    let built = Engine::builder(database.pool()).build().await.unwrap_err();
    assert!(
        built.to_string().contains("idempotent_core::migrate"),
        "{built}"
    );
}

#[tokio::test]
async fn ten_processes_migrate_at_once() {
    let database = TestDatabase::empty().await;
    // A strict default isolation must not make them fail.
    let strict = database
        .options()
        .options([("default_transaction_isolation", "serializable")]);
    let migrations: Vec<_> = (0..10)
        .map(|_| tokio::spawn(migrate(strict.clone())))
        .collect();
    for migration in migrations {
        migration.await.unwrap();
    }
    assert_eq!(trip::count(&database, "idempotent_migrations").await, 1);
    assert_eq!(trip::count(&database, "idempotency_keys").await, 0);
}

async fn migrate(options: PgConnectOptions) {
    let pool = pool_options().max_connections(1).connect_lazy_with(options);
    idempotent_core::migrate(&pool).await.unwrap();
}

/// The application's own migrations table, and its versions, are not in the way.
#[tokio::test]
async fn the_application_has_its_own_migrations_table() {
    use sqlx::SqlSafeStr;
    use sqlx::migrate::{Migration, MigrationType, Migrator};

    let database = TestDatabase::empty().await;
    let pool = database.pool();
    for _ in 0..2 {
        let sql = "CREATE TABLE things (id bigint)".into_sql_str();
        let migration = Migration::new(1, "things".into(), MigrationType::Simple, sql, false);
        idempotent_core::migrate(&pool).await.unwrap();
        idempotent_core::migrate_with(&pool, Migrator::with_migrations(vec![migration]))
            .await
            .unwrap();
    }
    assert_eq!(trip::count(&database, "_sqlx_migrations").await, 1);
    assert_eq!(trip::count(&database, "idempotent_migrations").await, 1);
}

/// The database's default may be serializable: claims that conflict are run again.
#[tokio::test]
async fn a_serializable_default_is_no_obstacle() {
    let database = trip::database().await;
    let strict = database
        .options()
        .options([("default_transaction_isolation", "serializable")]);
    let flow = TripFlow::default();
    let trips = flow.run_by(pool_options().connect_lazy_with(strict)).await;
    let running: Vec<_> = (0..20)
        .map(|n| {
            trips
                .start(trip::key(&format!("k{n}")), trip::trip_to("mars"))
                .unwrap()
        })
        .collect();
    for (n, running) in running.into_iter().enumerate() {
        // Run again a bounded number of times, after which the client is asked to.
        let mut answer = running.wait().await;
        while let Err(RunError::Retry { .. }) = answer {
            let key = trip::key(&format!("k{n}"));
            answer = trips.run(key, trip::trip_to("mars")).await;
        }
        assert_eq!(answer.unwrap().reply().status(), 201);
    }
    assert_eq!(flow.outside.payments(), 20);
}
