//! A tower layer for axum handlers without phases: the handler's response is the reply. Of all requests
//! with one key one runs at a time, and once its response is stored every retry gets that.
//!
//! It is the quick way in, and the weaker one. A handler has no recovery points: if the process dies in
//! the middle of one, a retry runs it from its beginning, and what it did until then it may do again.
//! What must not happen twice belongs into a flow.

use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{FromRequestParts, Request};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use http::response::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt;
use tower_layer::Layer;
use tower_service::Service;

use super::axum_glue::{contract_of, read_body, rendered, whole_uri};
use super::contract::invalid_key;
use super::header::missing;
use super::{Caller, Problem};
use crate::engine::{Guard, Handled, Patience};
use crate::error::RunError;
use crate::reply::StoredReply;

/// Marks a response whose body is passed through and not stored: `false`.
static BODY_STORED: HeaderName = HeaderName::from_static("idempotent-body-stored");

/// What of a handler's response is stored besides its status and its body. Without the last two a
/// replayed 405 or 401 would not be one (RFC 9110, sections 15.5.6 and 15.5.2).
static KEPT_HEADERS: [HeaderName; 7] = [
    header::CONTENT_TYPE,
    header::LOCATION,
    header::CONTENT_LANGUAGE,
    header::ETAG,
    header::LINK,
    header::ALLOW,
    header::WWW_AUTHENTICATE,
];

/// Which responses are stored and replayed. After another one the key is free again, and a retry runs
/// the handler once more.
#[derive(Clone)]
pub struct Keep(Arc<Keeps>);

type Keeps = dyn Fn(StatusCode, &HeaderMap) -> bool + Send + Sync;

impl Keep {
    /// Those that are not a server error: the usual choice. A 4xx is an answer too.
    pub fn below_500() -> Self {
        Self::when(|status, _| !status.is_server_error())
    }

    /// Only those that say that it was done.
    pub fn success() -> Self {
        Self::when(|status, _| status.is_success())
    }

    /// Those of which this is true.
    pub fn when(keeps: impl Fn(StatusCode, &HeaderMap) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(keeps))
    }
}

impl fmt::Debug for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keep(..)")
    }
}

/// All callers are one: for a service that has one client, or none that it could tell apart.
#[derive(Debug, Clone, Copy)]
pub struct Anyone;

impl Caller for Anyone {
    fn user_id(&self) -> String {
        "anyone".to_owned()
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Anyone {
    type Rejection = Infallible;

    async fn from_request_parts(
        _parts: &mut http::request::Parts,
        _state: &S,
    ) -> Result<Self, Infallible> {
        Ok(Self)
    }
}

/// Guards the handlers below it. `U` is the application's own extractor, which authenticates and
/// authorises every request, a retry too, before its key is looked at.
///
/// Guarded are POST and PATCH, and they must have a key, unless it is told otherwise.
///
/// ```no_run
/// use axum::{Router, routing::post};
/// use idempotent_core::Engine;
/// use idempotent_core::http::{Anyone, GuardLayer, Keep};
///
/// # async fn example(pool: sqlx::PgPool) -> Result<Router, Box<dyn std::error::Error>> {
/// let engine = Engine::builder(pool).guard("notes").build().await?;
/// let guarded = GuardLayer::for_caller::<Anyone>(engine.guard("notes")?, ()).keep(Keep::success());
/// // A path that is not there uses up no key.
/// let router = Router::new().route("/notes", post(async || "noted")).route_layer(guarded);
/// # Ok(router)
/// # }
/// ```
pub struct GuardLayer<U, S> {
    settings: Arc<Settings<S>>,
    user: PhantomData<fn() -> U>,
}

struct Settings<S> {
    guard: Guard,
    state: S,
    keep: Keep,
    kept_headers: Vec<HeaderName>,
    methods: Vec<Method>,
    requires_key: bool,
    reply_limit: usize,
}

impl<S: Clone> Clone for Settings<S> {
    fn clone(&self) -> Self {
        Self {
            guard: self.guard.clone(),
            state: self.state.clone(),
            keep: self.keep.clone(),
            kept_headers: self.kept_headers.clone(),
            methods: self.methods.clone(),
            requires_key: self.requires_key,
            reply_limit: self.reply_limit,
        }
    }
}

impl<S> GuardLayer<(), S> {
    /// A layer whose callers the extractor `U` tells apart, from this state.
    pub fn for_caller<U>(guard: Guard, state: S) -> GuardLayer<U, S>
    where
        U: FromRequestParts<S> + Caller,
    {
        let settings = Settings {
            state,
            keep: Keep::below_500(),
            kept_headers: KEPT_HEADERS.to_vec(),
            methods: vec![Method::POST, Method::PATCH],
            requires_key: true,
            reply_limit: guard.reply_limit(),
            guard,
        };
        GuardLayer {
            settings: Arc::new(settings),
            user: PhantomData,
        }
    }
}

impl<U, S: Clone> GuardLayer<U, S> {
    fn settings(&mut self) -> &mut Settings<S> {
        Arc::make_mut(&mut self.settings)
    }

    /// Which responses are stored. [`Keep::below_500`] unless given.
    #[must_use]
    pub fn keep(mut self, keep: Keep) -> Self {
        self.settings().keep = keep;
        self
    }

    /// Stores this header too, beside `content-type`, `location`, `content-language`, `etag`, `link`,
    /// `allow` and `www-authenticate`. Those that belong to one transmission or one session (`set-cookie`, `date`,
    /// hop-by-hop) are never stored.
    #[must_use]
    pub fn keep_header(mut self, name: HeaderName) -> Self {
        self.settings().kept_headers.push(name);
        self
    }

    /// Which methods are guarded; with another one a key is ignored. POST and PATCH unless given.
    #[must_use]
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.settings().methods = methods.into_iter().collect();
        self
    }

    /// Lets requests without a key through, unguarded.
    #[must_use]
    pub fn key_optional(mut self) -> Self {
        self.settings().requires_key = false;
        self
    }

    /// The most bytes of a response's body that are stored; the guard's own limit unless given.
    #[must_use]
    pub fn reply_limit(mut self, bytes: usize) -> Self {
        self.settings().reply_limit = bytes;
        self
    }
}

impl<U, S> Clone for GuardLayer<U, S> {
    fn clone(&self) -> Self {
        Self {
            settings: Arc::clone(&self.settings),
            user: PhantomData,
        }
    }
}

impl<U, S> fmt::Debug for GuardLayer<U, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuardLayer")
            .field("guard", &self.settings.guard)
            .field("methods", &self.settings.methods)
            .finish_non_exhaustive()
    }
}

/// A guarded service. Made by [`GuardLayer`].
pub struct Guarding<I, U, S> {
    inner: I,
    layer: GuardLayer<U, S>,
}

impl<I: Clone, U, S> Clone for Guarding<I, U, S> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            layer: self.layer.clone(),
        }
    }
}

impl<I, U, S> fmt::Debug for Guarding<I, U, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guarding")
            .field("layer", &self.layer)
            .finish_non_exhaustive()
    }
}

impl<I, U, S> Layer<I> for GuardLayer<U, S> {
    type Service = Guarding<I, U, S>;

    fn layer(&self, inner: I) -> Guarding<I, U, S> {
        Guarding {
            inner,
            layer: self.clone(),
        }
    }
}

impl<I, U, S> Service<Request> for Guarding<I, U, S>
where
    I: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    I::Future: Send + 'static,
    U: FromRequestParts<S> + Caller,
    S: Clone + Send + Sync + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        // The one that was made ready is the one that is called.
        let spare = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, spare);
        if !self.layer.settings.methods.contains(request.method()) {
            return Box::pin(inner.call(request));
        }
        let settings = Arc::clone(&self.layer.settings);
        Box::pin(async move {
            Ok(guarded::<I, U, S>(inner, &settings, request)
                .await
                .unwrap_or_else(|refused| refused))
        })
    }
}

async fn guarded<I, U, S>(
    mut inner: I,
    settings: &Settings<S>,
    request: Request,
) -> Result<Response, Response>
where
    I: Service<Request, Response = Response, Error = Infallible> + Send + 'static,
    I::Future: Send + 'static,
    U: FromRequestParts<S> + Caller,
    S: Send + Sync,
{
    let refuse = |problem: Problem| problem.into_response();
    let (mut parts, body) = request.into_parts();
    let user = U::from_request_parts(&mut parts, &settings.state).await;
    let user = user.map_err(IntoResponse::into_response)?.user_id();
    let contract = contract_of(&parts.extensions);
    let key = match contract.find_key(&parts.headers).map_err(refuse)? {
        Some(key) => key,
        None if settings.requires_key => return Err(refuse(missing())),
        None => {
            let answered = inner.call(Request::from_parts(parts, body)).await;
            return Ok(answered.unwrap_or_else(|never| match never {}));
        }
    };
    let place = contract.place(&parts, &whole_uri(&parts));
    let key = place.key(user, key);
    let key = key.map_err(|error| refuse(contract.profile().problem(&invalid_key(error))))?;
    let body = Bytes::from(read_body(body, &contract).await.map_err(refuse)?);

    let live: Live = Arc::default();
    let handler = {
        let (live, body) = (Arc::clone(&live), body.clone());
        let (keep, limit) = (settings.keep.clone(), settings.reply_limit);
        let (kept_headers, contract) = (settings.kept_headers.clone(), contract.clone());
        async move {
            let answered = inner.call(Request::from_parts(parts, Body::from(body)));
            let response = answered.await.unwrap_or_else(|never| match never {});
            // What is stored is what this API's clients see.
            let response = rendered(response, &contract);
            let (handled, response) = settle(response, &keep, &kept_headers, limit).await;
            *live.lock().unwrap_or_else(PoisonError::into_inner) = Some(response);
            handled
        }
    };
    let patience = place.patience(Patience::none());
    let answered = settings
        .guard
        .run_handler(key, &body, patience, Box::pin(handler));
    let answered = tokio::time::timeout(contract.longest_answer(), answered).await;
    let answered = answered.unwrap_or_else(|_| Err(contract.took_too_long()));
    let live = live.lock().unwrap_or_else(PoisonError::into_inner).take();
    let mut response = match (answered, live) {
        (Ok(answer), Some(live)) if !answer.is_replayed() => live,
        (Ok(answer), _) => contract.render(&answer).map(Body::from),
        // The handler's own failure, of which nothing is stored.
        (Err(RunError::Retry { .. }), Some(live)) => live,
        (Err(error), _) => contract.profile().problem(&error).into_response(),
    };
    place.note_preference(response.headers_mut());
    Ok(response)
}

/// The handler's own response, for the one client that waits for it.
type Live = Arc<Mutex<Option<Response>>>;

/// What is stored of a response, and what its client gets.
async fn settle(
    response: Response,
    keep: &Keep,
    kept_headers: &[HeaderName],
    limit: usize,
) -> (Handled, Response) {
    let status = response.status();
    if !(keep.0)(status, response.headers()) {
        let why = format!("the handler answered {}", status.as_u16());
        return (Handled::Release(why), response);
    }
    let (mut parts, body) = response.into_parts();
    match collect(body, limit).await {
        Ok(Collected::Whole(bytes)) => {
            let stored = stored(&parts, kept_headers, bytes.clone());
            let response = Response::from_parts(parts, Body::from(bytes));
            (Handled::Store(stored), response)
        }
        Ok(Collected::PassedThrough(body)) => {
            tracing::info!(
                status = status.as_u16(),
                limit,
                "the body of a response is streamed or too long and is not stored; a retry gets its status and headers"
            );
            let stored = stored(&parts, kept_headers, Bytes::new()).without_body();
            parts
                .headers
                .insert(&BODY_STORED, HeaderValue::from_static("false"));
            (Handled::Store(stored), Response::from_parts(parts, body))
        }
        Err(error) => {
            tracing::warn!(%error, "the body of a response could not be read; nothing of it is stored");
            let problem = Problem::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "response_broken",
                "The response could not be made",
            );
            let why = "the body of its response could not be read".to_owned();
            (Handled::Release(why), problem.into_response())
        }
    }
}

fn stored(parts: &Parts, kept_headers: &[HeaderName], body: Bytes) -> StoredReply {
    let headers = parts.headers.iter();
    let kept = headers.filter(|(name, _)| kept_headers.contains(name));
    StoredReply::of_parts(parts.status, kept, body)
}

enum Collected {
    Whole(Bytes),
    /// Streamed, or too long: what was read of it stands before the rest.
    PassedThrough(Body),
}

/// Reads a body whose length is known and within the limit. One of unknown length is read as far as
/// it is there at once: if that is all, it was no stream; else nobody is kept waiting for its end.
async fn collect(mut body: Body, limit: usize) -> Result<Collected, axum::Error> {
    let known = body.size_hint().exact();
    if known.is_some_and(|length| length > limit as u64) {
        return Ok(Collected::PassedThrough(body));
    }
    let mut bytes = BytesMut::new();
    loop {
        let frame = match known {
            Some(_) => body.frame().await,
            None => match at_once(body.frame()).await {
                Some(frame) => frame,
                None => return Ok(Collected::PassedThrough(behind(bytes.freeze(), body))),
            },
        };
        let Some(frame) = frame.transpose()? else {
            return Ok(Collected::Whole(bytes.freeze()));
        };
        if let Ok(data) = frame.into_data() {
            bytes.extend_from_slice(&data);
        }
        if bytes.len() > limit {
            return Ok(Collected::PassedThrough(behind(bytes.freeze(), body)));
        }
    }
}

/// What a future gives without waiting.
async fn at_once<F: Future>(future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// The rest of a body behind what was read of it.
struct Behind {
    read: Option<Bytes>,
    rest: Body,
}

fn behind(read: Bytes, rest: Body) -> Body {
    let read = (!read.is_empty()).then_some(read);
    Body::new(Behind { read, rest })
}

impl http_body::Body for Behind {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        match this.read.take() {
            Some(read) => Poll::Ready(Some(Ok(Frame::data(read)))),
            None => Pin::new(&mut this.rest).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_none() && self.rest.is_end_stream()
    }
}
