//! Processes that are frozen at the worst moment, stopped, or killed: somebody else goes on, soon,
//! and nobody waits for ever.

use std::time::Duration;

use idempotent_core::{Engine, FlowOptions, RunError};
use serde_json::{Value, json};
use sqlx::postgres::PgPool;
use tests::database::{TestDatabase, pool_options};
use tests::proxy::{Point, Proxy};
use tests::server::{Server, ServerConfig, http};
use tests::trip::{self, PATIENCE, TripFlow, key, trip_to};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

const CHECKPOINT: &str = "SET recovery_point = $5, state = $6, attempts = 0";
const FINISH: &str = "SET recovery_point = 'finished'";

/// The database, and a gateway that outlives the servers, as the outside does.
pub(crate) struct World {
    database: TestDatabase,
    pub(crate) pool: PgPool,
    gateway: Server,
}

impl World {
    pub(crate) async fn start() -> Self {
        let database = TestDatabase::from_template("chaos", async |pool| {
            rides_app::database::migrate(&pool).await?;
            rides_app::users::add(&pool, "alice", "alice-token").await?;
            Ok(())
        })
        .await;
        let gateway = Server::start(ServerConfig::gateway(&database.url())).await;
        let pool = database.pool();
        Self {
            database,
            pool,
            gateway,
        }
    }

    pub(crate) fn config(&self, options: &[&str]) -> ServerConfig {
        self.config_through(&self.database.url(), options)
    }

    /// A server that reaches the database by way of something before it.
    fn config_through(&self, database_url: &str, options: &[&str]) -> ServerConfig {
        let config = ServerConfig::serve(database_url).args(options);
        config.arg("--gateway-url").arg(self.gateway.url(""))
    }

    async fn server(&self, options: &[&str]) -> Server {
        Server::start(self.config(options)).await
    }

    pub(crate) async fn gateway_is_up(&self) -> bool {
        let asked = http().get(self.gateway.url("/healthz")).send().await;
        asked.is_ok_and(|answer| answer.status() == 200)
    }

    pub(crate) async fn ask<T>(&self, sql: &'static str) -> T
    where
        T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
    {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    /// Waits until a query says true.
    async fn until(&self, what: &str, sql: &'static str) {
        trip::until(&self.pool, what, sql).await;
    }

    /// How long from `since` until the latest ride is in other hands: it may be let go again soon,
    /// but the fence stays.
    async fn taken_from(&self, before: i64, since: Instant) -> Duration {
        let sql =
            "SELECT fence > $1 FROM idempotency_keys WHERE flow = 'ride' ORDER BY id DESC LIMIT 1";
        let deadline = since + PATIENCE;
        while !sqlx::query_scalar::<_, bool>(sql)
            .bind(before)
            .fetch_one(&self.pool)
            .await
            .unwrap()
        {
            assert!(Instant::now() < deadline, "nobody takes the key over");
            sleep(Duration::from_millis(5)).await;
        }
        since.elapsed()
    }

    /// What there is, to the last column.
    async fn everything(&self) -> Vec<Value> {
        let sql = "SELECT to_jsonb(k) FROM idempotency_keys AS k UNION ALL SELECT to_jsonb(r) FROM rides AS r
                   UNION ALL SELECT to_jsonb(c) FROM gateway.charges AS c
                   UNION ALL SELECT to_jsonb(r) FROM gateway.receipts AS r ORDER BY 1";
        let everything = sqlx::query_scalar(sql).fetch_all(&self.pool);
        everything.await.unwrap()
    }
}

/// A process of its own within this one: a runtime on one thread, which can be stopped or let die.
pub(crate) struct Process {
    /// None only when it is being dropped.
    runtime: Option<Runtime>,
}

impl Process {
    pub(crate) fn start() -> Self {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build();
        Self {
            runtime: Some(runtime.unwrap()),
        }
    }

    pub(crate) fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.runtime.as_ref().unwrap().spawn(work)
    }

    /// Nothing moves in it until what is returned is dropped.
    fn freeze(&self) -> std::sync::mpsc::Sender<()> {
        let (thaw, thawed) = std::sync::mpsc::channel();
        self.run(async move { thawed.recv() });
        thaw
    }
}

/// It dies in the middle of what it does, without a word.
impl Drop for Process {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

pub(crate) async fn send(
    client: &reqwest::Client,
    url: &str,
    key: &str,
    body: &Value,
) -> Option<(u16, Vec<u8>)> {
    let request = client.post(url).bearer_auth("alice-token");
    let sent = request.header("idempotency-key", key).json(body).send();
    let response = sent.await.ok()?;
    let status = response.status().as_u16();
    Some((status, response.bytes().await.ok()?.to_vec()))
}

pub(crate) fn code(body: &[u8]) -> Value {
    serde_json::from_slice::<Value>(body).unwrap_or_default()["code"].clone()
}

// Frozen -----------------------------------------------------------------------------------------

/// Asks again and again while a process stands still with its locks held: told each time within
/// moments that the request is in progress, until somebody has taken it over.
async fn retry_beside_a_frozen_one(server: &Server, body: &Value) -> (Vec<u8>, usize) {
    let (client, url) = (http(), server.url("/api/rides"));
    let deadline = Instant::now() + PATIENCE;
    for told in 0.. {
        let asked = Instant::now();
        let (status, answer) = send(&client, &url, "k", body).await.unwrap();
        assert!(
            asked.elapsed() < Duration::from_secs(3),
            "waited {:?}",
            asked.elapsed()
        );
        if status == 201 {
            return (answer, told);
        }
        assert_eq!((status, code(&answer)), (409, "request_in_progress".into()));
        assert!(Instant::now() < deadline, "in progress for ever");
        sleep(Duration::from_millis(50)).await;
    }
    unreachable!()
}

/// A real process, stopped by SIGSTOP between its checkpoint and its commit; it wakes when all is
/// over, and its commit is still on its way.
#[tokio::test]
async fn a_server_frozen_before_its_commit_is_succeeded_and_changes_nothing() {
    for phase_end in [CHECKPOINT, FINISH] {
        let world = World::start().await;
        let proxy = Proxy::start(&world.database.options());
        let through = proxy.url(&world.database.options());
        let frozen = Server::start(world.config_through(&through, &["--lease", "1s"])).await;
        let other = world.server(&["--lease", "1s"]).await;
        let held = proxy.hold(Point::commit().after(phase_end));
        let body = json!({"amountCents": 2000});

        let (client, url) = (http(), frozen.url("/api/rides"));
        let (woken, receipt) = tokio::join!(send(&client, &url, "k", &body), async {
            held.reached().await;
            frozen.freeze();
            let locked = "SELECT count(*) = 1 FROM pg_stat_activity
                          WHERE datname = current_database() AND state = 'idle in transaction'";
            world.until("its transaction is open", locked).await;
            let (receipt, told) = retry_beside_a_frozen_one(&other, &body).await;
            assert!(told > 0, "the locks were in nobody's way");
            world.until("the receipt is sent", FINISHED).await;
            let before = world.everything().await;
            held.release();
            frozen.thaw();
            (receipt, before)
        });
        // Woken, it told its client what is stored, or to ask again.
        let (receipt, before) = receipt;
        let (status, answer) = woken.unwrap();
        match status {
            201 => assert_eq!(answer, receipt),
            status => assert!(matches!(status, 409 | 503), "{status}"),
        }
        assert_eq!(world.everything().await, before, "after {phase_end}");
        let charges: i64 = world.ask("SELECT count(*) FROM gateway.charges").await;
        assert_eq!((charges, before.len()), (1, 5), "{before:#?}");
        let once = send(&client, &url, "k", &body).await.unwrap();
        assert_eq!(once, (201, receipt), "the woken one replays what is stored");
    }
}

/// The same within a process: all of an engine stands on one thread, and that is stopped.
#[tokio::test]
async fn an_engine_frozen_before_its_commit_is_succeeded_and_changes_nothing() {
    let lease = FlowOptions::new().lease(Duration::from_secs(1));
    for (phase_end, calls) in [(CHECKPOINT, 1), (FINISH, 2)] {
        let database = trip::database().await;
        let proxy = Proxy::start(&database.options());
        let flow = TripFlow::default();
        let engine = Engine::builder(database.pool()).flow_with(flow.clone(), lease);
        let other = engine.build().await.unwrap();
        let trips = other.handle::<TripFlow>().unwrap();

        let frozen = Process::start();
        let held = proxy.hold(Point::commit().after(phase_end));
        let (through, zombie) = (proxy.connect_options(&database.options()), flow.clone());
        let woken = frozen.run(async move {
            let pool = pool_options().connect_lazy_with(through);
            let trips = zombie.run_with(pool, lease).await;
            trips.run(key("k"), trip_to("mars")).await
        });
        held.reached().await;
        let ice = frozen.freeze();

        // Nobody asks but the completer, then a client does.
        let workers = other.workers().start();
        let deadline = Instant::now() + PATIENCE;
        let mut told = 0;
        let answer = loop {
            let asked = timeout(Duration::from_secs(3), trips.run(key("k"), trip_to("mars")));
            match asked.await.expect("nobody hangs") {
                Ok(answer) => break answer,
                Err(error) => assert!(matches!(error, RunError::InProgress { .. }), "{error:?}"),
            }
            told += 1;
            assert!(Instant::now() < deadline, "in progress for ever");
            sleep(Duration::from_millis(50)).await;
        };
        assert!(told > 0, "the locks were in nobody's way");
        workers.stop().await;
        let pool = database.pool();
        let everything =
            "SELECT jsonb_agg(to_jsonb(k) || to_jsonb(t)) FROM idempotency_keys AS k, trips AS t";
        let before: Value = sqlx::query_scalar(everything)
            .fetch_one(&pool)
            .await
            .unwrap();
        held.release();
        drop(ice);
        let woken = timeout(PATIENCE, woken).await.unwrap().unwrap();
        match woken {
            Ok(woken) => assert_eq!(woken.reply(), answer.reply()),
            Err(error) => assert!(error.retry_after().is_some(), "{error:?}"),
        }
        let after: Value = sqlx::query_scalar(everything)
            .fetch_one(&pool)
            .await
            .unwrap();
        assert_eq!(after, before);
        assert_eq!(before.as_array().unwrap().len(), 1);
        assert_eq!(
            (flow.outside.calls().len(), flow.outside.payments()),
            (calls, 1)
        );
    }
}

// Handed on --------------------------------------------------------------------------------------

const FENCE: &str =
    "SELECT fence FROM idempotency_keys WHERE finished_at IS NULL AND flow = 'ride'";
const FINISHED: &str = "SELECT bool_and(finished_at IS NOT NULL) FROM idempotency_keys";

/// SIGTERM: another server goes on at once, and not after the lease of 15 s. The first call to the
/// gateway takes its time, or was made and is never answered.
#[tokio::test]
async fn a_stopped_server_hands_on_at_once() {
    let world = World::start().await;
    let staying = world.server(&[]).await;
    for (card, delay) in [
        ("tok_gatewayHang", 0),
        ("tok_gatewayHang", 0),
        ("tok_slow_600", 600),
    ] {
        let mut stopping = world.server(&["--shutdown-grace", "0s"]).await;
        let (client, url) = (http(), stopping.url("/api/rides"));
        let body = json!({"amountCents": 2000, "paymentSource": card});
        let key = uuid::Uuid::new_v4().to_string();
        let asking = tokio::spawn(async move { send(&client, &url, &key, &body).await });
        let calling = "SELECT count(*) = 1 FROM idempotency_keys
                       WHERE recovery_point = 'ride_created' AND holder IS NOT NULL AND finished_at IS NULL";
        world.until("in the call", calling).await;
        let charging =
            "SELECT (SELECT count(*) FROM rides) = (SELECT count(*) FROM gateway.charges)
                        OR EXISTS (SELECT FROM gateway.idempotency_keys WHERE holder IS NOT NULL)";
        world.until("the gateway has the call", charging).await;
        let before: i64 = world.ask(FENCE).await;
        let since = Instant::now();
        let (taken, finished, status) = tokio::join!(
            world.taken_from(before, since),
            async {
                world.until("finished", FINISHED).await;
                since.elapsed()
            },
            stopping.terminate(),
        );
        eprintln!("SIGTERM, {card}: taken over after {taken:?}, finished after {finished:?}");
        assert!(status.success());
        assert!(taken < Duration::from_secs(2), "taken over after {taken:?}");
        // A call that the gateway still works on is refused, and tried again after a backoff.
        let patience = if delay == 0 { 2000 } else { delay + 5000 };
        assert!(
            finished < Duration::from_millis(patience),
            "finished after {finished:?}"
        );
        if let Some((status, answer)) = asking.await.unwrap() {
            assert_eq!(
                (status, code(&answer)),
                (503, "temporarily_unavailable".into())
            );
        }
    }
    assert!(
        world
            .ask::<bool>("SELECT count(*) = 3 FROM rides WHERE status = 'charged'")
            .await
    );
    assert_eq!(
        world
            .ask::<i64>("SELECT count(*) FROM gateway.charges")
            .await,
        3
    );
    drop(staying);
}

/// SIGKILL: nobody is told, so the lease has to run out, and the completer to look.
#[tokio::test]
async fn a_killed_server_is_succeeded_after_its_lease() {
    let world = World::start().await;
    let staying = world.server(&["--lease", "1s"]).await;
    for _ in 0..3 {
        let mut killed = world.server(&["--lease", "1s"]).await;
        let (client, url) = (http(), killed.url("/api/rides"));
        let body = json!({"amountCents": 2000, "paymentSource": "tok_gatewayHang"});
        let key = uuid::Uuid::new_v4().to_string();
        let asking = tokio::spawn(async move { send(&client, &url, &key, &body).await });
        let charged = "SELECT count(*) = (SELECT count(*) FROM gateway.charges) AND bool_or(status = 'created')
                       FROM rides HAVING count(*) > 0 UNION ALL SELECT false";
        world.until("charged", charged).await;
        let before: i64 = world.ask(FENCE).await;
        let since = Instant::now();
        killed.kill();
        let taken = world.taken_from(before, since).await;
        world.until("finished", FINISHED).await;
        eprintln!(
            "SIGKILL: taken over after {taken:?}, finished after {:?}",
            since.elapsed()
        );
        // The lease and the longest poll, and as much again for a busy machine.
        assert!(taken < Duration::from_secs(3), "taken over after {taken:?}");
        assert!(asking.await.unwrap().is_none(), "the client got no answer");
    }
    assert_eq!(
        world
            .ask::<i64>("SELECT count(*) FROM gateway.charges")
            .await,
        3
    );
    drop(staying);
}
