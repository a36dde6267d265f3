//! What the layer for plain handlers keeps when a process dies, a lease is lost or a right is
//! revoked, and what it leaves alone: there is no phase to go on from.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use axum::Router;
use axum::extract::FromRequestParts;
use axum::routing::post;
use http::request::Parts;
use http::{HeaderName, Method, StatusCode};
use idempotent_core::http::{Anyone, Caller, Contract, GuardLayer, Keep};
use idempotent_core::{Engine, FlowOptions};
use reqwest::Response;
use tests::database::TestDatabase;
use tests::fixture;
use tests::server::{Server, ServerConfig, http, serve};
use tests::trip::{expire_leases, until};

use crate::conformance::{Fixture, begun, count, database, problem, release};

async fn program(database: &TestDatabase) -> Server {
    let program = Path::new(env!("CARGO_BIN_EXE_conformance-fixture"));
    Server::start(ServerConfig::program(program).args(["--database", &database.url()])).await
}

async fn engine(database: &TestDatabase) -> Engine {
    let engine = fixture::engine(database.pool(), FlowOptions::new());
    engine.await.unwrap()
}

async fn unfinished(database: &TestDatabase) -> i64 {
    let sql = "SELECT count(*) FROM idempotency_keys WHERE finished_at IS NULL";
    let unfinished = sqlx::query_scalar(sql).fetch_one(&database.pool()).await;
    unfinished.unwrap()
}

/// A fixture's process that was killed while the handler of the key `k` ran.
async fn killed_in_a_handler() -> TestDatabase {
    let database = database().await;
    let client = http();
    let mut server = program(&database).await;
    let held = client.post(server.url("/held"));
    let held = tokio::spawn(held.header("idempotency-key", "k").send());
    begun(&client, &server.url(""), 1).await;
    server.kill();
    held.await.unwrap().unwrap_err();
    assert_eq!(unfinished(&database).await, 1);
    database
}

#[tokio::test]
async fn a_process_killed_in_a_handler_leaves_the_key_to_the_clients_retry() {
    let database = killed_in_a_handler().await;
    let client = http();
    let server = program(&database).await;
    let held = || {
        let held = client.post(server.url("/held"));
        held.header("idempotency-key", "k").send()
    };

    // The lease of the dead is still valid.
    let early = problem(held().await.unwrap()).await;
    assert_eq!(early, (409, "request_in_progress".to_owned()));
    expire_leases(&database).await;

    // There is nothing the completer could go on from.
    let engine = engine(&database).await;
    assert_eq!(engine.complete_once().await.unwrap(), 0);
    assert_eq!(unfinished(&database).await, 1);
    assert_eq!(count(&client, &server.url("")).await, 0);

    let retry = tokio::spawn(held());
    begun(&client, &server.url(""), 1).await;
    release(&server.url("")).await;
    let retry = retry.await.unwrap().unwrap();
    assert!(!retry.headers().contains_key("idempotent-replayed"));
    assert_eq!(retry.text().await.unwrap(), "released");
    let again = held().await.unwrap();
    assert_eq!(again.headers()["idempotent-replayed"], "true");
    assert_eq!(count(&client, &server.url("")).await, 1);
}

#[tokio::test]
async fn an_unfinished_key_is_removed_after_its_retention_and_not_before() {
    let database = killed_in_a_handler().await;
    let engine = engine(&database).await;
    expire_leases(&database).await;
    engine.reap_once().await.unwrap();
    assert_eq!(unfinished(&database).await, 1);

    let age = "UPDATE idempotency_keys SET created_at = created_at - interval '25 hours'";
    sqlx::query(age).execute(&database.pool()).await.unwrap();
    engine.reap_once().await.unwrap();
    assert_eq!(unfinished(&database).await, 0);
}

#[tokio::test]
async fn a_handler_that_lost_its_lease_has_its_answer_stored_nowhere() {
    let fixture = Fixture::start().await;
    let twin = fixture.twin().await;
    let first = tokio::spawn(fixture.post("/held", "k").send());
    fixture.begun(1).await;
    expire_leases(&fixture.database).await;

    let elsewhere = http().post(format!("{twin}/held"));
    let second = tokio::spawn(elsewhere.header("idempotency-key", "k").send());
    let taken = "SELECT fence = 2 FROM idempotency_keys";
    until(&fixture.database.pool(), "the key is taken over", taken).await;

    fixture.release().await;
    let refused = problem(first.await.unwrap().unwrap()).await;
    assert_eq!(refused, (409, "request_in_progress".to_owned()));
    assert_eq!(unfinished(&fixture.database).await, 1);

    release(&twin).await;
    let second = second.await.unwrap().unwrap();
    assert!(!second.headers().contains_key("idempotent-replayed"));
    let retry = fixture.post("/held", "k").send().await.unwrap();
    assert_eq!(retry.headers()["idempotent-replayed"], "true");
    assert_eq!(fixture.count().await, 1);
}

/// Who may do things, and how many were done.
#[derive(Clone, Default)]
struct Door {
    revoked: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
}

/// The user named in a header, as long as the right to do things is not revoked.
struct Visitor(String);

impl Caller for Visitor {
    fn user_id(&self) -> String {
        self.0.clone()
    }
}

impl FromRequestParts<Door> for Visitor {
    type Rejection = StatusCode;

    async fn from_request_parts(parts: &mut Parts, door: &Door) -> Result<Self, StatusCode> {
        let user = parts.headers.get("x-user").and_then(|id| id.to_str().ok());
        let user = user.ok_or(StatusCode::UNAUTHORIZED)?;
        if door.revoked.load(Ordering::SeqCst) {
            return Err(StatusCode::FORBIDDEN);
        }
        Ok(Self(user.to_owned()))
    }
}

#[tokio::test]
async fn a_replay_is_authorised_like_a_first_request_and_is_of_its_user() {
    let database = database().await;
    let door = Door::default();
    let guard = engine(&database).await.guard("fixture").unwrap();
    let done = Arc::clone(&door.done);
    let things = Router::new()
        .route(
            "/things",
            post(async move |user: axum::http::HeaderMap| {
                let nth = done.fetch_add(1, Ordering::SeqCst) + 1;
                format!("{nth} for {}", user["x-user"].to_str().unwrap())
            }),
        )
        .layer(GuardLayer::for_caller::<Visitor>(guard, door.clone()))
        .layer(Contract::default());
    let base = serve(things).await;
    let post = |user: Option<&'static str>| {
        let request = http().post(format!("{base}/things"));
        let request = request.header("idempotency-key", "k");
        match user {
            Some(user) => request.header("x-user", user),
            None => request,
        }
        .send()
    };
    let text = async |response: Response| {
        assert_eq!(response.status(), 200);
        response.text().await.unwrap()
    };

    assert_eq!(
        text(post(Some("user-1")).await.unwrap()).await,
        "1 for user-1"
    );
    // The same key is another user's own.
    assert_eq!(
        text(post(Some("user-2")).await.unwrap()).await,
        "2 for user-2"
    );
    assert_eq!(
        text(post(Some("user-1")).await.unwrap()).await,
        "1 for user-1"
    );
    assert_eq!(post(None).await.unwrap().status(), 401);

    door.revoked.store(true, Ordering::SeqCst);
    let revoked = post(Some("user-1")).await.unwrap();
    assert_eq!(revoked.status(), 403);
    assert_eq!(revoked.text().await.unwrap(), "");
    assert_eq!(door.done.load(Ordering::SeqCst), 2);
}

/// A fixture behind a layer of these settings.
async fn behind(
    set: impl FnOnce(GuardLayer<Anyone, ()>) -> GuardLayer<Anyone, ()>,
) -> (TestDatabase, String) {
    let database = database().await;
    let guard = engine(&database).await.guard("fixture").unwrap();
    let layer = set(GuardLayer::for_caller::<Anyone>(guard, ()));
    let base = serve(fixture::guarded(layer, Contract::default())).await;
    (database, base)
}

/// Whether each of two equal requests was answered by its own run of the handler.
async fn runs_twice(base: &str, method: Method, path: &str) -> bool {
    let client = http();
    let mut replayed = Vec::new();
    for _ in 0..2 {
        let request = client.request(method.clone(), format!("{base}{path}"));
        let response = request.header("idempotency-key", path).send();
        let response = response.await.unwrap();
        replayed.push(response.headers().contains_key("idempotent-replayed"));
    }
    assert!(!replayed[0], "the first is never a replay");
    !replayed[1]
}

#[tokio::test]
async fn a_route_says_what_is_stored() {
    let (_database, base) = behind(|layer| layer.keep(Keep::success())).await;
    assert!(!runs_twice(&base, Method::POST, "/status/201").await);
    assert!(runs_twice(&base, Method::POST, "/status/404").await);
    assert!(runs_twice(&base, Method::POST, "/status/503").await);

    let teapots = Keep::when(|status, headers| {
        status == StatusCode::IM_A_TEAPOT && headers.contains_key("content-type")
    });
    let (_database, base) = behind(|layer| layer.keep(teapots)).await;
    assert!(!runs_twice(&base, Method::POST, "/status/418").await);
    assert!(runs_twice(&base, Method::POST, "/status/201").await);
}

#[tokio::test]
async fn a_route_says_which_requests_are_guarded_and_which_headers_are_kept() {
    let (_database, base) = behind(|layer| {
        layer
            .methods([Method::PUT])
            .keep_header(HeaderName::from_static("cache-control"))
    })
    .await;
    for _ in 0..2 {
        release(&base).await;
    }
    assert!(!runs_twice(&base, Method::PUT, "/held").await);
    assert!(runs_twice(&base, Method::POST, "/status/200").await);

    let kept = HeaderName::from_static("cache-control");
    let (_database, base) = behind(|layer| layer.keep_header(kept)).await;
    for replayed in [false, true] {
        let made = http().post(format!("{base}/headers"));
        let made = made.header("idempotency-key", "h").send().await.unwrap();
        assert_eq!(made.headers().contains_key("idempotent-replayed"), replayed);
        assert_eq!(made.headers()["cache-control"], "no-store");
        assert_eq!(made.headers().contains_key("set-cookie"), !replayed);
    }
}

#[tokio::test]
async fn where_the_key_is_optional_a_request_without_one_is_let_through() {
    let (_database, base) = behind(GuardLayer::key_optional).await;
    for _ in 0..2 {
        let bare = http().post(format!("{base}/status/201")).send();
        assert_eq!(bare.await.unwrap().status(), 201);
    }
    let counted = http().get(format!("{base}/counter")).send().await.unwrap();
    assert_eq!(counted.text().await.unwrap(), r#"{"count":2}"#);
    assert!(!runs_twice(&base, Method::POST, "/status/202").await);

    // One that is none is refused all the same: the client believes that it is protected.
    let broken = http().post(format!("{base}/status/201"));
    let broken = broken.header("idempotency-key", "\"a").send();
    let broken = problem(broken.await.unwrap()).await;
    assert_eq!(broken, (400, "key_invalid".to_owned()));
}
