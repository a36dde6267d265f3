//! Round trips, counted on the wire and not by trust: a forwarder on a Unix socket between the pool
//! and the server. A round trip is a `ReadyForQuery` of the server's, for a simple query or for a
//! batch that ends in Sync. A Sync with nothing before it is the ping that sqlx sends when a
//! connection goes back to its pool: counted apart, nobody waits for it.
//!
//! The forwarder can also be far away: it keeps every request for a while, as a network would.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;

use crate::cluster::Cluster;
use crate::contender::{Contender, Error};
use crate::measure::Asks;

/// What one piece of work needs.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Trips {
    pub(crate) round_trips: f64,
    pub(crate) pings: f64,
}

/// How many pieces of work are counted: enough to see one that differs from the rest.
const COUNTED: usize = 20;

/// Counts the round trips of a form whose pool has one connection, to the forwarder.
pub(crate) async fn count(
    forwarder: &Forwarder,
    form: &Contender,
    asks: &Asks,
) -> Result<Trips, Error> {
    let work = form.work();
    // Prepares the statements.
    for turn in 0..5 {
        work(asks.of(0, 1, turn)).await?;
    }
    settle().await;
    let before = forwarder.counted.read();
    for turn in 0..COUNTED {
        work(asks.of(0, 1, turn)).await?;
    }
    settle().await;
    let after = forwarder.counted.read();
    let each = |after: u64, before: u64| (after - before) as f64 / COUNTED as f64;
    Ok(Trips {
        round_trips: each(after.0, before.0),
        pings: each(after.1, before.1),
    })
}

/// The last ping is sent after the work is done.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(50)).await;
}

/// Listens between the clients and the server.
pub(crate) struct Forwarder {
    directory: PathBuf,
    options: PgConnectOptions,
    counted: Arc<Counted>,
}

#[derive(Debug, Default)]
struct Counted {
    round_trips: AtomicU64,
    pings: AtomicU64,
}

impl Counted {
    fn read(&self) -> (u64, u64) {
        (
            self.round_trips.load(Ordering::SeqCst),
            self.pings.load(Ordering::SeqCst),
        )
    }
}

/// What the client waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Awaited {
    RoundTrip,
    Ping,
}

type Queue = Arc<Mutex<VecDeque<Awaited>>>;

impl Forwarder {
    /// `distance` is how long a round trip takes on its way.
    pub(crate) fn start(cluster: &Cluster, distance: Duration) -> Result<Self, Error> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory =
            std::env::temp_dir().join(format!("flows-wire-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        let socket = format!(".s.PGSQL.{}", cluster.options().get_port());
        let server = cluster
            .options()
            .get_socket()
            .ok_or("the server has no Unix socket")?
            .join(&socket);
        let listener = UnixListener::bind(directory.join(&socket))?;
        let counted = Arc::new(Counted::default());
        let counter = Arc::clone(&counted);
        // Ends with the process: it waits for clients for ever.
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if let Ok(server) = UnixStream::connect(&server) {
                    forward(client, server, distance, &counter);
                }
            }
        });
        let options = cluster.options().clone().socket(&directory);
        Ok(Self {
            directory,
            options,
            counted,
        })
    }

    /// The way to the server that is listened to.
    pub(crate) fn options(&self) -> &PgConnectOptions {
        &self.options
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn forward(client: UnixStream, server: UnixStream, distance: Duration, counted: &Arc<Counted>) {
    let (Ok(client_too), Ok(server_too)) = (client.try_clone(), server.try_clone()) else {
        return;
    };
    let awaited = Queue::default();
    let (asked, counted) = (Arc::clone(&awaited), Arc::clone(counted));
    thread::spawn(move || requests(client, server, distance, &asked));
    thread::spawn(move || answers(server_too, client_too, &awaited, &counted));
}

fn requests(
    mut client: UnixStream,
    mut server: UnixStream,
    distance: Duration,
    awaited: &Queue,
) -> io::Result<()> {
    // The first message has no type.
    server.write_all(&read_body(&mut client, Vec::new())?)?;
    let mut batch = Vec::new();
    loop {
        let message = read_message(&mut client)?;
        let ends = match message[0] {
            b'S' if batch.is_empty() => Some(Awaited::Ping),
            b'S' | b'Q' => Some(Awaited::RoundTrip),
            _ => None,
        };
        batch.extend(message);
        if let Some(ends) = ends {
            if !distance.is_zero() {
                thread::sleep(distance);
            }
            awaited
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push_back(ends);
            server.write_all(&batch)?;
            batch.clear();
        }
    }
}

fn answers(
    mut server: UnixStream,
    mut client: UnixStream,
    awaited: &Queue,
    counted: &Counted,
) -> io::Result<()> {
    loop {
        let message = read_message(&mut server)?;
        if message[0] == b'Z' {
            match awaited
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop_front()
            {
                Some(Awaited::RoundTrip) => counted.round_trips.fetch_add(1, Ordering::SeqCst),
                Some(Awaited::Ping) => counted.pings.fetch_add(1, Ordering::SeqCst),
                // The one that ends the login.
                None => 0,
            };
        }
        client.write_all(&message)?;
    }
}

fn read_message(from: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut kind = vec![0];
    from.read_exact(&mut kind)?;
    read_body(from, kind)
}

fn read_body(from: &mut UnixStream, mut message: Vec<u8>) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    message.extend(length);
    let start = message.len();
    let rest = usize::try_from(u32::from_be_bytes(length))
        .unwrap_or(0)
        .saturating_sub(length.len());
    message.resize(start + rest, 0);
    from.read_exact(&mut message[start..])?;
    Ok(message)
}
