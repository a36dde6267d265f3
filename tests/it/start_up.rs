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

/// C22: what a new version cannot go on with is found when it starts, named, and left as it is.
#[tokio::test]
async fn flows_that_a_new_version_does_not_know_are_named_at_start_up() {
    use idempotent_core::OnStranded;
    use tests::trip::{Act, TripError};

    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;
    for name in ["a", "b", "c", "fine"] {
        flow.script.next("before pay", Act::Fail(TripError::Retry));
        let trip = trips.run(trip::key(name), trip::trip_to(name)).await;
        trip.unwrap_err();
    }
    let changes = [
        "UPDATE idempotency_keys SET recovery_point = 'teleported' WHERE key IN ('a', 'b')",
        r#"UPDATE idempotency_keys SET request = '{"place": 1}' WHERE key = 'c'"#,
    ];
    for change in changes {
        sqlx::query(change).execute(&database.pool()).await.unwrap();
    }
    let before = trip::everything(&database).await;

    let engine = |policy| {
        let builder = Engine::builder(database.pool()).flow(flow.clone());
        builder.on_stranded(policy).build()
    };
    let stranded = engine(OnStranded::Warn)
        .await
        .unwrap()
        .stranded()
        .await
        .unwrap();
    let named: Vec<_> = stranded
        .iter()
        .map(|some| (some.keys, some.point.as_str()))
        .collect();
    assert_eq!(named, [(1, "created"), (2, "teleported")]);
    assert!(stranded[0].reason.contains("goal"), "{}", stranded[0]);
    let refused = engine(OnStranded::Refuse).await.unwrap_err().to_string();
    assert!(
        refused.contains("2 of flow `trip` at `teleported`"),
        "{refused}"
    );
    assert_eq!(trip::everything(&database).await, before);
}

/// A flow that kills its process each time, so that no attempt can say why it ended.
#[tokio::test]
async fn a_flow_whose_attempts_end_without_a_word_is_stuck_in_the_end() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let hour = Duration::from_secs(3600);
    let options = FlowOptions::new().retry_attempts(3, hour);
    let gate = flow.script.hold("before pay");
    let dead = flow.run_with(database.pool(), options).await;
    let _never = dead.start(trip::key("k"), trip::trip_to("mars")).unwrap();
    gate.reached().await;
    let builder = Engine::builder(database.pool()).flow_with(flow.clone(), options);
    let engine = builder.build().await.unwrap();
    // As if it had been taken over often, and each time had died.
    trip::expire_leases(&database).await;
    let died =
        "UPDATE idempotency_keys SET attempts = 3, last_error = jsonb_build_object('class', 'lost',
                'first_at', statement_timestamp() - interval '2 hours')";
    sqlx::query(died).execute(&database.pool()).await.unwrap();

    assert_eq!(engine.complete_once().await.unwrap(), 0);
    let trips = engine.handle::<TripFlow>().unwrap();
    let told = trips
        .run(trip::key("k"), trip::trip_to("mars"))
        .await
        .unwrap_err();
    assert!(matches!(told, RunError::Stuck), "{told:?}");
    let history: serde_json::Value = sqlx::query_scalar("SELECT history FROM idempotency_keys")
        .fetch_one(&database.pool())
        .await
        .unwrap();
    assert_eq!(history[0]["event"], "lost", "{history:#}");
}
