//! Every way in which an upstream fails has its own status, reason and count, and none looks
//! like a whole answer.

use std::time::Duration;

use l7rp_testkit::{Call, Origin, SOON, Then, eventually, reply};

use crate::setup::{assert_failed, get, in_flight, over, post};

/// One request to one upstream that fails so; the counts that follow.
#[track_caller]
fn fails(origin: &Origin, pool: &str, status: u16, error: &str, reason: &str) {
    let proxy = over(&[origin]).pool(pool).start();
    let answer = proxy.get("/");
    assert_failed(&proxy, &answer, status, error, reason);
    let metrics = proxy.metrics();
    let code = status.to_string();
    assert_eq!(metrics.sum("proxy_requests_total", &[("route", "r"), ("status", &code)]), 1.0);
    assert_eq!(metrics.sum("proxy_upstream_requests_total", &[("status", "err")]), 1.0);
    assert_eq!(metrics.sum("proxy_upstream_inflight", &[]), 0.0);
    let line = proxy.logged_path("/");
    assert_eq!((&line["upstream"], &line["pool"]), (&origin.url().into(), &"b".into()));
    let event = proxy.wait_for_event("upstream_error", |e| e["reason"] == reason, SOON);
    assert_eq!(event["upstream"], origin.url());
}

#[test]
fn refused() {
    fails(&Origin::refusing(), "connect_timeout: 5s", 502, "connection_refused", "connect_refused");
}

#[test]
fn not_accepted_in_time() {
    let origin = Origin::never_accepting();
    fails(&origin, "connect_timeout: 300ms", 504, "connection_timeout", "connect_timeout");
}

#[test]
fn closed_without_an_answer() {
    let origin = Origin::start(reply::close);
    fails(&origin, "max_in_flight: 9", 502, "connection_terminated", "upstream_closed");
}

#[test]
fn reset_without_an_answer() {
    let origin = Origin::start(|_| Then::Reset);
    fails(&origin, "max_in_flight: 9", 502, "connection_terminated", "upstream_closed");
}

#[test]
fn closed_in_the_middle_of_the_head() {
    let origin = Origin::start(reply::raw("HTTP/1.1 200 OK\r\nContent-Le"));
    fails(&origin, "max_in_flight: 9", 502, "connection_terminated", "upstream_closed");
}

#[test]
fn no_answer_in_time() {
    let origin = Origin::start(reply::hang);
    let pool = "response_header_timeout: 300ms";
    fails(&origin, pool, 504, "http_response_timeout", "response_timeout");
    eventually(SOON, || origin.open() == 0);
}

#[test]
fn no_http() {
    let origin = Origin::start(reply::raw("SSH-2.0-OpenSSH_9.9\r\n\r\n"));
    fails(&origin, "max_in_flight: 9", 502, "http_protocol_error", "malformed_start_line");
}

#[test]
fn an_answer_that_could_be_read_in_two_ways() {
    for (fields, reason) in [
        ("Content-Length: 3\r\nContent-Length: 4\r\n", "bad_content_length"),
        (
            "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
            "content_length_with_transfer_encoding",
        ),
        ("Transfer-Encoding: gzip, chunked\r\n", "bad_transfer_encoding"),
        ("X-A: b\r\n folded\r\n", "malformed_field_name"),
        ("X-A: a\0b\r\n", "malformed_field_value"),
    ] {
        let origin = Origin::start(reply::raw_kept(format!("HTTP/1.1 200 OK\r\n{fields}\r\nabc")));
        let proxy = over(&[&origin]).one_worker().start();
        for _ in 0..2 {
            let answer = proxy.get("/");
            assert_eq!(answer.status(), 502, "{fields}");
            let status = answer.get("proxy-status").expect("a reason");
            assert!(status.contains("error=http_protocol_error"), "{fields}: {status}");
            assert!(status.contains(reason) || fields.starts_with("X-A"), "{fields}: {status}");
        }
        assert_eq!(origin.accepted(), 2, "its connection is not used again: {fields}");
    }
}

#[test]
fn a_head_too_large() {
    let head = format!("HTTP/1.1 200 OK\r\nX-Big: {}\r\n\r\n", "x".repeat(80 << 10));
    let origin = Origin::start(reply::raw(head));
    let error = "http_response_header_section_size";
    fails(&origin, "max_in_flight: 9", 502, error, "response_head_too_large");
}

#[test]
fn a_large_head_within_the_bound_passes() {
    let cookies = format!("Set-Cookie: c={}\r\n", "v".repeat(2000)).repeat(30);
    let origin = Origin::start(reply::raw_kept(format!(
        "HTTP/1.1 200 OK\r\n{cookies}Content-Length: 0\r\n\r\n"
    )));
    let answer = over(&[&origin]).start().get("/");
    assert_eq!((answer.status(), answer.all("set-cookie").len()), (200, 30));
}

#[test]
fn the_routes_time_is_over() {
    let origin = Origin::start(reply::hang);
    let proxy = over(&[&origin]).route("timeouts: { total: 300ms }").start();
    let answer = proxy.get("/");
    assert_failed(&proxy, &answer, 504, "http_response_timeout", "total_timeout");
}

/// The answer is cut: the client must notice, and the log says why.
#[track_caller]
fn is_cut(
    answer: &str,
    reason: &str,
    script: impl Fn(&mut Call<'_>) -> Then + Send + Sync + 'static,
) {
    let origin = Origin::start(script);
    let proxy = over(&[&origin]).pool("response_header_timeout: 300ms").start();
    let mut client = proxy.client();
    let got = client.send(get("a.test", "/cut", "")).try_response();
    assert!(got.is_err(), "{answer}: looks complete: {got:?}");
    let line = proxy.logged_path("/cut");
    assert_eq!((&line["reason"], &line["status"]), (&reason.into(), &200.into()), "{answer}");
    let metrics = proxy.metrics();
    assert_eq!(metrics.sum("proxy_upstream_requests_total", &[("status", "err")]), 1.0, "{answer}");
    assert_eq!(metrics.sum("proxy_upstream_inflight", &[]), 0.0);
    let event = proxy.wait_for_event("upstream_error", |e| e["reason"] == reason, SOON);
    assert_eq!(event["upstream"], origin.url());
}

#[test]
fn a_cut_answer_never_looks_complete() {
    for answer in [
        "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc",
    ] {
        is_cut(answer, "response_truncated", reply::raw(answer));
    }
    is_cut("bad chunk", "bad_chunk", |call| {
        call.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n");
        // What is wrong must not come with what is right.
        l7rp_testkit::let_pass(Duration::from_millis(100));
        call.send("zz\r\n");
        Then::Close
    });
}

#[test]
fn an_answer_that_is_broken_before_any_of_it_is_out_is_a_502() {
    let broken = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n";
    let origin = Origin::start(reply::raw(broken));
    let proxy = over(&[&origin]).start();
    let answer = proxy.get("/");
    assert_failed(&proxy, &answer, 502, "http_protocol_error", "bad_chunk");
    // But for the request id, which has any three digits now and then.
    let words = answer.text().lines().next().unwrap_or_default().to_owned();
    assert!(!words.contains("abc"), "{words}");
    // An old client, who gets its chunks taken off, is told as well.
    let mut client = proxy.client();
    client.send("GET /old HTTP/1.0\r\nHost: a.test\r\n\r\n");
    assert_eq!(client.response().status(), 502);
}

#[test]
fn a_stalled_answer_is_cut() {
    let head = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc";
    is_cut(head, "response_stalled", move |call| {
        call.send(head);
        reply::hang(call)
    });
}

#[test]
fn an_answer_that_ends_with_its_connection_is_cut_by_a_reset() {
    is_cut("by close", "response_truncated", |call| {
        call.send("HTTP/1.1 200 OK\r\n\r\nabc");
        // The reset must not overtake what was sent.
        l7rp_testkit::let_pass(Duration::from_millis(100));
        Then::Reset
    });
    // Closed in order, it is complete.
    let origin = Origin::start(reply::raw("HTTP/1.1 200 OK\r\n\r\nabc"));
    assert_eq!(over(&[&origin]).start().get("/").text(), "abc");
}

#[test]
fn what_was_not_sent_goes_to_another_upstream_whatever_its_method() {
    let good = Origin::start(reply::echo);
    for (bad, pool) in [
        (Origin::refusing(), "selector: { algorithm: round-robin }"),
        (Origin::never_accepting(), "selector: { algorithm: round-robin }, connect_timeout: 200ms"),
    ] {
        let proxy = over(&[&bad, &good]).pool(pool).start();
        for n in 0..4 {
            let answer = proxy.client().ask(post(&format!("/{n}"), "a body"));
            assert_eq!(answer.status(), 200);
            assert!(answer.text().ends_with("a body"));
        }
        let tries: u64 = (0..4)
            .map(|n| proxy.logged_path(&format!("/{n}"))["attempts"].as_u64().unwrap_or(0))
            .sum();
        assert!(tries > 4, "some met the bad upstream first");
        let errors = proxy
            .metrics()
            .sum("proxy_upstream_requests_total", &[("upstream", &bad.url()), ("status", "err")]);
        assert_eq!(errors, (tries - 4) as f64);
        assert_eq!(in_flight(&proxy), 0.0);
    }
    assert_eq!(good.requests(), 8);
}

#[test]
fn a_long_body_goes_to_another_upstream_too() {
    let good = Origin::start(|call| {
        let length = call.body().map_or(0, <[u8]>::len);
        call.send(reply::ok(&length.to_string()));
        Then::Next
    });
    let bad = Origin::refusing();
    let proxy = over(&[&bad, &good]).pool("selector: { algorithm: round-robin }").start();
    let body = "b".repeat(1 << 20);
    for _ in 0..2 {
        assert_eq!(proxy.client().ask(post("/", &body)).text(), (1 << 20).to_string());
    }
}

#[test]
fn all_refuse() {
    let (a, b) = (Origin::refusing(), Origin::refusing());
    let proxy = over(&[&a, &b]).start();
    let answer = proxy.client().ask(post("/", "x"));
    assert_failed(&proxy, &answer, 502, "connection_refused", "connect_refused");
    assert_eq!(proxy.logged_path("/")["attempts"], 2);
}

#[test]
fn what_may_have_arrived_is_not_sent_again() {
    let bad = Origin::start(reply::close);
    let good = Origin::start(reply::name("x"));
    let proxy = over(&[&bad, &good]).pool("selector: { algorithm: round-robin }").start();
    let statuses: Vec<_> = (0..4).map(|_| proxy.client().ask(post("/", "x")).status()).collect();
    assert_eq!(statuses.iter().filter(|s| **s == 502).count(), 2, "{statuses:?}");
    assert_eq!((bad.requests(), good.requests()), (2, 2));
}

#[test]
fn an_error_of_the_upstreams_own_passes_untouched() {
    let origin = Origin::start(reply::raw_kept(
        "HTTP/1.1 503 Busy Here\r\nContent-Length: 4\r\nRetry-After: 7\r\n\r\nbusy",
    ));
    let proxy = over(&[&origin]).start();
    let answer = proxy.get("/");
    assert_eq!(answer.start, "HTTP/1.1 503 Busy Here");
    assert_eq!((answer.get("retry-after"), answer.get("proxy-status")), (Some("7"), None));
    assert_eq!(answer.text(), "busy");
    let line = proxy.logged_path("/");
    assert_eq!((&line["level"], line.get("reason")), (&"error".into(), None));
}

#[test]
fn a_switch_that_nobody_asked_for() {
    let origin =
        Origin::start(reply::raw("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"));
    fails(&origin, "max_in_flight: 9", 502, "http_protocol_error", "bad_interim_response");
}

#[test]
fn a_head_that_drips_is_not_waited_for() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 200 OK\r\nX: ");
        // An octet now and then does not set the clock back.
        while call.send("x") {
            l7rp_testkit::let_pass(Duration::from_millis(20));
        }
        Then::Close
    });
    let pool = "response_header_timeout: 400ms";
    fails(&origin, pool, 504, "http_response_timeout", "response_timeout");
}

#[test]
fn an_upload_that_the_upstream_does_not_want_ends() {
    let origin = Origin::start(|call| {
        let _ = call.wire.read_exact(5);
        Then::Reset
    });
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1000\r\n\r\nbegin");
    let answer = client.response();
    assert_failed(&proxy, &answer, 502, "connection_terminated", "upstream_closed");
}

#[test]
fn the_routes_time_is_over_in_the_middle_of_the_answer() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n");
        while call.send("x") {
            l7rp_testkit::let_pass(Duration::from_millis(20));
        }
        Then::Close
    });
    let proxy = over(&[&origin]).route("timeouts: { total: 400ms }").start();
    let mut client = proxy.client();
    assert!(client.send(get("a.test", "/cut", "")).try_response().is_err());
    assert_eq!(proxy.logged_path("/cut")["reason"], "total_timeout");
    eventually(SOON, || origin.open() == 0 && in_flight(&proxy) == 0.0);
}

#[test]
fn a_flood_of_interim_answers_is_ended() {
    let origin = Origin::start(|call| {
        while call.send("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n") {}
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    let answer = proxy.get("/");
    assert_failed(&proxy, &answer, 502, "http_protocol_error", "bad_interim_response");
    eventually(SOON, || origin.open() == 0 && in_flight(&proxy) == 0.0);
}
