//! The payment gateway over real HTTP, on a real ledger: what a client may rely on when calls race, when
//! gateways are killed, and when the test cards misbehave.

#![allow(clippy::expect_used)]

use std::time::Duration;

use reqwest::{Client, StatusCode};
use rides_app::gateway::{self, Gateway};
use rides_app::payments::{ChargeRequest, GatewayClient, Handling};
use serde_json::Value;
use sqlx::PgPool;
use tests::database::TestDatabase;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

const API_KEY: &str = "sk_test_rides";

/// A migrated ledger and a first gateway on it.
struct Setup {
    database: TestDatabase,
    pool: PgPool,
    gateway: Caller,
}

impl Setup {
    async fn new() -> Self {
        let database = TestDatabase::from_template("gateway", async |pool| {
            Gateway::new(pool).migrate().await?;
            Ok(())
        })
        .await;
        let pool = database.pool();
        let gateway = Caller::to(&serve(pool.clone()).await);
        Self {
            database,
            pool,
            gateway,
        }
    }

    async fn another_gateway(&self) -> Caller {
        Caller::to(&serve(self.database.pool()).await)
    }

    async fn charges(&self) -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM gateway.charges")
            .fetch_one(&self.pool)
            .await
            .expect("counted")
    }

    async fn keys_in_use(&self) -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM gateway.idempotency_keys WHERE holder IS NOT NULL")
            .fetch_one(&self.pool)
            .await
            .expect("counted")
    }

    /// Waits until some call holds a key.
    async fn key_in_use(&self) {
        while self.keys_in_use().await == 0 {
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Makes every marker look left behind long ago.
    async fn expire_markers(&self) {
        sqlx::query("UPDATE gateway.idempotency_keys SET in_use_until = now() - interval '1 second' WHERE holder IS NOT NULL")
            .execute(&self.pool)
            .await
            .expect("expired");
    }
}

async fn serve(pool: PgPool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(gateway::serve(
        listener,
        Gateway::new(pool),
        std::future::pending(),
    ));
    format!("http://{address}")
}

#[derive(Clone)]
struct Caller {
    http: Client,
    url: String,
    api_key: &'static str,
}

#[derive(Debug, Clone, PartialEq)]
struct Answer {
    status: u16,
    replayed: bool,
    body: Vec<u8>,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }

    fn error(&self, name: &str) -> String {
        self.json()["error"][name]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }
}

impl Caller {
    fn to(url: &str) -> Self {
        let http = Client::builder().no_proxy().build().expect("a client");
        Self {
            http,
            url: url.to_owned(),
            api_key: API_KEY,
        }
    }

    async fn charge(&self, key: &str, source: &str) -> Answer {
        self.post(
            Some(key),
            &[("amount", "2000"), ("currency", "usd"), ("source", source)],
        )
        .await
    }

    async fn post(&self, key: Option<&str>, form: &[(&str, &str)]) -> Answer {
        let mut request = self
            .http
            .post(format!("{}/v1/charges", self.url))
            .form(form);
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        self.send(request).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.send(self.http.get(format!("{}{path}", self.url)))
            .await
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Answer {
        let response = request
            .bearer_auth(self.api_key)
            .send()
            .await
            .expect("an answer");
        Answer {
            status: response.status().as_u16(),
            replayed: response
                .headers()
                .get("idempotent-replayed")
                .is_some_and(|value| value == "true"),
            body: response.bytes().await.expect("a body").to_vec(),
        }
    }
}

#[tokio::test]
async fn a_charge_is_replayed_byte_for_byte() {
    let setup = Setup::new().await;
    let form = [
        ("amount", "1"),
        ("currency", "EUR"),
        ("source", "tok_visa"),
        ("description", "Zürich ✓"),
        ("metadata[zebra]", "1"),
        ("metadata[an]", "2"),
    ];
    let first = setup.gateway.post(Some("key"), &form).await;
    let replay = setup.gateway.post(Some("key"), &form).await;

    let charge = first.json();
    assert_eq!((first.status, first.replayed), (200, false));
    assert_eq!((replay.status, replay.replayed), (200, true));
    assert_eq!(first.body, replay.body);
    assert_eq!(charge["object"], "charge");
    assert_eq!(charge["amount"], 1);
    assert_eq!(charge["currency"], "eur");
    assert_eq!(charge["status"], "succeeded");
    assert_eq!(charge["paid"], true);
    assert_eq!(charge["metadata"]["zebra"], "1");
    assert!(
        charge["created"]
            .as_i64()
            .is_some_and(|created| created > 1_700_000_000)
    );
    let id = charge["id"].as_str().expect("an id");
    assert!(id.starts_with("ch_"));
    // The ledger's own view is the same object.
    assert_eq!(
        setup.gateway.get(&format!("/v1/charges/{id}")).await.body,
        first.body
    );
    assert_eq!(setup.charges().await, 1);
}

#[tokio::test]
async fn twenty_calls_on_two_gateways_charge_once() {
    let setup = Setup::new().await;
    let gateways = [setup.gateway.clone(), setup.another_gateway().await];
    for (source, charges) in [("tok_visa", 1), ("tok_slow_300", 2)] {
        let mut calls = JoinSet::new();
        for n in 0..20 {
            let gateway = gateways[n % 2].clone();
            calls.spawn(async move { gateway.charge(source, source).await });
        }
        let answers = calls.join_all().await;
        let first: Vec<_> = answers
            .iter()
            .filter(|answer| answer.status == 200 && !answer.replayed)
            .collect();
        assert_eq!(first.len(), 1, "{answers:?}");
        for answer in &answers {
            match answer.status {
                200 => assert_eq!(answer.body, first[0].body),
                409 => assert_eq!(answer.error("code"), "idempotency_key_in_use"),
                _ => panic!("{answer:?}"),
            }
        }
        if source != "tok_visa" {
            assert!(
                answers.iter().any(|answer| answer.status == 409),
                "{answers:?}"
            );
        }
        assert_eq!(setup.charges().await, charges);
        assert!(gateways[1].charge(source, source).await.replayed);
    }
}

#[tokio::test]
async fn a_key_is_bound_to_its_parameters() {
    let setup = Setup::new().await;
    let first = setup.gateway.charge("key", "tok_visa").await;
    for other in [
        vec![
            ("amount", "2001"),
            ("currency", "usd"),
            ("source", "tok_visa"),
        ],
        vec![
            ("amount", "2000"),
            ("currency", "eur"),
            ("source", "tok_visa"),
        ],
        vec![
            ("amount", "2000"),
            ("currency", "usd"),
            ("source", "tok_slow_1"),
        ],
        vec![
            ("amount", "2000"),
            ("currency", "usd"),
            ("source", "tok_visa"),
            ("metadata[a]", "b"),
        ],
    ] {
        let refused = setup.gateway.post(Some("key"), &other).await;
        assert_eq!(
            (refused.status, refused.error("type").as_str()),
            (400, "idempotency_error"),
            "{other:?}"
        );
    }
    // Also while the first call is in progress, and never disturbing it.
    let slow = tokio::spawn({
        let gateway = setup.gateway.clone();
        async move { gateway.charge("slow", "tok_slow_300").await }
    });
    setup.key_in_use().await;
    assert_eq!(
        setup.gateway.charge("slow", "tok_visa").await.error("type"),
        "idempotency_error"
    );
    assert_eq!(slow.await.expect("joined").status, 200);

    assert_eq!(
        setup.gateway.charge("key", "tok_visa").await.body,
        first.body
    );
    assert_eq!(setup.charges().await, 2);
}

#[tokio::test]
async fn what_was_refused_before_it_began_does_not_bind_a_key() {
    let setup = Setup::new().await;
    let unknown = setup.gateway.charge("key", "tok_nobody").await;
    assert_eq!(
        (unknown.status, unknown.error("code").as_str()),
        (400, "resource_missing")
    );
    assert_eq!(setup.gateway.charge("key", "tok_visa").await.status, 200);
}

#[tokio::test]
async fn keys_and_charges_belong_to_one_api_key() {
    let setup = Setup::new().await;
    let other = Caller {
        api_key: "sk_test_other",
        ..setup.gateway.clone()
    };
    let ours = setup.gateway.charge("key", "tok_visa").await;
    let theirs = other
        .post(
            Some("key"),
            &[("amount", "5"), ("currency", "usd"), ("source", "tok_visa")],
        )
        .await;
    assert_eq!((theirs.status, theirs.replayed), (200, false));
    let id = ours.json()["id"].as_str().expect("an id").to_owned();
    assert_eq!(
        other.get(&format!("/v1/charges/{id}")).await.error("code"),
        "resource_missing"
    );
    assert_eq!(
        other.get("/v1/charges").await.json()["data"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );

    let url = format!("{}/v1/charges", setup.gateway.url);
    let anonymous = setup
        .gateway
        .http
        .post(url)
        .send()
        .await
        .expect("an answer");
    assert_eq!(anonymous.status(), StatusCode::UNAUTHORIZED);
    let body: Value = anonymous.json().await.expect("JSON");
    assert_eq!(body["error"]["type"], "invalid_request_error");
}

#[tokio::test]
async fn without_a_key_every_call_charges() {
    let setup = Setup::new().await;
    let mut ids = Vec::new();
    for amount in ["1", "2", "3"] {
        let form = [
            ("amount", amount),
            ("currency", "usd"),
            ("source", "tok_visa"),
        ];
        ids.push(setup.gateway.post(None, &form).await.json()["id"].clone());
    }
    let listed = setup.gateway.get("/v1/charges?limit=2").await.json();
    assert_eq!(listed["has_more"], true);
    assert_eq!(listed["data"][0]["id"], ids[2]);
    assert_eq!(listed["data"][1]["id"], ids[1]);
    let all = setup.gateway.get("/v1/charges").await.json();
    assert_eq!(
        (
            all["has_more"].clone(),
            all["data"].as_array().map(Vec::len)
        ),
        (Value::Bool(false), Some(3))
    );

    for failing in ["tok_gatewayError", "tok_gatewayError", "tok_gatewayError"] {
        let form = [("amount", "1"), ("currency", "usd"), ("source", failing)];
        assert_eq!(setup.gateway.post(None, &form).await.status, 500);
    }
    assert_eq!(setup.charges().await, 3);
}

#[tokio::test]
async fn a_decline_is_a_remembered_answer() {
    let setup = Setup::new().await;
    let first = setup.gateway.charge("key", "tok_chargeDeclined").await;
    let replay = setup.gateway.charge("key", "tok_chargeDeclined").await;
    assert_eq!((first.status, first.replayed), (402, false));
    assert_eq!(first.error("type"), "card_error");
    assert_eq!(first.error("code"), "card_declined");
    assert_eq!(
        replay,
        Answer {
            replayed: true,
            ..first
        }
    );
    assert_eq!(setup.charges().await, 0);
}

#[tokio::test]
async fn a_failing_gateway_works_the_third_time() {
    let setup = Setup::new().await;
    for key in ["one", "two"] {
        let mut statuses = Vec::new();
        for _ in 0..4 {
            let answer = setup.gateway.charge(key, "tok_gatewayError").await;
            statuses.push((answer.status, answer.replayed));
        }
        assert_eq!(
            statuses,
            [(500, false), (500, false), (200, false), (200, true)]
        );
    }
    assert_eq!(setup.charges().await, 2);
}

#[tokio::test]
async fn a_hanging_gateway_charges_and_replays() {
    let setup = Setup::new().await;
    let never = timeout(
        Duration::from_millis(400),
        setup.gateway.charge("key", "tok_gatewayHang"),
    )
    .await;
    assert!(never.is_err(), "{never:?}");
    assert_eq!(setup.charges().await, 1);
    let replay = setup.gateway.charge("key", "tok_gatewayHang").await;
    assert_eq!((replay.status, replay.replayed), (200, true));
    assert_eq!(setup.charges().await, 1);
}

#[tokio::test]
async fn a_client_that_hangs_up_does_not_stop_a_charge() {
    let setup = Setup::new().await;
    let gone = timeout(
        Duration::from_millis(100),
        setup.gateway.charge("key", "tok_slow_400"),
    )
    .await;
    assert!(gone.is_err());
    assert_eq!(setup.charges().await, 0);
    assert_eq!(
        setup.gateway.charge("key", "tok_slow_400").await.status,
        409
    );
    sleep(Duration::from_millis(600)).await;
    assert_eq!(setup.charges().await, 1);
    assert!(setup.gateway.charge("key", "tok_slow_400").await.replayed);
}

#[test]
fn a_killed_gateways_marker_runs_out() {
    // A runtime of its own dies with everything on it, in the middle of what it did, like a process.
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .expect("a runtime")
    };
    let tests = runtime();
    let setup = tests.block_on(Setup::new());
    let doomed = runtime();
    let victim = doomed.block_on(async { setup.another_gateway().await });
    let call = tests.spawn(async move {
        victim
            .http
            .post(format!("{}/v1/charges", victim.url))
            .bearer_auth(API_KEY)
            .header("idempotency-key", "key")
            .form(&[
                ("amount", "2000"),
                ("currency", "usd"),
                ("source", "tok_slow_300"),
            ])
            .send()
            .await
    });
    tests.block_on(setup.key_in_use());
    doomed.shutdown_background();
    assert!(tests.block_on(call).expect("joined").is_err());

    tests.block_on(async {
        sleep(Duration::from_millis(500)).await;
        assert_eq!((setup.charges().await, setup.keys_in_use().await), (0, 1));
        assert_eq!(
            setup.gateway.charge("key", "tok_slow_300").await.status,
            409
        );
        setup.expire_markers().await;
        let answer = setup.gateway.charge("key", "tok_slow_300").await;
        assert_eq!((answer.status, answer.replayed), (200, false));
        assert_eq!((setup.charges().await, setup.keys_in_use().await), (1, 0));
    });
}

#[tokio::test]
async fn a_marker_from_before_the_clock_was_set_back_counts_as_over() {
    let setup = Setup::new().await;
    setup.gateway.charge("key", "tok_gatewayError").await;
    sqlx::query("UPDATE gateway.idempotency_keys SET holder = gen_random_uuid(), in_use_until = now() + interval '1 day'")
        .execute(&setup.pool)
        .await
        .expect("marked");
    assert_eq!(
        setup.gateway.charge("key", "tok_gatewayError").await.status,
        500
    );
    assert_eq!(
        setup.gateway.charge("key", "tok_gatewayError").await.status,
        200
    );
}

#[tokio::test]
async fn a_call_that_was_taken_over_cannot_charge() {
    let setup = Setup::new().await;
    let call =
        |gateway: Caller| tokio::spawn(async move { gateway.charge("key", "tok_slow_500").await });
    let slow = call(setup.gateway.clone());
    setup.key_in_use().await;
    sleep(Duration::from_millis(150)).await;
    setup.expire_markers().await;
    let successor = call(setup.another_gateway().await);

    let (slow, successor) = (
        slow.await.expect("joined"),
        successor.await.expect("joined"),
    );
    assert_eq!(
        (slow.status, slow.error("code").as_str()),
        (409, "idempotency_key_in_use")
    );
    assert_eq!((successor.status, successor.replayed), (200, false));
    assert_eq!(setup.charges().await, 1);
    assert_eq!(
        setup.gateway.charge("key", "tok_slow_500").await.body,
        successor.body
    );
}

#[tokio::test]
async fn a_ledger_that_fails_leaves_the_key_free() {
    let setup = Setup::new().await;
    let refuse = "ALTER TABLE gateway.charges ADD CONSTRAINT ledger_full CHECK (amount <> 2000)";
    sqlx::query(refuse)
        .execute(&setup.pool)
        .await
        .expect("altered");
    let failed = setup.gateway.charge("key", "tok_visa").await;
    assert_eq!(
        (failed.status, failed.error("type").as_str()),
        (500, "api_error")
    );
    assert_eq!(setup.keys_in_use().await, 0);
    sqlx::query("ALTER TABLE gateway.charges DROP CONSTRAINT ledger_full")
        .execute(&setup.pool)
        .await
        .expect("altered");
    assert_eq!(setup.gateway.charge("key", "tok_visa").await.status, 200);
}

#[tokio::test]
async fn ten_gateways_migrate_at_once() {
    let database = TestDatabase::empty().await;
    let mut starts = JoinSet::new();
    for _ in 0..10 {
        let pool = database.pool();
        starts.spawn(async move { Gateway::new(pool).migrate().await });
    }
    for started in starts.join_all().await {
        started.expect("migrated");
    }
    Gateway::new(database.pool())
        .migrate()
        .await
        .expect("migrated again");
}

#[tokio::test]
async fn a_shutdown_answers_those_who_wait() {
    let setup = Setup::new().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let gateway = Caller::to(&format!(
        "http://{}",
        listener.local_addr().expect("an address")
    ));
    let (stop, stopped) = oneshot::channel();
    let server = tokio::spawn(gateway::serve(
        listener,
        Gateway::new(setup.pool.clone()),
        async {
            let _ = stopped.await;
        },
    ));
    let mut calls = JoinSet::new();
    for source in ["tok_slow_60000", "tok_gatewayHang"] {
        let gateway = gateway.clone();
        calls.spawn(async move { gateway.charge(source, source).await });
    }
    setup.key_in_use().await;
    sleep(Duration::from_millis(200)).await;

    let asked = Instant::now();
    stop.send(()).expect("still serving");
    for answer in calls.join_all().await {
        assert_eq!(answer.status, 503);
    }
    server.await.expect("joined").expect("served");
    assert!(
        asked.elapsed() < Duration::from_secs(2),
        "{:?}",
        asked.elapsed()
    );
    assert_eq!((setup.charges().await, setup.keys_in_use().await), (1, 0));
    assert!(
        setup
            .gateway
            .charge("tok_gatewayHang", "tok_gatewayHang")
            .await
            .replayed
    );
}

#[tokio::test]
async fn wrong_addresses_are_answered_in_the_same_shape() {
    let setup = Setup::new().await;
    assert_eq!(
        setup.gateway.get("/v1/refunds").await.error("type"),
        "invalid_request_error"
    );
    assert_eq!(setup.gateway.get("/v1/charges/ch_%00").await.status, 404);
    assert_eq!(
        setup.gateway.get("/v1/charges/ch_1").await.error("code"),
        "resource_missing"
    );
    assert_eq!(
        setup
            .gateway
            .get("/v1/charges?limit=0")
            .await
            .error("param"),
        "limit"
    );
    let request = setup
        .gateway
        .http
        .post(format!("{}/v1/charges", setup.gateway.url));
    assert_eq!(
        setup.gateway.send(request.json(&[1])).await.error("code"),
        "parameter_invalid_form"
    );
    let huge = "x".repeat(1 << 20);
    assert_eq!(
        setup
            .gateway
            .post(None, &[("description", &huge)])
            .await
            .status,
        413
    );
    assert_eq!(setup.gateway.get("/healthz").await.body, b"ok\n");
}

#[tokio::test]
async fn the_rides_client_understands_every_card() {
    let setup = Setup::new().await;
    let client = GatewayClient::new(&setup.gateway.url, API_KEY, Duration::from_millis(500))
        .expect("a client");
    let charge = async |source: &str| {
        let request = ChargeRequest {
            amount_cents: 2000,
            currency: "usd".to_owned(),
            source: source.to_owned(),
            description: Some("A ride".to_owned()),
        };
        client
            .charge(source, &request)
            .await
            .map_err(|error| error.handling())
    };
    let first = charge("tok_visa").await.expect("charged");
    assert_eq!(first.amount_cents, 2000);
    assert_eq!(charge("tok_visa").await, Ok(first));
    assert_eq!(charge("tok_chargeDeclined").await, Err(Handling::Decline));
    assert_eq!(charge("tok_nobody").await, Err(Handling::Stop));
    assert_eq!(charge("tok_gatewayError").await, Err(Handling::Retry(None)));
    assert_eq!(charge("tok_gatewayError").await, Err(Handling::Retry(None)));
    assert!(charge("tok_gatewayError").await.is_ok());
    assert_eq!(charge("tok_gatewayHang").await, Err(Handling::Retry(None)));
    assert!(charge("tok_gatewayHang").await.is_ok());
    assert_eq!(charge("tok_slow_900").await, Err(Handling::Retry(None)));
    assert_eq!(charge("tok_slow_900").await, Err(Handling::Retry(None)));
    sleep(Duration::from_millis(600)).await;
    assert!(charge("tok_slow_900").await.is_ok());
    assert_eq!(setup.charges().await, 4);
}
