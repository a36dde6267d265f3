//! Connect options that mean the same on every machine.
//!
//! The driver fills its options from the environment: host, port, user, password, database, TLS,
//! application name. All of them have setters and are set here. `PGOPTIONS` has none: what we add
//! is appended to it. But the server takes the last value of a setting, so each setting named in
//! `PGOPTIONS` is named once more, with the value it has in the server's own configuration.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use sqlx::postgres::{PgConnectOptions, PgSslMode};

use super::account::Account;
use super::cluster::SUPERUSER;
use super::error::{Doing, EmbeddedError};
use super::postmaster::Postmaster;
use super::supervisor::clear_environment;

/// Options for the server that runs on `data`.
pub(super) fn connect_options(
    data: &Path,
    postmaster: &Postmaster,
    account: &Account,
) -> Result<PgConnectOptions, EmbeddedError> {
    let options = PgConnectOptions::new_without_pgpass()
        .host("localhost")
        .port(postmaster.port)
        .socket(&postmaster.socket_dir)
        .username(SUPERUSER)
        .password("")
        .database("postgres")
        .ssl_mode(PgSslMode::Disable)
        .application_name("embedded");
    let Some(noise) = options.get_options().map(str::to_owned) else {
        return Ok(options);
    };
    let Some(names) = named_settings(&noise) else {
        return Err(EmbeddedError::SessionOptions { options: noise });
    };
    let mut undone = Vec::new();
    for name in names {
        let value = configured(&name, data, account)?;
        undone.push((name, value));
    }
    Ok(options.options(undone))
}

/// The names in `-c name=value`, `-cname=value` and `--name=value`; None if there is anything
/// else. A backslash takes the special meaning of the next letter away.
fn named_settings(options: &str) -> Option<Vec<String>> {
    let mut words: Vec<String> = vec![String::new()];
    let mut letters = options.chars();
    while let Some(letter) = letters.next() {
        match (letter, words.last_mut()) {
            ('\\', Some(word)) => word.extend(letters.next()),
            (letter, Some(word)) if !letter.is_whitespace() => word.push(letter),
            _ => words.push(String::new()),
        }
    }
    let mut words = words.into_iter().filter(|word| !word.is_empty());
    let mut names = Vec::new();
    while let Some(word) = words.next() {
        let setting = match word.strip_prefix("--").or_else(|| word.strip_prefix("-c")) {
            Some("") if word == "-c" => words.next()?,
            Some(setting) => setting.to_owned(),
            None => return None,
        };
        names.push(setting.split_once('=')?.0.replace('-', "_"));
    }
    Some(names)
}

/// What `postgres -C` says about a setting, given the running server's command line. A setting it
/// does not know belongs to an extension or to nobody; empty is its natural value.
fn configured(name: &str, data: &Path, account: &Account) -> Result<String, EmbeddedError> {
    let path = data.join("postmaster.opts");
    let line = fs::read_to_string(&path).doing("read", &path)?;
    let (program, arguments) = line
        .trim_end()
        .split_once(" \"")
        .unwrap_or((line.trim_end(), ""));
    let mut command = Command::new(program);
    command
        .args(["-C", name])
        .args(arguments.trim_end_matches('"').split("\" \""));
    clear_environment(&mut command);
    account.apply(&mut command);
    command
        .current_dir("/")
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    let output = command.output().doing("run", Path::new(program))?;
    Ok(String::from_utf8_lossy(&output.stdout)
        .trim_end()
        .to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_named_in_each_of_their_spellings() {
        let names = |options| named_settings(options).map(|names| names.join(" "));
        let all = r"-c a=1 -cb=x\ y  --work-mem=3 -c c=--d=5";
        assert_eq!(names(all).as_deref(), Some("a b work_mem c"));
        assert_eq!(names("").as_deref(), Some(""));
        assert_eq!(names("-e"), None);
        assert_eq!(names("-c"), None);
        assert_eq!(names("-c a"), None);
    }
}
