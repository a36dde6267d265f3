//! What a caller is told when a request could not be answered. Each message says what happened,
//! whether it is safe to retry, and what to do.

use std::time::Duration;

use crate::engine::Stranded;
use crate::key::KeyError;

/// Why a request has no answer now. A business refusal is not among them: that is an answer.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The request itself cannot be accepted. Final: nothing was stored.
    #[error(
        "the request cannot be accepted: {0}; nothing was stored, correct it and send it again"
    )]
    Invalid(#[from] InvalidRequest),
    /// The key was used before, for another request. Final: use another key.
    #[error("this key was used for a different request; send that request, or use a new key")]
    Mismatch,
    /// Another attempt is running this very request.
    #[error("an attempt is running this request; retry with the same key in {} ms", retry_after.as_millis())]
    InProgress {
        /// When the other attempt's lease ends at the latest, if it is not renewed.
        retry_after: Duration,
    },
    /// A phase could not do its work now. The recovery point is kept.
    #[error(
        "phase `{phase}` failed: {reason}; retry with the same key, the flow goes on at `{point}`"
    )]
    Retry {
        /// The phase that failed.
        phase: &'static str,
        /// The recovery point from which the retry goes on.
        point: &'static str,
        /// What the phase said.
        reason: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// A phase hit a bug: it panicked, or its error says that this should not be. The recovery
    /// point is kept, and a retry is safe, but somebody should look.
    #[error(
        "phase `{phase}` stopped: {reason}; retry with the same key, the flow goes on at `{point}`"
    )]
    Stopped {
        /// The phase that stopped.
        phase: &'static str,
        /// The recovery point from which the retry goes on.
        point: &'static str,
        /// What went wrong.
        reason: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// The flow used up its attempts and waits for an operator.
    #[error("the flow is stuck and waits for an operator; a retry does not help, nothing is lost")]
    Stuck,
    /// The flow stands at a point, or holds a value, that this version of the program cannot read.
    /// Left as it is, for the version that can.
    #[error(
        "this version cannot go on with the flow: {reason}; retry with the same key, another version may"
    )]
    NotUnderstood {
        /// What cannot be read.
        reason: String,
    },
    /// This process runs as many requests as it takes on, of this user or in all. Nothing was begun.
    #[error(
        "{} running here as may; retry with the same key", if *of_this_user { "as many of this user's requests are" } else { "as many requests are" }
    )]
    TooManyRunning {
        /// Whether it is this user who has too many, and not all users together.
        of_this_user: bool,
        /// When to try again.
        retry_after: Duration,
    },
    /// The database did not answer, or not in time.
    #[error("the database is not available: {reason}; retry with the same key")]
    Unavailable {
        /// What the driver said.
        reason: String,
    },
    /// The process is going away under the flow. Another attempt goes on with it.
    #[error("the server is shutting down; retry with the same key")]
    ShuttingDown,
}

impl RunError {
    /// When a retry with the same key makes sense; none when it would be answered the same way.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Invalid(_) | Self::Mismatch | Self::Stuck => None,
            Self::InProgress { retry_after }
            | Self::Retry { retry_after, .. }
            | Self::Stopped { retry_after, .. }
            | Self::TooManyRunning { retry_after, .. } => Some(*retry_after),
            Self::NotUnderstood { .. } => Some(Duration::from_secs(10)),
            Self::Unavailable { .. } | Self::ShuttingDown => Some(Duration::from_secs(1)),
        }
    }

    pub(crate) fn unavailable(error: &sqlx::Error) -> Self {
        Self::Unavailable {
            reason: error.to_string(),
        }
    }
}

/// Why a request cannot be accepted at all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidRequest {
    /// The user, path or key cannot be stored.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A string of the request holds a NUL character, which PostgreSQL cannot store.
    #[error("a string holds a NUL character")]
    Nul,
    /// The request nests too deep to be read back.
    #[error("it nests deeper than 100 levels")]
    TooDeep,
    /// The request cannot be written as JSON: a bug of its type.
    #[error("it cannot be written as JSON: {0}")]
    NotJson(String),
}

/// Why an engine cannot be built. All are found at start-up, before a request is taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// Two flows have one name; their stored keys could not be told apart.
    #[error(
        "two flows are named `{0}`: give one of them another name, stored keys are told apart by it"
    )]
    DuplicateFlow(&'static str),
    /// The lease is too short or too long.
    #[error("the lease of flow `{flow}` is {lease:?}; it must be between 100 ms and 10 min")]
    Lease {
        /// The flow.
        flow: &'static str,
        /// The lease it was given.
        lease: Duration,
    },
    /// A reply that is reaped while its attempt may still run protects nobody.
    #[error("flow `{flow}` keeps replies for {retention:?}, which is less than its lease")]
    Retention {
        /// The flow.
        flow: &'static str,
        /// The retention it was given.
        retention: Duration,
    },
    /// Leases would be renewed in another table than the one in which they are granted.
    #[error(
        "a connection made from the pool's connect options sees another `idempotency_keys` than the pool does; \
         put what `after_connect` sets, such as `search_path`, into the connect options instead: \
         leases are renewed on a connection of their own"
    )]
    RenewalsElsewhere,
    /// There are unfinished flows that this version cannot go on with, and it was told not to start
    /// then. They are left as they are.
    #[error("this version cannot go on with some unfinished flows: {}", list(.0))]
    Stranded(Vec<Stranded>),
    /// The tables are not there.
    #[error(
        "the table `idempotency_keys` does not exist: call `idempotent_core::migrate(&pool)` before `build`"
    )]
    NotMigrated,
    /// The database could not be asked.
    #[error("the database did not answer: {0}")]
    Database(#[from] sqlx::Error),
}

fn list(stranded: &[Stranded]) -> String {
    let lines: Vec<String> = stranded.iter().map(Stranded::to_string).collect();
    lines.join("; ")
}

/// A handle was asked for a flow that the engine does not know.
#[derive(Debug, thiserror::Error)]
#[error(
    "flow `{0}` is not registered: add `.flow(…)` with a value of this type to `Engine::builder`"
)]
pub struct NotRegistered(pub(crate) &'static str);

/// A guard was asked for that the engine does not know.
#[derive(Debug, thiserror::Error)]
#[error("guard `{0}` is not registered: add `.guard(\"{0}\")` to `Engine::builder`")]
pub struct NoSuchGuard(pub(crate) String);
