//! Bodies pass whole, both ways at once, as fast as the slower side takes them.

use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use l7rp_testkit::{Call, Gate, Origin, SOON, Then, eventually, reply};

use crate::setup::{get, in_flight, over, post, settled};

const LONG: usize = 16 << 20;

/// Octets that do not repeat within any buffer.
fn pattern(length: usize) -> Vec<u8> {
    let words = (0u32..).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes());
    words.take(length).collect()
}

fn sum(data: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(data);
    hasher.finish()
}

fn chunked(data: &[u8], size: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len() + 64);
    for chunk in data.chunks(size) {
        out.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
        out.extend_from_slice(chunk);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"0\r\n\r\n");
    out
}

/// Answers with length and checksum of the request's body.
fn summing(call: &mut Call<'_>) -> Then {
    let Ok(body) = call.body() else { return Then::Close };
    let answer = format!("{} {:x}", body.len(), sum(body));
    call.send(reply::ok(&answer));
    Then::Next
}

#[test]
fn bodies_go_up_with_either_framing() {
    let origin = Origin::start(summing);
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    for size in [0, 1, 5, 70_000, 300_000] {
        let body = pattern(size);
        let expected = format!("{size} {:x}", sum(&body));
        let head = format!("PUT /l HTTP/1.1\r\nHost: a.test\r\nContent-Length: {size}\r\n\r\n");
        client.send(head).send(&body);
        assert_eq!(client.response().text(), expected);
        assert_eq!(origin.last().get("content-length"), Some(size.to_string().as_str()));
        client.send("PUT /c HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n");
        client.send(chunked(&body, 4000));
        assert_eq!(client.response().text(), expected);
        assert!(origin.last().is_chunked());
        assert_eq!(origin.last().get("content-length"), None);
    }
}

#[test]
fn chunks_of_one_octet_and_trailers_pass() {
    let origin = Origin::start(summing);
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n");
    for octet in ["1\r\na\r\n", "1;ext=\"x\"\r\n", "b\r", "\n", "0", "\r\nX-Check: 7\r\n", "\r\n"] {
        client.send(octet);
    }
    assert_eq!(client.response().text(), format!("2 {:x}", sum(b"ab")));
    assert_eq!(origin.last().trailers, [("X-Check".to_owned(), "7".to_owned())]);
}

#[test]
fn bodies_come_down_with_either_framing() {
    for size in [0, 1, 70_000, 300_000] {
        let body = pattern(size);
        let by_length = format!("HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n");
        let in_chunks = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let answers = [
            [by_length.as_bytes(), &body].concat(),
            [in_chunks.as_bytes(), &chunked(&body, 5000)].concat(),
        ];
        for answer in answers {
            let origin = Origin::start(reply::raw_kept(answer));
            let proxy = over(&[&origin]).one_worker().start();
            let mut client = proxy.client();
            for _ in 0..2 {
                let got = client.get("/");
                assert!(got.complete && got.body == body, "{size}");
            }
            assert_eq!(origin.accepted(), 1);
            let line = proxy.logged(|line| line["bytes_out"].as_u64() >= Some(size as u64));
            assert_eq!(line["status"], 200);
        }
    }
}

#[test]
fn trailers_come_down() {
    let origin = Origin::start(reply::raw_kept(
        "HTTP/1.1 200 OK\r\nTrailer: X-Check\r\nTransfer-Encoding: chunked\r\n\r\n\
         2\r\nab\r\n0\r\nX-Check: 7\r\n\r\n",
    ));
    let answer = over(&[&origin]).start().get("/");
    assert_eq!(answer.trailers, [("X-Check".to_owned(), "7".to_owned())]);
}

#[test]
fn long_bodies_pass_whole_in_little_memory() {
    let body = Arc::new(pattern(LONG));
    let down = body.clone();
    let origin = Origin::start(move |call| {
        if call.request.method() != "GET" {
            return summing(call);
        }
        call.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {LONG}\r\n\r\n"));
        call.send(&*down);
        Then::Next
    });
    let proxy = over(&[&origin]).start();
    let before = proxy.resident();
    let got = proxy.get("/down");
    assert!(got.complete && sum(&got.body) == sum(&body));
    let mut client = proxy.client();
    client.send(format!("POST /up HTTP/1.1\r\nHost: a.test\r\nContent-Length: {LONG}\r\n\r\n"));
    client.send(&*body);
    assert_eq!(client.response().text(), format!("{LONG} {:x}", sum(&body)));
    client.send("POST /chunked HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n");
    client.send(chunked(&body, 100_000));
    assert_eq!(client.response().text(), format!("{LONG} {:x}", sum(&body)));
    let grown = proxy.resident().saturating_sub(before);
    // Less than any of the bodies.
    assert!(grown < 12 << 20, "grown by {grown}");
    assert_eq!(proxy.logged_path("/down")["bytes_out"], LONG);
    assert_eq!(proxy.logged_path("/up")["bytes_in"], LONG);
    assert_eq!(proxy.logged_path("/chunked")["bytes_in"], LONG);
}

#[test]
fn both_directions_flow_at_once() {
    // The answer begins before the request ends: each octet up is answered by one down.
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        while let Ok(line) = call.wire.read_until(b"\r\n") {
            if line == b"0\r\n" {
                let _ = call.wire.read_until(b"\r\n");
                break;
            }
            let Ok(octet) = call.wire.read_exact(3) else { break };
            call.send(["1\r\n".as_bytes(), &octet].concat());
        }
        call.send("0\r\n\r\n");
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n");
    client.send("1\r\na\r\n");
    assert_eq!(client.head().status(), 200);
    for octet in ["a", "b", "c"] {
        let chunk = format!("1\r\n{octet}\r\n");
        if octet != "a" {
            client.send(&chunk);
        }
        assert_eq!(client.wire.read_exact(chunk.len()).expect("an echo"), chunk.as_bytes());
    }
    client.send("0\r\n\r\n");
    assert_eq!(client.wire.read_exact(5).expect("the end"), b"0\r\n\r\n");
}

#[test]
fn events_are_not_held_back() {
    let gate = Gate::default();
    let open = gate.clone();
    let origin = Origin::start(move |call| {
        call.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n");
        open.pass();
        call.send("data: 2\n\n");
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", "")).head();
    assert_eq!(client.wire.read_exact(9).expect("an event"), b"data: 1\n\n");
    gate.open();
    assert_eq!(client.wire.read_to_end().expect("the end"), b"data: 2\n\n");
}

#[test]
fn answers_without_a_body_have_none() {
    let origin = Origin::start(|call| {
        let (status, body) = match (call.request.method(), call.request.target()) {
            ("HEAD", _) => ("200 OK\r\nContent-Length: 5", ""),
            (_, "/204") => ("204 No Content", ""),
            (_, "/204-5") => ("204 No Content\r\nContent-Length: 5", ""),
            (_, "/304") => ("304 Not Modified\r\nContent-Length: 5\r\nETag: \"x\"", ""),
            _ => ("200 OK\r\nContent-Length: 5", "hello"),
        };
        call.send(format!("HTTP/1.1 {status}\r\n\r\n{body}"));
        Then::Next
    });
    let proxy = over(&[&origin]).one_worker().start();
    let mut client = proxy.client();
    let head = client.send("HEAD / HTTP/1.1\r\nHost: a.test\r\n\r\n").head();
    assert_eq!((head.status(), head.get("content-length")), (200, Some("5")));
    let answer = client.get("/204");
    assert_eq!((answer.status(), answer.get("content-length")), (204, None));
    let answer = client.get("/304");
    assert_eq!((answer.status(), answer.get("etag")), (304, Some("\"x\"")));
    assert_eq!(client.get("/").text(), "hello");
    assert_eq!(origin.accepted(), 1);
    // One that announces a body may send it: its connection is not used again.
    let answer = client.get("/204-5");
    assert_eq!((answer.status(), answer.get("content-length")), (204, None));
    assert_eq!(client.get("/").text(), "hello");
    assert_eq!(origin.accepted(), 2);
}

#[test]
fn errors_to_head_have_no_body() {
    let origin = Origin::refusing();
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    let head = client.send("HEAD / HTTP/1.1\r\nHost: a.test\r\n\r\n").head();
    assert_eq!(head.status(), 502);
    assert_eq!(client.get("/").status(), 502);
}

#[test]
fn an_early_answer_reaches_a_client_that_still_sends() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 3\r\n\r\nbig");
        call.until_gone();
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    for framing in ["Content-Length: 100000000", "Transfer-Encoding: chunked"] {
        let mut client = proxy.client();
        client.send(format!("POST / HTTP/1.1\r\nHost: a.test\r\n{framing}\r\n\r\n"));
        let mut sender = client.wire.twin();
        let part = format!("8000\r\n{}\r\n", "x".repeat(0x8000));
        // Sends until the proxy has had enough.
        let sending = thread::spawn(move || while sender.write(part.as_bytes()).is_ok() {});
        let answer = client.response();
        assert_eq!((answer.status(), answer.text().as_str()), (413, "big"), "{framing}");
        client.reset();
        sending.join().expect("the sender ends");
    }
    eventually(SOON, || origin.open() == 0 && in_flight(&proxy) == 0.0);
}

#[test]
fn an_upstream_that_answers_and_closes_during_an_upload_is_heard() {
    let origin = Origin::start(reply_and_close);
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1000\r\n\r\nbegin");
    let answer = client.response();
    assert_eq!(answer.status(), 401);
}

fn reply_and_close(call: &mut Call<'_>) -> Then {
    let _ = call.wire.read_exact(5);
    call.send("HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n");
    Then::Close
}

#[test]
fn continue_is_asked_for_and_passed_on() {
    let origin = Origin::start(|call| {
        assert_eq!(call.request.get("expect"), Some("100-continue"));
        call.send("HTTP/1.1 100 Continue\r\n\r\n");
        reply::echo(call)
    });
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    let head =
        "POST / HTTP/1.1\r\nHost: a.test\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n";
    assert_eq!(client.send(head).head().status(), 100);
    let answer = client.send("body").response();
    assert!(answer.status() == 200 && answer.text().ends_with("body"));
    // And refused: the body is never sent.
    let refusing = Origin::start(reply_417);
    let proxy = over(&[&refusing]).start();
    assert_eq!(proxy.client().send(head).head().status(), 417);
}

fn reply_417(call: &mut Call<'_>) -> Then {
    call.send("HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n");
    Then::Close
}

#[test]
fn early_hints_pass_but_not_to_old_clients() {
    let origin = Origin::start(reply::raw_kept(
        "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ));
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    let hint = client.send(get("a.test", "/", "")).head();
    assert_eq!((hint.status(), hint.get("link")), (103, Some("</a>")));
    assert_eq!(client.head().status(), 200);
    let mut old = proxy.client();
    assert_eq!(old.send("GET / HTTP/1.0\r\n\r\n").head().status(), 200);
}

#[test]
fn an_old_client_gets_no_chunks() {
    let origin = Origin::start(reply::raw_kept(
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
    ));
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    let answer = client.ask("GET / HTTP/1.0\r\nHost: a.test\r\nConnection: keep-alive\r\n\r\n");
    assert_eq!((answer.is_chunked(), answer.text().as_str()), (false, "abcde"));
    assert_eq!(answer.get("connection"), Some("close"));
}

#[test]
fn a_client_that_does_not_read_stops_the_upstream() {
    let sent = Arc::new(AtomicUsize::new(0));
    let count = sent.clone();
    let origin = Origin::start(move |call| {
        call.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", 64 << 20));
        let part = vec![b'x'; 64 << 10];
        while count.load(SeqCst) < 64 << 20 && call.send(&part) {
            count.fetch_add(part.len(), SeqCst);
        }
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    let before = proxy.resident();
    let mut client = proxy.client();
    client.send(get("a.test", "/", "")).head();
    let stopped = settled(&sent);
    assert!(stopped < 32 << 20, "the upstream has sent {stopped}");
    let grown = proxy.resident().saturating_sub(before);
    assert!(grown < 4 << 20, "grown by {grown}");
    // And nothing was lost.
    let mut got = 0;
    while got < 64 << 20 {
        got += client.wire.read_some(usize::MAX).expect("more").len();
    }
    assert_eq!(got, 64 << 20);
}

#[test]
fn an_upstream_that_does_not_read_stops_the_client() {
    let gate = Gate::default();
    let open = gate.clone();
    let origin = Origin::start(move |call| {
        open.pass();
        summing(call)
    });
    let proxy = over(&[&origin]).start();
    let before = proxy.resident();
    let mut client = proxy.client();
    client.send(format!("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: {}\r\n\r\n", 64 << 20));
    let sent = Arc::new(AtomicUsize::new(0));
    let (count, mut sender) = (sent.clone(), client.wire.twin());
    let sending = thread::spawn(move || {
        let part = vec![b'x'; 64 << 10];
        while count.load(SeqCst) < 64 << 20 && sender.write(&part).is_ok() {
            count.fetch_add(part.len(), SeqCst);
        }
    });
    let stopped = settled(&sent);
    assert!(stopped < 32 << 20, "the client has sent {stopped}");
    let grown = proxy.resident().saturating_sub(before);
    assert!(grown < 4 << 20, "grown by {grown}");
    gate.open();
    let expected = format!("{} {:x}", 64 << 20, sum(&vec![b'x'; 64 << 20]));
    assert_eq!(client.response().text(), expected);
    sending.join().expect("the sender ends");
}

#[test]
fn posts_keep_their_order_on_one_connection() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    for n in 0..5 {
        let body = n.to_string().repeat(1000);
        assert!(client.ask(post("/", &body)).text().ends_with(&body));
    }
}

#[test]
fn slow_but_steady_bodies_pass_both_ways() {
    let origin = Origin::start(|call| {
        let length = call.body().map_or(0, <[u8]>::len);
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n");
        for _ in 0..8 {
            l7rp_testkit::let_pass(Duration::from_millis(100));
            call.send("y");
        }
        assert_eq!(length, 8);
        Then::Next
    });
    // Each longer in all than any of the times allowed without progress.
    let proxy = over(&[&origin])
        .listener("timeouts: { read: 400ms, write: 400ms, idle: 400ms, read_header: 400ms }")
        .pool("response_header_timeout: 400ms")
        .start();
    let mut client = proxy.client();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 8\r\n\r\n");
    for _ in 0..8 {
        l7rp_testkit::let_pass(Duration::from_millis(100));
        client.send("x");
    }
    assert_eq!(client.response().text(), "yyyyyyyy");
}
