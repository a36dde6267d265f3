//! What stands in for the expansion when something was wrong: the user's block, so that an editor keeps
//! completing in it, and a flow of the right name that does nothing, so that one mistake gives one error
//! and not another one at each place where the flow is used.

use proc_macro2::TokenStream;
use quote::quote;

use crate::items;
use crate::model::Flow;
use crate::parse::Block;

/// The block and the stand-in.
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
    let recovery_points = items::recovery_points(block, flow);
    let outcomes = items::outcomes(block, flow);
    let reference = items::reference(block, flow);
    let recovery_point = items::recovery_point_name(flow);
    let request = flow
        .request()
        .map_or(quote!(()), |request| quote!(#request));
    quote! {
        #attributes
        #rest

        #recovery_points

        #outcomes

        #reference

        #cfgs
        impl #impl_generics ::idempotent_core::Flow for #self_ty #where_clause {
            type Request = #request;
            type RecoveryPoint = #recovery_point;

            const GRAPH: &'static ::idempotent_core::__private::Graph =
                &::idempotent_core::__private::Graph::new("", 0, 0, &[], &[], &[]);

            fn check(
                _: Self::RecoveryPoint,
                _: &::idempotent_core::__private::State,
            ) -> ::core::result::Result<(), ::idempotent_core::__private::Undecodable> {
                ::core::unreachable!()
            }

            async fn advance(
                &self,
                _: Self::RecoveryPoint,
                _: &mut ::idempotent_core::__private::Attempt,
                _: &Self::Request,
            ) -> ::core::result::Result<(), ::idempotent_core::__private::Halt> {
                ::core::unreachable!()
            }

            async fn reject(
                &self,
                _: Self::RecoveryPoint,
                _: &mut ::idempotent_core::__private::Attempt,
                _: &::idempotent_core::__private::Rejection,
                _: &Self::Request,
            ) -> ::core::result::Result<(), ::idempotent_core::__private::Halt> {
                ::core::unreachable!()
            }
        }
    }
}
