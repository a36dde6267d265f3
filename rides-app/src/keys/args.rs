//! The command line of `keys`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use idempotent_core::KeyState;
use uuid::Uuid;

use crate::cli::{DatabaseArgs, PaymentsArgs, parse_duration};

/// See and help keys.
#[derive(Debug, Args)]
pub struct KeysArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: KeysCommand,
    /// Print one JSON document on stdout, and all else on stderr.
    #[arg(long, global = true)]
    pub json: bool,
    /// Which database.
    #[command(flatten)]
    pub database: DatabaseArgs,
}

/// What can be done with keys.
#[derive(Debug, Subcommand)]
pub enum KeysCommand {
    /// List keys, newest first.
    List(ListArgs),
    /// Show all that is known of a key: where it stands, why, and what happened.
    Show(ShowArgs),
    /// Let a stuck or waiting flow try again, at once and with all its attempts.
    Retry(RetryArgs),
    /// Finish a flow by hand: every retry gets this reply. Runs nothing, touches no ride.
    Resolve(ResolveArgs),
    /// Take the lease of a running flow away. Its holder cannot write any more.
    Release {
        /// The key's id.
        id: Uuid,
    },
    /// Count keys by flow, point and state.
    Stats,
    /// Delete finished keys past their retention, now.
    Reap(ReapArgs),
    /// Go on with all flows that are due, once.
    Complete(CompleteArgs),
}

/// Which keys to list.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Only this flow.
    #[arg(long)]
    pub flow: Option<String>,
    /// Only this recovery point, such as ride_created.
    #[arg(long)]
    pub point: Option<String>,
    /// Only this state.
    #[arg(long, value_parser = key_state())]
    pub state: Option<KeyState>,
    /// Only this user, by id or by name.
    #[arg(long)]
    pub user: Option<String>,
    /// Only what is older (30s, 15m, 2h, 1d).
    #[arg(long, value_parser = parse_duration, value_name = "AGE")]
    pub older_than: Option<Duration>,
    /// At most so many.
    #[arg(long, default_value_t = 50, value_name = "KEYS")]
    pub limit: u32,
}

/// Which key to show, and how much of it.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// The key's id. Instead, --user and --key will do.
    #[arg(required_unless_present = "key")]
    pub id: Option<Uuid>,
    /// The user, by id or by name.
    #[arg(long, requires = "key", conflicts_with = "id")]
    pub user: Option<String>,
    /// The client's idempotency key.
    #[arg(long, requires = "user", conflicts_with = "id")]
    pub key: Option<String>,
    /// The path that was asked.
    #[arg(long, default_value = "/api/rides", requires = "key")]
    pub path: String,
    /// Also what the client sent.
    #[arg(long)]
    pub request: bool,
    /// Also what was answered.
    #[arg(long)]
    pub reply: bool,
}

/// Which key to try again.
#[derive(Debug, Args)]
pub struct RetryArgs {
    /// The key's id.
    pub id: Uuid,
    /// Make a call again of which nobody knows whether it happened. Find out first.
    #[arg(long)]
    pub call_again: bool,
}

/// Which key to finish, and with what reply.
#[derive(Debug, Args)]
pub struct ResolveArgs {
    /// The key's id.
    pub id: Uuid,
    /// The HTTP status, such as 201.
    #[arg(long, value_parser = clap::value_parser!(u16).range(200..=599))]
    pub status: u16,
    /// The body, sent as it is given. JSON is called JSON unless --header says otherwise.
    #[arg(long)]
    pub body: Option<String>,
    /// The body, from a file; - is stdin.
    #[arg(long, conflicts_with = "body", value_name = "FILE")]
    pub body_file: Option<PathBuf>,
    /// A header, such as 'location: /api/rides/1'. May be repeated.
    #[arg(long, value_parser = parse_header, value_name = "NAME: VALUE")]
    pub header: Vec<(String, String)>,
}

/// How to reap.
#[derive(Debug, Args)]
pub struct ReapArgs {
    /// Only say how many keys would be deleted.
    #[arg(long)]
    pub dry_run: bool,
}

/// How to complete.
#[derive(Debug, Args)]
pub struct CompleteArgs {
    /// Which gateway.
    #[command(flatten)]
    pub payments: PaymentsArgs,
}

fn key_state() -> impl TypedValueParser<Value = KeyState> {
    PossibleValuesParser::new(KeyState::ALL.map(KeyState::as_str))
        .try_map(|name| name.parse::<KeyState>())
}

fn parse_header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text
        .split_once(':')
        .ok_or("write a name, a colon and a value: 'location: /api/rides/1'")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}
