//! What does the framework cost? The same ride, done three times: through the framework, by hand in
//! the same form (the same statements, without a framework around them), and in the form of the
//! article that made recovery points known. Then what a retry of a finished request costs.
//!
//! ```text
//! cargo bench -p idempotent-core --bench flows --features embedded -- --quick
//! ```
//!
//! The server is on the same machine, where a round trip costs little but the work of both sides; the
//! ride is therefore done once more with a network in between (`far away`), where round trips are
//! what it takes time for.
//!
//! A machine's speed changes from second to second, so no number here is compared with one from
//! another minute: all forms run in short windows that take turns, and what is judged is the median
//! of the ratios within one turn. Commits wait for the disk (`fsync` is on, the cluster lies on a
//! real one). Checkpoints and autovacuum are put off until after the run: they would fall on one form
//! by chance.
//!
//! It is a measurement and not a test: a missed target is printed, and the exit code stays 0.

#![allow(
    clippy::expect_used,
    reason = "a benchmark that cannot go on has nobody to tell but the person who started it"
)]

mod article;
mod by_hand;
mod cluster;
mod contender;
mod cpu;
mod framework;
mod measure;
mod options;
mod report;
mod ride;
mod wire;

use std::time::Duration;

use sqlx::postgres::PgConnectOptions;

use crate::cluster::Cluster;
use crate::contender::{Contender, Error};
use crate::measure::{Asks, Turns};
use crate::options::Options;
use crate::report::{Report, Target};
use crate::wire::Forwarder;

/// Finished keys to replay: the same number for every number of clients up to 64, so that no two
/// clients ask for one key at the same time.
const FINISHED_KEYS: usize = 1_920;

fn main() -> Result<(), Error> {
    let Some(options) = Options::from_args(std::env::args().skip(1))? else {
        println!("{}", options::HELP);
        return Ok(());
    };
    // Started before the runtime: starting a server blocks.
    let cluster = Cluster::start()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(run(&options, &cluster))?;
    drop(runtime);
    cluster.stop()
}

async fn run(options: &Options, cluster: &Cluster) -> Result<(), Error> {
    println!(
        "{}; fsync is {}; {} rounds of {:?} for each form and number of clients",
        cluster.version().await?,
        cluster.fsync().await?,
        options.rounds,
        options.window,
    );
    let finished = Asks::list(FINISHED_KEYS);
    create_databases(cluster, &finished).await?;
    let mut report = Report::default();

    let forwarder = Forwarder::start(cluster, Duration::ZERO)?;
    for form in flows(forwarder.options(), 1, options).await? {
        report.add_trips(
            form.name,
            wire::count(&forwarder, &form, &Asks::Fresh).await?,
        );
    }
    for form in replays(forwarder.options(), 1, options).await? {
        report.add_trips(form.name, wire::count(&forwarder, &form, &finished).await?);
    }

    let far = Forwarder::start(cluster, options.away)?;
    for &clients in &options.clients {
        // Some more connections than clients: a connection that was just given back is still busy
        // for a moment, with the ping that sqlx sends before it lies in the pool again.
        let pool_size = clients + 4;
        let turns = Turns {
            cluster,
            clients,
            rounds: options.rounds,
            window: options.window,
        };

        let forms = flows(cluster.options(), pool_size, options).await?;
        report.add(
            "ride flow",
            clients,
            &turns.take(&forms, &Asks::Fresh).await?,
            &RIDE_TARGETS,
        );
        close(forms).await;

        // Beyond this many, the forwarder's own work is what would be measured.
        if clients <= 8 && !options.away.is_zero() {
            let forms = flows(far.options(), pool_size, options).await?;
            report.add(
                "far away",
                clients,
                &turns.take(&forms, &Asks::Fresh).await?,
                &RIDE_TARGETS,
            );
            close(forms).await;
        }

        let forms = replays(cluster.options(), pool_size, options).await?;
        // Many times faster than flows: half the time shows as much.
        let turns = Turns {
            window: options.window / 2,
            ..turns
        };
        report.add(
            "replay",
            clients,
            &turns.take(&forms, &finished).await?,
            &REPLAY_TARGETS,
        );
        close(forms).await;
    }
    report.print(options.away);
    Ok(())
}

const RIDE_TARGETS: [Target; 2] = [
    Target {
        of: framework::NAME,
        to: by_hand::NAME,
        at_least: Some(0.9),
    },
    Target {
        of: framework::NAME,
        to: article::NAME,
        at_least: Some(1.4),
    },
];

const REPLAY_TARGETS: [Target; 2] = [
    Target {
        of: framework::REPLAY,
        to: by_hand::REPLAY,
        at_least: Some(0.8),
    },
    Target {
        of: framework::REPLAY,
        to: by_hand::BARE_SELECT,
        at_least: None,
    },
];

/// A database for each form, so that all tables grow alike. The keys that will be replayed are
/// finished in each, which also lets the planner know that the tables are not empty: a plan is kept
/// as long as its connection.
async fn create_databases(cluster: &Cluster, finished: &Asks) -> Result<(), Error> {
    for name in [framework::NAME, by_hand::NAME, article::NAME] {
        let database = cluster.create_database(name).await?;
        ride::create_table(&database).await?;
        if name == article::NAME {
            article::create_table(&database).await?;
        } else {
            idempotent_core::migrate(&database).await?;
        }
        database.close().await;
    }
    let forms = flows(cluster.options(), 12, &Options::default()).await?;
    for form in &forms {
        measure::once_each(form, finished, 8).await?;
        sqlx::raw_sql("VACUUM ANALYZE").execute(&form.pool).await?;
    }
    close(forms).await;
    Ok(())
}

async fn flows(
    server: &PgConnectOptions,
    pool_size: usize,
    options: &Options,
) -> Result<Vec<Contender>, Error> {
    let pool = |name| cluster::pool(server, name, pool_size);
    Ok(options.wanted(vec![
        framework::flow(pool(framework::NAME)).await?,
        by_hand::flow(pool(by_hand::NAME)),
        article::flow(pool(article::NAME)),
    ]))
}

async fn replays(
    server: &PgConnectOptions,
    pool_size: usize,
    options: &Options,
) -> Result<Vec<Contender>, Error> {
    let pool = |name| cluster::pool(server, name, pool_size);
    Ok(options.wanted(vec![
        framework::replay(pool(framework::NAME)).await?,
        by_hand::replay(pool(by_hand::NAME)),
        by_hand::bare_select(pool(by_hand::NAME)),
    ]))
}

async fn close(forms: Vec<Contender>) {
    for form in forms {
        form.pool.close().await;
    }
    // The backends of the last pools go away while nothing is measured.
    tokio::time::sleep(Duration::from_millis(50)).await;
}
