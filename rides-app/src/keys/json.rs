//! What the commands say to programs. Names are those of the table's columns where there is one;
//! durations are in milliseconds, moments as in RFC 3339.

use std::time::{Duration, SystemTime};

use idempotent_core::{Event, KeyCount, KeyDetails, KeySummary, StoredReply};
use serde_json::{Value, json};

use super::text::rfc3339;

pub(super) fn list(keys: &[KeySummary]) -> Value {
    keys.iter().map(summary).collect()
}

fn summary(key: &KeySummary) -> Value {
    json!({
        "id": key.id,
        "flow": key.flow,
        "user": key.user,
        "path": key.path,
        "recovery_point": key.point,
        "state": key.state.as_str(),
        "attempts": key.attempts,
        "lease_left_ms": key.lease_left.map(millis),
        "next_attempt_in_ms": key.next_attempt_in.map(millis),
        "error": key.error,
        "status": key.status,
        "created_at": rfc3339(key.created_at),
        "age_ms": millis(key.age),
    })
}

pub(super) fn show(
    key: &KeyDetails,
    request: Option<&Value>,
    reply: Option<&StoredReply>,
) -> Value {
    let last_error = key.last_error.as_ref().map(|error| {
        json!({
            "class": error.class,
            "phase": error.phase,
            "message": error.message,
            "at": moment(error.at),
            "first_at": moment(error.first_at),
        })
    });
    let timeline: Value = key.timeline.iter().map(event).collect();
    let mut shown = summary(&key.summary);
    let more = json!({
        "key": key.key,
        "holder": key.holder,
        "fence": key.fence,
        "parent": key.parent,
        "intent": key.intent,
        "last_error": last_error,
        "stuck_at": moment(key.stuck_at),
        "finished_at": moment(key.finished_at),
        "reply_bytes": key.reply.map(|reply| reply.bytes),
        "timeline": timeline,
    });
    if let (Value::Object(shown), Value::Object(more)) = (&mut shown, more) {
        shown.extend(more);
        if let Some(request) = request {
            shown.insert("request".to_owned(), request.clone());
        }
        if let Some(reply) = reply {
            shown.insert("reply".to_owned(), stored(reply));
        }
    }
    shown
}

fn event(event: &Event) -> Value {
    let mut members = event.more.clone();
    members.insert("event".to_owned(), event.event.clone().into());
    members.insert("at".to_owned(), rfc3339(event.at).into());
    members.into()
}

/// A body that is not text is written as an array of bytes.
fn stored(reply: &StoredReply) -> Value {
    let headers: Value = reply
        .headers()
        .iter()
        .map(|(name, value)| json!([name.as_str(), value.to_str().unwrap_or_default()]))
        .collect();
    let body = match str::from_utf8(reply.body()) {
        Ok(text) => json!(text),
        Err(_) => json!(&reply.body()[..]),
    };
    json!({"status": reply.status().as_u16(), "headers": headers, "body": body})
}

pub(super) fn stats(counts: &[KeyCount]) -> Value {
    let groups: Value = counts
        .iter()
        .map(|count| {
            json!({
                "flow": count.flow,
                "recovery_point": count.point,
                "state": count.state.as_str(),
                "keys": count.keys,
                "oldest_ms": millis(count.oldest),
            })
        })
        .collect();
    json!({
        "keys": counts.iter().map(|count| count.keys).sum::<u64>(),
        "oldest_ms": counts.iter().map(|count| count.oldest).max().map(millis),
        "groups": groups,
    })
}

fn moment(at: Option<SystemTime>) -> Option<String> {
    at.map(rfc3339)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
