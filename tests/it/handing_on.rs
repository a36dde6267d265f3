//! Going away without leaving anybody waiting: shutdown hands on what runs, staged flows are picked
//! up by whoever is there.

use std::time::Duration;

use idempotent_core::{
    Engine, FlowOptions, FlowReference, Reply, RunError, StageError, Tx, idempotent_flow,
};
use sqlx::Row;
use tests::database::{TestDatabase, pool_options};
use tests::proxy::{Point, Proxy};
use tests::trip::{self, PATIENCE, TripError, TripFlow, TripRequest, key, trip_to};

async fn trips(flow: &TripFlow, database: &TestDatabase) -> Engine {
    let builder = Engine::builder(database.pool()).flow(flow.clone());
    builder.build().await.unwrap()
}

/// What ends within the grace ends; nothing new is taken meanwhile.
#[tokio::test]
async fn a_shutdown_lets_what_runs_come_to_its_end() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let engine = trips(&flow, &database).await;
    let handle = engine.handle::<TripFlow>().unwrap();
    let gate = flow.script.hold("pay");
    let running = handle.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;

    let stopping = tokio::spawn({
        let engine = engine.clone();
        async move { engine.shutdown(PATIENCE).await }
    });
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !matches!(
        handle.start(key("new"), trip_to("venus")),
        Err(RunError::ShuttingDown)
    ) {
        assert!(
            tokio::time::Instant::now() < deadline,
            "requests are still taken"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    gate.open();
    assert!(stopping.await.unwrap(), "everything ended by itself");
    assert_eq!(running.wait().await.unwrap().reply().status(), 201);
}

/// What does not end is released at its recovery point: another process goes on at once, and not
/// after the lease, and the failure is nobody's.
#[tokio::test]
async fn a_shutdown_hands_on_what_does_not_end() {
    for phase in ["create", "before pay", "pay", "finish"] {
        let database = trip::database().await;
        let flow = TripFlow::default();
        let engine = trips(&flow, &database).await;
        let handle = engine.handle::<TripFlow>().unwrap();
        let gate = flow.script.hold(phase);
        let running = handle.start(key("k"), trip_to("mars")).unwrap();
        gate.reached().await;

        assert!(!engine.shutdown(Duration::ZERO).await);
        let told = running.wait().await.unwrap_err();
        assert!(
            matches!(told, RunError::ShuttingDown),
            "in {phase}: {told:?}"
        );
        let row = sqlx::query(
            "SELECT holder IS NULL, last_error IS NULL, stuck_at IS NULL FROM idempotency_keys",
        )
        .fetch_one(&database.pool())
        .await
        .unwrap();
        assert!(
            row.get::<bool, _>(0) && row.get::<bool, _>(1) && row.get::<bool, _>(2),
            "in {phase}"
        );

        let next = flow.run_by(database.pool()).await;
        let answer = next.run(key("k"), trip_to("mars")).await.unwrap();
        assert!(!answer.is_replayed());
        assert_eq!(flow.outside.payments(), 1, "in {phase}");
        assert_eq!(
            trip::trips(&database).await,
            [("mars".to_owned(), "paid".to_owned())]
        );
    }
}

/// Another process finishes what was handed on, by itself and well before the lease would be over.
#[tokio::test]
async fn another_process_takes_over_at_once_after_a_shutdown() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let leaving = trips(&flow, &database).await;
    let staying = trips(&flow, &database).await;
    let workers = staying.workers().start();
    let gate = flow.script.hold("pay");
    let handle = leaving.handle::<TripFlow>().unwrap();
    let _running = handle.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;
    leaving.shutdown(Duration::ZERO).await;
    // A tenth of the lease of 15 s is more than enough, and far too short for the lease itself.
    let taken = tokio::time::timeout(Duration::from_millis(1500), async {
        let pool = database.pool();
        let sql = "SELECT finished_at IS NOT NULL FROM idempotency_keys";
        while !sqlx::query_scalar::<_, bool>(sql)
            .fetch_one(&pool)
            .await
            .unwrap()
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    taken.await.expect("taken over at once");
    workers.stop().await;
}

/// A flow that stages others in its only phase.
struct Parent;

/// The trip, as other flows know it.
struct TripReference;

impl FlowReference for TripReference {
    type Request = TripRequest;
    const FLOW: &'static str = "trip";
}

#[derive(Debug)]
enum ParentError {
    Stage(StageError),
    Trip(TripError),
}

impl std::fmt::Display for ParentError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stage(error) => error.fmt(f),
            Self::Trip(error) => error.fmt(f),
        }
    }
}

impl idempotent_core::PhaseFailure for ParentError {
    fn disposition(&self) -> idempotent_core::Disposition {
        match self {
            Self::Stage(error) => error.disposition(),
            Self::Trip(error) => error.disposition(),
        }
    }
}

#[idempotent_flow(name = "parent", lease = "15s", retention = "48h")]
impl Parent {
    #[atomic(Started -> Finished)]
    async fn stage(
        &self,
        tx: &mut Tx<'_>,
        request: &Vec<String>,
    ) -> Result<Reply<usize>, ParentError> {
        for (number, goal) in request.iter().enumerate() {
            let suffix = if goal == "twice" {
                "same".to_owned()
            } else {
                number.to_string()
            };
            tx.stage(TripReference, &suffix, &trip_to(goal))
                .map_err(ParentError::Stage)?;
        }
        if request.iter().any(|goal| goal == "fail") {
            return Err(ParentError::Trip(TripError::Retry));
        }
        Ok(Reply::ok(request.len()))
    }
}

async fn family(flow: &TripFlow, pool: sqlx::PgPool) -> Engine {
    Engine::builder(pool)
        .flow(Parent)
        .flow(flow.clone())
        .build()
        .await
        .unwrap()
}

async fn children(database: &TestDatabase) -> i64 {
    let sql = "SELECT count(*) FROM idempotency_keys WHERE flow = 'trip' AND path = 'flow:trip'";
    sqlx::query_scalar(sql)
        .fetch_one(&database.pool())
        .await
        .unwrap()
}

#[tokio::test]
async fn a_staged_flow_exists_if_and_only_if_its_phase_commits_and_then_runs() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let engine = family(&flow, database.pool()).await;
    let parents = engine.handle::<Parent>().unwrap();

    let failing = vec!["mars".to_owned(), "fail".to_owned()];
    parents.run(key("failing"), failing).await.unwrap_err();
    assert_eq!(children(&database).await, 0);

    let workers = engine.workers().start();
    let goals = vec!["mars".to_owned(), "venus".to_owned()];
    parents.run(key("k"), goals.clone()).await.unwrap();
    assert!(parents.run(key("k"), goals).await.unwrap().is_replayed());
    let finished =
        "SELECT count(*) = 2 FROM idempotency_keys WHERE flow = 'trip' AND finished_at IS NOT NULL
         AND parent_id = (SELECT id FROM idempotency_keys WHERE key = 'k')";
    trip::until(&database.pool(), "the staged flows have run", finished).await;
    workers.stop().await;
    assert_eq!(children(&database).await, 2);
    assert_eq!(flow.outside.payments(), 2);

    let twice = vec!["twice".to_owned(), "twice".to_owned()];
    let told = parents.run(key("twice"), twice).await.unwrap_err();
    assert!(told.to_string().contains("staged twice"), "{told}");
}

/// Staging costs no round trip, and a phase whose commit was lost stages once.
#[tokio::test]
async fn staging_rides_on_the_checkpoint() {
    let database = trip::database().await;
    let proxy = Proxy::start(&database.options());
    let options = proxy.connect_options(&database.options());
    let pool = pool_options().max_connections(1).connect_lazy_with(options);
    let flow = TripFlow::default();
    let engine = family(&flow, pool).await;
    let parents = engine.handle::<Parent>().unwrap();
    parents
        .run(key("warm"), vec!["mars".to_owned()])
        .await
        .unwrap();
    proxy.reset();
    parents
        .run(key("k"), vec!["mars".to_owned(), "venus".to_owned()])
        .await
        .unwrap();
    // Claim, BEGIN, finish with what was staged, COMMIT.
    assert_eq!(proxy.round_trips(), 4, "{:#?}", proxy.transcript());

    for point in [
        Point::commit().after("staged AS"),
        Point::containing("staged AS"),
    ] {
        let before = children(&database).await;
        let fault = proxy.lose_answer(point);
        let name = format!("lost after {before}");
        let answered = parents.run(key(&name), vec!["pluto".to_owned()]).await;
        fault.fired().await;
        if answered.is_err() {
            parents
                .run(key(&name), vec!["pluto".to_owned()])
                .await
                .unwrap();
        }
        assert_eq!(children(&database).await, before + 1);
    }
}

/// C23: a row with a lower id that commits later is not passed over, since nobody reads by position.
#[tokio::test]
async fn no_staged_flow_is_lost_however_commits_interleave() {
    let database = trip::database().await;
    let proxy = Proxy::start(&database.options());
    let slow = pool_options().connect_lazy_with(proxy.connect_options(&database.options()));
    let flow = TripFlow::default();
    let late = family(&flow, slow).await.handle::<Parent>().unwrap();
    let engine = family(&flow, database.pool()).await;
    let early = engine.handle::<Parent>().unwrap();
    let workers = engine.workers().start();

    // Its children have the lower ids, and commit last.
    let held = proxy.hold(Point::commit().after("staged AS"));
    let running = late.start(key("late"), vec!["mars".to_owned()]).unwrap();
    held.reached().await;
    early
        .run(key("early"), vec!["venus".to_owned()])
        .await
        .unwrap();
    let one = "SELECT count(*) >= 1 FROM idempotency_keys WHERE flow = 'trip' AND finished_at IS NOT NULL";
    let two = "SELECT count(*) >= 2 FROM idempotency_keys WHERE flow = 'trip' AND finished_at IS NOT NULL";
    trip::until(&database.pool(), "the early one has run", one).await;
    held.release();
    running.wait().await.unwrap();
    trip::until(&database.pool(), "the late one has run", two).await;
    workers.stop().await;
}

/// An option nobody should need, and which must not be too short for its lease.
#[tokio::test]
async fn a_child_is_not_reaped_before_its_parent() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let brief = FlowOptions::new().retention(Duration::from_secs(60));
    let builder = Engine::builder(database.pool()).flow(Parent);
    let engine = builder
        .flow_with(flow.clone(), brief)
        .build()
        .await
        .unwrap();
    let parents = engine.handle::<Parent>().unwrap();
    parents
        .run(key("k"), vec!["mars".to_owned()])
        .await
        .unwrap();
    engine.complete_once().await.unwrap();
    let age = "UPDATE idempotency_keys SET finished_at = finished_at - interval '1 hour'";
    sqlx::query(age).execute(&database.pool()).await.unwrap();
    assert_eq!(
        engine.reap_once().await.unwrap().keys,
        0,
        "a repeated parent would stage again"
    );
    let age = "UPDATE idempotency_keys SET finished_at = finished_at - interval '48 hours'";
    sqlx::query(age).execute(&database.pool()).await.unwrap();
    let (first, second) = (
        engine.reap_once().await.unwrap(),
        engine.reap_once().await.unwrap(),
    );
    assert_eq!(first.keys + second.keys, 2);
}
