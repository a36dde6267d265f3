//! What the commands say to people, and for the short ones also to programs.

use std::fmt::Write;
use std::time::SystemTime;

use idempotent_core::{
    Changed, Event, KeyCount, KeyDetails, KeyState, KeySummary, Reaped, StoredReply,
};
use serde_json::{Value, json};
use uuid::Uuid;

use super::Said;
use super::table::{Align, table, width};
use super::text::{age, duration, line, many, moment, wrapped};

pub(super) fn list(keys: &[KeySummary], limit: u32) -> String {
    if keys.is_empty() {
        return "no keys".to_owned();
    }
    let heads = [
        ("ID", Align::Left),
        ("AGE", Align::Right),
        ("FLOW", Align::Left),
        ("POINT", Align::Left),
        ("STATE", Align::Left),
        ("NOTE", Align::Left),
    ];
    let rows: Vec<_> = keys
        .iter()
        .map(|key| {
            [
                key.id.to_string(),
                age(key.age),
                line(&key.flow),
                line(&key.point),
                key.state.to_string(),
                note(key),
            ]
        })
        .collect();
    let mut text = table(heads, &rows, width());
    if usize::try_from(limit).is_ok_and(|limit| keys.len() >= limit) {
        let _ = writeln!(
            text,
            "\nthe newest {}; more with --limit",
            many(u64::from(limit), "key")
        );
    }
    text
}

fn note(key: &KeySummary) -> String {
    let error = || key.error.as_deref().map(line).unwrap_or_default();
    let tries = || many(u64::from(key.attempts), "try").replace("trys", "tries");
    match key.state {
        KeyState::Finished => key
            .status
            .map(|status| status.to_string())
            .unwrap_or_default(),
        KeyState::Running => {
            format!("lease {}", key.lease_left.map(duration).unwrap_or_default())
        }
        KeyState::Waiting => {
            let next = key.next_attempt_in.map(duration).unwrap_or_default();
            format!("next in {next}: {}", error())
        }
        KeyState::Stuck => format!("{}: {}", tries(), error()),
        _ => error(),
    }
}

pub(super) fn show(
    details: &KeyDetails,
    request: Option<&Value>,
    reply: Option<&StoredReply>,
) -> String {
    let key = &details.summary;
    let now = key.created_at + key.age;
    let ago = |at: SystemTime| {
        let ago = now.duration_since(at).unwrap_or_default();
        format!("{} ({} ago)", moment(at), duration(ago))
    };
    let mut page = Page::default();
    page.row("key", &key.id.to_string());
    page.row("state", &state(details, now));
    page.row("flow", &key.flow);
    page.row("point", &key.point);
    page.row("user", &key.user);
    page.row("path", &key.path);
    page.row("client key", &details.key);
    page.row("attempts", &format!("{} at this point", key.attempts));
    page.row("holder", &holder(details));
    page.row("fence", &details.fence.to_string());
    page.row("next try", next_try(key).as_str());
    if let Some(parent) = details.parent {
        page.row("staged by", &parent.to_string());
    }
    if let Some(intent) = &details.intent {
        page.row("call begun", &format!("{intent}: its outcome is not known"));
    }
    if let Some(error) = &details.last_error {
        let said = format!("{} in {}: {}", error.class, error.phase, error.message);
        page.row("last error", &said);
        if let Some(at) = error.at {
            page.row("", &ago(at));
        }
        if let Some(first) = error.first_at.filter(|first| Some(*first) != error.at) {
            page.row("", &format!("failing since {}", ago(first)));
        }
    }
    page.row("created", &ago(key.created_at));
    if let Some(at) = details.finished_at {
        page.row("finished", &ago(at));
    }
    if let Some(reply) = details.reply {
        let length = many(reply.bytes, "byte");
        page.row("reply", &format!("{}, {length}", reply.status));
    }

    page.title("timeline");
    for happened in &details.timeline {
        page.event(happened);
    }
    if let Some(request) = request {
        page.title("request");
        page.verbatim(&format!("{request:#}"));
    }
    if let Some(reply) = reply {
        page.title("reply");
        page.verbatim(&reply.status().to_string());
        for (name, value) in reply.headers() {
            page.verbatim(&format!("{name}: {}", value.to_str().unwrap_or_default()));
        }
        page.verbatim(&format!("\n{}", String::from_utf8_lossy(reply.body())));
    }
    let next = what_next(details);
    if !next.is_empty() {
        page.title("what can be done");
        for (what, command) in next {
            page.verbatim(&format!("{what}:\n  {command}"));
        }
    }
    page.0
}

fn state(details: &KeyDetails, now: SystemTime) -> String {
    match details.summary.state {
        KeyState::Running => "running".to_owned(),
        KeyState::Waiting => "waiting; a client's own retry runs at once".to_owned(),
        KeyState::Due => "due; the completer takes it next".to_owned(),
        KeyState::Stuck => {
            let since = details.stuck_at.and_then(|at| now.duration_since(at).ok());
            let since = duration(since.unwrap_or_default());
            format!("stuck for {since}; nobody runs it until an operator says so")
        }
        state => state.to_string(),
    }
}

fn holder(details: &KeyDetails) -> String {
    match (details.holder, details.summary.lease_left) {
        (Some(holder), Some(left)) => {
            format!("{holder}, lease {} unless renewed", duration(left))
        }
        (Some(holder), None) => format!("{holder}, whose lease is over"),
        (None, _) => "nobody".to_owned(),
    }
}

fn next_try(key: &KeySummary) -> String {
    match (key.state, key.next_attempt_in) {
        (KeyState::Due, _) => "now".to_owned(),
        (KeyState::Waiting, Some(next)) => format!("in {}", duration(next)),
        _ => "none".to_owned(),
    }
}

/// The commands that make sense where the key stands.
fn what_next(details: &KeyDetails) -> Vec<(&'static str, String)> {
    let id = details.summary.id;
    let retry = ("try it again now", format!("rides-app keys retry {id}"));
    let call_again = (
        "make the call again, once you know that it did not happen",
        format!("rides-app keys retry {id} --call-again"),
    );
    let resolve = (
        "finish it by hand, once its ride is right",
        format!("rides-app keys resolve {id} --status 201 --body '{{…}}'"),
    );
    let release = (
        "take the lease away, if its holder hangs",
        format!("rides-app keys release {id}"),
    );
    let is_parked = details
        .last_error
        .as_ref()
        .is_some_and(|error| error.class == "park");
    match details.summary.state {
        KeyState::Running => vec![release],
        // A call that may have been made: a plain retry would be parked again.
        KeyState::Stuck if is_parked || details.intent.is_some() => vec![call_again, resolve],
        KeyState::Stuck | KeyState::Waiting => vec![retry, resolve],
        KeyState::Due => vec![(
            "run what is due, without a server",
            "rides-app keys complete".to_owned(),
        )],
        _ => Vec::new(),
    }
}

/// A text of titled parts.
#[derive(Default)]
struct Page(String);

/// The width of the names on a page.
const NAMES: usize = 12;

impl Page {
    fn row(&mut self, name: &str, value: &str) {
        for (number, part) in wrapped(value, width() - NAMES).iter().enumerate() {
            let name = if number == 0 { name } else { "" };
            let _ = writeln!(self.0, "{}", format!("{name:<NAMES$}{part}").trim_end());
        }
    }

    fn title(&mut self, title: &str) {
        let _ = writeln!(self.0, "\n{title}");
    }

    fn event(&mut self, happened: &Event) {
        let at = moment(happened.at);
        let text = |name: &str| match happened.more.get(name) {
            Some(Value::String(text)) => Some(line(text)),
            Some(Value::Bool(false)) | None => None,
            Some(other) => Some(other.to_string()),
        };
        let mut what = line(&happened.event);
        let of_attempt = !what.starts_with("operator ");
        for (before, name) in [
            (" in ", "phase"),
            (" by ", "by"),
            (", try ", "attempt"),
            (", was ", "was"),
            (", at ", "point"),
            (", status ", "status"),
            (", took the lease of ", "holder"),
            (", with a call begun: ", "intent"),
        ] {
            if let Some(text) =
                text(name).filter(|text| !text.is_empty() && (of_attempt || name != "attempt"))
            {
                let _ = write!(what, "{before}{text}");
            }
        }
        if let Some(message) = text("message") {
            let _ = write!(what, ": {message}");
        }
        let indent = at.len() + 4;
        for (number, part) in wrapped(&what, width() - indent).iter().enumerate() {
            let at = if number == 0 { at.as_str() } else { "" };
            let _ = writeln!(self.0, "  {at:<width$}{part}", width = indent - 2);
        }
    }

    fn verbatim(&mut self, text: &str) {
        for line in text.lines() {
            let _ = writeln!(self.0, "{}", format!("  {line}").trim_end());
        }
    }
}

pub(super) fn stats(counts: &[KeyCount]) -> String {
    if counts.is_empty() {
        return "no keys".to_owned();
    }
    let heads = [
        ("FLOW", Align::Left),
        ("POINT", Align::Left),
        ("STATE", Align::Left),
        ("KEYS", Align::Right),
        ("OLDEST", Align::Right),
    ];
    let rows: Vec<_> = counts
        .iter()
        .map(|count| {
            [
                line(&count.flow),
                line(&count.point),
                count.state.to_string(),
                count.keys.to_string(),
                age(count.oldest),
            ]
        })
        .collect();
    table(heads, &rows, width())
}

pub(super) fn changed(event: &str, id: Uuid, changed: Changed) -> Said {
    let follows = match (event, changed.is) {
        ("operator release", _) => "its holder is fenced off; the completer takes it next",
        (_, KeyState::Due) => "the completer takes it next",
        (_, KeyState::Finished) => "every retry gets this reply",
        _ => "",
    };
    Said {
        human: format!("{id} was {}, is {}: {follows}", changed.was, changed.is),
        json: json!({
            "id": id,
            "event": event,
            "was": changed.was.as_str(),
            "is": changed.is.as_str(),
        }),
    }
}

pub(super) fn reapable(keys: u64) -> Said {
    Said {
        human: format!("{} would be deleted", many(keys, "key")),
        json: json!({"dry_run": true, "keys": keys}),
    }
}

pub(super) fn reaped(reaped: Reaped) -> Said {
    Said {
        human: format!(
            "{} deleted in {}",
            many(reaped.keys, "key"),
            duration(reaped.took)
        ),
        json: json!({
            "dry_run": false,
            "keys": reaped.keys,
            "took_ms": u64::try_from(reaped.took.as_millis()).unwrap_or(u64::MAX),
        }),
    }
}

pub(super) fn completed(finished: usize, left: &[KeyCount]) -> Said {
    let in_state = |state: KeyState| -> u64 {
        let counts = left.iter().filter(|count| count.state == state);
        counts.map(|count| count.keys).sum()
    };
    let unfinished = [
        KeyState::Running,
        KeyState::Waiting,
        KeyState::Due,
        KeyState::Stuck,
    ];
    let mut human = format!("{} finished", many(finished as u64, "flow"));
    let mut left = serde_json::Map::new();
    for state in unfinished {
        let keys = in_state(state);
        if keys > 0 {
            let _ = write!(human, ", {keys} {state}");
        }
        left.insert(state.as_str().to_owned(), keys.into());
    }
    Said {
        human,
        json: json!({"finished": finished, "left": left}),
    }
}
