//! Many pipelined requests on many connections, in all shapes and cut anywhere: each answer is
//! the one to its request. The numbers are random and the same each time.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Call, Client, Message, Origin, Proxy, SOON, Then, Wire, eventually};

use crate::setup::{assert_counts, in_flight, over};

/// Requests that are answered in one round.
const ROUND: u64 = 20_000;
const CLIENTS: u64 = 8;
/// How long the long variant runs, if the environment does not say.
const TWO_HOURS: u64 = 7200;

/// Numbers that look random, the same ones each time.
pub struct Draw(pub u64);

impl Draw {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    /// One time in `n`.
    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// What the upstream does with a request; the first part of its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Length,
    Chunked,
    NoContent,
    NotModified,
    Error,
    /// Interim answers come before.
    Interim,
    /// The body ends with the connection.
    UntilClose,
    /// Before the body was read.
    Early,
    /// It closes without an answer.
    Gone,
    /// It resets within the answer.
    Cut,
}

const WAYS: [Way; 10] = [
    Way::Length,
    Way::Chunked,
    Way::NoContent,
    Way::NotModified,
    Way::Error,
    Way::Interim,
    Way::UntilClose,
    Way::Early,
    Way::Gone,
    Way::Cut,
];

/// A request, and what its answer is known by.
struct Ask {
    id: String,
    method: &'static str,
    way: Way,
    body: String,
    raw: Vec<u8>,
}

impl Ask {
    fn draw(id: String, draw: &mut Draw) -> Self {
        let method = ["GET", "GET", "POST", "POST", "PUT", "HEAD"][draw.below(6) as usize];
        let way = match draw.below(100) {
            0..38 => Way::Length,
            38..76 => Way::Chunked,
            // The rest seldom, and what ends connections most seldom.
            n @ 76..96 => WAYS[2 + (n as usize - 76) / 5],
            96 => Way::Early,
            97 => Way::Gone,
            98 if draw.one_in(2) => Way::Cut,
            _ => Way::UntilClose,
        };
        // A HEAD has no body that could be cut or end with the connection.
        let way = match way {
            Way::Cut | Way::UntilClose if method == "HEAD" => Way::Length,
            way => way,
        };
        let has_body = matches!(method, "POST" | "PUT");
        let longest = if draw.one_in(20) { 20_000 } else { 300 };
        let copies = if has_body { draw.below(longest) / id.len() as u64 } else { 0 };
        let body = id.repeat(copies as usize);
        let raw = raw(&id, method, way, has_body.then_some(body.as_bytes()), draw);
        Self { id, method, way, body, raw }
    }

    /// Holds an answer against what this request must get. An answer that is for another one
    /// shows in any of its three marks.
    fn judge(&self, answer: &Message) {
        let Self { id, way, .. } = self;
        let about = || format!("{id} {way:?} got {answer:?}");
        assert_eq!(answer.get("x-request-id"), Some(id.as_str()), "{}", about());
        let status = match way {
            Way::NoContent => 204,
            Way::NotModified => 304,
            Way::Error => 500,
            Way::Gone | Way::Cut => 502,
            _ => 200,
        };
        assert_eq!(answer.status(), status, "{}", about());
        if status == 502 {
            return;
        }
        assert_eq!(answer.get("x-id"), Some(id.as_str()), "{}", about());
        let empty = self.method == "HEAD" || matches!(status, 204 | 304);
        let content = if empty { String::new() } else { content(id, *way, self.body.as_bytes()) };
        assert!(answer.text() == content, "{}", about());
    }
}

fn raw(id: &str, method: &str, way: Way, body: Option<&[u8]>, draw: &mut Draw) -> Vec<u8> {
    let mut raw = format!("{method} /{way:?}/{id} HTTP/1.1\r\nHost: a.test\r\n").into_bytes();
    raw.extend(format!("X-Request-ID: {id}\r\n").bytes());
    match body {
        None => raw.extend(b"\r\n"),
        Some(body) if draw.one_in(2) => {
            raw.extend(format!("Content-Length: {}\r\n\r\n", body.len()).bytes());
            raw.extend(body);
        }
        Some(body) => {
            raw.extend(b"Transfer-Encoding: chunked\r\n\r\n");
            for chunk in body.chunks(1 + draw.below(4000) as usize) {
                raw.extend(format!("{:x}\r\n", chunk.len()).bytes());
                raw.extend(chunk);
                raw.extend(b"\r\n");
            }
            raw.extend(b"0\r\n\r\n");
        }
    }
    raw
}

/// What the upstream answers with: the id, and the body that it got unless it did not wait.
fn content(id: &str, way: Way, body: &[u8]) -> String {
    let body = if way == Way::Early { &[] } else { body };
    format!("{id}:{}", String::from_utf8_lossy(body))
}

fn upstream(call: &mut Call<'_>) -> Then {
    let target = call.request.target().to_owned();
    let (way, id) = target[1..].split_once('/').expect("a target of this test");
    let way = *WAYS.iter().find(|w| format!("{w:?}") == way).expect("a way of this test");
    let mut draw = Draw(call.number as u64 ^ 0x5eed);
    if way != Way::Early && call.body().is_err() {
        // A client that leaves midway.
        return Then::Close;
    }
    if draw.one_in(8) {
        thread::sleep(Duration::from_micros(draw.below(4000)));
    }
    let content = content(id, way, &call.request.body);
    let content = if call.request.method() == "HEAD" { "" } else { content.as_str() };
    let mark = format!("X-Id: {id}\r\n");
    let length = content.len();
    match way {
        Way::Length | Way::Early => {
            call.send(format!("HTTP/1.1 200 OK\r\n{mark}Content-Length: {length}\r\n\r\n"));
            call.send(content);
        }
        Way::Chunked => chunked(call, &mark, content, &mut draw),
        Way::NoContent => drop(call.send(format!("HTTP/1.1 204 None\r\n{mark}\r\n"))),
        Way::NotModified => drop(call.send(format!("HTTP/1.1 304 Same\r\n{mark}\r\n"))),
        Way::Error => {
            let head = format!("HTTP/1.1 500 Oops\r\n{mark}Content-Length: {length}\r\n\r\n");
            call.send(head + content);
        }
        Way::Interim => {
            call.send(format!("HTTP/1.1 103 Soon\r\n{mark}\r\n"));
            call.send(format!("HTTP/1.1 200 OK\r\n{mark}Content-Length: {length}\r\n\r\n"));
            call.send(content);
        }
        Way::UntilClose => {
            call.send(format!("HTTP/1.1 200 OK\r\n{mark}Connection: close\r\n\r\n{content}"));
            return Then::Close;
        }
        Way::Gone => return Then::Close,
        Way::Cut => {
            let length = length + 100;
            let head = format!("HTTP/1.1 200 OK\r\n{mark}Content-Length: {length}\r\n\r\n");
            call.send(head + content);
            return Then::Reset;
        }
    }
    Then::Next
}

fn chunked(call: &mut Call<'_>, mark: &str, content: &str, draw: &mut Draw) {
    call.send(format!("HTTP/1.1 200 OK\r\n{mark}Transfer-Encoding: chunked\r\n\r\n"));
    if call.request.method() == "HEAD" {
        return;
    }
    for chunk in content.as_bytes().chunks(1 + draw.below(4000) as usize) {
        if draw.one_in(16) {
            thread::sleep(Duration::from_micros(draw.below(2000)));
        }
        let mut octets = format!("{:x}\r\n", chunk.len()).into_bytes();
        octets.extend(chunk);
        octets.extend(b"\r\n");
        call.send(octets);
    }
    call.send("0\r\n\r\n");
}

/// What became of the requests of all connections.
#[derive(Debug, Default)]
struct Tally {
    sent: AtomicU64,
    answered: AtomicU64,
    /// Behind an answer that said that it is the last, or that was cut as intended.
    unanswered: AtomicU64,
    /// The client left before their answers.
    left: AtomicU64,
}

/// Sends in parts that end anywhere, some after a pause.
fn send(wire: &mut Wire, raw: &[u8], mut draw: Draw) {
    let mut rest = raw;
    while !rest.is_empty() {
        let longest = if draw.one_in(3) { 20 } else { 4000 };
        let (part, behind) = rest.split_at(rest.len().min(1 + draw.below(longest) as usize));
        // The proxy may have closed, as it said it would.
        if wire.write(part).is_err() {
            return;
        }
        rest = behind;
        if draw.one_in(12) {
            thread::sleep(Duration::from_micros(draw.below(2000)));
        }
    }
}

/// One connection's requests and answers.
fn connection(proxy: &Proxy, tally: &Tally, name: &str, draw: &mut Draw) {
    let count = 1 + draw.below(40);
    let asks: Vec<_> = (0..count).map(|n| Ask::draw(format!("{name}-{n}"), draw)).collect();
    let raw: Vec<u8> = asks.iter().flat_map(|ask| ask.raw.clone()).collect();
    // Some leave midway.
    let stays = if draw.one_in(15) { draw.below(count) } else { count };
    let mut client = proxy.client();
    let mut writer = client.wire.twin();
    let seed = Draw(draw.below(u64::MAX));
    tally.sent.fetch_add(count, Relaxed);
    let mut answered = 0;
    thread::scope(|scope| {
        scope.spawn(move || send(&mut writer, &raw, seed));
        for ask in asks.iter().take(stays as usize) {
            let goes_on = answer(&mut client, ask);
            answered += u64::from(goes_on.is_some());
            if goes_on != Some(true) {
                break;
            }
        }
        // Whatever is still being sent meets a closed connection.
        let _ = client.wire.shut();
    });
    tally.answered.fetch_add(answered, Relaxed);
    let by = if answered == stays { &tally.left } else { &tally.unanswered };
    by.fetch_add(count - answered, Relaxed);
}

/// Reads the answer to `ask`. `None`: it was cut, as it was to be. Else whether another follows.
fn answer(client: &mut Client, ask: &Ask) -> Option<bool> {
    let about = || format!("{} {:?}", ask.id, ask.way);
    let mut answer = loop {
        let head = match client.wire.read_head() {
            Ok(Some(head)) => head,
            other => panic!("{}: no answer: {other:?}", about()),
        };
        if head.status() >= 200 {
            break head;
        }
        assert_eq!(head.get("x-id"), Some(ask.id.as_str()), "{head:?}");
    };
    let empty = ask.method == "HEAD" || matches!(answer.status(), 204 | 304);
    if !empty {
        let read = client.wire.read_body(&mut answer, true);
        // A reset may overtake the head, which is then as good as none.
        if ask.way == Way::Cut && answer.status() == 200 {
            assert_eq!(answer.get("x-id"), Some(ask.id.as_str()), "{answer:?}");
            assert!(read.is_err() || !answer.complete, "{answer:?}");
            return None;
        }
        read.unwrap_or_else(|e| panic!("{}: {e}", about()));
    }
    ask.judge(&answer);
    Some(!answer.all("connection").contains(&"close"))
}

/// One round; how many requests were answered.
fn round(seed: u64) -> u64 {
    let origins = [Origin::start(upstream), Origin::start(upstream)];
    let proxy = over(&[&origins[0], &origins[1]]).top("access_log: { enabled: false }").start();
    let tally = Tally::default();
    thread::scope(|scope| {
        for who in 0..CLIENTS {
            let (proxy, tally) = (&proxy, &tally);
            scope.spawn(move || {
                let mut draw = Draw(seed * CLIENTS + who);
                for nth in 0.. {
                    if tally.answered.load(Relaxed) >= ROUND {
                        break;
                    }
                    connection(proxy, tally, &format!("{seed}-{who}-{nth}"), &mut draw);
                }
            });
        }
    });
    eventually(SOON, || in_flight(&proxy) == 0.0);
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
    assert_counts(&proxy, "proxy_panics_total", &[], 0.0);
    let answered = tally.answered.load(Relaxed);
    // What ends connections is seldom: else little would have been tested.
    assert!(answered * 10 > tally.sent.load(Relaxed) * 5, "{tally:?}");
    println!("round {seed}: {tally:?}");
    answered
}

#[test]
fn each_answer_is_that_to_its_request() {
    round(1);
}

/// `L7RP_PIPELINING_SECONDS=300 cargo test --release --test it -- --ignored --nocapture each_answer`
#[test]
#[ignore = "two hours, or what L7RP_PIPELINING_SECONDS says"]
fn each_answer_is_that_to_its_request_for_hours() {
    let seconds = std::env::var("L7RP_PIPELINING_SECONDS").ok();
    let seconds = seconds.map_or(TWO_HOURS, |s| s.parse().expect("a number of seconds"));
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut answered = 0;
    for seed in 2.. {
        if Instant::now() >= until {
            break;
        }
        answered += round(seed);
    }
    println!("{answered} requests answered, each with its own answer");
}
