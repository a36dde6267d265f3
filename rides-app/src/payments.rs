//! The client of the payment gateway: one call, [`GatewayClient::charge`], and what its failures mean.
//!
//! A charge takes money, so the question after each failure is not "what went wrong" but "may the money have
//! been taken". [`PaymentError::handling`] answers it by one rule: an outcome that is not known is asked for
//! again under the same key, which never charges twice; only an explicit decline is a final answer; anything
//! else is a mistake in this program or its configuration, which no retry mends and no customer should see.
//!
//! What is sent is computed from the arguments alone, so that a retry, years later and from another machine,
//! sends the same bytes under the same key. Neither the API key nor any body appears in errors, logs or
//! `Debug` output.
//!
//! Deliberately absent: retries and backoff. Whoever calls holds the lease and decides.

mod error;

use std::fmt;
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode, Url};
use serde::{Deserialize, Serialize};

pub use self::error::{GatewayConfigError, Handling, PaymentError};

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// No answer about a charge comes near this; a longer one is not read to its end.
const ANSWER_LIMIT: usize = 256 * 1024;

/// A `Retry-After` beyond this is a mistake at the other end.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(3600);

/// Calls a payment gateway that speaks Stripe's charge call.
#[derive(Clone)]
pub struct GatewayClient {
    client: Client,
    charges: Url,
    receipts: Url,
    authorization: HeaderValue,
}

impl fmt::Debug for GatewayClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatewayClient")
            .field("charges", &self.charges.as_str())
            .finish_non_exhaustive()
    }
}

/// What to charge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChargeRequest {
    /// In the currency's smallest unit; at least 1.
    pub amount_cents: i64,
    /// Three letters, such as `usd`.
    pub currency: String,
    /// The card, as a token of the gateway: `tok_visa`.
    pub source: String,
    /// What the customer reads about it.
    pub description: Option<String>,
}

/// Money that was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Charge {
    /// The gateway's id, such as `ch_1`.
    pub id: String,
    /// In the currency's smallest unit; what was asked for.
    pub amount_cents: i64,
}

impl GatewayClient {
    /// A client for the gateway at `base_url` (`http://127.0.0.1:4000`, `https://api.stripe.com`).
    ///
    /// `timeout` bounds one call from its connection to the last byte of its answer.
    ///
    /// # Errors
    ///
    /// When the URL or the API key cannot be used, or the URL wants TLS and this build has none.
    pub fn new(
        base_url: &str,
        api_key: &str,
        timeout: Duration,
    ) -> Result<Self, GatewayConfigError> {
        let base = Url::parse(base_url).map_err(|_| GatewayConfigError::Url("it is not a URL"))?;
        let [charges, receipts] = endpoints(&base)?;

        let mut authorization = HeaderValue::from_str(&format!("Bearer {api_key}"))
            .ok()
            .filter(|_| !api_key.is_empty() && !api_key.contains(char::is_whitespace))
            .ok_or(GatewayConfigError::ApiKey)?;
        authorization.set_sensitive(true);

        // A redirected charge may turn into a GET or end up at a stranger's.
        let mut builder = Client::builder()
            .timeout(timeout)
            .redirect(reqwest::redirect::Policy::none());
        if is_loopback(&charges) {
            // The environment's proxy would look for this gateway on its own machine.
            builder = builder.no_proxy();
        }
        Ok(Self {
            client: builder.build().map_err(GatewayConfigError::Client)?,
            charges,
            receipts,
            authorization,
        })
    }

    /// Charges, once per `key`: the same key and request again give the first charge.
    ///
    /// # Errors
    ///
    /// See [`PaymentError`]; its [`handling`](PaymentError::handling) says what to do.
    pub async fn charge(&self, key: &str, charge: &ChargeRequest) -> Result<Charge, PaymentError> {
        let amount = charge.amount_cents.to_string();
        let mut form = vec![
            ("amount", amount.as_str()),
            ("currency", &charge.currency),
            ("source", &charge.source),
        ];
        if let Some(description) = &charge.description {
            form.push(("description", description));
        }
        let (status, body) = self.post(&self.charges, key, &form).await?;
        charged(status, &body, charge)
    }

    /// Sends a receipt for a charge, once per `key`.
    ///
    /// # Errors
    ///
    /// As [`charge`](Self::charge), without a decline.
    pub async fn send_receipt(
        &self,
        key: &str,
        charge: &str,
        reference: &str,
    ) -> Result<(), PaymentError> {
        let form = [("charge", charge), ("reference", reference)];
        self.post(&self.receipts, key, &form).await.map(|_| ())
    }

    /// A call under a key, and what a success says.
    async fn post(
        &self,
        url: &Url,
        key: &str,
        form: &[(&str, &str)],
    ) -> Result<(StatusCode, Vec<u8>), PaymentError> {
        let mut key = HeaderValue::from_str(key).map_err(|_| PaymentError::Key)?;
        key.set_sensitive(true);
        let response = self
            .client
            .post(url.clone())
            .header(AUTHORIZATION, self.authorization.clone())
            .header(IDEMPOTENCY_KEY, key)
            .form(form)
            .send()
            .await
            .map_err(unreachable)?;
        let status = response.status();
        if status.is_success() {
            return Ok((status, read(response).await?));
        }
        if means_try_again(status) {
            return Err(PaymentError::Unavailable {
                status: status.as_u16(),
                retry_after: retry_after(response.headers()),
            });
        }
        Err(refused(status, &read(response).await?))
    }
}

/// 409 is here and not with the refusals: our own call from before a crash may still be running over there,
/// and about to charge.
fn means_try_again(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status.as_u16(), 408 | 409 | 425 | 429)
}

fn unreachable(error: reqwest::Error) -> PaymentError {
    // The URL is configuration; it may say more than a log should.
    let error = error.without_url();
    match error.is_builder() {
        true => PaymentError::Request(error),
        false => PaymentError::Unreachable(error),
    }
}

/// The body, or nothing of one that is too long to be an answer.
async fn read(mut response: Response) -> Result<Vec<u8>, PaymentError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(unreachable)? {
        if body.len() + chunk.len() > ANSWER_LIMIT {
            return Ok(Vec::new());
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    // The date form depends on both clocks and is not used by payment gateways.
    let seconds = headers
        .get(RETRY_AFTER)?
        .to_str()
        .ok()?
        .trim()
        .parse()
        .ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST_RETRY_AFTER))
}

fn charged(status: StatusCode, body: &[u8], asked: &ChargeRequest) -> Result<Charge, PaymentError> {
    #[derive(Deserialize)]
    struct ChargeObject {
        id: String,
        amount: i64,
        currency: String,
        status: String,
    }

    let charge: ChargeObject = serde_json::from_slice(body)
        .ok()
        .filter(|charge: &ChargeObject| is_identifier(&charge.id))
        .ok_or(PaymentError::Unreadable {
            status: status.as_u16(),
        })?;
    let difference = if charge.amount != asked.amount_cents {
        "amount"
    } else if !charge.currency.eq_ignore_ascii_case(&asked.currency) {
        "currency"
    } else if charge.status != "succeeded" {
        "status"
    } else {
        return Ok(Charge {
            id: charge.id,
            amount_cents: charge.amount,
        });
    };
    Err(PaymentError::OtherCharge {
        id: charge.id,
        difference,
    })
}

fn refused(status: StatusCode, body: &[u8]) -> PaymentError {
    #[derive(Default, Deserialize)]
    struct ErrorObject {
        #[serde(default)]
        error: Fault,
    }
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Fault {
        #[serde(rename = "type")]
        kind: Option<String>,
        code: Option<String>,
        decline_code: Option<String>,
        message: Option<String>,
    }

    let ErrorObject { error } = serde_json::from_slice(body).unwrap_or_default();
    let identifier = |text: Option<String>| text.filter(|text| is_identifier(text));
    let (kind, code) = (identifier(error.kind), identifier(error.code));
    if status == StatusCode::PAYMENT_REQUIRED && kind.as_deref() == Some("card_error") {
        return PaymentError::Declined {
            code: code.unwrap_or_else(|| "card_declined".to_owned()),
            decline_code: identifier(error.decline_code),
            message: error
                .message
                .map(|message| printable(&message))
                .filter(|message| !message.is_empty())
                .unwrap_or_else(|| "The card was declined.".to_owned()),
        };
    }
    PaymentError::Refused {
        status: status.as_u16(),
        code: code.or(kind).unwrap_or_else(|| "no code".to_owned()),
    }
}

/// Ids and codes end up in logs, answers and the database: what does not look like one is not taken over.
fn is_identifier(text: &str) -> bool {
    (1..=255).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'))
}

/// A stranger's sentence, made fit for an answer: no control characters (Postgres cannot store a NUL), and
/// not endless.
fn printable(message: &str) -> String {
    message
        .chars()
        .filter(|character| !character.is_control())
        .take(300)
        .collect()
}

/// Where charges are made and receipts are sent.
fn endpoints(base: &Url) -> Result<[Url; 2], GatewayConfigError> {
    match base.scheme() {
        "http" => {}
        "https" if cfg!(feature = "tls") => {}
        "https" => return Err(GatewayConfigError::TlsNotBuilt),
        _ => return Err(GatewayConfigError::Url("it is neither http nor https")),
    }
    if !base.username().is_empty() || base.password().is_some() {
        return Err(GatewayConfigError::Url(
            "it has a user name or password in it",
        ));
    }
    if base.query().is_some() || base.fragment().is_some() {
        return Err(GatewayConfigError::Url("it has a query or fragment in it"));
    }
    let root = base.path().trim_end_matches('/');
    Ok(["charges", "receipts"].map(|call| {
        let mut url = base.clone();
        url.set_path(&format!("{root}/v1/{call}"));
        url
    }))
}

fn is_loopback(url: &Url) -> bool {
    url.host_str().is_some_and(|host| {
        let address = host.trim_start_matches('[').trim_end_matches(']');
        host == "localhost"
            || address
                .parse()
                .is_ok_and(|address: std::net::IpAddr| address.is_loopback())
    })
}

#[cfg(test)]
mod tests;
