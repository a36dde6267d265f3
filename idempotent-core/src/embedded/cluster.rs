//! The directories of a private PostgreSQL: whose they are, what is in them, and how a server is
//! started on them.
//!
//! ```text
//! root/              ours, 0700; others may enter it if the server runs as another user
//!   lock             held by the app while it runs; holds its process id
//!   server.log       held by the server's processes while one of them lives
//!   data/            PostgreSQL's own, 0700
//!   data.new/        an `initdb` that is not finished, or was killed
//!   socket/          the Unix socket, 0700; elsewhere if its path would be too long
//!   postgresql-*/    binaries, if none were installed
//! ```

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::account::{Account, current_uid, private_directory};
use super::binaries::Binaries;
use super::error::{Doing, EmbeddedError};
use super::log::{Log, lock_within};
use super::postmaster::{Holder, Postmaster, holder};
use super::supervisor::{STOP_LIMIT, Supervisor, clear_environment, wait_until};

/// The longest path of a Unix socket: 108 bytes on Linux, 104 elsewhere, with a closing zero.
const SOCKET_PATH_LIMIT: usize = if cfg!(target_os = "linux") { 107 } else { 103 };

/// How long a server may take to be ready. Mostly well under a second; the replay of a large log
/// after a crash takes longer.
const START_LIMIT: Duration = Duration::from_secs(60);

pub(super) const SUPERUSER: &str = "postgres";

/// A data root, locked.
#[derive(Debug)]
pub(super) struct Root {
    pub(super) path: PathBuf,
    pub(super) account: Account,
    _lock: File,
}

impl Root {
    /// Creates the root if need be, checks that it may be trusted, and takes its lock.
    pub(super) fn take(path: &Path) -> Result<Root, EmbeddedError> {
        let (path, account) = private_directory(path)?;
        let lock = instance_lock(&path)?;
        Ok(Root {
            path,
            account,
            _lock: lock,
        })
    }

    pub(super) fn data(&self) -> PathBuf {
        self.path.join("data")
    }

    /// Takes the server's log, which waits until no process of an old server is left.
    pub(super) fn take_log(&self) -> Result<Log, EmbeddedError> {
        let log = Log::take(self.path.join("server.log"), STOP_LIMIT)?;
        let data = self.data();
        // Someone may also have started a server on this data by hand.
        let free = || (!matches!(holder(&data), Holder::Server(_))).then_some(());
        match log {
            Some(log) if wait_until(STOP_LIMIT, free).is_some() => Ok(log),
            _ => Err(EmbeddedError::StillRunning {
                root: self.path.clone(),
                pid: Postmaster::read(&data).map(|postmaster| postmaster.pid),
            }),
        }
    }

    /// Runs `initdb` if there is no data yet. It works in `data.new`, so that what is called
    /// `data` is always complete.
    pub(super) fn initialize(
        &self,
        binaries: &Binaries,
        fsync: bool,
        output: Stdio,
        log: &Log,
    ) -> Result<(), EmbeddedError> {
        let (data, new) = (self.data(), self.path.join("data.new"));
        if data.join("PG_VERSION").exists() {
            return Ok(());
        }
        if new.exists() {
            fs::remove_dir_all(&new).doing("remove", &new)?;
        }
        DirBuilder::new()
            .mode(0o700)
            .create(&new)
            .doing("create", &new)?;
        self.account.give(&new)?;
        let initdb = binaries.program("initdb");
        let mut command = Command::new(&initdb);
        command
            .arg("--pgdata")
            .arg(&new)
            .args(["--username", SUPERUSER, "--encoding=UTF8"]);
        command.args(["--locale=C", "--auth-local=trust", "--auth-host=reject"]);
        if !fsync {
            command.arg("--no-sync");
        }
        clear_environment(&mut command);
        self.account.apply(&mut command);
        command.current_dir("/").process_group(0);
        command
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(log.stdio()?);
        let status = command.status().doing("run", &initdb)?;
        if !status.success() {
            return Err(EmbeddedError::Initdb {
                reason: status.to_string(),
                log: log.tail(),
            });
        }
        fs::rename(&new, &data).doing("rename", &new)?;
        File::open(&self.path)
            .and_then(|root| root.sync_all())
            .doing("sync", &self.path)
    }

    /// Makes the directory for the socket, or checks the one that is there.
    pub(super) fn socket_dir(&self) -> Result<PathBuf, EmbeddedError> {
        let dir = socket_place(&self.path, &self.account);
        match DirBuilder::new().mode(0o700).create(&dir) {
            Ok(()) => self.account.give(&dir)?,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => self.check_private(&dir)?,
            Err(error) => return Err(error).doing("create", &dir),
        }
        Ok(dir)
    }

    /// In a place where anybody may create names, only a directory that is ours and closed to
    /// others is ours; a link is not a directory.
    fn check_private(&self, dir: &Path) -> Result<(), EmbeddedError> {
        let found = fs::symlink_metadata(dir).doing("read", dir)?;
        let untrusted = |reason: &str| {
            let reason = reason.to_owned();
            Err(EmbeddedError::Untrusted {
                path: dir.to_owned(),
                reason,
            })
        };
        if !found.is_dir() {
            return untrusted("it is not a directory");
        }
        if found.uid() != self.account.uid && found.uid() != current_uid()? {
            return untrusted("it belongs to somebody else");
        }
        if found.mode() & 0o077 != 0 {
            return untrusted("it is open to others");
        }
        // A start that was killed may have left it without handing it over.
        self.account.give(dir)
    }

    /// Removes what a killed server left and a new one would stumble over: PostgreSQL refuses to
    /// start if the process number in a lock file is in use, by whomever. Called with the log
    /// taken, when no server of ours is left.
    pub(super) fn recover(&self, socket_dir: &Path) -> Result<(), EmbeddedError> {
        let mut stale = vec![
            socket_dir.join(format!(".s.PGSQL.{PORT}")),
            socket_dir.join(format!(".s.PGSQL.{PORT}.lock")),
        ];
        if holder(&self.data()) == Holder::Foreign {
            stale.push(self.data().join("postmaster.pid"));
        }
        for file in stale {
            match fs::remove_file(&file) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(error).doing("remove", &file);
                }
                _ => (),
            }
        }
        Ok(())
    }

    /// Waits until the server takes connections, or says why it does not.
    pub(super) fn await_ready(
        &self,
        supervisor: &mut Supervisor,
        log: &Log,
    ) -> Result<Postmaster, EmbeddedError> {
        let data = self.data();
        let outcome = wait_until(START_LIMIT, || {
            if let Some(status) = supervisor.ended() {
                return Some(Err(format!("it ended with {status}")));
            }
            let postmaster = Postmaster::read(&data).filter(|postmaster| postmaster.ready)?;
            UnixStream::connect(postmaster.socket())
                .is_ok()
                .then_some(Ok(postmaster))
        });
        let late = || Err(format!("it was not ready after {START_LIMIT:?}"));
        outcome
            .unwrap_or_else(late)
            .map_err(|reason| EmbeddedError::Start {
                reason,
                path: log.path.clone(),
                log: log.tail(),
            })
    }
}

/// The port is only a part of the socket's name.
pub(super) const PORT: u16 = 5432;

/// The server's command line. What stands here wins over the configuration files.
pub(super) fn server_arguments(
    data: &Path,
    socket_dir: &Path,
    settings: &[(String, String)],
) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["-D".into(), data.into()];
    let mut set = |name: &str, value: &str| {
        arguments.push("-c".into());
        arguments.push(format!("{name}={value}").into());
    };
    set("listen_addresses", "");
    set("port", &PORT.to_string());
    set("unix_socket_permissions", "0700");
    // The log is our standard error, whatever the configuration says: its lock shows who lives.
    set("logging_collector", "off");
    set("log_destination", "stderr");
    for (name, value) in settings {
        set(name, value);
    }
    arguments.push("-k".into());
    arguments.push(socket_dir.into());
    arguments
}

/// The lock that keeps a second app away. It ends with the process that holds it; the server does
/// not inherit it.
fn instance_lock(root: &Path) -> Result<File, EmbeddedError> {
    let path = root.join("lock");
    let mut options = File::options();
    options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600);
    let mut lock = options.open(&path).doing("open", &path)?;
    // Not at once: a child that this or a killed app was just starting has a copy until its exec.
    if !lock_within(&lock, Duration::from_secs(1)).doing("lock", &path)? {
        let holder = fs::read_to_string(&path).unwrap_or_default();
        let (root, pid) = (root.to_owned(), holder.trim().parse().ok());
        return Err(EmbeddedError::InUse { root, pid });
    }
    lock.set_len(0).doing("write", &path)?;
    writeln!(lock, "{}", std::process::id()).doing("write", &path)?;
    Ok(lock)
}

/// Where the socket belongs. A path that is too long for a socket, or that PostgreSQL would take
/// for a list, gets a short stand-in in the temporary directory.
pub(super) fn socket_place(root: &Path, account: &Account) -> PathBuf {
    let dir = root.join("socket");
    if fits_a_socket(&dir) {
        return dir;
    }
    let name = short_name(root);
    let temporary = std::env::temp_dir().join(&name);
    match fits_a_socket(&temporary) && account.blocked_at(&temporary).is_none() {
        true => temporary,
        false => Path::new("/tmp").join(&name),
    }
}

/// Whether PostgreSQL and the driver can use this directory for a socket as it is.
fn fits_a_socket(dir: &Path) -> bool {
    let length = dir.as_os_str().len() + format!("/.s.PGSQL.{PORT}").len();
    // PostgreSQL reads a list of directories, and the driver wants UTF-8.
    length <= SOCKET_PATH_LIMIT && dir.to_str().is_some_and(|dir| !dir.contains([',', '"']))
}

fn short_name(root: &Path) -> String {
    let digest = Sha256::digest(root.as_os_str().as_encoded_bytes());
    digest
        .iter()
        .take(8)
        .fold("pg-".to_owned(), |name, byte| format!("{name}{byte:02x}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_path_fits_up_to_its_last_byte() {
        let dir = |length: usize| PathBuf::from(format!("/{}", "d".repeat(length - 1)));
        let longest = SOCKET_PATH_LIMIT - "/.s.PGSQL.5432".len();
        assert!(fits_a_socket(&dir(longest)));
        assert!(!fits_a_socket(&dir(longest + 1)));
        assert!(!fits_a_socket(Path::new("/srv/a,b/socket")));
        assert!(fits_a_socket(
            &Path::new("/tmp").join(short_name(&dir(300)))
        ));
        assert_ne!(short_name(&dir(300)), short_name(&dir(301)));
    }
}
