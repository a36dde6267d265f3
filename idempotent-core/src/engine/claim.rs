//! How a request gets the right to run, or learns why it does not: fresh keys are claimed and known
//! ones read by one statement; a free one is then taken by compare-and-swap.

use std::time::{Duration, SystemTime};

use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, Postgres};
use tokio::time::Instant;
use uuid::Uuid;

use super::look::not_a_reply;
use super::{Handle, Prepared};
use crate::attempt::{Attempt, Start};
use crate::error::RunError;
use crate::fingerprint::Fingerprint;
use crate::flow::{Flow, RecoveryPoint};
use crate::graph::{Graph, Phase};
use crate::json::into_storable;
use crate::key::KeyInfo;
use crate::reply::StoredReply;
use crate::state::State;
use crate::store::{
    self, Advance, End, Fresh, Holder, Intent, Known, Parting, Position, Read, Taken,
    UnfinishedKey, bounded,
};

/// What a claim came to, where it did not fail.
pub(super) enum Claim {
    /// The attempt may run.
    Granted(Box<Attempt>),
    /// The flow finished before.
    Finished(StoredReply),
}

/// How often a claim is tried again when rows come and go under it, or the database asks for it.
const LAPS: u32 = 10;

impl<F: Flow> Handle<F> {
    pub(super) async fn claim(&self, prepared: &Prepared) -> Result<Claim, RunError> {
        // The same in all laps: they are how a claim whose answer was lost knows itself again.
        let (id, holder) = (Uuid::now_v7(), Holder::fresh());
        let fresh = Fresh {
            id,
            key: &prepared.key,
            flow: self.graph.flow(),
            fingerprint: &prepared.fingerprint,
            request: &prepared.body,
            holder,
            lease: self.settings.lease,
            durable: self
                .graph
                .phase_from("started")
                .is_some_and(Phase::is_external),
        };
        let patience = LAPS + self.inner.pool.options().get_max_connections();
        let mut last_error = None;
        for lap in 0..patience {
            let granted = Instant::now();
            let mut connection = store::acquire(&self.inner.pool)
                .await
                .map_err(|error| RunError::unavailable(&error))?;
            match self.claim_once(prepared, &fresh, &mut connection).await {
                Ok(Some(Granted::Answer(reply))) => return Ok(Claim::Finished(reply)),
                Ok(Some(Granted::Lease(lease))) => {
                    let key = &prepared.key;
                    let names = [&key.user, &key.path, &key.key];
                    let attempt = self.begin(names, lease, holder, granted, connection);
                    return Ok(Claim::Granted(Box::new(attempt)));
                }
                // Rows came and went between two reads: look again.
                Ok(None) => {}
                Err(ClaimError::Refused(error)) => return Err(error),
                Err(ClaimError::Database(error)) if store::is_lock_timeout(&error) => {
                    return Err(RunError::InProgress {
                        retry_after: Duration::from_secs(1),
                    });
                }
                // Run again with the same id and holder: if the lost claim did commit, it is ours.
                Err(ClaimError::Database(error)) if store::is_connection_lost(&error) => {
                    connection.close_on_drop();
                    last_error = Some(error);
                }
                Err(ClaimError::Database(error)) if store::is_conflict(&error) => {
                    last_error = Some(error)
                }
                Err(ClaimError::Database(error)) => return Err(RunError::unavailable(&error)),
            }
            drop(connection);
            tokio::time::sleep(super::drive::backoff(lap.min(LAPS))).await;
        }
        Err(match last_error {
            Some(error) => RunError::unavailable(&error),
            None => RunError::InProgress {
                retry_after: Duration::from_secs(1),
            },
        })
    }

    async fn claim_once(
        &self,
        prepared: &Prepared,
        fresh: &Fresh<'_>,
        connection: &mut PoolConnection<Postgres>,
    ) -> Result<Option<Granted>, ClaimError> {
        let within = store::answer_time(self.settings.lease);
        let read = bounded(within, store::claim_or_read(connection, fresh)).await?;
        let known = match read {
            None => return Ok(None),
            Some(Read::Claimed { created_at }) => {
                let started = self.graph.points().first();
                return Ok(Some(Granted::Lease(Lease {
                    id: fresh.id,
                    fence: 1,
                    attempts: 1,
                    created_at,
                    stored_point: "started",
                    point: started.map_or("started", |point| point.name()),
                    state: State::default(),
                    age: Duration::ZERO,
                    is_fresh: true,
                    intent: None,
                })));
            }
            Some(Read::Known(known)) => known,
        };
        let unfinished = match judge::<F>(self.graph, prepared, *known)? {
            Judged::Finished(reply) => return Ok(Some(Granted::Answer(reply))),
            Judged::Unfinished(unfinished) => *unfinished,
        };
        if unfinished.is_held && unfinished.holder == Some(fresh.holder) {
            // Ours already: the acknowledgement of our own claim was lost.
            let lease = Lease::of::<F>(unfinished.id, unfinished.standing)?;
            return Ok(Some(Granted::Lease(lease)));
        }
        if unfinished.is_held {
            let retry_after = unfinished.lease_left;
            return Err(RunError::InProgress { retry_after }.into());
        }
        // What cannot be understood is left unclaimed, for the version that can.
        let standing = unfinished.standing;
        understand::<F>(&standing.recovery_point, standing.state)?;
        let user = &prepared.key.user;
        let taken = self.take_over(connection, unfinished.id, user, fresh.holder);
        Ok(taken.await?.map(Granted::Lease))
    }

    /// Takes a free key; the run goes on from what the update returned, since a point that was read
    /// before it may be stale.
    pub(super) async fn take_over(
        &self,
        connection: &mut PgConnection,
        id: Uuid,
        user: &str,
        holder: Holder,
    ) -> Result<Option<Lease>, ClaimError> {
        let length = self.settings.lease;
        let within = store::answer_time(length);
        let taken = store::take_over(connection, id, user, holder, length);
        let Some(taken) = bounded(within, taken).await? else {
            return Ok(None);
        };
        let (point, state) = (taken.recovery_point.clone(), taken.state.clone());
        let lease = Lease::of::<F>(id, taken);
        if lease.is_err() {
            // Another version moved it on in between: given back, for that one to go on.
            let position = Position {
                id,
                user,
                holder,
                stored_point: &point,
            };
            let advance = Advance {
                point: &point,
                state: &state,
            };
            let parting = Parting::without_failure(&self.settings.limits);
            let released = store::release(connection, position, advance, parting, length);
            bounded(within, released).await?;
        }
        Ok(Some(lease?))
    }

    /// An attempt that has just been granted its lease.
    pub(super) fn begin(
        &self,
        [user, path, key]: [&String; 3],
        lease: Lease,
        holder: Holder,
        granted: Instant,
        connection: PoolConnection<Postgres>,
    ) -> Attempt {
        Attempt::start(Start {
            pool: self.inner.pool.clone(),
            keeper: self.inner.keeper.clone(),
            graph: self.graph,
            reply_limit: self.settings.reply_limit,
            key: KeyInfo {
                id: lease.id,
                user: user.clone(),
                path: path.clone(),
                key: key.clone(),
                attempt: u32::try_from(lease.attempts).unwrap_or(1).max(1),
                fence: lease.fence,
                created_at: lease.created_at,
            },
            holder,
            lease: self.settings.lease,
            granted,
            surroundings: self.inner.surroundings(),
            stored_point: lease.stored_point,
            point: lease.point,
            state: lease.state,
            age: lease.age,
            is_fresh: lease.is_fresh,
            intent: lease.intent,
            connection,
        })
    }
}

enum Granted {
    Answer(StoredReply),
    Lease(Lease),
}

/// A lease that was granted, and where the flow stands.
pub(super) struct Lease {
    id: Uuid,
    fence: i64,
    attempts: i32,
    created_at: SystemTime,
    stored_point: &'static str,
    point: &'static str,
    state: State,
    age: Duration,
    /// Nobody has been here before: no phase that leaves this point was ever entered.
    is_fresh: bool,
    intent: Option<Intent>,
}

impl Lease {
    /// Since the flow last moved on, this one included.
    pub(super) fn attempts(&self) -> u32 {
        u32::try_from(self.attempts).unwrap_or(0)
    }

    fn of<F: Flow>(id: Uuid, taken: Taken) -> Result<Self, RunError> {
        let stored = understand::<F>(&taken.recovery_point, taken.state)?;
        Ok(Self {
            id,
            fence: taken.fence,
            attempts: taken.attempts,
            created_at: taken.created_at,
            stored_point: stored.name,
            point: stored.point,
            state: stored.state,
            age: taken.age,
            is_fresh: taken.call_again,
            intent: taken.intent,
        })
    }
}

pub(super) enum ClaimError {
    Refused(RunError),
    Database(sqlx::Error),
}

impl From<RunError> for ClaimError {
    fn from(error: RunError) -> Self {
        Self::Refused(error)
    }
}

impl From<sqlx::Error> for ClaimError {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

/// What a known key is to a request, that is the same and not stuck.
pub(super) enum Judged {
    Finished(StoredReply),
    Unfinished(Box<UnfinishedKey>),
}

/// A mismatch is decided first, whatever state the key is in.
pub(super) fn judge<F: Flow>(
    graph: &Graph,
    prepared: &Prepared,
    known: Known,
) -> Result<Judged, RunError> {
    if !is_same_request::<F>(graph, prepared, &known) {
        return Err(RunError::Mismatch);
    }
    match known.end {
        End::Finished(stored) => StoredReply::from_stored(stored)
            .map(Judged::Finished)
            .ok_or_else(not_a_reply),
        End::NotYet(unfinished) if unfinished.is_stuck => Err(RunError::Stuck),
        End::NotYet(unfinished) => Ok(Judged::Unfinished(unfinished)),
    }
}

/// Equal hashes are the same request. Different ones need not be different requests: a newer version
/// may have a field more, with a default, or another version of the hash. So the stored request is
/// read as today's type, and that decides.
fn is_same_request<F: Flow>(graph: &Graph, prepared: &Prepared, known: &Known) -> bool {
    if known.flow != graph.flow() {
        return false;
    }
    if known.request_hash == prepared.fingerprint.as_bytes() {
        return true;
    }
    let Some(stored) = &known.other_request else {
        return false;
    };
    // Only the body is stored. Its hash with our method and query must be the stored one, or those
    // are what differs.
    if Fingerprint::new(&prepared.key, stored).as_bytes() != known.request_hash {
        return false;
    }
    let Ok(today) = <F::Request as serde::Deserialize>::deserialize(stored) else {
        return false;
    };
    let body = serde_json::to_value(&today).ok();
    let body = body.and_then(|body| into_storable(body).ok());
    body.is_some_and(|body| Fingerprint::new(&prepared.key, &body) == prepared.fingerprint)
}

/// A stored point and its values, in this version's terms.
pub(super) struct Understood {
    /// The point's name as it is stored: that of an older version, where it was renamed.
    name: &'static str,
    point: &'static str,
    state: State,
}

/// Whether this version could go on with a flow, from what is stored.
pub(super) fn can_go_on<F: Flow>(
    point: &str,
    state: &serde_json::Value,
    request: &serde_json::Value,
) -> Result<(), String> {
    understand::<F>(point, state.clone()).map_err(|error| error.to_string())?;
    <F::Request as serde::Deserialize>::deserialize(request)
        .map(|_| ())
        .map_err(|error| format!("its request cannot be read: {error}"))
}

/// Reads a stored point and its values as this version does.
fn understand<F: Flow>(name: &str, state: serde_json::Value) -> Result<Understood, RunError> {
    let not_understood = |reason: String| RunError::NotUnderstood { reason };
    let stored = F::GRAPH.stored_point(name);
    let (today, name) = stored.map_or((name, "unknown"), |(point, name)| (point.name(), name));
    let point: F::RecoveryPoint = today
        .parse()
        .map_err(|error: crate::UnknownRecoveryPoint| not_understood(error.to_string()))?;
    let state =
        State::from_stored(F::GRAPH, state).map_err(|error| not_understood(error.to_string()))?;
    F::check(point, &state).map_err(|error| not_understood(error.to_string()))?;
    let point = point.name();
    Ok(Understood { name, point, state })
}
