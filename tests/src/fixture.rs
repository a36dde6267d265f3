//! A small API to try the HTTP contract against: plain handlers behind our layer, each POST counted,
//! so that a client can see whether a handler ran. `conformance-fixture` serves it as a program.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use idempotent_core::http::{Anyone, Contract, GuardLayer};
use idempotent_core::{BuildError, Engine, FlowOptions};
use serde::Deserialize;
use serde_json::json;
use sqlx::PgPool;
use tokio::sync::Semaphore;

/// How many POSTs were handled, and what holds some of them.
#[derive(Clone, Debug)]
struct Counter {
    handled: Arc<AtomicU64>,
    released: Arc<Semaphore>,
}

impl Counter {
    /// One more.
    fn add(&self) {
        self.handled.fetch_add(1, Ordering::SeqCst);
    }
}

/// An engine with the guard that [`router`] needs.
///
/// # Errors
///
/// See [`BuildError`].
pub async fn engine(pool: PgPool, options: FlowOptions) -> Result<Engine, BuildError> {
    Engine::builder(pool)
        .guard_with("fixture", options)
        .build()
        .await
}

/// The API, under this contract. All POST routes but `/reset` and `/release` need a key.
///
/// # Panics
///
/// When the engine is not [`engine`]'s.
pub fn router(engine: &Engine, contract: Contract) -> Router {
    let guard = engine.guard("fixture").expect("the fixture's engine");
    guarded(GuardLayer::for_caller::<Anyone>(guard, ()), contract)
}

/// The same behind a layer of the caller's own settings.
pub fn guarded(layer: GuardLayer<Anyone, ()>, contract: Contract) -> Router {
    let counter = Counter {
        handled: Arc::default(),
        released: Arc::new(Semaphore::new(0)),
    };
    Router::new()
        .route("/echo", post(echo))
        .route("/status/{code}", post(status))
        .route("/slow", post(slow))
        .route("/large", post(large))
        .route("/headers", post(headers))
        .route("/stream", post(stream))
        .route("/panic", post(panics))
        .route("/held", post(held).put(held))
        .route("/counter", get(count))
        .route_layer(layer)
        .route("/release", post(release))
        .route("/reset", post(reset))
        .layer(contract)
        .with_state(counter)
}

async fn echo(State(counter): State<Counter>, headers: HeaderMap, body: Bytes) -> Response {
    counter.add();
    let content_type = headers.get(header::CONTENT_TYPE).cloned();
    let content_type = content_type.unwrap_or(HeaderValue::from_static("application/octet-stream"));
    let headers = [(header::CONTENT_TYPE, content_type)];
    (StatusCode::CREATED, headers, body).into_response()
}

async fn status(State(counter): State<Counter>, Path(code): Path<u16>) -> Response {
    counter.add();
    match StatusCode::from_u16(code) {
        Ok(status) if !status.is_informational() => {
            (status, format!("status:{code}")).into_response()
        }
        _ => (StatusCode::BAD_REQUEST, "not a final status").into_response(),
    }
}

#[derive(Deserialize)]
struct Slow {
    #[serde(default)]
    ms: u64,
}

async fn slow(State(counter): State<Counter>, Query(slow): Query<Slow>) -> String {
    counter.add();
    tokio::time::sleep(Duration::from_millis(slow.ms)).await;
    format!("slept:{}", slow.ms)
}

#[derive(Deserialize)]
struct Large {
    #[serde(default)]
    bytes: usize,
}

/// More than anybody needs, and less than there is memory.
const LARGEST: usize = 256 << 20;

async fn large(State(counter): State<Counter>, Query(large): Query<Large>) -> Response {
    counter.add();
    if large.bytes > LARGEST {
        return (StatusCode::BAD_REQUEST, "too large").into_response();
    }
    "x".repeat(large.bytes).into_response()
}

/// With headers that are kept, and some that must not be.
async fn headers(State(counter): State<Counter>) -> Response {
    counter.add();
    let headers = [
        (header::LOCATION, "/things/1"),
        (header::ETAG, "\"v1\""),
        (header::CONTENT_LANGUAGE, "de"),
        (header::LINK, "</things>; rel=\"collection\""),
        (header::SET_COOKIE, "session=secret"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (StatusCode::CREATED, headers, "made").into_response()
}

/// A body that does not end for a while.
async fn stream(State(counter): State<Counter>) -> Response {
    counter.add();
    let (mut sender, receiver) = tokio::io::duplex(64);
    tokio::spawn(async move {
        for part in 0..3 {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let line = format!("part {part}\n");
            if tokio::io::AsyncWriteExt::write_all(&mut sender, line.as_bytes())
                .await
                .is_err()
            {
                return;
            }
        }
    });
    Response::new(Body::new(Lines(receiver)))
}

/// What is written to a pipe, as a body of unknown length.
struct Lines(tokio::io::DuplexStream);

impl http_body::Body for Lines {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, std::io::Error>>> {
        let mut space = [0; 64];
        let mut read = tokio::io::ReadBuf::new(&mut space);
        let reader = std::pin::Pin::new(&mut self.0);
        std::task::ready!(tokio::io::AsyncRead::poll_read(reader, context, &mut read))?;
        let bytes = Bytes::copy_from_slice(read.filled());
        std::task::Poll::Ready((!bytes.is_empty()).then(|| Ok(http_body::Frame::data(bytes))))
    }
}

async fn panics(State(counter): State<Counter>) -> Response {
    counter.add();
    panic!("as it was asked to");
}

/// Waits for one `/release`.
async fn held(State(counter): State<Counter>) -> &'static str {
    counter.add();
    // It is never closed; if it were, there would be nothing to wait for.
    if let Ok(permit) = counter.released.acquire().await {
        permit.forget();
    }
    "released"
}

async fn release(State(counter): State<Counter>) -> StatusCode {
    counter.released.add_permits(1);
    StatusCode::NO_CONTENT
}

async fn count(State(counter): State<Counter>) -> Response {
    Json(json!({ "count": counter.handled.load(Ordering::SeqCst) })).into_response()
}

async fn reset(State(counter): State<Counter>) -> StatusCode {
    counter.handled.store(0, Ordering::SeqCst);
    StatusCode::NO_CONTENT
}
