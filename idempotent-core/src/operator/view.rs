//! What an operator gets to see. Times and ages are the database's.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use serde_json::{Map, Value};
use uuid::Uuid;

use crate::reply::StoredReply;

/// Where a key stands, for a person.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum KeyState {
    /// Somebody has a live lease.
    Running,
    /// Nobody runs it; the completer takes it later. A client's own retry runs at once.
    Waiting,
    /// Nobody runs it; the completer takes it next.
    Due,
    /// Its attempts are used up; it waits for an operator.
    Stuck,
    /// It has its reply.
    Finished,
}

impl KeyState {
    /// All of them, from running to finished.
    pub const ALL: [Self; 5] = [
        Self::Running,
        Self::Waiting,
        Self::Due,
        Self::Stuck,
        Self::Finished,
    ];

    /// `running`, `waiting`, `due`, `stuck` or `finished`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Due => "due",
            Self::Stuck => "stuck",
            Self::Finished => "finished",
        }
    }
}

impl fmt::Display for KeyState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A word that names no state of a key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no state of a key: running, waiting, due, stuck, finished")]
pub struct UnknownKeyState(String);

impl FromStr for KeyState {
    type Err = UnknownKeyState;

    fn from_str(name: &str) -> Result<Self, UnknownKeyState> {
        let mut all = Self::ALL.into_iter();
        all.find(|state| state.as_str() == name)
            .ok_or_else(|| UnknownKeyState(name.to_owned()))
    }
}

/// Which keys to list: those that all that is given fits, 50 of them unless a limit is given.
///
/// ```
/// use std::time::Duration;
/// use idempotent_core::{KeyFilter, KeyState};
///
/// let old_and_stuck = KeyFilter::new()
///     .flow("ride")
///     .state(KeyState::Stuck)
///     .older_than(Duration::from_secs(3600));
/// # let _ = old_and_stuck;
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a filter does nothing until it is given to `Operator::list`"]
pub struct KeyFilter {
    pub(crate) flow: Option<String>,
    pub(crate) point: Option<String>,
    pub(crate) state: Option<KeyState>,
    pub(crate) user: Option<String>,
    pub(crate) older_than: Option<Duration>,
    pub(crate) limit: u32,
}

impl Default for KeyFilter {
    fn default() -> Self {
        Self {
            flow: None,
            point: None,
            state: None,
            user: None,
            older_than: None,
            limit: 50,
        }
    }
}

impl KeyFilter {
    /// All keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// Only those of this flow.
    pub fn flow(mut self, name: impl Into<String>) -> Self {
        self.flow = Some(name.into());
        self
    }

    /// Only those at this recovery point, by its stored name: `ride_created`.
    pub fn point(mut self, name: impl Into<String>) -> Self {
        self.point = Some(name.into());
        self
    }

    /// Only those that stand so.
    pub fn state(mut self, state: KeyState) -> Self {
        self.state = Some(state);
        self
    }

    /// Only those of this user.
    pub fn user(mut self, user: impl Into<String>) -> Self {
        self.user = Some(user.into());
        self
    }

    /// Only those first claimed so long ago or longer.
    pub fn older_than(mut self, age: Duration) -> Self {
        self.older_than = Some(age);
        self
    }

    /// At most so many.
    pub fn limit(mut self, keys: u32) -> Self {
        self.limit = keys;
        self
    }
}

/// A key in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeySummary {
    /// Its own id, which every change asks for.
    pub id: Uuid,
    /// Its flow.
    pub flow: String,
    /// Whose it is.
    pub user: String,
    /// The path that was asked.
    pub path: String,
    /// The recovery point from which the next attempt goes on.
    pub point: String,
    /// Where it stands.
    pub state: KeyState,
    /// How often it was tried at this point.
    pub attempts: u32,
    /// While it runs: when its lease is over, if it is not renewed.
    pub lease_left: Option<Duration>,
    /// While it waits: when the completer takes it.
    pub next_attempt_in: Option<Duration>,
    /// What went wrong last, if anything did.
    pub error: Option<String>,
    /// The status that was answered.
    pub status: Option<u16>,
    /// When it was first claimed.
    pub created_at: SystemTime,
    /// How long ago that was.
    pub age: Duration,
}

/// All that is known of a key, save what the client sent and was answered.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct KeyDetails {
    /// What a list shows.
    pub summary: KeySummary,
    /// The client's own key. Who has it, and may act as the user, can ask for the reply.
    pub key: String,
    /// Whose lease it is; also after the lease is over, until somebody takes the key.
    pub holder: Option<Uuid>,
    /// How often it changed hands.
    pub fence: i64,
    /// The key whose flow staged this one.
    pub parent: Option<Uuid>,
    /// A call that was begun and of which nothing is known yet.
    pub intent: Option<Value>,
    /// What went wrong last.
    pub last_error: Option<LastError>,
    /// What happened, the oldest first. The beginning may be missing: a key remembers 20 entries.
    pub timeline: Vec<Event>,
    /// Since when it is stuck.
    pub stuck_at: Option<SystemTime>,
    /// When it got its reply.
    pub finished_at: Option<SystemTime>,
    /// What was answered, without the answer.
    pub reply: Option<ReplySummary>,
}

/// The client's key stays out of logs.
impl fmt::Debug for KeyDetails {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyDetails")
            .field("summary", &self.summary)
            .field("fence", &self.fence)
            .field("last_error", &self.last_error)
            .field("timeline", &self.timeline)
            .finish_non_exhaustive()
    }
}

/// What went wrong in the last attempt that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LastError {
    /// `retry`, `wait`, `stop`; `park` where a call may have been made and may not be repeated;
    /// `lost` where the attempt ended without a word.
    pub class: String,
    /// The phase that failed.
    pub phase: String,
    /// What it said.
    pub message: String,
    /// When.
    pub at: Option<SystemTime>,
    /// Since when this point has been failing.
    pub first_at: Option<SystemTime>,
}

/// Something that happened to a key.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Event {
    /// When.
    pub at: SystemTime,
    /// What: `created`, how an attempt ended (`retry`, `wait`, `stop`, `park`, `release`, `lost`), what a person did
    /// (`operator retry`, `operator resolve`, `operator release`), `stuck`, `finished`.
    pub event: String,
    /// What else was noted: `phase`, `message`, `by`, …
    pub more: Map<String, Value>,
}

impl Event {
    pub(crate) fn new(at: SystemTime, event: &str) -> Self {
        Self {
            at,
            event: event.to_owned(),
            more: Map::new(),
        }
    }
}

/// An answer, without what it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReplySummary {
    /// Its status.
    pub status: u16,
    /// The length of its body.
    pub bytes: u64,
}

/// What the client sent, what the phases stored, and what was answered.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct KeyContents {
    /// The request.
    pub request: Value,
    /// The values that the phases ahead ask for, by point.
    pub state: Value,
    /// The reply, once there is one.
    pub reply: Option<StoredReply>,
}

/// It is the client's; it stays out of logs.
impl fmt::Debug for KeyContents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyContents").finish_non_exhaustive()
    }
}

/// How many keys of a flow stand at a point, in a state.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyCount {
    /// The flow.
    pub flow: String,
    /// The recovery point.
    pub point: String,
    /// The state.
    pub state: KeyState,
    /// How many.
    pub keys: u64,
    /// The age of the oldest of them.
    pub oldest: Duration,
}
