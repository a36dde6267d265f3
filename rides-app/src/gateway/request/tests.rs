#![allow(clippy::expect_used)]

use axum::http::HeaderValue;

use super::*;

fn call(pairs: &[(&str, &str)]) -> Result<ChargeCall, Answer> {
    ChargeCall::from_pairs(
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect(),
    )
}

fn with(name: &str, value: &str) -> Result<ChargeCall, Answer> {
    let mut pairs = vec![
        ("amount", "2000"),
        ("currency", "USD"),
        ("source", "tok_visa"),
    ];
    pairs.retain(|(known, _)| *known != name);
    pairs.push((name, value));
    call(&pairs)
}

/// Status, code and parameter of a refusal.
fn refusal<T: std::fmt::Debug>(result: Result<T, Answer>) -> (u16, String, String) {
    let answer = result.expect_err("should be refused");
    let body: serde_json::Value = serde_json::from_slice(&answer.body).expect("JSON");
    let text = |name| {
        body["error"][name]
            .as_str()
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    (answer.status.as_u16(), text("code"), text("param"))
}

fn bad(code: &str, param: &str) -> (u16, String, String) {
    (400, code.to_owned(), param.to_owned())
}

#[test]
fn a_charge_call_is_read() {
    let call = call(&[
        ("metadata[ride]", "7"),
        ("source", "tok_slow_250"),
        ("currency", "USD"),
        ("amount", "1"),
        ("description", "A ride"),
    ])
    .expect("valid");
    assert_eq!(call.amount, 1);
    assert_eq!(call.currency, "usd");
    assert_eq!(call.card, TestCard::Slow(Duration::from_millis(250)));
    assert_eq!(call.description.as_deref(), Some("A ride"));
    assert_eq!(call.metadata["ride"], "7");
}

#[test]
fn amounts_are_integers_from_one() {
    for wrong in ["0", "-1", "+1", "1.0", "1e3", " 1", "9223372036854775808"] {
        assert_eq!(
            refusal(with("amount", wrong)),
            bad("parameter_invalid_integer", "amount"),
            "{wrong}"
        );
    }
    assert_eq!(
        refusal(with("amount", "")),
        bad("parameter_missing", "amount")
    );
    assert!(with("amount", "9223372036854775807").is_ok());
}

#[test]
fn unknown_tokens_are_missing_resources() {
    for wrong in [
        "tok_nobody",
        "tok_slow_",
        "tok_slow_x",
        "tok_slow_-1",
        "tok_slow_600001",
        "tok_slow_99999999999999999999",
    ] {
        assert_eq!(
            refusal(with("source", wrong)),
            bad("resource_missing", "source"),
            "{wrong}"
        );
    }
}

#[test]
fn everything_else_that_is_wrong_is_named() {
    let string = "parameter_invalid_string";
    assert_eq!(
        refusal(with("currency", "dollars")),
        bad(string, "currency")
    );
    assert_eq!(
        refusal(with("description", "a\0b")),
        bad(string, "description")
    );
    assert_eq!(
        refusal(with("metadata[]", "no name")),
        bad(string, "metadata")
    );
    assert_eq!(
        refusal(with("capture", "false")),
        bad("parameter_unknown", "capture")
    );
    assert_eq!(
        refusal(call(&[("amount", "1"), ("amount", "2")])),
        bad(string, "amount")
    );
    assert_eq!(
        refusal(call(&[("amount", "1"), ("currency", "usd")])),
        bad("parameter_missing", "source")
    );
}

#[test]
fn the_fingerprint_ignores_order_and_nothing_else() {
    let print = |pairs: &[(&str, &str)]| call(pairs).expect("valid").fingerprint;
    let (amount, currency, source) = (("amount", "1"), ("currency", "usd"), ("source", "tok_visa"));
    let plain = print(&[amount, currency, source]);
    assert_eq!(plain, print(&[source, amount, currency]));
    assert_ne!(plain, print(&[("amount", "2"), currency, source]));
    assert_ne!(
        plain,
        print(&[amount, currency, source, ("description", "")])
    );
    assert_ne!(
        print(&[amount, currency, source, ("metadata[a]", "bc")]),
        print(&[amount, currency, source, ("metadata[ab]", "c")]),
    );
}

#[test]
fn callers_are_told_apart_by_their_key() {
    let account = |value: &str| {
        let mut headers = HeaderMap::new();
        headers.insert(
            header::AUTHORIZATION,
            HeaderValue::from_str(value).expect("a header value"),
        );
        Account::from_headers(&headers)
    };
    assert_eq!(account("Bearer sk_1").ok(), account("bearer sk_1").ok());
    assert_ne!(account("Bearer sk_1").ok(), account("Bearer sk_2").ok());
    for wrong in ["Bearer", "Bearer ", "Basic c2s6", "sk_1", ""] {
        assert_eq!(refusal(account(wrong)).0, 401, "{wrong}");
    }
    assert_eq!(refusal(Account::from_headers(&HeaderMap::new())).0, 401);
    let shown = format!("{:?}", account("Bearer sk_1"));
    assert_eq!(shown, "Ok(Account(..))");
}

#[test]
fn idempotency_keys_are_optional_but_checked() {
    let key = |values: &[&[u8]]| {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(
                "idempotency-key",
                HeaderValue::from_bytes(value).expect("a header value"),
            );
        }
        idempotency_key(&headers)
    };
    assert_eq!(key(&[]), Ok(None));
    assert_eq!(key(&[b"ride-1"]), Ok(Some("ride-1".to_owned())));
    assert_eq!(key(&[&[b'k'; 255]]), Ok(Some("k".repeat(255))));
    for wrong in [
        &[b"".as_slice()] as &[&[u8]],
        &[&[b'k'; 256]],
        &["clé".as_bytes()],
        &[b"one", b"two"],
    ] {
        assert_eq!(refusal(key(wrong)), bad("parameter_invalid_string", ""));
    }
}

#[test]
fn limits_are_checked() {
    let limit = |name: &str, value: &str| limit(&[(name.to_owned(), value.to_owned())]);
    assert_eq!(super::limit(&[]), Ok(10));
    assert_eq!(limit("limit", "100"), Ok(100));
    for wrong in ["0", "101", "", "x"] {
        assert_eq!(
            refusal(limit("limit", wrong)),
            bad("parameter_invalid_integer", "limit")
        );
    }
    assert_eq!(
        refusal(limit("page", "2")),
        bad("parameter_unknown", "page")
    );
}
