//! The end of the process: what was begun is finished, and nothing new is begun.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use l7rp_testkit::{Gate, Origin, Proxy, SOON, Signal, eventually, reply};

use crate::setup::{assert_counts, get, over};

fn refuses(proxy: &Proxy) -> bool {
    TcpStream::connect_timeout(&proxy.address(), SOON).is_err()
}

#[test]
fn kept_connections_are_closed() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = over(&[&origin]).start();
    let mut kept: Vec<_> = (0..4).map(|_| proxy.client()).collect();
    for client in &mut kept {
        assert_eq!(client.get("/").text(), "x");
    }
    assert_counts(&proxy, "proxy_requests_total", &[], 4.0);
    proxy.signal(Signal::TERM);
    for client in &mut kept {
        assert!(client.is_closed_within(SOON));
    }
    assert_eq!(proxy.wait_exit(SOON), 0);
    let started = proxy.wait_for_event("shutdown_started", |_| true, SOON);
    assert_eq!((&started["why"], &started["in_progress"]), (&"SIGTERM".into(), &0.into()));
    proxy.wait_for_event("shutdown_complete", |e| e["cut"] == 0, SOON);
}

#[test]
fn requests_in_progress_hold_the_end() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let mut proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/late", ""));
    eventually(SOON, || origin.requests() == 1);
    assert_eq!(proxy.ask_admin("/readyz").status(), 204);
    proxy.signal(Signal::TERM);
    eventually(SOON, || refuses(&proxy));
    // The admin endpoints answer to the end, and say that no more should come.
    assert_eq!(proxy.ask_admin("/readyz").status(), 503);
    assert_eq!(proxy.ask_admin("/-/ready").status(), 503);
    assert_eq!(proxy.ask_admin("/livez").status(), 204);
    let started = proxy.wait_for_event("shutdown_started", |_| true, SOON);
    assert_eq!(started["in_progress"], 1);
    gate.open();
    let answer = client.response();
    assert_eq!((answer.status(), answer.text().as_str()), (200, "late"));
    assert_eq!(answer.get("connection"), Some("close"));
    assert!(client.is_closed_within(SOON));
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert_eq!(proxy.logged_path("/late")["status"], 200);
    proxy.wait_for_event("shutdown_complete", |e| e["cut"] == 0, SOON);
}

#[test]
fn interrupt_drains_too() {
    let mut proxy = over(&[&Origin::refusing()]).start();
    proxy.signal(Signal::INT);
    assert_eq!(proxy.wait_exit(SOON), 0);
}

#[test]
fn the_grace_ends() {
    let origin = Origin::start(reply::hang);
    let mut proxy = over(&[&origin]).top("drain: { timeout: 300ms }").start();
    let mut client = proxy.client();
    client.send(get("a.test", "/cut", ""));
    eventually(SOON, || origin.requests() == 1);
    proxy.signal(Signal::TERM);
    let began = Instant::now();
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert!(began.elapsed() > Duration::from_millis(250));
    assert!(client.try_response().is_err());
    let line = proxy.logged_path("/cut");
    assert_eq!(line["reason"], "draining");
    proxy.wait_for_event("shutdown_complete", |e| e["cut"] == 1, SOON);
}

#[test]
fn a_second_signal_ends_at_once() {
    let origin = Origin::start(reply::hang);
    let mut proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || origin.requests() == 1);
    proxy.signal(Signal::TERM);
    proxy.wait_for_event("shutdown_started", |_| true, SOON);
    // Two signals within 100 ms are one.
    l7rp_testkit::let_pass(Duration::from_millis(150));
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 3);
    proxy.wait_for_event("shutdown_forced", |e| e["cut"] == 1, SOON);
}

#[test]
fn a_delay_keeps_serving_while_it_is_unready() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = over(&[&origin]).top("drain: { delay: 1s }").start();
    let mut kept = proxy.client();
    assert_eq!(kept.get("/").status(), 200);
    proxy.signal(Signal::TERM);
    eventually(SOON, || proxy.ask_admin("/readyz").status() == 503);
    assert_eq!(proxy.get("/new").status(), 200);
    assert_eq!(kept.get("/kept").status(), 200);
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert!(kept.is_closed_within(SOON));
}

#[test]
fn a_connection_that_was_accepted_is_served() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = over(&[&origin]).start();
    let mut early = proxy.client();
    eventually(SOON, || proxy.metrics().sum("proxy_connections", &[]) == 1.0);
    proxy.signal(Signal::TERM);
    eventually(SOON, || refuses(&proxy));
    let answer = early.get("/");
    assert_eq!((answer.status(), answer.get("connection")), (200, Some("close")));
    assert_eq!(proxy.wait_exit(SOON), 0);
}

#[test]
fn hang_up_does_not_end_the_process() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    proxy.signal(Signal::HUP);
    eventually(SOON, || {
        ["reload_ignored", "config_reloaded", "config_rejected"]
            .iter()
            .any(|name| !proxy.events(name).is_empty())
    });
    assert_eq!(proxy.get("/").status(), 200);
}

#[test]
fn a_connection_that_says_nothing_does_not_hold_the_end_for_long() {
    let mut proxy =
        over(&[&Origin::refusing()]).listener("timeouts: { read_header: 300ms }").start();
    let silent = proxy.client();
    eventually(SOON, || proxy.metrics().sum("proxy_connections", &[]) == 1.0);
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    proxy.wait_for_event("shutdown_complete", |e| e["cut"] == 0, SOON);
    drop(silent);
}

#[test]
fn an_upload_in_progress_is_finished() {
    let origin = Origin::start(reply::echo);
    let mut proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 6\r\n\r\nabc");
    eventually(SOON, || origin.requests() == 1);
    proxy.signal(Signal::TERM);
    eventually(SOON, || refuses(&proxy));
    let answer = client.ask("def");
    assert!(answer.status() == 200 && answer.text().ends_with("abcdef"));
    assert_eq!(proxy.wait_exit(SOON), 0);
}

#[test]
fn an_answer_that_the_grace_cuts_is_logged_as_cut() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf");
        reply::hang(call)
    });
    let mut proxy = over(&[&origin]).top("drain: { timeout: 300ms }").start();
    let mut client = proxy.client();
    assert_eq!(client.send(get("a.test", "/cut", "")).head().status(), 200);
    assert_eq!(client.wire.read_exact(4).expect("a half"), b"half");
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    let line = proxy.logged_path("/cut");
    assert_eq!((&line["status"], &line["reason"]), (&200.into(), &"draining".into()), "{line}");
    assert_eq!(line["bytes_out"], 4, "{line}");
}
