//! Endpoints about the proxy itself, on a listener of their own, served by the control
//! thread: they answer while all workers are busy, and to the end of a drain.

use std::fmt::Write;
use std::fs::File;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use l7rp_core::http1::Limits;
use l7rp_core::http1::request::{Method, Request, parse_request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

use crate::config;
use crate::live::Process;
use crate::observe::metrics;
use crate::serve::listen::{Accepting, Bound};
use crate::stream::Stream;

/// Connections served at once; more wait.
const MAX_CONNECTIONS: usize = 64;
/// For one request, from the first octet to the last of its answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Accepting pauses for so long when this machine lacks something.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(50);
const LIMITS: Limits = Limits { max_head: 8 << 10, max_fields: 50, max_target: 2 << 10 };

/// An answer.
struct Answer {
    status: &'static str,
    content_type: &'static str,
    body: String,
}

const TEXT: &str = "text/plain; charset=utf-8";

/// Descriptors held back, so that what is wrong can be asked for when there are no others.
#[derive(Default)]
struct Reserve(Vec<File>);

impl Reserve {
    /// One for a connection, and some for the files that metrics are read from.
    const SIZE: usize = 4;

    fn fill(&mut self) {
        while self.0.len() < Self::SIZE
            && let Ok(file) = File::open("/dev/null")
        {
            self.0.push(file);
        }
    }
}

/// Serves the endpoints. Never returns while the socket works.
pub async fn serve(socket: Bound, process: Arc<Process>) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    // A socket that the runtime refuses leaves the proxy without these endpoints, no more.
    let Ok(socket) = Accepting::new(socket) else { return };
    let mut reserve = Reserve::default();
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        // Not while somebody is served who may need what was held back.
        if places.available_permits() + 1 == MAX_CONNECTIONS {
            reserve.fill();
        }
        let mut accepted = poll_fn(|cx| socket.poll_accept(cx)).await;
        if accepted.is_err() {
            reserve.0.clear();
            accepted = poll_fn(|cx| socket.poll_accept(cx)).await;
        }
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(SHORTAGE_PAUSE).await;
            continue;
        };
        let process = process.clone();
        tokio::spawn(async move {
            connection(stream, &process).await;
            drop(place);
        });
    }
}

/// Serves one connection.
async fn connection(mut stream: Stream, process: &Process) {
    let mut buf = Vec::with_capacity(4 << 10);
    let mut head = Request::default();
    loop {
        let exchange = exchange(&mut stream, &mut buf, &mut head, process);
        // A scraper that stops in the middle costs a place for this long.
        match tokio::time::timeout(PATIENCE, exchange).await {
            Ok(Some(len)) => drop(buf.drain(..len)),
            Ok(None) | Err(_) => return,
        }
    }
}

/// Serves one request; the length of its head, or `None` if the connection ends.
async fn exchange(
    stream: &mut Stream,
    buf: &mut Vec<u8>,
    head: &mut Request,
    process: &Process,
) -> Option<usize> {
    let len = loop {
        if !buf.is_empty() {
            match parse_request(buf, head, LIMITS) {
                Ok(Some(len)) => break len,
                Ok(None) => {}
                Err(failure) => {
                    let m = failure.meaning();
                    let text =
                        format!("HTTP/1.1 {} {}\r\nConnection: close\r\n\r\n", m.status, m.text);
                    let _ = stream.write_all(text.as_bytes()).await;
                    return None;
                }
            }
        }
        if stream.read_buf(buf).await.ok()? == 0 {
            return None;
        }
    };
    let target = head.target.of(buf);
    let path = target.split(|&b| b == b'?').next().unwrap_or_default();
    let answer = match head.method {
        Method::Get | Method::Head => answer(path, process),
        _ => Answer { status: "405 Method Not Allowed", content_type: TEXT, body: String::new() },
    };
    // No endpoint takes a body; one that comes ends the connection.
    let may = head.keep_alive && !process.is_succeeded();
    let keep = may && head.framing == l7rp_core::http1::Framing::None;
    let text = written(&answer, keep, head.method == Method::Head);
    stream.write_all(text.as_bytes()).await.ok()?;
    keep.then_some(len)
}

fn written(answer: &Answer, keep: bool, to_head: bool) -> String {
    let Answer { status, content_type, body } = answer;
    let mut text = format!("HTTP/1.1 {status}\r\n");
    if !status.starts_with("204") {
        let _ = write!(text, "Content-Type: {content_type}\r\nContent-Length: {}\r\n", body.len());
    }
    if !keep {
        text += "Connection: close\r\n";
    }
    text += "\r\n";
    if !to_head {
        text += body;
    }
    text
}

fn answer(path: &[u8], process: &Process) -> Answer {
    let text = |status, body: &str| Answer { status, content_type: TEXT, body: body.to_owned() };
    match path {
        b"/metrics" => Answer {
            status: "200 OK",
            content_type: "text/plain; version=0.0.4; charset=utf-8",
            body: metrics::render(process),
        },
        b"/-/healthz" => text("200 OK", "ok\n"),
        b"/-/ready" if process.is_ready() => text("200 OK", "ready\n"),
        b"/-/version" => text("200 OK", concat!("l7rp ", env!("CARGO_PKG_VERSION"), "\n")),
        b"/-/plan" => Answer {
            status: "200 OK",
            content_type: "application/json",
            body: format!("{}\n", config::view(&process.snapshot().plan)),
        },
        b"/livez" => text("204 No Content", ""),
        b"/readyz" if process.is_ready() => text("204 No Content", ""),
        b"/-/ready" | b"/readyz" => text("503 Service Unavailable", "no backend ready\n"),
        b"/" => text("200 OK", "/metrics /-/healthz /-/ready /-/version /-/plan /livez /readyz\n"),
        _ => text("404 Not Found", "not found\n"),
    }
}
