//! A private PostgreSQL for development and tests, started by the program itself.
//!
//! `cargo run` and `cargo test` should work on a machine where nobody has set up a database. So,
//! when there is no `DATABASE_URL`, the program starts a PostgreSQL of its own on a directory, talks
//! to it over a Unix socket only, and takes it down again. The promise that makes this bearable is
//! that the server **ends with the program**, also when that is killed by SIGKILL, and that the next
//! start works at once.
//!
//! ```no_run
//! use idempotent_core::embedded::{Embedded, default_data_root};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // An app: the data stays, and is safe on disk when a commit returns.
//! let server = Embedded::start(default_data_root("rides"))?;
//! let options = server.connect_options();
//!
//! // A test binary: a throw-away cluster, gone when the process is.
//! let cluster = Embedded::ephemeral()?;
//! # Ok(()) }
//! ```
//!
//! How it is done, from the outside in:
//!
//! - `binaries` finds PostgreSQL, or unpacks one;
//! - `account` decides which user runs it, because PostgreSQL refuses to be root;
//! - `cluster` knows the directories, their locks, `initdb`, and what a killed server leaves behind;
//! - `supervisor` has the shells that take the server down when the app ends;
//! - `log` holds the lock by which a start knows that no old server is left;
//! - `postmaster` and `session` read what the server says, and keep the environment out.
//!
//! Everything here blocks: call it before the runtime starts, or in `spawn_blocking`. Deliberately
//! absent: TCP, passwords, upgrades between major versions, Windows. The same data root always has the
//! same connect options, so that a test may keep them over a [`kill`](Embedded::kill) and a
//! [`restart`](Embedded::restart).

mod account;
mod binaries;
mod cluster;
mod error;
mod log;
mod postmaster;
mod session;
mod supervisor;

use std::env;
use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sqlx::postgres::PgConnectOptions;
use uuid::Uuid;

use account::{Account, current_uid};
use binaries::Binaries;
use cluster::{Root, server_arguments};
use error::Doing;
pub use error::EmbeddedError;
use log::Log;
use postmaster::{Holder, Postmaster, holder};
use supervisor::{Janitor, STOP_LIMIT, Supervisor, signal};

/// A running PostgreSQL of our own. Dropping it stops the server and waits for that; so does the
/// end of the process, however it comes, except for the waiting.
#[derive(Debug)]
pub struct Embedded {
    // Dropped from top to bottom: the server ends, its directory goes if it is a throw-away one,
    // and only then may somebody else have the root.
    supervisor: Option<Supervisor>,
    janitor: Option<Janitor>,
    root: Root,
    socket_dir: PathBuf,
    binaries: Binaries,
    settings: Vec<(String, String)>,
    options: PgConnectOptions,
}

impl Embedded {
    /// Choices for a server; without any, the same as [`ephemeral`](Self::ephemeral).
    pub fn builder() -> Builder {
        Builder {
            place: Place::Ephemeral { parent: None },
            fsync: None,
            settings: Vec::new(),
        }
    }

    /// Starts a server whose data stay in `data_root`, which is created if need be.
    ///
    /// A server that an earlier, killed process left is waited for while it stops.
    pub fn start(data_root: impl Into<PathBuf>) -> Result<Embedded, EmbeddedError> {
        Self::builder().data_root(data_root).start()
    }

    /// Starts a throw-away server for tests: in the temporary directory, without fsync, for many
    /// connections. Its directory is removed when the process ends.
    pub fn ephemeral() -> Result<Embedded, EmbeddedError> {
        Self::builder().start()
    }

    /// Connect options for the server that another process has running on `data_root`, or None if
    /// none is ready there.
    pub fn attach(
        data_root: impl Into<PathBuf>,
    ) -> Result<Option<PgConnectOptions>, EmbeddedError> {
        let root = data_root.into();
        let root = match root.canonicalize() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            found => found.doing("open", &root)?,
        };
        let data = root.join("data");
        match fs::metadata(data.join("postmaster.pid")) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            found => found.doing("read", &data)?,
        };
        let Some(postmaster) = Postmaster::read(&data).filter(|postmaster| postmaster.ready) else {
            return Ok(None);
        };
        // The file may be a crash's; the socket, in a directory of ours, does not answer by itself.
        let closed = [ErrorKind::NotFound, ErrorKind::ConnectionRefused];
        match UnixStream::connect(postmaster.socket()) {
            Err(error) if closed.contains(&error.kind()) => return Ok(None),
            connected => connected.doing("connect to", &postmaster.socket())?,
        };
        let account = Account::for_root(&root)?;
        session::connect_options(&data, &postmaster, &account).map(Some)
    }

    /// Options to connect as the superuser to the database `postgres`, whatever the environment
    /// says. Use `.database(..)` on them for another one.
    pub fn connect_options(&self) -> PgConnectOptions {
        self.options.clone()
    }

    /// The directory that holds everything of this server.
    pub fn data_root(&self) -> &Path {
        &self.root.path
    }

    /// The directory of the Unix socket, for `psql -h`.
    pub fn socket_dir(&self) -> &Path {
        &self.socket_dir
    }

    /// The server's version, such as `15.8`.
    pub fn version(&self) -> &str {
        &self.binaries.version
    }

    /// The postmaster's process, or None while it is not running.
    pub fn pid(&self) -> Option<u32> {
        match holder(&self.root.data()) {
            Holder::Server(pid) => Some(pid),
            Holder::Gone | Holder::Foreign => None,
        }
    }

    /// Stops the server and waits until its last process is gone. Dropping does the same, but
    /// keeps a failure to itself.
    pub fn stop(mut self) -> Result<(), EmbeddedError> {
        self.take_down().map(drop)
    }

    /// Kills the postmaster by SIGKILL, as a crash of the database would, and waits until its
    /// processes are gone. For drills and tests; [`restart`](Self::restart) brings it back.
    pub fn kill(&mut self) -> Result<(), EmbeddedError> {
        if let Some(pid) = self.pid() {
            signal(pid, "KILL");
        }
        self.take_down().map(drop)
    }

    /// Stops the server, if it runs, and starts it again. The connect options stay valid.
    pub fn restart(&mut self) -> Result<(), EmbeddedError> {
        let log = self.take_down()?;
        self.bring_up(log)
    }

    /// Ends the server; the log is free when all its processes are gone.
    fn take_down(&mut self) -> Result<Log, EmbeddedError> {
        drop(self.supervisor.take());
        let log = self.root.path.join("server.log");
        if let Some(log) = Log::take(log, STOP_LIMIT)? {
            return Ok(log);
        }
        // Somebody killed the supervisor, so nobody has told the server.
        if let Some(pid) = self.pid() {
            signal(pid, "QUIT");
        }
        self.root.take_log()
    }

    fn bring_up(&mut self, log: Log) -> Result<(), EmbeddedError> {
        self.root.recover(&self.socket_dir)?;
        let mut server = Command::new(self.binaries.program("postgres"));
        server.args(server_arguments(
            &self.root.data(),
            &self.socket_dir,
            &self.settings,
        ));
        let output = output(self.janitor.as_ref(), &log)?;
        let mut supervisor = Supervisor::spawn(&server, &self.root.account, output, log.stdio()?)?;
        let postmaster = self.root.await_ready(&mut supervisor, &log)?;
        self.supervisor = Some(supervisor);
        self.options =
            session::connect_options(&self.root.data(), &postmaster, &self.root.account)?;
        Ok(())
    }
}

/// Standard output: what a janitor waits for, or the log.
fn output(janitor: Option<&Janitor>, log: &Log) -> Result<Stdio, EmbeddedError> {
    match janitor {
        Some(janitor) => janitor.hold().doing("open", &log.path),
        None => log.stdio(),
    }
}

/// Choices for a private PostgreSQL; see [`Embedded::builder`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it is started"]
pub struct Builder {
    place: Place,
    fsync: Option<bool>,
    settings: Vec<(String, String)>,
}

#[derive(Clone, Debug)]
enum Place {
    Root(PathBuf),
    Ephemeral { parent: Option<PathBuf> },
}

impl Builder {
    /// Keeps the data in this directory, and locks it against a second server.
    pub fn data_root(mut self, path: impl Into<PathBuf>) -> Builder {
        self.place = Place::Root(path.into());
        self
    }

    /// Makes a throw-away server in a new directory below `parent` rather than below the temporary
    /// directory: a benchmark wants a real disk.
    pub fn ephemeral_in(mut self, parent: impl Into<PathBuf>) -> Builder {
        let parent = Some(parent.into());
        self.place = Place::Ephemeral { parent };
        self
    }

    /// Whether a commit waits for the disk. On, unless the server is a throw-away one.
    pub fn fsync(mut self, fsync: bool) -> Builder {
        self.fsync = Some(fsync);
        self
    }

    /// Sets a PostgreSQL setting, such as `max_connections`. It wins over the configuration files
    /// and over what a throw-away server has by default.
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Builder {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Starts the server and waits until it takes connections.
    pub fn start(self) -> Result<Embedded, EmbeddedError> {
        let (path, janitor) = match self.place {
            Place::Root(path) => (path, None),
            Place::Ephemeral { parent } => {
                let path = new_directory(parent)?;
                let socket = cluster::socket_place(&path, &Account::for_root(&path)?);
                // First the janitor, then what it removes: killed in between, nothing is left.
                let janitor = Janitor::spawn(&[path.clone(), socket])?;
                let made = DirBuilder::new().mode(0o700).create(&path);
                made.doing("create", &path)?;
                (path, Some(janitor))
            }
        };
        let root = Root::take(&path)?;
        let fsync = self.fsync.unwrap_or(janitor.is_none());
        let mut settings = vec![("fsync", if fsync { "on" } else { "off" })];
        if janitor.is_some() {
            // Many tests, each with a few connections and little data.
            settings.extend([("max_connections", "300"), ("shared_buffers", "32MB")]);
        }
        let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        let settings = settings
            .into_iter()
            .map(owned)
            .chain(self.settings)
            .collect();

        let log = root.take_log()?;
        // Throw-away clusters share what was unpacked.
        let unpack_root = || match &janitor {
            Some(_) => default_data_root("embedded-postgres"),
            None => root.path.clone(),
        };
        let binaries = binaries::find(&root.data(), &root.account, unpack_root)?;
        root.initialize(&binaries, fsync, output(janitor.as_ref(), &log)?, &log)?;
        let socket_dir = root.socket_dir()?;
        let mut embedded = Embedded {
            supervisor: None,
            janitor,
            root,
            socket_dir,
            binaries,
            settings,
            options: PgConnectOptions::new_without_pgpass(),
        };
        embedded.bring_up(log)?;
        Ok(embedded)
    }
}

/// The name of a new directory for a throw-away server, somewhere that the server's user can reach.
/// Nobody else has it or will: so whoever removes it later can be started before it is made.
fn new_directory(parent: Option<PathBuf>) -> Result<PathBuf, EmbeddedError> {
    let parent = match parent {
        Some(parent) => parent,
        None => {
            let account = Account::for_root(Path::new("/"))?;
            let places = [env::temp_dir(), PathBuf::from("/var/tmp")];
            let open = places
                .into_iter()
                .find(|place| account.blocked_at(place).is_none());
            open.unwrap_or_else(|| PathBuf::from("/tmp"))
        }
    };
    let parent = parent.canonicalize().doing("open", &parent)?;
    Ok(parent.join(format!("pg-{}", Uuid::new_v4().simple())))
}

/// Where an app keeps its data if it was not told: `$XDG_DATA_HOME`, else `~/.local/share`, if that
/// is ours and the server can reach it; else `/var/tmp`, which is where root ends up, because
/// nobody else may enter root's home.
pub fn default_data_root(app: &str) -> PathBuf {
    let uid = current_uid().unwrap_or_default();
    let suits = |path: &PathBuf| {
        let nearest = path.ancestors().find_map(|step| fs::metadata(step).ok());
        path.is_absolute()
            && nearest.is_some_and(|found| found.uid() == uid)
            && Account::for_root(path).is_ok_and(|account| account.blocked_at(path).is_none())
    };
    [("XDG_DATA_HOME", ""), ("HOME", ".local/share")]
        .into_iter()
        .filter_map(|(name, below)| Some(PathBuf::from(env::var_os(name)?).join(below).join(app)))
        .find(suits)
        .unwrap_or_else(|| PathBuf::from(format!("/var/tmp/{app}-{uid}")))
}
