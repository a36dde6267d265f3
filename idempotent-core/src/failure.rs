//! What it means when a phase fails. A phase's error type says so through one small trait,
//! [`PhaseFailure`]; the engine does the rest: it keeps the recovery point and asks for a retry, or
//! stores a final answer, or stops and counts.
//!
//! An unknown outcome is never a rejection. A timeout, a lost connection or a 5xx from the outside
//! is a retry: the next attempt sends the same derived key and learns what really happened.

use std::convert::Infallible;
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use crate::reply::{Reply, StoredReply};

/// What a phase's error means for the flow.
///
/// ```
/// use idempotent_core::{Disposition, PhaseFailure, Reply};
/// use http::StatusCode;
///
/// #[derive(Debug, thiserror::Error)]
/// enum RideError {
///     #[error("the database refused")]
///     Database(#[from] sqlx::Error),
///     #[error("the gateway did not answer")]
///     Gateway,
///     #[error("the card was declined")]
///     Declined,
/// }
///
/// impl PhaseFailure for RideError {
///     fn disposition(&self) -> Disposition {
///         match self {
///             Self::Database(error) => error.disposition(),
///             Self::Gateway => Disposition::retry(),
///             Self::Declined => Disposition::reject(Reply::new(StatusCode::PAYMENT_REQUIRED, "declined")),
///         }
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say what its failure means for the flow",
    label = "the error of a phase needs a disposition",
    note = "implement `idempotent_core::PhaseFailure` for `{Self}`: retry, reject with a reply, or stop"
)]
pub trait PhaseFailure: fmt::Display + Send {
    /// Whether to retry, to answer for good, or to stop.
    fn disposition(&self) -> Disposition;
}

/// What the engine does about a failed phase.
#[derive(Debug, Clone)]
pub struct Disposition(pub(crate) Kind);

#[derive(Debug, Clone)]
pub(crate) enum Kind {
    /// Keep the recovery point; the client or the completer tries again.
    Retry { after: Option<Duration> },
    /// Not an error: the outside says "pending". Ask again.
    Wait { after: Duration },
    /// The transaction did not commit and may be run again at once: the database asked for that
    /// (SQLSTATE 40001, 40P01), or its COMMIT is known not to have happened. When that has been tried
    /// often enough, the failure is what is inside.
    Again(Box<Kind>),
    /// A final business answer.
    Reject(Box<StoredReply>),
    /// A bug: as retry, but counted as such.
    Stop,
    /// Nobody but an operator can say how to go on.
    Park,
    /// A rejection whose reply cannot be stored: a bug, with the reason.
    Unstorable(String),
}

impl Disposition {
    /// Not now: the outcome is unknown or the other side is unwell. The recovery point is kept, the
    /// client gets a 503 with `Retry-After`.
    pub fn retry() -> Self {
        Self(Kind::Retry { after: None })
    }

    /// Not now, but probably after this time.
    pub fn retry_after(after: Duration) -> Self {
        Self(Kind::Retry { after: Some(after) })
    }

    /// Not an error: the outside has not decided yet. Asked again after this time, for as long as the
    /// flow's `max_wait` allows; attempts that wait are not counted.
    pub fn wait(after: Duration) -> Self {
        Self(Kind::Wait { after })
    }

    /// What an HTTP status of the outside means, by the rule: 408, 409, 425, 429 and 5xx leave the
    /// outcome unknown and are retried; another 4xx is a bug of the caller, and no status is a
    /// rejection by itself. That only an explicit business outcome is, and you alone can tell one.
    ///
    /// 409 is a retry because a call of an earlier attempt may still be running over there.
    pub fn of_status(status: http::StatusCode) -> Self {
        match status.as_u16() {
            408 | 409 | 425 | 429 | 500..=599 => Self::retry(),
            _ => Self::stop(),
        }
    }

    /// A final business answer: stored, and replayed to every retry. The phase's own writes are
    /// rolled back first.
    pub fn reject<T: Serialize>(reply: Reply<T>) -> Self {
        match reply.store() {
            Ok(stored) => Self(Kind::Reject(Box::new(stored))),
            Err(reason) => Self(Kind::Unstorable(reason.to_string())),
        }
    }

    /// A bug, or a state that should not be: nothing is stored, and somebody must look.
    pub fn stop() -> Self {
        Self(Kind::Stop)
    }

    pub(crate) fn conflict() -> Self {
        Self(Kind::Again(Box::new(Kind::Retry { after: None })))
    }
}

/// A phase's final refusal of the request, as it will be stored and replayed.
#[derive(Debug, Clone)]
pub struct Rejection {
    phase: &'static str,
    message: String,
    reply: Arc<StoredReply>,
}

impl Rejection {
    pub(crate) fn new(phase: &'static str, message: String, reply: StoredReply) -> Self {
        Self {
            phase,
            message,
            reply: Arc::new(reply),
        }
    }

    /// The phase that rejected the request.
    pub fn phase(&self) -> &'static str {
        self.phase
    }

    /// What the phase's error says.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The answer that the client gets, now and at every retry.
    pub fn reply(&self) -> &StoredReply {
        &self.reply
    }

    pub(crate) fn shared_reply(&self) -> Arc<StoredReply> {
        Arc::clone(&self.reply)
    }
}

/// A failed phase, as the engine sees it.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) phase: &'static str,
    pub(crate) disposition: Disposition,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn of(phase: &'static str, error: &impl PhaseFailure) -> Self {
        Self {
            phase,
            disposition: error.disposition(),
            message: error.to_string(),
        }
    }

    /// Waits for an operator at once.
    pub(crate) fn park(phase: &'static str, message: impl Into<String>) -> Self {
        let disposition = Disposition(Kind::Park);
        let message = message.into();
        Self {
            phase,
            disposition,
            message,
        }
    }

    /// A commit that is known not to have happened, for a reason that may or may not pass.
    pub(crate) fn not_committed(phase: &'static str, error: &sqlx::Error) -> Self {
        let mut failure = Self::of(phase, error);
        if !matches!(failure.disposition.0, Kind::Again(_)) {
            failure.disposition = Disposition(Kind::Again(Box::new(failure.disposition.0)));
        }
        failure
    }

    pub(crate) fn stop(phase: &'static str, message: impl Into<String>) -> Self {
        Self {
            phase,
            disposition: Disposition::stop(),
            message: message.into(),
        }
    }
}

/// By SQLSTATE: conflicts are run again, a lost connection, a timeout or a server that is going
/// away is a retry, everything else (a constraint, a missing table) is a bug until the phase says
/// otherwise.
impl PhaseFailure for sqlx::Error {
    fn disposition(&self) -> Disposition {
        match self {
            Self::Database(error) => match error.code().as_deref() {
                Some("40001" | "40P01") => Disposition::conflict(),
                Some(code) if is_passing(code) => Disposition::retry(),
                _ => Disposition::stop(),
            },
            Self::Io(_)
            | Self::Tls(_)
            | Self::Protocol(_)
            | Self::PoolTimedOut
            | Self::PoolClosed
            | Self::WorkerCrashed
            | Self::BeginFailed => Disposition::retry(),
            _ => Disposition::stop(),
        }
    }
}

/// SQLSTATEs that say nothing about the statement itself: connection exceptions (08), resources
/// (53), operator intervention (57), locks not available, transactions timed out, and a server that
/// was just made a standby.
fn is_passing(code: &str) -> bool {
    matches!(&code[..code.len().min(2)], "08" | "53" | "57")
        || matches!(code, "55P03" | "25P03" | "25P04" | "25006")
}

impl PhaseFailure for Infallible {
    fn disposition(&self) -> Disposition {
        match *self {}
    }
}

/// What is known of the error or of its sources decides; the rest is a bug.
impl PhaseFailure for Box<dyn Error + Send + Sync> {
    fn disposition(&self) -> Disposition {
        let mut source: Option<&(dyn Error + 'static)> = Some(self.as_ref());
        while let Some(error) = source {
            if let Some(error) = error.downcast_ref::<sqlx::Error>() {
                return error.disposition();
            }
            source = error.source();
        }
        Disposition::stop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boxed_error_is_judged_by_its_source() {
        #[derive(Debug, thiserror::Error)]
        #[error("no ride")]
        struct NoRide(#[source] sqlx::Error);

        let passing: Box<dyn Error + Send + Sync> = Box::new(NoRide(sqlx::Error::PoolTimedOut));
        let bug: Box<dyn Error + Send + Sync> = Box::new(NoRide(sqlx::Error::RowNotFound));

        assert!(matches!(passing.disposition().0, Kind::Retry { .. }));
        assert!(matches!(bug.disposition().0, Kind::Stop));
        assert!(matches!(
            Box::<dyn Error + Send + Sync>::from("oh").disposition().0,
            Kind::Stop
        ));
    }

    #[test]
    fn sqlstates_of_a_server_in_trouble_are_passing() {
        for code in ["08006", "53300", "57P01", "57014", "55P03", "25P03"] {
            assert!(is_passing(code), "{code}");
        }
        for code in ["23505", "42P01", "22001", "25P02", ""] {
            assert!(!is_passing(code), "{code}");
        }
    }

    #[test]
    fn no_status_is_a_rejection() {
        for status in 300..600 {
            let status = http::StatusCode::from_u16(status).unwrap();
            let retried =
                matches!(status.as_u16(), 408 | 409 | 425 | 429) || status.is_server_error();
            match Disposition::of_status(status).0 {
                Kind::Retry { .. } => assert!(retried, "{status}"),
                Kind::Stop => assert!(!retried, "{status}"),
                other => panic!("{status}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_rejection_that_cannot_be_stored_is_a_bug() {
        let reply = Reply::ok("x").header("set-cookie", "a=b");
        assert!(matches!(Disposition::reject(reply).0, Kind::Unstorable(_)));
    }
}
