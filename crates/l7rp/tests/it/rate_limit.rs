//! A route's rate is kept: who asks more often is told when to come again, and nobody can ask
//! in another's name.

use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Client, Gate, Origin, Proxy, eventually, let_pass, reply};

use crate::setup::{
    Setup, assert_counts, assert_failed, client_from, get, in_flight, over, post, start,
};

/// So few that none comes back during a test.
const SELDOM: &str = "per_ip_rps: 0.01, burst: 5";

fn limited(origin: &Origin, keys: &str) -> Setup {
    over(&[origin]).route(&format!("middleware: [{{ rate_limit: {{ {keys} }} }}]"))
}

/// Asks `n` times; how often it was let in. Whoever is not is told when to come again.
#[track_caller]
fn let_in(client: &mut Client, n: usize, request: impl Fn(usize) -> String) -> usize {
    let mut count = 0;
    for n in 0..n {
        let answer = client.ask(request(n));
        if answer.status() == 200 {
            count += 1;
            continue;
        }
        assert_eq!(answer.status(), 429, "{answer:?}");
        let seconds: u32 = answer.get("retry-after").and_then(|s| s.parse().ok()).expect("seconds");
        assert!(seconds >= 1, "{answer:?}");
        assert_eq!(answer.get("x-ratelimit-remaining"), Some("0"), "{answer:?}");
    }
    count
}

fn plain(_: usize) -> String {
    get("a.test", "/", "")
}

#[test]
fn a_burst_is_let_in_and_what_is_more_is_refused() {
    let origin = Origin::start(reply::name("x"));
    let proxy = limited(&origin, SELDOM).start();
    let mut client = proxy.client();
    for _ in 0..5 {
        assert_eq!(client.get("/").status(), 200);
    }
    for n in 1..4 {
        let answer = client.get("/more");
        assert_failed(&proxy, &answer, 429, "http_request_denied", "rate_limited");
        assert_eq!(answer.get("x-ratelimit-remaining"), Some("0"));
        // One comes each 100 s.
        let seconds: u32 = answer.get("retry-after").and_then(|s| s.parse().ok()).expect("seconds");
        assert!((90..=100).contains(&seconds), "{seconds}");
        assert_counts(&proxy, "proxy_rate_limited_total", &[("route", "r")], f64::from(n));
    }
    assert_eq!(origin.requests(), 5);
    assert_counts(&proxy, "proxy_requests_total", &[("status", "429")], 3.0);
    let line = proxy.logged_path("/more");
    assert_eq!((&line["route"], &line["level"]), (&"r".into(), &"warn".into()));
    assert_eq!(in_flight(&proxy), 0.0);
}

#[test]
fn a_refused_body_leaves_the_connection_in_order() {
    let origin = Origin::start(reply::name("x"));
    let proxy = limited(&origin, "per_ip_rps: 4, burst: 1").start();
    let mut client = proxy.client();
    assert_eq!(client.ask(post("/", "first")).status(), 200);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        // What looks like a request in a body is none.
        let answer = client.ask(post("/", "GET /smuggled HTTP/1.1\r\nHost: a.test\r\n\r\n"));
        if answer.status() == 200 {
            break;
        }
        assert_eq!(answer.status(), 429);
        if answer.get("connection") == Some("close") {
            client = proxy.client();
        }
    }
    assert_eq!(origin.requests(), 2);
    assert!(origin.seen().iter().all(|seen| seen.message.target() == "/"));
    // Nor is a large one waited for.
    let head = "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 100000\r\n\r\nbegin";
    assert_eq!(proxy.client().ask(head).status(), 429);
    assert_eq!(in_flight(&proxy), 0.0);
}

#[test]
fn it_fills_up_again_at_its_rate() {
    let origin = Origin::start(reply::name("x"));
    let proxy = limited(&origin, "per_ip_rps: 10, burst: 2").start();
    let mut client = proxy.client();
    let began = Instant::now();
    let mut count = 0;
    while began.elapsed() < Duration::from_millis(1500) {
        count += let_in(&mut client, 1, plain);
        let_pass(Duration::from_millis(2));
    }
    let most = 2.0 + began.elapsed().as_secs_f64() * 10.0;
    assert!(f64::from(count as u32) <= most + 0.5, "{count}, {most}");
    assert!(count >= 8, "{count}, {most}");
    // Never more than a burst is saved up.
    let_pass(Duration::from_millis(500));
    let asked = Instant::now();
    let count = let_in(&mut client, 20, plain);
    let most = 2.0 + asked.elapsed().as_secs_f64() * 10.0;
    assert!(count >= 2 && f64::from(count as u32) <= most + 0.5, "{count}, {most}");
}

#[test]
fn who_waits_as_told_is_let_in() {
    let origin = Origin::start(reply::name("x"));
    let proxy = limited(&origin, "per_ip_rps: 0.8, burst: 1").start();
    let mut client = proxy.client();
    assert_eq!(client.get("/").status(), 200);
    let answer = client.get("/");
    assert_eq!((answer.status(), answer.get("retry-after")), (429, Some("2")));
    let_pass(Duration::from_secs(2));
    assert_eq!(client.get("/").status(), 200);
}

#[test]
fn each_address_has_its_own() {
    let origin = Origin::start(reply::name("x"));
    let proxy = limited(&origin, SELDOM).start();
    for last in 2..5 {
        assert_eq!(let_in(&mut client_from(last, &proxy), 9, plain), 5, "127.0.0.{last}");
        // Not for each connection.
        assert_eq!(let_in(&mut client_from(last, &proxy), 3, plain), 0, "127.0.0.{last}");
    }
    assert_eq!(origin.requests(), 15);
}

#[test]
fn a_route_may_have_one_for_all() {
    let origin = Origin::start(reply::name("x"));
    let proxy = limited(&origin, &format!("scope: per-route, {SELDOM}")).start();
    let count: usize = (2..12).map(|last| let_in(&mut client_from(last, &proxy), 1, plain)).sum();
    assert_eq!((count, origin.requests()), (5, 5));
}

#[test]
fn each_route_has_its_own() {
    let origin = Origin::start(reply::name("x"));
    let rule =
        |scope: &str| format!("middleware: [{{ rate_limit: {{ scope: {scope}, {SELDOM} }} }}]");
    let proxy = over(&[&origin])
        .top(&format!("- {{ name: ip, path_prefix: /ip, pool: b, {} }}", rule("per-ip")))
        .top(&format!("- {{ name: too, path_prefix: /too, pool: b, {} }}", rule("per-ip")))
        .top(&format!("- {{ name: all, path_prefix: /all, pool: b, {} }}", rule("per-route")))
        .start();
    let mut client = proxy.client();
    for path in ["/ip", "/too", "/all"] {
        assert_eq!(let_in(&mut client, 8, |_| get("a.test", path, "")), 5, "{path}");
    }
    for (route, refused) in [("ip", 3.0), ("too", 3.0), ("all", 3.0), ("r", 0.0)] {
        assert_counts(&proxy, "proxy_rate_limited_total", &[("route", route)], refused);
    }
    assert_eq!(let_in(&mut client, 20, plain), 20, "the route without a limit");
}

#[test]
fn many_at_once_get_no_more() {
    let origin = Origin::start(reply::name("x"));
    let proxy = limited(&origin, "per_ip_rps: 0.01, burst: 20").start();
    let count: usize = thread::scope(|scope| {
        let proxy = &proxy;
        let clients: Vec<_> =
            (0..8).map(|_| scope.spawn(move || let_in(&mut proxy.client(), 15, plain))).collect();
        clients.into_iter().map(|client| client.join().expect("answers")).sum()
    });
    assert_eq!((count, origin.requests()), (20, 20));
    assert_counts(&proxy, "proxy_rate_limited_total", &[("route", "r")], 100.0);
}

#[test]
fn who_is_refused_takes_no_place() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("x", &gate));
    let proxy = limited(&origin, SELDOM)
        .pool("max_in_flight: 5")
        .top("limits: { max_in_flight: 5 }")
        .start();
    let mut held: Vec<_> = (0..5).map(|_| proxy.client()).collect();
    for client in &mut held {
        client.send(plain(0));
    }
    eventually(l7rp_testkit::SOON, || origin.requests() == 5);
    // Not that the proxy is full.
    assert_eq!(let_in(&mut proxy.client(), 3, plain), 0);
    gate.open();
    assert!(held.iter_mut().all(|client| client.response().status() == 200));
    eventually(l7rp_testkit::SOON, || in_flight(&proxy) == 0.0);
}

/// The address in the log of the request for this path.
fn logged(proxy: &Proxy, path: &str) -> String {
    proxy.logged_path(path)["client_ip"].as_str().unwrap_or_default().to_owned()
}

fn forwarded(path: &str, lines: &[&str]) -> String {
    let lines = lines
        .iter()
        .fold(String::new(), |lines, line| format!("{lines}X-Forwarded-For: {line}\r\n"));
    get("a.test", path, &lines)
}

/// Case `limits-xff-rotation`.
#[test]
fn limits_xff_rotation() {
    let origin = Origin::start(reply::name("x"));
    let proxy = limited(&origin, SELDOM).listener("trusted_proxies: [127.0.0.2/32]").start();
    let mut stranger = client_from(3, &proxy);
    let mut trusted = client_from(2, &proxy);
    let rotating = |n: usize| format!("198.51.100.{n}");
    let count = let_in(&mut stranger, 20, |n| forwarded("/a", &[&rotating(n)]));
    assert_eq!((count, logged(&proxy, "/a").as_str()), (5, "127.0.0.3"));
    // Whose name was used is not the worse for it.
    let count = let_in(&mut trusted, 1, |_| forwarded("/forged", &["198.51.100.0"]));
    assert_eq!((count, logged(&proxy, "/forged").as_str()), (1, "198.51.100.0"));
    let count =
        let_in(&mut trusted, 20, |n| forwarded("/b", &[&format!("{}, 203.0.113.7", rotating(n))]));
    assert_eq!((count, logged(&proxy, "/b").as_str()), (5, "203.0.113.7"));
    // The same client through two trusted ones.
    let count = let_in(&mut trusted, 5, |n| {
        forwarded("/c", &[&format!("{}, 203.0.113.7, 127.0.0.2", rotating(n))])
    });
    assert_eq!((count, logged(&proxy, "/c").as_str()), (0, "203.0.113.7"));
    let count = let_in(&mut trusted, 20, |n| {
        forwarded("/d", &[&format!("203.0.113.{}, nobody-{n}", 100 + n)])
    });
    assert_eq!((count, logged(&proxy, "/d").as_str()), (5, "127.0.0.2"));
    // Two lines are one list.
    let count = let_in(&mut trusted, 20, |n| forwarded("/e", &[&rotating(n), "203.0.113.8"]));
    assert_eq!((count, logged(&proxy, "/e").as_str()), (5, "203.0.113.8"));
    assert_eq!(origin.requests(), 5 + 1 + 5 + 5 + 5);
}

/// Case `limits-xff-rotation`, F.
#[test]
fn limits_forwarded_names_the_client() {
    let origin = Origin::start(reply::name("x"));
    let proxy = limited(&origin, SELDOM).listener("trusted_proxies: [127.0.0.2/32]").start();
    let mut trusted = client_from(2, &proxy);
    let count = let_in(&mut trusted, 20, |_| {
        get("a.test", "/f", "Forwarded: for=\"[2001:db8::1]:1234\"\r\n")
    });
    assert_eq!((count, logged(&proxy, "/f").as_str()), (5, "2001:db8::1"));
    assert_eq!(let_in(&mut trusted, 9, plain), 5, "the peer has its own");
}

#[test]
fn version_6_counts_by_network() {
    let origin = Origin::start(reply::name("x"));
    let proxy = limited(&origin, SELDOM).listener("trusted_proxies: [127.0.0.2/32]").start();
    let mut trusted = client_from(2, &proxy);
    for network in ["2001:db8:0:1", "2001:db8:0:2", "2001:db8:1:1"] {
        let count =
            let_in(&mut trusted, 20, |n| forwarded("/six", &[&format!("{network}:{n}::{n}")]));
        assert_eq!(count, 5, "{network}");
    }
    // An address of version 4 is one, however it is written.
    for last in [1, 2] {
        let count =
            let_in(&mut trusted, 9, |_| forwarded("/map", &[&format!("::ffff:203.0.113.{last}")]));
        assert_eq!(count, 5, "{last}");
        let count = let_in(&mut trusted, 3, |_| forwarded("/4", &[&format!("203.0.113.{last}")]));
        assert_eq!(count, 0, "{last}");
    }
}

#[test]
fn hops_are_counted_from_the_right() {
    let origin = Origin::start(reply::name("x"));
    let two_hops = format!("middleware: [{{ rate_limit: {{ trust_proxy_hops: 2, {SELDOM} }} }}]");
    let proxy = limited(&origin, &format!("trust_proxy_hops: 1, {SELDOM}"))
        .top(&format!("- {{ name: two, path_prefix: /two, pool: b, {two_hops} }}"))
        .start();
    let mut client = client_from(4, &proxy);
    let count =
        let_in(&mut client, 20, |n| forwarded("/one", &[&format!("198.51.100.{n}, 203.0.113.7")]));
    assert_eq!(count, 5);
    // It is its own key only.
    assert_eq!(logged(&proxy, "/one"), "127.0.0.4");
    // The same client through another proxy, and another client.
    let mut other = client_from(5, &proxy);
    assert_eq!(let_in(&mut other, 3, |_| forwarded("/one", &["203.0.113.7"])), 0);
    assert_eq!(let_in(&mut other, 3, |_| forwarded("/one", &["203.0.113.8"])), 3);
    // Without one that can be read it is the peer.
    assert_eq!(let_in(&mut client, 9, plain), 5);
    for junk in ["nobody", "203.0.113.9, 999.1.1.1", "203.0.113.9, unknown"] {
        assert_eq!(let_in(&mut client, 2, |_| forwarded("/", &[junk])), 0, "{junk}");
    }
    let count = let_in(&mut client, 20, |n| {
        forwarded("/two", &[&format!("198.51.100.{n}, 203.0.113.7, 10.0.0.{n}")])
    });
    assert_eq!(count, 5, "the second from the right");
    let count =
        let_in(&mut client, 3, |n| forwarded("/two", &["203.0.113.7", &format!("10.0.0.{n}")]));
    assert_eq!(count, 0, "two lines are one list");
    let count = let_in(&mut client, 20, |n| forwarded("/two", &[&format!("10.0.1.{n}")]));
    assert_eq!(count, 5, "the peer, where there are not as many");
}

/// Sends requests from so many made-up addresses, many at a time; how many were let in.
fn spoof(proxy: &Proxy, from: u32, to: u32) -> usize {
    const AT_ONCE: u32 = 100;
    let mut client = proxy.client();
    let mut count = 0;
    for first in (from..to).step_by(AT_ONCE as usize) {
        let requests: String = (first..first + AT_ONCE)
            .map(|n| forwarded("/", &[&std::net::Ipv4Addr::from(0x0a00_0000 + n).to_string()]))
            .collect();
        client.send(requests);
        count += (0..AT_ONCE).filter(|_| client.response().status() == 200).count();
    }
    count
}

#[test]
fn many_made_up_addresses_take_little_memory_and_hide_nobody() {
    const MANY: u32 = 100_000;
    // No upstream: what is measured is the limit.
    let proxy = start(&format!(
        "listeners:\n- {{ name: web, bind: \"127.0.0.1:0\" }}\n\
         routes:\n- {{ name: r, respond: {{ status: 200, body: x }}, \
         middleware: [{{ rate_limit: {{ trust_proxy_hops: 1, {SELDOM} }} }}] }}\n\
         access_log: {{ enabled: false }}"
    ));
    let of = |address: &str| let_in(&mut proxy.client(), 9, |_| forwarded("/", &[address]));
    assert_eq!(of("203.0.113.7"), 5);
    let flood = |from: u32, to: u32| -> usize {
        let part = (to - from) / 4;
        thread::scope(|scope| {
            let proxy = &proxy;
            let parts: Vec<_> = (0..4)
                .map(|n| (from + n * part, from + (n + 1) * part))
                .map(|(from, to)| scope.spawn(move || spoof(proxy, from, to)))
                .collect();
            parts.into_iter().map(|part| part.join().expect("answers")).sum()
        })
    };
    flood(MANY, MANY + 2000);
    let before = proxy.resident();
    let count = flood(0, MANY);
    let grown = proxy.resident().saturating_sub(before);
    // Less than the addresses and a time for each.
    assert!(grown < 3 << 20, "grown by {grown}");
    // They are no way to lock others out, nor to be forgotten.
    assert!(count * 100 >= MANY as usize * 95, "{count}");
    assert!(of("203.0.113.8") >= 1);
    assert_eq!(of("203.0.113.7"), 0);
}
