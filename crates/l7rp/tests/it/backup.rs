//! Upstreams that are spared: those that wait until no other is left, and those that have just
//! come and get their share bit by bit.

use std::thread;
use std::time::Duration;

use l7rp_testkit::{Gate, Origin, Proxy, SOON, eventually, let_pass, reply};

use crate::setup::{assert_failed, over, quiet};
use crate::verdict::{
    CLOSED, NO_BREAKER, OPEN, TOUCHY, becomes, hear, is_eligible, refused, state,
};

const ROUND_ROBIN: &str = "selector: { algorithm: round-robin }";
const SPARE: &str = "backup: true";
const PROBED: &str = "health: { active: { path: /healthz, interval: 100ms, timeout: 90ms, \
                      healthy_threshold: 1, unhealthy_threshold: 2 } }";

#[test]
fn a_backup_gets_nothing_while_another_can_be_used() {
    let (one, two) = (Origin::start(reply::told), Origin::start(reply::told));
    let spare = Origin::start(reply::name("spare"));
    for algorithm in ["round-robin", "weighted-rr", "least-conn", "p2c-ewma", "ip-hash"] {
        let proxy = over(&[&one])
            .upstream(&spare.url(), SPARE)
            .upstream(&two.url(), "weight: 1")
            .pool(&format!("selector: {{ algorithm: {algorithm} }}"))
            .start();
        for _ in 0..12 {
            assert_eq!(proxy.get("/").text(), "good", "{algorithm}");
        }
    }
    assert_eq!(spare.requests(), 0);
}

#[test]
fn a_backup_stands_in_while_the_breakers_of_the_others_are_open() {
    let main = Origin::start(reply::told);
    let spare = Origin::start(reply::name("spare"));
    let keys = "consecutive_failures: 1, half_open_probes: 1, open_min: 500ms, open_max: 500ms";
    let proxy = over(&[&main])
        .upstream(&spare.url(), SPARE)
        .pool(&format!("{ROUND_ROBIN}, circuit_breaker: {{ {keys} }}"))
        .start();
    assert_eq!(proxy.get("/500").status(), 500);
    becomes(&proxy, &main, OPEN);
    assert_eq!(proxy.get("/stands-in").text(), "spare");
    assert_eq!(proxy.logged_path("/stands-in")["attempts"], 1);
    eventually(SOON, || proxy.get("/").text() == "good");
    becomes(&proxy, &main, CLOSED);
    let stood_in = spare.requests();
    for _ in 0..10 {
        assert_eq!(proxy.get("/").text(), "good");
    }
    assert_eq!(spare.requests(), stood_in);
    quiet(&proxy);
}

#[test]
fn a_backup_stands_in_while_the_others_are_down_by_health() {
    // An address where no connection of another test begins.
    let main = Origin::start_at(([127, 0, 77, 3], 0).into(), reply::told);
    let address = main.address;
    let spare = Origin::start(reply::name("spare"));
    let proxy = over(&[&main])
        .upstream(&spare.url(), SPARE)
        .pool(&format!("{ROUND_ROBIN}, {PROBED}, {NO_BREAKER}"))
        .start();
    hear(&proxy, &main, "eligible");
    hear(&proxy, &spare, "eligible");
    assert_eq!(proxy.get("/").text(), "good");
    drop(main);
    eventually(SOON, || {
        !proxy.events("upstream_health_changed").iter().all(|e| e["to"] == "eligible")
    });
    for n in 0..6 {
        let path = format!("/{n}");
        assert_eq!(proxy.get(&path).text(), "spare");
        assert_eq!(proxy.logged_path(&path)["attempts"], 1);
    }
    assert_eq!(proxy.ask_admin("/readyz").status(), 204);
    let main = Origin::start_at(address, reply::told);
    eventually(SOON, || is_eligible(&proxy, &main));
    for _ in 0..6 {
        assert_eq!(proxy.get("/").text(), "good");
    }
    quiet(&proxy);
}

#[test]
fn a_backup_is_tried_after_all_the_others() {
    let (one, two) = (Origin::refusing(), Origin::refusing());
    let spare = Origin::start(reply::name("spare"));
    let proxy = over(&[&one])
        .upstream(&spare.url(), SPARE)
        .upstream(&two.url(), "weight: 1")
        .pool(&format!("{ROUND_ROBIN}, {NO_BREAKER}"))
        .start();
    for n in 0..3 {
        let path = format!("/{n}");
        assert_eq!(proxy.get(&path).text(), "spare");
        assert_eq!(proxy.logged_path(&path)["attempts"], 3);
    }
    quiet(&proxy);
}

#[test]
fn several_backups_share_what_there_is() {
    let main = Origin::start(reply::told);
    let spares = [Origin::start(reply::name("1")), Origin::start(reply::name("2"))];
    let proxy = over(&[&main])
        .upstream(&spares[0].url(), SPARE)
        .upstream(&spares[1].url(), SPARE)
        .pool(&format!("{ROUND_ROBIN}, {TOUCHY}"))
        .start();
    assert_eq!(proxy.get("/500").status(), 500);
    becomes(&proxy, &main, OPEN);
    for _ in 0..10 {
        assert!(["1", "2"].contains(&proxy.get("/").text().as_str()));
    }
    assert_eq!((spares[0].requests(), spares[1].requests()), (5, 5));
}

#[test]
fn a_backup_has_a_breaker_too() {
    let (main, spare) = (Origin::start(reply::told), Origin::start(reply::told));
    let proxy = over(&[&main])
        .upstream(&spare.url(), SPARE)
        .pool(&format!("{ROUND_ROBIN}, {TOUCHY}"))
        .start();
    for origin in [&main, &spare] {
        assert_eq!(proxy.get("/500").status(), 500);
        becomes(&proxy, origin, OPEN);
    }
    refused(&proxy, &proxy.get("/"));
    assert_eq!((main.requests(), spare.requests()), (1, 1));
    assert_eq!(proxy.ask_admin("/readyz").status(), 503);
}

#[test]
fn only_backups_are_better_than_nothing() {
    let spare = Origin::start(reply::name("spare"));
    let proxy = over(&[]).upstream(&spare.url(), SPARE).start();
    assert_eq!(proxy.get("/").text(), "spare");
    let gone = Origin::refusing();
    let dead = over(&[]).upstream(&gone.url(), SPARE).start();
    let answer = dead.get("/");
    assert_failed(&dead, &answer, 502, "connection_refused", "connect_refused");
}

/// Two upstreams, the second of which can be used when the gate has been opened.
fn one_later(algorithm: &str, ramp: &str, gate: &Gate) -> (Origin, Origin, Proxy) {
    let held = gate.clone();
    let first = Origin::start(reply::told);
    let second = Origin::start(move |call| {
        if call.request.target() == "/healthz" {
            held.pass();
        }
        reply::name("late")(call)
    });
    let health = "health: { active: { path: /healthz, interval: 10s, timeout: 9s, \
                  healthy_threshold: 1 } }";
    let pool = format!("selector: {{ algorithm: {algorithm} }}, slow_start: {ramp}, {health}");
    let proxy = over(&[&first, &second]).pool(&pool).start();
    hear(&proxy, &first, "eligible");
    (first, second, proxy)
}

#[test]
fn one_that_has_just_come_gets_little_at_first() {
    let share = |algorithm: &str| {
        let gate = Gate::default();
        let (_first, second, proxy) = one_later(algorithm, "1s", &gate);
        // The first has its whole share when the second comes.
        let_pass(Duration::from_millis(1100));
        gate.open();
        hear(&proxy, &second, "eligible");
        let late = (0..40).filter(|_| proxy.get("/").text() == "late").count();
        quiet(&proxy);
        late
    };
    thread::scope(|scope| {
        let algorithms = ["round-robin", "weighted-rr", "least-conn", "p2c-ewma"];
        let all = algorithms.map(|of| (of, scope.spawn(move || share(of))));
        for (algorithm, share) in all {
            let late = share.join().expect("it is measured");
            assert!(late <= 15, "{algorithm}: {late} of 40");
        }
    });
}

#[test]
fn one_that_has_been_there_for_a_while_gets_its_whole_share() {
    let gate = Gate::default();
    let (_first, second, proxy) = one_later("round-robin", "400ms", &gate);
    gate.open();
    hear(&proxy, &second, "eligible");
    let_pass(Duration::from_millis(500));
    let late = (0..20).filter(|_| proxy.get("/").text() == "late").count();
    assert_eq!(late, 10);
    assert_eq!(state(&proxy, &second), CLOSED);
}

#[test]
fn one_alone_gets_everything_however_new_it_is() {
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin]).pool(&format!("slow_start: 60s, {PROBED}")).start();
    hear(&proxy, &origin, "eligible");
    for _ in 0..30 {
        assert_eq!(proxy.get("/").text(), "good");
    }
    assert_eq!(origin.seen().iter().filter(|s| s.message.target() == "/").count(), 30);
}
