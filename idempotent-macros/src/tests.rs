//! The whole macro: snapshots of what it makes from three flows, and what it does with the block.

use proc_macro2::TokenStream;
use quote::quote;

use crate::errors::Errors;
use crate::model::{self, Flow};
use crate::{attr, flow, parse, validate};

/// The model of a flow without mistakes.
pub(crate) fn model((arguments, block): (TokenStream, TokenStream)) -> Flow {
    let mut errors = Errors::new();
    let block = parse::block(block, &mut errors).unwrap();
    let options = attr::flow_options(arguments, &block.ident, &mut errors);
    let flow = model::flow(&block, options, &mut errors);
    validate::flow(&flow, &mut errors);
    errors.finish().unwrap();
    flow
}

/// The flow of the design: linear, an early value asked for later, business work on a rejection.
fn ride() -> (TokenStream, TokenStream) {
    let block = quote! {
        /// Rides.
        impl<P: Payments> RideFlow<P> {
            /// Inserts the ride.
            #[atomic(Started -> RideCreated)]
            async fn create_ride(&self, tx: &mut Tx<'_>, request: &RideRequest) -> Result<Ride, RideError> { .. }

            /// Charges the card.
            #[external(RideCreated -> ChargeCompleted, timeout = "10s")]
            async fn charge(&self, call: &External<'_>, ride: &Ride, request: &RideRequest) -> Result<Charge, RideError> { .. }

            #[atomic(ChargeCompleted -> Finished, with(RideCreated))]
            async fn finish(&self, tx: &mut Tx<'_>, charge: &Charge, ride: &Ride) -> Result<Reply<Receipt>, RideError> { .. }

            #[on_reject(RideCreated)]
            async fn decline(&self, tx: &mut Tx<'_>, ride: &Ride, rejection: &Rejection) -> Result<(), RideError> { .. }
        }
    };
    (
        quote!(name = "ride", lease = "15s", retention = "48h"),
        block,
    )
}

/// A fork with an early finish, branches that join again, units that are not taken, all options.
pub(crate) fn booking() -> (TokenStream, TokenStream) {
    let block = quote! {
        #[cfg(feature = "bookings")]
        impl<S, M> Booking<S, M> where S: Seats, M: Mailer {
            #[atomic(Started -> Quoted, isolation = "serializable")]
            async fn quote(&self, tx: &mut Tx<'_>, request: &BookingRequest) -> Result<Quote, QuoteError> { .. }

            #[external(Quoted -> Reserved | SoldOut | Finished, timeout = "10s", key = "hold", checkpoint = "eager")]
            async fn reserve(&self, call: &External<'_>, quote: &Quote) -> Result<BookingReserveOutcome<Reservation, (), Reply<Refusal>>, SeatError> { .. }

            #[atomic(SoldOut -> Settled, timeout = "2s")]
            async fn wait_listed(&self, tx: &mut Tx<'_>) -> Result<(), sqlx::Error> { .. }

            #[atomic(Reserved -> Settled)]
            async fn settle(&self, tx: &mut Tx<'_>, reservation: &Reservation) -> Result<(), sqlx::Error> { .. }

            #[external(Settled -> Finished, with(Quoted))]
            async fn confirm(&self, call: &External<'_>, quote: &Quote, request: &BookingRequest) -> Result<Reply<Receipt>, MailError> { .. }

            #[on_reject(Reserved, SoldOut, with(Quoted))]
            async fn give_back(&self, tx: &mut Tx<'_>, quote: &Quote, rejection: &Rejection, request: &BookingRequest) -> Result<(), QuoteError> { .. }
        }
    };
    (quote!(name = "booking", lease = "5s"), block)
}

/// The smallest flow there is.
fn ping() -> (TokenStream, TokenStream) {
    let block = quote! {
        impl Ping {
            #[atomic(Started -> Finished)]
            async fn ping(&self, tx: &mut Tx<'_>, request: &Request) -> Result<Reply<()>, sqlx::Error> { .. }
        }
    };
    (quote!(name = "ping"), block)
}

fn expanded((arguments, block): (TokenStream, TokenStream)) -> String {
    let (tokens, errors) = flow(arguments, block);
    assert!(errors.is_empty(), "{errors:?}");
    // A body of `..` is no Rust, which proves that it is not parsed; the printer does parse.
    let tokens: TokenStream = tokens
        .to_string()
        .replace("{ .. }", "{ todo!() }")
        .parse()
        .unwrap();
    prettyplease::unparse(&syn::parse2(tokens).unwrap())
}

#[test]
fn the_ride_flow() {
    insta::assert_snapshot!(expanded(ride()));
}

#[test]
fn a_flow_with_branches_that_join() {
    insta::assert_snapshot!(expanded(booking()));
}

#[test]
fn the_smallest_flow() {
    insta::assert_snapshot!(expanded(ping()));
}

#[test]
fn a_point_keeps_its_value_and_those_asked_for_ahead() {
    let flow = model(booking());
    let keeps: Vec<(String, Vec<String>)> = flow
        .points()
        .iter()
        .map(|point| {
            (
                point.to_string(),
                flow.keeps(point).iter().map(ToString::to_string).collect(),
            )
        })
        .collect();
    let expected: [(&str, &[&str]); 6] = [
        ("Started", &[]),
        ("Quoted", &["Quoted"]),
        ("Reserved", &["Quoted", "Reserved"]),
        ("SoldOut", &["Quoted", "SoldOut"]),
        ("Settled", &["Quoted", "Settled"]),
        ("Finished", &[]),
    ];
    let expected = expected.map(|(point, keeps)| {
        (
            point.to_owned(),
            keeps
                .iter()
                .map(|&keep| keep.to_owned())
                .collect::<Vec<_>>(),
        )
    });
    assert_eq!(keeps, expected);
}

/// What an editor needs: whatever is wrong, the output begins with the user's block, less our marks.
#[test]
fn the_users_block_comes_first_and_untouched() {
    let bodies = [
        quote!(todo!()),
        quote!(self.payments. ; let x = = ;),
        quote!(let ride: = match { => } #[atomic(A)] ..),
    ];
    let marks = [
        quote!(#[atomic(Started -> Finished)]),
        quote!(#[atomic(Started ->)]),
        quote!(#[atomic]),
        quote!(#[atomic(Started -> Finished, with, = , timeout = )]),
        quote!(#[atomc(Started -> Finished)]),
        quote!(#[external(Started -> Elsewhere)]),
    ];
    for body in &bodies {
        for mark in &marks {
            for arguments in [
                quote!(name = "ride"),
                quote!(nme = ),
                quote!(name = "ride", lease = , ..),
            ] {
                let rest = quote! {
                    async fn create(&self, tx: &mut Tx<'_>, request: &R) -> Result<Reply<()>, E> { #body }
                    const LIMIT: usize = { 3 };
                };
                let (output, _) = flow(
                    arguments,
                    quote!(impl<P: Payments> RideFlow<P> { #[inline] #mark #rest }),
                );
                let mut output = output.into_iter();
                // The docs with the transitions stand before the block when the flow is right.
                let expected = quote!(impl<P: Payments> RideFlow<P> { #[inline] #rest });
                let mut found: Vec<_> = output.by_ref().take(2).collect();
                if found[0].to_string() == "#" {
                    found.clear();
                }
                let missing = expected.clone().into_iter().count() - found.len();
                found.extend(output.take(missing));
                assert_eq!(
                    found.into_iter().collect::<TokenStream>().to_string(),
                    expected.to_string()
                );
            }
        }
    }
}

#[test]
fn what_is_no_flow_is_given_back_without_our_marks() {
    let (output, errors) = flow(
        quote!(name = "ride"),
        quote!(impl Ride for RideFlow { #[atomic(A -> B)] fn f() {} }),
    );
    assert_eq!(
        output.to_string(),
        quote!(impl Ride for RideFlow { fn f() {} }).to_string()
    );
    assert_eq!(errors.len(), 1);
}

#[test]
fn a_broken_flow_still_has_its_types() {
    let (_, block) = booking();
    let (output, errors) = flow(quote!(), block);
    let output = output.to_string();
    assert_eq!(errors.len(), 1);
    for expected in [
        "enum BookingRecoveryPoint",
        "Settled = \"settled\"",
        "enum BookingReserveOutcome",
        "Flow for Booking",
    ] {
        assert!(output.contains(expected), "{output}");
    }
}
