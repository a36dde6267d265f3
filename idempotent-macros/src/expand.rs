//! Writes the implementation of `Flow`. It is straight-line code without closures, as one would write it
//! by hand, so that it can be read when expanded, and so that the compiler's complaints about a phase
//! (its future is not `Send`, its value is not what the next one takes) find their way to the phase.
//!
//! Spans: names and types of the user's keep theirs. Code that may not compile because of something the
//! user wrote is [blamed](blame) on that. All else is on the attribute, where no lint looks.

use proc_macro2::{Ident, Literal, Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};

use crate::attr::MarkKind;
use crate::docs;
use crate::graph::FINISHED;
use crate::items::{self, blame};
use crate::model::{Flow, Handler, Phase};
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
    let recovery_point = items::recovery_point_name(flow);
    let request = flow.request();
    let graph = stored::graph(flow);
    let check = stored::check(flow);
    let advance = advance(flow);
    let reject = reject(flow);
    quote! {
        #attributes
        #docs
        #rest

        #recovery_points

        #outcomes

        #cfgs
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
        let body = match phase.kind {
            MarkKind::External => external(flow, phase),
            MarkKind::Atomic | MarkKind::OnReject => atomic(flow, phase),
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
    let taken = Taken::by_phase(phase);
    let reads = taken.reads(flow);
    let call = taken.call(&phase.name, lent_tx(&phase.signature.capability));
    let entered = entered(flow, phase, call);
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
    let taken = Taken::by_phase(phase);
    let reads = taken.reads(flow);
    let lent = quote_spanned!(blame(&phase.signature.capability)=> &call);
    let call = taken.call(&phase.name, lent);
    let entered = entered(flow, phase, call);
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
    quote! {
        #reads
        let call = attempt.external(phase)?;
        let value = #entered?;
        #end
    }
}

fn lent_tx(capability: &Option<Ty>) -> TokenStream {
    quote_spanned!(blame(capability)=> &mut tx.lend())
}

/// The user's phase, run. It is told here what it must return, in full: the one place where the
/// compiler can hold what it does return against that, and the error lands on the phase's name.
fn entered(flow: &Flow, phase: &Phase, call: TokenStream) -> TokenStream {
    let carried = phase.arrow.to.iter().map(|to| match flow.payload(to) {
        _ if *to == FINISHED => quote!(::idempotent_core::Reply<_>),
        Some(ty) => quote!(#ty),
        None => quote!(_),
    });
    let returned = if phase.has_branches() {
        let outcome = items::outcome_name(flow, phase);
        quote!(#outcome<#(#carried),*>)
    } else {
        quote!(#(#carried)*)
    };
    quote_spanned!(blame(&phase.name)=> attempt.enter::<#returned, _>(phase, #call).await)
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
    match (phase.kind, *to == FINISHED) {
        (MarkKind::External, false) => {
            quote_spanned!(span=> attempt.carry(#recovery_point::#to, value).await)
        }
        (MarkKind::External, true) => quote_spanned!(span=> attempt.finish_external(value).await),
        (_, false) => {
            quote_spanned!(span=> attempt.checkpoint(tx, #recovery_point::#to, value).await)
        }
        (_, true) => quote_spanned!(span=> attempt.finish(tx, value).await),
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
    let taken = Taken::by_handler(handler, at);
    let reads = taken.reads(flow);
    let call = taken.call(&handler.name, lent_tx(&handler.signature.capability));
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

/// What a fn of the user's takes, behind `&self` and its capability.
struct Taken<'a> {
    values: Vec<(&'a Ident, &'a Ty)>,
    takes_rejection: bool,
    request: Option<&'a Ty>,
}

impl<'a> Taken<'a> {
    fn by_phase(phase: &'a Phase) -> Self {
        let values = phase
            .value()
            .map(|ty| (&phase.arrow.from, ty))
            .into_iter()
            .chain(phase.with())
            .collect();
        Self {
            values,
            takes_rejection: false,
            request: phase.signature.request.as_ref(),
        }
    }

    fn by_handler(handler: &'a Handler, at: &'a Ident) -> Self {
        let values = handler
            .value()
            .map(|ty| (at, ty))
            .into_iter()
            .chain(handler.with())
            .collect();
        let signature = &handler.signature;
        Self {
            values,
            takes_rejection: signature.takes_rejection,
            request: signature.request.as_ref(),
        }
    }

    /// `let at_ride_created: Ride = attempt.value(RideFlowRecoveryPoint::RideCreated)?;`
    fn reads(&self, flow: &Flow) -> TokenStream {
        let recovery_point = items::recovery_point_name(flow);
        let read = |(point, ty): &(&Ident, &Ty)| {
            let stored_as = flow.payload(point).unwrap_or(ty);
            let local = local(point, Span::call_site());
            let value = quote_spanned!(blame(stored_as)=> attempt.value(#recovery_point::#point));
            quote!(let #local: #stored_as = #value?;)
        };
        self.values.iter().map(read).collect()
    }

    /// `Self::charge(self, &call, &at_ride_created, request)`
    fn call(&self, name: &Ident, capability: TokenStream) -> TokenStream {
        let values = self.values.iter().map(|(point, ty)| {
            let span = blame(ty);
            let local = local(point, span);
            quote_spanned!(span=> &#local)
        });
        let rejection = self.takes_rejection.then(|| quote!(rejection));
        let request = self.request.map(|ty| quote_spanned!(blame(ty)=> request));
        let arguments = [capability]
            .into_iter()
            .chain(values)
            .chain(rejection)
            .chain(request);
        quote_spanned!(blame(name)=> Self::#name(self, #(#arguments),*))
    }
}

fn local(point: &Ident, span: Span) -> Ident {
    format_ident!("at_{}", snake_case(&point.to_string()), span = span)
}
