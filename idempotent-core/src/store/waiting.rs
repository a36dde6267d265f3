//! The statements of those who wait for an attempt that another process runs.

use sqlx::Row;
use sqlx::postgres::PgConnection;

use super::claim::lease_over;

/// The keys that are waited for, column by column.
#[derive(Default)]
pub(crate) struct Awaited {
    pub(crate) users: Vec<String>,
    pub(crate) paths: Vec<String>,
    pub(crate) keys: Vec<String>,
}

/// Which of these keys nobody runs any more, by their places in the list: finished, stuck, let go,
/// lost or gone. One read for all who wait in this process.
pub(crate) async fn list_ended(
    connection: &mut PgConnection,
    awaited: &Awaited,
) -> Result<Vec<usize>, sqlx::Error> {
    let rows = sqlx::query(concat!(
        "SELECT awaited.place - 1
         FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY AS awaited (user_id, path, key, place)
         LEFT JOIN idempotency_keys AS stored
             ON stored.user_id = awaited.user_id AND stored.path = awaited.path AND stored.key = awaited.key
         WHERE stored.holder IS NULL OR ",
        lease_over!()
    ))
    .bind(&awaited.users)
    .bind(&awaited.paths)
    .bind(&awaited.keys)
    .fetch_all(connection)
    .await?;
    rows.iter()
        .map(|row| Ok(usize::try_from(row.try_get::<i64, _>(0)?).unwrap_or(usize::MAX)))
        .collect()
}

/// Tells whoever listens that attempts at these keys have ended, each named by a hash. Asynchronous:
/// who misses it looks again by itself.
pub(crate) async fn announce_ends(
    connection: &mut PgConnection,
    channel: &str,
    hashes: &str,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "SELECT pg_notify($1, $2) FROM set_config('synchronous_commit', 'off', true) AS asynchronous",
    )
    .bind(channel)
    .bind(hashes)
    .execute(connection)
    .await?;
    Ok(())
}
