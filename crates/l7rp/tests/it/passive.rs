//! Real traffic is looked at too: an upstream whose answers are bad or slow is taken out, never
//! more than half of them, and only probes bring one back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use l7rp_testkit::{Origin, Proxy, SOON, Then, Value, eventually, let_pass, reply, within};

use crate::setup::{assert_failed, over, quiet};
use crate::verdict::{
    CLOSED, NO_BREAKER, ejections, eligible, hear, is_eligible, nobody_is_blamed, state,
};

/// An upstream that probes find good, and whose other answers have this status while `is_bad`.
fn two_faced(is_bad: &Arc<AtomicBool>, status: u16) -> Origin {
    let is_bad = is_bad.clone();
    Origin::start(move |call| {
        if call.request.target() != "/healthz" && is_bad.load(SeqCst) {
            call.send(format!("HTTP/1.1 {status} So\r\nContent-Length: 0\r\n\r\n"));
            return Then::Next;
        }
        reply::told(call)
    })
}

fn always(status: u16) -> Origin {
    two_faced(&Arc::new(AtomicBool::new(true)), status)
}

/// A proxy that looks at its traffic so, each of these upstreams eligible.
#[track_caller]
fn watching(origins: &[&Origin], interval: &str, passive: &str) -> Proxy {
    let proxy = over(origins)
        .pool("selector: { algorithm: round-robin }")
        .pool(NO_BREAKER)
        .pool(&format!(
            "health: {{ active: {{ path: /healthz, interval: {interval}, timeout: 200ms, \
             healthy_threshold: 3, unhealthy_threshold: 3 }}, passive: {{ {passive} }} }}"
        ))
        .start();
    eventually(SOON, || eligible(&proxy) == origins.len() as f64);
    proxy
}

fn without_probes(origin: &Origin) -> usize {
    origin.seen().iter().filter(|seen| seen.message.target() != "/healthz").count()
}

/// Asks until an upstream has been taken out; the news.
#[track_caller]
fn ask_until_one_is_out(proxy: &Proxy) -> Value {
    let out = within(SOON, || {
        proxy.get("/");
        proxy.events("upstream_health_changed").into_iter().find(|e| e["to"] == "ineligible")
    });
    out.expect("one is taken out")
}

#[test]
fn bad_answers_take_an_upstream_out_and_the_others_go_on() {
    let (bad, good) = (always(500), Origin::start(reply::told));
    let proxy = watching(&[&bad, &good], "30s", "error_threshold: 0.4, half_life: 200ms");
    let event = ask_until_one_is_out(&proxy);
    assert_eq!((&event["upstream"], &event["from"]), (&bad.url().into(), &"eligible".into()));
    assert_eq!(event["why"], "passive:errors");
    let asked = without_probes(&bad);
    assert!(asked >= 10, "{asked} bad answers were enough");
    for _ in 0..20 {
        assert_eq!(proxy.get("/").text(), "good");
    }
    // At most the one that was on its way when it was taken out.
    assert!(without_probes(&bad) <= asked + 1);
    assert_eq!(ejections(&proxy, Some("passive:errors")), 1.0);
    assert_eq!((is_eligible(&proxy, &bad), is_eligible(&proxy, &good)), (false, true));
    assert_eq!((state(&proxy, &bad), state(&proxy, &good)), (CLOSED, CLOSED));
    quiet(&proxy);
}

#[test]
fn connections_that_break_count_as_well() {
    let broken = Origin::start(|call| {
        if call.request.target() == "/healthz" { reply::told(call) } else { Then::Reset }
    });
    let good = Origin::start(reply::told);
    let proxy = watching(&[&broken, &good], "30s", "error_threshold: 0.4, half_life: 200ms");
    let event = ask_until_one_is_out(&proxy);
    assert_eq!(
        (&event["upstream"], &event["why"]),
        (&broken.url().into(), &"passive:errors".into())
    );
    assert_eq!(proxy.get("/").text(), "good");
}

#[test]
fn what_the_client_got_wrong_does_not_count() {
    let (one, two) = (always(404), always(429));
    let proxy = watching(&[&one, &two], "30s", "error_threshold: 0.1, half_life: 100ms");
    for _ in 0..60 {
        proxy.get("/");
        let_pass(Duration::from_millis(5));
    }
    assert_eq!(eligible(&proxy), 2.0);
    nobody_is_blamed(&proxy);
}

#[test]
fn only_probes_bring_it_back_and_as_many_as_at_first() {
    let is_bad = Arc::new(AtomicBool::new(true));
    let bad = two_faced(&is_bad, 503);
    let good = Origin::start(reply::told);
    let proxy = watching(&[&bad, &good], "250ms", "error_threshold: 0.4, half_life: 200ms");
    ask_until_one_is_out(&proxy);
    let probes = || bad.requests() - without_probes(&bad);
    let at_first = probes();
    is_bad.store(false, SeqCst);
    let back = within(SOON, || {
        proxy.events("upstream_health_changed").into_iter().nth(3).map(|event| (event, probes()))
    });
    let (event, probes) = back.expect("it comes back");
    assert_eq!((&event["upstream"], &event["to"]), (&bad.url().into(), &"eligible".into()));
    assert_eq!(event["why"], "status:200");
    // One may have been counted before it was known to be out.
    assert!(probes - at_first >= 2, "{} were enough", probes - at_first);
    let asked = without_probes(&bad);
    for _ in 0..6 {
        assert_eq!(proxy.get("/").status(), 200);
    }
    assert_eq!(without_probes(&bad), asked + 3);
}

#[test]
fn slow_answers_take_an_upstream_out() {
    let slow = Origin::start(|call| {
        if call.request.target() != "/healthz" {
            let_pass(Duration::from_millis(450));
        }
        reply::told(call)
    });
    let good = Origin::start(reply::told);
    let proxy = watching(&[&slow, &good], "30s", "latency_threshold_p99: 300ms, half_life: 1s");
    let is_out = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..24 {
            scope.spawn(|| {
                while !is_out.load(SeqCst) {
                    proxy.get("/");
                }
            });
        }
        let event = within(SOON, || {
            proxy.events("upstream_health_changed").into_iter().find(|e| e["to"] == "ineligible")
        });
        is_out.store(true, SeqCst);
        let event = event.expect("it is taken out");
        assert_eq!(
            (&event["upstream"], &event["why"]),
            (&slow.url().into(), &"passive:latency".into())
        );
    });
    assert_eq!(ejections(&proxy, Some("passive:latency")), 1.0);
    assert_eq!((is_eligible(&proxy, &slow), is_eligible(&proxy, &good)), (false, true));
    quiet(&proxy);
}

#[test]
fn no_more_than_half_are_taken_out() {
    for (of, most) in [(4, 2.0), (3, 1.0), (2, 1.0)] {
        let all: Vec<_> = (0..of).map(|_| always(500)).collect();
        let origins: Vec<_> = all.iter().collect();
        let proxy = watching(&origins, "30s", "error_threshold: 0.4, half_life: 100ms");
        eventually(SOON, || {
            proxy.get("/");
            ejections(&proxy, Some("passive:errors")) == most
        });
        for _ in 0..60 {
            // They are bad, but some answer is better than none.
            assert_eq!(proxy.get("/").status(), 500);
            let_pass(Duration::from_millis(3));
        }
        assert_eq!(ejections(&proxy, None), most, "of {of}");
        assert_eq!(eligible(&proxy), f64::from(of) - most);
    }
}

#[test]
fn one_alone_can_be_taken_out() {
    let bad = always(500);
    let proxy = watching(&[&bad], "30s", "error_threshold: 0.4, half_life: 100ms");
    ask_until_one_is_out(&proxy);
    let answer = proxy.get("/");
    assert_failed(&proxy, &answer, 503, "destination_unavailable", "no_upstream");
    assert_eq!(proxy.ask_admin("/readyz").status(), 503);
    hear(&proxy, &bad, "ineligible");
}
