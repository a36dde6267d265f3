//! What a data directory says about the server that runs on it, and whether that is true.
//!
//! `postmaster.pid` survives a crash, and by then its number may belong to somebody else: to a
//! shell, or in a container to the app itself. PostgreSQL believes such a file; we look.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The lines of `postmaster.pid` that matter here.
#[derive(Debug, PartialEq)]
pub(super) struct Postmaster {
    pub(super) pid: u32,
    pub(super) port: u16,
    pub(super) socket_dir: PathBuf,
    pub(super) ready: bool,
}

impl Postmaster {
    /// Reads the file in `data`; None if there is none or it is not complete yet.
    pub(super) fn read(data: &Path) -> Option<Postmaster> {
        Self::parse(&fs::read_to_string(data.join("postmaster.pid")).ok()?)
    }

    fn parse(text: &str) -> Option<Postmaster> {
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        Some(Postmaster {
            pid: lines.first()?.parse().ok()?,
            port: lines.get(3)?.parse().ok()?,
            socket_dir: PathBuf::from(lines.get(4)?),
            ready: lines.get(7) == Some(&"ready"),
        })
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.socket_dir.join(format!(".s.PGSQL.{}", self.port))
    }
}

/// What the number in a `postmaster.pid` stands for.
#[derive(Debug, PartialEq)]
pub(super) enum Holder {
    /// Nothing: the file is absent or its process is gone. PostgreSQL deals with both.
    Gone,
    /// A process that has nothing to do with this data.
    Foreign,
    /// A server on this very data.
    Server(u32),
}

pub(super) fn holder(data: &Path) -> Holder {
    let text = fs::read_to_string(data.join("postmaster.pid")).unwrap_or_default();
    match text
        .lines()
        .next()
        .and_then(|line| line.trim().parse().ok())
    {
        None => Holder::Gone,
        Some(pid) => judge(pid, Process::look_up(pid), data),
    }
}

/// What can be seen of a process from outside.
struct Process {
    arguments: String,
    /// A postmaster's working directory is its data. Unknown where there is no /proc.
    directory: Option<PathBuf>,
}

impl Process {
    fn look_up(pid: u32) -> Option<Process> {
        if Path::new("/proc/self/cmdline").exists() {
            let arguments = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let arguments = String::from_utf8_lossy(&arguments).replace('\0', " ");
            let directory = fs::read_link(format!("/proc/{pid}/cwd")).ok();
            return Some(Process {
                arguments,
                directory,
            });
        }
        let mut ps = Command::new("ps");
        ps.args(["-ww", "-o", "args=", "-p", &pid.to_string()])
            .stderr(Stdio::null());
        let output = ps.output().ok()?;
        let arguments = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        (!arguments.is_empty()).then_some(Process {
            arguments,
            directory: None,
        })
    }
}

fn judge(pid: u32, process: Option<Process>, data: &Path) -> Holder {
    let Some(process) = process else {
        return Holder::Gone;
    };
    // A server's children show as `postgres: checkpointer`; they are never the postmaster.
    let program = process
        .arguments
        .split(" -")
        .next()
        .unwrap_or_default()
        .trim_end();
    let is_postgres = matches!(program.rsplit('/').next(), Some("postgres" | "postmaster"));
    let is_here = match process.directory {
        Some(directory) => directory == data,
        None => process.arguments.contains(&*data.to_string_lossy()),
    };
    match is_postgres && is_here {
        true => Holder::Server(pid),
        false => Holder::Foreign,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn seen(arguments: &str, directory: Option<&str>) -> Option<Process> {
        Some(Process {
            arguments: arguments.to_owned(),
            directory: directory.map(PathBuf::from),
        })
    }

    #[test]
    fn a_pid_is_ours_only_if_it_is_a_postmaster_on_this_data() {
        let data = Path::new("/srv/data");
        let judge = |process| judge(7, process, data);
        let ours = Holder::Server(7);
        assert_eq!(judge(None), Holder::Gone);
        assert_eq!(
            judge(seen("/usr/bin/postgres -D /srv/data ", Some("/srv/data"))),
            ours
        );
        assert_eq!(judge(seen("postmaster", Some("/srv/data"))), ours);
        assert_eq!(judge(seen("/usr/bin/postgres -D /srv/data", None)), ours);
        assert_eq!(
            judge(seen("/usr/bin/postgres -D /srv/other", None)),
            Holder::Foreign
        );
        assert_eq!(
            judge(seen("/usr/bin/postgres -D x", Some("/srv/other"))),
            Holder::Foreign
        );
        assert_eq!(judge(seen("sh", Some("/srv/data"))), Holder::Foreign);
        assert_eq!(
            judge(seen("vi /srv/data/postgresql.conf", None)),
            Holder::Foreign
        );
        assert_eq!(
            judge(seen("postgres: walwriter ", Some("/srv/data"))),
            Holder::Foreign
        );
    }

    #[test]
    fn a_pid_file_is_read_only_when_complete() {
        let text = "42\n/srv/data\n1700000000\n5432\n/srv/socket\n\n  1 2\nstarting\n";
        let starting = Postmaster::parse(text).unwrap();
        assert_eq!((starting.pid, starting.ready), (42, false));
        assert_eq!(starting.socket(), Path::new("/srv/socket/.s.PGSQL.5432"));
        assert!(
            Postmaster::parse(&text.replace("starting", "ready   "))
                .unwrap()
                .ready
        );
        assert_eq!(Postmaster::parse("42\n/srv/data\n"), None);
        assert_eq!(Postmaster::parse(""), None);
    }
}
