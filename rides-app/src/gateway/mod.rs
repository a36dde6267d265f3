//! The payment gateway: the outside world, as a server that can be run and looked at.
//!
//! It speaks Stripe's charge call over real HTTP and keeps its ledger in its own Postgres schema, through
//! its own pool, so that the ride service meets what it would meet outside: a company that charges cards,
//! dedupes by `Idempotency-Key`, and sometimes answers late, wrongly or not at all. The `source` of a
//! charge drives it, like Stripe's test cards:
//!
//! | token | what happens |
//! | --- | --- |
//! | `tok_visa` | charged |
//! | `tok_chargeDeclined` | 402 `card_declined`: a remembered answer |
//! | `tok_gatewayError` | 500 twice per idempotency key (always without one), not remembered; then charged |
//! | `tok_gatewayHang` | charged, then never answered; the same key again gets the replay |
//! | `tok_slow_<ms>` | charged after that many milliseconds (600000 at most); the key is in use meanwhile |
//!
//! Three rules make it correct with any number of gateway processes on one database, each of which may be
//! killed anywhere:
//!
//! - a key is *taken* before any work, by one statement; who finds it taken answers 409;
//! - a charge and its remembered answer are *one statement*, so one commit, and only the call that still
//!   holds the key can make it;
//! - no lock, transaction or connection is held in between. A killed gateway leaves its marker behind, which
//!   runs out by the database's clock, ten seconds after the call's own deliberate delay.
//!
//! From here: `charges` is what the calls do, `ledger` is every SQL statement, `request` is what is
//! accepted, `answer` is what is said.
//!
//! Deliberately absent: refunds, customers, the card's number, pruning of old keys, and rows for declined
//! charges (the ledger holds the money that was taken).

mod answer;
mod charges;
mod ledger;
mod migrations;
mod receipts;
mod request;

use std::future::{Future, IntoFuture};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{Method, Uri};
use axum::routing::{get, post};
use sqlx::PgPool;
use tokio::net::TcpListener;
use tokio::sync::watch;

use self::answer::Answer;
pub use self::migrations::MigrationError;

/// How long a stopping server waits for calls that are still being answered.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// A charge with 50 metadata entries fits; nothing a charge needs is larger.
const BODY_LIMIT: usize = 128 * 1024;

/// The payment gateway on its ledger.
///
/// Call [`migrate`](Self::migrate) once, then [`serve`] it, or mount its [`router`](Self::router).
#[derive(Debug, Clone)]
pub struct Gateway {
    pool: PgPool,
}

impl Gateway {
    /// A gateway that keeps its ledger in the schema `gateway` of this pool's database.
    ///
    /// The pool should be the gateway's own: it stands for another company's database.
    pub fn new(pool: PgPool) -> Self {
        Self { pool }
    }

    /// Creates or updates the ledger's tables. Safe to run again, and from many processes at once.
    ///
    /// # Errors
    ///
    /// When the database cannot be reached or refuses a migration. Nothing is changed then; running it
    /// again is safe.
    pub async fn migrate(&self) -> Result<(), MigrationError> {
        migrations::run(&self.pool).await
    }

    /// The gateway's routes: `POST /v1/charges`, `GET /v1/charges`, `GET /v1/charges/{id}`,
    /// `POST /v1/receipts`, `GET /healthz`.
    pub fn router(&self) -> Router {
        self.routes(Arc::new(watch::Sender::new(false)))
    }

    fn routes(&self, closing: Arc<watch::Sender<bool>>) -> Router {
        Router::new()
            .route("/v1/charges", post(charges::create).get(charges::list))
            .route("/v1/charges/{id}", get(charges::retrieve))
            .route("/v1/receipts", post(receipts::create))
            .route("/healthz", get(async || "ok\n"))
            .fallback(unknown_url)
            .method_not_allowed_fallback(unknown_url)
            .layer(DefaultBodyLimit::max(BODY_LIMIT))
            .with_state(Desk {
                pool: self.pool.clone(),
                closing,
            })
    }
}

/// Serves the gateway on `listener` until `shutdown` completes.
///
/// Calls that are being answered are then finished; calls that wait on purpose (`tok_slow_…`,
/// `tok_gatewayHang`) are answered 503, which a client retries. Returns within about ten seconds of the
/// shutdown, whatever the clients do.
///
/// # Errors
///
/// As `axum::serve`: in practice never.
pub async fn serve(
    listener: TcpListener,
    gateway: Gateway,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let closing = Arc::new(watch::Sender::new(false));
    let announce = {
        let closing = Arc::clone(&closing);
        async move {
            shutdown.await;
            closing.send_replace(true);
        }
    };
    let server = axum::serve(listener, gateway.routes(Arc::clone(&closing)))
        .with_graceful_shutdown(announce)
        .into_future();

    // A client that stops in the middle of sending would keep a graceful shutdown waiting for ever.
    let overdue = {
        let closing = Closing::subscribe(&closing);
        async move {
            closing.announced().await;
            tokio::time::sleep(SHUTDOWN_GRACE).await;
        }
    };
    tokio::select! {
        served = server => served?,
        () = overdue => tracing::warn!("gateway stopped with connections still open"),
    }

    // Calls run on their own tasks and each has subscribed: when all receivers are gone, all are done.
    let _ = tokio::time::timeout(SHUTDOWN_GRACE, closing.closed()).await;
    Ok(())
}

async fn unknown_url(method: Method, uri: Uri) -> Answer {
    Answer::unknown_url(&method, uri.path())
}

/// What every handler works with.
#[derive(Debug, Clone)]
struct Desk {
    pool: PgPool,
    closing: Arc<watch::Sender<bool>>,
}

impl Desk {
    fn closing(&self) -> Closing {
        Closing::subscribe(&self.closing)
    }
}

/// Says when the server wants to stop. While one is alive, [`serve`] knows that a call is still running.
#[derive(Debug, Clone)]
struct Closing(watch::Receiver<bool>);

impl Closing {
    fn subscribe(sender: &watch::Sender<bool>) -> Self {
        Self(sender.subscribe())
    }

    /// Completes when the shutdown is announced; never, if nobody is left to announce it.
    async fn announced(mut self) {
        if self.0.wait_for(|closing| *closing).await.is_err() {
            std::future::pending().await
        }
    }
}
