//! Which database: the one that `DATABASE_URL` names, or a private PostgreSQL that lives and dies
//! with the program.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use idempotent_core::embedded::{Embedded, EmbeddedError, default_data_root};
use idempotent_core::migrate_with;
use sqlx::SqlSafeStr;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};

use crate::cli::DatabaseArgs;

/// So that the server notices within half a minute when this machine is gone, and not after the two
/// hours that are usual. Without a meaning, and without harm, on a Unix socket.
const KEEPALIVES: &str =
    "SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3";

/// A database to connect to.
#[derive(Debug)]
pub struct Database {
    options: PgConnectOptions,
    /// The private server, where this program started it.
    server: Option<Embedded>,
    embedded_in: Option<PathBuf>,
}

/// The database cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatabaseError {
    /// The URL is not one.
    #[error("DATABASE_URL cannot be read: {0}")]
    Url(#[source] sqlx::Error),
    /// The private PostgreSQL cannot be started.
    #[error(transparent)]
    Embedded(#[from] EmbeddedError),
}

impl Database {
    /// The database to serve from. Blocks while a private server starts.
    pub fn open(args: &DatabaseArgs) -> Result<Self, DatabaseError> {
        if let Some(url) = &args.database_url {
            return Self::at(url);
        }
        let data_dir = data_dir(args);
        let server = Embedded::start(&data_dir)?;
        Ok(Self {
            options: server.connect_options(),
            server: Some(server),
            embedded_in: Some(data_dir),
        })
    }

    /// The database to work on beside a server: the private one that is up already, if there is one.
    pub fn open_beside(args: &DatabaseArgs) -> Result<Self, DatabaseError> {
        if let Some(url) = &args.database_url {
            return Self::at(url);
        }
        let data_dir = data_dir(args);
        match Embedded::attach(&data_dir)? {
            Some(options) => Ok(Self {
                options,
                server: None,
                embedded_in: Some(data_dir),
            }),
            None => Self::open(args),
        }
    }

    fn at(url: &str) -> Result<Self, DatabaseError> {
        let options = url.parse().map_err(DatabaseError::Url)?;
        Ok(Self {
            options,
            server: None,
            embedded_in: None,
        })
    }

    /// Whether it is private to this program, so that demo users do no harm.
    pub fn is_embedded(&self) -> bool {
        self.embedded_in.is_some()
    }

    /// What a person is told.
    pub fn describe(&self) -> String {
        match (&self.embedded_in, &self.server) {
            (Some(path), Some(server)) => {
                format!(
                    "a private PostgreSQL {} in {}",
                    server.version(),
                    path.display()
                )
            }
            (Some(path), None) => format!("the private PostgreSQL in {}", path.display()),
            (None, _) => {
                format!(
                    "{} on {}",
                    self.options
                        .get_database()
                        .unwrap_or("the default database"),
                    self.options.get_host()
                )
            }
        }
    }

    /// A pool. Stale connections are found by the engine, which saves a round trip for each use.
    pub fn pool(&self, connections: u32) -> PgPool {
        PgPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(Duration::from_secs(5))
            .after_connect(|connection, _| {
                Box::pin(async move {
                    sqlx::raw_sql(KEEPALIVES).execute(connection).await?;
                    Ok(())
                })
            })
            .test_before_acquire(false)
            .connect_lazy_with(self.options.clone())
    }

    /// Stops the private server, if this program started it.
    pub fn stop(self) {
        if let Some(Err(error)) = self.server.map(Embedded::stop) {
            let _ = writeln!(
                std::io::stderr(),
                "the private PostgreSQL did not stop cleanly: {error}"
            );
        }
    }
}

fn data_dir(args: &DatabaseArgs) -> PathBuf {
    args.data_dir
        .clone()
        .unwrap_or_else(|| default_data_root("rides-app"))
}

/// Creates or updates all tables: the framework's and the service's.
pub async fn migrate(pool: &PgPool) -> Result<(), MigrateError> {
    idempotent_core::migrate(pool).await?;
    let rides = include_str!("../migrations/0001_rides.sql");
    let rides = Migration::new(
        1,
        "rides".into(),
        MigrationType::Simple,
        rides.into_sql_str(),
        false,
    );
    let mut migrator = Migrator::with_migrations(vec![rides]);
    migrator.set_ignore_missing(true);
    migrate_with(pool, migrator).await
}
