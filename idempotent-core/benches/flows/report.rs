//! The tables at the end.

use std::collections::HashMap;

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

    pub(crate) fn print(&self) {
        println!();
        println!(
            "{:<10} {:>7}  {:<18} {:>10} {:>11} {:>11} {:>7} {:>11}",
            "work",
            "clients",
            "form",
            "per second",
            "client CPU",
            "round trips",
            "pings",
            "WAL bytes"
        );
        self.rates.iter().for_each(|line| println!("{line}"));
        println!();
        println!(
            "{:<10} {:>7}  {:<38} {:>6} {:>13} {:>8}",
            "work", "clients", "ratio", "median", "(min-max)", "target"
        );
        self.ratios.iter().for_each(|line| println!("{line}"));
        println!();
        println!(
            "client CPU: of this process, for one piece of work. Round trips: by a forwarder that reads"
        );
        println!(
            "the wire. Pings: what sqlx sends when a connection goes back to its pool; nobody waits for it."
        );
    }
}

fn rate(work: &str, clients: usize, measured: &Measured, trips: Trips) -> String {
    let cpu = measured
        .client_cpu
        .map_or("-".to_owned(), |cpu| format!("{} us", cpu.as_micros()));
    format!(
        "{work:<10} {clients:>7}  {:<18} {:>10.0} {cpu:>11} {:>11.1} {:>7.1} {:>11.0}",
        measured.name,
        median(measured.per_second.iter().copied()),
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
    let names = format!("{} / {}", of.name, to.name);
    let verdict = match at_least {
        None => String::new(),
        Some(wanted) if middle >= wanted => format!(">= {wanted}  PASS"),
        Some(wanted) => format!(">= {wanted}  MISS"),
    };
    format!(
        "{work:<10} {clients:>7}  {names:<38} {middle:>6.2} ({smallest:.2}-{largest:.2})   {verdict}"
    )
}
