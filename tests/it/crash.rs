//! Real processes, really killed: whatever the moment, the retry ends with one ride and one charge.

use std::time::Duration;

use serde_json::{Value, json};
use sqlx::postgres::PgPool;
use tests::database::TestDatabase;
use tests::server::{Server, ServerConfig, http};
use tests::trip::{PATIENCE, until};

/// A gateway that outlives the servers, as the outside does.
pub(crate) struct World {
    pub(crate) database: TestDatabase,
    pool: PgPool,
    gateway: Server,
}

impl World {
    pub(crate) async fn start() -> Self {
        let database = TestDatabase::from_template("crash", async |pool| {
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

    pub(crate) async fn server(&self, lease: &str) -> Server {
        self.server_at(&self.database.url(), lease).await
    }

    /// A server that reaches the database by another way.
    pub(crate) async fn server_at(&self, database_url: &str, lease: &str) -> Server {
        let config = ServerConfig::serve(database_url).args(["--lease", lease]);
        Server::start(config.arg("--gateway-url").arg(self.gateway.url(""))).await
    }

    /// Waits until a query says true.
    async fn until(&self, what: &str, sql: &'static str) {
        until(&self.pool, what, sql).await;
    }

    /// Retries until there is an answer, as a client does.
    pub(crate) async fn retry(&self, server: &Server, body: &Value) -> Value {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let response = send(server, body).await.unwrap();
            if response.status() == 201 {
                return response.json().await.unwrap();
            }
            let status = response.status().as_u16();
            let told: Value = response.json().await.unwrap();
            assert!(matches!(status, 409 | 503), "{status} {told}");
            assert!(tokio::time::Instant::now() < deadline, "still {told}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// One ride and one charge, of the same amount, and a finished key.
    pub(crate) async fn holds_one_ride(&self, receipt: &Value) {
        let rows: Vec<(i64, String, String)> =
            sqlx::query_as("SELECT amount_cents, charge_id, status FROM rides")
                .fetch_all(&self.pool)
                .await
                .unwrap();
        let charge = receipt["chargeId"].as_str().unwrap().to_owned();
        assert_eq!(rows, [(2000, charge.clone(), "charged".to_owned())]);
        let charges: Vec<(String, i64)> = sqlx::query_as("SELECT id, amount FROM gateway.charges")
            .fetch_all(&self.pool)
            .await
            .unwrap();
        assert_eq!(charges, [(charge, 2000)]);
        self.until(
            "finished, the receipt too",
            "SELECT bool_and(finished_at IS NOT NULL) AND count(*) = 2 FROM idempotency_keys",
        )
        .await;
        self.until(
            "one receipt was sent",
            "SELECT count(*) = 1 FROM gateway.receipts WHERE charge = (SELECT charge_id FROM rides)",
        )
        .await;
    }
}

pub(crate) async fn send(server: &Server, body: &Value) -> reqwest::Result<reqwest::Response> {
    http()
        .post(server.url("/api/rides"))
        .bearer_auth("alice-token")
        .header("idempotency-key", "k")
        .json(body)
        .send()
        .await
}

const STANDS_BEFORE_THE_CHARGE: &str = "SELECT count(*) = 1 FROM idempotency_keys WHERE recovery_point = 'ride_created' AND holder IS NOT NULL";
const CHARGED: &str = "SELECT count(*) = 1 FROM gateway.charges";

/// Killed before the charge was made: the gateway is still taking its time.
#[tokio::test]
async fn a_server_killed_before_the_charge() {
    let world = World::start().await;
    let mut first = world.server("1s").await;
    let body = json!({"amountCents": 2000, "paymentSource": "tok_slow_700"});
    let (sent, ()) = tokio::join!(send(&first, &body), async {
        world
            .until("before the charge", STANDS_BEFORE_THE_CHARGE)
            .await;
        assert!(
            !sqlx::query_scalar::<_, bool>(CHARGED)
                .fetch_one(&world.pool)
                .await
                .unwrap()
        );
        kill(first.pid());
    });
    assert!(sent.is_err(), "the client got no answer");
    first.kill();

    let second = world.server("1s").await;
    let receipt = world.retry(&second, &body).await;
    world.holds_one_ride(&receipt).await;
}

/// Killed after the charge, before its result was stored: the gateway charged and does not answer.
#[tokio::test]
async fn a_server_killed_after_the_charge() {
    let world = World::start().await;
    let mut first = world.server("1s").await;
    let body = json!({"amountCents": 2000, "paymentSource": "tok_gatewayHang"});
    let (sent, ()) = tokio::join!(send(&first, &body), async {
        world.until("charged", CHARGED).await;
        kill(first.pid());
    });
    assert!(sent.is_err(), "the client got no answer");
    first.kill();

    let second = world.server("1s").await;
    let receipt = world.retry(&second, &body).await;
    world.holds_one_ride(&receipt).await;
}

/// A server frozen past its lease, while another finishes; then it wakes: a real zombie.
#[tokio::test]
async fn a_frozen_server_wakes_up_to_a_finished_flow() {
    let world = World::start().await;
    let first = world.server("1s").await;
    let second = world.server("1s").await;
    let body = json!({"amountCents": 2000, "paymentSource": "tok_slow_700"});
    let (woken, receipt) = tokio::join!(send(&first, &body), async {
        world
            .until("before the charge", STANDS_BEFORE_THE_CHARGE)
            .await;
        first.freeze();
        let receipt = world.retry(&second, &body).await;
        first.thaw();
        receipt
    });
    world.holds_one_ride(&receipt).await;
    // Whatever it tells its client, it is not another ride.
    let woken = woken.unwrap();
    if woken.status() == 201 {
        assert_eq!(woken.json::<Value>().await.unwrap(), receipt);
    } else {
        assert!(matches!(woken.status().as_u16(), 409 | 503));
    }
    world.holds_one_ride(&receipt).await;
}

/// The client never comes back, and nobody starts the server for it: the next start finishes the ride.
#[tokio::test]
async fn a_ride_ends_without_its_client() {
    let world = World::start().await;
    let mut first = world.server("1s").await;
    let body = json!({"amountCents": 2000, "paymentSource": "tok_gatewayHang"});
    let (sent, ()) = tokio::join!(send(&first, &body), async {
        world.until("charged", CHARGED).await;
        kill(first.pid());
    });
    assert!(sent.is_err(), "the client got no answer");
    first.kill();
    let second = world.server("1s").await;
    world
        .until(
            "the ride is charged",
            "SELECT status = 'charged' FROM rides",
        )
        .await;
    let receipt = world.retry(&second, &body).await;
    world.holds_one_ride(&receipt).await;
}

/// C06 with real processes: many clients, two servers, one key.
#[tokio::test]
async fn two_servers_race_on_one_key() {
    let world = World::start().await;
    let servers = [world.server("15s").await, world.server("15s").await];
    let body = json!({"amountCents": 2000});
    let sent: Vec<_> = (0..20)
        .map(|n| {
            let request = http()
                .post(servers[n % 2].url("/api/rides"))
                .bearer_auth("alice-token");
            tokio::spawn(request.header("idempotency-key", "k").json(&body).send())
        })
        .collect();
    let mut first_answers = 0;
    for sent in sent {
        let response = sent.await.unwrap().unwrap();
        match response.status().as_u16() {
            201 => {
                first_answers +=
                    usize::from(!response.headers().contains_key("idempotent-replayed"))
            }
            409 => assert_eq!(
                response.json::<Value>().await.unwrap()["code"],
                "request_in_progress"
            ),
            status => panic!("{status}"),
        }
    }
    assert_eq!(first_answers, 1);
    let receipt = world.retry(&servers[0], &body).await;
    world.holds_one_ride(&receipt).await;
}

/// The first command of the README: a database of its own, the demo users, and Ctrl-C.
#[tokio::test]
async fn the_app_brings_its_own_database_and_stops_cleanly() {
    let data = std::env::temp_dir().join(format!("rides-{}", uuid::Uuid::new_v4().simple()));
    let config = || ServerConfig::command("serve").env("RIDES_DATA_DIR", &data);
    let mut server = Server::start(config()).await;
    let ride = |server: &Server| {
        let request = http()
            .post(server.url("/api/rides"))
            .bearer_auth("demo-alice");
        request
            .header("idempotency-key", "k")
            .json(&json!({"amountCents": 2000}))
            .send()
    };
    let first = ride(&server).await.unwrap();
    assert_eq!(first.status(), 201);
    let first = first.bytes().await.unwrap();

    // Beside it: a user of one's own.
    let added = tokio::process::Command::new(tests::server::binary())
        .args(["users", "add", "carol"])
        .env_remove("DATABASE_URL")
        .env("RIDES_DATA_DIR", &data)
        .output()
        .await
        .unwrap();
    assert!(
        added.status.success(),
        "{}",
        String::from_utf8_lossy(&added.stderr)
    );
    let token = String::from_utf8(added.stdout).unwrap().trim().to_owned();
    let list = http()
        .get(server.url("/api/rides"))
        .bearer_auth(&token)
        .send()
        .await
        .unwrap();
    assert_eq!(list.json::<Value>().await.unwrap(), json!({"rides": []}));

    assert!(server.interrupt().await.success());
    // Killed this time; the database goes with it, and comes back with what was committed.
    let mut killed = Server::start(config()).await;
    killed.kill();
    let server = Server::start(config()).await;
    let replay = ride(&server).await.unwrap();
    assert_eq!(replay.headers()["idempotent-replayed"], "true");
    assert_eq!(replay.bytes().await.unwrap(), first);
    drop(server);
    remove(&data).await;
}

/// The private server may still be stopping in the directory.
async fn remove(data: &std::path::Path) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while std::fs::remove_dir_all(data).is_err() && data.exists() {
        assert!(
            tokio::time::Instant::now() < deadline,
            "{} cannot be removed",
            data.display()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// SIGKILL, without waiting: the test waits for the client to notice.
pub(crate) fn kill(pid: u32) {
    let status = std::process::Command::new("kill")
        .args(["-KILL", &pid.to_string()])
        .status()
        .unwrap();
    assert!(status.success());
}
