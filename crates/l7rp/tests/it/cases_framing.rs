//! Cases that went wrong in other proxies: where messages begin and end, and which connection
//! may be used again. Each is named after the case it comes from.

use std::collections::BTreeMap;
use std::io::ErrorKind::WouldBlock;
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{
    Call, Client, Gate, Origin, Proxy, SOON, Then, Value, eventually, let_pass, reply,
};

use crate::setup::{assert_counts, get, in_flight, over};

/// Answers, then closes or resets after a while of idleness, whether or not the next request is
/// on its way by then.
fn short_lived(call: &mut Call<'_>) -> Then {
    let _ = call.body();
    let target = call.request.target().to_owned();
    call.send(reply::ok(&target));
    let idle = Duration::from_millis(call.number as u64 * 7 % 20 + 1);
    if call.number.is_multiple_of(2) {
        call.wire.patience(Some(idle));
        return Then::Next;
    }
    if call.number % 4 == 1 {
        return Then::Next;
    }
    let_pass(idle);
    Then::Reset
}

#[test]
fn h1_stale_get() {
    let origin = Origin::start(short_lived);
    let proxy = over(&[&origin]).pool("keepalive: { max_idle: 16, idle_timeout: 90s }").start();
    thread::scope(|scope| {
        for who in 0..8_u64 {
            let proxy = &proxy;
            scope.spawn(move || {
                let mut client = proxy.client();
                for n in 0..100_u64 {
                    let path = format!("/{who}/{n}");
                    let answer = client.get(&path);
                    assert_eq!((answer.status(), answer.text()), (200, path));
                    let_pass(Duration::from_millis((n * 13 + who * 5) % 20));
                }
            });
        }
    });
    let mut served = BTreeMap::<String, usize>::new();
    for seen in origin.seen() {
        *served.entry(seen.message.target().to_owned()).or_default() += 1;
    }
    assert_eq!(served.len(), 800);
    assert!(served.values().all(|times| *times <= 2), "{served:?}");
    assert!(proxy.lines().iter().all(|line| line["level"] != "error"));
    // It did happen that a connection was used again.
    assert!(origin.accepted() < 800, "{} connections", origin.accepted());
}

const EXPECTING: &str = "POST /e HTTP/1.1\r\nHost: a.test\r\nExpect: 100-continue\r\n\
                         Content-Length: 5000000\r\n\r\n";

/// Takes a long body and answers with its length.
fn take_body(call: &mut Call<'_>) -> Then {
    let Ok(body) = call.body() else { return Then::Close };
    let answer = reply::ok(&body.len().to_string());
    call.send(answer);
    Then::Next
}

#[test]
fn h1_expect_continue_a_is_passed_on_when_the_upstream_says_it() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| {
        held.pass();
        call.send("HTTP/1.1 100 Continue\r\n\r\n");
        take_body(call)
    });
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(EXPECTING);
    eventually(SOON, || origin.requests() == 1);
    assert_eq!(origin.last().get("expect"), Some("100-continue"));
    client.wire.patience(Some(Duration::from_millis(300)));
    assert!(client.wire.read_some(1).is_err_and(|e| e.kind() == WouldBlock), "it is not made up");
    client.wire.patience(Some(SOON));
    gate.open();
    assert_eq!(client.head().status(), 100);
    assert_eq!(client.send(vec![b'x'; 5_000_000]).head().status(), 200);
    assert_eq!(client.wire.read_exact(7).expect("a length"), b"5000000");
}

#[test]
fn h1_expect_continue_b_a_refusal_is_the_only_answer() {
    let (told, heard) = std::sync::mpsc::channel();
    let origin = Origin::start(move |call| {
        call.send("HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n");
        let _ = told.send(call.wire.read_to_end().map(|body| body.len()));
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    assert_eq!(client.send(EXPECTING).head().status(), 401);
    assert!(client.is_closed_within(SOON), "it cannot know where the next request would begin");
    let got = heard.recv_timeout(SOON).expect("the end");
    assert_eq!(got.unwrap_or(0), 0, "nothing of the body");
}

#[test]
fn h1_expect_continue_c_a_body_that_did_not_wait_is_taken() {
    let origin = Origin::start(take_body);
    let proxy = over(&[&origin]).start();
    let began = Instant::now();
    let mut client = proxy.client();
    client.send(EXPECTING);
    let_pass(Duration::from_millis(300));
    client.send(vec![b'x'; 5_000_000]);
    let answer = client.response();
    assert_eq!((answer.status(), answer.text().as_str()), (200, "5000000"));
    assert!(began.elapsed() < Duration::from_secs(3));
}

#[test]
fn h1_bodyless_desync() {
    const STRAY: &str = "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\ninjected";
    let origin = Origin::start(|call| {
        let head = match call.request.target() {
            "/204" => "HTTP/1.1 204 No Content\r\n\r\n",
            "/304" => "HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\n\r\n",
            "/head" => "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n",
            _ => return reply::name("legit!")(call),
        };
        call.send(format!("{head}{STRAY}"));
        Then::Next
    });
    let keys =
        "keepalive: { max_idle: 1, idle_timeout: 90s }, circuit_breaker: { failure_ratio: 1.0 }";
    let proxy = over(&[&origin]).one_worker().pool(keys).start();
    let mut client = proxy.client();
    for round in 0..20 {
        for (method, path) in [("GET", "/204"), ("GET", "/304"), ("HEAD", "/head")] {
            let request = format!("{method} {path} HTTP/1.1\r\nHost: a.test\r\n\r\n");
            client.send(request).head();
            // A body on the wire would be taken for the next head.
            assert_eq!(client.get("/x").text(), "legit!", "{round} {path}");
        }
    }
    // One connection for each stray answer, and the one that is idle now.
    assert_eq!(origin.accepted(), 61);
    eventually(SOON, || origin.open() == 1);
}

/// How a chunked answer stops, and what is known of it then.
struct Stop {
    answer: Vec<u8>,
    then: fn(&mut Call<'_>) -> Then,
    reason: &'static str,
}

fn stops() -> Vec<Stop> {
    let stop = |chunks: &[u8], then, reason| {
        let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        Stop { answer: [head, chunks].concat(), then, reason }
    };
    let close: fn(&mut Call<'_>) -> Then = |_| Then::Close;
    let long = format!("19000\r\n{}\r\n", "x".repeat(0x19000));
    vec![
        stop(b"5\r\nhel", close, "response_truncated"),
        stop(b"5\r\nhello\r\n", close, "response_truncated"),
        stop(b"5\r\nhello\r\n0\r\n", close, "response_truncated"),
        stop(
            long.as_bytes(),
            |_| {
                // A reset takes with it what was not yet read.
                let_pass(Duration::from_millis(200));
                Then::Reset
            },
            "response_truncated",
        ),
        stop(b"5\r\nhello\r\n", reply::hang, "total_timeout"),
    ]
}

#[test]
fn h1_truncated_chunked() {
    for (n, stop) in stops().into_iter().enumerate() {
        let sent = stop.answer.clone();
        let chunks = sent.windows(4).position(|w| w == b"\r\n\r\n").expect("a head") + 4;
        // The mark of the end is held back, for it is not whole.
        let passed = sent[chunks..].strip_suffix(b"0\r\n").unwrap_or(&sent[chunks..]).to_vec();
        let origin = Origin::start(move |call| {
            call.send(&stop.answer);
            (stop.then)(call)
        });
        let proxy = over(&[&origin]).route("timeouts: { total: 600ms }").start();
        let began = Instant::now();
        let mut client = proxy.client();
        assert_eq!(client.send(get("a.test", "/cut", "")).head().status(), 200, "{n}");
        let mut got = Vec::new();
        while let Ok(part) = client.wire.read_some(usize::MAX) {
            if part.is_empty() {
                break;
            }
            got.extend(part);
        }
        let took = began.elapsed();
        assert!(!got.ends_with(b"0\r\n\r\n"), "{n}");
        let got_end = got.strip_suffix(b"0\r\n").unwrap_or(&got);
        assert!(got_end == passed, "{n}: {} of {} octets", got.len(), passed.len());
        if stop.reason == "total_timeout" {
            assert!(took > Duration::from_millis(550) && took < SOON / 2, "{took:?}");
        }
        let line = proxy.logged_path("/cut");
        assert_eq!((&line["status"], &line["reason"]), (&200.into(), &stop.reason.into()), "{n}");
        assert_eq!(line["bytes_out"], got.len(), "{n}: {line}");
        assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "err")], 1.0);
    }
}

#[test]
fn h1_interim_sequence() {
    let origin = Origin::start(reply::raw_kept(
        "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n\
         HTTP/1.1 103 Early Hints\r\nLink: </b>\r\nConnection: close\r\n\r\n\
         HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 100 Continue\r\nContent-Length: 168\r\n\r\n\
         HTTP/1.1 199 Odd\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ));
    let keys =
        "keepalive: { max_idle: 1, idle_timeout: 90s }, circuit_breaker: { failure_ratio: 1.0 }";
    let proxy = over(&[&origin]).one_worker().pool(keys).start();
    let mut client = proxy.client();
    for path in ["/a", "/b"].repeat(20) {
        client.send(get("a.test", path, ""));
        let mut links = Vec::new();
        loop {
            let head = client.head();
            if head.status() == 200 {
                break;
            }
            assert!(head.status() < 200, "{head:?}");
            for name in ["connection", "content-length", "transfer-encoding"] {
                assert_eq!(head.all(name), [""; 0], "{head:?}");
            }
            links.extend(head.get("link").map(str::to_owned));
        }
        assert_eq!(client.wire.read_exact(2).expect("a body"), b"ok");
        assert_eq!(links, ["</a>", "</b>"]);
    }
    assert_eq!(origin.accepted(), 1);
}

#[test]
fn h1_interim_sequence_one_with_a_body_is_a_bad_answer() {
    let origin = Origin::start(reply::raw_kept(
        "HTTP/1.1 103 Early Hints\r\nTransfer-Encoding: chunked\r\n\r\n\
         HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ));
    let proxy = over(&[&origin]).one_worker().start();
    for n in 1..3 {
        assert_eq!(proxy.get("/").status(), 502);
        assert_eq!(origin.accepted(), n);
    }
    eventually(SOON, || origin.open() == 0);
}

#[test]
fn h1_pipelined() {
    let origin = Origin::start(|call| {
        if call.request.target() == "/slow" {
            let_pass(Duration::from_millis(300));
        }
        let _ = call.body();
        let target = call.request.target().to_owned();
        call.send(reply::ok(&target));
        Then::Next
    });
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    let slow = "POST /slow HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n\r\nhello";
    client.send(format!("{slow}{}", get("a.test", "/fast", "").repeat(2)));
    for path in ["/slow", "/fast", "/fast"] {
        let answer = client.response();
        assert_eq!((answer.status(), answer.text().as_str()), (200, path));
    }
    let doubtful = "POST /doubtful HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1, 1\r\n\r\nx";
    let (first, after) = (get("a.test", "/fast", ""), get("a.test", "/after", ""));
    client.send(format!("{first}{doubtful}{after}"));
    assert_eq!(client.response().status(), 200);
    let answer = client.response();
    assert_eq!((answer.status(), answer.get("connection")), (400, Some("close")));
    assert!(client.is_closed_within(SOON));
    let targets: Vec<_> = origin.seen().iter().map(|s| s.message.target().to_owned()).collect();
    assert_eq!(targets, ["/slow", "/fast", "/fast", "/fast"]);
}

/// Asks and leaves while the upstream is waited for, which then answers.
fn leaves(proxy: &Proxy, origin: &Origin, gate: &Gate, how: fn(Client)) -> Value {
    let mut client = proxy.client();
    client.send(get("a.test", "/left", ""));
    eventually(SOON, || origin.requests() == 1);
    how(client);
    let_pass(Duration::from_millis(100));
    gate.open();
    proxy.logged_path("/left")
}

#[test]
fn h1_half_close_request() {
    let body = "x".repeat(100 << 10);
    let ways: [(fn(Client), u16); 3] = [
        (
            |mut client| {
                client.wire.half_close().expect("it can");
                thread::spawn(move || {
                    assert_eq!(client.response().body.len(), 100 << 10);
                });
            },
            200,
        ),
        (Client::reset, 499),
        // An end like the first, until the answer meets a socket that is gone.
        (drop, 499),
    ];
    for (how, status) in ways {
        for _ in 0..3 {
            let gate = Gate::default();
            let origin = Origin::start(reply::held(&body, &gate));
            let proxy = over(&[&origin]).start();
            let line = leaves(&proxy, &origin, &gate, how);
            let gone = status == 499;
            assert_eq!(line["reason"], if gone { "client_gone".into() } else { Value::Null });
            assert!(!gone || line["status"] == 499 || line["status"] == 200, "{line}");
            assert!(gone || line["bytes_out"] == 100 << 10, "{line}");
            assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "err")], 0.0);
            assert_eq!(in_flight(&proxy), 0.0);
        }
    }
}

/// Paths, the fields of their answers, and the reason why those are refused.
const CONFLICTS: [(&str, &str, &str); 6] = [
    ("/te2", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", "bad_transfer_encoding"),
    (
        "/both",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "content_length_with_transfer_encoding",
    ),
    ("/cl2", "Content-Length: 5\r\nContent-Length: 6", "bad_content_length"),
    ("/cl2same", "Content-Length: 5\r\nContent-Length: 5", "bad_content_length"),
    ("/neg", "Content-Length: -1", "bad_content_length"),
    ("/te-gzip", "Transfer-Encoding: gzip, chunked", "bad_transfer_encoding"),
];

fn conflicting(call: &mut Call<'_>) -> Then {
    let target = call.request.target().to_owned();
    match CONFLICTS.iter().find(|(path, ..)| *path == target) {
        Some((_, fields, _)) => {
            call.send(format!("HTTP/1.1 200 OK\r\n{fields}\r\n\r\nhello"));
        }
        None => drop(call.send(reply::ok("its own"))),
    }
    Then::Next
}

#[test]
fn h1_upstream_framing_conflict() {
    let origin = Origin::start(conflicting);
    let keys =
        "keepalive: { max_idle: 1, idle_timeout: 90s }, circuit_breaker: { failure_ratio: 1.0 }";
    let proxy = over(&[&origin]).one_worker().pool(keys).start();
    let mut client = proxy.client();
    for (path, _, reason) in CONFLICTS.repeat(5) {
        let before = origin.accepted();
        let answer = client.get(path);
        if path == "/cl2same" && answer.status() == 200 {
            // One field where it was repeated: the same every time.
            assert_eq!((answer.get("content-length"), answer.text()), (Some("5"), "hello".into()));
        } else {
            assert_eq!(answer.status(), 502, "{path}");
            let status = answer.get("proxy-status").expect("a reason");
            assert!(status.contains("error=http_protocol_error"), "{path}: {status}");
            assert!(status.contains(reason), "{path}: {status}");
        }
        assert_eq!(client.get("/ok").text(), "its own", "{path}");
        assert!(answer.status() == 200 || origin.accepted() > before, "{path} is used again");
    }
    let event = proxy.wait_for_event("upstream_error", |_| true, SOON);
    assert_eq!(event["upstream"], origin.url());
    assert_eq!(event["reason"], CONFLICTS[0].2);
}

#[test]
fn h1_upstream_framing_conflict_names_the_values() {
    let origin = Origin::start(conflicting);
    let proxy = over(&[&origin]).start();
    assert_eq!(proxy.get("/cl2").status(), 502);
    let event = proxy.wait_for_event("upstream_error", |_| true, SOON);
    let words = event["error"].as_str().expect("words");
    assert!(words.contains('5') && words.contains('6'), "{event}");
}

#[test]
fn h1_request_targets() {
    let origin = Origin::start(reply::echo);
    let other = Origin::start(reply::echo);
    let proxy = over(&[&origin]).route("host: a.example").start();
    let ask = |line: &str, host: &str| {
        let answer = proxy.client().ask(format!("{line} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        (answer.status(), answer.text().lines().next().unwrap_or_default().to_owned())
    };
    // The target decides: it is never another Host that does.
    let (status, line) = ask("GET http://a.example/x", "a.example");
    assert_eq!((status, line.as_str()), (200, "GET /x HTTP/1.1"));
    assert_eq!(origin.last().get("host"), Some("a.example"));
    let served = origin.requests();
    // Two that disagree are refused, which RFC 9112 §3.2.2 lets us do.
    assert_eq!(ask("GET http://a.example/x", "b.example").0, 400);
    assert!(matches!(ask("GET http://b.example/x", "a.example").0, 400 | 404));
    let tunnel = format!("CONNECT {}", other.address);
    assert!(matches!(ask(&tunnel, &other.address.to_string()).0, 400 | 405));
    assert!(matches!(ask("CONNECT a.example:443", "a.example:443").0, 400 | 405));
    assert_eq!(ask("GET a.example/x", "a.example").0, 400);
    assert_eq!((origin.requests(), other.accepted()), (served, 0));
    let (status, line) = ask("OPTIONS *", "a.example");
    assert!(status >= 400 || line == "OPTIONS * HTTP/1.1", "{status} {line}");
    let (status, line) = ask("GET //evil.example/x", "a.example");
    assert_eq!((status, line.as_str()), (200, "GET //evil.example/x HTTP/1.1"));
    assert_eq!(origin.last().get("host"), Some("a.example"));
}
