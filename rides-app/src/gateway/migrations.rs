//! The ledger's migrations, compiled in. Any number of gateways may start at once.

use std::borrow::Cow;

use idempotent_core::migrate_with;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};
use sqlx::{PgPool, SqlSafeStr};

/// The ledger's tables could not be brought up to date.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationError {
    /// The database could not be reached or refused a migration, or one differs from the one applied earlier.
    #[error(
        "the gateway's ledger could not be migrated and was left as it was; \
         see the cause: migrating again is safe, but helps only once that is removed"
    )]
    Refused(#[from] MigrateError),
}

pub(super) async fn run(pool: &PgPool) -> Result<(), MigrationError> {
    Ok(migrate_with(pool, migrator()).await?)
}

fn migrator() -> Migrator {
    let migrations = [
        (
            1,
            "ledger",
            include_str!("../../migrations/gateway/0001_ledger.sql"),
        ),
        (
            2,
            "receipts",
            include_str!("../../migrations/gateway/0002_receipts.sql"),
        ),
    ];
    let migrations = migrations.map(|(version, description, sql)| {
        let (description, sql) = (Cow::Borrowed(description), sql.into_sql_str());
        Migration::new(version, description, MigrationType::Simple, sql, false)
    });
    let mut migrator = Migrator::with_migrations(migrations.into());
    migrator.create_schema("gateway");
    migrator.dangerous_set_table_name("gateway._migrations");
    // A gateway of the version before may start beside a newer one.
    migrator.set_ignore_missing(true);
    migrator
}
