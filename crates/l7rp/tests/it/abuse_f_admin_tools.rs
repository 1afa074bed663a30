//! What is told to people about a running instance and about a file is true and harmless.

use std::process::{Command, Stdio};

use l7rp_testkit::{Client, Gate, Origin, Proxy, SOON, Value, eventually, reply};
use serde_json::json;

use crate::admin_actions::{post, try_order};
use crate::setup::{PROGRAM, get, over, start};

/// Runs the program; the exit code, and what it prints.
fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(PROGRAM).args(arguments).stdin(Stdio::null()).output();
    let output = output.expect("it runs");
    let text = |octets| String::from_utf8(octets).expect("UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn status(proxy: &Proxy) -> String {
    let (code, out, err) = run(&["status", "--admin", &format!("http://{}", proxy.admin())]);
    assert_eq!(code, Some(0), "{err}");
    out
}

fn force(proxy: &Proxy, origin: &Origin, state: &str) {
    let body = json!({ "pool": "b", "upstream": origin.url(), "state": state });
    assert_eq!(try_order(proxy, "/-/upstreams/breaker", &body).status(), 200);
}

/// Nobody knows until when a breaker is forced open.
#[test]
fn a_breaker_that_is_forced_open_is_not_said_to_try_again_by_itself() {
    let (a, b) = (Origin::start(reply::name("a")), Origin::start(reply::name("b")));
    let proxy = over(&[&a, &b]).start();
    force(&proxy, &a, "open");
    let told = status(&proxy);
    assert!(!told.contains("next try in"), "{told}");
}

/// A breaker that is forced closed protects nobody: who looks must see it.
#[test]
fn a_breaker_that_is_forced_closed_is_seen() {
    let (a, b) = (Origin::start(reply::name("a")), Origin::start(reply::name("b")));
    let proxy = over(&[&a, &b]).start();
    force(&proxy, &a, "closed");
    let told = status(&proxy);
    assert!(told.contains("forced"), "{told}");
}

/// What is in the file but cannot be: the file, and its `check --lint`.
fn lint(yaml: &str) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("config.yaml");
    std::fs::write(&path, yaml).expect("a file");
    let (code, _, err) = run(&["check", "--lint", "--no-files", path.to_str().expect("UTF-8")]);
    (code, err)
}

const LISTENER: &str = "listeners: [{ name: web, bind: \"127.0.0.1:8080\" }]\n";

#[test]
fn a_hedge_that_comes_after_the_end_of_the_first_try_is_told() {
    let (code, told) = lint(&format!(
        "{LISTENER}upstream_pools: [{{ name: b, connect_timeout: 1s, response_header_timeout: 2s, \
         upstreams: [{{ url: \"http://127.0.0.1:1\" }}, {{ url: \"http://127.0.0.1:2\" }}] }}]\n\
         routes: [{{ name: r, pool: b, middleware: [{{ retry: {{ hedge_after: 10s }} }}] }}]\n"
    ));
    assert!(code == Some(4) && told.contains("hedge_after"), "{code:?} {told}");
}

#[test]
fn a_target_that_is_longer_than_a_head_is_told() {
    let (code, told) = lint(
        "listeners: [{ name: web, bind: \"127.0.0.1:8080\", timeouts: { max_header_bytes: 4096 }, \
         limits: { max_target_bytes: 8192 } }]\n\
         upstream_pools: [{ name: b, upstreams: [{ url: \"http://127.0.0.1:1\" }] }]\n\
         routes: [{ name: r, pool: b }]\n",
    );
    assert!(code == Some(4) && told.contains("max_target_bytes"), "{code:?} {told}");
}

#[test]
fn a_token_that_nobody_is_asked_for_is_told() {
    let (code, told) = lint(&format!(
        "{LISTENER}upstream_pools: [{{ name: b, upstreams: [{{ url: \"http://127.0.0.1:1\" }}] }}]\n\
         routes: [{{ name: r, pool: b }}]\nadmin: {{ bind: \"unix:/run/a.sock\", token_file: t }}\n"
    ));
    assert!(code == Some(4) && told.contains("token_file"), "{code:?} {told}");
}

/// A default that the file does not write out is held against nobody.
#[test]
fn a_minute_for_a_request_is_nothing_to_tell_of() {
    let (code, told) = lint(&format!(
        "{LISTENER}upstream_pools: [{{ name: b, upstreams: [{{ url: \"http://127.0.0.1:1\" }}] }}]\n\
         routes: [{{ name: r, pool: b, timeouts: {{ total: 1m }} }}]\n"
    ));
    assert_eq!((code, told.as_str()), (Some(0), ""));
}

/// What lint says is never reached is not the reason that the log names.
#[test]
fn a_limit_that_is_said_never_to_be_reached_never_is() {
    let gate = Gate::default();
    let origins = [(); 2].map(|()| Origin::start(reply::held("held", &gate)));
    let pool = "max_in_flight: 2, selector: { algorithm: round-robin }";
    let setup = over(&[])
        .upstream(&origins[0].url(), "max_in_flight: 1")
        .upstream(&origins[1].url(), "max_in_flight: 1")
        .pool(pool);
    let (_, told) = lint(&setup.yaml());
    let proxy = start(&setup.yaml());
    let mut clients = [proxy.client(), proxy.client()];
    for client in &mut clients {
        client.send(get("a.test", "/", ""));
    }
    eventually(SOON, || origins.iter().all(|origin| origin.requests() == 1));
    let id = proxy.get("/late").get("x-request-id").expect("an id").to_owned();
    let line = proxy.logged(|line| line["request_id"] == id.as_str());
    gate.open();
    let is_told = told.contains("`max_in_flight` 2 is never reached");
    assert!(!(is_told && line["reason"] == "capacity_pool"), "{told}\n{line}");
}

/// Explains, as JSON, what an instance says.
#[test]
fn explain_writes_nothing_that_acts_on_a_terminal() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let admin = format!("http://{}", proxy.admin());
    let acts = |text: &str| text.chars().any(|c| c != '\n' && c.is_control());
    let (code, out, _) = run(&["explain", "--admin", &admin, "--json", "http://a.test/\u{9b}31m"]);
    assert!(code == Some(0) && !acts(&out), "{out:?}");
}

#[test]
fn what_a_stranger_answers_to_explain_does_nothing_to_the_terminal() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let asked = json!({ "url": "http://a.test/" });
    let answer = Client::connect(proxy.admin()).ask(post("localhost", "/-/explain", "", &asked));
    let mut told: Value = serde_json::from_str(&answer.text()).expect("JSON");
    told["stages"][0]["outcome"] = "\u{1b}[2J".into();
    let other = Origin::start(reply::raw(reply::ok(&told.to_string())));
    let (code, _, err) = run(&["explain", "--admin", &other.url(), "/"]);
    let acts = err.chars().any(|c| c != '\n' && c.is_control());
    assert!(code == Some(1) && !acts, "{err:?}");
}

/// A request that asks for another protocol is never hedged.
#[test]
fn explain_tells_of_no_hedge_where_none_is_made() {
    let origins = [(); 2].map(|()| Origin::start(reply::name("x")));
    let proxy = over(&[&origins[0], &origins[1]])
        .route("middleware: [{ retry: { hedge_after: 100ms } }]")
        .start();
    for (lines, outcome) in [
        (json!(["Connection: Upgrade", "Upgrade: websocket"]), "off"),
        (json!(["Expect: 100-continue", "Content-Length: 1"]), "off"),
        (json!([]), "passed"),
    ] {
        let asked = json!({ "url": "http://a.test/", "headers": lines });
        let order = post("localhost", "/-/explain", "", &asked);
        let answer = Client::connect(proxy.admin()).ask(order);
        let told: Value = serde_json::from_str(&answer.text()).expect("JSON");
        let stages = told["stages"].as_array().expect("stages");
        let hedge = stages.iter().find(|stage| stage["stage"] == "hedge").expect("a stage");
        assert_eq!(hedge["outcome"], outcome, "{hedge}");
    }
}

/// A password in the URL of an upstream is refused, and repeated nowhere.
#[test]
fn what_is_refused_is_told_without_its_secrets() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    proxy.try_reload(&over(&[]).upstream("http://me:hunter22@127.0.0.1:1", "weight: 1").yaml());
    let told = proxy.ask_admin("/status").text();
    assert!(told.contains("\"last_rejected\": true"), "{told}");
    assert!(!told.contains("hunter22"), "{told}");
}
