//! Which answer a request gets: the list of all endpoints.

use l7rp_core::http1::request::Method;

use super::actions;
use super::http::{Answer, Asked, JSON};
use super::page;
use super::status::{self, Status};
use crate::config;
use crate::explain::explain;
use crate::live::Process;
use crate::observe::metrics;

/// It changes nothing: it is a look that needs more room than a target has.
const EXPLAIN: &str = "/-/explain";

pub(super) async fn answer(asked: &Asked<'_>, process: &Process) -> Answer {
    match asked.method {
        Method::Get | Method::Head => match may_see(asked) {
            Err(refused) => refused,
            Ok(()) if asked.path == b"/" => page::front(asked),
            Ok(()) => look(asked.path, process),
        },
        Method::Post if asked.path == EXPLAIN.as_bytes() => explained(asked, process),
        Method::Post => actions::answer(asked, process).await,
        _ => not_allowed(asked.path),
    }
}

/// Whether it may be looked at. Probes may come under any name: what they are told is no secret.
fn may_see(asked: &Asked<'_>) -> Result<(), Answer> {
    match asked.path {
        b"/livez" | b"/readyz" | b"/-/healthz" | b"/-/ready" => Ok(()),
        _ => actions::may_see(asked),
    }
}

/// It is for other methods.
fn not_allowed(path: &[u8]) -> Answer {
    let posts = actions::PATHS.iter().chain([&EXPLAIN]);
    let (fields, words) = match posts.map(|post| post.as_bytes()).find(|post| *post == path) {
        Some(b"/-/log-level") => ("Allow: GET, HEAD, POST\r\n", "GET, HEAD and POST"),
        Some(_) => ("Allow: POST\r\n", "POST"),
        None => ("Allow: GET, HEAD\r\n", "GET and HEAD"),
    };
    Answer { fields, ..Answer::text("405 Method Not Allowed", format!("this is for {words}\n")) }
}

/// What would become of the request in the body.
fn explained(asked: &Asked<'_>, process: &Process) -> Answer {
    if let Err(refused) = actions::may_ask(asked) {
        return refused;
    }
    let explained = serde_json::from_slice(asked.body)
        .map_err(|e| e.to_string())
        .and_then(|asked| explain(&process.snapshot(), Some(process), &asked));
    match explained {
        Ok(explanation) => Answer::json(&explanation),
        Err(why) => Answer::text("400 Bad Request", why + "\n"),
    }
}

/// What can be looked at.
fn look(path: &[u8], process: &Process) -> Answer {
    match path {
        b"/metrics" => {
            let content_type = "text/plain; version=0.0.4; charset=utf-8";
            Answer::new("200 OK", content_type, metrics::render(process))
        }
        b"/-/healthz" => Answer::text("200 OK", "ok\n"),
        b"/-/version" => Answer::text("200 OK", concat!("l7rp ", env!("CARGO_PKG_VERSION"), "\n")),
        b"/-/plan" => {
            Answer::new("200 OK", JSON, format!("{}\n", config::view(&process.snapshot().plan)))
        }
        b"/livez" => Answer::text("204 No Content", ""),
        b"/-/ready" | b"/readyz" => match process.why_unready() {
            Some(why) => Answer::text("503 Service Unavailable", why.line()),
            None if path == b"/readyz" => Answer::text("204 No Content", ""),
            None => Answer::text("200 OK", "ready\n"),
        },
        b"/-/log-level" => actions::show_log_level(process),
        b"/status" => Answer::json(&Status::of(process)),
        b"/-/status.schema.json" => Answer::json(&status::schema()),
        b"/-/page.js" => page::script(),
        b"/-/page.css" => page::style(),
        b"/-/explain" => not_allowed(path),
        _ if actions::PATHS.iter().any(|known| known.as_bytes() == path) => not_allowed(path),
        _ => Answer::text("404 Not Found", "not found\n"),
    }
}
