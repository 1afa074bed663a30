//! Which answer a request gets.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use l7rp_core::http1::request::{Method, Request};

use super::Shared;
use super::faults::{Ending, Faults, divides};
use crate::config::file::Size;

/// What `/slow` waits at most.
const LONGEST_WAIT_MS: u64 = 3_600_000;
/// The chunk of `/chunked` unless the request names one.
const USUAL_CHUNK: u64 = 16 * 1024;

/// The answer to one request, and how it is spoilt.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) content: Content,
    /// Wait before it.
    pub(super) wait: Duration,
    /// Wait before each octet of the body.
    pub(super) drip: Duration,
    pub(super) ending: Ending,
}

/// What the body has.
#[derive(Debug)]
pub(super) enum Content {
    /// This text.
    Text(Vec<u8>),
    /// This text, and the length of the request's body as a last line.
    Measured(Vec<u8>),
    /// So many octets of a pattern.
    Bytes(u64),
    /// The same in chunks.
    Chunked { n: u64, chunk: u64 },
}

impl Answer {
    /// A text that is not spoilt.
    pub(super) fn text(status: u16, text: impl Into<Vec<u8>>) -> Self {
        Self::of(status, Content::Text(text.into()))
    }

    fn of(status: u16, content: Content) -> Self {
        let (wait, drip) = (Duration::ZERO, Duration::ZERO);
        Self { status, content, wait, drip, ending: Ending::Answer }
    }

    fn spoilt(mut self, faults: &Faults) -> Self {
        self.wait += faults.slow;
        self.drip = faults.drip;
        self.ending = faults.ending;
        self
    }
}

/// Counts the request and chooses its answer. `buf`: what `head` was parsed from.
pub(super) fn choose(buf: &[u8], head: &Request, shared: &Shared) -> Answer {
    let options = &shared.options;
    let faults = &options.faults;
    let target = head.target.of(buf);
    let (path, query) = split(target);
    let is_down = faults.flap.is_some_and(|flap| flap.is_down(shared.clock.now()));
    if path == b"/healthz" {
        return if is_down { down() } else { Answer::text(204, "") };
    }
    let number = shared.requests.fetch_add(1, Relaxed) + 1;
    if is_down {
        return down();
    }
    let hit = faults.hit(number);
    let answer = match faults.status {
        _ if divides(options.fail_every, number) => Answer::text(503, "simulated failure\n"),
        Some(status) if hit => Answer::text(status, format!("simulated status {status}\n")),
        _ => by_path(buf, head, path, query)
            .unwrap_or_else(|| Answer::text(200, format!("{} request={number}\n", options.name))),
    };
    if hit { answer.spoilt(faults) } else { answer }
}

fn down() -> Answer {
    Answer::text(503, "down for now\n")
}

fn split(target: &[u8]) -> (&[u8], &[u8]) {
    match target.iter().position(|&b| b == b'?') {
        Some(at) => (&target[..at], &target[at + 1..]),
        None => (target, b""),
    }
}

/// The paths that have an answer of their own.
fn by_path(buf: &[u8], head: &Request, path: &[u8], query: &[u8]) -> Option<Answer> {
    let answer = match path {
        b"/echo" => Answer::of(200, Content::Measured(echo(buf, head))),
        b"/upload" => Answer::of(200, Content::Measured(Vec::new())),
        b"/bytes" => match size(query, "n", 0) {
            Some(n) => Answer::of(200, Content::Bytes(n)),
            None => wrong("n is a size: /bytes?n=100, /bytes?n=64KiB"),
        },
        b"/chunked" => match (size(query, "n", 0), size(query, "chunk", USUAL_CHUNK)) {
            (Some(n), Some(chunk)) if chunk > 0 => Answer::of(200, Content::Chunked { n, chunk }),
            _ => wrong("n and chunk are sizes: /chunked?n=1MiB&chunk=16KiB"),
        },
        b"/status" => match size(query, "code", 200) {
            // An interim status ends no exchange.
            Some(code @ 200..=599) => Answer::text(code as u16, format!("status {code}\n")),
            _ => wrong("code is a final status: /status?code=503"),
        },
        b"/slow" => match size(query, "ms", 1000) {
            Some(ms @ 0..=LONGEST_WAIT_MS) => {
                let answer = Answer::text(200, format!("waited {ms} ms\n"));
                Answer { wait: Duration::from_millis(ms), ..answer }
            }
            _ => wrong("ms is a number up to an hour: /slow?ms=250"),
        },
        _ => return None,
    };
    Some(answer)
}

fn wrong(hint: &str) -> Answer {
    Answer::text(400, format!("{hint}\n"))
}

/// The request as it arrived, for people to read.
fn echo(buf: &[u8], head: &Request) -> Vec<u8> {
    let version = if head.is_http10 { "HTTP/1.0" } else { "HTTP/1.1" };
    let method = head.method_text.of(buf);
    let mut out = [method, head.target.of(buf), version.as_bytes()].join(&b' ');
    out.push(b'\n');
    for field in &head.fields {
        out.extend_from_slice(field.name.of(buf));
        out.extend_from_slice(b": ");
        out.extend_from_slice(field.value.of(buf));
        out.push(b'\n');
    }
    out.push(b'\n');
    out
}

/// A number of the query; `None`: it is none. Units as in the configuration.
fn size(query: &[u8], key: &str, otherwise: u64) -> Option<u64> {
    let pairs = query.split(|&b| b == b'&');
    let mut values = pairs.filter_map(|pair| pair.strip_prefix(key.as_bytes())?.strip_prefix(b"="));
    let Some(value) = values.next() else { return Some(otherwise) };
    Size::parse(std::str::from_utf8(value).ok()?).ok().map(|Size(size)| size)
}

/// Whether an answer with this status to this request has a body (RFC 9110 §6.4.1).
pub(super) fn has_body(status: u16, method: Method) -> bool {
    method != Method::Head && has_content(status)
}

/// Whether this status can have content at all.
pub(super) fn has_content(status: u16) -> bool {
    !matches!(status, 204 | 205 | 304)
}

/// The phrase of a status; empty for those that are rarely seen.
pub(super) fn phrase(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        204 => "No Content",
        301 => "Moved Permanently",
        302 => "Found",
        304 => "Not Modified",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        413 => "Content Too Large",
        414 => "URI Too Long",
        417 => "Expectation Failed",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_the_query() {
        for (query, want) in [
            ("", Some(7)),
            ("n=12", Some(12)),
            ("x=1&n=2KiB&n=3", Some(2048)),
            ("nn=5", Some(7)),
            ("n=", None),
            ("n=-1", None),
            ("n=1MB", None),
            ("n=99999999999GiB", None),
        ] {
            assert_eq!(size(query.as_bytes(), "n", 7), want, "{query}");
        }
    }
}
