//! One connection: both directions of it, and what a fault makes of them.

use std::collections::VecDeque;
use std::mem;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sqlx::postgres::PgConnectOptions;
use tokio::io::{self, AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::batch::{Batch, Pending, Step};
use super::fault::{Action, Armed};
use super::ledger::Shared;
use super::wire::{Frames, Message, Startup, cannot_connect_now, text};

/// So much of an answer is gathered before it is passed on.
const GATHERED: usize = 64 * 1024;

/// Where the server is.
pub(super) enum Upstream {
    Unix(PathBuf),
    Tcp(String, u16),
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

type Reader<S> = Frames<io::ReadHalf<S>>;
type Writer<S> = io::WriteHalf<S>;
type Server = Box<dyn Stream>;

impl Upstream {
    pub(super) fn of(options: &PgConnectOptions) -> Self {
        let (host, port) = (options.get_host(), options.get_port());
        let in_host = || host.starts_with('/').then(|| PathBuf::from(host));
        match options.get_socket().cloned().or_else(in_host) {
            Some(directory) => Self::Unix(directory.join(format!(".s.PGSQL.{port}"))),
            None => Self::Tcp(host.to_owned(), port),
        }
    }

    async fn connect(&self) -> io::Result<Server> {
        Ok(match self {
            Self::Unix(path) => Box::new(UnixStream::connect(path).await?),
            Self::Tcp(host, port) => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
        })
    }
}

/// Serves one client until it, the server or a fault ends the connection.
pub(super) async fn run(client: TcpStream, connection: usize, shared: Arc<Shared>) {
    let _ = client.set_nodelay(true);
    let (reader, mut to_client) = io::split(client);
    let mut from_client = Frames::new(reader);
    let startup = loop {
        match from_client.startup().await {
            Some(Startup::Encryption) if to_client.write_all(b"N").await.is_ok() => {}
            Some(Startup::Server(packet)) => break packet,
            _ => return,
        }
    };
    let Ok(server) = shared.upstream.connect().await else {
        let _ = to_client.write_all(&cannot_connect_now()).await;
        return;
    };
    let (reader, mut to_server) = io::split(server);
    let mut from_server = Frames::new(reader);
    let relay = Relay {
        connection,
        shared,
        session: Mutex::default(),
    };
    if to_server.write_all(&startup).await.is_err() {
        return;
    }
    let end = tokio::select! {
        end = relay.requests(&mut from_client, &mut to_server) => end,
        end = relay.answers(&mut from_server, &mut to_client) => end,
    };
    drop((from_client, to_client));
    relay.end(end, from_server, to_server).await;
}

/// One connection. What the server still owed when it is dropped, or aborted, is written down.
struct Relay {
    connection: usize,
    shared: Arc<Shared>,
    session: Mutex<Session>,
}

#[derive(Default)]
struct Session {
    /// What the server has still to answer, in order.
    pending: VecDeque<Pending>,
    /// What was sent to it since it was last idle.
    transaction: Vec<String>,
}

/// Why a connection is over for its client.
enum End {
    ClientGone,
    ServerGone,
    Cut(Arc<Armed>),
    /// Cut, but the batch is still on its way.
    Undecided(Arc<Armed>, Batch),
}

impl Relay {
    /// Passes on what the client asks.
    async fn requests(&self, client: &mut Reader<TcpStream>, server: &mut Writer<Server>) -> End {
        let mut batch = Batch::default();
        while let Some(message) = client.next().await {
            let sent = match batch.add(&message) {
                Step::Keep => continue,
                Step::Pass => server.write_all(&batch.take_bytes()).await,
                Step::Complete => {
                    let batch = batch.take();
                    let fault = match self.strike(&batch) {
                        Some(fault) if fault.action == Action::CutBefore => return End::Cut(fault),
                        Some(fault) if fault.action == Action::HalfCommit => {
                            return End::Undecided(fault, batch);
                        }
                        Some(fault) if fault.action == Action::Hold => {
                            if !fault.verdict().await {
                                return End::Cut(fault);
                            }
                            None
                        }
                        fault => fault,
                    };
                    self.shared.delay(client.arrived()).await;
                    self.send(batch, fault, server).await
                }
            };
            if sent.is_err() {
                return End::ServerGone;
            }
        }
        End::ClientGone
    }

    /// Passes on what the server answers, after it is counted: a client that has its answer finds
    /// it in the transcript.
    async fn answers(&self, server: &mut Reader<Server>, client: &mut Writer<TcpStream>) -> End {
        let mut ready = Vec::new();
        let mut withheld = Vec::new();
        while let Some(message) = server.next().await {
            let fault = self
                .session()
                .pending
                .front()
                .and_then(|batch| batch.fault.clone());
            let complete = self.observe(&message);
            let bytes = if fault.is_some() {
                &mut withheld
            } else {
                &mut ready
            };
            bytes.extend_from_slice(&message.bytes);

            let struck = fault.filter(|_| complete);
            let flush = struck.is_some() || !server.has_next() || ready.len() > GATHERED;
            if flush && client.write_all(&mem::take(&mut ready)).await.is_err() {
                return End::ClientGone;
            }
            if let Some(fault) = struck {
                if fault.action == Action::LoseAnswer || !fault.verdict().await {
                    return End::Cut(fault);
                }
                if client.write_all(&mem::take(&mut withheld)).await.is_err() {
                    return End::ClientGone;
                }
            }
        }
        End::ServerGone
    }

    /// Ends the connection for the server too, and tells the fault when that is done.
    async fn end(&self, end: End, mut from_server: Reader<Server>, mut to_server: Writer<Server>) {
        let mut fault = None;
        match end {
            End::ClientGone => {}
            End::ServerGone => return,
            End::Cut(struck) => fault = Some(struck),
            End::Undecided(struck, batch) => {
                let go_on = tokio::select! {
                    go_on = struck.verdict() => go_on,
                    () = self.drain(&mut from_server) => return struck.lost(),
                };
                if go_on && !self.deliver(batch, &mut from_server, &mut to_server).await {
                    return struck.lost();
                }
                fault = Some(struck);
            }
        }
        // As a client that died: the server reads the end of the stream once it has finished what
        // it was doing.
        let _ = to_server.shutdown().await;
        self.drain(&mut from_server).await;
        self.abort();
        if let Some(fault) = fault {
            fault.done();
        }
    }

    /// Sends a batch late, and waits until everything sent is answered.
    async fn deliver(
        &self,
        batch: Batch,
        from: &mut Reader<Server>,
        to: &mut Writer<Server>,
    ) -> bool {
        if self.send(batch, None, to).await.is_err() {
            return false;
        }
        while !self.session().pending.is_empty() {
            match from.next().await {
                Some(message) => self.observe(&message),
                None => return false,
            };
        }
        true
    }

    /// Reads until the server has ended the session.
    async fn drain(&self, server: &mut Reader<Server>) {
        while let Some(message) = server.next().await {
            self.observe(&message);
        }
    }

    async fn send(
        &self,
        mut batch: Batch,
        fault: Option<Arc<Armed>>,
        server: &mut Writer<Server>,
    ) -> io::Result<()> {
        {
            let mut session = self.session();
            if batch.runs() {
                session.transaction.push(batch.sql());
            }
            session.pending.push_back(batch.pending(fault));
        }
        server.write_all(&batch.take_bytes()).await
    }

    fn strike(&self, batch: &Batch) -> Option<Arc<Armed>> {
        let session = self.session();
        if !batch.runs() {
            return None;
        }
        self.shared.strike(&batch.sql(), &session.transaction)
    }

    /// Notes a message of the server; says whether it completes the answer to a batch.
    fn observe(&self, message: &Message) -> bool {
        let mut session = self.session();
        match (message.kind(), session.pending.front_mut()) {
            (b'C', Some(batch)) => batch.tags.push(text(message.body()).0),
            (b'E', Some(batch)) if batch.sqlstate.is_none() => batch.sqlstate = message.sqlstate(),
            (b'Z', _) => {
                if message.body() == b"I" {
                    session.transaction.clear();
                }
                // The first ReadyForQuery ends the startup and answers nothing.
                let Some(batch) = session.pending.pop_front() else {
                    return false;
                };
                self.shared.record(self.connection, batch, true);
                return true;
            }
            _ => {}
        }
        false
    }

    /// Writes down what the server will not answer any more.
    fn abort(&self) {
        let unanswered = mem::take(&mut self.session().pending);
        for batch in unanswered {
            if let Some(fault) = &batch.fault {
                fault.lost();
            }
            self.shared.record(self.connection, batch, false);
        }
    }

    fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.abort();
    }
}
