//! A proxy between a program and PostgreSQL that counts, remembers and breaks what passes.
//!
//! Round trips and commits are the cost of a flow, and a lost answer at the wrong moment is what it
//! must survive. Neither can be seen or brought about from inside the client, so the proxy reads
//! the protocol of both sides message by message. Faults strike at a [`Point`] in the SQL and are
//! followed by their handles; nothing here waits for time to pass, except the latency asked for.
//!
//! It runs on its own thread: a test may block, or the program may be a child process, while it
//! goes on. There is no TLS, and no fault between a Parse and its Sync. A client that copies in
//! through the extended protocol would be counted wrongly; sqlx does not.

mod batch;
mod fault;
mod gate;
mod ledger;
mod relay;
mod wire;

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use tokio::runtime;
use tokio::sync::{mpsc, oneshot};

use fault::{Action, Armed, Handle};
pub use fault::{Fault, Hold, Point, Undecided};
use gate::{Command, Order, serve};
use ledger::Shared;
pub use ledger::{Counts, Exchange, Kind};
use relay::Upstream;

/// One proxy in front of one PostgreSQL server, as long as it lives.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    commands: Option<mpsc::UnboundedSender<Order>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Proxy {
    /// Starts a proxy to the server that `to` leads to, on a port of 127.0.0.1 of its own.
    #[must_use]
    pub fn start(to: &PgConnectOptions) -> Self {
        // Listening before the thread runs: whoever is told the address may connect.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port for the proxy");
        listener
            .set_nonblocking(true)
            .expect("a listener that tokio takes");
        let address = listener.local_addr().expect("a listener has an address");
        let shared = Arc::new(Shared::new(Upstream::of(to)));
        let (commands, inbox) = mpsc::unbounded_channel();
        let serving = serve(listener, Arc::clone(&shared), inbox);
        let thread = thread::spawn(move || {
            let runtime = runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.expect("the proxy needs a runtime");
            runtime.block_on(serving);
            runtime.shutdown_background();
        });
        Self {
            address,
            shared,
            commands: Some(commands),
            thread: Some(thread),
        }
    }

    /// The same database and user through the proxy.
    #[must_use]
    pub fn connect_options(&self, base: &PgConnectOptions) -> PgConnectOptions {
        let tcp = if base.get_socket().is_some() {
            without_socket(base)
        } else {
            base.clone()
        };
        tcp.host("127.0.0.1")
            .port(self.address.port())
            .ssl_mode(PgSslMode::Disable)
    }

    /// The same database and user through the proxy, as a `DATABASE_URL`.
    #[must_use]
    pub fn url(&self, base: &PgConnectOptions) -> String {
        self.connect_options(base).to_url_lossy().into()
    }

    /// Starts counting afresh and forgets the transcript. Armed faults and open connections stay.
    pub fn reset(&self) {
        let mut state = self.shared.state();
        state.counts = Counts::default();
        state.transcript.clear();
    }

    /// What was counted.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.state().counts
    }

    /// [`Counts::round_trips`].
    #[must_use]
    pub fn round_trips(&self) -> usize {
        self.counts().round_trips
    }

    /// [`Counts::commits`].
    #[must_use]
    pub fn commits(&self) -> usize {
        self.counts().commits
    }

    /// Everything that parsed or ran SQL, in the order in which the server was done with it. What a
    /// fault kept from the server is not there.
    #[must_use]
    pub fn transcript(&self) -> Vec<Exchange> {
        self.shared.state().transcript.clone()
    }

    /// Delays every batch by this much before it goes to the server, as a network does. Batches
    /// that were sent in one write are delayed together. Faults strike before the delay.
    pub fn set_latency(&self, latency: Duration) {
        self.shared.state().latency = latency;
    }

    /// The server does what `point` asks, to the end; its answer is lost, and the client cut.
    #[track_caller]
    pub fn lose_answer(&self, point: impl Into<Point>) -> Fault {
        Fault(self.arm(Action::LoseAnswer, point.into()))
    }

    /// The client is cut, and what `point` asks never reaches the server.
    #[track_caller]
    pub fn cut_before(&self, point: impl Into<Point>) -> Fault {
        Fault(self.arm(Action::CutBefore, point.into()))
    }

    /// `point` stands before the server until it is released.
    #[track_caller]
    pub fn hold(&self, point: impl Into<Point>) -> Hold {
        Hold(self.arm(Action::Hold, point.into()))
    }

    /// The server does what `point` asks; its answer stands before the client until it is released.
    #[track_caller]
    pub fn hold_answer(&self, point: impl Into<Point>) -> Hold {
        Hold(self.arm(Action::HoldAnswer, point.into()))
    }

    /// The client is cut while `point`, a COMMIT for instance, is still on its way; whether it
    /// arrives is for the test to say.
    #[track_caller]
    pub fn half_commit(&self, point: impl Into<Point>) -> Undecided {
        Undecided(self.arm(Action::HalfCommit, point.into()))
    }

    /// Cuts all connections. What the server is doing it finishes, a COMMIT too.
    pub async fn cut_all(&self) {
        self.command(Command::Cut).await;
    }

    /// Takes the database down: cuts all connections and has new ones refused, until
    /// [`accept`](Self::accept).
    pub async fn refuse(&self) {
        self.command(Command::Refuse).await;
    }

    /// Brings the database up again, on the same port.
    pub async fn accept(&self) {
        self.command(Command::Accept).await;
    }

    #[track_caller]
    fn arm(&self, action: Action, point: Point) -> Handle {
        let armed = Arc::new(Armed::new(action, point));
        self.shared.arm(&armed);
        Handle::new(armed, &self.shared)
    }

    async fn command(&self, command: Command) {
        let (done, waiting) = oneshot::channel();
        let commands = self.commands.as_ref().expect("the proxy lives");
        commands
            .send((command, done))
            .expect("the proxy's thread lives");
        waiting.await.expect("the proxy's thread lives");
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Options cannot forget a socket, but their URL can. What a URL does not carry is copied; log
/// settings are lost.
fn without_socket(base: &PgConnectOptions) -> PgConnectOptions {
    let mut url = base.to_url_lossy();
    url.set_host(Some("127.0.0.1"))
        .expect("an address is a host");
    if let Some(options) = base.get_options() {
        url.query_pairs_mut().append_pair("options", options);
    }
    if let Some(name) = base.get_application_name() {
        url.query_pairs_mut().append_pair("application_name", name);
    }
    PgConnectOptions::from_url(&url).expect("what sqlx writes it reads")
}
