//! As in `why`: requests that had more than one try, or would have had.

use std::net::TcpStream;
use std::time::Duration;

use l7rp_testkit::{Gate, Origin, Proxy, SOON, Signal, eventually, let_pass, own_address, reply};
use serde_json::{Value, json};

use crate::http2_frames::{code, frame, kind, raw_origin, taken};
use crate::setup::{get, over, post};
use crate::tries::{NOTHING_LEFT, PLENTY, in_turn, retrying, say, with_retry};
use crate::verdict::{OPEN, TOUCHY, becomes};
use crate::why::{explained, told};

/// In the order in which a new proxy asks them.
fn order(origins: &[Origin; 2]) -> [&Origin; 2] {
    origins.each_ref()
}

/// Two upstreams of which the first says 503, and the second `second`.
fn busy_and(second: u16) -> [Origin; 2] {
    in_turn(move |call, nth| {
        let status = if nth == 0 { 503 } else { second };
        say(call, status, "", "said")
    })
}

/// The line of one request with this method and these keys of `retry` and of the pool.
#[track_caller]
fn line(origins: &[Origin; 2], keys: &str, pool: &str, request: &str) -> Value {
    let setup = with_retry(&order(origins), &format!("backoff: 1ms, {keys}")).pool(pool);
    let proxy = setup.one_worker().start();
    proxy.client().ask(request);
    told(&proxy, "/", &order(origins))
}

fn ask() -> String {
    get("a.test", "/", "")
}

/// A 503 of `A`, which was all.
fn busy(no_retry: &str) -> Value {
    json!({
        "status": 503, "route": "r", "pool": "b", "upstream": "A",
        "tries": [{ "upstream": "A", "status": 503, "conn_reused": false }],
        "no_retry": no_retry,
    })
}

#[test]
fn a_retry_that_helped() {
    assert_eq!(
        line(&busy_and(200), "max_attempts: 2", PLENTY, &ask()),
        json!({
            "status": 200, "route": "r", "pool": "b", "upstream": "B",
            "tries": [
                { "upstream": "A", "status": 503, "conn_reused": false },
                { "upstream": "B", "status": 200, "conn_reused": false },
            ],
        })
    );
}

#[test]
fn a_retry_that_did_not_help() {
    assert_eq!(
        line(&busy_and(502), "max_attempts: 2", PLENTY, &ask()),
        json!({
            "status": 502, "route": "r", "pool": "b", "upstream": "B",
            "tries": [
                { "upstream": "A", "status": 503, "conn_reused": false },
                { "upstream": "B", "status": 502, "conn_reused": false },
            ],
            "no_retry": "attempts",
        })
    );
}

/// The answer is an upstream's own where one has spoken, whoever was the last.
#[test]
fn a_retry_that_made_it_worse() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        0 => say(call, 503, "", "busy"),
        _ => reply::close(call),
    });
    assert_eq!(
        line(&origins, "max_attempts: 2", PLENTY, &ask()),
        json!({
            "status": 503, "route": "r", "pool": "b", "upstream": "A",
            "tries": [
                { "upstream": "A", "status": 503, "conn_reused": false },
                { "upstream": "B", "error": "upstream_closed", "conn_reused": false },
            ],
            "no_retry": "attempts",
        })
    );
}

#[test]
fn what_is_not_tried_again() {
    let later = "Retry-After: 7\r\n";
    let delayed: [Origin; 2] = in_turn(move |call, _| say(call, 503, later, "later"));
    let told: [Origin; 2] = in_turn(|call, _| {
        call.send("HTTP/1.1 102 Processing\r\n\r\n");
        say(call, 503, "", "busy")
    });
    let long = post("/", &"b".repeat(100)).replace("POST", "PUT");
    for (origins, keys, pool, request, no_retry) in [
        (busy_and(200), "max_attempts: 2", NOTHING_LEFT, ask(), "budget"),
        (busy_and(200), "max_attempts: 2", PLENTY, post("/", "x"), "method"),
        (busy_and(200), "retry_on: [502]", PLENTY, ask(), "not_listed"),
        (busy_and(200), "max_attempts: 1", PLENTY, ask(), "no_rule"),
        (busy_and(200), "retry_methods: [PUT], max_replayable_body: 9", PLENTY, long, "body"),
        (busy_and(200), "backoff: 20s", "max_in_flight: 9", ask(), "deadline"),
        (delayed, "max_attempts: 2", PLENTY, ask(), "stay_away"),
        (told, "max_attempts: 2", PLENTY, ask(), "told"),
    ] {
        let setup = with_retry(&order(&origins), keys).pool(pool).one_worker();
        let proxy = setup.route("timeouts: { total: 10s }").start();
        assert_eq!(proxy.client().ask(request).status(), 503, "{no_retry}");
        assert_eq!(crate::why::told(&proxy, "/", &order(&origins)), busy(no_retry));
    }
}

/// A status that is listed is explained even if it is no server error.
#[test]
fn a_listed_status_that_is_not_tried_again() {
    let origins: [Origin; 2] = in_turn(|call, _| say(call, 429, "Retry-After: 7\r\n", "slowly"));
    assert_eq!(
        line(&origins, "retry_on: [429]", PLENTY, &ask()),
        json!({
            "status": 429, "route": "r", "pool": "b", "upstream": "A",
            "tries": [{ "upstream": "A", "status": 429, "conn_reused": false }],
            "no_retry": "stay_away",
        })
    );
}

#[test]
fn a_retry_that_a_drain_forbids() {
    let gate = Gate::default();
    let held = gate.clone();
    let origins: [Origin; 2] = in_turn(move |call, _| {
        held.pass();
        say(call, 503, "", "busy")
    });
    let proxy = retrying(&order(&origins), "max_attempts: 2").one_worker().start();
    let mut client = proxy.client();
    client.send(ask());
    eventually(SOON, || origins[0].requests() == 1);
    proxy.signal(Signal::TERM);
    // It drains once it does not listen any more.
    let address = proxy.address();
    eventually(SOON, || TcpStream::connect(address).is_err());
    gate.open();
    assert_eq!(client.response().status(), 503);
    assert_eq!(told(&proxy, "/", &order(&origins)), busy("draining"));
}

#[test]
fn a_client_that_leaves_between_two_tries() {
    let origins = busy_and(200);
    let proxy = with_retry(&order(&origins), "backoff: 20s").pool(PLENTY).one_worker().start();
    let mut client = proxy.client();
    client.send(ask());
    let answered = [("status", "503")];
    crate::setup::assert_counts(&proxy, "proxy_upstream_requests_total", &answered, 1.0);
    client.reset();
    let mut expected = busy("final");
    expected["status"] = 499.into();
    expected["reason"] = "client_gone".into();
    assert_eq!(told(&proxy, "/", &order(&origins)), expected);
}

/// Nothing was sent to the first: the next is asked whatever the rules.
#[test]
fn another_that_was_asked_because_nobody_was_there() {
    let (bad, good) = (Origin::refusing(), Origin::start(reply::name("x")));
    let proxy = over(&[&bad, &good]).pool("selector: { algorithm: round-robin }").start();
    assert_eq!(proxy.client().ask(post("/", "x")).status(), 200);
    assert_eq!(
        told(&proxy, "/", &[&bad, &good]),
        json!({
            "status": 200, "route": "r", "pool": "b", "upstream": "B",
            "tries": [
                { "upstream": "A", "error": "connect_refused" },
                { "upstream": "B", "status": 200, "conn_reused": false },
            ],
        })
    );
}

#[test]
fn patience_has_an_end() {
    let origins: [Origin; 4] = [(); 4].map(|()| Origin::never_accepting());
    let setup = over(&origins.each_ref()).pool("selector: { algorithm: round-robin }");
    let proxy = setup.pool("connect_timeout: 100ms").start();
    assert_eq!(proxy.get("/").status(), 504);
    let line = proxy.logged_path("/");
    assert_eq!((&line["no_retry"], &line["attempts"]), (&"patience".into(), &3.into()), "{line}");
    assert_eq!(line["tries"].as_array().map(Vec::len), Some(3), "{line}");
    assert_eq!(line["upstream"], line["tries"][2]["upstream"], "{line}");
}

/// Three upstreams, of which the second is not asked because of its breaker, and the third because
/// of its health; the first answers with 404, until it is gone.
fn one_of_three(keys: &str) -> (Proxy, Option<Origin>, Vec<String>) {
    fn healthy(call: &l7rp_testkit::Call<'_>) -> bool {
        call.request.target() == "/healthz"
    }
    let first = Origin::start_at(own_address(), |call| {
        let status = if healthy(call) { 200 } else { 404 };
        say(call, status, "", "first")
    });
    let second = Origin::start(|call| {
        let status = if healthy(call) { 200 } else { 500 };
        say(call, status, "", "second")
    });
    let third = Origin::start(|call| say(call, 500, "", "third"));
    let urls = [&first, &second, &third].map(Origin::url).to_vec();
    let health = "health: { active: { path: /healthz, interval: 1h } }";
    let proxy = over(&[&first])
        .upstream(&urls[1], "backup: true")
        .upstream(&urls[2], "backup: true")
        .pool(&format!("{TOUCHY}, {PLENTY}, {health}"))
        .route(&format!("middleware: [{{ retry: {{ backoff: 1ms, {keys} }} }}]"))
        .one_worker()
        .start();
    crate::setup::assert_counts(&proxy, "proxy_upstream_eligible", &[], 2.0);
    assert_eq!(proxy.get("/open").status(), 500);
    becomes(&proxy, &second, OPEN);
    eventually(SOON, || proxy.ask_admin("/status").text().contains("status:500"));
    drop((second, third));
    (proxy, Some(first), urls)
}

/// Its first probe was bad, and the next is far away.
const UNJUDGED: &str = "no verdict yet, last probe status:500, expected 200";

#[test]
fn nobody_is_left() {
    let (proxy, mut first, urls) = one_of_three("max_attempts: 2, retry_on: [404]");
    let address = first.take().expect("it is there").address;
    eventually(SOON, || TcpStream::connect(address).is_err());
    assert_eq!(proxy.get("/").status(), 502);
    assert_eq!(
        explained(proxy.logged_path("/"), &urls),
        json!({
            "status": 502, "route": "r", "pool": "b", "upstream": "A",
            "reason": "connect_refused",
            "tries": [{ "upstream": "A", "error": "connect_refused" }],
            "not_tried": [
                { "upstream": "B", "why": "breaker_open" },
                { "upstream": "C", "why": "unhealthy", "cause": UNJUDGED },
            ],
            "no_retry": "no_upstream",
        })
    );
}

/// It goes where it was already, and the line says why.
#[test]
fn nobody_else_is_left() {
    let (proxy, _first, urls) = one_of_three("max_attempts: 2, retry_on: [404]");
    assert_eq!(proxy.get("/").status(), 404);
    assert_eq!(
        explained(proxy.logged_path("/"), &urls),
        json!({
            "status": 404, "route": "r", "pool": "b", "upstream": "A",
            "tries": [
                { "upstream": "A", "status": 404, "conn_reused": true },
                { "upstream": "A", "status": 404, "conn_reused": false },
            ],
            "not_tried": [
                { "upstream": "B", "why": "breaker_open" },
                { "upstream": "C", "why": "unhealthy", "cause": UNJUDGED },
            ],
            "no_retry": "attempts",
        })
    );
}

#[test]
fn an_upstream_that_does_not_begin() {
    let url = raw_origin(b"", |mut raw, _| {
        while let Some((stream, _)) = taken(&mut raw) {
            let refused = code::REFUSED_STREAM.to_be_bytes();
            raw.write(frame(kind::RST_STREAM, 0, stream, &refused));
        }
    });
    let proxy = over(&[]).upstream(&url, "weight: 1").pool("protocol: http2").start();
    assert_eq!(proxy.get("/").status(), 503);
    assert_eq!(
        explained(proxy.logged_path("/"), &[url]),
        json!({
            "status": 503, "route": "r", "pool": "b", "upstream": "A", "reason": "stream_refused",
            "tries": [
                { "upstream": "A", "error": "stream_refused", "conn_reused": false, "repeated": true },
                { "upstream": "A", "error": "stream_refused", "conn_reused": false },
            ],
            "no_retry": "no_upstream",
        })
    );
}

/// Two upstreams that race.
fn race(origins: &[Origin; 2], route: &str) -> Proxy {
    let keys = "max_attempts: 2, hedge_after: 100ms";
    retrying(&order(origins), keys).one_worker().route(route).start()
}

#[test]
fn a_race_that_the_second_wins() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        0 => reply::hang(call),
        _ => say(call, 200, "", "hedge"),
    });
    let proxy = race(&origins, "path_prefix: /");
    assert_eq!(proxy.get("/").text(), "hedge");
    assert_eq!(
        told(&proxy, "/", &order(&origins)),
        json!({
            "status": 200, "route": "r", "pool": "b", "upstream": "B",
            "tries": [
                { "upstream": "A", "error": "lost_race" },
                { "upstream": "B", "status": 200, "conn_reused": false, "hedge": true },
            ],
        })
    );
}

#[test]
fn a_race_that_the_second_loses() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        0 => {
            let_pass(Duration::from_millis(400));
            say(call, 200, "", "primary")
        }
        _ => reply::hang(call),
    });
    let proxy = race(&origins, "path_prefix: /");
    assert_eq!(proxy.get("/").text(), "primary");
    assert_eq!(
        told(&proxy, "/", &order(&origins)),
        json!({
            "status": 200, "route": "r", "pool": "b", "upstream": "A",
            "tries": [
                { "upstream": "A", "status": 200, "conn_reused": false },
                { "upstream": "B", "error": "lost_race", "hedge": true },
            ],
        })
    );
}

#[test]
fn a_race_that_nobody_wins() {
    let origins: [Origin; 2] = in_turn(|call, _| reply::hang(call));
    let proxy = race(&origins, "timeouts: { total: 500ms }");
    assert_eq!(proxy.get("/").status(), 504);
    assert_eq!(
        told(&proxy, "/", &order(&origins)),
        json!({
            "status": 504, "route": "r", "pool": "b", "upstream": "A", "reason": "total_timeout",
            "tries": [
                { "upstream": "A", "error": "total_timeout", "conn_reused": false },
                { "upstream": "B", "error": "total_timeout", "hedge": true },
            ],
            "no_retry": "final",
        })
    );
}

#[test]
fn a_race_in_which_one_fails() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        0 => {
            let_pass(Duration::from_millis(400));
            say(call, 200, "", "primary")
        }
        _ => say(call, 503, "", "busy"),
    });
    let proxy = race(&origins, "path_prefix: /");
    assert_eq!(proxy.get("/").text(), "primary");
    assert_eq!(
        told(&proxy, "/", &order(&origins)),
        json!({
            "status": 200, "route": "r", "pool": "b", "upstream": "A",
            "tries": [
                { "upstream": "A", "status": 200, "conn_reused": false },
                { "upstream": "B", "status": 503, "hedge": true },
            ],
        })
    );
}
