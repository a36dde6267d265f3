//! Every SQL statement of the gateway, one function each.
//!
//! Each statement is its own transaction: nothing is held between two of them, so a gateway that freezes or
//! dies leaves no lock behind, at most a marker that runs out. Every write to a key that is in use carries
//! `AND holder = $3`: a call whose marker ran out and was taken over changes nothing any more. All times are
//! the database's.

use std::collections::BTreeMap;
use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{PgPool, Row};
use uuid::Uuid;

use super::answer::Answer;
use super::request::Account;

/// One row of the ledger: money that was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Charge {
    pub(super) id: String,
    pub(super) amount: i64,
    pub(super) currency: String,
    pub(super) source: String,
    pub(super) description: Option<String>,
    pub(super) metadata: BTreeMap<String, String>,
    /// Seconds since 1970.
    pub(super) created: i64,
}

/// An idempotency key as one call sends it.
#[derive(Debug, Clone)]
pub(super) struct KeyedCall {
    pub(super) account: Account,
    pub(super) key: String,
    pub(super) parameters: [u8; 32],
    /// New for each call: whoever's holder stands in the row may write to it.
    pub(super) holder: Uuid,
}

/// What a call that took its key knows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hold {
    pub(super) failures: i32,
    /// Seconds since 1970; becomes the charge's `created`.
    pub(super) taken_at: i64,
}

/// A key that was used before.
#[derive(Debug, Clone)]
pub(super) struct Used {
    pub(super) parameters: Vec<u8>,
    pub(super) answer: Option<Answer>,
}

/// A receipt that went out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Receipt {
    pub(super) id: String,
    pub(super) charge: String,
    pub(super) reference: String,
}

/// Sends a receipt, or says which one went out under this key before.
///
/// The update changes nothing; it makes the statement return, and wait for, the row of another call with
/// the same key.
pub(super) async fn send_receipt(
    pool: &PgPool,
    account: Account,
    key: &str,
    charge: &str,
    reference: &str,
) -> sqlx::Result<Receipt> {
    let row = sqlx::query(
        "INSERT INTO gateway.receipts AS sent (id, account, idempotency_key, charge, reference, created_at)
         VALUES ($1, $2, $3, $4, $5, statement_timestamp())
         ON CONFLICT (account, idempotency_key) DO UPDATE SET charge = sent.charge
         RETURNING id, charge, reference",
    )
    .bind(format!("rc_{}", Uuid::new_v4().simple()))
    .bind(account.0)
    .bind(key)
    .bind(charge)
    .bind(reference)
    .fetch_one(pool)
    .await?;
    Ok(Receipt {
        id: row.try_get(0)?,
        charge: row.try_get(1)?,
        reference: row.try_get(2)?,
    })
}

/// Takes a key that was never used. None: it was.
///
/// The unique index decides races between processes. `DO NOTHING` waits for another insert of this key to
/// commit, which is one statement away.
pub(super) async fn take_new(
    pool: &PgPool,
    call: &KeyedCall,
    lease: Duration,
) -> sqlx::Result<Option<Hold>> {
    let row = sqlx::query_as(
        "INSERT INTO gateway.idempotency_keys (account, key, parameters, holder, in_use_until, taken_at)
         VALUES ($1, $2, $3, $4, statement_timestamp() + make_interval(secs => $5), statement_timestamp())
         ON CONFLICT (account, key) DO NOTHING
         RETURNING failures, floor(extract(epoch FROM taken_at))::bigint AS taken_at",
    )
    .bind(&call.account.0[..])
    .bind(&call.key)
    .bind(&call.parameters[..])
    .bind(call.holder)
    .bind(lease.as_secs_f64())
    .fetch_optional(pool)
    .await?;
    Ok(row.map(|(failures, taken_at)| Hold { failures, taken_at }))
}

/// What is known of a key. Rows are never deleted, so a key that could not be taken as new is found.
pub(super) async fn find(pool: &PgPool, account: Account, key: &str) -> sqlx::Result<Option<Used>> {
    let row = sqlx::query_as(
        "SELECT parameters, status, body FROM gateway.idempotency_keys WHERE account = $1 AND key = $2",
    )
    .bind(&account.0[..])
    .bind(key)
    .fetch_optional(pool)
    .await?;
    row.map(
        |(parameters, status, body): (_, Option<i16>, Option<Vec<u8>>)| {
            let answer = match (status, body) {
                (Some(status), Some(body)) => Some(Answer::replayed(status, body)?),
                _ => None,
            };
            Ok(Used { parameters, answer })
        },
    )
    .transpose()
}

/// Takes a used key that has no answer and that nobody works on. None: it has, or somebody does.
///
/// A compare-and-swap: the row's own lock orders two calls, and the second one's condition is then checked
/// against what the first one wrote. A marker that lies further ahead than twice its length was written
/// before the database's clock was set back, and counts as over (same parameters: same length).
pub(super) async fn take_over(
    pool: &PgPool,
    call: &KeyedCall,
    lease: Duration,
) -> sqlx::Result<Option<Hold>> {
    let row = sqlx::query_as(
        "UPDATE gateway.idempotency_keys
         SET holder = $4,
             in_use_until = statement_timestamp() + make_interval(secs => $5),
             taken_at = statement_timestamp()
         WHERE account = $1 AND key = $2 AND parameters = $3 AND status IS NULL
           AND (holder IS NULL
                OR in_use_until <= statement_timestamp()
                OR in_use_until > statement_timestamp() + make_interval(secs => 2 * $5))
         RETURNING failures, floor(extract(epoch FROM taken_at))::bigint AS taken_at",
    )
    .bind(&call.account.0[..])
    .bind(&call.key)
    .bind(&call.parameters[..])
    .bind(call.holder)
    .bind(lease.as_secs_f64())
    .fetch_optional(pool)
    .await?;
    Ok(row.map(|(failures, taken_at)| Hold { failures, taken_at }))
}

/// Takes the money and remembers the answer, in one statement: both are there or neither. False: the key is
/// no longer ours, and nothing was written.
///
/// The charge is dated by the hold, because the answer's bytes, which say so, exist before the row does.
pub(super) async fn charge_and_remember(
    pool: &PgPool,
    call: &KeyedCall,
    charge: &Charge,
    answer: &Answer,
) -> sqlx::Result<bool> {
    let done = sqlx::query(
        "WITH remembered AS (
             UPDATE gateway.idempotency_keys
             SET status = $4, body = $5, holder = NULL, in_use_until = NULL
             WHERE account = $1 AND key = $2 AND holder = $3
             RETURNING account, key, taken_at
         )
         INSERT INTO gateway.charges
             (id, account, idempotency_key, amount, currency, source, description, metadata, created_at)
         SELECT $6, account, key, $7, $8, $9, $10, $11, taken_at FROM remembered",
    )
    .bind(&call.account.0[..])
    .bind(&call.key)
    .bind(call.holder)
    .bind(answer.status_column())
    .bind(&answer.body)
    .bind(&charge.id)
    .bind(charge.amount)
    .bind(&charge.currency)
    .bind(&charge.source)
    .bind(&charge.description)
    .bind(Json(&charge.metadata))
    .execute(pool)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Remembers an answer that took no money. False: the key is no longer ours.
pub(super) async fn remember(
    pool: &PgPool,
    call: &KeyedCall,
    answer: &Answer,
) -> sqlx::Result<bool> {
    let done = sqlx::query(
        "UPDATE gateway.idempotency_keys
         SET status = $4, body = $5, holder = NULL, in_use_until = NULL
         WHERE account = $1 AND key = $2 AND holder = $3",
    )
    .bind(&call.account.0[..])
    .bind(&call.key)
    .bind(call.holder)
    .bind(answer.status_column())
    .bind(&answer.body)
    .execute(pool)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Lets go of a key without an answer; the next call works on it. Harmless when the key is not ours.
///
/// Also after a write whose answer was lost: if that write goes through, this finds no holder; if this goes
/// first, that write finds none.
pub(super) async fn release(
    pool: &PgPool,
    call: &KeyedCall,
    failed_on_purpose: bool,
) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE gateway.idempotency_keys
         SET holder = NULL, in_use_until = NULL, failures = failures + $4::boolean::integer
         WHERE account = $1 AND key = $2 AND holder = $3",
    )
    .bind(&call.account.0[..])
    .bind(&call.key)
    .bind(call.holder)
    .bind(failed_on_purpose)
    .execute(pool)
    .await?;
    Ok(())
}

/// Takes the money for a call without a key: each such call charges anew. Returns when, in seconds since
/// 1970.
pub(super) async fn charge(pool: &PgPool, account: Account, charge: &Charge) -> sqlx::Result<i64> {
    sqlx::query_scalar(
        "INSERT INTO gateway.charges
             (id, account, amount, currency, source, description, metadata, created_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, statement_timestamp())
         RETURNING floor(extract(epoch FROM created_at))::bigint",
    )
    .bind(&charge.id)
    .bind(&account.0[..])
    .bind(charge.amount)
    .bind(&charge.currency)
    .bind(&charge.source)
    .bind(&charge.description)
    .bind(Json(&charge.metadata))
    .fetch_one(pool)
    .await
}

/// One of this account's charges.
pub(super) async fn find_charge(
    pool: &PgPool,
    account: Account,
    id: &str,
) -> sqlx::Result<Option<Charge>> {
    let row = sqlx::query(
        "SELECT id, amount, currency, source, description, metadata,
                floor(extract(epoch FROM created_at))::bigint AS created
         FROM gateway.charges WHERE account = $1 AND id = $2",
    )
    .bind(&account.0[..])
    .bind(id)
    .fetch_optional(pool)
    .await?;
    row.map(charge_row).transpose()
}

/// This account's charges, the newest first.
pub(super) async fn newest_charges(
    pool: &PgPool,
    account: Account,
    limit: i64,
) -> sqlx::Result<Vec<Charge>> {
    sqlx::query(
        "SELECT id, amount, currency, source, description, metadata,
                floor(extract(epoch FROM created_at))::bigint AS created
         FROM gateway.charges WHERE account = $1 ORDER BY created_at DESC, id DESC LIMIT $2",
    )
    .bind(&account.0[..])
    .bind(limit)
    .fetch_all(pool)
    .await?
    .into_iter()
    .map(charge_row)
    .collect()
}

fn charge_row(row: PgRow) -> sqlx::Result<Charge> {
    let Json(metadata) = row.try_get("metadata")?;
    Ok(Charge {
        id: row.try_get("id")?,
        amount: row.try_get("amount")?,
        currency: row.try_get("currency")?,
        source: row.try_get("source")?,
        description: row.try_get("description")?,
        metadata,
        created: row.try_get("created")?,
    })
}

/// Whether the database broke a statement off only to keep transactions apart: 40001, or 40P01 (deadlock).
pub(super) fn is_conflict(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| matches!(&*code, "40001" | "40P01"))
}
