//! Trailers pass both ways, but for fields that have no business in one.

use l7rp_testkit::{Origin, Then, reply};

use crate::setup::{get, over};

/// Fields that frame, route, authenticate or describe what came before.
const FORBIDDEN: &[&str] = &[
    "Content-Length: 5",
    "transfer-encoding: chunked",
    "Host: evil.test",
    "Connection: close",
    "Upgrade: test",
    "TE: trailers",
    "Trailer: X",
    "Expect: 100-continue",
    "Authorization: Basic eDp5",
    "Cookie: a=b",
    "SET-COOKIE: a=b",
    "Content-Type: text/html",
    "Content-Encoding: gzip",
    "Content-Range: bytes 0-1/2",
    "Cache-Control: public",
    "X-Forwarded-For: 192.0.2.66",
    "Forwarded: for=192.0.2.66",
    "X-Real-IP: 192.0.2.66",
];

fn pairs(trailers: &[(String, String)]) -> Vec<(&str, &str)> {
    trailers.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect()
}

/// A chunked message with these trailer lines, among them the forbidden ones.
fn message(start: &str) -> String {
    let mut message = format!(
        "{start}Trailer: X-First, grpc-status\r\nTransfer-Encoding: chunked\r\n\r\n\
         3\r\nabc\r\n0\r\nX-First: 1\r\n"
    );
    for line in FORBIDDEN {
        message.extend([line, "\r\n"]);
    }
    message + "grpc-status: 0\r\nX-Repeated: a\r\nX-Repeated: b\r\nX-Empty:\r\n\r\n"
}

const KEPT: [(&str, &str); 5] = [
    ("X-First", "1"),
    ("grpc-status", "0"),
    ("X-Repeated", "a"),
    ("X-Repeated", "b"),
    ("X-Empty", ""),
];

#[test]
fn trailers_pass_both_ways_without_the_forbidden_ones() {
    let down = message("HTTP/1.1 200 OK\r\n");
    let origin = Origin::start(reply::raw_kept(down));
    let proxy = over(&[&origin]).one_worker().start();
    let mut client = proxy.client();
    // Whole, and in the smallest pieces.
    let request = message("POST / HTTP/1.1\r\nHost: a.test\r\n");
    for pieces in [request.len(), 1] {
        for piece in request.as_bytes().chunks(pieces) {
            client.send(piece);
        }
        let answer = client.response();
        let sent = origin.last();
        assert_eq!((answer.text().as_str(), sent.text().as_str()), ("abc", "abc"));
        assert_eq!(pairs(&answer.trailers), KEPT);
        assert_eq!(pairs(&sent.trailers), KEPT);
    }
    assert_eq!(origin.accepted(), 1);
}

#[test]
fn the_announcement_of_trailers_passes_with_them() {
    // RFC 9110 §6.6.2: intermediaries do not remove it.
    let origin = Origin::start(reply::raw_kept(message("HTTP/1.1 200 OK\r\n")));
    let proxy = over(&[&origin]).start();
    let answer = proxy.client().ask(message("POST / HTTP/1.1\r\nHost: a.test\r\n"));
    for message in [&origin.last(), &answer] {
        assert_eq!(message.get("trailer"), Some("X-First, grpc-status"), "{}", message.start);
    }
}

#[test]
fn an_old_client_gets_no_trailers() {
    let origin = Origin::start(reply::raw_kept(message("HTTP/1.1 200 OK\r\n")));
    let proxy = over(&[&origin]).start();
    let answer = proxy.client().ask("GET / HTTP/1.0\r\nHost: a.test\r\n\r\n");
    assert_eq!((answer.text().as_str(), answer.is_chunked()), ("abc", false));
}

#[test]
fn a_broken_trailer_breaks_the_message() {
    for line in ["No colon", ": no name", "Bad Name: x", "X-A : b", " folded", "X-A: a\0b"] {
        let chunks = format!("3\r\nabc\r\n0\r\n{line}\r\n\r\n");
        let origin = Origin::start(reply::raw(format!(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}"
        )));
        let proxy = over(&[&origin]).start();
        let answer = proxy.get("/");
        assert_eq!(answer.status(), 502, "{line}");
        let before = origin.requests();
        let head = "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n";
        let answer = proxy.client().ask(format!("{head}{chunks}"));
        assert_eq!(answer.status(), 400, "{line}");
        assert_eq!(answer.get("connection"), Some("close"), "{line}");
        assert_eq!(origin.requests(), before, "{line}");
    }
}

#[test]
fn whether_trailers_are_wanted_is_told_to_the_upstream() {
    let origin = Origin::start(|call| {
        call.send(reply::ok("x"));
        Then::Next
    });
    let proxy = over(&[&origin]).start();
    for (lines, passed) in [
        ("TE: trailers\r\nConnection: TE\r\n", true),
        ("Connection: keep-alive, te\r\nTE: Trailers\r\n", true),
        ("TE: gzip;q=0.5, trailers\r\nConnection: TE\r\n", true),
        ("TE: gzip\r\nConnection: TE\r\n", false),
        ("", false),
    ] {
        assert_eq!(proxy.client().ask(get("a.test", "/", lines)).status(), 200);
        let request = origin.last();
        let expected = passed.then_some("trailers");
        assert_eq!(request.get("te"), expected, "{lines}");
        let named = request.get("connection").is_some_and(|c| c.eq_ignore_ascii_case("te"));
        assert_eq!(named, passed, "{lines}");
    }
}
