//! Outside calls that may not simply be made again: because the outside does not dedupe at all
//! (`at_most_once`), or has forgotten the key by now (`dedupes_for`). The call is announced in the
//! row before it is made. Whoever finds an announcement without a result does not call: it asks the
//! outside what happened, or leaves that to an operator.

use super::doubt::{Alone, WriteEnd};
use super::{Attempt, Halt};
use crate::failure::Failure;
use crate::graph::{Phase, PhaseKind, Repeatable};
use crate::store::Intent;

/// What to do about a call that may not be repeated at will.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intended {
    /// It is announced: make it.
    Call,
    /// It may have been made before, and may not be made again.
    Unknown,
}

/// What the outside says of a call that may have been made before.
///
/// Only `Happened` goes on by itself. After `DidNot` the first attempt, frozen, may still wake up
/// and make the call, so an operator has to say "call again"; and so after `Unknown`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reconciled<T> {
    /// It took effect, with this result.
    Happened(T),
    /// It did not take effect, so far.
    DidNot,
    /// The outside cannot say.
    Unknown,
}

impl Attempt {
    /// Announces the call of a phase, unless it was announced before.
    pub async fn intend(&mut self, phase: &'static Phase) -> Result<Intended, Halt> {
        let PhaseKind::External { call, .. } = phase.kind() else {
            return Err(self.stop("an atomic phase may not call the outside"));
        };
        // By any name: one phase leaves a point, and the fn may have been renamed since.
        let announced = self.intent.as_ref().map(|intent| intent.age);
        let (age, since) = self.age;
        match (phase.repeatable(), announced) {
            (Repeatable::Always, _) => return Ok(Intended::Call),
            // No first try can be older than its key, so nothing need be written down yet.
            (Repeatable::Within(time), _) if age + since.elapsed() < time => {
                return Ok(Intended::Call);
            }
            (Repeatable::Within(time), Some(age)) if age < time => return Ok(Intended::Call),
            (_, Some(_)) => return Ok(Intended::Unknown),
            // It may have been made while the key was young, without an announcement.
            (Repeatable::Within(_), None) if !self.is_fresh => return Ok(Intended::Unknown),
            (Repeatable::Within(_) | Repeatable::Never, None) => {}
        }
        match self.write_alone(Alone::Announcement(call)).await? {
            WriteEnd::Written => {
                self.intent = Some(Intent {
                    call: call.to_owned(),
                    age: std::time::Duration::ZERO,
                });
                // No connection is held while the outside is called.
                self.connection = None;
                Ok(Intended::Call)
            }
            WriteEnd::Elsewhere => Err(self.stop("the flow moved on while a call was announced")),
        }
    }

    /// Goes on after a call that the outside says happened.
    pub fn reconciled<T>(&self, phase: &'static Phase, asked: Reconciled<T>) -> Result<T, Halt> {
        let says = match asked {
            Reconciled::Happened(value) => return Ok(value),
            Reconciled::DidNot => {
                "that it did not happen; but an attempt that is frozen may still make it"
            }
            Reconciled::Unknown => "that it does not know",
        };
        let message = format!(
            "the call may have been made before, and may not be made again; the outside says {says}. \
             Make sure, then let an operator say \"call again\", or resolve the flow by hand"
        );
        Err(Halt::failed(Failure::park(phase.name(), message)))
    }

    /// Stops before a call that may have happened, where nobody can be asked.
    pub fn unreconciled(&self, phase: &'static Phase) -> Halt {
        let message = "the call may have been made before, and may not be made again. Make sure, then \
                       let an operator say \"call again\", or resolve the flow by hand";
        Halt::failed(Failure::park(phase.name(), message))
    }
}
