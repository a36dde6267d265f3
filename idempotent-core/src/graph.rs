//! The shape of a flow, as data: its recovery points, the phases between them and what is stored
//! where. `#[idempotent_flow]` writes it down as a constant beside the flow; the engine reads it to
//! know which values to keep and when an external result must be committed by itself, and people
//! read it as a table or a diagram. Nothing here can be built by hand: the macro has checked the
//! graph (every point reached and left, no cycle) before the constant exists.

use std::time::Duration;

/// The state machine of one flow.
///
/// ```
/// # mod doc_flow { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/doc_flow.rs")); }
/// # use doc_flow::RideFlow;
/// use idempotent_core::Flow;
/// let graph = RideFlow::graph();
/// assert_eq!(graph.flow(), "ride");
/// assert_eq!(graph.points().first().map(|point| point.name()), Some("started"));
/// println!("{}", graph.mermaid());
/// ```
#[derive(Debug)]
pub struct Graph {
    flow: &'static str,
    lease: Duration,
    retention: Duration,
    points: &'static [Point],
    phases: &'static [Phase],
    on_reject: &'static [OnReject],
    reconciles: &'static [Reconcile],
}

/// A recovery point: a durable state of the flow.
#[derive(Debug)]
pub struct Point {
    name: &'static str,
    keeps: &'static [&'static str],
    former_names: &'static [&'static str],
}

/// A phase: an async fn that moves the flow from one recovery point to the next.
#[derive(Debug)]
pub struct Phase {
    name: &'static str,
    kind: PhaseKind,
    from: &'static str,
    to: &'static [&'static str],
    timeout: Option<Duration>,
    retries: Option<Retries>,
    repeatable: Repeatable,
}

/// How a phase that asks for a retry is repeated before the client is asked to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Retries {
    /// How often.
    pub times: u32,
    /// The longest first pause.
    pub first: Duration,
    /// The longest pause of all.
    pub longest: Duration,
}

/// Whether an outside call whose outcome is unknown may be made again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Repeatable {
    /// Always: the outside dedupes by the derived key.
    Always,
    /// For so long after the first try: the outside forgets the key after that.
    Within(Duration),
    /// Never: the outside does not dedupe.
    Never,
}

/// A fn that asks the outside what became of a call that may not be made again.
#[derive(Debug)]
pub struct Reconcile {
    name: &'static str,
    at: &'static str,
}

/// What a phase may touch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PhaseKind {
    /// Runs in one database transaction, which also stores the next recovery point.
    Atomic {
        /// The isolation level of the transaction; the database's default when not given.
        isolation: Option<Isolation>,
    },
    /// Calls the outside world; holds no transaction; gets a derived key.
    External {
        /// The name of the call, from which its key is derived.
        call: &'static str,
        /// The result is committed by itself, before the next phase begins.
        eager: bool,
    },
}

/// The isolation level of an atomic phase's transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// `READ COMMITTED`
    ReadCommitted,
    /// `REPEATABLE READ`
    RepeatableRead,
    /// `SERIALIZABLE`
    Serializable,
}

/// Business work that is done in the transaction which stores a rejection.
#[derive(Debug)]
pub struct OnReject {
    name: &'static str,
    at: &'static [&'static str],
}

impl Graph {
    #[doc(hidden)]
    pub const fn new(
        flow: &'static str,
        lease_millis: u64,
        retention_millis: u64,
        points: &'static [Point],
        phases: &'static [Phase],
        on_reject: &'static [OnReject],
    ) -> Self {
        Self {
            flow,
            lease: Duration::from_millis(lease_millis),
            retention: Duration::from_millis(retention_millis),
            points,
            phases,
            on_reject,
            reconciles: &[],
        }
    }

    #[doc(hidden)]
    pub const fn reconciles(mut self, reconciles: &'static [Reconcile]) -> Self {
        self.reconciles = reconciles;
        self
    }

    /// The flow's name, as stored with each of its keys.
    pub fn flow(&self) -> &'static str {
        self.flow
    }

    /// How long an attempt may run without renewing its right to do so.
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// How long a finished key is kept for replays.
    pub fn retention(&self) -> Duration {
        self.retention
    }

    /// The recovery points, `started` first and `finished` last.
    pub fn points(&self) -> &'static [Point] {
        self.points
    }

    /// The phases, in the order in which they were written.
    pub const fn phases(&self) -> &'static [Phase] {
        self.phases
    }

    /// The fns that do business work when a phase rejects the request.
    pub const fn on_reject(&self) -> &'static [OnReject] {
        self.on_reject
    }

    /// The phase that leaves the named point; none for `finished`.
    pub fn phase_from(&self, point: &str) -> Option<&'static Phase> {
        self.phases.iter().find(|phase| phase.from == point)
    }

    /// Whether an external phase lies on a way to the named point: from there on, something may
    /// have happened outside that a refusal would not undo.
    pub fn is_behind_external(&self, point: &str) -> bool {
        self.phases
            .iter()
            .filter(|phase| phase.to.contains(&point))
            .any(|phase| phase.is_external() || self.is_behind_external(phase.from))
    }

    /// Whether some fn marked `on_reject` takes care of a rejection at the named point.
    pub fn handles_rejection_at(&self, point: &str) -> bool {
        self.on_reject
            .iter()
            .any(|handler| handler.at.contains(&point))
    }

    /// The flow as a [Mermaid](https://mermaid.js.org) state diagram.
    pub fn mermaid(&self) -> String {
        let mut diagram = String::from("stateDiagram-v2\n    [*] --> started\n");
        for phase in self.phases {
            let label = match phase.kind {
                PhaseKind::Atomic { .. } => "atomic",
                PhaseKind::External { .. } => "external",
            };
            for to in phase.to {
                diagram.push_str(&format!(
                    "    {} --> {to}: {} ({label})\n",
                    phase.from, phase.name
                ));
            }
        }
        for reconcile in self.reconciles {
            diagram.push_str(&format!(
                "    {0} --> {0}: {1} (asks what became of the call)\n",
                reconcile.at, reconcile.name
            ));
        }
        for handler in self.on_reject {
            for at in handler.at {
                diagram.push_str(&format!(
                    "    {at} --> finished: {} (rejected)\n",
                    handler.name
                ));
            }
        }
        diagram.push_str("    finished --> [*]\n");
        diagram
    }

    /// The fns that ask the outside what became of a call.
    pub fn reconcile(&self) -> &'static [Reconcile] {
        self.reconciles
    }

    pub(crate) fn point(&self, name: &str) -> Option<&'static Point> {
        self.points.iter().find(|point| point.name == name)
    }

    /// The point that is stored under this name, now or by an older version, and the name itself.
    pub(crate) fn stored_point(&self, name: &str) -> Option<(&'static Point, &'static str)> {
        self.points.iter().find_map(|point| {
            let mut names = std::iter::once(&point.name).chain(point.former_names);
            names
                .find(|known| **known == name)
                .map(|known| (point, *known))
        })
    }
}

impl Point {
    #[doc(hidden)]
    pub const fn new(name: &'static str, keeps: &'static [&'static str]) -> Self {
        Self {
            name,
            keeps,
            former_names: &[],
        }
    }

    #[doc(hidden)]
    pub const fn renamed_from(mut self, former_names: &'static [&'static str]) -> Self {
        self.former_names = former_names;
        self
    }

    /// Names under which older versions stored the point.
    pub fn former_names(&self) -> &'static [&'static str] {
        self.former_names
    }

    /// The name under which the point is stored.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The points whose values are stored while the flow is here: this one's and those that some
    /// phase ahead asks for.
    pub fn keeps(&self) -> &'static [&'static str] {
        self.keeps
    }
}

impl Phase {
    #[doc(hidden)]
    pub const fn atomic(
        name: &'static str,
        from: &'static str,
        to: &'static [&'static str],
    ) -> Self {
        let kind = PhaseKind::Atomic { isolation: None };
        Self {
            name,
            kind,
            from,
            to,
            timeout: None,
            retries: None,
            repeatable: Repeatable::Always,
        }
    }

    #[doc(hidden)]
    pub const fn external(
        name: &'static str,
        from: &'static str,
        to: &'static [&'static str],
        call: &'static str,
    ) -> Self {
        let kind = PhaseKind::External { call, eager: false };
        Self {
            name,
            kind,
            from,
            to,
            timeout: None,
            retries: None,
            repeatable: Repeatable::Always,
        }
    }

    #[doc(hidden)]
    pub const fn timeout_millis(mut self, millis: u64) -> Self {
        self.timeout = Some(Duration::from_millis(millis));
        self
    }

    #[doc(hidden)]
    pub const fn eager(mut self) -> Self {
        if let PhaseKind::External { call, .. } = self.kind {
            self.kind = PhaseKind::External { call, eager: true };
        }
        self
    }

    #[doc(hidden)]
    pub const fn retries(mut self, times: u32, first_millis: u64, longest_millis: u64) -> Self {
        self.retries = Some(Retries {
            times,
            first: Duration::from_millis(first_millis),
            longest: Duration::from_millis(longest_millis),
        });
        self
    }

    #[doc(hidden)]
    pub const fn at_most_once(mut self) -> Self {
        self.repeatable = Repeatable::Never;
        self
    }

    #[doc(hidden)]
    pub const fn dedupes_for_millis(mut self, millis: u64) -> Self {
        self.repeatable = Repeatable::Within(Duration::from_millis(millis));
        self
    }

    #[doc(hidden)]
    pub const fn isolation(mut self, isolation: Isolation) -> Self {
        self.kind = PhaseKind::Atomic {
            isolation: Some(isolation),
        };
        self
    }

    /// The name of the fn.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What the phase may touch.
    pub fn kind(&self) -> PhaseKind {
        self.kind
    }

    /// The recovery point that the phase leaves.
    pub fn from(&self) -> &'static str {
        self.from
    }

    /// The recovery points that the phase may reach: one, or the branches of a fork.
    pub fn to(&self) -> &'static [&'static str] {
        self.to
    }

    /// How long the phase may take; the lease when not given.
    pub fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// How the phase is repeated before the client is asked to retry; none: not at all.
    pub fn in_request_retries(&self) -> Option<Retries> {
        self.retries
    }

    /// Whether the phase's call may be made again when its outcome is unknown.
    pub fn repeatable(&self) -> Repeatable {
        self.repeatable
    }

    /// Whether the phase calls the outside world.
    pub fn is_external(&self) -> bool {
        matches!(self.kind, PhaseKind::External { .. })
    }
}

impl OnReject {
    #[doc(hidden)]
    pub const fn new(name: &'static str, at: &'static [&'static str]) -> Self {
        Self { name, at }
    }

    /// The name of the fn.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The recovery points at which it takes care of a rejection.
    pub fn at(&self) -> &'static [&'static str] {
        self.at
    }
}

impl Reconcile {
    #[doc(hidden)]
    pub const fn new(name: &'static str, at: &'static str) -> Self {
        Self { name, at }
    }

    /// The name of the fn.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The point from which the call is made.
    pub fn at(&self) -> &'static str {
        self.at
    }
}

impl Isolation {
    pub(crate) fn as_sql(self) -> &'static str {
        match self {
            Self::ReadCommitted => "READ COMMITTED",
            Self::RepeatableRead => "REPEATABLE READ",
            Self::Serializable => "SERIALIZABLE",
        }
    }
}
