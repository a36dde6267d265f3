//! What draft-ietf-httpapi-idempotency-key-header-07 asks of a server, as far as a client can see it,
//! and what our contract promises beside it: over real sockets, against plain handlers behind the
//! layer. Each test counts how often a handler ran.

use std::time::Duration;

use idempotent_core::http::{Contract, Profile};
use idempotent_core::{Engine, FlowOptions};
use reqwest::{Method, RequestBuilder, Response};
use serde_json::Value;
use tests::database::TestDatabase;
use tests::fixture;
use tests::raw::{self, Connection};
use tests::server::{http, serve};
use tests::trip::PATIENCE;

/// The fixture, in this process, on a database of its own.
pub(crate) struct Fixture {
    pub(crate) base: String,
    pub(crate) engine: Engine,
    pub(crate) database: TestDatabase,
    client: reqwest::Client,
}

impl Fixture {
    pub(crate) async fn start() -> Self {
        Self::with(Contract::default(), FlowOptions::new()).await
    }

    pub(crate) async fn with(contract: Contract, options: FlowOptions) -> Self {
        let database = database().await;
        let engine = fixture::engine(database.pool(), options).await.unwrap();
        let base = serve(fixture::router(&engine, contract)).await;
        Self {
            base,
            engine,
            database,
            client: http(),
        }
    }

    /// Another process of the same service.
    pub(crate) async fn twin(&self) -> String {
        let engine = fixture::engine(self.database.pool(), FlowOptions::new());
        serve(fixture::router(&engine.await.unwrap(), Contract::default())).await
    }

    pub(crate) fn request(&self, method: Method, path: &str, key: &str) -> RequestBuilder {
        self.client
            .request(method, format!("{}{path}", self.base))
            .header("idempotency-key", key)
    }

    pub(crate) fn post(&self, path: &str, key: &str) -> RequestBuilder {
        self.request(Method::POST, path, key)
    }

    pub(crate) async fn count(&self) -> u64 {
        count(&self.client, &self.base).await
    }

    /// Until so many handlers have begun.
    pub(crate) async fn begun(&self, handlers: u64) {
        begun(&self.client, &self.base, handlers).await;
    }

    /// Lets one held handler go on.
    pub(crate) async fn release(&self) {
        release(&self.base).await;
    }
}

pub(crate) async fn database() -> TestDatabase {
    TestDatabase::from_template("fixture", async |pool| {
        idempotent_core::migrate(&pool).await?;
        Ok(())
    })
    .await
}

/// How many handlers have begun, there.
pub(crate) async fn count(client: &reqwest::Client, base: &str) -> u64 {
    let counted = client.get(format!("{base}/counter")).send().await.unwrap();
    let counted: Value = counted.json().await.unwrap();
    counted["count"].as_u64().unwrap()
}

/// Until so many handlers have begun, there.
pub(crate) async fn begun(client: &reqwest::Client, base: &str, handlers: u64) {
    let begun = async {
        while count(client, base).await < handlers {
            tokio::task::yield_now().await;
        }
    };
    let begun = tokio::time::timeout(PATIENCE, begun).await;
    begun.expect("the handlers begin");
}

/// Lets one held handler go on, there.
pub(crate) async fn release(base: &str) {
    let released = http().post(format!("{base}/release")).send();
    assert_eq!(released.await.unwrap().status(), 204);
}

/// Status, headers but the date and the length, and body.
pub(crate) type Whole = (u16, Vec<(String, String)>, Vec<u8>);

pub(crate) async fn whole(response: Response) -> Whole {
    let status = response.status().as_u16();
    let headers = response.headers().iter();
    let headers = headers
        .filter(|(name, _)| !["date", "content-length"].contains(&name.as_str()))
        .map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()))
        .collect();
    (status, headers, response.bytes().await.unwrap().to_vec())
}

fn is_replayed(response: &Response) -> bool {
    response
        .headers()
        .get("idempotent-replayed")
        .is_some_and(|value| value == "true")
}

/// Status and code of a problem that says where it is described.
pub(crate) async fn problem(response: Response) -> (u16, String) {
    let status = response.status().as_u16();
    let headers = response.headers().clone();
    assert_eq!(headers["content-type"], "application/problem+json");
    let problem: Value = response.json().await.unwrap();
    assert_eq!(problem["status"], status);
    assert!(
        problem["title"].is_string() && problem["detail"].is_string(),
        "{problem}"
    );
    let described_at = problem["type"].as_str().unwrap();
    assert_eq!(
        headers["link"].to_str().unwrap(),
        format!("<{described_at}>; rel=\"describedby\"")
    );
    let code = problem["code"].as_str().unwrap().to_owned();
    assert!(
        described_at.ends_with(&format!("#{code}")),
        "{described_at}"
    );
    (status, code)
}

async fn refused(response: Response, status: u16, code: &str) {
    assert_eq!(problem(response).await, (status, code.to_owned()));
}

#[tokio::test]
async fn a_request_without_a_key_is_refused_and_not_run() {
    let fixture = Fixture::start().await;
    let bare = http().post(format!("{}/echo", fixture.base)).body("a");
    refused(bare.send().await.unwrap(), 400, "key_missing").await;
    assert_eq!(fixture.count().await, 0);
}

#[tokio::test]
async fn a_key_that_is_none_is_refused_and_not_run() {
    let fixture = Fixture::start().await;
    let long = "k".repeat(256);
    let quoted_long = format!("\"{long}\"");
    let keys: &[&[u8]] = &[
        b"",
        b"\"\"",
        b"   ",
        long.as_bytes(),
        quoted_long.as_bytes(),
        b"\"open",
        b"close\"",
        b"\"a\"b",
        b"\"a\\n\"",
        b"\"a\\",
        b"a b",
        b"a, b",
        b"\"a\", \"b\"",
        b"\"a\";p=1",
        b"a;p=1",
        b"caf\xc3\xa9",
        b"\"caf\xc3\xa9\"",
        b"\xff\xfe",
        b"a\tb",
    ];
    for key in keys {
        let mut connection = Connection::open(&fixture.base).await;
        let header = [b"idempotency-key: ", *key].concat();
        let answer = connection.ask(&raw::post("/echo", &[&header], b"a")).await;
        let shown = String::from_utf8_lossy(key);
        assert_eq!(answer.status, 400, "{shown}: {}", answer.text());
        let problem: Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(problem["code"], "key_invalid", "{shown}");
        assert!(problem["detail"].as_str().unwrap().len() > 20, "{problem}");
        // What the key was is nobody's who reads a log of answers.
        assert!(
            shown.trim().len() < 3 || !answer.text().contains(shown.trim()),
            "{shown}"
        );
    }
    let twice: [&[u8]; 2] = [b"idempotency-key: a", b"Idempotency-Key: a"];
    let mut connection = Connection::open(&fixture.base).await;
    let answer = connection.ask(&raw::post("/echo", &twice, b"a")).await;
    assert_eq!(answer.status, 400, "{}", answer.text());
    // What the parser of HTTP itself refuses is a bare 400.
    let mut connection = Connection::open(&fixture.base).await;
    let nul: [&[u8]; 1] = [b"idempotency-key: a\0b"];
    let answer = connection.ask(&raw::post("/echo", &nul, b"a")).await;
    assert_eq!(answer.status, 400);
    assert_eq!(fixture.count().await, 0);
}

#[tokio::test]
async fn quoted_and_bare_name_one_key() {
    let fixture = Fixture::start().await;
    let long = "k".repeat(255);
    let alike = [
        ("\"8e03978e-40d5\"", "8e03978e-40d5"),
        ("\"a\\\"b\"", "  \"a\\\"b\"  "),
        (&format!("\"{long}\""), &long),
        ("\"Zz!#$%&'*+-.^_`|~09:/@\"", "Zz!#$%&'*+-.^_`|~09:/@"),
    ];
    for (runs, (quoted, bare)) in alike.into_iter().enumerate() {
        let first = fixture
            .post("/echo", quoted)
            .body("x")
            .send()
            .await
            .unwrap();
        let retry = fixture.post("/echo", bare).body("x").send().await.unwrap();
        assert_eq!(first.status(), 201, "{quoted}");
        assert!(!is_replayed(&first) && is_replayed(&retry), "{quoted}");
        assert_eq!(fixture.count().await, runs as u64 + 1);
    }
    // A key with characters that need quotes is another than its pieces, and case counts.
    for key in ["\"a, b;c\"", "\"A\"", "\"a\"", "\"a \""] {
        let answer = fixture.post("/echo", key).body("x").send().await.unwrap();
        assert!(!is_replayed(&answer), "{key}");
    }
}

#[tokio::test]
async fn a_retry_gets_the_first_answer_to_the_byte() {
    let fixture = Fixture::start().await;
    let bytes: Vec<u8> = (0..=255).collect();
    let send = async || {
        let request = fixture
            .post("/echo", "k")
            .header("content-type", "image/x-odd; q=1");
        request.body(bytes.clone()).send().await.unwrap()
    };
    let first = send().await;
    assert!(!is_replayed(&first));
    let (status, mut headers, body) = whole(first).await;
    assert_eq!((status, &body), (201, &bytes));
    headers.push(("idempotent-replayed".to_owned(), "true".to_owned()));
    for _ in 0..3 {
        assert_eq!(
            whole(send().await).await,
            (status, headers.clone(), body.clone())
        );
    }
    // C06 in a way: another process gives it too.
    let elsewhere = http().post(format!("{}/echo", fixture.twin().await));
    let elsewhere = elsewhere
        .header("idempotency-key", "k")
        .header("content-type", "image/x-odd; q=1");
    let elsewhere = elsewhere.body(bytes.clone()).send().await.unwrap();
    assert_eq!(whole(elsewhere).await, (status, headers, body));
    assert_eq!(fixture.count().await, 1);
}

#[tokio::test]
async fn of_the_headers_those_are_replayed_that_belong_to_the_answer() {
    // C03.
    let fixture = Fixture::start().await;
    let first = fixture.post("/headers", "k").send().await.unwrap();
    let retry = fixture.post("/headers", "k").send().await.unwrap();
    assert_eq!(first.headers()["set-cookie"], "session=secret");
    assert!(is_replayed(&retry));
    assert_eq!(retry.status(), 201);
    for kept in [
        "location",
        "etag",
        "content-language",
        "link",
        "content-type",
    ] {
        assert_eq!(first.headers()[kept], retry.headers()[kept], "{kept}");
    }
    for of_one_answer in ["set-cookie", "cache-control"] {
        assert!(
            !retry.headers().contains_key(of_one_answer),
            "{of_one_answer}"
        );
    }
    assert_eq!(retry.headers().get_all("date").iter().count(), 1);
}

#[tokio::test]
async fn a_key_is_of_its_path_and_its_request() {
    let fixture = Fixture::start().await;
    let send = async |path: &str, body: &str| {
        let answer = fixture.post(path, "k").body(body.to_owned()).send();
        answer.await.unwrap()
    };
    // C09: two requests.
    assert_eq!(send("/echo", "a").await.status(), 201);
    assert_eq!(send("/status/200", "a").await.status(), 200);
    assert_eq!(send("/status/202", "a").await.status(), 202);
    assert_eq!(fixture.count().await, 3);
    refused(send("/echo", "b").await, 422, "request_mismatch").await;
    refused(send("/echo", "").await, 422, "request_mismatch").await;
    refused(send("/echo?x=1", "a").await, 422, "request_mismatch").await;
    // The mismatch changed nothing.
    assert!(is_replayed(&send("/echo", "a").await));
    assert_eq!(fixture.count().await, 3);
    // C11: the second of two long bodies that differ in the last byte.
    let long = "a".repeat(40_000);
    let other = format!("{}b", &long[1..]);
    let long_one = fixture
        .post("/echo", "long")
        .body(long)
        .send()
        .await
        .unwrap();
    assert_eq!(long_one.status(), 201);
    let other = fixture
        .post("/echo", "long")
        .body(other)
        .send()
        .await
        .unwrap();
    refused(other, 422, "request_mismatch").await;
    // Another method on the same path.
    fixture.release().await;
    assert_eq!(
        fixture.post("/held", "m").send().await.unwrap().status(),
        200
    );
}

#[tokio::test]
async fn while_it_runs_a_retry_is_told_so_and_another_request_is_a_mismatch() {
    let fixture = Fixture::start().await;
    let first = tokio::spawn(fixture.post("/held", "k").body("a").send());
    fixture.begun(1).await;

    let twin = fixture.twin().await;
    let elsewhere = || {
        http()
            .post(format!("{twin}/held"))
            .header("idempotency-key", "k")
    };
    let here = || fixture.post("/held", "k");
    for retry in [here().body("a"), elsewhere().body("a")] {
        let retry = retry.send().await.unwrap();
        let retry_after = retry.headers()["retry-after"]
            .to_str()
            .unwrap()
            .parse::<u64>();
        assert!(
            (1..=15).contains(&retry_after.unwrap()),
            "{:?}",
            retry.headers()
        );
        refused(retry, 409, "request_in_progress").await;
    }
    for other in [here().body("b"), elsewhere().body("b")] {
        refused(other.send().await.unwrap(), 422, "request_mismatch").await;
    }

    fixture.release().await;
    let first = first.await.unwrap().unwrap();
    assert!(!is_replayed(&first));
    assert_eq!(first.text().await.unwrap(), "released");
    for retry in [here().body("a"), elsewhere().body("a")] {
        let retry = retry.send().await.unwrap();
        assert!(is_replayed(&retry));
        assert_eq!(retry.text().await.unwrap(), "released");
    }
    assert_eq!(fixture.count().await, 1);
}

#[tokio::test]
async fn of_many_at_once_one_runs() {
    // C05, C06: two processes, and no loser of a race is told of an error.
    let fixture = Fixture::start().await;
    let twin = fixture.twin().await;
    let client = http();
    let send = |base: &str| {
        let request = client
            .post(format!("{base}/echo"))
            .header("idempotency-key", "k");
        tokio::spawn(request.body("x").send())
    };
    let sent: Vec<_> = (0..25)
        .flat_map(|_| [send(&fixture.base), send(&twin)])
        .collect();
    let mut first_answers = 0;
    for answer in sent {
        let answer = answer.await.unwrap().unwrap();
        match answer.status().as_u16() {
            201 => first_answers += u64::from(!is_replayed(&answer)),
            409 => refused(answer, 409, "request_in_progress").await,
            other => panic!("{other}: {}", answer.text().await.unwrap()),
        }
    }
    assert_eq!(first_answers, 1);
    assert_eq!(fixture.count().await + count(&client, &twin).await, 1);
}

#[tokio::test]
async fn a_client_error_is_an_answer_and_a_server_error_is_none() {
    let fixture = Fixture::start().await;
    let mut runs = 0;
    for (code, is_kept) in [
        (200, true),
        (204, true),
        (301, true),
        (304, true),
        (400, true),
        (402, true),
        (404, true),
        (409, true),
        (422, true),
        (500, false),
        (502, false),
        (503, false),
        (599, false),
    ] {
        let path = format!("/status/{code}");
        let first = fixture.post(&path, "k").send().await.unwrap();
        let retry = fixture.post(&path, "k").send().await.unwrap();
        runs += if is_kept { 1 } else { 2 };
        assert_eq!(first.status(), code);
        assert!(!is_replayed(&first), "{code}");
        assert_eq!(is_replayed(&retry), is_kept, "{code}");
        let (first, retry) = (first.text().await.unwrap(), retry.text().await.unwrap());
        assert_eq!(first, retry, "{code}");
        assert_eq!(fixture.count().await, runs, "{code}");
    }
}

#[tokio::test]
async fn a_key_is_ignored_where_the_method_is_safe_to_repeat() {
    let fixture = Fixture::start().await;
    let get = || fixture.request(Method::GET, "/counter", "k").send();
    let before = get().await.unwrap().text().await.unwrap();
    assert_eq!(before, r#"{"count":0}"#);
    assert_eq!(
        fixture.post("/echo", "k").send().await.unwrap().status(),
        201
    );
    let after = get().await.unwrap();
    assert!(!is_replayed(&after));
    assert_eq!(after.text().await.unwrap(), r#"{"count":1}"#);
    // Not even a bad one matters.
    let odd = fixture
        .request(Method::HEAD, "/counter", "a b")
        .send()
        .await
        .unwrap();
    assert_eq!(odd.status(), 200);
    fixture.release().await;
    fixture.release().await;
    for run in 2..4 {
        let put = fixture
            .request(Method::PUT, "/held", "k")
            .send()
            .await
            .unwrap();
        assert!(put.status() == 200 && !is_replayed(&put));
        assert_eq!(fixture.count().await, run);
    }
    // A path that is not there uses up no key.
    let nowhere = fixture.post("/nowhere", "k").send().await.unwrap();
    assert_eq!(nowhere.status(), 404);
    let keys = tests::trip::count(&fixture.database, "idempotency_keys").await;
    assert_eq!(keys, 1);
    // A method that is not there is an answer, and its replay says too which are.
    for _ in 0..2 {
        let no_such = fixture.post("/counter", "k").send().await.unwrap();
        assert_eq!(no_such.status(), 405);
        assert_eq!(no_such.headers()["allow"], "GET,HEAD");
    }
}

#[tokio::test]
async fn past_its_retention_a_key_is_new() {
    let times = FlowOptions::new()
        .lease(Duration::from_millis(500))
        .retention(Duration::from_secs(1));
    let fixture = Fixture::with(Contract::default(), times).await;
    assert!(!is_replayed(
        &fixture.post("/echo", "k").send().await.unwrap()
    ));
    assert!(is_replayed(
        &fixture.post("/echo", "k").send().await.unwrap()
    ));
    let age = "UPDATE idempotency_keys SET finished_at = finished_at - interval '2 seconds'";
    sqlx::query(age)
        .execute(&fixture.database.pool())
        .await
        .unwrap();
    fixture.engine.reap_once().await.unwrap();
    assert!(!is_replayed(
        &fixture.post("/echo", "k").body("new").send().await.unwrap()
    ));
    assert_eq!(fixture.count().await, 2);
}

#[tokio::test]
async fn an_answer_over_the_limit_goes_out_whole_and_runs_once() {
    let fixture = Fixture::start().await;
    let within = 1 << 20;
    for (key, bytes, is_kept) in [
        ("k1", within, true),
        ("k2", within + 1, false),
        ("k3", 9 << 20, false),
    ] {
        let path = format!("/large?bytes={bytes}");
        let first = fixture.post(&path, key).send().await.unwrap();
        assert_eq!(first.status(), 200);
        assert!(!is_replayed(&first));
        let stored = first.headers().get("idempotent-body-stored").cloned();
        assert_eq!(stored.is_none(), is_kept);
        let body = first.bytes().await.unwrap();
        assert_eq!(body.len(), bytes);
        assert!(body.iter().all(|byte| *byte == b'x'));
        for _ in 0..2 {
            let retry = fixture.post(&path, key).send().await.unwrap();
            assert_eq!(retry.status(), 200);
            assert!(is_replayed(&retry));
            assert_eq!(retry.headers()["content-type"], "text/plain; charset=utf-8");
            let truncated = retry.headers().get("idempotent-replay-truncated").cloned();
            assert_eq!(truncated.is_none(), is_kept);
            let length = if is_kept { bytes } else { 0 };
            assert_eq!(retry.bytes().await.unwrap().len(), length);
        }
    }
    assert_eq!(fixture.count().await, 3);
}

#[tokio::test]
async fn a_streamed_answer_is_passed_through_and_runs_once() {
    let fixture = Fixture::start().await;
    let first = fixture.post("/stream", "k").send().await.unwrap();
    assert_eq!(first.headers()["idempotent-body-stored"], "false");
    assert_eq!(first.text().await.unwrap(), "part 0\npart 1\npart 2\n");
    let retry = fixture.post("/stream", "k").send().await.unwrap();
    assert!(is_replayed(&retry));
    assert_eq!(retry.headers()["idempotent-replay-truncated"], "true");
    assert_eq!(retry.text().await.unwrap(), "");
    assert_eq!(fixture.count().await, 1);
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_and_uses_up_no_key() {
    let contract = Contract::default().body_limit(1000);
    let fixture = Fixture::with(contract, FlowOptions::new()).await;
    let send = |bytes: usize| fixture.post("/echo", "k").body("x".repeat(bytes)).send();
    // The client has not yet sent all of it when it is clear that it is too much, and sees so.
    for bytes in [1001, 30 << 20] {
        refused(send(bytes).await.unwrap(), 413, "body_too_large").await;
    }
    assert_eq!(fixture.count().await, 0);
    assert_eq!(send(1000).await.unwrap().status(), 201);
}

#[tokio::test]
async fn a_handler_that_panics_lets_its_key_go() {
    // C01.
    let fixture = Fixture::start().await;
    for runs in 1..3 {
        let answer = fixture.post("/panic", "k").send().await.unwrap();
        assert!(answer.headers().contains_key("retry-after"));
        refused(answer, 503, "temporarily_unavailable").await;
        assert_eq!(fixture.count().await, runs);
    }
}

#[tokio::test]
async fn each_profile_says_no_in_its_own_way() {
    for (profile, mismatch) in [
        (Profile::ietf(), 422),
        (Profile::rocket_rides(), 409),
        (Profile::stripe(), 400),
    ] {
        let fixture = Fixture::with(Contract::new(profile), FlowOptions::new()).await;
        let first = tokio::spawn(fixture.post("/held", "k").send());
        fixture.begun(1).await;
        let other = fixture.post("/held", "k").body("x").send().await.unwrap();
        let running = fixture.post("/held", "k").send().await.unwrap();
        assert!(running.headers().contains_key("retry-after"));
        if profile == Profile::stripe() {
            let shape = async |answer: Response| {
                let status = answer.status().as_u16();
                assert_eq!(answer.headers()["content-type"], "application/json");
                let error: Value = answer.json().await.unwrap();
                let text = |name: &str| error["error"][name].as_str().unwrap().to_owned();
                assert!(!text("message").is_empty() && text("doc_url").contains('#'));
                (status, text("type"), text("code"))
            };
            let expected =
                |status: u16, code: &str| (status, "idempotency_error".to_owned(), code.to_owned());
            assert_eq!(shape(other).await, expected(400, "request_mismatch"));
            assert_eq!(
                shape(running).await,
                expected(409, "idempotency_key_in_use")
            );
            let bare = http()
                .post(format!("{}/echo", fixture.base))
                .send()
                .await
                .unwrap();
            let (status, kind, code) = shape(bare).await;
            assert_eq!(
                (status, &*kind, &*code),
                (400, "invalid_request_error", "key_missing")
            );
        } else {
            refused(other, mismatch, "request_mismatch").await;
            refused(running, 409, "request_in_progress").await;
        }
        fixture.release().await;
        assert_eq!(first.await.unwrap().unwrap().status(), 200);
    }
}

#[tokio::test]
async fn an_api_may_ask_for_longer_keys_and_name_the_header() {
    let name = reqwest::header::HeaderName::from_static("x-replay");
    let contract = Contract::default().shortest_key(16).replayed_header(name);
    let contract = contract.documented_at("https://api.example.com/problems");
    let fixture = Fixture::with(contract, FlowOptions::new()).await;
    let short = fixture
        .post("/echo", "\"0123456789abcde\"")
        .send()
        .await
        .unwrap();
    let link = short.headers()["link"].clone();
    assert_eq!(
        link,
        "<https://api.example.com/problems#key_invalid>; rel=\"describedby\""
    );
    refused(short, 400, "key_invalid").await;
    let send = || fixture.post("/echo", "0123456789abcdef").send();
    assert!(!send().await.unwrap().headers().contains_key("x-replay"));
    let retry = send().await.unwrap();
    assert_eq!(retry.headers()["x-replay"], "true");
    assert!(!is_replayed(&retry));
}

#[tokio::test]
async fn a_lease_is_renewed_for_as_long_as_the_handler_runs() {
    let times = FlowOptions::new().lease(Duration::from_millis(500));
    let fixture = Fixture::with(Contract::default(), times).await;
    let first = tokio::spawn(fixture.post("/slow?ms=1600", "k").send());
    fixture.begun(1).await;
    let mut told = 0;
    let retry = loop {
        let retry = fixture.post("/slow?ms=1600", "k").send().await.unwrap();
        if retry.status() == 200 {
            break retry;
        }
        refused(retry, 409, "request_in_progress").await;
        told += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(is_replayed(&retry) && told > 5);
    assert_eq!(
        first.await.unwrap().unwrap().text().await.unwrap(),
        "slept:1600"
    );
    assert_eq!(fixture.count().await, 1);
}
