//! HTTP/2 to upstreams: requests and answers pass as by HTTP/1.1, and many share few connections.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use h2::Reason;
use http::{HeaderMap, Response};
use l7rp_testkit::{Message, SOON, eventually};

use crate::http2_tools::{
    Conn, H2Origin, Incoming, content, echo, flag, frame, kind, raw_origin, request, say, taken,
    to, upload, wait, whole,
};
use crate::setup::{get, in_flight, over, post, quiet, settled};
use crate::tries::NEVER_OPENS;

const MIB: usize = 1 << 20;

#[track_caller]
fn is_ok(answer: &Message, text: &str) {
    assert_eq!((answer.status(), answer.text().as_str()), (200, text), "{answer:?}");
}

#[test]
fn a_request_and_its_answer_pass() {
    let origin = H2Origin::start(echo);
    let proxy = to(&[&origin.url()]).start();
    let mut client = proxy.client();
    let answer = client.ask(
        "POST /a?b=c HTTP/1.1\r\nHost: a.test\r\nConnection: x-hop\r\nX-Hop: 1\r\nX-End: 2\r\n\
         TE: trailers, gzip\r\nContent-Length: 4\r\n\r\nbody",
    );
    is_ok(&answer, "body");
    let line = answer.get("got-line").expect("it is told");
    assert!(line.ends_with("/a?b=c") && line.starts_with("POST http://"), "{line}");
    assert_eq!((answer.get("got-x-end"), answer.get("got-x-hop")), (Some("2"), None));
    assert_eq!(answer.get("got-content-length"), Some("4"));
    for name in ["got-connection", "got-transfer-encoding", "got-host", "got-keep-alive"] {
        assert_eq!(answer.get(name), None, "{answer:?}");
    }
    // No length was told, and the connection goes on.
    assert!(answer.is_chunked(), "{answer:?}");
    is_ok(&client.get("/"), "");
    is_ok(&client.ask(post("/", "again")), "again");
    assert_eq!(origin.accepted(), 1);
    quiet(&proxy);
}

#[test]
fn a_head_request_has_an_answer_without_a_body() {
    let origin = H2Origin::start(|mut incoming: Incoming| async move {
        let mut response = Response::new(());
        response.headers_mut().insert("content-length", 12.into());
        let _ = incoming.respond.send_response(response, true);
    });
    let proxy = to(&[&origin.url()]).start();
    let mut client = proxy.client();
    for _ in 0..2 {
        let head = client.send("HEAD / HTTP/1.1\r\nHost: a.test\r\n\r\n").head();
        assert_eq!((head.status(), head.get("content-length")), (200, Some("12")));
    }
    let got = Conn::open(&proxy).ask(request("HEAD", "/")).expect("an answer");
    assert_eq!((got.status, got.get("content-length")), (200, Some("12")));
    quiet(&proxy);
}

#[test]
fn many_requests_share_few_connections() {
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let held = gate.clone();
    let origin = H2Origin::start(move |mut incoming| {
        let held = held.clone();
        async move {
            let _permit = held.acquire().await;
            let path = incoming.request.uri().path().to_owned();
            say(&mut incoming.respond, path);
        }
    });
    let proxy = to(&[&origin.url()]).one_worker().start();
    thread::scope(|scope| {
        // All at once, and nothing is open yet.
        let asking: Vec<_> = (0..81)
            .map(|n| {
                let proxy = &proxy;
                scope.spawn(move || is_ok(&proxy.get(&format!("/{n}")), &format!("/{n}")))
            })
            .collect();
        eventually(SOON, || origin.requests() == 81);
        let open = origin.open();
        gate.close();
        assert_eq!(open, 1);
        for one in asking {
            one.join().expect("it is answered");
        }
    });
    for n in 0..20 {
        is_ok(&proxy.get(&format!("/more/{n}")), &format!("/more/{n}"));
    }
    assert_eq!(origin.accepted(), 1);
    quiet(&proxy);
}

#[test]
fn a_limit_of_the_upstream_is_kept() {
    const FEW: &[u8] = &[0, 3, 0, 0, 0, 10];
    let most = Arc::new(AtomicUsize::new(0));
    let seen = most.clone();
    let url = raw_origin(FEW, move |mut raw, _| {
        let mut open = Vec::new();
        raw.wire.patience(Some(Duration::from_millis(50)));
        loop {
            match raw.next() {
                Some(f) if f.kind == kind::HEADERS => open.push(f.stream),
                Some(_) => {}
                None if open.is_empty() => thread::sleep(Duration::from_millis(1)),
                None => {
                    seen.fetch_max(open.len(), SeqCst);
                    for stream in open.drain(..) {
                        if !raw.write(frame(kind::HEADERS, 5, stream, &[0x88])) {
                            return;
                        }
                    }
                }
            }
        }
    });
    let proxy = to(&[&url]).one_worker().start();
    is_ok(&proxy.get("/first"), "");
    thread::scope(|scope| {
        for _ in 0..40 {
            scope.spawn(|| is_ok(&proxy.get("/"), ""));
        }
    });
    assert!(most.load(SeqCst) <= 10, "{} at once", most.load(SeqCst));
    quiet(&proxy);
}

#[test]
fn an_upstream_that_resets_in_the_middle_cuts_the_answer() {
    let origin = H2Origin::start(|mut incoming: Incoming| async move {
        if incoming.request.uri().path() == "/good" {
            return say(&mut incoming.respond, "good");
        }
        let mut response = Response::new(());
        if incoming.request.uri().path() == "/length" {
            response.headers_mut().insert("content-length", 8.into());
        }
        let mut stream = incoming.respond.send_response(response, false).expect("it is taken");
        let _ = upload(&mut stream, "half".into(), false).await;
        // What was sent is on its way before the stream is reset.
        tokio::time::sleep(Duration::from_millis(50)).await;
        stream.send_reset(Reason::INTERNAL_ERROR);
    });
    let proxy = to(&[&origin.url()]).start();
    for path in ["/length", "/chunks"] {
        let mut client = proxy.client();
        client.send(get("a.test", path, ""));
        assert!(client.try_response().is_err(), "{path}");
        let error = Conn::open(&proxy).ask(request("GET", path)).expect_err("it is not whole");
        assert!(error.is_reset(), "{error}");
    }
    is_ok(&proxy.get("/good"), "good");
    quiet(&proxy);
}

#[test]
fn an_upstream_with_fewer_octets_than_it_said_cuts_the_answer() {
    let url = raw_origin(b"", |mut raw, _| {
        while let Some((stream, _)) = taken(&mut raw) {
            // content-length: 8, as a literal with an indexed name.
            raw.write(frame(kind::HEADERS, 4, stream, &[0x88, 0x0f, 0x0d, 1, b'8']));
            raw.write(frame(kind::DATA, flag::END_STREAM, stream, b"half"));
        }
    });
    let proxy = to(&[&url]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    assert!(client.try_response().map_or(true, |answer| answer.status() == 502));
    quiet(&proxy);
}

/// An upstream that begins its answer and waits; what has become of its streams.
fn waiting() -> (H2Origin, Arc<Mutex<Vec<Reason>>>) {
    let ends = Arc::new(Mutex::new(Vec::new()));
    let told = ends.clone();
    let origin = H2Origin::start(move |mut incoming| {
        let told = told.clone();
        async move {
            let path = incoming.request.uri().path().to_owned();
            let why = match path.as_str() {
                "/silent" => std::future::poll_fn(|cx| incoming.respond.poll_reset(cx)).await,
                "/begun" => {
                    let sent = incoming.respond.send_response(Response::new(()), false);
                    let mut stream = sent.expect("it is taken");
                    let _ = upload(&mut stream, "half".into(), false).await;
                    std::future::poll_fn(|cx| stream.poll_reset(cx)).await
                }
                _ => return say(&mut incoming.respond, "good"),
            };
            if let Ok(why) = why {
                told.lock().unwrap_or_else(PoisonError::into_inner).push(why);
            }
        }
    });
    (origin, ends)
}

/// Waits until so many streams were reset, each because nobody wants it any more.
#[track_caller]
fn cancelled(ends: &Mutex<Vec<Reason>>, count: usize) {
    let all = || ends.lock().unwrap_or_else(PoisonError::into_inner).clone();
    eventually(SOON, || all().len() == count);
    assert!(all().iter().all(|why| *why == Reason::CANCEL), "{:?}", all());
}

#[test]
fn a_client_that_leaves_ends_its_stream_only() {
    let (origin, ends) = waiting();
    let proxy = to(&[&origin.url()]).one_worker().start();
    is_ok(&proxy.get("/good"), "good");
    for (n, path) in ["/silent", "/begun"].into_iter().enumerate() {
        let mut client = proxy.client();
        client.send(get("a.test", path, ""));
        eventually(SOON, || origin.requests() == 2 + 2 * n);
        if path == "/begun" {
            assert_eq!(client.head().status(), 200);
        }
        client.reset();
        eventually(SOON, || in_flight(&proxy) == 0.0);
        cancelled(&ends, n + 1);
        is_ok(&proxy.get("/good"), "good");
    }
    assert_eq!(origin.accepted(), 1);
    quiet(&proxy);
}

#[test]
fn a_stream_that_is_reset_ends_another_only() {
    let (origin, ends) = waiting();
    let proxy = to(&[&origin.url()]).one_worker().start();
    let conn = Conn::open(&proxy);
    assert_eq!(conn.get("/good").text(), "good");
    for (n, path) in ["/begun", "/silent"].into_iter().enumerate() {
        let (mut response, mut stream) = conn.begin(request("GET", path), true);
        eventually(SOON, || origin.requests() == 2 + 2 * n);
        if path == "/begun" {
            assert_eq!(wait(&mut response).expect("a head").status(), 200);
        }
        stream.send_reset(Reason::CANCEL);
        eventually(SOON, || in_flight(&proxy) == 0.0);
        cancelled(&ends, n + 1);
        assert_eq!(conn.get("/good").text(), "good");
    }
    assert_eq!(origin.accepted(), 1);
    quiet(&proxy);
}

#[test]
fn trailers_and_interim_answers_pass() {
    let origin = H2Origin::start(|mut incoming: Incoming| async move {
        let mut hint = Response::new(());
        *hint.status_mut() = http::StatusCode::EARLY_HINTS;
        hint.headers_mut().insert("link", "</a>".parse().expect("a value"));
        incoming.respond.send_informational(hint).expect("it is taken");
        echo(incoming).await;
    });
    let proxy = to(&[&origin.url()]).start();
    let mut client = proxy.client();
    client.send(
        "POST / HTTP/1.1\r\nHost: a.test\r\nTE: trailers\r\nTransfer-Encoding: chunked\r\n\r\n\
         4\r\nbody\r\n0\r\nX-Sum: 17\r\n\r\n",
    );
    let hint = client.head();
    assert_eq!((hint.status(), hint.get("link")), (103, Some("</a>")));
    let answer = client.response();
    is_ok(&answer, "body");
    assert_eq!(answer.trailers, [("x-sum".to_owned(), "17".to_owned())]);
    let conn = Conn::open(&proxy);
    let (response, mut stream) = conn.begin(request("POST", "/"), false);
    stream.send_data("data".into(), false).expect("it is taken");
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", "18".parse().expect("a value"));
    stream.send_trailers(trailers).expect("they are taken");
    let got = wait(whole(response)).expect("an answer");
    assert_eq!(got.text(), "data");
    assert_eq!(got.trailers.expect("trailers")["x-sum"], "18");
    quiet(&proxy);
}

#[test]
fn an_answer_of_trailers_only_stays_one() {
    let origin = H2Origin::start(|mut incoming: Incoming| async move {
        let mut response = Response::new(());
        response.headers_mut().insert("grpc-status", 5.into());
        let _ = incoming.respond.send_response(response, true);
    });
    let proxy = to(&[&origin.url()]).start();
    let conn = Conn::open(&proxy);
    let (response, mut stream) = conn.begin(request("POST", "/"), false);
    stream.send_data("call".into(), true).expect("it is taken");
    let (head, body) = wait(response).expect("an answer").into_parts();
    assert_eq!(head.headers["grpc-status"], "5");
    assert!(body.is_end_stream());
    let (octets, trailers) = wait(content(body)).expect("its end");
    assert_eq!((octets.len(), trailers), (0, None));
}

#[test]
fn both_directions_flow_at_once() {
    // Each part comes back before the next is sent: nothing is held back.
    let origin = H2Origin::start(|incoming: Incoming| async move {
        let Incoming { request, mut respond } = incoming;
        let mut stream = respond.send_response(Response::new(()), false).expect("it is taken");
        let mut body = request.into_body();
        while let Some(Ok(part)) = body.data().await {
            let _ = body.flow_control().release_capacity(part.len());
            if upload(&mut stream, part, false).await.is_err() {
                return;
            }
        }
        let _ = stream.send_data(Bytes::new(), true);
    });
    let proxy = to(&[&origin.url()]).start();
    let conn = Conn::open(&proxy);
    let (response, mut stream) = conn.begin(request("POST", "/"), false);
    let mut body = wait(response).expect("an answer before the body").into_body();
    for n in 0..50 {
        let part = Bytes::from(vec![n; 1 + usize::from(n) * 700]);
        wait(upload(&mut stream, part.clone(), false)).expect("it is taken");
        let mut got = Vec::new();
        while got.len() < part.len() {
            let more = wait(body.data()).expect("more").expect("it lives");
            body.flow_control().release_capacity(more.len()).expect("it is owed");
            got.extend_from_slice(&more);
        }
        assert!(got == part, "{n}");
    }
    stream.send_data(Bytes::new(), true).expect("it is taken");
    assert!(wait(body.data()).is_none_or(|end| end.is_ok_and(|end| end.is_empty())));
    quiet(&proxy);
}

#[test]
fn large_bodies_stay_whole_by_both_versions() {
    let origin = H2Origin::start(echo);
    let proxy = to(&[&origin.url()]).start();
    let conn = Conn::open(&proxy);
    for length in [65_535, 262_145, 5 * MIB] {
        let body: Vec<u8> = (0..length).map(|n| ((n * 31) >> 3) as u8).collect();
        let got = conn.post(request("POST", "/"), body.clone()).expect("an answer");
        assert!(got.body == body, "{length} became {}", got.body.len());
        let mut client = proxy.client();
        client.send(format!("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: {length}\r\n\r\n"));
        let mut twin = client.wire.twin();
        let whole = thread::scope(|scope| {
            scope.spawn(|| twin.write(&body));
            client.response()
        });
        assert!(whole.body == body, "{length} became {}", whole.body.len());
    }
    quiet(&proxy);
}

/// An upstream whose answer has no end; how much of it was taken.
fn endless() -> (H2Origin, Arc<AtomicUsize>) {
    let sent = Arc::new(AtomicUsize::new(0));
    let count = sent.clone();
    let origin = H2Origin::start(move |mut incoming| {
        let count = count.clone();
        async move {
            if incoming.request.uri().path() != "/endless" {
                return say(&mut incoming.respond, "good");
            }
            let Ok(mut stream) = incoming.respond.send_response(Response::new(()), false) else {
                return;
            };
            let part = Bytes::from(vec![b'x'; 64 << 10]);
            while upload(&mut stream, part.clone(), false).await.is_ok() {
                count.fetch_add(part.len(), SeqCst);
            }
        }
    });
    (origin, sent)
}

#[test]
fn a_slow_reader_holds_up_its_stream_only() {
    let (origin, sent) = endless();
    let proxy = to(&[&origin.url()]).one_worker().start();
    is_ok(&proxy.get("/"), "good");
    let before = proxy.resident();
    let mut client = proxy.client();
    assert_eq!(client.send(get("a.test", "/endless", "")).head().status(), 200);
    let at = settled(&sent);
    assert!(at < 64 * MIB, "{at} were taken");
    assert!(proxy.resident() < before + 16 * MIB as u64);
    for _ in 0..20 {
        is_ok(&proxy.get("/"), "good");
    }
    assert_eq!(origin.accepted(), 1);
    drop(client);
    eventually(SOON, || in_flight(&proxy) == 0.0);
}

#[test]
fn an_upstream_that_does_not_speak_it_is_a_bad_one() {
    let origin = l7rp_testkit::Origin::start(l7rp_testkit::reply::raw("HTTP/1.1 200 OK\r\n\r\n"));
    let proxy = to(&[&origin.url().replace("http:", "h2c:")]).start();
    for _ in 0..3 {
        let answer = proxy.get("/");
        assert_eq!(answer.status(), 502, "{answer:?}");
    }
    quiet(&proxy);
}

#[test]
fn another_protocol_takes_new_connections() {
    let origin = H2Origin::start(echo);
    let url = origin.url().replace("h2c:", "http:");
    let with = |protocol: &str| {
        let pool = format!("protocol: {protocol}");
        over(&[]).upstream(&url, "weight: 1").pool(&pool).pool(NEVER_OPENS).one_worker()
    };
    let proxy = with("http1").start();
    for _ in 0..2 {
        assert_eq!(proxy.get("/").status(), 502);
        proxy.reload(&with("http2").yaml());
        is_ok(&proxy.get("/"), "");
        // The connection that is there is for those who speak as before.
        proxy.reload(&with("http1").yaml());
    }
    assert_eq!(origin.requests(), 2);
}

#[test]
fn an_idle_connection_is_kept_for_as_long_as_the_pool_says() {
    let origin = H2Origin::start(echo);
    let keys = "keepalive: { max_idle: 1, idle_timeout: 100ms }";
    let proxy = to(&[&origin.url()]).pool(keys).one_worker().start();
    is_ok(&proxy.get("/"), "");
    eventually(SOON, || origin.open() == 0);
    is_ok(&proxy.get("/"), "");
    assert_eq!(origin.accepted(), 2);
}
