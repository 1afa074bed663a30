//! What is full refuses at once, lets in exactly as many as leave, and neither blames upstreams
//! nor makes anything try again. The limits one by one, and places that come back after every
//! kind of failure, are in `capacity`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use l7rp_testkit::{Client, Gate, Origin, Proxy, SOON, eventually, reply};

use crate::setup::{Setup, assert_counts, assert_failed, get, in_flight, over, post};
use crate::tries::{PLENTY, assert_at_rest, attempts, breaker, requests, says, transitions};

/// Gates by target, made when asked for.
#[derive(Clone, Debug, Default)]
struct Gates(Arc<Mutex<HashMap<String, Gate>>>);

impl Gates {
    fn of(&self, target: &str) -> Gate {
        let mut gates = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        gates.entry(target.to_owned()).or_default().clone()
    }
}

/// An upstream that holds every request until its gate opens.
fn holding(gates: &Gates) -> Origin {
    let gates = gates.clone();
    Origin::start(move |call| {
        let gate = gates.of(call.request.target());
        gate.pass();
        says(200, "let go")(call)
    })
}

/// Clients whose requests for `/{n}` are held at the upstream.
#[track_caller]
fn held(proxy: &Proxy, origin: &Origin, numbers: std::ops::Range<usize>) -> Vec<Client> {
    let before = origin.requests();
    let many = numbers.len();
    let clients = numbers
        .map(|n| {
            let mut client = proxy.client();
            client.send(get("a.test", &format!("/{n}"), ""));
            client
        })
        .collect();
    eventually(SOON, || origin.requests() == before + many);
    clients
}

/// Each place that can be full.
const SCOPES: [&str; 4] = ["process", "listener", "pool", "upstream"];

/// With room for so many there.
fn full_at(scope: &str, room: usize, origin: &Origin) -> Setup {
    let key = format!("max_in_flight: {room}");
    match scope {
        "process" => over(&[origin]).top(&format!("limits: {{ {key} }}")),
        "listener" => over(&[origin]).listener(&key),
        "pool" => over(&[origin]).pool(&key),
        _ => over(&[]).upstream(&origin.url(), &key),
    }
}

/// L1.
#[test]
fn all_that_is_over_is_refused_at_once() {
    const MORE: usize = 300;
    for scope in SCOPES {
        let gates = Gates::default();
        let origin = holding(&gates);
        let proxy = full_at(scope, 4, &origin).top("access_log: { enabled: false }").start();
        let clients = held(&proxy, &origin, 0..4);
        let mut client = proxy.client();
        let mut took: Vec<Duration> = (0..MORE)
            .map(|n| {
                let began = Instant::now();
                let answer = client.get(&format!("/more/{n}"));
                assert_eq!((answer.status(), answer.get("retry-after")), (503, Some("1")));
                began.elapsed()
            })
            .collect();
        took.sort();
        let (half, last) = (took[MORE / 2], took[MORE - 1]);
        assert!(half < Duration::from_millis(30), "{scope}: {half:?}");
        assert!(last < Duration::from_secs(1), "{scope}: {last:?}");
        assert_counts(&proxy, "proxy_shed_total", &[("scope", scope)], MORE as f64);
        assert_counts(&proxy, "proxy_shed_total", &[], MORE as f64);
        // None of them has waited for anything.
        (0..4).for_each(|n| gates.of(&format!("/{n}")).open());
        for mut client in clients {
            assert_eq!(client.response().text(), "let go");
        }
        assert_at_rest(&proxy);
        assert_eq!(origin.requests(), 4, "{scope}");
    }
}

/// L2.
#[test]
fn for_each_that_leaves_exactly_one_is_let_in() {
    const ROOM: usize = 3;
    for scope in SCOPES {
        let gates = Gates::default();
        let origin = holding(&gates);
        let proxy = full_at(scope, ROOM, &origin).start();
        let mut clients = held(&proxy, &origin, 0..ROOM);
        for n in 0..4 {
            gates.of(&format!("/{n}")).open();
            assert_eq!(clients[n].response().text(), "let go", "{scope}");
            eventually(SOON, || in_flight(&proxy) == ROOM as f64 - 1.0);
            // The place is free a moment after the last octet of the answer.
            let next = format!("/{}", n + ROOM);
            let one = within_room(&proxy, &origin, &next);
            clients.push(one);
            for _ in 0..4 {
                assert_eq!(proxy.get("/more").status(), 503, "{scope}");
            }
            assert_eq!(origin.requests(), ROOM + n + 1, "{scope}");
        }
        (0..9).for_each(|n| gates.of(&format!("/{n}")).open());
        for client in &mut clients[4..] {
            assert_eq!(client.response().text(), "let go", "{scope}");
        }
        assert_at_rest(&proxy);
    }
}

/// Asks until it is let in.
fn within_room(proxy: &Proxy, origin: &Origin, path: &str) -> Client {
    let before = origin.requests();
    let asked = l7rp_testkit::within(SOON, || {
        let mut client = proxy.client();
        client.send(get("a.test", path, ""));
        client.wire.patience(Some(Duration::from_millis(20)));
        loop {
            if origin.requests() > before {
                return Some(client);
            }
            if let Ok(head) = client.wire.read_head() {
                assert_eq!(head.expect("an answer").status(), 503);
                return None;
            }
        }
    });
    let client = asked.expect("there is room");
    client.wire.patience(Some(SOON));
    assert_eq!(origin.requests(), before + 1);
    client
}

/// L3.
#[test]
fn clients_that_vanish_leave_their_places() {
    const ROOM: usize = 40;
    for scope in SCOPES {
        let origin = Origin::start(reply::hang);
        let proxy = full_at(scope, ROOM, &origin).start();
        for _ in 0..2 {
            let clients = held(&proxy, &origin, 0..ROOM);
            assert_eq!(proxy.get("/more").status(), 503, "{scope}");
            let left = Instant::now();
            clients.into_iter().for_each(Client::reset);
            eventually(SOON, || in_flight(&proxy) == 0.0);
            let took = left.elapsed();
            assert!(took < Duration::from_secs(1), "{scope}: {took:?}");
        }
        eventually(SOON, || origin.open() == 0);
        assert_at_rest(&proxy);
    }
}

/// L4: the proxy's own endpoints.
#[test]
fn the_admin_endpoints_are_not_refused() {
    let gates = Gates::default();
    let origin = holding(&gates);
    let proxy = over(&[&origin])
        .listener("max_in_flight: 1")
        .pool("max_in_flight: 1")
        .top("limits: { max_in_flight: 1 }")
        .start();
    let mut clients = held(&proxy, &origin, 0..1);
    assert_eq!(proxy.get("/more").status(), 503);
    for (path, status) in [("/metrics", 200), ("/-/healthz", 200), ("/-/ready", 200)] {
        assert_eq!(proxy.ask_admin(path).status(), status, "{path}");
    }
    assert_eq!(proxy.ask_admin("/livez").start.split(' ').nth(1), Some("204"));
    gates.of("/0").open();
    assert_eq!(clients[0].response().text(), "let go");
    assert_at_rest(&proxy);
}

/// L4: nobody is blamed, and nothing is tried again.
#[test]
fn what_is_full_is_no_failure_of_an_upstream() {
    const STRICT: &str = "circuit_breaker: { consecutive_failures: 1 }";
    for scope in SCOPES {
        let gates = Gates::default();
        let origin = holding(&gates);
        let proxy = full_at(scope, 1, &origin)
            .pool(PLENTY)
            .pool(STRICT)
            .route("middleware: [{ retry: { max_attempts: 5, backoff: 1ms } }]")
            .start();
        let mut clients = held(&proxy, &origin, 0..1);
        let mut client = proxy.client();
        for n in 0..5 {
            let path = format!("/more/{n}");
            let answer = client.get(&path);
            let reason = format!("capacity_{scope}");
            assert_failed(&proxy, &answer, 503, "connection_limit_reached", &reason);
            assert_eq!(attempts(&proxy, &path), 0, "{scope}");
        }
        assert_counts(&proxy, "proxy_shed_total", &[("scope", scope)], 5.0);
        assert_eq!((breaker(&proxy, &origin), transitions(&proxy)), (0.0, 0.0), "{scope}");
        let metrics = proxy.metrics();
        assert_eq!(metrics.sum("proxy_upstream_requests_total", &[]), 0.0, "{scope}");
        assert_eq!(metrics.sum("proxy_retry_attempts_total", &[]), 0.0, "{scope}");
        assert_eq!(metrics.sum("proxy_retry_budget_exhausted_total", &[]), 0.0, "{scope}");
        gates.of("/0").open();
        assert_eq!(clients[0].response().text(), "let go");
        assert_at_rest(&proxy);
    }
}

#[test]
fn a_refused_upload_is_not_waited_for() {
    let gates = Gates::default();
    let origin = holding(&gates);
    let proxy = over(&[&origin]).pool("max_in_flight: 1").start();
    let mut clients = held(&proxy, &origin, 0..1);
    let mut client = proxy.client();
    client.send("POST /up HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1000000\r\n\r\nbegin");
    let answer = client.response();
    assert_failed(&proxy, &answer, 503, "connection_limit_reached", "capacity_pool");
    // A short one may leave the connection as it was.
    let mut client = proxy.client();
    for _ in 0..3 {
        let answer = client.ask(post("/up", "GET /smuggled HTTP/1.1\r\nHost: a.test\r\n\r\n"));
        assert_eq!(answer.status(), 503);
        if answer.get("connection") == Some("close") {
            client = proxy.client();
        }
    }
    gates.of("/0").open();
    assert_eq!(clients[0].response().text(), "let go");
    assert_eq!(origin.requests(), 1);
    assert_at_rest(&proxy);
}

#[test]
fn a_retry_finds_no_room_either() {
    let gates = Gates::default();
    let full = holding(&gates);
    let busy = Origin::start(says(503, "busy"));
    let proxy = over(&[&busy])
        .upstream(&full.url(), "max_in_flight: 1")
        .pool("selector: { algorithm: round-robin }")
        .pool(PLENTY)
        .pool(crate::tries::NEVER_OPENS)
        .route("middleware: [{ retry: { max_attempts: 2, backoff: 1ms } }]")
        .start();
    // A POST, so that it stays where it is.
    let mut held = proxy.client();
    held.send(post("/0", ""));
    if l7rp_testkit::within(Duration::from_millis(300), || (full.requests() == 1).then_some(()))
        .is_none()
    {
        assert_eq!(held.response().status(), 503);
        held.send(post("/0", ""));
        eventually(SOON, || full.requests() == 1);
    }
    for _ in 0..4 {
        let answer = proxy.get("/busy");
        assert_eq!((answer.status(), answer.text().as_str()), (503, "busy"));
        assert_eq!(answer.get("proxy-status"), None);
    }
    assert_eq!(full.requests(), 1);
    assert_eq!(proxy.metrics().sum("proxy_shed_total", &[]), 0.0);
    gates.of("/0").open();
    assert_eq!(held.response().text(), "let go");
    assert_eq!(requests(&[full]), 1);
    assert_at_rest(&proxy);
}
