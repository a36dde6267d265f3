//! Writes what the engine and the rows in the database must agree on: the graph, in which everything has
//! the name under which it is stored, and the check whether stored values can still be read.

use proc_macro2::{Ident, Literal, TokenStream};
use quote::{quote, quote_spanned};

use crate::items::{self, blame};
use crate::model::{Flow, Phase};
use crate::phase_options::Isolation;
use crate::text::{plain, snake_case};

fn stored(point: &Ident) -> String {
    snake_case(&point.to_string())
}

/// The graph as a constant.
pub(crate) fn graph(flow: &Flow) -> TokenStream {
    let name = &flow.options.name;
    let lease = Literal::u64_unsuffixed(flow.options.lease_millis);
    let retention = Literal::u64_unsuffixed(flow.options.retention_millis);
    let points = flow.points().into_iter().map(|point| {
        let name = stored(&point);
        let keeps = flow.keeps(&point);
        let keeps = keeps.iter().map(stored);
        let old_names = flow.old_names(&point);
        let renamed_from =
            (!old_names.is_empty()).then(|| quote!(.renamed_from(&[#(#old_names),*])));
        quote!(::idempotent_core::__private::Point::new(#name, &[#(#keeps),*]) #renamed_from)
    });
    let phases = flow.phases.iter().map(phase_in_graph);
    let handlers = flow.handlers.iter().map(|handler| {
        let name = plain(&handler.name);
        let at = handler.at.iter().map(stored);
        quote!(::idempotent_core::__private::OnReject::new(#name, &[#(#at),*]))
    });
    let reconciles = flow.reconciles.iter().map(|reconcile| {
        let name = plain(&reconcile.name);
        let at = stored(&reconcile.at);
        quote!(::idempotent_core::__private::Reconcile::new(#name, #at))
    });
    let reconciles =
        (!flow.reconciles.is_empty()).then(|| quote!(.reconciles(&[#(#reconciles),*])));
    quote! {
        const GRAPH: &'static ::idempotent_core::__private::Graph = &::idempotent_core::__private::Graph::new(
            #name,
            #lease,
            #retention,
            &[#(#points),*],
            &[#(#phases),*],
            &[#(#handlers),*],
        ) #reconciles;
    }
}

fn phase_in_graph(phase: &Phase) -> TokenStream {
    let name = plain(&phase.name);
    let from = stored(&phase.arrow.from);
    let to = phase.arrow.to.iter().map(stored);
    let options = &phase.options;
    let made = if phase.is_external() {
        let call = phase.call_name();
        quote!(::idempotent_core::__private::Phase::external(#name, #from, &[#(#to),*], #call))
    } else {
        quote!(::idempotent_core::__private::Phase::atomic(#name, #from, &[#(#to),*]))
    };
    let timeout = options
        .timeout_millis
        .map(Literal::u64_unsuffixed)
        .map(|millis| quote!(.timeout_millis(#millis)));
    let eager = options.eager.then(|| quote!(.eager()));
    let isolation = options.isolation.map(|isolation| {
        let level = match isolation {
            Isolation::ReadCommitted => quote!(ReadCommitted),
            Isolation::RepeatableRead => quote!(RepeatableRead),
            Isolation::Serializable => quote!(Serializable),
        };
        quote!(.isolation(::idempotent_core::__private::Isolation::#level))
    });
    let retries = options.retries.map(Literal::u32_unsuffixed).map(|times| {
        let first = Literal::u64_unsuffixed(options.backoff.first_millis);
        let longest = Literal::u64_unsuffixed(options.backoff.longest_millis);
        quote!(.retries(#times, #first, #longest))
    });
    let at_most_once = options.at_most_once.then(|| quote!(.at_most_once()));
    let dedupes_for = options
        .dedupes_for_millis
        .map(Literal::u64_unsuffixed)
        .map(|millis| quote!(.dedupes_for_millis(#millis)));
    quote!(#made #timeout #eager #isolation #retries #at_most_once #dedupes_for)
}

/// Whether what is stored at a point can be read: all that the fns at this point and ahead take.
pub(crate) fn check(flow: &Flow) -> TokenStream {
    let recovery_point = items::recovery_point_name(flow);
    let mut nothing_to_read = Vec::new();
    let mut arms = Vec::new();
    for point in flow.points() {
        let read: Vec<TokenStream> = flow
            .keeps(&point)
            .iter()
            .filter(|kept| flow.is_taken_from(&point, kept))
            .filter_map(|kept| Some((stored(kept), flow.payload(kept)?)))
            .map(|(kept, ty)| {
                let decoded = quote_spanned!(blame(ty)=> state.decode::<#ty>(#kept));
                quote!(#decoded?;)
            })
            .collect();
        if read.is_empty() {
            nothing_to_read.push(point);
        } else {
            arms.push(quote!(#recovery_point::#point => { #(#read)* }));
        }
    }
    let (point, state) = if arms.is_empty() {
        (quote!(_), quote!(_))
    } else {
        (quote!(point), quote!(state))
    };
    let body = (!arms.is_empty()).then(|| {
        quote! {
            match point {
                #(#recovery_point::#nothing_to_read)|* => {}
                #(#arms)*
            }
        }
    });
    quote! {
        fn check(
            #point: Self::RecoveryPoint,
            #state: &::idempotent_core::__private::State,
        ) -> ::core::result::Result<(), ::idempotent_core::__private::Undecodable> {
            #body
            ::core::result::Result::Ok(())
        }
    }
}
