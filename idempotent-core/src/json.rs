//! Values on their way into PostgreSQL. What is hashed and what the phases see must be what comes
//! back out, so a value is brought into the form that survives storage before either: an integral
//! float becomes the integer that jsonb makes of it, and what cannot be stored is refused.

use serde_json::{Number, Value};

/// How deep a value may nest. What is read back has at most 128 levels, and the stored state adds a
/// few of its own.
const DEPTH: usize = 100;

/// Why a value cannot be stored and read back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unstorable {
    /// PostgreSQL cannot store the character NUL.
    #[error("a string holds a NUL character")]
    Nul,
    /// It could be written, but not read back.
    #[error("it nests deeper than {DEPTH} levels")]
    TooDeep,
}

/// Brings a value into the form in which it comes back from storage.
pub(crate) fn into_storable(mut value: Value) -> Result<Value, Unstorable> {
    settle(&mut value, 0)?;
    Ok(value)
}

fn settle(value: &mut Value, depth: usize) -> Result<(), Unstorable> {
    match value {
        Value::Array(_) | Value::Object(_) if depth >= DEPTH => Err(Unstorable::TooDeep),
        Value::Array(items) => items
            .iter_mut()
            .try_for_each(|item| settle(item, depth + 1)),
        Value::Object(members) => members.iter_mut().try_for_each(|(name, value)| {
            if name.contains('\0') {
                return Err(Unstorable::Nul);
            }
            settle(value, depth + 1)
        }),
        Value::String(text) if text.contains('\0') => Err(Unstorable::Nul),
        Value::Number(number) => {
            if let Some(integer) = integral(number) {
                *number = integer;
            }
            Ok(())
        }
        Value::Null | Value::Bool(_) | Value::String(_) => Ok(()),
    }
}

/// The integer that a float is, where it is one: jsonb keeps no difference between `2000.0`, `2e3`
/// and `2000` that a reader could tell.
fn integral(number: &Number) -> Option<Number> {
    const TWO_TO_63: f64 = 9_223_372_036_854_775_808.0;
    const TWO_TO_64: f64 = 18_446_744_073_709_551_616.0;
    let float = number.as_f64().filter(|_| number.is_f64())?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "integral, and within the bounds of the type"
    )]
    match float {
        _ if float.fract() != 0.0 => None,
        _ if (-TWO_TO_63..TWO_TO_63).contains(&float) => Some((float as i64).into()),
        _ if (0.0..TWO_TO_64).contains(&float) => Some((float as u64).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_integral_float_becomes_an_integer_and_no_other_number_changes() {
        let value = json!([
            2000.0, -0.0, 1e16, 1e18, 1e19, -1e18, 0.1, 1.5, 1e300, -1e300
        ]);
        let expected = json!([
            2000,
            0,
            10_000_000_000_000_000_i64,
            1_000_000_000_000_000_000_i64,
            10_000_000_000_000_000_000_u64,
            -1_000_000_000_000_000_000_i64,
            0.1,
            1.5,
            1e300,
            -1e300
        ]);
        assert_eq!(into_storable(value), Ok(expected));
    }

    #[test]
    fn nul_is_found_wherever_it_hides() {
        for hidden in [json!(["a", {"b": "c\0"}]), json!({"a\0": 1})] {
            assert_eq!(into_storable(hidden), Err(Unstorable::Nul));
        }
        assert!(into_storable(json!({"a": ["\\u0000", 1, null]})).is_ok());
    }

    #[test]
    fn depth_is_bounded() {
        let nested = |depth| (0..depth).fold(json!(1), |value, _| json!([value]));
        assert!(into_storable(nested(DEPTH)).is_ok());
        assert_eq!(into_storable(nested(DEPTH + 1)), Err(Unstorable::TooDeep));
    }
}
