//! Clients as they are, against the layer over real sockets: they hang up, send slowly or in pieces,
//! send the next request before the answer to the last, use HTTP/2, or would rather wait.

use std::path::Path;
use std::time::{Duration, Instant};

use idempotent_core::http::Contract;
use idempotent_core::{Engine, FlowOptions};
use tests::fixture;
use tests::raw::{self, Connection};
use tests::server::{Server, ServerConfig, http, serve};
use tests::trip::until;

use crate::conformance::{Fixture, database, problem, release, whole};

const KEY: &[u8] = b"idempotency-key: k";

#[tokio::test]
async fn a_client_that_hangs_up_has_its_request_done_and_its_answer_kept() {
    // C02.
    let fixture = Fixture::start().await;
    let mut first = Connection::open(&fixture.base).await;
    first.send(&raw::post("/held", &[KEY], b"a")).await.unwrap();
    fixture.begun(1).await;
    drop(first);
    let mut second = Connection::open(&fixture.base).await;
    let second = second.ask(&raw::post("/held", &[KEY], b"a")).await;
    assert_eq!(second.status, 409, "{}", second.text());

    fixture.release().await;
    let finished = "SELECT count(*) = 1 FROM idempotency_keys WHERE finished_at IS NOT NULL";
    until(&fixture.database.pool(), "its answer is stored", finished).await;
    let mut third = Connection::open(&fixture.base).await;
    let third = third.ask(&raw::post("/held", &[KEY], b"a")).await;
    assert_eq!((third.status, third.text()), (200, "released".to_owned()));
    assert_eq!(third.header("idempotent-replayed"), Some("true"));
    assert_eq!(fixture.count().await, 1);
}

#[tokio::test]
async fn a_client_that_hangs_up_in_its_body_has_begun_nothing() {
    let fixture = Fixture::start().await;
    let whole = raw::post("/echo", &[KEY], &[b'a'; 1000]);
    let mut first = Connection::open(&fixture.base).await;
    first.send(&whole[..whole.len() - 1]).await.unwrap();
    drop(first);
    let mut second = Connection::open(&fixture.base).await;
    let second = second.ask(&raw::post("/echo", &[KEY], b"other")).await;
    assert_eq!(second.status, 201);
    assert_eq!(fixture.count().await, 1);
}

#[tokio::test]
async fn a_body_in_pieces_or_in_chunks_is_the_same_body() {
    let fixture = Fixture::start().await;
    let mut connection = Connection::open(&fixture.base).await;
    let request = raw::post("/echo", &[KEY], b"abc");
    for byte in &request {
        connection.send(&[*byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    assert_eq!(connection.response().await.text(), "abc");
    let chunked = b"POST /echo HTTP/1.1\r\nhost: h\r\nidempotency-key: \"k\"\r\ntransfer-encoding: chunked\r\n\r\n\
        1\r\na\r\n2\r\nbc\r\n0\r\n\r\n";
    let retry = connection.ask(chunked).await;
    assert_eq!(
        retry.header("idempotent-replayed"),
        Some("true"),
        "{}",
        retry.text()
    );
    assert_eq!(retry.text(), "abc");
    let expecting =
        b"POST /echo HTTP/1.1\r\nhost: h\r\nidempotency-key: k\r\nexpect: 100-continue\r\n\
        content-length: 3\r\n\r\nabc";
    let retry = connection.ask(expecting).await;
    assert_eq!(retry.header("idempotent-replayed"), Some("true"));
    assert_eq!(fixture.count().await, 1);
}

#[tokio::test]
async fn a_body_that_comes_too_slowly_is_refused_and_uses_up_no_key() {
    let contract = Contract::default().body_time(Duration::from_millis(300));
    let fixture = Fixture::with(contract, FlowOptions::new()).await;
    let request = raw::post("/echo", &[KEY], b"abc");
    let mut slow = Connection::open(&fixture.base).await;
    slow.send(&request[..request.len() - 1]).await.unwrap();
    // It never sends the last byte, and need not be waited for.
    let answer = slow.response().await;
    assert_eq!(answer.status, 408, "{}", answer.text());
    assert!(answer.text().contains("body_too_slow"));
    assert_eq!(answer.header("connection"), Some("close"));
    assert!(slow.is_closed().await);
    let mut again = Connection::open(&fixture.base).await;
    assert_eq!(again.ask(&request).await.status, 201);
    assert_eq!(fixture.count().await, 1);
}

#[tokio::test]
async fn requests_in_a_row_on_one_connection_are_answered_in_their_order() {
    let fixture = Fixture::start().await;
    let mut connection = Connection::open(&fixture.base).await;
    let requests = [
        raw::post("/echo", &[KEY], b"one"),
        raw::post("/echo", &[KEY], b"one"),
        raw::post("/echo", &[b"idempotency-key: k2"], b"two"),
        raw::post("/echo", &[KEY], b"three"),
    ];
    connection.send(&requests.concat()).await.unwrap();
    let mut answers = Vec::new();
    for _ in 0..4 {
        let answer = connection.response().await;
        let replayed = answer.header("idempotent-replayed").is_some();
        answers.push((answer.status, replayed));
    }
    assert_eq!(
        answers,
        [(201, false), (201, true), (201, false), (422, false)]
    );
    assert_eq!(fixture.count().await, 2);
}

#[tokio::test]
async fn over_http_2_it_is_the_same() {
    let fixture = Fixture::start().await;
    let modern = reqwest::Client::builder()
        .no_proxy()
        .http2_prior_knowledge()
        .build()
        .unwrap();
    let send = |client: &reqwest::Client| {
        let request = client.post(format!("{}/echo", fixture.base));
        request.header("idempotency-key", "k").body("x").send()
    };
    let first = send(&modern).await.unwrap();
    assert_eq!(first.version(), reqwest::Version::HTTP_2);
    let (status, headers, body) = whole(first).await;
    assert_eq!((status, &body[..]), (201, &b"x"[..]));
    let (status, mut of_replay, body) = whole(send(&http()).await.unwrap()).await;
    of_replay.retain(|(name, _)| name != "idempotent-replayed");
    assert_eq!((status, &body[..]), (201, &b"x"[..]));
    assert_eq!(headers, of_replay);
    // A body that is too large, on one of many streams.
    let large = modern.post(format!("{}/echo", fixture.base));
    let large = large.header("idempotency-key", "k2").body(vec![0; 4 << 20]);
    let large = large.send().await.unwrap();
    assert_eq!(problem(large).await, (413, "body_too_large".to_owned()));
    assert_eq!(fixture.count().await, 1);
}

#[tokio::test]
async fn a_client_may_rather_wait() {
    let fixture = Fixture::start().await;
    let twin = fixture.twin().await;
    let first = tokio::spawn(fixture.post("/held", "k").send());
    fixture.begun(1).await;

    let waiting: Vec<_> = [&fixture.base, &twin]
        .into_iter()
        .map(|base| {
            let request = http().post(format!("{base}/held"));
            let request = request.header("idempotency-key", "\"k\"");
            tokio::spawn(request.header("prefer", "respond-async, wait=20").send())
        })
        .collect();
    // Who has less patience is told before they are.
    let hasty = fixture.post("/held", "k").header("prefer", "wait=1");
    let hasty = hasty.send().await.unwrap();
    assert_eq!(hasty.headers()["preference-applied"], "wait=1");
    assert_eq!(
        problem(hasty).await,
        (409, "request_in_progress".to_owned())
    );
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()));

    fixture.release().await;
    for waiting in waiting {
        let waited = waiting.await.unwrap().unwrap();
        assert_eq!(waited.headers()["preference-applied"], "wait=20");
        assert_eq!(waited.text().await.unwrap(), "released");
    }
    assert_eq!(first.await.unwrap().unwrap().status(), 200);
    assert_eq!(fixture.count().await, 1);
}

#[tokio::test]
async fn who_waits_for_an_attempt_that_fails_goes_on_where_it_stopped() {
    let fixture = Fixture::start().await;
    let twin = fixture.twin().await;
    // Nobody renews this lease: its process is gone.
    let first = tokio::spawn(fixture.post("/held", "k").send());
    fixture.begun(1).await;
    first.abort();
    let waiting = http().post(format!("{twin}/held"));
    let waiting = waiting
        .header("idempotency-key", "k")
        .header("prefer", "wait=20");
    let waiting = tokio::spawn(waiting.send());
    let lose = "UPDATE idempotency_keys SET holder = NULL, lease_expires_at = NULL";
    sqlx::query(lose)
        .execute(&fixture.database.pool())
        .await
        .unwrap();
    release(&twin).await;
    let waited = waiting.await.unwrap().unwrap();
    assert_eq!(waited.status(), 200);
    assert!(!waited.headers().contains_key("idempotent-replayed"));
    // The handler that lost its lease stores nothing, and its client's retry gets what counts.
    let retry = fixture.post("/held", "k").send().await.unwrap();
    assert_eq!(retry.headers()["idempotent-replayed"], "true");
}

#[tokio::test]
async fn only_so_many_wait() {
    let database = database().await;
    let engine = async || {
        let engine = Engine::builder(database.pool()).max_waiting(1);
        let engine = engine.guard("fixture").build().await.unwrap();
        serve(fixture::router(&engine, Contract::default())).await
    };
    let (here, there) = (engine().await, engine().await);
    let send = |base: &str, key: &str, wait: bool| {
        let request = http()
            .post(format!("{base}/held"))
            .header("idempotency-key", key);
        let request = if wait {
            request.header("prefer", "wait=20")
        } else {
            request
        };
        tokio::spawn(request.send())
    };
    let first = send(&here, "k", false);
    let running = "SELECT count(*) = 1 FROM idempotency_keys WHERE holder IS NOT NULL";
    until(&database.pool(), "it runs", running).await;
    let began = Instant::now();
    let mut waiting = [send(&there, "k", true), send(&there, "k", true)];
    // Of two, one is told at once.
    let told = std::future::poll_fn(|context| {
        for waiting in &mut waiting {
            if let std::task::Poll::Ready(told) = std::pin::Pin::new(waiting).poll(context) {
                return std::task::Poll::Ready(told.unwrap().unwrap());
            }
        }
        std::task::Poll::Pending
    })
    .await;
    assert!(began.elapsed() < Duration::from_secs(15));
    assert_eq!(problem(told).await, (409, "request_in_progress".to_owned()));
    release(&here).await;
    let waited = waiting
        .into_iter()
        .find(|waiting| !waiting.is_finished())
        .unwrap();
    assert_eq!(
        waited.await.unwrap().unwrap().text().await.unwrap(),
        "released"
    );
    assert_eq!(first.await.unwrap().unwrap().status(), 200);
}

#[tokio::test]
async fn a_client_that_has_waited_long_enough_is_told_to_retry() {
    let contract = Contract::default().answer_within(Duration::from_millis(200));
    let fixture = Fixture::with(contract, FlowOptions::new()).await;
    let first = fixture.post("/held", "k").send().await.unwrap();
    assert!(first.headers().contains_key("retry-after"));
    assert_eq!(
        problem(first).await,
        (503, "temporarily_unavailable".to_owned())
    );
    let retry = fixture.post("/held", "k").send().await.unwrap();
    assert_eq!(
        problem(retry).await,
        (409, "request_in_progress".to_owned())
    );
    fixture.release().await;
    let finished = "SELECT count(*) = 1 FROM idempotency_keys WHERE finished_at IS NOT NULL";
    until(&fixture.database.pool(), "its answer is stored", finished).await;
    let retry = fixture.post("/held", "k").send().await.unwrap();
    assert_eq!(retry.text().await.unwrap(), "released");
    assert_eq!(fixture.count().await, 1);
}

#[tokio::test]
async fn the_program_serves_all_of_it() {
    let program = Path::new(env!("CARGO_BIN_EXE_conformance-fixture"));
    let program =
        ServerConfig::program(program).args(["--profile", "rocket-rides", "--retention", "2s"]);
    let mut server = Server::start(program).await;
    let client = http();
    let post = |path: &str, key: &str, body: &str| {
        let request = client.post(server.url(path)).header("idempotency-key", key);
        request
            .header("content-type", "text/x-thing")
            .body(body.to_owned())
            .send()
    };
    let count = async || {
        client
            .get(server.url("/counter"))
            .send()
            .await
            .unwrap()
            .text()
            .await
            .unwrap()
    };

    let echo = post("/echo", "e", "thing").await.unwrap();
    assert_eq!(echo.status(), 201);
    assert_eq!(echo.headers()["content-type"], "text/x-thing");
    assert_eq!(echo.text().await.unwrap(), "thing");
    let mismatch = post("/echo", "e", "other").await.unwrap();
    assert_eq!(
        problem(mismatch).await,
        (409, "request_mismatch".to_owned())
    );
    let status = post("/status/418", "s", "").await.unwrap();
    assert_eq!(status.status(), 418);
    assert_eq!(status.text().await.unwrap(), "status:418");
    let slow = post("/slow?ms=10", "w", "").await.unwrap();
    assert_eq!(slow.text().await.unwrap(), "slept:10");
    let large = post("/large?bytes=1000", "l", "").await.unwrap();
    assert_eq!(large.bytes().await.unwrap(), "x".repeat(1000));
    assert_eq!(count().await, r#"{"count":4}"#);

    // The retention ends, and something removes what is past it.
    let renewed = async {
        while post("/echo", "e", "other").await.unwrap().status() != 201 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let renewed = tokio::time::timeout(Duration::from_secs(20), renewed).await;
    renewed.expect("the key is new again");
    assert_eq!(count().await, r#"{"count":5}"#);
    let reset = client.post(server.url("/reset")).send().await.unwrap();
    assert_eq!(reset.status(), 204);
    assert_eq!(count().await, r#"{"count":0}"#);
    assert!(server.interrupt().await.success());
}
