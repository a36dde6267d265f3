//! The charge calls: what happens between a request and its answer.
//!
//! A call with an idempotency key takes the key, works, and writes its outcome in one statement that only
//! the key's holder can make. A call works on its own task: as at any real gateway, a client that hangs up
//! does not stop a charge.

use std::time::Duration;

use axum::Form;
use axum::extract::rejection::{FormRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::HeaderMap;
use sqlx::PgPool;
use uuid::Uuid;

use super::answer::Answer;
use super::ledger::{self, Charge, Hold, KeyedCall};
use super::request::{self, Account, ChargeCall, TestCard};
use super::{Closing, Desk};

/// How long a key stays in use beyond the call's deliberate delay. A gateway that is killed in the middle
/// leaves its key in use for at most this much longer than a living one would have.
const SLACK: Duration = Duration::from_secs(10);

/// How often `tok_gatewayError` fails under one idempotency key.
const FAILURES_ON_PURPOSE: i32 = 2;

/// How often a call is tried before a database that keeps breaking it off is reported.
const CONFLICTS_REPEATED: u64 = 6;

type Pairs = Vec<(String, String)>;

/// `POST /v1/charges`
pub(super) async fn create(
    State(desk): State<Desk>,
    headers: HeaderMap,
    form: Result<Form<Pairs>, FormRejection>,
) -> Result<Answer, Answer> {
    let account = Account::from_headers(&headers)?;
    let key = request::idempotency_key(&headers)?;
    let call = ChargeCall::from_form(form.map(|Form(pairs)| pairs))?;

    let work = {
        let (pool, closing) = (desk.pool.clone(), desk.closing());
        tokio::spawn(async move {
            match key {
                Some(key) => charge_once(&pool, account, key, &call, closing).await,
                None => charge_anew(&pool, account, &call, closing).await,
            }
        })
    };
    match work.await {
        Ok(Ok(Outcome::Answered(answer))) => Ok(answer),
        Ok(Ok(Outcome::Hanging)) => {
            desk.closing().announced().await;
            Err(Answer::stopping())
        }
        Ok(Err(error)) => Err(ledger_failed(&error)),
        Err(_panicked_or_stopped) => Err(Answer::failed()),
    }
}

/// `GET /v1/charges/{id}`
pub(super) async fn retrieve(
    State(desk): State<Desk>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Answer, Answer> {
    let account = Account::from_headers(&headers)?;
    if !id
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    {
        return Err(Answer::unknown_charge(&id));
    }
    match ledger::find_charge(&desk.pool, account, &id).await {
        Ok(Some(charge)) => Ok(Answer::charge(&charge)),
        Ok(None) => Err(Answer::unknown_charge(&id)),
        Err(error) => Err(ledger_failed(&error)),
    }
}

/// `GET /v1/charges?limit=`
pub(super) async fn list(
    State(desk): State<Desk>,
    headers: HeaderMap,
    query: Result<Query<Pairs>, QueryRejection>,
) -> Result<Answer, Answer> {
    let account = Account::from_headers(&headers)?;
    let pairs = query.map(|Query(pairs)| pairs).unwrap_or_default();
    let limit = request::limit(&pairs)?;
    // One more than asked for tells whether there are more.
    let mut charges = ledger::newest_charges(&desk.pool, account, limit + 1)
        .await
        .map_err(|error| ledger_failed(&error))?;
    let has_more = charges.len() as i64 > limit;
    charges.truncate(limit as usize);
    Ok(Answer::charges(&charges, has_more))
}

enum Outcome {
    Answered(Answer),
    /// Charged, but the client is never told.
    Hanging,
}

impl From<Answer> for Outcome {
    fn from(answer: Answer) -> Self {
        Self::Answered(answer)
    }
}

/// Charges under a key: once, however often and wherever it is called.
///
/// Repeats what the database broke off to keep transactions apart, which it does where its default is
/// serializable. After the last time the caller repeats it: nothing is remembered.
async fn charge_once(
    pool: &PgPool,
    account: Account,
    key: String,
    call: &ChargeCall,
    closing: Closing,
) -> sqlx::Result<Outcome> {
    let mut keyed = KeyedCall {
        account,
        key,
        parameters: call.fingerprint,
        holder: Uuid::new_v4(),
    };
    for attempt in 1..CONFLICTS_REPEATED {
        match attempt_once(pool, &keyed, call, closing.clone()).await {
            Err(error) if ledger::is_conflict(&error) => {}
            outcome => return outcome,
        }
        tokio::time::sleep(Duration::from_millis(10 * attempt)).await;
        keyed.holder = Uuid::new_v4();
    }
    attempt_once(pool, &keyed, call, closing).await
}

async fn attempt_once(
    pool: &PgPool,
    keyed: &KeyedCall,
    call: &ChargeCall,
    closing: Closing,
) -> sqlx::Result<Outcome> {
    let outcome = take_and_work(pool, keyed, call, closing).await;
    if outcome.is_err() {
        // The next call may go on at once, also when the key was taken but the database's answer was lost.
        // If this fails too, the marker runs out by itself, and the first error is the one that tells why.
        if let Err(error) = ledger::release(pool, keyed, false).await {
            tracing::warn!(%error, "gateway: a key stays in use until its marker runs out");
        }
    }
    outcome
}

async fn take_and_work(
    pool: &PgPool,
    keyed: &KeyedCall,
    call: &ChargeCall,
    closing: Closing,
) -> sqlx::Result<Outcome> {
    match take(pool, keyed, call.card.delay() + SLACK).await? {
        Taken::Ours(hold) => work(pool, keyed, hold, call, closing).await,
        Taken::Not(answer) => Ok(answer.into()),
    }
}

enum Taken {
    Ours(Hold),
    Not(Answer),
}

/// Takes the key, or says what to answer instead.
async fn take(pool: &PgPool, keyed: &KeyedCall, lease: Duration) -> sqlx::Result<Taken> {
    if let Some(hold) = ledger::take_new(pool, keyed, lease).await? {
        return Ok(Taken::Ours(hold));
    }
    if let Some(used) = ledger::find(pool, keyed.account, &keyed.key).await? {
        if used.parameters != keyed.parameters {
            return Ok(Taken::Not(Answer::other_parameters()));
        }
        if let Some(answer) = used.answer {
            return Ok(Taken::Not(answer));
        }
    }
    // Another call may come between the look and this, and take the key or even finish it. "In use" is then
    // a moment old, but still an honest answer: it tells the client to come again.
    Ok(match ledger::take_over(pool, keyed, lease).await? {
        Some(hold) => Taken::Ours(hold),
        None => Taken::Not(Answer::key_in_use()),
    })
}

/// Does what the card says, holding the key.
async fn work(
    pool: &PgPool,
    keyed: &KeyedCall,
    hold: Hold,
    call: &ChargeCall,
    closing: Closing,
) -> sqlx::Result<Outcome> {
    let answer = match call.card {
        TestCard::Declined => {
            let answer = Answer::declined();
            return match ledger::remember(pool, keyed, &answer).await? {
                true => Ok(answer.into()),
                false => after_losing_the_key(pool, keyed).await,
            };
        }
        TestCard::Failing if hold.failures < FAILURES_ON_PURPOSE => {
            ledger::release(pool, keyed, true).await?;
            return Ok(Answer::failed().into());
        }
        card => {
            if stopped_while_waiting(card.delay(), closing).await {
                ledger::release(pool, keyed, false).await?;
                return Ok(Answer::stopping().into());
            }
            let charge = new_charge(call, hold.taken_at);
            let answer = Answer::charge(&charge);
            if !ledger::charge_and_remember(pool, keyed, &charge, &answer).await? {
                return after_losing_the_key(pool, keyed).await;
            }
            tracing::debug!(charge = %charge.id, "gateway: charged");
            answer
        }
    };
    Ok(match call.card {
        TestCard::Hanging => Outcome::Hanging,
        _ => answer.into(),
    })
}

/// Our marker ran out and another call took over: its answer counts, if it has one yet.
async fn after_losing_the_key(pool: &PgPool, keyed: &KeyedCall) -> sqlx::Result<Outcome> {
    let used = ledger::find(pool, keyed.account, &keyed.key).await?;
    let answer = used.and_then(|used| used.answer);
    Ok(answer.unwrap_or_else(Answer::key_in_use).into())
}

/// Charges without a key: anew with each call.
async fn charge_anew(
    pool: &PgPool,
    account: Account,
    call: &ChargeCall,
    closing: Closing,
) -> sqlx::Result<Outcome> {
    match call.card {
        TestCard::Declined => return Ok(Answer::declined().into()),
        // Nothing tells one call from the next, so there is nothing to count by.
        TestCard::Failing => return Ok(Answer::failed().into()),
        TestCard::Works | TestCard::Hanging | TestCard::Slow(_) => {}
    }
    if stopped_while_waiting(call.card.delay(), closing).await {
        return Ok(Answer::stopping().into());
    }
    let mut charge = new_charge(call, 0);
    charge.created = ledger::charge(pool, account, &charge).await?;
    Ok(match call.card {
        TestCard::Hanging => Outcome::Hanging,
        _ => Answer::charge(&charge).into(),
    })
}

async fn stopped_while_waiting(delay: Duration, closing: Closing) -> bool {
    if delay.is_zero() {
        return false;
    }
    tokio::select! {
        () = tokio::time::sleep(delay) => false,
        () = closing.announced() => true,
    }
}

fn new_charge(call: &ChargeCall, created: i64) -> Charge {
    Charge {
        id: format!("ch_{}", Uuid::new_v4().simple()),
        amount: call.amount,
        currency: call.currency.clone(),
        source: call.source.clone(),
        description: call.description.clone(),
        metadata: call.metadata.clone(),
        created,
    }
}

pub(super) fn ledger_failed(error: &sqlx::Error) -> Answer {
    tracing::error!(%error, "gateway: the ledger failed; the caller is told to repeat the call");
    Answer::failed()
}
