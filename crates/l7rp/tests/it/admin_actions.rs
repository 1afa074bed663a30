//! What runs is changed over the admin address, while requests come without a pause: none fails
//! by it, and all that is said of it is true.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;

use l7rp_testkit::{
    Client, Gate, Message, Origin, Proxy, SOON, Value, eventually, let_pass, own_address, reply,
};

use crate::load::{Load, Target, answer};
use crate::reload::{Over, pool, simple};
use crate::setup::{assert_counts, assert_failed, get, in_flight, over, quiet, start};
use crate::verdict::{CLOSED, OPEN, TOUCHY, becomes, is_eligible, state, turns};

const ROUND_ROBIN: &str = "selector: { algorithm: round-robin }";

/// The head and the body of a POST to an admin endpoint, with more lines.
pub fn post(host: &str, path: &str, lines: &str, body: &Value) -> String {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let kind = if body.is_empty() { "" } else { "Content-Type: application/json\r\n" };
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nHost: {host}\r\n{kind}Content-Length: {length}\r\n\
         Connection: close\r\n{lines}\r\n{body}"
    )
}

/// The answer to a POST.
#[track_caller]
pub fn try_order(proxy: &Proxy, path: &str, body: &Value) -> Message {
    Client::connect(proxy.admin()).ask(post("localhost", path, "", body))
}

/// What is answered to a POST that is obeyed.
#[track_caller]
fn order(proxy: &Proxy, path: &str, body: &Value) -> Value {
    let answer = try_order(proxy, path, body);
    assert_eq!(answer.status(), 200, "{} {}", answer.start, answer.text());
    assert_eq!(answer.get("content-type"), Some("application/json"));
    json(&answer)
}

fn json(answer: &Message) -> Value {
    serde_json::from_str(&answer.text()).expect("JSON")
}

/// A body that names an upstream of the pool `b`; `more`: keys of its own.
fn about(origin: &Origin, more: &[(&str, Value)]) -> Value {
    let mut body = serde_json::json!({ "pool": "b", "upstream": origin.url() });
    for (key, value) in more {
        body[*key] = value.clone();
    }
    body
}

#[track_caller]
fn force(proxy: &Proxy, origin: &Origin, state: &str) -> Value {
    order(proxy, "/-/upstreams/breaker", &about(origin, &[("state", state.into())]))
}

#[track_caller]
fn drain(proxy: &Proxy, origin: &Origin) -> Value {
    order(proxy, "/-/upstreams/drain", &about(origin, &[]))
}

#[track_caller]
fn undrain(proxy: &Proxy, origin: &Origin) -> Value {
    order(proxy, "/-/upstreams/undrain", &about(origin, &[]))
}

/// The only event of this name.
#[track_caller]
fn event(proxy: &Proxy, name: &str) -> Value {
    let event = proxy.wait_for_event(name, |_| true, SOON);
    assert_eq!((&event["why"], &event["by"]), (&"admin".into(), &"127.0.0.1".into()), "{event}");
    event
}

/// Waits until everything that has been sent is at rest, then sees that this upstream gets
/// nothing of what follows.
#[track_caller]
fn gets_nothing(load: &Load, origin: &Origin) {
    let before = origin.requests();
    load.goes_on(200);
    assert_eq!(origin.requests(), before);
}

#[test]
fn a_drained_upstream_gets_nothing_new_and_nothing_fails_by_it() {
    let (a, b) = (Origin::start(answer), Origin::start(answer));
    let proxy = over(&[&a, &b]).pool(ROUND_ROBIN).start();
    let load = Load::start(&Target::Tcp(proxy.address()), 4, 2);
    load.goes_on(50);
    for round in 0..3 {
        let told = drain(&proxy, &a);
        assert_eq!((&told["from"], &told["to"]), (&"in_use".into(), &"drained".into()));
        assert_eq!(told["eligible_left"], 1);
        assert!(!is_eligible(&proxy, &a) && is_eligible(&proxy, &b));
        // Each client has at most one that was sent before.
        load.goes_on(10);
        gets_nothing(&load, &a);
        let (before, told) = (a.requests(), undrain(&proxy, &a));
        assert_eq!((&told["from"], &told["to"]), (&"drained".into(), &"in_use".into()));
        load.goes_on(50);
        assert!(a.requests() > before && is_eligible(&proxy, &a), "{round}");
    }
    load.end();
    let drained = event(&proxy, "upstream_drained");
    assert_eq!((&drained["pool"], &drained["upstream"]), (&"b".into(), &a.url().into()));
    assert_eq!(event(&proxy, "upstream_undrained")["to"], "in_use");
    assert_eq!(undrain(&proxy, &a)["from"], "in_use", "that is no news");
    assert_eq!(proxy.events("upstream_drained").len(), 3);
    assert_eq!(proxy.events("upstream_undrained").len(), 3);
    quiet(&proxy);
}

#[test]
fn what_is_in_progress_at_a_drained_upstream_comes_to_its_end() {
    let gate = Gate::default();
    let held = Origin::start(reply::held("held", &gate));
    let proxy = over(&[&held]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || held.requests() == 1);
    assert_eq!(drain(&proxy, &held)["in_flight"], 1);
    assert_failed(&proxy, &proxy.get("/"), 503, "destination_unavailable", "no_upstream");
    assert_eq!(proxy.ask_admin("/-/ready").status(), 503);
    gate.open();
    assert_eq!(client.response().text(), "held");
    eventually(SOON, || in_flight(&proxy) == 0.0);
    undrain(&proxy, &held);
    assert_eq!((proxy.get("/").text(), held.requests()), ("held".to_owned(), 2));
    assert_eq!(proxy.ask_admin("/-/ready").status(), 200);
}

#[test]
fn no_retry_and_no_test_of_a_breaker_goes_to_a_drained_upstream() {
    let (bad, good) = (Origin::start(reply::told), Origin::start(reply::name("good")));
    let keys = "circuit_breaker: { consecutive_failures: 1, open_min: 10ms, open_max: 10ms }";
    let proxy = over(&[&bad, &good])
        .pool(ROUND_ROBIN)
        .pool(keys)
        .route("middleware: [retry: { max_attempts: 3 }]")
        .start();
    eventually(SOON, || proxy.get("/503").text() == "good" && state(&proxy, &bad) == OPEN);
    drain(&proxy, &bad);
    let before = bad.requests();
    let_pass(std::time::Duration::from_millis(30));
    for _ in 0..20 {
        assert_eq!(proxy.get("/503").text(), "good");
    }
    drain(&proxy, &good);
    assert_failed(&proxy, &proxy.get("/503"), 503, "destination_unavailable", "no_upstream");
    assert_eq!(bad.requests(), before);
    undrain(&proxy, &bad);
    eventually(SOON, || bad.requests() > before || proxy.get("/200").status() == 200);
}

/// What began before a reload goes on with what was in force then; a drain is for it too.
#[test]
fn a_retry_of_what_began_before_a_reload_goes_to_no_drained_upstream() {
    let gate = Gate::default();
    let waits = gate.clone();
    let failing = Origin::start(move |call| {
        waits.pass();
        reply::close(call)
    });
    let spare = Origin::start(reply::name("spare"));
    let setup = |failures: u32| {
        over(&[&failing])
            .upstream(&spare.url(), "backup: true")
            .pool(&format!("circuit_breaker: {{ consecutive_failures: {failures} }}"))
            .route("middleware: [retry: { max_attempts: 3 }]")
            .yaml()
    };
    let proxy = start(&setup(5));
    let mut early = proxy.client();
    early.send(get("a.test", "/", ""));
    eventually(SOON, || failing.requests() == 1);
    proxy.reload(&setup(6));
    drain(&proxy, &spare);
    gate.open();
    assert_eq!(early.response().status(), 502);
    assert_eq!(spare.requests(), 0);
    undrain(&proxy, &spare);
    assert_eq!((proxy.get("/").text(), spare.requests()), ("spare".to_owned(), 1));
}

#[test]
fn forced_open_keeps_all_away_until_it_is_left_to_itself() {
    let (a, b) = (Origin::start(answer), Origin::start(answer));
    let proxy = over(&[&a, &b]).pool(ROUND_ROBIN).start();
    let load = Load::start(&Target::Tcp(proxy.address()), 4, 2);
    load.goes_on(50);
    let told = force(&proxy, &a, "open");
    assert_eq!(
        (&told["from"], &told["to"], &told["state"]),
        (&"auto".into(), &"open".into(), &"open".into())
    );
    assert!(state(&proxy, &a) == OPEN && !is_eligible(&proxy, &a) && is_eligible(&proxy, &b));
    assert_eq!(turns(&proxy, &a, "open"), 1.0);
    let forced = || proxy.metrics().sum("proxy_circuit_breaker_forced", &[("upstream", &a.url())]);
    assert_eq!(forced(), 1.0);
    load.goes_on(10);
    gets_nothing(&load, &a);
    let before = a.requests();
    assert_eq!(force(&proxy, &a, "auto")["state"], "closed");
    load.goes_on(50);
    assert!(a.requests() > before && state(&proxy, &a) == CLOSED);
    assert_eq!(turns(&proxy, &a, "closed"), 1.0);
    assert_eq!(forced(), 0.0);
    load.end();
    let told = event(&proxy, "circuit_breaker_forced");
    assert_eq!((&told["from"], &told["to"]), (&"auto".into(), &"open".into()), "{told}");
    assert_eq!((&told["state_from"], &told["state_to"]), (&"closed".into(), &"open".into()));
    assert_eq!(proxy.events("circuit_breaker_changed"), Vec::<Value>::new());
    quiet(&proxy);
}

#[test]
fn with_all_forced_open_the_answer_says_that_it_is_the_breaker() {
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin]).pool("circuit_breaker: { open_max: 7s, open_min: 1s }").start();
    force(&proxy, &origin, "open");
    let answer = proxy.get("/200");
    assert_failed(&proxy, &answer, 503, "destination_unavailable", "breaker_open");
    assert_eq!(answer.get("retry-after"), Some("7"));
    assert_eq!(origin.requests(), 0);
    force(&proxy, &origin, "auto");
    assert_eq!(proxy.get("/200").status(), 200);
}

#[test]
fn forced_closed_goes_on_sending_whatever_comes_back() {
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin]).pool(TOUCHY).start();
    assert_eq!(proxy.get("/503").status(), 503);
    becomes(&proxy, &origin, OPEN);
    let told = force(&proxy, &origin, "closed");
    assert_eq!((&told["from"], &told["state"]), (&"auto".into(), &"closed".into()));
    for n in 0..30 {
        assert_eq!(proxy.get("/503").status(), 503);
        assert_eq!(origin.requests(), n + 2);
    }
    assert!(state(&proxy, &origin) == CLOSED && is_eligible(&proxy, &origin));
    assert_eq!((turns(&proxy, &origin, "open"), turns(&proxy, &origin, "closed")), (1.0, 1.0));
    // Left to itself it counts anew: the first failure is one too many.
    force(&proxy, &origin, "auto");
    assert_eq!(proxy.get("/200").status(), 200);
    assert_eq!(proxy.get("/503").status(), 503);
    becomes(&proxy, &origin, OPEN);
    assert_eq!(turns(&proxy, &origin, "open"), 2.0);
}

#[test]
fn holds_survive_reloads_also_under_other_rules() {
    let origins = [(); 3].map(|()| Origin::start(reply::told));
    let [drained, open, closed] = &origins;
    // By itself none would be open for longer than a moment.
    let file = |keys: &str| {
        let keys = format!("circuit_breaker: {{ open_min: 1ms, open_max: 1ms, {keys} }}");
        simple(&[drained, open, closed], &format!(", {ROUND_ROBIN}, {keys}"))
    };
    let proxy = start(&file("consecutive_failures: 5"));
    drain(&proxy, drained);
    force(&proxy, open, "open");
    force(&proxy, closed, "closed");
    // The same rules, other ones, and others again.
    for failures in [5, 1, 2] {
        proxy.reload(&file(&format!("consecutive_failures: {failures}")));
        for _ in 0..10 {
            assert_eq!(proxy.get("/503").status(), 503);
        }
        assert_eq!((drained.requests(), open.requests()), (0, 0));
        assert!(!is_eligible(&proxy, drained) && !is_eligible(&proxy, open));
        assert!(state(&proxy, open) == OPEN && state(&proxy, closed) == CLOSED);
    }
    assert_eq!(closed.requests(), 30);
    undrain(&proxy, drained);
    force(&proxy, open, "auto");
    proxy.reload(&file("consecutive_failures: 3"));
    assert!(is_eligible(&proxy, drained) && is_eligible(&proxy, open));
    // One that the pool has lost meanwhile is another.
    drain(&proxy, drained);
    proxy.reload(&simple(&[open, closed], ""));
    proxy.reload(&file("consecutive_failures: 3"));
    assert!(is_eligible(&proxy, drained));
}

#[test]
fn a_weight_shifts_what_comes_until_the_next_reload() {
    let (a, b) = (Origin::start(answer), Origin::start(answer));
    let file = simple(&[&a, &b], ", selector: { algorithm: weighted-rr }");
    let proxy = start(&file);
    let load = Load::start(&Target::Tcp(proxy.address()), 4, 2);
    load.goes_on(50);
    let told = order(&proxy, "/-/upstreams/weight", &about(&a, &[("weight", 9.into())]));
    assert_eq!((&told["from"], &told["to"]), (&1.into(), &9.into()), "{told}");
    assert_eq!((&told["generation"], &told["note"]), (&2.into(), &Value::Null), "{told}");
    load.goes_on(20);
    let (from_a, from_b) = (a.requests(), b.requests());
    load.goes_on(200);
    let (more_a, more_b) = (a.requests() - from_a, b.requests() - from_b);
    assert!(more_a > more_b * 5, "{more_a} and {more_b}, not 9 to 1");
    let again = order(&proxy, "/-/upstreams/weight", &about(&a, &[("weight", 9.into())]));
    assert_eq!((&again["from"], &again["generation"]), (&9.into(), &2.into()));
    proxy.reload(&file);
    load.goes_on(20);
    let (from_a, from_b) = (a.requests(), b.requests());
    load.goes_on(200);
    let (more_a, more_b) = (a.requests() - from_a, b.requests() - from_b);
    assert!(more_a < more_b * 2 && more_b < more_a * 2, "{more_a} and {more_b}");
    load.end();
    let told = event(&proxy, "upstream_weight_changed");
    assert_eq!((&told["from"], &told["to"]), (&1.into(), &9.into()), "{told}");
    assert_eq!(proxy.events("upstream_weight_changed").len(), 1);
    assert_eq!(proxy.events("config_reloaded").len(), 1, "a weight is no reload");
    quiet(&proxy);
}

#[test]
fn a_weight_that_nobody_looks_at_is_told_to_be_so() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).pool(ROUND_ROBIN).start();
    let told = order(&proxy, "/-/upstreams/weight", &about(&origin, &[("weight", 65_535.into())]));
    assert_eq!(told["to"], 65_535);
    let note = told["note"].as_str().expect("a note");
    assert!(note.contains("round-robin"), "{note}");
    let plan = json(&proxy.ask_admin("/-/plan"));
    assert_eq!(plan["upstream_pools"][0]["upstreams"][0]["weight"], 65_535);
}

#[test]
fn a_reload_is_answered_when_it_is_done() {
    let (old, new) = (Origin::start(reply::name("old")), Origin::start(reply::name("new")));
    let proxy = start(&simple(&[&old], ""));
    proxy.rewrite_yaml(&simple(&[&new], ""));
    let told = order(&proxy, "/-/reload", &Value::Null);
    assert_eq!(proxy.get("/").text(), "new");
    assert_eq!((&told["outcome"], &told["generation"]), (&"ok".into(), &2.into()), "{told}");
    let change = |what: &str| told["changes"]["upstreams"][what][0].as_str().map(str::to_owned);
    assert_eq!(change("added"), Some(format!("b {}", new.url())));
    assert_eq!(change("removed"), Some(format!("b {}", old.url())));
    let event = proxy.wait_for_event("config_reloaded", |_| true, SOON);
    assert_eq!((&event["cause"], &event["by"]), (&"admin".into(), &"127.0.0.1".into()), "{event}");
    assert_counts(&proxy, "proxy_config_reloads_total", &[("outcome", "ok")], 1.0);
}

#[test]
fn a_reload_that_is_refused_says_all_that_is_wrong() {
    let origin = Origin::start(reply::name("x"));
    let proxy = start(&simple(&[&origin], ""));
    proxy.rewrite_yaml("listeners: 3\nworkers: many\n");
    let answer = try_order(&proxy, "/-/reload", &serde_json::json!({}));
    assert_eq!(answer.status(), 422, "{}", answer.text());
    let told = json(&answer);
    assert_eq!((&told["outcome"], &told["generation"]), (&"rejected".into(), &1.into()), "{told}");
    let event = proxy.wait_for_event("config_rejected", |_| true, SOON);
    assert_eq!((&event["cause"], &event["by"]), (&"admin".into(), &"127.0.0.1".into()));
    assert_eq!(event["errors"], told["errors"]);
    assert!(told["errors"].as_array().expect("a list").len() >= 2, "{told}");
    assert!(told["errors"][0].as_str().expect("a line").contains("config.yaml:1:"), "{told}");
    assert_eq!(proxy.get("/").text(), "x");
}

#[test]
fn reloads_that_are_asked_for_at_once_are_all_answered() {
    let origin = Origin::start(answer);
    let proxy = start(&simple(&[&origin], ""));
    let load = Load::start(&Target::Tcp(proxy.address()), 2, 2);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _over = Over(&over);
        let hanging_up = scope.spawn(|| {
            while !over.load(SeqCst) {
                proxy.signal(rustix::process::Signal::HUP);
                load.goes_on(5);
            }
        });
        let asking = [(); 4].map(|()| {
            scope.spawn(|| {
                let statuses =
                    (0..5).map(|_| try_order(&proxy, "/-/reload", &Value::Null).status());
                statuses.collect::<Vec<_>>()
            })
        });
        for asking in asking {
            let statuses = asking.join().expect("it is answered");
            // Four wait at most, and those who ask are four.
            assert_eq!(statuses, [200; 5]);
        }
        over.store(true, SeqCst);
        hanging_up.join().expect("it ends");
    });
    load.end();
}

#[test]
fn what_cannot_be_done_is_told_with_what_can() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let url = origin.url();
    let (drain, weight) = ("/-/upstreams/drain", "/-/upstreams/weight");
    let breaker = "/-/upstreams/breaker";
    let bad = |key: &str, value: Value| about(&origin, &[(key, value)]);
    for (path, body, status, says) in [
        (drain, serde_json::json!({ "pool": "c", "upstream": url }), 404, "did you mean `b`?"),
        (drain, serde_json::json!({ "pool": "other", "upstream": url }), 404, "there are `b`"),
        (drain, serde_json::json!({ "pool": "b", "upstream": "http://x" }), 404, &*url),
        (drain, serde_json::json!({ "upstream": url }), 400, "`pool` is missing"),
        (drain, serde_json::json!({ "pool": 1, "upstream": url }), 400, "`pool` must be"),
        (drain, bad("weight", 1.into()), 400, "unknown key \"weight\""),
        (drain, serde_json::json!([]), 400, "JSON object"),
        (weight, about(&origin, &[]), 400, "`weight` is missing"),
        (weight, bad("weight", 0.into()), 400, "`weight` must be"),
        (weight, bad("weight", 65_536.into()), 400, "`weight` must be"),
        (weight, bad("weight", 1.5.into()), 400, "`weight` must be"),
        (weight, bad("weight", "1".into()), 400, "`weight` must be"),
        (breaker, bad("state", "half_open".into()), 400, "`open`, `closed`, `auto`"),
        ("/-/reload", serde_json::json!({ "now": true }), 400, "unknown key \"now\""),
        ("/-/log-level", serde_json::json!({ "level": "loud" }), 400, "`debug`, `info`"),
        ("/-/upstreams", Value::Null, 404, "not found"),
    ] {
        let answer = try_order(&proxy, path, &body);
        assert_eq!(answer.status(), status, "{path} {body}: {}", answer.text());
        assert!(answer.text().contains(says), "{path} {body}: {}", answer.text());
        assert_eq!(answer.text().lines().count(), 1);
    }
    let broken = "POST /-/upstreams/drain HTTP/1.1\r\nHost: localhost\r\n\
                  Content-Type: application/json\r\nContent-Length: 5\r\n\r\n{\"a\":";
    let answer = Client::connect(proxy.admin()).ask(broken);
    assert!(answer.status() == 400 && answer.text().contains("no JSON"), "{}", answer.text());
    let answer = proxy.ask_admin(drain);
    assert_eq!((answer.status(), answer.get("allow")), (405, Some("POST")));
    assert!(is_eligible(&proxy, &origin));
    for event in ["upstream_drained", "circuit_breaker_forced", "upstream_weight_changed"] {
        assert_eq!(proxy.events(event), Vec::<Value>::new());
    }
}

#[test]
fn the_log_level_changes_at_once() {
    let (a, b) = (Origin::start(reply::name("a")), Origin::start(reply::name("b")));
    let proxy = over(&[&a, &b]).start();
    let level = || json(&proxy.ask_admin("/-/log-level"))["level"].clone();
    assert_eq!(level(), "info");
    let told = order(&proxy, "/-/log-level", &serde_json::json!({ "level": "error" }));
    assert_eq!((&told["from"], &told["to"]), (&"info".into(), &"error".into()));
    assert_eq!(level(), "error");
    drain(&proxy, &a);
    order(&proxy, "/-/log-level", &serde_json::json!({ "level": "info" }));
    drain(&proxy, &b);
    // Lines come in order: that about `a` was not severe enough.
    let told = event(&proxy, "upstream_drained");
    assert_eq!(told["upstream"], b.url());
    let told: Vec<_> = proxy.events("log_level_changed");
    assert_eq!(told.len(), 2, "also the one that says that less is written");
    assert_eq!((&told[0]["to"], &told[0]["by"]), (&"error".into(), &"127.0.0.1".into()));
}

#[test]
fn a_process_that_drains_takes_no_changes() {
    let gate = Gate::default();
    let held = Origin::start(reply::held("held", &gate));
    let admin = own_address();
    let yaml = simple(&[&held], "") + &format!("admin: {{ bind: \"{admin}\" }}\n");
    let mut proxy = start(&yaml);
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || held.requests() == 1);
    proxy.signal(rustix::process::Signal::TERM);
    proxy.wait_for_event("shutdown_started", |_| true, SOON);
    let drain = |proxy: &Proxy| try_order(proxy, "/-/upstreams/drain", &about(&held, &[]));
    eventually(SOON, || drain(&proxy).status() == 409);
    let answer = try_order(&proxy, "/-/reload", &Value::Null);
    assert!(answer.status() == 409 && answer.text().contains("draining"), "{}", answer.text());
    gate.open();
    assert_eq!(client.response().text(), "held");
    assert_eq!(proxy.wait_exit(SOON), 0);
}

#[test]
fn a_pool_of_another_name_is_not_meant() {
    let (a, b) = (Origin::start(reply::name("a")), Origin::start(reply::name("b")));
    let pools = [pool("b", &[&a, &b], ""), pool("c", &[&a], "")];
    let yaml = crate::reload::file(
        &[crate::reload::WEB],
        &pools,
        &[crate::reload::ALL, "name: c, path_prefix: /c, pool: c"],
    );
    let proxy = start(&yaml);
    drain(&proxy, &a);
    for _ in 0..4 {
        assert_eq!((proxy.get("/").text(), proxy.get("/c").text()), ("b".into(), "a".into()));
    }
}
