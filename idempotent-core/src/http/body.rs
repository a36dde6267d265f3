//! A JSON body, read strictly enough for a fingerprint: one meaning only. A member that stands twice
//! is refused (parsers disagree which one counts), a body that is not an object is refused (serde
//! would read an array into a struct), and a number with an integral value is that integer however
//! it is spelt, so that a retry which writes `2000.0` is the same request.

use std::fmt;

use http::StatusCode;
use serde::de::{DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::{Map, Number, Value};

use super::Problem;

/// Reads a JSON object strictly: one meaning only, so that a retry is the same request.
///
/// # Errors
///
/// A problem: 400 (`body_malformed`) for what is not one JSON object, or has a member twice; 422
/// (`body_invalid`) for what is not a `T`.
///
/// ```
/// use idempotent_core::http::parse_json;
///
/// #[derive(serde::Deserialize)]
/// struct Ride { amount: i64 }
///
/// let ride: Ride = parse_json(br#"{"amount": 2e3}"#).map_err(|problem| problem.code())?;
/// assert_eq!(ride.amount, 2000);
/// assert!(parse_json::<Ride>(br#"{"amount": 1, "amount": 2}"#).is_err());
/// # Ok::<(), &'static str>(())
/// ```
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    parse(bytes)
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let Strict(value) =
        serde_json::from_slice(bytes).map_err(|error| malformed(&error.to_string()))?;
    if !value.is_object() {
        return Err(malformed("it is not an object"));
    }
    T::deserialize(value).map_err(|error| {
        Problem::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            "body_invalid",
            "The body does not fit",
        )
        .detail(error.to_string())
    })
}

pub(super) fn malformed(why: &str) -> Problem {
    Problem::new(
        StatusCode::BAD_REQUEST,
        "body_malformed",
        "The body cannot be read",
    )
    .detail(format!("The body must be one JSON object: {why}."))
}

/// A JSON value without duplicate members, with integral numbers as integers.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Strict)
    }
}

struct StrictVisitor;

/// Up to here a float holds every integer exactly.
const EXACT: f64 = 9_007_199_254_740_992.0;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        if value.fract() == 0.0 && value.abs() <= EXACT {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "integral, and within what both types hold exactly"
            )]
            return Ok((value as i64).into());
        }
        Number::from_f64(value)
            .map(Value::Number)
            .ok_or_else(|| E::custom("a number is too large"))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E: de::Error>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut array = Vec::new();
        while let Some(Strict(item)) = items.next_element()? {
            array.push(item);
        }
        Ok(Value::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(name) = members.next_key::<String>()? {
            let Strict(value) = members.next_value()?;
            if object.insert(name.clone(), value).is_some() {
                return Err(A::Error::custom(format_args!(
                    "the member {name:?} stands twice"
                )));
            }
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn value(text: &str) -> Value {
        parse::<Value>(text.as_bytes()).unwrap()
    }

    #[test]
    fn an_integer_is_the_same_however_it_is_spelt() {
        for spelling in ["2000", "2000.0", "2e3", "2.0E+3"] {
            assert_eq!(
                value(&format!(r#"{{"amount": {spelling}}}"#)),
                json!({"amount": 2000}),
                "{spelling}"
            );
        }
        assert_eq!(
            value(r#"{"a": [0.1, -3.0, 1.5e300, 18446744073709551615]}"#),
            json!({"a": [0.1, -3, 1.5e300, 18_446_744_073_709_551_615_u64]})
        );
    }

    #[test]
    fn duplicate_members_are_refused_at_any_depth() {
        for twice in [r#"{"a": 1, "a": 1}"#, r#"{"b": [{"a": 1, "a": null}]}"#] {
            let problem = parse::<Value>(twice.as_bytes()).unwrap_err();
            assert_eq!(problem.code(), "body_malformed");
        }
    }

    #[test]
    fn only_one_object_is_a_body() {
        #[derive(Debug, Deserialize)]
        struct Ride {
            #[expect(dead_code, reason = "only whether it can be read matters")]
            amount: i64,
        }
        for bad in ["[1]", "1", "null", "", "{} {}", "{", r#"{"amount":1}x"#] {
            assert_eq!(
                parse::<Ride>(bad.as_bytes()).unwrap_err().code(),
                "body_malformed",
                "{bad}"
            );
        }
        for unfit in [
            "{}",
            r#"{"amount": 1.5}"#,
            r#"{"amount": "1"}"#,
            r#"{"amount": 1e30}"#,
        ] {
            assert_eq!(
                parse::<Ride>(unfit.as_bytes()).unwrap_err().code(),
                "body_invalid",
                "{unfit}"
            );
        }
        assert!(parse::<Ride>(br#"{"amount": 1.0}"#).is_ok());
    }

    #[test]
    fn depth_is_bounded() {
        let deep = format!("{{\"a\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(
            parse::<Value>(deep.as_bytes()).unwrap_err().code(),
            "body_malformed"
        );
    }
}
