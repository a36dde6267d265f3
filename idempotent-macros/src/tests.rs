//! The whole macro: snapshots of what it makes from three flows, and what it does with the block.

use proc_macro2::{TokenStream, TokenTree};
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

/// Calls that the outside does not know by their key, or not for ever; retries; points with a past.
pub(crate) fn parcel() -> (TokenStream, TokenStream) {
    let block = quote! {
        impl<C: Carrier> ParcelFlow<C> {
            #[atomic(Started -> Packed, retries = 3)]
            async fn pack(&self, tx: &mut Tx<'_>, request: &ParcelRequest) -> Result<Parcel, sqlx::Error> { .. }

            #[external(Packed -> Sent | Refused, at_most_once, renamed_from(Sent = "posted", Sent = "handed_over", Refused = "rejected"))]
            async fn send(&self, call: &External<'_>, parcel: &Parcel, request: &ParcelRequest) -> Result<ParcelFlowSendOutcome<Label, ()>, CarrierError> { .. }

            #[reconcile(Packed)]
            async fn look_up(&self, call: &External<'_>, parcel: &Parcel) -> Result<Reconciled<ParcelFlowSendOutcome<Label, ()>>, CarrierError> { .. }

            #[external(Sent -> Insured, dedupes_for = "24h", retries = 5, backoff = "1s..30s")]
            async fn insure(&self, call: &External<'_>, label: &Label) -> Result<(), CarrierError> { .. }

            #[external(Refused -> Finished, at_most_once)]
            async fn complain(&self, call: &External<'_>, request: &ParcelRequest) -> Result<Reply<()>, CarrierError> { .. }

            #[atomic(Insured -> Finished, with(Sent))]
            async fn finish(&self, tx: &mut Tx<'_>, label: &Label) -> Result<Reply<Receipt>, sqlx::Error> { .. }

            #[reconcile(Sent, with(Packed))]
            async fn is_insured(&self, call: &External<'_>, label: &Label, parcel: &Parcel, request: &ParcelRequest) -> Result<Reconciled<()>, CarrierError> { .. }
        }
    };
    (quote!(name = "parcel"), block)
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
fn a_flow_whose_calls_may_be_made_once() {
    insta::assert_snapshot!(expanded(parcel()));
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

#[test]
fn a_reconcile_fn_keeps_what_it_takes() {
    let flow = model(parcel());
    let keeps = |name| {
        let points = flow.points();
        let point = points.iter().find(|point| *point == name).unwrap();
        flow.keeps(point)
    };
    assert_eq!(keeps("Packed"), ["Packed"]);
    assert_eq!(keeps("Sent"), ["Packed", "Sent"]);
    assert_eq!(keeps("Insured"), ["Sent", "Insured"]);
}

/// A reference stands beside the block, where the block's parameters mean nothing.
#[test]
fn a_request_that_depends_on_the_flows_parameters_has_no_reference() {
    for (parameter, argument, request, has_reference) in [
        (quote!(), quote!(), quote!(Request), true),
        (quote!(P), quote!(P), quote!(Vec<api::Request>), true),
        (quote!(P), quote!(P), quote!(P), false),
        (quote!(P), quote!(P), quote!(Vec<(u8, P)>), false),
        (quote!(const N: usize), quote!(N), quote!([u8; N]), false),
        (quote!('a), quote!('a), quote!(Cow<'a, str>), false),
        (quote!(), quote!(), quote!(<Self as Asks>::For), false),
    ] {
        let block = quote! {
            impl<#parameter> Ping<#argument> {
                #[atomic(Started -> Finished)]
                async fn ping(&self, tx: &mut Tx<'_>, request: &#request) -> Result<Reply<()>, E> { .. }
            }
        };
        let (output, errors) = flow(quote!(name = "ping"), block);
        assert!(errors.is_empty(), "{errors:?}");
        let found = output.to_string().contains("PingReference");
        assert_eq!(found, has_reference, "{request}");
    }
}

/// What is wrong with a flow made of these fns.
pub(crate) fn mistakes(block: TokenStream) -> Vec<String> {
    let (_, errors) = flow(quote!(name = "parcel"), quote!(impl ParcelFlow { #block }));
    errors.iter().map(ToString::to_string).collect()
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
                // An `allow` stands before the block when the flow is right; nothing else does.
                let output: Vec<_> = output.into_iter().collect();
                let is_attribute = |tokens: &[TokenTree]| tokens[0].to_string() == "#";
                let attributes = output
                    .chunks(2)
                    .take_while(|tokens| is_attribute(tokens))
                    .count();
                assert!(attributes <= 1);
                let expected = quote!(impl<P: Payments> RideFlow<P> { #[inline] #rest });
                let length = expected.clone().into_iter().count();
                let found = output.into_iter().skip(2 * attributes).take(length);
                assert_eq!(
                    found.collect::<TokenStream>().to_string(),
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
