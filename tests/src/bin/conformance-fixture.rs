//! Serves [`tests::fixture`] for a client that wants to try the contract of the HTTP layer, on a
//! database that is gone with this program, unless it is told of one that outlives it:
//! `cargo run -p tests --bin conformance-fixture -- --listen 127.0.0.1:4000`.

use std::error::Error;
use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

use clap::Parser;
use idempotent_core::embedded::Embedded;
use idempotent_core::http::Contract;
use idempotent_core::{Engine, FlowOptions};
use rides_app::cli::{ProfileName, parse_duration};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tests::fixture;

/// An API to try the contract of the idempotency layer against.
///
/// POST /echo, /status/{code}, /slow?ms=N and /large?bytes=N need an Idempotency-Key; GET /counter
/// tells how many of them were handled, and POST /reset begins anew.
#[derive(Debug, Parser)]
#[command(name = "conformance-fixture")]
struct Args {
    /// Where to listen. Port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:4000", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// A database that is there already, in place of one of its own.
    #[arg(long, value_name = "URL")]
    database: Option<PgConnectOptions>,
    /// Which statuses and which shape errors have.
    #[arg(long, value_enum, default_value_t = ProfileName::Ietf)]
    profile: ProfileName,
    /// How long answers are kept for replays (1s, 24h).
    #[arg(long, default_value = "24h", value_parser = parse_duration)]
    retention: Duration,
    /// How long an attempt may run without renewing its lease (500ms, 15s): 15 s, or the retention
    /// where that is shorter, unless given.
    #[arg(long, value_parser = parse_duration)]
    lease: Option<Duration>,
    /// The fewest characters of a key.
    #[arg(long, default_value_t = 1)]
    shortest_key: usize,
}

/// A lease, unless given.
const LEASE: Duration = Duration::from_secs(15);

/// How often what is past its retention is deleted.
const REAP_EVERY: Duration = Duration::from_millis(250);

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let args = Args::parse();
    let (own, database) = match args.database.clone() {
        Some(database) => (None, database),
        None => {
            let own = Embedded::ephemeral()?;
            let database = own.connect_options();
            (Some(own), database)
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(serve(database, args))?;
    if let Some(own) = own {
        own.stop()?;
    }
    Ok(())
}

async fn serve(database: PgConnectOptions, args: Args) -> Result<(), Box<dyn Error + Send + Sync>> {
    let pool = PgPoolOptions::new()
        .max_connections(20)
        .test_before_acquire(false)
        .connect_lazy_with(database);
    idempotent_core::migrate(&pool).await?;
    let options = FlowOptions::new()
        .lease(args.lease.unwrap_or(LEASE.min(args.retention)))
        .retention(args.retention);
    let engine = fixture::engine(pool, options).await?;
    tokio::spawn(reap(engine.clone()));

    let contract = Contract::new(args.profile.into()).shortest_key(args.shortest_key);
    let listener = tokio::net::TcpListener::bind(args.listen).await?;
    let mut stdout = std::io::stdout();
    // A closed stdout is no reason not to serve.
    let _ = writeln!(stdout, "listening on http://{}", listener.local_addr()?);
    let _ = stdout.flush();
    axum::serve(listener, fixture::router(&engine, contract))
        .with_graceful_shutdown(async {
            let _ = tokio::signal::ctrl_c().await;
        })
        .await?;
    Ok(())
}

async fn reap(engine: Engine) {
    loop {
        tokio::time::sleep(REAP_EVERY).await;
        // The next pass makes up for it.
        let _ = engine.reap_once().await;
    }
}
