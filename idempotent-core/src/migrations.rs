//! The framework's own tables. They are kept apart from the application's: another migrations
//! table, so neither side's versions are in the other's way. Any number of processes may start at
//! once; the first one migrates and the rest wait for it, without a session lock (which PgBouncer
//! in transaction mode would lose).

use sqlx::SqlSafeStr;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};
use sqlx::postgres::PgPool;

/// Where the versions applied to the framework's tables are listed.
const TABLE: &str = "idempotent_migrations";

/// Any number that no application is likely to lock.
const LOCK: i64 = i64::from_be_bytes(*b"idempote");

const MIGRATIONS: &[(i64, &str, &str)] = &[(
    1,
    "idempotency keys",
    include_str!("../migrations/0001_idempotency_keys.sql"),
)];

/// Creates or updates the framework's tables, in the schema that the connection's `search_path`
/// names first. Call it once at start-up, before [`EngineBuilder::build`](crate::EngineBuilder::build).
///
/// # Errors
///
/// When the database cannot be reached, or the role may not create tables. Nothing is half done: it
/// is one transaction. Tables of a newer version are left as they are.
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// idempotent_core::migrate(&pool).await?;
/// # Ok(())
/// # }
/// ```
pub async fn migrate(pool: &PgPool) -> Result<(), MigrateError> {
    let migrations = MIGRATIONS
        .iter()
        .map(|&(version, description, sql)| {
            let kind = MigrationType::Simple;
            Migration::new(version, description.into(), kind, sql.into_sql_str(), false)
        })
        .collect();
    let mut migrator = Migrator::with_migrations(migrations);
    migrator.dangerous_set_table_name(TABLE);
    // A version before may start beside a newer one, or be rolled back to.
    migrator.set_ignore_missing(true);
    migrate_with(pool, migrator).await
}

/// Runs an application's own migrations the way the framework runs its: in one transaction, behind
/// a transaction-level advisory lock, so that many processes may start at once and no session lock
/// is needed. A migration that cannot run in a transaction (`CREATE INDEX CONCURRENTLY`) has no
/// place here.
///
/// # Errors
///
/// When the database cannot be reached or refuses a migration, or a migration differs from the one
/// applied earlier. Nothing is changed then; running it again is safe.
pub async fn migrate_with(pool: &PgPool, mut migrator: Migrator) -> Result<(), MigrateError> {
    migrator.set_locking(false);
    // Read committed, whatever the database's default: a snapshot taken before the wait for the lock
    // would not show what the process before us did.
    let mut tx = pool
        .begin_with("BEGIN ISOLATION LEVEL READ COMMITTED")
        .await?;
    sqlx::query("SELECT pg_advisory_xact_lock($1)")
        .bind(LOCK)
        .execute(&mut *tx)
        .await?;
    // "Already exists, skipping" at every start is noise.
    sqlx::query("SET LOCAL client_min_messages = warning")
        .execute(&mut *tx)
        .await?;
    // Not `run`: its future is not Send here (a known limit of sqlx's `Acquire`).
    migrator.run_direct(None, &mut *tx, false).await?;
    tx.commit().await?;
    Ok(())
}
