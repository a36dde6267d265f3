//! Reads what a mark says: which kind it is, the arrow of a phase, the points of the other fns. The
//! options behind them are in [`phase_options`](crate::phase_options).

use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::Token;
use syn::parse::Parser;
use syn::punctuated::Punctuated;

use crate::errors::Errors;
use crate::options::chunks;
use crate::phase_options::{self, PhaseOptions};
use crate::text::{pascal_case, snake_case};

/// What a mark is put on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MarkKind {
    Atomic,
    External,
    OnReject,
    Reconcile,
}

/// `RideCreated -> ChargeCompleted`, or with branches `Quoted -> Reserved | SoldOut`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Arrow {
    pub(crate) from: Ident,
    pub(crate) to: Vec<Ident>,
}

impl MarkKind {
    pub(crate) fn named(name: &Ident) -> Option<Self> {
        match name.to_string().as_str() {
            "atomic" => Some(Self::Atomic),
            "external" => Some(Self::External),
            "on_reject" => Some(Self::OnReject),
            "reconcile" => Some(Self::Reconcile),
            _ => None,
        }
    }
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
    (arrow, phase_options::read(kind, chunks, errors))
}

/// Reads `RideCreated, Paid, with(Quoted)`: points, then options.
pub(crate) fn on_reject(
    mark: &Ident,
    arguments: TokenStream,
    errors: &mut Errors,
) -> (Vec<Ident>, PhaseOptions) {
    let before = errors.count();
    let (points, options) = points(MarkKind::OnReject, arguments, errors);
    if points.is_empty() && errors.count() == before {
        errors.on(mark, "`#[on_reject]` needs the point at which it takes care of a rejection, as in `#[on_reject(RideCreated)]`");
    }
    (points, options)
}

/// Reads `RideCreated, with(Quoted)`: the point from which the call is made, then options.
pub(crate) fn reconcile(
    mark: &Ident,
    arguments: TokenStream,
    errors: &mut Errors,
) -> (Option<Ident>, PhaseOptions) {
    let before = errors.count();
    let (points, options) = points(MarkKind::Reconcile, arguments, errors);
    let mut points = points.into_iter();
    let first = points.next();
    if first.is_none() && errors.count() == before {
        errors.on(mark, "`#[reconcile]` needs the point from which the call is made that it asks about, as in `#[reconcile(RideCreated)]`");
    }
    if let Some(second) = points.next() {
        let message = format!(
            "a `reconcile` fn asks what became of one call, and gives what that call gives; mark another fn with `#[reconcile({second})]`"
        );
        errors.on(&second, message);
    }
    (first, options)
}

fn points(
    kind: MarkKind,
    arguments: TokenStream,
    errors: &mut Errors,
) -> (Vec<Ident>, PhaseOptions) {
    let is_point = |chunk: &TokenStream| {
        let mut tokens = chunk.clone().into_iter();
        matches!((tokens.next(), tokens.next()), (Some(TokenTree::Ident(name)), None) if starts_upper(&name))
    };
    let (points, options): (Vec<_>, Vec<_>) = chunks(arguments).into_iter().partition(is_point);
    let options = phase_options::read(kind, options, errors);
    let points = points
        .into_iter()
        .filter_map(|point| syn::parse2(point).ok())
        .collect();
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

#[cfg(test)]
mod tests {
    use super::*;
    use quote::{format_ident, quote};

    fn messages(errors: Errors) -> Vec<String> {
        let found = errors.finish().err().unwrap_or_default();
        found.iter().map(ToString::to_string).collect()
    }

    fn external(arguments: TokenStream) -> (Option<Arrow>, Vec<String>) {
        let mut errors = Errors::new();
        let mark = format_ident!("external");
        let (arrow, _) = phase(MarkKind::External, &mark, arguments, &mut errors);
        (arrow, messages(errors))
    }

    #[test]
    fn an_arrow_with_branches() {
        let (arrow, errors) = external(quote!(Quoted -> Reserved | SoldOut, timeout = "10s"));
        assert_eq!(errors, [""; 0]);
        assert_eq!(
            arrow,
            Some(Arrow {
                from: format_ident!("Quoted"),
                to: vec![format_ident!("Reserved"), format_ident!("SoldOut")]
            })
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
            let (arrow, errors) = external(arguments);
            assert_eq!(arrow, None);
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert!(errors[0].contains(message), "{errors:?}");
        }
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

    #[test]
    fn reconcile_names_one_point() {
        let cases: [(TokenStream, Option<Ident>, &[&str]); 3] = [
            (quote!(A, with(C)), Some(format_ident!("A")), &[]),
            (
                quote!(),
                None,
                &["needs the point from which the call is made"],
            ),
            (
                quote!(A, B),
                Some(format_ident!("A")),
                &["mark another fn with `#[reconcile(B)]`"],
            ),
        ];
        for (arguments, expected, messages_expected) in cases {
            let mut errors = Errors::new();
            let (point, _) = reconcile(&format_ident!("reconcile"), arguments, &mut errors);
            assert_eq!(point, expected);
            let found = messages(errors);
            assert_eq!(found.len(), messages_expected.len(), "{found:?}");
            for (found, expected) in found.iter().zip(messages_expected) {
                assert!(found.contains(expected), "{found}");
            }
        }
    }
}
