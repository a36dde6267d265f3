//! What a client sends up to the next ReadyForQuery, and what it means in SQL.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use super::fault::Armed;
use super::ledger::Kind;
use super::wire::{Message, text};

/// What to do with a client's message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Wait for the rest of its batch.
    Keep,
    /// Pass on at once what has been kept: the server is needed to go on (a password, COPY data,
    /// Flush, Terminate).
    Pass,
    /// The batch is complete, and the server will answer it with one ReadyForQuery.
    Complete,
}

/// The messages of one round trip as far as they have come.
#[derive(Default)]
pub(super) struct Batch {
    /// The messages as they travel.
    pub(super) bytes: Vec<u8>,
    executed: Vec<String>,
    parsed: Vec<String>,
    simple: bool,
    bound: bool,
    other: bool,
    prepared: Names,
}

/// The texts behind the names that a client gives to its statements and portals. They outlive a
/// batch.
#[derive(Default)]
struct Names {
    statements: HashMap<String, String>,
    portals: HashMap<String, String>,
}

impl Batch {
    /// Adds a client's message.
    pub(super) fn add(&mut self, message: &Message) -> Step {
        self.bytes.extend_from_slice(&message.bytes);
        let body = message.body();
        match message.kind() {
            b'Q' => {
                self.simple = true;
                self.executed.push(text(body).0);
                return Step::Complete;
            }
            b'S' => return Step::Complete,
            b'P' => {
                let (name, rest) = text(body);
                let sql = text(rest).0;
                self.parsed.push(sql.clone());
                self.prepared.statements.insert(name, sql);
            }
            b'B' => {
                let (portal, rest) = text(body);
                let statement = text(rest).0;
                let sql = self.prepared.statements.get(&statement).cloned();
                self.bound = true;
                self.prepared
                    .portals
                    .insert(portal, sql.unwrap_or_default());
            }
            b'E' => {
                let portal = text(body).0;
                let sql = self.prepared.portals.get(&portal).cloned();
                self.bound = true;
                self.executed.push(sql.unwrap_or_default());
            }
            b'C' => {
                self.other = true;
                let name = text(body.get(1..).unwrap_or_default()).0;
                match body.first() {
                    Some(b'S') => self.prepared.statements.remove(&name),
                    _ => self.prepared.portals.remove(&name),
                };
            }
            b'D' => self.other = true,
            _ => return Step::Pass,
        }
        Step::Keep
    }

    /// Takes what is to be sent now; the batch goes on.
    pub(super) fn take_bytes(&mut self) -> Vec<u8> {
        mem::take(&mut self.bytes)
    }

    /// Takes the complete batch and begins the next one of the same client.
    pub(super) fn take(&mut self) -> Self {
        let prepared = mem::take(&mut self.prepared);
        mem::replace(
            self,
            Self {
                prepared,
                ..Self::default()
            },
        )
    }

    /// Whether it runs SQL: only then can a fault strike it.
    pub(super) fn runs(&self) -> bool {
        self.simple || self.bound
    }

    /// The texts of what it runs, or prepares if it runs nothing.
    pub(super) fn sql(&self) -> String {
        let texts = if self.executed.is_empty() {
            &self.parsed
        } else {
            &self.executed
        };
        texts.join(";\n")
    }

    /// What the proxy remembers until the server has answered.
    pub(super) fn pending(&self, fault: Option<Arc<Armed>>) -> Pending {
        Pending {
            work: match (self.simple, self.bound, self.parsed.is_empty()) {
                (true, _, _) => Work::Sql(Kind::Simple),
                (_, true, _) => Work::Sql(Kind::Prepared),
                (_, _, false) => Work::Sql(Kind::Parse),
                _ if self.other => Work::Other,
                _ => Work::Ping,
            },
            parses: !self.parsed.is_empty(),
            sql: self.sql(),
            tags: Vec::new(),
            sqlstate: None,
            fault,
        }
    }
}

/// What a round trip is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// It parses or runs SQL.
    Sql(Kind),
    /// A Sync and nothing else.
    Ping,
    /// It closes or describes.
    Other,
}

/// A batch that the server has and has not answered yet.
pub(super) struct Pending {
    pub(super) work: Work,
    pub(super) parses: bool,
    pub(super) sql: String,
    pub(super) tags: Vec<String>,
    pub(super) sqlstate: Option<String>,
    /// What is to happen to the answer.
    pub(super) fault: Option<Arc<Armed>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u8, body: &[u8]) -> Message {
        let length = u32::try_from(body.len() + 4).unwrap();
        let bytes = [&[kind], length.to_be_bytes().as_slice(), body].concat();
        Message { bytes }
    }

    fn batch(client: &mut Batch, messages: &[(u8, &[u8])]) -> Pending {
        let (last, first) = messages.split_last().unwrap();
        for (kind, body) in first {
            assert_eq!(client.add(&message(*kind, body)), Step::Keep);
        }
        assert_eq!(client.add(&message(last.0, last.1)), Step::Complete);
        client.take().pending(None)
    }

    #[test]
    fn a_bound_statement_is_known_by_its_text() {
        let mut client = Batch::default();
        let parse = batch(
            &mut client,
            &[
                (b'P', b"s1\0SELECT $1\0\0\0"),
                (b'D', b"Ss1\0"),
                (b'S', b""),
            ],
        );
        assert_eq!((parse.work, parse.parses), (Work::Sql(Kind::Parse), true));
        let bind: &[(u8, &[u8])] = &[
            (b'B', b"\0s1\0"),
            (b'E', b"\0\0\0\0\0"),
            (b'C', b"P\0"),
            (b'S', b""),
        ];
        for _ in 0..2 {
            let run = batch(&mut client, bind);
            assert_eq!((run.work, run.parses), (Work::Sql(Kind::Prepared), false));
            assert_eq!(run.sql, "SELECT $1");
        }
    }

    #[test]
    fn a_bare_sync_is_a_ping_and_closing_is_neither() {
        let mut client = Batch::default();
        assert_eq!(batch(&mut client, &[(b'S', b"")]).work, Work::Ping);
        assert_eq!(
            batch(&mut client, &[(b'C', b"Ss1\0"), (b'S', b"")]).work,
            Work::Other
        );
        let query = batch(&mut client, &[(b'Q', b"COMMIT\0")]);
        assert_eq!(
            (query.work, query.sql.as_str()),
            (Work::Sql(Kind::Simple), "COMMIT")
        );
    }

    #[test]
    fn copy_data_passes() {
        assert_eq!(Batch::default().add(&message(b'd', b"1\t2\n")), Step::Pass);
    }
}
