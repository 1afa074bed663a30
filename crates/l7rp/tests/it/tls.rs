//! TLS with clients: which certificate they are shown, what is agreed on, and HTTP/1.1 through
//! it as it is without.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use l7rp_testkit::{Gate, Origin, Proxy, SOON, Signal, Then, eventually, let_pass, reply};
use rustls::client::Resumption;

use crate::reload::is_left_alone;
use crate::setup::{assert_counts, get, in_flight, over};
use crate::tls_kit::{Ca, HOST, client, secured, shake, tls, try_shake};
use crate::tries::assert_at_rest;
use crate::upgrade::{ACCEPT, OFFER, echo, echoes};

/// Waits until so many handshakes have failed for this reason, and no other.
#[track_caller]
pub fn fails(proxy: &Proxy, reason: &str, times: f64) {
    const NAME: &str = "proxy_tls_handshake_failures_total";
    assert_counts(proxy, NAME, &[("reason", reason)], times);
    assert_eq!(proxy.metrics().sum(NAME, &[]), times, "{}", proxy.metrics().text);
}

/// A connection without TLS.
pub fn plainly(proxy: &Proxy) -> TcpStream {
    let tcp = TcpStream::connect_timeout(&proxy.address(), SOON).expect("the proxy accepts");
    tcp.set_read_timeout(Some(SOON)).expect("a time-out");
    tcp
}

#[test]
fn the_name_that_is_asked_for_chooses_the_certificate() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let first = ca.issue("first", &["first.test"]);
    let exact = ca.issue("exact", &["a.b.test"]);
    let wild = ca.issue("wild", &["*.b.test"]);
    let longer = ca.issue("longer", &["*.c.b.test"]);
    let listed = ca.issue("listed", &["listed.test", "also.b.test"]);
    let items = [&first, &exact, &wild, &longer].map(|pair| pair.item("")).join(", ");
    let listed = listed.item(", hosts: [listed.test]");
    let keys = format!("tls: {{ certs: [{items}, {listed}] }}");
    let proxy = over(&[&origin]).listener(&keys).start();
    let config = Arc::new(ca.client());
    for (name, expected) in [
        ("first.test", "first"),
        ("a.b.test", "exact"),
        ("A.B.Test", "exact"),
        ("b.b.test", "wild"),
        ("x.c.b.test", "longer"),
        ("c.b.test", "wild"),
        ("listed.test", "listed"),
        ("also.b.test", "wild"),
    ] {
        let mut shaken = shake(&config, proxy.address(), name);
        assert_eq!(shaken.shown, expected, "{name}");
        assert_eq!(shaken.client.ask(get(name, "/", "")).text(), "x", "{name}");
    }
    // What nobody has gets the first, which the client does not take.
    assert!(try_shake(&config, proxy.address(), "nobody.example").is_err());
    fails(&proxy, "client_alert", 1.0);
    let mut silent = ca.client();
    silent.enable_sni = false;
    let mut shaken = shake(&Arc::new(silent), proxy.address(), "first.test");
    assert_eq!(shaken.shown, "first");
    assert_eq!(shaken.client.ask(get("first.test", "/", "")).text(), "x");
    assert_at_rest(&proxy);
}

#[test]
fn a_name_that_the_certificate_is_not_for_is_misdirected() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let wild = ca.issue("wild", &["*.example.com"]);
    let proxy = over(&[&origin]).listener(&tls(&[&wild], "")).start();
    let config = Arc::new(ca.client());
    let mut client = shake(&config, proxy.address(), "a.example.com").client;
    for (host, status) in [("a.example.com", 200), ("b.example.com", 200), ("other.test", 421)] {
        assert_eq!(client.ask(get(host, "/", "")).status(), status, "{host}");
    }
}

/// A `ClientHello` of this version of TLS without extensions.
fn old_hello(minor: u8) -> Vec<u8> {
    let mut body = vec![3, minor];
    body.extend([7; 32]);
    // No session, two suites that every version knows, no compression.
    body.extend([0, 0, 4, 0x00, 0x2f, 0xc0, 0x13, 1, 0]);
    let length = u8::try_from(body.len()).expect("it is short");
    let mut hello = vec![22, 3, 1, 0, length + 4, 1, 0, 0, length];
    hello.extend(body);
    hello
}

#[test]
fn old_versions_are_refused() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let pair = ca.issue("a", &[HOST]);
    let both = over(&[&origin]).listener(&tls(&[&pair], "")).start();
    let newest = over(&[&origin]).listener(&tls(&[&pair], ", min_version: \"1.3\"")).start();
    let of = |version| Arc::new(ca.client_of(&[version], None));
    let (new, old) = (of(&rustls::version::TLS13), of(&rustls::version::TLS12));
    for (proxy, config) in [(&both, &new), (&both, &old), (&newest, &new)] {
        assert_eq!(client(config, proxy).get("/").text(), "x");
    }
    let refusal = try_shake(&old, newest.address(), HOST).err().expect("it is refused");
    assert!(refusal.to_string().contains("ProtocolVersion"), "{refusal}");
    fails(&newest, "no_shared_version", 1.0);
}

#[test]
fn versions_of_the_last_century_are_refused_and_counted_as_such() {
    let origin = Origin::start(reply::name("x"));
    let (_ca, proxy, _) = secured(&origin);
    for minor in 1..=2 {
        let mut tcp = plainly(&proxy);
        tcp.write_all(&old_hello(minor)).expect("it is taken");
        let mut answer = Vec::new();
        tcp.read_to_end(&mut answer).expect("an end");
        assert_eq!((answer[0], answer.len()), (21, 7), "an alert: {answer:?}");
        assert_eq!(answer[5], 2, "a fatal one: {answer:?}");
    }
    fails(&proxy, "no_shared_version", 2.0);
}

#[test]
fn clients_agree_on_a_protocol() {
    let origin = Origin::start(reply::name("x"));
    let (ca, proxy, _) = secured(&origin);
    let offering = |names: &[&str]| {
        let mut config = ca.client();
        config.alpn_protocols = names.iter().map(|name| name.as_bytes().to_vec()).collect();
        Arc::new(config)
    };
    for names in [&["http/1.1"][..], &["http/1.0", "http/1.1"], &[]] {
        let mut shaken = shake(&offering(names), proxy.address(), HOST);
        assert_eq!(shaken.alpn.as_deref(), names.last().copied());
        assert_eq!(shaken.client.get("/").text(), "x");
    }
    let mut shaken = shake(&offering(&["http/1.1", "h2"]), proxy.address(), HOST);
    assert_eq!(shaken.alpn.as_deref(), Some("h2"));
    shaken.client.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
    // Its settings come first.
    assert_eq!(shaken.client.wire.read_exact(9).expect("a frame")[3..5], [4, 0]);
    let refusal = try_shake(&offering(&["spdy/3"]), proxy.address(), HOST).err();
    assert!(refusal.is_some_and(|e| e.to_string().contains("NoApplicationProtocol")));
    fails(&proxy, "no_shared_protocol", 1.0);
}

#[test]
fn requests_follow_one_another_on_a_connection() {
    let origin = Origin::start(reply::echo);
    let (_ca, proxy, config) = secured(&origin);
    let mut client = client(&config, &proxy);
    for n in 0..20 {
        let answer = client.get(&format!("/{n}"));
        assert_eq!((answer.status(), answer.get("connection")), (200, None));
        assert!(answer.text().to_lowercase().contains("x-forwarded-proto: https\r\n"));
    }
    // Sent at once, and a part of the next.
    let all: String = (0..50).map(|n| get(HOST, &format!("/{n}"), "")).collect();
    client.send(all + "GET /part HT");
    for n in 0..50 {
        let answer = client.response();
        assert!(answer.text().starts_with(&format!("GET /{n} ")), "{answer:?}");
    }
    let answer = client.ask("TP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n");
    assert!(answer.text().starts_with("GET /part "), "{answer:?}");
    assert_eq!(answer.get("connection"), Some("close"));
    assert_eq!(origin.seen().iter().filter(|seen| seen.connection == 0).count(), 71);
    assert_at_rest(&proxy);
}

/// An upstream whose answers have no length; that at `/cut` breaks off.
fn of_chunks() -> Origin {
    Origin::start(|call| {
        call.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nwhole\r\n");
        if call.request.target() == "/cut" {
            return Then::Close;
        }
        call.send("0\r\n\r\n");
        Then::Next
    })
}

/// How an answer ends whose end is that of the connection: without `close_notify` before it,
/// reading is an error.
fn ends_in_order(path: &str) -> [bool; 2] {
    let origin = of_chunks();
    let (ca, proxy, _) = secured(&origin);
    [&rustls::version::TLS12, &rustls::version::TLS13].map(|version| {
        let mut old = client(&Arc::new(ca.client_of(&[version], None)), &proxy);
        old.send(format!("GET {path} HTTP/1.0\r\nHost: a.test\r\n\r\n"));
        assert_eq!(old.head().status(), 200);
        old.wire.read_to_end().is_ok()
    })
}

#[test]
fn the_end_of_a_whole_answer_is_said_in_tls() {
    assert_eq!(ends_in_order("/"), [true; 2]);
}

#[test]
fn the_end_of_a_cut_answer_is_not_said_in_tls() {
    assert_eq!(ends_in_order("/cut"), [false; 2]);
}

#[test]
fn the_end_of_the_last_answer_is_said_in_tls() {
    let origin = of_chunks();
    let (_ca, proxy, config) = secured(&origin);
    let mut client = client(&config, &proxy);
    assert_eq!(client.ask(get(HOST, "/", "Connection: close\r\n")).text(), "whole");
    assert!(client.is_closed_within(SOON));
}

#[test]
fn the_end_of_an_idle_connection_is_said_in_tls() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let keys = tls(&[&ca.issue("a", &[HOST])], ", min_version: \"1.3\"");
    let proxy = over(&[&origin]).listener(&keys).listener("timeouts: { idle: 100ms }").start();
    let mut client = client(&Arc::new(ca.client()), &proxy);
    assert_eq!(client.get("/").text(), "x");
    assert!(client.is_closed_within(SOON));
}

#[test]
fn a_head_may_come_in_many_records() {
    let origin = Origin::start(reply::name("x"));
    let (_ca, proxy, config) = secured(&origin);
    let mut client = client(&config, &proxy);
    for octet in get(HOST, "/", "X-Long: value\r\n").as_bytes() {
        client.send([*octet]);
    }
    assert_eq!(client.response().text(), "x");
}

/// Octets that tell where they are.
fn numbered(length: usize) -> Vec<u8> {
    (0..length.div_ceil(8)).flat_map(|n| (n as u64).to_be_bytes()).take(length).collect()
}

#[test]
fn large_bodies_come_through_whole() {
    const LENGTH: usize = (24 << 20) + 13;
    let origin = Origin::start(|call| {
        let Ok(body) = call.body() else { return Then::Close };
        let body = body.to_vec();
        call.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        for part in body.chunks(70_001) {
            call.send(format!("{:x}\r\n", part.len()));
            call.send(part);
            call.send("\r\n");
        }
        call.send("0\r\n\r\n");
        Then::Next
    });
    let (ca, proxy, _) = secured(&origin);
    let body = numbered(LENGTH);
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let mut client = client(&Arc::new(ca.client_of(&[version], None)), &proxy);
        for _ in 0..2 {
            client.send(format!(
                "POST /up HTTP/1.1\r\nHost: a.test\r\nContent-Length: {LENGTH}\r\n\r\n"
            ));
            let answer = client.ask(&body);
            assert!(answer.body == body, "{} octets come back", answer.body.len());
        }
    }
    assert_at_rest(&proxy);
}

#[test]
fn slow_readers_get_everything() {
    let origin = Origin::start(|call| {
        let body = numbered(8 << 20);
        call.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len()));
        if call.send(body) { Then::Next } else { Then::Close }
    });
    let (_ca, proxy, config) = secured(&origin);
    let mut slow = client(&config, &proxy);
    slow.send(get(HOST, "/", ""));
    assert_eq!(slow.head().status(), 200);
    let (expected, mut got) = (numbered(8 << 20), Vec::new());
    while got.len() < expected.len() {
        let most = if got.len() < 1 << 20 { 10_000 } else { 1 << 20 };
        got.extend(slow.wire.read_some(most).expect("more of it"));
        if got.len() < 1 << 20 {
            let_pass(Duration::from_millis(3));
        }
    }
    assert!(got == expected);
    // One that goes away in the midst leaves nothing behind.
    let mut gone = client(&config, &proxy);
    gone.send(get(HOST, "/", ""));
    assert_eq!(gone.head().status(), 200);
    gone.reset();
    eventually(SOON, || in_flight(&proxy) == 0.0);
    drop(slow);
    assert_at_rest(&proxy);
}

#[test]
fn tunnels_through_tls_end_one_side_at_a_time() {
    let origin = Origin::start(|call| {
        let _ = echo(call);
        // The client has ended its side; ours goes on.
        call.send("last words");
        Then::Close
    });
    let (_ca, proxy, config) = secured(&origin);
    let mut client = client(&config, &proxy);
    assert_eq!(client.send(OFFER).head().status(), 101);
    echoes(&mut client, "hello");
    let long = numbered(1 << 20);
    for part in long.chunks(64 << 10) {
        client.send(part);
        assert!(client.wire.read_exact(part.len()).expect("the echo") == part);
    }
    client.wire.half_close().expect("it is said");
    assert_eq!(client.wire.read_to_end().expect("an end in order"), b"last words");
    drop(client);
    is_left_alone(&origin);
    assert_counts(&proxy, "proxy_tunnels", &[], 0.0);
    assert_at_rest(&proxy);
}

#[test]
fn a_tunnel_that_breaks_does_not_end_in_order() {
    let origin = Origin::start(|call| {
        call.send(ACCEPT.to_owned() + "some");
        Then::Reset
    });
    let (_ca, proxy, config) = secured(&origin);
    let mut client = client(&config, &proxy);
    assert_eq!(client.send(OFFER).head().status(), 101);
    let end = client.wire.read_to_end();
    assert!(end.is_err(), "{end:?}");
    assert_at_rest(&proxy);
}

#[test]
fn websockets_open_through_tls() {
    let origin = Origin::start(echo);
    let (_ca, proxy, config) = secured(&origin);
    let mut client = client(&config, &proxy);
    let head = client.send(get(
        HOST,
        "/ws",
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    ));
    assert_eq!(head.head().status(), 101);
    echoes(&mut client, "a frame");
    // What the upstream ends is ended in order.
    drop(origin);
    assert!(client.is_closed_within(SOON));
}

#[test]
fn the_end_of_the_process_is_told_in_order() {
    let origin = Origin::start(reply::name("x"));
    let (_ca, mut proxy, config) = secured(&origin);
    let mut kept: Vec<_> = (0..3).map(|_| client(&config, &proxy)).collect();
    for client in &mut kept[1..] {
        assert_eq!(client.get("/").text(), "x");
    }
    assert_counts(&proxy, "proxy_connections", &[], 3.0);
    proxy.signal(Signal::TERM);
    for client in &mut kept {
        // Without `close_notify` before the end this fails.
        assert!(client.is_closed_within(SOON));
    }
    drop(kept);
    assert_eq!(proxy.wait_exit(SOON), 0);
}

#[test]
fn a_request_in_progress_is_answered_at_the_end_of_the_process() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let (_ca, mut proxy, config) = secured(&origin);
    let mut client = client(&config, &proxy);
    client.send(get(HOST, "/", ""));
    eventually(SOON, || origin.requests() == 1);
    proxy.signal(Signal::TERM);
    eventually(SOON, || TcpStream::connect_timeout(&proxy.address(), SOON).is_err());
    gate.open();
    let answer = client.response();
    assert_eq!((answer.text().as_str(), answer.get("connection")), ("late", Some("close")));
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert!(client.is_closed_within(SOON), "close_notify comes before the end");
}

#[test]
fn handshakes_are_resumed_after_a_reload_too() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let pair = ca.issue("a", &[HOST]);
    let yaml = over(&[&origin]).listener(&tls(&[&pair], "")).yaml();
    let proxy = crate::setup::start(&yaml);
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let mut config = ca.client_of(&[version], None);
        config.resumption = Resumption::in_memory_sessions(32);
        let config = Arc::new(config);
        for n in 0..6 {
            if n == 3 {
                proxy.reload(&yaml);
            }
            let mut shaken = shake(&config, proxy.address(), HOST);
            assert_eq!(shaken.resumed, n > 0, "{version:?} {n}");
            assert_eq!(shaken.client.get("/").text(), "x");
        }
    }
}
