//! An upstream that fails is left alone for a while: that one, not before enough has failed, and
//! not for what is nobody's or somebody else's fault.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use l7rp_testkit::{Call, Gate, Origin, Proxy, SOON, Then, Value, eventually, let_pass, reply};

use crate::setup::{assert_failed, over, quiet, start};
use crate::verdict::{
    CLOSED, NO_BREAKER, OPEN, TOUCHY, asking, becomes, eligible, hear, is_eligible, judged,
    nobody_is_blamed, refused, state, turns,
};

const ROUND_ROBIN: &str = "selector: { algorithm: round-robin }";

fn breaker(keys: &str) -> String {
    format!("circuit_breaker: {{ open_min: 60s, open_max: 60s, {keys} }}")
}

/// Requests for these statuses, one after another, each judged before the next begins.
#[track_caller]
fn told(proxy: &Proxy, origin: &Origin, statuses: &[u16]) {
    for status in statuses {
        assert_eq!(proxy.get(&format!("/{status}")).status(), *status);
        judged(proxy, origin.requests());
    }
}

#[test]
fn so_many_failures_in_a_row_open_it_and_not_one_less() {
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin]).pool(&breaker("consecutive_failures: 5")).start();
    // One good answer, and counting begins again.
    told(&proxy, &origin, &[500, 502, 503, 504, 200, 500, 500, 500, 599, 200, 500, 500, 500, 500]);
    nobody_is_blamed(&proxy);
    told(&proxy, &origin, &[500]);
    becomes(&proxy, &origin, OPEN);
    refused(&proxy, &proxy.get("/200"));
    refused(&proxy, &proxy.client().ask("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"));
    assert_eq!(origin.requests(), 15);
    quiet(&proxy);
}

#[test]
fn twenty_failures_open_it_if_nothing_else_is_said() {
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin]).start();
    told(&proxy, &origin, &[500; 19]);
    nobody_is_blamed(&proxy);
    told(&proxy, &origin, &[500]);
    becomes(&proxy, &origin, OPEN);
    assert_eq!(turns(&proxy, &origin, "open"), 1.0);
    quiet(&proxy);
}

#[test]
fn half_is_not_more_than_half() {
    let origin = Origin::start(reply::told);
    let keys = "failure_ratio: 0.5, min_observations: 20";
    let proxy = over(&[&origin]).pool(&breaker(keys)).start();
    told(&proxy, &origin, &[200; 10]);
    told(&proxy, &origin, &[500; 10]);
    nobody_is_blamed(&proxy);
    told(&proxy, &origin, &[500]);
    becomes(&proxy, &origin, OPEN);
}

#[test]
fn only_the_last_ones_count() {
    let origin = Origin::start(reply::told);
    let keys = "failure_ratio: 0.5, min_observations: 20, window_size: 20";
    let proxy = over(&[&origin]).pool(&breaker(keys)).start();
    told(&proxy, &origin, &[200; 30]);
    told(&proxy, &origin, &[500; 10]);
    nobody_is_blamed(&proxy);
    told(&proxy, &origin, &[500]);
    becomes(&proxy, &origin, OPEN);
}

#[test]
fn what_is_long_ago_does_not_count() {
    let origin = Origin::start(reply::told);
    let keys = "failure_ratio: 0.5, min_observations: 5, window: 1s";
    let proxy = over(&[&origin]).pool(&breaker(keys)).start();
    told(&proxy, &origin, &[500; 4]);
    let_pass(Duration::from_millis(1300));
    told(&proxy, &origin, &[500; 4]);
    nobody_is_blamed(&proxy);
    told(&proxy, &origin, &[500]);
    becomes(&proxy, &origin, OPEN);
}

#[test]
fn what_the_client_got_wrong_never_counts() {
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin]).pool(TOUCHY).start();
    let all = [200, 204, 301, 304, 400, 401, 403, 404, 405, 408, 413, 421, 429, 451, 499, 501, 505];
    told(&proxy, &origin, &all.repeat(3));
    nobody_is_blamed(&proxy);
    quiet(&proxy);
}

#[test]
fn which_statuses_are_failures_is_said_in_the_file() {
    let origin = Origin::start(reply::told);
    let keys = "consecutive_failures: 1, failure_statuses: [404, 503]";
    for failure in [404, 503] {
        let proxy = over(&[&origin]).pool(&breaker(keys)).start();
        for status in [500, 502, 504, 429, 400, 405, 200] {
            assert_eq!(proxy.get(&format!("/{status}")).status(), status);
        }
        judged(&proxy, 7);
        nobody_is_blamed(&proxy);
        assert_eq!(proxy.get(&format!("/{failure}")).status(), failure);
        becomes(&proxy, &origin, OPEN);
    }
}

#[test]
fn what_speaks_of_the_request_counts_if_it_is_listed() {
    let origin = Origin::start(reply::told);
    let keys = "consecutive_failures: 1, failure_statuses: [5xx, 501]";
    let proxy = over(&[&origin]).pool(&breaker(keys)).start();
    assert_eq!(proxy.get("/505").status(), 505);
    judged(&proxy, 1);
    nobody_is_blamed(&proxy);
    assert_eq!(proxy.get("/501").status(), 501);
    becomes(&proxy, &origin, OPEN);
}

#[test]
fn only_the_one_that_fails_is_left_out() {
    let bad = Origin::start(reply::raw_kept("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"));
    let good = Origin::start(reply::name("good"));
    let pool = format!("{ROUND_ROBIN}, {}", breaker("consecutive_failures: 3"));
    let proxy = over(&[&bad, &good]).pool(&pool).start();
    for _ in 0..6 {
        proxy.get("/");
    }
    becomes(&proxy, &bad, OPEN);
    for _ in 0..20 {
        assert_eq!(proxy.get("/later").text(), "good");
    }
    // It is passed over, not tried in vain.
    assert_eq!(proxy.logged_path("/later")["attempts"], 1);
    assert_eq!((bad.requests(), good.requests()), (3, 23));
    assert_eq!((state(&proxy, &bad), state(&proxy, &good)), (OPEN, CLOSED));
    assert_eq!((is_eligible(&proxy, &bad), is_eligible(&proxy, &good)), (false, true));
    assert_eq!((turns(&proxy, &bad, "open"), turns(&proxy, &good, "open")), (1.0, 0.0));
    quiet(&proxy);
}

#[test]
fn what_one_pool_thinks_of_an_upstream_is_nothing_to_another() {
    let origin = Origin::start(reply::told);
    let url = origin.url();
    let proxy = start(&format!(
        "listeners:\n- {{ name: web, bind: \"127.0.0.1:0\" }}\n\
         upstream_pools:\n\
         - {{ name: b, upstreams: [{{ url: \"{url}\" }}], {TOUCHY} }}\n\
         - {{ name: c, upstreams: [{{ url: \"{url}\" }}], {TOUCHY} }}\n\
         routes:\n\
         - {{ name: one, host: one.test, pool: b }}\n\
         - {{ name: two, host: two.test, pool: c }}\n"
    ));
    let ask = |host: &str, path: &str| proxy.client().ask(crate::setup::get(host, path, ""));
    assert_eq!(ask("one.test", "/500").status(), 500);
    becomes(&proxy, &origin, OPEN);
    refused(&proxy, &ask("one.test", "/"));
    assert_eq!(ask("two.test", "/").text(), "good");
    let of_c = [("pool", "c")];
    assert_eq!(proxy.metrics().sum("proxy_circuit_breaker_state", &of_c), CLOSED);
    assert_eq!(proxy.ask_admin("/readyz").status(), 204);
}

/// Fails if the path names it.
fn fails_at(name: &'static str) -> impl Fn(&mut Call<'_>) -> Then + Send + Sync {
    move |call| {
        let path = if call.request.target().contains(name) { "500 No" } else { "200 OK" };
        call.send(format!("HTTP/1.1 {path}\r\nContent-Length: 0\r\n\r\n"));
        Then::Next
    }
}

#[test]
fn when_none_is_left_the_client_is_told_when_the_first_comes_back() {
    let (one, two) = (Origin::start(fails_at("one")), Origin::start(fails_at("two")));
    let keys = "circuit_breaker: { consecutive_failures: 1, open_min: 30s, open_max: 30s }";
    let proxy = over(&[&one, &two]).pool(keys).start();
    while state(&proxy, &one) != OPEN {
        assert!([200, 500].contains(&proxy.get("/one").status()));
    }
    let_pass(Duration::from_millis(1100));
    assert_eq!(proxy.get("/two").status(), 500);
    becomes(&proxy, &two, OPEN);
    let asked = Instant::now();
    let seconds = refused(&proxy, &proxy.get("/"));
    assert!(asked.elapsed() < Duration::from_secs(2), "nobody waits");
    assert!((20..=29).contains(&seconds), "{seconds}: the second has 30, the first 28.9 at most");
    assert_eq!(eligible(&proxy), 0.0);
    quiet(&proxy);
}

#[test]
fn nobody_is_told_to_wait_for_longer_than_it_is_open() {
    let origin = Origin::start(reply::told);
    let keys = "circuit_breaker: { consecutive_failures: 1, open_min: 15s, open_max: 15s }";
    for _ in 0..5 {
        let proxy = over(&[&origin]).pool(keys).start();
        let mut client = proxy.client();
        assert_eq!(client.get("/500").status(), 500);
        let answer = loop {
            let answer = client.get("/500");
            if answer.status() == 503 {
                break answer;
            }
        };
        let seconds = refused(&proxy, &answer);
        assert!(seconds <= 15, "{seconds}");
    }
}

#[test]
fn each_time_it_is_left_alone_for_longer_up_to_a_bound() {
    let arrivals = Arc::new(Mutex::new(Vec::new()));
    let arrived = arrivals.clone();
    let origin = Origin::start(move |call| {
        arrived.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
        call.send("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n");
        Then::Next
    });
    let keys = "consecutive_failures: 1, half_open_probes: 1, open_min: 200ms, open_max: 400ms";
    let proxy = over(&[&origin]).pool(&format!("circuit_breaker: {{ {keys} }}")).start();
    let known = || arrivals.lock().unwrap_or_else(PoisonError::into_inner).clone();
    eventually(SOON, || {
        let answer = proxy.get("/");
        assert!([500, 503].contains(&answer.status()));
        known().len() >= 5
    });
    let gaps: Vec<_> = known().windows(2).map(|pair| pair[1] - pair[0]).collect();
    let ms = Duration::from_millis;
    // The second time is twice the first, give or take a fifth, and the bound holds for good:
    // without one the fourth would be 1600 ms, less a fifth.
    let least = [ms(200), ms(320), ms(320), ms(320)];
    for (gap, least) in gaps.iter().zip(least) {
        assert!(*gap >= least, "{gaps:?}");
    }
    assert!(gaps[3] < ms(1280), "{gaps:?}");
}

#[test]
fn each_turn_is_told_and_counted_once() {
    let origin = Origin::start(reply::told);
    let keys = "consecutive_failures: 1, half_open_probes: 1, open_min: 100ms, open_max: 100ms";
    let proxy = over(&[&origin]).pool(&format!("circuit_breaker: {{ {keys} }}")).start();
    assert_eq!(state(&proxy, &origin), CLOSED);
    assert_eq!(proxy.get("/500").status(), 500);
    becomes(&proxy, &origin, OPEN);
    eventually(SOON, || proxy.get("/").status() == 200);
    becomes(&proxy, &origin, CLOSED);
    for to in ["open", "half_open", "closed"] {
        assert_eq!(turns(&proxy, &origin, to), 1.0, "{to}");
    }
    let event = |n: usize| within_events(&proxy, n);
    for (n, (from, to)) in
        [("closed", "open"), ("open", "half_open"), ("half_open", "closed")].into_iter().enumerate()
    {
        let event = event(n);
        assert_eq!((&event["from"], &event["to"]), (&from.into(), &to.into()), "{event}");
        assert_eq!((&event["pool"], &event["upstream"]), (&"b".into(), &origin.url().into()));
    }
    assert_eq!(proxy.events("circuit_breaker_changed").len(), 3);
}

/// The `n`th turn of any breaker.
#[track_caller]
fn within_events(proxy: &Proxy, n: usize) -> Value {
    let event =
        l7rp_testkit::within(SOON, || proxy.events("circuit_breaker_changed").get(n).cloned());
    event.expect("it is told")
}

#[test]
fn good_probes_of_health_do_not_close_it() {
    let origin = Origin::start(reply::told);
    let health = "health: { active: { path: /healthz, interval: 100ms, timeout: 90ms, \
                  healthy_threshold: 1, unhealthy_threshold: 9 } }";
    let proxy = over(&[&origin]).pool(&format!("{TOUCHY}, {health}")).start();
    hear(&proxy, &origin, "eligible");
    assert_eq!(proxy.get("/500").status(), 500);
    becomes(&proxy, &origin, OPEN);
    let before = origin.requests();
    eventually(SOON, || origin.requests() >= before + 5);
    refused(&proxy, &proxy.get("/"));
    assert_eq!(state(&proxy, &origin), OPEN);
    // Nor is its failure one of health.
    assert_eq!(proxy.events("upstream_health_changed").len(), 1);
    assert!(!is_eligible(&proxy, &origin));
    assert_eq!(proxy.ask_admin("/readyz").status(), 503);
}

#[test]
fn bad_probes_of_health_do_not_open_it() {
    let origin = Origin::start(reply::told);
    let health = "health: { active: { path: /500, interval: 100ms, timeout: 90ms, \
                  healthy_threshold: 1, unhealthy_threshold: 1 } }";
    let proxy = over(&[&origin]).pool(&format!("{TOUCHY}, {health}")).start();
    eventually(SOON, || origin.requests() >= 5);
    assert_eq!(state(&proxy, &origin), CLOSED);
    let answer = proxy.get("/");
    assert_failed(&proxy, &answer, 503, "destination_unavailable", "no_upstream");
    for to in ["open", "half_open", "closed"] {
        assert_eq!(turns(&proxy, &origin, to), 0.0);
    }
}

#[test]
fn what_is_refused_here_for_want_of_room_is_no_verdict() {
    for (upstream, pool) in
        [("weight: 1", "max_in_flight: 1"), ("max_in_flight: 1", "max_in_flight: 9")]
    {
        let gate = Gate::default();
        let origin = Origin::start(reply::held("late", &gate));
        let setup = over(&[]).upstream(&origin.url(), upstream);
        let proxy = setup.pool(&format!("{TOUCHY}, {pool}")).start();
        let mut first = asking(&proxy, &origin, "/");
        for _ in 0..5 {
            assert_eq!(proxy.get("/").status(), 503);
        }
        nobody_is_blamed(&proxy);
        gate.open();
        assert_eq!(first.response().status(), 200);
        quiet(&proxy);
        nobody_is_blamed(&proxy);
    }
}

#[test]
fn one_that_nothing_opens_can_be_had() {
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin]).pool(NO_BREAKER).start();
    told(&proxy, &origin, &[500; 60]);
    nobody_is_blamed(&proxy);
}

#[test]
fn an_open_one_does_not_make_the_proxy_unready_for_ever() {
    let origin = Origin::start(reply::told);
    let keys = "consecutive_failures: 1, open_min: 500ms, open_max: 500ms";
    let proxy = over(&[&origin]).pool(&format!("circuit_breaker: {{ {keys} }}")).start();
    assert_eq!(proxy.ask_admin("/readyz").status(), 204);
    assert_eq!(proxy.get("/500").status(), 500);
    eventually(SOON, || proxy.ask_admin("/readyz").status() == 503);
    assert_eq!(proxy.ask_admin("/-/ready").status(), 503);
    // Whoever asks gets nothing to do while it is unready, so that no request can end it.
    eventually(SOON, || proxy.ask_admin("/readyz").status() == 204);
    assert!(is_eligible(&proxy, &origin));
    assert_eq!(origin.requests(), 1);
    assert_eq!(proxy.get("/").status(), 200);
}
