//! Processor time, of this process and of the server's. A noisy machine makes everything slower, but
//! hardly makes work longer that is counted in processor time: where the two disagree, believe this.
//! Linux only; elsewhere there is none.

use std::fs;
use std::time::Duration;

/// What both sides have used up to now.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Used {
    pub(crate) client: Option<Duration>,
    pub(crate) server: Option<Duration>,
}

impl Used {
    /// Of this process, and of the processes that this postmaster has now. Connections stay open
    /// while something is measured, so none is lost.
    pub(crate) fn until_now(postmaster: Option<u32>) -> Self {
        Self {
            client: threads("self"),
            server: postmaster.and_then(children),
        }
    }

    pub(crate) fn total(self) -> Option<Duration> {
        Some(self.client? + self.server?)
    }

    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            client: difference(self.client, before.client),
            server: difference(self.server, before.server),
        }
    }
}

fn difference(after: Option<Duration>, before: Option<Duration>) -> Option<Duration> {
    Some(after?.saturating_sub(before?))
}

fn children(pid: u32) -> Option<Duration> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    Some(children.split_whitespace().filter_map(threads).sum())
}

fn threads(pid: &str) -> Option<Duration> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    Some(
        threads
            .flatten()
            .filter_map(|thread| thread_time(&thread.path()))
            .sum(),
    )
}

/// The first number in `schedstat`: nanoseconds on a processor.
fn thread_time(thread: &std::path::Path) -> Option<Duration> {
    let schedstat = fs::read_to_string(thread.join("schedstat")).ok()?;
    schedstat
        .split_whitespace()
        .next()?
        .parse()
        .ok()
        .map(Duration::from_nanos)
}
