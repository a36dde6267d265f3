//! A fleet of servers on one database, killed and stopped at random, and clients that send every
//! request until it is answered: what was accepted took effect once, and everything ends.

use std::collections::HashMap;
use std::env;
use std::os::unix::process::ExitStatusExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use sqlx::Row;
use tests::server::{Server, ServerConfig, http};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::chaos::{World, code, send};

/// How many servers are alive at a time, or about to be; a run sees more than a hundred.
const SERVERS: usize = 10;

const CLIENTS: u64 = 8;

/// How long servers are killed, and how often.
const STORM: Duration = Duration::from_secs(40);
const GUST: Duration = Duration::from_millis(300);

/// Longer than the lease: what wakes is a zombie.
const FROZEN: Duration = Duration::from_millis(1500);

/// Within this, every request is answered, and everything has ended after the storm.
const PATIENCE: Duration = Duration::from_secs(60);

/// A small lease, so that takeovers are many. What is stopped may end, or not.
const OPTIONS: [&str; 4] = ["--lease", "1s", "--shutdown-grace", "200ms"];

/// What repeats a run as far as chance is ours: `CHAOS_SEED=… cargo test …`. Told on a failure.
struct Seed(u64);

impl Seed {
    fn new() -> Self {
        let given = env::var("CHAOS_SEED").ok();
        Self(match given {
            Some(seed) => seed.parse().expect("CHAOS_SEED is a number"),
            None => SystemTime::UNIX_EPOCH
                .elapsed()
                .map_or(1, |time| u64::from(time.subsec_nanos())),
        })
    }

    /// The chance of one of those who take part.
    fn chance(&self, of: u64) -> Chance {
        Chance(self.0.wrapping_add(of << 32))
    }
}

impl Drop for Seed {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("to try it again: CHAOS_SEED={}", self.0);
        }
    }
}

/// SplitMix64.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        let limit = u64::try_from(from.len()).unwrap();
        &from[usize::try_from(self.below(limit)).unwrap()]
    }
}

/// Where the servers listen, or did until just now: clients do not know better.
#[derive(Clone)]
struct Addresses(Arc<Mutex<Vec<String>>>);

impl Addresses {
    fn any(&self, chance: &mut Chance) -> String {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        chance.pick(&all).clone()
    }

    fn replace(&self, slot: usize, server: &Server) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all[slot] = server.url("/api/rides");
    }
}

/// What a client was told.
struct Accepted {
    amount: i64,
    reply: Vec<u8>,
}

/// Sends one request after the other, each to servers by chance, again until it is answered, and
/// sometimes twice at once, or once more; or forgets about it after the first try.
async fn client(
    number: u64,
    servers: Addresses,
    mut chance: Chance,
    end: Instant,
) -> HashMap<String, Accepted> {
    let http = http();
    let mut accepted = HashMap::new();
    for ride in 0.. {
        if Instant::now() >= end {
            break;
        }
        let key = format!("{number}-{ride}");
        let amount = i64::try_from(1000 + chance.below(9000)).unwrap();
        let card = match chance.below(100) {
            0..10 => "tok_gatewayError",
            10..25 => "tok_slow_200",
            _ => "tok_visa",
        };
        let body = json!({"amountCents": amount, "paymentSource": card});
        let forgets = chance.percent(10);
        let mut answers: Vec<Vec<u8>> = Vec::new();
        let mut wanted = if chance.percent(25) { 2 } else { 1 };
        let mut last = None;
        let deadline = Instant::now() + PATIENCE;
        while answers.len() < wanted {
            let (one, other) = (servers.any(&mut chance), servers.any(&mut chance));
            let twice = chance.percent(20);
            let sent = tokio::join!(send(&http, &one, &key, &body), async {
                match twice {
                    true => send(&http, &other, &key, &body).await,
                    false => None,
                }
            });
            for (status, answer) in [sent.0, sent.1].into_iter().flatten() {
                last = Some(status);
                match status {
                    201 => answers.push(answer),
                    409 => assert_eq!(code(&answer), "request_in_progress", "{key}"),
                    503 => assert_eq!(code(&answer), "temporarily_unavailable", "{key}"),
                    _ => panic!("{key}: {status} {}", String::from_utf8_lossy(&answer)),
                }
            }
            if forgets {
                wanted = 0;
            }
            assert!(
                Instant::now() < deadline,
                "{key} is not answered: {last:?} last"
            );
            sleep(Duration::from_millis(20 + chance.below(80))).await;
        }
        if let Some(reply) = answers.pop() {
            assert!(
                answers.iter().all(|other| *other == reply),
                "{key}: {answers:?} {reply:?}"
            );
            accepted.insert(key, Accepted { amount, reply });
        }
    }
    accepted
}

/// How often servers were killed, stopped, and frozen.
#[derive(Debug, Default)]
struct Losses {
    killed: usize,
    stopped: usize,
    frozen: usize,
}

/// What happens to a server.
#[derive(Clone, Copy)]
enum Blow {
    Kill,
    Stop,
    Freeze,
}

impl Losses {
    fn next(&mut self, chance: &mut Chance) -> Blow {
        let (count, blow) = match chance.below(100) {
            0..50 => (&mut self.killed, Blow::Kill),
            50..85 => (&mut self.stopped, Blow::Stop),
            _ => (&mut self.frozen, Blow::Freeze),
        };
        *count += 1;
        blow
    }
}

impl Blow {
    /// What is there when it is over: another server, or the same one, which knows of nothing.
    async fn strike(self, mut server: Server, config: ServerConfig) -> Server {
        match self {
            Self::Kill => server.kill(),
            Self::Stop => {
                let status = server.terminate().await;
                // One that has only just said where it listens does not listen to signals yet.
                let told = status.success() || status.signal() == Some(15);
                assert!(told, "{status}:\n{}", server.output());
            }
            Self::Freeze => {
                server.freeze();
                sleep(FROZEN).await;
                server.thaw();
                return server;
            }
        }
        Server::start(config).await
    }
}

/// Strikes a server by chance, again and again; returns those that are there afterwards.
async fn storm(
    mut alive: HashMap<usize, Server>,
    addresses: &Addresses,
    config: &ServerConfig,
    mut chance: Chance,
    end: Instant,
) -> (HashMap<usize, Server>, Losses) {
    let mut losses = Losses::default();
    let mut starting: JoinSet<(usize, Server)> = JoinSet::new();
    let mut next = Instant::now();
    while next < end {
        next += GUST;
        sleep_until(next).await;
        while let Some(started) = starting.try_join_next() {
            let (slot, server) = started.unwrap();
            addresses.replace(slot, &server);
            alive.insert(slot, server);
        }
        let mut slots: Vec<_> = alive.keys().copied().collect();
        slots.sort_unstable();
        if slots.len() < 2 {
            continue;
        }
        let slot = *chance.pick(&slots);
        let server = alive.remove(&slot).unwrap();
        let struck = losses.next(&mut chance).strike(server, config.clone());
        starting.spawn(async move { (slot, struck.await) });
    }
    while let Some(started) = starting.join_next().await {
        let (slot, server) = started.unwrap();
        addresses.replace(slot, &server);
        alive.insert(slot, server);
    }
    (alive, losses)
}

#[tokio::test]
async fn servers_killed_at_random_finish_everything_once() {
    let seed = Seed::new();
    let world = World::start().await;
    let config = world.config(&OPTIONS);
    let mut alive = HashMap::new();
    for slot in 0..SERVERS {
        alive.insert(slot, Server::start(config.clone()).await);
    }
    let addresses = Addresses(Arc::new(Mutex::new(vec![String::new(); SERVERS])));
    for (slot, server) in &alive {
        addresses.replace(*slot, server);
    }

    let end = Instant::now() + STORM;
    let mut clients = JoinSet::new();
    for number in 1..=CLIENTS {
        let client = client(number, addresses.clone(), seed.chance(number), end);
        clients.spawn(client);
    }
    let (alive, losses) = storm(alive, &addresses, &config, seed.chance(0), end).await;
    assert!(alive.len() >= 2);
    assert!(world.gateway_is_up().await, "the outside is gone");
    let mut accepted = HashMap::new();
    while let Some(client) = clients.join_next().await {
        accepted.extend(client.unwrap());
    }
    let calm = Instant::now();
    let left = "SELECT count(*) FROM idempotency_keys WHERE finished_at IS NULL";
    while world.ask::<i64>(left).await > 0 {
        if calm.elapsed() > PATIENCE {
            let sql = "SELECT jsonb_agg(to_jsonb(k)) FROM idempotency_keys AS k WHERE finished_at IS NULL";
            panic!("not finished: {:#}", world.ask::<Value>(sql).await);
        }
        sleep(Duration::from_millis(20)).await;
    }

    // Whatever a client was told, there is one ride and one charge, of what it asked for, and one
    // receipt.
    let rows = sqlx::query(
        "SELECT k.key, k.response_body, r.amount_cents, c.amount
         FROM idempotency_keys AS k
         LEFT JOIN rides AS r ON r.key_id = k.id AND r.status = 'charged'
         LEFT JOIN gateway.charges AS c ON c.id = r.charge_id
         WHERE k.flow = 'ride'",
    )
    .fetch_all(&world.pool)
    .await
    .unwrap();
    let mut told = accepted.len();
    for row in &rows {
        let (key, reply): (String, Vec<u8>) = (row.get(0), row.get(1));
        let (ride, charge): (Option<i64>, Option<i64>) = (row.get(2), row.get(3));
        assert!(
            ride.is_some() && ride == charge,
            "{key}: {ride:?} {charge:?}"
        );
        if let Some(accepted) = accepted.get(&key) {
            assert_eq!(
                (ride, &reply),
                (Some(accepted.amount), &accepted.reply),
                "{key}"
            );
            told -= 1;
        }
    }
    assert_eq!(told, 0, "an accepted key is gone");
    let keys = i64::try_from(rows.len()).unwrap();
    let distinct = "SELECT count(DISTINCT key) FROM idempotency_keys WHERE flow = 'ride'";
    assert_eq!(world.ask::<i64>(distinct).await, keys, "one ride a key");
    for table in [
        "SELECT count(*) FROM rides",
        "SELECT count(*) FROM gateway.charges",
        "SELECT count(*) FROM gateway.receipts",
        "SELECT count(DISTINCT charge) FROM gateway.receipts",
        "SELECT count(*) FROM idempotency_keys WHERE flow = 'receipt'",
    ] {
        assert_eq!(world.ask::<i64>(table).await, keys, "{table}");
    }
    let takeovers: i64 = world
        .ask("SELECT sum(fence - 1)::bigint FROM idempotency_keys")
        .await;
    eprintln!(
        "{keys} rides, {} of them acknowledged, {takeovers} takeovers, {losses:?}, all finished {:?} \
         after the last answer (CHAOS_SEED={})",
        accepted.len(),
        calm.elapsed(),
        seed.0
    );
    assert!(takeovers > 0 && losses.killed > 0 && losses.stopped > 0 && losses.frozen > 0);
}
