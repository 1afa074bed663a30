//! A route with `retry` tries again what may be tried again, where it was not tried before, and
//! passes on what it cannot better.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::SeqCst};

use l7rp_testkit::{Call, Gate, Message, Origin, Proxy, SOON, Then, eventually, reply};

use crate::setup::{assert_counts, assert_failed, get, over, post};
use crate::tries::{answer, assert_at_rest, attempts, in_turn, requests, retrying, say, says};

/// Everything that was tried again.
fn tried_again(proxy: &Proxy, outcome: &str) -> f64 {
    let labels = [("route", "r"), ("outcome", outcome)];
    proxy.metrics().sum("proxy_retry_attempts_total", &labels)
}

#[test]
fn a_listed_status_is_tried_on_another_upstream() {
    for status in [502, 503, 504] {
        let bad = Origin::start(says(status, "bad"));
        let good = Origin::start(reply::name("good"));
        let proxy = retrying(&[&bad, &good], "").start();
        let mut client = proxy.client();
        let mut tries = 0;
        for n in 0..6 {
            let path = format!("/{n}");
            let answer = client.get(&path);
            assert_eq!((answer.status(), answer.text().as_str()), (200, "good"));
            assert_eq!(proxy.logged_path(&path)["upstream"], good.url());
            tries += attempts(&proxy, &path);
        }
        let failed = bad.requests();
        assert!(failed >= 2 && good.requests() == 6, "{failed}");
        assert_eq!(tries, 6 + failed as u64);
        let code = status.to_string();
        let at_bad = [("upstream", bad.url()), ("status", code)];
        let at_bad = at_bad.each_ref().map(|(key, value)| (*key, value.as_str()));
        assert_counts(&proxy, "proxy_upstream_requests_total", &at_bad, failed as f64);
        assert_counts(&proxy, "proxy_requests_total", &[("status", "200")], 6.0);
        assert_eq!(tried_again(&proxy, "success"), failed as f64);
        assert_eq!(tried_again(&proxy, "failure"), 0.0);
        assert_at_rest(&proxy);
    }
}

#[test]
fn what_is_not_listed_is_passed_on() {
    for (keys, status, tries) in [
        ("", 500, 1),
        ("", 404, 1),
        ("", 429, 1),
        ("retry_on: [500]", 503, 1),
        ("retry_on: []", 503, 1),
        ("retry_on: [429, 500]", 429, 3),
        ("retry_on: [429, 500]", 500, 3),
    ] {
        let origins: [Origin; 2] = in_turn(move |call, _| say(call, status, "", "said"));
        let proxy = retrying(&origins.each_ref(), keys).start();
        let answer = proxy.get("/");
        assert_eq!((answer.status(), answer.text().as_str()), (status, "said"), "{keys}");
        assert_eq!(requests(&origins), tries, "{keys}: {status}");
        assert_eq!(attempts(&proxy, "/"), tries as u64);
        // None has given what was wanted, and yet the client has the last answer.
        let again = (tried_again(&proxy, "success"), tried_again(&proxy, "failure"));
        assert_eq!(again, (0.0, tries as f64 - 1.0), "{keys}: {status}");
        assert_at_rest(&proxy);
    }
}

#[test]
fn only_listed_methods_are_tried_again() {
    for (keys, again, once) in [
        ("", &["GET", "HEAD"][..], &["PUT", "DELETE", "OPTIONS", "POST", "PATCH"][..]),
        ("retry_methods: [PUT, POST]", &["PUT", "POST"], &["GET", "HEAD", "DELETE"]),
    ] {
        let origins: [Origin; 2] = in_turn(|call, _| say(call, 503, "", "busy"));
        let proxy = retrying(&origins.each_ref(), &format!("max_attempts: 2, {keys}")).start();
        for (methods, tries) in [(again, 2), (once, 1)] {
            for method in methods {
                let before = requests(&origins);
                let path = format!("/{method}");
                let head = format!("{method} {path} HTTP/1.1\r\nHost: a.test\r\n");
                let mut client = proxy.client();
                client.send(format!("{head}Content-Length: 0\r\n\r\n"));
                assert_eq!(client.head().status(), 503);
                assert_eq!(requests(&origins) - before, tries, "{method} {keys}");
                assert_eq!(attempts(&proxy, &path), tries as u64, "{method} {keys}");
            }
        }
        assert_at_rest(&proxy);
    }
}

#[test]
fn without_retry_a_503_is_passed_on() {
    let origins: [Origin; 2] = in_turn(|call, _| say(call, 503, "", "busy"));
    let proxy = over(&origins.each_ref()).start();
    assert_eq!(proxy.get("/").text(), "busy");
    assert_eq!(requests(&origins), 1);
}

const COOKIES: &str = "Content-Type: application/json\r\nRetry-After: 7\r\n\
                       Set-Cookie: a=1\r\nSet-Cookie: b=2\r\n";

/// Case `retry-post-5xx-untouched`.
#[test]
fn retry_post_5xx_untouched() {
    let script = |name: &'static str| {
        move |call: &mut Call<'_>| {
            if call.request.method() == "POST" {
                return say(call, 503, COOKIES, "{\"why\":\"busy\"}");
            }
            let body = format!("{name}-{}", call.number);
            say(call, 503, "", &body)
        }
    };
    let (a, b) = (Origin::start(script("a")), Origin::start(script("b")));
    let proxy = retrying(&[&a, &b], "max_attempts: 3").start();
    for n in 0..20 {
        let path = format!("/post/{n}");
        let answer = proxy.client().ask(post(&path, &"p".repeat(1024)));
        assert_eq!((answer.status(), answer.text().as_str()), (503, "{\"why\":\"busy\"}"));
        assert_eq!(answer.all("set-cookie"), ["a=1", "b=2"]);
        assert_eq!(answer.get("retry-after"), Some("7"));
        assert_eq!(answer.get("content-type"), Some("application/json"));
        assert_eq!(answer.get("proxy-status"), None, "it is not the proxy's");
        assert_eq!(attempts(&proxy, &path), 1);
    }
    assert_eq!(a.requests() + b.requests(), 20);
    for n in 0..20 {
        let (at_a, at_b) = (a.requests(), b.requests());
        let path = format!("/get/{n}");
        let answer = proxy.get(&path);
        assert_eq!((answer.status(), answer.get("proxy-status")), (503, None));
        assert_eq!(attempts(&proxy, &path), 3);
        let (at_a, at_b) = (a.requests() - at_a, b.requests() - at_b);
        assert!(at_a + at_b == 3 && at_a > 0 && at_b > 0, "{at_a} and {at_b}");
        // The last one's: the only upstream tried twice was tried last.
        let last = if at_a == 2 { ("a", &a) } else { ("b", &b) };
        assert_eq!(answer.text(), format!("{}-{}", last.0, last.1.requests() - 1));
        assert_eq!(proxy.logged_path(&path)["upstream"], last.1.url());
    }
    assert_eq!(tried_again(&proxy, "success") + tried_again(&proxy, "failure"), 40.0);
    assert_at_rest(&proxy);
}

#[test]
fn one_attempt_is_no_retry() {
    let origins: [Origin; 2] = in_turn(|call, _| say(call, 503, "", "busy"));
    let proxy = retrying(&origins.each_ref(), "max_attempts: 1").start();
    assert_eq!(proxy.get("/").text(), "busy");
    assert_eq!((requests(&origins), attempts(&proxy, "/")), (1, 1));
    assert_at_rest(&proxy);
}

#[test]
fn each_try_takes_an_upstream_that_was_not_tried() {
    for selector in [
        "round-robin",
        "weighted-rr",
        "least-conn",
        "p2c-ewma",
        "ip-hash",
        "consistent-hash-bounded, hash_key: client_ip",
    ] {
        let origins: [Origin; 3] = in_turn(|call, _| say(call, 503, "", "busy"));
        let proxy = over(&origins.each_ref())
            .pool(&format!("selector: {{ algorithm: {selector} }}"))
            .pool(crate::tries::NEVER_OPENS)
            .pool(crate::tries::PLENTY)
            .route("middleware: [{ retry: { max_attempts: 3, backoff: 1ms } }]")
            .start();
        for round in 1..5 {
            assert_eq!(proxy.get("/").status(), 503);
            let each = origins.each_ref().map(Origin::requests);
            assert_eq!(each, [round; 3], "{selector}");
        }
        assert_at_rest(&proxy);
    }
}

#[test]
fn with_nobody_left_it_goes_again_on_a_new_connection() {
    let gate = Gate::default();
    let open = gate.clone();
    let [origin] = in_turn(move |call, nth| match call.request.target() {
        "/again" if nth < 2 => say(call, 503, "", "busy"),
        "/before" => {
            open.pass();
            say(call, 200, "", "good")
        }
        _ => say(call, 200, "", "good"),
    });
    let proxy = retrying(&[&origin], "").one_worker().start();
    // Three connections that are there.
    let mut clients: Vec<_> = (0..3).map(|_| proxy.client()).collect();
    for client in &mut clients {
        client.send(get("a.test", "/before", ""));
    }
    eventually(SOON, || origin.requests() == 3);
    gate.open();
    assert!(clients.iter_mut().all(|client| client.response().status() == 200));
    assert_eq!(proxy.get("/again").text(), "good");
    assert_eq!(attempts(&proxy, "/again"), 3);
    let of_request: Vec<_> = origin
        .seen()
        .iter()
        .filter(|seen| seen.message.target() == "/again")
        .map(|seen| seen.connection)
        .collect();
    assert!(of_request[0] < 3, "the first try may take one that is there");
    assert_eq!(of_request[1..], [3, 4], "the others may not");
    assert_at_rest(&proxy);
}

#[test]
fn the_same_head_goes_to_each() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        0 => say(call, 503, "", "busy"),
        _ => say(call, 200, "", "good"),
    });
    let proxy = retrying(&origins.each_ref(), "").start();
    let lines = "Cookie: a=1\r\nx-Odd: 1\r\nX-Odd: 2\r\nConnection: X-Gone\r\nX-Gone: 1\r\n";
    assert_eq!(proxy.client().ask(get("a.test", "/p?q=1", lines)).text(), "good");
    let [a, b] = origins.map(|origin| origin.last().head);
    assert_eq!(String::from_utf8_lossy(&a), String::from_utf8_lossy(&b));
    assert!(!String::from_utf8_lossy(&a).contains("X-Gone"));
}

#[test]
fn an_answer_that_says_when_to_come_again_is_passed_on() {
    for (lines, tries) in [
        ("Retry-After: 7\r\n", 1),
        ("Retry-After: Fri, 31 Dec 2100 23:59:59 GMT\r\n", 1),
        ("Retry-After: 0\r\n", 2),
        ("", 2),
    ] {
        let origins: [Origin; 2] = in_turn(move |call, _| say(call, 503, lines, "busy"));
        let proxy = retrying(&origins.each_ref(), "max_attempts: 2").start();
        let answer = proxy.get("/");
        assert_eq!((answer.status(), answer.text().as_str()), (503, "busy"));
        assert_eq!(requests(&origins), tries, "{lines}");
        let told = lines.trim_end().strip_prefix("Retry-After: ");
        assert_eq!(answer.get("retry-after"), told);
        assert_at_rest(&proxy);
    }
}

/// Fails without an answer.
fn fail(call: &mut Call<'_>, way: &str) -> Then {
    match way {
        "close" => reply::close(call),
        "reset" => Then::Reset,
        "half a head" => reply::raw("HTTP/1.1 200 OK\r\nContent-Le")(call),
        "garbage" => reply::raw("SSH-2.0-OpenSSH_9.9\r\n\r\n")(call),
        "large head" => {
            let head = format!("HTTP/1.1 200 OK\r\nX-Big: {}\r\n\r\n", "x".repeat(80 << 10));
            reply::raw(head)(call)
        }
        "silence" => reply::hang(call),
        other => panic!("{other} is no way to fail"),
    }
}

/// An upstream that always does: the status of what the client is told, and the upstream.
fn failing(way: &'static str) -> (u16, Origin) {
    (if way == "silence" { 504 } else { 502 }, Origin::start(move |call| fail(call, way)))
}

/// Not much of it where the upstream is silent.
fn patience(way: &str) -> &'static str {
    match way {
        "silence" => "response_header_timeout: 500ms",
        _ => "response_header_timeout: 5s",
    }
}

const WAYS: [&str; 6] = ["close", "reset", "half a head", "garbage", "large head", "silence"];

#[test]
fn what_an_upstream_failed_to_answer_is_tried_on_another() {
    for way in WAYS {
        let (status, bad) = failing(way);
        let good = Origin::start(reply::name("good"));
        let proxy = retrying(&[&bad, &good], "").pool(patience(way)).start();
        for n in 0..4 {
            assert_eq!(proxy.get(&format!("/{n}")).text(), "good", "{way}");
        }
        let failed = bad.requests();
        assert!(failed >= 1, "{way}");
        let errors = [("upstream", bad.url()), ("status", "err".to_owned())];
        let errors = errors.each_ref().map(|(key, value)| (*key, value.as_str()));
        assert_counts(&proxy, "proxy_upstream_requests_total", &errors, failed as f64);
        assert_eq!(tried_again(&proxy, "success"), failed as f64, "{way}");
        // What may have been acted on is not sent again: one try each.
        let before = bad.requests() + good.requests();
        let answers: Vec<_> = (0..4).map(|_| proxy.client().ask(post("/", "x"))).collect();
        assert!(answers.iter().all(|a| [200, status].contains(&a.status())), "{way}: {answers:?}");
        assert!(answers.iter().any(|a| a.status() == status), "{way}");
        assert_eq!(bad.requests() + good.requests() - before, 4, "{way}");
        assert_at_rest(&proxy);
    }
}

#[test]
fn a_failure_whose_status_is_not_listed_is_not_tried_again() {
    for (way, keys, error, reason) in [
        ("close", "retry_on: [503, 504]", "connection_terminated", "upstream_closed"),
        ("silence", "retry_on: [502, 503]", "http_response_timeout", "response_timeout"),
    ] {
        let ((status, a), (_, b)) = (failing(way), failing(way));
        let proxy = retrying(&[&a, &b], keys).pool(patience(way)).one_worker().start();
        assert_failed(&proxy, &proxy.get("/"), status, error, reason);
        assert_eq!((a.requests() + b.requests(), attempts(&proxy, "/")), (1, 1));
        assert_at_rest(&proxy);
    }
}

#[test]
fn when_nobody_answers_the_last_failure_is_told() {
    let ((_, a), (_, b)) = (failing("close"), failing("close"));
    let proxy = retrying(&[&a, &b], "max_attempts: 2").start();
    let answer = proxy.get("/");
    assert_failed(&proxy, &answer, 502, "connection_terminated", "upstream_closed");
    assert_eq!((a.requests(), b.requests(), attempts(&proxy, "/")), (1, 1, 2));
    assert_eq!((tried_again(&proxy, "success"), tried_again(&proxy, "failure")), (0.0, 1.0));
    assert_at_rest(&proxy);
}

/// Busy, at length: longer than any buffer, so that it has to be kept where it is.
fn busy(call: &mut Call<'_>) -> Then {
    let lines = "Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Who: a\r\n";
    say(call, 503, lines, &"busy;".repeat(60_000))
}

#[track_caller]
fn assert_busy(answer: &Message, way: &str) {
    assert_eq!((answer.status(), answer.get("proxy-status")), (503, None), "{way}");
    assert_eq!(answer.all("set-cookie"), ["a=1", "b=2"], "{way}");
    assert!(answer.complete && answer.text() == "busy;".repeat(60_000), "{way}");
}

#[test]
fn a_real_answer_is_never_replaced_by_a_made_up_one() {
    for way in WAYS {
        // Before the failure, and after it.
        for busy_one in [0, 1] {
            let origins: [Origin; 2] =
                in_turn(
                    move |call, nth| {
                        if nth == busy_one { busy(call) } else { fail(call, way) }
                    },
                );
            let keys = "max_attempts: 2";
            let proxy = retrying(&origins.each_ref(), keys).pool(patience(way)).start();
            assert_busy(&proxy.get("/"), way);
            assert_eq!((requests(&origins), attempts(&proxy, "/")), (2, 2), "{way}");
            let whose = proxy.logged_path("/")["upstream"].clone();
            assert!(origins.iter().any(|origin| whose == origin.url()));
            // The failed one is not the one.
            let reason = &proxy.logged_path("/")["reason"];
            assert!(reason.is_null() || reason == "", "{reason}");
            assert_at_rest(&proxy);
        }
    }
}

#[test]
fn nor_by_a_connection_that_is_refused() {
    let (origin, bad) = (Origin::start(busy), Origin::refusing());
    for order in [[&origin, &bad], [&bad, &origin]] {
        let proxy = retrying(&order, "max_attempts: 2").start();
        for _ in 0..3 {
            assert_busy(&proxy.get("/"), "refused");
        }
        assert_eq!(proxy.logged_path("/")["upstream"], origin.url());
        assert_at_rest(&proxy);
    }
    assert!(origin.requests() >= 6);
}

#[test]
fn an_answer_that_is_not_used_is_not_waited_for() {
    // Its body never ends.
    let bad = Origin::start(|call| {
        call.send("HTTP/1.1 503 Busy\r\nContent-Length: 1000000\r\n\r\nsome");
        reply::hang(call)
    });
    let good = Origin::start(reply::name("good"));
    let proxy = retrying(&[&bad, &good], "").start();
    for _ in 0..4 {
        assert_eq!(proxy.get("/").text(), "good");
    }
    assert!(bad.requests() >= 1);
    // Its connection is worth nothing any more.
    eventually(SOON, || bad.open() == 0);
    assert_at_rest(&proxy);
}

#[test]
fn what_is_committed_is_not_tried_again() {
    let origins: [Origin; 2] = in_turn(|call, _| {
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc");
        // The head is out before the end comes.
        l7rp_testkit::let_pass(std::time::Duration::from_millis(50));
        Then::Close
    });
    let proxy = retrying(&origins.each_ref(), "").start();
    let mut client = proxy.client();
    assert!(client.send(get("a.test", "/cut", "")).try_response().is_err());
    assert_eq!((requests(&origins), attempts(&proxy, "/cut")), (1, 1));
    assert_at_rest(&proxy);
}

#[test]
fn hints_do_not_commit_and_other_interim_answers_do() {
    for (interim, tries) in [
        ("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", 2),
        ("HTTP/1.1 102 Processing\r\nX-At: 1\r\n\r\n", 1),
    ] {
        let origins: [Origin; 2] = in_turn(move |call, nth| {
            if nth > 0 {
                return say(call, 200, "", "good");
            }
            call.send(interim);
            say(call, 503, "", "busy")
        });
        let proxy = retrying(&origins.each_ref(), "").start();
        let mut client = proxy.client();
        let told = client.send(get("a.test", "/", "")).head();
        assert!(interim.starts_with(&told.start), "{told:?}");
        let answer = client.response();
        let expected = if tries == 2 { (200, "good") } else { (503, "busy") };
        assert_eq!((answer.status(), answer.text().as_str()), expected, "{interim}");
        assert_eq!((requests(&origins), attempts(&proxy, "/")), (tries, tries as u64));
        assert_at_rest(&proxy);
    }
}

#[test]
fn a_stale_connection_costs_no_attempt() {
    let origin = Origin::start(|call| match call.on_connection {
        0 => say(call, 200, "", "good"),
        _ => reply::close(call),
    });
    let proxy = retrying(&[&origin], "").pool("max_in_flight: 9").one_worker().start();
    assert_eq!(proxy.get("/first").text(), "good");
    assert_eq!(proxy.get("/second").text(), "good");
    assert_eq!(origin.requests(), 3);
    assert_eq!(attempts(&proxy, "/second"), 1);
    assert_eq!(tried_again(&proxy, "success") + tried_again(&proxy, "failure"), 0.0);
}

#[test]
fn pipelined_requests_keep_their_order() {
    // Every other one fails at first.
    let origins: [Origin; 2] = in_turn(|call, nth| {
        let body = call.request.target().to_owned();
        let fails = nth == 0 && body.ends_with(['1', '3', '5']);
        say(call, if fails { 503 } else { 200 }, "", &body)
    });
    let proxy = retrying(&origins.each_ref(), "").start();
    let mut client = proxy.client();
    let all: String = (0..6).map(|n| get("a.test", &format!("/{n}"), "")).collect();
    client.send(all);
    for n in 0..6 {
        assert_eq!(client.response().text(), format!("/{n}"));
    }
    assert_eq!(requests(&origins), 9);
    assert_at_rest(&proxy);
}

#[test]
fn an_upstream_that_changes_its_mind_is_heard() {
    // All fail, then none does: nothing of the past is held against them.
    let status = Arc::new(AtomicU16::new(503));
    let now = status.clone();
    let origins: [Origin; 2] = in_turn(move |call, _| {
        let status = now.load(SeqCst);
        let whole = answer(status, "", &status.to_string());
        let _ = call.body();
        call.send(whole);
        Then::Next
    });
    let proxy = retrying(&origins.each_ref(), "").start();
    for _ in 0..30 {
        assert_eq!(proxy.get("/").text(), "503");
    }
    status.store(200, SeqCst);
    for n in 0..10 {
        let path = format!("/good/{n}");
        assert_eq!(proxy.get(&path).text(), "200");
        assert_eq!(attempts(&proxy, &path), 1);
    }
    assert_at_rest(&proxy);
}
