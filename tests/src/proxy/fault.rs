//! Where a fault strikes, what it does, and the handle by which a test follows it.
//!
//! A fault strikes once, and a handle that is dropped before its fault has struck panics: a test
//! whose fault never happened has tested something else. [`Fault::disarm`] is for those that look
//! for the last point at which one can strike.

use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::ledger::Shared;

/// How long a handle waits for its fault before the test fails.
const PATIENCE: Duration = Duration::from_secs(30);

type Predicate = Box<dyn Fn(&str) -> bool + Send + Sync>;

/// A place in the conversation with the database: the n-th statement since arming that matches.
///
/// A statement is matched when it runs, never when it is parsed. A text stands for the statements
/// that contain it.
pub struct Point {
    name: String,
    matches: Predicate,
    after: Option<String>,
    nth: usize,
}

impl Point {
    /// The statements of which `matches` says so; `name` is for messages.
    pub fn matching(name: &str, matches: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Self {
            name: name.to_owned(),
            matches: Box::new(matches),
            after: None,
            nth: 1,
        }
    }

    /// The statements that contain `part`, case included.
    #[must_use]
    pub fn containing(part: &str) -> Self {
        let wanted = part.to_owned();
        Self::matching(&format!("`{part}`"), move |sql| sql.contains(&wanted))
    }

    /// The statements that are a COMMIT and nothing else.
    #[must_use]
    pub fn commit() -> Self {
        let is_commit = |sql: &str| {
            sql.trim()
                .trim_end_matches(';')
                .eq_ignore_ascii_case("commit")
        };
        Self::matching("COMMIT", is_commit)
    }

    /// Every statement.
    #[must_use]
    pub fn any() -> Self {
        Self::matching("any statement", |_| true)
    }

    /// Only in a transaction in which a statement with this text has run: of several COMMITs, the
    /// one of that transaction.
    #[must_use]
    pub fn after(mut self, part: &str) -> Self {
        self.after = Some(part.to_owned());
        self
    }

    /// The n-th match, the first being 1.
    #[must_use]
    pub fn nth(mut self, n: usize) -> Self {
        assert!(n > 0, "the first match is number 1");
        self.nth = n;
        self
    }

    /// Whether it is this statement, run after the `earlier` ones of its transaction.
    fn is(&self, sql: &str, earlier: &[String]) -> bool {
        let follows = |part: &String| earlier.iter().any(|sql| sql.contains(part));
        (self.matches)(sql) && self.after.as_ref().is_none_or(follows)
    }
}

impl From<&str> for Point {
    fn from(part: &str) -> Self {
        Self::containing(part)
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "match {} of {}", self.nth, self.name)?;
        match &self.after {
            Some(part) => write!(f, " after `{part}`"),
            None => Ok(()),
        }
    }
}

/// What a fault does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    LoseAnswer,
    CutBefore,
    Hold,
    HoldAnswer,
    HalfCommit,
}

/// How far a fault has come, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Stage {
    /// No statement matched yet.
    Waiting,
    /// Its statement is here.
    Struck,
    /// The connection stands still until the test decides.
    Reached,
    /// The test lets it go on.
    Released,
    /// The test wants it cut.
    Abandoned,
    /// Everything has happened, on the server too.
    Done,
    /// The server ended the session first.
    Lost,
}

/// A fault as the proxy sees it.
pub(super) struct Armed {
    pub(super) action: Action,
    point: Point,
    stage: watch::Sender<Stage>,
    armed_at: &'static Location<'static>,
}

impl Armed {
    #[track_caller]
    pub(super) fn new(action: Action, point: Point) -> Self {
        Self {
            action,
            point,
            stage: watch::Sender::new(Stage::Waiting),
            armed_at: Location::caller(),
        }
    }

    /// Whether its `seen`-th match, the first being 1, is its own.
    pub(super) fn is_due(&self, seen: usize) -> bool {
        seen >= self.point.nth
    }

    pub(super) fn matches(&self, sql: &str, earlier: &[String]) -> bool {
        self.point.is(sql, earlier)
    }

    pub(super) fn strike(&self) {
        self.advance(Stage::Struck);
    }

    pub(super) fn done(&self) {
        self.advance(Stage::Done);
    }

    pub(super) fn lost(&self) {
        self.advance(Stage::Lost);
    }

    /// Stands still until the test decides; says whether to go on.
    pub(super) async fn verdict(&self) -> bool {
        self.advance(Stage::Reached);
        let mut stage = self.stage.subscribe();
        let decided = stage.wait_for(|stage| *stage >= Stage::Released).await;
        decided.is_ok_and(|stage| *stage == Stage::Released)
    }

    fn advance(&self, to: Stage) {
        self.advance_until(to, to);
    }

    /// The first decision stands.
    fn decide(&self, to: Stage) {
        self.advance_until(Stage::Released, to);
    }

    fn advance_until(&self, limit: Stage, to: Stage) {
        self.stage.send_if_modified(|stage| {
            let moves = *stage < limit;
            if moves {
                *stage = to;
            }
            moves
        });
    }

    fn stage(&self) -> Stage {
        *self.stage.borrow()
    }
}

impl fmt::Display for Armed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} at {}, armed at {}",
            self.action, self.point, self.armed_at
        )
    }
}

/// What the handles share. Dropped too early it panics; a connection that still stands is
/// abandoned.
pub(super) struct Handle {
    armed: Arc<Armed>,
    proxy: Weak<Shared>,
}

impl Handle {
    pub(super) fn new(armed: Arc<Armed>, proxy: &Arc<Shared>) -> Self {
        Self {
            armed,
            proxy: Arc::downgrade(proxy),
        }
    }

    async fn wait(&self, least: Stage) -> Stage {
        let mut stage = self.armed.stage.subscribe();
        match timeout(PATIENCE, stage.wait_for(|stage| *stage >= least)).await {
            Ok(Ok(stage)) => *stage,
            _ => self.give_up(least),
        }
    }

    fn give_up(&self, least: Stage) -> ! {
        let transcript = self
            .proxy
            .upgrade()
            .map(|proxy| proxy.describe())
            .unwrap_or_default();
        panic!(
            "{}: still {:?} after {PATIENCE:?}, not {least:?}; the proxy saw:\n{transcript}",
            self.armed,
            self.armed.stage()
        );
    }

    fn decide(&self, stage: Stage) {
        let now = self.armed.stage();
        assert!(
            now >= Stage::Reached,
            "{}: decided before it was reached ({now:?})",
            self.armed
        );
        self.armed.decide(stage);
    }

    /// Takes the fault back; says whether it had struck.
    fn disarm(&self) -> bool {
        if let Some(proxy) = self.proxy.upgrade() {
            proxy.disarm(&self.armed);
        }
        let struck = self.armed.stage() > Stage::Waiting;
        self.armed.decide(Stage::Abandoned);
        struck
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let struck = self.disarm();
        if !struck && !thread::panicking() {
            panic!("{}: never struck", self.armed);
        }
    }
}

/// A fault that runs by itself: a lost answer, or a cut.
#[must_use = "a fault is taken back when its handle is dropped"]
pub struct Fault(pub(super) Handle);

impl Fault {
    /// Waits until it has happened, and until the server has ended the session too: its locks are
    /// gone.
    pub async fn fired(&self) {
        let stage = self.0.wait(Stage::Done).await;
        assert_eq!(
            stage,
            Stage::Done,
            "{}: the server ended the session before",
            self.0.armed
        );
    }

    /// Takes it back, and says whether it had struck.
    pub fn disarm(self) -> bool {
        self.0.disarm()
    }
}

/// A connection that stands still: before its request went out, or before its answer came back.
#[must_use = "a fault is taken back, and its connection cut, when its handle is dropped"]
pub struct Hold(pub(super) Handle);

impl Hold {
    /// Waits until it stands.
    pub async fn reached(&self) {
        let stage = self.0.wait(Stage::Reached).await;
        assert_ne!(
            stage,
            Stage::Lost,
            "{}: the server ended the session before",
            self.0.armed
        );
    }

    /// Lets it go on as if nothing had been.
    pub fn release(self) {
        self.0.decide(Stage::Released);
    }

    /// Cuts it for the client, and waits until the server has ended the session too.
    pub async fn cut(self) {
        self.0.decide(Stage::Abandoned);
        self.0.wait(Stage::Done).await;
    }

    /// Takes it back, and says whether it had struck; a connection that stands is cut.
    pub fn disarm(self) -> bool {
        self.0.disarm()
    }
}

/// A request still on its way whose client has gone: for a COMMIT, one that is not decided.
#[must_use = "a fault is taken back, and its session ended, when its handle is dropped"]
pub struct Undecided(pub(super) Handle);

impl Undecided {
    /// Waits until the client is cut and the session stands, its transaction open.
    pub async fn reached(&self) {
        self.0.wait(Stage::Reached).await;
    }

    /// The request arrives: waits until the server has answered it.
    pub async fn release(self) {
        self.0.decide(Stage::Released);
        if self.0.wait(Stage::Done).await == Stage::Lost {
            panic!("{}: the server ended the session before", self.0.armed);
        }
    }

    /// The request never arrives: waits until the server has noticed, and its transaction is rolled
    /// back.
    pub async fn abandon(self) {
        self.0.decide(Stage::Abandoned);
        self.0.wait(Stage::Done).await;
    }

    /// Waits until the server ends the session by itself, by a timeout for example.
    pub async fn lost(&self) {
        let stage = self.0.wait(Stage::Lost).await;
        assert_eq!(stage, Stage::Lost, "{}", self.0.armed);
    }

    /// Takes it back, and says whether it had struck; a session that stands is ended.
    pub fn disarm(self) -> bool {
        self.0.disarm()
    }
}
