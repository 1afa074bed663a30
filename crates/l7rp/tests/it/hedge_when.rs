//! When a second try is made: after how long, of which requests, and where.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use l7rp_testkit::{Call, Gate, Origin, Proxy, SOON, Then, eventually, let_pass, reply};

use crate::setup::{assert_counts, get, over, post};
use crate::tries::{
    NEVER_OPENS, PLENTY, assert_at_rest, attempts, breaker, in_turn, requests, say, transitions,
};

fn fired(proxy: &Proxy) -> f64 {
    proxy.metrics().sum("proxy_hedge_fired_total", &[("route", "r")])
}

/// Two upstreams and one worker. What is `/slow…` waits for the gate in its first try.
fn with_slow(keys: &str, gate: &Gate) -> (Proxy, [Origin; 2]) {
    let open = gate.clone();
    let origins: [Origin; 2] = in_turn(move |call, nth| {
        if nth == 0 && call.request.target().starts_with("/slow") {
            open.pass();
        }
        say(call, 200, "", "good")
    });
    let proxy = over(&origins.each_ref())
        .pool("selector: { algorithm: round-robin }")
        .pool(PLENTY)
        .pool(NEVER_OPENS)
        .route(&format!("middleware: [{{ retry: {{ max_attempts: 2, {keys} }} }}]"))
        .one_worker()
        .start();
    (proxy, origins)
}

#[test]
fn the_percentile_is_of_what_was_seen() {
    let gate = Gate::default();
    let (proxy, origins) = with_slow("hedge_after_percentile: 95", &gate);
    let mut client = proxy.client();
    for n in 0..10 {
        assert_eq!(client.get(&format!("/{n}")).text(), "good");
    }
    // Ten are too few to know.
    let mut early = proxy.client();
    early.send(get("a.test", "/slow/early", ""));
    eventually(SOON, || requests(&origins) == 11);
    let_pass(Duration::from_millis(400));
    assert_eq!((requests(&origins), fired(&proxy)), (11, 0.0));
    for n in 10..70 {
        assert_eq!(client.get(&format!("/{n}")).text(), "good");
    }
    let before = fired(&proxy);
    // All took milliseconds: so this one is helped before long, with the gate still shut.
    let began = Instant::now();
    assert_eq!(client.get("/slow/late").text(), "good");
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert!(fired(&proxy) > before);
    assert_eq!(proxy.logged_path("/slow/late")["hedged"], true);
    gate.open();
    assert_eq!(early.response().text(), "good");
    assert_eq!(proxy.logged_path("/slow/early")["hedged"], false);
    assert_at_rest(&proxy);
}

#[test]
fn the_fixed_time_holds_until_the_percentile_is_known() {
    let gate = Gate::default();
    let keys = "hedge_after: 250ms, hedge_after_percentile: 95";
    let (proxy, _origins) = with_slow(keys, &gate);
    let mut client = proxy.client();
    let began = Instant::now();
    assert_eq!(client.get("/slow/early").text(), "good");
    assert!(began.elapsed() >= Duration::from_millis(250), "{:?}", began.elapsed());
    assert_eq!(fired(&proxy), 1.0);
    for n in 0..70 {
        assert_eq!(client.get(&format!("/{n}")).text(), "good");
    }
    // Now it is known to be less; of several, since a machine may be slow now and then.
    let soonest = (0..4).map(|n| {
        let began = Instant::now();
        assert_eq!(client.get(&format!("/slow/late/{n}")).text(), "good");
        began.elapsed()
    });
    let soonest = soonest.min().unwrap_or_default();
    assert!(soonest < Duration::from_millis(200), "{soonest:?}");
    gate.open();
    assert_at_rest(&proxy);
}

#[test]
fn a_body_that_came_with_the_head_is_sent_to_both() {
    let gate = Gate::default();
    let (proxy, origins) = with_slow("hedge_after: 100ms", &gate);
    let request = post("/slow/whole", "a query").replace("POST", "GET");
    assert_eq!(proxy.client().ask(request).text(), "good");
    gate.open();
    assert_eq!(fired(&proxy), 1.0);
    eventually(SOON, || {
        let mut seen = origins.iter().flat_map(Origin::seen);
        seen.all(|seen| seen.message.body == b"a query" && seen.message.complete)
    });
    assert_eq!(origins.each_ref().map(Origin::requests), [1, 1]);
    assert_at_rest(&proxy);
}

#[test]
fn a_body_that_comes_later_is_sent_to_one() {
    let gate = Gate::default();
    let (proxy, origins) = with_slow("hedge_after: 100ms", &gate);
    for (n, (framing, body)) in [
        ("Content-Length: 7", "a query"),
        ("Transfer-Encoding: chunked", "7\r\na query\r\n0\r\n\r\n"),
    ]
    .into_iter()
    .enumerate()
    {
        let path = format!("/slow/{n}");
        let mut client = proxy.client();
        client.send(format!("GET {path} HTTP/1.1\r\nHost: a.test\r\n{framing}\r\n\r\n"));
        eventually(SOON, || requests(&origins) == n + 1);
        client.send(body);
        let_pass(Duration::from_millis(350));
        assert_eq!((requests(&origins), fired(&proxy)), (n + 1, 0.0), "{framing}");
        if n == 1 {
            gate.open();
        }
        if n == 0 {
            client.reset();
            assert_counts(&proxy, "proxy_upstream_inflight", &[], 0.0);
        } else {
            assert_eq!(client.response().text(), "good");
            assert_eq!(proxy.logged_path(&path)["hedged"], false);
        }
    }
    assert_at_rest(&proxy);
}

const WELL: usize = 0;
const FAILING: usize = 1;
const SILENT: usize = 2;

/// Does what it is told to by `mode`.
fn told(name: &'static str, mode: &Arc<AtomicUsize>) -> impl Fn(&mut Call<'_>) -> Then + use<> {
    let mode = mode.clone();
    move |call| match mode.load(SeqCst) {
        FAILING => say(call, 500, "", name),
        SILENT => reply::hang(call),
        _ => say(call, 200, "", name),
    }
}

/// Two upstreams, each with users of its own, and a breaker that opens at the first failure and
/// lets one through after 300 ms.
fn tied(a: &Origin, b: &Origin, breaker: &str) -> (Proxy, String, String) {
    let proxy = over(&[a, b])
        .pool("selector: { algorithm: consistent-hash-bounded, hash_key: \"header:X-User\" }")
        .pool(PLENTY)
        .pool(&format!(
            "circuit_breaker: {{ {breaker}, open_min: 300ms, open_max: 300ms, \
             half_open_probes: 1 }}"
        ))
        .route("middleware: [{ retry: { max_attempts: 2, hedge_after: 200ms } }]")
        .start();
    let user_of = |name: &str| {
        let of = (0..200).map(|n| format!("X-User: u{n}\r\n"));
        let user = of
            .into_iter()
            .find(|user| proxy.client().ask(get("a.test", "/find", user)).text() == name);
        user.expect("each has users")
    };
    let users = (user_of("a"), user_of("b"));
    (proxy, users.0, users.1)
}

/// H4: whoever has failed is asked by first tries only.
#[test]
fn no_second_try_is_made_where_a_breaker_is_not_closed() {
    let (of_a, of_b) = (Arc::new(AtomicUsize::new(WELL)), Arc::new(AtomicUsize::new(WELL)));
    let slow_after = of_a.clone();
    let a = Origin::start(move |call| {
        if slow_after.load(SeqCst) == SILENT {
            let_pass(Duration::from_millis(600));
        }
        say(call, 200, "", "a")
    });
    let b = Origin::start(told("b", &of_b));
    let (proxy, user_a, user_b) = tied(&a, &b, "consecutive_failures: 1");
    of_b.store(FAILING, SeqCst);
    assert_eq!(proxy.client().ask(get("a.test", "/", &user_b)).status(), 500);
    assert_counts(&proxy, "proxy_circuit_breaker_transitions_total", &[("to", "open")], 1.0);
    of_b.store(WELL, SeqCst);
    of_a.store(SILENT, SeqCst);
    let (before, fired_before) = (b.requests(), fired(&proxy));
    // While it is open, and when it would let one through.
    for path in ["/open", "/half-open"] {
        assert_eq!(proxy.client().ask(get("a.test", path, &user_a)).text(), "a");
        assert_eq!(proxy.logged_path(path)["hedged"], false);
        let_pass(Duration::from_millis(50));
    }
    assert_eq!((b.requests(), fired(&proxy)), (before, fired_before));
    of_a.store(WELL, SeqCst);
    // A first try closes it, and then it is asked again.
    assert_eq!(proxy.client().ask(get("a.test", "/", &user_b)).text(), "b");
    eventually(SOON, || breaker(&proxy, &b) == 0.0);
    of_a.store(SILENT, SeqCst);
    assert_eq!(proxy.client().ask(get("a.test", "/closed", &user_a)).text(), "b");
    assert_eq!(fired(&proxy), fired_before + 1.0);
    assert_at_rest(&proxy);
}

/// Case `breaker-slot-returns`, variant H: a probe that loses the race.
#[test]
fn breaker_slot_returns_when_a_probe_loses() {
    let of_b = Arc::new(AtomicUsize::new(WELL));
    let a = Origin::start(reply::name("a"));
    let b = Origin::start(told("b", &of_b));
    let (proxy, _, user_b) = tied(&a, &b, "consecutive_failures: 3");
    of_b.store(FAILING, SeqCst);
    for _ in 0..3 {
        assert_eq!(proxy.client().ask(get("a.test", "/", &user_b)).status(), 500);
    }
    assert_counts(&proxy, "proxy_circuit_breaker_transitions_total", &[("to", "open")], 1.0);
    let_pass(Duration::from_millis(350));
    of_b.store(SILENT, SeqCst);
    let fired_before = fired(&proxy);
    // The only one that is let through. The next must come to its end, so that a breaker whose
    // tests are slow is not half-open for ever: see `abuse`.
    let before = b.requests();
    assert_eq!(proxy.client().ask(get("a.test", "/probe", &user_b)).text(), "a");
    assert_eq!(b.requests(), before + 1, "it is let through");
    assert_eq!((attempts(&proxy, "/probe"), fired(&proxy)), (2, fired_before + 1.0));
    assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "cancel")], 1.0);
    assert_eq!(breaker(&proxy, &b), 2.0, "that was neither a success nor a failure");
    assert_eq!(transitions(&proxy), 2.0, "opened, and half-open since");
    of_b.store(WELL, SeqCst);
    let well = Instant::now();
    assert_eq!(proxy.client().ask(get("a.test", "/well", &user_b)).text(), "b");
    assert!(well.elapsed() < Duration::from_secs(2));
    eventually(SOON, || breaker(&proxy, &b) == 0.0);
    assert_eq!(breaker(&proxy, &a), 0.0);
    assert_at_rest(&proxy);
}
