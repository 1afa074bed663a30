//! `/`: a live page for people, and the list of endpoints for everyone else. The page asks for
//! `/status` again and again; it takes nothing from anywhere else, and may not.

use super::actions;
use super::http::{Answer, Asked};

const PAGE: &str = include_str!("page.html");
const SCRIPT: &str = include_str!("page.js");
const STYLE: &str = include_str!("page.css");

/// For those who do not say that they show HTML.
const LIST: &str = "/status /metrics /-/healthz /-/ready /-/version /-/plan /-/log-level \
                    /-/status.schema.json /livez /readyz\nPOST: /-/explain";

/// Whatever were put into the page, it could load nothing, ask nobody else and be shown in no
/// frame.
const GUARDED: &str = "Content-Security-Policy: default-src 'none'; script-src 'self'; \
                       style-src 'self'; connect-src 'self'; base-uri 'none'; \
                       form-action 'none'; frame-ancestors 'none'\r\n\
                       X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n\
                       Cache-Control: no-cache\r\nVary: Accept\r\n";
const PART: &str = "X-Content-Type-Options: nosniff\r\nCache-Control: no-cache\r\n";

pub(super) fn front(asked: &Asked<'_>) -> Answer {
    let accepted = asked.field("accept").unwrap_or_default().to_ascii_lowercase();
    if memchr::memmem::find(&accepted, b"text/html").is_none() {
        let list = format!("{LIST} {}\n", actions::PATHS.join(" "));
        return Answer { fields: "Vary: Accept\r\n", ..Answer::text("200 OK", list) };
    }
    let page = Answer::new("200 OK", "text/html; charset=utf-8", PAGE);
    Answer { fields: GUARDED, ..page }
}

pub(super) fn script() -> Answer {
    let script = Answer::new("200 OK", "text/javascript; charset=utf-8", SCRIPT);
    Answer { fields: PART, ..script }
}

pub(super) fn style() -> Answer {
    let style = Answer::new("200 OK", "text/css; charset=utf-8", STYLE);
    Answer { fields: PART, ..style }
}
