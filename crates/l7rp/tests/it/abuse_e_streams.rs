//! Streams of HTTP/2 that are more than a question and an answer.

use std::time::Duration;

use l7rp_testkit::{Origin, SOON, Then, eventually, let_pass, reply};

use crate::http2_tools::{
    Conn, GET, H2Origin, Incoming, Raw, content, flag, frame, kind, request, section, to, upload,
    wait,
};
use crate::setup::{over, quiet};

/// An extended CONNECT (RFC 8441) with this `:protocol`.
fn connect(protocol: &str) -> Vec<u8> {
    let mut fields = GET.to_vec();
    fields[0].1 = "CONNECT";
    fields.insert(1, (":protocol", protocol));
    fields.push(("sec-websocket-version", "13"));
    section(&fields)
}

/// Section D.3, item 1, for the one part of a head that the library does not check.
#[test]
fn d3_1_no_protocol_ends_a_line() {
    let mut passed = Vec::new();
    for protocol in [
        "websocket\r\nx-injected: 1",
        "websocket\nx-injected: 1",
        "websocket\r\ncontent-length: 5",
        "web socket",
        "websocket, h2c",
        "",
    ] {
        let origin = Origin::start(reply::echo);
        let proxy = over(&[&origin]).start();
        let mut raw = Raw::open(&proxy, b"");
        let flags = flag::END_HEADERS | flag::END_STREAM;
        raw.write(frame(kind::HEADERS, flags, 1, &connect(protocol)));
        raw.end_of(1);
        for seen in origin.seen() {
            passed.push((protocol, seen.message.fields.clone()));
        }
        quiet(&proxy);
    }
    assert!(passed.is_empty(), "the upstream got {passed:#?}");
}

fn data_until(raw: &mut Raw, stream: u32, wanted: usize) -> Result<Vec<u8>, String> {
    let mut got = Vec::new();
    while got.len() < wanted {
        let next = raw.find(|f| f.stream == stream || f.kind == kind::GOAWAY);
        match next {
            Some(f) if f.kind == kind::DATA => got.extend_from_slice(&f.payload),
            Some(f) if f.kind == kind::RST_STREAM || f.kind == kind::GOAWAY => {
                return Err(format!("{} octets, then code {}", got.len(), f.code()));
            }
            Some(_) => {}
            None => return Err(format!("{} octets, then the end", got.len())),
        }
    }
    Ok(got)
}

/// An upstream that says something at once, and three times more, a little later each.
fn in_bits(kind: &'static str) -> Origin {
    Origin::start(move |call| {
        call.send(format!("HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\ndata: 1\n\n"));
        for _ in 0..3 {
            let_pass(Duration::from_millis(300));
            if !call.send("data: 2\n\n") {
                break;
            }
        }
        Then::Close
    })
}

#[track_caller]
fn goes_on(kind: &'static str) {
    let origin = in_bits(kind);
    let proxy = over(&[&origin]).start();
    let mut raw = Raw::open(&proxy, b"");
    let flags = flag::END_HEADERS | flag::END_STREAM;
    raw.write(frame(kind::HEADERS, flags, 1, &section(&GET)));
    let got = data_until(&mut raw, 1, 36);
    let line = proxy.logged_path("/");
    assert_eq!(got.map(|octets| octets.len()), Ok(36), "{line}");
}

/// A stream of events goes on for as long as both sides like, also for a client whose request has
/// ended, as each GET by HTTP/2 has at once.
#[test]
fn a_stream_of_events_goes_on_by_http2() {
    goes_on("text/event-stream");
}

/// What the test above differs in.
#[test]
fn a_stream_of_text_goes_on_by_http2() {
    goes_on("text/plain");
}

/// The same with a client that is not ours.
#[test]
fn curl_gets_events_by_http2() {
    let origin = in_bits("text/event-stream");
    let proxy = over(&[&origin]).start();
    let got = std::process::Command::new("curl")
        .args(["-sS", "-N", "-m", "10", "--http2-prior-knowledge"])
        .arg(format!("http://{}/", proxy.address()))
        .output()
        .expect("curl");
    assert_eq!(got.stdout.len(), 36, "{got:?}");
}

/// Config: `write` is the "time WITHOUT PROGRESS ... of a response that we have bytes for; never a
/// total, never on tunnels". What bounds a tunnel is `tunnel_idle_timeout`.
#[test]
fn a_tunnel_that_is_not_read_for_a_while_goes_on() {
    const ALL: usize = 200 << 10;
    let origin = Origin::start(|call| {
        call.send(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        );
        call.send(vec![b'x'; ALL]);
        call.until_gone();
        Then::Close
    });
    let proxy = over(&[&origin]).listener("timeouts: { write: 500ms }").start();
    let mut raw = Raw::open(&proxy, b"");
    raw.write(frame(kind::HEADERS, flag::END_HEADERS, 1, &connect("websocket")));
    let first = data_until(&mut raw, 1, 65_535).expect("as much as the window takes");
    // It has something else to do for longer than `write`, and for much less than the hour that a
    // tunnel may be idle.
    let_pass(Duration::from_secs(2));
    let more = (ALL as u32).to_be_bytes();
    for stream in [0, 1] {
        raw.write(frame(kind::WINDOW_UPDATE, 0, stream, &more));
    }
    let rest = data_until(&mut raw, 1, ALL - first.len());
    assert_eq!(rest.map(|octets| octets.len()), Ok(ALL - first.len()));
}

/// A request that never comes to its end is told so, and logged, whatever its method: POST is.
#[test]
fn a_get_without_an_end_is_not_dropped_without_a_word() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).listener("timeouts: { read: 300ms }").start();
    let mut seen = Vec::new();
    for method in ["POST", "GET"] {
        let mut raw = Raw::open(&proxy, b"");
        let mut fields = GET.to_vec();
        fields[0].1 = method;
        raw.write(frame(kind::HEADERS, flag::END_HEADERS, 1, &section(&fields)));
        let first = raw.find(|f| f.stream == 1 && f.kind != kind::WINDOW_UPDATE);
        seen.push((method, first.map(|f| f.kind)));
    }
    let logged = |method: &str| {
        proxy.events("request_completed").iter().filter(|line| line["method"] == method).count()
    };
    eventually(SOON, || logged("POST") == 1);
    let_pass(Duration::from_millis(300));
    assert_eq!(logged("GET"), 1, "what came: {seen:?}");
}

/// A call that watches: the client has said all that it has to say for now, and the server speaks
/// when there is news. Neither side's silence is an end (requirement 3.5: gRPC of all kinds).
fn watching(
    listener: &str,
    pool: &str,
    (pause, count): (Duration, usize),
    ends: bool,
) -> Result<usize, String> {
    let origin = H2Origin::start(move |incoming| async move {
        let Incoming { request, mut respond } = incoming;
        let mut body = request.into_body();
        let mut head = http::Response::new(());
        let kind = "application/grpc".parse().expect("a value");
        head.headers_mut().insert("content-type", kind);
        let Ok(mut stream) = respond.send_response(head, false) else { return };
        let _ = body.data().await;
        for _ in 0..count {
            tokio::time::sleep(pause).await;
            if upload(&mut stream, "news!".into(), false).await.is_err() {
                return;
            }
        }
        let mut trailers = http::HeaderMap::new();
        trailers.insert("grpc-status", "0".parse().expect("a value"));
        let _ = stream.send_trailers(trailers);
    });
    let proxy = to(&[&origin.url()]).listener(listener).pool(pool).start();
    let conn = Conn::open(&proxy);
    let mut asked = request("POST", "/pkg.Watcher/Watch");
    asked.headers_mut().insert("content-type", "application/grpc".parse().expect("a value"));
    asked.headers_mut().insert("te", "trailers".parse().expect("a value"));
    let (response, mut stream) = conn.begin(asked, false);
    stream.send_data("watch".into(), ends).expect("it is taken");
    let got = wait(async {
        let (_, body) = response.await?.into_parts();
        content(body).await
    });
    let lines = proxy.events("request_completed");
    let reasons: Vec<_> = lines.iter().map(|line| line["reason"].clone()).collect();
    drop(stream);
    match got {
        Ok((octets, trailers)) if trailers.is_some() => Ok(octets.len()),
        Ok((octets, _)) => Err(format!("{} octets without trailers {reasons:?}", octets.len())),
        Err(e) => Err(format!("{e} {reasons:?}")),
    }
}

#[test]
fn a_watching_client_may_be_silent_while_the_server_speaks() {
    let each = (Duration::from_millis(100), 15);
    let got = watching("timeouts: { read: 500ms }", "response_header_timeout: 30s", each, false);
    assert_eq!(got, Ok(15 * 5));
}

#[test]
fn a_server_with_no_news_for_a_watching_client_may_be_silent() {
    let each = (Duration::from_millis(1200), 2);
    let got = watching("timeouts: { read: 30s }", "response_header_timeout: 500ms", each, false);
    assert_eq!(got, Ok(2 * 5));
}

/// A call with one question and many answers.
#[test]
fn a_server_with_no_news_for_a_client_that_has_ended_may_be_silent() {
    let each = (Duration::from_millis(1200), 2);
    let got = watching("timeouts: { read: 30s }", "response_header_timeout: 500ms", each, true);
    assert_eq!(got, Ok(2 * 5));
}

/// A client that opens its window for each part that it has read, on the stream and on the
/// connection, as some do (Dart's library did): that is what it was sent, and no flood. D9 allows
/// that to grow with the DATA frames that were sent, as Envoy does.
#[test]
fn a_client_that_acknowledges_each_small_part_is_no_flood() {
    const PARTS: usize = 2500;
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        for _ in 0..PARTS {
            let_pass(Duration::from_millis(1));
            if !call.send("14\r\n01234567890123456789\r\n") {
                return Then::Close;
            }
        }
        call.send("0\r\n\r\n");
        Then::Next
    });
    let proxy = over(&[&origin]).start();
    let mut raw = Raw::open(&proxy, b"");
    let flags = flag::END_HEADERS | flag::END_STREAM;
    raw.write(frame(kind::HEADERS, flags, 1, &section(&GET)));
    let (mut frames, mut octets) = (0, 0);
    loop {
        let next = raw.find(|f| f.stream == 1 || f.kind == kind::GOAWAY);
        let next = next.expect("the answer comes to its end");
        assert!(
            next.kind != kind::GOAWAY && next.kind != kind::RST_STREAM,
            "code {} after {frames} DATA frames of {octets} octets",
            next.code()
        );
        if next.kind == kind::DATA && !next.payload.is_empty() {
            frames += 1;
            octets += next.payload.len();
            let by = (next.payload.len() as u32).to_be_bytes();
            for stream in [0, 1] {
                raw.write(frame(kind::WINDOW_UPDATE, 0, stream, &by));
            }
        }
        if next.ends() {
            break;
        }
    }
    assert_eq!(octets, PARTS * 20);
}

/// Promised: "What the proxy answers itself is a gRPC status, too."
#[test]
fn a_call_with_too_many_fields_is_told_so_in_its_own_way() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let mut asked = request("POST", "/pkg.S/M");
    asked.headers_mut().insert("content-type", "application/grpc".parse().expect("a value"));
    asked.headers_mut().insert("te", "trailers".parse().expect("a value"));
    for n in 0..120 {
        let name: http::HeaderName = format!("x-{n}").parse().expect("a name");
        asked.headers_mut().insert(name, "1".parse().expect("a value"));
    }
    let got = Conn::open(&proxy).ask(asked).expect("an answer");
    assert_eq!((got.status, got.get("grpc-status").is_some()), (200, true), "{got:?}");
}
