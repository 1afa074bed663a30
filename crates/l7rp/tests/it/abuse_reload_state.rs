//! What is known of upstreams outlives a reload, and a reload leaves nothing behind.

use std::fmt::Write;
use std::fs;
use std::ops::RangeInclusive;
use std::time::Duration;

use l7rp_testkit::{Gate, Origin, SOON, Signal, eventually, let_pass, reply, within};

use crate::reloading::free_port;
use crate::setup::{assert_counts, get, over, start};
use crate::verdict::{OPEN, becomes, judged};

/// Opens at the first failure, for longer than a test takes.
const OPENS_AT_ONCE: &str = "circuit_breaker: { consecutive_failures: 1, open_min: 30s, \
     open_max: 60s, failure_statuses: [500] }";

/// Opens at the third failure; the other rule is there to be changed.
fn opens_at_three(probes: u32) -> String {
    format!(
        "circuit_breaker: {{ consecutive_failures: 3, open_min: 30s, open_max: 60s, \
         failure_statuses: [500], half_open_probes: {probes} }}"
    )
}

/// Whether a breaker that opens while a reload waits for new upstreams stays open; `None`: the
/// reload did not wait for long enough to tell.
fn stays_open_while_a_reload_waits() -> Option<bool> {
    let (origin, cold) = (Origin::start(reply::told), Origin::start(reply::told));
    let proxy = over(&[&origin]).pool(&opens_at_three(1)).start();
    // The new pool has nobody who is well: the reload waits for a second.
    let pool = format!(
        "- {{ name: cold, upstreams: [{{ url: \"{}\" }}], health: {{ active: {{ path: /500 }} }} }}",
        cold.url()
    );
    let new = over(&[&origin]).pool(&opens_at_three(2)).yaml();
    proxy.rewrite_yaml(&new.replace("routes:", &format!("{pool}\nroutes:")));
    proxy.signal(Signal::HUP);
    eventually(SOON, || cold.requests() > 0);
    for _ in 0..3 {
        assert_eq!(proxy.get("/500").status(), 500);
    }
    proxy.wait_for_event("circuit_breaker_changed", |e| e["to"] == "open", SOON);
    if !proxy.outcomes().is_empty() {
        return None;
    }
    proxy.wait_for_event("config_reloaded", |_| true, SOON);
    Some(proxy.get("/200").status() == 503)
}

#[test]
fn a_breaker_that_opens_while_a_reload_waits_for_new_upstreams_stays_open() {
    let stays = (0..10).find_map(|_| stays_open_while_a_reload_waits());
    assert!(stays.expect("a reload that waits"), "the breaker has opened for 30 s");
}

#[test]
fn a_failure_in_progress_while_breaker_rules_change_counts() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| {
        if call.request.target() == "/500" {
            held.pass();
        }
        reply::told(call)
    });
    let pool = |probes: u32| over(&[&origin]).pool(&opens_at_three(probes)).yaml();
    let proxy = start(&pool(1));
    let mut clients: Vec<_> = (0..6).map(|_| proxy.client()).collect();
    for client in &mut clients {
        client.send(get("a.test", "/500", ""));
    }
    eventually(SOON, || origin.requests() == 6);
    proxy.reload(&pool(2));
    gate.open();
    for client in &mut clients {
        assert_eq!(client.response().status(), 500);
    }
    becomes(&proxy, &origin, OPEN);
    proxy.wait_for_event("circuit_breaker_changed", |e| e["to"] == "open", SOON);
    assert_eq!(proxy.get("/200").status(), 503, "it is open, but the upstream is used");
}

#[test]
fn what_a_breaker_has_counted_outlives_a_change_of_a_timeout() {
    let origin = Origin::start(reply::told);
    let pool = |timeout: u32| {
        let keys = format!(
            "response_header_timeout: {timeout}s, circuit_breaker: {{ failure_ratio: 0.5, \
             min_observations: 10, window: 60s, open_min: 30s, open_max: 60s, \
             failure_statuses: [500] }}"
        );
        over(&[&origin]).pool(&keys).yaml()
    };
    let proxy = start(&pool(20));
    for _ in 0..9 {
        assert_eq!(proxy.get("/500").status(), 500);
    }
    judged(&proxy, 9);
    proxy.reload(&pool(21));
    // 11 failures of 11, and min_observations is 10.
    for _ in 0..2 {
        proxy.get("/500");
    }
    becomes(&proxy, &origin, OPEN);
    assert_eq!(proxy.get("/200").status(), 503);
}

/// Checks that a breaker that is open is still so after a reload with the same in other words.
#[track_caller]
fn keeps_its_breaker(rewrite: impl FnOnce(&str, &Origin) -> String) {
    let origin = Origin::start(reply::told);
    let yaml = over(&[&origin]).pool(OPENS_AT_ONCE).yaml();
    let proxy = start(&yaml);
    assert_eq!(proxy.get("/500").status(), 500);
    eventually(SOON, || proxy.get("/200").status() == 503);
    let new = rewrite(&yaml, &origin);
    assert_ne!(new, yaml);
    proxy.reload(&new);
    assert_eq!(proxy.get("/200").status(), 503, "the same machine, open for 30 s");
}

#[test]
fn an_upstream_whose_url_is_only_written_otherwise_keeps_its_breaker() {
    keeps_its_breaker(|yaml, origin| yaml.replace(&origin.url(), &format!("{}/", origin.url())));
}

#[test]
fn an_upstream_of_a_pool_that_is_renamed_keeps_its_breaker() {
    keeps_its_breaker(|yaml, _| yaml.replace("name: b,", "name: c,").replace("pool: b", "pool: c"));
}

#[test]
fn a_mended_health_check_is_asked_at_once() {
    let origin = Origin::start(reply::told);
    let pool = |path: &str| {
        let keys = format!(
            "health: {{ active: {{ path: \"{path}\", interval: 20s, timeout: 1s, \
             healthy_threshold: 1 }} }}"
        );
        over(&[&origin]).pool(&keys).yaml()
    };
    let proxy = start(&pool("/404"));
    eventually(SOON, || origin.requests() >= 1);
    assert_eq!(proxy.get("/200").status(), 503);
    proxy.reload(&pool("/200"));
    let well = within(Duration::from_secs(4), || {
        (proxy.ask_admin("/readyz").status() == 204).then_some(())
    });
    assert!(well.is_some(), "it is well and is not asked for as long as the old interval says");
}

#[test]
fn a_reload_while_a_new_upstream_is_being_judged_does_not_stop_that() {
    let good = Origin::start(reply::name("good"));
    let slow = Origin::start(|call| {
        if call.request.target() == "/health" {
            let_pass(Duration::from_millis(400));
        }
        reply::name("new")(call)
    });
    let yaml = |origins: &[&Origin], probes: u32| {
        let keys = format!(
            "health: {{ active: {{ path: /health, interval: 25s, timeout: 5s, \
             healthy_threshold: 2 }} }}, circuit_breaker: {{ half_open_probes: {probes} }}"
        );
        over(origins).pool(&keys).yaml()
    };
    let proxy = start(&yaml(&[&good], 1));
    eventually(SOON, || proxy.get("/").status() == 200);
    proxy.reload(&yaml(&[&good, &slow], 1));
    eventually(SOON, || slow.requests() >= 1);
    proxy.reload(&yaml(&[&good, &slow], 2));
    let used = within(Duration::from_secs(6), || (proxy.get("/").text() == "new").then_some(()));
    assert!(used.is_some(), "it is well, and is not probed again before a whole interval is over");
}

#[test]
fn idle_connections_that_a_reload_has_closed_are_not_counted_as_idle() {
    let origin = Origin::start(reply::name("x"));
    let pool = |probes: u32| {
        let keys = format!("circuit_breaker: {{ half_open_probes: {probes} }}");
        over(&[&origin]).pool(&keys).one_worker().yaml()
    };
    let proxy = start(&pool(1));
    proxy.get("/");
    let idle = [("state", "idle")];
    assert_counts(&proxy, "proxy_upstream_connections", &idle, 1.0);
    proxy.reload(&pool(2));
    eventually(SOON, || origin.open() == 0);
    assert_counts(&proxy, "proxy_upstream_connections", &idle, 0.0);
}

/// The `n`th of many configurations: listeners come, go and change, and so does all that is known
/// of upstreams.
fn varied(n: usize, origin: &Origin, ports: [u16; 2]) -> String {
    let [stays, changes] = ports;
    let more = match n % 11 {
        1 => format!("- {{ name: x, bind: \"127.0.0.1:{changes}\" }}\n"),
        2 => "- { name: u, bind: \"unix:{dir}/u.sock\" }\n".to_owned(),
        3 => format!("- {{ name: y, bind: \"127.0.0.1:{changes}\", max_connections: 9 }}\n"),
        _ => String::new(),
    };
    let url = if n.is_multiple_of(3) { origin.url() } else { format!("{}/{n}", origin.url()) };
    let (weight, probes, rate) = (1 + n % 2, 1 + n % 5, 1000 + n % 3);
    let mut pools = String::new();
    for i in 0..20 {
        let _ = writeln!(
            pools,
            "- {{ name: p{i}, upstreams: [{{ url: \"{url}\", weight: {weight} }}], \
             circuit_breaker: {{ half_open_probes: {probes} }}, \
             health: {{ active: {{ path: \"/{n}\", interval: 1s, timeout: 500ms }} }} }}"
        );
    }
    format!(
        "listeners:\n- {{ name: web, bind: \"127.0.0.1:{stays}\" }}\n{more}\
         upstream_pools:\n{pools}\
         routes:\n- {{ name: r, pool: p0, middleware: [{{ rate_limit: \
         {{ per_ip_rps: {rate}, burst: 1000 }} }}] }}\n"
    )
}

#[test]
fn many_reloads_of_every_kind_leave_nothing_behind() {
    let origin = Origin::start(reply::told);
    let ports = [free_port(), free_port()];
    let proxy = start(&varied(0, &origin, ports));
    let threads = || fs::read_dir(format!("/proc/{}/task", proxy.pid())).map_or(0, Iterator::count);
    let after = |numbers: RangeInclusive<usize>| {
        for n in numbers {
            proxy.reload(&varied(n, &origin, ports));
            let _ = proxy.client().send(get("a.test", "/200", "")).try_response();
        }
        proxy.descriptors()
    };
    let few = after(1..=11);
    after(12..=66);
    let first = proxy.resident() >> 10;
    after(67..=132);
    // What the last ones have left is closed within seconds.
    let mut seen = Vec::new();
    let is_small = within(SOON, || {
        let (memory, descriptors) = (proxy.resident() >> 10, proxy.descriptors());
        seen.push((memory, descriptors, threads()));
        (memory < first + first / 4 && descriptors <= few + 20).then_some(())
    });
    let last = seen.last();
    println!("{few} descriptors, {first} KiB; at last KiB, descriptors, threads: {last:?}");
    assert!(is_small.is_some(), "{few} descriptors and {first} KiB have become {last:?}");
}
