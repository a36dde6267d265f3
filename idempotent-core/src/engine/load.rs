//! How much a process takes on: a limit for all requests that run in it, and one for those of each
//! user, so that one user's retries cannot keep the others out. A duplicate takes no place: one that
//! joins a run adds nothing to it, and where there is no place left, a known key is still answered.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::RunError;

/// The limits; none where there is none.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LoadLimits {
    pub(super) per_user: Option<usize>,
    pub(super) in_all: Option<usize>,
}

#[derive(Debug)]
pub(super) struct Load {
    limits: LoadLimits,
    running: Arc<Mutex<Running>>,
}

#[derive(Default)]
struct Running {
    in_all: usize,
    by_user: HashMap<String, usize>,
}

/// The users stay out of logs.
impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running")
            .field("in_all", &self.in_all)
            .finish_non_exhaustive()
    }
}

/// There is no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Full {
    ForThisUser,
    ForAll,
}

impl From<Full> for RunError {
    fn from(full: Full) -> Self {
        Self::TooManyRunning {
            of_this_user: full == Full::ForThisUser,
            retry_after: Duration::from_secs(1),
        }
    }
}

/// Counts a request for as long as it lives. None where nothing is limited, so nothing counted.
#[derive(Debug)]
pub(super) struct Place(Option<(Arc<Mutex<Running>>, String)>);

impl Load {
    pub(super) fn new(limits: LoadLimits) -> Self {
        Self {
            limits,
            running: Arc::default(),
        }
    }

    pub(super) fn enter(&self, user: &str) -> Result<Place, Full> {
        let LoadLimits { per_user, in_all } = self.limits;
        if per_user.is_none() && in_all.is_none() {
            return Ok(Place(None));
        }
        let mut running = locked(&self.running);
        let of_user = running.by_user.get(user).copied().unwrap_or(0);
        if per_user.is_some_and(|limit| of_user >= limit) {
            return Err(Full::ForThisUser);
        }
        if in_all.is_some_and(|limit| running.in_all >= limit) {
            return Err(Full::ForAll);
        }
        running.in_all += 1;
        running.by_user.insert(user.to_owned(), of_user + 1);
        Ok(Place(Some((Arc::clone(&self.running), user.to_owned()))))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Some((running, user)) = self.0.take() else {
            return;
        };
        let mut running = locked(&running);
        running.in_all -= 1;
        if let Some(of_user) = running.by_user.get_mut(&user) {
            *of_user -= 1;
            if *of_user == 0 {
                running.by_user.remove(&user);
            }
        }
    }
}

fn locked(running: &Mutex<Running>) -> MutexGuard<'_, Running> {
    // A panic while it was locked leaves it whole: nothing in between can panic.
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_counted_per_user_and_in_all_and_given_back() {
        let load = Load::new(LoadLimits {
            per_user: Some(2),
            in_all: Some(3),
        });
        let first = load.enter("a").unwrap();
        let _second = load.enter("a").unwrap();
        assert_eq!(load.enter("a").unwrap_err(), Full::ForThisUser);
        let _third = load.enter("b").unwrap();
        assert_eq!(load.enter("b").unwrap_err(), Full::ForAll);
        drop(first);
        let _again = load.enter("a").unwrap();
        assert_eq!(load.enter("c").unwrap_err(), Full::ForAll);
    }

    #[test]
    fn nothing_is_kept_of_users_who_have_nothing_running() {
        let load = Load::new(LoadLimits {
            per_user: Some(1),
            in_all: None,
        });
        drop(load.enter("a").unwrap());
        assert!(locked(&load.running).by_user.is_empty());
    }
}
