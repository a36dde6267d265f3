//! The page that every problem's `type` and `Link` lead to: what each code means and what a client
//! should do about it. The framework describes its own problems; the service adds those of rides.

use std::fmt::Write;

use axum::response::Html;
use idempotent_core::http::problems;

/// Where the page is.
pub const PAGE: &str = "/problems";

/// What the service says beside what the framework does.
const OF_RIDES: [(&str, &str); 6] = [
    (
        "unauthorized",
        "Status 401. The request needs a valid token: `Authorization: Bearer …`. A retry needs one as much as \
         the first request did.",
    ),
    (
        "card_declined",
        "Status 402. The card was declined and no money was taken. This is the final answer for this key; use \
         another payment source with a new one.",
    ),
    (
        "payment_source_unknown",
        "Status 402. The gateway does not know the payment source, and no money was taken. This is the final \
         answer for this key.",
    ),
    (
        "ride_unknown",
        "Status 404. There is no such ride of this user.",
    ),
    ("not_found", "Status 404. There is nothing at this path."),
    (
        "method_not_allowed",
        "Status 405. The path is there, and does not take this method.",
    ),
];

/// Every problem, by its code.
pub(crate) async fn page() -> Html<String> {
    let of_framework = problems::all().map(|problem| (problem.code, problem.meaning));
    let mut page = String::from(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>Problems</title>\n\
         <style>body{font:1rem/1.5 system-ui,sans-serif;max-width:45rem;margin:2rem auto;padding:0 1rem}\
         :target{background:#fff3bf}code{font-size:.95em}</style>\n<h1>Problems</h1>\n",
    );
    for (code, meaning) in of_framework.chain(OF_RIDES) {
        let meaning = as_html(meaning);
        // Writing to a string cannot fail.
        let _ = writeln!(
            page,
            "<section id=\"{code}\"><h2><code>{code}</code></h2><p>{meaning}</p></section>"
        );
    }
    Html(page)
}

/// Text with code between backticks.
fn as_html(text: &str) -> String {
    let escaped = text.replace('&', "&amp;").replace('<', "&lt;");
    let mut parts = escaped.split('`');
    let mut html = parts.next().unwrap_or_default().to_owned();
    while let (Some(code), after) = (parts.next(), parts.next()) {
        html.push_str(&format!("<code>{code}</code>"));
        html.push_str(after.unwrap_or_default());
    }
    html
}

#[cfg(test)]
mod tests {
    use super::as_html;

    #[test]
    fn text_is_shown_as_it_is_and_code_as_code() {
        assert_eq!(
            as_html("a < b & `c<d>` e"),
            "a &lt; b &amp; <code>c&lt;d></code> e"
        );
        assert_eq!(as_html("`c`"), "<code>c</code>");
        assert_eq!(as_html("plain"), "plain");
    }
}
