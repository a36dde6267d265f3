//! What an API promises its clients about keys, and the way of a request through it in the types of
//! the `http` crate alone.

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, Uri};

use super::header::{find_idempotency_key, missing};
use super::{IdempotencyKey, Problem, Profile, problem};
use crate::engine::{Answer, Handle, Patience};
use crate::error::{InvalidRequest, RunError};
use crate::flow::Flow;
use crate::key::{Key, KeyError};

/// The header that marks a replay, unless the contract names another: `true`.
pub static IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

static PREFER: HeaderName = HeaderName::from_static("prefer");
static PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// Where the problems are described, unless the API has a page of its own.
const DESCRIBED_AT: &str =
    "https://docs.rs/idempotent-core/latest/idempotent_core/http/problems/index.html";

/// What an API promises its clients about keys. Cheap to clone.
///
/// With the feature `axum` it is a tower layer, for a whole router: it tells the extractors inside
/// what holds, and renders every [`Problem`] that comes out in the profile's shape.
///
/// ```
/// use std::time::Duration;
/// use idempotent_core::http::{Contract, Profile};
///
/// let contract = Contract::new(Profile::ietf())
///     .documented_at("https://api.example.com/problems")
///     .shortest_key(16)
///     .longest_wait(Duration::from_secs(20));
/// # let _ = contract;
/// ```
#[derive(Debug, Clone)]
#[must_use = "a contract does nothing until it is used: put it around a router by `layer`"]
pub struct Contract {
    profile: Profile,
    described_at: Cow<'static, str>,
    shortest_key: usize,
    replayed: HeaderName,
    longest_wait: Duration,
    answer_within: Duration,
    body_limit: usize,
    body_time: Duration,
}

impl Default for Contract {
    fn default() -> Self {
        Self::new(Profile::default())
    }
}

impl Contract {
    /// The usual contract, with the errors of this profile.
    pub const fn new(profile: Profile) -> Self {
        Self {
            profile,
            described_at: Cow::Borrowed(DESCRIBED_AT),
            shortest_key: 1,
            replayed: HeaderName::from_static("idempotent-replayed"),
            longest_wait: Duration::from_secs(30),
            answer_within: Duration::from_secs(60),
            body_limit: 1 << 20,
            body_time: Duration::from_secs(30),
        }
    }

    /// The page that describes the API's problems, each at `#code`: where their `type` and their
    /// `Link` lead. [`problems`](super::problems) unless given.
    pub fn documented_at(mut self, page: impl Into<Cow<'static, str>>) -> Self {
        self.described_at = page.into();
        self
    }

    /// The fewest bytes that a key must have: for an API that would have its clients send random
    /// keys. 1 unless given.
    pub fn shortest_key(mut self, bytes: usize) -> Self {
        self.shortest_key = bytes;
        self
    }

    /// The header that marks a replay. [`IDEMPOTENT_REPLAYED`] unless given.
    pub fn replayed_header(mut self, name: HeaderName) -> Self {
        self.replayed = name;
        self
    }

    /// The longest that a client may wait for another attempt by `Prefer: wait=N` (RFC 7240): a longer
    /// wish is cut. 30 s unless given; zero ignores the preference.
    pub fn longest_wait(mut self, time: Duration) -> Self {
        self.longest_wait = time;
        self
    }

    /// How long a client is kept until it has its answer. One that is not is told to retry; its
    /// request runs on. 60 s unless given.
    pub fn answer_within(mut self, time: Duration) -> Self {
        self.answer_within = time;
        self
    }

    /// The most bytes of a request's body that are taken. 1 MiB unless given.
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// How long a request's body may take to arrive. 30 s unless given.
    pub fn body_time(mut self, time: Duration) -> Self {
        self.body_time = time;
        self
    }

    /// The profile.
    pub fn profile(&self) -> Profile {
        self.profile
    }

    pub(super) fn described_at(&self, code: &str) -> String {
        problem::described_at(&self.described_at, code)
    }

    #[cfg(feature = "axum")]
    pub(super) fn body_bounds(&self) -> (usize, Duration) {
        (self.body_limit, self.body_time)
    }

    /// What of a request concerns its key. The path is that of its URI: of a nested router give the
    /// parts before the prefix was taken off.
    ///
    /// # Errors
    ///
    /// A 400 problem: `key_missing` or `key_invalid`.
    pub fn incoming(&self, parts: &Parts) -> Result<Incoming, Problem> {
        let key = find_idempotency_key(&parts.headers, self.shortest_key)?.ok_or_else(missing)?;
        let place = self.place(parts, &parts.uri);
        Ok(Incoming { key, place })
    }

    #[cfg(feature = "axum")]
    pub(super) fn find_key(&self, headers: &HeaderMap) -> Result<Option<IdempotencyKey>, Problem> {
        find_idempotency_key(headers, self.shortest_key)
    }

    pub(super) fn place(&self, parts: &Parts, uri: &Uri) -> Place {
        Place {
            method: parts.method.as_str().to_owned(),
            path: uri.path().to_owned(),
            query: uri.query().unwrap_or_default().to_owned(),
            wait: preferred_wait(&parts.headers)
                .map(|wait| wait.min(self.longest_wait.as_secs()))
                .filter(|wait| *wait > 0),
        }
    }

    /// Runs a request through its flow and answers: the reply, the replay, or a problem. The caller
    /// has authenticated and authorised `user`, and checked the request.
    ///
    /// A duplicate that finds its twin running in this process waits for its answer, for a second, or
    /// for as long as the client asks for by `Prefer: wait=N`; then it is told that the request is in
    /// progress. The twin runs on.
    ///
    /// An adapter for a framework is a few lines around this: see `tests/it/neutral.rs` in the
    /// repository for one on plain hyper.
    pub async fn answer<F: Flow>(
        &self,
        flow: &Handle<F>,
        incoming: Incoming,
        user: impl Into<String>,
        request: F::Request,
    ) -> Response<Bytes> {
        let Incoming { key, place } = incoming;
        let key = match place.key(user, key) {
            Ok(key) => key,
            Err(error) => return self.refuse(F::graph().flow(), &invalid_key(error)),
        };
        let patience = place.patience(Patience::default());
        let answered = flow.run_patiently(key, request, patience);
        let answered = tokio::time::timeout(self.answer_within, answered).await;
        let answered = answered.unwrap_or_else(|_| Err(self.took_too_long()));
        let mut response = match answered {
            Ok(answer) => self.render(&answer),
            Err(error) => self.refuse(F::graph().flow(), &error),
        };
        place.note_preference(response.headers_mut());
        response
    }

    /// An answer of the engine as a response.
    pub fn render(&self, answer: &Answer) -> Response<Bytes> {
        let mut response = answer.reply().to_response();
        if answer.is_replayed() {
            let headers = response.headers_mut();
            headers.insert(&self.replayed, HeaderValue::from_static("true"));
        }
        response
    }

    /// An error of the engine as a response, with a line in the log where somebody should know.
    pub(super) fn refuse(&self, flow: &str, error: &RunError) -> Response<Bytes> {
        let problem = self.profile.problem(error);
        if problem.status().is_server_error() {
            tracing::warn!(flow, %error, "the request could not be answered");
        }
        problem.to_response(self)
    }

    /// The client has waited for long enough; the request runs on.
    pub(super) fn took_too_long(&self) -> RunError {
        RunError::Unavailable {
            reason: format!(
                "no answer within {:?}; the request runs on",
                self.answer_within
            ),
        }
    }

    #[cfg(feature = "axum")]
    pub(super) fn longest_answer(&self) -> Duration {
        self.answer_within
    }
}

pub(super) fn invalid_key(error: KeyError) -> RunError {
    RunError::Invalid(InvalidRequest::Key(error))
}

/// What of a request concerns its key.
#[derive(Debug, Clone)]
pub struct Incoming {
    pub(super) key: IdempotencyKey,
    pub(super) place: Place,
}

/// Where a request goes, and how long its client would wait.
#[derive(Debug, Clone)]
pub(super) struct Place {
    method: String,
    path: String,
    query: String,
    /// In seconds.
    wait: Option<u64>,
}

impl Place {
    pub(super) fn key(
        &self,
        user: impl Into<String>,
        key: IdempotencyKey,
    ) -> Result<Key, KeyError> {
        let key = Key::new(user, self.path.clone(), key.into_string())?;
        Ok(key
            .with_method(self.method.clone())
            .with_query(self.query.clone()))
    }

    pub(super) fn patience(&self, usual: Patience) -> Patience {
        self.wait
            .map_or(usual, |seconds| Patience::of(Duration::from_secs(seconds)))
    }

    /// Tells the client that its preference was heard.
    pub(super) fn note_preference(&self, headers: &mut HeaderMap) {
        if let Some(seconds) = self.wait
            && let Ok(applied) = HeaderValue::try_from(format!("wait={seconds}"))
        {
            headers.insert(&PREFERENCE_APPLIED, applied);
        }
    }
}

/// The `wait` of `Prefer` headers (RFC 7240, section 4.3), in seconds. The first that is well-formed
/// counts; what is not understood is ignored, as the RFC asks.
fn preferred_wait(headers: &HeaderMap) -> Option<u64> {
    let values = headers.get_all(&PREFER).iter();
    let preferences = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','));
    preferences
        .filter_map(|preference| {
            let (name, value) = preference.split(';').next()?.split_once('=')?;
            let is_wait = name.trim().eq_ignore_ascii_case("wait");
            is_wait.then(|| value.trim().trim_matches('"').parse().ok())?
        })
        .next()
}

impl Profile {
    /// An error as the problem that tells the client what to do.
    pub fn problem(self, error: &RunError) -> Problem {
        let (status, code, title) = match error {
            RunError::Invalid(InvalidRequest::Key(_)) => (
                StatusCode::BAD_REQUEST,
                "key_invalid",
                "The idempotency key is not valid",
            ),
            RunError::Invalid(_) => (
                StatusCode::BAD_REQUEST,
                "body_malformed",
                "The body cannot be stored",
            ),
            RunError::Mismatch => (
                self.mismatch,
                "request_mismatch",
                "The key was used for a different request",
            ),
            RunError::InProgress { .. } => (
                StatusCode::CONFLICT,
                "request_in_progress",
                "A request with this key is in progress",
            ),
            RunError::Stuck => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "flow_stuck",
                "The request could not be completed and waits for an operator",
            ),
            RunError::TooManyRunning { of_this_user, .. } => (
                if *of_this_user {
                    StatusCode::TOO_MANY_REQUESTS
                } else {
                    StatusCode::SERVICE_UNAVAILABLE
                },
                "too_many_running",
                "Too many requests are running",
            ),
            RunError::Retry { .. }
            | RunError::Stopped { .. }
            | RunError::NotUnderstood { .. }
            | RunError::Unavailable { .. }
            | RunError::ShuttingDown => (
                StatusCode::SERVICE_UNAVAILABLE,
                "temporarily_unavailable",
                "The request could not be completed now",
            ),
        };
        let problem = Problem::new(status, code, title).detail(detail(error));
        match error.retry_after() {
            Some(after) => problem.retry_after(after),
            None => problem,
        }
    }
}

/// What the client is told. What went wrong inside is for the log: it may name tables or hosts.
fn detail(error: &RunError) -> String {
    match error {
        RunError::Invalid(_) | RunError::Mismatch => error.to_string(),
        RunError::InProgress { .. } => {
            "An attempt is running this request. Retry with the same key after the time that Retry-After names, \
             or send Prefer: wait=10 to wait for its answer."
                .to_owned()
        }
        RunError::TooManyRunning { of_this_user, .. } => format!(
            "Nothing was begun, because as many requests{} are running as may. Retry with the same key after the \
             time that Retry-After names.",
            if *of_this_user { " of yours" } else { "" }
        ),
        RunError::Stuck => "Nothing is lost, but a retry does not help now. Contact support and name your idempotency key; \
                            once it is resolved, the same request with the same key gets its answer. Do not send it with a new key."
            .to_owned(),
        _ => "It is safe to retry: send the same request with the same key. What was done is kept and is not done again."
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::problems;
    use super::*;

    fn wait(values: &[&str]) -> Option<u64> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(&PREFER, value.parse().unwrap());
        }
        preferred_wait(&headers)
    }

    #[test]
    fn the_first_wait_of_all_prefer_headers_counts() {
        assert_eq!(wait(&["wait=10"]), Some(10));
        assert_eq!(wait(&["respond-async, WAIT = \"5\" ; x=1"]), Some(5));
        assert_eq!(wait(&["respond-async", "wait=3, wait=9"]), Some(3));
        for ignored in ["wait", "wait=", "wait=-1", "wait=1.5", "await=5", "wait=x"] {
            assert_eq!(wait(&[ignored]), None, "{ignored}");
        }
    }

    #[test]
    fn a_longer_wish_is_cut_and_zero_is_none() {
        let contract = Contract::default().longest_wait(Duration::from_secs(20));
        let place = |wait: &str| {
            let request = http::Request::post("/a").header("prefer", wait);
            let (parts, ()) = request.body(()).unwrap().into_parts();
            contract.place(&parts, &parts.uri).wait
        };
        assert_eq!(place("wait=5"), Some(5));
        assert_eq!(place("wait=99999999999"), Some(20));
        assert_eq!(place("wait=0"), None);
    }

    #[test]
    fn every_problem_is_described_on_the_page_that_its_type_names() {
        let described: Vec<&str> = problems::all().map(|problem| problem.code).collect();
        let retry_after = Duration::ZERO;
        let errors = [
            RunError::Mismatch,
            RunError::Stuck,
            RunError::ShuttingDown,
            RunError::InProgress { retry_after },
            RunError::TooManyRunning {
                of_this_user: true,
                retry_after,
            },
            invalid_key(KeyError::Empty { part: "key" }),
            RunError::Invalid(InvalidRequest::Nul),
        ];
        for error in &errors {
            let problem = Profile::ietf().problem(error);
            assert!(described.contains(&problem.code()), "{}", problem.code());
        }
    }
}
