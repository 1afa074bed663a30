//! Heads of HTTP/2 become heads of HTTP/1.1 that mean the same, or are refused: nothing in them may
//! be taken for something else behind the proxy.

use bytes::Bytes;
use h2::{Reason, RecvStream};
use http::{HeaderValue, Request};
use l7rp_testkit::{Origin, Proxy, SOON, Then, eventually, reply};

use crate::http2_tools::{
    Conn, Frame, GET, Raw, code, flag, frame, get_frame, kind, request, section, upload, wait,
    whole,
};
use crate::setup::{in_flight, over, quiet};

type Fields<'a> = [(&'a str, &'a str)];

/// An upstream and a proxy in front of it.
fn echoing() -> (Origin, Proxy) {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).start();
    (origin, proxy)
}

/// GET, with these fields in place of those with the same names, or behind them.
fn with<'a>(fields: &Fields<'a>) -> Vec<(&'a str, &'a str)> {
    let mut all: Vec<_> = GET.to_vec();
    for (name, value) in fields {
        match all.iter_mut().find(|(n, _)| n == name) {
            Some(old) => old.1 = value,
            None => all.push((name, value)),
        }
    }
    all
}

fn without(name: &str, fields: &Fields<'static>) -> Vec<(&'static str, &'static str)> {
    GET.into_iter().filter(|(n, _)| *n != name).chain(fields.iter().copied()).collect()
}

/// Whether a stream was reset for what was said on it, or answered with a 400 (an index of RFC 7541).
fn refuses(end: &Frame, answer: &Frame) -> bool {
    let by_answer = answer.kind == kind::HEADERS && answer.payload.first() == Some(&0x8c);
    by_answer || end.kind == kind::RST_STREAM && end.code() == code::PROTOCOL_ERROR
}

/// Sends a head; what comes first on its stream, and last.
#[track_caller]
fn said(raw: &mut Raw, stream: u32, octets: &[u8]) -> (Frame, Frame) {
    raw.write(octets);
    let first = raw.find(|f| f.stream == stream && f.kind != kind::WINDOW_UPDATE);
    let first = first.expect("something comes");
    let last = if first.ends() || first.kind == kind::RST_STREAM {
        first.clone()
    } else {
        raw.end_of(stream)
    };
    (first, last)
}

/// Each of these heads is refused, and neither the connection nor the upstream knows of it.
#[track_caller]
fn all_refused(heads: &[Vec<(&str, &str)>]) {
    let (origin, proxy) = echoing();
    let mut raw = Raw::open(&proxy, b"");
    for (n, fields) in heads.iter().enumerate() {
        let stream = 1 + 4 * n as u32;
        let flags = flag::END_HEADERS | flag::END_STREAM;
        let octets = frame(kind::HEADERS, flags, stream, &section(fields));
        let (first, last) = said(&mut raw, stream, &octets);
        assert!(refuses(&last, &first), "{fields:?}: {first:?} {last:?}");
        assert_eq!(origin.requests(), n, "{fields:?}");
        let (first, last) = said(&mut raw, stream + 2, &get_frame(stream + 2));
        assert!(first.payload[0] == 0x88 && last.ends(), "{fields:?}: {first:?} {last:?}");
    }
    quiet(&proxy);
}

/// Each of these heads is refused, if need be with the connection, and no upstream sees it.
#[track_caller]
fn none_passes(heads: &[Vec<(&str, &str)>]) {
    let (origin, proxy) = echoing();
    for fields in heads {
        let mut raw = Raw::open(&proxy, b"");
        let flags = flag::END_HEADERS | flag::END_STREAM;
        raw.write(frame(kind::HEADERS, flags, 1, &section(fields)));
        let first = raw.find(|f| f.stream == 1 || f.kind == kind::GOAWAY);
        let first = first.expect("it is told why");
        let away = first.kind == kind::GOAWAY && first.code() != code::NO_ERROR;
        assert!(away || refuses(&first, &first), "{fields:?}: {first:?}");
        assert_eq!(origin.requests(), 0, "{fields:?}");
    }
    assert_eq!(Conn::open(&proxy).get("/").status, 200);
    quiet(&proxy);
}

#[test]
fn crumbs_of_cookies_become_one_field() {
    let (origin, proxy) = echoing();
    let conn = Conn::open(&proxy);
    let mut asked = request("GET", "/");
    for crumb in ["a=1", "session_id=S", "b=\"x; y\""] {
        asked.headers_mut().append("cookie", crumb.parse().expect("a value"));
    }
    assert_eq!(conn.ask(asked).expect("an answer").status, 200);
    assert_eq!(origin.last().all("cookie"), ["a=1; session_id=S; b=\"x; y\""]);
    let mut asked = request("GET", "/");
    asked.headers_mut().append("cookie", "a=1; b=2".parse().expect("a value"));
    assert_eq!(conn.ask(asked).expect("an answer").status, 200);
    assert_eq!(origin.last().all("cookie"), ["a=1; b=2"]);
}

#[test]
fn the_authority_is_the_host() {
    let (origin, proxy) = echoing();
    let mut raw = Raw::open(&proxy, b"");
    let heads = [
        (with(&[(":authority", "b.test:8080")]), "b.test:8080"),
        (with(&[("host", "a.test")]), "a.test"),
        (without(":authority", &[("host", "c.test")]), "c.test"),
    ];
    for (n, (fields, host)) in heads.into_iter().enumerate() {
        let stream = 1 + 2 * n as u32;
        let octets = frame(kind::HEADERS, 5, stream, &section(&fields));
        let (first, _) = said(&mut raw, stream, &octets);
        assert_eq!(first.payload[0], 0x88, "{fields:?}");
        assert_eq!(origin.last().all("host"), [host], "{fields:?}");
    }
}

#[test]
fn a_host_that_is_not_the_authority_is_refused() {
    all_refused(&[
        with(&[("host", "b.test")]),
        [with(&[("host", "a.test")]), vec![("host", "a.test")]].concat(),
        without(":authority", &[]),
        without(":authority", &[("host", "")]),
        with(&[(":authority", "user@a.test")]),
        with(&[(":authority", "a.test:99999")]),
        with(&[(":authority", "a.test,b.test")]),
        with(&[(":authority", "a test")]),
    ]);
}

#[test]
fn fields_that_are_about_a_connection_are_refused() {
    all_refused(&[
        with(&[("connection", "close")]),
        with(&[("keep-alive", "timeout=5")]),
        with(&[("proxy-connection", "close")]),
        with(&[("transfer-encoding", "chunked")]),
        with(&[("upgrade", "websocket")]),
        with(&[("te", "gzip")]),
    ]);
}

#[test]
fn names_and_values_that_would_end_a_line_are_refused() {
    none_passes(&[
        with(&[("X-Upper", "x")]),
        with(&[("x y", "x")]),
        with(&[("x:y", "x")]),
        with(&[("", "x")]),
        with(&[("x\r\ny", "x")]),
        with(&[("x", "a\r\nb: c")]),
        with(&[("x", "a\nb: c")]),
        with(&[("x", "a\0b")]),
        with(&[(":path", "/a\r\nb: c")]),
        with(&[(":authority", "a.test\r\nb: c")]),
    ]);
}

#[test]
fn bad_pseudo_fields_are_refused() {
    none_passes(&[
        without(":method", &[]),
        without(":scheme", &[]),
        without(":path", &[]),
        with(&[(":evil", "x")]),
        with(&[(":status", "200")]),
        without(":path", &[("x", "y"), (":path", "/")]),
        [GET.to_vec(), vec![(":path", "/again")]].concat(),
        with(&[(":path", "")]),
        with(&[(":path", "no-slash")]),
        with(&[(":path", "/a b")]),
        with(&[(":path", "*")]),
        with(&[(":path", "http://other.test/")]),
        with(&[(":method", "GET /x HTTP/1.1")]),
        with(&[(":method", "")]),
    ]);
}

#[test]
fn a_fragment_does_not_reach_the_upstream() {
    let (origin, proxy) = echoing();
    let mut raw = Raw::open(&proxy, b"");
    let octets = frame(kind::HEADERS, 5, 1, &section(&with(&[(":path", "/a#b")])));
    said(&mut raw, 1, &octets);
    assert!(origin.seen().iter().all(|seen| !seen.message.start.contains('#')));
}

#[test]
fn connect_is_refused() {
    let (origin, proxy) = echoing();
    let conn = Conn::open(&proxy);
    let asked = Request::builder().method("CONNECT").uri("a.test:443").body(()).expect("a request");
    assert_eq!(conn.ask(asked).expect("an answer").status, 405);
    assert_eq!(conn.get("/").status, 200);
    assert_eq!(origin.requests(), 1);
}

#[test]
fn an_end_of_its_own_is_no_body_of_a_get() {
    let (origin, proxy) = echoing();
    let mut raw = Raw::open(&proxy, b"");
    for (n, empty) in [(0u32, 1), (1, 3)] {
        let stream = 1 + 2 * n;
        let mut octets = frame(kind::HEADERS, flag::END_HEADERS, stream, &section(&GET));
        for nth in 1..=empty {
            octets.extend(frame(kind::DATA, u8::from(nth == empty), stream, b""));
        }
        let (first, last) = said(&mut raw, stream, &octets);
        assert!(first.payload[0] == 0x88 && last.ends());
        let seen = origin.last();
        assert_eq!((seen.is_chunked(), seen.get("content-length")), (false, None), "{seen:?}");
    }
    // A body that a GET does have is not lost.
    let got = Conn::open(&proxy).post(request("GET", "/"), "body").expect("an answer");
    assert!(got.text().ends_with("\r\n\r\nbody"), "{}", got.text());
    // An empty last frame ends a body once.
    let conn = Conn::open(&proxy);
    for _ in 0..20 {
        let (response, mut stream) = conn.begin(request("POST", "/"), false);
        stream.send_data("body".into(), false).expect("it is taken");
        stream.send_data(Bytes::new(), true).expect("it is taken");
        let got = wait(whole(response)).expect("an answer");
        assert!(got.text().ends_with("\r\n\r\nbody"), "{}", got.text());
    }
    assert_eq!(origin.requests(), 23);
}

#[test]
fn a_length_that_is_not_kept_to_is_an_error_and_no_request() {
    let (origin, proxy) = echoing();
    let mut raw = Raw::open(&proxy, b"");
    let cases = [("10", &b"short"[..]), ("0", b"more"), ("3", b"longer")];
    for (n, (length, body)) in cases.into_iter().enumerate() {
        let stream = 1 + 2 * n as u32;
        let fields = with(&[(":method", "POST"), ("content-length", length)]);
        let mut octets = frame(kind::HEADERS, flag::END_HEADERS, stream, &section(&fields));
        octets.extend(frame(kind::DATA, flag::END_STREAM, stream, body));
        let (first, last) = said(&mut raw, stream, &octets);
        // What is known to be wrong only at the end may have an answer before.
        assert!(refuses(&last, &first) || length == "0", "{length}: {first:?} {last:?}");
        eventually(SOON, || in_flight(&proxy) == 0.0);
    }
    // The upstream can tell that none of them was whole.
    assert!(origin.seen().iter().all(|seen| seen.message.text() != "short"), "{:?}", origin.seen());
    let conn = Conn::open(&proxy);
    assert_eq!(conn.get("/").status, 200);
}

#[test]
fn a_length_that_is_no_number_is_refused() {
    all_refused(&[
        with(&[("content-length", "x")]),
        with(&[("content-length", "4")]),
        with(&[("content-length", "4, 4")]),
        with(&[("content-length", "+0")]),
        [with(&[("content-length", "0")]), vec![("content-length", "1")]].concat(),
    ]);
}

#[test]
fn trailers_are_asked_for() {
    let (origin, proxy) = echoing();
    let conn = Conn::open(&proxy);
    let mut asked = request("GET", "/");
    asked.headers_mut().insert("te", "trailers".parse().expect("a value"));
    assert_eq!(conn.ask(asked).expect("an answer").status, 200);
    let seen = origin.last();
    assert!(seen.get("te").is_none_or(|te| te == "trailers"), "{seen:?}");
}

#[test]
fn trailers_that_would_be_fields_of_the_head_are_not_passed_on() {
    let (origin, proxy) = echoing();
    let mut raw = Raw::open(&proxy, b"");
    let names = [":path", "content-length", "transfer-encoding", "host", "connection"];
    for (n, name) in names.into_iter().enumerate() {
        let stream = 1 + 2 * n as u32;
        let fields = with(&[(":method", "POST")]);
        let mut octets = frame(kind::HEADERS, flag::END_HEADERS, stream, &section(&fields));
        octets.extend(frame(kind::DATA, 0, stream, b"body"));
        octets.extend(frame(kind::HEADERS, 5, stream, &section(&[(name, "5")])));
        said(&mut raw, stream, &octets);
        eventually(SOON, || in_flight(&proxy) == 0.0);
    }
    for seen in origin.seen() {
        assert!(seen.message.trailers.is_empty(), "{seen:?}");
    }
}

#[test]
fn what_is_about_the_connection_to_the_upstream_stays_there() {
    let origin = Origin::start(reply::raw_kept(
        "HTTP/1.1 200 OK\r\nConnection: keep-alive, x-hop\r\nKeep-Alive: timeout=5\r\n\
         X-Hop: 1\r\nX-End: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    ));
    let proxy = over(&[&origin]).start();
    let got = Conn::open(&proxy).get("/");
    assert_eq!((got.text().as_str(), got.get("x-end")), ("ok", Some("2")));
    let hops = ["connection", "keep-alive", "transfer-encoding", "upgrade", "x-hop"];
    assert!(hops.iter().all(|name| got.get(name).is_none()), "{got:?}");
}

#[test]
fn an_upstream_that_switches_unasked_is_not_believed() {
    let origin = Origin::start(reply::told);
    let proxy = over(&[&origin]).start();
    let got = Conn::open(&proxy).get("/upgrade");
    assert_eq!(got.status, 502);
}

/// An upstream that takes every upgrade, and sends back what comes.
fn tunnelling() -> Origin {
    Origin::start(|call| {
        call.send(
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Accept: x\r\nSec-WebSocket-Protocol: chat\r\n\r\n",
        );
        while let Ok(part) = call.wire.read_some(4096) {
            if part.is_empty() || part == b"bye" {
                break;
            }
            call.send(part);
        }
        Then::Close
    })
}

fn websocket() -> Request<()> {
    let mut asked = Request::builder()
        .method("CONNECT")
        .uri("http://a.test/chat")
        .header("sec-websocket-version", "13")
        .header("sec-websocket-protocol", "chat")
        .body(())
        .expect("a request");
    asked.extensions_mut().insert(h2::ext::Protocol::from_static("websocket"));
    asked
}

/// Reads so many octets of a tunnel.
fn read(body: &mut RecvStream, length: usize) -> Vec<u8> {
    let mut all = Vec::new();
    wait(async {
        while all.len() < length {
            let part = body.data().await.expect("more").expect("it lives");
            body.flow_control().release_capacity(part.len()).expect("it is owed");
            all.extend_from_slice(&part);
        }
    });
    all
}

#[test]
fn websockets_pass_in_a_stream() {
    let origin = tunnelling();
    let proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    // The server says with its settings that it may be asked for.
    eventually(SOON, || conn.send.is_extended_connect_protocol_enabled());
    for by_client in [true, false] {
        let (response, mut stream) = conn.begin(websocket(), false);
        let (head, mut body) = wait(response).expect("an answer").into_parts();
        assert_eq!(head.status, 200);
        assert_eq!(
            head.headers.get("sec-websocket-protocol"),
            Some(&HeaderValue::from_static("chat"))
        );
        for name in ["sec-websocket-accept", "connection", "upgrade"] {
            assert!(!head.headers.contains_key(name), "{head:?}");
        }
        let seen = origin.last();
        assert_eq!(
            (seen.start.as_str(), seen.get("upgrade")),
            ("GET /chat HTTP/1.1", Some("websocket"))
        );
        assert_eq!(seen.get("sec-websocket-version"), Some("13"));
        assert!(seen.get("sec-websocket-key").is_some() && !seen.is_chunked(), "{seen:?}");
        for message in [vec![0x81, 0x05, 1, 2, 3], vec![7; 100_000]] {
            wait(upload(&mut stream, message.clone().into(), false)).expect("it is taken");
            assert!(read(&mut body, message.len()) == message);
        }
        assert_eq!(in_flight(&proxy), 1.0);
        let last = if by_client { "" } else { "bye" };
        stream.send_data(last.into(), by_client).expect("it is taken");
        let end = wait(body.data());
        let in_order = |part: Result<Bytes, _>| part.is_ok_and(|part| part.is_empty());
        assert!(end.is_none_or(in_order) && body.is_end_stream());
        eventually(SOON, || in_flight(&proxy) == 0.0 && origin.open() == 0);
    }
}

#[test]
fn a_websocket_that_is_reset_ends_at_the_upstream() {
    let origin = tunnelling();
    let proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    eventually(SOON, || conn.send.is_extended_connect_protocol_enabled());
    let (response, mut stream) = conn.begin(websocket(), false);
    let body = wait(response).expect("an answer").into_body();
    stream.send_reset(Reason::CANCEL);
    drop(body);
    eventually(SOON, || in_flight(&proxy) == 0.0 && origin.open() == 0);
    quiet(&proxy);
}

#[test]
fn a_websocket_that_the_upstream_refuses_is_answered() {
    let origin =
        Origin::start(reply::raw_kept("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno"));
    let proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    eventually(SOON, || conn.send.is_extended_connect_protocol_enabled());
    let (response, _stream) = conn.begin(websocket(), false);
    let got = wait(whole(response)).expect("an answer");
    assert_eq!((got.status, got.text().as_str()), (403, "no"));
    assert_eq!(conn.get("/").status, 403);
}
