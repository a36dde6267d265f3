//! The answer of a flow: what the last phase returns ([`Reply`]), and the form in which it is stored
//! and replayed ([`StoredReply`]: status, ordered headers, body bytes). The first answer is rendered
//! from the stored form too, so a replay cannot differ from it by a byte.

use std::borrow::Cow;
use std::fmt;

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::{Response, StatusCode};
use serde::Serialize;
use serde_json::Value;
use sqlx::types::Json;

use crate::store::StoredResponse;

/// What a flow answers when it finishes (or rejects): status, headers, and a body sent as JSON.
///
/// ```
/// use idempotent_core::Reply;
///
/// #[derive(serde::Serialize)]
/// struct Receipt { amount: i64 }
///
/// let reply = Reply::created(Receipt { amount: 2000 }).header("location", "/api/rides/1");
/// # let _ = reply;
/// ```
#[derive(Debug, Clone)]
#[must_use = "a reply is what the flow answers: return it from the phase that finishes"]
pub struct Reply<T> {
    status: StatusCode,
    headers: Vec<(String, String)>,
    body: Option<T>,
}

/// Headers that describe one transmission, or one client's session, and so may not be replayed.
static NEVER_STORED: [HeaderName; 11] = [
    header::SET_COOKIE,
    header::DATE,
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::PROXY_AUTHENTICATE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// Marks a replay whose body was too long to be stored: `true`.
pub(crate) static TRUNCATED: HeaderName = HeaderName::from_static("idempotent-replay-truncated");

impl<T> Reply<T> {
    /// A reply with this status and body.
    pub fn new(status: StatusCode, body: T) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: Some(body),
        }
    }

    /// 200 with a body.
    pub fn ok(body: T) -> Self {
        Self::new(StatusCode::OK, body)
    }

    /// 201 with a body. Say where the new thing is: `.header("location", …)`.
    pub fn created(body: T) -> Self {
        Self::new(StatusCode::CREATED, body)
    }

    /// 202 with a body.
    pub fn accepted(body: T) -> Self {
        Self::new(StatusCode::ACCEPTED, body)
    }

    /// Adds a header. `content-type` is `application/json` unless given here.
    ///
    /// A header that is malformed, or that must not be replayed (`set-cookie`, `date`, hop-by-hop),
    /// fails the phase that returns the reply: it is a bug of the flow.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }
}

impl Reply<()> {
    /// A reply without a body, such as 204.
    pub fn empty(status: StatusCode) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: None,
        }
    }
}

impl Reply<()> {
    /// The form in which a reply with these very bytes as its body is stored: for one that is not
    /// JSON, or that was written by hand. Say what they are: `.header("content-type", …)`.
    ///
    /// # Errors
    ///
    /// When a header cannot be replayed; see [`UnstorableReply`].
    pub fn store_with_body(self, body: impl Into<Bytes>) -> Result<StoredReply, UnstorableReply> {
        let mut reply = self.store()?;
        reply.body = body.into();
        Ok(reply)
    }
}

/// Why a reply cannot be stored and replayed. A bug of the flow that made it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnstorableReply {
    /// The name or the value is not a header.
    #[error("`{name}` is not a valid header, or its value is not")]
    MalformedHeader {
        /// The header's name, as the flow wrote it.
        name: String,
    },
    /// The header belongs to one transmission only.
    #[error("the header `{name}` must not be replayed: take it out of the flow's reply")]
    TransientHeader {
        /// The header's name.
        name: HeaderName,
    },
    /// An informational status is not an answer.
    #[error("the status {0} is not a final answer")]
    NotFinal(StatusCode),
    /// The body cannot be written as JSON.
    #[error("the body cannot be written as JSON: {0}")]
    Body(#[source] serde_json::Error),
}

impl<T: Serialize> Reply<T> {
    /// The form in which the reply is stored, and rendered every time.
    ///
    /// # Errors
    ///
    /// When a header cannot be replayed or the body cannot be written as JSON; see
    /// [`UnstorableReply`].
    pub fn store(self) -> Result<StoredReply, UnstorableReply> {
        if self.status.is_informational() {
            return Err(UnstorableReply::NotFinal(self.status));
        }
        let mut headers = self
            .headers
            .into_iter()
            .map(parse_header)
            .collect::<Result<Vec<_>, _>>()?;
        let body = match &self.body {
            Some(body) => {
                if !headers.iter().any(|(name, _)| name == header::CONTENT_TYPE) {
                    headers.insert(
                        0,
                        (
                            header::CONTENT_TYPE,
                            HeaderValue::from_static("application/json"),
                        ),
                    );
                }
                serde_json::to_vec(body).map_err(UnstorableReply::Body)?
            }
            None => Vec::new(),
        };
        Ok(StoredReply {
            status: self.status,
            headers,
            body: Bytes::from(body),
        })
    }
}

fn parse_header(
    (name, value): (String, String),
) -> Result<(HeaderName, HeaderValue), UnstorableReply> {
    match (HeaderName::try_from(&name), HeaderValue::from_str(&value)) {
        (Ok(name), _) if NEVER_STORED.contains(&name) => {
            Err(UnstorableReply::TransientHeader { name })
        }
        (Ok(name), Ok(value)) if value.to_str().is_ok() => Ok((name, value)),
        _ => Err(UnstorableReply::MalformedHeader { name }),
    }
}

/// The stored answer of a finished key.
#[derive(Clone, PartialEq, Eq)]
pub struct StoredReply {
    status: StatusCode,
    headers: Vec<(HeaderName, HeaderValue)>,
    body: Bytes,
}

/// What was answered is the client's; it stays out of logs.
impl fmt::Debug for StoredReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredReply")
            .field("status", &self.status)
            .field("bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

impl StoredReply {
    /// Of a response, with those of these headers that can be stored and replayed.
    #[cfg(feature = "axum")]
    pub(crate) fn of_parts<'a>(
        status: StatusCode,
        headers: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)>,
        body: Bytes,
    ) -> Self {
        let headers = headers
            .filter(|(name, value)| !NEVER_STORED.contains(name) && value.to_str().is_ok())
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        Self {
            status,
            headers,
            body,
        }
    }

    /// The status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The headers, in their order.
    pub fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        &self.headers
    }

    /// The body's bytes.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// What is stored of the reply where at most so many bytes of a body are: the reply itself, or
    /// without its body and marked so.
    pub(crate) fn within(&self, limit: usize) -> Cow<'_, Self> {
        if self.body.len() <= limit {
            return Cow::Borrowed(self);
        }
        tracing::info!(
            bytes = self.body.len(),
            limit,
            "the reply is longer than what is stored; a retry gets its status and headers only"
        );
        Cow::Owned(self.without_body())
    }

    /// The reply without its body, marked so.
    pub(crate) fn without_body(&self) -> Self {
        let mut headers = self.headers.clone();
        headers.push((TRUNCATED.clone(), HeaderValue::from_static("true")));
        Self {
            status: self.status,
            headers,
            body: Bytes::new(),
        }
    }

    /// The reply as an HTTP response.
    pub fn to_response(&self) -> Response<Bytes> {
        let mut response = Response::new(self.body.clone());
        *response.status_mut() = self.status;
        for (name, value) in &self.headers {
            response.headers_mut().append(name.clone(), value.clone());
        }
        response
    }

    /// The headers as they are stored: an array of pairs, since jsonb does not keep the order of an
    /// object's members.
    pub(crate) fn stored_headers(&self) -> Value {
        self.headers
            .iter()
            .map(|(name, value)| {
                Value::from(vec![name.as_str(), value.to_str().unwrap_or_default()])
            })
            .collect()
    }

    /// The stored columns as a reply; none when they do not hold one.
    pub(crate) fn from_stored(stored: StoredResponse) -> Option<Self> {
        let status = StatusCode::from_u16(u16::try_from(stored.status).ok()?).ok()?;
        let Json(pairs) = stored.headers;
        let headers = pairs
            .into_iter()
            .map(|(name, value)| Some((name.parse().ok()?, value.try_into().ok()?)))
            .collect::<Option<Vec<_>>>()?;
        let body = Bytes::from(stored.body);
        Some(Self {
            status,
            headers,
            body,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored_and_read_back(reply: &StoredReply) -> Option<StoredReply> {
        let status = i16::try_from(reply.status().as_u16()).ok()?;
        let headers = Json(serde_json::from_value(reply.stored_headers()).ok()?);
        let body = reply.body().to_vec();
        StoredReply::from_stored(StoredResponse {
            status,
            headers,
            body,
        })
    }

    #[test]
    fn storage_keeps_status_header_order_and_bytes() {
        let reply = Reply::created(vec![1, 2])
            .header("location", "/rides/1")
            .header("link", "</a>; rel=a")
            .header("etag", "\"1\"")
            .header("link", "</b>; rel=b")
            .store()
            .unwrap();

        assert_eq!(stored_and_read_back(&reply).as_ref(), Some(&reply));
        let names: Vec<_> = reply
            .headers()
            .iter()
            .map(|(name, _)| name.as_str())
            .collect();
        assert_eq!(names, ["content-type", "location", "link", "etag", "link"]);
        assert_eq!(&reply.body()[..], b"[1,2]");
    }

    #[test]
    fn a_content_type_of_the_flow_wins() {
        let reply = Reply::ok(1)
            .header("Content-Type", "application/problem+json")
            .store()
            .unwrap();
        assert_eq!(reply.headers().len(), 1);
    }

    #[test]
    fn an_empty_reply_has_no_content_type() {
        let reply = Reply::empty(StatusCode::NO_CONTENT).store().unwrap();
        assert!(reply.headers().is_empty() && reply.body().is_empty());
    }

    #[test]
    fn what_may_not_be_replayed_is_refused() {
        for name in [
            "Set-Cookie",
            "date",
            "Transfer-Encoding",
            "keep-alive",
            "content-length",
        ] {
            let refused = Reply::ok(1).header(name, "x").store();
            assert!(
                matches!(refused, Err(UnstorableReply::TransientHeader { .. })),
                "{name}"
            );
        }
        for (name, value) in [("a b", "x"), ("x", "a\nb"), ("x", "é")] {
            let refused = Reply::ok(1).header(name, value).store();
            assert!(
                matches!(refused, Err(UnstorableReply::MalformedHeader { .. })),
                "{name}"
            );
        }
        assert!(matches!(
            Reply::new(StatusCode::CONTINUE, 1).store(),
            Err(UnstorableReply::NotFinal(_))
        ));
    }
}
