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

pub(super) async fn answer(asked: &Asked<'_>, process: &Process) -> Answer {
    match asked.method {
        Method::Get | Method::Head if asked.path == b"/" => page::front(asked),
        Method::Get | Method::Head => look(asked.path, process),
        // It changes nothing: it is a look that needs more room than a target has.
        Method::Post if asked.path == b"/-/explain" => explained(asked.body, process),
        Method::Post => actions::answer(asked, process).await,
        _ => Answer::text("405 Method Not Allowed", ""),
    }
}

/// What would become of the request in `body`.
fn explained(body: &[u8], process: &Process) -> Answer {
    let explained = serde_json::from_slice(body)
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
        b"/-/ready" if process.is_ready() => Answer::text("200 OK", "ready\n"),
        b"/-/version" => Answer::text("200 OK", concat!("l7rp ", env!("CARGO_PKG_VERSION"), "\n")),
        b"/-/plan" => {
            Answer::new("200 OK", JSON, format!("{}\n", config::view(&process.snapshot().plan)))
        }
        b"/livez" => Answer::text("204 No Content", ""),
        b"/readyz" if process.is_ready() => Answer::text("204 No Content", ""),
        b"/-/ready" | b"/readyz" => Answer::text("503 Service Unavailable", "no backend ready\n"),
        b"/-/log-level" => actions::show_log_level(process),
        b"/status" => Answer::json(&Status::of(process)),
        b"/-/status.schema.json" => Answer::json(&status::schema()),
        b"/-/page.js" => page::script(),
        b"/-/page.css" => page::style(),
        _ if actions::PATHS.iter().any(|known| known.as_bytes() == path) => {
            let answer = Answer::text("405 Method Not Allowed", "this is for POST\n");
            Answer { fields: "Allow: POST\r\n", ..answer }
        }
        _ => Answer::text("404 Not Found", "not found\n"),
    }
}
