//! Connections to upstreams are used again, safely.

use std::time::Duration;

use l7rp_testkit::{Call, Gate, Origin, SOON, Then, eventually, let_pass, reply};

use crate::setup::{assert_failed, get, over, post};

#[test]
fn a_connection_serves_many_requests() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).one_worker().start();
    for n in 0..6 {
        // Bodies of all kinds must leave the connection where the next request begins.
        let answer = match n % 3 {
            0 => proxy.client().get(&format!("/{n}")),
            1 => proxy.client().ask(post(&format!("/{n}"), "body")),
            _ => proxy.client().ask(format!(
                "PUT /{n} HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n\
                 3\r\nabc\r\n0\r\n\r\n"
            )),
        };
        assert_eq!(answer.status(), 200);
    }
    assert_eq!((origin.requests(), origin.accepted()), (6, 1));
    assert_eq!(proxy.logged_path("/0")["conn_reused"], false);
    assert_eq!(proxy.logged_path("/5")["conn_reused"], true);
    let metrics = proxy.metrics();
    assert_eq!(metrics.sum("proxy_upstream_connections", &[("state", "idle")]), 1.0);
    assert_eq!(metrics.sum("proxy_upstream_connections", &[("state", "active")]), 0.0);
}

#[test]
fn an_upstream_that_says_close_is_not_used_again() {
    for head in [
        "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx",
        "HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
        // More than the message: nobody knows what it belongs to.
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxHTTP/1.1 200 OK\r\n",
    ] {
        let origin = Origin::start(reply::raw_kept(head));
        let proxy = over(&[&origin]).one_worker().start();
        for _ in 0..3 {
            assert_eq!(proxy.get("/").text(), "x");
        }
        assert_eq!(origin.accepted(), 3, "{head}");
        eventually(SOON, || origin.open() == 0);
    }
}

/// Serves one request on each connection, and closes on the second without an answer.
pub fn stale(call: &mut Call<'_>) -> Then {
    if call.on_connection > 0 {
        let _ = call.body();
        return Then::Close;
    }
    reply::echo(call)
}

#[test]
fn a_stale_connection_is_not_noticed_by_what_may_be_repeated() {
    let origin = Origin::start(stale);
    let proxy = over(&[&origin]).one_worker().start();
    assert_eq!(proxy.get("/first").status(), 200);
    assert_eq!(proxy.get("/second").status(), 200);
    let targets: Vec<_> =
        origin.seen().iter().map(|s| (s.message.target().to_owned(), s.connection)).collect();
    let expected = [("/first", 0), ("/second", 0), ("/second", 1)];
    assert_eq!(targets, expected.map(|(t, c)| (t.to_owned(), c)));
}

#[test]
fn a_body_that_came_with_the_head_goes_again_too() {
    let origin = Origin::start(stale);
    let proxy = over(&[&origin]).one_worker().start();
    assert_eq!(proxy.get("/first").status(), 200);
    let put = "PUT /p HTTP/1.1\r\nHost: a.test\r\nContent-Length: 4\r\n\r\nbody";
    let answer = proxy.client().ask(put);
    assert_eq!(answer.status(), 200);
    assert!(answer.text().ends_with("body"));
    assert_eq!(origin.requests(), 3);
}

#[test]
fn a_stale_connection_never_repeats_what_may_not_be() {
    let origin = Origin::start(stale);
    let proxy = over(&[&origin]).one_worker().start();
    assert_eq!(proxy.get("/first").status(), 200);
    let answer = proxy.client().ask(post("/once", "order"));
    assert_failed(&proxy, &answer, 502, "connection_terminated", "upstream_closed");
    let orders = origin.seen().iter().filter(|s| s.message.target() == "/once").count();
    assert_eq!(orders, 1);
}

#[test]
fn a_connection_that_the_upstream_closed_is_not_chosen() {
    let origin = Origin::start(|call| {
        let _ = call.body();
        call.send(reply::ok("x"));
        Then::Close
    });
    let proxy = over(&[&origin]).one_worker().start();
    assert_eq!(proxy.get("/").status(), 200);
    eventually(SOON, || origin.open() == 0);
    // Not even a POST meets it.
    assert_eq!(proxy.client().ask(post("/", "x")).status(), 200);
    assert_eq!((origin.requests(), origin.accepted()), (2, 2));
}

#[test]
fn what_may_not_be_repeated_takes_only_a_fresh_connection() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).one_worker().start();
    assert_eq!(proxy.client().ask(post("/", "x")).status(), 200);
    assert_eq!(proxy.client().ask(post("/", "x")).status(), 200);
    assert_eq!(origin.accepted(), 1);
    let_pass(Duration::from_millis(2100));
    assert_eq!(proxy.get("/").status(), 200);
    assert_eq!(origin.accepted(), 1);
    let_pass(Duration::from_millis(2100));
    assert_eq!(proxy.client().ask(post("/", "x")).status(), 200);
    assert_eq!(origin.accepted(), 2);
}

#[test]
fn no_more_connections_than_allowed_are_kept() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("x", &gate));
    let proxy = over(&[&origin]).one_worker().pool("keepalive: { max_idle: 2 }").start();
    let mut clients: Vec<_> = (0..5).map(|_| proxy.client()).collect();
    for client in &mut clients {
        client.send(get("a.test", "/", ""));
    }
    eventually(SOON, || origin.requests() == 5);
    gate.open();
    for client in &mut clients {
        assert_eq!(client.response().status(), 200);
    }
    eventually(SOON, || origin.open() == 2);
    assert_eq!(proxy.metrics().sum("proxy_upstream_connections", &[("state", "idle")]), 2.0);
}

#[test]
fn idle_connections_are_closed_after_their_time() {
    let plain = Origin::start(reply::name("x"));
    let proxy = over(&[&plain]).pool("keepalive: { idle_timeout: 200ms }").start();
    assert_eq!(proxy.get("/").status(), 200);
    eventually(Duration::from_secs(4), || plain.open() == 0);
    eventually(SOON, || proxy.metrics().sum("proxy_upstream_connections", &[]) == 0.0);
}

#[test]
fn an_upstreams_own_idle_time_is_obeyed() {
    let telling = Origin::start(reply::raw_kept(
        "HTTP/1.1 200 OK\r\nKeep-Alive: timeout=1, max=9\r\nContent-Length: 0\r\n\r\n",
    ));
    let proxy = over(&[&telling]).start();
    assert_eq!(proxy.get("/").status(), 200);
    eventually(Duration::from_secs(4), || telling.open() == 0);
}

#[test]
fn an_upstream_that_answers_before_the_request_is_out_is_not_used_again() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n");
        reply::hang(call)
    });
    let proxy = over(&[&origin]).one_worker().start();
    let mut client = proxy.client();
    let answer = client.ask("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 100\r\n\r\nhalf");
    assert_eq!(answer.status(), 403);
    eventually(SOON, || origin.open() == 0);
}

#[test]
fn an_answer_in_the_smallest_pieces_is_one() {
    let whole = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n";
    let origin = Origin::start(move |call| {
        for octet in whole.bytes() {
            call.send([octet]);
        }
        Then::Next
    });
    let proxy = over(&[&origin]).one_worker().start();
    for _ in 0..2 {
        assert_eq!(proxy.get("/").text(), "hi");
    }
    assert_eq!(origin.accepted(), 1);
}

#[test]
fn an_answer_to_head_leaves_the_connection_where_it_should() {
    let origin = Origin::start(|call| {
        let body = if call.request.method() == "HEAD" { "" } else { "2\r\nhi\r\n0\r\n\r\n" };
        call.send(format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{body}"));
        Then::Next
    });
    let proxy = over(&[&origin]).one_worker().start();
    let mut client = proxy.client();
    for _ in 0..2 {
        assert_eq!(client.send("HEAD / HTTP/1.1\r\nHost: a.test\r\n\r\n").head().status(), 200);
        assert_eq!(client.get("/").text(), "hi");
    }
    assert_eq!(origin.accepted(), 1);
}
