//! The fns beside the phases: those that follow a rejection, and those that ask what became of a call.
//! They are called where a phase stands, so each needs such a phase, and no two may answer for one.

use proc_macro2::{Ident, Span};

use crate::errors::Errors;
use crate::graph::{Arrows, FINISHED, STARTED};
use crate::model::{Flow, Handler, Phase, Reconcile};
use crate::text::{list, suggestion};
use crate::validate::{count, with};

/// Reports what is wrong with the `on_reject` and the `reconcile` fns.
pub(crate) fn report(flow: &Flow, arrows: &Arrows, errors: &mut Errors) {
    handlers(flow, arrows, errors);
    reconciles(flow, arrows, errors);
}

fn handlers(flow: &Flow, arrows: &Arrows, errors: &mut Errors) {
    let points = flow.points();
    let mut seen: Vec<(&Ident, &Handler)> = Vec::new();
    for handler in &flow.handlers {
        for at in &handler.at {
            let known = points.contains(at);
            if *at == FINISHED {
                errors.on(at, "nothing is rejected at `Finished`: the reply is stored");
            } else if !known && flow.incomplete {
                // The arrow that names it may be one of those that could not be read.
            } else if !known {
                let names: Vec<String> = points
                    .iter()
                    .map(Ident::to_string)
                    .filter(|name| name != FINISHED)
                    .collect();
                let names = || names.iter().map(String::as_str);
                errors.on(
                    at,
                    format!(
                        "this flow has no point `{at}`{} (a phase may reject at {})",
                        suggestion(&at.to_string(), names()),
                        list(names())
                    ),
                );
            } else if !arrows.is_left(at) && !flow.incomplete {
                errors.on(at, format!("nobody leaves `{at}`, so no phase can reject there and `{}` would never be called", handler.name));
            }
            match seen.iter().find(|(point, _)| *point == at) {
                Some((_, other)) if other.name == handler.name => {
                    errors.on(at, format!("`{at}` is named twice"))
                }
                Some((_, other)) => errors.on(
                    at,
                    format!(
                        "a rejection at `{at}` is taken care of by `{}` already",
                        other.name
                    ),
                ),
                None => seen.push((at, handler)),
            }
        }
        let at: Vec<&Ident> = handler
            .at
            .iter()
            .filter(|at| points.contains(at) && **at != FINISHED)
            .collect();
        if !at.is_empty() {
            with(&handler.with, &at, flow, arrows, errors);
        }
        let started = Ident::new(STARTED, Span::call_site());
        if let Some(first) = handler
            .at
            .iter()
            .find(|at| **at == STARTED)
            .map(|_| &started)
            .or(handler.at.first())
        {
            count(
                &handler.name,
                first,
                handler.signature.values.len(),
                &handler.with,
                errors,
            );
        }
    }
}

fn reconciles(flow: &Flow, arrows: &Arrows, errors: &mut Errors) {
    let points = flow.points();
    for (index, reconcile) in flow.reconciles.iter().enumerate() {
        let Reconcile { name, at, .. } = reconcile;
        let mut phases = flow.phases.iter();
        match phases.find(|phase| phase.arrow.from == *at) {
            Some(phase) => asked_about(phase, reconcile, errors),
            None if flow.incomplete => {}
            None => errors.on(at, no_call_at(flow, at)),
        }
        let mut before = flow.reconciles[..index].iter();
        if let Some(other) = before.find(|other| other.at == *at) {
            errors.on(
                at,
                format!(
                    "`{}` asks already what became of the call that is made from `{at}`",
                    other.name
                ),
            );
        }
        if points.contains(at) {
            with(&reconcile.with, &[at], flow, arrows, errors);
        }
        count(
            name,
            at,
            reconcile.signature.values.len(),
            &reconcile.with,
            errors,
        );
    }
}

/// Only a call that is not simply made again leaves something to ask about.
fn asked_about(phase: &Phase, reconcile: &Reconcile, errors: &mut Errors) {
    let Reconcile { name, at, .. } = reconcile;
    let leaves = &phase.name;
    if !phase.is_external() {
        errors.on(
            at,
            format!("`{at}` is left by `{leaves}`, which is atomic and makes no outside call: its transaction was committed or it was not, so there is nothing for `{name}` to ask"),
        );
    } else if !phase.has_intent() {
        errors.on(
            at,
            format!("`{name}` would never be called: when nobody knows what became of the call of `{leaves}`, it is made again with the same key; if the outside does not know it by its key, mark `{leaves}` as `at_most_once`, or if it forgets keys, say after how long, as in `dedupes_for = \"24h\"`"),
        );
    }
}

fn no_call_at(flow: &Flow, at: &Ident) -> String {
    let asked_about: Vec<String> = flow
        .phases
        .iter()
        .filter(|phase| phase.has_intent())
        .map(|phase| phase.arrow.from.to_string())
        .collect();
    let names = || asked_about.iter().map(String::as_str);
    let meant = suggestion(&at.to_string(), names());
    let there_are = match asked_about.as_slice() {
        [] => " (no phase of this flow is marked `at_most_once` or `dedupes_for`)".to_owned(),
        _ => format!(" (calls to ask about are made from {})", list(names())),
    };
    format!("no phase leaves `{at}`, so there is no call to ask about{meant}{there_are}")
}

#[cfg(test)]
mod tests {
    use crate::tests::mistakes;
    use quote::quote;

    #[test]
    fn a_reconcile_fn_needs_a_call_to_ask_about() {
        let send = |options| {
            quote! {
                #[atomic(Started -> Packed)]
                async fn pack(&self, tx: &mut Tx<'_>, request: &R) -> Result<Parcel, E> { .. }
                #[external(Packed -> Finished #options)]
                async fn send(&self, call: &External<'_>) -> Result<Reply<()>, E> { .. }
            }
        };
        let ask = |at| {
            quote! {
                #[reconcile(#at)]
                async fn ask(&self, call: &External<'_>) -> Result<Reconciled<Reply<()>>, E> { .. }
            }
        };
        let once = send(quote!(, at_most_once));
        let always = send(quote!());
        let misspelt = send(quote!(, at_most_onec));
        let unread = send(quote!(, dedupes_for = "a day"));
        let packed = ask(quote!(Packed));
        let pakced = ask(quote!(Pakced));
        let started = ask(quote!(Started));
        let finished = ask(quote!(Finished));
        let broken = quote!(
            #[atomic(Broken)]
            async fn broken(&self, tx: &mut Tx<'_>) -> Result<(), E> {
                ..
            }
        );
        let second = quote! {
            #[reconcile(Packed)]
            async fn ask_again(&self, call: &External<'_>) -> Result<Reconciled<Reply<()>>, E> { .. }
        };
        for (block, messages) in [
            (quote!(#once #packed), vec![]),
            (quote!(#always #packed), vec!["`ask` would never be called"]),
            (
                quote!(#once #pakced),
                vec!["did you mean `Packed`? (calls to ask about are made from `Packed`)"],
            ),
            (
                quote!(#always #finished),
                vec!["no phase leaves `Finished`"],
            ),
            (
                quote!(#once #started),
                vec!["`Started` is left by `pack`, which is atomic"],
            ),
            (quote!(#once #packed #second), vec!["`ask` asks already"]),
            // One mistake, one error: what could not be read is not also missing.
            (
                quote!(#misspelt #packed),
                vec!["did you mean `at_most_once`?"],
            ),
            (quote!(#unread #packed), vec!["\"a day\" is no duration"]),
            (quote!(#once #pakced #broken), vec!["expected an arrow"]),
        ] {
            let found = mistakes(block);
            assert_eq!(found.len(), messages.len(), "{found:?}");
            for (found, expected) in found.iter().zip(messages) {
                assert!(found.contains(expected), "{found}");
            }
        }
    }
}
