//! What a flow is: the trait that `#[idempotent_flow]` implements. A flow is a value (it holds the
//! clients its phases call), a request type, a set of recovery points, and one transition per phase.
//! The transitions are driven by the engine, never by the user: each one lends a capability to the
//! user's fn, and stores what the fn returns together with the point that it reaches.
//!
//! Deliberately absent: how a flow is claimed, run or retried. That is [`engine`](crate::engine).

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::attempt::{Attempt, Halt};
use crate::failure::Rejection;
use crate::graph::Graph;
use crate::state::{State, Undecodable};

/// A request's work as a typed state machine. Implemented by
/// [`#[idempotent_flow]`](macro@crate::idempotent_flow), not by hand.
///
/// ```
/// # mod doc_flow { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/doc_flow.rs")); }
/// # use doc_flow::RideFlow;
/// use idempotent_core::Flow;
/// assert_eq!(RideFlow::graph().flow(), "ride");
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a flow",
    label = "not a flow",
    note = "put `#[idempotent_flow(name = \"…\", lease = \"15s\", retention = \"48h\")]` on an impl block of `{Self}`"
)]
pub trait Flow: Sized + Send + Sync + 'static {
    /// What the client asks for. Stored with the key, so that the work can go on without the client.
    type Request: Payload + Sync;

    /// The durable states of this flow.
    type RecoveryPoint: RecoveryPoint;

    #[doc(hidden)]
    const GRAPH: &'static Graph;

    /// The state machine, as data.
    fn graph() -> &'static Graph {
        Self::GRAPH
    }

    /// Whether this version of the flow can go on from what is stored at `point`.
    #[doc(hidden)]
    fn check(point: Self::RecoveryPoint, state: &State) -> Result<(), Undecodable>;

    /// Runs the phase that leaves `from`, and stores what it returns.
    #[doc(hidden)]
    fn advance(
        &self,
        from: Self::RecoveryPoint,
        attempt: &mut Attempt,
        request: &Self::Request,
    ) -> impl Future<Output = Result<(), Halt>> + Send;

    /// Stores a rejection at `at`, with the business work that the flow wants done beside it.
    #[doc(hidden)]
    fn reject(
        &self,
        at: Self::RecoveryPoint,
        attempt: &mut Attempt,
        rejection: &Rejection,
        request: &Self::Request,
    ) -> impl Future<Output = Result<(), Halt>> + Send;
}

/// A flow, by name and request alone, so that a phase of another flow can stage it. Generated beside
/// the flow as `{Flow}Reference`.
///
/// ```
/// # mod doc_flow { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/doc_flow.rs")); }
/// # use doc_flow::{RideFlow, RideRequest};
/// use idempotent_core::{StageError, Tx};
/// # struct RideFlowReference;
/// # impl idempotent_core::FlowReference for RideFlowReference { type Request = RideRequest; const FLOW: &'static str = "ride"; }
///
/// fn order_a_ride_home(tx: &mut Tx<'_>) -> Result<(), StageError> {
///     tx.stage(RideFlowReference, "home", &RideRequest { amount_cents: 2000 })
/// }
/// ```
pub trait FlowReference {
    /// What the flow is asked for.
    type Request: Payload + Sync;
    /// The flow's name.
    const FLOW: &'static str;
}

/// The durable states of one flow: an enum that the macro generates, from `Started` to `Finished`.
///
/// ```
/// # mod doc_flow { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/doc_flow.rs")); }
/// # use doc_flow::RideFlowRecoveryPoint;
/// use idempotent_core::RecoveryPoint;
/// let point: RideFlowRecoveryPoint = "ride_created".parse()?;
/// assert_eq!(point, RideFlowRecoveryPoint::RideCreated);
/// assert_eq!(point.name(), "ride_created");
/// # Ok::<(), idempotent_core::UnknownRecoveryPoint>(())
/// ```
pub trait RecoveryPoint:
    fmt::Debug
    + fmt::Display
    + FromStr<Err = UnknownRecoveryPoint>
    + Copy
    + Eq
    + std::hash::Hash
    + Send
    + Sync
    + 'static
{
    /// Every point, in the order of the flow.
    const ALL: &'static [Self];

    /// The name under which the point is stored; never a number.
    fn name(self) -> &'static str;
}

/// A stored recovery point that this version of the flow does not have.
///
/// The key is left as it is, for the version that knows the point.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("flow `{flow}` has no recovery point `{point}` (it has {})", known.join(", "))]
pub struct UnknownRecoveryPoint {
    flow: &'static str,
    point: String,
    known: Vec<&'static str>,
}

impl UnknownRecoveryPoint {
    #[doc(hidden)]
    pub fn new(flow: &'static str, point: &str, known: &[&'static str]) -> Self {
        Self {
            flow,
            point: point.to_owned(),
            known: known.to_vec(),
        }
    }
}

/// What can be stored at a recovery point: any serde type that owns its data.
///
/// Implemented for all types that qualify; what a phase returns must come back from the database
/// unchanged in another process.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be stored at a recovery point",
    label = "this value must be stored with its recovery point",
    note = "a stored value is read back by another process: derive `serde::Serialize` and `serde::Deserialize`, and own the data"
)]
pub trait Payload: Serialize + DeserializeOwned + Send + 'static {}

#[diagnostic::do_not_recommend]
impl<T: Serialize + DeserializeOwned + Send + 'static> Payload for T {}
