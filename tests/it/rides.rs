//! The rides app over real HTTP, in this process: what a client of it sees.

use std::time::Duration;

use idempotent_core::{Engine, FlowOptions};
use reqwest::{Response, StatusCode};
use rides_app::app::{App, router};
use rides_app::database::migrate;
use rides_app::flow::RideFlow;
use rides_app::gateway::Gateway;
use rides_app::payments::GatewayClient;
use rides_app::users;
use serde_json::{Value, json};
use sqlx::postgres::PgPool;
use tests::database::TestDatabase;
use tests::server::{http, serve};

/// The service, its gateway, and their database.
pub(crate) struct Rides {
    pub(crate) database: TestDatabase,
    pub(crate) base: String,
    gateway: String,
    pub(crate) client: reqwest::Client,
}

impl Rides {
    pub(crate) async fn start() -> Self {
        let database = TestDatabase::from_template("rides", async |pool| {
            migrate(&pool).await?;
            Gateway::new(pool.clone()).migrate().await?;
            users::add(&pool, "alice", "alice-token").await?;
            users::add(&pool, "bob", "bob-token").await?;
            Ok(())
        })
        .await;
        let gateway = serve(Gateway::new(database.pool()).router()).await;
        let base = serve_rides(database.pool(), &gateway).await;
        Self {
            database,
            base,
            gateway,
            client: http(),
        }
    }

    pub(crate) fn post(
        &self,
        token: &str,
        key: &str,
        body: impl Into<reqwest::Body>,
    ) -> reqwest::RequestBuilder {
        self.client
            .post(format!("{}/api/rides", self.base))
            .bearer_auth(token)
            .header("idempotency-key", key)
            .header("content-type", "application/json")
            .body(body)
    }

    pub(crate) async fn ride(&self, key: &str, body: &Value) -> Response {
        self.post("alice-token", key, body.to_string())
            .send()
            .await
            .unwrap()
    }

    pub(crate) async fn get(&self, token: &str, path: &str) -> Response {
        self.client
            .get(format!("{}{path}", self.base))
            .bearer_auth(token)
            .send()
            .await
            .unwrap()
    }

    pub(crate) async fn charges(&self) -> i64 {
        tests::trip::count(&self.database, "gateway.charges").await
    }
}

/// One process of the service; several on one database are several calls.
async fn serve_rides(pool: PgPool, gateway: &str) -> String {
    let payments = GatewayClient::new(gateway, "sk_test", Duration::from_secs(2)).unwrap();
    let options = FlowOptions::new().lease(Duration::from_secs(15));
    let engine = Engine::builder(pool.clone())
        .flow_with(RideFlow::new(payments), options)
        .build()
        .await
        .unwrap();
    serve(router(App {
        pool,
        rides: engine.handle::<RideFlow<GatewayClient>>().unwrap(),
    }))
    .await
}

/// The status and the code of a problem, which is one in form as well.
pub(crate) async fn problem(response: Response) -> (u16, String) {
    let status = response.status().as_u16();
    assert_eq!(
        response.headers()["content-type"],
        "application/problem+json",
        "{status}"
    );
    let retry_after = response
        .headers()
        .get("retry-after")
        .map(|value| value.to_str().unwrap().parse::<u64>().unwrap());
    let problem: Value = response.json().await.unwrap();
    assert_eq!(problem["status"], status);
    assert!(problem["title"].is_string(), "{problem}");
    let code = problem["code"].as_str().unwrap().to_owned();
    let is_passing = status == 503 || code == "request_in_progress";
    assert_eq!(
        retry_after.is_some_and(|seconds| seconds >= 1),
        is_passing,
        "{code}: {retry_after:?}"
    );
    (status, code)
}

#[tokio::test]
async fn a_ride_is_made_once_and_replayed_byte_for_byte() {
    let rides = Rides::start().await;
    let first = rides.ride("k", &json!({"amountCents": 2000})).await;
    assert_eq!(first.status(), StatusCode::CREATED);
    assert!(first.headers().get("idempotent-replayed").is_none());
    let location = first.headers()["location"].to_str().unwrap().to_owned();
    let content_type = first.headers()["content-type"].clone();
    let bytes = first.bytes().await.unwrap();
    let receipt: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(receipt["amount"], 2000);
    assert_eq!(
        location,
        format!("/api/rides/{}", receipt["rideId"].as_str().unwrap())
    );
    assert!(receipt["chargeId"].as_str().unwrap().starts_with("ch_"));

    // By another process, too.
    let elsewhere = serve_rides(rides.database.pool(), &rides.gateway).await;
    for base in [&rides.base, &elsewhere] {
        let retry = rides.client.post(format!("{base}/api/rides"));
        let retry = retry
            .bearer_auth("alice-token")
            .header("idempotency-key", "\"k\"");
        let retry = retry.header("content-type", "application/json; charset=utf-8");
        // C10 and more: members in another order, a null, an integer spelt as a float.
        let retry = retry
            .body(r#"{ "currency": "usd", "target": null, "amountCents": 2000.0 }"#)
            .send()
            .await
            .unwrap();
        assert_eq!(retry.status(), StatusCode::CREATED);
        assert_eq!(retry.headers()["idempotent-replayed"], "true");
        assert_eq!(retry.headers()["location"], location.as_str());
        assert_eq!(retry.headers()["content-type"], content_type);
        assert_eq!(retry.bytes().await.unwrap(), bytes);
    }
    assert_eq!(rides.charges().await, 1);

    let shown: Value = rides
        .get("alice-token", &location)
        .await
        .json()
        .await
        .unwrap();
    assert_eq!(shown["rideId"], receipt["rideId"]);
    assert_eq!(
        (&shown["amount"], &shown["chargeId"], &shown["status"]),
        (&json!(2000), &receipt["chargeId"], &json!("charged"))
    );
}

#[tokio::test]
async fn a_changed_body_is_a_mismatch() {
    let rides = Rides::start().await;
    rides.ride("k", &json!({"amountCents": 2000})).await;
    for other in [
        json!({"amountCents": 2001}),
        json!({"amountCents": 2000, "currency": "eur"}),
        json!({"amountCents": 2000, "origin": {"lat": 1, "lon": 2}}),
        json!({"amountCents": 2000, "unknown": 1}),
    ] {
        assert_eq!(
            problem(rides.ride("k", &other).await).await,
            (409, "request_mismatch".to_owned()),
            "{other}"
        );
    }
    // C11: long bodies that differ in the last byte.
    let long = |end: &str| json!({"amountCents": 1, "note": "x".repeat(40_000) + end});
    assert_eq!(rides.ride("long", &long("a")).await.status(), 201);
    assert_eq!(
        problem(rides.ride("long", &long("b")).await).await,
        (409, "request_mismatch".to_owned())
    );
}

#[tokio::test]
async fn a_request_in_progress_is_a_conflict_elsewhere_and_is_waited_for_here() {
    let rides = Rides::start().await;
    let elsewhere = serve_rides(rides.database.pool(), &rides.gateway).await;
    let slow = json!({"amountCents": 5, "paymentSource": "tok_slow_1500"});
    let (first, ()) = tokio::join!(rides.ride("k", &slow), async {
        running(&rides.database).await;
        let there = rides
            .client
            .post(format!("{elsewhere}/api/rides"))
            .bearer_auth("alice-token");
        let there = there
            .header("idempotency-key", "k")
            .json(&slow)
            .send()
            .await
            .unwrap();
        assert_eq!(
            problem(there).await,
            (409, "request_in_progress".to_owned())
        );
        // Here it is waited for, but not for ever.
        let here = rides.ride("k", &slow).await;
        match here.status() {
            StatusCode::CREATED => assert_eq!(here.headers()["idempotent-replayed"], "true"),
            _ => assert_eq!(problem(here).await, (409, "request_in_progress".to_owned())),
        }
    });
    assert_eq!(first.status(), 201);
    assert_eq!(rides.charges().await, 1);
}

/// Waits until a flow stands before its charge.
async fn running(database: &TestDatabase) {
    let sql = "SELECT count(*) > 0 FROM idempotency_keys WHERE recovery_point = 'ride_created' AND holder IS NOT NULL";
    tests::trip::until(&database.pool(), "a flow is running", sql).await;
}

#[tokio::test]
async fn a_declined_card_is_a_final_answer() {
    let rides = Rides::start().await;
    let body = json!({"amountCents": 2000, "paymentSource": "tok_chargeDeclined"});
    let first = rides.ride("k", &body).await;
    let retry = rides.ride("k", &body).await;
    assert_eq!(retry.headers()["idempotent-replayed"], "true");
    assert_eq!(problem(first).await, (402, "card_declined".to_owned()));
    assert_eq!(problem(retry).await, (402, "card_declined".to_owned()));
    let list: Value = rides
        .get("alice-token", "/api/rides")
        .await
        .json()
        .await
        .unwrap();
    assert_eq!(
        (&list["rides"][0]["status"], &list["rides"][0]["chargeId"]),
        (&json!("declined"), &Value::Null)
    );
    assert_eq!(rides.charges().await, 0);

    let unknown = rides
        .ride(
            "u",
            &json!({"amountCents": 1, "paymentSource": "tok_nobody"}),
        )
        .await;
    assert_eq!(
        problem(unknown).await,
        (402, "payment_source_unknown".to_owned())
    );
}

/// C12 in part: an outage is not stored; the retry goes on.
#[tokio::test]
async fn a_gateway_in_trouble_is_503_and_a_retry_goes_on() {
    let rides = Rides::start().await;
    let body = json!({"amountCents": 2000, "paymentSource": "tok_gatewayError"});
    for _ in 0..2 {
        assert_eq!(
            problem(rides.ride("k", &body).await).await,
            (503, "temporarily_unavailable".to_owned())
        );
    }
    let answered = rides.ride("k", &body).await;
    assert_eq!(answered.status(), 201);
    assert!(answered.headers().get("idempotent-replayed").is_none());

    // Charged, and never answered: the retry learns it, under the same key.
    let body = json!({"amountCents": 7, "paymentSource": "tok_gatewayHang"});
    assert_eq!(
        problem(rides.ride("h", &body).await).await,
        (503, "temporarily_unavailable".to_owned())
    );
    assert_eq!(rides.ride("h", &body).await.status(), 201);
    assert_eq!(rides.charges().await, 2);
    assert_eq!(tests::trip::count(&rides.database, "rides").await, 2);
}

/// C07, C08 in part, C09: who asks is part of what is asked.
#[tokio::test]
async fn nothing_of_one_user_reaches_another() {
    let rides = Rides::start().await;
    let body = json!({"amountCents": 2000});
    let alices = rides.ride("k", &body).await;
    let location = alices.headers()["location"].to_str().unwrap().to_owned();

    let bobs = rides
        .post("bob-token", "k", json!({"amountCents": 3000}).to_string())
        .send()
        .await
        .unwrap();
    assert_eq!(
        bobs.status(),
        201,
        "bob's own request runs, although alice used that key"
    );
    assert!(bobs.headers().get("idempotent-replayed").is_none());
    assert_ne!(bobs.headers()["location"].to_str().unwrap(), location);

    assert_eq!(
        problem(rides.get("bob-token", &location).await).await,
        (404, "ride_unknown".to_owned())
    );
    let list: Value = rides
        .get("bob-token", "/api/rides")
        .await
        .json()
        .await
        .unwrap();
    assert_eq!(list["rides"].as_array().unwrap().len(), 1);
    assert_eq!(list["rides"][0]["amount"], 3000);

    // A replay is authorised like a first request.
    let stranger = rides
        .post("no-such-token", "k", body.to_string())
        .send()
        .await
        .unwrap();
    assert_eq!(problem(stranger).await, (401, "unauthorized".to_owned()));
    sqlx::query("DELETE FROM rides")
        .execute(&rides.database.pool())
        .await
        .unwrap();
    sqlx::query("DELETE FROM users WHERE name = 'alice'")
        .execute(&rides.database.pool())
        .await
        .unwrap();
    assert_eq!(
        problem(rides.ride("k", &body).await).await,
        (401, "unauthorized".to_owned())
    );
}

/// C24.
#[tokio::test]
async fn a_key_in_bad_form_is_refused_with_the_reason() {
    let rides = Rides::start().await;
    let body = json!({"amountCents": 2000}).to_string();
    let send = |keys: Vec<Vec<u8>>| {
        let mut request = rides
            .client
            .post(format!("{}/api/rides", rides.base))
            .bearer_auth("alice-token");
        for key in keys {
            request = request.header(
                "idempotency-key",
                reqwest::header::HeaderValue::from_bytes(&key).unwrap(),
            );
        }
        request
            .header("content-type", "application/json")
            .body(body.clone())
            .send()
    };
    assert_eq!(
        problem(send(vec![]).await.unwrap()).await,
        (400, "key_missing".to_owned())
    );
    let long = "k".repeat(256);
    for bad in [
        "",
        "\"\"",
        "\"unclosed",
        "a,b",
        "\"a\";p=1",
        "é",
        long.as_str(),
    ] {
        let refused = send(vec![bad.as_bytes().to_vec()]).await.unwrap();
        assert_eq!(
            problem(refused).await,
            (400, "key_invalid".to_owned()),
            "{bad}"
        );
    }
    let twice = send(vec![b"k".to_vec(), b"k".to_vec()]).await.unwrap();
    assert_eq!(problem(twice).await, (400, "key_invalid".to_owned()));
    assert_eq!(
        send(vec!["k".repeat(255).into_bytes()])
            .await
            .unwrap()
            .status(),
        201
    );
    assert_eq!(
        tests::trip::count(&rides.database, "idempotency_keys WHERE flow = 'ride'").await,
        1,
        "refusals use up no key"
    );
}

#[tokio::test]
async fn a_body_in_bad_form_is_refused_and_uses_up_no_key() {
    let rides = Rides::start().await;
    let malformed = [
        "",
        "{",
        "[2000]",
        "2000",
        r#"{"amountCents": 1, "amountCents": 1}"#,
    ];
    let unfit = [
        r#"{}"#,
        r#"{"amountCents": 0}"#,
        r#"{"amountCents": -5}"#,
        r#"{"amountCents": 1.5}"#,
        r#"{"amountCents": "2000"}"#,
        r#"{"amountCents": 1e30}"#,
        r#"{"amountCents": null}"#,
        r#"{"amountCents": 1, "currency": "dollars"}"#,
        r#"{"amountCents": 1, "origin": {"lat": 91, "lon": 0}}"#,
        r#"{"amountCents": 1, "paymentSource": "a b"}"#,
    ];
    for (bodies, expected) in [
        (&malformed[..], (400, "body_malformed")),
        (&unfit[..], (422, "body_invalid")),
    ] {
        for body in bodies {
            let refused = rides.post("alice-token", "k", *body).send().await.unwrap();
            assert_eq!(
                problem(refused).await,
                (expected.0, expected.1.to_owned()),
                "{body}"
            );
        }
    }
    let nul = rides
        .post(
            "alice-token",
            "k",
            r#"{"amountCents": 1, "note": "a\u0000b"}"#,
        )
        .send()
        .await
        .unwrap();
    assert_eq!(problem(nul).await, (400, "body_malformed".to_owned()));
    assert_eq!(
        rides.ride("k", &json!({"amountCents": 1})).await.status(),
        201
    );
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused_while_it_is_still_being_sent() {
    let rides = Rides::start().await;
    for megabytes in [2, 20] {
        let body = format!(
            r#"{{"amountCents": 1, "note": "{}"}}"#,
            "x".repeat(megabytes << 20)
        );
        let refused = rides.post("alice-token", "k", body).send().await.unwrap();
        assert_eq!(problem(refused).await, (413, "body_too_large".to_owned()));
    }
    let fits = json!({"amountCents": 1, "note": "x".repeat(1 << 19)});
    assert_eq!(rides.ride("k", &fits).await.status(), 201);
}

#[tokio::test]
async fn every_error_is_a_problem() {
    let rides = Rides::start().await;
    assert_eq!(
        problem(rides.get("alice-token", "/nowhere").await).await,
        (404, "not_found".to_owned())
    );
    assert_eq!(
        problem(rides.get("alice-token", "/api/rides/1").await).await,
        (404, "ride_unknown".to_owned())
    );
    assert_eq!(
        problem(rides.get("", "/api/rides").await).await,
        (401, "unauthorized".to_owned())
    );
    let delete = rides
        .client
        .delete(format!("{}/api/rides", rides.base))
        .send()
        .await
        .unwrap();
    let allowed = delete.headers()["allow"].to_str().unwrap();
    assert!(allowed.contains("POST"), "{allowed}");
    assert_eq!(
        problem(delete).await,
        (405, "method_not_allowed".to_owned())
    );
    let text = rides
        .client
        .post(format!("{}/api/rides", rides.base))
        .bearer_auth("alice-token");
    let text = text
        .header("idempotency-key", "k")
        .body("amountCents=2000")
        .send()
        .await
        .unwrap();
    assert_eq!(problem(text).await, (415, "body_not_json".to_owned()));
    for path in ["/healthz", "/readyz"] {
        assert_eq!(rides.get("", path).await.status(), 200);
    }
}
