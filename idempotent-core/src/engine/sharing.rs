//! Identical requests that run in this process at the same time share one run: the first leads, the
//! others wait for its answer, without a look at the database. Identical means: the same user, path
//! and key, the same flow, and an equal fingerprint; a request that differs goes to the database,
//! which refuses it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::Answer;
use crate::error::RunError;
use crate::fingerprint::Fingerprint;
use crate::key::Key;

type Outcome = Option<Result<Answer, RunError>>;

/// The runs of this process, by what names them.
#[derive(Debug, Clone, Default)]
pub(super) struct Shared(Arc<Mutex<HashMap<Arc<Name>, Run>>>);

#[derive(Clone, PartialEq, Eq, Hash)]
struct Name {
    user: String,
    path: String,
    key: String,
}

/// The user and the key stay out of logs.
impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Name(..)")
    }
}

#[derive(Debug)]
struct Run {
    flow: &'static str,
    fingerprint: Fingerprint,
    outcome: watch::Receiver<Outcome>,
}

/// The duty to answer all who joined.
#[derive(Debug)]
pub(super) struct Lead {
    outcome: watch::Sender<Outcome>,
    /// None for a run that nobody can join: its key is taken here by a different request.
    registration: Option<Registration>,
}

#[derive(Debug)]
struct Registration {
    shared: Shared,
    name: Arc<Name>,
}

/// What a request is to the run that answers it.
#[derive(Debug)]
pub(super) enum Role {
    /// An identical request runs already.
    Joined(Joined),
    /// This one runs: whoever has the lead must answer.
    Leads(Lead, Joined),
}

/// A request that waits for a run: its own, or one that it joined.
#[derive(Debug)]
pub(super) struct Joined {
    outcome: watch::Receiver<Outcome>,
    joined: bool,
}

impl Shared {
    /// Joins the run of an identical request, or leads one.
    pub(super) fn join_or_lead(
        &self,
        flow: &'static str,
        key: &Key,
        fingerprint: &Fingerprint,
    ) -> Role {
        let name = Arc::new(Name {
            user: key.user.clone(),
            path: key.path.clone(),
            key: key.key.clone(),
        });
        let (sender, receiver) = watch::channel(None);
        let registration = match self.runs().entry(Arc::clone(&name)) {
            Entry::Occupied(running) => {
                let running = running.get();
                if running.flow == flow && running.fingerprint == *fingerprint {
                    return Role::Joined(Joined {
                        outcome: running.outcome.clone(),
                        joined: true,
                    });
                }
                None
            }
            Entry::Vacant(free) => {
                free.insert(Run {
                    flow,
                    fingerprint: fingerprint.clone(),
                    outcome: receiver.clone(),
                });
                Some(Registration {
                    shared: self.clone(),
                    name,
                })
            }
        };
        Role::Leads(
            Lead {
                outcome: sender,
                registration,
            },
            Joined {
                outcome: receiver,
                joined: false,
            },
        )
    }

    /// Leads a run of a stored request; none when one with this name runs here already.
    pub(super) fn lead(
        &self,
        flow: &'static str,
        (user, path, key): (&str, &str, &str),
        fingerprint: &Fingerprint,
    ) -> Option<Lead> {
        let (user, path, key) = (user.to_owned(), path.to_owned(), key.to_owned());
        let name = Arc::new(Name { user, path, key });
        let (sender, receiver) = watch::channel(None);
        match self.runs().entry(Arc::clone(&name)) {
            Entry::Occupied(_) => None,
            Entry::Vacant(free) => {
                free.insert(Run {
                    flow,
                    fingerprint: fingerprint.clone(),
                    outcome: receiver,
                });
                let registration = Registration {
                    shared: self.clone(),
                    name,
                };
                Some(Lead {
                    outcome: sender,
                    registration: Some(registration),
                })
            }
        }
    }

    fn runs(&self) -> MutexGuard<'_, HashMap<Arc<Name>, Run>> {
        // A panic while the map was locked leaves it whole: every change to it is one call.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lead {
    pub(super) fn answer(self, outcome: Result<Answer, RunError>) {
        self.outcome.send_replace(Some(outcome));
    }
}

/// Also when the task ends without an answer, because the runtime is going away.
impl Drop for Registration {
    fn drop(&mut self) {
        self.shared.runs().remove(&self.name);
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        // After the answer was sent, so that nobody finds neither the run nor its end in the database.
        self.registration = None;
    }
}

impl Joined {
    pub(super) fn is_joined(&self) -> bool {
        self.joined
    }

    pub(super) async fn wait(mut self) -> Result<Answer, RunError> {
        let outcome = match self.outcome.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone(),
            Err(_) => None,
        };
        match outcome {
            Some(Ok(answer)) => Ok(Answer {
                replayed: answer.replayed || self.joined,
                ..answer
            }),
            Some(Err(error)) => Err(error),
            None => Err(RunError::ShuttingDown),
        }
    }
}
