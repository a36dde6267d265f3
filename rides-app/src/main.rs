//! `rides-app`: see `rides-app --help`.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use rides_app::cli::Cli;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new("warn,rides_app=info,idempotent_core=info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    match rides_app::serve::run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut stderr = std::io::stderr();
            let _ = writeln!(stderr, "rides-app: {error}");
            let mut cause = error.source();
            while let Some(error) = cause {
                let _ = writeln!(stderr, "  because: {error}");
                cause = error.source();
            }
            ExitCode::FAILURE
        }
    }
}
