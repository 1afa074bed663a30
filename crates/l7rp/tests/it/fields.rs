//! Fields pass as they were sent; those of one connection do not pass.

use l7rp_testkit::{Message, Origin, reply};

use crate::setup::over;

fn passed<'a>(message: &'a Message, ours: &[&str]) -> Vec<(&'a str, &'a str)> {
    let fields = message.fields.iter().map(|(n, v)| (n.as_str(), v.as_str()));
    fields.filter(|(n, _)| !ours.iter().any(|o| n.eq_ignore_ascii_case(o))).collect()
}

const OURS: &[&str] = &[
    "host",
    "x-forwarded-for",
    "x-forwarded-proto",
    "x-forwarded-host",
    "x-real-ip",
    "x-request-id",
    "content-length",
];

#[test]
fn values_pass_as_sent() {
    let long = "v".repeat(20 << 10);
    let fields = [
        ("X-Empty", ""),
        ("X-Tab", "a\tb"),
        ("X-Dup", "1"),
        ("SOAPAction", "\"\""),
        ("x-lower", "Value, with, commas"),
        ("X-Dup", "2"),
        ("X-UPPER", "x"),
        ("X-Latin", "caf\u{e9}"),
        ("X-Dup", "3"),
        ("X-Long", &long),
        ("Cookie", "a=1; b=2"),
        ("Authorization", "Basic eDp5"),
    ];
    let mut lines = Vec::new();
    for (name, value) in fields {
        lines.extend_from_slice(format!("{name}: ").as_bytes());
        // One octet a character, so that the Latin value is none of UTF-8.
        lines.extend(value.chars().map(|c| c as u8));
        lines.extend_from_slice(b"  \r\n");
    }
    let answer = [b"HTTP/1.1 200 OK\r\n", &lines[..], b"Content-Length: 0\r\n\r\n"].concat();
    let request = [b"GET / HTTP/1.1\r\nHost: a.test\r\n", &lines[..], b"\r\n"].concat();
    let origin = Origin::start(reply::raw_kept(answer));
    let proxy = over(&[&origin]).start();
    let response = proxy.client().ask(request);
    assert_eq!(passed(&origin.last(), OURS), fields);
    assert_eq!(passed(&response, OURS), fields);
}

#[test]
fn repeated_fields_of_answers_are_not_merged() {
    let cookie = format!("big={}", "c".repeat(4096));
    let cookies =
        ["a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT", "b=2; Max-Age=0", &cookie, "d=4", "e=5"];
    let mut head = String::from("HTTP/1.1 200 OK\r\nVary: a\r\nContent-Length: 0\r\n");
    for value in cookies {
        head += &format!("Set-Cookie: {value}\r\n");
    }
    head += "WWW-Authenticate: Basic\r\nVary: b\r\nWWW-Authenticate: Bearer\r\n\r\n";
    let origin = Origin::start(reply::raw_kept(head));
    let answer = over(&[&origin]).start().get("/");
    assert_eq!(answer.all("set-cookie"), cookies);
    assert_eq!(answer.all("vary"), ["a", "b"]);
    assert_eq!(answer.all("www-authenticate"), ["Basic", "Bearer"]);
}

#[test]
fn fields_of_one_connection_do_not_pass() {
    let hop = "Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=9\r\n\
               Proxy-Connection: keep-alive\r\nTE: gzip\r\nUpgrade: h2c\r\nX-End: 1\r\n";
    let origin = Origin::start(reply::raw_kept(format!(
        "HTTP/1.1 200 OK\r\n{hop}Content-Length: 0\r\n\r\n"
    )));
    let proxy = over(&[&origin]).start();
    let request = format!("GET / HTTP/1.1\r\nHost: a.test\r\n{hop}\r\n");
    let answer = proxy.client().ask(request);
    for message in [&origin.last(), &answer] {
        assert_eq!(message.get("x-end"), Some("1"));
        for name in ["x-hop", "keep-alive", "proxy-connection", "te", "upgrade", "connection"] {
            assert_eq!(message.all(name), [""; 0], "{name} in {message:?}");
        }
    }
}

#[test]
fn a_client_cannot_have_ours_removed() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let request = "GET / HTTP/1.1\r\nHost: a.test\r\nAuthorization: x\r\nConnection: close, \
                   X-Forwarded-For, X-Real-IP, Host, X-Request-ID\r\n\r\n";
    assert_eq!(proxy.client().ask(request).status(), 200);
    let request = origin.last();
    assert_eq!(request.get("x-forwarded-for"), Some("127.0.0.1"));
    assert_eq!(request.get("x-real-ip"), Some("127.0.0.1"));
    assert_eq!(request.get("host"), Some("a.test"));
    assert!(request.get("x-request-id").is_some());
}

#[test]
fn trace_context_passes() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let lines = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n\
                 tracestate: a=1\r\nbaggage: k=v\r\n";
    proxy.client().ask(format!("GET / HTTP/1.1\r\nHost: a.test\r\n{lines}\r\n"));
    let request = origin.last();
    assert_eq!(request.get("tracestate"), Some("a=1"));
    assert_eq!(request.get("baggage"), Some("k=v"));
    assert!(request.get("traceparent").is_some_and(|v| v.ends_with("331-01")));
}
