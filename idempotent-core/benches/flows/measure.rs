//! Windows that take turns: each form runs for a moment, then the next, in an order that rotates from
//! round to round, so that a noisy moment falls on all of them alike.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sqlx::PgConnection;

use crate::cluster::Cluster;
use crate::contender::{Ask, Contender, Error};
use crate::cpu::Used;

/// What the clients ask for.
#[derive(Clone)]
pub(crate) enum Asks {
    /// A key that was never seen, every time.
    Fresh,
    /// These, in turn; each client has its own among them.
    Listed(Arc<Vec<Ask>>),
}

impl Asks {
    pub(crate) fn list(length: usize) -> Self {
        Self::Listed(Arc::new((0..length).map(|n| Ask::fresh(n % 32)).collect()))
    }

    pub(crate) fn of(&self, client: usize, clients: usize, turn: usize) -> Ask {
        match self {
            Self::Fresh => Ask::fresh(client),
            Self::Listed(asks) => asks[(client + turn * clients) % asks.len()].clone(),
        }
    }
}

/// What was measured of one form, in all rounds at one number of clients.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) name: &'static str,
    pub(crate) per_second: Vec<f64>,
    pub(crate) wal_bytes: Vec<f64>,
    /// For one piece of work.
    pub(crate) cpu: Used,
}

/// How the forms take turns.
pub(crate) struct Turns<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) clients: usize,
    pub(crate) rounds: usize,
    pub(crate) window: Duration,
}

impl Turns<'_> {
    pub(crate) async fn take(
        &self,
        forms: &[Contender],
        asks: &Asks,
    ) -> Result<Vec<Measured>, Error> {
        let mut admin = self.cluster.administer().await?;
        for form in forms {
            // Uncounted: connections are opened, statements prepared, plans settled.
            self.run(
                form,
                asks,
                self.window.max(Duration::from_millis(500)),
                &mut admin,
            )
            .await?;
        }
        let mut windows: Vec<Vec<Window>> = forms.iter().map(|_| Vec::new()).collect();
        for round in 0..self.rounds {
            for turn in 0..forms.len() {
                let which = (turn + round) % forms.len();
                windows[which].push(
                    self.run(&forms[which], asks, self.window, &mut admin)
                        .await?,
                );
            }
        }
        Ok(forms
            .iter()
            .zip(windows)
            .map(|(form, windows)| Measured::of(form.name, &windows))
            .collect())
    }

    async fn run(
        &self,
        form: &Contender,
        asks: &Asks,
        length: Duration,
        admin: &mut PgConnection,
    ) -> Result<Window, Error> {
        let clients = self.clients;
        let wal_before = wal_position(admin).await?;
        let (cpu_before, start) = (self.cluster.cpu(), Instant::now());
        let tasks: Vec<_> = (0..clients)
            .map(|client| {
                let (work, asks) = (form.work(), asks.clone());
                tokio::spawn(async move {
                    let mut done = 0;
                    while start.elapsed() < length {
                        work(asks.of(client, clients, done)).await?;
                        done += 1;
                    }
                    Ok::<_, Error>(done)
                })
            })
            .collect();
        let mut done = 0;
        for task in tasks {
            done += task.await??;
        }
        let took = start.elapsed();
        let cpu = self.cluster.cpu().since(cpu_before);
        Ok(Window {
            done,
            took,
            wal_bytes: wal_position(admin).await? - wal_before,
            cpu,
        })
    }
}

/// Does every listed piece of work once.
pub(crate) async fn once_each(
    contender: &Contender,
    asks: &Asks,
    clients: usize,
) -> Result<(), Error> {
    let Asks::Listed(list) = asks else {
        return Ok(());
    };
    let tasks: Vec<_> = (0..clients)
        .map(|client| {
            let (work, list) = (contender.work(), Arc::clone(list));
            tokio::spawn(async move {
                for ask in list.iter().skip(client).step_by(clients) {
                    work(ask.clone()).await?;
                }
                Ok::<_, Error>(())
            })
        })
        .collect();
    for task in tasks {
        task.await??;
    }
    Ok(())
}

struct Window {
    done: usize,
    took: Duration,
    wal_bytes: i64,
    cpu: Used,
}

impl Measured {
    fn of(name: &'static str, windows: &[Window]) -> Self {
        let done: usize = windows.iter().map(|window| window.done).sum();
        let each = |cpu: fn(&Window) -> Option<Duration>| {
            windows
                .iter()
                .map(cpu)
                .sum::<Option<Duration>>()
                .map(|cpu| cpu.div_f64(done as f64))
        };
        Self {
            name,
            per_second: windows
                .iter()
                .map(|window| window.done as f64 / window.took.as_secs_f64())
                .collect(),
            wal_bytes: windows
                .iter()
                .map(|window| window.wal_bytes as f64 / window.done as f64)
                .collect(),
            cpu: Used {
                client: each(|window| window.cpu.client),
                server: each(|window| window.cpu.server),
            },
        }
    }
}

async fn wal_position(admin: &mut PgConnection) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint")
        .fetch_one(admin)
        .await
}

pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}
