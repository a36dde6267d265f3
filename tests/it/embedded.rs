//! The private PostgreSQL: it ends with its app, starts again at once, and owes nothing to the
//! machine it runs on.
//!
//! An "app" that is killed is this test binary once more, run with a filter for [`app_process`].

#![allow(clippy::unwrap_used)]

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use idempotent_core::embedded::{Embedded, EmbeddedError, default_data_root};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Connection};

/// Longer than a server ever takes to stop by itself; a test that waits this long has failed.
const DEADLINE: Duration = Duration::from_secs(30);

/// A directory that goes away with the test, in a place that the server's user can reach.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Scratch {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = env::temp_dir().join(format!("embedded-it-{}-{number}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Scratch(path.canonicalize().unwrap())
    }

    fn root(&self) -> PathBuf {
        self.0.join("root")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Connects, asks for one text, disconnects.
fn ask(options: PgConnectOptions, sql: &'static str) -> String {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut connection = options.connect().await.unwrap();
        let answer = sqlx::query_scalar::<_, String>(sql)
            .fetch_one(&mut connection)
            .await;
        connection.close().await.unwrap();
        answer.unwrap()
    })
}

/// Connects, does something, disconnects.
fn tell(options: PgConnectOptions, sql: &'static str) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut connection = options.connect().await.unwrap();
        sqlx::raw_sql(sql).execute(&mut connection).await.unwrap();
        connection.close().await.unwrap();
    })
}

/// A server on lasting data, for tests in which no disk fails.
fn quick(root: &Path) -> Embedded {
    Embedded::builder()
        .data_root(root)
        .fsync(false)
        .start()
        .unwrap()
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn is_alive(pid: u32) -> bool {
    let probe = Command::new("/bin/sh")
        .args(["-c", "kill -0 $0", &pid.to_string()])
        .output();
    probe.unwrap().status.success()
}

fn is_root(scratch: &Scratch) -> bool {
    fs::metadata(&scratch.0).unwrap().uid() == 0
}

// The app ----------------------------------------------------------------------------------------

/// Not a test: the app of the other tests. It starts a server, says so, and stays.
#[test]
fn app_process() {
    let Ok(mode) = env::var("EMBEDDED_APP") else {
        return;
    };
    let root = env::var_os("EMBEDDED_APP_ROOT").map(PathBuf::from);
    let server = match root {
        Some(root) => Embedded::builder().data_root(root).fsync(false).start(),
        None => Embedded::ephemeral(),
    };
    let server = server.unwrap_or_else(|error| panic!("{error}"));
    if mode == "ask" {
        let sql = "SELECT concat_ws(' ', current_user, current_database(), \
                   current_setting('server_encoding'), current_setting('lc_collate'), \
                   current_setting('statement_timeout'), current_setting('work_mem'), \
                   current_setting('TimeZone'), current_setting('log_timezone'), \
                   extract(timezone from '2024-07-01'::timestamptz))";
        println!("\nanswer {}", ask(server.connect_options(), sql));
        return;
    }
    println!(
        "\nready {} {}",
        server.pid().unwrap(),
        server.data_root().display()
    );
    loop {
        thread::park();
    }
}

struct App {
    process: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl App {
    fn command(program: &Path, mode: &str, root: Option<&Path>) -> Command {
        let mut command = Command::new(program);
        Self::arguments(&mut command, mode, root);
        command
    }

    fn arguments(command: &mut Command, mode: &str, root: Option<&Path>) {
        let module = module_path!().split_once("::").unwrap().1;
        command.args(["--exact", &format!("{module}::app_process"), "--nocapture"]);
        command
            .env("EMBEDDED_APP", mode)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        if let Some(root) = root {
            command.env("EMBEDDED_APP_ROOT", root);
        }
    }

    fn spawn(mut command: Command) -> App {
        let mut process = command.spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        App { process, output }
    }

    fn start(root: Option<&Path>) -> App {
        Self::spawn(Self::command(&env::current_exe().unwrap(), "stay", root))
    }

    /// The rest of the line that starts with a word.
    fn line(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(
                self.output.read_line(&mut line).unwrap(),
                0,
                "the app ended without `{word}`"
            );
            if let Some(rest) = line.trim_end().strip_prefix(word) {
                return rest.trim_start().to_owned();
            }
        }
    }

    /// The server's process and its root.
    fn ready(&mut self) -> (u32, PathBuf) {
        let line = self.line("ready ");
        let (pid, root) = line.split_once(' ').unwrap();
        (pid.parse().unwrap(), PathBuf::from(root))
    }

    /// SIGKILL. That standard output ends shows that no process of the server holds it.
    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.output.read_to_end(&mut Vec::new()).unwrap();
    }
}

impl Drop for App {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

// Starting and stopping --------------------------------------------------------------------------

#[test]
fn data_survives_a_restart() {
    let scratch = Scratch::new();
    let server = Embedded::start(scratch.root()).unwrap();
    tell(
        server.connect_options(),
        "CREATE TABLE kept (it text); INSERT INTO kept VALUES ('yes')",
    );
    assert_eq!(ask(server.connect_options(), "SHOW fsync"), "on");
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&scratch.root().join("data")), 0o700);
    assert_eq!(mode(server.socket_dir()), 0o700);
    assert_eq!(mode(&scratch.root()) & 0o066, 0);
    let pid = server.pid().unwrap();
    server.stop().unwrap();
    assert!(!is_alive(pid));

    let server = Embedded::start(scratch.root()).unwrap();
    assert_eq!(ask(server.connect_options(), "SELECT it FROM kept"), "yes");
    assert!(ask(server.connect_options(), "SHOW server_version").starts_with(server.version()));
}

#[test]
fn a_second_start_is_refused_and_names_the_first() {
    let scratch = Scratch::new();
    let _first = quick(&scratch.root());
    let refusal = Embedded::start(scratch.root()).unwrap_err();
    assert!(
        matches!(refusal, EmbeddedError::InUse { pid: Some(pid), .. } if pid == std::process::id())
    );
    let message = refusal.to_string();
    assert!(
        message.contains(scratch.root().to_str().unwrap()),
        "{message}"
    );
}

#[test]
fn of_two_racing_starts_one_wins_and_the_other_is_refused() {
    let scratch = Scratch::new();
    let barrier = Barrier::new(2);
    let done = Barrier::new(2);
    let start = || {
        barrier.wait();
        let outcome = Embedded::start(scratch.root());
        done.wait();
        outcome.map(drop)
    };
    let outcomes = thread::scope(|scope| {
        [scope.spawn(start), scope.spawn(start)].map(|one| one.join().unwrap())
    });
    let refused: Vec<_> = outcomes
        .iter()
        .filter_map(|outcome| outcome.as_ref().err())
        .collect();
    assert!(
        matches!(refused[..], [EmbeddedError::InUse { .. }]),
        "{outcomes:?}"
    );
}

#[test]
fn another_process_can_attach_while_the_server_runs() {
    let scratch = Scratch::new();
    assert!(Embedded::attach(scratch.root()).unwrap().is_none());
    let mut app = App::start(Some(&scratch.root()));
    app.ready();
    let options = Embedded::attach(scratch.root()).unwrap().unwrap();
    assert_eq!(ask(options, "SELECT current_database()::text"), "postgres");
    app.kill();
    eventually("nothing to attach to", || {
        Embedded::attach(scratch.root()).unwrap().is_none()
    });
}

#[test]
fn a_throw_away_cluster_has_its_settings_and_leaves_nothing() {
    let parent = Scratch::new();
    let server = Embedded::builder()
        .ephemeral_in(&parent.0)
        .setting("max_connections", "50")
        .setting("work_mem", "7MB")
        .start()
        .unwrap();
    let shown = |sql| ask(server.connect_options(), sql);
    assert_eq!(shown("SHOW max_connections"), "50");
    assert_eq!(shown("SHOW work_mem"), "7MB");
    assert_eq!(shown("SHOW fsync"), "off");
    assert_eq!(shown("SHOW synchronous_commit"), "on");
    assert_eq!(shown("SHOW listen_addresses"), "");
    let durable = Embedded::builder()
        .ephemeral_in(&parent.0)
        .fsync(true)
        .start()
        .unwrap();
    assert_eq!(ask(durable.connect_options(), "SHOW fsync"), "on");
    assert_eq!(
        ask(durable.connect_options(), "SHOW max_connections"),
        "300"
    );
    durable.stop().unwrap();
    drop(server);
    assert_eq!(fs::read_dir(&parent.0).unwrap().count(), 0);
}

#[test]
fn a_server_can_be_shared_by_the_tests_of_a_binary() {
    fn can_be_static<T: Send + Sync + 'static>() {}
    can_be_static::<Embedded>();
}

// Being killed -----------------------------------------------------------------------------------

#[test]
fn the_server_ends_with_its_app_and_the_next_start_works_at_once() {
    let scratch = Scratch::new();
    for round in 0..3 {
        let mut app = App::start(Some(&scratch.root()));
        let (pid, root) = app.ready();
        if round == 0 {
            let options = Embedded::attach(&root).unwrap().unwrap();
            tell(
                options,
                "CREATE TABLE kept (it text); INSERT INTO kept VALUES ('yes')",
            );
        }
        app.kill();
        if round == 1 {
            eventually("the server is gone", || !is_alive(pid));
        }
    }
    let server = quick(&scratch.root());
    assert_eq!(ask(server.connect_options(), "SELECT it FROM kept"), "yes");
}

#[test]
fn a_throw_away_cluster_is_gone_after_sigkill() {
    let mut app = App::start(None);
    let (pid, root) = app.ready();
    assert!(root.is_dir());
    app.kill();
    eventually("the server and its directory are gone", || {
        !is_alive(pid) && !root.exists()
    });
}

#[test]
fn killed_at_any_moment_of_its_start_an_app_is_in_nobodys_way() {
    let (scratch, parent) = (Scratch::new(), Scratch::new());
    // The pauses only choose the moment; whatever it hits, what is asserted below holds.
    let kill_after = |root: Option<&Path>, milliseconds| {
        let mut command = App::command(&env::current_exe().unwrap(), "stay", root);
        command.env("TMPDIR", &parent.0);
        let app = App::spawn(command);
        thread::sleep(Duration::from_millis(milliseconds));
        app.kill();
    };
    for milliseconds in [5, 40, 150, 400, 800] {
        kill_after(Some(&scratch.root()), milliseconds); // Mostly in `initdb`.
        kill_after(None, milliseconds);
    }
    quick(&scratch.root()).stop().unwrap();
    for milliseconds in [5, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100] {
        kill_after(Some(&scratch.root()), milliseconds); // In the start of the server.
    }
    let server = quick(&scratch.root());
    assert_eq!(ask(server.connect_options(), "SELECT 'works'"), "works");
    eventually("no throw-away cluster is left", || {
        fs::read_dir(&parent.0).unwrap().count() == 0
    });
}

#[test]
fn a_killed_postmaster_can_be_started_again() {
    let scratch = Scratch::new();
    let mut server = quick(&scratch.root());
    let options = server.connect_options();
    tell(
        options.clone(),
        "CREATE TABLE kept (it text); INSERT INTO kept VALUES ('yes')",
    );
    let first = server.pid().unwrap();
    server.kill().unwrap();
    assert_eq!((server.pid(), is_alive(first)), (None, false));
    server.restart().unwrap();
    assert_ne!(server.pid().unwrap(), first);
    assert_eq!(ask(options.clone(), "SELECT it FROM kept"), "yes");
    server.restart().unwrap();
    assert_eq!(ask(options, "SELECT it FROM kept"), "yes");
}

#[test]
fn a_stale_pid_file_with_the_number_of_somebody_else_is_no_obstacle() {
    let scratch = Scratch::new();
    let server = quick(&scratch.root());
    let socket_dir = server.socket_dir().to_owned();
    let pid_file = scratch.root().join("data/postmaster.pid");
    let server_pid = server.pid().unwrap().to_string();
    let text = fs::read_to_string(&pid_file).unwrap();
    let owner = fs::metadata(&pid_file).unwrap();
    server.stop().unwrap();
    // This very process is alive, and is no postmaster.
    let stale = text.replacen(&server_pid, &std::process::id().to_string(), 1);
    for file in [&pid_file, &socket_dir.join(".s.PGSQL.5432.lock")] {
        fs::write(file, &stale).unwrap();
        std::os::unix::fs::chown(file, Some(owner.uid()), Some(owner.gid())).unwrap();
    }
    assert!(Embedded::attach(scratch.root()).unwrap().is_none());
    let server = quick(&scratch.root());
    assert_eq!(ask(server.connect_options(), "SELECT 'works'"), "works");
}

// The machine around it --------------------------------------------------------------------------

#[test]
fn the_environment_does_not_leak_in() {
    let scratch = Scratch::new();
    let noise = [
        ("PGPORT", "1"),
        ("PGHOST", "nowhere.invalid"),
        ("PGHOSTADDR", "192.0.2.1"),
        ("PGSSLMODE", "verify-full"),
        ("PGSSLROOTCERT", "/nonexistent"),
        ("PGUSER", "stranger"),
        ("PGPASSWORD", "secret"),
        ("PGDATABASE", "elsewhere"),
        ("PGAPPNAME", "noise"),
        ("PGDATA", "/nonexistent"),
        ("PGTZ", "Asia/Tokyo"),
        ("PGDATESTYLE", "German"),
        ("PGCLIENTENCODING", "LATIN1"),
        (
            "PGOPTIONS",
            r"-c statement_timeout=9s --work-mem=9MB -cTimeZone=Asia/Tokyo -c a.b=c\ d",
        ),
        ("LANG", "xx_XX.UTF-8"),
        ("LC_ALL", "tr_TR.UTF-8"),
        ("LC_MESSAGES", "de_DE.UTF-8"),
        ("TZ", "Asia/Tokyo"),
    ];
    let mut command = App::command(&env::current_exe().unwrap(), "ask", Some(&scratch.root()));
    command.envs(noise);
    let answer = App::spawn(command).line("answer ");
    assert_eq!(answer, "postgres postgres UTF8 C 0 4MB UTC UTC 0");
}

#[test]
fn session_options_that_cannot_be_undone_are_refused() {
    let scratch = Scratch::new();
    let mut command = App::command(&env::current_exe().unwrap(), "ask", Some(&scratch.root()));
    command.env("PGOPTIONS", "-e").stderr(Stdio::piped());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("env -u PGOPTIONS"), "{said}");
}

#[test]
fn a_long_path_gets_a_short_private_socket_directory() {
    let scratch = Scratch::new();
    let root = scratch.0.join("d".repeat(90)).join("a, b");
    let server = quick(&root);
    assert_eq!(ask(server.connect_options(), "SELECT 'works'"), "works");
    let options = Embedded::attach(&root).unwrap().unwrap();
    assert_eq!(ask(options, "SELECT 'works'"), "works");
    let socket_dir = server.socket_dir().to_owned();
    assert!(!socket_dir.starts_with(&root) && socket_dir.as_os_str().len() < 90);
    assert_eq!(fs::metadata(&socket_dir).unwrap().mode() & 0o777, 0o700);
    server.stop().unwrap();

    // Anybody may make names where it stands. One that is open, or a link, is not taken.
    fs::set_permissions(&socket_dir, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(matches!(
        Embedded::start(&root),
        Err(EmbeddedError::Untrusted { .. })
    ));
    fs::remove_dir_all(&socket_dir).unwrap();
    symlink(&scratch.0, &socket_dir).unwrap();
    assert!(matches!(
        Embedded::start(&root),
        Err(EmbeddedError::Untrusted { .. })
    ));
    fs::remove_file(&socket_dir).unwrap();

    let ephemeral = Embedded::builder()
        .ephemeral_in(root.parent().unwrap())
        .start()
        .unwrap();
    let socket_dir = ephemeral.socket_dir().to_owned();
    assert!(socket_dir.is_dir());
    drop(ephemeral);
    assert!(!socket_dir.exists());
}

#[test]
fn data_of_another_major_version_is_refused_by_name() {
    let scratch = Scratch::new();
    quick(&scratch.root()).stop().unwrap();
    fs::write(scratch.root().join("data/PG_VERSION"), "7\n").unwrap();
    let refusal = Embedded::start(scratch.root()).unwrap_err();
    assert!(matches!(&refusal, EmbeddedError::Version { data_version, .. } if data_version == "7"));
    let message = refusal.to_string();
    assert!(
        message.contains("made by PostgreSQL 7, but what was found is PostgreSQL 1"),
        "{message}"
    );
}

#[test]
fn a_server_that_does_not_start_says_why() {
    let scratch = Scratch::new();
    let refusal = Embedded::builder()
        .data_root(scratch.root())
        .setting("max_connections", "many")
        .start()
        .unwrap_err();
    assert!(matches!(refusal, EmbeddedError::Start { .. }));
    assert!(
        refusal
            .to_string()
            .contains("invalid value for parameter \"max_connections\""),
        "{refusal}"
    );
    // And it is out of the way.
    Embedded::start(scratch.root()).unwrap();
}

#[test]
fn a_place_anybody_may_write_to_is_refused() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.root()).unwrap();
    fs::set_permissions(scratch.root(), fs::Permissions::from_mode(0o777)).unwrap();
    let refusal = Embedded::start(scratch.root()).unwrap_err();
    assert!(
        matches!(refusal, EmbeddedError::Untrusted { .. }),
        "{refusal}"
    );
}

#[test]
fn the_default_place_works_for_whoever_asks() {
    let root = default_data_root(&format!("embedded-it-{}", std::process::id()));
    Embedded::start(&root).unwrap().stop().unwrap();
    fs::remove_dir_all(root).unwrap();
}

// As root ----------------------------------------------------------------------------------------

#[test]
fn root_drops_to_another_user_and_says_when_that_one_is_locked_out() {
    let scratch = Scratch::new();
    if !is_root(&scratch) {
        return;
    }
    let server = quick(&scratch.root());
    let data_owner = fs::metadata(scratch.root().join("data")).unwrap().uid();
    assert_ne!(data_owner, 0);
    drop(server);

    let closed = scratch.0.join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
    let refusal = Embedded::start(closed.join("root")).unwrap_err();
    assert!(
        matches!(&refusal, EmbeddedError::Unreachable { at, .. } if *at == closed),
        "{refusal}"
    );

    // The owner of the directory is the one to drop to.
    let theirs = scratch.0.join("theirs");
    fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::chown(&theirs, Some(65_533), Some(65_533)).unwrap();
    if let Err(refusal) = Embedded::start(&theirs) {
        // A user without a name is one `initdb` does not take.
        assert!(
            refusal
                .to_string()
                .contains("could not look up effective user ID 65533"),
            "{refusal}"
        );
    }
    assert_eq!(fs::metadata(theirs.join("server.log")).unwrap().uid(), 0);
}

#[test]
fn an_ordinary_user_needs_nothing_from_root() {
    let scratch = Scratch::new();
    if !is_root(&scratch) || Command::new("setpriv").arg("--version").output().is_err() {
        return;
    }
    // The test binary may be where only root can go.
    let program = scratch.0.join("app");
    // Not by us: a file that a thread has open for writing while another forks cannot be run.
    let mut copy = Command::new("cp");
    copy.arg(env::current_exe().unwrap()).arg(&program);
    assert!(copy.status().unwrap().success());
    let home = scratch.0.join("home");
    fs::create_dir(&home).unwrap();
    let nobody = 65_534;
    std::os::unix::fs::chown(&home, Some(nobody), Some(nobody)).unwrap();
    for root in [Some(home.join("root")), None] {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(&program);
        App::arguments(&mut command, "stay", root.as_deref());
        command.current_dir("/").env("HOME", &home);
        let mut app = App::spawn(command);
        let (pid, root) = app.ready();
        assert_eq!(fs::metadata(root.join("data")).unwrap().uid(), nobody);
        app.kill();
        eventually("the server is gone", || !is_alive(pid));
    }
}
