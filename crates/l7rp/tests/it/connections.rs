//! Clients' connections: kept, pipelined, half-closed, reset.

use std::time::Duration;

use l7rp_testkit::{Gate, Origin, SOON, Then, eventually, reply};

use crate::setup::{assert_counts, get, in_flight, over};

#[test]
fn a_connection_is_kept_as_its_version_says() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    for (version, lines, kept) in [
        ("1.1", "", true),
        ("1.1", "Connection: close\r\n", false),
        ("1.1", "Connection: Foo, CLOSE\r\n", false),
        ("1.0", "", false),
        ("1.0", "Connection: Keep-Alive\r\n", true),
    ] {
        let mut client = proxy.client();
        let request = format!("GET / HTTP/{version}\r\nHost: a.test\r\n{lines}\r\n");
        let answer = client.ask(&request);
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.get("connection") == Some("close"), !kept, "{version} {lines}");
        if kept {
            assert_eq!(client.ask(&request).status(), 200, "{version} {lines}");
        } else {
            assert!(client.is_closed_within(SOON), "{version} {lines}");
        }
    }
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    // The first is the slowest.
    let origin = Origin::start(|call| {
        if call.request.target() == "/0" {
            l7rp_testkit::let_pass(Duration::from_millis(100));
        }
        reply::echo(call)
    });
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    let mut all = String::new();
    for n in 0..12 {
        let request = match n % 3 {
            0 => get("a.test", &format!("/{n}"), ""),
            1 => format!("POST /{n} HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n\r\nb{n:02}"),
            _ => format!(
                "PUT /{n} HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n\
                 3\r\nb{n:02}\r\n0\r\n\r\n"
            ),
        };
        all.push_str(&request);
        if n == 5 {
            // Empty lines between requests are nothing.
            all += "\r\n\r\n";
        }
    }
    client.send(all);
    for n in 0..12 {
        let answer = client.response().text();
        assert!(answer.contains(&format!(" /{n} HTTP/1.1\r\n")), "{n}: {answer}");
        assert!(n % 3 == 0 || answer.ends_with(&format!("b{n:02}")), "{n}: {answer}");
    }
}

#[test]
fn a_pipelined_request_that_arrives_in_pieces_waits_its_turn() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("x", &gate));
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/1", ""));
    eventually(SOON, || origin.requests() == 1);
    let second = get("a.test", "/2", "");
    client.send(&second[..20]);
    gate.open();
    assert_eq!(client.response().status(), 200);
    assert_eq!(client.ask(&second[20..]).status(), 200);
    assert_eq!(origin.last().target(), "/2");
}

#[test]
fn nothing_after_a_refused_request_is_looked_at() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(format!("GET / HTTP/1.1\r\nHost: a\r\nBad Name: x\r\n\r\n{}", get("a", "/n", "")));
    assert_eq!(client.response().status(), 400);
    assert!(client.is_closed_within(SOON));
    assert_eq!(origin.requests(), 0);
}

#[test]
fn a_client_that_ends_its_side_gets_its_answer() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    client.wire.half_close().expect("it can");
    eventually(SOON, || origin.requests() == 1);
    // Time enough to notice the end, and to draw the wrong conclusion.
    l7rp_testkit::let_pass(Duration::from_millis(100));
    gate.open();
    assert_eq!(client.response().text(), "late");
    assert!(client.is_closed_within(SOON));
    eventually(SOON, || proxy.metrics().sum("proxy_connections", &[]) == 0.0);
}

#[test]
fn a_client_that_ends_its_side_in_the_middle_of_a_body_gets_none() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send("POST /cut HTTP/1.1\r\nHost: a.test\r\nContent-Length: 9\r\n\r\nhalf");
    client.wire.half_close().expect("it can");
    let line = proxy.logged_path("/cut");
    assert_eq!((&line["status"], &line["reason"]), (&499.into(), &"client_gone".into()));
    eventually(SOON, || origin.open() == 0);
    assert!(!origin.last().complete);
}

#[test]
fn a_reset_while_the_upstream_is_waited_for_ends_the_exchange() {
    let origin = Origin::start(reply::hang);
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/gone", ""));
    eventually(SOON, || origin.requests() == 1 && in_flight(&proxy) == 1.0);
    client.reset();
    eventually(SOON, || origin.open() == 0);
    let line = proxy.logged_path("/gone");
    assert_eq!((&line["status"], &line["reason"]), (&499.into(), &"client_gone".into()));
    assert_eq!(in_flight(&proxy), 0.0);
    let metrics = proxy.metrics();
    assert_eq!(metrics.sum("proxy_upstream_requests_total", &[("status", "cancel")]), 1.0);
    assert_eq!(metrics.sum("proxy_upstream_requests_total", &[("status", "err")]), 0.0);
    assert_eq!(metrics.sum("proxy_requests_total", &[("status", "499")]), 1.0);
}

/// A reset after the begin of an answer that then pauses, as streams of events do.
#[track_caller]
fn a_reset_in_the_middle_is_noticed(content_type: &str) {
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n\
         3\r\nabc\r\n"
    );
    let origin = Origin::start(move |call| {
        call.send(&head);
        reply::hang(call)
    });
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/stream", "")).head();
    client.wire.read_exact(8).expect("a chunk");
    client.reset();
    eventually(SOON, || origin.open() == 0 && in_flight(&proxy) == 0.0);
    assert_eq!(proxy.logged_path("/stream")["reason"], "client_gone");
}

#[test]
fn a_reset_in_the_middle_of_a_pausing_answer_is_noticed() {
    a_reset_in_the_middle_is_noticed("text/plain");
}

#[test]
fn a_reset_in_the_middle_of_a_stream_of_events_is_noticed() {
    a_reset_in_the_middle_is_noticed("text/event-stream");
}

#[test]
fn a_reset_while_the_answer_flows_ends_the_exchange() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 200 OK\r\n\r\n");
        while call.send([b'x'; 4096]) {}
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/flow", "")).head();
    client.reset();
    eventually(SOON, || origin.open() == 0 && in_flight(&proxy) == 0.0);
    assert_eq!(proxy.logged_path("/flow")["reason"], "client_gone");
}

#[test]
fn a_request_in_the_smallest_pieces_is_one() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    for octet in "POST /p HTTP/1.1\r\nHost: a.test\r\nContent-Length: 2\r\n\r\nhi".bytes() {
        client.send([octet]);
    }
    let answer = client.response().text();
    assert!(answer.starts_with("POST /p HTTP/1.1\r\n") && answer.ends_with("hi"), "{answer}");
}

#[test]
fn a_next_request_that_begins_in_the_last_piece_of_a_body_stays_in_order() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("x", &gate));
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send("POST /1 HTTP/1.1\r\nHost: a.test\r\nContent-Length: 6\r\n\r\nabc");
    eventually(SOON, || origin.requests() == 1);
    // Each piece is read by itself while the first answer is waited for.
    for piece in ["defGET /2 HT", "TP/1.1\r\nHo", "st: a.test\r\n\r\n"] {
        client.send(piece);
        l7rp_testkit::let_pass(Duration::from_millis(100));
    }
    gate.open();
    assert_eq!(client.response().status(), 200);
    assert_eq!(client.response().status(), 200);
    assert_eq!(origin.last().target(), "/2");
    assert_eq!(origin.seen()[0].message.text(), "abcdef");
}

#[test]
fn a_connection_that_has_been_answered_is_held_in_little_memory() {
    const CONNECTIONS: u64 = 2000;
    l7rp::running::raise_open_files();
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).one_worker().start();
    assert_eq!(proxy.get("/").status(), 200);
    let status = std::fs::read_to_string(format!("/proc/{}/status", proxy.pid())).expect("it runs");
    assert!(status.contains("THP_enabled:\t0"), "huge pages are held for little:\n{status}");
    let before = proxy.resident();
    let _idle: Vec<_> = (0..CONNECTIONS)
        .map(|_| {
            let mut client = proxy.client();
            assert_eq!(client.get("/").status(), 200);
            client
        })
        .collect();
    // At once: what a request needs is given back with its answer, not some time after it.
    let each = proxy.resident().saturating_sub(before) / CONNECTIONS;
    assert!(each < 1536, "{each} octets for each connection");
}

#[test]
fn many_pipelined_requests_wait_in_bounded_memory() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("x", &gate));
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    // More than any buffer holds.
    let all: String = (0..6000).map(|n| get("a.test", &format!("/{n:0100}"), "")).collect();
    let mut sender = client.wire.twin();
    let sending = std::thread::spawn(move || sender.write(all.as_bytes()));
    eventually(SOON, || origin.requests() == 1);
    let before = proxy.resident();
    l7rp_testkit::let_pass(Duration::from_millis(200));
    assert!(proxy.resident() < before + (1 << 20));
    gate.open();
    for n in 0..6000 {
        assert_eq!(client.response().status(), 200, "{n}");
    }
    sending.join().expect("the sender ends").expect("all is taken");
    assert_eq!(origin.last().target(), format!("/{:0100}", 5999));
}

#[test]
fn pipelined_requests_are_answered_to_a_client_that_ends_its_side() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send((0..5).map(|n| get("a.test", &format!("/{n}"), "")).collect::<String>());
    client.wire.half_close().expect("it can");
    for n in 0..5 {
        assert!(client.response().text().starts_with(&format!("GET /{n} ")));
    }
    assert!(client.is_closed_within(SOON));
}

#[test]
fn an_empty_line_that_comes_in_two_parts_is_nothing() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).one_worker().start();
    let mut client = proxy.client();
    client.send("\r");
    // The first part must have been read alone, which nothing outside shows.
    l7rp_testkit::let_pass(Duration::from_millis(100));
    client.send("\n");
    l7rp_testkit::let_pass(Duration::from_millis(100));
    assert_eq!(client.get("/").status(), 200);
    assert_counts(&proxy, "proxy_panics_total", &[], 0.0);
}
