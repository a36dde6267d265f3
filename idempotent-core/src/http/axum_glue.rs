//! The glue for axum: extractors for who asks, under which key and for what, and the contract as a
//! layer around a router.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, OriginalUri, Request};
use axum::response::{IntoResponse, Response};
use http::request::Parts;
use http::{Extensions, StatusCode, header};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use tower_layer::Layer;
use tower_service::Service;

use super::body::{malformed, parse_json};
use super::contract::{Place, invalid_key};
use super::header::missing;
use super::{Contract, IdempotencyKey, Incoming, Problem};
use crate::engine::{Answer, Handle};
use crate::flow::Flow;
use crate::key::Key;

/// Who sends a request: what the application's own authentication found out.
///
/// ```
/// use idempotent_core::http::Caller;
///
/// struct User { id: u64 }
///
/// impl Caller for User {
///     fn user_id(&self) -> String {
///         self.id.to_string()
///     }
/// }
/// ```
pub trait Caller: Send + Sync {
    /// The user within whom keys are unique: 1 to 128 bytes, never the same for two users.
    fn user_id(&self) -> String;
}

/// Who asks, and where: the application's own extractor `U`, which authenticates and authorises, and
/// what of the request concerns its key. Put it first: what `U` refuses gets no further, also when it
/// is a retry whose answer is stored.
///
/// ```no_run
/// # mod doc_flow { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/doc_flow.rs")); }
/// # use doc_flow::{RideFlow, RideRequest};
/// # use axum::extract::FromRequestParts;
/// # struct User;
/// # impl<S: Send + Sync> FromRequestParts<S> for User {
/// #     type Rejection = std::convert::Infallible;
/// #     async fn from_request_parts(_: &mut http::request::Parts, _: &S) -> Result<Self, Self::Rejection> { Ok(User) }
/// # }
/// # impl idempotent_core::http::Caller for User { fn user_id(&self) -> String { "1".to_owned() } }
/// use axum::extract::State;
/// use axum::response::Response;
/// use axum::{Router, routing::post};
/// use idempotent_core::Handle;
/// use idempotent_core::http::{Contract, IdempotencyKey, JsonBody, Profile, Scope};
///
/// async fn create_ride(
///     State(rides): State<Handle<RideFlow>>,
///     scope: Scope<User>,
///     key: IdempotencyKey,
///     JsonBody(request): JsonBody<RideRequest>,
/// ) -> Response {
///     scope.run(&rides, key, request).await
/// }
///
/// # fn routes(rides: Handle<RideFlow>) -> Router {
/// Router::new()
///     .route("/api/rides", post(create_ride))
///     .layer(Contract::new(Profile::ietf()))
///     .with_state(rides)
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Scope<U> {
    user: U,
    contract: Contract,
    place: Place,
}

impl<U: Caller> Scope<U> {
    /// The user who asks.
    pub fn user(&self) -> &U {
        &self.user
    }

    /// Runs the request through its flow and answers, see [`Contract::answer`].
    pub async fn run<F: Flow>(
        self,
        flow: &Handle<F>,
        key: IdempotencyKey,
        request: F::Request,
    ) -> Response {
        let user = self.user.user_id();
        let incoming = Incoming {
            key,
            place: self.place,
        };
        let answered = self.contract.answer(flow, incoming, user, request);
        answered.await.map(Body::from)
    }

    /// The key of this request, for a handler that calls the engine itself.
    ///
    /// # Errors
    ///
    /// A 400 problem (`key_invalid`) for what cannot be stored.
    pub fn key(&self, key: IdempotencyKey) -> Result<Key, Problem> {
        let key = self.place.key(self.user.user_id(), key);
        key.map_err(|error| self.contract.profile().problem(&invalid_key(error)))
    }

    /// The contract that holds here.
    pub fn contract(&self) -> &Contract {
        &self.contract
    }
}

impl<U, S> FromRequestParts<S> for Scope<U>
where
    U: FromRequestParts<S> + Caller,
    S: Send + Sync,
{
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        let user = U::from_request_parts(parts, state).await;
        let user = user.map_err(IntoResponse::into_response)?;
        let contract = contract_of(&parts.extensions);
        let place = contract.place(parts, &whole_uri(parts));
        Ok(Self {
            user,
            contract,
            place,
        })
    }
}

/// A nested router sees the rest of the path only, and two of those may be alike.
pub(super) fn whole_uri(parts: &Parts) -> http::Uri {
    match parts.extensions.get::<OriginalUri>() {
        Some(OriginalUri(uri)) => uri.clone(),
        None => parts.uri.clone(),
    }
}

pub(super) fn contract_of(extensions: &Extensions) -> Contract {
    extensions.get().cloned().unwrap_or_default()
}

impl<S: Send + Sync> FromRequestParts<S> for IdempotencyKey {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Response> {
        let found = contract_of(&parts.extensions).find_key(&parts.headers);
        found
            .and_then(|key| key.ok_or_else(missing))
            .map_err(IntoResponse::into_response)
    }
}

/// A JSON object, read strictly and within the [`Contract`]'s bounds. As an extractor it answers 400
/// (`body_malformed`), 408 (`body_too_slow`), 413 (`body_too_large`), 415 (`body_not_json`) or 422
/// (`body_invalid`).
#[derive(Debug, Clone)]
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Response;

    async fn from_request(request: Request, _state: &S) -> Result<Self, Response> {
        let declared_json = is_json(&request);
        let contract = contract_of(request.extensions());
        let bytes = read_body(request.into_body(), &contract)
            .await
            .map_err(IntoResponse::into_response)?;
        if !declared_json {
            let problem = Problem::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "body_not_json",
                "The body must be JSON",
            );
            return Err(problem
                .detail("Send the header content-type: application/json.")
                .into_response());
        }
        parse_json(&bytes)
            .map(Self)
            .map_err(IntoResponse::into_response)
    }
}

fn is_json(request: &Request) -> bool {
    let content_type = request
        .headers()
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    let essence = content_type
        .and_then(|value| value.split(';').next())
        .map(|value| value.trim().to_ascii_lowercase());
    essence.is_some_and(|essence| essence == "application/json" || essence.ends_with("+json"))
}

/// How much of a body over the limit is read and thrown away, so that a client still sending gets to
/// see the answer, and for how long.
const DRAIN_LIMIT: usize = 64 << 20;
const DRAIN_TIME: std::time::Duration = std::time::Duration::from_secs(10);

/// Reads a body within the contract's bounds. A client that sends a byte a minute does not hold its
/// handler for ever.
pub(super) async fn read_body(body: Body, contract: &Contract) -> Result<Vec<u8>, Problem> {
    let (limit, time) = contract.body_bounds();
    tokio::time::timeout(time, read(body, limit))
        .await
        .unwrap_or_else(|_| {
            let problem = Problem::new(
                StatusCode::REQUEST_TIMEOUT,
                "body_too_slow",
                "The body took too long",
            );
            let detail = format!("It must arrive within {} s.", time.as_secs());
            Err(problem.detail(detail).closing_the_connection())
        })
}

async fn read(mut body: Body, limit: usize) -> Result<Vec<u8>, Problem> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| malformed("it ended too early"))?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if bytes.len() + data.len() > limit {
            return Err(drain(body, bytes.len() + data.len(), limit).await);
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

async fn drain(mut body: Body, mut read: usize, limit: usize) -> Problem {
    let to_the_end = async {
        while let Some(frame) = body.frame().await {
            match frame.map(http_body::Frame::into_data) {
                Ok(Ok(data)) => read += data.len(),
                Ok(Err(_)) => {}
                Err(_) => return false,
            }
            if read > DRAIN_LIMIT {
                return false;
            }
        }
        true
    };
    let drained = tokio::time::timeout(DRAIN_TIME, to_the_end)
        .await
        .unwrap_or(false);
    let problem = Problem::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        "body_too_large",
        "The body is too large",
    )
    .detail(format!("At most {limit} bytes are taken."));
    if drained {
        problem
    } else {
        problem.closing_the_connection()
    }
}

/// Rendered by the usual contract; the one around the router, if there is one, renders it again.
impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = self.to_response(&Contract::default()).map(Body::from);
        response.extensions_mut().insert(self);
        response
    }
}

/// Rendered by the usual contract. [`Contract::render`] for another.
impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        Contract::default().render(&self).map(Body::from)
    }
}

/// A service within a contract. Made by [`Contract`] as a layer.
#[derive(Debug, Clone)]
pub struct Contracted<S> {
    contract: Contract,
    inner: S,
}

impl<S> Layer<S> for Contract {
    type Service = Contracted<S>;

    fn layer(&self, inner: S) -> Contracted<S> {
        Contracted {
            contract: self.clone(),
            inner,
        }
    }
}

impl<S> Service<Request> for Contracted<S>
where
    S: Service<Request, Response = Response, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        let contract = self.contract.clone();
        request.extensions_mut().insert(contract.clone());
        let answered = self.inner.call(request);
        Box::pin(async move { Ok(rendered(answered.await?, &contract)) })
    }
}

/// A response, with the problem that it may carry rendered as the contract has it. The problem is
/// taken out, so that a contract further out leaves the response as it is.
pub(super) fn rendered(mut response: Response, contract: &Contract) -> Response {
    let Some(problem) = response.extensions_mut().remove::<Problem>() else {
        return response;
    };
    let mut rendered = problem.to_response(contract).map(Body::from);
    // What was added to it on the way, such as WWW-Authenticate, stays.
    for (name, value) in response.headers() {
        if !rendered.headers().contains_key(name) && name != header::CONTENT_LENGTH {
            rendered.headers_mut().append(name.clone(), value.clone());
        }
    }
    *rendered.extensions_mut() = std::mem::take(response.extensions_mut());
    rendered
}
