//! Answers that are lost on the way: the claim, a phase, the finish, a release. Whether the commit
//! happened is never guessed, and nothing runs twice where it did.

use idempotent_core::{FlowOptions, Handle, RunError};
use std::time::Duration;
use tests::database::{TestDatabase, pool_options};
use tests::proxy::{Point, Proxy};
use tests::trip::{self, Act, TripError, TripFlow, key, trip_to};

const CLAIM: &str = "INSERT INTO idempotency_keys";
const TAKEOVER: &str = "attempts = attempts + 1";
const CHECKPOINT: &str = "SET recovery_point = $5, state = $6, attempts = 0";
const FINISH: &str = "SET recovery_point = 'finished'";
const RELEASE: &str = "SET holder = NULL, lease_expires_at = NULL, recovery_point = $5";
const FROM_MYSELF: &str = "SET holder = $4";

struct Setup {
    database: TestDatabase,
    proxy: Proxy,
    flow: TripFlow,
    trips: Handle<TripFlow>,
}

/// A flow that reaches its database through a proxy.
async fn setup() -> Setup {
    let database = trip::database().await;
    let proxy = Proxy::start(&database.options());
    let pool = pool_options().connect_lazy_with(proxy.connect_options(&database.options()));
    let flow = TripFlow::default();
    let options = FlowOptions::new().lease(Duration::from_secs(5));
    let trips = flow.run_with(pool, options).await;
    Setup {
        database,
        proxy,
        flow,
        trips,
    }
}

impl Setup {
    /// The flow was done once, and the answer is the stored one.
    async fn done_once(&self, calls: usize) {
        assert_eq!(
            trip::trips(&self.database).await,
            [("mars".to_owned(), "paid".to_owned())]
        );
        assert_eq!(
            (
                self.flow.outside.calls().len(),
                self.flow.outside.payments()
            ),
            (calls, 1)
        );
        let replay = self.trips.run(key("k"), trip_to("mars")).await.unwrap();
        assert!(replay.is_replayed());
        assert_eq!(trip::count(&self.database, "idempotency_keys").await, 1);
    }
}

/// C04: our own row, met again, is ours.
#[tokio::test]
async fn a_claim_whose_answer_was_lost_is_recognised() {
    let setup = setup().await;
    let fault = setup.proxy.lose_answer(CLAIM);
    let answer = setup.trips.run(key("k"), trip_to("mars")).await.unwrap();
    fault.fired().await;
    assert!(!answer.is_replayed());
    let fence: i64 = sqlx::query_scalar("SELECT fence FROM idempotency_keys")
        .fetch_one(&setup.database.pool())
        .await
        .unwrap();
    assert_eq!(fence, 1, "it did not even have to take over");
    setup.done_once(1).await;
}

#[tokio::test]
async fn a_claim_that_never_arrived_is_sent_again() {
    let setup = setup().await;
    let fault = setup.proxy.cut_before(CLAIM);
    let answer = setup.trips.run(key("k"), trip_to("mars")).await.unwrap();
    fault.fired().await;
    assert!(!answer.is_replayed());
    setup.done_once(1).await;
}

#[tokio::test]
async fn a_takeover_whose_answer_was_lost_is_recognised() {
    let setup = setup().await;
    setup
        .flow
        .script
        .next("before pay", Act::Fail(TripError::Retry));
    setup
        .trips
        .run(key("k"), trip_to("mars"))
        .await
        .unwrap_err();
    let fault = setup.proxy.lose_answer(TAKEOVER);
    assert!(
        !setup
            .trips
            .run(key("k"), trip_to("mars"))
            .await
            .unwrap()
            .is_replayed()
    );
    fault.fired().await;
    setup.done_once(1).await;
}

/// The phase did commit: it does not run again.
#[tokio::test]
async fn a_phase_whose_commit_was_lost_on_the_way_back_is_not_run_again() {
    let setup = setup().await;
    let fault = setup.proxy.lose_answer(Point::commit().after(CHECKPOINT));
    let answer = setup.trips.run(key("k"), trip_to("mars")).await.unwrap();
    fault.fired().await;
    assert_eq!(answer.reply().status(), 201);
    setup.done_once(1).await;
}

/// The phase did not commit: it runs again, in the same attempt.
#[tokio::test]
async fn a_phase_whose_commit_never_arrived_is_run_again() {
    let setup = setup().await;
    let fault = setup.proxy.cut_before(Point::commit().after(CHECKPOINT));
    let answer = setup.trips.run(key("k"), trip_to("mars")).await.unwrap();
    fault.fired().await;
    assert_eq!(answer.reply().status(), 201);
    setup.done_once(1).await;
}

/// The worst: while the attempt asks, the commit is still on its way. A plain SELECT would show the
/// old point, and the phase would run twice. The takeover from itself waits for the transaction.
#[tokio::test]
async fn a_commit_that_is_undecided_is_waited_for() {
    for arrives in [true, false] {
        let setup = setup().await;
        let undecided = setup.proxy.half_commit(Point::commit().after(CHECKPOINT));
        let asks = setup.proxy.hold(FROM_MYSELF);
        let running = setup.trips.start(key("k"), trip_to("mars")).unwrap();
        undecided.reached().await;
        asks.reached().await;
        asks.release();
        blocked(&setup.database).await;
        if arrives {
            undecided.release().await;
        } else {
            undecided.abandon().await;
        }
        let answer = running.wait().await.unwrap();
        assert_eq!(answer.reply().status(), 201, "arrives: {arrives}");
        setup.done_once(1).await;
    }
}

#[tokio::test]
async fn a_finish_whose_answer_was_lost_is_answered_with_what_it_stored() {
    let setup = setup().await;
    let fault = setup.proxy.lose_answer(Point::commit().after(FINISH));
    let answer = setup.trips.run(key("k"), trip_to("mars")).await.unwrap();
    fault.fired().await;
    assert!(!answer.is_replayed(), "nobody has seen it before");
    setup.done_once(1).await;
}

#[tokio::test]
async fn a_finish_that_never_arrived_is_done_again() {
    let setup = setup().await;
    let fault = setup.proxy.cut_before(Point::commit().after(FINISH));
    let answer = setup.trips.run(key("k"), trip_to("mars")).await.unwrap();
    fault.fired().await;
    assert_eq!(answer.reply().status(), 201);
    // What the outside gave is kept, and not asked for again.
    setup.done_once(1).await;
}

#[tokio::test]
async fn an_undecided_finish_is_waited_for() {
    let setup = setup().await;
    let undecided = setup.proxy.half_commit(Point::commit().after(FINISH));
    let running = setup.trips.start(key("k"), trip_to("mars")).unwrap();
    undecided.reached().await;
    blocked(&setup.database).await;
    undecided.release().await;
    assert_eq!(running.wait().await.unwrap().reply().status(), 201);
    setup.done_once(1).await;
}

/// The takeover from itself may lose its answer as well.
#[tokio::test]
async fn a_doubt_about_a_doubt_is_resolved() {
    for point in [
        Point::commit().after(CHECKPOINT),
        Point::commit().after(FINISH),
    ] {
        let setup = setup().await;
        let first = setup.proxy.lose_answer(point);
        let second = setup.proxy.lose_answer(FROM_MYSELF);
        let answer = setup.trips.run(key("k"), trip_to("mars")).await.unwrap();
        first.fired().await;
        second.fired().await;
        assert_eq!(answer.reply().status(), 201);
        setup.done_once(1).await;
    }
}

#[tokio::test]
async fn a_release_whose_answer_was_lost_leaves_the_key_free() {
    let setup = setup().await;
    setup
        .flow
        .script
        .next("before pay", Act::Fail(TripError::Retry));
    let fault = setup.proxy.lose_answer(RELEASE);
    let told = setup
        .trips
        .run(key("k"), trip_to("mars"))
        .await
        .unwrap_err();
    fault.fired().await;
    // The failed release does not hide why.
    let RunError::Retry { reason, .. } = &told else {
        panic!("{told:?}")
    };
    assert_eq!(reason, "the outside is unwell");
    assert!(
        !setup
            .trips
            .run(key("k"), trip_to("mars"))
            .await
            .unwrap()
            .is_replayed()
    );
    setup.done_once(1).await;
}

#[tokio::test]
async fn a_release_that_never_arrived_is_sent_again() {
    let setup = setup().await;
    setup
        .flow
        .script
        .next("before pay", Act::Fail(TripError::Retry));
    let fault = setup.proxy.cut_before(RELEASE);
    setup
        .trips
        .run(key("k"), trip_to("mars"))
        .await
        .unwrap_err();
    fault.fired().await;
    assert!(
        !setup
            .trips
            .run(key("k"), trip_to("mars"))
            .await
            .unwrap()
            .is_replayed()
    );
    setup.done_once(1).await;
}

/// A connection that is lost in the middle of a phase, before the commit was sent: the phase failed
/// for certain, and is retried by the client.
#[tokio::test]
async fn a_connection_lost_before_the_commit_is_a_retry() {
    for point in ["INSERT INTO trips", CHECKPOINT] {
        let setup = setup().await;
        let fault = setup.proxy.cut_before(point);
        let told = setup
            .trips
            .run(key("k"), trip_to("mars"))
            .await
            .unwrap_err();
        fault.fired().await;
        assert!(
            matches!(
                told,
                RunError::Retry {
                    phase: "create",
                    ..
                }
            ),
            "{told:?}"
        );
        assert_eq!(
            setup
                .trips
                .run(key("k"), trip_to("mars"))
                .await
                .unwrap()
                .reply()
                .status(),
            201
        );
        setup.done_once(1).await;
    }
}

/// All connections of the pool are stale, as after a restart of the server: nobody notices.
#[tokio::test]
async fn stale_connections_are_replaced() {
    let setup = setup().await;
    for name in ["a", "b"] {
        setup.trips.run(key(name), trip_to(name)).await.unwrap();
    }
    setup.proxy.cut_all().await;
    assert_eq!(
        setup
            .trips
            .run(key("c"), trip_to("c"))
            .await
            .unwrap()
            .reply()
            .status(),
        201
    );
    // Between the claim and a later phase, too.
    let gate = setup.flow.script.hold("pay");
    let running = setup.trips.start(key("d"), trip_to("d")).unwrap();
    gate.reached().await;
    setup.proxy.cut_all().await;
    gate.open();
    assert_eq!(running.wait().await.unwrap().reply().status(), 201);
}

/// Waits until some statement waits for a lock.
async fn blocked(database: &TestDatabase) {
    let sql = "SELECT count(*) > 0 FROM pg_stat_activity
               WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let what = "something waits for the open transaction";
    trip::until(&database.pool(), what, sql).await;
}
