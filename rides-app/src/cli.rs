//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use idempotent_core::http::Profile;

use crate::keys::KeysArgs;

/// A ride service whose requests take effect once, whatever happens.
///
/// Without a command it serves. Without DATABASE_URL it starts a private PostgreSQL of its own.
#[derive(Debug, Parser)]
#[command(name = "rides-app", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// How to serve, where no command is given.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve rides, with a payment gateway of its own unless told of another.
    Serve(ServeArgs),
    /// Run the payment gateway alone.
    Gateway(GatewayArgs),
    /// Manage users. Works beside a running server.
    Users {
        /// What to do.
        #[command(subcommand)]
        command: UsersCommand,
        /// Which database.
        #[command(flatten)]
        database: DatabaseArgs,
    },
    /// See idempotency keys, and help flows that need it. Works beside a running server.
    Keys(KeysArgs),
}

/// What can be done with users.
#[derive(Debug, Subcommand)]
pub enum UsersCommand {
    /// Add a user, and print the new token. It is shown only once.
    Add {
        /// The user's name.
        name: String,
    },
}

/// Which database to use.
#[derive(Debug, Clone, Args)]
pub struct DatabaseArgs {
    /// Use this PostgreSQL instead of a private one.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, global = true)]
    pub database_url: Option<String>,
    /// Where the private PostgreSQL keeps its data.
    #[arg(long, env = "RIDES_DATA_DIR", global = true, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
}

/// How to serve.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Where to listen. Port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:3000", value_name = "ADDRESS")]
    pub listen: SocketAddr,
    /// How long an attempt may run without renewing its lease (500ms, 15s, 2m).
    #[arg(long, value_parser = parse_duration)]
    pub lease: Option<Duration>,
    /// How the service says no to a key.
    #[arg(
        long,
        env = "RIDES_PROFILE",
        value_enum,
        default_value_t,
        value_name = "PROFILE"
    )]
    pub profile: ProfileName,
    /// How long requests that are running may take to end after Ctrl-C or SIGTERM. What does not is
    /// handed on, and goes on in another process or after the next start.
    #[arg(long, default_value = "5s", value_parser = parse_duration)]
    pub shutdown_grace: Duration,
    /// Which gateway.
    #[command(flatten)]
    pub payments: PaymentsArgs,
    /// Which database.
    #[command(flatten)]
    pub database: DatabaseArgs,
}

/// The profiles, by name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum ProfileName {
    /// As the IETF draft: 422 where the key was used for another request, 409 while it runs.
    Ietf,
    /// As Rocket Rides: 409 for both, told apart by `code`.
    #[default]
    RocketRides,
    /// As Stripe: 400 and 409, with error bodies that Stripe's clients can read.
    Stripe,
}

impl From<ProfileName> for Profile {
    fn from(name: ProfileName) -> Self {
        match name {
            ProfileName::Ietf => Self::ietf(),
            ProfileName::RocketRides => Self::rocket_rides(),
            ProfileName::Stripe => Self::stripe(),
        }
    }
}

/// How to charge.
#[derive(Debug, Clone, Args)]
pub struct PaymentsArgs {
    /// Charge through this gateway instead of a private one.
    #[arg(long, env = "GATEWAY_URL", value_name = "URL")]
    pub gateway_url: Option<String>,
    /// The key for the gateway.
    #[arg(
        long,
        env = "STRIPE_API_KEY",
        hide_env_values = true,
        value_name = "KEY"
    )]
    pub gateway_key: Option<String>,
}

/// How to run the gateway.
#[derive(Debug, Clone, Args)]
pub struct GatewayArgs {
    /// Where to listen. Port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:3001", value_name = "ADDRESS")]
    pub listen: SocketAddr,
    /// Which database.
    #[command(flatten)]
    pub database: DatabaseArgs,
}

/// Reads a span of time from a command line.
///
/// # Errors
///
/// What to write instead.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let millis = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err("write a number and a unit: 500ms, 15s, 2m, 1h, 2d".to_owned()),
    };
    let number: u64 = number
        .parse()
        .map_err(|_| "write a number and a unit: 15s".to_owned())?;
    number
        .checked_mul(millis)
        .map(Duration::from_millis)
        .ok_or_else(|| "this is too long".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn serve_is_what_is_done_without_a_command() {
        let cli = Cli::parse_from(["rides-app", "--listen", "127.0.0.1:0", "--lease", "3s"]);
        assert!(cli.command.is_none());
        assert_eq!(cli.serve.lease, Some(Duration::from_secs(3)));
        assert!(Cli::try_parse_from(["rides-app", "--lease", "3"]).is_err());
        assert!(Cli::try_parse_from(["rides-app", "--lease", "99999999999999999999s"]).is_err());
    }
}
