//! What a caller is told: the first answer, the replay, the mismatch, the request in progress.

use std::time::Duration;

use idempotent_core::{InvalidRequest, Key, RunError};
use serde_json::json;
use sqlx::Row;
use tests::trip::{self, TripFlow, TripRequest, key, trip_to};

#[tokio::test]
async fn a_first_request_runs_once_and_its_retries_get_the_same_answer() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;

    let first = trips.run(key("k"), trip_to("mars")).await.unwrap();
    let retry = trips.run(key("k"), trip_to("mars")).await.unwrap();
    // Another process, which shares nothing with the first but the database.
    let elsewhere = flow
        .run_by(database.pool())
        .await
        .run(key("k"), trip_to("mars"))
        .await
        .unwrap();

    assert_eq!(first.reply().status(), 201);
    assert_eq!(&first.reply().body()[..], b"1");
    assert!(!first.is_replayed() && retry.is_replayed() && elsewhere.is_replayed());
    // C03: status, headers in their order, and bytes.
    assert_eq!(first.reply(), retry.reply());
    assert_eq!(first.reply(), elsewhere.reply());
    let headers: Vec<_> = first
        .reply()
        .headers()
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(headers, ["content-type", "location", "etag"]);
    assert_eq!(flow.outside.calls().len(), 1);
    assert_eq!(
        trip::trips(&database).await,
        [("mars".to_owned(), "paid".to_owned())]
    );
}

#[tokio::test]
async fn a_finished_key_keeps_neither_lease_nor_values() {
    let database = trip::database().await;
    TripFlow::default()
        .run_by(database.pool())
        .await
        .run(key("k"), trip_to("mars"))
        .await
        .unwrap();

    let row = sqlx::query(
        "SELECT recovery_point, state, holder IS NULL, lease_expires_at IS NULL, fence, finished_at IS NOT NULL
         FROM idempotency_keys",
    )
    .fetch_one(&database.pool())
    .await
    .unwrap();
    assert_eq!(row.get::<String, _>(0), "finished");
    assert_eq!(row.get::<serde_json::Value, _>(1), json!({}));
    assert!(row.get::<bool, _>(2) && row.get::<bool, _>(3) && row.get::<bool, _>(5));
    assert_eq!(row.get::<i64, _>(4), 1);
}

/// C11: also while the first is in flight, and however much the bodies have in common.
#[tokio::test]
async fn another_body_under_the_same_key_is_a_mismatch_in_every_state() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;
    let elsewhere = flow.run_by(database.pool()).await;
    let long = |end: &str| trip_to(&("x".repeat(40_000) + end));

    let gate = flow.script.hold("pay");
    let running = trips.start(key("k"), long("a")).unwrap();
    gate.reached().await;
    for process in [&trips, &elsewhere] {
        let refused = process.run(key("k"), long("b")).await.unwrap_err();
        assert!(
            matches!(refused, RunError::Mismatch),
            "in flight: {refused:?}"
        );
    }
    gate.open();
    let first = running.wait().await.unwrap();
    for process in [&trips, &elsewhere] {
        let refused = process.run(key("k"), long("b")).await.unwrap_err();
        assert!(
            matches!(refused, RunError::Mismatch),
            "finished: {refused:?}"
        );
    }
    // The refused requests changed nothing.
    let replay = elsewhere.run(key("k"), long("a")).await.unwrap();
    assert_eq!(replay.reply(), first.reply());
    assert_eq!(flow.outside.calls().len(), 1);
}

#[tokio::test]
async fn method_and_query_belong_to_the_request() {
    let database = trip::database().await;
    let trips = TripFlow::default().run_by(database.pool()).await;
    trips.run(key("k"), trip_to("mars")).await.unwrap();

    for other in [key("k").with_method("PUT"), key("k").with_query("dry=1")] {
        let refused = trips.run(other, trip_to("mars")).await.unwrap_err();
        assert!(matches!(refused, RunError::Mismatch));
    }
}

#[tokio::test]
async fn a_request_in_progress_elsewhere_says_when_to_come_back() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let here = flow.run_by(database.pool()).await;
    let elsewhere = flow.run_by(database.pool()).await;

    for phase in ["create", "pay", "finish"] {
        let gate = flow.script.hold(phase);
        let running = here.start(key(phase), trip_to("mars")).unwrap();
        gate.reached().await;
        let refused = elsewhere
            .run(key(phase), trip_to("mars"))
            .await
            .unwrap_err();
        let RunError::InProgress { retry_after } = refused else {
            panic!("in {phase}: {refused:?}")
        };
        assert!(
            (Duration::from_secs(1)..=Duration::from_secs(15)).contains(&retry_after),
            "{retry_after:?}"
        );
        gate.open();
        running.wait().await.unwrap();
    }
    assert_eq!(flow.outside.calls().len(), 3);
}

/// C06: in the same process they share one run, without a look at the database.
#[tokio::test]
async fn identical_requests_in_one_process_share_one_run() {
    let database = trip::database().await;
    let proxy = tests::proxy::Proxy::start(&database.options());
    let pool = tests::database::pool_options()
        .connect_lazy_with(proxy.connect_options(&database.options()));
    let flow = TripFlow::default();
    let trips = flow.run_by(pool).await;

    let gate = flow.script.hold("pay");
    let first = trips.start(key("k"), trip_to("mars")).unwrap();
    gate.reached().await;
    proxy.reset();
    let others: Vec<_> = (0..20)
        .map(|_| trips.start(key("k"), trip_to("mars")).unwrap())
        .collect();
    assert!(!first.is_joined() && others.iter().all(|other| other.is_joined()));
    assert_eq!(proxy.round_trips(), 0, "{:?}", proxy.transcript());
    gate.open();

    let first = first.wait().await.unwrap();
    assert!(!first.is_replayed());
    for other in others {
        let other = other.wait().await.unwrap();
        assert!(other.is_replayed());
        assert_eq!(other.reply(), first.reply());
    }
    assert_eq!(flow.outside.calls().len(), 1);
}

/// C05, C06: across processes one runs; the others are told, never an error of the database.
#[tokio::test]
async fn of_many_processes_that_race_on_one_key_one_runs() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let mut processes = Vec::new();
    for _ in 0..6 {
        let options = tests::database::pool_options().max_connections(3);
        processes.push(
            flow.run_by(options.connect_lazy_with(database.options()))
                .await,
        );
    }
    for round in 0..20 {
        let key = key(&format!("k{round}"));
        let running: Vec<_> = processes
            .iter()
            .map(|process| process.start(key.clone(), trip_to("mars")).unwrap())
            .collect();
        let mut answered = 0;
        for running in running {
            match running.wait().await {
                Ok(answer) => {
                    answered += usize::from(!answer.is_replayed());
                    assert_eq!(answer.reply().status(), 201);
                }
                Err(RunError::InProgress { .. }) => {}
                Err(error) => panic!("round {round}: {error:?}"),
            }
        }
        assert_eq!(answered, 1, "round {round}");
    }
    assert_eq!(flow.outside.calls().len(), 20);
    assert_eq!(trip::trips(&database).await.len(), 20);
}

/// C07, C09: the same key of another user, or on another path, is another request.
#[tokio::test]
async fn keys_belong_to_a_user_and_a_path() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;

    let mut answers = Vec::new();
    for (user, path) in [
        ("alice", "/trips"),
        ("bob", "/trips"),
        ("alice", "/journeys"),
    ] {
        let key = Key::new(user, path, "k").unwrap();
        answers.push(trips.run(key, trip_to("mars")).await.unwrap());
    }
    assert!(answers.iter().all(|answer| !answer.is_replayed()));
    assert_eq!(flow.outside.payments(), 3, "each has its own derived key");
    // Not even a difference that would be a mismatch shows bob what alice did.
    let key = Key::new("carol", "/trips", "k").unwrap();
    assert!(
        !trips
            .run(key, trip_to("venus"))
            .await
            .unwrap()
            .is_replayed()
    );
}

/// C02: dropping the caller's future does not stop the flow.
#[tokio::test]
async fn a_client_that_hangs_up_does_not_stop_the_flow() {
    let database = trip::database().await;
    let flow = TripFlow::default();
    let trips = flow.run_by(database.pool()).await;

    let gate = flow.script.hold("pay");
    {
        let run = trips.run(key("k"), trip_to("mars"));
        tokio::select! {
            _ = run => panic!("the gate is shut"),
            () = gate.reached() => {}
        }
    }
    let retry = trips.start(key("k"), trip_to("mars")).unwrap();
    assert!(retry.is_joined(), "the flow still runs");
    gate.open();
    assert_eq!(retry.wait().await.unwrap().reply().status(), 201);
    assert_eq!(flow.outside.calls().len(), 1);
}

#[tokio::test]
async fn what_the_database_cannot_store_is_refused_before_it_is_asked() {
    let database = trip::database().await;
    let trips = TripFlow::default().run_by(database.pool()).await;
    let refused = trips.run(key("k"), trip_to("ma\0rs")).await.unwrap_err();
    assert!(matches!(refused, RunError::Invalid(InvalidRequest::Nul)));
    assert_eq!(trip::count(&database, "idempotency_keys").await, 0);
}

/// A newer version with a new, defaulted field must still know the request of an older one: its hash
/// differs, and the stored request, read as today's type, decides.
#[tokio::test]
async fn a_new_field_with_a_default_does_not_make_a_mismatch() {
    let database = trip::database().await;
    let trips = TripFlow::default().run_by(database.pool()).await;
    trips.run(key("k"), trip_to("mars")).await.unwrap();
    // As an older version would have stored it: another hash, of a body without the field.
    old_version::TripFlow.rewrite(&database).await;

    assert!(
        trips
            .run(key("k"), trip_to("mars"))
            .await
            .unwrap()
            .is_replayed()
    );
    let other = TripRequest {
        note: Some("window seat".to_owned()),
        ..trip_to("mars")
    };
    assert!(matches!(
        trips.run(key("k"), other).await.unwrap_err(),
        RunError::Mismatch
    ));
}

/// The version before: its request had no currency yet.
mod old_version {
    use idempotent_core::{Engine, Reply, Tx, idempotent_flow};
    use serde::{Deserialize, Serialize};
    use tests::database::TestDatabase;

    #[derive(Debug, Serialize, Deserialize)]
    pub(super) struct TripRequest {
        goal: String,
        /// The newer version fills it with this default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        never: Option<i64>,
        #[serde(default)]
        pace: Pace,
    }

    /// Serialised by the older version only; the newer one ignores it.
    #[derive(Debug, Default, Serialize, Deserialize)]
    struct Pace(u8);

    pub(super) struct TripFlow;

    #[idempotent_flow(name = "trip", lease = "15s", retention = "48h")]
    impl TripFlow {
        #[atomic(Started -> Finished)]
        async fn go(
            &self,
            _tx: &mut Tx<'_>,
            request: &TripRequest,
        ) -> Result<Reply<String>, sqlx::Error> {
            Ok(Reply::ok(request.goal.clone()))
        }
    }

    impl TripFlow {
        /// Runs the request anew, in the place of what a newer version stored.
        pub(super) async fn rewrite(self, database: &TestDatabase) {
            let pool = database.pool();
            sqlx::query("DELETE FROM idempotency_keys")
                .execute(&pool)
                .await
                .unwrap();
            let engine = Engine::builder(pool).flow(self).build().await.unwrap();
            let request = TripRequest {
                goal: "mars".to_owned(),
                never: None,
                pace: Pace::default(),
            };
            engine
                .handle::<Self>()
                .unwrap()
                .run(tests::trip::key("k"), request)
                .await
                .unwrap();
        }
    }
}
