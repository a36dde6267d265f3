//! What names a request: the [`Key`] that the client chose, within a user and a path, and the
//! [`DerivedKey`] that the outside gets to see in its place.

use std::fmt;
use std::time::SystemTime;

use sha2::{Digest, Sha256};
use uuid::Uuid;

/// The identity of one request: the client's key, unique per user and path, with what else of the
/// request line belongs to its fingerprint.
///
/// ```
/// use idempotent_core::Key;
///
/// let key = Key::new("user-1", "/api/rides", "8e03978e-40d5-43dd-bc93-6894a57f9324")?;
/// # let _ = key;
/// # Ok::<(), idempotent_core::KeyError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key {
    pub(crate) user: String,
    pub(crate) path: String,
    pub(crate) key: String,
    pub(crate) method: String,
    pub(crate) query: String,
}

/// The most bytes a user's id may have.
pub(crate) const USER_BYTES: usize = 128;
/// The most bytes a path may have.
pub(crate) const PATH_BYTES: usize = 1024;
/// The most bytes a client's key may have.
pub(crate) const KEY_BYTES: usize = 255;

/// Why something cannot be a key. Final: the same request is refused again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The part is empty.
    #[error("the {part} is empty")]
    Empty {
        /// `user`, `path` or `key`.
        part: &'static str,
    },
    /// The part is longer than can be stored.
    #[error("the {part} has {bytes} bytes, more than {limit}")]
    TooLong {
        /// `user`, `path` or `key`.
        part: &'static str,
        /// How long it is.
        bytes: usize,
        /// How long it may be.
        limit: usize,
    },
    /// The part holds a NUL character, which PostgreSQL cannot store.
    #[error("the {part} holds a NUL character")]
    Nul {
        /// `user`, `path` or `key`.
        part: &'static str,
    },
}

impl Key {
    /// The key of a `POST` to `path` by `user`.
    ///
    /// # Errors
    ///
    /// When a part is empty, too long (128, 1024 and 255 bytes) or holds a NUL character.
    pub fn new(
        user: impl Into<String>,
        path: impl Into<String>,
        key: impl Into<String>,
    ) -> Result<Self, KeyError> {
        let (user, path, key) = (user.into(), path.into(), key.into());
        check("user", &user, USER_BYTES)?;
        check("path", &path, PATH_BYTES)?;
        check("key", &key, KEY_BYTES)?;
        Ok(Self {
            user,
            path,
            key,
            method: "POST".to_owned(),
            query: String::new(),
        })
    }

    /// Another method than `POST`. Part of the fingerprint, not of the key.
    #[must_use]
    pub fn with_method(mut self, method: impl Into<String>) -> Self {
        self.method = method.into();
        self
    }

    /// The query string. Part of the fingerprint, not of the key.
    #[must_use]
    pub fn with_query(mut self, query: impl Into<String>) -> Self {
        self.query = query.into();
        self
    }
}

impl Key {
    /// What a staged key is fingerprinted by.
    pub(crate) fn staged(user: &str, path: &str, key: &str) -> Self {
        Self {
            user: user.to_owned(),
            path: path.to_owned(),
            key: key.to_owned(),
            method: "POST".to_owned(),
            query: String::new(),
        }
    }
}

impl KeyInfo {
    /// The key of a run that a phase stages: computed from what names this run, so that a repeated
    /// phase, also one that comes after this key was reaped, stages the same.
    pub(crate) fn staged_key(&self, phase: &str, suffix: &str) -> String {
        let mut hash = Sha256::new();
        let parts = [
            "idempotent-staged-1",
            &self.user,
            &self.path,
            &self.key,
            phase,
            suffix,
        ];
        for part in parts {
            hash_part(&mut hash, part.as_bytes());
        }
        hash.finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

fn check(part: &'static str, text: &str, limit: usize) -> Result<(), KeyError> {
    match text.len() {
        0 => Err(KeyError::Empty { part }),
        bytes if bytes > limit => Err(KeyError::TooLong { part, bytes, limit }),
        _ if text.contains('\0') => Err(KeyError::Nul { part }),
        _ => Ok(()),
    }
}

/// The client's key stays out of logs: who has it could ask for the reply.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// What a phase may know about the key it works for.
///
/// Business rows refer to [`id`](Self::id) in a unique column, without a foreign key: keys are
/// reaped, rows stay.
#[derive(Clone)]
pub struct KeyInfo {
    pub(crate) id: Uuid,
    pub(crate) user: String,
    pub(crate) path: String,
    pub(crate) key: String,
    pub(crate) attempt: u32,
    pub(crate) fence: i64,
    pub(crate) created_at: SystemTime,
}

impl KeyInfo {
    /// The key's own id (UUIDv7), the same in every attempt.
    pub fn id(&self) -> Uuid {
        self.id
    }

    /// The user who sent the request.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// The path that was asked for.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The key that the client chose.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Which attempt this is since the flow last moved on, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// A number that grows with every attempt: hand it to an outside that can compare it.
    pub fn fence(&self) -> i64 {
        self.fence
    }

    /// When the key was first seen, by the database's clock.
    pub fn created_at(&self) -> SystemTime {
        self.created_at
    }
}

/// The user's id and the client's key stay out of logs.
impl fmt::Debug for KeyInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyInfo")
            .field("id", &self.id)
            .field("path", &self.path)
            .field("attempt", &self.attempt)
            .field("fence", &self.fence)
            .finish_non_exhaustive()
    }
}

/// The idempotency key for a call to the outside: the same in every attempt, in every process, and
/// after the client's key was reaped and sent again.
///
/// Only an [`External`](crate::External) gives one out, so a call that asks for a `&DerivedKey`
/// cannot be made from an atomic phase.
///
/// Computed from the flow, the user, the path, the key and the name of the call; never from the
/// body or from a row's id, which would change where the outside must see the same call.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct DerivedKey(String);

/// Who has it could ask the outside for the answer: it stays out of logs.
impl fmt::Debug for DerivedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DerivedKey(..)")
    }
}

impl DerivedKey {
    pub(crate) fn new(flow: &str, user: &str, path: &str, key: &str, call: &str) -> Self {
        let mut hash = Sha256::new();
        // The version: another way to derive must never give a key that was used before.
        for part in ["idempotent-derived-1", flow, user, path, key, call] {
            hash_part(&mut hash, part.as_bytes());
        }
        Self(
            hash.finalize()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
        )
    }

    /// The key as text: 64 hexadecimal digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DerivedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<str> for DerivedKey {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

/// Length-prefixed, so that no two lists of parts give the same bytes.
pub(crate) fn hash_part(hash: &mut Sha256, part: &[u8]) {
    hash.update((part.len() as u64).to_be_bytes());
    hash.update(part);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_keys_differ_in_every_part_and_at_every_border() {
        let parts = ["ride", "u1", "/rides", "k", "charge"];
        let derive = |p: [&str; 5]| DerivedKey::new(p[0], p[1], p[2], p[3], p[4]);
        let key = derive(parts);
        for changed in 0..parts.len() {
            let mut other = parts;
            other[changed] = "x";
            assert_ne!(key, derive(other));
        }
        assert_ne!(derive(["ride", "u1", "/rides", "kc", "harge"]), key);
    }

    /// Outsides remember keys for days: a change of this value charges cards again.
    #[test]
    fn the_derived_key_never_changes() {
        let key = DerivedKey::new("ride", "user-1", "/api/rides", "abc", "charge");
        assert_eq!(
            key.as_str(),
            "bda095c88dc8aea03ee7ac9b7743a5d4a9239acb1577c2b42fca4133456eba1e"
        );
    }

    #[test]
    fn parts_that_cannot_be_stored_are_refused() {
        let limit = |n| "x".repeat(n);
        assert!(Key::new(limit(128), limit(1024), limit(255)).is_ok());
        assert_eq!(
            Key::new("u", "/", limit(256)).unwrap_err(),
            KeyError::TooLong {
                part: "key",
                bytes: 256,
                limit: 255
            }
        );
        assert!(
            Key::new(limit(129), "/", "k").is_err() && Key::new("u", limit(1025), "k").is_err()
        );
        assert_eq!(
            Key::new("u", "/", "").unwrap_err(),
            KeyError::Empty { part: "key" }
        );
        assert_eq!(
            Key::new("u\0", "/", "k").unwrap_err(),
            KeyError::Nul { part: "user" }
        );
    }

    #[test]
    fn secrets_stay_out_of_debug_output() {
        let key = Key::new("alice", "/rides", "secret").unwrap();
        let shown = format!("{key:?}");
        assert!(!shown.contains("alice") && !shown.contains("secret") && shown.contains("/rides"));
    }
}
