//! What the gateway says: charges and errors, in Stripe's shapes.
//!
//! An [`Answer`] is complete before it is stored or sent, so the first answer and its replay are the same
//! bytes.

use std::collections::BTreeMap;

use axum::body::Body;
use axum::http::{HeaderValue, Method, Response, StatusCode, header};
use axum::response::IntoResponse;
use serde::Serialize;

use super::ledger::{Charge, Receipt};

/// A response, ready to be remembered, replayed or sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) body: Vec<u8>,
    pub(super) replayed: bool,
}

impl IntoResponse for Answer {
    fn into_response(self) -> axum::response::Response {
        let mut response = Response::new(Body::from(self.body));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        if self.replayed {
            headers.insert("idempotent-replayed", HeaderValue::from_static("true"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(
                header::WWW_AUTHENTICATE,
                HeaderValue::from_static("Bearer realm=\"gateway\""),
            );
        }
        response
    }
}

impl Answer {
    /// A remembered answer, given again.
    pub(super) fn replayed(status: i16, body: Vec<u8>) -> sqlx::Result<Self> {
        let status = u16::try_from(status)
            .ok()
            .and_then(|status| StatusCode::from_u16(status).ok())
            .ok_or_else(|| sqlx::Error::Decode("a remembered status that HTTP lacks".into()))?;
        Ok(Self {
            status,
            body,
            replayed: true,
        })
    }

    /// The status as it is remembered.
    pub(super) fn status_column(&self) -> i16 {
        // Three digits fit.
        self.status.as_u16() as i16
    }

    pub(super) fn charge(charge: &Charge) -> Self {
        Self::json(StatusCode::OK, &ChargeObject::from(charge))
    }

    pub(super) fn receipt(receipt: &Receipt) -> Self {
        let Receipt {
            id,
            charge,
            reference,
        } = receipt;
        let value = serde_json::json!({
            "id": id, "object": "receipt", "charge": charge, "reference": reference,
        });
        Self::json(StatusCode::OK, &value)
    }

    pub(super) fn charges(charges: &[Charge], has_more: bool) -> Self {
        let list = List {
            object: "list",
            url: "/v1/charges",
            has_more,
            data: charges.iter().map(ChargeObject::from).collect(),
        };
        Self::json(StatusCode::OK, &list)
    }

    /// A request that can never succeed as it is.
    pub(super) fn invalid(code: &'static str, param: Option<&str>, message: String) -> Self {
        Self::refused(StatusCode::BAD_REQUEST, code, param, message)
    }

    /// As [`invalid`](Self::invalid), with another status.
    pub(super) fn refused(
        status: StatusCode,
        code: &'static str,
        param: Option<&str>,
        message: String,
    ) -> Self {
        Self::error(
            status,
            Fault {
                code: Some(code),
                param,
                ..Fault::new("invalid_request_error", message)
            },
        )
    }

    pub(super) fn unauthorized() -> Self {
        let message = "You did not provide an API key. Send it in the Authorization header as \
                       'Authorization: Bearer sk_...'.";
        Self::error(
            StatusCode::UNAUTHORIZED,
            Fault::new("invalid_request_error", message.to_owned()),
        )
    }

    pub(super) fn unknown_url(method: &Method, path: &str) -> Self {
        let message = format!("Unrecognized request URL ({method}: {path}).");
        Self::error(
            StatusCode::NOT_FOUND,
            Fault::new("invalid_request_error", message),
        )
    }

    pub(super) fn unknown_charge(id: &str) -> Self {
        Self::refused(
            StatusCode::NOT_FOUND,
            "resource_missing",
            Some("id"),
            format!("No such charge: '{id}'"),
        )
    }

    pub(super) fn declined() -> Self {
        Self::error(
            StatusCode::PAYMENT_REQUIRED,
            Fault {
                code: Some("card_declined"),
                decline_code: Some("generic_decline"),
                ..Fault::new("card_error", "Your card was declined.".to_owned())
            },
        )
    }

    pub(super) fn key_in_use() -> Self {
        let message = "There is currently another in-progress request using this idempotency key. \
                       Try again later with the same key.";
        Self::error(
            StatusCode::CONFLICT,
            Fault {
                code: Some("idempotency_key_in_use"),
                ..Fault::new("idempotency_error", message.to_owned())
            },
        )
    }

    pub(super) fn other_parameters() -> Self {
        let message = "Keys for idempotent requests can only be used with the same parameters they were \
                       first used with. Use another key if you meant another request.";
        Self::error(
            StatusCode::BAD_REQUEST,
            Fault::new("idempotency_error", message.to_owned()),
        )
    }

    /// The gateway failed; this is never remembered, so the same key may be sent again.
    pub(super) fn failed() -> Self {
        Self::unavailable(
            StatusCode::INTERNAL_SERVER_ERROR,
            "The gateway failed. Whether the charge went through is not known here: repeat the call with \
             the same idempotency key to find out, which never charges twice.",
        )
    }

    /// The server stops; never remembered either.
    pub(super) fn stopping() -> Self {
        Self::unavailable(
            StatusCode::SERVICE_UNAVAILABLE,
            "The gateway is stopping. Repeat the call with the same idempotency key.",
        )
    }

    fn unavailable(status: StatusCode, message: &str) -> Self {
        Self::error(status, Fault::new("api_error", message.to_owned()))
    }

    fn error(status: StatusCode, error: Fault<'_>) -> Self {
        Self::json(status, &ErrorObject { error })
    }

    fn json(status: StatusCode, value: &impl Serialize) -> Self {
        // Strings, numbers and maps with string keys: there is nothing here that JSON cannot hold.
        let mut body = serde_json::to_vec_pretty(value).unwrap_or_default();
        body.push(b'\n');
        Self {
            status,
            body,
            replayed: false,
        }
    }
}

#[derive(Serialize)]
struct ErrorObject<'a> {
    error: Fault<'a>,
}

#[derive(Serialize)]
struct Fault<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decline_code: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    param: Option<&'a str>,
    message: String,
}

impl Fault<'_> {
    fn new(kind: &'static str, message: String) -> Self {
        Self {
            kind,
            code: None,
            decline_code: None,
            param: None,
            message,
        }
    }
}

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    url: &'static str,
    has_more: bool,
    data: Vec<ChargeObject<'a>>,
}

/// What Stripe's charge object has in common with ours, under its names.
#[derive(Serialize)]
struct ChargeObject<'a> {
    id: &'a str,
    object: &'static str,
    amount: i64,
    amount_captured: i64,
    amount_refunded: i64,
    captured: bool,
    created: i64,
    currency: &'a str,
    description: Option<&'a str>,
    livemode: bool,
    metadata: &'a BTreeMap<String, String>,
    paid: bool,
    refunded: bool,
    source: Source<'a>,
    status: &'static str,
}

#[derive(Serialize)]
struct Source<'a> {
    id: &'a str,
    object: &'static str,
    brand: &'static str,
    last4: &'static str,
}

impl<'a> From<&'a Charge> for ChargeObject<'a> {
    fn from(charge: &'a Charge) -> Self {
        Self {
            id: &charge.id,
            object: "charge",
            amount: charge.amount,
            amount_captured: charge.amount,
            amount_refunded: 0,
            captured: true,
            created: charge.created,
            currency: &charge.currency,
            description: charge.description.as_deref(),
            livemode: false,
            metadata: &charge.metadata,
            paid: true,
            refunded: false,
            source: Source {
                id: &charge.source,
                object: "card",
                brand: "Visa",
                last4: "4242",
            },
            status: "succeeded",
        }
    }
}
