//! How an engine is put together: its flows and guards, its limits, and what can be checked before the
//! first request.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use sqlx::Connection;
use sqlx::postgres::{PgConnection, PgPool};
use tokio::sync::Notify;

use super::guard::Guarded;
use super::load::{Load, LoadLimits};
use super::options::{FlowOptions, Settings};
use super::resume::resume;
use super::sharing::Shared;
use super::shutdown::Closing;
use super::start_up::{OnStranded, check};
use super::waiting::{Announcer, Waiting};
use super::{Engine, Inner, Registered};
use crate::attempt::Surroundings;
use crate::error::BuildError;
use crate::flow::Flow;
use crate::lease::Keeper;
use crate::store::{self, LONGEST_LEASE};

/// Collects the flows of an engine.
#[derive(Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct EngineBuilder {
    pool: PgPool,
    flows: Vec<Registered>,
    guards: Vec<(&'static str, FlowOptions)>,
    on_stranded: OnStranded,
    load: LoadLimits,
    most_waiting: usize,
    notifies: bool,
}

/// How many requests of a process may wait for attempts that run elsewhere.
const MOST_WAITING: usize = 1000;

impl EngineBuilder {
    pub(super) fn new(pool: PgPool) -> Self {
        Self {
            pool,
            flows: Vec::new(),
            guards: Vec::new(),
            on_stranded: OnStranded::default(),
            load: LoadLimits::default(),
            most_waiting: MOST_WAITING,
            notifies: false,
        }
    }

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
            settings: options.settle(F::GRAPH),
        });
        self
    }

    /// Adds a guard for handlers without phases, see [`Guard`](super::Guard). The name is stored with
    /// each of its keys, like a flow's, and must not be one. The lease is 15 s and the retention 24 h
    /// unless the options say otherwise.
    pub fn guard(self, name: &'static str) -> Self {
        self.guard_with(name, FlowOptions::new())
    }

    /// Adds a guard, with options.
    pub fn guard_with(mut self, name: &'static str, options: FlowOptions) -> Self {
        self.guards.push((name, options));
        self
    }

    /// The most requests of one user that run in this process at once. One that comes on top is
    /// refused with [`RunError::TooManyRunning`](crate::RunError::TooManyRunning), unless it is a
    /// duplicate: those wait or are answered, as ever. Without a limit unless given.
    pub fn max_running_per_user(mut self, requests: usize) -> Self {
        self.load.per_user = Some(requests);
        self
    }

    /// The most requests that run in this process at once, of all users. What the completer runs is
    /// not counted. Without a limit unless given.
    pub fn max_running(mut self, requests: usize) -> Self {
        self.load.in_all = Some(requests);
        self
    }

    /// The most requests of this process that wait for an attempt that runs in another one. One that
    /// comes on top is told at once that the request is in progress. 1000 unless given.
    pub fn max_waiting(mut self, requests: usize) -> Self {
        self.most_waiting = requests;
        self
    }

    /// Whether this process tells the others, by `NOTIFY`, when an attempt has ended, so that a
    /// request that waits for it there hears of it at once and not at its next look, after 100 ms at
    /// the most. It costs a small transaction for each batch of ended attempts. Off unless given, as
    /// `NOTIFY` is of no use behind a PgBouncer in transaction mode.
    pub fn notify(mut self, notifies: bool) -> Self {
        self.notifies = notifies;
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
            check_times(flow, registered.settings)?;
            match flows.entry(flow) {
                Entry::Occupied(_) => return Err(BuildError::DuplicateFlow(flow)),
                Entry::Vacant(free) => free.insert(registered),
            };
        }
        let mut guards = HashMap::new();
        for (name, options) in self.guards {
            let guarded = Guarded::new(name, options);
            check_times(name, guarded.settings)?;
            if flows.contains_key(name) || guards.insert(name, guarded).is_some() {
                return Err(BuildError::DuplicateFlow(name));
            }
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
        let announcer = self.notifies.then(|| Announcer::start(self.pool.clone()));
        let inner = Inner {
            pool: self.pool,
            flows,
            guards,
            load: Load::new(self.load),
            waiting: Waiting::new(self.most_waiting, self.notifies),
            announcer,
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

fn check_times(flow: &'static str, settings: Settings) -> Result<(), BuildError> {
    let Settings {
        lease, retention, ..
    } = settings;
    if !(Duration::from_millis(100)..=LONGEST_LEASE).contains(&lease) {
        return Err(BuildError::Lease { flow, lease });
    }
    if retention < lease {
        return Err(BuildError::Retention { flow, retention });
    }
    Ok(())
}
