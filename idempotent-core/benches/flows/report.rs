//! The tables at the end.

use std::collections::HashMap;
use std::time::Duration;

use crate::measure::{Measured, median};
use crate::wire::Trips;

/// A ratio of two forms, and what it should be, if anything.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    pub(crate) of: &'static str,
    pub(crate) to: &'static str,
    pub(crate) at_least: Option<f64>,
}

#[derive(Debug, Default)]
pub(crate) struct Report {
    trips: HashMap<&'static str, Trips>,
    rates: Vec<String>,
    ratios: Vec<String>,
}

impl Report {
    pub(crate) fn add_trips(&mut self, form: &'static str, trips: Trips) {
        self.trips.insert(form, trips);
    }

    pub(crate) fn add(
        &mut self,
        work: &str,
        clients: usize,
        measured: &[Measured],
        targets: &[Target],
    ) {
        for measured in measured {
            let trips = self.trips.get(measured.name).copied().unwrap_or_default();
            self.rates.push(rate(work, clients, measured, trips));
        }
        let named = |name| measured.iter().find(|measured| measured.name == name);
        for target in targets {
            if let (Some(of), Some(to)) = (named(target.of), named(target.to)) {
                self.ratios
                    .push(ratio(work, clients, of, to, target.at_least));
            }
        }
    }

    pub(crate) fn print(&self, away: Duration) {
        println!(
            "\n{:<10} {:>7}  {:<18} {:>10} {:>10} {:>10} {:>11} {:>5} {:>9}",
            "work",
            "clients",
            "form",
            "per second",
            "client us",
            "server us",
            "round trips",
            "pings",
            "WAL bytes"
        );
        self.rates.iter().for_each(|line| println!("{line}"));
        println!(
            "\n{:<10} {:>7}  {:<38} {:>6} {:>11} {:>8} {:>11}",
            "work", "clients", "ratio, per second", "median", "(min-max)", "by CPU", "target"
        );
        self.ratios.iter().for_each(|line| println!("{line}"));
        println!(
            "\nfar away: the ride flow with {away:?} more for every round trip; its client us include the network.{LEGEND}"
        );
    }
}

const LEGEND: &str = "
client us, server us: processor time of this process and of the server's, for one piece of work.
by CPU: the ratio of both together, which is what the other ratio tends to when all processors are busy
and nobody else uses them. Round trips: counted by a forwarder that reads the wire. Pings: what sqlx
sends when a connection goes back to its pool; nobody waits for it.";

fn rate(work: &str, clients: usize, measured: &Measured, trips: Trips) -> String {
    let micros =
        |cpu: Option<Duration>| cpu.map_or("-".to_owned(), |cpu| cpu.as_micros().to_string());
    format!(
        "{work:<10} {clients:>7}  {:<18} {:>10.0} {:>10} {:>10} {:>11.1} {:>5.1} {:>9.0}",
        measured.name,
        median(measured.per_second.iter().copied()),
        micros(measured.cpu.client),
        micros(measured.cpu.server),
        trips.round_trips,
        trips.pings,
        median(measured.wal_bytes.iter().copied()),
    )
}

fn ratio(
    work: &str,
    clients: usize,
    of: &Measured,
    to: &Measured,
    at_least: Option<f64>,
) -> String {
    let ratios: Vec<f64> = of
        .per_second
        .iter()
        .zip(&to.per_second)
        .map(|(of, to)| of / to)
        .collect();
    let middle = median(ratios.iter().copied());
    let smallest = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let largest = ratios.iter().copied().fold(0.0, f64::max);
    let spread = format!("({smallest:.2}-{largest:.2})");
    let by_cpu = match (of.cpu.total(), to.cpu.total()) {
        (Some(of), Some(to)) => format!("{:.2}", to.as_secs_f64() / of.as_secs_f64()),
        _ => "-".to_owned(),
    };
    let names = format!("{} / {}", of.name, to.name);
    let verdict = match at_least {
        None => String::new(),
        Some(wanted) if middle >= wanted => format!(">= {wanted} PASS"),
        Some(wanted) => format!(">= {wanted} MISS"),
    };
    format!(
        "{work:<10} {clients:>7}  {names:<38} {middle:>6.2} {spread:>11} {by_cpu:>8} {verdict:>11}"
    )
}
