//! What a new version finds when it starts: flows that stand at points it no longer has, or hold
//! values that it cannot read. They are named, and left as they are: nothing is lost or guessed, and
//! the version that knows them can still finish them.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;
use sqlx::postgres::PgConnection;

use super::claim::can_go_on;
use super::{Engine, Inner};
use crate::flow::Flow;
use crate::store::{self, Unfinished};

/// Unfinished flows that this version cannot go on with, for one reason.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stranded {
    /// The flow.
    pub flow: String,
    /// The recovery point, as it is stored.
    pub point: String,
    /// How many keys: of those that were looked at.
    pub keys: u64,
    /// What is in the way.
    pub reason: String,
}

impl fmt::Display for Stranded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            flow,
            point,
            keys,
            reason,
        } = self;
        write!(f, "{keys} of flow `{flow}` at `{point}`: {reason}")
    }
}

/// What to do at start-up about flows that this version cannot go on with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnStranded {
    /// Say so in the log, and start: in a rolling deployment another version may know them.
    #[default]
    Warn,
    /// Do not start.
    Refuse,
}

/// How many unfinished keys are looked at. Enough to find a mistake, too few to slow a start down.
const LOOKED_AT: i64 = 1000;

pub(super) type Check = fn(&Unfinished) -> Result<(), String>;

/// Whether a flow of type `F` could go on from what is stored.
pub(super) fn check<F: Flow>(stored: &Unfinished) -> Result<(), String> {
    can_go_on::<F>(&stored.recovery_point, &stored.state, &stored.request)
}

impl Engine {
    /// The unfinished flows that this version cannot go on with, among the first thousand of its
    /// flows.
    ///
    /// # Errors
    ///
    /// When the database does not answer.
    pub async fn stranded(&self) -> Result<Vec<Stranded>, sqlx::Error> {
        let mut connection = store::acquire(self.inner.pool()).await?;
        self.inner.stranded(&mut connection).await
    }
}

impl Inner {
    pub(super) async fn stranded(
        &self,
        connection: &mut PgConnection,
    ) -> Result<Vec<Stranded>, sqlx::Error> {
        let flows: Vec<&str> = self.flow_names().collect();
        let unfinished = store::list_unfinished(connection, &flows, LOOKED_AT).await?;
        let mut counts: BTreeMap<(String, String, String), u64> = BTreeMap::new();
        for stored in unfinished {
            let Some(registered) = self.flows.get(stored.flow.as_str()) else {
                continue;
            };
            if let Err(reason) = (registered.check)(&stored) {
                *counts
                    .entry((stored.flow, stored.recovery_point, reason))
                    .or_default() += 1;
            }
        }
        let stranded = counts
            .into_iter()
            .map(|((flow, point, reason), keys)| Stranded {
                flow,
                point,
                keys,
                reason,
            });
        Ok(stranded.collect())
    }
}

impl Unfinished {
    pub(crate) fn new(flow: String, recovery_point: String, state: Value, request: Value) -> Self {
        Self {
            flow,
            recovery_point,
            state,
            request,
        }
    }
}
