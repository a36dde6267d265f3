//! The small spelling rules: how names are turned into other names, which name was probably meant,
//! how long `"15s"` is.

use std::fmt::Display;

use proc_macro2::{Ident, Span};

pub(crate) const SECOND: u64 = 1_000;
pub(crate) const MINUTE: u64 = 60 * SECOND;
pub(crate) const HOUR: u64 = 60 * MINUTE;
pub(crate) const DAY: u64 = 24 * HOUR;

/// A string the user wrote, and where.
#[derive(Debug, Clone)]
pub(crate) struct Text {
    pub(crate) value: String,
    pub(crate) span: Span,
}

/// Where it was written makes no difference to what it says.
impl PartialEq for Text {
    fn eq(&self, other: &Self) -> bool {
        self.value == other.value
    }
}

/// `RideCreated` becomes `ride_created`: the name under which a point is stored.
pub(crate) fn snake_case(name: &str) -> String {
    let characters: Vec<char> = name.chars().collect();
    let mut snake = String::new();
    for (index, character) in characters.iter().enumerate() {
        if character.is_uppercase() && index > 0 {
            let after_lower = !characters[index - 1].is_uppercase() && characters[index - 1] != '_';
            let before_lower = characters
                .get(index + 1)
                .is_some_and(|next| next.is_lowercase());
            let after_upper = characters[index - 1].is_uppercase();
            if after_lower || (after_upper && before_lower) {
                snake.push('_');
            }
        }
        snake.extend(character.to_lowercase());
    }
    snake
}

/// `create_ride` becomes `CreateRide`.
pub(crate) fn pascal_case(name: &str) -> String {
    name.split('_')
        .flat_map(|word| {
            let mut characters = word.chars();
            let first = characters.next().into_iter().flat_map(char::to_uppercase);
            first.chain(characters).collect::<Vec<char>>()
        })
        .collect()
}

/// The name without `r#`, as it is stored and shown.
pub(crate) fn plain(ident: &Ident) -> String {
    let name = ident.to_string();
    name.strip_prefix("r#").map_or(name.clone(), str::to_owned)
}

/// The known name that was probably meant.
pub(crate) fn did_you_mean<'a>(
    written: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let limit = (written.chars().count() / 3).clamp(1, 3);
    known
        .into_iter()
        .map(|name| {
            (
                distance(&written.to_lowercase(), &name.to_lowercase()),
                name,
            )
        })
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// "; did you mean `lease`?", or nothing.
pub(crate) fn suggestion<'a>(written: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    did_you_mean(written, known).map_or(String::new(), |name| format!("; did you mean `{name}`?"))
}

/// How many letters must be changed, added, removed or swapped with their neighbour.
fn distance(left: &str, right: &str) -> usize {
    let (left, right): (Vec<char>, Vec<char>) = (left.chars().collect(), right.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=right.len()).collect()];
    for (i, l) in left.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, r) in right.iter().enumerate() {
            let mut best = (rows[i][j] + usize::from(l != r))
                .min(rows[i][j + 1] + 1)
                .min(row[j] + 1);
            if i > 0 && j > 0 && *l == right[j - 1] && left[i - 1] == *r {
                best = best.min(rows[i - 1][j - 1] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[left.len()][right.len()]
}

/// `a`, `b` and `c`, each in backquotes.
pub(crate) fn list(names: impl IntoIterator<Item = impl Display>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
    match names.split_last() {
        None => "none".to_owned(),
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
    }
}

/// Reads `"15s"` as milliseconds.
pub(crate) fn millis(duration: &str) -> Option<u64> {
    let digits = duration.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = duration.split_at(digits);
    let unit = match unit {
        "ms" => 1,
        "s" => SECOND,
        "m" => MINUTE,
        "h" => HOUR,
        "d" => DAY,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

/// Writes milliseconds as the user would: in the largest unit that fits.
pub(crate) fn duration(millis: u64) -> String {
    let units = [(DAY, "d"), (HOUR, "h"), (MINUTE, "m"), (SECOND, "s")];
    units
        .into_iter()
        .find(|(unit, _)| millis >= *unit && millis.is_multiple_of(*unit))
        .map_or(format!("{millis}ms"), |(unit, name)| {
            format!("{}{name}", millis / unit)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_stored_in_snake_case() {
        let names = [
            "Started",
            "RideCreated",
            "HTTPSent",
            "ChargeV2",
            "A",
            "SentSMS",
            "Sold_Out",
        ];
        let snake: Vec<String> = names.into_iter().map(snake_case).collect();
        assert_eq!(
            snake,
            [
                "started",
                "ride_created",
                "http_sent",
                "charge_v2",
                "a",
                "sent_sms",
                "sold_out"
            ]
        );
    }

    #[test]
    fn outcome_enums_are_named_in_pascal_case() {
        assert_eq!(pascal_case("create_ride"), "CreateRide");
        assert_eq!(pascal_case("reserve"), "Reserve");
        assert_eq!(pascal_case("_do__it"), "DoIt");
    }

    #[test]
    fn a_near_spelling_is_suggested_and_a_far_one_is_not() {
        let known = ["name", "lease", "retention"];
        assert_eq!(did_you_mean("leese", known), Some("lease"));
        assert_eq!(did_you_mean("retenshun", known), Some("retention"));
        assert_eq!(did_you_mean("nmae", known), Some("name"));
        assert_eq!(did_you_mean("retries", known), None);
    }

    #[test]
    fn durations_are_a_number_and_a_unit() {
        assert_eq!(
            ["15s", "250ms", "2m", "48h", "3d"].map(millis),
            [
                Some(15_000),
                Some(250),
                Some(120_000),
                Some(172_800_000),
                Some(259_200_000)
            ]
        );
        let wrong = [
            "",
            "15",
            "s",
            "15 s",
            "1.5s",
            "-1s",
            "15sec",
            "99999999999999999999s",
            "999999999999999999d",
        ];
        for duration in wrong {
            assert_eq!(millis(duration), None, "{duration}");
        }
    }

    #[test]
    fn durations_are_shown_in_the_largest_unit_that_fits() {
        assert_eq!(
            [15_000, 90_000, 120_000, 172_800_000, 250, 0].map(duration),
            ["15s", "90s", "2m", "2d", "250ms", "0ms"]
        );
    }

    #[test]
    fn lists_read_as_a_sentence() {
        assert_eq!(list(["a"]), "`a`");
        assert_eq!(list(["a", "b", "c"]), "`a`, `b` and `c`");
    }
}
