//! The commands, from the command line to a running server.

use std::error::Error;
use std::fmt::Display;
use std::future::IntoFuture;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::time::Duration;

use idempotent_core::{Engine, FlowOptions};
use sqlx::postgres::PgPool;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::app::{App, contract, routes};
use crate::cli::{Cli, Command, DatabaseArgs, GatewayArgs, PaymentsArgs, ServeArgs, UsersCommand};
use crate::database::{Database, migrate};
use crate::flow::RideFlow;
use crate::gateway::{self, Gateway};
use crate::keys;
use crate::payments::GatewayClient;
use crate::receipts::ReceiptFlow;
use crate::users;

pub(crate) type Failure = Box<dyn Error + Send + Sync>;

/// How long the last answers have to get out.
const LAST_ANSWERS: Duration = Duration::from_millis(100);

/// How long one call to the gateway may take; the phase's own timeout is a little longer.
const GATEWAY_TIMEOUT: Duration = Duration::from_secs(8);

/// The key for the private gateway. Any will do there.
const DEMO_GATEWAY_KEY: &str = "sk_test_rides";

/// Does what the command line asks for.
///
/// # Errors
///
/// When something that is needed cannot be had; the message says what and what to do.
pub fn run(cli: Cli) -> Result<(), Failure> {
    match cli.command {
        None => serve(&cli.serve),
        Some(Command::Serve(args)) => serve(&args),
        Some(Command::Gateway(args)) => run_gateway(&args),
        Some(Command::Users {
            command: UsersCommand::Add { name },
            database,
        }) => add_user(&database, &name),
        Some(Command::Keys(args)) => keys::run(&args),
    }
}

pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    Ok(tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?)
}

/// A closed stdout is no reason to stop serving.
pub(crate) fn say(line: impl Display) {
    let mut stdout = std::io::stdout();
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
}

fn serve(args: &ServeArgs) -> Result<(), Failure> {
    let database = Database::open(&args.database)?;
    let runtime = runtime()?;
    let served = runtime.block_on(serve_from(&database, args));
    // Ends what still runs in the background before its database goes.
    runtime.shutdown_timeout(Duration::from_secs(1));
    database.stop();
    served
}

async fn serve_from(database: &Database, args: &ServeArgs) -> Result<(), Failure> {
    let pool = database.pool(20);
    migrate(&pool).await.map_err(|error| no_database(&error))?;
    if database.is_embedded() {
        for (name, token) in [("alice", "demo-alice"), ("bob", "demo-bob")] {
            users::add(&pool, name, token).await?;
        }
    }

    let (stop, stopping) = watch::channel(false);
    let outside = Outside::start(database, &args.payments, told(stopping.clone())).await?;
    let payments = outside.client(&args.payments)?;

    let mut options = FlowOptions::new();
    if let Some(lease) = args.lease {
        options = options.lease(lease);
    }
    let engine = Engine::builder(pool.clone())
        .flow_with(RideFlow::new(payments.clone()), options)
        .flow_with(ReceiptFlow::new(payments), options)
        .build()
        .await?;
    let workers = engine.workers().start();
    let app = App {
        pool: pool.clone(),
        rides: engine.handle::<RideFlow<GatewayClient>>()?,
    };

    let mut interrupts = Interrupts::listen()?;
    let listener = listen(args.listen).await?;
    let address = listener.local_addr()?;
    announce(address, database, &outside.url, outside.private.is_some());

    let served = routes(app).layer(contract(args.profile.into()));
    let server = axum::serve(listener, served)
        .with_graceful_shutdown(told(stopping))
        .into_future();
    let grace = args.shutdown_grace;
    let interrupted = async {
        interrupts.next().await;
        say(format_args!(
            "stopping: what runs may end within {grace:?}; the rest is handed on"
        ));
        stop.send_replace(true);
        // Nothing new is taken up while what runs comes to its end. A second signal ends the wait.
        let handing_on = async {
            tokio::join!(workers.stop(), engine.shutdown(grace));
        };
        tokio::select! {
            () = handing_on => {}
            () = interrupts.next() => {}
        }
        // The answers to what was handed on are still on their way out.
        tokio::time::sleep(LAST_ANSWERS).await;
    };
    tokio::select! {
        served = async { tokio::join!(server, interrupted).0 } => served?,
        () = overdue(stop.subscribe(), grace) => say("stopping with connections still open"),
    }
    outside.stopped().await?;
    let _ = tokio::time::timeout(Duration::from_secs(2), pool.close()).await;
    Ok(())
}

/// Where charges go: the gateway that was named, or a private one on the same database.
pub(crate) struct Outside {
    url: String,
    private: Option<JoinHandle<io::Result<()>>>,
}

impl Outside {
    pub(crate) async fn start(
        database: &Database,
        args: &PaymentsArgs,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> Result<Self, Failure> {
        if let Some(url) = &args.gateway_url {
            return Ok(Self {
                url: url.clone(),
                private: None,
            });
        }
        let listener = listen("127.0.0.1:0".parse()?).await?;
        let url = format!("http://{}", listener.local_addr()?);
        let gateway = Gateway::new(database.pool(10));
        gateway.migrate().await?;
        let private = Some(tokio::spawn(gateway::serve(listener, gateway, stop)));
        Ok(Self { url, private })
    }

    pub(crate) fn client(&self, args: &PaymentsArgs) -> Result<GatewayClient, Failure> {
        let key = args.gateway_key.as_deref().unwrap_or(DEMO_GATEWAY_KEY);
        Ok(GatewayClient::new(&self.url, key, GATEWAY_TIMEOUT)?)
    }

    /// After it was told to stop.
    pub(crate) async fn stopped(self) -> Result<(), Failure> {
        if let Some(gateway) = self.private {
            gateway.await??;
        }
        Ok(())
    }
}

fn announce(address: SocketAddr, database: &Database, gateway_url: &str, gateway_is_private: bool) {
    say(format_args!("listening on http://{address}"));
    say(format_args!("  database: {}", database.describe()));
    let private = if gateway_is_private {
        " (private, a fake)"
    } else {
        ""
    };
    say(format_args!("  gateway:  {gateway_url}{private}"));
    if !database.is_embedded() {
        say("  users:    add one with `rides-app users add NAME`");
        return;
    }
    say("  users:    alice (token demo-alice), bob (token demo-bob)");
    say(format_args!(
        "
Ask for a ride, then send the same line again: the same answer, and one charge.

  curl -i http://{address}/api/rides -H 'Authorization: Bearer demo-alice' \\
    -H 'Idempotency-Key: ride-1' -H 'Content-Type: application/json' \\
    -d '{{\"amountCents\": 2000}}'

Change the amount and keep the key: 409. See what there is:

  curl -s http://{address}/api/rides -H 'Authorization: Bearer demo-alice'

Other cards: \"paymentSource\": \"tok_chargeDeclined\", \"tok_gatewayError\", \"tok_gatewayHang\",
\"tok_slow_5000\". Kill this program while a slow one runs, start it again, and retry. Ctrl-C stops it."
    ));
    if gateway_is_private {
        say(format_args!(
            "The gateway's ledger: curl -s {gateway_url}/v1/charges -H 'Authorization: Bearer {DEMO_GATEWAY_KEY}'"
        ));
    }
}

/// A client that does not read its answer, or does not end its request, must not keep the program
/// from ending.
async fn overdue(stopping: watch::Receiver<bool>, grace: Duration) {
    told(stopping).await;
    tokio::time::sleep(grace + Duration::from_secs(8)).await;
}

async fn told(mut stopping: watch::Receiver<bool>) {
    // An error means that nobody is left to tell; that is the end as well.
    let _ = stopping.wait_for(|stop| *stop).await;
}

/// Ctrl-C and SIGTERM, from the moment this is made: a signal that comes before anybody waits for it
/// is not lost.
struct Interrupts {
    ctrl_c: Signal,
    terminate: Signal,
}

impl Interrupts {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            ctrl_c: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.ctrl_c.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.map_err(|error| {
        format!("cannot listen on {address}: {error}; choose another with --listen, such as --listen 127.0.0.1:0").into()
    })
}

pub(crate) fn no_database(error: &sqlx::migrate::MigrateError) -> Failure {
    format!("the database cannot be used: {error}; check DATABASE_URL, or leave it unset to use a private one").into()
}

fn run_gateway(args: &GatewayArgs) -> Result<(), Failure> {
    let database = Database::open_beside(&args.database)?;
    let runtime = runtime()?;
    let served: Result<(), Failure> = runtime.block_on(async {
        let gateway = Gateway::new(database.pool(10));
        gateway.migrate().await?;
        let mut interrupts = Interrupts::listen()?;
        let listener = listen(args.listen).await?;
        say(format_args!(
            "the gateway listens on http://{}",
            listener.local_addr()?
        ));
        say(format_args!("  database: {}", database.describe()));
        gateway::serve(listener, gateway, async move { interrupts.next().await }).await?;
        Ok(())
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    database.stop();
    served
}

fn add_user(args: &DatabaseArgs, name: &str) -> Result<(), Failure> {
    let database = Database::open_beside(args)?;
    let runtime = runtime()?;
    let token = users::new_token();
    let added: Result<bool, Failure> = runtime.block_on(async {
        let pool: PgPool = database.pool(1);
        migrate(&pool).await.map_err(|error| no_database(&error))?;
        let added = users::add(&pool, name, &token).await?;
        pool.close().await;
        Ok(added)
    });
    database.stop();
    if !added? {
        return Err(format!("there is a user named {name:?} already").into());
    }
    say(token);
    Ok(())
}
