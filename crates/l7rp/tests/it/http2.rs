//! HTTP/2 from clients: requests and answers pass as by HTTP/1.1, many at once on one connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use bytes::Bytes;
use h2::Reason;
use h2::client::Builder;
use http::HeaderMap;
use l7rp_testkit::{Gate, Origin, SOON, Then, eventually, reply};

use crate::http2_tools::{
    Conn, Raw, frame, get_frame, kind, meanwhile, request, upload, wait, whole,
};
use crate::setup::{assert_counts, in_flight, over, quiet, settled};
use crate::tries::{in_turn, retrying, say, says};

const MIB: usize = 1 << 20;

fn long(length: usize) -> Vec<u8> {
    (0..length).map(|n| (n.wrapping_mul(2_654_435_761) >> 16) as u8).collect()
}

fn with_length(path: &str, length: usize) -> http::Request<()> {
    let mut request = request("POST", path);
    request.headers_mut().insert("content-length", length.into());
    request
}

#[test]
fn requests_and_answers_pass() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    let got = conn.get("/a?b=c");
    assert_eq!(got.status, 200);
    assert!(got.text().starts_with("GET /a?b=c HTTP/1.1\r\n"), "{}", got.text());
    let seen = origin.last();
    assert_eq!(seen.get("host"), Some("a.test"));
    assert_eq!((seen.get("content-length"), seen.is_chunked()), (None, false));
    let got = conn.post(with_length("/told", 4), "body").expect("an answer");
    assert!(got.text().ends_with("\r\n\r\nbody"), "{}", got.text());
    assert_eq!(origin.last().get("content-length"), Some("4"));
    let got = conn.post(request("POST", "/untold"), "body").expect("an answer");
    assert!(got.text().ends_with("\r\n\r\nbody"), "{}", got.text());
    assert!(origin.last().is_chunked());
    assert_eq!(origin.last().text(), "body");
    let got = conn.post(with_length("/none", 0), "").expect("an answer");
    assert_eq!(got.status, 200);
    let line = proxy.logged_path("/untold");
    assert_eq!((&line["protocol"], &line["status"]), (&"HTTP/2".into(), &200.into()), "{line}");
    assert_counts(&proxy, "proxy_requests_total", &[("status", "200")], 4.0);
    quiet(&proxy);
}

#[test]
fn answers_without_a_body_have_none() {
    let origin = Origin::start(|call| match call.request.target() {
        "/304" => reply::raw_kept("HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\n\r\n")(call),
        "/head" => reply::raw_kept("HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n")(call),
        _ => reply::told(call),
    });
    let proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    for (method, path, status) in
        [("GET", "/204", 204), ("GET", "/304", 304), ("HEAD", "/head", 200)]
    {
        let got = conn.ask(request(method, path)).expect("an answer");
        assert_eq!((got.status, got.body.len()), (status, 0), "{got:?}");
        assert_eq!(got.get("content-length"), (path == "/head").then_some("12"));
    }
    assert_eq!(conn.get("/x").text(), "good");
    assert_eq!(origin.accepted(), 1);
}

#[test]
fn large_bodies_stay_whole_both_ways() {
    let origin = Origin::start(|call| {
        if call.body().is_err() {
            return Then::Close;
        }
        let body = call.request.body.clone();
        if call.request.target() == "/chunks" {
            call.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            for part in body.chunks(10_007) {
                call.send(format!("{:x}\r\n", part.len()));
                call.send(part);
                call.send("\r\n");
            }
            call.send("0\r\n\r\n");
        } else {
            call.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len()));
            call.send(&body);
        }
        Then::Next
    });
    let proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    for length in [1, 16_384, 65_535, 65_536, 262_145, 5 * MIB] {
        let body = long(length);
        let told = conn.post(with_length("/length", length), body.clone()).expect("an answer");
        assert!(told.body == body, "{length} became {}", told.body.len());
        assert_eq!(told.get("content-length"), Some(length.to_string().as_str()));
        let untold = conn.post(request("POST", "/chunks"), body.clone()).expect("an answer");
        assert!(untold.body == body, "{length} became {}", untold.body.len());
    }
    quiet(&proxy);
}

#[test]
fn trailers_pass_both_ways() {
    let origin = Origin::start(|call| {
        if call.body().is_err() {
            return Then::Close;
        }
        call.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: grpc-status\r\n\r\n");
        call.send("4\r\nbody\r\n0\r\ngrpc-status: 7\r\ngrpc-message: no\r\n\r\n");
        Then::Next
    });
    let proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    let mut asked = request("POST", "/");
    asked.headers_mut().insert("te", "trailers".parse().expect("a value"));
    let (response, mut stream) = conn.begin(asked, false);
    stream.send_data("data".into(), false).expect("it is taken");
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", "17".parse().expect("a value"));
    stream.send_trailers(trailers).expect("they are taken");
    let got = wait(whole(response)).expect("an answer");
    assert_eq!(got.text(), "body");
    let trailers = got.trailers.expect("trailers");
    assert_eq!(trailers.get("grpc-status").expect("a status"), "7");
    assert_eq!(trailers.get("grpc-message").expect("a message"), "no");
    let seen = origin.last();
    assert_eq!(seen.text(), "data");
    assert_eq!(seen.trailers, [("x-sum".to_owned(), "17".to_owned())]);
}

#[test]
fn interim_answers_pass() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| {
        call.send("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n");
        held.pass();
        reply::name("late")(call)
    });
    let proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    let (mut response, _) = conn.begin(request("GET", "/"), true);
    let interim = wait(std::future::poll_fn(|cx| response.poll_informational(cx)));
    let interim = interim.expect("one comes").expect("it is well");
    assert_eq!(interim.status(), 103);
    assert_eq!(interim.headers()["link"], "</a>");
    gate.open();
    assert_eq!(wait(whole(response)).expect("an answer").text(), "late");
}

#[test]
fn many_streams_at_once_get_their_own_answers() {
    const STREAMS: usize = 100;
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| {
        held.pass();
        reply::echo(call)
    });
    let proxy = over(&[&origin]).start();
    // Room for all answers at once, for they are read one after another.
    let conn = Conn::open_with(&proxy, Builder::new().initial_connection_window_size(4 << 20));
    let all: Vec<_> = (0..STREAMS)
        .map(|n| {
            let (response, mut stream) = conn.begin(request("POST", &format!("/{n}")), false);
            let body = format!("<{n}>").repeat(n * 10);
            meanwhile(async move { upload(&mut stream, body.into(), true).await });
            (n, response)
        })
        .collect();
    eventually(SOON, || origin.requests() == STREAMS);
    assert_eq!(in_flight(&proxy), STREAMS as f64);
    gate.open();
    // The last first: nobody waits for another.
    for (n, response) in all.into_iter().rev() {
        let text = wait(whole(response)).expect("an answer").text();
        assert!(text.starts_with(&format!("POST /{n} ")), "{n}: {text}");
        assert!(text.ends_with(&format!("\r\n\r\n{}", format!("<{n}>").repeat(n * 10))), "{n}");
    }
    assert_counts(&proxy, "proxy_connections_total", &[("protocol", "http2")], 1.0);
    quiet(&proxy);
}

#[test]
fn an_answer_may_come_before_the_upload_is_over() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno");
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    // More than the window of the connection in all: what is not read is given back.
    for _ in 0..20 {
        let (response, mut stream) = conn.begin(with_length("/up", 10 * MIB), false);
        let part = Bytes::from(vec![b'x'; 128 << 10]);
        let sent = meanwhile(async move {
            let sent = upload(&mut stream, part, false).await;
            (stream, sent)
        });
        let got = wait(whole(response)).expect("an answer");
        assert_eq!((got.status, got.text().as_str()), (413, "no"));
        drop(sent);
    }
    let origin_alive = conn.post(request("POST", "/small"), "x").expect("an answer");
    assert_eq!(origin_alive.status, 413);
    quiet(&proxy);
}

#[test]
fn a_reader_that_opens_no_window_holds_the_upstream_up() {
    const ALL: usize = 64 * MIB;
    let sent = Arc::new(AtomicUsize::new(0));
    let count = sent.clone();
    let origin = Origin::start(move |call| {
        if call.request.target() == "/small" {
            return reply::name("x")(call);
        }
        call.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {ALL}\r\n\r\n"));
        let part = vec![b'x'; 64 << 10];
        while count.load(SeqCst) < ALL && call.send(&part) {
            count.fetch_add(part.len(), SeqCst);
        }
        Then::Next
    });
    let proxy = over(&[&origin]).start();
    let conn = Conn::open_with(&proxy, Builder::new().initial_window_size(1000));
    assert_eq!(conn.get("/small").text(), "x");
    let before = proxy.resident();
    let (response, _) = conn.begin(request("GET", "/"), true);
    let mut body = wait(response).expect("a head").into_body();
    let held_at = settled(&sent);
    assert!(held_at < ALL, "it has taken everything");
    assert!(proxy.resident() < before + 16 * MIB as u64, "grown to {}", proxy.resident());
    let mut total = 0;
    wait(async {
        while let Some(part) = body.data().await {
            let part = part.expect("more");
            total += part.len();
            body.flow_control().release_capacity(part.len()).expect("it is owed");
            if total > MIB {
                break;
            }
        }
    });
    drop(body);
    eventually(SOON, || in_flight(&proxy) == 0.0);
}

#[test]
fn an_upstream_that_reads_nothing_holds_the_client_up() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| {
        if call.request.target() == "/small" {
            return reply::name("x")(call);
        }
        // It reads nothing more until the test is over.
        held.pass();
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    assert_eq!(conn.get("/small").text(), "x");
    let before = proxy.resident();
    let (_response, mut stream) = conn.begin(with_length("/up", 64 * MIB), false);
    let sent = Arc::new(AtomicUsize::new(0));
    let count = sent.clone();
    let sending = meanwhile(async move {
        for _ in 0..1024 {
            let part = Bytes::from(vec![b'x'; 64 << 10]);
            if upload(&mut stream, part, false).await.is_err() {
                return;
            }
            count.fetch_add(64 << 10, SeqCst);
        }
    });
    let held_at = settled(&sent);
    assert!(held_at < 64 * MIB, "everything was taken");
    assert!(proxy.resident() < before + 16 * MIB as u64, "grown to {}", proxy.resident());
    sending.abort();
    gate.open();
}

#[test]
fn a_client_that_resets_ends_the_request_at_the_upstream() {
    let origin = Origin::start(|call| match call.request.target() {
        "/hang" | "/stall" => reply::told(call),
        _ => reply::name("good")(call),
    });
    let proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    for path in ["/hang", "/stall"] {
        let (mut response, mut stream) = conn.begin(request("GET", path), true);
        eventually(SOON, || in_flight(&proxy) == 1.0);
        if path == "/stall" {
            assert_eq!(wait(&mut response).expect("a head").status(), 200);
        }
        stream.send_reset(Reason::CANCEL);
        eventually(SOON, || in_flight(&proxy) == 0.0);
        eventually(SOON, || origin.open() == 0);
        let line = proxy.logged_path(path);
        assert_eq!(line["reason"], "client_gone", "{line}");
    }
    assert_eq!(conn.get("/").text(), "good");
    quiet(&proxy);
}

#[test]
fn an_upstream_that_breaks_in_the_middle_resets_the_stream() {
    let origin = Origin::start(|call| match call.request.target() {
        "/chunks" => {
            reply::raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")(call)
        }
        _ => reply::told(call),
    });
    let proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    for path in ["/half", "/chunks"] {
        let error = conn.ask(request("GET", path)).expect_err("it is not whole");
        assert!(error.is_reset() && error.is_remote(), "{error}");
        assert_eq!(error.reason(), Some(Reason::INTERNAL_ERROR));
    }
    assert_eq!(conn.get("/close").status, 502);
    assert_eq!(conn.get("/garbage").status, 502);
    assert_eq!(conn.get("/").text(), "good");
    quiet(&proxy);
}

#[test]
fn what_protects_upstreams_holds_for_these_clients_as_well() {
    let failing: [Origin; 2] = in_turn(|call, nth| match nth {
        0 => say(call, 503, "", "bad"),
        _ => say(call, 200, "", "good"),
    });
    let proxy = retrying(&failing.each_ref(), "").start();
    assert_eq!(Conn::open(&proxy).get("/").text(), "good");
    assert_eq!(proxy.logged_path("/")["attempts"], 2);

    let origin = Origin::start(reply::name("x"));
    let limited = "middleware: [{ rate_limit: { per_ip_rps: 0.01, burst: 2 } }]";
    let proxy = over(&[&origin]).route(limited).start();
    let conn = Conn::open(&proxy);
    assert_eq!([(); 3].map(|()| conn.get("/").status), [200, 200, 429]);

    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let proxy = over(&[]).upstream(&origin.url(), "max_in_flight: 2").start();
    let conn = Conn::open(&proxy);
    let first = [(); 2].map(|()| conn.begin(request("GET", "/"), true).0);
    eventually(SOON, || origin.requests() == 2);
    let refused = conn.get("/over");
    assert_eq!((refused.status, refused.get("retry-after")), (503, Some("1")));
    gate.open();
    for response in first {
        assert_eq!(wait(whole(response)).expect("an answer").text(), "late");
    }

    let origin = Origin::start(says(500, "bad"));
    let breaker = "circuit_breaker: { open_min: 60s, open_max: 60s, consecutive_failures: 3 }";
    let proxy = over(&[&origin]).pool(breaker).start();
    let conn = Conn::open(&proxy);
    for _ in 0..3 {
        assert_eq!(conn.get("/").status, 500);
    }
    eventually(SOON, || conn.get("/").status == 503);
    quiet(&proxy);
}

#[test]
fn both_versions_are_spoken_on_one_port() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    let mut client = proxy.client();
    for _ in 0..3 {
        assert_eq!(conn.get("/two").text(), "x");
        assert_eq!(client.get("/one").text(), "x");
    }
    assert_eq!(proxy.logged_path("/one")["protocol"], "HTTP/1.1");
    assert_eq!(proxy.logged_path("/two")["protocol"], "HTTP/2");
    // The preface may come in pieces, and what only begins like it is no HTTP/2.
    let mut client = proxy.client();
    for part in [&b"PRI * HT"[..], b"TP/2.0\r\n\r\nS", b"M\r\n\r\n"] {
        client.send(part);
        assert_eq!(conn.get("/two").text(), "x");
    }
    client.send(frame(kind::SETTINGS, 0, 0, b""));
    client.send(get_frame(1));
    let mut raw = Raw { wire: client.wire };
    assert!(raw.end_of(1).ends());
    let mut client = proxy.client();
    let answer = client.ask("PRI * HTTP/1.1\r\nHost: a.test\r\n\r\n");
    assert!(matches!(answer.status(), 400 | 405 | 501), "{answer:?}");
}
