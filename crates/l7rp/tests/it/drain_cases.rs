//! What a drain does to idle connections, to a balancer, to what does not end in time, and what
//! the exit code says.

use std::io;
use std::net::TcpListener;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Client, Gate, Origin, Proxy, SOON, Signal, eventually, let_pass, reply};

use crate::load::Target;
use crate::setup::{PROGRAM, get, over, start};
use crate::upgrade::{self, echoes};

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[test]
fn idle_connections_do_not_hold_the_end() {
    const SLOW: Duration = Duration::from_millis(1500);
    let origin = Origin::start(|call| {
        if call.request.target() == "/slow" {
            let_pass(SLOW);
        }
        reply::name("x")(call)
    });
    let mut proxy = over(&[&origin]).top("drain: { timeout: 20s }").start();
    let mut idle: Vec<Client> = (0..50).map(|_| proxy.client()).collect();
    for client in &mut idle {
        assert_eq!(client.get("/").status(), 200);
    }
    let mut slow: Vec<Client> = (0..5).map(|_| proxy.client()).collect();
    for client in &mut slow {
        client.send(get("a.test", "/slow", ""));
    }
    eventually(SOON, || origin.requests() == 55);
    let began = Instant::now();
    proxy.signal(Signal::TERM);
    let started = proxy.wait_for_event("shutdown_started", |_| true, SOON);
    assert_eq!((&started["in_progress"], &started["connections"]), (&5.into(), &55.into()));
    for client in &mut idle {
        assert!(client.is_closed_within(SOON), "an idle one ends in order");
    }
    assert!(proxy.events("shutdown_complete").is_empty(), "they are closed before the others end");
    for mut client in slow {
        let answer = client.response();
        assert_eq!((answer.status(), answer.get("connection")), (200, Some("close")));
        assert!(client.is_closed_within(SOON));
    }
    assert_eq!(proxy.wait_exit(SOON), 0);
    let took = began.elapsed();
    assert!(took < SLOW + ms(2000), "{took:?}");
    let told = proxy.wait_for_event("shutdown_complete", |_| true, SOON);
    assert_eq!((&told["cut"], &told["tunnels_closed"]), (&0.into(), &0.into()));
    assert!(told["took_ms"].as_f64().is_some_and(|n| n < 3500.0), "{told}");
}

/// What an admin endpoint says, each 20 ms; `None` from the moment when nobody answers.
fn poll(address: std::net::SocketAddr, path: &str, mut tell: impl FnMut(Option<u16>) -> bool) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: admin\r\nConnection: close\r\n\r\n");
    loop {
        let answer = Target::Tcp(address).connect().and_then(|mut client| {
            client.wire.write(request.as_bytes())?;
            client.try_response()
        });
        let status = answer.as_ref().map(l7rp_testkit::Message::status).ok();
        if !tell(status) || status.is_none() {
            return;
        }
        let_pass(ms(20));
    }
}

#[test]
fn a_balancer_that_asks_whether_it_is_ready_loses_nothing() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = over(&[&origin]).top("drain: { delay: 3s, timeout: 15s }").start();
    let (address, admin) = (proxy.address(), proxy.admin());
    let lives = thread::spawn(move || {
        let mut seen = Vec::new();
        poll(admin, "/livez", |status| {
            seen.push(status);
            true
        });
        (seen, Instant::now())
    });
    let (unready, is_unready) = sync_channel(1);
    let asks = thread::spawn(move || {
        poll(admin, "/readyz", |status| {
            if status != Some(204) {
                let _ = unready.send((status, Instant::now()));
            }
            status == Some(204)
        });
    });
    let began = Instant::now();
    proxy.signal(Signal::TERM);
    // The balancer learns late, and acts on it later still: all that while it sends.
    let (status, at) = is_unready.recv_timeout(SOON).expect("it becomes unready");
    assert_eq!(status, Some(503));
    assert!(at - began < ms(1000), "{:?}", at - began);
    let mut sent = 0;
    while at.elapsed() < ms(1500) {
        let answer = Client::connect(address).get("/");
        assert_eq!((answer.status(), answer.get("connection")), (200, None));
        sent += 1;
        let_pass(ms(10));
    }
    assert!(sent > 0);
    assert!(proxy.events("shutdown_complete").is_empty());
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert!(began.elapsed() >= ms(3000));
    asks.join().expect("it asks");
    let (lives, last) = lives.join().expect("it asks");
    assert!(lives.iter().rev().skip(1).all(|status| *status == Some(204)), "{lives:?}");
    assert!(last - began >= ms(3000), "it lives to the end");
    let started = proxy.wait_for_event("shutdown_started", |_| true, SOON);
    assert_eq!((&started["delay_ms"], &started["grace_ms"]), (&3000.into(), &15000.into()));
}

#[test]
fn each_way_to_wait_is_cut_logged_and_counted() {
    let origin = Origin::start(|call| match call.request.target() {
        "/t" => upgrade::echo(call),
        "/half" => {
            call.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf");
            reply::hang(call)
        }
        _ => reply::hang(call),
    });
    let mut proxy = over(&[&origin]).top("drain: { timeout: 1500ms }").start();
    let mut tunnels = [upgrade::open(&proxy), upgrade::open(&proxy)];
    let mut hangs = proxy.client();
    hangs.send(get("a.test", "/hang", ""));
    let mut half = proxy.client();
    half.send(get("a.test", "/half", ""));
    assert_eq!(half.head().status(), 200);
    let mut uploads = proxy.client();
    uploads.send("POST /up HTTP/1.1\r\nHost: a.test\r\nContent-Length: 9\r\n\r\npart");
    eventually(SOON, || origin.requests() == 5);
    let began = Instant::now();
    proxy.signal(Signal::TERM);
    proxy.wait_for_event("shutdown_started", |e| e["in_progress"] == 5 && e["tunnels"] == 2, SOON);
    for tunnel in &mut tunnels {
        echoes(tunnel, "still here");
    }
    for tunnel in &mut tunnels {
        assert_eq!(tunnel.wire.read_to_end().expect("an end in order"), b"");
        assert!(began.elapsed() >= ms(1500));
    }
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert!(began.elapsed() < ms(6000), "{:?}", began.elapsed());
    let told = proxy.wait_for_event("shutdown_complete", |_| true, SOON);
    assert_eq!((&told["cut"], &told["tunnels_closed"]), (&3.into(), &2.into()), "{told}");
    for mut client in [hangs, uploads] {
        assert!(client.try_response().is_err(), "nothing was to be had");
    }
    assert_eq!(half.wire.read_exact(4).expect("what had come"), b"half");
    assert!(half.wire.read_exact(1).is_err(), "and no more");
    let lines = proxy.events("request_completed");
    assert_eq!(lines.len(), 5);
    assert!(lines.iter().all(|line| line["reason"] == "draining"), "{lines:#?}");
    eventually(SOON, || origin.open() == 0);
}

#[test]
fn a_request_that_ends_while_others_are_cut_is_none_of_them() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| match call.request.target() {
        "/hang" => reply::hang(call),
        _ => reply::held("in time", &held)(call),
    });
    let mut proxy = over(&[&origin]).top("drain: { timeout: 500ms }").start();
    let mut ends = proxy.client();
    ends.send(get("a.test", "/ends", ""));
    let mut hangs = proxy.client();
    hangs.send(get("a.test", "/hang", ""));
    eventually(SOON, || origin.requests() == 2);
    proxy.signal(Signal::TERM);
    proxy.wait_for_event("shutdown_started", |_| true, SOON);
    gate.open();
    assert_eq!(ends.response().text(), "in time");
    assert_eq!(proxy.wait_exit(SOON), 0);
    proxy.wait_for_event("shutdown_complete", |e| e["cut"] == 1, SOON);
    assert!(proxy.logged_path("/ends")["reason"].is_null());
    assert_eq!(proxy.logged_path("/hang")["reason"], "draining");
}

#[test]
fn pipelined_requests_get_whole_answers_up_to_the_last() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("x", &gate));
    let mut proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    let one = get("a.test", "/", "");
    // More than fits into any buffer that would be emptied by chance.
    client.send(one.repeat(500));
    eventually(SOON, || origin.requests() == 1);
    proxy.signal(Signal::TERM);
    proxy.wait_for_event("shutdown_started", |_| true, SOON);
    eventually(SOON, || Target::Tcp(proxy.address()).connect().is_err());
    gate.open();
    let answer = client.response();
    assert_eq!((answer.text().as_str(), answer.get("connection")), ("x", Some("close")));
    let end = client.wire.read_to_end().expect("an end in order, not a reset");
    assert!(end.is_empty(), "nothing follows the last answer");
    drop(client);
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert_eq!(origin.requests(), 1);
}

#[test]
fn a_head_that_was_begun_is_taken_to_its_end() {
    let origin = Origin::start(|call| {
        if call.request.get("expect").is_some() {
            call.send("HTTP/1.1 100 Continue\r\n\r\n");
        }
        reply::echo(call)
    });
    let mut proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    assert_eq!(client.get("/first").status(), 200);
    client.send("POST /begun HTTP/1.1\r\nHost: a.");
    eventually(SOON, || proxy.metrics().sum("proxy_connections", &[]) == 1.0);
    proxy.signal(Signal::TERM);
    eventually(SOON, || Target::Tcp(proxy.address()).connect().is_err());
    client.send("test\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n");
    assert_eq!(client.head().status(), 100);
    let answer = client.ask("abc");
    assert_eq!((answer.status(), answer.get("connection")), (200, Some("close")));
    assert!(answer.text().ends_with("abc"));
    assert!(client.is_closed_within(SOON));
    assert_eq!(proxy.wait_exit(SOON), 0);
}

/// One that has a request which never ends and a tunnel, and drains for this reason.
fn draining(signal: Signal, keys: &str) -> (Proxy, Client, Client) {
    let origin = Origin::start(|call| match call.request.target() {
        "/t" => upgrade::echo(call),
        _ => reply::hang(call),
    });
    let proxy = over(&[&origin]).top(keys).start();
    let tunnel = upgrade::open(&proxy);
    let mut hangs = proxy.client();
    hangs.send(get("a.test", "/hang", ""));
    eventually(SOON, || origin.requests() == 2);
    // It must outlive the process.
    std::mem::forget(origin);
    proxy.signal(signal);
    proxy.wait_for_event("shutdown_started", |e| e["in_progress"] == 2, SOON);
    (proxy, tunnel, hangs)
}

#[test]
fn any_second_signal_ends_at_once_and_tells_what_it_cut() {
    let name = |signal| if signal == Signal::INT { "SIGINT" } else { "SIGTERM" };
    for (first, second, keys) in [
        (Signal::INT, Signal::TERM, ""),
        (Signal::TERM, Signal::INT, ""),
        (Signal::INT, Signal::INT, "drain: { delay: 1m }"),
    ] {
        let (mut proxy, _tunnel, _hangs) = draining(first, keys);
        proxy.wait_for_event("shutdown_started", |e| e["why"] == name(first), SOON);
        // Two signals within 100 ms are one.
        let_pass(ms(150));
        let began = Instant::now();
        proxy.signal(second);
        assert_eq!(proxy.wait_exit(SOON), 3);
        assert!(began.elapsed() < ms(3000), "{:?}", began.elapsed());
        proxy.wait_for_event("shutdown_forced", |e| e["cut"] == 2, SOON);
        assert!(proxy.events("shutdown_complete").is_empty());
        let lines = proxy.events("request_completed");
        assert_eq!(lines.len(), 2, "what was cut has its lines");
    }
}

#[test]
fn two_signals_at_once_are_one() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let mut proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || origin.requests() == 1);
    proxy.signal(Signal::TERM);
    proxy.signal(Signal::INT);
    eventually(SOON, || Target::Tcp(proxy.address()).connect().is_err());
    gate.open();
    assert_eq!(client.response().text(), "late");
    assert_eq!(proxy.wait_exit(SOON), 0);
}

#[test]
fn a_slow_reader_gets_all_of_a_long_answer() {
    let origin = Origin::start(reply::told);
    let mut proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/big", ""));
    let head = client.head();
    let length: usize = head.get("content-length").and_then(|n| n.parse().ok()).expect("a length");
    proxy.signal(Signal::TERM);
    eventually(SOON, || Target::Tcp(proxy.address()).connect().is_err());
    let mut got = 0;
    for _ in 0..5 {
        let_pass(ms(100));
        got += client.wire.read_exact(64 << 10).expect("more of it").len();
    }
    let rest = client.wire.read_to_end().expect("all of it, and an end in order");
    assert_eq!(got + rest.len(), length);
    assert_eq!(proxy.wait_exit(SOON), 0);
    proxy.wait_for_event("shutdown_complete", |e| e["cut"] == 0, SOON);
}

#[test]
fn hang_up_while_it_drains_changes_nothing() {
    let (mut proxy, mut tunnel, hangs) = draining(Signal::TERM, "drain: { timeout: 2s }");
    let_pass(ms(150));
    proxy.signal(Signal::HUP);
    proxy.wait_for_event("reload_ignored", |_| true, SOON);
    echoes(&mut tunnel, "still here");
    drop((tunnel, hangs));
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert!(proxy.events("config_reloaded").is_empty());
}

#[test]
fn socket_files_go_with_the_process() {
    let yaml = over(&[&Origin::refusing()])
        .top("admin: { bind: \"unix:{dir}/admin.sock\" }")
        .yaml()
        .replace("127.0.0.1:0", "unix:{dir}/web.sock");
    let mut proxy = start(&yaml);
    let files = ["web.sock", "admin.sock"].map(|name| proxy.directory().join(name));
    assert!(files.iter().all(|file| file.exists()));
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    let left: Vec<_> = files.iter().filter(|file| file.exists()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn the_exit_code_says_whether_the_file_or_the_start_is_at_fault() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = taken.local_addr().map(|address| address.to_string()).expect("an address");
    let good = || over(&[&Origin::refusing()]);
    let listening = |at: &str| good().yaml().replace("127.0.0.1:0", at);
    for (yaml, code) in [
        (good().top("drain: { timeout: soon }").yaml(), 2),
        (good().top("drain: { patience: 3s }").yaml(), 2),
        (good().top("drain: { delay: -1s }").yaml(), 2),
        (good().route("pool: nowhere").yaml(), 2),
        ("listeners: [".to_owned(), 2),
        (listening(&taken), 1),
        (listening("unix:{dir}/no/such/directory.sock"), 1),
        (good().top("admin: { bind: \"unix:{dir}/no/such/directory.sock\" }").yaml(), 1),
    ] {
        let mut proxy = Proxy::spawn(PROGRAM, &yaml);
        assert_eq!(proxy.wait_exit(SOON), code, "{yaml}\n{}", proxy.errors());
        assert!(!proxy.errors().is_empty() && proxy.events("proxy_started").is_empty());
    }
}

#[test]
fn a_stop_while_it_starts_is_heard() {
    // The start waits for the first answer of a health check, which does not come.
    let silent = Origin::never_accepting();
    let check = "health: { active: { path: /, interval: 1s, timeout: 900ms } }";
    let yaml = over(&[&silent]).pool(check).yaml();
    let mut proxy = Proxy::spawn(PROGRAM, &yaml);
    let catches = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", proxy.pid()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
        let mask = u64::from_str_radix(line.trim(), 16).unwrap_or(0);
        io::Result::Ok(mask & (1 << (Signal::TERM.as_raw() - 1)) != 0)
    };
    eventually(SOON, || catches().unwrap_or(false));
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
}
