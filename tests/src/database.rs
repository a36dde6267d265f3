//! A database of its own for each test, in a cluster that the tests of one binary share.
//!
//! The cluster is started by the first test that asks, lives as long as the process, and is removed
//! with it. A template is migrated once and copied for each test, which costs a few milliseconds.
//! Only plain data is kept between tests: a pool belongs to the runtime of the test that opened it.
//!
//! `Drop` cannot wait for a server, so a test's database is only put on a list; the next test's
//! creation drops what is listed. The last ones go with the cluster.

use std::collections::HashMap;
use std::error::Error;
use std::mem;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use idempotent_core::embedded::{Embedded, EmbeddedError};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, PgPool};
use tokio::sync::OnceCell;
use tokio::task::spawn_blocking;
use uuid::Uuid;

/// How many connections a test's pool opens at most: the cluster's tests run at once, on as many
/// threads as there are cores, and share its connections.
pub const MAX_CONNECTIONS: u32 = 10;

/// Where Linux has memory as a directory.
const MEMORY: &str = "/dev/shm";

static CLUSTER: OnceCell<Cluster> = OnceCell::const_new();

/// A failure of a migration, whatever its type.
pub type MigrateError = Box<dyn Error + Send + Sync>;

/// A database that no other test uses.
pub struct TestDatabase {
    name: String,
    options: PgConnectOptions,
}

impl TestDatabase {
    /// A copy of the template `template`, which `migrate` fills the first time in this process. The
    /// same name must always come with the same `migrate`.
    pub async fn from_template(
        template: &'static str,
        migrate: impl AsyncFnOnce(PgPool) -> Result<(), MigrateError>,
    ) -> Self {
        let cluster = CLUSTER.get_or_init(Cluster::start).await;
        let filled = cluster.template(template);
        filled.get_or_init(|| cluster.fill(template, migrate)).await;
        cluster
            .create(&format!(
                r#"TEMPLATE "template_{template}" STRATEGY file_copy"#
            ))
            .await
    }

    /// A database with nothing in it.
    pub async fn empty() -> Self {
        let cluster = CLUSTER.get_or_init(Cluster::start).await;
        cluster.create("STRATEGY file_copy").await
    }

    /// How to connect to it, by the cluster's Unix socket.
    #[must_use]
    pub fn options(&self) -> PgConnectOptions {
        self.options.clone()
    }

    /// The same as a `DATABASE_URL`, for a child process.
    #[must_use]
    pub fn url(&self) -> String {
        self.options.to_url_lossy().into()
    }

    /// A new pool to it, for this test's runtime.
    #[must_use]
    pub fn pool(&self) -> PgPool {
        pool_options().connect_lazy_with(self.options())
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        if let Some(cluster) = CLUSTER.get() {
            let mut used = cluster.used.lock().unwrap_or_else(PoisonError::into_inner);
            used.push(mem::take(&mut self.name));
        }
    }
}

/// The settings of a test's pool, for one that goes through a proxy.
#[must_use]
pub fn pool_options() -> PgPoolOptions {
    PgPoolOptions::new()
        .max_connections(MAX_CONNECTIONS)
        .acquire_timeout(Duration::from_secs(20))
}

/// Starts the server, in memory if there is enough: to copy a template takes 10 ms there, and up to
/// 500 ms on a disk that a compiler is using too.
fn start_server() -> Result<Embedded, EmbeddedError> {
    match free_kib(MEMORY) {
        Some(free) if free > 1024 * 1024 => Embedded::builder().ephemeral_in(MEMORY).start(),
        _ => Embedded::ephemeral(),
    }
}

/// How much room a directory has: in containers, memory is often 64 MiB, which is too little.
fn free_kib(directory: &str) -> Option<u64> {
    let df = Command::new("df").args(["-kP", directory]).output().ok()?;
    let table = String::from_utf8(df.stdout).ok()?;
    table
        .lines()
        .nth(1)?
        .split_whitespace()
        .nth(3)?
        .parse()
        .ok()
}

/// The cluster of this process.
struct Cluster {
    /// Keeps the server up: it ends with this value, or with the process.
    _server: Embedded,
    admin: PgConnectOptions,
    templates: Mutex<HashMap<&'static str, Arc<OnceCell<()>>>>,
    /// Databases whose tests are over.
    used: Mutex<Vec<String>>,
}

impl Cluster {
    async fn start() -> Self {
        let server = spawn_blocking(start_server)
            .await
            .expect("starting does not panic");
        let server = server.unwrap_or_else(|error| panic!("no PostgreSQL for the tests: {error}"));
        Self {
            admin: server.connect_options(),
            _server: server,
            templates: Mutex::default(),
            used: Mutex::default(),
        }
    }

    fn template(&self, name: &'static str) -> Arc<OnceCell<()>> {
        let mut templates = self
            .templates
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Arc::clone(templates.entry(name).or_default())
    }

    /// Makes a template. A test that fails in here leaves half of one; the next begins again.
    async fn fill(
        &self,
        template: &str,
        migrate: impl AsyncFnOnce(PgPool) -> Result<(), MigrateError>,
    ) {
        let name = format!("template_{template}");
        let mut admin = self.connect().await;
        execute(
            &mut admin,
            &format!(r#"DROP DATABASE IF EXISTS "{name}" WITH (FORCE)"#),
        )
        .await;
        execute(
            &mut admin,
            &format!(r#"CREATE DATABASE "{name}" STRATEGY file_copy"#),
        )
        .await;
        let pool = pool_options().connect_lazy_with(self.admin.clone().database(&name));
        if let Err(error) = migrate(pool.clone()).await {
            panic!("the template `{template}` cannot be migrated: {error}");
        }
        pool.close().await;
        // A template that somebody is connected to cannot be copied.
        execute(
            &mut admin,
            &format!(r#"ALTER DATABASE "{name}" ALLOW_CONNECTIONS false"#),
        )
        .await;
        let _ = admin.close().await;
    }

    /// Creates a test's database, and drops those that are no longer used.
    async fn create(&self, from: &str) -> TestDatabase {
        let mut admin = self.connect().await;
        let used = mem::take(&mut *self.used.lock().unwrap_or_else(PoisonError::into_inner));
        for name in used {
            execute(
                &mut admin,
                &format!(r#"DROP DATABASE IF EXISTS "{name}" WITH (FORCE)"#),
            )
            .await;
        }
        let name = format!("t_{}", Uuid::new_v4().simple());
        execute(&mut admin, &format!(r#"CREATE DATABASE "{name}" {from}"#)).await;
        let _ = admin.close().await;
        TestDatabase {
            options: self.admin.clone().database(&name),
            name,
        }
    }

    async fn connect(&self) -> PgConnection {
        self.admin
            .connect()
            .await
            .expect("the tests' cluster takes connections")
    }
}

async fn execute(connection: &mut PgConnection, sql: &str) {
    if let Err(error) = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))
        .execute(connection)
        .await
    {
        panic!("{sql}: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn with_table() -> TestDatabase {
        TestDatabase::from_template("database", async |pool| {
            let sql = "CREATE TABLE notes (id int); INSERT INTO notes VALUES (1)";
            sqlx::raw_sql(sql).execute(&pool).await?;
            Ok(())
        })
        .await
    }

    async fn count(pool: &PgPool, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(pool).await.unwrap()
    }

    #[tokio::test]
    async fn a_copy_is_migrated_and_alone() {
        let (one, other) = tokio::join!(with_table(), with_table());
        let (one, other) = (one.pool(), other.pool());
        sqlx::raw_sql("DELETE FROM notes")
            .execute(&one)
            .await
            .unwrap();
        assert_eq!(count(&one, "SELECT count(*) FROM notes").await, 0);
        assert_eq!(count(&other, "SELECT count(*) FROM notes").await, 1);
    }

    #[tokio::test]
    async fn a_used_database_goes_with_the_next_that_is_made() {
        let used = TestDatabase::empty().await;
        let name = used.name.clone();
        let connected = used.pool().acquire().await.unwrap();
        drop(used);
        // Another test may have taken the list; then its drop is on the way.
        let made = TestDatabase::empty().await;
        let gone = async {
            let sql = "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)";
            while sqlx::query_scalar(sql)
                .bind(&name)
                .fetch_one(&made.pool())
                .await
                .unwrap()
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), gone)
            .await
            .unwrap();
        drop(connected);
    }
}
