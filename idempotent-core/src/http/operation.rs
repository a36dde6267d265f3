//! The state of an operation, for a client that gave up waiting and wants to know.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

use super::{Contract, Problem};
use crate::engine::{Handle, Operation, OperationState};
use crate::flow::Flow;
use crate::key::Key;
use crate::reply::StoredReply;

impl Contract {
    /// Answers where the request with this key stands, as JSON: `state` is `running`, `waiting` (for a
    /// retry, or for the completer), `finished` or `stuck`, with the `recoveryPoint` and the `attempt`
    /// of one that is under way and the `reply` of one that has ended. 404 (`operation_unknown`) where
    /// there is none of this user.
    ///
    /// It only looks. The caller has authenticated the user whom the key names, and authorised them as
    /// for the request itself.
    ///
    /// ```no_run
    /// # mod doc_flow { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/doc_flow.rs")); }
    /// # use doc_flow::RideFlow;
    /// use bytes::Bytes;
    /// use http::Response;
    /// use idempotent_core::http::Contract;
    /// use idempotent_core::{Handle, Key, KeyError};
    ///
    /// // GET /api/rides/by-key/{key}
    /// async fn ride_by_key(
    ///     contract: &Contract,
    ///     rides: &Handle<RideFlow>,
    ///     user: &str,
    ///     key: &str,
    /// ) -> Result<Response<Bytes>, KeyError> {
    ///     let key = Key::new(user, "/api/rides", key)?;
    ///     Ok(contract.operation(rides, &key).await)
    /// }
    /// ```
    pub async fn operation<F: Flow>(&self, flow: &Handle<F>, key: &Key) -> Response<Bytes> {
        match flow.look(key).await {
            Ok(Some(operation)) => as_json(&operation),
            Ok(None) => Problem::new(
                StatusCode::NOT_FOUND,
                "operation_unknown",
                "No request with this key is known",
            )
            .detail("It did not arrive, or its answer is past its retention. It is safe to send it with this key.")
            .to_response(self),
            Err(error) => self.refuse(F::graph().flow(), &error),
        }
    }
}

fn as_json(operation: &Operation) -> Response<Bytes> {
    let under_way = |state: &str| {
        json!({
            "state": state,
            "recoveryPoint": operation.recovery_point,
            "attempt": operation.attempt,
        })
    };
    let document = match &operation.state {
        OperationState::Running => under_way("running"),
        OperationState::Waiting => under_way("waiting"),
        OperationState::Stuck => under_way("stuck"),
        OperationState::Finished(reply) => json!({
            "state": "finished",
            "recoveryPoint": operation.recovery_point,
            "reply": reply_as_json(reply),
        }),
    };
    let mut response = Response::new(Bytes::from(document.to_string()));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// The body as JSON where it is, else as text; null where it is neither, as only a replay of the
/// request itself gives bytes.
fn reply_as_json(reply: &StoredReply) -> Value {
    let headers: Vec<(&str, &str)> = reply
        .headers()
        .iter()
        .filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?)))
        .collect();
    let body = serde_json::from_slice(reply.body())
        .unwrap_or_else(|_| std::str::from_utf8(reply.body()).map_or(Value::Null, Value::from));
    json!({
        "status": reply.status().as_u16(),
        "headers": headers,
        "body": body,
    })
}
