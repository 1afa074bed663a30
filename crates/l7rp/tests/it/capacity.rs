//! What is full refuses at once; places come back whatever becomes of a request.

use std::io::Read;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use l7rp_testkit::{Call, Client, Gate, Origin, Proxy, SOON, Then, eventually, reply};

use crate::setup::{Setup, assert_counts, assert_failed, get, in_flight, over};
use crate::tls_kit::{Ca, tls};

/// With room for one request: the second is refused, and after the first the third is not.
#[track_caller]
fn has_room_for_one(setup: impl Fn(&Origin) -> Setup, scope: &str) {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("x", &gate));
    let proxy = setup(&origin).start();
    let mut first = proxy.client();
    first.send(get("a.test", "/", ""));
    eventually(SOON, || origin.requests() == 1);
    let mut second = proxy.client();
    for n in 1..3 {
        let began = Instant::now();
        let answer = second.get("/");
        assert!(began.elapsed() < Duration::from_secs(1), "it does not wait");
        let reason = format!("capacity_{scope}");
        assert_failed(&proxy, &answer, 503, "connection_limit_reached", &reason);
        assert_eq!(answer.get("retry-after"), Some("1"));
        let shed = proxy.metrics().sum("proxy_shed_total", &[("scope", scope)]);
        assert_eq!(shed, f64::from(n));
    }
    gate.open();
    assert_eq!(first.response().status(), 200);
    // The connection that was refused on is still good.
    eventually(SOON, || second.get("/").status() == 200);
}

#[test]
fn of_the_process() {
    has_room_for_one(|o| over(&[o]).top("limits: { max_in_flight: 1 }"), "process");
}

#[test]
fn of_a_listener() {
    has_room_for_one(|o| over(&[o]).listener("max_in_flight: 1"), "listener");
}

#[test]
fn of_a_pool() {
    has_room_for_one(|o| over(&[o]).pool("max_in_flight: 1"), "pool");
}

#[test]
fn of_an_upstream() {
    has_room_for_one(|o| over(&[]).upstream(&o.url(), "max_in_flight: 1"), "upstream");
}

/// Does what the target says.
fn erratic(call: &mut Call<'_>) -> Then {
    match call.request.target() {
        "/hang" => reply::hang(call),
        "/reset" => Then::Reset,
        "/close" => reply::close(call),
        "/half" => {
            call.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf");
            Then::Close
        }
        "/stall" => {
            call.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf");
            reply::hang(call)
        }
        "/garbage" => {
            call.send("garbage\r\n\r\n");
            Then::Close
        }
        _ => reply::name("good")(call),
    }
}

#[test]
fn places_come_back_on_every_way_out() {
    let origin = Origin::start(erratic);
    let proxy = over(&[])
        .upstream(&origin.url(), "max_in_flight: 4")
        .listener("max_in_flight: 4, timeouts: { read: 300ms }")
        .pool("max_in_flight: 4, response_header_timeout: 300ms")
        .top("limits: { max_in_flight: 4 }")
        .start();
    for round in 0..3 {
        for target in ["/hang", "/reset", "/close", "/half", "/stall", "/garbage", "/", "/upload"] {
            leave(&proxy, &origin, target, round);
        }
    }
    let active = [("state", "active")];
    assert_counts(&proxy, "proxy_upstream_connections", &active, 0.0);
    all_four_places_are_free(&proxy, &origin);
}

/// Four requests that hang are all let in.
#[track_caller]
fn all_four_places_are_free(proxy: &Proxy, origin: &Origin) {
    let before = origin.requests();
    let mut clients: Vec<_> = (0..4).map(|_| proxy.client()).collect();
    for client in &mut clients {
        client.send(get("a.test", "/hang", ""));
    }
    eventually(SOON, || origin.requests() == before + 4);
    assert!(clients.into_iter().all(|mut c| c.response().status() == 504));
}

/// Asks and leaves: in order, with a reset, or at the end of the answer.
fn leave(proxy: &Proxy, origin: &Origin, target: &str, round: usize) {
    let before = origin.requests();
    let mut client = proxy.client();
    if target == "/upload" {
        client.send("POST /upload HTTP/1.1\r\nHost: a.test\r\nContent-Length: 9\r\n\r\nhalf");
    } else {
        client.send(get("a.test", target, ""));
    }
    eventually(SOON, || origin.requests() > before);
    match round {
        0 => drop(client.try_response()),
        1 => client.reset(),
        _ => drop(client),
    }
    eventually(SOON, || in_flight(proxy) == 0.0);
}

#[test]
fn no_more_connections_than_allowed() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).listener("max_connections: 2").start();
    let mut clients: Vec<_> = (0..2).map(|_| proxy.client()).collect();
    for client in &mut clients {
        assert_eq!(client.get("/").status(), 200);
    }
    let mut third = proxy.client();
    let answer = third.response();
    assert_eq!((answer.status(), answer.get("retry-after")), (503, Some("1")));
    assert!(answer.get("proxy-status").is_some_and(|s| s.contains("capacity_connections")));
    assert!(third.is_closed_within(SOON));
    let metrics = proxy.metrics();
    assert_eq!(metrics.sum("proxy_shed_total", &[("scope", "connections")]), 1.0);
    assert_eq!(metrics.sum("proxy_connections", &[("listener", "web")]), 2.0);
    clients.pop();
    eventually(SOON, || proxy.metrics().sum("proxy_connections", &[]) == 1.0);
    assert_eq!(proxy.get("/").status(), 200);
    assert_eq!(clients[0].get("/").status(), 200);
}

#[test]
fn nothing_is_said_in_clear_where_tls_is_spoken() {
    let origin = Origin::start(reply::name("x"));
    let (ca, keys) = (Ca::new("ca"), "max_connections: 1");
    let pair = ca.issue("web", &["a.test"]);
    let proxy = over(&[&origin]).listener(&format!("{keys}, {}", tls(&[&pair], ""))).start();
    let _first = TcpStream::connect(proxy.address()).expect("it accepts");
    eventually(SOON, || proxy.metrics().sum("proxy_connections", &[]) == 1.0);
    let mut second = TcpStream::connect(proxy.address()).expect("it accepts");
    second.set_read_timeout(Some(SOON)).expect("an open socket");
    let mut said = Vec::new();
    let _ = second.read_to_end(&mut said);
    assert_eq!(said.escape_ascii().to_string(), "");
    eventually(SOON, || {
        proxy.metrics().sum("proxy_shed_total", &[("scope", "connections")]) == 1.0
    });
}

#[test]
fn descriptors_come_back() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).pool("keepalive: { idle_timeout: 100ms }").start();
    let before = proxy.descriptors();
    let clients: Vec<Client> = (0..50)
        .map(|_| {
            let mut client = proxy.client();
            assert_eq!(client.get("/").status(), 200);
            client
        })
        .collect();
    assert!(proxy.descriptors() >= before + 50);
    drop(clients);
    eventually(SOON, || proxy.descriptors() <= before);
}

#[test]
fn a_shortage_of_descriptors_is_nobodys_fault_and_passes() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).one_worker().start();
    // Room for one client, and none for an upstream.
    proxy.limit_descriptors(room_for_one(&proxy));
    let mut client = proxy.client();
    let answer = client.get("/short");
    assert_eq!((answer.status(), answer.get("retry-after")), (503, Some("1")));
    assert!(answer.get("proxy-status").is_some_and(|s| s.contains("local_shortage")), "{answer:?}");
    let mut waiting = proxy.client();
    waiting.send(get("a.test", "/waited", ""));
    let event = proxy.wait_for_event("accept_failed", |_| true, SOON);
    assert_eq!(event["listener"], "web");
    proxy.limit_descriptors(1000);
    assert_eq!(waiting.response().status(), 200);
    assert_eq!(client.get("/").status(), 200);
    assert_eq!(proxy.logged_path("/short")["reason"], "local_shortage");
    let errors = proxy.metrics().sum("proxy_upstream_requests_total", &[("status", "err")]);
    assert_eq!(errors, 0.0);
}

/// A limit below which one descriptor is free.
fn room_for_one(proxy: &Proxy) -> usize {
    let directory = format!("/proc/{}/fd", proxy.pid());
    let names = std::fs::read_dir(directory).expect("it runs").flatten();
    let used: Vec<usize> =
        names.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    (0..).filter(|n| !used.contains(n)).nth(1).expect("there are more numbers")
}
