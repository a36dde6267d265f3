//! The proxy does what it says: what these tests build on would otherwise be a guess.

use std::time::{Duration, Instant};

use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};
use tests::database::TestDatabase;
use tests::proxy::{Counts, Exchange, Kind, Point, Proxy};

const INSERT: &str = "INSERT INTO notes (id) VALUES ($1)";

/// A database with a table, a proxy to it, and a way around the proxy.
struct Bench {
    proxy: Proxy,
    database: TestDatabase,
}

impl Bench {
    async fn new() -> Self {
        let database = TestDatabase::from_template("proxy", async |pool| {
            sqlx::raw_sql("CREATE TABLE notes (id int PRIMARY KEY, body text)")
                .execute(&pool)
                .await?;
            Ok(())
        })
        .await;
        Self {
            proxy: Proxy::start(&database.options()),
            database,
        }
    }

    async fn connect(&self) -> PgConnection {
        let options = self.proxy.connect_options(&self.database.options());
        PgConnection::connect_with(&options).await.unwrap()
    }

    fn pool(&self) -> PgPool {
        let options = self.proxy.connect_options(&self.database.options());
        PgPoolOptions::new()
            .max_connections(1)
            .test_before_acquire(false)
            .connect_lazy_with(options)
    }

    /// The rows that are committed, seen past the proxy.
    async fn notes(&self) -> Vec<i32> {
        let mut direct = PgConnection::connect_with(&self.database.options())
            .await
            .unwrap();
        sqlx::query_scalar("SELECT id FROM notes ORDER BY id")
            .fetch_all(&mut direct)
            .await
            .unwrap()
    }

    /// How many sessions there are besides the asking one.
    async fn sessions(&self) -> i64 {
        self.ask("SELECT count(*) FROM pg_stat_activity WHERE ")
            .await
    }

    async fn waiting_for_locks(&self) -> i64 {
        self.ask("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND ")
            .await
    }

    /// Ends them as an administrator does; says how many there were.
    async fn end_sessions(&self) -> i64 {
        self.ask("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE ")
            .await
    }

    async fn ask(&self, sql: &str) -> i64 {
        let others = "datname = current_database() AND pid <> pg_backend_pid()";
        let mut direct = PgConnection::connect_with(&self.database.options())
            .await
            .unwrap();
        sqlx::query_scalar(AssertSqlSafe(format!("{sql}{others}")))
            .fetch_one(&mut direct)
            .await
            .unwrap()
    }
}

async fn insert(connection: &mut PgConnection, id: i32) -> sqlx::Result<()> {
    sqlx::query(INSERT)
        .bind(id)
        .execute(connection)
        .await
        .map(drop)
}

async fn insert_in_transaction(connection: &mut PgConnection, id: i32) -> sqlx::Result<()> {
    let mut transaction = connection.begin().await?;
    insert(&mut transaction, id).await?;
    transaction.commit().await
}

#[tokio::test]
async fn counts_what_a_statement_costs() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    assert_eq!(
        bench.proxy.counts(),
        Counts::default(),
        "connecting is not work"
    );

    insert(&mut connection, 1).await.unwrap();
    let first = bench.proxy.counts();
    assert_eq!((first.round_trips, first.parses), (2, 1));

    bench.proxy.reset();
    insert(&mut connection, 2).await.unwrap();
    let prepared = bench.proxy.counts();
    assert_eq!((prepared.round_trips, prepared.parses), (1, 0));

    bench.proxy.reset();
    insert_in_transaction(&mut connection, 3).await.unwrap();
    assert_eq!((bench.proxy.round_trips(), bench.proxy.commits()), (3, 1));
    connection.ping().await.unwrap();
    assert_eq!(
        (bench.proxy.round_trips(), bench.proxy.counts().pings),
        (3, 1)
    );
}

#[tokio::test]
async fn remembers_what_was_said() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    insert(&mut connection, 1).await.unwrap();
    let duplicate = insert_in_transaction(&mut connection, 1).await.unwrap_err();
    assert_eq!(
        duplicate.as_database_error().unwrap().code().as_deref(),
        Some("23505")
    );
    connection.ping().await.unwrap();

    let said = |exchange: Exchange| {
        let Exchange {
            connection,
            kind,
            sql,
            command_tags,
            error_sqlstate,
            answered,
            ..
        } = exchange;
        assert_eq!((connection, answered), (0, true));
        (
            kind,
            sql,
            command_tags.join(","),
            error_sqlstate.unwrap_or_default(),
        )
    };
    let transcript: Vec<_> = bench.proxy.transcript().into_iter().map(said).collect();
    let expected = [
        (Kind::Parse, INSERT, "", ""),
        (Kind::Prepared, INSERT, "INSERT 0 1", ""),
        (Kind::Simple, "BEGIN", "BEGIN", ""),
        (Kind::Prepared, INSERT, "", "23505"),
        (Kind::Simple, "ROLLBACK", "ROLLBACK", ""),
    ];
    let expected = expected
        .map(|(kind, sql, tags, error)| (kind, sql.to_owned(), tags.to_owned(), error.to_owned()));
    assert_eq!(transcript, expected);
}

#[tokio::test]
async fn tells_the_statements_of_one_query_apart() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    let sql = "BEGIN; INSERT INTO notes (id) VALUES (1), (2); COMMIT";
    sqlx::raw_sql(sql).execute(&mut connection).await.unwrap();
    let transcript = bench.proxy.transcript();
    assert_eq!(transcript.len(), 1);
    assert_eq!(
        transcript[0].command_tags,
        ["BEGIN", "INSERT 0 2", "COMMIT"]
    );
    assert_eq!(bench.proxy.commits(), 1);
}

#[tokio::test]
async fn passes_large_messages_and_copies() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    let body = "ä".repeat(600_000);
    let echoed: String = sqlx::query_scalar("SELECT $1")
        .bind(&body)
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert!(echoed == body);

    bench.proxy.reset();
    let mut copy = connection
        .copy_in_raw("COPY notes FROM STDIN")
        .await
        .unwrap();
    for id in 0..10_000 {
        copy.send(format!("{id}\tbody {id}\n").into_bytes())
            .await
            .unwrap();
    }
    copy.finish().await.unwrap();
    assert_eq!(bench.proxy.round_trips(), 1);
    assert_eq!(bench.proxy.transcript()[0].command_tags, ["COPY 10000"]);
    let rows: Vec<(i32, String)> = sqlx::query_as("SELECT id, body FROM notes")
        .fetch_all(&mut connection)
        .await
        .unwrap();
    assert_eq!(rows.len(), 10_000);
}

#[tokio::test]
async fn a_lost_answer_is_of_something_done() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    let lost = bench.proxy.lose_answer(Point::commit());
    let error = insert_in_transaction(&mut connection, 1).await.unwrap_err();
    assert!(matches!(error, sqlx::Error::Io(_)), "{error}");
    lost.fired().await;
    assert_eq!(bench.notes().await, [1]);
    assert_eq!(bench.proxy.commits(), 1);
}

#[tokio::test]
async fn a_lost_answer_inside_a_transaction_rolls_it_back() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    let lost = bench.proxy.lose_answer("INSERT INTO notes");
    insert_in_transaction(&mut connection, 1).await.unwrap_err();
    lost.fired().await;
    assert_eq!(
        bench.proxy.transcript().last().unwrap().command_tags,
        ["INSERT 0 1"]
    );
    // The row's key is free at once: the session has ended.
    assert_eq!(bench.sessions().await, 0);
    insert(&mut bench.connect().await, 1).await.unwrap();
}

#[tokio::test]
async fn a_cut_before_is_of_something_not_done() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    let cut = bench.proxy.cut_before(Point::commit());
    let error = insert_in_transaction(&mut connection, 1).await.unwrap_err();
    assert!(matches!(error, sqlx::Error::Io(_)), "{error}");
    cut.fired().await;
    assert!(bench.notes().await.is_empty());
    assert!(
        bench
            .proxy
            .transcript()
            .iter()
            .all(|exchange| exchange.sql != "COMMIT")
    );
}

#[tokio::test]
async fn a_held_request_has_not_arrived() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    let hold = bench.proxy.hold(Point::commit());
    let running = tokio::spawn(async move { insert_in_transaction(&mut connection, 1).await });
    hold.reached().await;
    assert!(bench.notes().await.is_empty());
    hold.release();
    running.await.unwrap().unwrap();
    assert_eq!(bench.notes().await, [1]);
}

#[tokio::test]
async fn a_held_request_can_be_cut() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    let hold = bench.proxy.hold(Point::commit());
    let running = tokio::spawn(async move { insert_in_transaction(&mut connection, 1).await });
    hold.reached().await;
    hold.cut().await;
    running.await.unwrap().unwrap_err();
    assert!(bench.notes().await.is_empty());
}

#[tokio::test]
async fn a_held_answer_is_of_something_done() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    let hold = bench.proxy.hold_answer(Point::commit());
    let running = tokio::spawn(async move { insert_in_transaction(&mut connection, 1).await });
    hold.reached().await;
    assert_eq!(bench.notes().await, [1]);
    assert!(!running.is_finished());
    hold.release();
    running.await.unwrap().unwrap();
}

#[tokio::test]
async fn half_a_commit_can_arrive_late() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    let undecided = bench.proxy.half_commit(Point::commit());
    insert_in_transaction(&mut connection, 1).await.unwrap_err();
    undecided.reached().await;
    assert!(bench.notes().await.is_empty());

    // Its locks are held all the while: the same row waits for the decision.
    let mut other = bench.connect().await;
    let second = tokio::spawn(async move { insert(&mut other, 1).await });
    wait_until(async || bench.waiting_for_locks().await == 1).await;
    undecided.release().await;
    assert_eq!(bench.notes().await, [1]);
    let error = second.await.unwrap().unwrap_err();
    assert!(error.as_database_error().unwrap().is_unique_violation());
}

#[tokio::test]
async fn half_a_commit_may_never_arrive() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    let undecided = bench.proxy.half_commit(Point::commit());
    insert_in_transaction(&mut connection, 1).await.unwrap_err();
    undecided.reached().await;
    undecided.abandon().await;
    insert(&mut bench.connect().await, 1).await.unwrap();
}

#[tokio::test]
async fn half_a_commit_may_come_too_late() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    let undecided = bench.proxy.half_commit(Point::commit());
    insert_in_transaction(&mut connection, 1).await.unwrap_err();
    undecided.reached().await;
    assert_eq!(bench.end_sessions().await, 1);
    undecided.lost().await;
    insert(&mut bench.connect().await, 1).await.unwrap();
}

#[tokio::test]
async fn a_fault_strikes_at_its_point_and_once() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    let third = bench
        .proxy
        .cut_before(Point::containing("INSERT INTO notes").nth(3));
    for id in 1..=2 {
        insert(&mut connection, id).await.unwrap();
    }
    insert(&mut connection, 3).await.unwrap_err();
    third.fired().await;

    let (mut first, mut second) = (bench.connect().await, bench.connect().await);
    let update = bench
        .proxy
        .cut_before(Point::commit().after("UPDATE notes"));
    let mut updating = first.begin().await.unwrap();
    sqlx::raw_sql("UPDATE notes SET body = ''")
        .execute(&mut *updating)
        .await
        .unwrap();
    // Neither another connection's transaction, nor a later one of the same, is meant.
    insert_in_transaction(&mut second, 4).await.unwrap();
    sqlx::raw_sql("SELECT 'UPDATE notes'")
        .execute(&mut second)
        .await
        .unwrap();
    insert_in_transaction(&mut second, 5).await.unwrap();
    updating.commit().await.unwrap_err();
    update.fired().await;
    insert_in_transaction(&mut second, 6).await.unwrap();
    assert_eq!(bench.notes().await, [1, 2, 4, 5, 6]);
}

#[tokio::test]
async fn faults_of_one_point_strike_one_after_the_other() {
    let bench = Bench::new().await;
    let faults = [(); 2].map(|()| bench.proxy.cut_before("INSERT INTO notes"));
    for fault in &faults {
        insert(&mut bench.connect().await, 1).await.unwrap_err();
        fault.fired().await;
    }
    insert(&mut bench.connect().await, 1).await.unwrap();
}

#[tokio::test]
#[should_panic(expected = "never struck")]
async fn a_fault_that_never_strikes_fails_the_test() {
    let bench = Bench::new().await;
    let _cut = bench.proxy.cut_before("DELETE FROM notes");
    insert(&mut bench.connect().await, 1).await.unwrap();
}

#[tokio::test]
async fn a_fault_can_be_taken_back() {
    let bench = Bench::new().await;
    let fault = bench.proxy.cut_before(Point::any().nth(2));
    let mut connection = bench.connect().await;
    insert(&mut connection, 1).await.unwrap();
    assert!(!fault.disarm());
    insert(&mut connection, 2).await.unwrap();

    let fault = bench.proxy.cut_before(Point::any());
    insert(&mut connection, 3).await.unwrap_err();
    assert!(fault.disarm());
}

#[tokio::test]
async fn a_pool_that_gets_a_connection_back_rolls_back_and_pings() {
    let bench = Bench::new().await;
    let pool = bench.pool();
    let rollback = bench.proxy.hold_answer("ROLLBACK");
    let mut transaction = pool.begin().await.unwrap();
    insert(&mut transaction, 1).await.unwrap();
    drop(transaction);
    rollback.reached().await;
    rollback.release();
    insert(&mut pool.acquire().await.unwrap(), 2).await.unwrap();
    // BEGIN, the statement's Parse, the statement twice, and a ROLLBACK in one write with the
    // pool's Sync.
    let counts = bench.proxy.counts();
    assert_eq!((counts.round_trips, counts.parses), (5, 1));
    assert!(counts.pings >= 1);
    assert_eq!(bench.notes().await, [2]);
}

#[tokio::test]
async fn what_runs_when_the_client_goes_is_still_seen() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    let mut blocker = PgConnection::connect_with(&bench.database.options())
        .await
        .unwrap();
    let mut lock = blocker.begin().await.unwrap();
    insert(&mut lock, 1).await.unwrap();
    insert(&mut connection, 2).await.unwrap();
    let seen = bench.proxy.hold("INSERT INTO notes");
    let waiting = tokio::spawn(async move { insert(&mut connection, 1).await });
    seen.reached().await;
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    seen.release();
    lock.rollback().await.unwrap();
    wait_until(async || bench.notes().await == [1, 2]).await;
}

#[tokio::test]
async fn a_database_goes_down_and_comes_up() {
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    bench.proxy.refuse().await;
    insert(&mut connection, 1).await.unwrap_err();
    let options = bench.proxy.connect_options(&bench.database.options());
    let refused = PgConnection::connect_with(&options).await.unwrap_err();
    let sqlx::Error::Io(refused) = refused else {
        panic!("{refused}")
    };
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);

    bench.proxy.accept().await;
    insert(&mut bench.connect().await, 1).await.unwrap();

    let mut connection = bench.connect().await;
    bench.proxy.cut_all().await;
    insert(&mut connection, 2).await.unwrap_err();
    insert(&mut bench.connect().await, 2).await.unwrap();
}

#[tokio::test]
async fn a_server_that_is_not_there_is_one_that_starts() {
    let nowhere = sqlx::postgres::PgConnectOptions::new_without_pgpass().socket("/nonexistent");
    let proxy = Proxy::start(&nowhere);
    let error = PgConnection::connect_with(&proxy.connect_options(&nowhere))
        .await
        .unwrap_err();
    assert_eq!(
        error.as_database_error().unwrap().code().as_deref(),
        Some("57P03")
    );
}

#[tokio::test]
async fn latency_is_paid_once_a_round_trip() {
    const LATENCY: Duration = Duration::from_millis(3);
    let bench = Bench::new().await;
    let mut connection = bench.connect().await;
    insert(&mut connection, 0).await.unwrap();
    bench.proxy.set_latency(LATENCY);
    let started = Instant::now();
    for id in 1..=10 {
        insert(&mut connection, id).await.unwrap();
    }
    let taken = started.elapsed();
    println!("ten round trips of {LATENCY:?} took {taken:?}");
    assert!(taken >= 10 * LATENCY);
}

#[tokio::test]
async fn a_url_leads_to_the_same_database() {
    let bench = Bench::new().await;
    for url in [
        bench.database.url(),
        bench.proxy.url(&bench.database.options()),
    ] {
        let mut connection = PgConnection::connect(&url).await.unwrap();
        insert(&mut connection, i32::try_from(url.len()).unwrap())
            .await
            .unwrap();
    }
    assert_eq!(bench.notes().await.len(), 2);
    assert!(bench.proxy.round_trips() > 0);
}

/// Asks again until it is so, for the few things that nobody announces.
async fn wait_until(is_so: impl AsyncFn() -> bool) {
    let asking = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), asking)
        .await
        .expect("it never was so");
}
