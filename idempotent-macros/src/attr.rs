//! Reads what our attributes say: the options of the flow, and the arrow and options of each mark.
//! What an option looks like is the same for all of them, and is in [`options`](crate::options).

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use syn::Token;
use syn::parse::Parser;
use syn::punctuated::Punctuated;

use crate::errors::Errors;
use crate::options::{Seen, chunks, option};
use crate::text::{Text, did_you_mean, duration, list, pascal_case, snake_case, suggestion};

const SECOND: u64 = 1_000;
const MINUTE: u64 = 60 * SECOND;
const DAY: u64 = 24 * 60 * MINUTE;

/// `#[idempotent_flow(name = "ride", lease = "15s", retention = "48h")]`
#[derive(Debug, PartialEq)]
pub(crate) struct FlowOptions {
    pub(crate) name: String,
    pub(crate) lease_millis: u64,
    pub(crate) retention_millis: u64,
}

/// `RideCreated -> ChargeCompleted`, or with branches `Quoted -> Reserved | SoldOut`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Arrow {
    pub(crate) from: Ident,
    pub(crate) to: Vec<Ident>,
}

/// What may be said about a phase, behind its arrow.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct PhaseOptions {
    pub(crate) with: Vec<Ident>,
    pub(crate) timeout_millis: Option<u64>,
    pub(crate) isolation: Option<Isolation>,
    pub(crate) key: Option<Text>,
    pub(crate) eager: bool,
}

/// The isolation level of an atomic phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isolation {
    ReadCommitted,
    RepeatableRead,
    Serializable,
}

/// What a mark is put on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MarkKind {
    Atomic,
    External,
    OnReject,
}

impl MarkKind {
    pub(crate) fn named(name: &Ident) -> Option<Self> {
        match name.to_string().as_str() {
            "atomic" => Some(Self::Atomic),
            "external" => Some(Self::External),
            "on_reject" => Some(Self::OnReject),
            _ => None,
        }
    }

    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Atomic => &["with", "timeout", "isolation"],
            Self::External => &["with", "timeout", "key", "checkpoint"],
            Self::OnReject => &["with"],
        }
    }

    /// Why an option that another kind of mark has makes no sense here.
    fn why_not(self, option: &str) -> Option<&'static str> {
        match (self, option) {
            (Self::Atomic, "key") => Some(
                "`key` names an outside call; an atomic phase makes none: its effects are in its transaction",
            ),
            (Self::Atomic, "checkpoint") => Some(
                "`checkpoint` is for external phases; an atomic phase stores its point in its own transaction",
            ),
            (Self::External, "isolation") => Some(
                "`isolation` is for atomic phases; an external phase holds no transaction while it waits",
            ),
            (Self::OnReject, "timeout" | "isolation" | "key" | "checkpoint") => Some(
                "`on_reject` runs in the transaction that stores the rejection; it takes no option but `with(..)`",
            ),
            _ => None,
        }
    }
}

/// Reads the options of the flow; those that cannot be read get their defaults.
pub(crate) fn flow_options(
    arguments: TokenStream,
    flow: &Ident,
    errors: &mut Errors,
) -> FlowOptions {
    const OPTIONS: &[&str] = &["name", "lease", "retention"];
    let mut name: Option<String> = None;
    let mut name_missing = true;
    let mut lease: Option<(u64, Span)> = None;
    let mut retention: Option<(u64, Span)> = None;
    let mut seen = Seen::default();
    for chunk in chunks(arguments) {
        let Some(option) = option(chunk, errors) else {
            continue;
        };
        let written = option.name.to_string();
        name_missing &= did_you_mean(&written, OPTIONS.iter().copied()) != Some("name");
        match written.as_str() {
            written if OPTIONS.contains(&written) && seen.twice(&option.name, errors) => {}
            "name" => {
                name = option
                    .text("name = \"ride\"", errors)
                    .and_then(|text| checked_name(&text, errors))
            }
            "lease" => lease = option.millis("lease = \"15s\"", errors),
            "retention" => retention = option.millis("retention = \"48h\"", errors),
            written => errors.on(
                &option.name,
                format!(
                    "unknown option `{written}`{} (a flow has {})",
                    suggestion(written, OPTIONS.iter().copied()),
                    list(OPTIONS)
                ),
            ),
        }
    }
    if name_missing {
        let guess = snake_case(flow.to_string().trim_end_matches("Flow"));
        errors.at(
            Span::call_site(),
            format!("a flow needs a name, under which its keys are stored: `#[idempotent_flow(name = \"{guess}\")]`"),
        );
    }
    if let Some((millis, span)) =
        lease.filter(|(millis, _)| !(SECOND..=10 * MINUTE).contains(millis))
    {
        errors.at(
            span,
            format!("a lease lasts from \"1s\" to \"10m\", not \"{}\"; it is renewed while a phase runs, so it may be shorter than a call", duration(millis)),
        );
    }
    let (lease_millis, _) = lease.unwrap_or((15 * SECOND, Span::call_site()));
    let (retention_millis, span) = retention.unwrap_or((2 * DAY, Span::call_site()));
    if retention_millis < lease_millis {
        errors.at(
            span,
            format!(
                "a finished key is kept for the retention, \"{}\"; that is shorter than the lease, \"{}\"",
                duration(retention_millis),
                duration(lease_millis)
            ),
        );
    }
    FlowOptions {
        name: name.unwrap_or_default(),
        lease_millis,
        retention_millis,
    }
}

fn checked_name(name: &Text, errors: &mut Errors) -> Option<String> {
    let rule = "it is stored with every key: 1 to 64 of `a-z`, `0-9`, `_` and `-`, a letter first";
    let odd = name
        .value
        .chars()
        .find(|c| !matches!(c, 'a'..='z' | '0'..='9' | '_' | '-'));
    let problem = if name.value.is_empty() {
        "is empty".to_owned()
    } else if let Some(odd) = odd {
        format!("has a {odd:?} in it")
    } else if !name.value.starts_with(|c: char| c.is_ascii_lowercase()) {
        "does not begin with a letter".to_owned()
    } else if name.value.len() > 64 {
        format!("is {} letters long", name.value.len())
    } else {
        return Some(name.value.clone());
    };
    errors.at(name.span, format!("the flow's name {problem}; {rule}"));
    Some("invalid".to_owned())
}

/// Reads `Started -> RideCreated, timeout = "10s"`; no arrow if it cannot be read.
pub(crate) fn phase(
    kind: MarkKind,
    mark: &Ident,
    arguments: TokenStream,
    errors: &mut Errors,
) -> (Option<Arrow>, PhaseOptions) {
    let mut chunks = chunks(arguments).into_iter();
    let Some(first) = chunks.next() else {
        errors.on(
            mark,
            format!("`#[{mark}]` needs its arrow, as in `#[{mark}(Started -> RideCreated)]`"),
        );
        return (None, PhaseOptions::default());
    };
    let arrow = arrow(first, errors);
    (arrow, phase_options(kind, chunks, errors))
}

/// Reads `RideCreated, Paid, with(Quoted)`: points, then options.
pub(crate) fn on_reject(
    mark: &Ident,
    arguments: TokenStream,
    errors: &mut Errors,
) -> (Vec<Ident>, PhaseOptions) {
    let is_point = |chunk: &TokenStream| {
        let mut tokens = chunk.clone().into_iter();
        matches!((tokens.next(), tokens.next()), (Some(TokenTree::Ident(name)), None) if starts_upper(&name))
    };
    let (points, options): (Vec<_>, Vec<_>) = chunks(arguments).into_iter().partition(is_point);
    let before = errors.count();
    let options = phase_options(MarkKind::OnReject, options, errors);
    let points: Vec<Ident> = points
        .into_iter()
        .filter_map(|point| syn::parse2(point).ok())
        .collect();
    if points.is_empty() && errors.count() == before {
        errors.on(mark, "`#[on_reject]` needs the point at which it takes care of a rejection, as in `#[on_reject(RideCreated)]`");
    }
    (points, options)
}

fn starts_upper(name: &Ident) -> bool {
    name.to_string().starts_with(char::is_uppercase)
}

fn arrow(tokens: TokenStream, errors: &mut Errors) -> Option<Arrow> {
    let parser = |input: syn::parse::ParseStream<'_>| {
        let from: Ident = input.parse()?;
        input.parse::<Token![->]>()?;
        let to = Punctuated::<Ident, Token![|]>::parse_separated_nonempty(input)?;
        Ok(Arrow {
            from,
            to: to.into_iter().collect(),
        })
    };
    let Ok(arrow) = parser.parse2(tokens.clone()) else {
        errors.on(tokens, "expected an arrow from one recovery point to the next, as in `Started -> RideCreated`, or with branches `Quoted -> Reserved | SoldOut`");
        return None;
    };
    let found_before = errors.count();
    for point in [&arrow.from]
        .into_iter()
        .chain(&arrow.to)
        .filter(|point| !starts_upper(point))
    {
        let pascal = pascal_case(&point.to_string());
        errors.on(point, format!("recovery points are written as enum variants are; write `{pascal}` (it is stored as `{}`)", snake_case(&pascal)));
    }
    for (index, point) in arrow.to.iter().enumerate() {
        if *point == "Started" {
            errors.on(
                point,
                "nothing arrives at `Started`: it is where the request comes in",
            );
        } else if *point == arrow.from {
            errors.on(point, format!("this arrow leaves `{point}` and arrives at it; a phase moves the flow to another point"));
        } else if arrow.to[..index].contains(point) {
            errors.on(point, format!("`{point}` is named twice in this arrow; each branch leads to a point of its own"));
        }
    }
    if arrow.from == "Finished" {
        errors.on(
            &arrow.from,
            "nothing leaves `Finished`: the reply is stored, and every retry gets it",
        );
    }
    (errors.count() == found_before).then_some(arrow)
}

fn phase_options(
    kind: MarkKind,
    chunks: impl IntoIterator<Item = TokenStream>,
    errors: &mut Errors,
) -> PhaseOptions {
    let known = kind.options();
    let mut options = PhaseOptions::default();
    let mut seen = Seen::default();
    for chunk in chunks {
        let Some(option) = option(chunk, errors) else {
            continue;
        };
        let written = option.name.to_string();
        if let Some(why) = kind.why_not(&written) {
            errors.on(&option.name, why);
            continue;
        }
        if known.contains(&written.as_str()) && seen.twice(&option.name, errors) {
            continue;
        }
        match written.as_str() {
            "with" => options.with = option.points(errors),
            "timeout" => {
                options.timeout_millis = option
                    .millis("timeout = \"10s\"", errors)
                    .and_then(|timeout| checked_timeout(timeout, errors))
            }
            "isolation" if kind == MarkKind::Atomic => options.isolation = option.isolation(errors),
            "key" if kind == MarkKind::External => options.key = option.call_name(errors),
            "checkpoint" if kind == MarkKind::External => options.eager = option.eager(errors),
            _ => errors.on(
                &option.name,
                format!(
                    "unknown option `{written}`{} (here there are {})",
                    suggestion(&written, known.iter().copied()),
                    list(known)
                ),
            ),
        }
    }
    options
}

fn checked_timeout((millis, span): (u64, Span), errors: &mut Errors) -> Option<u64> {
    if (1..=DAY).contains(&millis) {
        return Some(millis);
    }
    errors.at(
        span,
        format!(
            "a timeout lasts from \"1ms\" to \"1d\", not \"{}\"",
            duration(millis)
        ),
    );
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use quote::{format_ident, quote};

    fn flow(arguments: TokenStream) -> (FlowOptions, Vec<String>) {
        let mut errors = Errors::new();
        let options = flow_options(arguments, &format_ident!("RideFlow"), &mut errors);
        (options, messages(errors))
    }

    fn external(arguments: TokenStream) -> (Option<Arrow>, PhaseOptions, Vec<String>) {
        let mut errors = Errors::new();
        let (arrow, options) = phase(
            MarkKind::External,
            &format_ident!("external"),
            arguments,
            &mut errors,
        );
        (arrow, options, messages(errors))
    }

    fn messages(errors: Errors) -> Vec<String> {
        errors
            .finish()
            .err()
            .unwrap_or_default()
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn the_options_of_a_flow() {
        let (options, errors) = flow(quote!(name = "ride", lease = "30s", retention = "7d"));
        assert_eq!(errors, [""; 0]);
        assert_eq!(
            options,
            FlowOptions {
                name: "ride".to_owned(),
                lease_millis: 30_000,
                retention_millis: 604_800_000
            }
        );
    }

    #[test]
    fn lease_and_retention_have_defaults() {
        let (options, errors) = flow(quote!(name = "ride"));
        assert_eq!(errors, [""; 0]);
        assert_eq!(
            options,
            FlowOptions {
                name: "ride".to_owned(),
                lease_millis: 15_000,
                retention_millis: 172_800_000
            }
        );
    }

    #[test]
    fn every_mistake_in_the_options_is_reported() {
        let (_, errors) = flow(quote!(
            nam = "ride",
            lease = "15",
            retention = 48,
            lease = "1s"
        ));
        assert_eq!(
            errors,
            [
                "unknown option `nam`; did you mean `name`? (a flow has `name`, `lease` and `retention`)",
                "\"15\" is no duration: write a whole number and a unit (`ms`, `s`, `m`, `h` or `d`), as in `lease = \"15s\"`",
                "`retention` takes a string: `retention = \"48h\"`",
                "`lease` is given twice",
            ]
        );
    }

    #[test]
    fn a_missing_name_is_guessed() {
        let (_, errors) = flow(quote!());
        assert_eq!(
            errors,
            [
                "a flow needs a name, under which its keys are stored: `#[idempotent_flow(name = \"ride\")]`"
            ]
        );
    }

    #[test]
    fn names_are_checked() {
        for (name, problem) in [
            ("", "is empty"),
            ("Ride", "'R'"),
            ("9lives", "begin with a letter"),
            (&"a".repeat(65), "65 letters"),
        ] {
            let (_, errors) = flow(quote!(name = #name));
            assert!(errors[0].contains(problem), "{errors:?}");
        }
    }

    #[test]
    fn an_arrow_with_branches_and_options() {
        let (arrow, options, errors) = external(
            quote!(Quoted -> Reserved | SoldOut, with(A, B), timeout = "10s", key = "hold", checkpoint = "eager"),
        );
        assert_eq!(errors, [""; 0]);
        let idents = |names: &[&str]| {
            names
                .iter()
                .map(|name| format_ident!("{name}"))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            arrow,
            Some(Arrow {
                from: format_ident!("Quoted"),
                to: idents(&["Reserved", "SoldOut"])
            })
        );
        assert_eq!(
            options,
            PhaseOptions {
                with: idents(&["A", "B"]),
                timeout_millis: Some(10_000),
                isolation: None,
                key: Some(Text {
                    value: "hold".to_owned(),
                    span: Span::call_site()
                }),
                eager: true,
            }
        );
    }

    #[test]
    fn arrows_that_cannot_be() {
        for (arguments, message) in [
            (quote!(), "needs its arrow"),
            (quote!(A), "expected an arrow"),
            (quote!(A => B), "expected an arrow"),
            (quote!(A -> Started), "nothing arrives at `Started`"),
            (quote!(Finished -> A), "nothing leaves `Finished`"),
            (quote!(A -> A), "leaves `A` and arrives at it"),
            (quote!(A -> B | B), "`B` is named twice"),
            (quote!(a -> B), "write `A`"),
        ] {
            let (arrow, _, errors) = external(arguments);
            assert_eq!(arrow, None);
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert!(errors[0].contains(message), "{errors:?}");
        }
    }

    #[test]
    fn options_of_the_other_kind_say_why_not() {
        let (_, _, errors) =
            external(quote!(A -> B, isolation = "serializable", timout = "1s", timeout = "0s"));
        assert_eq!(
            errors,
            [
                "`isolation` is for atomic phases; an external phase holds no transaction while it waits",
                "unknown option `timout`; did you mean `timeout`? (here there are `with`, `timeout`, `key` and `checkpoint`)",
                "a timeout lasts from \"1ms\" to \"1d\", not \"0ms\"",
            ]
        );
    }

    #[test]
    fn on_reject_names_points() {
        let mut errors = Errors::new();
        let (points, options) = on_reject(
            &format_ident!("on_reject"),
            quote!(A, B, with(C)),
            &mut errors,
        );
        assert_eq!(messages(errors), [""; 0]);
        assert_eq!(points, [format_ident!("A"), format_ident!("B")]);
        assert_eq!(options.with, [format_ident!("C")]);
    }
}
