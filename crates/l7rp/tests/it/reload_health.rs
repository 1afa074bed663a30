//! Who may be chosen does not change because a file has been read: health outlives a reload, and
//! nobody new is counted on before it has passed its checks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Call, Gate, Origin, Proxy, SOON, Then, eventually, let_pass, reply};

use crate::reload::{ALL, Over, WEB, file, is_left_alone, pool, simple};
use crate::setup::start;
use crate::verdict::{eligible, hear, is_eligible};

/// What an upstream answers to probes.
#[derive(Clone)]
struct Mood(Arc<AtomicU16>);

impl Mood {
    fn of(status: u16) -> Self {
        Self(Arc::new(AtomicU16::new(status)))
    }

    fn set(&self, status: u16) {
        self.0.store(status, SeqCst);
    }
}

fn is_probe(call: &Call<'_>) -> bool {
    call.request.target().starts_with("/health")
}

/// Answers with its name, and as it is in the mood for to probes; those for `/healthy` are fine.
fn moody(name: &str, mood: &Mood) -> Origin {
    let (name, mood) = (reply::name(name), mood.clone());
    Origin::start(move |call| {
        if !is_probe(call) {
            return name(call);
        }
        let is_fine = call.request.target() == "/healthy";
        let status = if is_fine { 200 } else { mood.0.load(SeqCst) };
        call.send(format!("HTTP/1.1 {status} So\r\nContent-Length: 0\r\n\r\n"));
        Then::Next
    })
}

/// Checks of this path, and more keys of the pool. So seldom that a test sees those at once only.
fn checked(path: &str, keys: &str) -> String {
    let pace = "interval: 30s, timeout: 5s, healthy_threshold: 2, unhealthy_threshold: 1";
    let active = format!("health: {{ active: {{ path: {path}, {pace} }} }}");
    format!(", selector: {{ algorithm: round-robin }}, {active}{keys}")
}

fn probes(origin: &Origin) -> usize {
    origin.seen().iter().filter(|seen| seen.message.target().starts_with("/health")).count()
}

/// Asks so often that each upstream would have its turn; who has answered.
fn who_answers(proxy: &Proxy) -> String {
    let mut names: Vec<_> = (0..8).map(|_| proxy.get("/").text()).collect();
    names.sort();
    names.dedup();
    names.concat()
}

/// A proxy over `a`, which is fine, and `b`, which is not; both have been judged.
fn one_is_ill() -> (Proxy, [Origin; 2], Mood) {
    let mood = Mood::of(503);
    let (a, b) = (moody("a", &Mood::of(200)), moody("b", &mood));
    let proxy = start(&simple(&[&a, &b], &checked("/health", "")));
    hear(&proxy, &a, "eligible");
    hear(&proxy, &b, "ineligible");
    (proxy, [a, b], mood)
}

#[test]
fn who_is_out_stays_out_and_who_is_in_stays_in() {
    let (proxy, [a, b], mood) = one_is_ill();
    // It would pass now, but nobody has asked it again.
    mood.set(200);
    let before = probes(&a) + probes(&b);
    let others = [
        ", connect_timeout: 2s",
        ", circuit_breaker: { consecutive_failures: 3 }",
        ", max_in_flight: 50",
        "",
    ];
    for keys in others {
        proxy.reload(&simple(&[&a, &b], &checked("/health", keys)));
        assert!(is_eligible(&proxy, &a) && !is_eligible(&proxy, &b), "{keys}");
        assert_eq!(who_answers(&proxy), "a");
    }
    // In another order they are the same.
    proxy.reload(&simple(&[&b, &a], &checked("/health", "")));
    assert_eq!(who_answers(&proxy), "a");
    assert_eq!(probes(&a) + probes(&b), before, "no reload is a reason to probe");
    assert_eq!(proxy.events("upstream_health_changed").len(), 2);
}

#[test]
fn other_thresholds_are_no_verdict() {
    let (proxy, [a, b], _) = one_is_ill();
    for healthy in [3, 5, 2] {
        let keys = checked("/health", "")
            .replace("healthy_threshold: 2", &format!("healthy_threshold: {healthy}"));
        proxy.reload(&simple(&[&a, &b], &keys));
        assert!(is_eligible(&proxy, &a) && !is_eligible(&proxy, &b), "{healthy}");
        assert_eq!(who_answers(&proxy), "a");
    }
}

#[test]
fn other_checks_decide_when_they_have_spoken() {
    let (a, b) = (moody("a", &Mood::of(503)), moody("b", &Mood::of(503)));
    let proxy = start(&simple(&[&a, &b], &checked("/healthy", "")));
    for origin in [&a, &b] {
        hear(&proxy, origin, "eligible");
    }
    // The new ones find both ill, at once: each counts until then, and is out from then on.
    proxy.reload(&simple(&[&a, &b], &checked("/health", "").replace("30s", "6s")));
    for origin in [&a, &b] {
        hear(&proxy, origin, "ineligible");
    }
    assert_eq!(proxy.get("/").status(), 503);
    // And those after them find both well.
    let before = probes(&a) + probes(&b);
    proxy.reload(&simple(&[&a, &b], &checked("/healthy", "").replace("30s", "6s")));
    eventually(SOON, || eligible(&proxy) == 2.0);
    assert!(probes(&a) + probes(&b) >= before + 4);
    assert_eq!(who_answers(&proxy), "ab");
}

#[test]
fn without_checks_all_are_in_and_checks_that_come_find_them_so() {
    let (proxy, [a, b], _) = one_is_ill();
    let without = ", selector: { algorithm: round-robin }";
    proxy.reload(&simple(&[&a, &b], without));
    assert_eq!((eligible(&proxy), who_answers(&proxy).as_str()), (2.0, "ab"));
    let before = probes(&a) + probes(&b);
    proxy.reload(&simple(&[&a, &b], &checked("/healthy", "").replace("30s", "6s")));
    assert_eq!(who_answers(&proxy), "ab");
    eventually(SOON, || probes(&a) + probes(&b) > before);
    assert_eq!(who_answers(&proxy), "ab");
}

/// Lets probes wait for the gate.
fn gated(name: &str, gate: &Gate) -> Origin {
    let (name, gate) = (reply::name(name), gate.clone());
    Origin::start(move |call| {
        if is_probe(call) {
            gate.pass();
        }
        name(call)
    })
}

#[test]
fn a_new_one_is_not_used_before_it_has_passed() {
    let gate = Gate::default();
    let (a, b) = (moody("a", &Mood::of(200)), gated("b", &gate));
    let proxy = start(&simple(&[&a], &checked("/health", "")));
    hear(&proxy, &a, "eligible");
    proxy.reload(&simple(&[&b, &a], &checked("/health", "")));
    assert_eq!(who_answers(&proxy), "a");
    eventually(SOON, || probes(&b) == 1);
    // Nor is a reload a way around it.
    proxy.reload(&simple(&[&b, &a], &checked("/health", ", keepalive: { max_idle: 9 }")));
    assert_eq!(who_answers(&proxy), "a");
    assert_eq!(b.requests(), probes(&b));
    gate.open();
    hear(&proxy, &b, "eligible");
    assert_eq!(who_answers(&proxy), "ab");
}

#[test]
fn a_new_one_whose_first_probe_a_reload_has_cut_is_probed_again_at_once() {
    let gate = Gate::default();
    let (a, b) = (moody("a", &Mood::of(200)), gated("b", &gate));
    let proxy = start(&simple(&[&a], &checked("/health", "")));
    hear(&proxy, &a, "eligible");
    proxy.reload(&simple(&[&b, &a], &checked("/health", "")));
    eventually(SOON, || probes(&b) == 1);
    // Its breaker gets other rules, and so its probes are another task's.
    proxy.reload(&simple(&[&b, &a], &checked("/health", ", connect_timeout: 1s")));
    gate.open();
    // The interval is 30 s: one that has not been judged yet does not wait for it.
    hear(&proxy, &b, "eligible");
}

#[test]
fn probes_come_to_a_verdict_however_often_the_file_changes() {
    let (hangs, seen) = (Arc::new(AtomicBool::new(false)), reply::name("a"));
    let may_hang = hangs.clone();
    let origin = Origin::start(move |call| {
        if is_probe(call) && may_hang.load(SeqCst) { reply::hang(call) } else { seen(call) }
    });
    let keys = |n: usize| {
        // Who judges by other rules is another upstream to the tasks that probe.
        checked("/health", &format!(", connect_timeout: {}s", 1 + n % 2))
            .replace("interval: 30s, timeout: 5s", "interval: 500ms, timeout: 400ms")
    };
    let proxy = start(&simple(&[&origin], &keys(0)));
    hear(&proxy, &origin, "eligible");
    hangs.store(true, SeqCst);
    let began = Instant::now();
    let mut n = 0;
    eventually(SOON, || {
        n += 1;
        proxy.reload(&simple(&[&origin], &keys(n)));
        let_pass(Duration::from_millis(150));
        let is_out = !is_eligible(&proxy, &origin);
        assert!(is_out || began.elapsed() < SOON / 2, "no probe has come to its end");
        is_out
    });
}

/// Asks all the time until `work` is done: nothing may fail. How often it has asked.
fn all_the_time(proxy: &Proxy, work: impl FnOnce()) -> usize {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut count = 0;
            let mut client = proxy.client();
            while !over.load(SeqCst) {
                for answer in [client.get("/"), proxy.get("/new")] {
                    assert!([200, 404].contains(&answer.status()), "{answer:?}");
                }
                count += 1;
            }
            count
        });
        let end = Over(&over);
        work();
        drop(end);
        asking.join().expect("no failure")
    })
}

#[test]
fn what_is_wholly_new_is_warmed_up_before_it_is_used() {
    let slow_probes = |name: &str| {
        let name = reply::name(name);
        Origin::start(move |call| {
            if is_probe(call) {
                let_pass(Duration::from_millis(40));
            }
            name(call)
        })
    };
    let origins = [(); 4].map(|()| slow_probes("x"));
    let [a, b, c, d] = &origins;
    let route = |name: &str, path: &str, pool: &str| {
        format!("name: {name}, path_prefix: {path}, pool: {pool}")
    };
    let all = |pools: &[String], new: Option<&str>| {
        let routes = [
            route("r", "/", "b"),
            new.map_or_else(
                || "name: none, path_prefix: /new, respond: { status: 404 }".to_owned(),
                |pool| route("new", "/new", pool),
            ),
        ];
        file(&[WEB], pools, &[&routes[0], &routes[1]])
    };
    let health = checked("/health", "");
    let proxy = start(&all(&[pool("b", &[a], &health)], None));
    hear(&proxy, a, "eligible");
    let asked = all_the_time(&proxy, || {
        // All upstreams of the pool are others.
        proxy.reload(&all(&[pool("b", &[b], &health)], None));
        // A pool that comes with its route.
        let event =
            proxy.reload(&all(&[pool("b", &[b], &health), pool("n", &[c], &health)], Some("n")));
        // It has waited for two probes, and not for longer than it must.
        let took = event["took_ms"].as_f64().expect("a time");
        assert!((80.0..1500.0).contains(&took), "{took}");
        assert_eq!(proxy.get("/new").status(), 200);
        // The pool has another name, and so all of it is new.
        proxy.reload(&all(&[pool("b", &[b], &health), pool("m", &[d, c], &health)], Some("m")));
        assert_eq!(proxy.get("/new").status(), 200);
    });
    assert!(asked > 10, "{asked}");
    is_left_alone(a);
}

#[test]
fn a_new_pool_that_is_ill_holds_the_reload_for_a_second_at_most() {
    let (a, ill) = (moody("a", &Mood::of(200)), moody("ill", &Mood::of(503)));
    let silent = Origin::start(reply::hang);
    let plain = pool("b", &[&a], "");
    let proxy = start(&file(&[WEB], std::slice::from_ref(&plain), &[ALL]));
    let began = Instant::now();
    let pools = [
        plain,
        pool("ill", &[&ill], &checked("/health", "")),
        pool("silent", &[&silent], &checked("/health", "")),
    ];
    let routes = [
        ALL,
        "name: ill, path_prefix: /ill, pool: ill",
        "name: silent, path_prefix: /silent, pool: silent",
    ];
    proxy.reload(&file(&[WEB], &pools, &routes));
    let took = began.elapsed();
    assert!(took > Duration::from_millis(900) && took < Duration::from_secs(4), "{took:?}");
    assert_eq!(proxy.get("/").text(), "a");
    for path in ["/ill", "/silent"] {
        assert_eq!(proxy.get(path).status(), 503);
    }
    // What was ill already holds nothing up.
    let pools = [pool("b", &[&a], ", connect_timeout: 1s"), pools[1].clone(), pools[2].clone()];
    let began = Instant::now();
    proxy.reload(&file(&[WEB], &pools, &routes));
    assert!(began.elapsed() < Duration::from_millis(900), "{:?}", began.elapsed());
}

#[test]
fn passive_judgement_outlives_a_reload() {
    let bad = Origin::start(|call| {
        if is_probe(call) || call.request.target() == "/fine" {
            return reply::name("bad")(call);
        }
        call.send("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n");
        Then::Next
    });
    let good = Origin::start(reply::name("good"));
    let passive = ", circuit_breaker: { failure_ratio: 1.0 }";
    let keys = |more: &str| {
        checked("/health", passive).replace(
            " } }, circuit",
            " }, passive: { error_threshold: 0.4, half_life: 200ms } }, circuit",
        ) + more
    };
    let proxy = start(&simple(&[&bad, &good], &keys("")));
    for origin in [&bad, &good] {
        hear(&proxy, origin, "eligible");
    }
    eventually(SOON, || {
        proxy.get("/");
        !is_eligible(&proxy, &bad)
    });
    let before = bad.requests();
    for more in [", max_in_flight: 70", ", connect_timeout: 3s", ""] {
        proxy.reload(&simple(&[&bad, &good], &keys(more)));
        assert!(!is_eligible(&proxy, &bad), "{more}");
        assert_eq!(who_answers(&proxy), "good");
    }
    assert_eq!(bad.requests(), before);
}
