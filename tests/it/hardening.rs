//! What once cost a lease, a key or an answer: a COMMIT that is refused for good, a phase or a
//! database that never answers, rows that somebody else has locked, connections that went stale.
//! Each ends in bounded time, and the key is free for the next.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::response::IntoResponse;
use http::{StatusCode, header};
use idempotent_core::http::Problem;
use idempotent_core::{Answer, Engine, FlowOptions, Handle, Reply, RunError, Tx, idempotent_flow};
use sqlx::postgres::PgPool;
use tests::database::{TestDatabase, pool_options};
use tests::proxy::{Point, Proxy};
use tests::trip::{self, Act, PATIENCE, TripError, TripFlow, TripRequest, key, trip_to};
use tokio::time::{Instant, sleep, timeout};

const CLAIM: &str = "INSERT INTO idempotency_keys";
const CHECKPOINT: &str = "SET recovery_point = $5, state = $6, attempts = 0";
const RELEASE: &str = "SET holder = NULL, lease_expires_at = NULL, recovery_point = $5";

/// Between two looks.
const TICK: Duration = Duration::from_millis(10);

fn lease(lease: Duration) -> FlowOptions {
    FlowOptions::new().lease(lease)
}

/// A deferred trigger has its say at COMMIT, with an SQLSTATE that says nothing of commits. It is
/// asked a few times, not for ever, and what the outside gave is kept.
#[tokio::test]
async fn a_commit_that_is_refused_for_good_stops_the_phase() {
    let database = trip::database().await;
    sqlx::raw_sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN RAISE EXCEPTION 'the books are not balanced'; END $$;
         CREATE CONSTRAINT TRIGGER balanced AFTER UPDATE ON trips
         DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    .execute(&database.pool())
    .await
    .unwrap();
    let flow = TripFlow::default();
    let trips = flow
        .run_with(database.pool(), lease(Duration::from_secs(1)))
        .await;

    let told = timeout(PATIENCE, trips.run(key("k"), trip_to("mars"))).await;
    let told = told.expect("it ends").unwrap_err();
    let RunError::Stopped {
        phase: "finish",
        reason,
        ..
    } = &told
    else {
        panic!("{told:?}")
    };
    assert!(reason.contains("the books are not balanced"), "{reason}");
    assert_eq!(flow.outside.calls().len(), 1, "the result was at hand");
    let (point, fence, is_free): (String, i64, bool) =
        sqlx::query_as("SELECT recovery_point, fence, holder IS NULL FROM idempotency_keys")
            .fetch_one(&database.pool())
            .await
            .unwrap();
    assert_eq!((point.as_str(), is_free), ("paid", true));
    assert!(fence < 20, "it took over from itself {fence} times");

    // The books are balanced after all: the flow goes on with the payment it has.
    sqlx::raw_sql("DROP TRIGGER balanced ON trips")
        .execute(&database.pool())
        .await
        .unwrap();
    let answer = trips.run(key("k"), trip_to("mars")).await.unwrap();
    assert_eq!(answer.reply().status(), 201);
    assert_eq!(flow.outside.calls().len(), 1);
}

/// The phase's future is never ready again. Its time, the lease, ends it: the caller is told, and
/// the key is free at once.
#[tokio::test]
async fn a_phase_that_never_ends_is_ended_by_its_time() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let short = lease(Duration::from_millis(500));
    let here = flow.run_with(database.pool(), short).await;
    let elsewhere = flow.run_with(database.pool(), short).await;
    let gate = flow.script.hold("create");
    let running = here.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;

    // The gate stays shut.
    let told = timeout(PATIENCE, running.wait()).await;
    let told = told.expect("it is ended").unwrap_err();
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
    let answer = elsewhere.run(key("k"), trip_to("mars")).await.unwrap();
    assert_eq!(answer.reply().status(), 201);
    assert_eq!(trip::count(&database, "trips").await, 1);
}

/// Half of the rows are locked by somebody else, for several leases' time: the other half does not
/// notice.
#[tokio::test]
async fn locked_rows_do_not_cost_the_leases_of_the_others() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let length = Duration::from_millis(900);
    let here = flow.run_with(database.pool(), lease(length)).await;
    let mut gates = Vec::new();
    let mut running = Vec::new();
    for n in 0..24 {
        let name = if n % 2 == 0 { "locked" } else { "free" };
        let gate = flow.script.hold("pay");
        running.push(
            here.start(key(&format!("{name} {n}")), trip_to("mars"))
                .unwrap(),
        );
        gate.reached().await;
        gates.push(gate);
    }

    let pool = database.pool();
    let mut locking = pool.begin().await.unwrap();
    let sql = "SELECT key FROM idempotency_keys WHERE key LIKE 'locked%' FOR UPDATE";
    let locked: Vec<String> = sqlx::query_scalar(sql)
        .fetch_all(&mut *locking)
        .await
        .unwrap();
    assert_eq!(locked.len(), 12);
    // Time is what this is about: four leases of it.
    let until = Instant::now() + length * 4;
    while Instant::now() < until {
        let over: Vec<String> = sqlx::query_scalar(
            "SELECT key FROM idempotency_keys
             WHERE key LIKE 'free%' AND lease_expires_at <= statement_timestamp()",
        )
        .fetch_all(&pool)
        .await
        .unwrap();
        assert!(over.is_empty(), "nobody locked {over:?}");
        sleep(TICK).await;
    }
    locking.rollback().await.unwrap();
    gates.iter().for_each(trip::Gate::open);
    for running in running {
        assert_eq!(running.wait().await.unwrap().reply().status(), 201);
    }
    assert_eq!(flow.outside.calls().len(), 24);
}

/// No answer and no error, whether the claim arrived or not.
#[tokio::test]
async fn a_database_that_is_silent_to_a_claim_is_not_waited_for() {
    for arrives in [false, true] {
        let _ = told_in_silence(CLAIM, arrives, &TripFlow::default()).await;
    }
}

#[tokio::test]
async fn a_database_that_is_silent_to_a_checkpoint_is_not_waited_for() {
    for arrives in [false, true] {
        let _ = told_in_silence(CHECKPOINT, arrives, &TripFlow::default()).await;
    }
}

/// What is told is the phase's own reason, not the silence behind it.
#[tokio::test]
async fn a_database_that_is_silent_to_a_release_is_not_waited_for() {
    for arrives in [false, true] {
        let flow = TripFlow::default();
        flow.script.next("before pay", Act::Fail(TripError::Retry));
        let told = told_in_silence(RELEASE, arrives, &flow).await;
        let Err(RunError::Retry {
            phase: "pay",
            reason,
            ..
        }) = &told
        else {
            panic!("{told:?}")
        };
        assert_eq!(reason, "the outside is unwell");
    }
}

/// What the caller is told while a statement, or its answer, does not come through; afterwards the
/// flow is done, once.
async fn told_in_silence(point: &str, arrives: bool, flow: &TripFlow) -> Result<Answer, RunError> {
    let database = trip::database().await;
    let proxy = Proxy::start(&database.options());
    let second = Duration::from_secs(1);
    let pool = pool_options()
        .acquire_timeout(second)
        .connect_lazy_with(proxy.connect_options(&database.options()));
    let trips = flow.run_with(pool, lease(second)).await;

    let hold = if arrives {
        proxy.hold_answer(point)
    } else {
        proxy.hold(point)
    };
    let running = trips.start(key("k"), trip_to("mars")).unwrap();
    hold.reached().await;
    let told = timeout(Duration::from_secs(10), running.wait()).await;
    let told = told.unwrap_or_else(|_| panic!("silence at {point}, arrives: {arrives}"));
    if let Err(error) = &told {
        assert!(error.retry_after().is_some(), "{error:?}");
    }

    hold.release();
    let answer = retried(&trips).await;
    assert_eq!(answer.reply().status(), 201, "after the silence at {point}");
    assert_eq!(
        trip::trips(&database).await,
        [("mars".to_owned(), "paid".to_owned())]
    );
    assert_eq!(flow.outside.payments(), 1);
    told
}

/// Retries like a client, until there is an answer.
async fn retried(trips: &Handle<TripFlow>) -> Answer {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match trips.run(key("k"), trip_to("mars")).await {
            Ok(answer) => return answer,
            Err(error) => {
                assert!(error.retry_after().is_some(), "{error:?}");
                assert!(Instant::now() < deadline, "still {error:?}");
            }
        }
        sleep(TICK).await;
    }
}

/// The checkpoint counts the new lease from its statement, not from its COMMIT. When that takes its
/// time, the next renewal is due at once.
#[tokio::test]
async fn a_slow_commit_does_not_leave_a_short_lease() {
    // One of the two comes while a renewal waits for the row, the other while none does.
    tokio::join!(
        commit_that_takes(Duration::from_millis(2300)),
        commit_that_takes(Duration::from_millis(2600)),
    );
}

async fn commit_that_takes(time: Duration) {
    let database = trip::database().await;
    let proxy = Proxy::start(&database.options());
    let pool = pool_options().connect_lazy_with(proxy.connect_options(&database.options()));
    let flow = TripFlow::default();
    let trips = flow.run_with(pool, lease(Duration::from_secs(3))).await;
    let gate = flow.script.hold("before pay");
    let commit = proxy.hold(Point::commit().after(CHECKPOINT));
    let running = trips.start(key("k"), trip_to("mars")).unwrap();
    commit.reached().await;
    // Time is what this is about.
    sleep(time).await;
    commit.release();
    gate.reached().await;

    let looks = database.pool();
    let deadline = Instant::now() + PATIENCE;
    let mut seen: Vec<String> = Vec::new();
    while seen.len() < 3 {
        assert!(Instant::now() < deadline, "only renewed to {seen:?}");
        let (until, is_over): (String, bool) = sqlx::query_as(
            "SELECT lease_expires_at::text, lease_expires_at <= statement_timestamp()
             FROM idempotency_keys",
        )
        .fetch_one(&looks)
        .await
        .unwrap();
        assert!(!is_over, "after a commit of {time:?}; renewed to {seen:?}");
        if seen.last() != Some(&until) {
            seen.push(until);
        }
        sleep(TICK).await;
    }
    gate.open();
    assert_eq!(running.wait().await.unwrap().reply().status(), 201);
    assert_eq!(flow.outside.calls().len(), 1);
}

/// Takes its time.
#[derive(Clone, Default)]
struct Slow {
    takes: Duration,
    ran: Arc<AtomicUsize>,
}

#[idempotent_flow(name = "slow", lease = "15s", retention = "48h")]
impl Slow {
    #[atomic(Started -> Finished, isolation = "serializable")]
    async fn work(&self, tx: &mut Tx<'_>, request: &TripRequest) -> Result<Reply<u32>, TripError> {
        self.ran.fetch_add(1, Ordering::SeqCst);
        let key_id = tx.key().id();
        sqlx::query("INSERT INTO trips (key_id, goal) VALUES ($1, $2)")
            .bind(key_id)
            .bind(&request.goal)
            .execute(&mut **tx)
            .await?;
        sleep(self.takes).await;
        Ok(Reply::ok(1))
    }
}

/// A renewal of its own row would be a conflict for its snapshot: it would run for ever.
#[tokio::test]
async fn a_serializable_phase_that_needs_its_lease_commits_at_first() {
    let database = trip::database().await;
    // Time is what this is about: two thirds of the lease.
    let slow = Slow {
        takes: Duration::from_secs(2),
        ..Slow::default()
    };
    let other = TripFlow::default();
    let engine = Engine::builder(database.pool())
        .flow_with(slow.clone(), lease(Duration::from_secs(3)))
        .flow_with(other.clone(), lease(Duration::from_millis(600)))
        .build()
        .await
        .unwrap();
    let gate = other.script.hold("pay");
    let trips = engine.handle::<TripFlow>().unwrap();
    let held = trips.start(key("other"), trip_to("mars")).unwrap();
    gate.reached().await;

    let looks = database.pool();
    let mut renewed: Vec<String> = Vec::new();
    let slows = engine.handle::<Slow>().unwrap();
    let mut running = pin!(slows.run(key("k"), trip_to("mars")));
    let answer = loop {
        tokio::select! {
            answer = &mut running => break answer.unwrap(),
            () = sleep(TICK) => {}
        }
        let until = "SELECT lease_expires_at::text FROM idempotency_keys WHERE flow = 'trip'";
        let until: String = sqlx::query_scalar(until).fetch_one(&looks).await.unwrap();
        if renewed.last() != Some(&until) {
            renewed.push(until);
        }
    };
    assert_eq!(answer.reply().status(), 200);
    assert_eq!(slow.ran.load(Ordering::SeqCst), 1);
    assert!(renewed.len() > 3, "the other was renewed to {renewed:?}");
    gate.open();
    assert_eq!(held.wait().await.unwrap().reply().status(), 201);
}

/// Renewals have a connection of their own, which `after_connect` never sees. Where that decides
/// which table is meant, leases would run out under their attempts: found at start-up.
#[tokio::test]
async fn a_search_path_that_renewals_do_not_have_is_refused() {
    let database = TestDatabase::empty().await;
    let pool = pool_options()
        .after_connect(|connection, _| {
            Box::pin(async move {
                let sql = "CREATE SCHEMA IF NOT EXISTS app; SET search_path = app";
                sqlx::raw_sql(sql).execute(connection).await?;
                Ok(())
            })
        })
        .connect_lazy_with(database.options());
    idempotent_core::migrate(&pool).await.unwrap();
    let told = built(pool).await.unwrap_err();
    assert!(told.contains("search_path"), "{told}");
    assert!(told.to_lowercase().contains("connect"), "{told}");
    assert!(told.to_lowercase().contains("options"), "{told}");

    // Where every connection has it, renewals have it too.
    let everywhere = database.options().options([("search_path", "app")]);
    built(pool_options().connect_lazy_with(everywhere))
        .await
        .unwrap();
}

async fn built(pool: PgPool) -> Result<Engine, String> {
    let engine = Engine::builder(pool).flow(TripFlow::default());
    engine.build().await.map_err(|error| error.to_string())
}

/// As after a restart of the server, between a phase and its release: more connections are stale
/// than a release has tries for a database in trouble.
#[tokio::test]
async fn a_release_finds_a_connection_behind_many_stale_ones() {
    let database = trip::database().await;
    let proxy = Proxy::start(&database.options());
    let pool = pool_options()
        .test_before_acquire(false)
        .connect_lazy_with(proxy.connect_options(&database.options()));
    let flow = TripFlow::default();
    let trips = flow
        .run_with(pool.clone(), lease(Duration::from_secs(15)))
        .await;
    let mut grown = Vec::new();
    for _ in 0..9 {
        grown.push(pool.acquire().await.unwrap());
    }
    drop(grown);
    let gate = flow.script.hold("before pay");
    flow.script.next("pay", Act::Fail(TripError::Retry));
    let running = trips.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;
    let deadline = Instant::now() + PATIENCE;
    while pool.num_idle() < 9 {
        assert!(Instant::now() < deadline, "{} are idle", pool.num_idle());
        sleep(TICK).await;
    }

    proxy.cut_all().await;
    gate.open();
    let told = running.wait().await.unwrap_err();
    assert!(
        matches!(told, RunError::Retry { phase: "pay", .. }),
        "{told:?}"
    );
    let is_free: bool = sqlx::query_scalar("SELECT holder IS NULL FROM idempotency_keys")
        .fetch_one(&database.pool())
        .await
        .unwrap();
    assert!(is_free, "nobody waits for the lease to run out");
    let answer = trips.run(key("k"), trip_to("mars")).await.unwrap();
    assert_eq!(answer.reply().status(), 201);
    assert_eq!(flow.outside.payments(), 1);
}

/// A flow may say anything, also something that no clock reaches.
#[test]
fn a_retry_after_of_any_length_is_sent() {
    for after in [Duration::MAX, Duration::from_secs(u64::MAX)] {
        let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, "busy", "Busy");
        let response = problem.retry_after(after).into_response();
        let sent = response.headers()[header::RETRY_AFTER].to_str().unwrap();
        assert!(sent.parse::<u64>().unwrap() > 0, "{sent}");
    }
}
