//! What an operator may expect of changes over the admin address.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use l7rp_testkit::{
    Client, Gate, Origin, Proxy, SOON, Signal, Then, Value, eventually, let_pass, own_address,
    reply, within,
};
use rustix::process::{Pid, kill_process};
use serde_json::json;

use crate::admin_actions::{post, try_order};
use crate::reloading::free_port;
use crate::setup::{over, start};
use crate::tls_kit::{Ca, client, tls};
use crate::verdict::{NO_BREAKER, eligible};

#[track_caller]
fn order(proxy: &Proxy, path: &str, origin: &Origin, more: &[(&str, Value)]) -> Value {
    let mut body = json!({ "pool": "b", "upstream": origin.url() });
    for (key, value) in more {
        body[*key] = value.clone();
    }
    let answer = try_order(proxy, path, &body);
    assert_eq!(answer.status(), 200, "{path} {body}: {}", answer.text());
    serde_json::from_str(&answer.text()).expect("JSON")
}

#[track_caller]
fn ask(proxy: &Proxy, asked: &Value) -> Value {
    let answer = Client::connect(proxy.admin()).ask(post("localhost", "/-/explain", "", asked));
    assert_eq!(answer.status(), 200, "{asked}: {}", answer.text());
    serde_json::from_str(&answer.text()).expect("JSON")
}

/// Scoring takes nobody out where half of the pool is out already, whatever for. Two of two: the
/// one that is left serves on, however badly.
#[test]
fn one_that_is_drained_counts_as_out_when_the_other_is_scored() {
    let bad = Arc::new(AtomicBool::new(false));
    let is_bad = bad.clone();
    let left = Origin::start(move |call| {
        if call.request.target() != "/healthz" && is_bad.load(SeqCst) {
            call.send("HTTP/1.1 500 So\r\nContent-Length: 4\r\n\r\nmine");
            return Then::Next;
        }
        reply::told(call)
    });
    let gone = Origin::start(reply::told);
    let proxy = over(&[&gone, &left])
        .pool("selector: { algorithm: round-robin }")
        .pool(NO_BREAKER)
        .pool(
            "health: { active: { path: /healthz, interval: 30s, timeout: 200ms, \
             healthy_threshold: 1, unhealthy_threshold: 3 }, \
             passive: { error_threshold: 0.4, half_life: 200ms } }",
        )
        .start();
    eventually(SOON, || eligible(&proxy) == 2.0);
    order(&proxy, "/-/upstreams/drain", &gone, &[]);
    bad.store(true, SeqCst);
    let not_own = within(Duration::from_secs(3), || {
        let text = proxy.get("/").text();
        (text != "mine").then_some(text)
    });
    assert_eq!(not_own, None, "the last of the pool was taken out");
}

/// `slow_start`: an upstream that has just become eligible gets a share that grows.
#[test]
fn one_whose_breaker_was_forced_open_comes_back_by_slow_start() {
    let (a, b) = (Origin::start(reply::name("a")), Origin::start(reply::name("b")));
    let proxy = over(&[&a, &b]).pool("slow_start: 60s").start();
    let share = |proxy: &Proxy| {
        ask(proxy, &json!({ "url": "/", "headers": ["Host: a.test"] }))["pool"]["upstreams"][0]
            ["live"]["slow_start"]
            .clone()
    };
    order(&proxy, "/-/upstreams/drain", &a, &[]);
    order(&proxy, "/-/upstreams/undrain", &a, &[]);
    assert!(share(&proxy).is_number(), "after a drain it does: {}", share(&proxy));
    let proxy = over(&[&a, &b]).pool("slow_start: 60s").start();
    order(&proxy, "/-/upstreams/breaker", &a, &[("state", "open".into())]);
    order(&proxy, "/-/upstreams/breaker", &a, &[("state", "auto".into())]);
    assert!(share(&proxy).is_number(), "it gets all at once: {}", share(&proxy));
}

/// Ends, when dropped, the processes that were started to take over.
struct Heirs<'a>(&'a Proxy);

impl Drop for Heirs<'_> {
    fn drop(&mut self) {
        for event in self.0.events("upgrade_started") {
            let pid = event["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
            if let Some(pid) = pid.and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// A change that is taken while another process is about to take over is either refused or in
/// force in that one.
#[test]
fn a_drain_that_is_taken_during_an_upgrade_is_not_lost_with_it() {
    let (gate, is_held) = (Gate::default(), Arc::new(AtomicBool::new(false)));
    let (waits, held) = (gate.clone(), is_held.clone());
    let slow = Origin::start(move |call| {
        if call.request.target() == "/health" && held.load(SeqCst) {
            waits.pass();
        }
        reply::name("slow")(call)
    });
    let away = Origin::start(reply::name("away"));
    let proxy = start(&format!(
        "listeners: [{{ name: web, bind: \"127.0.0.1:{}\" }}]\nupstream_pools:\n\
         - {{ name: b, upstreams: [{{ url: \"{}\" }}, {{ url: \"{}\" }}], \
         selector: {{ algorithm: round-robin }} }}\n\
         - {{ name: s, upstreams: [{{ url: \"{}\" }}], health: {{ active: {{ path: /health, \
         interval: 60s, timeout: 20s, healthy_threshold: 1 }} }} }}\n\
         routes: [{{ name: s, path_prefix: /s, pool: s }}, {{ name: f, pool: b }}]\n\
         admin: {{ bind: \"127.0.0.1:{}\" }}\n",
        free_port(),
        away.url(),
        slow.url(),
        slow.url(),
        free_port(),
    ));
    let _heirs = Heirs(&proxy);
    eventually(SOON, || proxy.get("/s").status() == 200);
    is_held.store(true, SeqCst);
    let probes = slow.requests();
    proxy.signal(Signal::USR2);
    proxy.wait_for_event("upgrade_started", |_| true, SOON);
    // The new process asks how the pool is.
    eventually(SOON, || slow.requests() > probes);
    let body = json!({ "pool": "b", "upstream": away.url() });
    let answer = try_order(&proxy, "/-/upstreams/drain", &body);
    gate.open();
    proxy.wait_for_event("upgrade_complete", |_| true, SOON);
    let before = away.requests();
    for _ in 0..10 {
        assert_eq!(proxy.get("/").status(), 200);
    }
    assert!(
        answer.status() == 409 || away.requests() == before,
        "{} {}: and {} requests since",
        answer.start,
        answer.text(),
        away.requests() - before
    );
}

/// A weight is no reload: what lies on the disk meanwhile is not put in force by it, and does not
/// stand in its way.
#[test]
fn a_weight_can_be_set_while_a_certificate_is_being_replaced() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let pair = ca.issue("a", &["a.test"]);
    let proxy = over(&[&origin])
        .pool("selector: { algorithm: weighted-rr }")
        .listener(&tls(&[&pair], ""))
        .start();
    // Orders are taken.
    eventually(SOON, || try_order(&proxy, "/-/reload", &Value::Null).status() == 200);
    // Half of it has been copied.
    std::fs::write(&pair.cert, "-----BEGIN CERTIFICATE-----\n").expect("a file");
    let told = order(&proxy, "/-/upstreams/weight", &origin, &[("weight", 5.into())]);
    assert_eq!(told["from"], 1);
    let plan: Value = serde_json::from_str(&proxy.ask_admin("/-/plan").text()).expect("JSON");
    assert_eq!(plan["upstream_pools"][0]["upstreams"][0]["weight"], 5);
    // What was read before is what is shown.
    assert_eq!(client(&Arc::new(ca.client()), &proxy).get("/").text(), "x");
}

/// `config.taken`: when the generation that is named beside it was put in force.
#[test]
fn the_time_of_a_generation_is_that_of_this_generation() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).pool("selector: { algorithm: weighted-rr }").start();
    let config = || -> Value {
        let status = proxy.ask_admin("/status").text();
        serde_json::from_str::<Value>(&status).expect("JSON")["config"].clone()
    };
    let before = config();
    let_pass(Duration::from_millis(20));
    order(&proxy, "/-/upstreams/weight", &origin, &[("weight", 5.into())]);
    let after = config();
    assert_eq!((&before["generation"], &after["generation"]), (&1.into(), &2.into()));
    assert_ne!(before["taken"], after["taken"], "generation 2 is no older than the order");
}

/// Every path that is for POST says so.
#[test]
fn who_looks_at_what_is_for_post_is_told_so() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    for path in ["/-/reload", "/-/explain"] {
        let answer = proxy.ask_admin(path);
        assert_eq!((answer.status(), answer.get("allow")), (405, Some("POST")), "{path}");
    }
    for (method, path, allowed) in [
        ("PUT", "/-/reload", "POST"),
        ("DELETE", "/-/log-level", "GET, HEAD, POST"),
        ("OPTIONS", "/status", "GET, HEAD"),
        // What it is for is not looked at.
        ("TRACE", "/status", "GET, HEAD, POST"),
    ] {
        let asked = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let answer = Client::connect(proxy.admin()).ask(asked);
        assert_eq!((answer.status(), answer.get("allow")), (405, Some(allowed)), "{method}");
    }
}

/// Everything that is answered to these octets.
fn raw(proxy: &Proxy, octets: &str) -> String {
    let mut client = Client::connect(proxy.admin());
    client.send(octets);
    String::from_utf8_lossy(&client.wire.read_to_end().unwrap_or_default()).into_owned()
}

/// One request is one request.
#[test]
fn nothing_is_smuggled_past_the_admin_endpoints() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let hidden = "POST /-/log-level HTTP/1.1\r\nHost: localhost\r\n\
                  Content-Type: application/json\r\nContent-Length: 17\r\n\r\n{\"level\":\"error\"}";
    let length = hidden.len();
    for (head, answers) in [
        (format!("GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n{hidden}"), 1),
        (
            format!(
                "HEAD /nothing HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n{hidden}"
            ),
            1,
        ),
        (
            format!(
                "GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{length:x}\r\n{hidden}\r\n0\r\n\r\n"
            ),
            1,
        ),
        (
            format!(
                "GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{hidden}"
            ),
            1,
        ),
        (
            format!(
                "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\nContent-Length: 0\r\n\r\n{hidden}"
            ),
            1,
        ),
        (format!("GET / HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n{hidden}"), 1),
        (
            format!(
                "POST /-/log-level HTTP/1.1\r\nHost: evil.example\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n{hidden}"
            ),
            1,
        ),
        (format!("GET / HTTP/1.0\r\n\r\n{hidden}"), 1),
        (format!("GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 70000\r\n\r\n{hidden}"), 1),
    ] {
        let got = raw(&proxy, &(head.clone() + "GET /x HTTP/1.0\r\n\r\n"));
        let level = proxy.ask_admin("/-/log-level").text();
        assert!(level.contains("info"), "{head}: {level}");
        let got = got.matches("HTTP/1.1 ").count() - got.matches("HTTP/1.1 100").count();
        // None: it was closed while something was left to read.
        assert!(got <= answers + 1, "{head}: {got} answers");
    }
}

/// While it waits out `drain.delay` it has backends, and all that is told says so.
#[test]
fn one_that_is_about_to_leave_is_not_said_to_lack_backends() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).top("drain: { delay: 20s, timeout: 1s }").start();
    proxy.signal(Signal::TERM);
    proxy.wait_for_event("shutdown_started", |_| true, SOON);
    assert_eq!(proxy.get("/").text(), "x");
    let admin = format!("http://{}", proxy.admin());
    let output = std::process::Command::new(crate::setup::PROGRAM)
        .args(["status", "--admin", &admin])
        .output()
        .expect("it runs");
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!told.contains("no backend to send to"), "{told}");
    assert!(told.contains("not ready: the process is shutting down"), "{told}");
    let ready = proxy.ask_admin("/-/ready");
    assert_eq!((ready.status(), ready.text().as_str()), (503, "shutting down\n"));
    let status: Value = serde_json::from_str(&proxy.ask_admin("/status").text()).expect("JSON");
    assert_eq!(status["why_unready"], "the process is shutting down");
}

/// Wrong tokens of others do not keep the one who has the right token out for good.
#[test]
fn guesses_of_others_do_not_keep_the_right_token_out() {
    use std::os::unix::fs::PermissionsExt;
    const SECRET: &str = "correct-horse-battery";
    let origin = Origin::start(reply::name("x"));
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("token");
    std::fs::write(&path, SECRET).expect("a file");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("mine");
    let admin = format!("admin: {{ bind: \"127.0.0.1:0\", token_file: \"{}\" }}", path.display());
    let proxy = over(&[&origin]).top(&admin).start();
    let knock = |last: u8, token: &str| {
        let mut client = Client::connect_from([127, 0, 0, last].into(), proxy.admin());
        let lines = format!("Authorization: Bearer {token}\r\n");
        client.ask(post("localhost", "/-/log-level", &lines, &json!({ "level": "info" }))).status()
    };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(SeqCst) {
                knock(2, "wrong-wrong-wrong-wrong");
                let_pass(Duration::from_millis(50));
            }
        });
        let locked = within(SOON, || (knock(2, "wrong-wrong-wrong-wrong") == 429).then_some(()));
        let mut statuses = Vec::new();
        for _ in 0..30 {
            statuses.push(knock(3, SECRET));
            let_pass(Duration::from_millis(100));
        }
        is_over.store(true, SeqCst);
        assert!(locked.is_some());
        let let_in = statuses.iter().filter(|status| **status == 200).count();
        assert!(
            let_in > 15,
            "the right token from another address was let in {let_in} of 30 times"
        );
    });
}

/// Two pools with the same upstreams, as for calls that may take long and others that may not:
/// when both get another name, each goes on as what it was.
#[test]
fn pools_that_are_renamed_together_keep_what_is_wanted_of_each() {
    let (a, b) = (Origin::start(reply::name("a")), Origin::start(reply::name("b")));
    let file = |first: &str, second: &str| {
        crate::reload::file(
            &[crate::reload::WEB],
            &[
                crate::reload::pool(first, &[&a, &b], ", response_header_timeout: 1s"),
                crate::reload::pool(second, &[&a, &b], ", response_header_timeout: 9s"),
            ],
            &[
                &format!("name: r, pool: {first}"),
                &format!("name: s, path_prefix: /s, pool: {second}"),
            ],
        )
    };
    let proxy = start(&file("b", "c"));
    let drained = || -> Vec<bool> {
        let status: Value = serde_json::from_str(&proxy.ask_admin("/status").text()).expect("JSON");
        let pools = status["pools"].as_array().expect("pools").iter();
        pools.filter_map(|pool| pool["upstreams"][0]["drained"].as_bool()).collect()
    };
    order(&proxy, "/-/upstreams/drain", &a, &[]);
    assert_eq!(drained(), [true, false]);
    for round in 0..8 {
        proxy.reload(&file(&format!("b{round}"), &format!("c{round}")));
        assert_eq!(drained(), [true, false], "round {round}");
    }
}

/// The admin endpoints answer before the process serves, while a name of an upstream is looked up:
/// who gives an order then is not told that there is no file.
#[test]
fn an_order_that_comes_too_early_is_not_told_that_there_is_no_file() {
    let origin = Origin::start(reply::name("x"));
    let admin = own_address();
    let yaml = over(&[&origin]).top(&format!("admin: {{ bind: \"{admin}\" }}")).yaml();
    let mut told = Vec::new();
    for _ in 0..10 {
        let proxy = Proxy::spawn(crate::setup::PROGRAM, &yaml);
        eventually(SOON, || std::net::TcpStream::connect(admin).is_ok());
        let last = within(SOON, || {
            let order = post("localhost", "/-/reload", "", &Value::Null);
            let answer = Client::connect(admin).ask(order);
            told.push(answer.text());
            (answer.status() == 200).then_some(())
        });
        assert!(last.is_some(), "{told:?}");
        drop(proxy);
    }
    let wrong = told.iter().filter(|text| text.contains("no file to read again")).count();
    assert_eq!(wrong, 0, "so often: this process cannot: it has no file to read again, or ends");
}
