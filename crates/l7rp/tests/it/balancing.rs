//! Each algorithm over real upstreams.

use std::collections::HashMap;
use std::time::Duration;

use l7rp_testkit::{Gate, Origin, Proxy, SOON, eventually, reply};

use crate::setup::{client_from, get, in_flight, over};

fn named() -> (Origin, Origin) {
    (Origin::start(reply::name("a")), Origin::start(reply::name("b")))
}

/// Names of the upstreams that answer `n` requests one after another, each on a connection
/// of its own, so that all workers have a part in it.
fn ask(proxy: &Proxy, n: usize) -> String {
    (0..n).map(|_| proxy.get("/").text()).collect()
}

#[test]
fn round_robin_alternates() {
    let (a, b) = named();
    let proxy = over(&[&a, &b]).pool("selector: { algorithm: round-robin }").start();
    let order = ask(&proxy, 8);
    assert!(order == "abababab" || order == "babababa", "{order}");
}

#[test]
fn weighted_rr_follows_the_weights_interleaved() {
    let (a, b) = named();
    let proxy = over(&[])
        .upstream(&a.url(), "weight: 3")
        .upstream(&b.url(), "weight: 1")
        .pool("selector: { algorithm: weighted-rr }")
        .start();
    let order = ask(&proxy, 16);
    assert_eq!(order.matches('b').count(), 4, "{order}");
    assert!(!order.contains("bb") && !order.contains("aaaa"), "{order}");
}

#[test]
fn least_conn_avoids_the_busy_one() {
    let gate = Gate::default();
    let script = |name: &'static str| {
        let (held, free) = (reply::held(name, &gate), reply::name(name));
        move |call: &mut l7rp_testkit::Call<'_>| {
            if call.request.target() == "/held" { held(call) } else { free(call) }
        }
    };
    let (a, b) = (Origin::start(script("a")), Origin::start(script("b")));
    let proxy = over(&[&a, &b]).pool("selector: { algorithm: least-conn }").start();
    let mut busy = proxy.client();
    busy.send(get("a.test", "/held", ""));
    eventually(SOON, || a.requests() + b.requests() == 1);
    let free = if a.requests() == 0 { "a" } else { "b" };
    for _ in 0..12 {
        assert_eq!(proxy.get("/").text(), free);
        eventually(SOON, || in_flight(&proxy) == 1.0);
    }
    gate.open();
    assert_ne!(busy.response().text(), free);
    eventually(SOON, || in_flight(&proxy) == 0.0);
}

#[test]
fn p2c_ewma_avoids_the_slow_one() {
    let slow = Origin::start(reply::slow("s", Duration::from_millis(60)));
    let fast = Origin::start(reply::name("f"));
    let proxy = over(&[&slow, &fast]).pool("selector: { algorithm: p2c-ewma }").start();
    let order = ask(&proxy, 40);
    assert!(order.matches('s').count() <= 6, "{order}");
    assert!(order.ends_with("ffffffffff"), "{order}");
}

#[test]
fn p2c_ewma_is_the_default() {
    let slow = Origin::start(reply::slow("s", Duration::from_millis(60)));
    let fast = Origin::start(reply::name("f"));
    let order = ask(&over(&[&slow, &fast]).start(), 24);
    assert!(order.matches('s').count() <= 6, "{order}");
}

#[test]
fn the_hash_of_a_cookie_sticks() {
    let (a, b) = named();
    let proxy = over(&[&a, &b])
        .pool("selector: { algorithm: consistent-hash-bounded, hash_key: \"cookie:sid\" }")
        .start();
    let mut seen = HashMap::<String, usize>::new();
    for user in 0..24 {
        let lines = format!("Cookie: other={user}; sid=user-{user}\r\n");
        let of_user: Vec<_> = (0..3)
            .map(|n| {
                // What else is in the line is nothing to the hash.
                let lines =
                    format!("{}Cookie: n={n}\r\n", lines.replace("other", &"o".repeat(n + 1)));
                proxy.client().ask(get("a.test", "/", &lines)).text()
            })
            .collect();
        assert!(of_user.iter().all(|name| *name == of_user[0]), "user {user}: {of_user:?}");
        *seen.entry(of_user[0].clone()).or_default() += 1;
    }
    assert!(seen.len() == 2 && seen.values().all(|&n| n >= 3), "{seen:?}");
}

#[test]
fn a_hash_of_a_header_sticks_and_falls_back_to_the_address() {
    let (a, b) = named();
    let proxy = over(&[&a, &b])
        .pool("selector: { algorithm: consistent-hash-bounded, hash_key: \"header:X-User\" }")
        .start();
    let mut names = std::collections::HashSet::new();
    for user in 0..16 {
        let request = get("a.test", "/", &format!("x-user: {user}\r\n"));
        let first = proxy.client().ask(&request).text();
        assert_eq!(proxy.client().ask(&request).text(), first);
        names.insert(first);
    }
    assert_eq!(names.len(), 2);
    let without = ask(&proxy, 6);
    assert!(without == "aaaaaa" || without == "bbbbbb", "{without}");
}

#[test]
fn ip_hash_sticks() {
    let (a, b) = named();
    let proxy = over(&[&a, &b]).pool("selector: { algorithm: ip-hash }").start();
    let mut seen = std::collections::HashSet::new();
    for last in 2..26 {
        let first = client_from(last, &proxy).get("/").text();
        for _ in 0..2 {
            assert_eq!(client_from(last, &proxy).get("/").text(), first, "127.0.0.{last}");
        }
        seen.insert(first);
    }
    assert_eq!(seen.len(), 2);
}

#[test]
fn an_upstream_at_its_own_limit_is_passed_over() {
    let gate = Gate::default();
    let limited = Origin::start(reply::held("limited", &gate));
    let free = Origin::start(reply::name("free"));
    let proxy = over(&[&free])
        .upstream(&limited.url(), "max_in_flight: 1")
        .pool("selector: { algorithm: round-robin }")
        .start();
    let mut clients: Vec<_> = (0..2).map(|_| proxy.client()).collect();
    for client in &mut clients {
        client.send(get("a.test", "/", ""));
    }
    eventually(SOON, || limited.requests() == 1 && free.requests() == 1);
    for _ in 0..6 {
        assert_eq!(proxy.get("/").text(), "free");
    }
    gate.open();
    let mut names: Vec<_> = clients.iter_mut().map(|c| c.response().text()).collect();
    names.sort();
    assert_eq!(names, ["free", "limited"]);
    eventually(SOON, || proxy.get("/").text() == "limited");
}
