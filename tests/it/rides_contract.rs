//! What the rides app promises around a request: the page that its problems lead to, the look at a
//! request by its key, the profiles, and that a replay is for who may still see it.

use reqwest::{Response, StatusCode};
use serde_json::{Value, json};
use tests::database::TestDatabase;
use tests::server::{Server, ServerConfig, http};
use tests::trip::until;

use crate::rides::{Rides, problem};

async fn json(response: Response) -> Value {
    assert_eq!(response.status(), 200);
    response.json().await.unwrap()
}

#[tokio::test]
async fn a_problem_leads_to_its_description() {
    let rides = Rides::start().await;
    let anonymous = rides.client.get(format!("{}/api/rides", rides.base));
    let no_key = rides.post("alice-token", "", r#"{"amountCents": 1}"#);
    let wrong = rides.client.get(format!("{}/nowhere", rides.base));
    let unknown = rides.client.get(format!("{}/api/rides/1", rides.base));
    let unknown = unknown.bearer_auth("alice-token");
    let declined = json!({"amountCents": 1, "paymentSource": "tok_chargeDeclined"});
    let declined = rides.post("alice-token", "declined", declined.to_string());
    let nobody = json!({"amountCents": 1, "paymentSource": "tok_nobodys"});
    let nobody = rides.post("alice-token", "nobody", nobody.to_string());
    for request in [anonymous, no_key, wrong, unknown, declined, nobody] {
        let refused = request.send().await.unwrap();
        let link = refused.headers()["link"].to_str().unwrap().to_owned();
        let refused: Value = refused.json().await.unwrap();
        let described_at = refused["type"].as_str().unwrap();
        assert_eq!(link, format!("<{described_at}>; rel=\"describedby\""));
        let (page, anchor) = described_at.split_once('#').unwrap();
        assert_eq!(anchor, refused["code"], "{refused}");
        // The page is for anybody.
        let page = rides.client.get(format!("{}{page}", rides.base)).send();
        let page = page.await.unwrap();
        assert_eq!(page.headers()["content-type"], "text/html; charset=utf-8");
        let page = page.text().await.unwrap();
        assert!(
            page.contains(&format!("<section id=\"{anchor}\">")),
            "{refused}"
        );
    }
}

#[tokio::test]
async fn a_client_that_gave_up_learns_where_its_request_stands() {
    let rides = Rides::start().await;
    let body = json!({"amountCents": 2000});
    let made = rides.ride("k", &body).await;
    let receipt: Value = made.json().await.unwrap();
    let looked = json(rides.get("alice-token", "/api/rides/by-key/k").await).await;
    assert_eq!(looked["state"], "finished");
    assert_eq!(looked["reply"]["status"], 201);
    assert_eq!(looked["reply"]["body"], receipt);

    let slow = json!({"amountCents": 3000, "paymentSource": "tok_slow_60000"});
    let slow = rides.post("alice-token", "slow", slow.to_string());
    let slow = tokio::spawn(slow.send());
    let charging = "SELECT count(*) = 1 FROM idempotency_keys
                    WHERE key = 'slow' AND recovery_point = 'ride_created'";
    until(&rides.database.pool(), "it is charging", charging).await;
    let running = json(rides.get("alice-token", "/api/rides/by-key/slow").await).await;
    assert_eq!(
        running,
        json!({"state": "running", "recoveryPoint": "ride_created", "attempt": 1})
    );
    slow.abort();

    // Another user's key is no key, and so is one that never came.
    for (token, key) in [("bob-token", "k"), ("alice-token", "never")] {
        let path = format!("/api/rides/by-key/{key}");
        let unknown = problem(rides.get(token, &path).await).await;
        assert_eq!(unknown, (404, "operation_unknown".to_owned()));
    }
    let anonymous = rides.get("nobodys-token", "/api/rides/by-key/k").await;
    assert_eq!(problem(anonymous).await, (401, "unauthorized".to_owned()));
    let too_long = format!("/api/rides/by-key/{}", "k".repeat(256));
    let refused = problem(rides.get("alice-token", &too_long).await).await;
    assert_eq!(refused, (400, "key_invalid".to_owned()));
}

#[tokio::test]
async fn who_lost_the_right_gets_no_replay() {
    let rides = Rides::start().await;
    let body = json!({"amountCents": 2000});
    let made = rides.ride("k", &body).await;
    assert_eq!(made.status(), StatusCode::CREATED);
    let receipt: Value = made.json().await.unwrap();

    // The token was stolen, and is another one now.
    let revoke = "UPDATE users SET token_hash = sha256('another') WHERE name = 'alice'";
    let revoked = sqlx::query(revoke).execute(&rides.database.pool()).await;
    assert_eq!(revoked.unwrap().rows_affected(), 1);
    let retry = rides.ride("k", &body).await;
    assert_eq!(retry.status(), StatusCode::UNAUTHORIZED);
    assert!(!retry.headers().contains_key("idempotent-replayed"));
    let refused = retry.text().await.unwrap();
    assert!(!refused.contains(receipt["chargeId"].as_str().unwrap()));

    // The same key of another user is another request.
    let others = rides.post("bob-token", "k", body.to_string());
    let others = others.send().await.unwrap();
    assert!(!others.headers().contains_key("idempotent-replayed"));
    let others: Value = others.json().await.unwrap();
    assert_ne!(others["rideId"], receipt["rideId"]);
    assert_eq!(rides.charges().await, 2);
}

/// A database with one user, for a program that brings its own gateway.
async fn database() -> TestDatabase {
    TestDatabase::from_template("rides-empty", async |pool| {
        rides_app::database::migrate(&pool).await?;
        rides_app::users::add(&pool, "alice", "alice-token").await?;
        Ok(())
    })
    .await
}

/// Its answer to alice, under the key `k`.
async fn ride(client: &reqwest::Client, server: &Server, cents: u64) -> Response {
    let request = client.post(server.url("/api/rides"));
    let request = request.bearer_auth("alice-token");
    let request = request.header("idempotency-key", "k");
    let request = request.header("content-type", "application/json");
    let body = json!({ "amountCents": cents }).to_string();
    request.body(body).send().await.unwrap()
}

#[tokio::test]
async fn the_program_speaks_http_2_to_who_does() {
    let database = database().await;
    let server = Server::start(ServerConfig::serve(&database.url())).await;
    let modern = reqwest::Client::builder().no_proxy();
    let modern = modern.http2_prior_knowledge().build().unwrap();
    let mut bodies = Vec::new();
    for client in [modern, http()] {
        let answer = ride(&client, &server, 5).await;
        assert_eq!(answer.status(), 201);
        bodies.push((answer.version(), answer.bytes().await.unwrap()));
    }
    assert_eq!(bodies[0].0, reqwest::Version::HTTP_2);
    assert_eq!(bodies[1].0, reqwest::Version::HTTP_11);
    assert_eq!(bodies[0].1, bodies[1].1);
}

#[tokio::test]
async fn the_service_says_no_in_the_way_it_is_told() {
    for (profile, status) in [("ietf", 422), ("rocket-rides", 409), ("stripe", 400)] {
        let database = database().await;
        let config = ServerConfig::serve(&database.url()).args(["--profile", profile]);
        let server = Server::start(config).await;
        assert_eq!(ride(&http(), &server, 1).await.status(), 201);
        let mismatch = ride(&http(), &server, 2).await;
        assert_eq!(mismatch.status(), status, "{profile}");
        let mismatch: Value = mismatch.json().await.unwrap();
        if profile == "stripe" {
            assert_eq!(mismatch["error"]["type"], "idempotency_error");
        } else {
            assert_eq!(mismatch["code"], "request_mismatch");
        }
    }
}
