//! Times, durations and texts, short enough for a line.

use std::fmt::Write;
use std::time::{Duration, SystemTime};

/// A moment in UTC, to the millisecond, as RFC 3339 has it.
pub(super) fn rfc3339(at: SystemTime) -> String {
    let (date, seconds, millis) = parts(at);
    let clock = clock(seconds);
    format!("{date}T{clock}.{millis:03}Z")
}

/// A moment in UTC, for people.
pub(super) fn moment(at: SystemTime) -> String {
    let (date, seconds, millis) = parts(at);
    let clock = clock(seconds);
    format!("{date} {clock}.{millis:03} UTC")
}

fn clock(seconds: u64) -> String {
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}", seconds % 60)
}

/// The date, the seconds of the day and the milliseconds of the second.
fn parts(at: SystemTime) -> (String, u64, u32) {
    let since = at
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    (date(days), seconds, since.subsec_millis())
}

/// A day of the Gregorian calendar, counted from 1970-01-01. Years are counted from March, so that
/// the leap day is the last of its year.
fn date(days: u64) -> String {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (month, year) = if month < 10 {
        (month + 3, year)
    } else {
        (month - 9, year + 1)
    };
    format!("{:04}-{month:02}-{day:02}", era * 400 + year)
}

/// A duration in its two largest units.
pub(super) fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    let pair = |large: u64, unit: char, small: u64, sub: char| match small {
        0 => format!("{large}{unit}"),
        _ => format!("{large}{unit} {small}{sub}"),
    };
    match seconds {
        0..10 => format!("{:.1}s", duration.as_secs_f64()),
        10..60 => format!("{seconds}s"),
        60..3600 => pair(minutes, 'm', seconds % 60, 's'),
        3600..86_400 => pair(hours, 'h', minutes, 'm'),
        _ => pair(days, 'd', hours, 'h'),
    }
}

/// A duration in its largest unit, for a column.
pub(super) fn age(age: Duration) -> String {
    match age.as_secs() {
        seconds @ 0..60 => format!("{seconds}s"),
        seconds @ 60..3600 => format!("{}m", seconds / 60),
        seconds @ 3600..172_800 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

/// How many of something.
pub(super) fn many(number: u64, one: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {one}{plural}")
}

/// A text on one line that does nothing to a terminal.
pub(super) fn line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => line.push(' '),
            c if c.is_control() => {
                let _ = write!(line, "{}", c.escape_default());
            }
            c => line.push(c),
        }
    }
    line
}

/// The text's beginning, if it is longer than so many characters.
pub(super) fn shortened(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut kept: String = text.chars().take(width.saturating_sub(1)).collect();
    kept.truncate(kept.trim_end().len());
    kept.push('…');
    kept
}

/// The text in lines of at most so many characters, broken at spaces.
pub(super) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in line(text).split_whitespace() {
        let last = lines.len() - 1;
        let length = lines[last].chars().count();
        if length > 0 && length + 1 + word.chars().count() > width {
            lines.push(word.to_owned());
            continue;
        }
        if length > 0 {
            lines[last].push(' ');
        }
        lines[last].push_str(word);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
        ] {
            let at = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(rfc3339(at), expected);
        }
    }

    #[test]
    fn durations_have_two_units() {
        for (seconds, expected) in [
            (3, "3.0s"),
            (42, "42s"),
            (60, "1m"),
            (61, "1m 1s"),
            (7500, "2h 5m"),
            (90_000, "1d 1h"),
        ] {
            assert_eq!(duration(Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn a_line_stays_a_line() {
        assert_eq!(line("a\nb\u{1b}[31m"), "a b\\u{1b}[31m");
        assert_eq!(shortened("abc def", 5), "abc…");
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
    }
}
