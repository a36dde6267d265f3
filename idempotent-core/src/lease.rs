//! Keeping leases. One task per engine renews the leases of all running attempts at a third of
//! their length, in one statement; an attempt whose lease turns out to be lost is told, and stops.
//!
//! The task has a connection of its own: a pool that phases have exhausted must not let leases run
//! out. A renewal that fails is not a lost lease; only the database, answering that the holder is
//! another one, says so. Deliberately absent: how a lease is granted. That is a claim, in `store`.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::Connection;
use sqlx::postgres::{PgConnection, PgPool};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use uuid::Uuid;

use crate::store::{self, Holder, Renewals};

/// The leases that this process holds.
#[derive(Debug, Default)]
pub(crate) struct Keeper {
    held: Mutex<HashMap<Holder, Held>>,
    changed: Notify,
}

#[derive(Debug)]
struct Held {
    id: Uuid,
    user: String,
    lease: Duration,
    renew_at: Instant,
    lost: watch::Sender<bool>,
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
    pub(crate) fn start(pool: PgPool) -> (Arc<Self>, KeeperTask) {
        let keeper = Arc::new(Self::default());
        let task = tokio::spawn(renew_for_ever(Arc::clone(&keeper), pool));
        (keeper, KeeperTask(task.abort_handle()))
    }

    /// Keeps a lease that was just granted.
    pub(crate) fn keep(
        self: &Arc<Self>,
        id: Uuid,
        user: String,
        holder: Holder,
        lease: Duration,
    ) -> Kept {
        let (lost, lost_signal) = watch::channel(false);
        let held = Held {
            id,
            user,
            lease,
            renew_at: Instant::now() + lease / 3,
            lost,
        };
        self.held().insert(holder, held);
        self.changed.notify_one();
        Kept {
            keeper: Arc::clone(self),
            holder,
            lost: lost_signal,
        }
    }

    fn held(&self) -> MutexGuard<'_, HashMap<Holder, Held>> {
        // A panic while the map was locked leaves it whole: every change to it is one call.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_renewal(&self) -> Option<Instant> {
        self.held().values().map(|held| held.renew_at).min()
    }

    /// The leases to renew now: those that are due, and those that will be before long, so that one
    /// statement serves them all.
    fn due(&self, now: Instant) -> HashMap<Holder, (Uuid, String, Duration)> {
        self.held()
            .iter()
            .filter(|(_, held)| held.renew_at <= now + held.lease / 6)
            .map(|(holder, held)| (*holder, (held.id, held.user.clone(), held.lease)))
            .collect()
    }

    fn renewed(&self, holder: Holder, at: Instant) {
        if let Some(held) = self.held().get_mut(&holder) {
            held.renew_at = at + held.lease / 3;
        }
    }

    fn lost(&self, holder: Holder) {
        if let Some(held) = self.held().remove(&holder) {
            held.lost.send_replace(true);
        }
    }

    fn postpone(&self, holder: Holder, now: Instant) {
        if let Some(held) = self.held().get_mut(&holder) {
            held.renew_at = now + held.lease / 10;
        }
    }
}

impl Kept {
    pub(crate) fn holder(&self) -> Holder {
        self.holder
    }

    /// The lease was renewed by a write of the attempt itself.
    pub(crate) fn renewed(&self) {
        self.keeper.renewed(self.holder, Instant::now());
    }

    /// Resolves when the database has said that the lease is lost; else never.
    pub(crate) async fn lost(&self) {
        let mut lost = self.lost.clone();
        if lost.wait_for(|lost| *lost).await.is_err() {
            std::future::pending().await
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.keeper.held().remove(&self.holder);
    }
}

async fn renew_for_ever(keeper: Arc<Keeper>, pool: PgPool) {
    let mut connection = None;
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

/// Renews what is due: all in one statement, or one by one when some row is locked (an attempt
/// between its checkpoint and its commit locks its own row), so that no lease waits for another's.
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
                match renew_together(pool, connection, std::iter::once(one), shortest).await {
                    Ok(renewed) => settle(keeper, std::iter::once(one.0), &renewed, now),
                    Err(error) => {
                        tracing::debug!(%error, key_id = %one.1.0, "a lease could not be renewed; trying again");
                        keeper.postpone(*one.0, Instant::now());
                    }
                }
            }
        }
        Err(error) => {
            tracing::warn!(%error, leases = due.len(), "leases could not be renewed; trying again");
            due.keys()
                .for_each(|holder| keeper.postpone(*holder, Instant::now()));
        }
    }
}

fn settle<'a>(
    keeper: &Keeper,
    asked: impl Iterator<Item = &'a Holder>,
    renewed: &[Holder],
    now: Instant,
) {
    for holder in asked {
        if renewed.contains(holder) {
            keeper.renewed(*holder, now);
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
        store::renew(open, &renewals, &store::lock_timeout(shortest)).await
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
