#![allow(clippy::expect_used)]

use axum::Router;
use axum::extract::Request;
use axum::http::Response;
use axum::routing::post;
use tokio::net::TcpListener;

use super::*;

const SECRET: &str = "sk_test_never_shown";
const KEY: &str = "derived-key-never-shown";

fn two_thousand() -> ChargeRequest {
    ChargeRequest {
        amount_cents: 2000,
        currency: "usd".to_owned(),
        source: "tok_visa".to_owned(),
        description: None,
    }
}

async fn serve(router: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move { axum::serve(listener, router).await });
    format!("http://{address}")
}

fn client(base_url: &str) -> GatewayClient {
    GatewayClient::new(base_url, SECRET, Duration::from_millis(500)).expect("valid")
}

/// What a gateway that always answers this leads to.
async fn answered(
    status: u16,
    headers: &'static [(&'static str, &'static str)],
    body: &'static str,
) -> Result<Charge, PaymentError> {
    let handler = async move || {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        response.body(body.to_owned()).expect("a response")
    };
    let base_url = serve(Router::new().route("/v1/charges", post(handler))).await;
    let result = client(&base_url).charge(KEY, &two_thousand()).await;
    if let Err(error) = &result {
        let shown = chain(error);
        assert!(!shown.contains(SECRET) && !shown.contains(KEY), "{shown}");
        assert!(!shown.contains("SECRET BODY"), "{shown}");
    }
    result
}

/// Everything an error report could print, `Debug` included.
fn chain(error: &PaymentError) -> String {
    let mut shown = format!("{error} {error:?}");
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        shown.push_str(&format!(" {error} {error:?}"));
        source = error.source();
    }
    shown
}

async fn handling(status: u16, body: &'static str) -> Handling {
    answered(status, &[], body)
        .await
        .expect_err("an error")
        .handling()
}

#[tokio::test]
async fn a_charge_sends_what_stripe_expects() {
    let handler = async |request: Request| {
        let (head, body) = request.into_parts();
        let header = |name: &str| {
            let value = head.headers.get(name).expect("the header");
            value.to_str().expect("text").to_owned()
        };
        assert_eq!(header("authorization"), format!("Bearer {SECRET}"));
        assert_eq!(header("idempotency-key"), KEY);
        assert_eq!(header("content-type"), "application/x-www-form-urlencoded");
        let body = axum::body::to_bytes(body, 1000).await.expect("a body");
        assert_eq!(
            body,
            "amount=2000&currency=usd&source=tok_visa&description=A+ride".as_bytes()
        );
        r#"{"id":"ch_1","amount":2000,"currency":"USD","status":"succeeded","more":[1]}"#
    };
    let base_url = serve(Router::new().route("/prefix/v1/charges", post(handler))).await;
    let request = ChargeRequest {
        description: Some("A ride".to_owned()),
        ..two_thousand()
    };
    let charge = client(&format!("{base_url}/prefix/"))
        .charge(KEY, &request)
        .await;
    assert_eq!(
        charge.expect("charged"),
        Charge {
            id: "ch_1".to_owned(),
            amount_cents: 2000
        }
    );
}

#[tokio::test]
async fn an_unknown_outcome_is_asked_for_again() {
    let in_use = r#"{"error":{"type":"idempotency_error","code":"idempotency_key_in_use"}}"#;
    for status in [408, 409, 425, 429, 500, 502, 503, 504, 599] {
        assert_eq!(
            handling(status, in_use).await,
            Handling::Retry(None),
            "{status}"
        );
    }
    let waiting = answered(429, &[("retry-after", "7")], "").await;
    let seven = Some(Duration::from_secs(7));
    assert_eq!(
        waiting.expect_err("busy").handling(),
        Handling::Retry(seven)
    );
    let forever = answered(503, &[("retry-after", "99999999999")], "").await;
    assert_eq!(
        forever.expect_err("busy").handling(),
        Handling::Retry(Some(LONGEST_RETRY_AFTER))
    );
}

#[tokio::test]
async fn a_success_that_cannot_be_read_is_asked_for_again() {
    for body in [
        "",
        "SECRET BODY",
        "{}",
        r#"{"id":"","amount":2000,"currency":"usd","status":"succeeded"}"#,
        r#"{"id":"ch \u0000","amount":2000,"currency":"usd","status":"succeeded"}"#,
        r#"{"id":"ch_1","amount":"2000","currency":"usd","status":"succeeded"}"#,
    ] {
        assert_eq!(handling(200, body).await, Handling::Retry(None), "{body}");
    }
}

#[tokio::test]
async fn another_charge_than_asked_for_stops() {
    for (body, what) in [
        (
            r#"{"id":"ch_1","amount":2001,"currency":"usd","status":"succeeded"}"#,
            "amount",
        ),
        (
            r#"{"id":"ch_1","amount":2000,"currency":"eur","status":"succeeded"}"#,
            "currency",
        ),
        (
            r#"{"id":"ch_1","amount":2000,"currency":"usd","status":"pending"}"#,
            "status",
        ),
    ] {
        let error = answered(200, &[], body).await.expect_err("differs");
        assert_eq!(error.handling(), Handling::Stop);
        assert!(
            matches!(error, PaymentError::OtherCharge { difference, .. } if difference == what)
        );
    }
}

#[tokio::test]
async fn only_an_explicit_decline_is_a_decline() {
    let body = r#"{"error":{"type":"card_error","code":"card_declined",
        "decline_code":"insufficient_funds","message":"Your card has\u0000 insufficient funds."}}"#;
    match answered(402, &[], body).await {
        Err(PaymentError::Declined {
            code,
            decline_code,
            message,
        }) => {
            assert_eq!(code, "card_declined");
            assert_eq!(decline_code.as_deref(), Some("insufficient_funds"));
            assert_eq!(message, "Your card has insufficient funds.");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(handling(402, body).await, Handling::Decline);
    assert_eq!(
        handling(402, r#"{"error":{"type":"api_error"}}"#).await,
        Handling::Stop
    );
    assert_eq!(handling(402, "SECRET BODY").await, Handling::Stop);
    assert_eq!(handling(400, body).await, Handling::Stop);
}

#[tokio::test]
async fn any_other_refusal_stops_and_says_its_code() {
    let mismatch = r#"{"error":{"type":"idempotency_error","message":"SECRET BODY"}}"#;
    let error = answered(400, &[], mismatch).await.expect_err("refused");
    assert!(
        error.to_string().contains("400 (idempotency_error)"),
        "{error}"
    );
    for status in [301, 307, 400, 401, 403, 404, 410, 422] {
        let location = &[("location", "http://127.0.0.1:9/v1/charges")];
        let error = answered(status, location, "SECRET BODY")
            .await
            .expect_err("refused");
        assert_eq!(error.handling(), Handling::Stop, "{status}");
    }
    let odd = answered(400, &[], r#"{"error":{"code":"SECRET BODY"}}"#)
        .await
        .expect_err("refused");
    assert!(odd.to_string().contains("no code"), "{odd}");
}

#[tokio::test]
async fn no_answer_is_asked_for_again() {
    let silent =
        serve(Router::new().route("/v1/charges", post(std::future::pending::<String>))).await;
    let error = client(&silent)
        .charge(KEY, &two_thousand())
        .await
        .expect_err("too late");
    assert_eq!(error.handling(), Handling::Retry(None));
    assert!(error.to_string().contains("in time"), "{error}");
    assert!(!chain(&error).contains(&silent), "{}", chain(&error));

    let free = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let nobody = format!("http://{}", free.local_addr().expect("an address"));
    drop(free);
    let error = client(&nobody)
        .charge(KEY, &two_thousand())
        .await
        .expect_err("nobody there");
    assert_eq!(error.handling(), Handling::Retry(None));
    assert!(error.to_string().contains("connected"), "{error}");
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_asked_for_again() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let base_url = format!("http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a client");
        let _ = stream.read(&mut [0; 4096]).await.expect("a request");
        let head = b"HTTP/1.1 402 Payment Required\r\ncontent-length: 500\r\n\r\n{\"error\":";
        stream.write_all(head).await.expect("sent");
    });
    let error = client(&base_url)
        .charge(KEY, &two_thousand())
        .await
        .expect_err("cut off");
    assert_eq!(error.handling(), Handling::Retry(None));
    assert!(error.to_string().contains("broke off"), "{error}");
}

#[tokio::test]
async fn a_key_that_no_header_can_carry_stops() {
    let error = client("http://127.0.0.1:9")
        .charge("a\nb", &two_thousand())
        .await;
    assert_eq!(error.expect_err("refused").handling(), Handling::Stop);
}

#[test]
fn the_configuration_is_checked_and_never_shown() {
    let build = |url, key| GatewayClient::new(url, key, Duration::from_secs(1));
    assert!(matches!(
        build("http://localhost:1", ""),
        Err(GatewayConfigError::ApiKey)
    ));
    assert!(matches!(
        build("http://localhost:1", "sk\n"),
        Err(GatewayConfigError::ApiKey)
    ));
    for url in [
        "localhost",
        "ftp://x",
        "http://user:pw@x",
        "http://x/?a=b",
        "http://x/#a",
    ] {
        let error = build(url, SECRET).expect_err(url);
        assert!(
            matches!(error, GatewayConfigError::Url(_)),
            "{url}: {error}"
        );
        assert!(!format!("{error} {error:?}").contains("pw"));
    }
    let shown = format!("{:?}", build("http://localhost:1", SECRET).expect("valid"));
    assert!(!shown.contains(SECRET), "{shown}");
    assert!(shown.contains("http://localhost:1/v1/charges"), "{shown}");
}

#[test]
fn https_needs_the_feature() {
    let built = GatewayClient::new("https://api.stripe.com", SECRET, Duration::from_secs(1));
    if cfg!(feature = "tls") {
        assert!(built.is_ok());
    } else {
        let error = built.expect_err("no TLS");
        assert!(error.to_string().contains("--features tls"), "{error}");
    }
}

#[test]
fn loopback_hosts_are_recognised() {
    let loopback = |url: &str| is_loopback(&Url::parse(url).expect("a URL"));
    assert!(loopback("http://127.0.0.1:1"));
    assert!(loopback("http://[::1]:1"));
    assert!(loopback("http://localhost"));
    assert!(!loopback("http://10.0.0.1"));
    assert!(!loopback("https://localhost.example.com"));
}
