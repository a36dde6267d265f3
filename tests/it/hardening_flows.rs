//! What once went wrong in a flow of a particular shape: a rejection behind an external, two
//! externals in a row, values that change or cannot be read back once they are stored.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use idempotent_core::{
    Engine, External, Flow, Handle, Rejection, Reply, RunError, Tx, idempotent_flow,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::postgres::PgPool;
use tests::database::pool_options;
use tests::proxy::{Point, Proxy};
use tests::trip::{self, PATIENCE, TripError, key};
use tokio::sync::Barrier;
use tokio::time::timeout;

const CHECKPOINT: &str = "SET recovery_point = $5, state = $6, attempts = 0";
const FINISH: &str = "SET recovery_point = 'finished'";

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Any {
    value: Value,
}

fn any(value: impl Into<Value>) -> Any {
    Any {
        value: value.into(),
    }
}

async fn handle<F: Flow>(pool: PgPool, flow: F) -> Handle<F> {
    let engine = Engine::builder(pool).flow(flow).build().await.unwrap();
    engine.handle::<F>().unwrap()
}

/// What was seen, in order.
type Seen<T> = Arc<Mutex<Vec<T>>>;

/// Pays, finds that it should not have, and owes a refund.
#[derive(Clone, Default)]
struct Refunding {
    charges: Arc<AtomicUsize>,
}

#[idempotent_flow(name = "refunding", lease = "5s", retention = "48h")]
impl Refunding {
    #[atomic(Started -> Created)]
    async fn create(&self, _tx: &mut Tx<'_>, request: &Any) -> Result<Value, TripError> {
        Ok(request.value.clone())
    }

    #[external(Created -> Paid)]
    async fn pay(&self, _call: &External<'_>) -> Result<u32, TripError> {
        self.charges.fetch_add(1, Ordering::SeqCst);
        Ok(7)
    }

    #[atomic(Paid -> Finished)]
    async fn finish(&self, _tx: &mut Tx<'_>, _paid: &u32) -> Result<Reply<u32>, TripError> {
        Err(TripError::Declined)
    }

    #[on_reject(Paid)]
    async fn refund(
        &self,
        tx: &mut Tx<'_>,
        paid: &u32,
        _rejection: &Rejection,
    ) -> Result<(), TripError> {
        let key_id = tx.key().id();
        sqlx::query("INSERT INTO trips (key_id, goal, state) VALUES ($1, 'refund', $2)")
            .bind(key_id)
            .bind(paid.to_string())
            .execute(&mut **tx)
            .await?;
        Ok(())
    }
}

/// The row still stands before the external, whose result was to be stored with the rejection. The
/// rejection stays one of the point behind it, with that point's work.
#[tokio::test]
async fn a_rejection_whose_commit_never_arrived_is_stored_with_its_work() {
    let database = trip::database().await;
    let proxy = Proxy::start(&database.options());
    let pool = pool_options().connect_lazy_with(proxy.connect_options(&database.options()));
    let flow = Refunding::default();
    let refunding = handle(pool, flow.clone()).await;

    let fault = proxy.cut_before(Point::commit().after(FINISH));
    let answer = refunding.run(key("k"), any(1)).await.unwrap();
    fault.fired().await;
    assert_eq!(answer.reply().status(), 402);
    assert!(!answer.is_replayed());
    assert_eq!(
        trip::trips(&database).await,
        [("refund".to_owned(), "7".to_owned())]
    );
    assert_eq!(flow.charges.load(Ordering::SeqCst), 1);
    let replay = refunding.run(key("k"), any(1)).await.unwrap();
    assert!(replay.is_replayed());
    assert_eq!(replay.reply(), answer.reply());
}

/// Phases that meet, twice: so a test knows that all are there, and says when they go on.
#[derive(Clone)]
struct Meeting {
    barrier: Arc<Barrier>,
    declines: bool,
}

#[idempotent_flow(name = "meeting", lease = "15s", retention = "48h")]
impl Meeting {
    #[atomic(Started -> Finished)]
    async fn meet(&self, _tx: &mut Tx<'_>, request: &Any) -> Result<Reply<Value>, TripError> {
        self.barrier.wait().await;
        self.barrier.wait().await;
        if self.declines {
            return Err(TripError::Declined);
        }
        Ok(Reply::ok(request.value.clone()))
    }
}

/// To store the rejection must not take a second connection while the first is held.
#[tokio::test]
async fn rejections_at_once_do_not_wait_for_each_others_connections() {
    for size in [1, 4] {
        let database = trip::database().await;
        let pool = pool_options()
            .max_connections(size)
            .connect_lazy_with(database.options());
        let size = usize::try_from(size).unwrap();
        let flow = Meeting {
            barrier: Arc::new(Barrier::new(size)),
            declines: true,
        };
        let meeting = handle(pool, flow).await;
        let running: Vec<_> = (0..size)
            .map(|n| meeting.start(key(&format!("k{n}")), any(1)).unwrap())
            .collect();
        let all = async {
            for running in running {
                let answer = running.wait().await.unwrap();
                assert_eq!(answer.reply().status(), 402, "with a pool of {size}");
            }
        };
        // Half of the time for which a connection is waited for.
        timeout(PATIENCE / 2, all).await.expect("promptly");
    }
}

/// Calls the outside twice in a row.
#[derive(Clone)]
struct Two {
    pool: PgPool,
    seen: Seen<String>,
}

#[idempotent_flow(name = "two", lease = "5s", retention = "48h")]
impl Two {
    #[external(Started -> First)]
    async fn a(&self, _call: &External<'_>, request: &Any) -> Result<Value, TripError> {
        self.seen.lock().unwrap().push("a".to_owned());
        Ok(request.value.clone())
    }

    #[external(First -> Second)]
    async fn b(&self, _call: &External<'_>) -> Result<u32, TripError> {
        let point: String = sqlx::query_scalar("SELECT recovery_point FROM idempotency_keys")
            .fetch_one(&self.pool)
            .await?;
        self.seen
            .lock()
            .unwrap()
            .push(format!("b while the row says {point}"));
        Ok(2)
    }

    #[atomic(Second -> Finished)]
    async fn finish(&self, _tx: &mut Tx<'_>) -> Result<Reply<u32>, TripError> {
        Ok(Reply::ok(1))
    }
}

/// What the first gave is stored before the second is called: also when it has to be stored again.
const IN_ORDER: [&str; 2] = ["a", "b while the row says first"];

#[tokio::test]
async fn a_result_whose_storing_conflicted_is_stored_before_the_next_call() {
    let database = trip::database().await;
    sqlx::raw_sql(
        "CREATE SEQUENCE times;
         CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF NEW.recovery_point = 'first' AND nextval('times') = 1 THEN
                 RAISE EXCEPTION 'could not serialize access' USING ERRCODE = '40001';
             END IF;
             RETURN NEW;
         END $$;
         CREATE TRIGGER conflict BEFORE UPDATE ON idempotency_keys
         FOR EACH ROW EXECUTE FUNCTION conflict()",
    )
    .execute(&database.pool())
    .await
    .unwrap();
    let flow = Two {
        pool: database.pool(),
        seen: Seen::default(),
    };
    let two = handle(database.pool(), flow.clone()).await;
    let answer = two.run(key("k"), any(1)).await.unwrap();
    assert_eq!(answer.reply().status(), 200);
    assert_eq!(flow.seen.lock().unwrap()[..], IN_ORDER);
}

#[tokio::test]
async fn a_result_whose_storing_never_arrived_is_stored_before_the_next_call() {
    let database = trip::database().await;
    let proxy = Proxy::start(&database.options());
    let pool = pool_options().connect_lazy_with(proxy.connect_options(&database.options()));
    let flow = Two {
        pool: database.pool(),
        seen: Seen::default(),
    };
    let two = handle(pool, flow.clone()).await;
    let fault = proxy.cut_before(CHECKPOINT);
    let answer = two.run(key("k"), any(1)).await.unwrap();
    fault.fired().await;
    assert_eq!(answer.reply().status(), 200);
    assert_eq!(flow.seen.lock().unwrap()[..], IN_ORDER);
}

/// How deep the values are that the phases return.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Depths {
    create: usize,
    pay: usize,
}

fn nested(depth: usize) -> Value {
    (0..depth).fold(Value::from(1), |inner, _| Value::Array(vec![inner]))
}

/// Returns deep values.
struct Nesting;

#[idempotent_flow(name = "nesting", lease = "5s", retention = "48h")]
impl Nesting {
    #[atomic(Started -> Created)]
    async fn create(&self, _tx: &mut Tx<'_>, request: &Depths) -> Result<Value, TripError> {
        Ok(nested(request.create))
    }

    #[external(Created -> Paid)]
    async fn pay(
        &self,
        _call: &External<'_>,
        _created: &Value,
        request: &Depths,
    ) -> Result<Value, TripError> {
        Ok(nested(request.pay))
    }

    #[atomic(Paid -> Finished)]
    async fn finish(&self, _tx: &mut Tx<'_>, _paid: &Value) -> Result<Reply<u32>, TripError> {
        Ok(Reply::ok(1))
    }
}

/// PostgreSQL stores it; nobody could read it again.
#[tokio::test]
async fn a_request_that_is_too_deep_is_refused() {
    let database = trip::database().await;
    let numbers = handle(database.pool(), Numbers::default()).await;
    let told = numbers.run(key("k"), any(nested(127))).await.unwrap_err();
    assert!(matches!(told, RunError::Invalid(_)), "{told:?}");
    assert_eq!(trip::count(&database, "idempotency_keys").await, 0);
}

#[tokio::test]
async fn a_payload_that_is_too_deep_does_not_poison_its_flow() {
    let database = trip::database().await;
    let nesting = handle(database.pool(), Nesting).await;
    let cases = [("create", 127, 1), ("pay", 1, 127)];
    for (phase, create, pay) in cases {
        for attempt in 1..=2 {
            let told = nesting.run(key(phase), Depths { create, pay }).await;
            let Err(RunError::Stopped { phase: stopped, .. }) = told else {
                panic!("attempt {attempt} at {phase}: {told:?}")
            };
            assert_eq!(stopped, phase);
        }
    }
    let fine = Depths {
        create: 64,
        pay: 64,
    };
    let answer = nesting.run(key("fine"), fine).await.unwrap();
    assert_eq!(answer.reply().status(), 200);
}

/// Passes a value on, and fails as often as it is told to.
#[derive(Clone, Default)]
struct Numbers {
    failures: Arc<AtomicUsize>,
    seen: Seen<Value>,
}

#[idempotent_flow(name = "numbers", lease = "5s", retention = "48h")]
impl Numbers {
    #[atomic(Started -> Created)]
    async fn create(&self, _tx: &mut Tx<'_>, request: &Any) -> Result<Value, TripError> {
        Ok(request.value.clone())
    }

    #[external(Created -> Paid)]
    async fn pay(&self, _call: &External<'_>, created: &Value) -> Result<(), TripError> {
        self.seen.lock().unwrap().push(created.clone());
        let fewer = |failures: usize| failures.checked_sub(1);
        let order = Ordering::SeqCst;
        match self.failures.fetch_update(order, order, fewer) {
            Ok(_) => Err(TripError::Retry),
            Err(_) => Ok(()),
        }
    }

    #[atomic(Paid -> Finished)]
    async fn finish(&self, _tx: &mut Tx<'_>) -> Result<Reply<u32>, TripError> {
        Ok(Reply::ok(1))
    }
}

/// The next version of it, whose requests have a member more.
struct NextNumbers;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct AnyMore {
    value: Value,
    #[serde(default)]
    more: bool,
}

#[idempotent_flow(name = "numbers", lease = "5s", retention = "48h")]
impl NextNumbers {
    #[atomic(Started -> Finished)]
    async fn create(&self, _tx: &mut Tx<'_>, request: &AnyMore) -> Result<Reply<bool>, TripError> {
        Ok(Reply::ok(request.more))
    }
}

/// The first does not survive a parser that rounds, the next two are written in another way by the
/// database.
fn floats() -> [f64; 5] {
    [55.393536131272924, 1e16, -0.0, 1e300, 0.1 + 0.2]
}

/// What a phase is given does not depend on whether the flow was interrupted before it.
#[tokio::test]
async fn a_resumed_run_sees_the_numbers_of_the_first() {
    let database = trip::database().await;
    let flow = Numbers::default();
    flow.failures.store(1, Ordering::SeqCst);
    let numbers = handle(database.pool(), flow.clone()).await;
    let values = json!(floats());
    let told = numbers.run(key("k"), any(values.clone())).await;
    assert!(matches!(told, Err(RunError::Retry { .. })), "{told:?}");
    let answer = numbers.run(key("k"), any(values)).await.unwrap();
    assert_eq!(answer.reply().status(), 200);

    let seen = flow.seen.lock().unwrap();
    let [first, resumed] = &seen[..] else {
        panic!("{seen:?}")
    };
    assert_eq!(first, resumed);
    // To the letter, too: two zeros are equal whatever their sign.
    assert_eq!(first.to_string(), resumed.to_string());
    let numbers = |value: &Value| -> Vec<f64> {
        let items = value.as_array().unwrap().iter();
        items.map(|item| item.as_f64().unwrap()).collect()
    };
    assert_eq!(numbers(first), floats(), "no number became another one");
}

#[tokio::test]
async fn requests_with_floats_are_the_same_to_the_next_version() {
    let database = trip::database().await;
    let old = handle(database.pool(), Numbers::default()).await;
    let new = handle(database.pool(), NextNumbers).await;
    for float in floats().into_iter().chain([1.5, 2e3]) {
        let name = format!("{float:e}");
        let first = old.run(key(&name), any(float)).await.unwrap();
        let request = AnyMore {
            value: float.into(),
            more: false,
        };
        let replay = new.run(key(&name), request).await;
        let replay = replay.unwrap_or_else(|error| panic!("{float}: {error:?}"));
        assert!(replay.is_replayed(), "{float}");
        assert_eq!(replay.reply(), first.reply(), "{float}");
    }
}

/// Who sees a log must not see a key with which to ask for a reply, nor the reply.
#[tokio::test]
async fn debug_output_keeps_secrets() {
    let database = trip::database().await;
    let barrier = Arc::new(Barrier::new(2));
    let flow = Meeting {
        barrier: Arc::clone(&barrier),
        declines: false,
    };
    let engine = Engine::builder(database.pool());
    let engine = engine.flow(flow).build().await.unwrap();
    let meeting = engine.handle::<Meeting>().unwrap();
    let run = || meeting.start(key("secret-key"), any("secret-body"));
    let (leads, joined) = (run().unwrap(), run().unwrap());
    assert!(joined.is_joined());
    barrier.wait().await;
    let shown = |what: &dyn std::fmt::Debug| {
        for shown in [format!("{what:?}"), format!("{what:#?}")] {
            for secret in ["alice", "secret-key", "secret-body"] {
                assert!(!shown.contains(secret), "{shown}");
            }
        }
    };
    shown(&engine);
    shown(&leads);
    shown(&joined);
    barrier.wait().await;
    let answer = leads.wait().await.unwrap();
    assert_eq!(answer.reply().body()[..], *b"\"secret-body\"");
    shown(&joined);
    shown(&answer);
    shown(answer.reply());
}
