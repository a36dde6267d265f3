//! The database server: a throw-away cluster on a real disk, with `fsync` on.

use std::path::PathBuf;
use std::time::Duration;

use idempotent_core::embedded::{Embedded, EmbeddedError};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::contender::Error;
use crate::cpu::Used;

pub(crate) struct Cluster {
    server: Embedded,
    options: PgConnectOptions,
}

impl Cluster {
    /// Beside the benchmark's own binary, in the target directory; or in /var/tmp, if the server's
    /// user cannot enter that. Not in /tmp, which may be memory.
    pub(crate) fn start() -> Result<Self, Error> {
        let beside = std::env::current_exe()
            .ok()
            .and_then(|exe| Some(exe.parent()?.to_owned()));
        let server = match beside.map(start_in) {
            Some(Ok(server)) => server,
            _ => start_in(PathBuf::from("/var/tmp"))?,
        };
        Ok(Self {
            options: server.connect_options(),
            server,
        })
    }

    pub(crate) fn stop(self) -> Result<(), Error> {
        Ok(self.server.stop()?)
    }

    pub(crate) fn options(&self) -> &PgConnectOptions {
        &self.options
    }

    /// Processor time up to now.
    pub(crate) fn cpu(&self) -> Used {
        Used::until_now(self.server.pid())
    }

    pub(crate) async fn create_database(&self, name: &str) -> Result<PgPool, Error> {
        let create = AssertSqlSafe(format!("CREATE DATABASE {name}"));
        sqlx::raw_sql(create)
            .execute(&mut self.administer().await?)
            .await?;
        Ok(pool(&self.options, name, 1))
    }

    pub(crate) async fn administer(&self) -> Result<PgConnection, sqlx::Error> {
        PgConnection::connect_with(&self.options).await
    }

    pub(crate) async fn version(&self) -> Result<String, Error> {
        let version: String =
            sqlx::query_scalar("SELECT 'PostgreSQL ' || current_setting('server_version')")
                .fetch_one(&mut self.administer().await?)
                .await?;
        Ok(version)
    }

    pub(crate) async fn fsync(&self) -> Result<String, Error> {
        Ok(sqlx::query_scalar("SELECT current_setting('fsync')")
            .fetch_one(&mut self.administer().await?)
            .await?)
    }
}

/// The same settings for everybody: those that the engine's documentation asks for.
pub(crate) fn pool(server: &PgConnectOptions, database: &str, size: usize) -> PgPool {
    PgPoolOptions::new()
        .max_connections(u32::try_from(size).unwrap_or(u32::MAX))
        .acquire_timeout(Duration::from_secs(30))
        .test_before_acquire(false)
        .connect_lazy_with(server.clone().database(database))
}

fn start_in(parent: PathBuf) -> Result<Embedded, EmbeddedError> {
    Embedded::builder()
        .ephemeral_in(parent)
        .fsync(true)
        .setting("shared_buffers", "256MB")
        // Nothing comes in between by chance; see the opening paragraph of the benchmark.
        .setting("autovacuum", "off")
        .setting("checkpoint_timeout", "1h")
        .setting("max_wal_size", "16GB")
        .start()
}
