//! `POST /v1/receipts`: sends a receipt for a charge. Here "sending" is a row in the ledger, so that
//! anybody can count how many went out. A key is required, and one key sends one receipt.

use axum::Form;
use axum::extract::State;
use axum::extract::rejection::FormRejection;
use axum::http::HeaderMap;
use serde::Deserialize;

use super::Desk;
use super::answer::Answer;
use super::charges::ledger_failed;
use super::ledger;
use super::request::{self, Account};

/// What a receipt is about.
#[derive(Debug, Deserialize)]
pub(super) struct ReceiptCall {
    charge: String,
    reference: String,
}

/// `POST /v1/receipts`
pub(super) async fn create(
    State(desk): State<Desk>,
    headers: HeaderMap,
    form: Result<Form<ReceiptCall>, FormRejection>,
) -> Result<Answer, Answer> {
    let account = Account::from_headers(&headers)?;
    let missing = |what: &str| Answer::invalid("parameter_missing", None, what.to_owned());
    let key = request::idempotency_key(&headers)?
        .ok_or_else(|| missing("Send an Idempotency-Key: a receipt is sent once for each."))?;
    let Form(call) = form.map_err(|_| missing("Send charge and reference, as a form."))?;
    if call.charge.contains('\0') || call.reference.contains('\0') {
        return Err(missing("charge and reference must be text."));
    }
    let sent = ledger::send_receipt(&desk.pool, account, &key, &call.charge, &call.reference)
        .await
        .map_err(|error| ledger_failed(&error))?;
    if (&sent.charge, &sent.reference) != (&call.charge, &call.reference) {
        return Err(Answer::other_parameters());
    }
    Ok(Answer::receipt(&sent))
}
