//! Many clients and upstreams that behave badly in every way, all at once: nothing leaks, and
//! whoever behaves is served.

use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Call, Origin, Proxy, SOON, Then, eventually, reply};

use crate::pipelining::Draw;
use crate::setup::{assert_counts, get, in_flight, over, post};

pub fn misbehaving(call: &mut Call<'_>) -> Then {
    let mut draw = Draw(call.number as u64);
    match if call.request.target() == "/good" { 99 } else { draw.below(12) } {
        0 => reply::hang(call),
        1 => Then::Reset,
        2 => reply::close(call),
        3 => reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")(call),
        4 => {
            call.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n");
            Then::Reset
        }
        5 => reply::raw("nonsense\r\n\r\n")(call),
        6 => reply::slow("slow", Duration::from_millis(30))(call),
        7 => reply::raw_kept("HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n")(call),
        _ => reply::name("good")(call),
    }
}

/// One client: asks in different ways and leaves in different ways.
pub fn misbehave(proxy: &Proxy, draw: &mut Draw) {
    let mut client = proxy.client();
    client.wire.patience(Some(Duration::from_secs(5)));
    let request = match draw.below(6) {
        0 => post("/storm", "a body"),
        1 => "POST /storm HTTP/1.1\r\nHost: a.test\r\nContent-Length: 99\r\n\r\nhalf".into(),
        2 => get("a.test", "/storm", "").repeat(3),
        3 => get("a.test", "/storm", "Bad Name: x\r\n"),
        _ => get("a.test", "/storm", ""),
    };
    // The proxy may have closed before all was sent, as it should.
    let _ = client.wire.write(request.as_bytes());
    match draw.below(4) {
        0 => client.reset(),
        1 => drop(client),
        2 => drop(client.wire.half_close().and_then(|()| client.wire.read_to_end())),
        _ => drop(client.try_response()),
    }
}

#[test]
fn nothing_leaks() {
    let (a, b, gone) = (Origin::start(misbehaving), Origin::start(misbehaving), Origin::refusing());
    let proxy = over(&[&a, &gone])
        .upstream(&b.url(), "max_in_flight: 8")
        .listener("max_in_flight: 32, timeouts: { read: 300ms, idle: 2s }")
        .pool("circuit_breaker: { failure_ratio: 1.0 }")
        .pool("max_in_flight: 16, response_header_timeout: 200ms, keepalive: { idle_timeout: 1s }")
        .top("limits: { max_in_flight: 64 }")
        .start();
    let before = proxy.descriptors();
    thread::scope(|scope| {
        for seed in 0..12 {
            let proxy = &proxy;
            scope.spawn(move || {
                let mut draw = Draw(seed);
                (0..60).for_each(|_| misbehave(proxy, &mut draw));
            });
        }
    });
    eventually(SOON, || in_flight(&proxy) == 0.0);
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
    assert_counts(&proxy, "proxy_upstream_connections", &[], 0.0);
    assert_counts(&proxy, "proxy_panics_total", &[], 0.0);
    eventually(SOON, || proxy.descriptors() <= before);
    // All is free again: as many as there may be at once are served.
    let mut clients: Vec<_> = (0..16).map(|_| proxy.client()).collect();
    for client in &mut clients {
        client.send(get("a.test", "/good", ""));
    }
    let good = clients.iter_mut().filter_map(|c| c.try_response().ok());
    assert_eq!(good.filter(|answer| answer.text() == "good").count(), 16);
    assert!(proxy.lines().iter().all(|line| line["event"] != "exchange_panicked"));
}

#[test]
fn clients_that_drip_do_not_disturb_the_rest() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).listener("timeouts: { read_header: 1s }").start();
    let before = proxy.resident();
    let request = get("a.test", "/drip", "");
    let mut dripping: Vec<_> = (0..200).map(|_| proxy.client()).collect();
    let began = Instant::now();
    let mut slowest = Duration::ZERO;
    for octet in request.as_bytes().chunks(1).take(8) {
        for client in &mut dripping {
            let _ = client.wire.write(octet);
        }
        let asked = Instant::now();
        assert_eq!(proxy.get("/honest").status(), 200);
        slowest = slowest.max(asked.elapsed());
        l7rp_testkit::let_pass(Duration::from_millis(100));
    }
    assert!(slowest < Duration::from_millis(500), "{slowest:?}");
    let each = proxy.resident().saturating_sub(before) / 200;
    assert!(each < 40 << 10, "{each} octets each");
    for client in &mut dripping {
        assert_eq!(client.response().status(), 408);
    }
    assert!(began.elapsed() < Duration::from_secs(5));
    drop(dripping);
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
}

#[test]
fn idle_clients_cost_little() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let mut clients = Vec::new();
    let mut connect = |n| {
        for _ in 0..n {
            let mut client = proxy.client();
            assert_eq!(client.get("/").status(), 200);
            clients.push(client);
        }
        proxy.resident()
    };
    // What a process needs once is not counted.
    let (before, after) = (connect(200), connect(800));
    let each = after.saturating_sub(before) / 800;
    assert!(each < 8 << 10, "{each} octets each");
}

#[test]
fn answers_do_not_mix() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).start();
    thread::scope(|scope| {
        for who in 0..12 {
            let proxy = &proxy;
            scope.spawn(move || {
                let mut client = proxy.client();
                for n in 0..120 {
                    let body = format!("{who}-{n};").repeat(1 + (n * who) % 700);
                    let answer = client.ask(post(&format!("/{who}/{n}"), &body)).text();
                    assert!(answer.starts_with(&format!("POST /{who}/{n} HTTP/1.1\r\n")));
                    assert!(answer.ends_with(&format!("\r\n\r\n{body}")), "{answer}");
                }
            });
        }
    });
    assert_eq!(origin.requests(), 12 * 120);
    // A connection serves many, and never two at once.
    assert!(origin.accepted() <= 2 * 12, "{} connections", origin.accepted());
}
