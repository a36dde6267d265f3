//! Which user the server runs as, and what that user can reach.
//!
//! PostgreSQL refuses to run as root, yet containers and fresh machines are root more often than
//! not. So a root process drops to an ordinary user for `initdb` and for the server, and keeps
//! everything else: the lock, the log and the directory around them stay its own.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, lchown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::error::{Doing, EmbeddedError};

/// The user that owns the data and runs the server.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Account {
    pub(super) name: String,
    pub(super) uid: u32,
    gid: u32,
    /// Whether this process is root and has to become that user.
    dropped: bool,
}

impl Account {
    /// The user for the data below `root`: ourselves, or, for root, whoever owns the data
    /// already, else `postgres`, else `nobody`.
    pub(super) fn for_root(root: &Path) -> Result<Account, EmbeddedError> {
        let uid = current_uid()?;
        if uid != 0 {
            return Ok(Account {
                name: format!("uid {uid}"),
                uid,
                gid: 0,
                dropped: false,
            });
        }
        for existing in [root.join("data"), root.to_owned()] {
            if let Ok(metadata) = fs::symlink_metadata(&existing)
                && metadata.uid() != 0
            {
                let (uid, gid) = (metadata.uid(), metadata.gid());
                return Ok(Account {
                    name: format!("uid {uid}"),
                    uid,
                    gid,
                    dropped: true,
                });
            }
        }
        let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
        ["postgres", "nobody"]
            .into_iter()
            .find_map(|name| in_passwd(&passwd, name).or_else(|| by_id_command(name)))
            .ok_or(EmbeddedError::NoUser)
    }

    /// Makes a command run as this user.
    pub(super) fn apply(&self, command: &mut Command) {
        if self.dropped {
            command.uid(self.uid).gid(self.gid);
        }
    }

    /// Hands a file or directory, never what a link points at, to this user.
    pub(super) fn give(&self, path: &Path) -> Result<(), EmbeddedError> {
        match self.dropped {
            true => lchown(path, Some(self.uid), Some(self.gid)).doing("change the owner of", path),
            false => Ok(()),
        }
    }

    /// The first directory on the way to `path`, itself included, that this user cannot enter.
    /// What does not exist yet is no obstacle.
    pub(super) fn blocked_at(&self, path: &Path) -> Option<PathBuf> {
        if !self.dropped {
            return None;
        }
        let mut steps: Vec<&Path> = path.ancestors().collect();
        steps.reverse();
        let enters = |step: &Path| match fs::metadata(step) {
            Ok(found) if found.uid() == self.uid => found.mode() & 0o100 != 0,
            Ok(found) if found.gid() == self.gid => found.mode() & 0o010 != 0,
            Ok(found) => found.mode() & 0o001 != 0,
            Err(_) => true,
        };
        steps
            .into_iter()
            .find(|step| !enters(step))
            .map(Path::to_owned)
    }
}

/// Makes sure that a directory exists, that nobody else can have planted or can change it, and
/// that the server's user can enter it.
pub(super) fn private_directory(path: &Path) -> Result<(PathBuf, Account), EmbeddedError> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).doing("create", parent)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(error).doing("create", path);
        }
        _ => (),
    }
    let path = path.canonicalize().doing("open", path)?;
    let found = fs::metadata(&path).doing("read", &path)?;
    let uid = current_uid()?;
    // Root may use somebody's directory, but not one that anybody may have put there.
    if found.uid() != uid && (uid != 0 || path.parent().is_none_or(anybody_may_write)) {
        let reason = format!(
            "it belongs to uid {}, and this process is uid {uid}",
            found.uid()
        );
        return Err(EmbeddedError::Untrusted { path, reason });
    }
    if anybody_may_write(&path) {
        let reason = "anybody may write to it".to_owned();
        return Err(EmbeddedError::Untrusted { path, reason });
    }
    let account = Account::for_root(&path)?;
    match account.blocked_at(&path) {
        // Entering is enough: nothing in it can be listed, and all of it is closed by itself.
        Some(at) if at == path && found.uid() == uid => {
            let mode = Permissions::from_mode(found.mode() | 0o011);
            fs::set_permissions(&path, mode).doing("open", &path)?;
        }
        Some(at) => {
            return Err(EmbeddedError::Unreachable {
                root: path,
                at,
                user: account.name,
            });
        }
        None => (),
    }
    Ok((path, account))
}

fn anybody_may_write(directory: &Path) -> bool {
    fs::metadata(directory).is_ok_and(|found| found.mode() & 0o002 != 0)
}

/// Our own user id, without libc: whom the kernel says this process, or a new file, belongs to.
pub(super) fn current_uid() -> Result<u32, EmbeddedError> {
    if let Ok(process) = fs::metadata("/proc/self") {
        return Ok(process.uid());
    }
    let probe = std::env::temp_dir().join(format!("whoami-{}", std::process::id()));
    let owner = File::create_new(&probe).and_then(|file| file.metadata());
    // A probe that already existed is not ours to remove.
    if !matches!(&owner, Err(error) if error.kind() == ErrorKind::AlreadyExists) {
        let _ = fs::remove_file(&probe);
    }
    Ok(owner.doing("create", &probe)?.uid())
}

fn in_passwd(passwd: &str, name: &str) -> Option<Account> {
    let line = passwd
        .lines()
        .find(|line| line.split(':').next() == Some(name))?;
    let mut numbers = line.split(':').skip(2);
    // macOS writes nobody's id as -2.
    let mut number = || {
        numbers
            .next()?
            .parse::<i64>()
            .ok()
            .map(|number| number as u32)
    };
    Some(Account {
        name: name.to_owned(),
        uid: number()?,
        gid: number()?,
        dropped: true,
    })
}

/// For users that are not in /etc/passwd: a directory service, or most of macOS.
fn by_id_command(name: &str) -> Option<Account> {
    let number = |flag| {
        let output = Command::new("id").args([flag, name]).output().ok()?;
        String::from_utf8(output.stdout).ok()?.trim().parse().ok()
    };
    Some(Account {
        name: name.to_owned(),
        uid: number("-u")?,
        gid: number("-g")?,
        dropped: true,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn passwd_lines_are_found_by_their_whole_name() {
        let passwd = "root:x:0:0::/root:/bin/sh\npostgres2:x:7:7::/:/bin/sh\n\
                      postgres:x:101:104:,,,:/var/lib/postgresql:/bin/bash\nnobody:*:-2:-2::/:/bin/false\n";
        let postgres = in_passwd(passwd, "postgres").unwrap();
        assert_eq!((postgres.uid, postgres.gid), (101, 104));
        assert_eq!(in_passwd(passwd, "nobody").unwrap().uid, 4_294_967_294);
        assert_eq!(in_passwd(passwd, "someone"), None);
    }

    #[test]
    fn a_closed_directory_on_the_way_is_named() {
        let top = std::env::temp_dir().join(format!("reach-{}", std::process::id()));
        fs::create_dir_all(top.join("closed/inner")).unwrap();
        fs::set_permissions(top.join("closed"), fs::Permissions::from_mode(0o700)).unwrap();
        let stranger = Account {
            name: "x".into(),
            uid: 54_321,
            gid: 54_321,
            dropped: true,
        };
        assert_eq!(
            stranger.blocked_at(&top.join("closed/inner/new")),
            Some(top.join("closed"))
        );
        assert_eq!(stranger.blocked_at(&std::env::temp_dir().join("new")), None);
        let ourselves = Account {
            dropped: false,
            ..stranger
        };
        assert_eq!(ourselves.blocked_at(&top.join("closed/inner")), None);
        fs::remove_dir_all(top).unwrap();
    }
}
