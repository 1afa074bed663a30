//! Calls of gRPC: how they went is said in a field, and how long they may take in another.

use bytes::Bytes;
use h2::server::SendResponse;
use http::{HeaderMap, Request, Response};
use l7rp_testkit::{SOON, eventually};

use crate::http2_tools::{Conn, H2Origin, Incoming, content, request, retried, say};
use crate::setup::{assert_counts, over, quiet};

/// A call, with these fields more.
pub fn call(path: &str, fields: &[(&'static str, &str)]) -> Request<()> {
    let mut request = request("POST", path);
    let usual = [("content-type", "application/grpc"), ("te", "trailers")];
    for (name, value) in usual.iter().chain(fields) {
        request.headers_mut().insert(*name, value.parse().expect("a value"));
    }
    request
}

pub fn status(code: u8) -> HeaderMap {
    let mut fields = HeaderMap::new();
    fields.insert("grpc-status", u16::from(code).into());
    fields
}

/// Ends a call at once, in one frame.
fn trailers_only(respond: &mut SendResponse<Bytes>, fields: HeaderMap) {
    let mut response = Response::new(());
    *response.headers_mut() = fields;
    let _ = respond.send_response(response, true);
}

/// Answers a call, and says how it went behind the answer.
fn with_trailers(respond: &mut SendResponse<Bytes>, body: Vec<u8>, fields: HeaderMap) {
    let sent = respond.send_response(Response::new(()), false);
    let _ = sent.and_then(|mut stream| {
        stream.send_data(body.into(), false)?;
        stream.send_trailers(fields)
    });
}

/// An upstream that refuses all calls with these fields.
pub fn refusing(fields: HeaderMap) -> H2Origin {
    H2Origin::start(move |Incoming { request, mut respond }| {
        let fields = fields.clone();
        async move {
            let _ = content(request.into_body()).await;
            trailers_only(&mut respond, fields);
        }
    })
}

/// An upstream that answers calls with what they have sent.
pub fn echoing() -> H2Origin {
    H2Origin::start(|Incoming { request, mut respond }| async move {
        let Ok((body, _)) = content(request.into_body()).await else { return };
        with_trailers(&mut respond, body, status(0));
    })
}

pub const UNAVAILABLE: u8 = 14;
const NOT_FOUND: u8 = 5;

#[test]
fn a_call_that_found_nobody_is_made_again_elsewhere() {
    let (bad, good) = (refusing(status(UNAVAILABLE)), echoing());
    let proxy = retried(&[&bad.url(), &good.url()], "retry_on_grpc: [UNAVAILABLE]").start();
    let conn = Conn::open(&proxy);
    let body = "x".repeat(50_000);
    for _ in 0..10 {
        let answer = conn.post(call("/svc/Echo", &[]), body.clone()).expect("an answer");
        assert_eq!(answer.trailers.expect("trailers")["grpc-status"], "0");
        assert_eq!(answer.body, body.as_bytes(), "it came once, and whole");
    }
    assert_eq!(good.requests(), 10);
    assert!(bad.requests() > 0, "some were sent there first");
    quiet(&proxy);
}

#[test]
fn other_outcomes_are_the_clients() {
    let pushed = {
        let mut fields = status(UNAVAILABLE);
        fields.insert("grpc-retry-pushback-ms", 5000.into());
        fields
    };
    let listed = "retry_on_grpc: [UNAVAILABLE]";
    for (fields, keys) in
        [(status(NOT_FOUND), listed), (pushed, listed), (status(UNAVAILABLE), "max_attempts: 3")]
    {
        let origins = [refusing(fields.clone()), refusing(fields.clone())];
        let proxy = retried(&[&origins[0].url(), &origins[1].url()], keys).start();
        let answer = Conn::open(&proxy).post(call("/svc/Get", &[]), "x").expect("an answer");
        assert_eq!(answer.fields["grpc-status"], fields["grpc-status"], "in the head, as it came");
        assert_eq!(origins[0].requests() + origins[1].requests(), 1, "{fields:?} {keys}");
        let line = proxy.logged_path("/svc/Get");
        let code: u8 = fields["grpc-status"].to_str().expect("text").parse().expect("a number");
        assert_eq!((&line["grpc_status"], &line["status"]), (&code.into(), &200.into()), "{line}");
    }
}

/// A breaker that opens after three failures in a row.
const OPENS: &str =
    "circuit_breaker: { consecutive_failures: 3, failure_grpc_statuses: [UNAVAILABLE] }";

#[test]
fn how_calls_go_is_what_a_breaker_is_told() {
    let in_head = refusing(status(UNAVAILABLE));
    let in_trailers = H2Origin::start(|Incoming { mut respond, .. }| async move {
        with_trailers(&mut respond, b"some".to_vec(), status(UNAVAILABLE));
    });
    for origin in [&in_head, &in_trailers] {
        let setup = over(&[]).upstream(&origin.url(), "weight: 1");
        let proxy = setup.pool("protocol: http2").pool(OPENS).start();
        let conn = Conn::open(&proxy);
        for n in 1..=3 {
            conn.post(call("/svc/Get", &[]), "x").expect("an answer");
            // It is judged just after its last octet.
            let labels = [("status", "200")];
            assert_counts(&proxy, "proxy_upstream_requests_total", &labels, f64::from(n));
        }
        let before = origin.requests();
        let answer = conn.post(call("/svc/Last", &[]), "x").expect("an answer");
        assert_eq!(answer.get("grpc-status"), Some("14"), "as a call expects it");
        assert_eq!(origin.requests(), before);
        assert_eq!(proxy.logged_path("/svc/Last")["reason"], "breaker_open");
    }
}

#[test]
fn outcomes_that_are_not_listed_say_nothing_of_an_upstream() {
    let origin = refusing(status(NOT_FOUND));
    let setup = over(&[]).upstream(&origin.url(), "weight: 1");
    let proxy = setup.pool("protocol: http2").pool(OPENS).start();
    let conn = Conn::open(&proxy);
    for _ in 0..10 {
        conn.post(call("/svc/Get", &[]), "x").expect("an answer");
    }
    // What is no call may have the field for reasons of its own.
    let plain = H2Origin::start(|Incoming { mut respond, .. }| async move {
        trailers_only(&mut respond, status(UNAVAILABLE));
    });
    let setup = over(&[]).upstream(&plain.url(), "weight: 1");
    let proxy_of_plain = setup.pool("protocol: http2").pool(OPENS).start();
    let other = Conn::open(&proxy_of_plain);
    for _ in 0..10 {
        other.get("/");
    }
    assert_eq!((origin.requests(), plain.requests()), (10, 10));
}

#[test]
fn a_call_ends_at_its_own_deadline() {
    let gone = std::sync::Arc::new(tokio::sync::Notify::new());
    let told = gone.clone();
    let origin = H2Origin::start(move |Incoming { request, mut respond }| {
        let told = told.clone();
        async move {
            if request.uri().path() == "/svc/Slow" {
                let reset = std::future::poll_fn(|cx| respond.poll_reset(cx)).await;
                assert_eq!(reset.expect("a reason"), h2::Reason::CANCEL);
                told.notify_one();
            } else {
                say(&mut respond, "x");
            }
        }
    });
    let setup = over(&[]).upstream(&origin.url(), "weight: 1").pool("protocol: http2");
    let breaker = "circuit_breaker: { consecutive_failures: 1 }";
    let proxy = setup.pool(breaker).route("timeouts: { total: 20s }").start();
    let conn = Conn::open(&proxy);
    let answer = conn.post(call("/svc/Slow", &[("grpc-timeout", "80m")]), "x").expect("an answer");
    assert_eq!((answer.status, answer.get("grpc-status")), (200, Some("4")));
    crate::http2_tools::wait(async { tokio::time::timeout(SOON, gone.notified()).await })
        .expect("the upstream is told");
    let line = proxy.logged_path("/svc/Slow");
    assert_eq!((&line["reason"], &line["grpc_status"]), (&"deadline_exceeded".into(), &4.into()));
    // Who sets deadlines that nobody can keep must not take upstreams from others.
    eventually(SOON, || conn.get("/").text() == "x");
    assert_counts(&proxy, "proxy_circuit_breaker_state", &[], 0.0);
    quiet(&proxy);
}

/// That the client itself says nothing more does not make the deadline another one.
#[test]
fn a_call_that_waits_for_its_client_ends_at_its_deadline() {
    let origin = H2Origin::start(|Incoming { request, respond }| async move {
        let _ = content(request.into_body()).await;
        drop(respond);
    });
    let setup = over(&[]).upstream(&origin.url(), "weight: 1").pool("protocol: http2");
    let proxy = setup.route("timeouts: { total: 20s }").start();
    let conn = Conn::open(&proxy);
    let (response, stream) = conn.begin(call("/svc/Collect", &[("grpc-timeout", "80m")]), false);
    let answer = crate::http2_tools::wait(response).expect("an answer");
    assert_eq!(answer.headers()["grpc-status"], "4");
    let line = proxy.logged_path("/svc/Collect");
    assert_eq!((&line["reason"], &line["grpc_status"]), (&"deadline_exceeded".into(), &4.into()));
    drop(stream);
    quiet(&proxy);
}

/// Whoever says that it is a call holds what it holds no longer than a tunnel may: before the answer
/// begins, and after that.
#[test]
fn a_call_in_which_nobody_speaks_ends() {
    let origin = H2Origin::start(|Incoming { request, mut respond }| async move {
        let path = request.uri().path().to_owned();
        let begun = (path == "/svc/Begun").then(|| respond.send_response(Response::new(()), false));
        let _ = content(request.into_body()).await;
        drop(begun);
    });
    let setup = over(&[]).upstream(&origin.url(), "weight: 1").pool("protocol: http2");
    let setup = setup.pool("circuit_breaker: { consecutive_failures: 1 }");
    let proxy = setup.route("tunnel_idle_timeout: 300ms").start();
    let conn = Conn::open(&proxy);
    for path in ["/svc/Silent", "/svc/Begun"] {
        let (response, stream) = conn.begin(call(path, &[]), false);
        let ended = crate::http2_tools::wait(crate::http2_tools::whole(response));
        assert!(ended.is_err() || ended.is_ok_and(|answer| answer.get("grpc-status").is_some()));
        assert_eq!(proxy.logged_path(path)["reason"], "body_timeout", "{path}");
        drop(stream);
    }
    assert_counts(&proxy, "proxy_circuit_breaker_state", &[], 0.0);
    quiet(&proxy);
}

#[test]
fn a_call_that_has_no_route_is_told_so_in_its_own_way() {
    let proxy = crate::setup::start(
        "listeners: [{ name: web, bind: \"127.0.0.1:0\" }]\n\
         routes: [{ name: r, path_prefix: /other, respond: { status: 204 } }]\n",
    );
    let answer = Conn::open(&proxy).post(call("/svc/Get", &[]), "x").expect("an answer");
    assert_eq!(answer.status, 200);
    assert_eq!(answer.get("content-type"), Some("application/grpc"));
    assert_eq!(answer.get("grpc-status"), Some("12"));
}
