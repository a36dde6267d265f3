//! The attribute [`macro@idempotent_flow`] of `idempotent-core`, which re-exports it. Start there: this
//! crate has nothing else for its users.
//!
//! For its readers, the way through the macro is `parse` (the block, bodies left as tokens) → `attr` and
//! `signature` (what our attributes and the marked fns say) → `model` (the flow) → `validate` → `expand`,
//! or `fallback` when something was wrong. Every stage is a plain function on plain values, and reports
//! to one store of `errors`.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod asides;
mod attr;
mod docs;
mod errors;
mod expand;
mod fallback;
mod gaps;
mod graph;
mod items;
mod marks;
mod model;
mod options;
mod parameters;
mod parse;
mod phase_options;
mod renames;
mod signature;
mod stored;
mod text;
mod validate;

#[cfg(test)]
mod tests;

use proc_macro2::TokenStream;

use crate::errors::Errors;

/// Declares a flow: a request's work as a typed state machine that is safe to retry.
///
/// It goes on an impl block of the flow's type. The async fns in it that carry a mark are the **phases**: each moves
/// the flow from one **recovery point** to the next, as its arrow says. Read top to bottom, the arrows are the state
/// machine. Other items may stand between the phases; they are left alone.
///
/// ```ignore
/// use idempotent_core::{External, Rejection, Reply, Tx, idempotent_flow};
///
/// #[idempotent_flow(name = "ride", lease = "15s", retention = "48h")]
/// impl<P: Payments> RideFlow<P> {
///     /// Inserts the ride.
///     #[atomic(Started -> RideCreated)]
///     async fn create_ride(&self, tx: &mut Tx<'_>, request: &RideRequest) -> Result<Ride, RideError> { .. }
///
///     /// Charges the card. The gateway sees the same key however often this runs.
///     #[external(RideCreated -> ChargeCompleted, timeout = "10s")]
///     async fn charge(&self, call: &External<'_>, ride: &Ride) -> Result<Charge, RideError> { .. }
///
///     /// Stores the charge, in one transaction with the reply.
///     #[atomic(ChargeCompleted -> Finished, with(RideCreated))]
///     async fn finish(&self, tx: &mut Tx<'_>, charge: &Charge, ride: &Ride) -> Result<Reply<Receipt>, RideError> { .. }
///
///     /// A declined card is a final answer.
///     #[on_reject(RideCreated)]
///     async fn decline(&self, tx: &mut Tx<'_>, ride: &Ride, rejection: &Rejection) -> Result<(), RideError> { .. }
/// }
/// ```
///
/// # Options of the flow
///
/// | option | |
/// | --- | --- |
/// | `name = "ride"` | The name under which the flow's keys are stored. Needed; 1 to 64 of `a-z`, `0-9`, `_` and `-`, a letter first. |
/// | `lease = "15s"` | How long one attempt may hold the flow without renewing, from `"1s"` to `"10m"`; `"15s"` if not given. It is renewed while a phase runs, so it may be shorter than a call. |
/// | `retention = "48h"` | How long a finished key is kept for replays, at least the lease; `"48h"` if not given. |
///
/// A duration is a whole number and a unit: `ms`, `s`, `m`, `h` or `d`.
///
/// # Phases
///
/// - `#[atomic(From -> To)]`: runs in one database transaction, lent as `&mut Tx<'_>`, which also stores `To`.
/// - `#[external(From -> To)]`: calls the outside world and holds no transaction meanwhile. It is lent an
///   `&External<'_>`, which has the derived key for the call: the same one however often the phase runs.
///
/// Every flow begins at `Started` and ends at `Finished`; each point between them is left by exactly one phase, and
/// nothing leads back. A phase that arrives at `Finished` returns a `Reply<T>`.
///
/// | option | of | |
/// | --- | --- | --- |
/// | `with(A, B)` | both | Asks for the values of earlier points, which must lie on every way to here. |
/// | `timeout = "10s"` | both | How long the phase may take; the lease if not given. |
/// | `isolation = "serializable"` | atomic | Also `"read committed"` and `"repeatable read"`; the database's default if not given. |
/// | `key = "charge"` | external | The name of the call, from which its key is derived; the fn's name if not given. Pin it when you rename the fn. |
/// | `checkpoint = "eager"` | external | Commits the result by itself, and not with the atomic phase that follows. |
/// | `retries = 3` | both | How often the phase is repeated, within the request, when it asks for a retry: 1 to 100 times; not at all if not given. |
/// | `backoff = "200ms..5s"` | both | The longest first pause between `retries`, and the longest of all; `"200ms..5s"` if not given. |
/// | `at_most_once` | external | The outside does not know a repeated call by its key: see [below](#calls-that-may-not-be-repeated). |
/// | `dedupes_for = "24h"` | external | The outside knows a repeated call by its key for so long, and no longer: see [below](#calls-that-may-not-be-repeated). |
/// | `renamed_from(B = "old_b")` | both | Older versions stored the point `B`, to which this arrow leads, under this name: flows that stand there go on. |
///
/// # Parameters
///
/// In this order: `&self`; the capability; the value of the point that the phase leaves (none at `Started`, and a `()`
/// may be left out); the values that `with(..)` asks for; and the request, in a parameter named `request`, which the
/// phase that leaves `Started` must take and every other may. All are lent: `&T`.
///
/// A phase returns a `Result<T, E>`. `T` is stored with the point it arrives at, so it is a serde type that owns its data.
/// `E` says what a failure means (`PhaseFailure`), and may differ from phase to phase.
///
/// # Branches
///
/// `#[external(Quoted -> Reserved | SoldOut)]` on `reserve` of `Booking` makes the enum `BookingReserveOutcome`, with a
/// variant per branch that carries the value of that branch, and a type parameter for each:
///
/// ```ignore
/// #[external(Quoted -> Reserved | SoldOut)]
/// async fn reserve(&self, call: &External<'_>, quote: &Quote) -> Result<BookingReserveOutcome<Reservation, ()>, E> { .. }
/// ```
///
/// Branches may join again. One of them may be `Finished`; it carries a `Reply<T>`.
///
/// # Rejections
///
/// `#[on_reject(A, B)]` marks an async fn that does business work in the transaction which stores a rejection at one of
/// these points. It takes `&mut Tx<'_>`, the point's value, what `with(..)` asks for, `&Rejection` and the request, each
/// only if it wants it, and returns `Result<(), E>`.
///
/// # Calls that may not be repeated
///
/// A call whose answer was lost is made again, with the same derived key; that is safe as long as the outside knows the
/// key. Where it does not (`at_most_once`), or does not any more (the first try may be longer ago than `dedupes_for`), the
/// call is announced in the flow's row before it is made, and one that may have been made before is not made again.
/// Instead a fn may ask the outside what became of it:
///
/// ```ignore
/// #[external(Packed -> Sent, at_most_once)]
/// async fn send(&self, call: &External<'_>, parcel: &Parcel) -> Result<Label, CarrierError> { .. }
///
/// #[reconcile(Packed)]
/// async fn look_up(&self, call: &External<'_>, parcel: &Parcel) -> Result<Reconciled<Label>, CarrierError> { .. }
/// ```
///
/// `#[reconcile(P)]` names the point that the call's phase leaves. The fn takes what that phase may take, and gives in
/// `Reconciled::Happened` what that phase gives (with branches, the outcome; at `Finished`, the `Reply<T>`); the flow goes
/// on as if the phase had given it. After `DidNot` and `Unknown`, and where there is no such fn, an operator decides.
///
/// # What it makes
///
/// Beside the block, which comes back without the marks and otherwise as it was: the enum of the recovery points
/// (`RideFlowRecoveryPoint`), the enums of the outcomes, the reference by which a phase of another flow stages this one
/// (`RideFlowReference`, unless the request's type depends on the flow's parameters), the implementation of `Flow`, and on the block's page of the
/// documentation the table and the diagram of the transitions. `#[cfg]` on the block holds for all of it.
#[proc_macro_attribute]
pub fn idempotent_flow(
    arguments: proc_macro::TokenStream,
    block: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    let (output, errors) = flow(arguments.into(), block.into());
    output
        .into_iter()
        .chain(errors::compile_errors(&errors))
        .collect::<TokenStream>()
        .into()
}

/// The whole macro, on tokens: what to put in the block's place, and what was wrong with it.
fn flow(arguments: TokenStream, block: TokenStream) -> (TokenStream, Vec<syn::Error>) {
    let mut errors = Errors::new();
    let Some(read) = parse::block(block.clone(), &mut errors) else {
        return (
            parse::without_marks(block),
            errors.finish().err().unwrap_or_default(),
        );
    };
    let options = attr::flow_options(arguments, &read.ident, &mut errors);
    let flow = model::flow(&read, options, &mut errors);
    validate::flow(&flow, &mut errors);
    match errors.finish() {
        Ok(()) => (expand::flow(&read, &flow), Vec::new()),
        Err(errors) => (fallback::flow(&read, &flow), errors),
    }
}
