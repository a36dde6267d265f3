//! Keeping leases. One task per engine renews the leases of all running attempts at a third of
//! their length, in one statement; an attempt whose lease turns out to be lost is told, and stops.
//!
//! The task has a connection of its own: a pool that phases have exhausted must not let leases run
//! out. A renewal that fails is not a lost lease; only the database, answering that the holder is
//! another one, says so. Deliberately absent: how a lease is granted. That is a claim, in `store`.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::Connection;
use sqlx::postgres::{PgConnection, PgPool};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use uuid::Uuid;

use crate::signal::raised;
use crate::store::{self, Holder, Renewals};

/// The leases that this process holds.
#[derive(Debug, Default)]
pub(crate) struct Keeper {
    held: Mutex<AllHeld>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct AllHeld {
    leases: HashMap<Holder, Held>,
    /// When the renewing task wakes by itself. None: not before it is told of a lease.
    wakes_at: Option<Instant>,
}

struct Held {
    id: Uuid,
    user: String,
    lease: Duration,
    renew_at: Instant,
    /// Its transaction has locked the row: it cannot be renewed, and nobody can take it either.
    is_resting: bool,
    lost: watch::Sender<bool>,
}

/// The user stays out of logs.
impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// Ends the renewals when the engine goes.
#[derive(Debug)]
pub(crate) struct KeeperTask(AbortHandle);

impl Drop for KeeperTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An attempt's lease, kept as long as this lives. Dropping it ends the renewals; it does not give
/// the lease back, which is a write of its own.
#[derive(Debug)]
pub(crate) struct Kept {
    keeper: Arc<Keeper>,
    holder: Holder,
    lost: watch::Receiver<bool>,
}

impl Keeper {
    /// Starts the task that renews. It ends with the returned guard.
    pub(crate) fn start(pool: PgPool, connection: PgConnection) -> (Arc<Self>, KeeperTask) {
        let keeper = Arc::new(Self::default());
        let task = tokio::spawn(renew_for_ever(Arc::clone(&keeper), pool, connection));
        (keeper, KeeperTask(task.abort_handle()))
    }

    /// Keeps a lease that was granted by a statement sent at `granted`.
    pub(crate) fn keep(
        self: &Arc<Self>,
        id: Uuid,
        user: String,
        holder: Holder,
        lease: Duration,
        granted: Instant,
    ) -> Kept {
        let (lost, lost_signal) = watch::channel(false);
        let held = Held {
            id,
            user,
            lease,
            renew_at: granted + lease / 3,
            is_resting: false,
            lost,
        };
        let renew_at = held.renew_at;
        let mut all = self.held();
        // Most leases are as long as the ones before: nothing is due before the task wakes anyway.
        let wakes_too_late = all.wakes_at.is_none_or(|wakes_at| renew_at < wakes_at);
        all.leases.insert(holder, held);
        drop(all);
        if wakes_too_late {
            self.changed.notify_one();
        }
        Kept {
            keeper: Arc::clone(self),
            holder,
            lost: lost_signal,
        }
    }

    fn held(&self) -> MutexGuard<'_, AllHeld> {
        // A panic while the map was locked leaves it whole: every change to it is one call.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When the task must wake; it promises to.
    fn next_renewal(&self) -> Option<Instant> {
        let mut all = self.held();
        let awake = all.leases.values().filter(|held| !held.is_resting);
        all.wakes_at = awake.map(|held| held.renew_at).min();
        all.wakes_at
    }

    /// The leases to renew now: those that are due, and those that will be before long, so that one
    /// statement serves them all.
    fn due(&self, now: Instant) -> HashMap<Holder, (Uuid, String, Duration)> {
        self.held()
            .leases
            .iter()
            .filter(|(_, held)| !held.is_resting && held.renew_at <= now + held.lease / 6)
            .map(|(holder, held)| (*holder, (held.id, held.user.clone(), held.lease)))
            .collect()
    }

    /// Whether the task wakes too late for what follows from it.
    fn renewed(&self, holder: Holder, at: Instant) -> bool {
        let mut all = self.held();
        let wakes_at = all.wakes_at;
        let Some(held) = all.leases.get_mut(&holder) else {
            return false;
        };
        held.renew_at = at + held.lease / 3;
        held.is_resting = false;
        wakes_at.is_none_or(|wakes_at| held.renew_at < wakes_at)
    }

    fn lost(&self, holder: Holder) {
        if let Some(held) = self.held().leases.remove(&holder) {
            held.lost.send_replace(true);
        }
    }

    fn postpone(&self, holder: Holder, now: Instant) {
        if let Some(held) = self.held().leases.get_mut(&holder) {
            held.renew_at = now + held.lease / 10;
        }
    }
}

impl Kept {
    pub(crate) fn holder(&self) -> Holder {
        self.holder
    }

    /// The lease was renewed by a write of the attempt itself, sent at `at`.
    pub(crate) fn renewed(&self, at: Instant) {
        // Later than it was, as a rule; where it rested, the task may have to wake sooner.
        if self.keeper.renewed(self.holder, at) {
            self.keeper.changed.notify_one();
        }
    }

    /// The attempt's transaction has locked the row, and so nobody can take the lease, nor renew it.
    pub(crate) fn rest(&self) {
        if let Some(held) = self.keeper.held().leases.get_mut(&self.holder) {
            held.is_resting = true;
        }
    }

    /// That transaction came to nothing: the lease is to be renewed at once.
    pub(crate) fn wake(&self) {
        if let Some(held) = self.keeper.held().leases.get_mut(&self.holder) {
            held.is_resting = false;
            held.renew_at = held.renew_at.min(Instant::now());
        }
        self.keeper.changed.notify_one();
    }

    /// Resolves when the database has said that the lease is lost; else never.
    pub(crate) async fn lost(&self) {
        raised(&self.lost).await;
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.keeper.held().leases.remove(&self.holder);
    }
}

async fn renew_for_ever(keeper: Arc<Keeper>, pool: PgPool, connection: PgConnection) {
    let mut connection = Some(connection);
    loop {
        // Registered before looking, so that a lease granted in between is not slept through.
        let changed = keeper.changed.notified();
        match keeper.next_renewal() {
            Some(next) if next <= Instant::now() => {
                renew_due(&keeper, &pool, &mut connection).await
            }
            Some(next) => {
                tokio::select! {
                    () = tokio::time::sleep_until(next) => {}
                    () = changed => {}
                }
            }
            None => changed.await,
        }
    }
}

/// How long a renewal waits for a locked row: not at all, in effect. An attempt between its
/// checkpoint and its commit has locked its own row, and renews it by that very commit.
const LOCK_TIMEOUT: &str = "5ms";

/// Renews what is due: all in one statement, or one by one when some row is locked, so that no lease
/// waits for another's.
async fn renew_due(keeper: &Keeper, pool: &PgPool, connection: &mut Option<PgConnection>) {
    let now = Instant::now();
    let due = keeper.due(now);
    let Some(shortest) = due.values().map(|(_, _, lease)| *lease).min() else {
        return;
    };
    match renew_together(pool, connection, due.iter(), shortest).await {
        Ok(renewed) => settle(keeper, due.keys(), &renewed, now),
        Err(error) if store::is_lock_timeout(&error) => {
            for one in &due {
                let sent = Instant::now();
                match renew_together(pool, connection, std::iter::once(one), shortest).await {
                    Ok(renewed) => settle(keeper, std::iter::once(one.0), &renewed, sent),
                    Err(error) => {
                        tracing::debug!(%error, key_id = %one.1.0, "a lease was not renewed; trying again");
                        keeper.postpone(*one.0, Instant::now());
                    }
                }
            }
        }
        Err(error) => {
            tracing::warn!(%error, leases = due.len(), "leases were not renewed; trying again");
            due.keys()
                .for_each(|holder| keeper.postpone(*holder, Instant::now()));
        }
    }
}

/// A lease that was not renewed has been lost, unless the attempt itself has ended meanwhile: then
/// nobody listens.
fn settle<'a>(
    keeper: &Keeper,
    asked: impl Iterator<Item = &'a Holder>,
    renewed: &[Holder],
    sent: Instant,
) {
    for holder in asked {
        if renewed.contains(holder) {
            let _ = keeper.renewed(*holder, sent);
        } else {
            keeper.lost(*holder);
        }
    }
}

async fn renew_together(
    pool: &PgPool,
    connection: &mut Option<PgConnection>,
    leases: impl Iterator<Item = (&Holder, &(Uuid, String, Duration))>,
    shortest: Duration,
) -> Result<Vec<Holder>, sqlx::Error> {
    let mut renewals = Renewals::default();
    for (holder, (id, user, lease)) in leases {
        renewals.push(*id, user.clone(), *holder, *lease);
    }
    let renewal = async {
        let open = match connection {
            Some(open) => open,
            None => connection.insert(PgConnection::connect_with(&pool.connect_options()).await?),
        };
        store::renew(open, &renewals, LOCK_TIMEOUT).await
    };
    // A connection that went silent must not cost the leases that another one could still renew.
    let renewed = tokio::time::timeout(shortest / 3, renewal)
        .await
        .unwrap_or_else(|_| Err(sqlx::Error::Io(io::ErrorKind::TimedOut.into())));
    if renewed
        .as_ref()
        .is_err_and(|error| !store::is_lock_timeout(error))
    {
        *connection = None;
    }
    renewed
}
