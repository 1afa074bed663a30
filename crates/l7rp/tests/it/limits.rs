//! What is too large or too slow is refused with its own status; what just fits passes.

use std::time::{Duration, Instant};

use l7rp_testkit::{Client, Message, Origin, Proxy, SOON, eventually, reply};

use crate::setup::{assert_counts, assert_failed, get, in_flight, over};

/// Asks for what is refused: the answer says why, the connection ends, nothing reaches an
/// upstream, and it is counted.
#[track_caller]
fn refused(proxy: &Proxy, origin: &Origin, request: &str, status: u16, reason: &str) {
    let before = origin.requests();
    let mut client = proxy.client();
    let answer = client.ask(request);
    let error = "http_request_error";
    assert_failed(proxy, &answer, status, error, reason);
    assert!(is_ended(&mut client, &answer), "{answer:?}");
    assert_eq!(origin.requests(), before);
    let counted = proxy.metrics().sum("proxy_bad_requests_total", &[("reason", reason)]);
    assert!(counted >= 1.0, "{reason}");
}

fn is_ended(client: &mut Client, answer: &Message) -> bool {
    answer.get("connection") == Some("close") && client.is_closed_within(SOON)
}

#[test]
fn heads_over_the_limits() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin])
        .listener("timeouts: { max_header_bytes: 8192 }, limits: { max_headers: 20, max_target_bytes: 1000 }")
        .start();
    let target = |n: usize| get("a.test", &format!("/{}", "t".repeat(n - 1)), "");
    assert_eq!(proxy.client().ask(target(1000)).status(), 200);
    refused(&proxy, &origin, &target(1001), 414, "target_too_long");
    // The Host line is one of them.
    let fields = |n: usize| get("a.test", "/", &"X-A: b\r\n".repeat(n - 1));
    assert_eq!(proxy.client().ask(fields(20)).status(), 200);
    refused(&proxy, &origin, &fields(21), 431, "too_many_fields");
    let empty = get("a.test", "/", "X-A: \r\n").len();
    let size = |n: usize| get("a.test", "/", &format!("X-A: {}\r\n", "a".repeat(n - empty)));
    assert_eq!(proxy.client().ask(size(8192)).status(), 200);
    refused(&proxy, &origin, &size(8193), 431, "head_too_large");
    refused(&proxy, &origin, &size(80_000), 431, "head_too_large");
}

#[test]
fn large_cookies_pass_with_the_defaults() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    for size in [8 << 10, 32 << 10, 60 << 10] {
        let cookie = "c".repeat(size);
        let answer = proxy.client().ask(get("a.test", "/", &format!("Cookie: a={cookie}\r\n")));
        assert_eq!(answer.status(), 200, "{size}");
        assert_eq!(origin.last().get("cookie"), Some(format!("a={cookie}").as_str()));
    }
    let cookie = format!("Cookie: a={}\r\n", "c".repeat(70 << 10));
    refused(&proxy, &origin, &get("a.test", "/", &cookie), 431, "head_too_large");
}

#[test]
fn bodies_over_the_limit() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin])
        .listener("limits: { max_body_bytes: 10 }")
        .route("max_body_bytes: 5")
        .top("- { name: wide, path_prefix: /wide, pool: b }")
        .start();
    let by_length = |path: &str, body: &str| {
        let n = body.len();
        format!("POST {path} HTTP/1.1\r\nHost: a.test\r\nContent-Length: {n}\r\n\r\n{body}")
    };
    let in_chunks = |path: &str, body: &str| {
        let chunks: String = body.chars().map(|c| format!("1\r\n{c}\r\n")).collect();
        format!(
            "POST {path} HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}0\r\n\r\n"
        )
    };
    // The route's own limit wins over the listener's.
    for (path, limit) in [("/", 5), ("/wide", 10)] {
        let (fits, over) = ("b".repeat(limit), "b".repeat(limit + 1));
        assert!(proxy.client().ask(by_length(path, &fits)).text().ends_with(&fits));
        assert!(proxy.client().ask(in_chunks(path, &fits)).text().ends_with(&fits));
        let before = origin.requests();
        for request in [by_length(path, &over), in_chunks(path, &over)] {
            let mut client = proxy.client();
            let answer = client.ask(request);
            assert_failed(&proxy, &answer, 413, "http_request_error", "body_too_large");
        }
        assert_eq!(origin.requests(), before);
    }
}

#[test]
fn a_body_that_grows_over_the_limit_later_is_cut() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).route("max_body_bytes: 5").start();
    let mut client = proxy.client();
    client
        .send("POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n");
    eventually(SOON, || origin.requests() == 1);
    let answer = client.ask("4\r\nefgh\r\n");
    assert_failed(&proxy, &answer, 413, "http_request_error", "body_too_large");
    assert!(is_ended(&mut client, &answer));
    // What the upstream got does not look like a whole request.
    eventually(SOON, || origin.open() == 0);
    assert!(!origin.last().complete);
}

#[test]
fn an_announced_body_over_the_limit_is_refused_unread() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).route("max_body_bytes: 5").start();
    let mut client = proxy.client();
    let answer = client.ask(
        "POST / HTTP/1.1\r\nHost: a.test\r\nExpect: 100-continue\r\nContent-Length: 6\r\n\r\n",
    );
    assert_failed(&proxy, &answer, 413, "http_request_error", "body_too_large");
    assert!(is_ended(&mut client, &answer));
    assert_eq!(origin.requests(), 0);
}

#[test]
fn a_head_that_takes_too_long() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).listener("timeouts: { read_header: 400ms }").start();
    let mut client = proxy.client();
    let began = Instant::now();
    let request = get("a.test", "/drip", "");
    let mut octets = request.bytes();
    // An octet now and then does not set the clock back.
    let answer = loop {
        client.wire.patience(Some(Duration::from_millis(50)));
        let octet = octets.next().expect("it is refused before the end");
        let _ = client.wire.write(&[octet]);
        if let Ok(Some(head)) = client.wire.read_head() {
            break head;
        }
    };
    let took = began.elapsed();
    assert!(took > Duration::from_millis(350) && took < Duration::from_secs(3), "{took:?}");
    assert_eq!(answer.status(), 408);
    assert!(answer.get("proxy-status").is_some_and(|s| s.contains("head_timeout")));
    proxy.logged(|line| line["reason"] == "head_timeout");
}

#[test]
fn a_body_without_progress() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).listener("timeouts: { read: 300ms }").start();
    let mut client = proxy.client();
    let answer = client.ask("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 9\r\n\r\nbegin");
    assert_failed(&proxy, &answer, 408, "http_request_error", "body_timeout");
    assert!(is_ended(&mut client, &answer));
    eventually(SOON, || origin.open() == 0 && in_flight(&proxy) == 0.0);
    // Time counts from the last progress, not from the begin.
    let mut steady = proxy.client();
    steady.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 8\r\n\r\n");
    for _ in 0..8 {
        l7rp_testkit::let_pass(Duration::from_millis(100));
        steady.send("x");
    }
    assert_eq!(steady.response().status(), 200);
}

#[test]
fn a_client_that_does_not_read_is_let_go() {
    let origin = Origin::start(reply::raw_kept(
        [b"HTTP/1.1 200 OK\r\nContent-Length: 67108864\r\n\r\n", &vec![b'x'; 64 << 20][..]]
            .concat(),
    ));
    let proxy = over(&[&origin]).listener("timeouts: { write: 400ms }").start();
    let mut client = proxy.client();
    client.send(get("a.test", "/slow", "")).head();
    let line = proxy.logged_path("/slow");
    assert_eq!(line["reason"], "client_stalled");
    // It is not the upstream's fault.
    assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "cancel")], 1.0);
    assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "err")], 0.0);
    eventually(SOON, || origin.open() == 0 && in_flight(&proxy) == 0.0);
    eventually(SOON, || proxy.metrics().sum("proxy_connections", &[]) == 0.0);
}

#[test]
fn an_idle_client_is_let_go() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).listener("timeouts: { idle: 300ms }").start();
    let mut client = proxy.client();
    assert_eq!(client.get("/").status(), 200);
    assert!(client.is_closed_within(Duration::from_secs(3)));
    eventually(SOON, || proxy.metrics().sum("proxy_connections", &[]) == 0.0);
}

#[test]
fn broken_requests_reach_nobody() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    for (request, reason) in [
        ("GET / HTTP/1.1\r\n\r\n", "host_missing"),
        ("GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", "host_repeated"),
        (
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            "content_length_with_transfer_encoding",
        ),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 1\r\n\r\n", "bad_content_length"),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\n", "bad_content_length"),
        (
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n",
            "bad_transfer_encoding",
        ),
        ("GET / HTTP/1.1\r\nHost: a\r\nX-A : b\r\n\r\n", "malformed_field_name"),
        ("GET / HTTP/1.1\r\nHost: a\r\nX-A: a\0b\r\n\r\n", "malformed_field_value"),
    ] {
        refused(&proxy, &origin, request, 400, reason);
    }
    refused(&proxy, &origin, "GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505, "version_unsupported");
    let odd = "GET / HTTP/1.1\r\nHost: a\r\nExpect: magic\r\n\r\n";
    refused(&proxy, &origin, odd, 417, "expectation_unknown");
}

#[test]
fn a_broken_chunk_breaks_the_request_to_the_upstream() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client
        .send("POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n");
    eventually(SOON, || origin.requests() == 1);
    let answer = client.ask("zz\r\n");
    assert_failed(&proxy, &answer, 400, "http_request_error", "bad_chunk");
    eventually(SOON, || origin.open() == 0 && in_flight(&proxy) == 0.0);
    assert!(!origin.last().complete);
}

#[test]
fn a_client_that_says_nothing_is_let_go() {
    let proxy = over(&[&Origin::refusing()]).listener("timeouts: { read_header: 300ms }").start();
    for first in ["", "\r\n"] {
        let mut silent = proxy.client();
        silent.send(first);
        let _ = silent.wire.read_to_end().unwrap_or_else(|e| panic!("{first:?}: still open: {e}"));
    }
    eventually(SOON, || proxy.metrics().sum("proxy_connections", &[]) == 0.0);
}
