//! What an operator sees and does: through the engine on the trip flow, and through the real program
//! on rides.

use std::path::Path;
use std::process::Output;
use std::time::Duration;

use idempotent_core::{
    DerivedKey, Engine, FlowOptions, Handle, Key, KeyFilter, KeyState, Operator, OperatorError,
    Reply, RunError,
};
use reqwest::StatusCode;
use rides_app::flow::{Payments, RideFlow, RideRequest};
use rides_app::payments::{Charge, ChargeRequest, PaymentError};
use serde_json::{Value, json};
use sqlx::Row;
use tests::database::TestDatabase;
use tests::server::http;
use tests::trip::{self, Act, TripError, TripFlow, key, trip_to};
use uuid::Uuid;

/// The trip flow on a database of its own, with somebody to look after it.
struct Desk {
    database: TestDatabase,
    flow: TripFlow,
    engine: Engine,
    trips: Handle<TripFlow>,
    operator: Operator,
}

impl Desk {
    /// A flow that waits for an hour after a failure, and is stuck at the first bug.
    async fn open() -> Self {
        let hour = Duration::from_secs(3600);
        Self::with(FlowOptions::new().backoff(hour, hour).max_attempts(2)).await
    }

    async fn with(options: FlowOptions) -> Self {
        let database = trip::database().await;
        let flow = TripFlow::default();
        let builder = Engine::builder(database.pool()).flow_with(flow.clone(), options);
        let engine = builder.build().await.unwrap();
        Self {
            trips: engine.handle().unwrap(),
            operator: engine.operator().by("nina"),
            database,
            flow,
            engine,
        }
    }

    async fn fails(&self, name: &str, error: TripError) -> Uuid {
        self.flow.script.next("before pay", Act::Fail(error));
        self.trips
            .run(key(name), trip_to("mars"))
            .await
            .unwrap_err();
        self.id(name).await
    }

    async fn stuck(&self, name: &str) -> Uuid {
        self.fails(name, TripError::Bug).await;
        self.fails(name, TripError::Bug).await
    }

    async fn waiting(&self, name: &str) -> Uuid {
        self.fails(name, TripError::Retry).await
    }

    async fn finished(&self, name: &str) -> Uuid {
        self.trips.run(key(name), trip_to("mars")).await.unwrap();
        self.id(name).await
    }

    async fn due(&self, name: &str) -> Uuid {
        let id = self.waiting(name).await;
        self.sql(
            "UPDATE idempotency_keys SET next_attempt_at = NULL WHERE id = $1",
            id,
        )
        .await;
        id
    }

    async fn id(&self, name: &str) -> Uuid {
        self.operator.find(&key(name)).await.unwrap()
    }

    async fn sql(&self, sql: &'static str, id: Uuid) {
        let pool = self.database.pool();
        let changed = sqlx::query(sql).bind(id).execute(&pool);
        assert_eq!(changed.await.unwrap().rows_affected(), 1);
    }

    /// The row as it is, to see that nothing changed it.
    async fn row(&self, id: Uuid) -> Value {
        sqlx::query_scalar("SELECT to_jsonb(stored) FROM idempotency_keys AS stored WHERE id = $1")
            .bind(id)
            .fetch_one(&self.database.pool())
            .await
            .unwrap()
    }

    async fn state(&self, id: Uuid) -> KeyState {
        self.operator.show(id).await.unwrap().summary.state
    }

    /// The last entry of the history.
    async fn last_entry(&self, id: Uuid) -> Value {
        let history = self.row(id).await["history"].take();
        history.as_array().unwrap().last().unwrap().clone()
    }
}

fn by_hand() -> idempotent_core::StoredReply {
    let reply = Reply::empty(StatusCode::CREATED)
        .header("content-type", "text/plain")
        .header("x-by", "hand");
    reply.store_with_body("{ \"b\": 1,  \"a\": 2 }\n").unwrap()
}

#[tokio::test]
async fn keys_are_listed_by_where_they_stand() {
    let desk = Desk::open().await;
    let finished = desk.finished("finished").await;
    let stuck = desk.stuck("stuck").await;
    let waiting = desk.waiting("waiting").await;
    let due = desk.due("due").await;
    let gate = desk.flow.script.hold("before pay");
    let bob = Key::new("bob", "/trips", "k").unwrap();
    let running = desk.trips.start(bob.clone(), trip_to("venus")).unwrap();
    gate.reached().await;
    let held = desk.operator.find(&bob).await.unwrap();

    let all = desk.operator.list(&KeyFilter::new()).await.unwrap();
    let ids: Vec<_> = all.iter().map(|key| key.id).collect();
    assert_eq!(ids, [held, due, waiting, stuck, finished], "newest first");
    let states: Vec<_> = all.iter().map(|key| key.state).collect();
    let expected = [
        KeyState::Running,
        KeyState::Due,
        KeyState::Waiting,
        KeyState::Stuck,
        KeyState::Finished,
    ];
    assert_eq!(states, expected);
    assert!(all[0].lease_left.unwrap() > Duration::from_secs(5));
    let next = all[2].next_attempt_in.unwrap();
    assert!((Duration::from_secs(1700)..=Duration::from_secs(3600)).contains(&next));
    assert_eq!(
        (all[1].next_attempt_in, all[3].next_attempt_in),
        (None, None)
    );
    assert_eq!(all[3].error.as_deref(), Some("this should not be"));
    assert_eq!(
        (all[4].status, all[4].point.as_str()),
        (Some(201), "finished")
    );

    for (filter, expected) in [
        (KeyFilter::new().state(KeyState::Stuck), vec![stuck]),
        (KeyFilter::new().user("bob"), vec![held]),
        (KeyFilter::new().point("created").limit(2), vec![held, due]),
        (
            KeyFilter::new().flow("trip").point("finished"),
            vec![finished],
        ),
        (KeyFilter::new().flow("ride"), vec![]),
        (
            KeyFilter::new().older_than(Duration::from_secs(3600)),
            vec![],
        ),
        (
            KeyFilter::new().older_than(Duration::ZERO).limit(1),
            vec![held],
        ),
    ] {
        let found = desk.operator.list(&filter).await.unwrap();
        let found: Vec<_> = found.iter().map(|key| key.id).collect();
        assert_eq!(found, expected, "{filter:?}");
    }

    let counts = desk.operator.stats().await.unwrap();
    let counts: Vec<_> = counts
        .iter()
        .map(|count| (count.point.as_str(), count.state.as_str(), count.keys))
        .collect();
    assert_eq!(
        counts,
        [
            ("created", "due", 1),
            ("created", "running", 1),
            ("created", "stuck", 1),
            ("created", "waiting", 1),
            ("finished", "finished", 1)
        ]
    );
    gate.open();
    running.wait().await.unwrap();
}

/// A due time that lies further ahead than any pause counts as due, as it does for the completer;
/// and a lease that is over is nobody's.
#[tokio::test]
async fn states_are_those_of_the_completer() {
    let desk = Desk::open().await;
    let waiting = desk.waiting("k").await;
    desk.sql("UPDATE idempotency_keys SET next_attempt_at = next_attempt_at + interval '30 days' WHERE id = $1", waiting)
        .await;
    assert_eq!(desk.state(waiting).await, KeyState::Due);
    desk.sql(
        "UPDATE idempotency_keys SET next_attempt_at = NULL, holder = gen_random_uuid(),
         lease_expires_at = statement_timestamp() - interval '1 second' WHERE id = $1",
        waiting,
    )
    .await;
    let details = desk.operator.show(waiting).await.unwrap();
    assert_eq!(details.summary.state, KeyState::Due);
    assert!(details.holder.is_some() && details.summary.lease_left.is_none());
    desk.sql(
        "UPDATE idempotency_keys SET lease_expires_at = statement_timestamp() + interval '1 day' WHERE id = $1",
        waiting,
    )
    .await;
    assert_eq!(desk.state(waiting).await, KeyState::Due);
    assert_eq!(desk.engine.complete_once().await.unwrap(), 1);
}

#[tokio::test]
async fn a_key_is_shown_without_what_is_the_clients() {
    let desk = Desk::open().await;
    let id = desk.stuck("k-4711").await;
    let details = desk.operator.show(id).await.unwrap();
    let error = details.last_error.as_ref().unwrap();
    assert_eq!(
        (error.class.as_str(), error.phase.as_str()),
        ("stop", "pay")
    );
    assert_eq!(error.message, "this should not be");
    assert!(error.at > error.first_at);
    assert_eq!(error.at, details.stuck_at);
    let events: Vec<_> = details
        .timeline
        .iter()
        .map(|event| event.event.as_str())
        .collect();
    assert_eq!(events, ["created", "stop", "stop", "stuck"]);
    assert!(details.timeline.is_sorted_by_key(|event| event.at));
    assert_eq!(details.summary.attempts, 2);
    assert_eq!((details.key.as_str(), details.reply), ("k-4711", None));
    let logged = format!(
        "{details:?} {:?}",
        desk.operator.contents(id).await.unwrap()
    );
    assert!(
        !logged.contains("k-4711") && !logged.contains("mars"),
        "{logged}"
    );
    let contents = desk.operator.contents(id).await.unwrap();
    assert_eq!(contents.request["goal"], "mars");
    assert!(contents.reply.is_none());

    let nobody = Uuid::now_v7();
    let refused = desk.operator.show(nobody).await.unwrap_err();
    assert!(matches!(refused, OperatorError::NotFound));
    assert!(matches!(
        desk.operator.find(&key("other")).await,
        Err(OperatorError::NotFound)
    ));
}

#[tokio::test]
async fn a_stuck_flow_tries_again_with_all_its_attempts() {
    let desk = Desk::open().await;
    let id = desk.stuck("k").await;
    let again = desk.trips.run(key("k"), trip_to("mars")).await;
    assert!(matches!(again, Err(RunError::Stuck)));
    assert_eq!(desk.engine.complete_once().await.unwrap(), 0);

    let changed = desk.operator.retry(id, false).await.unwrap();
    assert_eq!((changed.was, changed.is), (KeyState::Stuck, KeyState::Due));
    let entry = desk.last_entry(id).await;
    assert_eq!(
        (
            &entry["event"],
            &entry["by"],
            &entry["was"],
            &entry["point"],
            &entry["attempt"]
        ),
        (
            &json!("operator retry"),
            &json!("nina"),
            &json!("stuck"),
            &json!("created"),
            &json!(2)
        )
    );
    assert!(entry["at"].is_string() && entry["fence"] == 2 && entry["call_again"] == false);
    let row = desk.row(id).await;
    assert_eq!(
        (&row["attempts"], &row["stuck_at"]),
        (&json!(0), &Value::Null)
    );
    assert_eq!(
        row["last_error"]["message"], "this should not be",
        "the reason stays readable"
    );

    assert_eq!(desk.engine.complete_once().await.unwrap(), 1);
    let late = desk.trips.run(key("k"), trip_to("mars")).await.unwrap();
    assert!(late.is_replayed());
    assert_eq!(desk.flow.outside.payments(), 1);
}

/// The time since the first failure starts again too: the next "pending" must not park it at once.
#[tokio::test]
async fn a_flow_that_waited_too_long_may_wait_again() {
    let desk = Desk::with(FlowOptions::new().max_wait(Duration::from_secs(60))).await;
    let id = desk.fails("k", TripError::Pending).await;
    desk.sql(
        "UPDATE idempotency_keys SET stuck_at = statement_timestamp(), next_attempt_at = NULL,
         last_error = last_error || jsonb_build_object('first_at', statement_timestamp() - interval '2 minutes') WHERE id = $1",
        id,
    )
    .await;
    desk.operator.retry(id, false).await.unwrap();
    desk.fails("k", TripError::Pending).await;
    assert_eq!(desk.state(id).await, KeyState::Waiting);
}

#[tokio::test]
async fn a_waiting_flow_is_made_due() {
    let desk = Desk::open().await;
    let id = desk.waiting("k").await;
    assert_eq!(desk.engine.complete_once().await.unwrap(), 0);
    let changed = desk.operator.retry(id, false).await.unwrap();
    assert_eq!(
        (changed.was, changed.is),
        (KeyState::Waiting, KeyState::Due)
    );
    assert_eq!(desk.engine.complete_once().await.unwrap(), 1);
}

/// "Call again": what was begun is forgotten, and kept in the history.
#[tokio::test]
async fn only_call_again_clears_an_intent() {
    let desk = Desk::open().await;
    let id = desk.stuck("k").await;
    let begin = r#"UPDATE idempotency_keys SET intent = '{"name": "pay"}', stuck_at = statement_timestamp() WHERE id = $1"#;
    desk.sql(begin, id).await;
    desk.operator.retry(id, false).await.unwrap();
    assert_eq!(desk.row(id).await["intent"], json!({"name": "pay"}));
    assert!(desk.last_entry(id).await.get("intent").is_none());

    desk.sql(begin, id).await;
    let details = desk.operator.show(id).await.unwrap();
    assert_eq!(details.intent, Some(json!({"name": "pay"})));
    desk.operator.retry(id, true).await.unwrap();
    assert_eq!(desk.row(id).await["intent"], json!({"again": true}));
    let entry = desk.last_entry(id).await;
    assert_eq!(
        (&entry["call_again"], &entry["intent"]),
        (&json!(true), &json!({"name": "pay"}))
    );
}

#[tokio::test]
async fn a_flow_finished_by_hand_replays_exactly_that() {
    let desk = Desk::open().await;
    let reply = by_hand();
    for (name, id) in [
        ("stuck", desk.stuck("stuck").await),
        ("waiting", desk.waiting("waiting").await),
        ("due", desk.due("due").await),
    ] {
        let changed = desk.operator.resolve(id, &reply).await.unwrap();
        assert_eq!(
            (changed.was.as_str(), changed.is),
            (name, KeyState::Finished)
        );
        let answer = desk.trips.run(key(name), trip_to("mars")).await.unwrap();
        assert!(answer.is_replayed());
        assert_eq!(answer.reply(), &reply);
        let entry = desk.last_entry(id).await;
        assert_eq!(
            (&entry["event"], &entry["status"]),
            (&json!("operator resolve"), &json!(201))
        );
        assert_eq!(
            desk.operator.contents(id).await.unwrap().reply.as_ref(),
            Some(&reply)
        );
        let details = desk.operator.show(id).await.unwrap();
        assert_eq!(details.reply.unwrap().bytes, 20);
        assert!(details.stuck_at.is_none() && details.finished_at.is_some());
    }
    assert_eq!(desk.engine.complete_once().await.unwrap(), 0);
    desk.sql(
        "UPDATE idempotency_keys SET finished_at = finished_at - interval '3 days' WHERE id = $1",
        desk.id("stuck").await,
    )
    .await;
    assert_eq!(
        desk.engine.reap_once().await.unwrap().keys,
        1,
        "it is reaped like any other"
    );
}

/// A zombie whose lease is over wakes to a flow that a person has finished.
#[tokio::test]
async fn who_wakes_up_after_a_resolution_is_fenced_off() {
    let desk = Desk::open().await;
    let gate = desk.flow.script.hold("pay");
    let zombie = desk.trips.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;
    trip::expire_leases(&desk.database).await;
    let id = desk.id("k").await;
    let reply = by_hand();
    desk.operator.resolve(id, &reply).await.unwrap();
    gate.open();
    assert_eq!(zombie.wait().await.unwrap().reply(), &reply);
    assert_eq!(desk.row(id).await["fence"], 2);
    assert_eq!(
        trip::trips(&desk.database).await,
        [("mars".to_owned(), "created".to_owned())]
    );
}

#[tokio::test]
async fn a_released_leases_holder_is_fenced_off() {
    let desk = Desk::open().await;
    let gate = desk.flow.script.hold("pay");
    let hanging = desk.trips.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;
    let id = desk.id("k").await;
    let holder = desk.row(id).await["holder"].clone();

    let changed = desk.operator.release(id).await.unwrap();
    assert_eq!(
        (changed.was, changed.is),
        (KeyState::Running, KeyState::Due)
    );
    let row = desk.row(id).await;
    assert_eq!(
        (&row["holder"], &row["fence"], &row["attempts"]),
        (&Value::Null, &json!(2), &json!(0))
    );
    let entry = desk.last_entry(id).await;
    assert_eq!(
        (&entry["event"], &entry["holder"]),
        (&json!("operator release"), &holder)
    );

    // Another process goes on, while the first holder still hangs.
    let other = desk.flow.run_by(desk.database.pool()).await;
    let answer = other.run(key("k"), trip_to("mars")).await.unwrap();
    assert!(!answer.is_replayed());
    let finished = desk.row(id).await;
    gate.open();
    let woken = hanging.wait().await.unwrap();
    assert!(woken.is_replayed());
    assert_eq!(woken.reply(), answer.reply());
    assert_eq!(
        desk.row(id).await,
        finished,
        "the woken holder wrote nothing"
    );
    assert_eq!(
        (
            desk.flow.outside.calls().len(),
            desk.flow.outside.payments()
        ),
        (2, 1)
    );
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_and_changes_nothing() {
    let desk = Desk::open().await;
    let finished = desk.finished("finished").await;
    let stuck = desk.stuck("stuck").await;
    let waiting = desk.waiting("waiting").await;
    let due = desk.due("due").await;
    let gate = desk.flow.script.hold("before pay");
    let run = desk.trips.start(key("running"), trip_to("mars")).unwrap();
    gate.reached().await;
    let running = desk.id("running").await;
    let operator = &desk.operator;
    let reply = by_hand();

    for (id, is) in [
        (finished, KeyState::Finished),
        (stuck, KeyState::Stuck),
        (waiting, KeyState::Waiting),
        (due, KeyState::Due),
        (running, KeyState::Running),
    ] {
        let before = desk.row(id).await;
        let mut refused = Vec::new();
        if !matches!(is, KeyState::Stuck | KeyState::Waiting) {
            refused.push(operator.retry(id, false).await);
            refused.push(operator.retry(id, true).await);
        }
        if matches!(is, KeyState::Finished | KeyState::Running) {
            refused.push(operator.resolve(id, &reply).await);
        }
        if is != KeyState::Running {
            refused.push(operator.release(id).await);
        }
        for refused in refused {
            let error = refused.unwrap_err();
            assert!(
                matches!(error, OperatorError::WrongState { is: found, .. } if found == is),
                "{error}"
            );
        }
        assert_eq!(desk.row(id).await, before);
    }

    let nobody = Uuid::now_v7();
    for refused in [
        operator.retry(nobody, false).await,
        operator.resolve(nobody, &reply).await,
        operator.release(nobody).await,
    ] {
        assert!(matches!(refused, Err(OperatorError::NotFound)));
    }
    gate.open();
    run.wait().await.unwrap();
}

/// Of several people who press the button at once, one does it; the others are told.
#[tokio::test]
async fn of_two_operators_one_wins() {
    let desk = Desk::open().await;
    let id = desk.stuck("k").await;
    let reply = by_hand();
    let (retried, resolved, again) = tokio::join!(
        desk.operator.retry(id, false),
        desk.operator.resolve(id, &reply),
        desk.operator.retry(id, false),
    );
    // A key that was made due may still be finished by hand; never the other way round, nor twice.
    let retries = usize::from(retried.is_ok()) + usize::from(again.is_ok());
    assert!(retries <= 1, "{retried:?} {again:?}");
    assert!(resolved.is_ok(), "{resolved:?}");
    assert_eq!(desk.state(id).await, KeyState::Finished);
    let history = desk.row(id).await["history"].take();
    assert_eq!(
        history.as_array().unwrap().len(),
        3 + retries,
        "{history:#}"
    );
}

/// A row that a frozen transaction has locked is not waited for.
#[tokio::test]
async fn a_locked_key_is_busy() {
    let desk = Desk::open().await;
    let id = desk.stuck("k").await;
    let pool = desk.database.pool();
    let mut locking = pool.begin().await.unwrap();
    let lock = "SELECT 1 FROM idempotency_keys FOR UPDATE";
    sqlx::query(lock).execute(&mut *locking).await.unwrap();
    let refused = desk.operator.retry(id, false).await.unwrap_err();
    assert!(matches!(refused, OperatorError::Busy), "{refused}");
    assert_eq!(
        desk.state(id).await,
        KeyState::Stuck,
        "looking does not wait"
    );
    locking.rollback().await.unwrap();
    desk.operator.retry(id, false).await.unwrap();
}

#[tokio::test]
async fn the_history_stays_bounded() {
    let desk = Desk::open().await;
    let id = desk.waiting("k").await;
    for _ in 0..25 {
        desk.operator.retry(id, false).await.unwrap();
        desk.sql(
            "UPDATE idempotency_keys SET next_attempt_at = statement_timestamp() + interval '1 hour' WHERE id = $1",
            id,
        )
        .await;
    }
    let history = desk.row(id).await["history"].take();
    assert_eq!(history.as_array().unwrap().len(), 20);
}

// --- The program -------------------------------------------------------------------------------

/// A bank that does not answer, or says something that no program should ever be told.
struct Bank {
    refuses: bool,
}

impl Payments for Bank {
    async fn charge(&self, _: &DerivedKey, _: &ChargeRequest) -> Result<Charge, PaymentError> {
        Err(match self.refuses {
            true => PaymentError::Unreadable { status: 200 },
            false => PaymentError::Unavailable {
                status: 503,
                retry_after: None,
            },
        })
    }
}

/// A database with rides, and the program beside it.
struct Rides {
    database: TestDatabase,
    alice: Uuid,
}

impl Rides {
    async fn open() -> Self {
        let database = TestDatabase::from_template("operators", async |pool| {
            rides_app::database::migrate(&pool).await?;
            rides_app::users::add(&pool, "alice", "alice-token").await?;
            Ok(())
        })
        .await;
        let alice = sqlx::query_scalar("SELECT id FROM users");
        let alice = alice.fetch_one(&database.pool()).await.unwrap();
        Self { database, alice }
    }

    /// A ride whose charge failed: it waits for an hour, or is stuck.
    async fn fails(&self, name: &str, stuck: bool) -> String {
        let hour = Duration::from_secs(3600);
        let mut options = FlowOptions::new().backoff(hour, hour);
        if stuck {
            options = options.retry_attempts(1, Duration::ZERO);
        }
        let flow = RideFlow::new(Bank { refuses: stuck });
        let engine = Engine::builder(self.database.pool()).flow_with(flow, options);
        let engine = engine.build().await.unwrap();
        let rides = engine.handle::<RideFlow<Bank>>().unwrap();
        let request: RideRequest = serde_json::from_value(json!({"amountCents": 2000})).unwrap();
        for _ in 0..if stuck { 2 } else { 1 } {
            let failed = rides.run(self.key(name), request.clone()).await;
            failed.unwrap_err();
        }
        let id = engine.operator().find(&self.key(name)).await.unwrap();
        id.to_string()
    }

    fn key(&self, name: &str) -> Key {
        Key::new(self.alice.to_string(), "/api/rides", name).unwrap()
    }

    async fn keys(&self, args: &[&str]) -> Output {
        keys(args, &[("DATABASE_URL", &self.database.url())]).await
    }

    /// What a command says as text.
    async fn says(&self, args: &[&str]) -> String {
        let output = self.keys(args).await;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// What a command says to programs.
    async fn json(&self, args: &[&str]) -> Value {
        let args = [args, &["--json"]].concat();
        // Exactly one document: anything beside it would not parse.
        serde_json::from_str(&self.says(&args).await).unwrap()
    }

    /// What a command says when it is refused.
    async fn refused(&self, args: &[&str]) -> String {
        let output = self.keys(args).await;
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(output.stdout.is_empty());
        String::from_utf8(output.stderr).unwrap()
    }
}

async fn keys(args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = tokio::process::Command::new(tests::server::binary());
    command.arg("keys").args(args);
    for name in [
        "DATABASE_URL",
        "RIDES_DATA_DIR",
        "GATEWAY_URL",
        "RUST_LOG",
        "COLUMNS",
    ] {
        command.env_remove(name);
    }
    command.env("USER", "nina").envs(env.iter().copied());
    command.output().await.unwrap()
}

#[tokio::test]
async fn the_program_lists_shows_and_counts() {
    let rides = Rides::open().await;
    assert_eq!(rides.json(&["list"]).await, json!([]));
    assert_eq!(rides.says(&["list"]).await, "no keys\n");
    let stuck = rides.fails("k-stuck", true).await;
    let waiting = rides.fails("k-waiting", false).await;

    let text = rides.says(&["list"]).await;
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].starts_with("ID  ") && lines.len() == 3, "{text}");
    assert!(
        lines[1].starts_with(&waiting) && lines[1].contains("waiting  next in "),
        "{text}"
    );
    assert!(
        lines[2].starts_with(&stuck) && lines[2].contains("stuck"),
        "{text}"
    );
    assert!(
        lines.iter().all(|line| line.chars().count() <= 120),
        "{text}"
    );

    let all = rides.json(&["list"]).await;
    assert_eq!(all.as_array().unwrap().len(), 2);
    assert_eq!(all[0]["id"], waiting);
    for (filter, id) in [
        (["--state", "stuck"], &stuck),
        (["--state", "waiting"], &waiting),
        (["--limit", "1"], &waiting),
    ] {
        let found = rides.json(&[&["list"], &filter[..]].concat()).await;
        assert_eq!(found.as_array().unwrap().len(), 1);
        assert_eq!(found[0]["id"], **id);
        assert_eq!(found[0]["recovery_point"], "ride_created");
    }
    for none in [
        ["--older-than", "1h"],
        ["--flow", "trip"],
        ["--point", "started"],
    ] {
        assert_eq!(
            rides.json(&[&["list"], &none[..]].concat()).await,
            json!([])
        );
    }
    let args = [
        "list",
        "--user",
        "alice",
        "--flow",
        "ride",
        "--older-than",
        "0s",
    ];
    assert_eq!(rides.json(&args).await.as_array().unwrap().len(), 2);
    assert!(
        rides
            .refused(&["list", "--user", "carol"])
            .await
            .contains("no user named")
    );

    let shown = rides.json(&["show", &stuck]).await;
    assert_eq!(
        (&shown["state"], &shown["key"], &shown["attempts"]),
        (&json!("stuck"), &json!("k-stuck"), &json!(2))
    );
    assert_eq!(shown["last_error"]["phase"], "charge");
    assert_eq!(shown["timeline"][0]["event"], "created");
    assert!(shown.get("request").is_none() && shown.get("reply").is_none());
    let by_key = ["show", "--user", "alice", "--key", "k-stuck", "--request"];
    let by_key = rides.json(&by_key).await;
    assert_eq!(
        (&by_key["id"], &by_key["request"]["amountCents"]),
        (&json!(stuck), &json!(2000))
    );

    let text = rides.says(&["show", &stuck]).await;
    for part in [
        "stuck for",
        "alice",
        "k-stuck",
        "nobody",
        "last error",
        "timeline",
        "keys retry",
    ] {
        let part = if part == "alice" {
            rides.alice.to_string()
        } else {
            part.to_owned()
        };
        assert!(text.contains(&part), "{part}: {text}");
    }
    assert!(!text.contains("amountCents"), "{text}");
    let refused = rides
        .refused(&["show", &Uuid::now_v7().to_string(), "--json"])
        .await;
    assert!(refused.contains("there is no such key"), "{refused}");

    let stats = rides.json(&["stats"]).await;
    assert_eq!(stats["keys"], 2);
    assert_eq!(stats["groups"][0]["state"], "stuck");
    let text = rides.says(&["stats"]).await;
    assert!(
        text.starts_with("FLOW") && text.lines().count() == 3,
        "{text}"
    );
}

#[tokio::test]
async fn the_program_retries_completes_and_reaps() {
    let rides = Rides::open().await;
    let stuck = rides.fails("k", true).await;
    let pool = rides.database.pool();
    let begin = r#"UPDATE idempotency_keys SET intent = '{"name": "charge"}'"#;
    sqlx::query(begin).execute(&pool).await.unwrap();
    assert_eq!(
        rides.json(&["retry", &stuck, "--call-again"]).await,
        json!({"id": stuck, "event": "operator retry", "was": "stuck", "is": "due"})
    );
    let shown = rides.json(&["show", &stuck]).await;
    assert_eq!(
        (&shown["intent"], &shown["state"]),
        (&json!({"again": true}), &json!("due"))
    );
    let entry = shown["timeline"].as_array().unwrap().last().unwrap();
    assert_eq!(
        (&entry["event"], &entry["by"]),
        (&json!("operator retry"), &json!("nina"))
    );
    let refused = rides.refused(&["retry", &stuck]).await;
    assert!(
        refused.contains("the key is due") && refused.contains("completer"),
        "{refused}"
    );

    // With a private gateway, since none is named.
    let completed = rides.json(&["complete"]).await;
    assert_eq!(
        (&completed["finished"], &completed["left"]["due"]),
        (&json!(2), &json!(0)),
        "the ride, and the receipt that it staged"
    );
    let charges = tests::trip::count(&rides.database, "gateway.charges").await;
    assert_eq!(charges, 1);
    assert!(
        rides
            .refused(&["retry", &stuck])
            .await
            .contains("it has its reply")
    );
    assert!(
        rides
            .refused(&["release", &stuck])
            .await
            .contains("needs one that is running")
    );

    let dry_run = || rides.json(&["reap", "--dry-run"]);
    assert_eq!(dry_run().await, json!({"dry_run": true, "keys": 0}));
    let age = "UPDATE idempotency_keys SET finished_at = finished_at - interval '3 days'";
    sqlx::query(age).execute(&pool).await.unwrap();
    // The ride; its receipt is kept as long as what staged it.
    assert_eq!(dry_run().await["keys"], 1);
    assert_eq!(
        rides.says(&["reap", "--dry-run"]).await,
        "1 key would be deleted\n"
    );
    let reaped = rides.json(&["reap"]).await;
    // One, or both, by the order in which the flows are looked at.
    assert_eq!(reaped["dry_run"], false);
    assert!(reaped["keys"] == 1 || reaped["keys"] == 2, "{reaped}");
    if reaped["keys"] == 1 {
        rides.json(&["reap"]).await;
    }
    assert_eq!(rides.json(&["list"]).await, json!([]));
}

/// Beside a running server: the client of a stuck ride is told whom to ask, then gets what a person
/// answered, byte for byte; a lease is taken from a server that hangs.
#[tokio::test]
async fn the_program_works_beside_a_server() {
    let rides = Rides::open().await;
    let url = rides.database.url();
    let server = tests::server::Server::start(tests::server::ServerConfig::serve(&url)).await;
    let ask = |key: &str, source: &str| {
        let request = http()
            .post(server.url("/api/rides"))
            .bearer_auth("alice-token");
        request
            .header("idempotency-key", key)
            .json(&json!({"amountCents": 2000, "paymentSource": source}))
            .send()
    };
    let stuck = rides.fails("k", true).await;
    let told = ask("k", "tok_visa").await.unwrap();
    assert_eq!(told.status(), 500);
    assert!(!told.headers().contains_key("retry-after"));
    let problem = told.text().await.unwrap();
    assert!(
        problem.contains("flow_stuck") && problem.contains("Contact support"),
        "{problem}"
    );
    assert!(!problem.contains(&stuck), "{problem}");

    let body = "{ \"rideId\": null,  \"amount\": 0 }";
    let header = "location: /api/rides/none";
    let resolve = [
        "resolve", &stuck, "--status", "201", "--body", body, "--header", header,
    ];
    let said = rides.says(&resolve).await;
    assert!(said.contains("was stuck, is finished"), "{said}");
    let replay = ask("k", "tok_visa").await.unwrap();
    assert_eq!(replay.status(), 201);
    assert_eq!(replay.headers()["idempotent-replayed"], "true");
    assert_eq!(replay.headers()["content-type"], "application/json");
    assert_eq!(replay.headers()["location"], "/api/rides/none");
    assert_eq!(replay.text().await.unwrap(), body);
    let shown = rides.json(&["show", &stuck, "--reply"]).await;
    assert_eq!(
        (&shown["reply"]["body"], &shown["status"]),
        (&json!(body), &json!(201))
    );
    assert!(rides.refused(&resolve).await.contains("it has its reply"));
    let cookie = [
        "resolve",
        &stuck,
        "--status",
        "200",
        "--header",
        "set-cookie: a=b",
    ];
    assert!(rides.refused(&cookie).await.contains("set-cookie"));

    let (answer, ()) = tokio::join!(ask("slow", "tok_slow_1500"), async {
        let held = "SELECT id FROM idempotency_keys WHERE recovery_point = 'ride_created' AND holder IS NOT NULL";
        let pool = rides.database.pool();
        let deadline = tokio::time::Instant::now() + trip::PATIENCE;
        let id: Uuid = loop {
            let found = sqlx::query(held).fetch_optional(&pool).await.unwrap();
            if let Some(row) = found {
                break row.get(0);
            }
            assert!(tokio::time::Instant::now() < deadline);
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        let id = id.to_string();
        assert!(
            rides
                .refused(&["retry", &id])
                .await
                .contains("the key is running")
        );
        let released = rides.json(&["release", &id]).await;
        assert_eq!(
            (&released["was"], &released["is"]),
            (&json!("running"), &json!("due"))
        );
    });
    assert_eq!(answer.unwrap().status(), 201);
    assert_eq!(
        tests::trip::count(&rides.database, "gateway.charges").await,
        1
    );
}

/// With no server running, the private database is started for the command.
#[tokio::test]
async fn the_program_starts_its_database_for_a_command() {
    let data = std::env::temp_dir().join(format!("keys-{}", Uuid::new_v4().simple()));
    let env = [("RIDES_DATA_DIR", data.to_str().unwrap())];
    let output = keys(&["stats", "--json"], &env).await;
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let stats: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(stats, json!({"keys": 0, "oldest_ms": null, "groups": []}));
    remove(&data).await;
}

#[tokio::test]
async fn a_database_without_keys_is_named() {
    let database = TestDatabase::empty().await;
    let output = keys(&["list"], &[("DATABASE_URL", &database.url())]).await;
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        errors.contains("there are no keys in this database"),
        "{errors}"
    );
}

/// The private server may still be stopping in the directory.
async fn remove(data: &Path) {
    let deadline = tokio::time::Instant::now() + trip::PATIENCE;
    while std::fs::remove_dir_all(data).is_err() && data.exists() {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
