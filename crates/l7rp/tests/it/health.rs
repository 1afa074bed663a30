//! Probes decide who gets requests: from the first moment on, one upstream by itself, and not at
//! the first odd answer.

use std::collections::HashSet;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Call, Gate, Origin, Proxy, SOON, Then, eventually, let_pass, reply, within};

use crate::setup::{Setup, assert_failed, over, quiet, start};
use crate::verdict::{CLOSED, TOUCHY, ejections, eligible, hear, is_eligible, state};

const ROUND_ROBIN: &str = "selector: { algorithm: round-robin }";

/// Health checks with these keys.
fn active(keys: &str) -> String {
    format!("health: {{ active: {{ path: /healthz, {keys} }} }}")
}

/// Two good ones in a row let in, three bad ones take out.
fn probed(setup: Setup, interval: &str, timeout: &str) -> Proxy {
    let pace = format!("interval: {interval}, timeout: {timeout}");
    let health = active(&format!("{pace}, healthy_threshold: 2, unhealthy_threshold: 3"));
    setup.pool(ROUND_ROBIN).pool(&health).start()
}

/// What an upstream answers to probes: a status, or nothing.
#[derive(Clone, Debug)]
struct Mood(Arc<AtomicU16>);

const SILENT: u16 = 0;

impl Mood {
    fn good() -> Self {
        Self(Arc::new(AtomicU16::new(200)))
    }

    fn set(&self, status: u16) {
        self.0.store(status, SeqCst);
    }
}

fn is_probe(call: &Call<'_>) -> bool {
    call.request.target() == "/healthz"
}

/// Answers probes as it is in the mood for, and everything else with its name.
fn moody(name: &str, mood: &Mood) -> impl Fn(&mut Call<'_>) -> Then + Send + Sync + use<> {
    let (name, mood) = (reply::name(name), mood.clone());
    move |call| match mood.0.load(SeqCst) {
        _ if !is_probe(call) => name(call),
        SILENT => reply::hang(call),
        status => {
            call.send(format!("HTTP/1.1 {status} So\r\nContent-Length: 0\r\n\r\n"));
            Then::Next
        }
    }
}

/// How many probes it has got.
fn probes(origin: &Origin) -> usize {
    origin.seen().iter().filter(|seen| seen.message.target() == "/healthz").count()
}

/// How many other requests it has got.
fn others(origin: &Origin) -> usize {
    origin.requests() - probes(origin)
}

#[test]
fn a_cold_start_takes_a_moment_whatever_the_interval() {
    for _ in 0..3 {
        let (a, b) = (Origin::start(reply::told), Origin::start(reply::told));
        let proxy = probed(over(&[&a, &b]), "10s", "1s");
        let began = Instant::now();
        loop {
            let is_ready = proxy.ask_admin("/readyz").status() == 204;
            let answer = proxy.get("/");
            if answer.status() == 200 {
                break;
            }
            assert!(!is_ready, "it says that it is ready");
            assert_failed(&proxy, &answer, 503, "destination_unavailable", "no_upstream");
            assert_eq!(answer.get("retry-after"), Some("1"));
            assert!(began.elapsed() < Duration::from_secs(5), "the probes take their time");
        }
        eventually(SOON, || eligible(&proxy) == 2.0);
        assert!(began.elapsed() < Duration::from_secs(5), "the probes take their time");
        assert_eq!(proxy.ask_admin("/readyz").status(), 204);
        assert_eq!((probes(&a), probes(&b)), (2, 2));
    }
}

#[test]
fn a_cold_start_takes_a_moment_for_upstreams_with_names_too() {
    const POOLS: usize = 16;
    let origin = Origin::start(reply::told);
    let port = origin.address.port();
    let health = active("interval: 10s, timeout: 1s, healthy_threshold: 2");
    let mut yaml = "listeners:\n- { name: web, bind: \"127.0.0.1:0\" }\n\
                    routes:\n- { name: r, pool: p0 }\nupstream_pools:\n"
        .to_owned();
    for n in 0..POOLS {
        let upstream = format!("{{ url: \"http://localhost:{port}\" }}");
        let _ = writeln!(yaml, "- {{ name: p{n}, upstreams: [{upstream}], {health} }}");
    }
    // While the machine is busy, names are not there yet when the first probes are due.
    let (began, is_over) = (Instant::now(), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !is_over.load(SeqCst) && began.elapsed() < SOON {
                    std::hint::spin_loop();
                }
            });
        }
        let proxy = start(&yaml);
        is_over.store(true, SeqCst);
        let mut last = 0.0;
        let all = within(Duration::from_secs(5), || {
            last = eligible(&proxy);
            (last == POOLS as f64).then_some(())
        });
        assert!(all.is_some(), "after half of an interval only {last} of {POOLS}");
        assert_eq!(proxy.get("/").text(), "good");
    });
}

#[test]
fn an_upstream_that_was_never_in_is_not_said_to_have_been() {
    let origin = Origin::start(reply::raw_kept("HTTP/1.1 503 So\r\nContent-Length: 0\r\n\r\n"));
    let proxy = probed(over(&[&origin]), "100ms", "90ms");
    eventually(SOON, || probes(&origin) >= 5);
    for event in proxy.events("upstream_health_changed") {
        assert_ne!(event["from"], "eligible", "{event}");
    }
    assert_eq!(ejections(&proxy, None), 0.0);
}

#[test]
fn an_upstream_that_was_never_probed_gets_nothing() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("x", &gate));
    let proxy = probed(over(&[&origin]), "10s", "9s");
    eventually(SOON, || probes(&origin) == 1);
    for path in ["/readyz", "/-/ready"] {
        assert_eq!(proxy.ask_admin(path).status(), 503, "{path}");
    }
    let answer = proxy.get("/");
    assert_failed(&proxy, &answer, 503, "destination_unavailable", "no_upstream");
    assert_eq!(answer.get("retry-after"), Some("1"));
    assert!(!is_eligible(&proxy, &origin));
    gate.open();
    let event = hear(&proxy, &origin, "eligible");
    assert_eq!((&event["pool"], &event["from"]), (&"b".into(), &"ineligible".into()), "{event}");
    assert_eq!(event["why"], "status:200");
    assert_eq!(proxy.get("/").status(), 200);
    assert_eq!(proxy.ask_admin("/readyz").status(), 204);
    assert_eq!(proxy.ask_admin("/-/ready").status(), 200);
    let labels =
        [("pool", "b"), ("upstream", &*origin.url()), ("to", "eligible"), ("reason", "status:200")];
    let turned = proxy.metrics().sum("proxy_health_eligibility_transitions_total", &labels);
    assert_eq!(turned, 1.0);
    // Probes are no requests.
    quiet(&proxy);
}

#[test]
fn good_and_bad_ones_count_in_a_row_only() {
    const ANSWERS: [u16; 14] =
        [200, 200, 503, 200, 200, 200, 500, 500, 200, 404, 404, 200, 500, 500];
    let origin = Origin::start(|call| {
        let status = ANSWERS.get(call.number).copied().unwrap_or(500);
        call.send(format!("HTTP/1.1 {status} So\r\nContent-Length: 0\r\n\r\n"));
        Then::Next
    });
    let pace = "interval: 250ms, timeout: 240ms, healthy_threshold: 3, unhealthy_threshold: 3";
    let proxy = over(&[&origin]).pool(&active(pace)).start();
    hear(&proxy, &origin, "eligible");
    assert!(origin.requests() >= 6, "{} were enough", origin.requests());
    let event = hear(&proxy, &origin, "ineligible");
    assert!(origin.requests() >= 15, "{} were enough", origin.requests());
    assert_eq!((&event["from"], &event["why"]), (&"eligible".into(), &"status:500".into()));
    assert_eq!(ejections(&proxy, Some("status:500")), 1.0);
    assert_eq!(proxy.events("upstream_health_changed").len(), 2);
}

#[test]
fn a_backend_that_is_killed_is_left_and_comes_back() {
    let good = Origin::start(reply::told);
    // An address where no connection of another test begins.
    let killed = Origin::start_at(([127, 0, 77, 2], 0).into(), reply::name("back"));
    let (address, url) = (killed.address, killed.url());
    let proxy = probed(over(&[&good, &killed]), "150ms", "140ms");
    eventually(SOON, || eligible(&proxy) == 2.0);
    drop(killed);
    let gone = within(SOON, || {
        // Nobody notices.
        assert_eq!(proxy.get("/meanwhile").text(), "good");
        proxy.events("upstream_health_changed").into_iter().find(|e| e["to"] == "ineligible")
    });
    let event = gone.expect("it is left");
    assert_eq!((&event["upstream"], &event["why"]), (&url.into(), &"connect_refused".into()));
    assert_eq!(ejections(&proxy, Some("connect_refused")), 1.0);
    for n in 0..10 {
        assert_eq!(proxy.get(&format!("/{n}")).text(), "good");
        assert_eq!(proxy.logged_path(&format!("/{n}"))["attempts"], 1);
    }
    let again = Origin::start_at(address, reply::name("back"));
    eventually(SOON, || is_eligible(&proxy, &again));
    eventually(SOON, || proxy.get("/").text() == "back");
    assert!(probes(&again) >= 2, "it takes two good ones");
    quiet(&proxy);
}

#[test]
fn a_backend_that_hangs_is_left_and_delays_no_other() {
    let moods: Vec<_> = (0..6).map(|_| Mood::good()).collect();
    let origins: Vec<_> = moods.iter().map(|mood| Origin::start(moody("x", mood))).collect();
    let all: Vec<_> = origins.iter().collect();
    let proxy = probed(over(&all), "200ms", "150ms");
    eventually(SOON, || eligible(&proxy) == 6.0);
    moods[0].set(SILENT);
    let event = hear(&proxy, &origins[0], "ineligible");
    assert_eq!(event["why"], "timeout");
    let (before, began) = (others(&origins[0]), Instant::now());
    let paced: Vec<_> = origins.iter().map(probes).collect();
    for _ in 0..30 {
        assert_eq!(proxy.get("/").text(), "x");
        let_pass(Duration::from_millis(50));
    }
    assert_eq!(others(&origins[0]), before, "it is asked, though it hangs");
    let rounds = began.elapsed().as_millis() / 200;
    for (n, origin) in origins.iter().enumerate().skip(1) {
        let got = (probes(origin) - paced[n]) as u128;
        assert!(got + 2 >= rounds * 7 / 10, "{got} probes in {rounds} intervals");
        assert!(got <= rounds * 13 / 10 + 2, "{got} probes in {rounds} intervals");
    }
    assert_eq!(eligible(&proxy), 5.0);
    moods[0].set(200);
    eventually(SOON, || is_eligible(&proxy, &origins[0]));
    eventually(SOON, || {
        proxy.get("/");
        others(&origins[0]) > before
    });
}

#[test]
fn first_probes_do_not_come_all_at_once() {
    let arrivals = Arc::new(Mutex::new(Vec::new()));
    let origins: Vec<_> = (0..12)
        .map(|_| {
            let arrived = arrivals.clone();
            Origin::start(move |call| {
                if call.number == 0 {
                    let now = Instant::now();
                    arrived.lock().unwrap_or_else(PoisonError::into_inner).push(now);
                }
                reply::told(call)
            })
        })
        .collect();
    let all: Vec<_> = origins.iter().collect();
    let proxy = probed(over(&all), "10s", "1s");
    eventually(SOON, || eligible(&proxy) == 12.0);
    let arrivals = arrivals.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let (first, last) = (arrivals.iter().min().copied(), arrivals.iter().max().copied());
    let spread = last.zip(first).map(|(last, first)| last - first).expect("twelve of them");
    assert!(spread >= Duration::from_millis(100), "{spread:?}");
}

#[test]
fn a_probe_says_who_it_is_and_whom_it_wants() {
    for (host, expected) in [("preserve", None), ("upstream", None), ("api.test", Some("api.test"))]
    {
        let origin = Origin::start(reply::told);
        let keys = "interval: 100ms, timeout: 90ms, method: OPTIONS";
        let pool = format!("host_header: {host}, {}", active(keys));
        let proxy = over(&[&origin]).pool(&pool).start();
        eventually(SOON, || probes(&origin) >= 4 && is_eligible(&proxy, &origin));
        let seen = origin.seen();
        let authority = origin.address.to_string();
        for probe in &seen {
            let probe = &probe.message;
            assert_eq!((probe.method(), probe.target()), ("OPTIONS", "/healthz"));
            assert_eq!(probe.get("host"), Some(expected.unwrap_or(&authority)), "{host}");
            assert!(probe.get("user-agent").is_some_and(|agent| agent.starts_with("l7rp/")));
        }
        // Each on a connection of its own, which does not stay.
        let connections: HashSet<_> = seen.iter().map(|probe| probe.connection).collect();
        assert_eq!(connections.len(), seen.len());
        eventually(SOON, || origin.open() == 0);
    }
}

/// Probes of this method, answered so, make it eligible; how many octets the proxy has grown.
#[track_caller]
fn is_good_enough(keys: &str, answer: impl Into<Vec<u8>>) -> u64 {
    let answer = answer.into();
    let origin = Origin::start(move |call| {
        if is_probe(call) {
            call.send(&answer);
            return Then::Next;
        }
        reply::told(call)
    });
    let pace = "interval: 100ms, timeout: 90ms, healthy_threshold: 1";
    let proxy = over(&[&origin]).pool(&active(&format!("{pace}, {keys}"))).start();
    let before = proxy.resident();
    eventually(SOON, || is_eligible(&proxy, &origin) && probes(&origin) >= 5);
    assert_eq!(proxy.get("/").text(), "good");
    assert_eq!(ejections(&proxy, None), 0.0);
    proxy.resident().saturating_sub(before)
}

#[test]
fn an_answer_to_a_probe_may_have_a_body_of_any_size() {
    let grown = is_good_enough("method: GET", reply::ok(&"x".repeat(32 << 20)));
    assert!(grown < 8 << 20, "{grown} octets");
}

#[test]
fn an_answer_to_a_probe_that_comes_in_time_is_enough_whatever_its_body_does() {
    let origin = Origin::start(|call| {
        let_pass(Duration::from_millis(650));
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf");
        reply::hang(call)
    });
    let pace = "interval: 1s, timeout: 800ms, healthy_threshold: 1, unhealthy_threshold: 9";
    let proxy = over(&[&origin]).pool(&active(pace)).start();
    assert_eq!(hear(&proxy, &origin, "eligible")["why"], "status:200");
}

#[test]
fn an_answer_to_head_has_no_body_to_wait_for() {
    is_good_enough("method: HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 10485760\r\n\r\n");
}

#[test]
fn other_statuses_can_be_good() {
    is_good_enough("expected_status: [204, 401]", "HTTP/1.1 204 No\r\n\r\n");
    let denied = "HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n";
    is_good_enough("expected_status: [204, 401]", denied);
}

#[test]
fn a_redirect_is_not_followed_and_not_good() {
    let elsewhere = Origin::start(reply::told);
    let location = elsewhere.url();
    let moved = Arc::new(AtomicU16::new(0));
    let is_moved = moved.clone();
    let origin = Origin::start(move |call| {
        let head = match is_moved.load(SeqCst) {
            0 => "HTTP/1.1 200 OK".to_owned(),
            _ => format!("HTTP/1.1 301 Moved\r\nLocation: {location}/healthz"),
        };
        call.send(format!("{head}\r\nContent-Length: 0\r\n\r\n"));
        Then::Next
    });
    let proxy = probed(over(&[&origin]), "100ms", "90ms");
    hear(&proxy, &origin, "eligible");
    moved.store(1, SeqCst);
    assert_eq!(hear(&proxy, &origin, "ineligible")["why"], "status:301");
    assert_eq!(ejections(&proxy, Some("status:301")), 1.0);
    assert_eq!(elsewhere.requests(), 0);
}

#[test]
fn why_an_upstream_is_taken_out_is_told() {
    type Script = fn(&mut Call<'_>) -> Then;
    let close: Script = |_| Then::Close;
    let reset: Script = |_| Then::Reset;
    let silent: Script = |call| reply::hang(call);
    let sick: Script = |call| reply::raw_kept("HTTP/1.1 503 So\r\nContent-Length: 0\r\n\r\n")(call);
    for (script, why) in [
        (close, "upstream_closed"),
        (reset, "upstream_closed"),
        (silent, "timeout"),
        (sick, "status:503"),
    ] {
        let origin = Origin::start(
            move |call| {
                if call.number < 3 { reply::told(call) } else { script(call) }
            },
        );
        let proxy = probed(over(&[&origin]), "400ms", "390ms");
        assert_eq!(hear(&proxy, &origin, "ineligible")["why"], why);
        assert_eq!(ejections(&proxy, Some(why)), 1.0, "{why}");
        assert!(!is_eligible(&proxy, &origin));
        assert_eq!(proxy.ask_admin("/readyz").status(), 503);
    }
}

#[test]
fn one_that_is_down_by_probes_stays_out_whatever_its_breaker_says() {
    let mood = Mood::good();
    let origin = Origin::start(moody("x", &mood));
    let proxy = probed(over(&[&origin]).pool(TOUCHY), "100ms", "90ms");
    hear(&proxy, &origin, "eligible");
    assert_eq!(proxy.get("/").text(), "x");
    mood.set(503);
    hear(&proxy, &origin, "ineligible");
    let answer = proxy.get("/");
    assert_failed(&proxy, &answer, 503, "destination_unavailable", "no_upstream");
    assert_eq!(state(&proxy, &origin), CLOSED);
    mood.set(200);
    eventually(SOON, || proxy.get("/").status() == 200);
    assert_eq!(state(&proxy, &origin), CLOSED);
    quiet(&proxy);
}
