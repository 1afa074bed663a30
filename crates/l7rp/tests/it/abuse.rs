//! What clients and one bad upstream must not be able to do to the others: open a breaker, hold
//! a place, end one answer in another.
#![allow(warnings, clippy::all)]
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use l7rp_testkit::{Origin, SOON, Then, eventually, let_pass, reply};

use crate::setup::{get, over, quiet};
use crate::tries::{NEVER_OPENS, PLENTY, say};
use crate::verdict::{
    CLOSED, HALF_OPEN, TOUCHY, eligible, half_open, is_eligible, nobody_is_blamed, state,
};

/// A client that asks with Expect and never sends its body opens the breaker.
#[test]
fn expect_without_a_body_is_not_the_upstreams_fault() {
    // As a server that knows no 100-continue: it waits for the body.
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin]).pool(TOUCHY).pool("response_header_timeout: 300ms").start();
    let mut client = proxy.client();
    client.send(
        "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n",
    );
    let answer = client.head();
    println!("answer {answer:?}");
    quiet(&proxy);
    println!("line {}", proxy.logged_path("/"));
    nobody_is_blamed(&proxy);
}

/// Slow uploads take an upstream out by passive latency.
#[test]
fn slow_uploads_do_not_eject() {
    let one = Origin::start(reply::told);
    let proxy = over(&[&one])
        .pool("health: { active: { path: /healthz, interval: 30s, timeout: 200ms, healthy_threshold: 1 }, passive: { latency_threshold_p99: 100ms, half_life: 30s } }")
        .start();
    eventually(SOON, || eligible(&proxy) == 1.0);
    let mut clients: Vec<_> = (0..20).map(|_| proxy.client()).collect();
    for c in &mut clients {
        c.send("POST /x HTTP/1.1\r\nHost: a.test\r\nContent-Length: 2\r\n\r\na");
    }
    let_pass(Duration::from_millis(250));
    for c in &mut clients {
        c.send("b");
        let_pass(Duration::from_millis(60));
    }
    for c in &mut clients {
        println!("{}", c.response().status());
    }
    println!("{:?}", proxy.events("upstream_health_changed"));
    println!("then: {}", proxy.get("/").status());
    assert!(is_eligible(&proxy, &one));
}

/// Slow uploads hold the places of probes.
#[test]
fn a_slow_upload_does_not_hold_the_probe() {
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin])
        .pool("connect_timeout: 500ms, response_header_timeout: 1s, circuit_breaker: { open_min: 300ms, open_max: 300ms, consecutive_failures: 1, half_open_probes: 1 }")
        .start();
    half_open(&proxy, &origin, Duration::from_millis(320));
    let mut slow = proxy.client();
    slow.send("POST /x HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1000\r\n\r\na");
    eventually(SOON, || state(&proxy, &origin) == HALF_OPEN);
    let began = Instant::now();
    let mut refused = 0;
    while began.elapsed() < Duration::from_secs(8) {
        slow.send("a");
        let status = proxy.get("/").status();
        if status == 200 {
            break;
        }
        refused += 1;
        let_pass(Duration::from_millis(100));
    }
    println!("refused {refused} for {:?}", began.elapsed());
    // A second is what a test may wait for its client.
    assert!(began.elapsed() < Duration::from_secs(3), "refused {refused} times");
}

/// With hedging, a breaker stays half-open for as long as its upstream is slower than the hedge.
#[test]
fn a_hedged_probe_is_judged_in_the_end() {
    let slow = Origin::start(|call| {
        if call.request.target() == "/500" {
            return reply::told(call);
        }
        let_pass(Duration::from_millis(250));
        say(call, 200, "", "slow")
    });
    let fast = Origin::start(|call| {
        if call.request.target() == "/500" {
            return say(call, 200, "", "fast");
        }
        say(call, 200, "", "fast")
    });
    let proxy = over(&[&slow, &fast])
        .pool("selector: { algorithm: round-robin }, circuit_breaker: { open_min: 300ms, open_max: 300ms, consecutive_failures: 1, half_open_probes: 1 }")
        .pool(PLENTY)
        .route("middleware: [{ retry: { max_attempts: 1, hedge_after: 80ms } }]")
        .start();
    half_open(&proxy, &slow, Duration::from_millis(320));
    let mut asked = 0;
    for _ in 0..40 {
        assert_eq!(proxy.get("/").status(), 200);
        asked += 1;
        if state(&proxy, &slow) == CLOSED {
            break;
        }
    }
    println!("{asked} requests, state {}, at slow {}", state(&proxy, &slow), slow.requests());
    assert_eq!(state(&proxy, &slow), CLOSED);
}

/// An upstream that gives up on a client that does not send its body.
#[test]
fn an_upstream_that_tires_of_a_slow_client_is_not_blamed() {
    let origin = Origin::start(|call| {
        call.wire.patience(Some(Duration::from_millis(1200)));
        if call.body().is_err() {
            return Then::Close;
        }
        say(call, 200, "", "ok")
    });
    let proxy = over(&[&origin]).pool(TOUCHY).start();
    let mut client = proxy.client();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n\r\na");
    println!("{:?}", client.head());
    println!("line {}", proxy.logged_path("/"));
    nobody_is_blamed(&proxy);
}

/// An upstream that gives up on a client that reads slowly.
#[test]
fn an_upstream_that_tires_of_a_slow_reader_is_not_blamed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for s in listener.incoming() {
            let mut s = s.unwrap();
            let mut b = [0; 4096];
            let _ = s.read(&mut b);
            s.set_write_timeout(Some(Duration::from_millis(400))).unwrap();
            let _ = s.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 104857600\r\n\r\n");
            let part = vec![b'x'; 64 << 10];
            while s.write_all(&part).is_ok() {}
            println!("the upstream tires");
        }
    });
    let proxy = over(&[]).upstream(&url, "weight: 1").pool(TOUCHY).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    let_pass(Duration::from_millis(1500));
    while client.wire.read_some(1 << 20).is_ok_and(|p| !p.is_empty()) {}
    println!("line {}", proxy.logged_path("/"));
    nobody_is_blamed(&proxy);
}

/// The time that a client takes to send is charged to the upstream.
#[test]
fn a_deadline_that_the_client_has_used_up_is_not_the_upstreams_fault() {
    let origin = Origin::start(|call| {
        if call.body().is_err() {
            return Then::Close;
        }
        let_pass(Duration::from_millis(100));
        say(call, 200, "", "ok")
    });
    let proxy = over(&[&origin]).pool(TOUCHY).route("timeouts: { total: 1s }").start();
    let mut client = proxy.client();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 2\r\n\r\na");
    let_pass(Duration::from_millis(960));
    client.send("b");
    println!("{:?}", client.head());
    println!("line {}", proxy.logged_path("/"));
    nobody_is_blamed(&proxy);
}

/// One bad upstream has a good one blamed.
#[test]
fn a_retry_with_little_time_left_does_not_blame_the_second() {
    let bad = Origin::start(reply::hang);
    let good = Origin::start(|call| {
        let_pass(Duration::from_millis(200));
        say(call, 200, "", "good")
    });
    let proxy = over(&[&bad, &good])
        .pool("selector: { algorithm: round-robin }, response_header_timeout: 900ms")
        .pool(TOUCHY)
        .pool(PLENTY)
        .route("timeouts: { total: 1s }, middleware: [{ retry: { backoff: 1ms } }]")
        .start();
    for _ in 0..2 {
        println!("{}", proxy.get("/").status());
        if state(&proxy, &bad) != CLOSED {
            break;
        }
    }
    assert_eq!(state(&proxy, &good), CLOSED);
}

/// Hedges and tries beyond the maximum when first tries do not get a connection.
#[test]
fn at_most_one_hedge() {
    let nowhere: Vec<Origin> = (0..3).map(|_| Origin::never_accepting()).collect();
    let bad: Vec<Origin> = (0..3).map(|_| Origin::start(reply::close)).collect();
    let all: Vec<&Origin> =
        [&nowhere[0], &bad[0], &nowhere[1], &bad[1], &nowhere[2], &bad[2]].to_vec();
    let proxy = over(&all)
        .pool("selector: { algorithm: round-robin }, connect_timeout: 300ms")
        .pool(NEVER_OPENS).pool(PLENTY)
        .route("middleware: [{ retry: { max_attempts: 2, hedge_after: 80ms, backoff: 1ms, retry_on: [504] } }]")
        .start();
    for n in 0..3 {
        let path = format!("/{n}");
        println!("{}", proxy.get(&path).status());
        let line = proxy.logged_path(&path);
        println!(
            "attempts {} hedges so far {}",
            line["attempts"],
            proxy.metrics().sum("proxy_hedge_fired_total", &[])
        );
    }
    assert!(proxy.metrics().sum("proxy_hedge_fired_total", &[]) <= 3.0);
}

/// An interim response that is half out, and then the hedge's answer behind it.
#[test]
fn a_half_written_interim_response_is_not_followed_by_another() {
    let first = |call: &mut l7rp_testkit::Call<'_>| {
        let link = format!("Link: <{}>\r\n", "A".repeat(60_000));
        for _ in 0..31 {
            call.send(format!("HTTP/1.1 103 Early Hints\r\n{link}\r\n"));
        }
        reply::hang(call)
    };
    let origins: [Origin; 2] = crate::tries::in_turn(move |call, nth| {
        if call.request.target() == "/fill" {
            return say(call, 200, "", &"f".repeat(2_300_000));
        }
        if nth == 0 { first(call) } else { say(call, 200, "", "hedge") }
    });
    let proxy = over(&origins.each_ref())
        .pool("selector: { algorithm: round-robin }")
        .pool(NEVER_OPENS)
        .pool(PLENTY)
        .route("middleware: [{ retry: { max_attempts: 2, hedge_after: 400ms } }]")
        .start();
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(&proxy.address().into()).unwrap();
    let mut s = TcpStream::from(socket);
    s.write_all(
        format!("{}{}", get("a.test", "/fill", ""), get("a.test", "/x", "Connection: close\r\n"))
            .as_bytes(),
    )
    .unwrap();
    let_pass(Duration::from_millis(2500));
    s.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut all = Vec::new();
    let mut b = vec![0; 1 << 16];
    while let Ok(n) = s.read(&mut b) {
        if n == 0 {
            break;
        }
        all.extend_from_slice(&b[..n]);
    }
    let text = String::from_utf8_lossy(&all);
    let interims = text.matches("HTTP/1.1 103").count();
    println!("{} octets, {interims} interim", all.len());
    for (at, _) in text.match_indices("HTTP/1.1 ") {
        let before = &text[at.saturating_sub(12)..at];
        if at > 0 && !before.ends_with("\r\n\r\n") && !before.ends_with("fff") {
            println!(
                "BROKEN at {at}: {:?}",
                &text[at.saturating_sub(30)..(at + 120).min(text.len())]
            );
            panic!("a response in the middle of another");
        }
    }
    let _ = eligible(&proxy);
}

/// A client that leaves while a connection is made.
#[test]
fn a_client_that_leaves_during_connect_is_noticed() {
    let nowhere = Origin::never_accepting();
    let proxy = over(&[&nowhere]).pool("connect_timeout: 3s").start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || proxy.metrics().sum("proxy_upstream_inflight", &[]) == 1.0);
    client.reset();
    let_pass(Duration::from_millis(500));
    let held = proxy.metrics().sum("proxy_upstream_inflight", &[]);
    println!("in flight after it left: {held}");
    assert_eq!(held, 0.0);
}

/// An answer that is kept while a retry waits holds its place.
#[test]
fn a_kept_answer_does_not_hold_the_place() {
    let origin = Origin::start(|call| {
        let path = call.request.target().to_owned();
        if path == "/503" { say(call, 503, "", "busy") } else { say(call, 200, "", "ok") }
    });
    let proxy = over(&[])
        .upstream(&origin.url(), "max_in_flight: 1")
        .pool(NEVER_OPENS)
        .pool(PLENTY)
        .route("middleware: [{ retry: { max_attempts: 2, backoff: 2s } }]")
        .start();
    let mut one = proxy.client();
    one.send(get("a.test", "/503", ""));
    let_pass(Duration::from_millis(300));
    let meanwhile = proxy.get("/").status();
    println!(
        "meanwhile {meanwhile}; first: {} after {} tries",
        one.response().status(),
        origin.requests()
    );
    println!("attempts {}", proxy.logged_path("/503")["attempts"]);
    assert_eq!(meanwhile, 200);
}

/// The deadline of the route while an interim response is written.
#[test]
fn the_deadline_holds_while_a_hint_is_written() {
    let origin = Origin::start(|call| {
        if call.request.target() == "/fill" {
            return say(call, 200, "", &"f".repeat(2_300_000));
        }
        let link = format!("Link: <{}>\r\n", "A".repeat(60_000));
        for _ in 0..31 {
            call.send(format!("HTTP/1.1 103 Early Hints\r\n{link}\r\n"));
        }
        reply::hang(call)
    });
    let proxy = over(&[&origin])
        .listener("timeouts: { write: 3s }")
        .route("timeouts: { total: 500ms }")
        .start();
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(&proxy.address().into()).unwrap();
    let mut s = TcpStream::from(socket);
    s.write_all(format!("{}{}", get("a.test", "/fill", ""), get("a.test", "/x", "")).as_bytes())
        .unwrap();
    let line = proxy.logged_path("/x");
    println!("{line}");
    assert!(line["duration_ms"].as_f64().unwrap() < 1000.0);
}

/// The last one that is well is taken out by scoring.
#[test]
fn scoring_does_not_take_out_the_last() {
    let down = Origin::start(|call| say(call, 503, "", "down"));
    let last = Origin::start(|call| {
        if call.request.target() == "/healthz" {
            say(call, 200, "", "")
        } else {
            say(call, 500, "", "x")
        }
    });
    let proxy = over(&[&down, &last]).pool(NEVER_OPENS)
        .pool("health: { active: { path: /healthz, interval: 30s, timeout: 200ms, healthy_threshold: 1 }, passive: { error_threshold: 0.4, half_life: 200ms } }").start();
    eventually(SOON, || eligible(&proxy) == 1.0);
    for _ in 0..300 {
        if eligible(&proxy) == 0.0 {
            break;
        }
        proxy.get("/");
        let_pass(Duration::from_millis(5));
    }
    println!("then {}", proxy.get("/").status());
    assert_eq!(eligible(&proxy), 1.0);
}

/// A bound that no body reaches.
#[test]
fn a_huge_bound_for_bodies() {
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin])
        .route("middleware: [{ retry: { max_replayable_body: 1GiB, retry_methods: [PUT] } }]")
        .start();
    let mut c = proxy.client();
    c.send("PUT / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 2\r\n\r\n");
    let_pass(Duration::from_millis(50));
    c.send("ab");
    let a = c.head();
    println!("{}", a.status());
    assert_eq!(a.status(), 200);
}

/// A connection that has switched protocols is kept for others.
#[test]
fn a_switched_connection_is_not_kept() {
    let origins: [Origin; 2] = crate::tries::in_turn(|call, nth| {
        if call.on_connection > 0 {
            println!("asked on connection {} again: {}", call.connection, call.request.target());
        }
        if call.request.target() == "/up" && nth == 0 {
            call.send(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n",
            );
            return Then::Next;
        }
        say(call, 200, "", "ok")
    });
    let proxy = over(&origins.each_ref())
        .one_worker()
        .pool("selector: { algorithm: round-robin }")
        .pool(PLENTY)
        .pool(NEVER_OPENS)
        .route("middleware: [{ retry: { retry_on: [101], backoff: 1ms } }]")
        .start();
    let mut client = proxy.client();
    client.send(get("a.test", "/up", "Connection: upgrade\r\nUpgrade: test\r\n"));
    assert_eq!(client.head().status(), 101);
    for n in 0..3 {
        assert_eq!(proxy.get(&format!("/{n}")).status(), 200);
    }
    let requests = origins.iter().flat_map(Origin::seen);
    let switched: Vec<_> = requests.filter(|seen| seen.message.target() == "/up").collect();
    assert_eq!(switched.len(), 1, "it is not tried again");
    client.reset();
}
