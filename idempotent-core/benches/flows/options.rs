//! What the command line says.

use std::time::Duration;

use crate::contender::{Contender, Error};

pub(crate) const HELP: &str = "\
cargo bench -p idempotent-core --bench flows --features embedded -- [options]
  --clients 1,8,32   numbers of clients that ask at the same time
  --rounds N         windows for each form and number of clients (15)
  --seconds S        length of a window (0.4)
  --away MS          the ride once more with a network of MS milliseconds a round trip (1; 0: not)
  --quick            5 short rounds: for a look, not for a judgement
  --only TEXT        only the forms whose name contains this: for a profiler";

#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) clients: Vec<usize>,
    pub(crate) rounds: usize,
    pub(crate) window: Duration,
    pub(crate) away: Duration,
    only: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            clients: vec![1, 8, 32],
            rounds: 15,
            window: Duration::from_millis(400),
            away: Duration::from_millis(1),
            only: None,
        }
    }
}

impl Options {
    /// None: help was asked for. What is not known is left alone: cargo adds arguments of its own.
    pub(crate) fn from_args(mut args: impl Iterator<Item = String>) -> Result<Option<Self>, Error> {
        let mut options = Self::default();
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("`{arg}` needs a value"));
            match arg.as_str() {
                "--clients" => {
                    let clients = value()?
                        .split(',')
                        .map(|n| n.trim().parse())
                        .collect::<Result<Vec<usize>, _>>()?;
                    options.clients = clients.into_iter().map(|n| n.clamp(1, 64)).collect();
                }
                "--rounds" => options.rounds = value()?.parse::<usize>()?.max(1),
                "--seconds" => options.window = Duration::try_from_secs_f64(value()?.parse()?)?,
                "--away" => {
                    options.away = Duration::try_from_secs_f64(value()?.parse::<f64>()? / 1e3)?
                }
                "--quick" => (options.rounds, options.window) = (5, Duration::from_millis(200)),
                "--only" => options.only = Some(value()?),
                "--help" | "-h" => return Ok(None),
                _ => {}
            }
        }
        Ok(Some(options))
    }

    pub(crate) fn wanted(&self, mut contenders: Vec<Contender>) -> Vec<Contender> {
        contenders.retain(|contender| {
            self.only
                .as_ref()
                .is_none_or(|only| contender.name.contains(only))
        });
        contenders
    }
}
