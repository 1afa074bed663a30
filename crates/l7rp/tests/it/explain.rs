//! What `l7rp explain` says is what happens.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::process::{Command, Stdio};

use l7rp::config::{Files, Source, parse};
use l7rp_testkit::{Client, Origin, Proxy, SOON, Then, eventually, within};
use serde_json::{Value, json};

use crate::setup::{PROGRAM, over, start};

/// Runs `l7rp explain`; the exit code, and what it prints.
fn explain(arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(PROGRAM);
    let output = command.arg("explain").args(arguments).stdin(Stdio::null()).output();
    let output = output.expect("it runs");
    let text = |octets| String::from_utf8(octets).expect("UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Asks a running instance, on a connection that is kept.
fn ask(admin: &mut Client, asked: &Value) -> Value {
    let body = asked.to_string();
    let length = body.len();
    let head = format!("POST /-/explain HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n");
    let answer = admin.ask(head + &body);
    assert_eq!(answer.status(), 200, "{asked}: {}", answer.text());
    serde_json::from_str(&answer.text()).expect("JSON")
}

const HOSTS: [&str; 5] = ["a.test", "b.a.test", "*.a.test", "*.test", ""];
const PATHS: [&str; 6] = ["/", "/v1", "/v1/", "/v1/x", "/v2", "/v1/x/y"];

/// A file with about 30 routes that get into each other's way.
fn crowded(rng: &mut fastrand::Rng, origins: [&Origin; 2]) -> String {
    let mut yaml = format!(
        "listeners: [{{ name: l0, bind: '127.0.0.1:0' }}, \
         {{ name: l1, bind: '127.0.0.1:0', trusted_proxies: [127.0.0.0/8] }}]\n\
         upstream_pools:\n- {{ name: p0, upstreams: [{{ url: '{}' }}] }}\n\
         - {{ name: p1, upstreams: [{{ url: '{}' }}] }}\nroutes:\n",
        origins[0].url(),
        origins[1].url()
    );
    let mut routes = 0;
    for _ in 0..200 {
        let mut line = format!("- {{ name: r{routes}, path_prefix: {}", one_of(rng, &PATHS));
        let host = one_of(rng, &HOSTS);
        if !host.is_empty() {
            let _ = write!(line, ", host: '{host}'");
        }
        for (often, keys) in [
            (3, ", methods: [GET]"),
            (3, ", methods: [POST, PUT]"),
            (3, ", header_predicates: [{ name: x-canary, value: '1' }]"),
            (4, ", listeners: [l0]"),
            (4, ", listeners: [l1]"),
            (5, ", deny: [127.0.0.2, 192.0.2.0/24]"),
            (5, ", allow: [127.0.0.1]"),
        ] {
            let key = &keys[..keys.find(':').unwrap_or_default()];
            if rng.usize(..often) == 0 && !line.contains(key) {
                line += keys;
            }
        }
        line += match rng.usize(..5) {
            0 => ", respond: { status: 200, body: hi } }\n",
            1 => ", redirect: { scheme: https, code: 308 } }\n",
            2 | 3 => ", pool: p0 }\n",
            _ => ", pool: p1 }\n",
        };
        let source = Source { name: "x".into(), text: format!("{yaml}{line}") };
        // One that others leave nothing for is refused.
        if parse(&source, "".as_ref(), Files::Ignore).is_ok() {
            yaml = source.text;
            routes += 1;
        }
        if routes == 30 {
            break;
        }
    }
    yaml
}

#[test]
fn what_is_told_is_what_happens() {
    let origins = [Origin::start(answer), Origin::start(answer)];
    let mut rng = fastrand::Rng::with_seed(17);
    let (mut outcomes, mut all) = (BTreeSet::new(), Vec::new());
    let proxy = start(&crowded(&mut rng, [&origins[0], &origins[1]]));
    let mut admin = Client::connect(proxy.admin());
    for n in 0..300 {
        let (listener, last) = (one_of(&mut rng, &["l0", "l1"]), rng.u8(1..=2));
        let peer = [127, 0, 0, last];
        let mut asked = request(&mut rng, n);
        let lines: Vec<_> = asked["headers"].as_array().expect("lines").iter().collect();
        let lines: Vec<_> = lines.into_iter().filter_map(Value::as_str).collect();
        let line = |key: &str| asked[key].as_str().expect("text").to_owned();
        let (method, path, lines) = (line("method"), line("url"), lines.join("\r\n"));
        let head = format!("{method} {path} HTTP/1.1\r\n{lines}\r\n\r\n");
        asked["listener"] = json!(listener);
        asked["client"] = json!(std::net::Ipv4Addr::from(peer));
        let told = ask(&mut admin, &asked);

        let mut client = Client::connect_from(peer.into(), proxy.listener(listener));
        let answer = client.ask(head);
        let status = told["verdict"]["status"].as_u64().unwrap_or(200);
        assert_eq!(u64::from(answer.status()), status, "{asked}\n{told:#}");
        outcomes.insert(format!("{} {}", status, told["verdict"]["reason"]));
        let taken = told["routes"].as_array().expect("routes").iter();
        let taken: Vec<_> =
            taken.filter(|r| r["outcome"] == "taken").map(|r| &r["route"]).collect();
        assert_eq!(taken.first().copied().unwrap_or(&Value::Null), &told["route"]);
        assert!(taken.len() <= 1 && told["live"] == true, "{told:#}");
        // Of what is no request, the log has no id.
        if status != 400 && status != 405 {
            all.push((format!("request-{n}"), told));
        }
    }
    let lines = within(SOON, || {
        let lines = proxy.events("request_completed");
        let is_there = |id: &str| lines.iter().any(|line| line["request_id"] == id);
        all.iter().all(|(id, _)| is_there(id)).then_some(lines)
    });
    let lines = lines.expect("a line for each");
    for (id, told) in &all {
        let logged = lines.iter().find(|line| line["request_id"] == *id).expect("a line");
        for (told, logged) in [
            (&told["route"], &logged["route"]),
            (&told["pool"]["name"], &logged["pool"]),
            (&told["request"]["client"], &logged["client_ip"]),
            (&told["verdict"]["reason"], &logged["reason"]),
        ] {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            assert_eq!(text(told), text(logged), "{told:#}\n{logged:#}");
        }
    }
    for outcome in [
        "200 null",
        "308 null",
        "400 \"host_invalid\"",
        "403 \"forbidden\"",
        "404 \"no_route\"",
        "405 \"method_refused\"",
    ] {
        assert!(outcomes.contains(outcome), "{outcome} never happened: {outcomes:?}");
    }
}

fn one_of<'a>(rng: &mut fastrand::Rng, all: &[&'a str]) -> &'a str {
    all[rng.usize(..all.len())]
}

/// A request with an id.
fn request(rng: &mut fastrand::Rng, n: usize) -> Value {
    let host = one_of(rng, &["a.test", "b.a.test", "A.test:80", "c", "x.test", "a b"]);
    let mut lines = vec![format!("Host: {host}"), format!("X-Request-ID: request-{n}")];
    if rng.bool() {
        lines.push("X-Canary: 1".into());
    }
    if rng.bool() {
        lines.push("X-Forwarded-For: 192.0.2.9".into());
    }
    json!({
        "url": one_of(rng, &["/", "/v1", "/v1/x", "/v1/x/y?z", "/v2/..", "/v1%2Fx"]),
        "method": one_of(rng, &["GET", "GET", "POST", "PUT", "DELETE", "TRACE"]),
        "headers": lines,
    })
}

fn answer(call: &mut l7rp_testkit::Call<'_>) -> Then {
    call.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    Then::Next
}

/// What is told of the upstream at `ix`.
fn upstream(told: &Value, ix: usize) -> &Value {
    &told["pool"]["upstreams"][ix]
}

#[test]
fn asking_takes_no_turn_and_sends_nothing() {
    let origins = [Origin::start(answer), Origin::start(answer), Origin::start(answer)];
    let proxy = over(&[&origins[0], &origins[1], &origins[2]])
        .pool("selector: { algorithm: round-robin }, max_in_flight: 7")
        .route("middleware: [{ rate_limit: { per_ip_rps: 0.001, burst: 7 } }]")
        .one_worker()
        .start();
    let mut admin = Client::connect(proxy.admin());
    let asked = json!({ "url": "http://a.test/" });
    for n in 0..7 {
        let (told, again) = (ask(&mut admin, &asked), ask(&mut admin, &asked));
        let chosen = |told: &Value| (0..3).position(|ix| upstream(told, ix)["chosen"] == 1.0);
        assert_eq!(chosen(&told), chosen(&again));
        let limit = stage(&told, "rate_limit");
        let says = limit["says"].as_str().expect("words");
        assert!(says.contains(&format!("{} more could follow", 6 - n)), "{says}");
        // A slot is given back just after the last octet is out.
        eventually(SOON, || {
            stage(&ask(&mut admin, &asked), "load_pool")["says"] == "0 of 7 in flight"
        });
        assert_eq!(origins.iter().map(Origin::requests).sum::<usize>(), n);
        assert_eq!(proxy.get("/").status(), 200);
        let chosen = &origins[chosen(&told).expect("somebody's turn")];
        assert_eq!(chosen.requests(), n / 3 + 1);
    }
    let told = ask(&mut admin, &asked);
    assert_eq!((&told["verdict"]["status"], &told["pool"]), (&json!(429), &Value::Null));
    assert_eq!(stage(&told, "rate_limit")["outcome"], "ends");
}

fn stage<'a>(told: &'a Value, name: &str) -> &'a Value {
    let all = told["stages"].as_array().expect("stages");
    all.iter().find(|stage| stage["stage"] == name).unwrap_or_else(|| panic!("{name}: {told:#}"))
}

#[test]
fn it_says_why_an_upstream_is_not_chosen() {
    let (good, gone) = (Origin::start(answer), Origin::refusing());
    let proxy = over(&[&good, &gone])
        .upstream("http://127.0.0.1:1/spare", "backup: true")
        .pool(
            "health: { active: { path: /up, interval: 500ms, timeout: 400ms, unhealthy_threshold: 1, \
             healthy_threshold: 1, expected_status: [200] } }",
        )
        .start();
    let mut admin = Client::connect(proxy.admin());
    let asked = json!({ "url": "http://a.test/" });
    eventually(SOON, || {
        let told = ask(&mut admin, &asked);
        let why = upstream(&told, 1)["live"]["obstacle"].as_str().unwrap_or_default().to_owned();
        why.starts_with("health checks: ") && upstream(&told, 0)["chosen"] == 1.0
    });
    let told = ask(&mut admin, &asked);
    let known = &upstream(&told, 0)["live"];
    assert_eq!((&known["obstacle"], &known["in_flight"]), (&Value::Null, &json!(0)));
    assert_eq!(told["verdict"]["status"], Value::Null);
}

#[test]
fn it_says_when_a_breaker_is_open_and_when_all_are_full() {
    let origin = Origin::start(|call| {
        if call.request.target() == "/wait" {
            call.until_gone();
            return Then::Close;
        }
        call.send("HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n");
        Then::Next
    });
    let breaker = "circuit_breaker: { consecutive_failures: 1, open_min: 60s }";
    let proxy = over(&[&origin]).pool(breaker).start();
    assert_eq!(proxy.get("/").status(), 503);
    let mut admin = Client::connect(proxy.admin());
    let asked = json!({ "url": "http://a.test/" });
    eventually(SOON, || ask(&mut admin, &asked)["verdict"]["reason"] == "breaker_open");
    let told = ask(&mut admin, &asked);
    let why = upstream(&told, 0)["live"]["obstacle"].as_str().expect("an obstacle");
    assert!(why.starts_with("breaker open for another "), "{why}");

    let proxy = over(&[]).upstream(&origin.url(), "max_in_flight: 1").start();
    let mut waiting = proxy.client();
    waiting.send("GET /wait HTTP/1.1\r\nHost: a.test\r\n\r\n");
    let mut admin = Client::connect(proxy.admin());
    eventually(SOON, || ask(&mut admin, &asked)["verdict"]["reason"] == "capacity_upstream");
    let told = ask(&mut admin, &asked);
    assert_eq!(upstream(&told, 0)["live"]["obstacle"], "at its max_in_flight");
    assert_eq!(upstream(&told, 0)["live"]["in_flight"], 1);
}

#[test]
fn a_question_that_makes_no_sense_is_refused() {
    let origin = Origin::refusing();
    let proxy = over(&[&origin]).start();
    let post = |body: &str| {
        let length = body.len();
        let head = format!("POST /-/explain HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n");
        Client::connect(proxy.admin()).ask(format!("{head}Connection: close\r\n\r\n{body}"))
    };
    for (body, says) in [
        ("", "EOF"),
        ("{}", "`url`"),
        (r#"{"url":"/","port":1}"#, "`port`"),
        (r#"{"url":"/","client":"me"}"#, "IP address"),
        (r#"{"url":"/","listener":"x"}"#, "there is no listener `x`; there are: web"),
        (r#"{"url":"/\r\nX: y"}"#, "line break"),
    ] {
        let answer = post(body);
        assert_eq!(answer.status(), 400, "{body}");
        assert!(answer.text().contains(says), "{body}: {}", answer.text());
    }
    assert_eq!(post(&" ".repeat(70_000)).status(), 413);
    assert!(proxy.ask_admin("/").text().contains(" /-/explain "));
}

#[test]
fn the_command_asks_a_file_or_an_instance() {
    let origin = Origin::refusing();
    let setup = over(&[&origin]).route("host: a.test").top("admin: { bind: '127.0.0.1:0' }");
    let proxy: Proxy = start(&setup.yaml());
    let file = proxy.directory().join("config.yaml");
    let file = file.to_str().expect("UTF-8");
    let admin = format!("http://{}", proxy.admin());
    for (arguments, code, out, err) in [
        (vec!["--config", file, "http://a.test/x"], 0, "verdict             it is passed on", ""),
        (vec!["--admin", &admin, "/x", "-H", "Host: a.test"], 0, "would be chosen, 0 in", ""),
        (vec!["--config", file, "http://b.test/"], 0, "verdict             404: no route", ""),
        (vec!["--config", file, "-X", "TRACE", "http://a.test/"], 0, "405: ", ""),
        (vec!["--config", file, "--json", "http://a.test/"], 0, "\"live\": false", ""),
        (vec!["--admin", &admin, "--json", "http://a.test/"], 0, "\"live\": true", ""),
        (vec!["--config", file, "--listener", "x", "/"], 2, "", "there are: web"),
        (vec!["--config", file, "gopher://a/"], 2, "", "http or https"),
        (vec!["--config", "/none.yaml", "/"], 2, "", "/none.yaml"),
        (vec!["--admin", &admin, "--listener", "x", "/"], 1, "", "there are: web"),
        (vec!["--admin", "http://127.0.0.1:1", "/"], 1, "", "Connection refused"),
    ] {
        let (was, stdout, stderr) = explain(&arguments);
        assert_eq!(was, Some(code), "{arguments:?}: {stdout}{stderr}");
        assert!(stdout.contains(out) && stderr.contains(err), "{arguments:?}: {stdout}{stderr}");
        assert_eq!((stdout.is_empty(), stderr.is_empty()), (code != 0, code == 0), "{arguments:?}");
    }
}
