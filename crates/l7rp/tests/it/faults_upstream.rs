//! Everything that upstreams do wrong, a test for each row of the table of faults: what the
//! client sees, whose fault it is held to be, and that nothing is left of it. A breaker that
//! opens at one failure shows each verdict.
//!
//! U10 is about names: `starting.rs` has the rest of it. U11 and U12 are about TLS and HTTP/2.

use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Message, Origin, Proxy, SOON, Then, eventually, let_pass, reply};

use crate::reuse::stale;
use crate::setup::{Setup, assert_counts, assert_failed, get, over, post, quiet};
use crate::verdict::{
    CLOSED, OPEN, TOUCHY, becomes, ejections, is_blamed, is_eligible, judged, nobody_is_blamed,
    refused, state, turns,
};

const ROUND_ROBIN: &str = "selector: { algorithm: round-robin }";
/// Waits for upstreams, a tenth of what is usual and less.
const PATIENCE: &str = "connect_timeout: 200ms, response_header_timeout: 300ms";
const T_CONNECT: Duration = Duration::from_millis(200);
const T_HEAD: Duration = Duration::from_millis(300);

fn touchy(setup: Setup) -> Proxy {
    setup.pool(PATIENCE).pool(TOUCHY).start()
}

/// The only upstream fails: the client is told so, and the upstream is blamed; the next client
/// is spared.
#[track_caller]
fn fails(proxy: &Proxy, origin: &Origin, answer: &Message, status: u16, error: &str, reason: &str) {
    assert_failed(proxy, answer, status, error, reason);
    is_blamed(proxy, origin);
    refused(proxy, &proxy.get("/next"));
    eventually(SOON, || origin.open() == 0);
    assert_counts(proxy, "proxy_upstream_connections", &[], 0.0);
    quiet(proxy);
}

/// The answer is cut: the client notices, and the upstream is blamed when it is.
#[track_caller]
fn is_cut(proxy: &Proxy, origin: &Origin, reason: &str) {
    let got = proxy.client().send(get("a.test", "/cut", "")).try_response();
    assert!(got.is_err(), "it looks complete: {got:?}");
    let line = proxy.logged_path("/cut");
    assert_eq!((&line["status"], &line["reason"]), (&200.into(), &reason.into()), "{line}");
    is_blamed(proxy, origin);
    eventually(SOON, || origin.open() == 0);
    quiet(proxy);
}

#[test]
fn u1_refused_goes_elsewhere_with_its_body_whatever_the_method() {
    let bodies = ["x".repeat(2), "y".repeat(60 << 10)];
    for body in bodies {
        let (bad, good) = (Origin::refusing(), Origin::start(reply::echo));
        let proxy = touchy(over(&[&bad, &good]).pool(ROUND_ROBIN));
        let chunked = format!(
            "PUT /2 HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n\
             {:x}\r\n{body}\r\n0\r\n\r\n",
            body.len()
        );
        for request in [post("/0", &body), chunked, post("/1", &body)] {
            let answer = proxy.client().ask(request);
            assert_eq!(answer.status(), 200);
            assert!(answer.text().ends_with(&format!("\r\n\r\n{body}")));
        }
        // It was met once, and is passed over from then on.
        is_blamed(&proxy, &bad);
        assert_eq!((state(&proxy, &good), good.requests()), (CLOSED, 3));
        quiet(&proxy);
    }
}

#[test]
fn u1_refused_by_the_only_one_is_told_at_once() {
    let bad = Origin::refusing();
    let proxy = touchy(over(&[&bad]));
    let began = Instant::now();
    let answer = proxy.client().ask(post("/", "x"));
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    fails(&proxy, &bad, &answer, 502, "connection_refused", "connect_refused");
}

#[test]
fn u2a_a_connection_that_is_never_made_is_given_up() {
    let bad = Origin::never_accepting();
    let proxy = touchy(over(&[&bad]));
    let began = Instant::now();
    let answer = proxy.client().ask(post("/", "x"));
    assert!(began.elapsed() >= T_CONNECT, "{:?}", began.elapsed());
    fails(&proxy, &bad, &answer, 504, "connection_timeout", "connect_timeout");
}

#[test]
fn u2a_never_past_the_time_of_the_route() {
    let all: Vec<_> = (0..3).map(|_| Origin::never_accepting()).collect();
    let origins: Vec<_> = all.iter().collect();
    let setup = over(&origins).pool("connect_timeout: 2s").route("timeouts: { total: 300ms }");
    let proxy = setup.pool(TOUCHY).start();
    let began = Instant::now();
    let answer = proxy.get("/");
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(300) && took < Duration::from_secs(2), "{took:?}");
    assert_failed(&proxy, &answer, 504, "http_response_timeout", "total_timeout");
    quiet(&proxy);
}

#[test]
fn u2b_a_connection_that_only_the_kernel_accepts_is_given_up() {
    let queue = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", queue.local_addr().expect("an address"));
    let proxy = touchy(over(&[]).upstream(&url, "weight: 1"));
    let began = Instant::now();
    let answer = proxy.get("/");
    assert!(began.elapsed() >= T_HEAD, "{:?}", began.elapsed());
    assert_failed(&proxy, &answer, 504, "http_response_timeout", "response_timeout");
    assert_counts(&proxy, "proxy_circuit_breaker_state", &[("upstream", &url)], OPEN);
    // The connection was closed, not kept.
    let (mut stream, _) = queue.accept().expect("it is in the queue");
    stream.set_read_timeout(Some(SOON)).expect("it can");
    let mut request = Vec::new();
    stream.read_to_end(&mut request).expect("the end");
    assert!(request.starts_with(b"GET / HTTP/1.1\r\n"));
    quiet(&proxy);
}

#[test]
fn u3_an_answer_that_never_comes_is_given_up_and_nothing_is_sent_twice() {
    for request in [get("a.test", "/", ""), post("/", "order")] {
        let (bad, good) = (Origin::start(reply::hang), Origin::start(reply::name("good")));
        let proxy = touchy(over(&[&bad, &good]).pool(ROUND_ROBIN));
        let mut answers: Vec<_> = (0..2).map(|_| proxy.client().ask(&request)).collect();
        answers.sort_by_key(Message::status);
        assert_eq!(answers[0].text(), "good");
        assert_failed(&proxy, &answers[1], 504, "http_response_timeout", "response_timeout");
        is_blamed(&proxy, &bad);
        assert_eq!((bad.requests(), good.requests()), (1, 1));
        eventually(SOON, || bad.open() == 0);
        quiet(&proxy);
    }
}

#[test]
fn u4_an_answer_that_stops_is_cut_and_blamed_then_and_not_before() {
    for head in ["Content-Length: 9\r\n\r\nhalf", "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"]
    {
        let origin = Origin::start(move |call| {
            call.send(format!("HTTP/1.1 200 OK\r\n{head}"));
            reply::hang(call)
        });
        let proxy = touchy(over(&[&origin]));
        let mut client = proxy.client();
        let began = Instant::now();
        assert_eq!(client.send(get("a.test", "/cut", "")).head().status(), 200);
        let early = state(&proxy, &origin);
        assert!(early == CLOSED || began.elapsed() >= T_HEAD, "it is blamed at once");
        let rest = client.wire.read_to_end().unwrap_or_default();
        assert!(!rest.ends_with(b"0\r\n\r\n"), "it looks complete");
        assert!(began.elapsed() >= T_HEAD, "{:?}", began.elapsed());
        assert_eq!(proxy.logged_path("/cut")["reason"], "response_stalled");
        is_blamed(&proxy, &origin);
        eventually(SOON, || origin.open() == 0);
        quiet(&proxy);
    }
}

#[test]
fn u5_an_answer_that_breaks_off_is_cut() {
    for answer in [
        "Content-Length: 9\r\n\r\nhalf",
        "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        "Transfer-Encoding: chunked\r\n\r\n9\r\nhalf",
    ] {
        for end in [Then::Close, Then::Reset] {
            let origin = Origin::start(move |call| {
                call.send(format!("HTTP/1.1 200 OK\r\n{answer}"));
                if end == Then::Reset {
                    // It must not overtake what was sent.
                    let_pass(Duration::from_millis(100));
                }
                end
            });
            is_cut(&touchy(over(&[&origin])), &origin, "response_truncated");
        }
    }
}

#[test]
fn u6a_an_idle_connection_that_has_ended_goes_unnoticed() {
    // In order, and with something that nobody asked for.
    for farewell in ["", "HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n\r\n"] {
        let origin = Origin::start(move |call| {
            call.send(reply::ok("x"));
            let_pass(Duration::from_millis(50));
            call.send(farewell);
            Then::Close
        });
        let proxy = touchy(over(&[&origin]).one_worker());
        for n in 1..4 {
            assert_eq!(proxy.client().ask(post("/", "order")).text(), "x");
            eventually(SOON, || origin.open() == 0);
            assert_eq!(origin.requests(), n);
        }
        nobody_is_blamed(&proxy);
        quiet(&proxy);
    }
}

#[test]
fn u6b_a_connection_that_ends_under_a_request_is_no_failure_if_the_request_can_be_repeated() {
    let origin = Origin::start(stale);
    let proxy = touchy(over(&[&origin]).one_worker());
    assert_eq!(proxy.get("/").status(), 200);
    // Sent once more, on a new connection, and not counted as a try of its own.
    assert_eq!(proxy.get("/again").status(), 200);
    assert_eq!(proxy.logged_path("/again")["attempts"], 1);
    assert_eq!((origin.requests(), origin.accepted()), (3, 2));
    nobody_is_blamed(&proxy);
    // What may not be sent again has failed, and somebody has to be told.
    let answer = proxy.client().ask(post("/once", "order"));
    assert_failed(&proxy, &answer, 502, "connection_terminated", "upstream_closed");
    let orders = origin.seen().iter().filter(|seen| seen.message.target() == "/once").count();
    assert_eq!(orders, 1);
    is_blamed(&proxy, &origin);
    quiet(&proxy);
}

#[test]
fn u6b_no_request_fails_where_both_sides_give_up_idle_connections_at_the_same_time() {
    let origin = Origin::start(|call| {
        call.send(reply::ok("x"));
        call.wire.patience(Some(Duration::from_millis(20)));
        Then::Next
    });
    let proxy = touchy(over(&[&origin]).pool("keepalive: { idle_timeout: 20ms }"));
    thread::scope(|scope| {
        for client in 0..4_u64 {
            let proxy = &proxy;
            scope.spawn(move || {
                for n in 0..40 {
                    assert_eq!(proxy.get("/").text(), "x");
                    let_pass(Duration::from_millis(17 + (n + client) % 7));
                }
            });
        }
    });
    nobody_is_blamed(&proxy);
    quiet(&proxy);
}

#[test]
fn u7_a_slow_answer_is_a_good_one() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n");
        for _ in 0..50 {
            let_pass(Duration::from_millis(10));
            call.send("x");
        }
        Then::Next
    });
    let proxy = touchy(over(&[&origin]));
    let began = Instant::now();
    assert_eq!(proxy.get("/").text(), "x".repeat(50));
    // Longer than any single wait for it.
    assert!(began.elapsed() > T_HEAD + T_CONNECT / 2, "{:?}", began.elapsed());
    nobody_is_blamed(&proxy);
    quiet(&proxy);
}

#[test]
fn u7_a_head_that_drips_is_given_up() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 200 OK\r\nX: ");
        while call.send("x") {
            let_pass(Duration::from_millis(20));
        }
        Then::Close
    });
    let proxy = touchy(over(&[&origin]));
    let answer = proxy.get("/");
    fails(&proxy, &origin, &answer, 504, "http_response_timeout", "response_timeout");
}

#[test]
fn u8_errors_of_the_upstreams_own_pass_unchanged_until_there_are_enough() {
    let origin = Origin::start(reply::told);
    let keys = "consecutive_failures: 4, open_min: 60s";
    let proxy = over(&[&origin]).pool(&format!("circuit_breaker: {{ {keys} }}")).start();
    for status in [404, 500, 404, 502, 503, 504, 599] {
        let answer = proxy.get(&format!("/{status}"));
        assert_eq!(answer.start, format!("HTTP/1.1 {status} As Told"));
        assert_eq!((answer.get("proxy-status"), answer.text()), (None, status.to_string()));
        judged(&proxy, origin.requests());
        let expected = if status == 599 { OPEN } else { CLOSED };
        becomes(&proxy, &origin, expected);
    }
    refused(&proxy, &proxy.get("/"));
    assert_eq!(origin.requests(), 7);
    quiet(&proxy);
}

#[test]
fn u9_only_trials_see_what_a_flapping_upstream_does_wrong() {
    let began = Instant::now();
    let is_down = move || {
        began.elapsed() < Duration::from_secs(2) && began.elapsed().as_millis() % 400 >= 200
    };
    let origin = Origin::start(move |call| {
        let status = if is_down() { "500 Down" } else { "200 Up" };
        call.send(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n"));
        Then::Next
    });
    let keys = "consecutive_failures: 1, half_open_probes: 1, open_min: 50ms, open_max: 400ms";
    let proxy = over(&[&origin]).pool(&format!("circuit_breaker: {{ {keys} }}")).start();
    let mut failed = 0.0;
    while began.elapsed() < Duration::from_secs(2) {
        let answer = proxy.get("/");
        failed += f64::from(u8::from(answer.status() == 500));
        assert!([200, 500, 503].contains(&answer.status()));
        judged(&proxy, origin.requests());
    }
    // Up for good.
    eventually(SOON, || proxy.get("/").status() == 200);
    becomes(&proxy, &origin, CLOSED);
    assert!((1.0..=40.0).contains(&failed), "{failed} failures got through");
    assert_eq!(turns(&proxy, &origin, "open"), failed);
    quiet(&proxy);
}

#[test]
fn u10_a_name_without_an_address_is_not_the_upstreams_fault() {
    let url = "http://no-such-host.invalid:80";
    let proxy = touchy(over(&[]).upstream(url, "weight: 1"));
    for _ in 0..3 {
        let answer = proxy.get("/");
        assert_failed(&proxy, &answer, 503, "dns_error", "unresolved");
    }
    nobody_is_blamed(&proxy);
    quiet(&proxy);
}

#[test]
fn u13_an_answer_before_the_request_is_out_is_a_good_one() {
    for status in [401, 413] {
        let origin = Origin::start(move |call| {
            call.send(format!("HTTP/1.1 {status} No\r\nContent-Length: 2\r\n\r\nno"));
            reply::hang(call)
        });
        let proxy = touchy(over(&[&origin]));
        let mut client = proxy.client();
        let head = "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1000000\r\n\r\nhalf";
        let answer = client.ask(head);
        assert_eq!((answer.status(), answer.text().as_str()), (status, "no"));
        drop(client);
        // Half of a request was written: it cannot be used again.
        eventually(SOON, || origin.open() == 0);
        nobody_is_blamed(&proxy);
        quiet(&proxy);
    }
}

#[test]
fn u14_what_is_no_answer_is_a_failure_and_nothing_is_sent_twice() {
    let long = format!("HTTP/1.1 200 OK\r\nX-Big: {}\r\n\r\n", "x".repeat(80 << 10));
    let protocol = "http_protocol_error";
    for (answer, error, reason) in [
        ("SSH-2.0-OpenSSH_9.9\r\n\r\n", protocol, "malformed_start_line"),
        (long.as_str(), "http_response_header_section_size", "response_head_too_large"),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
            protocol,
            "bad_content_length",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
            protocol,
            "content_length_with_transfer_encoding",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\nabc",
            protocol,
            "bad_transfer_encoding",
        ),
        ("HTTP/1.1 200 OK\r\nContent-Le", "connection_terminated", "upstream_closed"),
    ] {
        let (bad, good) =
            (Origin::start(reply::raw(answer.to_owned())), Origin::start(reply::name("good")));
        let proxy = touchy(over(&[&bad, &good]).pool(ROUND_ROBIN));
        let mut answers: Vec<_> = (0..2).map(|_| proxy.client().ask(post("/", "x"))).collect();
        answers.sort_by_key(Message::status);
        assert_eq!(answers[0].text(), "good");
        assert_failed(&proxy, &answers[1], 502, error, reason);
        is_blamed(&proxy, &bad);
        assert_eq!((bad.requests(), good.requests()), (1, 1), "{reason}");
        quiet(&proxy);
    }
}

#[test]
fn u14_what_is_no_answer_any_more_is_cut() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n");
        // What is wrong must not come with what is right.
        let_pass(Duration::from_millis(100));
        call.send("zz\r\n");
        Then::Close
    });
    is_cut(&touchy(over(&[&origin])), &origin, "bad_chunk");
}

/// Accepts and closes at once, for as long as the test runs; how often it has.
fn crash_loop() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let times = Arc::new(AtomicUsize::new(0));
    let counted = times.clone();
    thread::spawn(move || {
        for stream in listener.incoming() {
            counted.fetch_add(1, SeqCst);
            drop(stream);
        }
    });
    (address, times)
}

#[test]
fn u15_a_connection_that_is_closed_at_once_is_a_failure_each_time() {
    let (address, times) = crash_loop();
    let url = format!("http://{address}");
    let keys = "circuit_breaker: { consecutive_failures: 3, open_min: 60s }";
    let proxy = over(&[]).upstream(&url, "weight: 1").pool(keys).start();
    for n in 1..=3 {
        let answer = proxy.get("/");
        assert_failed(&proxy, &answer, 502, "connection_terminated", "upstream_closed");
        judged(&proxy, n);
        // A new connection is never taken for a stale one.
        assert_eq!(times.load(SeqCst), n);
    }
    assert_counts(&proxy, "proxy_circuit_breaker_state", &[("upstream", &url)], OPEN);
    refused(&proxy, &proxy.get("/"));
    assert_eq!(ejections(&proxy, None), 0.0);
    let errors = [("status", "err")];
    assert_counts(&proxy, "proxy_upstream_requests_total", &errors, 3.0);
    quiet(&proxy);
}

#[test]
fn u16_one_of_a_hundred_is_found() {
    let good = Origin::start(reply::name("good"));
    let dead: Vec<_> = (0..99).map(|_| Origin::refusing()).collect();
    let mut all: Vec<_> = dead.iter().collect();
    all.insert(50, &good);
    let proxy = touchy(over(&all));
    for n in 0..10 {
        assert_eq!(proxy.client().ask(post(&format!("/{n}"), "x")).text(), "good");
    }
    let tries: u64 =
        (0..10).filter_map(|n| proxy.logged_path(&format!("/{n}"))["attempts"].as_u64()).sum();
    // Each dead one is met once at most, and passed over from then on.
    assert!(tries <= 99 + 10, "{tries}");
    let met = tries as f64 - 10.0;
    let metrics = proxy.metrics();
    assert_eq!(metrics.sum("proxy_upstream_requests_total", &[("status", "err")]), met);
    assert_eq!(metrics.sum("proxy_circuit_breaker_state", &[]), met);
    assert!(is_eligible(&proxy, &good));
    quiet(&proxy);
}

#[test]
fn u16_what_is_down_is_not_asked_in_a_busy_loop() {
    let dead: Vec<_> = (0..20).map(|_| Origin::refusing()).collect();
    let all: Vec<_> = dead.iter().collect();
    let proxy = touchy(over(&all));
    let answer = proxy.get("/first");
    assert_failed(&proxy, &answer, 502, "connection_refused", "connect_refused");
    assert_eq!(proxy.logged_path("/first")["attempts"], 20);
    // All of them are open: nothing is tried.
    let began = Instant::now();
    for _ in 0..20 {
        refused(&proxy, &proxy.get("/"));
    }
    assert!(began.elapsed() < Duration::from_secs(2));
    judged(&proxy, 20);
    quiet(&proxy);
}

#[test]
fn an_upload_that_breaks_is_the_upstreams_failure() {
    let origin = Origin::start(|call| {
        let _ = call.wire.read_exact(5);
        Then::Reset
    });
    let proxy = touchy(over(&[&origin]));
    let mut client = proxy.client();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1000\r\n\r\nbegin");
    let answer = client.response();
    fails(&proxy, &origin, &answer, 502, "connection_terminated", "upstream_closed");
}
