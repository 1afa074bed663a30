//! What is known of upstreams, clients and routes outlives a reload as far as the new file still
//! speaks of the same; and only so far.

use std::time::{Duration, Instant};

use l7rp_testkit::{Client, Gate, Origin, Proxy, SOON, Then, eventually, let_pass, reply};

use crate::reload::{ALL, WEB, file, pool, simple};
use crate::setup::{assert_counts, assert_failed, get, in_flight, start};
use crate::tries::assert_at_rest;
use crate::verdict::{
    CLOSED, HALF_OPEN, OPEN, TOUCHY, asking, becomes, is_eligible, refused, state, turns,
};

/// One pool `b` with these upstreams, each with keys of its own, and a route with these keys.
fn weighted(upstreams: &[(&Origin, &str)], keys: &str, route: &str) -> String {
    let upstreams: Vec<_> =
        upstreams.iter().map(|(o, keys)| format!("{{ url: \"{}\"{keys} }}", o.url())).collect();
    let pool = format!("name: b, upstreams: [{}]{keys}", upstreams.join(", "));
    file(&[WEB], &[pool], &[&format!("{ALL}{route}")])
}

/// Files that differ in everything that is not the upstream itself, its breaker's rules too.
fn changes(origin: &Origin) -> Vec<String> {
    let touchy = format!(", {TOUCHY}");
    let with = |upstream: &str, pool: &str, route: &str| {
        weighted(&[(origin, upstream)], &format!("{touchy}{pool}"), route)
    };
    let other_rules = |keys: &str| {
        let breaker = format!(", circuit_breaker: {{ open_min: 60s, open_max: 60s, {keys} }}");
        weighted(&[(origin, "")], &breaker, "")
    };
    vec![
        with(", weight: 7", "", ""),
        with("", ", selector: { algorithm: round-robin }", ""),
        with("", ", selector: { algorithm: ip-hash }", ""),
        with("", "", ", middleware: [{ retry: { max_attempts: 2 } }]"),
        with("", "", ", timeouts: { total: 9s }"),
        with("", ", keepalive: { max_idle: 3 }", ""),
        with(", max_in_flight: 9", ", max_in_flight: 9", ""),
        with("", ", connect_timeout: 2s", ""),
        with("", ", protocol: http1", ""),
        with("", ", retry_budget: { ratio: 0.5, min_per_second: 1 }", ""),
        other_rules("consecutive_failures: 9"),
        other_rules("failure_ratio: 0.9, min_observations: 50"),
        other_rules("consecutive_failures: 2, half_open_probes: 1"),
        with("", "", ""),
    ]
}

#[test]
fn an_open_breaker_stays_open_whatever_else_changes() {
    let (bad, good) = (Origin::start(reply::told), Origin::start(reply::name("beside")));
    let files = changes(&bad);
    let proxy = start(files.last().expect("the plain one"));
    assert_eq!(proxy.get("/500").status(), 500);
    becomes(&proxy, &bad, OPEN);
    for file in &files {
        proxy.reload(file);
        assert_eq!(state(&proxy, &bad), OPEN, "{file}");
        refused(&proxy, &proxy.get("/"));
    }
    // One that comes beside it is not held back by it, and does not let it in.
    proxy.reload(&weighted(&[(&good, ""), (&bad, "")], &format!(", {TOUCHY}"), ""));
    for _ in 0..6 {
        assert_eq!(proxy.get("/").text(), "beside");
    }
    assert_eq!((state(&proxy, &bad), state(&proxy, &good)), (OPEN, CLOSED));
    assert_eq!(turns(&proxy, &bad, "open"), 1.0);
    assert_eq!(bad.requests(), 1);
}

#[test]
fn an_open_breaker_lets_in_at_its_time_however_often_the_file_changes() {
    let origin = Origin::start(reply::told);
    let file = |n: usize| {
        // The rules change too, but not for how long it is open.
        let keys = format!("consecutive_failures: {}, open_min: 1500ms, open_max: 2s", 1 + n % 2);
        let breaker = format!(", circuit_breaker: {{ {keys} }}");
        weighted(&[(&origin, &format!(", weight: {}", 1 + n / 2 % 2))], &breaker, "")
    };
    let proxy = start(&file(0));
    let began = Instant::now();
    assert_eq!(proxy.get("/500").status(), 500);
    becomes(&proxy, &origin, OPEN);
    let mut n = 0;
    eventually(SOON, || {
        n += 1;
        proxy.reload(&file(n));
        let_pass(Duration::from_millis(50));
        proxy.get("/").status() == 200
    });
    assert!(began.elapsed() > Duration::from_millis(1450), "{:?}", began.elapsed());
    assert!(n >= 2, "{n}");
    assert_eq!(origin.requests(), 2);
    assert_eq!(turns(&proxy, &origin, "open"), 1.0);
}

#[test]
fn failures_in_a_row_are_counted_across_reloads() {
    let origin = Origin::start(reply::told);
    let file = |n: usize| {
        let rule = "consecutive_failures: 4, open_min: 60s, open_max: 60s";
        let breaker = format!(", circuit_breaker: {{ {rule} }}, max_in_flight: {}", 10 + n);
        simple(&[&origin], &breaker)
    };
    let proxy = start(&file(0));
    for n in 1..=4 {
        assert_eq!(state(&proxy, &origin), CLOSED);
        assert_eq!(proxy.get("/500").status(), 500);
        assert_counts(&proxy, "proxy_upstream_requests_total", &[], f64::from(n));
        proxy.reload(&file(n as usize));
    }
    becomes(&proxy, &origin, OPEN);
    refused(&proxy, &proxy.get("/"));
}

#[test]
fn tests_of_a_half_open_breaker_keep_their_places() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| {
        if call.request.target() == "/held" {
            held.pass();
        }
        reply::told(call)
    });
    let file = |weight: usize| {
        let rule = "consecutive_failures: 1, open_min: 300ms, open_max: 300ms, half_open_probes: 2";
        let breaker = format!(", circuit_breaker: {{ {rule} }}");
        weighted(&[(&origin, &format!(", weight: {weight}"))], &breaker, "")
    };
    let proxy = start(&file(1));
    assert_eq!(proxy.get("/500").status(), 500);
    becomes(&proxy, &origin, OPEN);
    let_pass(Duration::from_millis(350));
    let mut tests = [(); 2].map(|()| asking(&proxy, &origin, "/held"));
    assert_eq!(state(&proxy, &origin), HALF_OPEN);
    for weight in 2..5 {
        proxy.reload(&file(weight));
        assert_eq!(state(&proxy, &origin), HALF_OPEN);
        refused(&proxy, &proxy.get("/"));
    }
    gate.open();
    for client in &mut tests {
        assert_eq!(client.response().status(), 200);
    }
    becomes(&proxy, &origin, CLOSED);
    assert_eq!(["open", "half_open", "closed"].map(|to| turns(&proxy, &origin, to)), [1.0; 3]);
    assert_eq!(origin.requests(), 3);
}

#[test]
fn the_faster_one_is_still_known() {
    let slow = Origin::start(reply::slow("s", Duration::from_millis(150)));
    let fast = Origin::start(reply::name("f"));
    let file = |weight: usize| {
        let weight = format!(", weight: {weight}");
        let other_rules = format!(", circuit_breaker: {{ window_size: {} }}", 50 + weight.len());
        weighted(&[(&slow, &weight), (&fast, "")], &other_rules, "")
    };
    let proxy = start(&file(1));
    for _ in 0..20 {
        proxy.get("/");
    }
    let before = slow.requests();
    assert!(before >= 1, "it has been tried");
    for round in 0..8 {
        // From 9 to 10 the breaker's rules change with it.
        proxy.reload(&file(if round % 2 == 0 { 9 } else { 10 + round }));
        for _ in 0..3 {
            assert_eq!(proxy.get("/").text(), "f", "round {round}");
        }
    }
    assert_eq!(slow.requests(), before);
}

/// Has so many requests in progress.
#[track_caller]
fn hold(proxy: &Proxy, origin: &Origin, n: usize) -> Vec<Client> {
    (0..n).map(|_| asking(proxy, origin, "/")).collect()
}

/// A file with a bound for what is in progress: at the pool, at the upstream, or of all. In each
/// round the upstream has another weight, and its breaker other rules.
fn bounded(origin: &Origin, kind: usize, bound: usize, round: usize) -> String {
    let bound = format!("max_in_flight: {bound}");
    let mut upstream = format!(", weight: {}", 1 + round);
    let mut pool = format!(", circuit_breaker: {{ window_size: {} }}", 50 + round / 2);
    match kind {
        0 => pool = format!("{pool}, {bound}"),
        1 => upstream = format!("{upstream}, {bound}"),
        _ => {
            return weighted(&[(origin, &upstream)], &pool, "")
                + &format!("limits: {{ {bound} }}\n");
        }
    }
    weighted(&[(origin, &upstream)], &pool, "")
}

#[test]
fn requests_in_progress_are_counted_by_the_new_file_too() {
    for kind in 0..3 {
        let gate = Gate::default();
        let origin = Origin::start(reply::held("late", &gate));
        let proxy = start(&bounded(&origin, kind, 2, 0));
        let mut held = hold(&proxy, &origin, 2);
        for round in 1..4 {
            proxy.reload(&bounded(&origin, kind, 2, round));
            assert_eq!(in_flight(&proxy), 2.0);
            assert_eq!(proxy.get("/").status(), 503, "{kind} {round}");
        }
        proxy.reload(&bounded(&origin, kind, 3, 4));
        held.extend(hold(&proxy, &origin, 1));
        proxy.reload(&bounded(&origin, kind, 1, 5));
        assert_eq!(proxy.get("/").status(), 503);
        assert_eq!(in_flight(&proxy), 3.0);
        gate.open();
        for client in &mut held {
            assert_eq!(client.response().text(), "late");
        }
        assert_at_rest(&proxy);
        for _ in 0..3 {
            // The last places are given back just after the last octet.
            eventually(SOON, || proxy.get("/").text() == "late");
        }
        assert_eq!(origin.requests(), 6);
    }
}

#[test]
fn a_listener_counts_on_what_is_in_progress() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let file = |keys: &str| file(&[&format!("{WEB}{keys}")], &[pool("b", &[&origin], "")], &[ALL]);
    let proxy = start(&file(", max_in_flight: 1"));
    let mut held = hold(&proxy, &origin, 1);
    proxy.reload(&file(", max_in_flight: 1, limits: { max_headers: 50 }"));
    assert_eq!(proxy.get("/").status(), 503);
    proxy.reload(&file(", max_in_flight: 2"));
    held.extend(hold(&proxy, &origin, 1));
    assert_eq!(proxy.get("/").status(), 503);
    gate.open();
    for client in &mut held {
        assert_eq!(client.response().text(), "late");
    }
    drop(held);
    assert_counts(&proxy, "proxy_connections", &[("listener", "web")], 0.0);
    // Connections are counted on as well.
    let mut first = proxy.client();
    assert_eq!(first.get("/").status(), 200);
    proxy.reload(&file(", max_connections: 1"));
    assert_eq!(proxy.client().response().status(), 503);
    assert_eq!(first.get("/").status(), 200);
    drop(first);
    assert_counts(&proxy, "proxy_connections", &[("listener", "web")], 0.0);
    assert_eq!(proxy.get("/").status(), 200);
}

fn limited(origin: &Origin, rule: &str, other: &str) -> String {
    let route = format!("{ALL}, middleware: [{{ rate_limit: {{ {rule} }} }}]{other}");
    file(&[WEB], &[pool("b", &[origin], "")], &[&route])
}

#[test]
fn who_has_used_up_a_rate_limit_is_not_let_in_by_a_reload() {
    for scope in ["per-ip", "per-route"] {
        let origin = Origin::start(reply::name("x"));
        let rule = |burst: usize| format!("scope: {scope}, per_ip_rps: 0.01, burst: {burst}");
        let proxy = start(&limited(&origin, &rule(3), ""));
        let mut client = proxy.client();
        let mut let_in = || (0..8).filter(|_| client.get("/").status() == 200).count();
        assert_eq!(let_in(), 3);
        proxy.reload(&limited(&origin, &rule(3), ", timeouts: { total: 5s }"));
        assert_eq!(let_in(), 0);
        proxy.reload(&limited(&origin, &rule(3), ", methods: [GET]"));
        assert_eq!(let_in(), 0);
        proxy.reload(&limited(&origin, &rule(4), ", methods: [GET]"));
        assert_eq!(let_in(), 4, "another rule begins anew");
        proxy.reload(&limited(&origin, &rule(4), ""));
        assert_eq!(let_in(), 0);
        let refused = [("route", "r")];
        assert_counts(&proxy, "proxy_rate_limited_total", &refused, 5.0 + 8.0 + 8.0 + 4.0 + 8.0);
    }
}

#[test]
fn what_a_retry_budget_has_saved_up_stays_saved_up() {
    let origins = [(); 2].map(|()| Origin::start(reply::told));
    let route = ", middleware: [{ retry: { max_attempts: 2, backoff: 1ms } }]";
    let file = |ratio: &str, weight: usize| {
        let never_opens = "circuit_breaker: { failure_ratio: 1.0 }";
        let budget = format!("retry_budget: {{ ratio: {ratio}, min_per_second: 0 }}");
        let weight = format!(", weight: {weight}");
        let upstreams = [(&origins[0], weight.as_str()), (&origins[1], "")];
        weighted(&upstreams, &format!(", {never_opens}, {budget}"), route)
    };
    let proxy = start(&file("0.5", 1));
    let mut client = proxy.client();
    let requests = || origins.iter().map(Origin::requests).sum::<usize>();
    let mut retries = |path: &str, n: usize| {
        let before = requests();
        for _ in 0..n {
            client.get(path);
        }
        requests() - before - n
    };
    assert_eq!(retries("/200", 40), 0);
    proxy.reload(&file("0.5", 2));
    // Half of 40 are saved up, less what is not whole.
    assert_eq!(retries("/503", 15), 15);
    proxy.reload(&file("0.4", 2));
    let new = retries("/503", 10);
    assert!(new <= 4, "{new}: another rule begins anew");
}

#[test]
fn counts_go_on_and_those_of_what_is_gone_vanish() {
    let (kept, gone) = (Origin::start(reply::name("k")), Origin::start(reply::name("g")));
    let routes = [ALL, "name: gone, path_prefix: /gone, pool: g"];
    let listeners = [WEB, "name: side, bind: \"127.0.0.1:0\""];
    let both = file(&listeners, &[pool("b", &[&kept], ""), pool("g", &[&gone], "")], &routes);
    let proxy = start(&both);
    let ask = |kept: usize, gone: usize| {
        (0..kept).for_each(|_| assert_eq!(proxy.get("/").text(), "k"));
        (0..gone).for_each(|_| assert_eq!(proxy.get("/gone").text(), "g"));
    };
    let counts = |of_kept: f64| {
        let all = [("proxy_requests_total", "route", "r")];
        let url = kept.url();
        let upstream = [("proxy_upstream_requests_total", "upstream", url.as_str())];
        for (name, label, value) in all.into_iter().chain(upstream) {
            assert_counts(&proxy, name, &[(label, value)], of_kept);
        }
        assert_counts(&proxy, "proxy_request_duration_seconds_count", &[("route", "r")], of_kept);
    };
    ask(3, 2);
    Client::connect(proxy.listener("side")).get("/");
    counts(4.0);
    let one = file(&[WEB], &[pool("b", &[&kept], ", connect_timeout: 1s")], &[ALL]);
    proxy.reload(&one);
    counts(4.0);
    ask(2, 0);
    counts(6.0);
    assert_counts(&proxy, "proxy_connections_total", &[("listener", "web")], 7.0);
    let text = proxy.metrics().text;
    for word in ["route=\"gone\"", "pool=\"g\"", gone.url().as_str(), "listener=\"side\""] {
        assert!(!text.contains(word), "{word} is still there");
    }
    proxy.reload(&both);
    ask(0, 1);
    assert_counts(&proxy, "proxy_requests_total", &[("route", "gone")], 1.0);
    counts(6.0);
}

#[test]
fn a_route_that_another_pool_serves_is_still_the_same_route() {
    let gate = Gate::default();
    let (a, b) = (Origin::start(reply::held("a", &gate)), Origin::start(reply::name("b")));
    let pools = [pool("a", &[&a], ""), pool("b", &[&b], "")];
    let proxy = start(&file(&[WEB], &pools, &["name: r, pool: a"]));
    let mut early = asking(&proxy, &a, "/early");
    proxy.reload(&file(&[WEB], &pools, &["name: r, pool: b"]));
    assert_eq!(proxy.get("/").text(), "b");
    gate.open();
    assert_eq!(early.response().text(), "a");
    let line = proxy.logged_path("/early");
    assert_eq!((&line["route"], &line["pool"]), (&"r".into(), &"a".into()), "{line}");
    assert_counts(&proxy, "proxy_requests_total", &[("route", "r")], 2.0);
}

#[test]
fn an_upstream_that_comes_back_is_a_new_one() {
    let (bad, other) = (Origin::start(reply::told), Origin::start(reply::name("other")));
    let touchy = format!(", {TOUCHY}");
    let proxy = start(&simple(&[&bad], &touchy));
    assert_eq!(proxy.get("/500").status(), 500);
    becomes(&proxy, &bad, OPEN);
    assert_failed(&proxy, &proxy.get("/"), 503, "destination_unavailable", "breaker_open");
    proxy.reload(&simple(&[&other], &touchy));
    assert_eq!(proxy.get("/").text(), "other");
    proxy.reload(&simple(&[&bad], &touchy));
    assert_eq!(state(&proxy, &bad), CLOSED);
    assert_eq!(proxy.get("/").text(), "good");
    assert!(is_eligible(&proxy, &bad));
}

#[test]
fn what_ends_after_its_upstream_is_gone_harms_nobody() {
    let gate = Gate::default();
    let held = gate.clone();
    let gone = Origin::start(move |call| {
        held.pass();
        call.send("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n");
        Then::Next
    });
    let new = Origin::start(reply::name("new"));
    let touchy = format!(", {TOUCHY}, max_in_flight: 3");
    let proxy = start(&simple(&[&gone], &touchy));
    let mut clients: Vec<_> = (0..2).map(|_| asking(&proxy, &gone, "/late")).collect();
    proxy.reload(&simple(&[&new], &touchy));
    assert_eq!(proxy.get("/").text(), "new");
    // They take their places in the pool until they end.
    proxy.reload(&simple(&[&new], &touchy.replace("max_in_flight: 3", "max_in_flight: 2")));
    assert_eq!(proxy.get("/").status(), 503);
    gate.open();
    for client in &mut clients {
        assert_eq!(client.response().status(), 500);
    }
    assert_counts(&proxy, "proxy_panics_total", &[], 0.0);
    eventually(SOON, || proxy.get("/").status() == 200);
    assert_eq!(state(&proxy, &new), CLOSED);
    assert!(!proxy.metrics().text.contains(&gone.url()));
}

#[test]
fn bounded_hashing_knows_what_began_before_the_reload() {
    // To a pool with one of the four and three others, and to the same four under another name.
    for (name, after) in [("b", [0, 4, 5, 6]), ("c", [0, 1, 2, 3])] {
        let gate = Gate::default();
        let origins: Vec<_> = (0..7).map(|_| Origin::start(reply::held("x", &gate))).collect();
        let bounded = |name: &str, members: [usize; 4]| {
            let members = members.map(|ix| &origins[ix]);
            let keys = ", selector: { algorithm: consistent-hash-bounded, epsilon: 0.25, \
                        hash_key: \"header:X-User\" }";
            file(&[WEB], &[pool(name, &members, keys)], &[&format!("name: r, pool: {name}")])
        };
        let load = || origins.iter().map(Origin::requests).collect::<Vec<_>>();
        let proxy = start(&bounded("b", [0, 1, 2, 3]));
        let mut clients = Vec::new();
        let mut ask = |user: &str, total: usize| {
            let mut client = proxy.client();
            client.send(get("a.test", "/", &format!("X-User: {user}\r\n")));
            clients.push(client);
            eventually(SOON, || load().iter().sum::<usize>() == total);
        };
        for n in 1..=20 {
            ask(&format!("user-{n}"), n);
        }
        let before = load();
        proxy.reload(&bounded(name, after));
        for n in 21..=32 {
            ask("hot", n);
        }
        let now = load();
        let in_pool: usize = after.iter().map(|&ix| now[ix]).sum();
        let bound = (in_pool * 5).div_ceil(4 * 4);
        for ix in after.into_iter().filter(|&ix| now[ix] > before[ix]) {
            assert!(now[ix] <= bound, "{ix} of {now:?}, before {before:?}: bound {bound}");
        }
        gate.open();
        assert!(clients.iter_mut().all(|client| client.response().status() == 200));
    }
}
