//! When are two requests the same? When method, path, query and the canonical form of the typed
//! body are: members sorted, null members left out. So the order of members, white space, and an
//! optional field that a newer client sends as null do not turn a retry into a mismatch.

use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::key::{Key, hash_part};

/// The version of the algorithm, the first byte of every stored hash: of a typed body, in its
/// canonical form.
const CANONICAL: u8 = 1;
/// The same of a body of which nothing but its bytes is known.
const RAW: u8 = 2;

/// A version byte and a SHA-256, as stored in `request_hash`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fingerprint([u8; 33]);

impl Fingerprint {
    pub(crate) fn new(key: &Key, body: &Value) -> Self {
        let mut canonical = Vec::new();
        write_canonical(body, &mut canonical);
        Self::hash(CANONICAL, key, &canonical)
    }

    /// Of a body that is compared byte by byte.
    pub(crate) fn of_bytes(key: &Key, body: &[u8]) -> Self {
        Self::hash(RAW, key, body)
    }

    fn hash(version: u8, key: &Key, body: &[u8]) -> Self {
        let mut hash = Sha256::new();
        let parts = [&key.method, &key.path, &key.query];
        for part in parts.map(String::as_bytes).into_iter().chain([body]) {
            hash_part(&mut hash, part);
        }
        let mut bytes = [version; 33];
        bytes[1..].copy_from_slice(&hash.finalize());
        Self(bytes)
    }

    /// A stored one. None for what another version of the program stored in another form.
    pub(crate) fn from_stored(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

fn write_canonical(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Object(members) => {
            // Sorted here, not by the map: whether the map sorts depends on a feature of serde_json
            // that any crate in the tree can switch.
            let mut members: Vec<_> = members
                .iter()
                .filter(|(_, value)| !value.is_null())
                .collect();
            members.sort_unstable_by_key(|(name, _)| *name);
            out.push(b'{');
            for (index, (name, value)) in members.into_iter().enumerate() {
                if index > 0 {
                    out.push(b',');
                }
                write_scalar(name, out);
                out.push(b':');
                write_canonical(value, out);
            }
            out.push(b'}');
        }
        Value::Array(items) => {
            out.push(b'[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(b',');
                }
                write_canonical(item, out);
            }
            out.push(b']');
        }
        scalar => write_scalar(scalar, out),
    }
}

fn write_scalar(scalar: &impl Serialize, out: &mut Vec<u8>) {
    // Writing a string, a number, a bool or null to memory cannot fail.
    let _ = serde_json::to_writer(out, scalar);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn canonical(value: &Value) -> String {
        let mut out = Vec::new();
        write_canonical(value, &mut out);
        String::from_utf8(out).unwrap()
    }

    fn key() -> Key {
        Key::new("u", "/rides", "k").unwrap()
    }

    #[test]
    fn members_are_sorted_and_null_members_left_out() {
        let value = json!({"b": [1, null, {"z": null, "a": "é\n\""}], "a": 2.5, "c": null});
        assert_eq!(canonical(&value), r#"{"a":2.5,"b":[1,null,{"a":"é\n\""}]}"#);
    }

    #[test]
    fn every_part_of_the_request_counts() {
        let body = json!({"amount": 1});
        let print = Fingerprint::new(&key(), &body);
        assert_ne!(print, Fingerprint::new(&key(), &json!({"amount": 2})));
        assert_ne!(print, Fingerprint::new(&key().with_method("PUT"), &body));
        assert_ne!(print, Fingerprint::new(&key().with_query("a=1"), &body));
        assert_ne!(
            print,
            Fingerprint::new(&Key::new("u", "/other", "k").unwrap(), &body)
        );
        assert_eq!(
            print,
            Fingerprint::new(&Key::new("v", "/rides", "other").unwrap(), &body)
        );
    }

    #[test]
    fn bytes_are_hashed_as_they_are_and_never_taken_for_a_canonical_body() {
        let print = Fingerprint::of_bytes(&key(), br#"{"amount":1}"#);
        assert_ne!(print, Fingerprint::new(&key(), &json!({"amount": 1})));
        assert_ne!(print, Fingerprint::of_bytes(&key(), br#"{"amount": 1}"#));
        assert_eq!(print.as_bytes()[0], RAW);
    }

    /// Stored hashes are compared with this one: a change needs a new version byte.
    #[test]
    fn the_hash_never_changes() {
        let print = Fingerprint::new(&key(), &json!({"amount": 1}));
        let hex: String = print
            .as_bytes()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(
            hex,
            "01e8394e5b0d6f8b0f295f779e010dee6bf889aceda2a5e7d300fb5c188a191fb4"
        );
    }
}
