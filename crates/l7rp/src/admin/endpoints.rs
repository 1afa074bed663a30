//! Which answer a request gets: the list of all endpoints.

use l7rp_core::http1::request::Method;

use super::http::{Answer, Asked, JSON};
use super::page;
use super::status::{self, Status};
use crate::config;
use crate::live::Process;
use crate::observe::metrics;

pub(super) async fn answer(asked: &Asked<'_>, process: &Process) -> Answer {
    match asked.method {
        Method::Get | Method::Head if asked.path == b"/" => page::front(asked),
        Method::Get | Method::Head => look(asked.path, process),
        _ => Answer::text("405 Method Not Allowed", ""),
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
        b"/status" => Answer::json(&Status::of(process)),
        b"/-/status.schema.json" => Answer::json(&status::schema()),
        b"/-/page.js" => page::script(),
        b"/-/page.css" => page::style(),
        _ => Answer::text("404 Not Found", "not found\n"),
    }
}
