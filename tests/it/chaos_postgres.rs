//! C20: PostgreSQL itself is killed, in the middle of whatever the engine is doing, and started
//! again. The engine is not: everything must finish by itself, and once.

use std::time::Duration;

use idempotent_core::embedded::{Embedded, EmbeddedError};
use idempotent_core::{Engine, FlowOptions, Handle, RunError};
use sqlx::postgres::{PgConnectOptions, PgPool};
use tests::database::pool_options;
use tests::proxy::{Point, Proxy};
use tests::trip::{self, Act, Gate, PATIENCE, TripError, TripFlow, key, trip_to};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};

use crate::chaos::Process;

const CHECKPOINT: &str = "SET recovery_point = $5, state = $6, attempts = 0";
const FINISH: &str = "SET recovery_point = 'finished'";
const TAKEOVER: &str = "attempts = attempts + 1";
const REAP: &str = "DELETE FROM idempotency_keys";

/// The slowest recovery is a lease, a poll and a backoff behind the restart.
const LEASE: Duration = Duration::from_secs(2);

fn options() -> FlowOptions {
    FlowOptions::new()
        .lease(LEASE)
        .backoff(Duration::from_millis(10), Duration::from_millis(50))
}

/// A server of the test's own: nobody else minds when it is killed. Commits are synchronous, but
/// nothing is forced to the disk: what the operating system has, survives a killed server.
struct Postgres {
    /// None only while a thread kills or starts it.
    server: Option<Embedded>,
    options: PgConnectOptions,
    /// The test's own eyes.
    pool: PgPool,
}

impl Postgres {
    async fn start() -> Self {
        let started = spawn_blocking(|| Embedded::builder().fsync(false).start());
        let server = started.await.unwrap().unwrap();
        let options = server.connect_options();
        let pool = pool_options().connect_lazy_with(options.clone());
        idempotent_core::migrate(&pool).await.unwrap();
        sqlx::raw_sql(trip::TABLE).execute(&pool).await.unwrap();
        Self {
            server: Some(server),
            options,
            pool,
        }
    }

    async fn engine(&self, flow: &TripFlow, database: &PgConnectOptions) -> Engine {
        // As a program would: stale connections are the engine's to find.
        let pool = pool_options().test_before_acquire(false);
        Engine::builder(pool.connect_lazy_with(database.clone()))
            .flow_with(flow.clone(), options())
            .build()
            .await
            .unwrap()
    }

    /// SIGKILL to the postmaster; its children follow.
    async fn kill(&mut self) {
        self.order(Embedded::kill).await;
    }

    async fn restart(&mut self) {
        self.order(Embedded::restart).await;
    }

    async fn order(&mut self, order: fn(&mut Embedded) -> Result<(), EmbeddedError>) {
        let mut server = self.server.take().unwrap();
        let carried_out = spawn_blocking(move || (order(&mut server), server));
        let (done, server) = carried_out.await.unwrap();
        self.server = Some(server);
        done.unwrap();
    }

    /// What was committed until now survives: a claim commits asynchronously, and a synchronous
    /// commit takes it along.
    async fn flush(&self) {
        let sql = "SELECT pg_logical_emit_message(true, 'test', 'a commit')";
        sqlx::query(sql).execute(&self.pool).await.unwrap();
    }

    /// Waits until a query says true.
    async fn until(&self, what: &str, sql: &'static str) {
        let deadline = Instant::now() + PATIENCE;
        while !sqlx::query_scalar::<_, bool>(sql)
            .fetch_one(&self.pool)
            .await
            .unwrap()
        {
            if Instant::now() >= deadline {
                let rows = "SELECT coalesce(string_agg(to_jsonb(k)::text, E'\n'), 'nothing')
                            FROM idempotency_keys AS k WHERE finished_at IS NULL";
                let left: String = self.scalar(rows).await;
                panic!("not: {what}; unfinished:\n{left}");
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    async fn all_finish(&self) {
        self.until(
            "finished",
            "SELECT bool_and(finished_at IS NOT NULL) FROM idempotency_keys",
        )
        .await;
    }

    async fn scalar<T>(&self, sql: &'static str) -> T
    where
        T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
    {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    /// Each trip was made and paid once, and each late client gets the stored reply.
    async fn done_once(&self, trips: &Handle<TripFlow>, flow: &TripFlow, goals: &[String]) {
        let made: Vec<(String, String)> =
            sqlx::query_as("SELECT goal, state FROM trips ORDER BY goal")
                .fetch_all(&self.pool)
                .await
                .unwrap();
        let mut expected: Vec<_> = goals
            .iter()
            .map(|goal| (goal.clone(), "paid".to_owned()))
            .collect();
        expected.sort();
        assert_eq!(made, expected);
        assert_eq!(flow.outside.payments(), goals.len());
        for goal in goals {
            let late = trips.run(key(goal), trip_to(goal)).await.unwrap();
            assert!(late.is_replayed(), "{goal}");
        }
    }
}

/// Leaves a flow as a process that was killed does: its runtime stops while a phase runs.
async fn die_in(phase: &'static str, goal: &str, flow: &TripFlow, postgres: &Postgres) {
    let process = Process::start();
    let gate = flow.script.hold(phase);
    let (name, flow, database) = (goal.to_owned(), flow.clone(), postgres.options.clone());
    process.run(async move {
        let pool = pool_options().connect_lazy_with(database);
        let trips = flow.run_with(pool, options()).await;
        let _ = trips.run(key(&name), trip_to(&name)).await;
    });
    gate.reached().await;
    postgres.flush().await;
    drop(process);
}

#[tokio::test]
async fn postgres_killed_while_a_phase_runs() {
    let mut postgres = Postgres::start().await;
    let flow = TripFlow::default();
    let engine = postgres.engine(&flow, &postgres.options).await;
    let workers = engine.workers().start();
    let trips = engine.handle::<TripFlow>().unwrap();
    let mut goals = Vec::new();
    for phase in ["create", "before pay", "pay", "finish"] {
        for goes_on_while_down in [true, false] {
            let goal = format!("{phase}, goes on while down: {goes_on_while_down}");
            let gate = flow.script.hold(phase);
            let running = trips.start(key(&goal), trip_to(&goal)).unwrap();
            gate.reached().await;
            postgres.flush().await;
            postgres.kill().await;
            if goes_on_while_down {
                gate.open();
            }
            postgres.restart().await;
            gate.open();
            // The client is answered, or told to ask again; it does not.
            let told = timeout(PATIENCE, running.wait()).await.unwrap();
            assert!(
                matches!(
                    told,
                    Ok(_)
                        | Err(RunError::Retry { .. }
                            | RunError::Unavailable { .. }
                            | RunError::InProgress { .. })
                ),
                "{goal}: {told:?}"
            );
            postgres.all_finish().await;
            goals.push(goal);
        }
    }
    postgres.done_once(&trips, &flow, &goals).await;
    workers.stop().await;
}

/// The worst moment: nobody knows whether the commit that was on its way has happened.
#[tokio::test]
async fn postgres_killed_while_a_commit_is_on_its_way() {
    let mut postgres = Postgres::start().await;
    let flow = TripFlow::default();
    let proxy = Proxy::start(&postgres.options);
    let database = proxy.connect_options(&postgres.options);
    let engine = postgres.engine(&flow, &database).await;
    let workers = engine.workers().start();
    let trips = engine.handle::<TripFlow>().unwrap();
    let mut goals = Vec::new();
    for phase_end in [CHECKPOINT, FINISH] {
        for arrived in [true, false] {
            let goal = format!("{phase_end}, arrived: {arrived}");
            let commit = Point::commit().after(phase_end);
            let held = if arrived {
                proxy.hold_answer(commit)
            } else {
                proxy.hold(commit)
            };
            let running = trips.start(key(&goal), trip_to(&goal)).unwrap();
            held.reached().await;
            postgres.flush().await;
            postgres.kill().await;
            // Cut, so that whoever waits for the answer never gets it.
            held.disarm();
            postgres.restart().await;
            let _ = timeout(PATIENCE, running.wait()).await.unwrap();
            postgres.all_finish().await;
            goals.push(goal);
        }
    }
    postgres.done_once(&trips, &flow, &goals).await;
    // What was committed is not done again, nor is what the outside gave asked for again.
    assert_eq!(flow.outside.calls().len(), goals.len());
    workers.stop().await;
}

/// A claim is committed asynchronously, so a killed server may have forgotten it, if nothing else
/// was committed since. Then nothing had happened, nobody was told otherwise, and a retry begins
/// anew.
#[tokio::test]
async fn a_claim_that_postgres_forgot_is_claimed_again() {
    let mut postgres = Postgres::start().await;
    let flow = TripFlow::default();
    let engine = postgres.engine(&flow, &postgres.options).await;
    let workers = engine.workers().start();
    let trips = engine.handle::<TripFlow>().unwrap();
    let mut goals = Vec::new();
    for round in 0..4 {
        let goal = format!("trip {round}");
        let gate = flow.script.hold("create");
        let running = trips.start(key(&goal), trip_to(&goal)).unwrap();
        gate.reached().await;
        postgres.kill().await;
        postgres.restart().await;
        gate.open();
        let mut told = timeout(PATIENCE, running.wait()).await.unwrap();
        let deadline = Instant::now() + PATIENCE;
        while told.is_err() {
            assert!(Instant::now() < deadline, "still {told:?}");
            sleep(Duration::from_millis(50)).await;
            told = trips.run(key(&goal), trip_to(&goal)).await;
        }
        assert_eq!(told.unwrap().reply().status(), 201);
        goals.push(goal);
    }
    postgres.done_once(&trips, &flow, &goals).await;
    workers.stop().await;
}

#[tokio::test]
async fn postgres_killed_during_a_recovery() {
    let mut postgres = Postgres::start().await;
    let flow = TripFlow::default();
    let proxy = Proxy::start(&postgres.options);
    let database = proxy.connect_options(&postgres.options);
    let engine = postgres.engine(&flow, &database).await;
    let workers = engine.workers().start();
    let mut goals = Vec::new();
    // In the phase that the takeover runs.
    for phase in ["create", "before pay", "pay", "finish"] {
        let goal = format!("taken over in {phase}");
        die_in(phase, &goal, &flow, &postgres).await;
        let gate = flow.script.hold(phase);
        gate.reached().await;
        postgres.kill().await;
        postgres.restart().await;
        gate.open();
        postgres.all_finish().await;
        goals.push(goal);
    }
    // In the takeover itself: before the server has it, and when its answer is on the way.
    for is_done in [false, true] {
        let goal = format!("taken over, done: {is_done}");
        let held = if is_done {
            proxy.hold_answer(TAKEOVER)
        } else {
            proxy.hold(TAKEOVER)
        };
        die_in("pay", &goal, &flow, &postgres).await;
        held.reached().await;
        postgres.kill().await;
        held.release();
        postgres.restart().await;
        postgres.all_finish().await;
        goals.push(goal);
    }
    let trips = engine.handle::<TripFlow>().unwrap();
    postgres.done_once(&trips, &flow, &goals).await;
    workers.stop().await;
}

#[tokio::test]
async fn postgres_killed_while_the_completer_works_through_many_flows() {
    let mut postgres = Postgres::start().await;
    let flow = TripFlow::default();
    let engine = postgres.engine(&flow, &postgres.options).await;
    let trips = engine.handle::<TripFlow>().unwrap();
    let goals: Vec<_> = (0..20).map(|n| format!("trip {n:02}")).collect();
    for goal in &goals {
        flow.script.next("before pay", Act::Fail(TripError::Retry));
        trips.run(key(goal), trip_to(goal)).await.unwrap_err();
    }
    // Eight pass; then two stand in the call, and two that have passed that in the transaction.
    let mut gates = Vec::new();
    for phase in ["pay", "finish"] {
        for _ in 0..8 {
            let passed = Gate::default();
            passed.open();
            flow.script.next(phase, Act::Wait(passed));
        }
        gates.extend([flow.script.hold(phase), flow.script.hold(phase)]);
    }
    let workers = engine.workers().concurrency(4).start();
    for gate in &gates {
        gate.reached().await;
    }
    let finished = "SELECT count(*) FROM idempotency_keys WHERE finished_at IS NOT NULL";
    assert_eq!(postgres.scalar::<i64>(finished).await, 8);
    postgres.kill().await;
    gates[0].open();
    gates[2].open();
    // Down for longer than a lease.
    sleep(LEASE * 3 / 2).await;
    postgres.restart().await;
    gates.iter().for_each(Gate::open);
    postgres.all_finish().await;
    postgres.done_once(&trips, &flow, &goals).await;
    workers.stop().await;
}

#[tokio::test]
async fn postgres_killed_while_the_reaper_deletes() {
    let mut postgres = Postgres::start().await;
    let flow = TripFlow::default();
    let proxy = Proxy::start(&postgres.options);
    let database = proxy.connect_options(&postgres.options);
    let engine = Engine::builder(pool_options().connect_lazy_with(database))
        .flow_with(flow.clone(), options().retention(Duration::from_secs(60)))
        .build()
        .await
        .unwrap();
    let trips = engine.handle::<TripFlow>().unwrap();
    trips.run(key("young"), trip_to("young")).await.unwrap();
    // Old ones, with old ids; and a reaper that stands still at the end of its second batch of 500
    // as long as the test has the lock, which a killed server forgets.
    sqlx::raw_sql(
        "INSERT INTO idempotency_keys
         SELECT (jsonb_populate_record(young, jsonb_build_object(
             'id', '00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'), 'key', 'old ' || n,
             'created_at', now() - interval '1 day', 'finished_at', now() - interval '1 day'))).*
         FROM idempotency_keys AS young, generate_series(1, 1200) AS n;
         CREATE FUNCTION stand_still() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             IF (SELECT count(*) FROM idempotency_keys) < 600 THEN
                 PERFORM pg_advisory_xact_lock(4711);
             END IF;
             RETURN NULL;
         END $$;
         CREATE TRIGGER stand_still AFTER DELETE ON idempotency_keys
         FOR EACH STATEMENT EXECUTE FUNCTION stand_still()",
    )
    .execute(&postgres.pool)
    .await
    .unwrap();
    let mut locking = postgres.pool.acquire().await.unwrap();
    sqlx::query("SELECT pg_advisory_lock(4711)")
        .execute(&mut *locking)
        .await
        .unwrap();
    let second = proxy.hold(Point::containing(REAP).nth(2));
    let workers = engine.workers().reap_every(Duration::from_secs(1)).start();
    second.reached().await;
    second.release();
    postgres
        .until(
            "the reaper stands still",
            "SELECT EXISTS (SELECT FROM pg_stat_activity
                            WHERE query LIKE 'DELETE FROM idempotency_keys%' AND wait_event = 'advisory')",
        )
        .await;
    postgres.kill().await;
    drop(locking);
    postgres.restart().await;
    // Requests do not mind.
    trips.run(key("new"), trip_to("new")).await.unwrap();
    postgres
        .until(
            "reaped",
            "SELECT NOT EXISTS (SELECT FROM idempotency_keys WHERE key LIKE 'old%')",
        )
        .await;
    let goals = ["new".to_owned(), "young".to_owned()];
    postgres.done_once(&trips, &flow, &goals).await;
    workers.stop().await;
}
