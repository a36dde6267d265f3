//! A rolling deploy: two versions of a flow on one database, both at work. Each leaves what it does
//! not know to the other, and whatever a version began is finished once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use idempotent_core::{
    Engine, External, Flow, FlowOptions, Handle, Reply, RunError, Tx, idempotent_flow,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::postgres::PgPool;
use tests::database::TestDatabase;
use tests::trip::{self, PATIENCE, TripError, key};
use tokio::time::{Instant, sleep};

/// The outside, which both versions call: how often, under each key.
#[derive(Clone, Default)]
struct Outside(Arc<Mutex<HashMap<String, usize>>>);

impl Outside {
    fn pay(&self, call: &External<'_>) {
        let mut payments = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *payments
            .entry(call.derived_key().as_str().to_owned())
            .or_default() += 1;
    }

    fn payments(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// Where a version's phases fail, as they do where the outside of their host is down.
#[derive(Clone, Copy, PartialEq)]
enum Down {
    Nowhere,
    In(&'static str),
}

impl Down {
    fn check(self, phase: &'static str) -> Result<(), TripError> {
        if self == Self::In(phase) {
            return Err(TripError::Retry);
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct OldRequest {
    goal: String,
}

struct OldVersion {
    outside: Outside,
    down: Down,
}

#[idempotent_flow(name = "trip", lease = "15s", retention = "48h")]
impl OldVersion {
    #[atomic(Started -> Created)]
    async fn create(&self, tx: &mut Tx<'_>, request: &OldRequest) -> Result<(), TripError> {
        self.down.check("create")?;
        insert(tx, &request.goal).await
    }

    #[external(Created -> Paid)]
    async fn pay(&self, call: &External<'_>) -> Result<String, TripError> {
        self.down.check("pay")?;
        self.outside.pay(call);
        Ok(call.derived_key().as_str().to_owned())
    }

    #[atomic(Paid -> Finished)]
    async fn finish(&self, tx: &mut Tx<'_>, paid: &String) -> Result<Reply<Value>, TripError> {
        self.down.check("finish")?;
        update(tx, "paid", paid).await?;
        Ok(Reply::created(json!({"paid": paid})))
    }
}

/// Knows of seats, which a client of before does not ask for.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct NewRequest {
    goal: String,
    #[serde(default = "one")]
    seats: u32,
}

fn one() -> u32 {
    1
}

struct NewVersion {
    outside: Outside,
    down: Down,
}

#[idempotent_flow(name = "trip", lease = "15s", retention = "48h")]
impl NewVersion {
    #[atomic(Started -> Created)]
    async fn create(&self, tx: &mut Tx<'_>, request: &NewRequest) -> Result<(), TripError> {
        self.down.check("create")?;
        insert(tx, &request.goal).await
    }

    #[atomic(Created -> Reserved)]
    async fn reserve(&self, tx: &mut Tx<'_>, request: &NewRequest) -> Result<u32, TripError> {
        self.down.check("reserve")?;
        update(tx, "reserved", &request.seats.to_string()).await?;
        Ok(request.seats)
    }

    #[external(Reserved -> Paid)]
    async fn pay(&self, call: &External<'_>, _seats: &u32) -> Result<String, TripError> {
        self.down.check("pay")?;
        self.outside.pay(call);
        Ok(call.derived_key().as_str().to_owned())
    }

    #[atomic(Paid -> Finished)]
    async fn finish(&self, tx: &mut Tx<'_>, paid: &String) -> Result<Reply<Value>, TripError> {
        self.down.check("finish")?;
        update(tx, "paid", paid).await?;
        Ok(Reply::created(json!({"paid": paid})))
    }
}

async fn insert(tx: &mut Tx<'_>, goal: &str) -> Result<(), TripError> {
    let key_id = tx.key().id();
    sqlx::query("INSERT INTO trips (key_id, goal) VALUES ($1, $2)")
        .bind(key_id)
        .bind(goal)
        .execute(&mut **tx)
        .await?;
    Ok(())
}

async fn update(tx: &mut Tx<'_>, state: &str, payment: &str) -> Result<(), TripError> {
    let key_id = tx.key().id();
    sqlx::query("UPDATE trips SET state = $2, payment = $3 WHERE key_id = $1")
        .bind(key_id)
        .bind(state)
        .bind(payment)
        .execute(&mut **tx)
        .await?;
    Ok(())
}

async fn engine<F: Flow>(pool: PgPool, flow: F) -> Engine {
    let backoff = FlowOptions::new().backoff(Duration::from_millis(10), Duration::from_millis(50));
    let builder = Engine::builder(pool).flow_with(flow, backoff);
    builder.build().await.unwrap()
}

struct Deploy {
    database: TestDatabase,
    outside: Outside,
}

impl Deploy {
    async fn start() -> Self {
        let database = trip::database().await;
        let outside = Outside::default();
        Self { database, outside }
    }

    async fn old_version(&self, down: Down) -> Engine {
        let outside = self.outside.clone();
        engine(self.database.pool(), OldVersion { outside, down }).await
    }

    async fn new_version(&self, down: Down) -> Engine {
        let outside = self.outside.clone();
        engine(self.database.pool(), NewVersion { outside, down }).await
    }

    /// What there is of the keys, by name.
    async fn rows(&self) -> Vec<Value> {
        sqlx::query_scalar("SELECT to_jsonb(k) FROM idempotency_keys AS k ORDER BY key")
            .fetch_all(&self.database.pool())
            .await
            .unwrap()
    }

    async fn all_finish(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut rows = self.rows().await;
            rows.retain(|row| row["finished_at"].is_null());
            if rows.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "not finished: {rows:#?}");
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// So many trips, each paid once and with the key that its row says.
    async fn done_once(&self, count: usize) {
        assert_eq!(self.rows().await.len(), count);
        let trips = trip::trips(&self.database).await;
        assert_eq!(trips.len(), count);
        assert!(trips.iter().all(|(_, state)| state == "paid"), "{trips:?}");
        assert_eq!(self.outside.payments(), count);
        let payments = "SELECT count(DISTINCT payment) FROM trips";
        let distinct: i64 = sqlx::query_scalar(payments)
            .fetch_one(&self.database.pool())
            .await
            .unwrap();
        assert_eq!(usize::try_from(distinct).unwrap(), count);
    }
}

fn old_trip(goal: &str) -> OldRequest {
    let goal = goal.to_owned();
    OldRequest { goal }
}

fn new_trip(goal: &str, seats: u32) -> NewRequest {
    let goal = goal.to_owned();
    NewRequest { goal, seats }
}

async fn fails<F: Flow>(trips: &Handle<F>, name: &str, request: F::Request) {
    let told = trips.run(key(name), request).await.unwrap_err();
    assert!(matches!(told, RunError::Retry { .. }), "{name}: {told:?}");
}

/// What stands at a point that the old version does not have, it leaves as it is: its completer, its
/// start, and a client's retry that reaches it. The new one finishes it, and what the old one began.
#[tokio::test]
async fn the_old_version_leaves_what_it_does_not_know_to_the_new_one() {
    let deploy = Deploy::start().await;
    let mut names = Vec::new();
    for phase in ["create", "pay", "finish"] {
        let old = deploy.old_version(Down::In(phase)).await;
        let name = format!("began in the old one, before {phase}");
        fails(&old.handle::<OldVersion>().unwrap(), &name, old_trip(&name)).await;
        names.push(name);
    }
    // Carried past the new point, and before it: the old one knows only the first.
    for phase in ["pay", "reserve"] {
        let new = deploy.new_version(Down::In(phase)).await;
        let name = format!("began in the new one, before {phase}");
        fails(
            &new.handle::<NewVersion>().unwrap(),
            &name,
            new_trip(&name, 3),
        )
        .await;
        names.push(name);
    }
    let unknown = "began in the new one, before pay";
    let row = |rows: Vec<Value>| rows.into_iter().find(|row| row["key"] == unknown).unwrap();
    let before = row(deploy.rows().await);
    assert_eq!(before["recovery_point"], "reserved");

    // The old one works on: it finishes what it knows, and does not so much as claim the rest.
    let old = deploy.old_version(Down::Nowhere).await;
    let workers = old.workers().start();
    let old_trips = old.handle::<OldVersion>().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while deploy
        .rows()
        .await
        .iter()
        .filter(|row| row["finished_at"].is_null())
        .count()
        > 1
    {
        assert!(
            Instant::now() < deadline,
            "the old one does not finish what it knows"
        );
        sleep(Duration::from_millis(10)).await;
    }
    let told = old_trips
        .run(key(unknown), old_trip(unknown))
        .await
        .unwrap_err();
    assert!(matches!(told, RunError::NotUnderstood { .. }), "{told:?}");
    assert!(told.retry_after().is_some(), "the client comes again");
    assert_eq!(old.complete_once().await.unwrap(), 0);
    assert_eq!(row(deploy.rows().await), before);

    let new = deploy.new_version(Down::Nowhere).await;
    let new_workers = new.workers().start();
    deploy.all_finish().await;
    deploy.done_once(5).await;
    // Every client gets its answer from either version, the same.
    let new_trips = new.handle::<NewVersion>().unwrap();
    for name in &names {
        let seats = if name.contains("the new one") { 3 } else { 1 };
        let by_new = new_trips
            .run(key(name), new_trip(name, seats))
            .await
            .unwrap();
        let by_old = old_trips.run(key(name), old_trip(name)).await.unwrap();
        assert!(by_new.is_replayed() && by_old.is_replayed(), "{name}");
        assert_eq!(by_new.reply(), by_old.reply(), "{name}");
    }
    let other = new_trips
        .run(key(unknown), new_trip(unknown, 4))
        .await
        .unwrap_err();
    assert!(matches!(other, RunError::Mismatch), "{other:?}");
    workers.stop().await;
    new_workers.stop().await;
}

/// The new version finishes what the old one left at each of its points; the field that the stored
/// request does not have gets its default, and the new point is passed by whoever comes to it.
#[tokio::test]
async fn the_new_version_goes_on_with_what_the_old_one_began() {
    let deploy = Deploy::start().await;
    for phase in ["create", "pay", "finish"] {
        let old = deploy.old_version(Down::In(phase)).await;
        let trips = old.handle::<OldVersion>().unwrap();
        fails(&trips, phase, old_trip(phase)).await;
    }
    // One at a client's retry, which asks for the default by name; the others by the completer.
    let new = deploy.new_version(Down::In("pay")).await;
    let trips = new.handle::<NewVersion>().unwrap();
    fails(&trips, "create", new_trip("create", 1)).await;
    let reserved = deploy.rows().await;
    let reserved = reserved.iter().find(|row| row["key"] == "create").unwrap();
    assert_eq!(reserved["recovery_point"], "reserved");
    assert_eq!(reserved["state"]["reserved"], 1, "{reserved:#}");

    let new = deploy.new_version(Down::Nowhere).await;
    let workers = new.workers().start();
    deploy.all_finish().await;
    deploy.done_once(3).await;
    workers.stop().await;
}

/// Both alive, and both failing now and then, as in the middle of a deploy: the clients' retries and
/// the completers go to whichever version, and every trip is made and paid once.
#[tokio::test]
async fn nothing_is_lost_while_both_versions_are_at_work() {
    let deploy = Deploy::start().await;
    let old = deploy.old_version(Down::Nowhere).await;
    let new = deploy.new_version(Down::Nowhere).await;
    let old_trips = old.handle::<OldVersion>().unwrap();
    let new_trips = new.handle::<NewVersion>().unwrap();
    let workers = [old.workers().start(), new.workers().start()];
    let mut count = 0;
    for phase in ["create", "reserve", "pay", "finish"] {
        let old_down = deploy.old_version(Down::In(phase)).await;
        let new_down = deploy.new_version(Down::In(phase)).await;
        for round in 0..4 {
            let name = format!("{phase} {round}");
            // Began where something is down, if it is; asked for again in the version beside it.
            if round % 2 == 0 {
                let began = old_down.handle::<OldVersion>().unwrap();
                let _ = began.run(key(&name), old_trip(&name)).await;
                answered(&new_trips, &name, new_trip(&name, 1)).await;
            } else {
                let began = new_down.handle::<NewVersion>().unwrap();
                let _ = began.run(key(&name), new_trip(&name, 2)).await;
                answered(&old_trips, &name, old_trip(&name)).await;
            }
            count += 1;
        }
    }
    deploy.all_finish().await;
    deploy.done_once(count).await;
    for workers in workers {
        workers.stop().await;
    }

    async fn answered<F: Flow>(trips: &Handle<F>, name: &str, request: F::Request)
    where
        F::Request: Clone,
    {
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = trips.run(key(name), request.clone()).await {
            assert!(error.retry_after().is_some(), "{name}: {error:?}");
            assert!(Instant::now() < deadline, "{name}: still {error:?}");
            sleep(Duration::from_millis(20)).await;
        }
    }
}
