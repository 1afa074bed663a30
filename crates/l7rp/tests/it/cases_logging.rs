//! The cases of logging: whatever is sent, a line is a line and says what was sent; and it says who
//! has failed, at which step and on which connection.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use l7rp_testkit::{
    Call, Client, Message, Origin, Proxy, SOON, Signal, Then, Value, eventually, reply,
};

use crate::log_sink::{Plain, dropped};
use crate::setup::{get, over, post};
use crate::tls_kit::Ca;
use crate::tls_upstream::trusting;
use crate::tries::NEVER_OPENS;

/// How many hostile requests are sent, and by how many clients at once.
const REQUESTS: usize = 10_000;
const CLIENTS: usize = 8;
/// Octets of a path, host or method in a line.
const MAX_TEXT: usize = 1024;

/// Pieces of which texts are made that try to be more than text.
const PIECES: [&[u8]; 16] = [
    b"%0d%0a",
    b"\"}\n{\"event\":\"request_completed\"",
    b"\\\"",
    b"\\u0000",
    b"\"},{\"level\":\"error\"",
    b"\xff\xfe",
    b"\xc3\x28",
    b"\xe2\x80\xa8",
    b"\x1b[2J\x1b[1;1H",
    b"\x7f",
    b"\0",
    b"\r",
    b"\t",
    b"<script>",
    b"${jndi:ldap://x}",
    b"%s%n%x",
];

/// Some of the pieces, each as this makes it.
fn text(rng: &mut Rng, make: fn(&[u8]) -> Vec<u8>) -> Vec<u8> {
    (0..rng.usize(1..4)).flat_map(|_| make(PIECES[rng.usize(..PIECES.len())])).collect()
}

/// As a target may have it.
fn escaped(piece: &[u8]) -> Vec<u8> {
    let is_plain = |b: &u8| b.is_ascii_alphanumeric() || b"%$:/[],".contains(b);
    let escape = |b: &u8| if is_plain(b) { vec![*b] } else { format!("%{b:02X}").into_bytes() };
    piece.iter().flat_map(escape).collect()
}

/// As the value of a field may have it.
fn of_field(piece: &[u8]) -> Vec<u8> {
    piece.iter().copied().filter(|b| !b.is_ascii_control()).collect()
}

/// A request that means no good, and its path.
fn hostile(rng: &mut Rng, number: usize) -> (Vec<u8>, Vec<u8>) {
    let mut path = format!("/n{number}/").into_bytes();
    // Some go beyond what a head may have.
    let as_it_is: fn(&[u8]) -> Vec<u8> = <[u8]>::to_vec;
    let make = if rng.usize(..12) == 0 { as_it_is } else { escaped };
    path.extend(text(rng, make));
    match rng.usize(..100) {
        0 => path.resize(100 << 10, b'p'),
        1..=12 => path.resize(rng.usize(900..3000), b'p'),
        _ => {}
    }
    let methods = [&b"GET"[..], b"PUT", b"!#$%&'*+-.^_`|~", b"X\"Y"];
    let known = if rng.usize(..8) == 0 { 4 } else { 3 };
    let method = methods[rng.usize(..known)];
    let host = match rng.usize(..24) {
        0 => b"a\\\"}".to_vec(),
        1 => text(rng, as_it_is),
        _ => b"a.test".to_vec(),
    };
    let id = match rng.usize(..12) {
        0 => text(rng, as_it_is),
        1 => b"a\r\n b".to_vec(),
        2..=4 => vec![b'i'; 129],
        5 => b"well-formed".to_vec(),
        _ => text(rng, of_field),
    };
    let agent: Vec<u8> = (0x80..=0xff).collect();
    let query = text(rng, escaped);
    let parts: [&[u8]; 13] = [
        method,
        b" ",
        &path,
        b"?token=s3cret",
        &query,
        b" HTTP/1.1\r\nHost: ",
        &host,
        b"\r\nX-Request-ID: ",
        &id,
        b"\r\nUser-Agent: ",
        &agent,
        b"\r\n",
        b"\r\n",
    ];
    (parts.concat(), path)
}

/// An upstream with odd words of its own.
fn odd_upstream() -> Origin {
    Origin::start(|call| {
        if call.body().is_err() {
            return Then::Close;
        }
        let reason: &[u8] = match call.number % 50 {
            0 => b"500 \"}\n{",
            1 => b"500 \x1b[2J",
            2 => b"599 \xff\xfe \"}",
            _ => b"200 \"\\}",
        };
        let head = [b"HTTP/1.1 ", reason, b"\r\nX-Odd: \xff\"}\\\r\nContent-Length: 0\r\n\r\n"];
        call.send(head.concat());
        Then::Next
    })
}

/// Sends its share, one after the other; how many were answered, and how many of them with 400.
fn attack(address: SocketAddr, who: usize, paths: &Mutex<HashMap<usize, Vec<u8>>>) -> (u64, u64) {
    let mut rng = Rng::with_seed(1000 + who as u64);
    let (mut answered, mut bad) = (0, 0);
    let mut client = Client::connect(address);
    for number in (who..REQUESTS).step_by(CLIENTS) {
        let (request, path) = hostile(&mut rng, number);
        paths.lock().unwrap_or_else(PoisonError::into_inner).insert(number, path);
        // What is refused unread may be cut off while it is sent.
        let _ = client.wire.write(&request);
        let answer = client.try_response();
        answered += u64::from(answer.is_ok());
        bad += u64::from(answer.as_ref().is_ok_and(|answer| answer.status() == 400));
        if answer.is_err() || answer.is_ok_and(|answer| answer.get("connection") == Some("close")) {
            client = Client::connect(address);
        }
    }
    (answered, bad)
}

/// The lines about requests, each of which is strictly JSON in visible ASCII.
#[track_caller]
fn lines(file: &Path) -> Vec<Value> {
    let octets = std::fs::read(file).expect("a file");
    let mut all = Vec::new();
    for line in octets.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
        let shown = String::from_utf8_lossy(line);
        assert!(line.iter().all(|b| matches!(b, b' '..=b'~')), "{shown}");
        let value: Value = serde_json::from_slice(line).unwrap_or_else(|e| panic!("{e}: {shown}"));
        assert!(value.is_object() && value["event"].is_string(), "{shown}");
        all.push(value);
    }
    all.retain(|line| line["event"] == "request_completed");
    all
}

/// That a line shows what was sent, and no more of it than is allowed.
#[track_caller]
fn shows(line: &Value, paths: &HashMap<usize, Vec<u8>>) {
    let is_id =
        |id: &str| (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic());
    assert!(line["request_id"].as_str().is_some_and(is_id), "{line}");
    for name in ["method", "host", "path", "route", "upstream", "pool", "reason"] {
        let text = line.get(name).and_then(Value::as_str).unwrap_or_default();
        assert!(text.chars().count() <= MAX_TEXT, "{name} of {line}");
    }
    let path = line["path"].as_str().expect("a path");
    if path.is_empty() {
        // It was refused before it was read that far.
        assert!(line["reason"].is_string(), "{line}");
        return;
    }
    let number = path.strip_prefix("/n").and_then(|rest| rest.split('/').next());
    let number: usize = number.and_then(|n| n.parse().ok()).expect("a number");
    let sent: String = paths[&number].iter().take(MAX_TEXT).map(|&b| char::from(b)).collect();
    assert_eq!(path, sent, "{line}");
}

/// Case `log-injection`.
#[test]
fn log_injection() {
    let origin = odd_upstream();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("log");
    let setup = over(&[&origin]).pool(NEVER_OPENS).top("workers: 2");
    let mut proxy = Plain::start(setup, File::create(&path).expect("a file"));
    let paths = Mutex::new(HashMap::new());
    let (answered, bad) = thread::scope(|scope| {
        let (address, paths) = (proxy.address, &paths);
        let all: Vec<_> =
            (0..CLIENTS).map(|who| scope.spawn(move || attack(address, who, paths))).collect();
        let all = all.into_iter().map(|one| one.join().expect("it ends"));
        all.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    });
    assert!(answered > REQUESTS as u64 * 9 / 10, "{answered} were answered");
    assert!(bad > 500 && answered - bad > 5000, "{bad} of {answered} were refused");
    // A line for each, but for what is no request: of these a few are as good as all.
    let mut left_out = 0;
    eventually(SOON, || {
        left_out = dropped(proxy.admin);
        lines(&path).len() as u64 + left_out == answered
    });
    assert!(left_out > 0 && left_out < bad, "{left_out} of {bad} have no line");
    assert_eq!(proxy.end(Signal::TERM), Some(0));
    let all = lines(&path);
    assert_eq!(all.len() as u64 + left_out, answered);
    let paths = paths.into_inner().unwrap_or_else(PoisonError::into_inner);
    for line in &all {
        shows(line, &paths);
    }
    // Whoever has not sent nonsense has its line.
    let of_requests = all.iter().filter(|line| line["status"] != 400).count() as u64;
    assert_eq!(of_requests, answered - bad);
    let text = std::fs::read_to_string(&path).expect("text");
    assert!(!text.contains("s3cret"));
    assert!(all.iter().any(|line| line["request_id"] == "well-formed"));
}

/// Who has failed, as client and operator are told.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Told {
    reason: String,
    error: String,
    /// Whether its connection was used before; `None`: it had none.
    reused: Option<bool>,
}

/// What is told of a failure of the upstream; an answer by the proxy names the request.
#[track_caller]
fn failed(proxy: &Proxy, path: &str, answer: Option<&Message>, upstream: &str) -> Told {
    let line = proxy.logged_path(path);
    assert_eq!(line["upstream"], upstream, "{line}");
    assert_eq!(line["attempts"], 1, "{line}");
    let reused = line.get("conn_reused").map(|reused| reused.as_bool().expect("a flag"));
    assert_eq!(line.get("conn_age_ms").is_some_and(Value::is_number), reused.is_some(), "{line}");
    let reason = line["reason"].as_str().expect("a reason").to_owned();
    let error = answer.map_or(String::new(), |answer| {
        let id = line["request_id"].as_str().expect("an id");
        assert!(answer.text().contains(id), "{answer:?}");
        let status = answer.get("proxy-status").expect("what has failed");
        assert!(status.contains(&format!("details=\"{reason}\"")), "{status}");
        let error = status.split("error=").nth(1).and_then(|rest| rest.split(';').next());
        error.expect("an error").to_owned()
    });
    Told { reason, error, reused }
}

/// One request to an upstream that fails by itself.
#[track_caller]
fn alone(origin: &Origin, pool: &str) -> Told {
    let proxy = over(&[origin]).pool(pool).start();
    let answer = proxy.get("/");
    failed(&proxy, "/", Some(&answer), &origin.url())
}

/// Closes on a POST, is cut off in the middle of `/cut`, and else does what it is told.
fn by_request(call: &mut Call<'_>) -> Then {
    match call.request.method() {
        "POST" => reply::close(call),
        _ if call.request.target() == "/cut" => {
            call.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf");
            l7rp_testkit::let_pass(Duration::from_millis(100));
            Then::Reset
        }
        _ => reply::told(call),
    }
}

/// Case `log-who-failed`.
#[test]
fn log_who_failed() {
    const PATIENCE: &str = "connect_timeout: 300ms, response_header_timeout: 300ms";
    let mut all = vec![
        alone(&Origin::refusing(), PATIENCE),
        alone(&Origin::never_accepting(), PATIENCE),
        alone(&Origin::start(reply::close), PATIENCE),
        alone(&Origin::start(reply::hang), PATIENCE),
        alone(&Origin::start(reply::raw("garbage\r\n\r\n")), PATIENCE),
    ];
    let alert = Origin::start_through(
        |mut tcp| {
            use std::io::{Read, Write};
            let _ = tcp.read(&mut [0; 4096]);
            // A fatal alert: handshake_failure.
            let _ = tcp.write_all(&[21, 3, 3, 0, 2, 2, 40]);
            Err(std::io::ErrorKind::Other.into())
        },
        reply::name("never"),
    );
    all.push(alone(&alert, &trusting(&Ca::new("ca"), "")));

    let origin = Origin::start(by_request);
    let url = origin.url();
    let proxy = over(&[&origin]).pool(NEVER_OPENS).one_worker().start();
    let mut client = proxy.client();
    // Its own errors are its own: neither a reason nor a word of ours, and the time it took.
    for (path, reused) in [("/502", false), ("/504", true), ("/500", true)] {
        let answer = client.get(path);
        assert_eq!(answer.status().to_string(), path[1..]);
        assert_eq!(answer.get("proxy-status"), None);
        let line = proxy.logged_path(path);
        assert_eq!(line.get("reason"), None, "{line}");
        assert_eq!(
            (&line["upstream"], &line["conn_reused"]),
            (&url.as_str().into(), &reused.into())
        );
        assert!(line["upstream_ms"].is_number() && line["conn_age_ms"].is_number(), "{line}");
    }
    // On a connection that was used before.
    let answer = client.ask(post("/used", "x"));
    assert_eq!(answer.status(), 502);
    all.push(failed(&proxy, "/used", Some(&answer), &url));
    // After the head: that is out, and the client is cut off.
    let mut client = proxy.client();
    assert!(client.send(get("a.test", "/cut", "")).try_response().is_err());
    all.push(failed(&proxy, "/cut", None, &url));

    let told = |reason: &str, error: &str, reused| Told {
        reason: reason.into(),
        error: error.into(),
        reused,
    };
    let expected = [
        told("connect_refused", "connection_refused", None),
        told("connect_timeout", "connection_timeout", None),
        told("upstream_closed", "connection_terminated", Some(false)),
        told("response_timeout", "http_response_timeout", Some(false)),
        told("malformed_start_line", "http_protocol_error", Some(false)),
        told("tls_protocol", "tls_protocol_error", None),
        told("upstream_closed", "connection_terminated", Some(true)),
        told("response_truncated", "", Some(false)),
    ];
    assert_eq!(all, expected);
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), expected.len(), "each is told apart");
}
