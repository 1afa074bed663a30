//! One JSON line for each request. No query string, cookies, credentials or bodies.

use std::cell::RefCell;
use std::io::Write;
use std::time::Duration;

use super::event::{Events, Level, write_timestamp};
use crate::clock;

/// Octets of a path, host or method in a line; more are cut.
const MAX_TEXT: usize = 1024;
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
    pub upstream: &'a str,
    pub pool: &'a str,
    pub attempts: u32,
    pub hedged: bool,
    pub upstream_time: Option<Duration>,
    pub conn_reused: bool,
    pub reason: &'static str,
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
    text(out, "upstream", e.upstream.as_bytes());
    text(out, "pool", e.pool.as_bytes());
    number(out, "attempts", u64::from(e.attempts));
    flag(out, "hedged", e.hedged);
    if let Some(time) = e.upstream_time {
        millis(out, "upstream_ms", time);
        flag(out, "conn_reused", e.conn_reused);
    }
    if !e.reason.is_empty() {
        text(out, "reason", e.reason.as_bytes());
    }
    out.extend_from_slice(b"}\n");
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
    use proptest::prelude::*;

    fn line(path: &[u8]) -> String {
        let mut out = Vec::new();
        let entry = Entry {
            route: "api",
            request_id: b"r1",
            method: b"GET",
            host: b"a.test",
            path,
            status: 502,
            grpc_status: None,
            duration: Duration::from_micros(1_234_567),
            bytes_in: 1,
            bytes_out: 2,
            client_ip: "192.0.2.1",
            client_identity: "",
            protocol: "HTTP/1.1",
            upstream: "http://127.0.0.1:9001",
            pool: "backend",
            attempts: 2,
            hedged: false,
            upstream_time: Some(Duration::from_millis(5)),
            conn_reused: true,
            reason: "upstream_closed",
        };
        write_entry(&mut out, Level::Error, 0, &entry);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_line_has_every_field() {
        assert_eq!(
            line(b"/x"),
            "{\"time\":\"1970-01-01T00:00:00.000Z\",\"level\":\"error\",\
             \"msg\":\"request_completed\",\"event\":\"request_completed\",\"route\":\"api\",\
             \"request_id\":\"r1\",\"method\":\"GET\",\"host\":\"a.test\",\"path\":\"/x\",\
             \"status\":502,\"duration_ms\":1234.567,\"bytes_in\":1,\"bytes_out\":2,\
             \"client_ip\":\"192.0.2.1\",\"protocol\":\"HTTP/1.1\",\
             \"upstream\":\"http://127.0.0.1:9001\",\"pool\":\"backend\",\"attempts\":2,\
             \"hedged\":false,\"upstream_ms\":5.000,\"conn_reused\":true,\
             \"reason\":\"upstream_closed\"}\n"
        );
    }

    proptest! {
        #[test]
        fn any_octets_make_one_valid_line(path in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let line = line(&path);
            prop_assert_eq!(line.matches('\n').count(), 1);
            let json: serde_json::Value = serde_json::from_str(&line).unwrap();
            let expected: String = path.iter().take(MAX_TEXT).map(|&b| char::from(b)).collect();
            prop_assert_eq!(json["path"].as_str(), Some(expected.as_str()));
        }
    }
}
