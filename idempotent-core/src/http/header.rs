//! The `Idempotency-Key` header (draft-ietf-httpapi-idempotency-key-header): a String of RFC 9651 in
//! quotes, or bare as most clients send it. Both name the same key. Anything else is refused with
//! the reason; where the RFC would have a malformed field ignored, running unprotected is worse.

use http::{HeaderMap, HeaderName, StatusCode};

use super::Problem;
use crate::key::KEY_BYTES;

static IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The key that the client sent. As an axum extractor it answers 400 (`key_missing`, `key_invalid`)
/// for a request without a good one.
#[derive(Clone, PartialEq, Eq)]
pub struct IdempotencyKey(String);

/// The key stays out of logs: who has it could ask for the reply.
impl std::fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IdempotencyKey(..)")
    }
}

impl IdempotencyKey {
    /// The key, without quotes. It names the request, and who has it could ask for the reply.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key, without quotes.
    pub fn into_string(self) -> String {
        self.0
    }
}

/// Reads the key from a request's headers.
///
/// # Errors
///
/// A 400 problem: `key_missing` without the header, `key_invalid` where it is empty, too long, sent
/// twice, malformed, or not ASCII.
///
/// ```
/// use http::HeaderMap;
/// use idempotent_core::http::parse_idempotency_key;
///
/// let mut quoted = HeaderMap::new();
/// quoted.insert("idempotency-key", r#""8e03978e""#.parse()?);
/// let mut bare = HeaderMap::new();
/// bare.insert("idempotency-key", "8e03978e".parse()?);
/// assert_eq!(parse_idempotency_key(&quoted).ok(), parse_idempotency_key(&bare).ok());
/// # Ok::<(), http::header::InvalidHeaderValue>(())
/// ```
pub fn parse_idempotency_key(headers: &HeaderMap) -> Result<IdempotencyKey, Problem> {
    find_idempotency_key(headers, 1)?.ok_or_else(missing)
}

pub(super) fn missing() -> Problem {
    Problem::new(
        StatusCode::BAD_REQUEST,
        "key_missing",
        "The request needs an idempotency key",
    )
    .detail(
        "Send an Idempotency-Key header: a new random value for each new request, the same one for its retries.",
    )
}

/// The same where the key need not be there, but must have so many bytes if it is.
pub(super) fn find_idempotency_key(
    headers: &HeaderMap,
    shortest: usize,
) -> Result<Option<IdempotencyKey>, Problem> {
    let mut values = headers.get_all(&IDEMPOTENCY_KEY).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(invalid("the header was sent more than once"));
    }
    let key = parse(value.as_bytes()).map_err(invalid)?;
    if key.len() < shortest {
        return Err(invalid(format_args!(
            "it has {} characters, fewer than the {shortest} that are asked for here",
            key.len()
        )));
    }
    Ok(Some(IdempotencyKey(key)))
}

fn invalid(why: impl std::fmt::Display) -> Problem {
    Problem::new(StatusCode::BAD_REQUEST, "key_invalid", "The idempotency key is not valid").detail(format!(
        "The Idempotency-Key header cannot be used: {why}. Send one value of 1 to {KEY_BYTES} ASCII characters, \
         such as a UUID, bare or in double quotes."
    ))
}

fn parse(value: &[u8]) -> Result<String, &'static str> {
    let value = value.trim_ascii();
    if !value.iter().all(|byte| matches!(byte, 0x20..=0x7e)) {
        return Err("it holds control or non-ASCII characters");
    }
    let key = match value {
        [] => return Err("it is empty"),
        [b'"', quoted @ ..] => unquote(quoted)?,
        bare => {
            if bare.contains(&b',') {
                return Err("it is a list; a key with a comma must be in double quotes");
            }
            if bare.contains(&b';') {
                return Err("it has parameters; a key with a semicolon must be in double quotes");
            }
            if bare.iter().any(|byte| matches!(byte, b'"' | b' ')) {
                return Err("it is not quoted correctly");
            }
            bare.to_vec()
        }
    };
    match key.len() {
        0 => Err("it is empty"),
        length if length > KEY_BYTES => Err("it is too long"),
        _ => String::from_utf8(key).map_err(|_| "it holds control or non-ASCII characters"),
    }
}

/// The rest of a String after its opening quote, as in RFC 9651, section 4.2.5.
fn unquote(quoted: &[u8]) -> Result<Vec<u8>, &'static str> {
    let mut key = Vec::with_capacity(quoted.len());
    let mut bytes = quoted.iter();
    while let Some(&byte) = bytes.next() {
        match byte {
            b'\\' => match bytes.next() {
                Some(&escaped @ (b'"' | b'\\')) => key.push(escaped),
                _ => return Err("a backslash in it escapes neither a quote nor a backslash"),
            },
            b'"' => {
                return match bytes.as_slice().trim_ascii_start() {
                    [] => Ok(key),
                    [b',', ..] => Err("it is a list"),
                    [b';', ..] => Err("it has parameters"),
                    _ => Err("it is not quoted correctly"),
                };
            }
            _ => key.push(byte),
        }
    }
    Err("its closing quote is missing")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_and_bare_are_one_key() {
        assert_eq!(parse(b"8e03-9f"), Ok("8e03-9f".to_owned()));
        assert_eq!(parse(b"\"8e03-9f\""), Ok("8e03-9f".to_owned()));
        assert_eq!(parse(b"  \"8e03-9f\"  "), Ok("8e03-9f".to_owned()));
    }

    #[test]
    fn escapes_and_odd_characters_need_quotes() {
        assert_eq!(parse(br#""a\"b\\c, d;e""#), Ok(r#"a"b\c, d;e"#.to_owned()));
        for bad in [
            "a,b",
            "a;b",
            "a b",
            "a\"b",
            "\"a",
            "\"a\\n\"",
            "\"a\"b",
            "\"a\", \"b\"",
            "\"a\";p=1",
            "\"a\\",
        ] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn length_is_counted_without_quotes() {
        let long = "k".repeat(KEY_BYTES);
        assert!(parse(long.as_bytes()).is_ok());
        assert!(parse(format!("\"{long}\"").as_bytes()).is_ok());
        assert_eq!(parse(format!("{long}k").as_bytes()), Err("it is too long"));
        assert_eq!(parse(b""), Err("it is empty"));
        assert_eq!(parse(b"\"\""), Err("it is empty"));
    }

    #[test]
    fn only_printable_ascii() {
        for bad in [&b"a\tb"[..], b"\x7f", "é".as_bytes(), b"\xff"] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_key_sent_twice_is_refused() {
        let mut headers = HeaderMap::new();
        for key in ["a", "a"] {
            headers.append(&IDEMPOTENCY_KEY, key.parse().unwrap());
        }
        assert_eq!(
            parse_idempotency_key(&headers).unwrap_err().code(),
            "key_invalid"
        );
        assert_eq!(
            parse_idempotency_key(&HeaderMap::new()).unwrap_err().code(),
            "key_missing"
        );
    }
}
