//! Somebody is woken at night and reads the log: times that are another try's, requests that failed
//! and look well, names of what was before, and what was nobody's business.

use std::time::Duration;

use l7rp_testkit::{Origin, Proxy, Then, Value, let_pass, reply};

use crate::setup::{client_from, get, over};
use crate::tries::{PLENTY, in_turn, retrying, say};
use crate::verdict::TOUCHY;

/// The time of a try, in ms.
#[track_caller]
fn ms(line: &Value, number: usize) -> f64 {
    line["tries"][number]["ms"].as_f64().unwrap_or_else(|| panic!("no time: {line}"))
}

/// The first answers at once, and what comes after it takes its time: that is not the first one's.
#[test]
fn an_answer_that_was_kept_has_its_own_time() {
    let origins: [Origin; 2] = in_turn(|call, nth| {
        if nth == 0 {
            return say(call, 503, "", "busy");
        }
        let_pass(Duration::from_millis(800));
        reply::close(call)
    });
    let proxy = retrying(&origins.each_ref(), "max_attempts: 2").one_worker().start();
    assert_eq!(proxy.get("/").text(), "busy");
    let line = proxy.logged_path("/");
    assert!(ms(&line, 1) >= 800.0, "{line}");
    assert!(ms(&line, 0) < 600.0, "the first has answered long before: {line}");
    assert!(line["upstream_ms"].as_f64().is_some_and(|ms| ms < 600.0), "{line}");
}

/// Two that race.
fn race(origins: &[Origin; 2]) -> Proxy {
    let setup = retrying(&origins.each_ref(), "max_attempts: 2, hedge_after: 100ms");
    setup.one_worker().start()
}

#[test]
fn the_first_of_a_race_that_fails_has_its_own_time() {
    let origins: [Origin; 2] = in_turn(|call, nth| {
        let_pass(Duration::from_millis(if nth == 0 { 200 } else { 1200 }));
        if nth == 0 { reply::close(call) } else { say(call, 200, "", "hedge") }
    });
    let proxy = race(&origins);
    assert_eq!(proxy.get("/").text(), "hedge");
    let line = proxy.logged_path("/");
    assert_eq!(line["tries"][0]["error"], "upstream_closed", "{line}");
    assert!(ms(&line, 0) < 800.0, "it had failed a second before: {line}");
}

#[test]
fn the_second_of_a_race_that_fails_has_its_own_time() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        0 => {
            let_pass(Duration::from_millis(1300));
            say(call, 200, "", "primary")
        }
        _ => say(call, 503, "", "busy"),
    });
    let proxy = race(&origins);
    assert_eq!(proxy.get("/").text(), "primary");
    let line = proxy.logged_path("/");
    assert_eq!(line["tries"][1]["status"], 503, "{line}");
    assert!(ms(&line, 1) < 800.0, "it had answered at once: {line}");
}

/// Its breaker opens by the very answer that would be tried again, and there is nobody else.
#[test]
fn an_answer_that_nobody_is_left_to_better_says_so() {
    let origin = Origin::start(|call| say(call, 500, "", "no"));
    let proxy = over(&[&origin])
        .pool(TOUCHY)
        .pool(PLENTY)
        .route("middleware: [{ retry: { backoff: 1ms, max_attempts: 2, retry_on: [500] } }]")
        .one_worker()
        .start();
    assert_eq!(proxy.get("/").text(), "no");
    let line = proxy.logged_path("/");
    assert_eq!(line["attempts"], 1, "{line}");
    assert_eq!(line["not_tried"][0]["why"], "breaker_open", "{line}");
    assert_eq!(line["no_retry"], "no_upstream", "{line}");
}

/// 200 is how HTTP carries it, and the call has failed all the same.
#[test]
fn a_call_that_an_upstream_fails_is_no_plain_success() {
    let answer = "HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\nGrpc-Status: 14\r\n\
                  Content-Length: 0\r\n\r\n";
    let origin = Origin::start(reply::raw_kept(answer));
    let proxy = over(&[&origin]).start();
    let call = "POST /s/m HTTP/1.1\r\nHost: a.test\r\nContent-Type: application/grpc\r\n\
                TE: trailers\r\nConnection: TE\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(proxy.client().ask(call).get("grpc-status"), Some("14"));
    let line = proxy.logged_path("/s/m");
    assert_eq!(line["grpc_status"], 14, "{line}");
    assert_eq!(line["tries"][0]["upstream"], origin.url(), "who has failed? {line}");
    assert_ne!(line["level"], "info", "{line}");
}

/// An upstream gets a request twice, and the line does not know.
#[test]
fn a_request_that_was_sent_twice_is_told_of_as_such() {
    let origin = Origin::start(|call| {
        if call.on_connection > 0 {
            let _ = call.body();
            let_pass(Duration::from_millis(300));
            return Then::Close;
        }
        say(call, 500, "", "no")
    });
    let proxy = over(&[&origin]).pool("circuit_breaker: { failure_ratio: 1.0 }").one_worker();
    let proxy = proxy.start();
    assert_eq!(proxy.get("/first").status(), 500);
    assert_eq!(proxy.get("/second").status(), 500);
    let sent = origin.seen().iter().filter(|seen| seen.message.target() == "/second").count();
    assert_eq!(sent, 2);
    let line = proxy.logged_path("/second").to_string();
    let told = line.contains("stale") || line.matches("conn_reused\":true").count() > 0;
    assert!(told, "nothing tells of the connection that was closed under it: {line}");
    let line = proxy.logged_path("/second");
    assert_eq!((&line["attempts"], &line["tries"][0]["repeated"]), (&1.into(), &true.into()));
    assert!(ms(&line, 0) >= 300.0 && ms(&line, 1) < 300.0, "each has its own time: {line}");
    assert_eq!(line["tries"][1]["status"], 500, "{line}");
}

/// The second of two that race has met a connection that was closed under it, and has won then.
#[test]
fn the_second_of_a_race_that_was_sent_twice_is_told_of_as_such() {
    let origins: [Origin; 2] = in_turn(|call, nth| match (call.request.target(), nth) {
        ("/race", 0) => {
            let_pass(Duration::from_millis(1500));
            say(call, 200, "", "primary")
        }
        ("/race", _) if call.on_connection > 0 => reply::close(call),
        ("/race", _) => say(call, 200, "", "hedge"),
        _ => say(call, 200, "", "before"),
    });
    let setup = retrying(&origins.each_ref(), "max_attempts: 2, hedge_after: 300ms");
    let proxy = setup.one_worker().start();
    for path in ["/one", "/two"] {
        assert_eq!(proxy.get(path).text(), "before");
    }
    assert_eq!(proxy.get("/race").text(), "hedge");
    let line = proxy.logged_path("/race");
    assert_eq!((&line["attempts"], &line["hedged"]), (&2.into(), &true.into()), "{line}");
    assert_eq!(line["tries"][0]["error"], "lost_race", "{line}");
    assert_eq!(line["tries"][1]["error"], "upstream_closed", "{line}");
    for (number, key) in [(1, "repeated"), (1, "conn_reused"), (1, "hedge"), (2, "hedge")] {
        assert_eq!(line["tries"][number][key], true, "{line}");
    }
    assert_eq!((&line["tries"][2]["status"], &line["tries"][3]), (&200.into(), &Value::Null));
}

/// Behind an edge that names nobody, what an inner proxy has told the edge stays there.
#[test]
fn a_decision_of_an_inner_proxy_is_not_told_to_everybody() {
    let origin = Origin::start(reply::name("x"));
    let inner = over(&[&origin]).listener("decision_header_for: [\"127.0.0.0/8\"]").start();
    let edge = over(&[])
        .upstream(&format!("http://{}", inner.address()), "weight: 1")
        .listener("decision_header_for: [\"127.0.0.7/32\"]")
        .start();
    let told = client_from(8, &edge).get("/");
    assert_eq!(told.status(), 200);
    assert_eq!(told.get("x-l7rp-decision"), None, "the edge names 127.0.0.7 alone: {told:?}");
}

#[test]
fn credentials_in_a_target_that_is_refused_are_not_logged() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    for (target, id) in [
        ("http://user:s3cret@a.test/", 1),
        ("https://user:s3cret@a.test/x", 2),
        ("ftp://user:s3cret@a.test/", 3),
        ("/a#access_token=s3cret", 4),
    ] {
        let lines = format!("Host: a.test\r\nX-Number: {id}\r\n");
        let answer = proxy.client().ask(format!("GET {target} HTTP/1.1\r\n{lines}\r\n"));
        assert_eq!(answer.status(), 400, "{target}");
        let of_this = answer.get("x-request-id").expect("an id").to_owned();
        let line = proxy.logged(|line| line["request_id"] == of_this.as_str());
        assert!(!line.to_string().contains("s3cret"), "{line}");
    }
}

/// One whose head was good spoke HTTP/1.0; the next one, which is no request, did not.
#[test]
fn a_head_that_is_refused_has_nothing_of_the_one_before() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).one_worker().start();
    let old = "GET /old HTTP/1.0\r\nHost: a.test\r\n\r\n";
    assert_eq!(proxy.client().ask(old).status(), 200);
    assert_eq!(proxy.logged_path("/old")["protocol"], "HTTP/1.0");
    let answer = proxy.client().ask("GET /new HTTP/1.1\r\nHost : a.test\r\n\r\n");
    assert_eq!(answer.status(), 400);
    let id = answer.get("x-request-id").expect("an id").to_owned();
    let line = proxy.logged(|line| line["request_id"] == id.as_str());
    assert_eq!(line["protocol"], "HTTP/1.1", "{line}");
}

/// A call that was good is followed by a head that is none, with its fields in the same places.
#[test]
fn a_head_that_is_refused_is_not_answered_as_the_call_before() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).one_worker().start();
    let first = "POST /s/m HTTP/1.1\r\nHost: a.test\r\nContent-Type: application/grpc\r\n\
                 TE: trailers\r\nConnection: TE\r\nContent-Length: 0\r\n\r\n";
    proxy.client().ask(first);
    // What stood there was a field; here it is part of another one's value.
    let value = "x".repeat("Host: a.test\r\n".len() - "A: ".len());
    let second =
        first.replace("Host: a.test\r\nContent-Type: ", &format!("A: {value}Content-Type: "));
    assert_eq!(second.len(), first.len());
    let second = second.replace("TE: trailers\r\n", "TE : trailers");
    let answer = proxy.client().ask(second);
    assert_eq!(answer.status(), 400, "it is no call: {answer:?}");
}

#[test]
fn a_target_without_a_path_is_logged_as_it_was_sent_on() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let answer = proxy.client().ask("GET http://a.test HTTP/1.1\r\nHost: a.test\r\n\r\n");
    assert_eq!((answer.status(), origin.last().target()), (200, "/"));
    let id = answer.get("x-request-id").expect("an id").to_owned();
    let line = proxy.logged(|line| line["request_id"] == id.as_str());
    assert_eq!(line["path"], "/", "{line}");
}

/// A change of readiness is one.
#[test]
fn readiness_that_changes_goes_from_one_to_the_other() {
    let origin = Origin::refusing();
    let health = "health: { active: { path: /healthz, interval: 100ms, timeout: 90ms } }";
    let mut proxy = over(&[&origin]).pool(health).top("drain: { delay: 1500ms }").start();
    crate::setup::assert_counts(&proxy, "proxy_upstream_eligible", &[], 0.0);
    let_pass(Duration::from_millis(600));
    proxy.signal(l7rp_testkit::Signal::TERM);
    assert_eq!(proxy.wait_exit(l7rp_testkit::SOON), 0);
    for event in proxy.events("readiness_changed") {
        assert_ne!(event["from"], event["to"], "{event}");
    }
}

/// Guard: a name in any case, from whoever, is the same.
#[test]
fn what_a_client_says_of_decisions_is_its_own() {
    let origin = Origin::start(reply::raw_kept(
        "HTTP/1.1 200 OK\r\nx-L7RP-decision: route=\"lie\"\r\nX-L7rp-Decision: route=\"lie\"\r\n\
         Content-Length: 1\r\n\r\nx",
    ));
    let proxy = over(&[&origin]).listener("decision_header_for: [\"127.0.0.7/32\"]").start();
    let told = client_from(7, &proxy).ask(get("a.test", "/", "X-L7rp-Decision: me\r\n"));
    let all = told.all("x-l7rp-decision");
    assert_eq!(all.len(), 1, "{told:?}");
    assert!(all[0].starts_with("route=\"r\""), "{told:?}");
}

/// Guard: who leaves with its HTTP/2 connection has left, and was not cut off by us.
#[test]
fn a_client_that_takes_its_connection_away_is_the_one_that_left() {
    let origin = Origin::start(reply::hang);
    let proxy = over(&[&origin]).start();
    let client = crate::http2_tools::Conn::open(&proxy);
    let begun = client.begin(crate::http2_tools::request("GET", "/gone"), true);
    l7rp_testkit::eventually(l7rp_testkit::SOON, || origin.requests() == 1);
    client.end.abort();
    drop((begun, client));
    let line = proxy.logged_path("/gone");
    assert_eq!((&line["status"], &line["reason"]), (&499.into(), &"client_gone".into()), "{line}");
}

/// Whoever adds it up takes a count that goes down for a restart, and adds all of it once more.
#[test]
fn no_count_of_connections_goes_down() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    for _ in 0..20 {
        assert_eq!(proxy.get("/").status(), 200);
    }
    // It has connected, and is not counted before it says what it speaks.
    let mut late = proxy.client();
    let all = || proxy.metrics().sum("proxy_connections_total", &[]);
    let of_http1 = || proxy.metrics().sum("proxy_connections_total", &[("protocol", "http1")]);
    l7rp_testkit::eventually(l7rp_testkit::SOON, || all() == 20.0);
    let before = of_http1();
    late.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
    let of_http2 = || proxy.metrics().sum("proxy_connections_total", &[("protocol", "http2")]);
    l7rp_testkit::eventually(l7rp_testkit::SOON, || of_http2() == 1.0);
    assert!(of_http1() >= before, "from {before} to {}", of_http1());
}

/// How long it was waited for is what the line is for.
#[test]
fn a_head_that_never_ended_has_taken_its_time() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).listener("timeouts: { read_header: 500ms }").start();
    let mut client = proxy.client();
    assert_eq!(client.send("GET / HTTP/1.1\r\nHost: a").response().status(), 408);
    let line = proxy.logged(|line| line["reason"] == "head_timeout");
    assert!(line["duration_ms"].as_f64().is_some_and(|ms| ms > 400.0), "{line}");
}

/// What was refused by HTTP/2 is named as it is by HTTP/1.
#[test]
fn what_is_refused_by_http2_is_named() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let refused = proxy.client().ask("TRACE /one HTTP/1.1\r\nHost: a.test\r\n\r\n");
    assert_eq!(refused.status(), 405);
    let line = proxy.logged(|line| line["reason"] == "method_refused");
    assert_eq!((&line["method"], &line["path"]), (&"TRACE".into(), &"/one".into()), "{line}");
    let conn = crate::http2_tools::Conn::open(&proxy);
    let refused = conn.ask(crate::http2_tools::request("TRACE", "/two")).expect("an answer");
    assert_eq!(refused.status, 405);
    let is_it = |line: &Value| line["reason"] == "method_refused" && line["protocol"] == "HTTP/2";
    let line = proxy.logged(is_it);
    assert_eq!((&line["method"], &line["path"]), (&"TRACE".into(), &"/two".into()), "{line}");
}

/// It was ready, and says so no more.
#[test]
fn a_process_that_ends_quickly_tells_that_it_is_not_ready() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = over(&[&origin]).start();
    assert_eq!(proxy.ask_admin("/readyz").status(), 204);
    proxy.signal(l7rp_testkit::Signal::TERM);
    assert_eq!(proxy.wait_exit(l7rp_testkit::SOON), 0);
    assert_eq!(proxy.events("readiness_changed").len(), 1, "readyz turns 503 at once");
}
