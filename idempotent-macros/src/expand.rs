//! Writes the implementation of `Flow`. It is straight-line code without closures, as one would write it
//! by hand, so that it can be read when expanded, and so that the compiler's complaints about a phase
//! (its future is not `Send`, its value is not what the next one takes) find their way to the phase.
//!
//! Spans: names and types of the user's keep theirs. Code that may not compile because of something the
//! user wrote is [blamed](blame) on that. All else is on the attribute, where no lint looks.

use proc_macro2::{Ident, Literal, Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};

use crate::docs;
use crate::graph::FINISHED;
use crate::items::{self, blame};
use crate::model::{Flow, Handler, Phase, Reconcile, Takes};
use crate::parse::Block;
use crate::signature::Ty;
use crate::stored;
use crate::text::snake_case;

/// The block, and what is made from it.
pub(crate) fn flow(block: &Block, flow: &Flow) -> TokenStream {
    let Block {
        attributes,
        rest,
        cfgs,
        self_ty,
        ..
    } = block;
    let generics = items::flow_generics(block);
    let (impl_generics, _, where_clause) = generics.split_for_impl();
    let docs = docs::block(flow);
    let recovery_points = items::recovery_points(block, flow);
    let outcomes = items::outcomes(block, flow);
    let reference = items::reference(block, flow);
    let recovery_point = items::recovery_point_name(flow);
    let request = flow.request();
    let graph = stored::graph(flow);
    let check = stored::check(flow);
    let advance = advance(flow);
    let reject = reject(flow);
    quote! {
        #attributes
        // What is lent to a phase is what is stored, a `String` and no `str`.
        #[allow(clippy::ptr_arg)]
        #rest

        #recovery_points

        #outcomes

        #reference

        #cfgs
        // Here and not on the block: rustdoc leaves out a block whose fns are all private.
        #docs
        impl #impl_generics ::idempotent_core::Flow for #self_ty #where_clause {
            type Request = #request;
            type RecoveryPoint = #recovery_point;

            #graph

            #check

            #advance

            #reject
        }
    }
}

fn advance(flow: &Flow) -> TokenStream {
    let recovery_point = items::recovery_point_name(flow);
    let arms = flow.phases.iter().enumerate().map(|(index, phase)| {
        let from = &phase.arrow.from;
        let index = Literal::usize_unsuffixed(index);
        let body = if phase.is_external() {
            external(flow, phase)
        } else {
            atomic(flow, phase)
        };
        quote! {
            #recovery_point::#from => {
                let phase = &Self::GRAPH.phases()[#index];
                #body
            }
        }
    });
    quote! {
        async fn advance(
            &self,
            from: Self::RecoveryPoint,
            attempt: &mut ::idempotent_core::__private::Attempt,
            request: &Self::Request,
        ) -> ::core::result::Result<(), ::idempotent_core::__private::Halt> {
            match from {
                #(#arms)*
                #recovery_point::Finished => ::core::result::Result::Err(attempt.already_finished()),
            }
        }
    }
}

/// One transaction: the user's statements and the next point.
fn atomic(flow: &Flow, phase: &Phase) -> TokenStream {
    let takes = phase.takes();
    let reads = reads(flow, &[&takes]);
    let call = call(&phase.name, lent_tx(&takes), &takes);
    let returned = returned(flow, phase);
    let entered = entered(&phase.name, returned, call);
    let ends = ends(flow, phase)
        .into_iter()
        .map(|(pattern, end)| quote!(::core::result::Result::Ok(#pattern) => #end,));
    quote! {
        #reads
        let mut tx = attempt.begin(phase).await?;
        let outcome = #entered;
        match outcome {
            #(#ends)*
            ::core::result::Result::Err(halt) => attempt.roll_back(tx, halt).await,
        }
    }
}

/// No transaction: what the outside answered is carried on.
fn external(flow: &Flow, phase: &Phase) -> TokenStream {
    let takes = phase.takes();
    let reconcile = flow
        .reconcile_at(&phase.arrow.from)
        .filter(|_| phase.has_intent());
    let reconciling = reconcile.map(Reconcile::takes);
    let takers: Vec<&Takes<'_>> = [&takes].into_iter().chain(&reconciling).collect();
    let reads = reads(flow, &takers);
    let call = call(&phase.name, lent_call(&takes), &takes);
    let entered = entered(&phase.name, returned(flow, phase), call);
    let mut ends = ends(flow, phase);
    let end = match ends.pop() {
        Some((_, end)) if ends.is_empty() => end,
        last => {
            let ends = ends
                .into_iter()
                .chain(last)
                .map(|(pattern, end)| quote!(#pattern => #end,));
            quote!(match value { #(#ends)* })
        }
    };
    if !phase.has_intent() {
        return quote! {
            #reads
            let call = attempt.external(phase)?;
            let value = #entered?;
            #end
        };
    }
    let (unknown, span) = match reconcile {
        Some(reconcile) => (reconciled(flow, phase, reconcile), blame(&reconcile.name)),
        None => (
            quote!(return ::core::result::Result::Err(attempt.unreconciled(phase))),
            Span::call_site(),
        ),
    };
    let called = quote_spanned!(blame(&phase.name)=> #entered?);
    // Both fns give the same type; where no phase takes the value, it is here that they are compared.
    let value = quote_spanned! {span=>
        match intended {
            ::idempotent_core::__private::Intended::Call => #called,
            ::idempotent_core::__private::Intended::Unknown => #unknown,
        }
    };
    quote! {
        #reads
        let intended = attempt.intend(phase).await?;
        let call = attempt.external(phase)?;
        let value = #value;
        #end
    }
}

/// The call may have been made: the outside is asked, and what it says stands for what the phase gives.
fn reconciled(flow: &Flow, phase: &Phase, reconcile: &Reconcile) -> TokenStream {
    let takes = reconcile.takes();
    let call = call(&reconcile.name, lent_call(&takes), &takes);
    let returned = returned(flow, phase);
    let returned = quote!(::idempotent_core::Reconciled<#returned>);
    let entered = entered(&reconcile.name, returned, call);
    let value = quote_spanned!(blame(&reconcile.name)=> attempt.reconciled(phase, asked)?);
    quote! {{
        let asked = #entered?;
        #value
    }}
}

fn lent_tx(takes: &Takes<'_>) -> TokenStream {
    quote_spanned!(blame(&takes.signature.capability)=> &mut tx.lend())
}

fn lent_call(takes: &Takes<'_>) -> TokenStream {
    quote_spanned!(blame(&takes.signature.capability)=> &call)
}

/// What the phase must return: what is stored where it leads.
fn returned(flow: &Flow, phase: &Phase) -> TokenStream {
    let carried = phase.arrow.to.iter().map(|to| match flow.payload(to) {
        _ if *to == FINISHED => quote!(::idempotent_core::Reply<_>),
        Some(ty) => quote!(#ty),
        None => quote!(_),
    });
    if phase.has_branches() {
        let outcome = items::outcome_name(flow, phase);
        quote!(#outcome<#(#carried),*>)
    } else {
        quote!(#(#carried)*)
    }
}

/// The user's fn, run. It is told here what it must return, in full: the one place where the
/// compiler can hold what it does return against that, and the error lands on the fn's name.
fn entered(name: &Ident, returned: TokenStream, call: TokenStream) -> TokenStream {
    quote_spanned!(blame(name)=> attempt.enter::<#returned, _>(phase, #call).await)
}

/// For each branch, the pattern of what the phase returned and what is done with it.
fn ends(flow: &Flow, phase: &Phase) -> Vec<(TokenStream, TokenStream)> {
    let outcome = items::outcome_name(flow, phase);
    let end = |to: &Ident| {
        let pattern = if phase.has_branches() {
            quote!(#outcome::#to(value))
        } else {
            quote!(value)
        };
        (pattern, arrive(flow, phase, to))
    };
    phase.arrow.to.iter().map(end).collect()
}

fn arrive(flow: &Flow, phase: &Phase, to: &Ident) -> TokenStream {
    let recovery_point = items::recovery_point_name(flow);
    // One that cannot be stored is reported once, at the fn that takes it or else at the one that returns it.
    let cause = flow.payload(to).or(phase.signature.output.as_ref());
    let span = blame(cause);
    match (phase.is_external(), *to == FINISHED) {
        (true, false) => {
            quote_spanned!(span=> attempt.carry(#recovery_point::#to, value).await)
        }
        (true, true) => quote_spanned!(span=> attempt.finish_external(value).await),
        (false, false) => {
            quote_spanned!(span=> attempt.checkpoint(tx, #recovery_point::#to, value).await)
        }
        (false, true) => quote_spanned!(span=> attempt.finish(tx, value).await),
    }
}

fn reject(flow: &Flow) -> TokenStream {
    let recovery_point = items::recovery_point_name(flow);
    let arms: Vec<TokenStream> = flow
        .handlers
        .iter()
        .enumerate()
        .flat_map(|(index, handler)| handler.at.iter().map(move |at| (index, handler, at)))
        .map(|(index, handler, at)| {
            let index = Literal::usize_unsuffixed(index);
            let body = rejection(flow, handler, at);
            quote! {
                #recovery_point::#at => {
                    let handler = &Self::GRAPH.on_reject()[#index];
                    #body
                }
            }
        })
        .collect();
    let bare = quote!(attempt.store_bare_rejection(rejection).await);
    let body = if arms.is_empty() {
        bare
    } else {
        quote!(match at { #(#arms)* _ => #bare, })
    };
    let at = if arms.is_empty() {
        quote!(_)
    } else {
        quote!(at)
    };
    let request = if flow
        .handlers
        .iter()
        .any(|handler| handler.signature.request.is_some())
    {
        quote!(request)
    } else {
        quote!(_)
    };
    quote! {
        async fn reject(
            &self,
            #at: Self::RecoveryPoint,
            attempt: &mut ::idempotent_core::__private::Attempt,
            rejection: &::idempotent_core::__private::Rejection,
            #request: &Self::Request,
        ) -> ::core::result::Result<(), ::idempotent_core::__private::Halt> {
            #body
        }
    }
}

/// One transaction: the user's statements and the rejection.
fn rejection(flow: &Flow, handler: &Handler, at: &Ident) -> TokenStream {
    let takes = handler.takes(at);
    let reads = reads(flow, &[&takes]);
    let call = call(&handler.name, lent_tx(&takes), &takes);
    let entered =
        quote_spanned!(blame(&handler.name)=> attempt.enter_rejection(handler, #call).await);
    quote! {
        #reads
        let mut tx = attempt.begin_rejection(handler).await?;
        let outcome = #entered;
        match outcome {
            ::core::result::Result::Ok(()) => attempt.store_rejection(tx, rejection).await,
            ::core::result::Result::Err(halt) => attempt.roll_back(tx, halt).await,
        }
    }
}

/// `let at_ride_created: Ride = attempt.value(RideFlowRecoveryPoint::RideCreated)?;`, for all values
/// that the fns take, each once.
fn reads(flow: &Flow, takers: &[&Takes<'_>]) -> TokenStream {
    let recovery_point = items::recovery_point_name(flow);
    let mut values: Vec<(&Ident, &Ty)> = Vec::new();
    for (point, ty) in takers.iter().flat_map(|takes| takes.values()) {
        if !values.iter().any(|(read, _)| *read == point) {
            values.push((point, ty));
        }
    }
    let read = |(point, ty): (&Ident, &Ty)| {
        let stored_as = flow.payload(point).unwrap_or(ty);
        let local = local(point, Span::call_site());
        let value = quote_spanned!(blame(stored_as)=> attempt.value(#recovery_point::#point));
        quote!(let #local: #stored_as = #value?;)
    };
    values.into_iter().map(read).collect()
}

/// `Self::charge(self, &call, &at_ride_created, request)`
fn call(name: &Ident, capability: TokenStream, takes: &Takes<'_>) -> TokenStream {
    let values = takes.values().into_iter().map(|(point, ty)| {
        let span = blame(ty);
        let local = local(point, span);
        quote_spanned!(span=> &#local)
    });
    let signature = takes.signature;
    let rejection = signature.takes_rejection.then(|| quote!(rejection));
    let request = signature.request.as_ref();
    let request = request.map(|ty| quote_spanned!(blame(ty)=> request));
    let arguments = [capability]
        .into_iter()
        .chain(values)
        .chain(rejection)
        .chain(request);
    quote_spanned!(blame(name)=> Self::#name(self, #(#arguments),*))
}

fn local(point: &Ident, span: Span) -> Ident {
    format_ident!("at_{}", snake_case(&point.to_string()), span = span)
}
