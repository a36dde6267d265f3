//! Reads what the attribute on the block says: the options of the flow. Those of the phases are in
//! [`phase_options`](crate::phase_options); what an option looks like is the same for all of them, and
//! is in [`options`](crate::options).

use proc_macro2::{Ident, Span, TokenStream};

use crate::errors::Errors;
use crate::options::{Seen, chunks, option};
use crate::text::{
    DAY, MINUTE, SECOND, Text, did_you_mean, duration, list, snake_case, suggestion,
};

/// `#[idempotent_flow(name = "ride", lease = "15s", retention = "48h")]`
#[derive(Debug, PartialEq)]
pub(crate) struct FlowOptions {
    pub(crate) name: String,
    pub(crate) lease_millis: u64,
    pub(crate) retention_millis: u64,
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

#[cfg(test)]
mod tests {
    use super::*;
    use quote::{format_ident, quote};

    fn flow(arguments: TokenStream) -> (FlowOptions, Vec<String>) {
        let mut errors = Errors::new();
        let options = flow_options(arguments, &format_ident!("RideFlow"), &mut errors);
        (options, messages(errors))
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
}
