//! One JSON line for each request. No query string, cookies, credentials or bodies.

use std::cell::RefCell;
use std::io::Write;
use std::time::Duration;

use l7rp_core::trace;

use super::event::{Events, Level, write_timestamp};
use super::tries::{End, Link, Refusal, Try};
use crate::clock;

/// Octets of a path, host or method in a line; more are cut.
const MAX_TEXT: usize = 1024;
/// Tries in a line, and upstreams that were not tried.
const MAX_ITEMS: usize = 16;
/// A worker hands its lines over when it has this many octets of them.
const CHUNK: usize = 32 << 10;

/// What a line says.
#[derive(Debug)]
#[expect(missing_docs, reason = "fields are the names in the line")]
pub struct Entry<'a> {
    pub route: &'a str,
    pub request_id: &'a [u8],
    pub method: &'a [u8],
    pub host: &'a [u8],
    pub path: &'a [u8],
    pub status: u16,
    pub grpc_status: Option<u8>,
    pub duration: Duration,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub client_ip: &'a str,
    pub client_identity: &'a str,
    pub protocol: &'static str,
    pub pool: &'a str,
    /// All tries.
    pub tries: &'a [Try<'a>],
    /// The one that counts.
    pub used: Option<&'a Try<'a>>,
    /// Upstreams that it could not go to.
    pub refused: &'a [Refusal<'a>],
    /// Why there was no other try.
    pub stop: &'static str,
    /// If it is sampled.
    pub trace_id: Option<u128>,
    pub reason: &'static str,
}

impl Entry<'_> {
    /// Whether there is nothing to explain.
    fn is_plain_success(&self) -> bool {
        let no_question = self.reason.is_empty() && self.stop.is_empty();
        no_question && self.tries.len() <= 1 && self.status < 500
    }
}

/// One worker's lines that were not handed over yet.
#[derive(Debug, Default)]
pub struct Lines {
    buffer: RefCell<(Vec<u8>, u64)>,
}

impl Lines {
    /// Adds a line. True: these are the first ones since the last [`Lines::hand_over`], so
    /// that somebody must see to it that they are handed over soon.
    pub fn add(&self, entry: &Entry<'_>, events: &Events) -> bool {
        let level = match entry.status {
            500.. => Level::Error,
            400..=499 => Level::Warn,
            _ => Level::Info,
        };
        if level < events.least() {
            return false;
        }
        let mut buffer = self.buffer.borrow_mut();
        let first = buffer.1 == 0;
        write_entry(&mut buffer.0, level, clock::wall_ms(), entry);
        buffer.1 += 1;
        if buffer.0.len() >= CHUNK {
            drop(buffer);
            self.hand_over(events);
            return false;
        }
        first
    }

    /// Hands what there is to the writer.
    pub fn hand_over(&self, events: &Events) {
        let mut buffer = self.buffer.borrow_mut();
        if buffer.1 > 0 {
            let lines = std::mem::replace(&mut buffer.0, Vec::with_capacity(CHUNK + 4096));
            events.log().lines(lines, std::mem::take(&mut buffer.1));
        }
    }
}

fn write_entry(out: &mut Vec<u8>, level: Level, wall_ms: u64, e: &Entry<'_>) {
    out.extend_from_slice(b"{\"time\":\"");
    write_timestamp(out, wall_ms);
    out.extend_from_slice(b"\",\"level\":\"");
    out.extend_from_slice(level.name().as_bytes());
    out.extend_from_slice(b"\",\"msg\":\"request_completed\",\"event\":\"request_completed\"");
    text(out, "route", e.route.as_bytes());
    text(out, "request_id", e.request_id);
    text(out, "method", e.method);
    text(out, "host", e.host);
    text(out, "path", e.path);
    number(out, "status", u64::from(e.status));
    if let Some(status) = e.grpc_status {
        number(out, "grpc_status", u64::from(status));
    }
    millis(out, "duration_ms", e.duration);
    number(out, "bytes_in", e.bytes_in);
    number(out, "bytes_out", e.bytes_out);
    text(out, "client_ip", e.client_ip.as_bytes());
    if !e.client_identity.is_empty() {
        text(out, "client_identity", e.client_identity.as_bytes());
    }
    text(out, "protocol", e.protocol.as_bytes());
    text(out, "upstream", e.used.map_or("", |used| used.url).as_bytes());
    text(out, "pool", e.pool.as_bytes());
    number(out, "attempts", e.tries.len() as u64);
    flag(out, "hedged", e.tries.iter().any(|one| one.is_hedge));
    if let Some((_, time)) = e.used.and_then(|used| used.ended) {
        millis(out, "upstream_ms", time);
    }
    link(out, e.used.and_then(|used| used.link));
    if !e.reason.is_empty() {
        text(out, "reason", e.reason.as_bytes());
    }
    if let Some(id) = e.trace_id {
        let mut digits = [0; 32];
        trace::write_hex(&mut digits, id);
        text(out, "trace_id", &digits);
    }
    if !e.is_plain_success() {
        explain(out, e);
    }
    out.extend_from_slice(b"}\n");
}

/// Who did what, where that needs to be told.
fn explain(out: &mut Vec<u8>, e: &Entry<'_>) {
    list(out, "tries", e.tries, |out, one| {
        text(out, "upstream", one.url.as_bytes());
        match one.ended {
            Some((End::Answered(status), _)) => number(out, "status", u64::from(status)),
            Some((End::Failed(failure), _)) => {
                text(out, "error", failure.meaning().reason.as_bytes());
            }
            Some((End::Lost, _)) => text(out, "error", b"lost_race"),
            None => text(out, "error", b"not_ended"),
        }
        if let Some((_, took)) = one.ended {
            millis(out, "ms", took);
        }
        link(out, one.link);
        if one.is_hedge {
            flag(out, "hedge", true);
        }
    });
    list(out, "not_tried", e.refused, |out, one| {
        text(out, "upstream", one.url.as_bytes());
        text(out, "why", one.why.as_bytes());
    });
    if !e.stop.is_empty() {
        text(out, "no_retry", e.stop.as_bytes());
    }
}

/// A list of objects, if there are any; of many, the last.
fn list<T>(out: &mut Vec<u8>, name: &str, all: &[T], each: impl Fn(&mut Vec<u8>, &T)) {
    if all.is_empty() {
        return;
    }
    key(out, name);
    let mut before = b'[';
    for one in &all[all.len().saturating_sub(MAX_ITEMS)..] {
        out.push(before);
        before = b',';
        let begin = out.len();
        each(out, one);
        // Every member brings a comma in front of it.
        if let Some(comma) = out.get_mut(begin) {
            *comma = b'{';
        }
        out.push(b'}');
    }
    out.push(b']');
}

fn link(out: &mut Vec<u8>, link: Option<Link>) {
    if let Some(Link { reused, age }) = link {
        flag(out, "conn_reused", reused);
        millis(out, "conn_age_ms", age);
    }
}

fn key(out: &mut Vec<u8>, name: &str) {
    out.extend_from_slice(b",\"");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":");
}

fn number(out: &mut Vec<u8>, name: &str, value: u64) {
    key(out, name);
    out.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
}

fn flag(out: &mut Vec<u8>, name: &str, value: bool) {
    key(out, name);
    out.extend_from_slice(if value { b"true" } else { b"false" });
}

/// Milliseconds with three decimals.
fn millis(out: &mut Vec<u8>, name: &str, d: Duration) {
    key(out, name);
    let us = d.as_micros() as u64;
    out.extend_from_slice(itoa::Buffer::new().format(us / 1000).as_bytes());
    let rest = us % 1000;
    out.extend([b'.', digit(rest / 100), digit(rest / 10 % 10), digit(rest % 10)]);
}

fn digit(n: u64) -> u8 {
    b'0' + n as u8
}

/// A JSON string. Octets outside visible ASCII are written as the code point of the same
/// number, so that a line is valid whatever a client sends and what it sent can be told.
fn text(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    key(out, name);
    out.push(b'"');
    let value = &value[..value.len().min(MAX_TEXT)];
    if value.iter().all(|&b| matches!(b, b' '..=b'~') && b != b'"' && b != b'\\') {
        out.extend_from_slice(value);
    } else {
        for &b in value {
            match b {
                b'"' | b'\\' => out.extend([b'\\', b]),
                b' '..=b'~' => out.push(b),
                _ => {
                    let _ = write!(out, "\\u{b:04x}");
                }
            }
        }
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use l7rp_core::failure::Failure;
    use l7rp_core::names::Nanos;
    use proptest::prelude::*;

    const TRY: Try<'static> = Try {
        url: "http://127.0.0.1:9001",
        host: "127.0.0.1",
        port: 9001,
        began: Nanos(0),
        ended: Some((End::Answered(200), Duration::from_millis(5))),
        link: Some(Link { reused: true, age: Duration::from_micros(1500) }),
        is_hedge: false,
        span: 0,
    };

    fn entry<'a>(path: &'a [u8], tries: &'a [Try<'a>]) -> Entry<'a> {
        Entry {
            route: "api",
            request_id: b"r1",
            method: b"GET",
            host: b"a.test",
            path,
            status: 200,
            grpc_status: None,
            duration: Duration::from_micros(1_234_567),
            bytes_in: 1,
            bytes_out: 2,
            client_ip: "192.0.2.1",
            client_identity: "",
            protocol: "HTTP/1.1",
            pool: "backend",
            tries,
            used: tries.last(),
            refused: &[],
            stop: "",
            trace_id: None,
            reason: "",
        }
    }

    fn line(entry: &Entry<'_>) -> String {
        let mut out = Vec::new();
        write_entry(&mut out, Level::Error, 0, entry);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_line_has_every_field() {
        assert_eq!(
            line(&Entry { trace_id: Some(0xab), ..entry(b"/x", &[TRY]) }),
            "{\"time\":\"1970-01-01T00:00:00.000Z\",\"level\":\"error\",\
             \"msg\":\"request_completed\",\"event\":\"request_completed\",\"route\":\"api\",\
             \"request_id\":\"r1\",\"method\":\"GET\",\"host\":\"a.test\",\"path\":\"/x\",\
             \"status\":200,\"duration_ms\":1234.567,\"bytes_in\":1,\"bytes_out\":2,\
             \"client_ip\":\"192.0.2.1\",\"protocol\":\"HTTP/1.1\",\
             \"upstream\":\"http://127.0.0.1:9001\",\"pool\":\"backend\",\"attempts\":1,\
             \"hedged\":false,\"upstream_ms\":5.000,\"conn_reused\":true,\"conn_age_ms\":1.500,\
             \"trace_id\":\"000000000000000000000000000000ab\"}\n"
        );
    }

    #[test]
    fn what_was_no_plain_success_is_explained() {
        let failed = (End::Failed(Failure::ConnectRefused), Duration::from_micros(100));
        let tries = [
            Try { ended: Some(failed), link: None, ..TRY },
            Try { ended: Some((End::Lost, Duration::from_millis(1))), is_hedge: true, ..TRY },
            Try { ended: None, link: None, ..TRY },
        ];
        let refused = [Refusal { url: "http://b", why: "breaker_open" }];
        let explained = Entry {
            status: 502,
            refused: &refused,
            stop: "budget",
            reason: "connect_refused",
            ..entry(b"/", &tries)
        };
        let line = line(&explained);
        let expected = "\"reason\":\"connect_refused\",\"tries\":[\
            {\"upstream\":\"http://127.0.0.1:9001\",\"error\":\"connect_refused\",\"ms\":0.100},\
            {\"upstream\":\"http://127.0.0.1:9001\",\"error\":\"lost_race\",\"ms\":1.000,\
            \"conn_reused\":true,\"conn_age_ms\":1.500,\"hedge\":true},\
            {\"upstream\":\"http://127.0.0.1:9001\",\"error\":\"not_ended\"}],\
            \"not_tried\":[{\"upstream\":\"http://b\",\"why\":\"breaker_open\"}],\
            \"no_retry\":\"budget\"}\n";
        assert!(line.ends_with(expected), "{line}");
        assert!(serde_json::from_str::<serde_json::Value>(&line).is_ok());
    }

    #[test]
    fn of_many_tries_the_last_are_told() {
        let json: serde_json::Value =
            serde_json::from_str(&line(&entry(b"/", &[TRY; 40]))).unwrap();
        assert_eq!(json["attempts"], 40);
        assert_eq!(json["tries"].as_array().map(Vec::len), Some(MAX_ITEMS));
    }

    proptest! {
        #[test]
        fn any_octets_make_one_valid_line(path in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let line = line(&entry(&path, &[TRY]));
            prop_assert_eq!(line.matches('\n').count(), 1);
            let json: serde_json::Value = serde_json::from_str(&line).unwrap();
            let expected: String = path.iter().take(MAX_TEXT).map(|&b| char::from(b)).collect();
            prop_assert_eq!(json["path"].as_str(), Some(expected.as_str()));
        }
    }
}
