//! What can go wrong with a charge, and what to do about each.

use std::time::Duration;

/// The client cannot be built as configured. Nothing was sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatewayConfigError {
    /// The base URL is unusable. It is not shown: a mistyped one may hold a password.
    #[error("the gateway's URL cannot be used: {0}; give one like https://api.stripe.com")]
    Url(&'static str),

    /// The API key is empty, or has characters that no header can carry.
    #[error(
        "the gateway's API key cannot be used: it is empty, or has spaces or control characters in it"
    )]
    ApiKey,

    /// This build has no TLS.
    #[error(
        "the gateway's URL is https, but this build has no TLS: \
         build rides-app with `--features tls`, or use an http URL"
    )]
    TlsNotBuilt,

    /// The HTTP client could not be set up, for instance because the system's certificates are missing.
    #[error("the HTTP client for the gateway could not be set up")]
    Client(#[source] reqwest::Error),
}

/// A charge did not come back as a charge.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PaymentError {
    /// No answer: the connection failed, broke off or took too long. The money may have been taken.
    #[error(
        "the payment gateway {}; the charge may have gone through: \
         call again with the same key, which never charges twice", no_answer(.0)
    )]
    Unreachable(#[source] reqwest::Error),

    /// The gateway says it cannot answer now: it failed, is overloaded, or is still working on this key.
    #[error(
        "the payment gateway answered {status}; the charge may have gone through: \
         call again with the same key, which never charges twice"
    )]
    Unavailable {
        /// The HTTP status: 408, 409, 425, 429 or 5xx.
        status: u16,
        /// How long the gateway asks to wait.
        retry_after: Option<Duration>,
    },

    /// The gateway says that it charged, but not in words this program understands.
    #[error(
        "the payment gateway answered {status} with something that is not a charge; it may have gone \
         through: call again with the same key, which never charges twice"
    )]
    Unreadable {
        /// The HTTP status: 2xx.
        status: u16,
    },

    /// The card was declined: a final answer, and no money was taken.
    #[error("the card was declined ({}); no money was taken, and the same key will give the same answer",
            .decline_code.as_deref().unwrap_or(.code))]
    Declined {
        /// The gateway's code: `card_declined`, `expired_card`.
        code: String,
        /// The bank's reason, where it gave one: `insufficient_funds`.
        decline_code: Option<String>,
        /// What the customer may be told.
        message: String,
    },

    /// The gateway does not accept this request, and will not accept it again as it is.
    #[error(
        "the payment gateway refused the request with {status} ({code}): the request, the key's use or the \
         configuration is wrong; no retry mends that"
    )]
    Refused {
        /// The HTTP status: a 3xx or 4xx that is none of the above.
        status: u16,
        /// The gateway's error code or type, or `no code`.
        code: String,
    },

    /// The gateway charged something else than was asked for. Money was taken: a person has to look.
    #[error(
        "the payment gateway's charge {id} differs from what was asked for in its {difference}; \
         money was taken: compare both sides by hand, a retry gives the same answer"
    )]
    OtherCharge {
        /// The charge's id at the gateway.
        id: String,
        /// What differs: `amount`, `currency` or `status`.
        difference: &'static str,
    },

    /// The key cannot be sent: it has characters that no header can carry. Nothing was sent.
    #[error("the idempotency key has characters that no HTTP header can carry; nothing was sent")]
    Key,

    /// The request could not even be built. Nothing was sent.
    #[error("the request to the payment gateway could not be built; nothing was sent")]
    Request(#[source] reqwest::Error),
}

/// What to do about a [`PaymentError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handling {
    /// The outcome is not known: ask again with the same key, after this long where the gateway said so.
    Retry(Option<Duration>),
    /// The gateway's final answer: no money was taken, and none will be under this key.
    Decline,
    /// A mistake on this side, or a riddle: leave everything as it is and tell a person.
    Stop,
}

impl PaymentError {
    /// What to do about it.
    pub fn handling(&self) -> Handling {
        match self {
            Self::Unreachable(_) | Self::Unreadable { .. } => Handling::Retry(None),
            Self::Unavailable { retry_after, .. } => Handling::Retry(*retry_after),
            Self::Declined { .. } => Handling::Decline,
            Self::Refused { .. } | Self::OtherCharge { .. } | Self::Key | Self::Request(_) => {
                Handling::Stop
            }
        }
    }
}

fn no_answer(error: &reqwest::Error) -> &'static str {
    if error.is_timeout() {
        "did not answer in time"
    } else if error.is_connect() {
        "could not be connected to"
    } else {
        "broke off before its answer was complete"
    }
}
