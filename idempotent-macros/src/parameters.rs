//! The parameters of a marked fn behind `&self`: the capability, the values, the rejection, the request.
//! Which is which shows in the type's last word and in the name `request`; the macro sees no more.

use proc_macro2::Ident;
use syn::{Pat, Type};

use crate::errors::Errors;
use crate::marks::MarkKind;
use crate::signature::{Signature, Ty, readable, without_groups};
use crate::text::plain;

/// A parameter behind `&self`.
pub(crate) struct Parameter<'a> {
    whole: &'a syn::PatType,
    /// Its name, if it is not a pattern.
    name: Option<Ident>,
    form: Form,
    /// The type behind the reference.
    inner: &'a Type,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Value,
    Shared,
    Mutable,
}

impl<'a> Parameter<'a> {
    pub(crate) fn new(whole: &'a syn::PatType) -> Self {
        let name = match &*whole.pat {
            Pat::Ident(pattern) => Some(pattern.ident.clone()),
            _ => None,
        };
        let (form, inner) = match without_groups(&whole.ty) {
            Type::Reference(reference) if reference.mutability.is_some() => {
                (Form::Mutable, &*reference.elem)
            }
            Type::Reference(reference) => (Form::Shared, &*reference.elem),
            other => (Form::Value, other),
        };
        Self {
            whole,
            name,
            form,
            inner: without_groups(inner),
        }
    }

    fn shown(&self) -> String {
        self.name.as_ref().map_or("value".to_owned(), plain)
    }

    /// The last word of the type's path.
    fn type_name(&self) -> Option<String> {
        match self.inner {
            Type::Path(path) => path
                .path
                .segments
                .last()
                .map(|segment| segment.ident.to_string()),
            _ => None,
        }
    }

    fn is_capability(&self) -> bool {
        self.type_name()
            .is_some_and(|name| name == "Tx" || name == "External")
    }
}

/// Checks the capability, and gives it and the other parameters.
pub(crate) fn capability<'p, 'a>(
    kind: MarkKind,
    name: &Ident,
    parameters: &'p [Parameter<'a>],
    errors: &mut Errors,
) -> (Option<Ty>, Vec<&'p Parameter<'a>>) {
    let (capabilities, others): (Vec<_>, Vec<_>) = parameters
        .iter()
        .partition(|parameter| parameter.is_capability());
    let (own, form) = match kind {
        MarkKind::Atomic | MarkKind::OnReject => ("Tx", Form::Mutable),
        MarkKind::External | MarkKind::Reconcile => ("External", Form::Shared),
    };
    let expected = kind.capability();
    let is_own = |parameter: &Parameter<'_>| parameter.type_name().is_some_and(|name| name == own);
    for foreign in capabilities.iter().filter(|parameter| !is_own(parameter)) {
        let why = match kind {
            MarkKind::Atomic => {
                "an atomic phase takes `&mut Tx<'_>` and makes no outside call: the call could not be rolled back, and the transaction would wait for it; move the call to an `#[external(..)]` phase"
            }
            MarkKind::OnReject => {
                "an `on_reject` fn takes `&mut Tx<'_>` and makes no outside call: it runs in the transaction that stores the rejection; work that needs the outside again is a branch of the flow"
            }
            MarkKind::Reconcile => {
                "a `reconcile` fn takes `&External<'_>`: it asks the outside what became of a call, and holds no transaction while it waits"
            }
            MarkKind::External => {
                "an external phase takes `&External<'_>`: it holds no transaction while it waits; store the result in the `#[atomic(..)]` phase that follows"
            }
        };
        errors.on(&foreign.whole.ty, why);
    }
    let mut owns = capabilities.iter().filter(|parameter| is_own(parameter));
    match owns.next() {
        None if capabilities.is_empty() => {
            errors.on(name, format!("`{name}` needs its capability behind `&self`: `{}`; only the engine can make one", kind.parameter()));
        }
        None => {}
        Some(first) => {
            if first.form != form {
                errors.on(
                    &first.whole.ty,
                    format!("the engine lends the capability: write `{expected}`"),
                );
            } else if !std::ptr::eq(first.whole, parameters[0].whole) && capabilities.len() == 1 {
                errors.on(
                    first.whole,
                    format!(
                        "the capability comes first, right behind `&self`: `{}`",
                        readable(first.whole)
                    ),
                );
            }
            for second in owns {
                errors.on(
                    second.whole,
                    "a phase has one capability; this is the second",
                );
            }
        }
    }
    (
        capabilities
            .first()
            .map(|parameter| Ty(parameter.inner.clone())),
        others,
    )
}

/// Reads one of the other parameters.
pub(crate) fn take(
    kind: MarkKind,
    parameter: &Parameter<'_>,
    is_last: bool,
    read: &mut Signature,
    errors: &mut Errors,
) {
    let shown = parameter.shown();
    let inner = readable(parameter.inner);
    if shown == "request" {
        if parameter.form != Form::Shared {
            errors.on(&parameter.whole.ty, format!("the request is lent, so that the phase can be run again: write `request: &{inner}`"));
        } else if !is_last {
            errors.on(
                parameter.whole,
                "`request` is the last parameter, behind the values",
            );
        }
        read.request = Some(Ty(parameter.inner.clone()));
    } else if parameter
        .type_name()
        .is_some_and(|name| name == "Rejection")
    {
        if kind != MarkKind::OnReject {
            errors.on(
                &parameter.whole.ty,
                format!(
                    "{} has no rejection to look at; `#[on_reject(..)]` fns do",
                    kind.what()
                ),
            );
        } else if parameter.form != Form::Shared {
            errors.on(
                &parameter.whole.ty,
                "the rejection is lent: write `rejection: &Rejection`",
            );
        } else if read.takes_rejection {
            errors.on(parameter.whole, "the rejection is asked for twice");
        } else if read.request.is_some() {
            errors.on(
                parameter.whole,
                "`rejection` stands before `request`, which is the last parameter",
            );
        }
        read.takes_rejection = true;
    } else {
        if parameter.form != Form::Shared {
            errors.on(
                &parameter.whole.ty,
                format!("stored values are lent: write `{shown}: &{inner}`"),
            );
        } else if let Some(why) = cannot_be_stored(parameter.inner) {
            errors.on(
                &parameter.whole.ty,
                format!("`{inner}` cannot be read back from the database: {why}"),
            );
        } else if read.takes_rejection {
            errors.on(
                parameter.whole,
                "the values stand before the rejection, right behind the capability",
            );
        }
        read.values.push(Ty(parameter.inner.clone()));
    }
}

/// Why no value of this type can come back from storage, as far as the tokens tell.
fn cannot_be_stored(ty: &Type) -> Option<&'static str> {
    match ty {
        Type::Path(path) if path.path.is_ident("str") => {
            Some("it is a view of a `String`; take `&String`")
        }
        Type::Slice(_) => Some("it is a view of a `Vec`; take `&Vec<_>`"),
        Type::ImplTrait(_) | Type::TraitObject(_) | Type::Infer(_) => {
            Some("it names no type; take the type that the phase before returns")
        }
        Type::Reference(_) => Some("it borrows; take the type that owns the data"),
        _ => None,
    }
}
