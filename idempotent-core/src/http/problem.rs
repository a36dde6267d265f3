//! Errors as `application/problem+json` (RFC 9457), each with a `code` that programs can rely on.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::json;

use super::Contract;
use crate::reply::Reply;

/// A problem document. The title says what kind of problem it is, the detail what to do about it.
///
/// ```
/// use http::StatusCode;
/// use idempotent_core::http::Problem;
///
/// let problem = Problem::new(StatusCode::NOT_FOUND, "ride_unknown", "There is no such ride")
///     .detail("Only the user who asked for a ride can see it.");
/// assert_eq!(problem.code(), "ride_unknown");
/// ```
#[derive(Debug, Clone)]
#[must_use = "a problem is a response: return it"]
pub struct Problem {
    status: StatusCode,
    code: &'static str,
    title: &'static str,
    detail: Option<String>,
    retry_after: Option<Duration>,
    close: bool,
}

impl Problem {
    /// A problem with a stable code.
    pub fn new(status: StatusCode, code: &'static str, title: &'static str) -> Self {
        Self {
            status,
            code,
            title,
            detail: None,
            retry_after: None,
            close: false,
        }
    }

    /// What happened this time, and what to do.
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// When a retry makes sense: sent as whole seconds, rounded up, at least one.
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// The connection is not fit for another request: the rest of this one was not read.
    #[cfg(feature = "axum")]
    pub(super) fn closing_the_connection(mut self) -> Self {
        self.close = true;
        self
    }

    /// The stable code.
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// The status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// What happened, in a sentence or two.
    pub(super) fn message(&self) -> String {
        match &self.detail {
            Some(detail) => format!("{}. {detail}", self.title),
            None => format!("{}.", self.title),
        }
    }

    /// The problem as a reply, for a flow whose final answer it is. It is described at this page, as
    /// those of a contract [documented there](Contract::documented_at) are.
    ///
    /// ```
    /// use http::StatusCode;
    /// use idempotent_core::http::Problem;
    ///
    /// let declined = Problem::new(StatusCode::PAYMENT_REQUIRED, "card_declined", "The card was declined");
    /// let reply = declined.to_reply("/problems");
    /// ```
    pub fn to_reply(&self, page: &str) -> Reply<serde_json::Value> {
        let described_at = described_at(page, self.code);
        Reply::new(self.status, self.document(&described_at))
            .header("content-type", "application/problem+json")
            .header("link", described_by(&described_at))
    }

    pub(super) fn document(&self, described_at: &str) -> serde_json::Value {
        let mut document = json!({
            "type": described_at,
            "title": self.title,
            "status": self.status.as_u16(),
            "code": self.code,
        });
        if let Some(detail) = &self.detail {
            document["detail"] = detail.as_str().into();
        }
        document
    }

    /// The response, as this contract has it.
    pub fn to_response(&self, contract: &Contract) -> Response<Bytes> {
        let described_at = contract.described_at(self.code);
        let profile = contract.profile();
        let body = profile.document(self, &described_at).to_string();
        let mut response = Response::new(Bytes::from(body));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, profile.content_type());
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Ok(link) = HeaderValue::try_from(described_by(&described_at)) {
            headers.insert(header::LINK, link);
        }
        if let Some(after) = self.retry_after {
            headers.insert(header::RETRY_AFTER, retry_after_seconds(after).into());
        }
        if self.close {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// Where a page describes the problem of this code.
pub(super) fn described_at(page: &str, code: &str) -> String {
    format!("{page}#{code}")
}

/// The `Link` to it.
fn described_by(described_at: &str) -> String {
    format!("<{described_at}>; rel=\"describedby\"")
}

/// A day, in seconds. Clients that would wait longer had better ask.
const LONGEST_RETRY_AFTER: u64 = 24 * 3600;

pub(super) fn retry_after_seconds(after: Duration) -> u64 {
    let rounded_up = after
        .as_secs()
        .saturating_add(u64::from(after.subsec_nanos() > 0));
    rounded_up.clamp(1, LONGEST_RETRY_AFTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_rounded_up_and_at_least_one() {
        let seconds = |millis| retry_after_seconds(Duration::from_millis(millis));
        assert_eq!(
            [
                seconds(0),
                seconds(1),
                seconds(1000),
                seconds(1001),
                seconds(14_500)
            ],
            [1, 1, 1, 2, 15]
        );
    }
}
