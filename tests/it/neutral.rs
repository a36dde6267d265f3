//! The contract without axum: an adapter for plain hyper, as one for any other framework would be,
//! and its test. What is between the two lines is all of it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use idempotent_core::Handle;
use idempotent_core::http::{Contract, Problem, parse_json};
use serde_json::json;
use tests::server::http;
use tests::trip::{self, TripFlow, TripRequest};

// ---------------------------------------------------------------------------------------------------

struct Api {
    contract: Contract,
    trips: Handle<TripFlow>,
}

impl Api {
    async fn serve(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let answered = self.create_trip(request).await;
        let answered = answered.unwrap_or_else(|problem| problem.to_response(&self.contract));
        answered.map(Full::new)
    }

    async fn create_trip(&self, request: Request<Incoming>) -> Result<Response<Bytes>, Problem> {
        let (parts, body) = request.into_parts();
        // Who asks comes first: a stored answer is for nobody else.
        let authorization = parts.headers.get("authorization");
        let user = authorization.and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        let user = user
            .ok_or_else(|| problem(401, "unauthenticated", "Who are you?"))?
            .to_owned();
        let incoming = self.contract.incoming(&parts)?;
        let body = Limited::new(body, 1 << 20).collect();
        let body = tokio::time::timeout(Duration::from_secs(10), body).await;
        let body = body.map_err(|_| problem(408, "body_too_slow", "The body took too long"))?;
        let body = body.map_err(|_| problem(413, "body_too_large", "The body is too large"))?;
        let request: TripRequest = parse_json(&body.to_bytes())?;
        Ok(self
            .contract
            .answer(&self.trips, incoming, user, request)
            .await)
    }
}

fn problem(status: u16, code: &'static str, title: &'static str) -> Problem {
    let status = http::StatusCode::from_u16(status).unwrap();
    Problem::new(status, code, title)
}

// ---------------------------------------------------------------------------------------------------

async fn listen(api: Api) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let api = Arc::new(api);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let api = Arc::clone(&api);
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let api = Arc::clone(&api);
                    async move { Ok::<_, Infallible>(api.serve(request).await) }
                });
                let connection = auto::Builder::new(TokioExecutor::new());
                let served = connection.serve_connection(TokioIo::new(stream), service);
                served.await.ok();
            });
        }
    });
    base
}

#[tokio::test]
async fn an_adapter_for_another_framework_is_a_few_lines() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let base = listen(Api {
        contract: Contract::default(),
        trips: flow.run_by(database.pool()).await,
    })
    .await;
    let send = async |user: &str, key: &str, body: serde_json::Value| {
        let request = http().post(format!("{base}/trips")).bearer_auth(user);
        let request = request
            .header("idempotency-key", key)
            .body(body.to_string());
        request.send().await.unwrap()
    };
    let first = send("alice", "k", json!({"goal": "mars"})).await;
    let retry = send("alice", "\"k\"", json!({"goal": "mars"})).await;
    assert_eq!(
        (first.status().as_u16(), retry.status().as_u16()),
        (201, 201)
    );
    assert!(!first.headers().contains_key("idempotent-replayed"));
    assert_eq!(retry.headers()["idempotent-replayed"], "true");
    assert_eq!(first.headers()["location"], retry.headers()["location"]);
    assert_eq!(first.bytes().await.unwrap(), retry.bytes().await.unwrap());

    let code = async |response: reqwest::Response| {
        let status = response.status().as_u16();
        let problem: serde_json::Value = response.json().await.unwrap();
        (status, problem["code"].as_str().unwrap().to_owned())
    };
    let mismatch = send("alice", "k", json!({"goal": "moon"})).await;
    assert_eq!(code(mismatch).await, (422, "request_mismatch".to_owned()));
    // C07: another user's key of the same name is another key.
    let of_bob = send("bob", "k", json!({"goal": "moon"})).await;
    assert_eq!(of_bob.status(), 201);
    assert!(!of_bob.headers().contains_key("idempotent-replayed"));
    let malformed = send("alice", "k2", json!([1])).await;
    assert_eq!(code(malformed).await, (400, "body_malformed".to_owned()));
    let nobody = http()
        .post(format!("{base}/trips"))
        .header("idempotency-key", "k");
    let nobody = nobody.send().await.unwrap();
    assert_eq!(code(nobody).await, (401, "unauthenticated".to_owned()));
    assert_eq!(flow.outside.payments(), 2);
}
