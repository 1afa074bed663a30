//! One JSON line for each request. No query string, cookies, credentials or bodies.

use std::cell::RefCell;
use std::io::Write;
use std::time::Duration;

use l7rp_core::hex;
use l7rp_core::names::Nanos;

use super::event::{Events, Level, write_timestamp};
use super::tries::{End, Link, Refusal, Try};
use crate::clock;

/// Octets of a path, host or method in a line; more are cut.
const MAX_TEXT: usize = 1024;
/// Tries in a line, and upstreams that were not tried.
const MAX_ITEMS: usize = 16;
/// Octets that nearly all lines fit into.
const MOST_LINE: usize = 1024;
/// A worker hands its lines over when it has this many octets of them.
const CHUNK: usize = 64 << 10;

/// A member's name as it stands in a line.
macro_rules! key {
    ($name:literal) => {
        concat!(",\"", $name, "\":")
    };
}

/// What stands between the time of a line and its first member of its own.
macro_rules! beginning {
    ($level:literal) => {
        concat!(
            "\",\"level\":\"",
            $level,
            "\",\"msg\":\"request_completed\",\"event\":\"request_completed\""
        )
        .as_bytes()
    };
}

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
    /// How many tries were made, without those that were repeated at no cost.
    pub attempts: usize,
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
    /// The reason is a fault of an upstream or of the proxy.
    pub is_fault: bool,
}

impl Entry<'_> {
    /// Whether there is nothing to explain.
    fn is_plain_success(&self) -> bool {
        let no_question = self.reason.is_empty() && self.stop.is_empty();
        no_question && self.tries.len() <= 1 && self.status < 500 && !self.is_failed_call()
    }

    /// Whether it is a call of gRPC that an upstream has failed in the way that a status from 500
    /// on means: unknown, deadline exceeded, unimplemented, internal, unavailable, data loss. What
    /// is answered here has a status of HTTP that says so.
    pub fn is_failed_call(&self) -> bool {
        self.status < 400 && matches!(self.grpc_status, Some(2 | 4 | 12..=15))
    }
}

/// One worker's lines that were not handed over yet.
#[derive(Debug, Default)]
pub struct Lines(RefCell<Buffer>);

#[derive(Debug, Default)]
struct Buffer {
    lines: Vec<u8>,
    count: u64,
    /// The last time that was written: up to the second.
    stamp: Stamp,
}

/// A time as a line has it. All but the milliseconds is the same for a second.
#[derive(Debug, Default)]
struct Stamp {
    second: u64,
    text: Vec<u8>,
    /// A point in time, and what the clock on the wall said then: it is read once for all lines
    /// that are handed over together.
    read: (Nanos, u64),
}

impl Stamp {
    /// The milliseconds of the wall clock at `at`, soon after it was read.
    fn wall_ms(&self, at: Nanos) -> u64 {
        let (then, wall_ms) = self.read;
        wall_ms + at.since(then).as_millis() as u64
    }

    fn write(&mut self, out: &mut Vec<u8>, wall_ms: u64) {
        const TO_SECOND: usize = "1970-01-01T00:00:00.".len();
        let (second, ms) = (wall_ms / 1000, wall_ms % 1000);
        if second != self.second || self.text.is_empty() {
            self.text.clear();
            write_timestamp(&mut self.text, wall_ms);
            self.text.truncate(TO_SECOND);
            self.second = second;
        }
        out.extend_from_slice(&self.text);
        out.extend_from_slice(&[digit(ms / 100), digit(ms / 10 % 10), digit(ms % 10), b'Z']);
    }
}

impl Lines {
    /// Adds a line. True: these are the first ones since the last [`Lines::hand_over`], so
    /// that somebody must see to it that they are handed over soon.
    pub fn add(&self, entry: &Entry<'_>, now: Nanos, events: &Events) -> bool {
        let level = match entry.status {
            _ if entry.is_failed_call() => Level::Error,
            500.. => Level::Error,
            400..=499 => Level::Warn,
            _ => Level::Info,
        };
        if level < events.least() {
            return false;
        }
        let mut buffer = self.0.borrow_mut();
        let Buffer { lines, count, stamp } = &mut *buffer;
        let first = *count == 0;
        if first {
            stamp.read = (now, clock::wall_ms());
        }
        lines.reserve(MOST_LINE);
        lines.extend_from_slice(b"{\"time\":\"");
        stamp.write(lines, stamp.wall_ms(now));
        write_entry(lines, level, entry);
        *count += 1;
        if lines.len() >= CHUNK {
            drop(buffer);
            self.hand_over(events);
            return false;
        }
        first
    }

    /// Hands what there is to the writer.
    pub fn hand_over(&self, events: &Events) {
        let mut buffer = self.0.borrow_mut();
        if buffer.count > 0 {
            let lines = std::mem::replace(&mut buffer.lines, events.log().buffer());
            events.log().lines(lines, std::mem::take(&mut buffer.count));
        }
    }
}

/// All of a line but its time.
fn write_entry(out: &mut Vec<u8>, level: Level, e: &Entry<'_>) {
    out.extend_from_slice(match level {
        Level::Error => beginning!("error"),
        Level::Warn => beginning!("warn"),
        Level::Info => beginning!("info"),
        Level::Debug => beginning!("debug"),
    });
    text(out, key!("route"), e.route.as_bytes());
    text(out, key!("request_id"), e.request_id);
    text(out, key!("method"), e.method);
    text(out, key!("host"), e.host);
    text(out, key!("path"), e.path);
    number(out, key!("status"), u64::from(e.status));
    if let Some(status) = e.grpc_status {
        number(out, key!("grpc_status"), u64::from(status));
    }
    millis(out, key!("duration_ms"), e.duration);
    number(out, key!("bytes_in"), e.bytes_in);
    number(out, key!("bytes_out"), e.bytes_out);
    plain(out, key!("client_ip"), e.client_ip);
    if !e.client_identity.is_empty() {
        text(out, key!("client_identity"), e.client_identity.as_bytes());
    }
    plain(out, key!("protocol"), e.protocol);
    text(out, key!("upstream"), e.used.map_or("", |used| used.url).as_bytes());
    text(out, key!("pool"), e.pool.as_bytes());
    match e.tries {
        [only] if !only.is_hedge && e.attempts == 1 => {
            out.extend_from_slice(b",\"attempts\":1,\"hedged\":false");
        }
        tries => {
            number(out, key!("attempts"), e.attempts as u64);
            flag(out, key!("hedged"), tries.iter().any(|one| one.is_hedge));
        }
    }
    if let Some((_, time)) = e.used.and_then(|used| used.ended) {
        millis(out, key!("upstream_ms"), time);
    }
    link(out, e.used.and_then(|used| used.link));
    if !e.reason.is_empty() {
        text(out, key!("reason"), e.reason.as_bytes());
    }
    if let Some(id) = e.trace_id {
        text(out, key!("trace_id"), &hex::long_digits(id));
    }
    if !e.is_plain_success() {
        explain(out, e);
    }
    out.extend_from_slice(b"}\n");
}

/// Who did what, where that needs to be told.
fn explain(out: &mut Vec<u8>, e: &Entry<'_>) {
    list(out, key!("tries"), e.tries, |out, one| {
        text(out, key!("upstream"), one.url.as_bytes());
        match one.ended {
            Some((End::Answered(status), _)) => number(out, key!("status"), u64::from(status)),
            Some((End::Failed(failure), _)) => {
                text(out, key!("error"), failure.meaning().reason.as_bytes());
            }
            Some((End::Lost, _)) => text(out, key!("error"), b"lost_race"),
            None => text(out, key!("error"), b"not_ended"),
        }
        if let Some((_, took)) = one.ended {
            millis(out, key!("ms"), took);
        }
        link(out, one.link);
        if one.is_hedge {
            flag(out, key!("hedge"), true);
        }
        if one.is_repeated {
            flag(out, key!("repeated"), true);
        }
    });
    list(out, key!("not_tried"), e.refused, |out, one| {
        text(out, key!("upstream"), one.url.as_bytes());
        text(out, key!("why"), one.why.as_bytes());
        if let Some(cause) = &one.cause {
            text(out, key!("cause"), cause.as_bytes());
        }
    });
    if !e.stop.is_empty() {
        text(out, key!("no_retry"), e.stop.as_bytes());
    }
}

/// A list of objects, if there are any; of many, the last.
fn list<T>(out: &mut Vec<u8>, key: &str, all: &[T], each: impl Fn(&mut Vec<u8>, &T)) {
    if all.is_empty() {
        return;
    }
    out.extend_from_slice(key.as_bytes());
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
        flag(out, key!("conn_reused"), reused);
        millis(out, key!("conn_age_ms"), age);
    }
}

#[inline]
fn number(out: &mut Vec<u8>, key: &str, value: u64) {
    out.extend_from_slice(key.as_bytes());
    out.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
}

#[inline]
fn flag(out: &mut Vec<u8>, key: &str, value: bool) {
    out.extend_from_slice(key.as_bytes());
    out.extend_from_slice(if value { b"true" } else { b"false" });
}

/// Milliseconds with three decimals.
#[inline]
fn millis(out: &mut Vec<u8>, key: &str, d: Duration) {
    out.extend_from_slice(key.as_bytes());
    let us = d.as_secs() * 1_000_000 + u64::from(d.subsec_micros());
    let (ms, rest) = (us / 1000, us % 1000);
    let decimals = [b'.', digit(rest / 100), digit(rest / 10 % 10), digit(rest % 10)];
    if ms < 10 {
        out.push(digit(ms));
    } else {
        out.extend_from_slice(itoa::Buffer::new().format(ms).as_bytes());
    }
    out.extend_from_slice(&decimals);
}

fn digit(n: u64) -> u8 {
    b'0' + n as u8
}

/// A JSON string. Octets outside visible ASCII are written as the code point of the same
/// number, so that a line is valid whatever a client sends and what it sent can be told.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a key of known length is a few stores")]
fn text(out: &mut Vec<u8>, key: &str, value: &[u8]) {
    out.extend_from_slice(key.as_bytes());
    string(out, value);
}

fn string(out: &mut Vec<u8>, value: &[u8]) {
    let value = &value[..value.len().min(MAX_TEXT)];
    out.reserve(value.len() + 2);
    out.push(b'"');
    if is_plain(value) {
        out.extend_from_slice(value);
    } else {
        escaped(out, value);
    }
    out.push(b'"');
}

/// A JSON string of what is visible ASCII without quotes: an address, or a word of ours.
#[inline]
fn plain(out: &mut Vec<u8>, key: &str, value: &str) {
    out.extend_from_slice(key.as_bytes());
    out.push(b'"');
    out.extend_from_slice(value.as_bytes());
    out.push(b'"');
}

/// Whether it stands in a line as it is: visible ASCII without quotes and backslashes. Looks at
/// eight octets at a time, as most values are too short for wider steps; the last eight may
/// overlap those before, and so may the two halves of what is shorter.
fn is_plain(value: &[u8]) -> bool {
    let (eights, _) = value.as_chunks::<8>();
    let odd = eights.iter().fold(0, |seen, eight| seen | odd_ones(u64::from_le_bytes(*eight)));
    let four = |four: &[u8; 4]| u64::from(u32::from_le_bytes(*four));
    let last = match (value.last_chunk::<8>(), value.first_chunk::<4>(), value.last_chunk::<4>()) {
        (Some(last), ..) => u64::from_le_bytes(*last),
        (None, Some(first), Some(last)) => four(first) | four(last) << 32,
        // Filled up with what is plain.
        _ => value.iter().fold(0x2020_2020_2020_2020, |last, &b| last << 8 | u64::from(b)),
    };
    (odd | odd_ones(last)) == 0
}

/// Not 0 if any of eight octets has to be escaped. A difference or sum that carries into the next
/// octet does so from one that is odd itself.
fn odd_ones(eight: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = ONES * 0x80;
    let is_zero = |x: u64| x.wrapping_sub(ONES) & !x;
    let control = eight.wrapping_sub(ONES * 0x20) & !eight;
    let delete_or_more = eight.wrapping_add(ONES) | eight;
    let quote = is_zero(eight ^ (ONES * u64::from(b'"')));
    let slash = is_zero(eight ^ (ONES * u64::from(b'\\')));
    (control | delete_or_more | quote | slash) & HIGH
}

fn escaped(out: &mut Vec<u8>, value: &[u8]) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use l7rp_core::failure::Failure;
    use proptest::prelude::*;

    const TRY: Try<'static> = Try {
        url: "http://127.0.0.1:9001",
        host: "127.0.0.1",
        port: 9001,
        began: Nanos(0),
        ended: Some((End::Answered(200), Duration::from_millis(5))),
        link: Some(Link { reused: true, age: Duration::from_micros(1500) }),
        is_hedge: false,
        is_repeated: false,
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
            attempts: tries.len(),
            tries,
            used: tries.last(),
            refused: &[],
            stop: "",
            trace_id: None,
            reason: "",
            is_fault: false,
        }
    }

    fn line(entry: &Entry<'_>) -> String {
        let mut out = Vec::new();
        out.extend_from_slice(b"{\"time\":\"");
        Stamp::default().write(&mut out, 7);
        write_entry(&mut out, Level::Error, entry);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_wall_clock_goes_on_from_when_it_was_read() {
        let stamp = Stamp { read: (Nanos(5_000_000), 1_000), ..Stamp::default() };
        for (ns, ms) in [(5_000_000, 1_000), (5_999_999, 1_000), (7_900_000, 1_002)] {
            assert_eq!(stamp.wall_ms(Nanos(ns)), ms);
        }
        // What was over before that is told at that time.
        assert_eq!(stamp.wall_ms(Nanos(1)), 1_000);
    }

    #[test]
    fn a_line_has_every_field() {
        assert_eq!(
            line(&Entry { trace_id: Some(0xab), ..entry(b"/x", &[TRY]) }),
            "{\"time\":\"1970-01-01T00:00:00.007Z\",\"level\":\"error\",\
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
            Try { ended: Some(failed), is_repeated: true, ..TRY },
            Try { ended: Some((End::Lost, Duration::from_millis(1))), is_hedge: true, ..TRY },
            Try { ended: None, link: None, ..TRY },
        ];
        let refused = [
            Refusal { url: "http://b", why: "breaker_open", cause: None },
            Refusal { url: "http://c", why: "unhealthy", cause: Some("status:404".to_owned()) },
        ];
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
            {\"upstream\":\"http://127.0.0.1:9001\",\"error\":\"connect_refused\",\"ms\":0.100,\
            \"conn_reused\":true,\"conn_age_ms\":1.500,\"repeated\":true},\
            {\"upstream\":\"http://127.0.0.1:9001\",\"error\":\"lost_race\",\"ms\":1.000,\
            \"conn_reused\":true,\"conn_age_ms\":1.500,\"hedge\":true},\
            {\"upstream\":\"http://127.0.0.1:9001\",\"error\":\"not_ended\"}],\
            \"not_tried\":[{\"upstream\":\"http://b\",\"why\":\"breaker_open\"},\
            {\"upstream\":\"http://c\",\"why\":\"unhealthy\",\"cause\":\"status:404\"}],\
            \"no_retry\":\"budget\"}\n";
        assert!(line.ends_with(expected), "{line}");
        assert!(serde_json::from_str::<serde_json::Value>(&line).is_ok());
    }

    proptest! {
        #[test]
        fn what_is_plain_is_found_so(value in proptest::collection::vec(any::<u8>(), 0..40)) {
            let expected = value.iter().all(|b| matches!(b, b' '..=b'~') && !b"\"\\".contains(b));
            prop_assert_eq!(is_plain(&value), expected);
            // And with no more than one that is odd, which random octets hardly ever have.
            for at in 0..value.len() {
                let mut one = vec![b'a'; value.len()];
                one[at] = value[at];
                let expected = matches!(value[at], b' '..=b'~') && !b"\"\\".contains(&value[at]);
                prop_assert_eq!(is_plain(&one), expected);
            }
        }
    }

    #[test]
    fn of_many_tries_the_last_are_told() {
        let json: serde_json::Value =
            serde_json::from_str(&line(&entry(b"/", &[TRY; 40]))).unwrap();
        assert_eq!(json["attempts"], 40);
        assert_eq!(json["tries"].as_array().map(Vec::len), Some(MAX_ITEMS));
    }

    #[test]
    fn a_stamp_is_a_timestamp() {
        let mut stamp = Stamp::default();
        for ms in [0, 999, 1000, 951_782_399_999, 951_782_400_000, 951_782_400_001, 86_399_999] {
            let mut out = Vec::new();
            stamp.write(&mut out, ms);
            assert_eq!(String::from_utf8(out).unwrap(), super::super::event::timestamp(ms));
        }
    }

    #[test]
    fn a_call_is_failed_by_its_upstream_and_not_by_us() {
        let is_failed = |status, grpc| {
            let grpc_status = Some(grpc);
            Entry { status, grpc_status, ..entry(b"/", &[TRY]) }.is_failed_call()
        };
        for grpc in [2, 4, 12, 13, 14, 15] {
            assert!(is_failed(200, grpc), "{grpc}");
        }
        // The client's own doing, or its fate; and too many calls, which is what 429 means.
        for grpc in [0, 1, 3, 5, 6, 7, 8, 9, 10, 11, 16, 17] {
            assert!(!is_failed(200, grpc), "{grpc}");
        }
        // A warning, like any other request without a route.
        assert!(!is_failed(404, 12));
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
