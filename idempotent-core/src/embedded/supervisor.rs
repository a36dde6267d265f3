//! The small shells that outlive the app for as long as it takes to clean up after it.
//!
//! No code of ours runs when the app is killed by SIGKILL, so somebody else has to notice. The
//! server is the child of a shell that reads a pipe whose only writing end is in the app: when the
//! app ends, however it ends, the shell reads end-of-file and shuts the server down. A throw-away
//! cluster has a second shell, the janitor, that waits on another pipe until every process that
//! could write to the directory is gone, and then removes it.
//!
//! Both are in process groups of their own: Ctrl-C in a terminal reaches the app, which may want to
//! finish its requests, and not the database under it.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::account::Account;
use super::error::{Doing, EmbeddedError};

/// How long a server may take to end, from the end-of-file on: ten seconds of fast shutdown, five
/// of immediate shutdown, then SIGKILL, and some room for a busy machine.
pub(super) const STOP_LIMIT: Duration = Duration::from_secs(20);

/// Runs `"$@"` until it ends by itself or standard input does.
///
/// The watcher is a process of its own, so that the shell can `wait` for the server and end with
/// it: that is how the app notices a server that dies. Signals are repeated because a server that
/// is only just starting ignores them. The pauses are short because the one that runs when the
/// watcher is killed runs to its end. Some shells announce that kill, at length, in what should
/// end with the server's last words.
const SUPERVISE: &str = r#"
trap '' HUP INT QUIT TERM
PATH="$PATH:/usr/bin:/bin"
exec 3<&0 </dev/null
"$@" 3<&- &
server=$!
(
    while read -r _; do :; done <&3
    for second in 1 2 3 4 5 6 7 8 9 10; do kill -INT "$server" || exit; sleep 1; done
    for second in 1 2 3 4 5; do kill -QUIT "$server" || exit; sleep 1; done
    kill -KILL "$server"
) >/dev/null 2>&1 &
watcher=$!
exec 3<&-
wait "$server"
status=$?
exec 2>/dev/null
kill -KILL "$watcher"
exit "$status"
"#;

const CLEAN_UP: &str = r#"
trap '' HUP INT QUIT TERM
PATH="$PATH:/usr/bin:/bin"
cat >/dev/null
rm -rf -- "$@"
"#;

/// A running server and the shell above it.
#[derive(Debug)]
pub(super) struct Supervisor {
    shell: Child,
}

impl Supervisor {
    pub(super) fn spawn(
        server: &Command,
        account: &Account,
        output: Stdio,
        log: Stdio,
    ) -> Result<Supervisor, EmbeddedError> {
        let mut shell = shell(SUPERVISE);
        shell.arg(server.get_program()).args(server.get_args());
        clear_environment(&mut shell);
        account.apply(&mut shell);
        shell.stdin(Stdio::piped()).stdout(output).stderr(log);
        Ok(Supervisor {
            shell: shell.spawn().doing("run", Path::new("/bin/sh"))?,
        })
    }

    /// How the server ended, if it did.
    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        self.shell.try_wait().ok().flatten()
    }
}

impl Drop for Supervisor {
    /// Closes the pipe, as the end of the app would, and waits for the server to end.
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let _ = wait_until(STOP_LIMIT, || self.ended());
    }
}

/// Removes directories when nobody holds the other end of its pipe any more.
#[derive(Debug)]
pub(super) struct Janitor {
    shell: Child,
    pipe: Option<OwnedFd>,
}

impl Janitor {
    pub(super) fn spawn(directories: &[PathBuf]) -> Result<Janitor, EmbeddedError> {
        let sh = Path::new("/bin/sh");
        let mut command = shell(CLEAN_UP);
        command.args(directories);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut shell = command.spawn().doing("run", sh)?;
        let pipe = shell.stdin.take().map(OwnedFd::from);
        Ok(Janitor { shell, pipe })
    }

    /// An end of the pipe for a child to hold, as its standard output.
    pub(super) fn hold(&self) -> io::Result<Stdio> {
        match &self.pipe {
            Some(pipe) => Ok(pipe.try_clone()?.into()),
            None => Ok(Stdio::null()),
        }
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        drop(self.pipe.take());
        let _ = wait_until(STOP_LIMIT, || self.shell.try_wait().ok().flatten());
    }
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", script, "sh"])
        .current_dir("/")
        .process_group(0);
    command
}

/// Sends a signal by name. The shell's own `kill` is there even where the program is not.
pub(super) fn signal(pid: u32, name: &str) {
    let _ = shell(r#"kill -s "$1" "$2""#)
        .args([name, &pid.to_string()])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .status();
}

/// Takes away what would make one machine's database differ from another's: locale, time zone, and
/// the variables that PostgreSQL reads as settings.
pub(super) fn clear_environment(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let known = name.to_string_lossy();
        if known.starts_with("LC_") || known.starts_with("PG") || known.starts_with("LANG") {
            command.env_remove(name);
        }
    }
    // `initdb` writes the time zone into the configuration; macOS wants LC_ALL to be set at all.
    command.env("TZ", "UTC").env("LC_ALL", "C");
}

/// Asks until there is an answer or the time is up.
pub(super) fn wait_until<T>(limit: Duration, mut answer: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + limit;
    loop {
        let found = answer();
        if found.is_some() || Instant::now() >= deadline {
            return found;
        }
        thread::sleep(Duration::from_millis(5));
    }
}
