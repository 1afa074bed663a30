//! The line in the access log explains a request that was not plainly answered: who was tried and
//! how that went, who was not and why, and why it was not tried again. A line for each cause:
//! upstreams that fail by themselves are here, tries in `why_tries`, clients in `why_clients`,
//! limits and shortages in `why_limits`; `why_all` checks that no cause is forgotten.

use std::io::{Read, Write};

use l7rp_testkit::{Origin, Proxy, SOON, Then, Value, let_pass, reply};
use serde_json::json;

use crate::setup::{Setup, get, over, post};
use crate::tls_kit::{Ca, upstream};
use crate::tls_upstream::trusting;
use crate::tries::NEVER_OPENS;
use crate::verdict::{OPEN, TOUCHY, becomes};

/// What differs from run to run, or says nothing of the cause.
const DROPPED: [&str; 14] = [
    "time",
    "level",
    "msg",
    "event",
    "request_id",
    "method",
    "host",
    "path",
    "client_ip",
    "protocol",
    "duration_ms",
    "upstream_ms",
    "bytes_in",
    "bytes_out",
];

/// What a line explains: `A`, `B` and `C` stand for these upstreams. What it says twice must agree.
#[track_caller]
pub fn explained(mut line: Value, upstreams: &[String]) -> Value {
    let told = line.clone();
    let fields = line.as_object_mut().expect("an object");
    fields.retain(|name, _| !DROPPED.contains(&name.as_str()));
    let tries = fields["attempts"].as_u64().expect("a count") as usize;
    let mut hedged = false;
    let mut links = vec![Value::Null];
    if let Some(all) = fields.get_mut("tries") {
        let all = all.as_array_mut().expect("a list");
        // What is sent again because its connection was closed under it is told of, and counts for none.
        let counted = all.iter().filter(|one| one.get("repeated").is_none()).count();
        assert_eq!(counted, tries, "{told}");
        for one in all.iter_mut() {
            links.push(one.get("conn_age_ms").cloned().unwrap_or_default());
            let one = one.as_object_mut().expect("an object");
            let (ms, age) = (one.remove("ms"), one.remove("conn_age_ms"));
            assert_eq!(ms.is_none(), one.get("error") == Some(&"not_ended".into()), "{told}");
            assert_eq!(age.is_some(), one.contains_key("conn_reused"), "{told}");
            let mut times = ms.iter().chain(&age).map(|ms| ms.as_f64().expect("a number"));
            assert!(times.all(|ms| (0.0..60_000.0).contains(&ms)), "{told}");
            hedged |= one.contains_key("hedge");
        }
        let age = fields.get("conn_age_ms").cloned().unwrap_or_default();
        assert!(links.contains(&age), "the connection is that of no try: {told}");
        assert_eq!(fields["hedged"], hedged, "{told}");
    }
    for name in ["attempts", "hedged", "conn_reused", "conn_age_ms"] {
        fields.remove(name);
    }
    fields.retain(|_, value| value != "");
    let names = upstreams.iter().zip(["A", "B", "C"]);
    let text = names.fold(line.to_string(), |text, (url, name)| text.replace(url, name));
    serde_json::from_str(&text).expect("it is as good as before")
}

/// What is told of the request with this path.
#[track_caller]
pub fn told(proxy: &Proxy, path: &str, origins: &[&Origin]) -> Value {
    let urls: Vec<_> = origins.iter().map(|origin| origin.url()).collect();
    explained(proxy.logged_path(path), &urls)
}

/// What is told of a single try at `A` that fails; `reused`: about its connection, if it had one.
pub fn alone(status: u16, reason: &str, reused: Option<bool>, no_retry: &str) -> Value {
    let mut one = json!({ "upstream": "A", "error": reason });
    if let Some(reused) = reused {
        one["conn_reused"] = reused.into();
    }
    json!({
        "status": status, "route": "r", "pool": "b", "upstream": "A", "reason": reason,
        "tries": [one],
        "no_retry": no_retry,
    })
}

/// One request to an upstream that fails so.
#[track_caller]
fn fails(origin: &Origin, setup: fn(Setup) -> Setup, expected: &Value) {
    let proxy = setup(over(&[origin])).start();
    let _ = proxy.client().send(get("a.test", "/", "")).try_response();
    assert_eq!(told(&proxy, "/", &[origin]), *expected);
}

const NEW: Option<bool> = Some(false);

#[test]
fn nobody_is_there() {
    let origin = Origin::refusing();
    let refused = alone(502, "connect_refused", None, "no_upstream");
    // A request of which nothing was sent would go elsewhere without any rule.
    fails(&origin, |setup| setup, &refused);
}

#[test]
fn nobody_opens() {
    let origin = Origin::never_accepting();
    let timeout = alone(504, "connect_timeout", None, "no_upstream");
    fails(&origin, |setup| setup.pool("connect_timeout: 200ms"), &timeout);
}

#[test]
fn there_is_no_way() {
    // Nobody connects to everybody.
    let url = "http://255.255.255.255:9".to_owned();
    let proxy = over(&[]).upstream(&url, "weight: 1").start();
    assert_eq!(proxy.get("/").status(), 502);
    let failed = alone(502, "connect_failed", None, "no_upstream");
    assert_eq!(explained(proxy.logged_path("/"), &[url]), failed);
}

#[test]
fn nobody_has_that_name() {
    let url = "http://no.such.name.invalid:80".to_owned();
    let proxy = over(&[]).upstream(&url, "weight: 1").start();
    assert_eq!(proxy.get("/").status(), 503);
    assert_eq!(
        explained(proxy.logged_path("/"), &[url]),
        json!({
            "status": 503, "route": "r", "pool": "b", "reason": "unresolved",
            "not_tried": [{ "upstream": "A", "why": "unresolved" }],
        })
    );
}

#[test]
fn whom_nobody_believes() {
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let strange = other.issue("up", &["127.0.0.1"]);
    let strange = upstream(other.server(&strange, false, &[]), reply::name("x"));
    let plain = Origin::start_through(
        |mut tcp| {
            let _ = tcp.read(&mut [0; 4096]);
            let _ = tcp.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            Err(std::io::ErrorKind::Other.into())
        },
        reply::name("never"),
    );
    for (origin, reason) in [(&strange, "tls_certificate"), (&plain, "tls_protocol")] {
        let proxy = over(&[origin]).pool(&trusting(&ca, "")).start();
        assert_eq!(proxy.get("/").status(), 502);
        assert_eq!(told(&proxy, "/", &[origin]), alone(502, reason, None, "no_upstream"));
    }
}

#[test]
fn closed_on_a_new_connection_and_on_one_that_was_used() {
    let origin = Origin::start(|call| match call.on_connection {
        0 if call.request.target() == "/" => reply::name("x")(call),
        _ => reply::close(call),
    });
    let proxy = over(&[&origin]).pool(NEVER_OPENS).one_worker().start();
    assert_eq!(proxy.get("/new").status(), 502);
    assert_eq!(told(&proxy, "/new", &[&origin]), alone(502, "upstream_closed", NEW, "no_rule"));
    let mut client = proxy.client();
    assert_eq!(client.get("/").text(), "x");
    assert_eq!(client.ask(post("/used", "x")).status(), 502);
    let used = alone(502, "upstream_closed", Some(true), "no_rule");
    assert_eq!(told(&proxy, "/used", &[&origin]), used);
    // What may be repeated is so, where it was.
    assert_eq!(client.get("/").text(), "x");
    assert_eq!(client.get("/again").status(), 502);
    let mut again = alone(502, "upstream_closed", NEW, "no_rule");
    let tries = again["tries"].as_array_mut().expect("a list");
    let mut first = tries[0].clone();
    (first["conn_reused"], first["repeated"]) = (true.into(), true.into());
    tries.insert(0, first);
    assert_eq!(told(&proxy, "/again", &[&origin]), again);
}

#[test]
fn nothing_is_said_in_time() {
    let origin = Origin::start(reply::hang);
    let timeout = alone(504, "response_timeout", NEW, "no_rule");
    fails(&origin, |setup| setup.pool("response_header_timeout: 200ms"), &timeout);
    let total = alone(504, "total_timeout", NEW, "final");
    fails(&origin, |setup| setup.route("timeouts: { total: 200ms }"), &total);
}

/// What is wrong with the head of a response.
pub const BAD_RESPONSES: [(&str, &str); 11] = [
    ("SSH-2.0-OpenSSH_9.9\r\n\r\n", "malformed_start_line"),
    ("HTTP/1.1 999 Odd\r\n\r\n", "bad_status_code"),
    ("HTTP/1.1 200 OK\r\nX A: b\r\n\r\n", "malformed_field_name"),
    ("HTTP/1.1 200 OK\r\nX-A: a\0b\r\n\r\n", "malformed_field_value"),
    ("HTTP/1.1 200 OK\nX-A: b\n\n", "malformed_line_ending"),
    ("HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n", "bad_content_length"),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "bad_transfer_encoding"),
    (
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        "content_length_with_transfer_encoding",
    ),
    ("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", "bad_interim_response"),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "bad_chunk"),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX Y: 1\r\n\r\n", "bad_trailer"),
];

#[test]
fn what_is_said_is_no_answer() {
    for (answer, reason) in BAD_RESPONSES {
        let origin = Origin::start(reply::raw(answer));
        // The head of the last two was good, and with that the try was over.
        let no_retry =
            if matches!(reason, "bad_chunk" | "bad_trailer") { "final" } else { "no_rule" };
        fails(&origin, |setup| setup, &alone(502, reason, NEW, no_retry));
    }
    let long = format!("HTTP/1.1 200 OK\r\nX-Big: {}\r\n\r\n", "x".repeat(80 << 10));
    let origin = Origin::start(reply::raw(long));
    fails(&origin, |setup| setup, &alone(502, "response_head_too_large", NEW, "no_rule"));
}

#[test]
fn what_is_said_does_not_end() {
    const HALF: &str = "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf";
    let cut = Origin::start(reply::raw(HALF));
    fails(&cut, |setup| setup, &alone(200, "response_truncated", NEW, "final"));
    let stalled = Origin::start(|call| {
        call.send(HALF);
        reply::hang(call)
    });
    let expected = alone(200, "response_stalled", NEW, "final");
    fails(&stalled, |setup| setup.pool("response_header_timeout: 200ms"), &expected);
    let slow = Origin::start(|call| {
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n");
        while call.send("x") {
            let_pass(std::time::Duration::from_millis(20));
        }
        Then::Close
    });
    let expected = alone(200, "total_timeout", NEW, "final");
    fails(&slow, |setup| setup.route("timeouts: { total: 300ms }"), &expected);
}

#[test]
fn an_upstreams_own_error_is_its_own() {
    for status in [500, 502, 503, 504] {
        let origin = Origin::start(reply::told);
        let proxy = over(&[&origin]).start();
        let path = format!("/{status}");
        assert_eq!(proxy.get(&path).status(), status);
        let own = json!({
            "status": status, "route": "r", "pool": "b", "upstream": "A",
            "tries": [{ "upstream": "A", "status": status, "conn_reused": false }],
            "no_retry": "no_rule",
        });
        assert_eq!(told(&proxy, &path, &[&origin]), own);
    }
    // Where nothing went wrong there is nothing to explain.
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin]).start();
    for (path, status) in [("/", 200), ("/404", 404), ("/429", 429)] {
        assert_eq!(proxy.get(path).status(), status);
        let plain = json!({ "status": status, "route": "r", "pool": "b", "upstream": "A" });
        assert_eq!(told(&proxy, path, &[&origin]), plain);
    }
}

#[test]
fn nobody_is_well() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n");
        Then::Next
    });
    let health = "health: { active: { path: /healthz, interval: 100ms, timeout: 90ms } }";
    let proxy = over(&[&origin]).pool(health).start();
    proxy.wait_for_event("upstream_health_changed", |e| e["to"] == "ineligible", SOON);
    assert_eq!(proxy.get("/").status(), 503);
    assert_eq!(
        told(&proxy, "/", &[&origin]),
        json!({
            "status": 503, "route": "r", "pool": "b", "reason": "no_upstream",
            "not_tried": [
                { "upstream": "A", "why": "unhealthy", "cause": "status:500, expected 200" },
            ],
        })
    );
}

#[test]
fn nobody_may_be_asked() {
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin]).pool(TOUCHY).start();
    assert_eq!(proxy.get("/500").status(), 500);
    becomes(&proxy, &origin, OPEN);
    assert_eq!(proxy.get("/").status(), 503);
    assert_eq!(
        told(&proxy, "/", &[&origin]),
        json!({
            "status": 503, "route": "r", "pool": "b", "reason": "breaker_open",
            "not_tried": [{ "upstream": "A", "why": "breaker_open" }],
        })
    );
}
