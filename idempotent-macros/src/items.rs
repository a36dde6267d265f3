//! The items beside the block that users name in their own code: the enum of the recovery points, for
//! each phase with branches the enum of its outcomes, and the reference by which the flow is staged. They are also there while something is wrong
//! with the flow, so that one mistake is not followed by "cannot find type".

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, format_ident, quote};
use syn::spanned::Spanned;
use syn::{GenericParam, Generics, WherePredicate, parse_quote_spanned};

use crate::docs;
use crate::graph::FINISHED;
use crate::model::{Flow, Phase};
use crate::parse::Block;
use crate::signature::Ty;
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

/// The reference by which a phase of another flow stages this one, as a value and as a type. There is
/// none if the request's type depends on the flow's parameters: whoever stages would have to know them.
///
/// It has the request as a parameter, with a default, so that a private request can be staged, too: the
/// compiler refuses to let a public type name a private one in a trait.
pub(crate) fn reference(block: &Block, flow: &Flow) -> TokenStream {
    let Some(request) = flow.request().filter(|request| is_free(block, request)) else {
        return TokenStream::new();
    };
    let name = format_ident!("{}Reference", flow.ident, span = Span::call_site());
    let cfgs = &block.cfgs;
    let stored_flow = &flow.options.name;
    let about = format!(
        "Stages [`{}`] from a phase of another flow: `tx.stage({name}, \"suffix\", &request)`.",
        flow.ident
    );
    quote! {
        #cfgs
        #[doc = #about]
        #[derive(::core::fmt::Debug, ::core::clone::Clone, ::core::marker::Copy)]
        pub struct #name<__Request = #request> {
            request: ::core::marker::PhantomData<fn(&__Request)>,
        }

        #cfgs
        #[doc = #about]
        pub const #name: #name = #name { request: ::core::marker::PhantomData };

        #cfgs
        impl<__Request: ::idempotent_core::Payload + ::core::marker::Sync> ::idempotent_core::FlowReference
            for #name<__Request>
        {
            type Request = __Request;
            const FLOW: &'static str = #stored_flow;
        }
    }
}

/// Whether the type means the same outside of the block.
fn is_free(block: &Block, ty: &Ty) -> bool {
    let parameters: Vec<String> = block
        .generics
        .params
        .iter()
        .map(|parameter| match parameter {
            GenericParam::Type(parameter) => parameter.ident.to_string(),
            GenericParam::Const(parameter) => parameter.ident.to_string(),
            GenericParam::Lifetime(parameter) => parameter.lifetime.ident.to_string(),
        })
        .chain(["Self".to_owned()])
        .collect();
    !names_any(ty.to_token_stream(), &parameters)
}

fn names_any(tokens: TokenStream, names: &[String]) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) => names.contains(&ident.to_string()),
        TokenTree::Group(group) => names_any(group.stream(), names),
        TokenTree::Punct(_) | TokenTree::Literal(_) => false,
    })
}
