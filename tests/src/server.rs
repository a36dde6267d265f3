//! The real program as a child process: started, killed, frozen and stopped as an operating system
//! does it.
//!
//! The program is another package's binary, so cargo does not tell where it is, nor builds it for
//! these tests. It is built once per test process, with the profile and in the target directory of
//! the test that runs.

use std::env;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time;

/// How long a child may take to say where it listens, and to end after SIGTERM.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often a child is looked at that is expected to end.
const GLANCE: Duration = Duration::from_millis(5);

/// What a child keeps of the tests' environment: no database, no settings of the program.
const KEPT: [&str; 6] = [
    "PATH",
    "HOME",
    "USER",
    "TMPDIR",
    "RUST_BACKTRACE",
    "LLVM_PROFILE_FILE",
];

/// What to start.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    binary: Option<PathBuf>,
    command: Option<&'static str>,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
}

impl ServerConfig {
    /// `rides-app serve` on this database.
    #[must_use]
    pub fn serve(database_url: &str) -> Self {
        Self::command("serve").env("DATABASE_URL", database_url)
    }

    /// `rides-app gateway` on this database.
    #[must_use]
    pub fn gateway(database_url: &str) -> Self {
        Self::command("gateway").env("DATABASE_URL", database_url)
    }

    /// Any command that takes `--listen` and says where it listens. Without `DATABASE_URL` it
    /// starts its own database.
    #[must_use]
    pub fn command(command: &'static str) -> Self {
        Self {
            binary: None,
            command: Some(command),
            args: Vec::new(),
            env: Vec::new(),
        }
    }

    /// A program without commands that takes `--listen` and says where it listens.
    #[must_use]
    pub fn program(path: impl Into<PathBuf>) -> Self {
        Self {
            binary: Some(path.into()),
            command: None,
            args: Vec::new(),
            env: Vec::new(),
        }
    }

    /// Another program than the workspace's `rides-app`.
    #[must_use]
    pub fn binary(mut self, path: impl Into<PathBuf>) -> Self {
        self.binary = Some(path.into());
        self
    }

    /// One more argument.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// More arguments.
    #[must_use]
    pub fn args(mut self, args: impl IntoIterator<Item: Into<OsString>>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// One more variable.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }
}

/// A running child. It is killed when dropped, and what it wrote is shown if the test fails.
pub struct Server {
    child: Child,
    address: String,
    output: Output,
}

impl Server {
    /// Starts it and waits until it says where it listens.
    pub async fn start(config: ServerConfig) -> Self {
        let binary = match config.binary.clone() {
            Some(binary) => binary,
            None => spawn_blocking(|| binary().to_owned())
                .await
                .expect("rides-app is built"),
        };
        let mut command = Command::new(&binary);
        command.env_clear().envs(
            KEPT.iter()
                .filter_map(|name| Some((name, env::var_os(name)?))),
        );
        command
            .args(config.command)
            .args(["--listen", "127.0.0.1:0"])
            .args(&config.args);
        command
            .envs(config.env)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{} cannot be started: {error}", binary.display()));

        let output = Output::default();
        let (announce, mut announced) = watch::channel(None);
        let stdout = child.stdout.take().expect("stdout is a pipe");
        let stderr = child.stderr.take().expect("stderr is a pipe");
        let of_gateway = config.command == Some("gateway");
        output.gather(stdout, move |line| {
            if announce.borrow().is_none()
                && let Some(address) = announced_address(line)
                && (of_gateway || !line.contains("gateway"))
            {
                announce.send_replace(Some(address));
            }
        });
        let (open, mut closed) = watch::channel(());
        output.gather(stderr, move |_| _ = &open);

        // From here on a panic kills the child.
        let mut server = Self {
            child,
            address: String::new(),
            output,
        };
        // The sender is gone when stdout has ended: the child has failed.
        let address = match time::timeout(PATIENCE, announced.wait_for(Option::is_some)).await {
            Ok(Ok(address)) => address.clone(),
            _ => None,
        };
        let Some(address) = address else {
            let ended = time::timeout(Duration::from_secs(1), server.wait()).await;
            let _ = time::timeout(Duration::from_secs(1), closed.changed()).await;
            panic!(
                "`{} {}` does not say where it listens ({ended:?}):\n{}",
                binary.display(),
                config.command.unwrap_or_default(),
                server.output()
            );
        };
        server.address = address;
        server
    }

    /// The URL of a path that begins with a slash.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.address)
    }

    /// The operating system's number for it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it wrote until now, standard output and standard error together.
    #[must_use]
    pub fn output(&self) -> String {
        self.output.lines().join("\n")
    }

    /// Kills it by SIGKILL and waits until it is dead.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().expect("a child can be waited for");
    }

    /// Asks it to stop by SIGTERM, and waits until it has.
    pub async fn terminate(&mut self) -> ExitStatus {
        self.signal("TERM");
        let ended = time::timeout(PATIENCE, self.wait()).await;
        ended.unwrap_or_else(|_| panic!("still running {PATIENCE:?} after SIGTERM"))
    }

    /// Asks it to stop as Ctrl-C does, and waits until it has.
    pub async fn interrupt(&mut self) -> ExitStatus {
        self.signal("INT");
        let ended = time::timeout(PATIENCE, self.wait()).await;
        ended.unwrap_or_else(|_| panic!("still running {PATIENCE:?} after SIGINT"))
    }

    /// Freezes it: it holds what it holds, and does not know of the time that passes.
    pub fn freeze(&self) {
        self.signal("STOP");
    }

    /// Lets it go on after [`freeze`](Self::freeze).
    pub fn thaw(&self) {
        self.signal("CONT");
    }

    /// Waits until it has ended by itself.
    pub async fn wait(&mut self) -> ExitStatus {
        loop {
            if let Some(status) = self.child.try_wait().expect("a child can be waited for") {
                return status;
            }
            time::sleep(GLANCE).await;
        }
    }

    fn signal(&self, signal: &str) {
        // The shell's own kill: not every machine has it as a program.
        let kill = format!("kill -s {signal} {}", self.pid());
        let sent = Command::new("sh").args(["-c", &kill]).status();
        assert!(
            sent.is_ok_and(|status| status.success()),
            "no SIG{signal} was sent"
        );
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A frozen child dies of SIGKILL too.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("--- what the child wrote ---\n{}\n---", self.output());
        }
    }
}

/// A client for tests: no proxy of the environment, no redirects, and a bounded wait.
#[must_use]
pub fn http() -> reqwest::Client {
    reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .timeout(PATIENCE)
        .build()
        .expect("a client without TLS")
}

/// Serves a router in this process, on a port of its own; the URL of its root.
pub async fn serve(router: axum::Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    tokio::spawn(async move { axum::serve(listener, router).await.expect("it serves") });
    format!("http://{address}")
}

/// Where a line says that the program listens.
fn announced_address(line: &str) -> Option<String> {
    const START: &str = "http://127.0.0.1:";
    let (_, rest) = line.split_once(START)?;
    let port: String = rest.chars().take_while(char::is_ascii_digit).collect();
    (!port.is_empty()).then(|| format!("{START}{port}"))
}

/// What a child writes, line by line.
#[derive(Clone, Default)]
struct Output(Arc<Mutex<Vec<String>>>);

impl Output {
    /// Reads a stream to its end on a thread: a child whose pipe is full stands still.
    fn gather(
        &self,
        stream: impl Read + Send + 'static,
        mut seen: impl FnMut(&str) + Send + 'static,
    ) {
        let output = self.clone();
        thread::spawn(move || {
            for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                output.lines().push(line.clone());
                seen(&line);
            }
        });
    }

    fn lines(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The path of the workspace's `rides-app`, built.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        // The test is target/[triple/]profile/deps/name, the program
        // target/[triple/]profile/rides-app.
        let test = env::current_exe().expect("a test knows its own path");
        let directory = test
            .ancestors()
            .nth(2)
            .expect("a test lies in a target directory");
        build(directory);
        let binary = directory.join(format!("rides-app{}", env::consts::EXE_SUFFIX));
        assert!(binary.is_file(), "cargo built no {}", binary.display());
        binary
    })
}

/// Builds the program into `directory`. Cargo holds no lock while it runs tests.
fn build(directory: &Path) {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("a member of a workspace");
    let name = |path: &Path| {
        path.file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    };
    let profile = match name(directory).as_str() {
        "debug" => "dev".to_owned(),
        profile => profile.to_owned(),
    };
    let parent = directory
        .parent()
        .expect("a profile lies in a target directory");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .current_dir(workspace)
        .args(["build", "--quiet", "--profile", &profile]);
    // Both packages are selected so that the dependencies have the features, and so the artifacts,
    // of the test's own build.
    cargo.args(["-p", "tests", "-p", "rides-app", "--bin", "rides-app"]);
    if parent.join("CACHEDIR.TAG").is_file() {
        cargo.arg("--target-dir").arg(parent);
    } else {
        let target = parent
            .parent()
            .expect("a triple lies in a target directory");
        cargo
            .args(["--target", &name(parent)])
            .arg("--target-dir")
            .arg(target);
    }
    let started = Instant::now();
    let output = cargo.output().expect("cargo can be run");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "rides-app cannot be built ({:?}):\n{errors}",
        started.elapsed()
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_found_in_its_line() {
        let found = announced_address("listening on http://127.0.0.1:4711/, stop with Ctrl-C");
        assert_eq!(found.as_deref(), Some("http://127.0.0.1:4711"));
        assert_eq!(announced_address("listening on http://127.0.0.1:"), None);
        assert_eq!(announced_address("starting PostgreSQL"), None);
    }
}
