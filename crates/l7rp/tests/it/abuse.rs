//! What clients and one bad upstream must not be able to do to the others: open a breaker, hold
//! a place, end one answer in another.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Call, Origin, Proxy, SOON, Then, eventually, let_pass, reply};

use crate::setup::{get, in_flight, over, quiet};
use crate::tries::{NEVER_OPENS, PLENTY, in_turn, say};
use crate::verdict::{
    CLOSED, HALF_OPEN, TOUCHY, becomes, eligible, half_open, is_eligible, nobody_is_blamed, state,
};

/// Opens at the first failure, for 300 ms, and is tested by one request.
const ONE_TEST: &str = "circuit_breaker: { open_min: 300ms, open_max: 300ms, \
     consecutive_failures: 1, half_open_probes: 1 }";
/// A test is due.
const OPEN_TIME: Duration = Duration::from_millis(320);
const IN_TURN: &str = "selector: { algorithm: round-robin }";

fn upload(length: usize, lines: &str) -> String {
    format!("POST /upload HTTP/1.1\r\nHost: a.test\r\nContent-Length: {length}\r\n{lines}\r\n")
}

fn reads_its_body_first(call: &mut Call<'_>) -> Then {
    if call.body().is_err() { Then::Close } else { say(call, 200, "", "ok") }
}

#[test]
fn a_client_that_waits_for_100_and_sends_no_body_opens_nothing() {
    // No server has to send a 100: this one waits for the body.
    let origin = Origin::start(reads_its_body_first);
    let proxy = over(&[&origin]).pool(TOUCHY).pool("response_header_timeout: 300ms").start();
    let mut client = proxy.client();
    client.send(upload(5, "Expect: 100-continue\r\n"));
    assert_eq!(client.head().status(), 504);
    quiet(&proxy);
    nobody_is_blamed(&proxy);
}

#[test]
fn slow_uploads_do_not_make_an_upstream_look_slow() {
    let origin = Origin::start(reply::told);
    let health = "health: { active: { path: /healthz, interval: 30s, timeout: 200ms, \
         healthy_threshold: 1 }, passive: { latency_threshold_p99: 500ms, half_life: 30s } }";
    let proxy = over(&[&origin]).pool(health).start();
    eventually(SOON, || eligible(&proxy) == 1.0);
    let mut clients: Vec<_> = (0..20).map(|_| proxy.client()).collect();
    for client in &mut clients {
        client.send(upload(2, "") + "a");
    }
    let_pass(Duration::from_secs(1));
    for client in &mut clients {
        client.send("b");
        let_pass(Duration::from_millis(60));
    }
    for client in &mut clients {
        assert_eq!(client.response().status(), 200);
    }
    assert!(is_eligible(&proxy, &origin));
}

#[test]
fn a_slow_upload_does_not_keep_others_from_testing() {
    let origin = Origin::start(reply::told);
    let timeouts = "connect_timeout: 5s, response_header_timeout: 20s";
    let proxy = over(&[&origin]).pool(timeouts).pool(ONE_TEST).start();
    half_open(&proxy, &origin, OPEN_TIME);
    let mut slow = proxy.client();
    slow.send(upload(1000, "") + "a");
    eventually(SOON, || state(&proxy, &origin) == HALF_OPEN);
    let began = Instant::now();
    eventually(SOON, || {
        slow.send("a");
        proxy.get("/").status() == 200
    });
    assert!(began.elapsed() < Duration::from_secs(5), "a second is what a test may wait");
    becomes(&proxy, &origin, CLOSED);
}

#[test]
fn a_slow_upload_that_ends_well_still_counts() {
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin]).pool(ONE_TEST).start();
    half_open(&proxy, &origin, OPEN_TIME);
    let mut slow = proxy.client();
    slow.send(upload(14, ""));
    for _ in 0..14 {
        let_pass(Duration::from_millis(100));
        slow.send("a");
    }
    assert_eq!(slow.response().status(), 200);
    becomes(&proxy, &origin, CLOSED);
}

#[test]
fn tests_that_are_slower_than_the_hedge_are_judged_in_the_end() {
    let slow = Origin::start(|call| {
        if call.request.target() != "/500" {
            let_pass(Duration::from_millis(250));
        }
        reply::told(call)
    });
    let fast = Origin::start(reply::name("fast"));
    let proxy = over(&[&slow, &fast])
        .pool(IN_TURN)
        .pool(ONE_TEST)
        .pool(PLENTY)
        .route("middleware: [{ retry: { max_attempts: 1, hedge_after: 80ms } }]")
        .start();
    half_open(&proxy, &slow, OPEN_TIME);
    let closes = (0..40).any(|_| {
        assert_eq!(proxy.get("/").status(), 200);
        state(&proxy, &slow) == CLOSED
    });
    assert!(closes, "it stays half-open");
}

#[test]
fn an_upstream_that_tires_of_a_slow_client_is_not_blamed() {
    let origin = Origin::start(|call| {
        call.wire.patience(Some(Duration::from_millis(1200)));
        reads_its_body_first(call)
    });
    let proxy = over(&[&origin]).pool(TOUCHY).start();
    let mut client = proxy.client();
    client.send(upload(5, "") + "a");
    assert_eq!(client.head().status(), 502);
    quiet(&proxy);
    nobody_is_blamed(&proxy);
}

#[test]
fn an_upstream_that_tires_of_a_slow_reader_is_not_blamed() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("the proxy connects");
        let mut request = [0; 4096];
        let _ = stream.read(&mut request);
        stream.set_write_timeout(Some(Duration::from_millis(400))).expect("a timeout");
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 104857600\r\n\r\n");
        let part = vec![b'x'; 64 << 10];
        while stream.write_all(&part).is_ok() {}
    });
    let proxy = over(&[]).upstream(&url, "weight: 1").pool(TOUCHY).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    let_pass(Duration::from_millis(1500));
    while client.wire.read_some(1 << 20).is_ok_and(|part| !part.is_empty()) {}
    quiet(&proxy);
    nobody_is_blamed(&proxy);
}

#[test]
fn a_deadline_that_the_client_has_used_up_is_not_the_upstreams_fault() {
    let origin = Origin::start(|call| {
        if call.body().is_err() {
            return Then::Close;
        }
        let_pass(Duration::from_millis(300));
        say(call, 200, "", "ok")
    });
    let proxy = over(&[&origin]).pool(TOUCHY).route("timeouts: { total: 1s }").start();
    let mut client = proxy.client();
    client.send(upload(2, "") + "a");
    let_pass(Duration::from_millis(850));
    client.send("b");
    assert_eq!(client.head().status(), 504);
    quiet(&proxy);
    nobody_is_blamed(&proxy);
}

#[test]
fn a_retry_with_little_time_left_does_not_blame_the_second() {
    let origins: [Origin; 2] = in_turn(|call, nth| {
        if nth == 0 {
            return reply::hang(call);
        }
        let_pass(Duration::from_millis(400));
        say(call, 200, "", "good")
    });
    let proxy = over(&origins.each_ref())
        .pool("response_header_timeout: 800ms")
        .pool(TOUCHY)
        .pool(PLENTY)
        .route("timeouts: { total: 1s }, middleware: [{ retry: { backoff: 1ms } }]")
        .start();
    assert_eq!(proxy.get("/").status(), 504);
    quiet(&proxy);
    let (first, second) =
        if origins[0].last().target() == "/" && state(&proxy, &origins[0]) != CLOSED {
            (&origins[0], &origins[1])
        } else {
            (&origins[1], &origins[0])
        };
    assert!(state(&proxy, first) > CLOSED, "the first has hung for long enough");
    assert_eq!(state(&proxy, second), CLOSED);
}

#[test]
fn races_whose_first_gets_no_connection_are_tries_too() {
    let nowhere = [(); 3].map(|()| Origin::never_accepting());
    let bad = [(); 3].map(|()| Origin::start(reply::close));
    let mixed: Vec<_> = nowhere.iter().zip(&bad).flat_map(|(none, bad)| [none, bad]).collect();
    let keys = "max_attempts: 2, hedge_after: 80ms, backoff: 1ms, retry_on: [504]";
    let proxy = over(&mixed)
        .pool(IN_TURN)
        .pool("connect_timeout: 300ms")
        .pool(NEVER_OPENS)
        .pool(PLENTY)
        .route(&format!("middleware: [{{ retry: {{ {keys} }} }}]"))
        .start();
    for n in 1..4 {
        proxy.get("/");
        let fired = proxy.metrics().sum("proxy_hedge_fired_total", &[]);
        assert!(fired <= f64::from(n), "{fired} second tries for {n} requests");
    }
}

/// Hints until the client's socket is full, and then nothing.
fn hints(call: &mut Call<'_>) -> Then {
    let link = format!("Link: <{}>\r\n", "A".repeat(60_000));
    for _ in 0..31 {
        call.send(format!("HTTP/1.1 103 Early Hints\r\n{link}\r\n"));
    }
    reply::hang(call)
}

const FILLING: usize = 2_300_000;

/// A client that takes little, asks for a long answer, and then for `/x`.
fn crowded(proxy: &Proxy, lines: &str) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
    let socket = socket.expect("a socket");
    socket.set_recv_buffer_size(4096).expect("a size");
    socket.connect(&proxy.address().into()).expect("the proxy accepts");
    let mut stream = TcpStream::from(socket);
    let both = get("a.test", "/fill", "") + &get("a.test", "/x", lines);
    stream.write_all(both.as_bytes()).expect("the proxy reads");
    stream
}

#[test]
fn an_answer_does_not_begin_in_the_middle_of_a_hint() {
    let origins: [Origin; 2] = in_turn(|call, nth| match (call.request.target(), nth) {
        ("/fill", _) => say(call, 200, "", &"f".repeat(FILLING)),
        (_, 0) => hints(call),
        _ => say(call, 200, "", "hedge"),
    });
    let proxy = over(&origins.each_ref())
        .pool(IN_TURN)
        .pool(NEVER_OPENS)
        .pool(PLENTY)
        .route("middleware: [{ retry: { max_attempts: 2, hedge_after: 400ms } }]")
        .start();
    let mut client = crowded(&proxy, "Connection: close\r\n");
    let_pass(Duration::from_millis(1500));
    client.set_read_timeout(Some(SOON)).expect("a timeout");
    let mut all = Vec::new();
    client.read_to_end(&mut all).expect("all of it");
    let text = String::from_utf8_lossy(&all);
    for (at, _) in text.match_indices("HTTP/1.1 ").skip(1) {
        let before = &text[at - 4..at];
        assert!(["\r\n\r\n", "ffff"].contains(&before), "after {before:?}");
    }
}

#[test]
fn the_deadline_holds_while_a_hint_is_written() {
    let origin = Origin::start(|call| match call.request.target() {
        "/fill" => say(call, 200, "", &"f".repeat(FILLING)),
        _ => hints(call),
    });
    let proxy = over(&[&origin])
        .listener("timeouts: { write: 4s }")
        .route("timeouts: { total: 500ms }")
        .start();
    let _client = crowded(&proxy, "");
    let took = proxy.logged_path("/x")["duration_ms"].as_f64();
    assert!(took.is_some_and(|ms| ms < 3000.0), "{took:?} ms");
}

#[test]
fn a_client_that_leaves_during_connect_is_noticed() {
    let nowhere = Origin::never_accepting();
    let proxy = over(&[&nowhere]).pool("connect_timeout: 30s").start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || in_flight(&proxy) == 1.0);
    client.reset();
    eventually(SOON, || in_flight(&proxy) == 0.0);
}

#[test]
fn a_kept_answer_does_not_hold_the_place() {
    let origin = Origin::start(reply::told);
    let proxy = over(&[])
        .upstream(&origin.url(), "max_in_flight: 1")
        .pool(NEVER_OPENS)
        .pool(PLENTY)
        .route("middleware: [{ retry: { max_attempts: 2, backoff: 20s } }]")
        .start();
    let mut waiting = proxy.client();
    waiting.send(get("a.test", "/503", ""));
    eventually(SOON, || origin.requests() == 1 && in_flight(&proxy) == 0.0);
    assert_eq!(proxy.get("/").status(), 200);
}

#[test]
fn scoring_does_not_take_out_the_last() {
    let down = Origin::start(|call| say(call, 503, "", "down"));
    let last = Origin::start(|call| {
        let status = if call.request.target() == "/healthz" { 200 } else { 500 };
        say(call, status, "", "x")
    });
    let health = "health: { active: { path: /healthz, interval: 30s, timeout: 200ms, \
         healthy_threshold: 1 }, passive: { error_threshold: 0.4, half_life: 200ms } }";
    let proxy = over(&[&down, &last]).pool(NEVER_OPENS).pool(health).start();
    eventually(SOON, || eligible(&proxy) == 1.0);
    for _ in 0..200 {
        assert_eq!(proxy.get("/").status(), 500);
        let_pass(Duration::from_millis(5));
    }
    assert_eq!(eligible(&proxy), 1.0);
}

#[test]
fn a_great_bound_for_bodies_costs_nothing() {
    let origin = Origin::start(reply::told);
    let keys = "max_replayable_body: 1GiB, retry_methods: [POST]";
    let proxy = over(&[&origin]).route(&format!("middleware: [{{ retry: {{ {keys} }} }}]")).start();
    let mut client = proxy.client();
    client.send(upload(2, ""));
    eventually(SOON, || origin.requests() == 1);
    client.send("ab");
    assert_eq!(client.response().status(), 200);
}

#[test]
fn what_has_switched_protocols_is_not_tried_again() {
    let origins: [Origin; 2] = in_turn(|call, _| {
        if call.request.target() == "/up" {
            call.send(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n",
            );
            return Then::Next;
        }
        say(call, 200, "", "ok")
    });
    let proxy = over(&origins.each_ref())
        .one_worker()
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
    assert_eq!(requests.filter(|seen| seen.message.target() == "/up").count(), 1);
    client.reset();
}
