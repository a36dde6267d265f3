//! The engine: which flows there are, and the way of a request through one. A typed [`Handle`] takes
//! a key and a request; the work runs on a task of its own, so a caller that goes away does not stop
//! it; identical requests that arrive meanwhile share it. The way itself is short: claim the key (or
//! read what is known of it), run the phases from the point that the claim returned, and on a
//! failure let the lease go.

mod claim;
mod drive;
mod resume;
mod sharing;
mod shutdown;
mod start_up;

use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use sqlx::Connection;
use sqlx::postgres::{PgConnection, PgPool};
use tokio::sync::Notify;

use crate::attempt::Surroundings;
use crate::error::{BuildError, InvalidRequest, NotRegistered, RunError};
use crate::fingerprint::Fingerprint;
use crate::flow::Flow;
use crate::graph::Graph;
use crate::json::{Unstorable, into_storable};
use crate::key::Key;
use crate::lease::{Keeper, KeeperTask};
use crate::reply::StoredReply;
use crate::store::{self, Found, LONGEST_LEASE, Limits};
pub(crate) use drive::{CONFLICTS, backoff, random};
pub(crate) use resume::Completion;
use resume::{Resume, resume};
use sharing::{Joined, Role, Shared};
use shutdown::Closing;
use start_up::{Check, check};
pub use start_up::{OnStranded, Stranded};

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

/// Collects the flows of an engine.
#[derive(Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct EngineBuilder {
    pool: PgPool,
    flows: Vec<Registered>,
    on_stranded: OnStranded,
}

/// What may be set for a flow where the engine is built, over what its attribute says.
///
/// ```
/// use std::time::Duration;
/// use idempotent_core::FlowOptions;
///
/// let options = FlowOptions::new().lease(Duration::from_secs(3)).retention(Duration::from_secs(3600));
/// # let _ = options;
/// ```
#[derive(Debug, Clone, Copy, Default)]
#[must_use = "options do nothing until they are given to `EngineBuilder::flow_with`"]
pub struct FlowOptions {
    lease: Option<Duration>,
    retention: Option<Duration>,
    limits: Limits,
}

impl FlowOptions {
    /// Everything as the flow's attribute says.
    pub fn new() -> Self {
        Self::default()
    }

    /// Another lease: from 100 ms to 10 min.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// Another time for which replies are kept.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = Some(retention);
        self
    }

    /// After so many attempts that stopped at one point (a bug, a panic) the flow is stuck. 5 unless
    /// given.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.limits.max_attempts = attempts;
        self
    }

    /// After so many attempts that asked for a retry at one point, and after `patience` since the
    /// first of them, the flow is stuck. 20 and 24 hours unless given.
    pub fn retry_attempts(mut self, attempts: u32, patience: Duration) -> Self {
        self.limits.retry_attempts = attempts;
        self.limits.patience = patience;
        self
    }

    /// How long an outside may keep saying "pending" before the flow is stuck. 7 days unless given.
    pub fn max_wait(mut self, max_wait: Duration) -> Self {
        self.limits.max_wait = max_wait;
        self
    }

    /// How long the completer waits after a failure: from `first`, doubled with each attempt, to
    /// `longest`. 1 second and 10 minutes unless given. A client's own retry runs at once.
    pub fn backoff(mut self, first: Duration, longest: Duration) -> Self {
        self.limits.backoff = first;
        self.limits.longest_backoff = longest;
        self
    }
}

/// What is in force for a flow.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    lease: Duration,
    retention: Duration,
    limits: Limits,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pool: PgPool,
    flows: HashMap<&'static str, Registered>,
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

    pub(crate) fn retentions(&self) -> impl Iterator<Item = (&'static str, Duration)> {
        let flows = self.flows.iter();
        flows.map(|(flow, registered)| (*flow, registered.settings.retention))
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
        EngineBuilder {
            pool,
            flows: Vec::new(),
            on_stranded: OnStranded::default(),
        }
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

impl EngineBuilder {
    /// Adds a flow.
    pub fn flow<F: Flow>(self, flow: F) -> Self {
        self.flow_with(flow, FlowOptions::new())
    }

    /// Adds a flow, with options over those of its attribute.
    pub fn flow_with<F: Flow>(mut self, flow: F, options: FlowOptions) -> Self {
        self.flows.push(Registered {
            graph: F::GRAPH,
            flow: Arc::new(flow),
            resume: resume::<F>,
            check: check::<F>,
            settings: Settings {
                lease: options.lease.unwrap_or(F::GRAPH.lease()),
                retention: options.retention.unwrap_or(F::GRAPH.retention()),
                limits: options.limits,
            },
        });
        self
    }

    /// What to do about unfinished flows that this version cannot go on with. They are named in the
    /// log in any case, and never touched.
    pub fn on_stranded(mut self, policy: OnStranded) -> Self {
        self.on_stranded = policy;
        self
    }

    /// Checks what can be checked before the first request, and starts the renewal of leases.
    ///
    /// # Errors
    ///
    /// See [`BuildError`].
    pub async fn build(self) -> Result<Engine, BuildError> {
        let mut flows = HashMap::new();
        for registered in self.flows {
            let flow = registered.graph.flow();
            let Settings {
                lease, retention, ..
            } = registered.settings;
            if !(Duration::from_millis(100)..=LONGEST_LEASE).contains(&lease) {
                return Err(BuildError::Lease { flow, lease });
            }
            if retention < lease {
                return Err(BuildError::Retention { flow, retention });
            }
            match flows.entry(flow) {
                Entry::Occupied(_) => return Err(BuildError::DuplicateFlow(flow)),
                Entry::Vacant(free) => free.insert(registered),
            };
        }

        let mut connection = store::acquire(&self.pool).await?;
        let table = store::table(&mut connection).await?;
        if table.is_none() {
            return Err(BuildError::NotMigrated);
        }
        let mut renewing = PgConnection::connect_with(&self.pool.connect_options()).await?;
        if store::table(&mut renewing).await? != table {
            return Err(BuildError::RenewalsElsewhere);
        }
        let default_isolation = store::default_isolation(&mut connection).await?;
        if store::synchronous_commit(&mut connection).await? == "off" {
            tracing::warn!(
                "synchronous_commit is off in this database: an answer may be given and then forgotten \
                 in a crash of the database; set it to on"
            );
        }

        let closing = Closing::default();
        let (keeper, keeper_task) = Keeper::start(self.pool.clone(), renewing);
        let inner = Inner {
            pool: self.pool,
            flows,
            surroundings: Surroundings {
                work: Arc::new(Notify::new()),
                closing: closing.hand_on(),
                default_isolation,
            },
            closing,
            keeper,
            shared: Shared::default(),
            _keeper_task: keeper_task,
        };
        let stranded = inner.stranded(&mut connection).await?;
        for stranded in &stranded {
            tracing::warn!(%stranded, "this version cannot go on with some flows; they are left as they are");
        }
        if !stranded.is_empty() && self.on_stranded == OnStranded::Refuse {
            return Err(BuildError::Stranded(stranded));
        }
        Ok(Engine {
            inner: Arc::new(inner),
        })
    }
}

/// Runs requests through one flow. Cheap to clone.
#[derive(Debug)]
pub struct Handle<F> {
    inner: Arc<Inner>,
    flow: Arc<F>,
    settings: Settings,
}

impl<F> Clone for Handle<F> {
    fn clone(&self) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
            flow: Arc::clone(&self.flow),
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
        let guard = self.inner.closing.enter()?;
        let prepared = Prepared::new(key, request)?;
        let (flow, key) = (F::GRAPH.flow(), &prepared.key);
        let joined = match self
            .inner
            .shared
            .join_or_lead(flow, key, &prepared.fingerprint)
        {
            Role::Joined(joined) => joined,
            Role::Leads(lead, joined) => {
                let handle = self.clone();
                tokio::spawn(async move {
                    lead.answer(handle.serve(&prepared).await);
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
}
