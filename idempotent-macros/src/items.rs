//! The items beside the block that users name in their own code: the enum of the recovery points, and
//! for each phase with branches the enum of its outcomes. They are also there while something is wrong
//! with the flow, so that one mistake is not followed by "cannot find type".

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, format_ident, quote};
use syn::spanned::Spanned;
use syn::{Generics, WherePredicate, parse_quote_spanned};

use crate::docs;
use crate::graph::FINISHED;
use crate::model::{Flow, Phase};
use crate::parse::Block;
use crate::text::{pascal_case, plain, snake_case};

/// `RideFlowRecoveryPoint`
pub(crate) fn recovery_point_name(flow: &Flow) -> Ident {
    format_ident!("{}RecoveryPoint", flow.ident, span = Span::call_site())
}

/// `BookingReserveOutcome`
pub(crate) fn outcome_name(flow: &Flow, phase: &Phase) -> Ident {
    format_ident!(
        "{}{}Outcome",
        flow.ident,
        pascal_case(&plain(&phase.name)),
        span = Span::call_site()
    )
}

/// The same hygiene as all generated code, but errors point to where the user caused them.
pub(crate) fn blame(cause: impl ToTokens) -> Span {
    Span::call_site().located_at(cause.to_token_stream().span())
}

/// The generics of the block, and what every flow must be beside them. Said as a condition of the
/// implementation: a flow that cannot be shared between threads is then one error, on its type, and not
/// one at each place where the generated code relies on it; and a generic client needs no bounds for it.
pub(crate) fn flow_generics(block: &Block) -> Generics {
    let mut generics = block.generics.clone();
    let self_ty = &block.self_ty;
    let shared: WherePredicate = parse_quote_spanned! {blame(self_ty)=>
        #self_ty: ::core::marker::Send + ::core::marker::Sync + 'static
    };
    generics.make_where_clause().predicates.push(shared);
    generics
}

/// The enum of the recovery points.
pub(crate) fn recovery_points(block: &Block, flow: &Flow) -> TokenStream {
    let name = recovery_point_name(flow);
    let cfgs = &block.cfgs;
    let stored_flow = &flow.options.name;
    let about = format!("The recovery points of [`{}`].", flow.ident);
    let points = flow.points();
    let stored = points.iter().map(|point| snake_case(&point.to_string()));
    let docs = points.iter().map(|point| docs::point(flow, point));
    quote! {
        #cfgs
        ::idempotent_core::__private::recovery_points! {
            #[doc = #about]
            pub enum #name of #stored_flow {
                #(#[doc = #docs] #points = #stored,)*
            }
        }
    }
}

/// The enums of the outcomes. They are generic over what their branches carry, so that they never
/// need a type parameter of the flow.
pub(crate) fn outcomes(block: &Block, flow: &Flow) -> TokenStream {
    let cfgs = &block.cfgs;
    let outcome = |phase: &Phase| {
        let name = outcome_name(flow, phase);
        let about = format!(
            "Where `{}` of [`{}`] may lead.",
            plain(&phase.name),
            flow.ident
        );
        let branches = &phase.arrow.to;
        let docs = branches.iter().map(|branch| {
            if *branch == FINISHED {
                "The flow ends, with this reply.".to_owned()
            } else {
                format!("The flow goes on at `{branch}`, with this value.")
            }
        });
        quote! {
            #cfgs
            #[doc = #about]
            #[derive(::core::fmt::Debug, ::core::clone::Clone, ::core::cmp::PartialEq)]
            pub enum #name<#(#branches),*> {
                #(#[doc = #docs] #branches(#branches),)*
            }
        }
    };
    flow.phases
        .iter()
        .filter(|phase| phase.has_branches())
        .map(outcome)
        .collect()
}
