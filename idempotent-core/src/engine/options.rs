//! What may be set for a flow where the engine is built, over what its attribute says.

use std::time::Duration;

use crate::graph::Graph;
use crate::store::Limits;

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
    reply_limit: Option<usize>,
}

/// The most bytes of a reply's body that are stored, unless the flow is told otherwise.
const REPLY_LIMIT: usize = 1 << 20;

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

    /// The most bytes of a reply's body that are stored: 1 MiB unless given. The first answer to a
    /// request goes out whole in any case. Of a longer one only the status and the headers are kept:
    /// a retry gets those, an empty body, and the header `idempotent-replay-truncated: true`. It is
    /// never a reason to run anything a second time.
    pub fn reply_limit(mut self, bytes: usize) -> Self {
        self.reply_limit = Some(bytes);
        self
    }

    /// What is in force for a flow with this graph.
    pub(super) fn settle(self, graph: &Graph) -> Settings {
        Settings {
            lease: self.lease.unwrap_or(graph.lease()),
            retention: self.retention.unwrap_or(graph.retention()),
            limits: self.limits,
            reply_limit: self.reply_limit.unwrap_or(REPLY_LIMIT),
        }
    }

    /// For a handler without phases: however often it fails, there is nothing that an operator could
    /// mend, so its key never gets stuck.
    pub(super) fn never_stuck(mut self) -> Self {
        self.limits.max_attempts = u32::MAX;
        self.limits.retry_attempts = u32::MAX;
        self
    }
}

/// What is in force for a flow.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(super) lease: Duration,
    pub(super) retention: Duration,
    pub(super) limits: Limits,
    pub(super) reply_limit: usize,
}
