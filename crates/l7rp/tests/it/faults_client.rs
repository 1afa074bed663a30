//! Whatever clients do wrong, no upstream is blamed for it: rows of the table of faults, with a
//! breaker that opens at one failure. What clients and upstreams see of each is elsewhere:
//!
//! - C1, slow heads: `limits.rs`, `slow.rs`; C7 and C8 are about TLS.
//! - C2, slow bodies: `limits.rs`, `body_rate.rs`. C3, slow readers: `limits.rs`, `bodies.rs`.
//! - C4, C5, clients that leave: `connections.rs`, `corners.rs`. C6, half-closed ones:
//!   `connections.rs`.
//! - C9, pipelining without end: `connections.rs`. C10, tunnels: `tunnel_ends.rs`.
//! - C11 is about retries.
//!
//! That the place of a trial comes back after each is in `half_open.rs`.

use std::thread;
use std::time::Duration;

use l7rp_testkit::{Client, Gate, Origin, Proxy, SOON, Then, eventually, let_pass, reply};

use crate::setup::{Setup, assert_counts, assert_failed, get, in_flight, over, post, quiet};
use crate::upgrade::{ACCEPT, OFFER};
use crate::verdict::{CLOSED, TOUCHY, asking, eligible, nobody_is_blamed, state, turns};

/// A proxy whose only upstream does as it is told.
fn touchy(setup: fn(Setup) -> Setup) -> (Origin, Proxy) {
    let origin = Origin::start(reply::told);
    let proxy = setup(over(&[&origin])).pool(TOUCHY).start();
    (origin, proxy)
}

/// The try was given up for the client's sake, its connection is closed, and nobody is blamed.
#[track_caller]
fn is_given_up(proxy: &Proxy, origin: &Origin) {
    eventually(SOON, || origin.open() == 0 && in_flight(proxy) == 0.0);
    assert_counts(proxy, "proxy_upstream_requests_total", &[("status", "cancel")], 1.0);
    quiet(proxy);
    nobody_is_blamed(proxy);
    assert_eq!(proxy.get("/after").text(), "good");
}

/// The reason and the status in the log.
#[track_caller]
fn is_logged(proxy: &Proxy, path: &str, status: u16, reason: &str) {
    let line = proxy.logged_path(path);
    assert_eq!((&line["status"], &line["reason"]), (&status.into(), &reason.into()), "{line}");
}

/// A client that has sent half of its body.
#[track_caller]
fn uploading(proxy: &Proxy, origin: &Origin) -> Client {
    let before = origin.requests();
    let mut client = proxy.client();
    client.send("POST /up HTTP/1.1\r\nHost: a.test\r\nContent-Length: 9\r\n\r\nhalf");
    eventually(SOON, || origin.requests() > before);
    client
}

#[test]
fn c2_a_body_that_does_not_go_on() {
    let (origin, proxy) = touchy(|setup| setup.listener("timeouts: { read: 300ms }"));
    let answer = uploading(&proxy, &origin).response();
    assert_failed(&proxy, &answer, 408, "http_request_error", "body_timeout");
    is_given_up(&proxy, &origin);
}

#[test]
fn c2_a_body_that_is_broken() {
    let (origin, proxy) = touchy(|setup| setup);
    let mut client = proxy.client();
    client.send(
        "POST /up HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    );
    eventually(SOON, || origin.requests() == 1);
    assert_eq!(client.ask("zz\r\n").status(), 400);
    is_given_up(&proxy, &origin);
}

#[test]
fn c2_a_body_that_is_too_long() {
    let (origin, proxy) = touchy(|setup| setup.listener("limits: { max_body_bytes: 5 }"));
    let mut client = proxy.client();
    client.send(
        "POST /up HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    );
    eventually(SOON, || origin.requests() == 1);
    assert_eq!(client.ask("3\r\ndef\r\n").status(), 413);
    is_given_up(&proxy, &origin);
}

#[test]
fn c2_a_body_that_takes_the_time_of_the_route() {
    let (origin, proxy) = touchy(|setup| setup.route("timeouts: { total: 300ms }"));
    let answer = uploading(&proxy, &origin).response();
    assert!(answer.status() >= 400, "{answer:?}");
    is_given_up(&proxy, &origin);
}

#[test]
fn c3_an_answer_that_is_not_read() {
    let (origin, proxy) = touchy(|setup| setup.one_worker().listener("timeouts: { write: 300ms }"));
    // What is needed once is there before.
    assert_eq!(proxy.get("/").text(), "good");
    let before = proxy.resident();
    let mut client = asking(&proxy, &origin, "/big");
    assert_eq!(client.head().status(), 200);
    is_logged(&proxy, "/big", 200, "client_stalled");
    assert!(proxy.resident() < before + (8 << 20), "the upstream was not held back");
    is_given_up(&proxy, &origin);
}

#[test]
fn c4_gone_during_the_upload() {
    for by_reset in [true, false] {
        let (origin, proxy) = touchy(|setup| setup);
        let client = uploading(&proxy, &origin);
        if by_reset {
            client.reset();
        } else {
            drop(client);
        }
        is_logged(&proxy, "/up", 499, "client_gone");
        is_given_up(&proxy, &origin);
    }
}

#[test]
fn c4_half_closed_during_the_upload() {
    let (origin, proxy) = touchy(|setup| setup);
    let client = uploading(&proxy, &origin);
    client.wire.half_close().expect("it can");
    is_logged(&proxy, "/up", 499, "client_gone");
    is_given_up(&proxy, &origin);
}

#[test]
fn c5_gone_while_it_waits() {
    let (origin, proxy) = touchy(|setup| setup);
    asking(&proxy, &origin, "/hang").reset();
    is_logged(&proxy, "/hang", 499, "client_gone");
    is_given_up(&proxy, &origin);
}

#[test]
fn c5_gone_in_the_middle_of_an_answer_that_pauses() {
    let (origin, proxy) = touchy(|setup| setup);
    let mut client = asking(&proxy, &origin, "/stall");
    assert_eq!(client.head().status(), 200);
    client.reset();
    is_logged(&proxy, "/stall", 200, "client_gone");
    is_given_up(&proxy, &origin);
}

#[test]
fn c5_gone_in_the_middle_of_an_answer_that_flows() {
    for by_reset in [true, false] {
        let (origin, proxy) = touchy(|setup| setup);
        let mut client = asking(&proxy, &origin, "/big");
        assert_eq!(client.head().status(), 200);
        if by_reset {
            client.reset();
        } else {
            drop(client);
        }
        is_logged(&proxy, "/big", 200, "client_gone");
        is_given_up(&proxy, &origin);
    }
}

#[test]
fn c6_half_closed_after_the_request() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let proxy = over(&[&origin]).pool(TOUCHY).start();
    let mut client = asking(&proxy, &origin, "/");
    client.wire.half_close().expect("it can");
    let_pass(Duration::from_millis(100));
    gate.open();
    assert_eq!(client.response().text(), "late");
    assert!(client.is_closed_within(SOON));
    quiet(&proxy);
    nobody_is_blamed(&proxy);
    assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "200")], 1.0);
}

#[test]
fn c9_a_hundred_at_once_on_one_connection_are_one_at_a_time() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("x", &gate));
    let proxy = over(&[&origin]).pool(TOUCHY).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", "").repeat(100));
    eventually(SOON, || origin.requests() == 1);
    let_pass(Duration::from_millis(100));
    assert_eq!((origin.requests(), in_flight(&proxy)), (1, 1.0));
    gate.open();
    // It reads some of the answers, and leaves.
    for _ in 0..10 {
        assert_eq!(client.response().status(), 200);
    }
    client.reset();
    quiet(&proxy);
    nobody_is_blamed(&proxy);
}

#[test]
fn c9_pipelining_without_reading_any_answer() {
    let origin = Origin::start(reply::name(&"x".repeat(1 << 20)));
    let setup = over(&[&origin]).one_worker().listener("timeouts: { write: 300ms }");
    let proxy = setup.pool(TOUCHY).start();
    // What is needed once is there before.
    assert_eq!(proxy.get("/").status(), 200);
    let before = proxy.resident();
    let mut client = proxy.client();
    client.send(get("a.test", "/", "").repeat(100));
    let stalled = |line: &l7rp_testkit::Value| line["reason"] == "client_stalled";
    proxy.logged(stalled);
    assert!(origin.requests() < 60, "{} answers for nobody", origin.requests());
    assert!(proxy.resident() < before + (8 << 20));
    eventually(SOON, || origin.open() == 0);
    quiet(&proxy);
    nobody_is_blamed(&proxy);
    drop(client);
}

#[test]
fn c10_a_tunnel_that_nobody_uses_any_more() {
    let origin = Origin::start(|call| {
        call.send(ACCEPT);
        reply::hang(call)
    });
    let setup = over(&[&origin]).route("tunnel_idle_timeout: 300ms");
    let proxy = setup.pool(TOUCHY).start();
    let mut client = proxy.client();
    assert_eq!(client.send(OFFER).head().status(), 101);
    is_logged(&proxy, "/t", 101, "tunnel_idle");
    eventually(SOON, || origin.open() == 0);
    quiet(&proxy);
    nobody_is_blamed(&proxy);
}

#[test]
fn c10_a_tunnel_that_either_side_tears_down() {
    for by_client in [true, false] {
        let origin = Origin::start(move |call| {
            call.send(ACCEPT);
            let _ = call.wire.read_exact(3);
            if by_client { reply::hang(call) } else { Then::Reset }
        });
        let proxy = over(&[&origin]).pool(TOUCHY).start();
        let mut client = proxy.client();
        assert_eq!(client.send(OFFER).head().status(), 101);
        client.send("now");
        if by_client {
            client.reset();
        } else {
            let _ = client.wire.read_to_end();
        }
        proxy.logged_path("/t");
        quiet(&proxy);
        // It did what it was asked to when it switched.
        assert_eq!(state(&proxy, &origin), CLOSED);
        assert_eq!(turns(&proxy, &origin, "open"), 0.0);
    }
}

/// What a client of the crowd does: most leave before the answer.
fn be_impatient(proxy: &Proxy, n: usize) {
    let mut client = proxy.client();
    match n % 10 {
        0 => {
            let _ = client.wire.write(b"GET / HTTP/1.1\r\nHost: a\r\nBad Name: x\r\n\r\n");
            assert_eq!(client.response().status(), 400);
        }
        1 => {
            client.send("POST /up HTTP/1.1\r\nHost: a.test\r\nContent-Length: 9\r\n\r\nhalf");
            let_pass(Duration::from_millis(10));
            drop(client);
        }
        2 => {
            client.send(post("/left", "x"));
            let_pass(Duration::from_millis(10));
            drop(client);
        }
        _ => {
            client.send(get("a.test", "/left", ""));
            let_pass(Duration::from_millis(10));
            client.reset();
        }
    }
}

#[test]
fn impatient_clients_take_no_upstream_out() {
    let origin = Origin::start(|call| {
        if call.request.target() == "/healthz" {
            return reply::told(call);
        }
        if call.body().is_err() {
            return Then::Close;
        }
        let_pass(Duration::from_millis(100));
        reply::told(call)
    });
    let health = "health: { active: { path: /healthz, interval: 500ms, timeout: 400ms, \
                  healthy_threshold: 2, unhealthy_threshold: 3 }, \
                  passive: { error_threshold: 0.1, half_life: 500ms } }";
    let breaker = "circuit_breaker: { failure_ratio: 0.05, min_observations: 10 }";
    let proxy = over(&[&origin]).pool(&format!("{health}, {breaker}")).start();
    eventually(SOON, || eligible(&proxy) == 1.0);
    thread::scope(|scope| {
        for thread in 0..8 {
            let proxy = &proxy;
            scope.spawn(move || (0..40).for_each(|n| be_impatient(proxy, thread + n)));
        }
        // Who waits gets an answer meanwhile.
        for _ in 0..8 {
            assert_eq!(proxy.get("/waited").text(), "good");
        }
    });
    quiet(&proxy);
    nobody_is_blamed(&proxy);
    assert_eq!(eligible(&proxy), 1.0);
    let metrics = proxy.metrics();
    let cancelled = metrics.sum("proxy_upstream_requests_total", &[("status", "cancel")]);
    let left = metrics.sum("proxy_requests_total", &[("status", "499")]);
    assert!(cancelled >= 100.0 && left >= 100.0, "{cancelled} given up, {left} gone");
    let bad = [("reason", "malformed_field_name")];
    assert_eq!(metrics.sum("proxy_bad_requests_total", &bad), 32.0);
}
