//! A flow that tests can hold, fail and look into: the ride flow's shape, with an outside that
//! counts, and a hook in every phase.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use idempotent_core::{
    Disposition, Engine, External, FlowOptions, Handle, Key, PhaseFailure, Rejection, Reply, Tx,
    idempotent_flow,
};
use serde::{Deserialize, Serialize};
use sqlx::Row;
use sqlx::postgres::PgPool;
use tokio::sync::watch;

use crate::database::TestDatabase;

/// The table that the flow writes to. One trip a key, by constraint.
pub const TABLE: &str = "CREATE TABLE trips (
    key_id uuid PRIMARY KEY,
    goal text NOT NULL,
    state text NOT NULL DEFAULT 'created',
    payment text
)";

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TripRequest {
    /// Where to.
    pub goal: String,
    /// Something that a newer client may leave out.
    #[serde(default)]
    pub note: Option<String>,
}

/// A request for a trip to `goal`.
pub fn trip_to(goal: &str) -> TripRequest {
    TripRequest {
        goal: goal.to_owned(),
        note: None,
    }
}

/// A key of `alice` for `/trips`.
pub fn key(key: &str) -> Key {
    Key::new("alice", "/trips", key).unwrap()
}

/// What the outside gave.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Payment {
    /// Its number, from 1.
    pub number: usize,
}

/// The outside: takes each key's payment once, and counts the calls.
#[derive(Debug, Clone, Default)]
pub struct Outside(Arc<Mutex<Ledger>>);

#[derive(Debug, Default)]
struct Ledger {
    payments: HashMap<String, usize>,
    calls: Vec<String>,
}

impl Outside {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pay(&self, key: &str) -> Payment {
        let mut ledger = self.ledger();
        ledger.calls.push(key.to_owned());
        let next = ledger.payments.len() + 1;
        Payment {
            number: *ledger.payments.entry(key.to_owned()).or_insert(next),
        }
    }

    /// The keys that it was called with, in order.
    pub fn calls(&self) -> Vec<String> {
        self.ledger().calls.clone()
    }

    /// How many payments were taken.
    pub fn payments(&self) -> usize {
        self.ledger().payments.len()
    }
}

/// What happens in a phase when it is next entered.
#[derive(Debug, Clone)]
pub enum Act {
    /// It waits at the gate, then goes on.
    Wait(Gate),
    /// It panics, after its work.
    Panic,
    /// It fails, after its work.
    Fail(TripError),
    /// It ends the transaction it was lent, after its work.
    Commit,
}

/// A place where a phase waits until the test lets it go on.
#[derive(Debug, Clone)]
pub struct Gate {
    reached: Arc<watch::Sender<bool>>,
    open: Arc<watch::Sender<bool>>,
}

/// Nothing that a test waits for takes longer, unless it never happens.
pub const PATIENCE: Duration = Duration::from_secs(20);

impl Default for Gate {
    fn default() -> Self {
        Self {
            reached: Arc::new(watch::Sender::new(false)),
            open: Arc::new(watch::Sender::new(false)),
        }
    }
}

impl Gate {
    /// Waits until a phase has come to the gate.
    pub async fn reached(&self) {
        let mut reached = self.reached.subscribe();
        let waited = tokio::time::timeout(PATIENCE, reached.wait_for(|reached| *reached)).await;
        waited.expect("the phase comes to the gate").unwrap();
    }

    /// Lets the phase go on.
    pub fn open(&self) {
        self.open.send_replace(true);
    }

    async fn pass(&self) {
        self.reached.send_replace(true);
        let mut open = self.open.subscribe();
        open.wait_for(|open| *open).await.unwrap();
    }
}

/// The acts to come, by phase.
#[derive(Debug, Clone, Default)]
pub struct Script(Arc<Mutex<HashMap<&'static str, VecDeque<Act>>>>);

impl Script {
    /// What happens when the phase is next entered, after what was said before.
    pub fn next(&self, phase: &'static str, act: Act) {
        self.acts().entry(phase).or_default().push_back(act);
    }

    /// The phase waits, the next time it is entered.
    pub fn hold(&self, phase: &'static str) -> Gate {
        let gate = Gate::default();
        self.next(phase, Act::Wait(gate.clone()));
        gate
    }

    fn acts(&self) -> MutexGuard<'_, HashMap<&'static str, VecDeque<Act>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, phase: &'static str) -> Option<Act> {
        self.acts().get_mut(phase)?.pop_front()
    }

    /// Does what comes next in the phase.
    pub async fn play(&self, phase: &'static str) -> Result<(), TripError> {
        match self.take(phase) {
            None => Ok(()),
            Some(Act::Wait(gate)) => {
                gate.pass().await;
                Ok(())
            }
            Some(Act::Panic) => panic!("the script says so"),
            Some(Act::Fail(error)) => Err(error),
            Some(Act::Commit) => Err(TripError::Script("only an atomic phase can commit")),
        }
    }

    /// Does what comes next in an atomic phase.
    pub async fn play_in(&self, phase: &'static str, tx: &mut Tx<'_>) -> Result<(), TripError> {
        if matches!(
            self.acts().get(phase).and_then(VecDeque::front),
            Some(Act::Commit)
        ) {
            self.take(phase);
            sqlx::raw_sql("COMMIT").execute(&mut **tx).await?;
            return Ok(());
        }
        self.play(phase).await
    }
}

/// The ways in which a trip fails.
#[derive(Debug, Clone)]
pub enum TripError {
    /// Not now.
    Retry,
    /// The outside has not decided.
    Pending,
    /// A bug.
    Bug,
    /// A final answer: 402.
    Declined,
    /// The database.
    Database(String, Disposition),
    /// The test is wrong.
    Script(&'static str),
}

impl fmt::Display for TripError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Retry => f.write_str("the outside is unwell"),
            Self::Pending => f.write_str("pending"),
            Self::Bug => f.write_str("this should not be"),
            Self::Declined => f.write_str("declined"),
            Self::Database(error, _) => f.write_str(error),
            Self::Script(error) => f.write_str(error),
        }
    }
}

impl From<sqlx::Error> for TripError {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error.to_string(), error.disposition())
    }
}

impl PhaseFailure for TripError {
    fn disposition(&self) -> Disposition {
        match self {
            Self::Retry => Disposition::retry(),
            Self::Pending => Disposition::wait(Duration::from_secs(2)),
            Self::Bug | Self::Script(_) => Disposition::stop(),
            Self::Declined => {
                let declined = http::StatusCode::PAYMENT_REQUIRED;
                Disposition::reject(Reply::new(declined, "declined").header("x-why", "funds"))
            }
            Self::Database(_, disposition) => disposition.clone(),
        }
    }
}

/// The flow.
#[derive(Debug, Clone, Default)]
pub struct TripFlow {
    /// The outside that it calls.
    pub outside: Outside,
    /// What happens in its phases.
    pub script: Script,
}

#[idempotent_flow(name = "trip", lease = "15s", retention = "48h")]
impl TripFlow {
    #[atomic(Started -> Created)]
    async fn create(&self, tx: &mut Tx<'_>, request: &TripRequest) -> Result<(), TripError> {
        let key_id = tx.key().id();
        sqlx::query("INSERT INTO trips (key_id, goal) VALUES ($1, $2)")
            .bind(key_id)
            .bind(&request.goal)
            .execute(&mut **tx)
            .await?;
        self.script.play_in("create", tx).await
    }

    #[external(Created -> Paid)]
    async fn pay(&self, call: &External<'_>) -> Result<Payment, TripError> {
        self.script.play("before pay").await?;
        let payment = self.outside.pay(call.derived_key().as_str());
        self.script.play("pay").await?;
        Ok(payment)
    }

    #[atomic(Paid -> Finished)]
    async fn finish(&self, tx: &mut Tx<'_>, payment: &Payment) -> Result<Reply<usize>, TripError> {
        let key_id = tx.key().id();
        sqlx::query("UPDATE trips SET state = 'paid', payment = $2 WHERE key_id = $1")
            .bind(key_id)
            .bind(payment.number.to_string())
            .execute(&mut **tx)
            .await?;
        self.script.play_in("finish", tx).await?;
        Ok(Reply::created(payment.number)
            .header("location", format!("/trips/{key_id}"))
            .header("etag", "\"1\""))
    }

    #[on_reject(Created)]
    async fn decline(&self, tx: &mut Tx<'_>, _rejection: &Rejection) -> Result<(), TripError> {
        let key_id = tx.key().id();
        sqlx::query("UPDATE trips SET state = 'declined' WHERE key_id = $1")
            .bind(key_id)
            .execute(&mut **tx)
            .await?;
        self.script.play_in("decline", tx).await
    }
}

impl TripFlow {
    /// An engine of its own for this flow, as another process would have, and the way to run it.
    pub async fn run_by(&self, pool: PgPool) -> Handle<Self> {
        self.run_with(pool, FlowOptions::new()).await
    }

    /// The same, with another lease.
    pub async fn run_with(&self, pool: PgPool, options: FlowOptions) -> Handle<Self> {
        let engine = Engine::builder(pool)
            .flow_with(self.clone(), options)
            .build()
            .await
            .unwrap();
        engine.handle::<Self>().unwrap()
    }
}

/// A database with the framework's table and the flow's.
pub async fn database() -> TestDatabase {
    TestDatabase::from_template("trips", async |pool| {
        idempotent_core::migrate(&pool).await?;
        sqlx::raw_sql(TABLE).execute(&pool).await?;
        Ok(())
    })
    .await
}

/// The trips there are: goal and state, in the order of their goals.
pub async fn trips(database: &TestDatabase) -> Vec<(String, String)> {
    let rows = sqlx::query("SELECT goal, state FROM trips ORDER BY goal, key_id");
    let rows = rows.fetch_all(&database.pool()).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// How many rows a table has.
pub async fn count(database: &TestDatabase, table: &'static str) -> i64 {
    let sql = sqlx::AssertSqlSafe(format!("SELECT count(*) FROM {table}"));
    sqlx::query_scalar(sql)
        .fetch_one(&database.pool())
        .await
        .unwrap()
}

/// Lets the lease of every unfinished key run out, as if its time had passed.
pub async fn expire_leases(database: &TestDatabase) {
    let sql =
        "UPDATE idempotency_keys SET lease_expires_at = statement_timestamp() - interval '1 second'
               WHERE holder IS NOT NULL";
    let expired = sqlx::query(sql).execute(&database.pool()).await.unwrap();
    assert_ne!(expired.rows_affected(), 0, "there is a lease to expire");
}

/// Ends the transactions that are held open in a phase, as the server does by itself when the
/// phase's time is up.
pub async fn end_frozen_transactions(database: &TestDatabase) {
    let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
               WHERE datname = current_database() AND state = 'idle in transaction'";
    sqlx::query(sql).execute(&database.pool()).await.unwrap();
    let gone = "SELECT count(*) = 0 FROM pg_stat_activity
                WHERE datname = current_database() AND state LIKE 'idle in transaction%'";
    until(&database.pool(), "the transactions have ended", gone).await;
}

/// Waits until a query says true; fails when it does not for [`PATIENCE`].
pub async fn until(pool: &PgPool, what: &str, sql: &'static str) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !sqlx::query_scalar::<_, bool>(sql)
        .fetch_one(pool)
        .await
        .unwrap()
    {
        assert!(tokio::time::Instant::now() < deadline, "not: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// What the database says when it wants a transaction to be run again.
pub fn conflict() -> TripError {
    let error = sqlx::Error::Database(Box::new(Conflict));
    error.into()
}

#[derive(Debug, thiserror::Error)]
#[error("could not serialize access")]
struct Conflict;

impl sqlx::error::DatabaseError for Conflict {
    fn message(&self) -> &str {
        "could not serialize access"
    }

    fn code(&self) -> Option<std::borrow::Cow<'_, str>> {
        Some("40001".into())
    }

    fn as_error(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        self
    }

    fn as_error_mut(&mut self) -> &mut (dyn std::error::Error + Send + Sync + 'static) {
        self
    }

    fn into_error(self: Box<Self>) -> Box<dyn std::error::Error + Send + Sync + 'static> {
        self
    }

    fn kind(&self) -> sqlx::error::ErrorKind {
        sqlx::error::ErrorKind::Other
    }
}

/// Every row of the framework's table and the flow's, to be compared with a later look.
pub async fn everything(database: &TestDatabase) -> Vec<String> {
    let mut rows: Vec<String> = Vec::new();
    for table in ["idempotency_keys", "trips"] {
        let sql = format!("SELECT to_jsonb(t)::text FROM {table} t ORDER BY 1");
        let query = sqlx::query_scalar(sqlx::AssertSqlSafe(sql));
        rows.extend(query.fetch_all(&database.pool()).await.unwrap());
    }
    rows
}
