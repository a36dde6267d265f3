//! Reads the options of a mark, behind its arrow or its points, and says which ones go together.

use proc_macro2::{Ident, Span, TokenStream};

use crate::errors::Errors;
use crate::marks::MarkKind;
use crate::options::{Opt, Seen, option};
use crate::text::{DAY, Text, did_you_mean, duration, list, suggestion};

/// What may be said about a phase.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct PhaseOptions {
    pub(crate) with: Vec<Ident>,
    pub(crate) timeout_millis: Option<u64>,
    pub(crate) isolation: Option<Isolation>,
    pub(crate) key: Option<Text>,
    pub(crate) eager: bool,
    pub(crate) retries: Option<u32>,
    pub(crate) backoff: Backoff,
    pub(crate) at_most_once: bool,
    pub(crate) dedupes_for_millis: Option<u64>,
    pub(crate) renames: Vec<Rename>,
}

/// The isolation level of an atomic phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isolation {
    ReadCommitted,
    RepeatableRead,
    Serializable,
}

/// The longest first pause between retries, and the longest of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Backoff {
    pub(crate) first_millis: u64,
    pub(crate) longest_millis: u64,
}

/// `RideCreated = "ride_made"`: the name under which older versions stored a point.
#[derive(Debug, PartialEq)]
pub(crate) struct Rename {
    pub(crate) point: Ident,
    pub(crate) old: Text,
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            first_millis: 200,
            longest_millis: 5_000,
        }
    }
}

impl MarkKind {
    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Atomic => &[
                "with",
                "timeout",
                "isolation",
                "retries",
                "backoff",
                "renamed_from",
            ],
            Self::External => &[
                "with",
                "timeout",
                "key",
                "checkpoint",
                "retries",
                "backoff",
                "at_most_once",
                "dedupes_for",
                "renamed_from",
            ],
            Self::OnReject | Self::Reconcile => &["with"],
        }
    }

    /// Why an option that another kind of mark has makes no sense here.
    fn why_not(self, option: &str) -> Option<&'static str> {
        let of_others =
            Self::Atomic.options().contains(&option) || Self::External.options().contains(&option);
        match (self, option) {
            (Self::Atomic, "key") => Some(
                "`key` names an outside call; an atomic phase makes none: its effects are in its transaction",
            ),
            (Self::Atomic, "checkpoint") => Some(
                "`checkpoint` is for external phases; an atomic phase stores its point in its own transaction",
            ),
            (Self::Atomic, "at_most_once" | "dedupes_for") => Some(
                "`at_most_once` and `dedupes_for` are about outside calls; an atomic phase makes none: its transaction is committed once or not at all",
            ),
            (Self::External, "isolation") => Some(
                "`isolation` is for atomic phases; an external phase holds no transaction while it waits",
            ),
            (Self::OnReject | Self::Reconcile, "with") => None,
            (Self::OnReject | Self::Reconcile, "renamed_from") => Some(
                "a point is renamed at the arrow that reaches it: `renamed_from` is for phases",
            ),
            (Self::OnReject, _) if of_others => Some(
                "`on_reject` runs in the transaction that stores the rejection; it takes no option but `with(..)`",
            ),
            (Self::Reconcile, _) if of_others => Some(
                "`reconcile` runs in the place of the phase whose call it asks about, and as that one says; it takes no option but `with(..)`",
            ),
            _ => None,
        }
    }
}

/// Reads the options of a mark; those that cannot be read are left out.
pub(crate) fn read(
    kind: MarkKind,
    chunks: impl IntoIterator<Item = TokenStream>,
    errors: &mut Errors,
) -> PhaseOptions {
    let mut options = PhaseOptions::default();
    let mut seen = Seen::default();
    for chunk in chunks {
        let Some(option) = option(chunk, errors) else {
            continue;
        };
        let Some(name) = known(kind, &option.name, errors) else {
            continue;
        };
        if !seen.twice(&name, errors) {
            options.set(&name.to_string(), &option, errors);
        }
    }
    conflicts(&seen, errors);
    options
}

/// The option's name. One that is misspelt is reported, and then read as what was meant: the other
/// mistakes are about what was meant, too.
fn known(kind: MarkKind, name: &Ident, errors: &mut Errors) -> Option<Ident> {
    let written = name.to_string();
    let known = kind.options();
    if known.contains(&written.as_str()) {
        return Some(name.clone());
    }
    if let Some(why) = kind.why_not(&written) {
        errors.on(name, why);
        return None;
    }
    let there_are = if known.len() == 1 { "is" } else { "are" };
    errors.on(
        name,
        format!(
            "unknown option `{written}`{} (here there {there_are} {})",
            suggestion(&written, known.iter().copied()),
            list(known)
        ),
    );
    let meant = did_you_mean(&written, known.iter().copied())?;
    Some(Ident::new(meant, name.span()))
}

impl PhaseOptions {
    fn set(&mut self, name: &str, option: &Opt, errors: &mut Errors) {
        match name {
            "with" => self.with = option.points(errors),
            "timeout" => {
                self.timeout_millis = option
                    .millis("timeout = \"10s\"", errors)
                    .and_then(|timeout| up_to_a_day("a timeout", timeout, errors))
            }
            "isolation" => self.isolation = option.isolation(errors),
            "key" => self.key = option.call_name(errors),
            "checkpoint" => self.eager = option.eager(errors),
            "retries" => self.retries = option.retries(errors),
            "backoff" => self.backoff = backoff(option, errors).unwrap_or_default(),
            "at_most_once" => self.at_most_once = option.stands_alone(errors),
            "dedupes_for" => self.dedupes_for_millis = Some(dedupes_for(option, errors)),
            "renamed_from" => self.renames = option.renames(errors),
            _ => {}
        }
    }
}

fn up_to_a_day(what: &str, (millis, span): (u64, Span), errors: &mut Errors) -> Option<u64> {
    if (1..=DAY).contains(&millis) {
        return Some(millis);
    }
    let written = duration(millis);
    errors.at(
        span,
        format!("{what} lasts from \"1ms\" to \"1d\", not \"{written}\""),
    );
    None
}

fn backoff(option: &Opt, errors: &mut Errors) -> Option<Backoff> {
    let (first, longest, span) = option.range("backoff = \"200ms..5s\"", errors)?;
    let first_millis = up_to_a_day("a pause", (first, span), errors)?;
    let longest_millis = up_to_a_day("a pause", (longest, span), errors)?;
    if first > longest {
        let (first, longest) = (duration(first), duration(longest));
        errors.at(
            span,
            format!("the pauses grow from the first to the longest: write `backoff = \"{longest}..{first}\"`"),
        );
        return None;
    }
    Some(Backoff {
        first_millis,
        longest_millis,
    })
}

/// One that cannot be read is reported, and still says that the outside forgets.
fn dedupes_for(option: &Opt, errors: &mut Errors) -> u64 {
    let Some((millis, span)) = option.millis("dedupes_for = \"24h\"", errors) else {
        return DAY;
    };
    if millis == 0 {
        errors.at(span, "`dedupes_for` says how long the outside remembers a call by its key; one that does not remember it at all is called `at_most_once`");
    }
    millis
}

/// Which options contradict each other, or need another one.
fn conflicts(seen: &Seen, errors: &mut Errors) {
    let retries = seen.named("retries");
    let backoff = seen.named("backoff");
    let dedupes_for = seen.named("dedupes_for");
    if seen.named("at_most_once").is_some() {
        if let Some(repeats) = retries.or(backoff) {
            errors.on(
                repeats,
                format!("`{repeats}` is for phases that are repeated by themselves, and a call that is made `at_most_once` never is: the outside would take the second for another one; leave `{repeats}` out, and let a `#[reconcile(..)]` fn ask what became of the call"),
            );
        }
        if let Some(dedupes_for) = dedupes_for {
            errors.on(
                dedupes_for,
                "`dedupes_for` says that the outside knows a repeated call by its key, and `at_most_once` that it does not; choose one (a call whose first try is older than `dedupes_for` is not repeated either)",
            );
        }
    } else if let (Some(backoff), None) = (backoff, retries) {
        errors.on(
            backoff,
            "`backoff` is the pause between `retries`, and there are none; say how many, as in `retries = 3`",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::chunks;
    use quote::{format_ident, quote};

    fn read_as(kind: MarkKind, options: TokenStream) -> (PhaseOptions, Vec<String>) {
        let mut errors = Errors::new();
        let options = read(kind, chunks(options), &mut errors);
        let found = errors.finish().err().unwrap_or_default();
        (options, found.iter().map(ToString::to_string).collect())
    }

    fn external(options: TokenStream) -> (PhaseOptions, Vec<String>) {
        read_as(MarkKind::External, options)
    }

    fn text(value: &str) -> Text {
        Text {
            value: value.to_owned(),
            span: Span::call_site(),
        }
    }

    #[test]
    fn all_options_of_an_external_phase() {
        let (options, errors) = external(quote!(
            with(A, B),
            timeout = "10s",
            key = "hold",
            checkpoint = "eager",
            retries = 3,
            backoff = "100ms..2s",
            dedupes_for = "24h",
            renamed_from(C = "old_c", C = "older_c")
        ));
        assert_eq!(errors, [""; 0]);
        let rename = |old| Rename {
            point: format_ident!("C"),
            old: text(old),
        };
        assert_eq!(
            options,
            PhaseOptions {
                with: vec![format_ident!("A"), format_ident!("B")],
                timeout_millis: Some(10_000),
                isolation: None,
                key: Some(text("hold")),
                eager: true,
                retries: Some(3),
                backoff: Backoff {
                    first_millis: 100,
                    longest_millis: 2_000
                },
                at_most_once: false,
                dedupes_for_millis: Some(DAY),
                renames: vec![rename("old_c"), rename("older_c")],
            }
        );
    }

    #[test]
    fn a_backoff_need_not_be_given() {
        let (options, errors) = read_as(MarkKind::Atomic, quote!(retries = 100));
        assert_eq!(errors, [""; 0]);
        assert_eq!(options.retries, Some(100));
        assert_eq!(
            options.backoff,
            Backoff {
                first_millis: 200,
                longest_millis: 5_000
            }
        );
    }

    #[test]
    fn at_most_once_is_a_word() {
        let (options, errors) = external(quote!(at_most_once, timeout = "1s"));
        assert_eq!(errors, [""; 0]);
        assert!(options.at_most_once);
    }

    #[test]
    fn options_of_the_other_kind_say_why_not() {
        let (_, errors) = external(quote!(
            isolation = "serializable",
            timout = "1s",
            timeout = "0s"
        ));
        assert_eq!(
            errors,
            [
                "`isolation` is for atomic phases; an external phase holds no transaction while it waits",
                "unknown option `timout`; did you mean `timeout`? (here there are `with`, `timeout`, `key`, `checkpoint`, `retries`, `backoff`, `at_most_once`, `dedupes_for` and `renamed_from`)",
                "`timeout` is given twice",
            ]
        );
        for (kind, option, why) in [
            (
                MarkKind::Atomic,
                quote!(at_most_once),
                "are about outside calls",
            ),
            (
                MarkKind::Atomic,
                quote!(dedupes_for = "1h"),
                "are about outside calls",
            ),
            (
                MarkKind::OnReject,
                quote!(retries = 3),
                "no option but `with(..)`",
            ),
            (
                MarkKind::Reconcile,
                quote!(timeout = "1s"),
                "in the place of the phase",
            ),
            (
                MarkKind::Reconcile,
                quote!(renamed_from(A = "b")),
                "at the arrow that reaches it",
            ),
            (
                MarkKind::Reconcile,
                quote!(colour = 3),
                "here there is `with`",
            ),
        ] {
            let (_, errors) = read_as(kind, option);
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert!(errors[0].contains(why), "{errors:?}");
        }
    }

    #[test]
    fn each_mistake_is_reported_once() {
        for (options, message) in [
            (
                quote!(timeout = "0s"),
                "a timeout lasts from \"1ms\" to \"1d\", not \"0ms\"",
            ),
            (
                quote!(retries),
                "`retries` takes a whole number: `retries = 3`",
            ),
            (quote!(retries = "3"), "`retries` takes a whole number"),
            (quote!(retries = -1), "repeated 1 to 100 times, not -1"),
            (quote!(retries = 0), "repeated 1 to 100 times, not 0"),
            (quote!(retries = 101), "repeated 1 to 100 times, not 101"),
            (
                quote!(retries = 99999999999),
                "repeated 1 to 100 times, not 99999999999",
            ),
            (quote!(retries = 3, backoff = 5), "`backoff` takes a string"),
            (
                quote!(retries = 3, backoff = "5s"),
                "\"5s\" is no range of durations",
            ),
            (
                quote!(retries = 3, backoff = "1..5s"),
                "\"1..5s\" is no range of durations",
            ),
            (
                quote!(retries = 3, backoff = "0s..5s"),
                "a pause lasts from",
            ),
            (
                quote!(retries = 3, backoff = "5s..200ms"),
                "write `backoff = \"200ms..5s\"`",
            ),
            (
                quote!(backoff = "1s..5s"),
                "say how many, as in `retries = 3`",
            ),
            (
                quote!(backoff = "1s..5s", at_most_once),
                "leave `backoff` out",
            ),
            (
                quote!(at_most_once, retries = 3, backoff = "1s..5s"),
                "leave `retries` out",
            ),
            (quote!(at_most_once = true), "`at_most_once` takes no value"),
            (quote!(at_most_once()), "`at_most_once` takes no value"),
            (quote!(at_most_once, dedupes_for = "1h"), "choose one"),
            (quote!(dedupes_for), "`dedupes_for` takes a string"),
            (quote!(dedupes_for = "0s"), "is called `at_most_once`"),
            (quote!(renamed_from = "b"), "`renamed_from` takes points"),
            (quote!(renamed_from()), "`renamed_from` takes points"),
            (quote!(renamed_from(B)), "`renamed_from` takes points"),
            (
                quote!(renamed_from(B = OldB)),
                "`renamed_from` takes points",
            ),
            (
                quote!(renamed_from(B = "OldB")),
                "it was stored as \"old_b\"",
            ),
            (quote!(renamed_from(B = "old b")), "in snake_case"),
            (quote!(renamed_from(B = "")), "in snake_case"),
            (
                quote!(backof = "1s..5s", retries = 3),
                "did you mean `backoff`?",
            ),
            (quote!(at_most_onec), "did you mean `at_most_once`?"),
        ] {
            let (_, errors) = external(options);
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert!(errors[0].contains(message), "{errors:?}");
        }
    }
}
