//! `rides-app keys …`: what an operator can see and do. A command asks for a key's id and finds the
//! rest itself; what it says is a text for people, or with `--json` exactly one JSON document.
//! Everything else goes to stderr.

mod args;
mod human;
mod json;
mod table;
mod text;

use std::env;
use std::fs;
use std::future::pending;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use http::StatusCode;
use idempotent_core::{BuildError, Engine, Key, KeyFilter, Operator, Reply, StoredReply};
use serde_json::Value;
use sqlx::postgres::PgPool;
use tokio::sync::oneshot;
use uuid::Uuid;

pub use self::args::{
    CompleteArgs, KeysArgs, KeysCommand, ListArgs, ReapArgs, ResolveArgs, RetryArgs, ShowArgs,
};
use crate::cli::PaymentsArgs;
use crate::database::{Database, migrate};
use crate::flow::{Payments, RideFlow};
use crate::payments::{Charge, ChargeRequest, PaymentError};
use crate::receipts::{ReceiptFlow, ReceiptRequest, Receipts};
use crate::serve::{Failure, Outside, no_database, runtime, say};
use crate::users;

/// What a command found or did, for both kinds of readers.
struct Said {
    human: String,
    json: Value,
}

/// Does what the command asks for, and says what it found or did.
///
/// # Errors
///
/// When a change was refused, or the database cannot be had. Nothing is then said on stdout.
pub(crate) fn run(args: &KeysArgs) -> Result<(), Failure> {
    let database = Database::open_beside(&args.database)?;
    let runtime = runtime()?;
    let done = runtime.block_on(perform(&database, &args.command));
    if let Ok(said) = &done {
        if args.json {
            say(format_args!("{:#}", said.json));
        } else {
            say(said.human.trim_end());
        }
    }
    runtime.shutdown_timeout(Duration::from_secs(1));
    database.stop();
    done.map(drop)
}

async fn perform(database: &Database, command: &KeysCommand) -> Result<Said, Failure> {
    let pool = database.pool(4);
    // A private database may be new. Another one is migrated by its server, not by whoever looks.
    if database.is_embedded() {
        migrate(&pool).await.map_err(|error| no_database(&error))?;
    }
    if let KeysCommand::Complete(args) = command {
        return complete(database, pool, &args.payments).await;
    }
    let engine = engine(pool.clone(), Nobody).await?;
    let operator = operator(&engine);
    match command {
        KeysCommand::List(args) => list(&operator, &pool, args).await,
        KeysCommand::Show(args) => show(&operator, &pool, args).await,
        KeysCommand::Retry(RetryArgs { id, call_again }) => {
            let changed = operator.retry(*id, *call_again).await?;
            Ok(human::changed("operator retry", *id, changed))
        }
        KeysCommand::Resolve(args) => {
            let changed = operator.resolve(args.id, &reply(args)?).await?;
            Ok(human::changed("operator resolve", args.id, changed))
        }
        KeysCommand::Release { id } => {
            let changed = operator.release(*id).await?;
            Ok(human::changed("operator release", *id, changed))
        }
        KeysCommand::Stats => {
            let counts = operator.stats().await?;
            Ok(Said {
                human: human::stats(&counts),
                json: json::stats(&counts),
            })
        }
        KeysCommand::Reap(ReapArgs { dry_run: true }) => {
            Ok(human::reapable(engine.count_reapable().await?))
        }
        KeysCommand::Reap(_) => Ok(human::reaped(engine.reap_once().await?)),
        KeysCommand::Complete(_) => unreachable!("done above"),
    }
}

async fn engine(
    pool: PgPool,
    payments: impl Payments + Receipts + Clone,
) -> Result<Engine, Failure> {
    let builder = Engine::builder(pool)
        .flow(RideFlow::new(payments.clone()))
        .flow(ReceiptFlow::new(payments));
    builder.build().await.map_err(|error| match error {
        BuildError::NotMigrated => {
            "there are no keys in this database: serve from it once (`rides-app serve`), or check DATABASE_URL"
                .into()
        }
        error => error.into(),
    })
}

fn operator(engine: &Engine) -> Operator {
    let name = env::var("USER").or_else(|_| env::var("LOGNAME"));
    engine.operator().by(&name.unwrap_or_default())
}

async fn list(operator: &Operator, pool: &PgPool, args: &ListArgs) -> Result<Said, Failure> {
    let mut filter = KeyFilter::new().limit(args.limit);
    if let Some(flow) = &args.flow {
        filter = filter.flow(flow);
    }
    if let Some(point) = &args.point {
        filter = filter.point(point);
    }
    if let Some(state) = args.state {
        filter = filter.state(state);
    }
    if let Some(user) = &args.user {
        filter = filter.user(user_id(pool, user).await?);
    }
    if let Some(age) = args.older_than {
        filter = filter.older_than(age);
    }
    let keys = operator.list(&filter).await?;
    Ok(Said {
        human: human::list(&keys, args.limit),
        json: json::list(&keys),
    })
}

async fn show(operator: &Operator, pool: &PgPool, args: &ShowArgs) -> Result<Said, Failure> {
    let id = match (args.id, &args.key, &args.user) {
        (Some(id), ..) => id,
        (None, Some(key), Some(user)) => {
            let user = user_id(pool, user).await?;
            operator.find(&Key::new(user, &args.path, key)?).await?
        }
        (None, ..) => return Err("name the key: its id, or --user and --key".into()),
    };
    let details = operator.show(id).await?;
    let contents = if args.request || args.reply {
        Some(operator.contents(id).await?)
    } else {
        None
    };
    let request = contents.as_ref().filter(|_| args.request);
    let request = request.map(|contents| &contents.request);
    let reply = contents.as_ref().filter(|_| args.reply);
    let reply = reply.and_then(|contents| contents.reply.as_ref());
    Ok(Said {
        human: human::show(&details, request, reply),
        json: json::show(&details, request, reply),
    })
}

/// The id of a user given by id or by name.
async fn user_id(pool: &PgPool, user: &str) -> Result<String, Failure> {
    if user.parse::<Uuid>().is_ok() {
        return Ok(user.to_owned());
    }
    let found = users::find_by_name(pool, user).await?;
    found.map(|id| id.to_string()).ok_or_else(|| {
        format!("there is no user named {user:?}; a user's id will do as well").into()
    })
}

fn reply(args: &ResolveArgs) -> Result<StoredReply, Failure> {
    let status = StatusCode::from_u16(args.status)?;
    let body = match (&args.body, &args.body_file) {
        (Some(body), _) => body.clone().into_bytes(),
        (None, Some(path)) => read(path).map_err(|error| format!("{}: {error}", path.display()))?,
        (None, None) => Vec::new(),
    };
    let mut reply = Reply::empty(status);
    let is_typed = |(name, _): &(String, String)| name.eq_ignore_ascii_case("content-type");
    if !body.is_empty() && !args.header.iter().any(is_typed) {
        reply = reply.header("content-type", content_type(&body));
    }
    for (name, value) in &args.header {
        reply = reply.header(name, value);
    }
    Ok(reply.store_with_body(body)?)
}

/// What a body is, where nobody says.
fn content_type(body: &[u8]) -> &'static str {
    match serde_json::from_slice::<serde::de::IgnoredAny>(body) {
        Ok(_) => "application/json",
        Err(_) if str::from_utf8(body).is_ok() => "text/plain; charset=utf-8",
        Err(_) => "application/octet-stream",
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    if path == Path::new("-") {
        let mut body = Vec::new();
        io::stdin().read_to_end(&mut body)?;
        return Ok(body);
    }
    fs::read(path)
}

/// One pass over what is due, with the gateway that the server would use.
async fn complete(
    database: &Database,
    pool: PgPool,
    payments: &PaymentsArgs,
) -> Result<Said, Failure> {
    let (stop, stopping) = oneshot::channel::<()>();
    let stopped = async {
        // An error means that nobody is left to say so; that is the end as well.
        let _ = stopping.await;
    };
    let outside = Outside::start(database, payments, stopped).await?;
    let engine = engine(pool, outside.client(payments)?).await?;
    let completed = engine.complete_once().await;
    drop(stop);
    outside.stopped().await?;
    let left = operator(&engine).stats().await?;
    Ok(human::completed(completed?, &left))
}

/// The outside of commands that run no flow.
#[derive(Clone)]
struct Nobody;

impl Receipts for Nobody {
    async fn send(
        &self,
        _key: &idempotent_core::DerivedKey,
        _receipt: &ReceiptRequest,
    ) -> Result<(), PaymentError> {
        pending().await
    }
}

impl Payments for Nobody {
    async fn charge(
        &self,
        _key: &idempotent_core::DerivedKey,
        _charge: &ChargeRequest,
    ) -> Result<Charge, PaymentError> {
        pending().await
    }
}
