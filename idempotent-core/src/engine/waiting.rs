//! Waiting for an attempt that somebody else runs: a request that would be told "in progress" may be
//! patient instead. An identical request in this process is joined; one in another process is looked
//! for, every 100 ms, by one statement for all who wait here. Where processes tell each other
//! (`EngineBuilder::notify`), a message makes that look come at once; who misses one loses nothing.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use sha2::{Digest, Sha256};
use sqlx::postgres::{PgListener, PgPool};
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::time::Instant;

use super::{Answer, Handle, Inner, Prepared};
use crate::error::RunError;
use crate::flow::Flow;
use crate::key::{Key, hash_part};
use crate::store::{self, Awaited, bounded};

/// How long a request waits where another attempt runs it, before it is told that one is in
/// progress. The other attempt runs on in any case.
///
/// ```
/// use std::time::Duration;
/// use idempotent_core::Patience;
///
/// // A second for an identical request in this process, nothing for one elsewhere.
/// let usual = Patience::default();
/// // What a client asks for with `Prefer: wait=10`.
/// let asked = Patience::of(Duration::from_secs(10));
/// # let _ = (usual, asked);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    here: Duration,
    anywhere: Duration,
}

impl Default for Patience {
    /// A second for an identical request that runs in this process, which costs nothing; none for one
    /// that runs in another.
    fn default() -> Self {
        Self {
            here: Duration::from_secs(1),
            anywhere: Duration::ZERO,
        }
    }
}

impl Patience {
    /// So long, wherever the other attempt runs.
    #[must_use]
    pub fn of(time: Duration) -> Self {
        Self {
            here: time,
            anywhere: time,
        }
    }

    /// None: a duplicate is told at once.
    #[must_use]
    pub fn none() -> Self {
        Self::of(Duration::ZERO)
    }
}

/// Between two looks at the keys that are waited for.
const LOOK: Duration = Duration::from_millis(100);

/// How long the database may take to answer a look.
const LOOK_TIME: Duration = Duration::from_secs(5);

/// The channel of the messages that attempts have ended.
const CHANNEL: &str = "idempotent_ends";

/// How many ended attempts one message names: each takes 33 of the 8,000 bytes that it may have.
const BATCH: usize = 200;

/// The requests of this process that wait for attempts elsewhere.
#[derive(Debug)]
pub(super) struct Waiting {
    places: Arc<Semaphore>,
    listens: bool,
    awaited: Mutex<HashMap<Name, Waiters>>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Name {
    user: String,
    path: String,
    key: String,
}

/// The user and the key stay out of logs.
impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Name(..)")
    }
}

#[derive(Debug, Default)]
struct Waiters {
    count: usize,
    ended: Arc<Notify>,
}

/// Takes a name off the list when the last who waits for it goes.
struct Waiter<'a> {
    waiting: &'a Waiting,
    name: Name,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut awaited = self.waiting.awaited();
        if let Some(waiters) = awaited.get_mut(&self.name) {
            waiters.count -= 1;
            if waiters.count == 0 {
                awaited.remove(&self.name);
            }
        }
    }
}

impl Waiting {
    pub(super) fn new(most: usize, listens: bool) -> Self {
        Self {
            places: Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS))),
            listens,
            awaited: Mutex::default(),
        }
    }

    fn awaited(&self) -> MutexGuard<'_, HashMap<Name, Waiters>> {
        // A panic while it was locked leaves it whole: every change to it is one call.
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The keys that are waited for, and whom to tell.
    fn list(&self) -> (Awaited, Vec<Arc<Notify>>) {
        let mut awaited = Awaited::default();
        let mut ended = Vec::new();
        for (name, waiters) in self.awaited().iter() {
            awaited.users.push(name.user.clone());
            awaited.paths.push(name.path.clone());
            awaited.keys.push(name.key.clone());
            ended.push(Arc::clone(&waiters.ended));
        }
        (awaited, ended)
    }
}

impl Inner {
    /// Waits until nobody runs this key, or the time is up. False: too many wait here already.
    async fn wait_for_end(self: &Arc<Self>, key: &Key, until: Instant) -> bool {
        let Ok(_place) = Arc::clone(&self.waiting.places).try_acquire_owned() else {
            return false;
        };
        let name = Name {
            user: key.user.clone(),
            path: key.path.clone(),
            key: key.key.clone(),
        };
        let (ended, is_first) = {
            let mut awaited = self.waiting.awaited();
            let is_first = awaited.is_empty();
            let waiters = awaited.entry(name.clone()).or_default();
            waiters.count += 1;
            (Arc::clone(&waiters.ended), is_first)
        };
        let _waiter = Waiter {
            waiting: &self.waiting,
            name,
        };
        if is_first {
            tokio::spawn(look_while_awaited(
                Arc::downgrade(self),
                self.pool.clone(),
                self.waiting.listens,
            ));
        }
        let _ = tokio::time::timeout_at(until, ended.notified()).await;
        true
    }

    /// Looks once at all that is waited for, and wakes those whose wait is over. False: nobody waits.
    async fn look(&self) -> bool {
        let (awaited, ended) = self.waiting.list();
        if ended.is_empty() {
            return false;
        }
        let looked = async {
            let mut connection = store::acquire(&self.pool).await?;
            let found = bounded(LOOK_TIME, store::list_ended(&mut connection, &awaited)).await;
            if found.is_err() {
                connection.close_on_drop();
            }
            found
        };
        match looked.await {
            Ok(places) => {
                for ended in places.into_iter().filter_map(|place| ended.get(place)) {
                    ended.notify_waiters();
                }
            }
            Err(error) => {
                tracing::debug!(%error, "could not look for the ends of attempts; looking again")
            }
        }
        true
    }
}

/// Lives as long as somebody waits.
async fn look_while_awaited(inner: Weak<Inner>, pool: PgPool, listens: bool) {
    let mut listener = match listens {
        true => listen(&pool).await,
        false => None,
    };
    loop {
        match inner.upgrade() {
            Some(inner) if inner.look().await => {}
            _ => return,
        }
        let heard = async {
            match &mut listener {
                Some(listener) => listener.try_recv().await.is_ok(),
                None => std::future::pending().await,
            }
        };
        if let Ok(false) = tokio::time::timeout(LOOK, heard).await {
            // It cannot be heard any more; who waits still looks.
            listener = None;
        }
    }
}

async fn listen(pool: &PgPool) -> Option<PgListener> {
    let listening = async {
        let mut listener = PgListener::connect_with(pool).await?;
        listener.listen(CHANNEL).await?;
        Ok::<_, sqlx::Error>(listener)
    };
    match bounded(LOOK_TIME, listening).await {
        Ok(listener) => Some(listener),
        Err(error) => {
            tracing::debug!(%error, "cannot listen for the ends of attempts; looking for them");
            None
        }
    }
}

/// Tells the other processes which attempts have ended here.
#[derive(Debug)]
pub(super) struct Announcer(mpsc::Sender<String>);

impl Announcer {
    /// Starts the task that tells. It ends with the announcer.
    pub(super) fn start(pool: PgPool) -> Self {
        let (sender, mut ended) = mpsc::channel::<String>(10 * BATCH);
        tokio::spawn(async move {
            let mut hashes = Vec::with_capacity(BATCH);
            while ended.recv_many(&mut hashes, BATCH).await > 0 {
                let told = async {
                    let mut connection = store::acquire(&pool).await?;
                    store::announce_ends(&mut connection, CHANNEL, &hashes.join(",")).await
                };
                if let Err(error) = bounded(LOOK_TIME, told).await {
                    tracing::debug!(%error, "the ends of attempts were not announced; who waits looks for them");
                }
                hashes.clear();
            }
        });
        Self(sender)
    }

    /// The key is named by a hash: everybody who may connect to the database can listen.
    pub(super) fn announce(&self, user: &str, path: &str, key: &str) {
        let mut hash = Sha256::new();
        for part in [user, path, key] {
            hash_part(&mut hash, part.as_bytes());
        }
        let name = hash.finalize();
        let name: String = name
            .iter()
            .take(16)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        // A full queue means that much is ending: who waits looks by itself.
        let _ = self.0.try_send(name);
    }
}

impl<F: Flow> Handle<F> {
    /// As [`run`](Self::run), but where another attempt has the key, in this process or in another,
    /// waits for its end: then the answer is that attempt's, or this request goes on where it stopped.
    ///
    /// # Errors
    ///
    /// See [`RunError`]; [`RunError::InProgress`] when the patience was used up.
    pub async fn run_patiently(
        &self,
        key: Key,
        request: F::Request,
        patience: Patience,
    ) -> Result<Answer, RunError> {
        let prepared = Prepared::new(key, request)?;
        self.run_prepared(Arc::new(prepared), patience).await
    }

    pub(super) async fn run_prepared(
        &self,
        prepared: Arc<Prepared>,
        patience: Patience,
    ) -> Result<Answer, RunError> {
        let began = Instant::now();
        let (here, anywhere) = (began + patience.here, began + patience.anywhere);
        loop {
            let running = self.start_prepared(Arc::clone(&prepared))?;
            let answered = if running.is_joined() {
                match tokio::time::timeout_at(here.max(anywhere), running.wait()).await {
                    Ok(answered) => answered,
                    // How long its lease lasts still is known in the database only.
                    Err(_) => return self.answer_if_known(&prepared, in_progress()).await,
                }
            } else {
                running.wait().await
            };
            match answered {
                Err(RunError::InProgress { retry_after }) if Instant::now() < anywhere => {
                    if !self.inner.wait_for_end(&prepared.key, anywhere).await {
                        return Err(RunError::InProgress { retry_after });
                    }
                }
                answered => return answered,
            }
        }
    }
}

/// Where nothing better is known than that it runs here.
fn in_progress() -> RunError {
    RunError::InProgress {
        retry_after: Duration::from_secs(1),
    }
}
