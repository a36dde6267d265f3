//! Requests to handlers without phases. A guard gives each key to one attempt at a time, under a lease
//! like a flow's, and stores what the handler answers, on the condition that the attempt still has
//! it. Inside it is a flow with one external phase, whose work is the handler of the request.
//!
//! What it cannot do without phases: know how far a handler came. If the process dies in the middle,
//! nobody goes on with the request but the client's own retry, which runs the handler from its
//! beginning and may so repeat its effects. The completer never takes such a key up, and the reaper
//! removes it after the retention.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{Answer, Engine, FlowOptions, Handle, Patience, Prepared, Settings};
use crate::attempt::{Attempt, Halt};
use crate::error::{NoSuchGuard, RunError};
use crate::failure::{Disposition, PhaseFailure, Rejection};
use crate::flow::Flow;
use crate::graph::{Graph, Phase, Point};
use crate::key::Key;
use crate::reply::StoredReply;
use crate::state::{State, Undecodable};

/// What a handler came to.
pub(crate) enum Handled {
    /// This is the answer, now and at every retry.
    Store(StoredReply),
    /// Nothing to be kept: the next request with this key runs the handler again.
    Release(String),
}

type Handler = Pin<Box<dyn Future<Output = Handled> + Send>>;

/// Guards handlers without phases: of all requests with one key, one at a time runs, and once an
/// answer is stored, every retry gets that. Cheap to clone. Made by [`Engine::guard`].
///
/// This is what [`GuardLayer`](crate::http::GuardLayer) (feature `axum`) stands on; by itself it is
/// for other frameworks.
///
/// ```no_run
/// use http::StatusCode;
/// use idempotent_core::{Engine, Key, Patience, Reply, UnstorableReply};
///
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// let engine = Engine::builder(pool).guard("notes").build().await?;
/// let notes = engine.guard("notes")?;
///
/// let key = Key::new("user-1", "/notes", "8e03978e-40d5")?;
/// let answer = notes
///     .run(key, b"buy milk", Patience::none(), async {
///         Reply::created("noted").store()
///     })
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Guard {
    handle: Handle<HandlerFlow>,
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("name", &self.handle.graph.flow())
            .finish_non_exhaustive()
    }
}

/// A guard as the engine keeps it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Guarded {
    graph: &'static Graph,
    pub(super) settings: Settings,
}

const LEASE: Duration = Duration::from_secs(15);
const RETENTION: Duration = Duration::from_secs(24 * 3600);

const POINTS: &[Point] = &[Point::new("started", &[]), Point::new("finished", &[])];

/// As long as a handler may take. The lease is renewed meanwhile.
const HANDLER_MILLIS: u64 = 24 * 3600 * 1000;

const PHASES: &[Phase] = &[
    Phase::external("handler", "started", &["finished"], "handler").timeout_millis(HANDLER_MILLIS),
];

const fn millis(time: Duration) -> u64 {
    time.as_secs() * 1000
}

const fn graph(name: &'static str) -> Graph {
    Graph::new(name, millis(LEASE), millis(RETENTION), POINTS, PHASES, &[])
}

impl Guarded {
    pub(super) fn new(name: &'static str, options: FlowOptions) -> Self {
        // A graph is otherwise a constant of its flow. There are as many of these as guards are
        // declared when the program starts.
        let graph: &'static Graph = Box::leak(Box::new(graph(name)));
        Self {
            graph,
            settings: options.never_stuck().settle(graph),
        }
    }
}

impl Engine {
    /// The guard of this name.
    ///
    /// # Errors
    ///
    /// When none of this name was given to the builder.
    pub fn guard(&self, name: &str) -> Result<Guard, NoSuchGuard> {
        let guarded = self.inner.guards.get(name);
        let guarded = guarded.ok_or_else(|| NoSuchGuard(name.to_owned()))?;
        Ok(Guard {
            handle: Handle {
                inner: Arc::clone(&self.inner),
                flow: Arc::new(HandlerFlow::default()),
                graph: guarded.graph,
                settings: guarded.settings,
            },
        })
    }
}

impl Guard {
    /// Runs a handler, or gives the stored answer of an earlier request with this key. The handler
    /// runs on a task of its own, so a caller that goes away does not stop it; it is dropped when the
    /// lease is lost. Its error is stored nowhere: the key is let go, and the next request runs.
    ///
    /// The caller has authorised the request. `body` is compared byte by byte.
    ///
    /// # Errors
    ///
    /// See [`RunError`]; [`RunError::Retry`] when the handler failed.
    pub async fn run<E: fmt::Display>(
        &self,
        key: Key,
        body: &[u8],
        patience: Patience,
        handler: impl Future<Output = Result<StoredReply, E>> + Send + 'static,
    ) -> Result<Answer, RunError> {
        let handler = async {
            match handler.await {
                Ok(reply) => Handled::Store(reply),
                Err(error) => Handled::Release(error.to_string()),
            }
        };
        self.run_handler(key, body, patience, Box::pin(handler))
            .await
    }

    pub(crate) async fn run_handler(
        &self,
        key: Key,
        body: &[u8],
        patience: Patience,
        handler: Handler,
    ) -> Result<Answer, RunError> {
        let prepared = Arc::new(Prepared::raw(key, body)?);
        let handle = Handle {
            flow: Arc::new(HandlerFlow(Mutex::new(Some(handler)))),
            ..self.handle.clone()
        };
        handle.run_prepared(prepared, patience).await
    }

    /// The most bytes of an answer that are stored.
    #[cfg(feature = "axum")]
    pub(crate) fn reply_limit(&self) -> usize {
        self.handle.settings.reply_limit
    }
}

/// One request to a handler, as a flow.
#[derive(Default)]
pub(super) struct HandlerFlow(Mutex<Option<Handler>>);

impl fmt::Debug for HandlerFlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HandlerFlow")
    }
}

crate::recovery_points! {
    /// Where a request to a handler can stand.
    pub(super) enum HandlerPoint of "handler" {
        /// It has not been answered.
        Started = "started",
        /// Its answer is stored.
        Finished = "finished",
    }
}

/// The handler gave nothing to be stored.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Released(String);

impl PhaseFailure for Released {
    fn disposition(&self) -> Disposition {
        Disposition::retry()
    }
}

impl Flow for HandlerFlow {
    type Request = ();
    type RecoveryPoint = HandlerPoint;
    /// Never looked at for its name or its times: each guard has a graph of its own.
    const GRAPH: &'static Graph = &graph("handler");

    fn check(_point: HandlerPoint, _state: &State) -> Result<(), Undecodable> {
        Ok(())
    }

    async fn advance(
        &self,
        from: HandlerPoint,
        attempt: &mut Attempt,
        (): &(),
    ) -> Result<(), Halt> {
        let [phase] = PHASES else {
            return Err(attempt.already_finished());
        };
        match from {
            HandlerPoint::Started => {
                let handler = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
                let run = async {
                    match handler {
                        Some(handler) => Ok(handler.await),
                        // It was dropped half-way, when an earlier lease of this request was lost.
                        None => Err(Released("the handler was interrupted".to_owned())),
                    }
                };
                let handled = attempt.enter(phase, async {
                    match run.await? {
                        Handled::Store(reply) => Ok(reply),
                        Handled::Release(why) => Err(Released(why)),
                    }
                });
                let reply = handled.await?;
                attempt.finish_with_stored(reply).await
            }
            HandlerPoint::Finished => Err(attempt.already_finished()),
        }
    }

    async fn reject(
        &self,
        _at: HandlerPoint,
        attempt: &mut Attempt,
        rejection: &Rejection,
        (): &(),
    ) -> Result<(), Halt> {
        attempt.store_bare_rejection(rejection).await
    }
}
