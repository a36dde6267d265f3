//! Calls that may not simply be made again, phases that are tried again within the request, and
//! points that were renamed.

use std::sync::{Arc, Mutex, PoisonError};

use idempotent_core::{
    Engine, External, FlowOptions, Handle, Reconciled, Reply, RunError, Tx, idempotent_flow,
};
use serde_json::Value;
use sqlx::postgres::PgPool;
use tests::database::{TestDatabase, pool_options};
use tests::proxy::Proxy;
use tests::trip::{self, Act, Script, TripError, key};
use uuid::Uuid;

/// An outside that does not dedupe: every call counts.
#[derive(Debug, Clone, Default)]
struct Post {
    script: Script,
    letters: Arc<Mutex<Vec<String>>>,
    says: Arc<Mutex<Option<Reconciled<u32>>>>,
}

impl Post {
    fn send(&self, letter: &str) -> u32 {
        let mut letters = self.letters.lock().unwrap_or_else(PoisonError::into_inner);
        letters.push(letter.to_owned());
        u32::try_from(letters.len()).unwrap()
    }

    fn sent(&self) -> usize {
        self.letters
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len()
    }

    fn say(&self, answer: Reconciled<u32>) {
        *self.says.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
    }

    async fn run(&self, pool: PgPool) -> (Engine, Handle<Letter>) {
        let engine = Engine::builder(pool)
            .flow(Letter { post: self.clone() })
            .build()
            .await
            .unwrap();
        let handle = engine.handle::<Letter>().unwrap();
        (engine, handle)
    }
}

struct Letter {
    post: Post,
}

#[idempotent_flow(name = "letter", lease = "15s", retention = "48h")]
impl Letter {
    #[atomic(Started -> Written)]
    async fn write(&self, _tx: &mut Tx<'_>, request: &Value) -> Result<String, TripError> {
        Ok(request.to_string())
    }

    #[external(Written -> Sent, at_most_once)]
    async fn send(&self, _call: &External<'_>, letter: &String) -> Result<u32, TripError> {
        self.post.script.play("before send").await?;
        let number = self.post.send(letter);
        self.post.script.play("send").await?;
        Ok(number)
    }

    #[reconcile(Written)]
    async fn ask(&self, _call: &External<'_>) -> Result<Reconciled<u32>, TripError> {
        let says = *self
            .post
            .says
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Ok(says.unwrap_or(Reconciled::Unknown))
    }

    #[atomic(Sent -> Finished)]
    async fn file(&self, _tx: &mut Tx<'_>, number: &u32) -> Result<Reply<u32>, TripError> {
        self.post.script.play("file").await?;
        Ok(Reply::ok(*number))
    }
}

async fn row(database: &TestDatabase) -> Value {
    let sql = "SELECT to_jsonb(k) FROM idempotency_keys k";
    sqlx::query_scalar(sql)
        .fetch_one(&database.pool())
        .await
        .unwrap()
}

/// Announced before, stored by itself after: what fails afterwards does not bring it back.
#[tokio::test]
async fn a_call_that_succeeded_is_stored_before_anything_else_is_done() {
    let database = trip::database().await;
    let post = Post::default();
    let (_, letters) = post.run(database.pool()).await;
    post.script.next("file", Act::Panic);
    letters.run(key("k"), "hello".into()).await.unwrap_err();
    let stored = row(&database).await;
    assert_eq!(
        (&stored["recovery_point"], &stored["intent"]),
        (&"sent".into(), &Value::Null)
    );
    letters.run(key("k"), "hello".into()).await.unwrap();
    assert_eq!(post.sent(), 1);
}

#[tokio::test]
async fn a_call_whose_outcome_is_unknown_is_asked_about_and_not_repeated() {
    for (says, ends) in [
        (Reconciled::Happened(7), true),
        (Reconciled::DidNot, false),
        (Reconciled::Unknown, false),
    ] {
        let database = trip::database().await;
        let post = Post::default();
        let (_, letters) = post.run(database.pool()).await;
        post.say(says);
        post.script.next("send", Act::Fail(TripError::Retry));
        letters.run(key("k"), "hello".into()).await.unwrap_err();
        assert_eq!(row(&database).await["intent"]["call"], "send");

        let told = letters.run(key("k"), "hello".into()).await;
        assert_eq!(post.sent(), 1, "{says:?}");
        if ends {
            assert_eq!(&told.unwrap().reply().body()[..], b"7");
            continue;
        }
        assert!(matches!(told.unwrap_err(), RunError::Stuck), "{says:?}");
        let stored = row(&database).await;
        assert!(!stored["stuck_at"].is_null());
        let why = stored["last_error"]["message"].as_str().unwrap();
        assert!(why.contains("call again"), "{why}");
    }
}

/// The first attempt is frozen in its call and loses its lease: the successor does not call.
#[tokio::test]
async fn a_successor_does_not_repeat_the_call_of_a_frozen_attempt() {
    let database = trip::database().await;
    let post = Post::default();
    let (_, frozen) = post.run(database.pool()).await;
    let (_, successor) = post.run(database.pool()).await;
    let gate = post.script.hold("before send");
    let held = frozen.start(key("k"), "hello".into()).unwrap();
    gate.reached().await;
    trip::expire_leases(&database).await;
    let told = successor.run(key("k"), "hello".into()).await.unwrap_err();
    assert!(matches!(told, RunError::Stuck), "{told:?}");
    assert_eq!(post.sent(), 0);
    gate.open();
    let told = held.wait().await.unwrap_err();
    assert!(matches!(told, RunError::Stuck), "{told:?}");
    assert!(post.sent() <= 1);
}

#[tokio::test]
async fn an_operator_says_call_again() {
    let database = trip::database().await;
    let post = Post::default();
    let (engine, letters) = post.run(database.pool()).await;
    post.script.next("before send", Act::Fail(TripError::Retry));
    letters.run(key("k"), "hello".into()).await.unwrap_err();
    letters.run(key("k"), "hello".into()).await.unwrap_err();
    let id: Uuid = row(&database).await["id"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();

    engine.operator().retry(id, false).await.unwrap();
    let told = letters.run(key("k"), "hello".into()).await.unwrap_err();
    assert!(matches!(told, RunError::Stuck), "nobody said so: {told:?}");
    engine.operator().retry(id, true).await.unwrap();
    assert_eq!(
        letters
            .run(key("k"), "hello".into())
            .await
            .unwrap()
            .reply()
            .status(),
        200
    );
    assert_eq!(post.sent(), 1);
}

/// An announcement whose answer was lost is not taken for somebody else's.
#[tokio::test]
async fn a_lost_answer_to_the_announcement_does_not_park_the_flow() {
    for arrives in [true, false] {
        let database = trip::database().await;
        let proxy = Proxy::start(&database.options());
        let options = proxy.connect_options(&database.options());
        let post = Post::default();
        let (_, letters) = post.run(pool_options().connect_lazy_with(options)).await;
        let announcement = "SET intent = jsonb_build_object";
        let fault = if arrives {
            proxy.lose_answer(announcement)
        } else {
            proxy.cut_before(announcement)
        };
        assert_eq!(
            letters
                .run(key("k"), "hello".into())
                .await
                .unwrap()
                .reply()
                .status(),
            200
        );
        fault.fired().await;
        assert_eq!(post.sent(), 1);
    }
}

/// An outside that remembers for an hour: within it the call is repeated, with nothing written down;
/// after it, the call counts as one that may not be.
struct Forgetful {
    post: Post,
}

#[idempotent_flow(name = "forgetful", lease = "15s", retention = "48h")]
impl Forgetful {
    #[atomic(Started -> Written)]
    async fn write(&self, _tx: &mut Tx<'_>, request: &Value) -> Result<String, TripError> {
        Ok(request.to_string())
    }

    #[external(Written -> Finished, dedupes_for = "1h")]
    async fn send(&self, _call: &External<'_>, letter: &String) -> Result<Reply<u32>, TripError> {
        let number = self.post.send(letter);
        self.post.script.play("send").await?;
        Ok(Reply::ok(number))
    }
}

#[tokio::test]
async fn an_outside_is_called_again_only_as_long_as_it_remembers() {
    let database = trip::database().await;
    let post = Post::default();
    let flow = Forgetful { post: post.clone() };
    let engine = Engine::builder(database.pool())
        .flow(flow)
        .build()
        .await
        .unwrap();
    let letters = engine.handle::<Forgetful>().unwrap();
    for _ in 0..2 {
        post.script.next("send", Act::Fail(TripError::Retry));
        letters.run(key("k"), "hello".into()).await.unwrap_err();
    }
    assert_eq!(
        (post.sent(), &row(&database).await["intent"]),
        (2, &Value::Null)
    );

    let age = "UPDATE idempotency_keys SET created_at = created_at - interval '2 hours'";
    sqlx::query(age).execute(&database.pool()).await.unwrap();
    let told = letters.run(key("k"), "hello".into()).await.unwrap_err();
    assert!(matches!(told, RunError::Stuck), "{told:?}");
    assert_eq!(post.sent(), 2);

    let id: Uuid = row(&database).await["id"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    engine.operator().retry(id, true).await.unwrap();
    letters.run(key("k"), "hello".into()).await.unwrap();
    assert_eq!(post.sent(), 3);
}

/// Tried again within the request, with pauses, before the client is asked to.
#[derive(Clone, Default)]
struct Patient {
    script: Script,
}

#[idempotent_flow(name = "patient", lease = "1s", retention = "48h")]
impl Patient {
    #[external(Started -> Asked, retries = 3, backoff = "1ms..5ms")]
    async fn ask(&self, _call: &External<'_>, request: &Value) -> Result<String, TripError> {
        self.script.play("ask").await?;
        Ok(request.to_string())
    }

    #[atomic(Asked -> Finished)]
    async fn finish(&self, _tx: &mut Tx<'_>, answer: &String) -> Result<Reply<String>, TripError> {
        Ok(Reply::ok(answer.clone()))
    }
}

#[tokio::test]
async fn a_phase_is_tried_again_within_the_request_as_often_as_it_says() {
    let database = trip::database().await;
    let flow = Patient::default();
    let builder = Engine::builder(database.pool()).flow(flow.clone());
    let engine = builder.build().await.unwrap();
    let patient = engine.handle::<Patient>().unwrap();
    let fail = |times: usize, error: TripError| {
        (0..times).for_each(|_| flow.script.next("ask", Act::Fail(error.clone())));
    };
    fail(3, TripError::Retry);
    assert_eq!(
        patient
            .run(key("three"), 1.into())
            .await
            .unwrap()
            .reply()
            .status(),
        200
    );
    fail(4, TripError::Retry);
    let told = patient.run(key("four"), 1.into()).await.unwrap_err();
    assert!(matches!(told, RunError::Retry { .. }), "{told:?}");
    // A bug is not tried again.
    fail(1, TripError::Bug);
    let told = patient.run(key("bug"), 1.into()).await.unwrap_err();
    assert!(matches!(told, RunError::Stopped { .. }), "{told:?}");
}

/// The same flow in a later version, in which a point has another name.
mod renamed {
    use super::*;

    pub(super) struct Letter;

    #[idempotent_flow(name = "letter", lease = "15s", retention = "48h")]
    impl Letter {
        #[atomic(Started -> Drafted, renamed_from(Drafted = "written"))]
        async fn write(&self, _tx: &mut Tx<'_>, request: &Value) -> Result<String, TripError> {
            Ok(request.to_string())
        }

        #[atomic(Drafted -> Finished)]
        async fn file(
            &self,
            _tx: &mut Tx<'_>,
            letter: &String,
        ) -> Result<Reply<String>, TripError> {
            Ok(Reply::ok(letter.clone()))
        }
    }
}

/// C22: a declared rename carries on, from what the old version stored.
#[tokio::test]
async fn a_flow_goes_on_from_a_point_that_was_renamed() {
    let database = trip::database().await;
    let post = Post::default();
    let (_, old) = post.run(database.pool()).await;
    // Before anything is announced at the point.
    let engine = Engine::builder(database.pool())
        .flow_with(renamed::Letter, FlowOptions::new())
        .build()
        .await
        .unwrap();
    post.script.next("before send", Act::Fail(TripError::Retry));
    old.run(key("k"), "hello".into()).await.unwrap_err();
    assert_eq!(row(&database).await["recovery_point"], "written");

    assert_eq!(engine.stranded().await.unwrap(), []);
    let new = engine.handle::<renamed::Letter>().unwrap();
    let answer = new.run(key("k"), "hello".into()).await.unwrap();
    assert_eq!(&answer.reply().body()[..], br#""\"hello\"""#);
}

/// A call whose result is stored by itself, before the next phase begins, because it says so.
#[derive(Clone, Default)]
struct Eager {
    script: Script,
}

#[idempotent_flow(name = "eager", lease = "15s", retention = "48h")]
impl Eager {
    #[external(Started -> Asked, checkpoint = "eager")]
    async fn ask(&self, _call: &External<'_>, request: &Value) -> Result<String, TripError> {
        Ok(request.to_string())
    }

    #[atomic(Asked -> Finished)]
    async fn finish(&self, tx: &mut Tx<'_>, answer: &String) -> Result<Reply<String>, TripError> {
        self.script.play_in("finish", tx).await?;
        Ok(Reply::ok(answer.clone()))
    }
}

#[tokio::test]
async fn an_eager_result_is_stored_before_the_next_phase_and_another_is_not() {
    let database = trip::database().await;
    let flow = Eager::default();
    let builder = Engine::builder(database.pool()).flow(flow.clone());
    let engine = builder.build().await.unwrap();
    let gate = flow.script.hold("finish");
    let running = engine.handle::<Eager>().unwrap();
    let running = running.start(key("eager"), 1.into()).unwrap();
    gate.reached().await;
    let stored = row(&database).await;
    assert_eq!(
        (&stored["recovery_point"], &stored["state"]["asked"]),
        (&"asked".into(), &"1".into())
    );
    gate.open();
    running.wait().await.unwrap();

    // Without the word, the result waits for the phase's own commit.
    let database = trip::database().await;
    let flow = trip::TripFlow::default();
    let gate = flow.script.hold("finish");
    let trips = flow.run_by(database.pool()).await;
    let running = trips.start(key("k"), trip::trip_to("mars")).unwrap();
    gate.reached().await;
    assert_eq!(row(&database).await["recovery_point"], "created");
    gate.open();
    running.wait().await.unwrap();
}
