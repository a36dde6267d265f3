//! A flow with a fork: a booking that finds a room, or finds the house full. Both branches join
//! again, and one of them calls a second outside.
//!
//! ```text
//! started --atomic--> quoted --external--> reserved --external--> notified --atomic--> finished
//!                                    \---> sold_out --external--> notified
//! ```
//!
//! Run it: `cargo run -p idempotent-core --example booking --features embedded`. It starts a private
//! PostgreSQL, books the last room, retries, and finds the house full for the next guest.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use idempotent_core::{
    Answer, DerivedKey, Disposition, Engine, External, Key, PhaseFailure, Reply, RunError, Tx,
    idempotent_flow,
};
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgPool;

/// What a guest asks for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BookingRequest {
    /// Who comes.
    pub guest: String,
    /// For how long.
    pub nights: i64,
}

/// What it costs.
#[derive(Debug, Serialize, Deserialize)]
pub struct Quote {
    cents: i64,
}

/// The room that the house keeps for the guest.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reservation {
    room: u32,
}

/// What the guest was told.
#[derive(Debug, Serialize, Deserialize)]
pub struct Notice {
    text: String,
}

/// The house: an outside that remembers the keys of its calls.
#[derive(Debug, Default)]
pub struct House {
    rooms: Mutex<Rooms>,
}

#[derive(Debug, Default)]
struct Rooms {
    free: Vec<u32>,
    answers: HashMap<String, Option<u32>>,
    letters: HashMap<String, String>,
}

impl House {
    /// A house with these rooms free.
    pub fn with_rooms(free: Vec<u32>) -> Self {
        let rooms = Rooms {
            free,
            ..Rooms::default()
        };
        Self {
            rooms: Mutex::new(rooms),
        }
    }

    /// How many letters were written.
    pub fn letters(&self) -> usize {
        self.rooms
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .letters
            .len()
    }

    fn reserve(&self, key: &DerivedKey) -> Option<u32> {
        let mut rooms = self.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answer) = rooms.answers.get(key.as_str()) {
            return *answer;
        }
        let room = rooms.free.pop();
        rooms.answers.insert(key.to_string(), room);
        room
    }

    fn write(&self, key: &DerivedKey, text: &str) {
        let mut rooms = self.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        rooms.letters.insert(key.to_string(), text.to_owned());
    }
}

/// The flow.
#[derive(Debug)]
pub struct Booking {
    house: Arc<House>,
}

#[idempotent_flow(name = "booking", lease = "10s", retention = "24h")]
impl Booking {
    /// Says what the stay costs.
    #[atomic(Started -> Quoted)]
    async fn quote(
        &self,
        tx: &mut Tx<'_>,
        request: &BookingRequest,
    ) -> Result<Quote, BookingError> {
        let cents: i64 = sqlx::query_scalar("SELECT cents * $1 FROM rates WHERE season = 'low'")
            .bind(request.nights)
            .fetch_one(&mut **tx)
            .await?;
        Ok(Quote { cents })
    }

    /// Asks the house for a room.
    #[external(Quoted -> Reserved | SoldOut)]
    async fn reserve(
        &self,
        call: &External<'_>,
    ) -> Result<BookingReserveOutcome<Reservation, ()>, Infallible> {
        Ok(match self.house.reserve(call.derived_key()) {
            Some(room) => BookingReserveOutcome::Reserved(Reservation { room }),
            None => BookingReserveOutcome::SoldOut(()),
        })
    }

    /// Writes to the guest who has a room.
    #[external(Reserved -> Notified, with(Quoted))]
    async fn confirm(
        &self,
        call: &External<'_>,
        reservation: &Reservation,
        quote: &Quote,
        request: &BookingRequest,
    ) -> Result<Notice, Infallible> {
        let text = format!(
            "{}: room {}, {} cents",
            request.guest, reservation.room, quote.cents
        );
        self.house.write(call.derived_key(), &text);
        Ok(Notice { text })
    }

    /// Writes to the guest who has none.
    #[external(SoldOut -> Notified)]
    async fn regret(
        &self,
        call: &External<'_>,
        request: &BookingRequest,
    ) -> Result<Notice, Infallible> {
        let text = format!("{}: no room is free", request.guest);
        self.house.write(call.derived_key(), &text);
        Ok(Notice { text })
    }

    /// Files the letter, in one transaction with the answer.
    #[atomic(Notified -> Finished)]
    async fn file(&self, tx: &mut Tx<'_>, notice: &Notice) -> Result<Reply<String>, BookingError> {
        let key_id = tx.key().id();
        sqlx::query("INSERT INTO letters (key_id, text) VALUES ($1, $2)")
            .bind(key_id)
            .bind(&notice.text)
            .execute(&mut **tx)
            .await?;
        Ok(Reply::created(notice.text.clone()))
    }
}

/// Only the database can fail here.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct BookingError(#[from] sqlx::Error);

impl PhaseFailure for BookingError {
    fn disposition(&self) -> Disposition {
        self.0.disposition()
    }
}

/// Books for two guests a house with one room, the first one twice.
pub async fn book(
    pool: PgPool,
    house: Arc<House>,
) -> Result<[Answer; 3], Box<dyn std::error::Error>> {
    idempotent_core::migrate(&pool).await?;
    sqlx::raw_sql(
        "CREATE TABLE rates (season text PRIMARY KEY, cents bigint NOT NULL);
         INSERT INTO rates VALUES ('low', 9000);
         CREATE TABLE letters (key_id uuid PRIMARY KEY, text text NOT NULL);",
    )
    .execute(&pool)
    .await?;

    let engine = Engine::builder(pool)
        .flow(Booking { house })
        .build()
        .await?;
    let bookings = engine.handle::<Booking>()?;
    let book = async |guest: &str, key: &str| -> Result<Answer, RunError> {
        let request = BookingRequest {
            guest: guest.to_owned(),
            nights: 2,
        };
        let key =
            Key::new(guest, "/bookings", key).map_err(|error| RunError::Invalid(error.into()))?;
        bookings.run(key, request).await
    };
    Ok([
        book("ada", "1").await?,
        book("ada", "1").await?,
        book("bert", "1").await?,
    ])
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = idempotent_core::embedded::Embedded::ephemeral()?;
    let pool = PgPool::connect_with(server.connect_options()).await?;
    for answer in book(pool, Arc::new(House::with_rooms(vec![7]))).await? {
        let replayed = if answer.is_replayed() {
            " (replayed)"
        } else {
            ""
        };
        println!(
            "{} {}{replayed}",
            answer.reply().status(),
            String::from_utf8_lossy(answer.reply().body())
        );
    }
    println!(
        "\n{}",
        <Booking as idempotent_core::Flow>::graph().mermaid()
    );
    Ok(server.stop()?)
}
