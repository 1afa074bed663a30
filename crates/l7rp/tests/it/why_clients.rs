//! As in `why`: requests that came to nothing because of who sent them.

use std::sync::Arc;

use l7rp_testkit::{Client, Origin, Proxy, SOON, Value, eventually, let_pass, reply};
use serde_json::json;

use crate::grpc::call;
use crate::http2_tools::{Conn, H2Origin};
use crate::setup::{Setup, get, over};
use crate::tls_kit::{Ca, shake, tls};
use crate::upgrade::{ACCEPT, OFFER, echo};
use crate::why::{alone, explained, told};

const GET: &str = "GET / HTTP/1.1\r\nHost: a\r\n";

/// What is wrong with the head of a request, or with its body.
pub const BAD_REQUESTS: [(&str, &str); 14] = [
    ("nonsense\r\n\r\n", "malformed_start_line"),
    ("GET /a|b HTTP/1.1\r\nHost: a\r\n\r\n", "malformed_target"),
    ("GET / HTTP/1.1\r\nHost: a\r\nX A: b\r\n\r\n", "malformed_field_name"),
    ("GET / HTTP/1.1\r\nHost: a\r\nX-A: a\0b\r\n\r\n", "malformed_field_value"),
    ("GET / HTTP/1.1\nHost: a\n\n", "malformed_line_ending"),
    ("GET / HTTP/1.1\r\n\r\n", "host_missing"),
    ("GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", "host_repeated"),
    ("GET / HTTP/1.1\r\nHost: a b\r\n\r\n", "host_invalid"),
    ("GET / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\n", "bad_content_length"),
    ("GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: x\r\n\r\n", "bad_transfer_encoding"),
    (
        "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        "content_length_with_transfer_encoding",
    ),
    ("GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "bad_chunk"),
    (
        "GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX Y: 1\r\n\r\n",
        "bad_trailer",
    ),
    // Upgrades are in a test of their own.
    ("", "early_upgrade_data"),
];

#[test]
fn requests_that_are_none() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).one_worker().start();
    for (request, reason) in BAD_REQUESTS.into_iter().filter(|(request, _)| !request.is_empty()) {
        let answer = proxy.client().ask(request);
        assert_eq!(answer.status(), 400, "{request:?}: {answer:?}");
        let id = answer.get("x-request-id").expect("an id").to_owned();
        let line = explained(proxy.logged(|line| line["request_id"] == id), &[]);
        let mut expected = json!({ "status": 400, "reason": reason });
        // The head was good: what follows it is the route's business.
        if matches!(reason, "bad_chunk" | "bad_trailer") {
            (expected["route"], expected["pool"]) = ("r".into(), "b".into());
        }
        assert_eq!(line, expected, "{request:?}");
    }
    assert_eq!(origin.requests(), 0);
}

/// The line of what this client gets as an answer.
#[track_caller]
fn of_answer(proxy: &Proxy, client: &mut Client, request: &str, origins: &[&Origin]) -> Value {
    let answer = client.ask(request);
    let id = answer.get("x-request-id").expect("an id").to_owned();
    let urls: Vec<_> = origins.iter().map(|origin| origin.url()).collect();
    explained(proxy.logged(|line| line["request_id"] == id), &urls)
}

#[test]
fn requests_that_are_refused_unread() {
    let limits = "limits: { max_headers: 20, max_target_bytes: 1000 }, \
                  timeouts: { max_header_bytes: 8192, read_header: 300ms }";
    let proxy = over(&[&Origin::refusing()]).listener(limits).start();
    let long = |n: usize| "x".repeat(n);
    for (request, status, reason) in [
        (get("a", &format!("/{}", long(1000)), ""), 414, "target_too_long"),
        (get("a", "/", &"X-A: b\r\n".repeat(20)), 431, "too_many_fields"),
        (get("a", "/", &format!("X-A: {}\r\n", long(9000))), 431, "head_too_large"),
        ("GET / HTTP/2.0\r\nHost: a\r\n\r\n".into(), 505, "version_unsupported"),
        ("TRACE / HTTP/1.1\r\nHost: a\r\n\r\n".into(), 405, "method_refused"),
        (get("a", "/", "Expect: magic\r\n"), 417, "expectation_unknown"),
        (GET.into(), 408, "head_timeout"),
    ] {
        let line = of_answer(&proxy, &mut proxy.client(), &request, &[]);
        assert_eq!(line, json!({ "status": status, "reason": reason }));
    }
}

#[test]
fn requests_that_are_not_let_in() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin])
        .route("host: a.test, max_body_bytes: 5")
        .top("- { name: shut, host: shut.test, pool: b, deny: [\"127.0.0.0/8\"] }")
        .top(
            "- { name: few, host: few.test, pool: b, \
             middleware: [{ rate_limit: { per_ip_rps: 0.01, burst: 1 } }] }",
        )
        .start();
    let mut client = proxy.client();
    assert_eq!(client.ask(get("few.test", "/", "")).status(), 200);
    for (request, expected) in [
        (get("other.test", "/", ""), json!({ "status": 404, "reason": "no_route" })),
        (
            get("shut.test", "/", ""),
            json!({ "status": 403, "route": "shut", "reason": "forbidden" }),
        ),
        (
            get("few.test", "/", ""),
            json!({ "status": 429, "route": "few", "reason": "rate_limited" }),
        ),
        (
            get("a.test", "/", "Content-Length: 6\r\n"),
            json!({ "status": 413, "route": "r", "reason": "body_too_large" }),
        ),
    ] {
        assert_eq!(of_answer(&proxy, &mut client, &request, &[]), expected);
    }
}

#[test]
fn a_host_that_is_not_this_connections() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let wild = ca.issue("wild", &["*.example.com"]);
    let proxy = over(&[&origin]).listener(&tls(&[&wild], "")).start();
    let mut client = shake(&Arc::new(ca.client()), proxy.address(), "a.example.com").client;
    let line = of_answer(&proxy, &mut client, &get("other.test", "/", ""), &[]);
    assert_eq!(line, json!({ "status": 421, "reason": "misdirected" }));
}

/// A client that has sent the begin of a body to an upstream that waits for the rest.
fn uploading(setup: fn(Setup) -> Setup) -> (Origin, Proxy, Client) {
    let origin = Origin::start(reply::echo);
    let proxy = setup(over(&[&origin])).start();
    let mut client = proxy.client();
    client.send(
        "POST /up HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    );
    eventually(SOON, || origin.requests() == 1);
    (origin, proxy, client)
}

/// A try on a new connection that its client has ended.
fn ended(status: u16, reason: &str) -> Value {
    alone(status, reason, Some(false), "final")
}

#[test]
fn bodies_that_do_not_go_on_as_they_should() {
    let (origin, proxy, mut client) =
        uploading(|setup| setup.listener("timeouts: { read: 300ms }"));
    assert_eq!(client.response().status(), 408);
    assert_eq!(told(&proxy, "/up", &[&origin]), ended(408, "body_timeout"));

    let (origin, proxy, mut client) = uploading(|setup| setup.route("max_body_bytes: 5"));
    assert_eq!(client.ask("4\r\nmore\r\n").status(), 413);
    assert_eq!(told(&proxy, "/up", &[&origin]), ended(413, "body_too_large"));

    let (origin, proxy, mut client) = uploading(|setup| setup);
    assert_eq!(client.ask("zz\r\n").status(), 400);
    assert_eq!(told(&proxy, "/up", &[&origin]), ended(400, "bad_chunk"));

    let (origin, proxy, client) = uploading(|setup| setup);
    client.reset();
    assert_eq!(told(&proxy, "/up", &[&origin]), ended(499, "client_gone"));
}

/// It takes ten seconds until anybody is too slow.
#[test]
fn a_body_that_is_too_slow() {
    let (origin, proxy, mut client) =
        uploading(|setup| setup.listener("limits: { min_body_rate: 1000 }"));
    client.wire.patience(Some(SOON * 2));
    let mut sender = client.wire.twin();
    std::thread::spawn(move || {
        while sender.write(b"1\r\nx\r\n").is_ok() {
            let_pass(std::time::Duration::from_millis(100));
        }
    });
    assert_eq!(client.response().status(), 408);
    assert_eq!(told(&proxy, "/up", &[&origin]), ended(408, "body_too_slow"));
}

#[test]
fn clients_that_leave_or_do_not_read() {
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin]).listener("timeouts: { write: 300ms }").start();
    let asking = |path: &str| {
        let before = origin.requests();
        let mut client = proxy.client();
        client.send(get("a.test", path, ""));
        eventually(SOON, || origin.requests() > before);
        client
    };
    asking("/hang").reset();
    assert_eq!(told(&proxy, "/hang", &[&origin]), ended(499, "client_gone"));
    let mut client = asking("/stall");
    assert_eq!(client.head().status(), 200);
    client.reset();
    assert_eq!(told(&proxy, "/stall", &[&origin]), ended(200, "client_gone"));
    let mut client = asking("/big");
    assert_eq!(client.head().status(), 200);
    assert_eq!(told(&proxy, "/big", &[&origin]), ended(200, "client_stalled"));
}

#[test]
fn a_deadline_of_the_clients_own() {
    let origin = H2Origin::start(|incoming| async move {
        let mut respond = incoming.respond;
        let _ = std::future::poll_fn(|cx| respond.poll_reset(cx)).await;
    });
    let setup = over(&[]).upstream(&origin.url(), "weight: 1").pool("protocol: http2");
    let proxy = setup.start();
    let conn = Conn::open(&proxy);
    let answer = conn.post(call("/svc/Slow", &[("grpc-timeout", "80m")]), "x").expect("an answer");
    assert_eq!(answer.get("grpc-status"), Some("4"));
    let mut expected = ended(408, "deadline_exceeded");
    expected["grpc_status"] = 4.into();
    assert_eq!(explained(proxy.logged_path("/svc/Slow"), &[origin.url()]), expected);
}

#[test]
fn tunnels_that_do_not_end_as_they_should() {
    let origin = Origin::start(|call| {
        call.send(ACCEPT);
        reply::hang(call)
    });
    let proxy = over(&[&origin]).route("tunnel_idle_timeout: 300ms").start();
    let mut client = proxy.client();
    assert_eq!(client.send(OFFER).head().status(), 101);
    assert_eq!(
        told(&proxy, "/t", &[&origin]),
        json!({
            "status": 101, "route": "r", "pool": "b", "upstream": "A", "reason": "tunnel_idle",
            "tries": [{ "upstream": "A", "status": 101, "conn_reused": false }],
        })
    );
    // What comes too early might be a request that nobody has looked at.
    let origin = Origin::start(echo);
    let proxy = over(&[&origin]).start();
    assert_eq!(proxy.client().ask(format!("{OFFER}early")).status(), 400);
    assert_eq!(
        told(&proxy, "/t", &[&origin]),
        json!({
            "status": 400, "route": "r", "pool": "b", "upstream": "A",
            "reason": "early_upgrade_data",
            "tries": [
                { "upstream": "A", "error": "early_upgrade_data", "conn_reused": false },
            ],
        })
    );
}
