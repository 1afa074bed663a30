//! `l7rp load`: failed requests are counted by what has failed.

use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use l7rp_testkit::{Origin, SOON, Then, eventually, let_pass, reply};

use crate::setup::PROGRAM;
use crate::tls_kit::Ca;
use crate::tool_load::{begin, count, end, errors, load, signal};

/// Five requests, all of which fail in this way, and the words for it.
#[track_caller]
fn all_fail(line: &str, url: &str, kind: &str, words: &str) {
    let told = load(&format!("--json --requests 5 -c 1 {line}"), url);
    let json = told.json();
    assert_eq!((told.code, count(&json["errors"][kind])), (Some(1), 5), "{json:#}");
    assert_eq!((errors(&json), &json["answers"]), (5, &0.into()), "{json:#}");
    let example = json["error_examples"][kind].as_str().expect("words");
    assert!(example.contains(words), "{example}");
}

#[test]
fn a_target_that_cannot_be_reached_is_told_at_once() {
    let refusing = Origin::refusing();
    for (url, words) in [
        (refusing.url(), "Connection refused"),
        ("http://no-such-name.invalid/".to_owned(), "cannot look up `no-such-name.invalid`"),
    ] {
        let told = load("--duration 1h -c 3", &url);
        assert_eq!((told.code, told.out.as_str()), (Some(1), ""), "{}", told.err);
        assert!(told.err.starts_with("error: ") && told.err.contains(words), "{}", told.err);
    }
}

#[test]
fn a_signal_ends_the_opening_of_connections() {
    for line in ["-c 2", "-c 1 --hold 2"] {
        // Nobody answers to TLS.
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("https://{}/", listener.local_addr().expect("an address"));
        let line = format!("--json --timeout 1h --duration 1h --insecure {line}");
        let mut child = begin(&line, &url);
        let _tool = listener.accept().expect("the tool");
        signal(&child);
        eventually(SOON, || child.try_wait().expect("it is ours").is_some());
        let told = end(child);
        let json = told.json();
        assert_eq!((told.code, &json["interrupted"]), (Some(1), &true.into()), "{json:#}");
        assert_eq!((&json["requests"], errors(&json)), (&0.into(), 0), "{json:#}");
    }
}

#[test]
fn who_lets_nobody_in_is_not_asked_by_all() {
    let closes = Origin::start_through(|_| Err(io::ErrorKind::Other.into()), reply::name("x"));
    let url = closes.url().replace("http:", "https:");
    let told = load("--insecure --duration 1h --threads 1 -c 1000", &url);
    assert_eq!((told.code, told.out.as_str()), (Some(1), ""), "{}", told.err);
    // Those that were opened at once, and some that have followed the first of them.
    assert!(closes.accepted() < 500, "{}", closes.accepted());
}

#[test]
fn open_files_are_those_of_connections() {
    let url = Origin::refusing().url();
    for (line, code, words) in [
        ("-c 1000", 2, "the limit is 200"),
        ("-c 1 --hold 1000", 2, "the limit is 200"),
        ("-c 1000 --http2 --streams 100", 1, "Connection refused"),
    ] {
        let script = format!("ulimit -n 200 && exec {PROGRAM} load {line} {url}");
        let output = Command::new("sh").args(["-c", &script]).output().expect("it runs");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {told}");
        assert!(told.contains(words), "{line}: {told}");
    }
}

#[test]
fn connections_that_are_refused_or_not_made_in_time() {
    all_fail("--new-connections", &Origin::refusing().url(), "connect", "Connection refused");
    let silent = Origin::never_accepting();
    let line = "--new-connections --timeout 200ms";
    all_fail(line, &silent.url(), "connect", "no connection within --timeout");
}

#[test]
fn connections_that_break() {
    let reset = Origin::start(|call| {
        let _ = call.body();
        Then::Reset
    });
    all_fail("", &reset.url(), "reset", "reset by peer");
    all_fail("", &Origin::start(reply::close).url(), "reset", "closed before the answer");
    for half in [
        "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        "HTTP/1.1 200 OK\r\nContent-Le",
    ] {
        let origin = Origin::start(reply::raw(half));
        all_fail("", &origin.url(), "reset", "closed in the middle of the answer");
        assert_eq!(origin.requests(), 5, "none is repeated");
    }
}

#[test]
fn what_cannot_be_opened_again_was_not() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/", listener.local_addr().expect("an address"));
    let server = std::thread::spawn(move || {
        let (mut tcp, _) = listener.accept().expect("the tool");
        // Nobody else is let in, and this one only once.
        drop(listener);
        let _ = tcp.read(&mut [0; 1024]);
        tcp.write_all(reply::ok("x").as_bytes()).expect("the tool");
    });
    let json = load("--json --requests 5 -c 1", &url).json();
    server.join().expect("it ends");
    assert_eq!((&json["answers"], &json["errors"]["connect"]), (&1.into(), &4.into()), "{json:#}");
    assert_eq!((&json["connections_opened"], &json["reconnects"]), (&1.into(), &0.into()));
}

#[test]
fn answers_that_are_not_http() {
    for (answer, words) in [
        ("SSH-2.0-x\r\n\r\n", "malformed_start_line"),
        ("HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "bad_content_length"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", "bad_chunk"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab", "more than the answer"),
        ("HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "not asked for"),
    ] {
        all_fail("", &Origin::start(reply::raw(answer)).url(), "protocol", words);
    }
    let long = format!("HTTP/1.1 200 OK\r\nX: {}", "x".repeat(1 << 20));
    all_fail("", &Origin::start(reply::raw(long)).url(), "protocol", "too_large");
}

#[test]
fn answers_that_are_late() {
    let line = "--timeout 200ms";
    all_fail(line, &Origin::start(reply::hang).url(), "timeout", "--timeout");
    let drips = Origin::start(|call| {
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n");
        while call.send("x") {
            let_pass(Duration::from_millis(5));
        }
        Then::Close
    });
    all_fail(line, &drips.url(), "timeout", "--timeout");
}

#[test]
fn tls_that_fails() {
    let plain = Origin::start(reply::name("x"));
    let url = plain.url().replace("http:", "https:");
    let words = "no TLS handshake within --timeout";
    all_fail("--new-connections --insecure --timeout 300ms", &url, "tls", words);
    let talks = Origin::start_through(
        |mut tcp| tcp.write_all(b"220 ready\r\n").and(Err(io::ErrorKind::Other.into())),
        reply::name("x"),
    );
    let line = "--new-connections --insecure";
    all_fail(line, &talks.url(), "tls", "something else than TLS");
    let ca = Ca::new("own");
    let server = ca.server(&ca.issue("s", &["127.0.0.1"]), false, &[]);
    let secured =
        Origin::start_through(move |tcp| crate::tls_kit::accept(&server, tcp), reply::name("x"));
    let stranger = Ca::new("stranger");
    let line = format!("--new-connections --cacert {}", stranger.file().display());
    all_fail(&line, &secured.url(), "tls", "is not trusted");
    // Without a file that can be read there is no load at all.
    let told = load("--requests 1 --cacert /none.pem", &secured.url());
    assert_eq!(told.code, Some(1));
    assert!(told.err.contains("/none.pem"), "{}", told.err);
}

#[test]
fn some_fail_and_the_others_count() {
    let origin = Origin::start(|call| {
        if call.number % 4 == 3 {
            return Then::Reset;
        }
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok");
        Then::Close
    });
    let told = load("--json --requests 40 -c 1", &origin.url());
    let json = told.json();
    assert_eq!((told.code, count(&json["requests"])), (Some(1), 40), "{json:#}");
    assert_eq!((count(&json["answers"]), count(&json["errors"]["reset"])), (30, 10), "{json:#}");
    let told = load("--requests 40 -c 1", &origin.url());
    assert!(told.out.contains("10 reset"), "{}", told.out);
    assert!(told.out.contains("10 of 40 requests failed. No latency has them"), "{}", told.out);
}

#[test]
fn an_early_answer_ends_an_upload() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n");
        call.until_gone();
        Then::Close
    });
    let told = load("--json --requests 3 -c 1 --body-size 64MiB", &origin.url());
    let json = told.json();
    assert_eq!((told.code, &json["statuses"]["413"]), (Some(0), &3.into()), "{json:#}");
    assert_eq!(origin.accepted(), 3, "what is left of a request is not sent as another");
}
