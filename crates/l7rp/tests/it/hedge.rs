//! A second try races the first when that takes long: the better answer wins, and losing costs
//! nobody anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Call, Gate, Origin, Proxy, SOON, Then, eventually, let_pass, reply};

use crate::setup::{Setup, assert_counts, assert_failed, get, over, post};
use crate::tries::{
    Moments, NEVER_OPENS, NOTHING_LEFT, PLENTY, assert_at_rest, attempts, breaker, in_turn,
    requests, say, transitions,
};

/// How long the first try is alone.
const ALONE: Duration = Duration::from_millis(120);
const KEYS: &str = "max_attempts: 2, backoff: 1ms, hedge_after: 120ms";
/// Longer than [`ALONE`].
const LONG: Duration = Duration::from_millis(350);

fn hedging(origins: &[&Origin], keys: &str) -> Setup {
    over(origins)
        .pool("selector: { algorithm: round-robin }")
        .route(&format!("middleware: [{{ retry: {{ {keys} }} }}]"))
}

/// As [`hedging`], with a budget and where failures are nothing.
fn racing(origins: &[&Origin]) -> Setup {
    hedging(origins, KEYS).pool(PLENTY).pool(NEVER_OPENS)
}

/// How many second tries there were, and how many races the first and the second have won.
fn races(proxy: &Proxy) -> (f64, f64, f64) {
    let metrics = proxy.metrics();
    let won = |who| {
        let labels = [("route", "r"), ("winner", who)];
        metrics.sum("proxy_hedge_winner_total", &labels)
    };
    (metrics.sum("proxy_hedge_fired_total", &[("route", "r")]), won("primary"), won("hedge"))
}

#[track_caller]
fn assert_races(proxy: &Proxy, fired: f64, primary: f64, hedge: f64) {
    assert_counts(proxy, "proxy_hedge_fired_total", &[("route", "r")], fired);
    assert_eq!(races(proxy), (fired, primary, hedge));
}

/// Says so after a while.
fn late(call: &mut Call<'_>, status: u16, body: &str) -> Then {
    let_pass(LONG);
    say(call, status, "", body)
}

#[test]
fn a_second_try_starts_after_its_time_and_wins() {
    let came = Moments::default();
    let moments = came.clone();
    let origins: [Origin; 2] = in_turn(move |call, nth| {
        moments.now();
        if nth == 0 { reply::hang(call) } else { say(call, 200, "", "hedge") }
    });
    let proxy = racing(&origins.each_ref()).start();
    let began = Instant::now();
    assert_eq!(proxy.get("/").text(), "hedge");
    let second = came.all()[1] - began;
    assert!(second >= ALONE, "{second:?}");
    assert_races(&proxy, 1.0, 0.0, 1.0);
    let line = proxy.logged_path("/");
    assert_eq!((&line["hedged"], &line["attempts"]), (&true.into(), &2.into()), "{line}");
    let winner = origins.iter().find(|origin| origin.open() == 1);
    assert_eq!(line["upstream"], winner.expect("one is kept").url());
    // It is no retry.
    assert_eq!(proxy.metrics().sum("proxy_retry_attempts_total", &[]), 0.0);
    assert_at_rest(&proxy);
}

#[test]
fn a_first_try_that_is_in_time_is_alone() {
    let origins: [Origin; 2] = in_turn(|call, _| say(call, 200, "", "good"));
    let keys = "max_attempts: 2, hedge_after: 5s";
    let proxy = hedging(&origins.each_ref(), keys).start();
    for n in 0..20 {
        assert_eq!(proxy.get(&format!("/{n}")).text(), "good");
    }
    assert_eq!(requests(&origins), 20);
    assert_races(&proxy, 0.0, 0.0, 0.0);
    let line = proxy.logged_path("/0");
    assert_eq!((&line["hedged"], &line["attempts"]), (&false.into(), &1.into()), "{line}");
}

#[test]
fn a_first_try_that_is_still_faster_wins() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        0 => late(call, 200, "primary"),
        _ => reply::hang(call),
    });
    let proxy = racing(&origins.each_ref()).start();
    assert_eq!(proxy.get("/").text(), "primary");
    assert_races(&proxy, 1.0, 1.0, 0.0);
    assert_eq!(proxy.logged_path("/")["hedged"], true);
    assert_eq!(attempts(&proxy, "/"), 2);
    // The loser is ended at once.
    eventually(SOON, || origins.iter().map(Origin::open).sum::<usize>() == 1);
    assert_at_rest(&proxy);
}

#[test]
fn the_loser_is_cancelled_at_once_and_not_blamed() {
    let gone = Moments::default();
    let moments = gone.clone();
    let origins: [Origin; 2] = in_turn(move |call, nth| {
        if nth == 0 && call.request.target() != "/after" {
            call.until_gone();
            moments.now();
            return Then::Close;
        }
        say(call, 200, "", "good")
    });
    let proxy = hedging(&origins.each_ref(), KEYS)
        .pool(PLENTY)
        .pool("circuit_breaker: { consecutive_failures: 1 }")
        .start();
    for n in 0..3 {
        assert_eq!(proxy.get(&format!("/{n}")).text(), "good");
        let won = Instant::now();
        eventually(SOON, || gone.all().len() == n + 1);
        let after = gone.all()[n].saturating_duration_since(won);
        assert!(after < Duration::from_secs(1), "{after:?}");
    }
    assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "cancel")], 3.0);
    let metrics = proxy.metrics();
    assert_eq!(metrics.sum("proxy_upstream_requests_total", &[("status", "200")]), 3.0);
    assert_eq!(metrics.sum("proxy_upstream_requests_total", &[("status", "err")]), 0.0);
    assert_eq!(transitions(&proxy), 0.0);
    assert!(origins.iter().all(|origin| breaker(&proxy, origin) == 0.0));
    let before = origins.each_ref().map(Origin::requests);
    for _ in 0..4 {
        assert_eq!(proxy.get("/after").text(), "good");
    }
    let after = origins.each_ref().map(Origin::requests);
    assert!(before.iter().zip(after).all(|(b, a)| a > *b), "{before:?} {after:?}");
    assert_at_rest(&proxy);
}

#[test]
fn a_failure_that_comes_first_does_not_win() {
    for way in ["502", "503", "500", "close", "garbage"] {
        let origins: [Origin; 2] = in_turn(move |call, nth| match (nth, way) {
            (0, _) => late(call, 200, "primary"),
            (_, "close") => reply::close(call),
            (_, "garbage") => reply::raw("SSH-2.0-OpenSSH_9.9\r\n\r\n")(call),
            (_, status) => say(call, status.parse().unwrap_or(500), "", "hedge"),
        });
        let proxy = racing(&origins.each_ref()).start();
        let answer = proxy.get("/");
        assert_eq!((answer.status(), answer.text().as_str()), (200, "primary"), "{way}");
        assert_races(&proxy, 1.0, 1.0, 0.0);
        assert_eq!(requests(&origins), 2, "{way}");
        assert_at_rest(&proxy);
    }
}

#[test]
fn a_first_try_that_fails_waits_for_the_second() {
    for way in ["503", "500", "close", "reset"] {
        let origins: [Origin; 2] = in_turn(move |call, nth| {
            if nth > 0 {
                // Later than the first fails.
                return late(call, 200, "hedge");
            }
            let_pass(ALONE + Duration::from_millis(100));
            match way {
                "close" => reply::close(call),
                "reset" => Then::Reset,
                status => say(call, status.parse().unwrap_or(500), "", "primary"),
            }
        });
        let proxy = racing(&origins.each_ref()).start();
        let answer = proxy.get("/");
        assert_eq!((answer.status(), answer.text().as_str()), (200, "hedge"), "{way}");
        assert_races(&proxy, 1.0, 0.0, 1.0);
        assert_eq!(requests(&origins), 2, "{way}");
        assert_at_rest(&proxy);
    }
}

#[test]
fn what_is_neither_listed_nor_the_upstreams_fault_wins_at_once() {
    for (status, keys) in [(404, ""), (302, ""), (429, ""), (404, "retry_on: [404], ")] {
        let listed = !keys.is_empty();
        let origins: [Origin; 2] = in_turn(move |call, nth| match nth {
            0 if listed => late(call, 200, "primary"),
            0 => reply::hang(call),
            _ => say(call, status, "", "hedge"),
        });
        let keys = format!("{keys}{KEYS}");
        let proxy = hedging(&origins.each_ref(), &keys).pool(PLENTY).pool(NEVER_OPENS).start();
        let answer = proxy.get("/");
        let expected = if listed { (200, "primary") } else { (status, "hedge") };
        assert_eq!((answer.status(), answer.text().as_str()), expected);
        assert_eq!(requests(&origins), 2);
        assert_at_rest(&proxy);
    }
}

#[test]
fn when_both_fail_a_real_answer_is_passed_on() {
    for (first, second) in [("503", "503"), ("503", "close"), ("close", "503")] {
        let origins: [Origin; 2] = in_turn(move |call, nth| {
            let_pass(LONG);
            match if nth == 0 { first } else { second } {
                "close" => reply::close(call),
                _ => say(call, 503, "Set-Cookie: a=1\r\nSet-Cookie: b=2\r\n", "busy"),
            }
        });
        let proxy = racing(&origins.each_ref()).start();
        let answer = proxy.get("/");
        assert_eq!((answer.status(), answer.text().as_str()), (503, "busy"), "{first} {second}");
        assert_eq!(answer.all("set-cookie"), ["a=1", "b=2"]);
        assert_eq!(answer.get("proxy-status"), None);
        assert_eq!((requests(&origins), attempts(&proxy, "/")), (2, 2));
        assert_at_rest(&proxy);
    }
    let origins: [Origin; 2] = in_turn(|call, _| {
        let_pass(LONG);
        reply::close(call)
    });
    let proxy = racing(&origins.each_ref()).start();
    let answer = proxy.get("/");
    assert_failed(&proxy, &answer, 502, "connection_terminated", "upstream_closed");
    assert_eq!((requests(&origins), attempts(&proxy, "/")), (2, 2));
    assert_at_rest(&proxy);
}

#[test]
fn there_is_one_second_try_at_most() {
    let origins: [Origin; 4] = in_turn(|call, _| {
        let_pass(LONG * 2);
        say(call, 200, "", "good")
    });
    let keys = "max_attempts: 4, hedge_after: 100ms";
    let proxy = hedging(&origins.each_ref(), keys).pool(PLENTY).start();
    assert_eq!(proxy.get("/").text(), "good");
    assert_eq!((requests(&origins), attempts(&proxy, "/")), (2, 2));
    assert!(origins.iter().all(|origin| origin.requests() <= 1), "on another upstream");
    assert_eq!(races(&proxy).0, 1.0);
    assert_at_rest(&proxy);
}

/// A request that takes long, which must not be sent twice.
#[track_caller]
fn is_alone(origins: &[Origin], setup: Setup, requests_to_send: &[&str]) {
    let proxy = setup.start();
    for request in requests_to_send {
        let before = requests(origins);
        let mut client = proxy.client();
        assert_eq!(client.send(request).head().status(), 200, "{request}");
        assert_eq!(requests(origins) - before, 1, "{request}");
    }
    assert_races(&proxy, 0.0, 0.0, 0.0);
    assert!(proxy.logged(|line| line["attempts"] == 1)["hedged"] == false);
    assert_at_rest(&proxy);
}

fn slow<const N: usize>() -> [Origin; N] {
    in_turn(|call, _| late(call, 200, "good"))
}

#[test]
fn what_is_not_listed_is_never_sent_twice() {
    let origins: [Origin; 2] = slow();
    let keys = format!("retry_methods: [GET, POST, PUT], {KEYS}");
    let offer = get("a.test", "/upgrade", "Connection: upgrade\r\nUpgrade: x\r\n");
    let put = post("/put", "x").replace("POST", "PUT");
    let setup = hedging(&origins.each_ref(), &keys).pool(PLENTY);
    is_alone(&origins, setup, &[&post("/post", "x"), &put, &offer]);
    let keys = format!("hedgeable: [HEAD], {KEYS}");
    let setup = hedging(&origins.each_ref(), &keys).pool(PLENTY);
    is_alone(&origins, setup, &[&get("a.test", "/get", "")]);
}

#[test]
fn nobody_but_another_upstream_gets_it() {
    let origins: [Origin; 1] = slow();
    let setup = hedging(&origins.each_ref(), KEYS).pool(PLENTY);
    is_alone(&origins, setup, &[&get("a.test", "/alone", "")]);
}

#[test]
fn without_a_budget_there_is_no_second_try() {
    let origins: [Origin; 2] = slow();
    let setup = hedging(&origins.each_ref(), KEYS).pool(NOTHING_LEFT);
    is_alone(&origins, setup, &[&get("a.test", "/a", ""), &get("a.test", "/b", "")]);
}

#[test]
fn second_tries_use_up_the_budget() {
    let origins: [Origin; 2] = slow();
    let proxy = hedging(&origins.each_ref(), KEYS)
        .pool("retry_budget: { ratio: 0.5, min_per_second: 0 }")
        .start();
    for n in 0..4 {
        assert_eq!(proxy.get(&format!("/{n}")).text(), "good");
    }
    // Two halves are one.
    assert_eq!((requests(&origins), races(&proxy).0), (6, 2.0));
    assert_at_rest(&proxy);
}

#[test]
fn an_upstream_at_its_limit_gets_no_second_try() {
    let gate = Gate::default();
    let open = gate.clone();
    let origins: [Origin; 2] = in_turn(move |call, _| {
        if call.request.target() == "/held" {
            open.pass();
            return say(call, 200, "", "held");
        }
        late(call, 200, "good")
    });
    let mut setup = hedging(&[], KEYS).pool(PLENTY);
    for origin in &origins {
        setup = setup.upstream(&origin.url(), "max_in_flight: 1");
    }
    let proxy = setup.start();
    let mut held = proxy.client();
    held.send(post("/held", ""));
    eventually(SOON, || requests(&origins) == 1);
    assert_eq!(proxy.get("/free").text(), "good");
    assert_eq!(requests(&origins), 2);
    assert_eq!(races(&proxy).0, 0.0);
    assert_eq!(proxy.metrics().sum("proxy_shed_total", &[]), 0.0);
    gate.open();
    assert_eq!(held.response().text(), "held");
    assert_at_rest(&proxy);
}

#[test]
fn both_are_in_flight_and_both_come_back() {
    let gate = Gate::default();
    let open = gate.clone();
    let origins: [Origin; 2] = in_turn(move |call, _| {
        open.pass();
        say(call, 200, "", "good")
    });
    let mut setup = hedging(&[], KEYS).pool(PLENTY);
    for origin in &origins {
        setup = setup.upstream(&origin.url(), "max_in_flight: 1");
    }
    let proxy = setup.start();
    for round in 0..2 {
        let mut client = proxy.client();
        client.send(get("a.test", &format!("/{round}"), ""));
        eventually(SOON, || requests(&origins) == 2 * round + 2);
        assert_counts(&proxy, "proxy_upstream_inflight", &[], 2.0);
        if round == 0 {
            // The client leaves: both are ended, and neither is blamed.
            client.reset();
            let line = proxy.logged_path("/0");
            assert_eq!((&line["status"], &line["hedged"]), (&499.into(), &true.into()));
            assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "cancel")], 2.0);
        } else {
            gate.open();
            assert_eq!(client.response().text(), "good");
        }
        assert_at_rest(&proxy);
    }
    assert_eq!(transitions(&proxy), 0.0);
}

#[test]
fn a_client_that_leaves_is_noticed_when_one_of_them_has_failed() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        // Just after the second has begun.
        0 => late(call, 503, "busy"),
        _ => reply::hang(call),
    });
    let proxy = racing(&origins.each_ref()).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || requests(&origins) == 2);
    let_pass(LONG + Duration::from_millis(100));
    client.reset();
    let left = Instant::now();
    assert_counts(&proxy, "proxy_upstream_inflight", &[], 0.0);
    assert!(left.elapsed() < Duration::from_secs(2), "{:?}", left.elapsed());
    assert_eq!(proxy.logged_path("/")["status"], 499);
    assert_at_rest(&proxy);
}

#[test]
fn a_second_try_that_is_refused_leaves_the_first_alone() {
    let slow = Origin::start(|call| late(call, 200, "good"));
    let proxy = racing(&[&slow, &Origin::refusing()]).start();
    for n in 0..4 {
        assert_eq!(proxy.get(&format!("/{n}")).text(), "good");
    }
    assert_eq!(slow.requests(), 4);
    let (fired, primary, hedge) = races(&proxy);
    assert!(fired >= 1.0 && primary == fired && hedge == 0.0, "{fired} {primary} {hedge}");
    assert_at_rest(&proxy);
}

#[test]
fn an_answer_to_head_has_no_body_either() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        0 if call.request.method() == "HEAD" => reply::hang(call),
        _ => say(call, 200, "X-Who: hedge\r\n", "four"),
    });
    let proxy = racing(&origins.each_ref()).start();
    let mut client = proxy.client();
    let head = client.send("HEAD /head HTTP/1.1\r\nHost: a.test\r\n\r\n").head();
    assert_eq!((head.status(), head.get("content-length")), (200, Some("4")));
    assert_eq!(head.get("x-who"), Some("hedge"));
    assert_eq!(client.get("/next").text(), "four");
    assert_races(&proxy, 1.0, 0.0, 1.0);
    assert_at_rest(&proxy);
}

#[test]
fn a_route_that_only_races_has_its_budget_too() {
    let origins: [Origin; 2] = slow();
    let proxy = hedging(&origins.each_ref(), "max_attempts: 1, hedge_after: 120ms")
        .pool("retry_budget: { ratio: 1.0, min_per_second: 0 }")
        .start();
    assert_eq!(proxy.get("/").text(), "good");
    assert_eq!((requests(&origins), races(&proxy).0), (2, 1.0));
    assert_at_rest(&proxy);
}

#[test]
fn the_routes_time_ends_both() {
    let origins: [Origin; 2] = in_turn(|call, _| reply::hang(call));
    let proxy = racing(&origins.each_ref()).route("timeouts: { total: 500ms }").start();
    let answer = proxy.get("/");
    assert_failed(&proxy, &answer, 504, "http_response_timeout", "total_timeout");
    assert_eq!(attempts(&proxy, "/"), 2);
    eventually(SOON, || origins.iter().all(|origin| origin.open() == 0));
    assert_at_rest(&proxy);
}

#[test]
fn answers_that_race_do_not_mix() {
    const LENGTH: usize = 300 << 10;
    let origins: [Origin; 2] = in_turn(|call, nth| {
        if nth == 0 {
            // Just when the second answers.
            let_pass(ALONE);
        }
        let body = ["p", "h"][nth].repeat(LENGTH);
        say(call, 200, "", &body)
    });
    let proxy = racing(&origins.each_ref()).start();
    thread::scope(|scope| {
        for who in 0..12 {
            let proxy = &proxy;
            scope.spawn(move || {
                let mut client = proxy.client();
                for n in 0..3 {
                    let answer = client.get(&format!("/{who}/{n}"));
                    let (first, length) = (answer.body[0], answer.body.len());
                    assert_eq!((answer.status(), length), (200, LENGTH));
                    assert!(answer.complete && answer.body.iter().all(|&b| b == first));
                }
            });
        }
    });
    assert_at_rest(&proxy);
    let (fired, primary, hedge) = races(&proxy);
    assert_eq!(fired, primary + hedge);
    assert!(fired > 0.0);
}

/// Whoever wins writes the answer, and must not write it into the middle of what another has
/// begun to say.
#[test]
fn nobody_tells_what_comes_before_the_answer_of_a_race() {
    const HINT: &str = "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n";
    for at_once in [true, false] {
        let origins: [Origin; 2] = in_turn(move |call, nth| {
            if at_once && nth > 0 {
                call.send(format!("{HINT}{}", reply::ok("hedge")));
                return Then::Next;
            }
            call.send(HINT);
            if nth > 0 { say(call, 200, "", "hedge") } else { reply::hang(call) }
        });
        let proxy = racing(&origins.each_ref()).start();
        let mut client = proxy.client();
        client.send(get("a.test", "/", ""));
        assert_eq!(client.head().status(), 200, "at once: {at_once}");
        assert_races(&proxy, 1.0, 0.0, 1.0);
        assert_at_rest(&proxy);
    }
}

#[test]
fn a_first_that_fails_before_the_time_is_tried_again() {
    let origins: [Origin; 2] = in_turn(|call, nth| {
        let status = if nth == 0 { 503 } else { 200 };
        say(call, status, "", "said")
    });
    let keys = "max_attempts: 2, backoff: 1ms, hedge_after: 5s";
    let proxy = hedging(&origins.each_ref(), keys).pool(PLENTY).pool(NEVER_OPENS).start();
    assert_eq!(proxy.get("/").status(), 200);
    assert_races(&proxy, 0.0, 0.0, 0.0);
    let line = proxy.logged_path("/");
    assert_eq!((&line["hedged"], &line["attempts"]), (&false.into(), &2.into()));
    assert_eq!(proxy.metrics().sum("proxy_retry_attempts_total", &[]), 1.0);
}

#[test]
fn counts_of_races_add_up() {
    let count = Arc::new(AtomicUsize::new(0));
    let all = count.clone();
    let origins: [Origin; 3] = in_turn(move |call, nth| {
        all.fetch_add(1, SeqCst);
        // The first of each second request takes long.
        let long = nth == 0 && call.request.target().len().is_multiple_of(2);
        if long { reply::hang(call) } else { say(call, 200, "", "good") }
    });
    let proxy = racing(&origins.each_ref()).start();
    thread::scope(|scope| {
        for who in 0..8 {
            let proxy = &proxy;
            scope.spawn(move || {
                let mut client = proxy.client();
                for n in 0..4 {
                    let path = format!("/{who}{}", "n".repeat(n));
                    assert_eq!(client.get(&path).text(), "good");
                }
            });
        }
    });
    assert_at_rest(&proxy);
    let (fired, primary, hedge) = races(&proxy);
    assert!(fired >= 16.0 && fired == primary + hedge, "{fired} {primary} {hedge}");
    assert_eq!(count.load(SeqCst) as f64, 32.0 + fired);
    let metrics = proxy.metrics();
    let by = |status| metrics.sum("proxy_upstream_requests_total", &[("status", status)]);
    // A loser may have answered, too, on a machine that is slow.
    assert_eq!((by("200") + by("cancel"), by("err")), (32.0 + fired, 0.0));
    assert!(by("cancel") >= 16.0);
}
