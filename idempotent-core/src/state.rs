//! The values a flow carries from point to point, by point name, as they lie in the `state` column.
//!
//! A value is encoded as soon as a phase returns it and decoded by the phase that takes it, also
//! when nothing was interrupted. So a type that does not survive storage (a float that is not a
//! number, a skipped field that is needed) is found by the first request and not by the first crash.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::flow::Payload;
use crate::graph::Graph;
use crate::json::into_storable;

/// The stored values of one flow, by the name of the point at which each was reached.
#[doc(hidden)]
#[derive(Clone, Default, PartialEq)]
#[expect(
    missing_debug_implementations,
    reason = "it holds the values of a request, which stay out of logs"
)]
pub struct State(Map<String, Value>);

/// A stored value that this version of the flow cannot read.
#[doc(hidden)]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the value stored at recovery point `{point}` cannot be read: {reason}")]
pub struct Undecodable {
    point: String,
    reason: String,
}

impl State {
    /// Reads the value of a point. A unit value is stored as `null`, and is not the same as none.
    pub fn decode<T: Payload>(&self, point: &'static str) -> Result<T, Undecodable> {
        let undecodable = |reason: String| Undecodable {
            point: point.to_owned(),
            reason,
        };
        let value = self
            .0
            .get(point)
            .ok_or_else(|| undecodable("there is none".to_owned()))?;
        T::deserialize(value).map_err(|error| undecodable(error.to_string()))
    }

    /// The values to store at `point`, to which the flow moves with `value`: those it keeps.
    pub(crate) fn moved_to(
        &self,
        point: &'static str,
        keeps: &[&str],
        value: &impl Serialize,
    ) -> Result<Self, String> {
        let value = serde_json::to_value(value).map_err(|error| error.to_string())?;
        let value = into_storable(value).map_err(|error| error.to_string())?;
        let mut kept = self.0.clone();
        kept.retain(|name, _| keeps.contains(&name.as_str()));
        kept.insert(point.to_owned(), value);
        Ok(Self(kept))
    }

    /// The stored values, under the names that their points have today.
    pub(crate) fn from_stored(graph: &Graph, stored: Value) -> Result<Self, Undecodable> {
        match stored {
            Value::Object(values) => {
                let today = values.into_iter().map(|(name, value)| {
                    let point = graph.stored_point(&name);
                    (
                        point.map_or(name, |(point, _)| point.name().to_owned()),
                        value,
                    )
                });
                Ok(Self(today.collect()))
            }
            _ => Err(Undecodable {
                point: "*".to_owned(),
                reason: "the stored state is not an object".to_owned(),
            }),
        }
    }

    pub(crate) fn as_value(&self) -> Value {
        Value::Object(self.0.clone())
    }
}
