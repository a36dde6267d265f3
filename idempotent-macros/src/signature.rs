//! Reads the signature of a marked fn: its capability, the values it takes, the request, what it
//! returns. A phase is called by the engine and by nobody else, so its signature is a fixed form, and
//! each departure from it has a reason that the message gives.
//!
//! Deliberately absent: which value is which. That takes the arrow, and is in [`model`](crate::model).

use std::fmt;

use proc_macro2::TokenStream;
use quote::ToTokens;
use syn::{FnArg, GenericParam, ReturnType, Type};

use crate::errors::Errors;
use crate::marks::MarkKind;
use crate::parameters::{Parameter, capability, take};

/// A type as the user wrote it.
#[derive(Clone)]
pub(crate) struct Ty(pub(crate) Type);

/// What a marked fn takes and returns.
#[derive(Debug, PartialEq)]
pub(crate) struct Signature {
    /// The type of the capability.
    pub(crate) capability: Option<Ty>,
    /// The types behind the references, in order.
    pub(crate) values: Vec<Ty>,
    pub(crate) takes_rejection: bool,
    pub(crate) request: Option<Ty>,
    pub(crate) output: Option<Ty>,
}

impl PartialEq for Ty {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl fmt::Display for Ty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&readable(&self.0))
    }
}

impl fmt::Debug for Ty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ty({self})")
    }
}

impl ToTokens for Ty {
    fn to_tokens(&self, tokens: &mut TokenStream) {
        self.0.to_tokens(tokens);
    }
}

/// Tokens as one would write them, not with spaces between all of them.
pub(crate) fn readable(tokens: &impl ToTokens) -> String {
    let mut text = tokens.to_token_stream().to_string();
    for (spaced, tight) in [
        (" < ", "<"),
        (" <", "<"),
        ("< ", "<"),
        (" >", ">"),
        (" :: ", "::"),
        (":: ", "::"),
        (" ,", ","),
        ("& ", "&"),
        (" ;", ";"),
    ] {
        text = text.replace(spaced, tight);
    }
    text
}

impl MarkKind {
    /// The capability, as the parameter must be written.
    pub(crate) fn capability(self) -> &'static str {
        match self {
            Self::Atomic | Self::OnReject => "&mut Tx<'_>",
            Self::External | Self::Reconcile => "&External<'_>",
        }
    }

    pub(crate) fn parameter(self) -> &'static str {
        match self {
            Self::Atomic | Self::OnReject => "tx: &mut Tx<'_>",
            Self::External | Self::Reconcile => "call: &External<'_>",
        }
    }

    pub(crate) fn what(self) -> &'static str {
        match self {
            Self::Atomic => "an atomic phase",
            Self::External => "an external phase",
            Self::OnReject => "an `on_reject` fn",
            Self::Reconcile => "a `reconcile` fn",
        }
    }
}

/// Reads the signature, and reports each departure from the form.
pub(crate) fn read(kind: MarkKind, signature: &syn::Signature, errors: &mut Errors) -> Signature {
    qualifiers(kind, signature, errors);
    let rest = receiver(signature, errors);
    let parameters: Vec<Parameter<'_>> = rest.into_iter().map(Parameter::new).collect();
    let (capability, rest) = capability(kind, &signature.ident, &parameters, errors);
    let mut read = Signature {
        capability,
        values: Vec::new(),
        takes_rejection: false,
        request: None,
        output: None,
    };
    for (index, parameter) in rest.iter().enumerate() {
        take(kind, parameter, index + 1 == rest.len(), &mut read, errors);
    }
    read.output = output(kind, signature, errors);
    read
}

fn qualifiers(kind: MarkKind, signature: &syn::Signature, errors: &mut Errors) {
    let name = &signature.ident;
    let what = kind.what();
    if signature.asyncness.is_none() {
        errors.on(
            signature.fn_token,
            format!("{what} is an `async fn`; write `async fn {name}(..)`"),
        );
    }
    let others: [&dyn ToTokens; 3] = [&signature.constness, &signature.safety, &signature.abi];
    for other in others
        .into_iter()
        .map(ToTokens::to_token_stream)
        .filter(|tokens| !tokens.is_empty())
    {
        errors.on(&other, format!("{what} is a plain `async fn`; the engine calls it, and keeps no promise that `{other}` asks for"));
    }
    for parameter in &signature.generics.params {
        let (generic, name) = match parameter {
            GenericParam::Type(generic) => (generic.to_token_stream(), &generic.ident),
            GenericParam::Const(generic) => (generic.to_token_stream(), &generic.ident),
            // A named lifetime is only another way to write what is elided elsewhere.
            GenericParam::Lifetime(_) => continue,
        };
        errors.on(generic, format!("`{}` cannot be generic: the engine calls it and could not choose `{name}`; put `{name}` on the impl block", signature.ident));
    }
}

fn receiver<'a>(signature: &'a syn::Signature, errors: &mut Errors) -> Vec<&'a syn::PatType> {
    match signature.inputs.first() {
        Some(FnArg::Receiver(receiver)) => {
            let form = readable(receiver);
            if form.replace("& ", "&") != "&self"
                && !(receiver.mutability.is_none() && form.starts_with("&'"))
            {
                errors.on(receiver, format!("write `&self`, not `{form}`: many requests run on one flow at the same time"));
            }
        }
        _ => errors.on(
            &signature.ident,
            format!(
                "`{}` takes `&self` first: the clients that a phase calls are in the flow",
                signature.ident
            ),
        ),
    }
    let typed = |argument: &'a FnArg| match argument {
        FnArg::Typed(typed) => Some(typed),
        FnArg::Receiver(_) => None,
    };
    signature.inputs.iter().filter_map(typed).collect()
}

/// Tokens that came through another macro are wrapped in invisible groups.
pub(crate) fn without_groups(ty: &Type) -> &Type {
    match ty {
        Type::Group(group) => without_groups(&group.elem),
        Type::Paren(paren) => without_groups(&paren.elem),
        other => other,
    }
}

fn output(kind: MarkKind, signature: &syn::Signature, errors: &mut Errors) -> Option<Ty> {
    let name = &signature.ident;
    let form = match kind {
        MarkKind::OnReject => "Result<(), E>",
        MarkKind::Reconcile => "Result<Reconciled<T>, E>",
        MarkKind::Atomic | MarkKind::External => "Result<T, E>",
    };
    let why = "the error says whether a failure is retried, waited for, a final answer or a bug";
    match &signature.output {
        ReturnType::Default => {
            errors.on(name, format!("`{name}` returns a `{form}`: {why}"));
            None
        }
        ReturnType::Type(_, ty) => {
            // Any other path may be an alias of a `Result`; the compiler knows.
            if !matches!(without_groups(ty), Type::Path(_) | Type::Macro(_)) {
                errors.on(
                    ty,
                    format!("`{name}` returns a `{form}`, not `{}`: {why}", readable(ty)),
                );
            }
            Some(Ty((**ty).clone()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use syn::parse_quote;

    fn read_as(kind: MarkKind, signature: syn::Signature) -> (Signature, Vec<String>) {
        let mut errors = Errors::new();
        let read = read(kind, &signature, &mut errors);
        (
            read,
            errors
                .finish()
                .err()
                .unwrap_or_default()
                .iter()
                .map(ToString::to_string)
                .collect(),
        )
    }

    #[test]
    fn the_form_of_a_phase() {
        let (signature, errors) = read_as(
            MarkKind::External,
            parse_quote! {
                async fn charge(&self, call: &External<'_>, ride: &db::Ride<P>, request: &RideRequest) -> Result<Charge, E>
            },
        );
        assert_eq!(errors, [""; 0]);
        assert_eq!(
            signature,
            Signature {
                capability: Some(Ty(parse_quote!(External<'_>))),
                values: vec![Ty(parse_quote!(db::Ride<P>))],
                takes_rejection: false,
                request: Some(Ty(parse_quote!(RideRequest))),
                output: Some(Ty(parse_quote!(Result<Charge, E>))),
            }
        );
        assert_eq!(signature.values[0].to_string(), "db::Ride<P>");
    }

    #[test]
    fn the_form_of_an_on_reject_fn() {
        let (signature, errors) = read_as(
            MarkKind::OnReject,
            parse_quote! {
                async fn decline(&self, tx: &mut Tx<'_>, ride: &Ride, rejection: &Rejection, request: &R) -> Result<(), E>
            },
        );
        assert_eq!(errors, [""; 0]);
        assert!(
            signature.takes_rejection && signature.values.len() == 1 && signature.request.is_some()
        );
    }

    #[test]
    fn the_form_of_a_reconcile_fn() {
        let (signature, errors) = read_as(
            MarkKind::Reconcile,
            parse_quote! {
                async fn check(&self, call: &External<'_>, ride: &Ride, request: &R) -> Result<Reconciled<Charge>, E>
            },
        );
        assert_eq!(errors, [""; 0]);
        assert!(signature.values.len() == 1 && signature.request.is_some());
    }

    #[test]
    fn each_departure_is_reported() {
        let cases: [(MarkKind, syn::Signature, &str); 19] = [
            (
                MarkKind::Atomic,
                parse_quote!(fn f(&self, tx: &mut Tx<'_>) -> Result<(), E>),
                "is an `async fn`",
            ),
            (
                MarkKind::Atomic,
                parse_quote!(async unsafe fn f(&self, tx: &mut Tx<'_>) -> Result<(), E>),
                "`unsafe` asks",
            ),
            (
                MarkKind::Atomic,
                parse_quote!(async fn f<T>(&self, tx: &mut Tx<'_>) -> Result<(), E>),
                "put `T` on the impl block",
            ),
            (
                MarkKind::Atomic,
                parse_quote!(async fn f(self, tx: &mut Tx<'_>) -> Result<(), E>),
                "write `&self`, not `self`",
            ),
            (
                MarkKind::Atomic,
                parse_quote!(async fn f(&mut self, tx: &mut Tx<'_>) -> Result<(), E>),
                "write `&self`, not `&mut self`",
            ),
            (
                MarkKind::Atomic,
                parse_quote!(async fn f(tx: &mut Tx<'_>) -> Result<(), E>),
                "takes `&self` first",
            ),
            (
                MarkKind::Atomic,
                parse_quote!(async fn f(&self) -> Result<(), E>),
                "needs its capability behind `&self`: `tx: &mut Tx<'_>`",
            ),
            (
                MarkKind::Atomic,
                parse_quote!(async fn f(&self, call: &External<'_>) -> Result<(), E>),
                "makes no outside call",
            ),
            (
                MarkKind::External,
                parse_quote!(async fn f(&self, tx: &mut Tx<'_>) -> Result<(), E>),
                "holds no transaction while it waits",
            ),
            (
                MarkKind::Atomic,
                parse_quote!(async fn f(&self, tx: &Tx<'_>) -> Result<(), E>),
                "write `&mut Tx<'_>`",
            ),
            (
                MarkKind::Atomic,
                parse_quote!(async fn f(&self, r: &Ride, tx: &mut Tx<'_>) -> Result<(), E>),
                "comes first",
            ),
            (
                MarkKind::Atomic,
                parse_quote!(async fn f(&self, tx: &mut Tx<'_>, r: Ride) -> Result<(), E>),
                "write `r: &Ride`",
            ),
            (
                MarkKind::Atomic,
                parse_quote!(async fn f(&self, tx: &mut Tx<'_>, r: &str) -> Result<(), E>),
                "take `&String`",
            ),
            (
                MarkKind::Atomic,
                parse_quote!(async fn f(&self, tx: &mut Tx<'_>, request: R) -> Result<(), E>),
                "write `request: &R`",
            ),
            (
                MarkKind::Atomic,
                parse_quote!(async fn f(&self, tx: &mut Tx<'_>)),
                "returns a `Result<T, E>`",
            ),
            (
                MarkKind::OnReject,
                parse_quote!(async fn f(&self, tx: &mut Tx<'_>) -> (u8, u8)),
                "not `(u8, u8)`",
            ),
            (
                MarkKind::Reconcile,
                parse_quote!(async fn f(&self, tx: &mut Tx<'_>) -> Result<Reconciled<()>, E>),
                "a `reconcile` fn takes `&External<'_>`",
            ),
            (
                MarkKind::Reconcile,
                parse_quote!(async fn f(&self, call: &External<'_>)),
                "returns a `Result<Reconciled<T>, E>`",
            ),
            (
                MarkKind::Reconcile,
                parse_quote!(async fn f(&self, call: &External<'_>, r: &Rejection) -> Result<Reconciled<()>, E>),
                "a `reconcile` fn has no rejection",
            ),
        ];
        for (kind, signature, message) in cases {
            let (_, errors) = read_as(kind, signature);
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert!(errors[0].contains(message), "{errors:?}");
        }
    }
}
