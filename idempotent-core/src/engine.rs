//! The engine: which flows there are, and the way of a request through one. A typed [`Handle`] takes
//! a key and a request; the work runs on a task of its own, so a caller that goes away does not stop
//! it; identical requests that arrive meanwhile share it. The way itself is short: claim the key (or
//! read what is known of it), run the phases from the point that the claim returned, and on a
//! failure let the lease go.

mod builder;
mod claim;
mod drive;
mod guard;
mod load;
mod look;
mod options;
mod resume;
mod sharing;
mod shutdown;
mod start_up;
mod waiting;

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use sqlx::postgres::PgPool;
use tokio::sync::Notify;

use crate::attempt::Surroundings;
use crate::error::{InvalidRequest, NotRegistered, RunError};
use crate::fingerprint::Fingerprint;
use crate::flow::Flow;
use crate::graph::Graph;
use crate::json::{Unstorable, into_storable};
use crate::key::Key;
use crate::lease::{Keeper, KeeperTask};
use crate::reply::StoredReply;
use crate::store::Found;
pub use builder::EngineBuilder;
pub(crate) use drive::{CONFLICTS, backoff, random};
pub use guard::Guard;
use guard::Guarded;
#[cfg(feature = "axum")]
pub(crate) use guard::Handled;
use load::Load;
pub use look::{Operation, OperationState};
pub use options::FlowOptions;
use options::Settings;
pub(crate) use resume::Completion;
use resume::Resume;
use sharing::{Joined, Role, Shared};
use shutdown::Closing;
use start_up::Check;
pub use start_up::{OnStranded, Stranded};
pub use waiting::Patience;
use waiting::{Announcer, Waiting};

/// Runs flows on one database. Cheap to clone.
///
/// ```no_run
/// # mod doc_flow { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/doc_flow.rs")); }
/// # use doc_flow::{RideFlow, RideRequest};
/// use idempotent_core::{Engine, Key};
///
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// idempotent_core::migrate(&pool).await?;
/// let engine = Engine::builder(pool).flow(RideFlow).build().await?;
/// let rides = engine.handle::<RideFlow>()?;
///
/// let key = Key::new("user-1", "/api/rides", "8e03978e-40d5")?;
/// let answer = rides.run(key, RideRequest { amount_cents: 2000 }).await?;
/// println!("{} {}", answer.reply().status(), answer.is_replayed());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pool: PgPool,
    flows: HashMap<&'static str, Registered>,
    guards: HashMap<&'static str, Guarded>,
    /// How many requests run here.
    load: Load,
    /// The requests that wait for attempts elsewhere.
    waiting: Waiting,
    announcer: Option<Announcer>,
    surroundings: Surroundings,
    /// Whether requests are still taken, and whether what runs is to be handed on.
    closing: Closing,
    keeper: Arc<Keeper>,
    shared: Shared,
    _keeper_task: KeeperTask,
}

#[derive(Debug, Clone)]
struct Registered {
    graph: &'static Graph,
    flow: Arc<dyn Any + Send + Sync>,
    resume: Resume,
    check: Check,
    settings: Settings,
}

impl Inner {
    pub(crate) fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// Where the completer waits for work of this process.
    pub(crate) fn work(&self) -> &Notify {
        &self.surroundings.work
    }

    fn surroundings(&self) -> Surroundings {
        self.surroundings.clone()
    }

    pub(crate) fn flow_names(&self) -> impl Iterator<Item = &'static str> {
        self.flows.keys().copied()
    }

    /// How long the finished keys of each flow and each guard are kept.
    pub(crate) fn retentions(&self) -> impl Iterator<Item = (&'static str, Duration)> {
        let flows = self.flows.iter();
        flows
            .map(|(flow, registered)| (*flow, registered.settings.retention))
            .chain(self.guard_retentions())
    }

    /// The same of the guards alone, whose unfinished keys nobody goes on with.
    pub(crate) fn guard_retentions(&self) -> impl Iterator<Item = (&'static str, Duration)> {
        let guards = self.guards.iter();
        guards.map(|(name, guarded)| (*name, guarded.settings.retention))
    }

    /// No flow is told to wait longer than this.
    pub(crate) fn longest_pause(&self) -> Duration {
        let limits = self.flows.values().map(|flow| flow.settings.limits);
        let longest = limits.map(|limits| limits.longest_backoff.max(limits.max_wait));
        longest.max().unwrap_or_default()
    }

    /// Goes on with a flow that nobody runs.
    pub(crate) async fn resume(self: &Arc<Self>, found: Found) -> Completion {
        match self.flows.get(found.flow.as_str()) {
            Some(registered) => (registered.resume)(Arc::clone(self), found).await,
            None => Completion::NotUnderstood(NotRegistered("unknown").to_string()),
        }
    }

    fn handle<F: Flow>(self: &Arc<Self>) -> Result<Handle<F>, NotRegistered> {
        let name = F::GRAPH.flow();
        let registered = self.flows.get(name).ok_or(NotRegistered(name))?;
        let flow = Arc::clone(&registered.flow).downcast::<F>();
        Ok(Handle {
            inner: Arc::clone(self),
            flow: flow.map_err(|_| NotRegistered(name))?,
            graph: registered.graph,
            settings: registered.settings,
        })
    }
}

impl Engine {
    /// An engine on this pool. Let the server's keepalives be short on its connections (`SET
    /// tcp_keepalives_idle` and its kin in `after_connect`), or a machine that is gone keeps what it
    /// locked until the phase's time is up. `test_before_acquire(false)` on the pool saves a round trip for each
    /// statement or transaction: the engine finds stale connections by itself.
    pub fn builder(pool: PgPool) -> EngineBuilder {
        EngineBuilder::new(pool)
    }

    /// The way to run one flow.
    ///
    /// # Errors
    ///
    /// When no flow of this type was given to the builder.
    pub fn handle<F: Flow>(&self) -> Result<Handle<F>, NotRegistered> {
        self.inner.handle()
    }

    pub(crate) fn inner(&self) -> Arc<Inner> {
        Arc::clone(&self.inner)
    }

    /// The state machines of the registered flows.
    pub fn graphs(&self) -> impl Iterator<Item = &'static Graph> {
        self.inner.flows.values().map(|registered| registered.graph)
    }
}

/// Runs requests through one flow. Cheap to clone.
#[derive(Debug)]
pub struct Handle<F> {
    inner: Arc<Inner>,
    flow: Arc<F>,
    graph: &'static Graph,
    settings: Settings,
}

impl<F> Clone for Handle<F> {
    fn clone(&self) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
            flow: Arc::clone(&self.flow),
            graph: self.graph,
            settings: self.settings,
        }
    }
}

/// The answer to a request.
#[derive(Debug, Clone)]
pub struct Answer {
    reply: Arc<StoredReply>,
    replayed: bool,
}

impl Answer {
    /// The stored reply.
    pub fn reply(&self) -> &StoredReply {
        &self.reply
    }

    /// Whether the reply was made for an earlier or a parallel request.
    pub fn is_replayed(&self) -> bool {
        self.replayed
    }
}

/// A request on its way. Dropping it does not stop the flow.
#[derive(Debug)]
#[must_use = "the answer comes from `wait`"]
pub struct Running {
    joined: Joined,
}

impl Running {
    /// Whether an identical request was running in this process already, and this one waits for it.
    pub fn is_joined(&self) -> bool {
        self.joined.is_joined()
    }

    /// Waits for the answer.
    ///
    /// # Errors
    ///
    /// See [`RunError`].
    pub async fn wait(self) -> Result<Answer, RunError> {
        self.joined.wait().await
    }
}

/// A request that was found acceptable, before the database is touched.
pub(crate) struct Prepared {
    key: Key,
    body: serde_json::Value,
    fingerprint: Fingerprint,
}

impl<F: Flow> Handle<F> {
    /// Runs a request to its answer: its own, or the stored one of the first request with this key.
    ///
    /// The caller has authorised the request and checked it; a replay is authorised like a first
    /// request. Dropping the returned future does not stop the flow.
    ///
    /// # Errors
    ///
    /// See [`RunError`]: each says whether and when a retry with the same key makes sense.
    pub async fn run(&self, key: Key, request: F::Request) -> Result<Answer, RunError> {
        self.start(key, request)?.wait().await
    }

    /// Starts a request, to be waited for separately: where a caller waits for a bounded time only.
    ///
    /// # Errors
    ///
    /// When the request cannot be accepted at all, or the engine is shutting down.
    pub fn start(&self, key: Key, request: F::Request) -> Result<Running, RunError> {
        self.start_prepared(Arc::new(Prepared::new(key, request)?))
    }

    fn start_prepared(&self, prepared: Arc<Prepared>) -> Result<Running, RunError> {
        let guard = self.inner.closing.enter()?;
        let (flow, key) = (self.graph.flow(), &prepared.key);
        let fingerprint = &prepared.fingerprint;
        let joined = match self.inner.shared.join_or_lead(flow, key, fingerprint) {
            Role::Joined(joined) => joined,
            Role::Leads(lead, joined) => {
                let place = self.inner.load.enter(&key.user);
                let handle = self.clone();
                tokio::spawn(async move {
                    let answer = match place {
                        Ok(_place) => handle.serve(&prepared).await,
                        Err(full) => handle.answer_if_known(&prepared, full).await,
                    };
                    lead.answer(answer);
                    drop(guard);
                });
                joined
            }
        };
        Ok(Running { joined })
    }
}

impl Prepared {
    fn new(key: Key, request: impl Serialize) -> Result<Self, InvalidRequest> {
        let body = serde_json::to_value(&request)
            .map_err(|error| InvalidRequest::NotJson(error.to_string()))?;
        let body = into_storable(body).map_err(|error| match error {
            Unstorable::Nul => InvalidRequest::Nul,
            Unstorable::TooDeep => InvalidRequest::TooDeep,
        })?;
        if key.query.contains('\0') || key.method.contains('\0') {
            return Err(InvalidRequest::Nul);
        }
        let fingerprint = Fingerprint::new(&key, &body);
        Ok(Self {
            key,
            body,
            fingerprint,
        })
    }

    /// A request of which nothing but its bytes is known. They are not stored.
    fn raw(key: Key, body: &[u8]) -> Result<Self, InvalidRequest> {
        if key.query.contains('\0') || key.method.contains('\0') {
            return Err(InvalidRequest::Nul);
        }
        let fingerprint = Fingerprint::of_bytes(&key, body);
        Ok(Self {
            key,
            body: serde_json::Value::Null,
            fingerprint,
        })
    }
}
