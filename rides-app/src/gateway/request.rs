//! What the gateway accepts: who calls, under which idempotency key, and for which charge.
//!
//! Everything is checked here, before the ledger is touched. A refused request is therefore not remembered,
//! and does not bind its key to its parameters: as at Stripe, only what began to run is. Each refusal is the
//! [`Answer`] to send.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use axum::extract::rejection::FormRejection;
use axum::http::{HeaderMap, StatusCode, header};
use sha2::{Digest, Sha256};

use super::answer::Answer;

type Pairs = Vec<(String, String)>;

/// The longest delay a `tok_slow_<ms>` may ask for.
const LONGEST_DELAY: Duration = Duration::from_secs(600);

/// Who calls: the SHA-256 of the API key, which is all that is ever stored or compared.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Account(pub(super) [u8; 32]);

impl fmt::Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Account(..)")
    }
}

impl Account {
    pub(super) fn from_headers(headers: &HeaderMap) -> Result<Self, Answer> {
        let key = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, key)| key.trim())
            .filter(|key| !key.is_empty())
            .ok_or_else(Answer::unauthorized)?;
        Ok(Self(Sha256::digest(key).into()))
    }
}

/// The `Idempotency-Key` header, if there is one: 1 to 255 visible ASCII characters or spaces, once.
pub(super) fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Answer> {
    let mut values = headers.get_all("idempotency-key").iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    match value.to_str() {
        Ok(key) if (1..=255).contains(&key.len()) && values.next().is_none() => {
            Ok(Some(key.to_owned()))
        }
        _ => Err(Answer::invalid(
            "parameter_invalid_string",
            None,
            "Send one Idempotency-Key header of 1 to 255 ASCII characters.".to_owned(),
        )),
    }
}

/// A valid `POST /v1/charges`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ChargeCall {
    pub(super) amount: i64,
    pub(super) currency: String,
    pub(super) source: String,
    pub(super) card: TestCard,
    pub(super) description: Option<String>,
    pub(super) metadata: BTreeMap<String, String>,
    /// SHA-256 of all parameters as sent: what "the same parameters" means for a key.
    pub(super) fingerprint: [u8; 32],
}

impl ChargeCall {
    pub(super) fn from_form(form: Result<Pairs, FormRejection>) -> Result<Self, Answer> {
        Self::from_pairs(form.map_err(|rejection| {
            let status = match rejection.status() {
                StatusCode::PAYLOAD_TOO_LARGE => StatusCode::PAYLOAD_TOO_LARGE,
                _ => StatusCode::BAD_REQUEST,
            };
            let message = "Send the parameters as a form (application/x-www-form-urlencoded).";
            Answer::refused(status, "parameter_invalid_form", None, message.to_owned())
        })?)
    }

    fn from_pairs(mut pairs: Pairs) -> Result<Self, Answer> {
        // The order of parameters means nothing. Sorted, equal names are neighbours too.
        pairs.sort();
        if let Some(twice) = pairs.windows(2).find(|two| two[0].0 == two[1].0) {
            return Err(invalid_string(&twice[0].0, "is given twice"));
        }
        if let Some((name, _)) = pairs
            .iter()
            .find(|(name, value)| name.contains('\0') || value.contains('\0'))
        {
            return Err(invalid_string(
                &name.replace('\0', ""),
                "contains a NUL character",
            ));
        }
        let fingerprint = fingerprint(&pairs);

        let mut known = BTreeMap::new();
        let mut metadata = BTreeMap::new();
        for (name, value) in pairs {
            if let Some(label) = metadata_label(&name) {
                metadata.insert(label.to_owned(), value);
            } else if matches!(
                name.as_str(),
                "amount" | "currency" | "source" | "description"
            ) {
                known.insert(name, value);
            } else {
                return Err(Answer::invalid(
                    "parameter_unknown",
                    Some(&name),
                    format!(
                        "Received unknown parameter: {name}. Known are amount, currency, source, \
                         description and metadata[...]."
                    ),
                ));
            }
        }
        let mut required = |name: &'static str| {
            known
                .remove(name)
                .filter(|value| !value.is_empty())
                .ok_or_else(|| {
                    Answer::invalid(
                        "parameter_missing",
                        Some(name),
                        format!("Missing required param: {name}."),
                    )
                })
        };
        let amount = amount(&required("amount")?)?;
        let currency = currency(&required("currency")?)?;
        let source = required("source")?;
        Ok(Self {
            amount,
            currency,
            card: TestCard::from_token(&source)?,
            source,
            description: known.remove("description"),
            metadata: checked_metadata(metadata)?,
            fingerprint,
        })
    }
}

/// What a test card's token makes the gateway do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TestCard {
    Works,
    Declined,
    /// The gateway fails twice before it charges.
    Failing,
    /// Charged, but never answered.
    Hanging,
    /// Charged after a while.
    Slow(Duration),
}

impl TestCard {
    fn from_token(token: &str) -> Result<Self, Answer> {
        match token {
            "tok_visa" => Ok(Self::Works),
            "tok_chargeDeclined" => Ok(Self::Declined),
            "tok_gatewayError" => Ok(Self::Failing),
            "tok_gatewayHang" => Ok(Self::Hanging),
            _ => token
                .strip_prefix("tok_slow_")
                .and_then(digits)
                .and_then(|ms| u64::try_from(ms).ok())
                .map(Duration::from_millis)
                .filter(|delay| *delay <= LONGEST_DELAY)
                .map(Self::Slow)
                .ok_or_else(|| {
                    Answer::invalid(
                        "resource_missing",
                        Some("source"),
                        "No such token. Known are tok_visa, tok_chargeDeclined, tok_gatewayError, \
                         tok_gatewayHang and tok_slow_<ms> with at most 600000 ms."
                            .to_owned(),
                    )
                }),
        }
    }

    /// How long the call waits on purpose.
    pub(super) fn delay(self) -> Duration {
        match self {
            Self::Slow(delay) => delay,
            _ => Duration::ZERO,
        }
    }
}

/// The `limit` of a list: 1 to 100, or 10.
pub(super) fn limit(pairs: &[(String, String)]) -> Result<i64, Answer> {
    let mut limit = 10;
    for (name, value) in pairs {
        if name != "limit" {
            return Err(Answer::invalid(
                "parameter_unknown",
                Some(name),
                format!("Received unknown parameter: {name}. Known is limit."),
            ));
        }
        limit = digits(value)
            .filter(|limit| (1..=100).contains(limit))
            .ok_or_else(|| {
                Answer::invalid(
                    "parameter_invalid_integer",
                    Some("limit"),
                    "This value must be an integer from 1 to 100.".to_owned(),
                )
            })?;
    }
    Ok(limit)
}

fn amount(value: &str) -> Result<i64, Answer> {
    digits(value).filter(|amount| *amount >= 1).ok_or_else(|| {
        Answer::invalid(
            "parameter_invalid_integer",
            Some("amount"),
            "Invalid positive integer: the amount is in the currency's smallest unit, at least 1."
                .to_owned(),
        )
    })
}

/// Digits only: `parse` alone would take a plus sign too.
fn digits(value: &str) -> Option<i64> {
    value
        .bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| value.parse().ok())
        .flatten()
}

fn currency(value: &str) -> Result<String, Answer> {
    if value.len() == 3 && value.bytes().all(|byte| byte.is_ascii_alphabetic()) {
        return Ok(value.to_ascii_lowercase());
    }
    Err(invalid_string("currency", "is not a three-letter ISO code"))
}

fn metadata_label(name: &str) -> Option<&str> {
    name.strip_prefix("metadata[")?.strip_suffix(']')
}

/// Stripe's limits.
fn checked_metadata(
    metadata: BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, Answer> {
    let fits = |(label, value): (&String, &String)| {
        (1..=40).contains(&label.chars().count()) && value.chars().count() <= 500
    };
    if metadata.len() <= 50 && metadata.iter().all(fits) {
        return Ok(metadata);
    }
    Err(invalid_string(
        "metadata",
        "has more than 50 entries, or a name over 40 or a value over 500 characters",
    ))
}

fn invalid_string(param: &str, what: &str) -> Answer {
    Answer::invalid(
        "parameter_invalid_string",
        Some(param),
        format!("The parameter {param} {what}."),
    )
}

/// Each part goes in behind its length, so that no two lists of parameters read the same.
fn fingerprint(sorted: &[(String, String)]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in sorted.iter().flat_map(|(name, value)| [name, value]) {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests;
