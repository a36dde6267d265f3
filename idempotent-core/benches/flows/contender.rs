//! One of those that are compared: a name, a pool of its own, and the way to do one piece of work.

use std::pin::Pin;
use std::sync::Arc;

use sqlx::postgres::PgPool;
use uuid::Uuid;

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Who asks, and with which key.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) user: String,
    pub(crate) key: String,
}

impl Ask {
    pub(crate) fn fresh(client: usize) -> Self {
        Self {
            user: format!("5f0c1c52-user-{client:04}"),
            key: Uuid::new_v4().to_string(),
        }
    }
}

type Work = dyn Fn(Ask) -> Pin<Box<dyn Future<Output = Result<(), Error>> + Send>> + Send + Sync;

pub(crate) struct Contender {
    pub(crate) name: &'static str,
    pub(crate) pool: PgPool,
    work: Arc<Work>,
}

impl Contender {
    pub(crate) fn new<Working>(
        name: &'static str,
        pool: PgPool,
        work: impl Fn(Ask) -> Working + Send + Sync + 'static,
    ) -> Self
    where
        Working: Future<Output = Result<(), Error>> + Send + 'static,
    {
        Self {
            name,
            pool,
            work: Arc::new(move |ask| Box::pin(work(ask))),
        }
    }

    /// Does one piece of work.
    pub(crate) fn work(&self) -> Arc<Work> {
        Arc::clone(&self.work)
    }
}

/// The answer must be one of this kind, or something else was measured than what was meant.
pub(crate) fn expect_answer(
    status: u16,
    replayed: bool,
    expected_replay: bool,
) -> Result<(), Error> {
    if status == 201 && replayed == expected_replay {
        return Ok(());
    }
    Err(format!(
        "answered {status}, replayed: {replayed}, where a 201, replayed: {expected_replay}, was due"
    )
    .into())
}
