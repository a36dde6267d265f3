//! The server's log, which is also the proof that no server is running.
//!
//! It is locked before it becomes the standard error of `initdb` and of the server. A lock of this
//! kind belongs to the open file, and all their processes share that: the lock is free when the
//! last of them is gone, even if the app, the supervisor or the postmaster were killed. So a start
//! that has the log knows that no old server, and no old `initdb`, still writes to the data.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use super::error::{Doing, EmbeddedError};
use super::supervisor::wait_until;

/// What the last starts said is kept, not the history of the machine.
const SIZE_LIMIT: u64 = 1 << 20;

/// The log, locked.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) path: PathBuf,
    file: File,
    start: u64,
}

impl Log {
    /// Takes the log, waiting for an old server that is still stopping. None when it does not.
    pub(super) fn take(path: PathBuf, limit: Duration) -> Result<Option<Log>, EmbeddedError> {
        let mut options = File::options();
        options.append(true).create(true).mode(0o600);
        let file = options.open(&path).doing("open", &path)?;
        if !lock_within(&file, limit).doing("lock", &path)? {
            return Ok(None);
        }
        let mut start = file.metadata().doing("read", &path)?.len();
        if start > SIZE_LIMIT {
            file.set_len(0).doing("truncate", &path)?;
            start = 0;
        }
        Ok(Some(Log { path, file, start }))
    }

    pub(super) fn stdio(&self) -> Result<Stdio, EmbeddedError> {
        Ok(self.file.try_clone().doing("open", &self.path)?.into())
    }

    /// The last lines since it was taken.
    pub(super) fn tail(&self) -> String {
        let all = fs::read(&self.path).unwrap_or_default();
        let new = all.get(self.start as usize..).unwrap_or_default();
        let text = String::from_utf8_lossy(new);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

/// Locks a file, waiting while somebody else has it; false if the time was up.
pub(super) fn lock_within(file: &File, limit: Duration) -> io::Result<bool> {
    let locked = wait_until(limit, || match file.try_lock() {
        Ok(()) => Some(Ok(true)),
        Err(TryLockError::WouldBlock) => None,
        Err(TryLockError::Error(error)) => Some(Err(error)),
    });
    locked.unwrap_or(Ok(false))
}
