//! What can go wrong with a private PostgreSQL, each with what to do about it.

use std::io;
use std::path::{Path, PathBuf};

/// Why a private PostgreSQL could not be started, reached or stopped.
///
/// Every message says what happened and what to do next, because it is usually the first thing a
/// newcomer sees when a first `cargo run` does not work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbeddedError {
    /// No PostgreSQL is installed, and none could be unpacked.
    #[error(
        "no PostgreSQL was found and none could be unpacked ({reason}). Install one \
         (`apt install postgresql`, `brew install postgresql`), point PG_BIN_DIR at the directory \
         that holds `postgres` and `initdb`, or set DATABASE_URL to use a running database"
    )]
    NotFound {
        /// Why unpacking one failed.
        reason: String,
    },
    /// `PG_BIN_DIR` points at a directory without usable binaries.
    #[error(
        "PG_BIN_DIR is {}, which does not work: {reason}. Point it at the directory that holds \
         `postgres` and `initdb`, or unset it to have them searched for", dir.display()
    )]
    BinDir {
        /// What `PG_BIN_DIR` says.
        dir: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The data was written by a major version of which there are no binaries.
    #[error(
        "the data in {} was made by PostgreSQL {data_version}, but what was found is {found}. \
         Install PostgreSQL {data_version} or point PG_BIN_DIR at it (then `pg_dump` and \
         `pg_upgrade` can move the data), or move the directory away to start empty", data.display()
    )]
    Version {
        /// The data directory.
        data: PathBuf,
        /// Its major version, from its `PG_VERSION`.
        data_version: String,
        /// The versions that were found, with their directories.
        found: String,
    },
    /// Another process has this data root.
    #[error(
        "{} is in use by another process{}. Stop that one, give this one a directory of its own, \
         or set DATABASE_URL", root.display(), process(*pid)
    )]
    InUse {
        /// The data root.
        root: PathBuf,
        /// The process that has it, if it said so.
        pid: Option<u32>,
    },
    /// An earlier server still runs on this data root although its app is gone.
    #[error(
        "an earlier PostgreSQL{} still runs on {} and did not end in time. Stop it with \
         `kill -INT` and start again", process(*pid), root.display()
    )]
    StillRunning {
        /// The data root.
        root: PathBuf,
        /// The server's process, if known.
        pid: Option<u32>,
    },
    /// PostgreSQL refuses to run as root, and the user it would run as cannot reach the data.
    #[error(
        "PostgreSQL cannot run as root and would run as `{user}`, who cannot enter {} and so \
         cannot reach {}. Choose a data directory elsewhere, for example below /var/tmp or \
         /var/lib, or run as an ordinary user", at.display(), root.display()
    )]
    Unreachable {
        /// The data root.
        root: PathBuf,
        /// The directory that is closed to the user.
        at: PathBuf,
        /// The user the server would run as.
        user: String,
    },
    /// A directory that must be private belongs to somebody else, or is not a directory.
    #[error(
        "{} cannot be trusted with data: {reason}. Remove it or choose another directory",
        path.display()
    )]
    Untrusted {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The process is root, and there is no ordinary user to run the server as.
    #[error(
        "PostgreSQL cannot run as root, and neither `postgres` nor `nobody` is a user here. \
         Create a user, or make the data directory belong to one"
    )]
    NoUser,
    /// `initdb` failed.
    #[error("`initdb` failed ({reason}). It said:\n{log}")]
    Initdb {
        /// How it ended.
        reason: String,
        /// The last lines of its output.
        log: String,
    },
    /// The server did not come up.
    #[error("PostgreSQL did not start: {reason}. The end of {}:\n{log}", path.display())]
    Start {
        /// How it ended, or that the time was up.
        reason: String,
        /// The server's log.
        path: PathBuf,
        /// The last lines of it.
        log: String,
    },
    /// `PGOPTIONS` is set to something whose effect cannot be undone.
    #[error(
        "PGOPTIONS is `{options}`, which would change every session of the private PostgreSQL; \
         only `-c name=value` can be undone. Unset it (`env -u PGOPTIONS …`)"
    )]
    SessionOptions {
        /// What `PGOPTIONS` says.
        options: String,
    },
    /// The operating system refused something.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which file or program.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

fn process(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" (process {pid})"))
        .unwrap_or_default()
}

/// Says what was being done to which path, which `io::Error` does not.
pub(super) trait Doing<T> {
    fn doing(self, doing: &'static str, path: &Path) -> Result<T, EmbeddedError>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, doing: &'static str, path: &Path) -> Result<T, EmbeddedError> {
        self.map_err(|source| EmbeddedError::Io {
            doing,
            path: path.to_owned(),
            source,
        })
    }
}
