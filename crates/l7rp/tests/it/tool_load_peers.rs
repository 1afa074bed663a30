//! `l7rp load` beside other load tools, and over HTTP/2 and TLS. Servers are the judges.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use bytes::Bytes;
use h2::Reason;
use http::Response;
use l7rp_testkit::{Origin, Proxy, reply};

use crate::http2_goaway::{goaway, ok, reset};
use crate::http2_tools::{H2Origin, code, raw_origin, taken};
use crate::peers_tls::run;
use crate::setup::{assert_counts, over, quiet};
use crate::tls_kit::{Ca, tls};
use crate::tool_load::{count, errors, good, load, us};

/// A proxy that speaks TLS for 127.0.0.1.
fn secured(origin: &Origin) -> (Ca, Proxy) {
    let ca = Ca::new("own");
    let pair = ca.issue("127.0.0.1", &["127.0.0.1"]);
    let proxy = over(&[origin]).listener(&tls(&[&pair], "")).start();
    (ca, proxy)
}

#[test]
fn each_version_over_tls() {
    let origin = Origin::start(reply::name("x"));
    let (ca, proxy) = secured(&origin);
    let url = format!("https://{}/", proxy.address());
    let trust = format!("--cacert {}", ca.file().display());
    for (line, http, connections) in [
        (format!("-c 4 {trust}"), "1.1", 4),
        ("-c 4 --insecure".to_owned(), "1.1", 4),
        (format!("-c 2 --new-connections {trust}"), "1.1", 100),
        (format!("-c 10 --http2 --streams 4 {trust}"), "2", 3),
        (format!("-c 10 --http2 --streams 4 --rate 2000 {trust}"), "2", 3),
    ] {
        let before = origin.requests();
        let json = good(&format!("--requests 100 {line}"), &url);
        assert_eq!((origin.requests() - before, &json["answers"]), (100, &100.into()), "{line}");
        assert_eq!(
            (&json["http"], &json["connections_opened"]),
            (&http.into(), &connections.into())
        );
    }
    quiet(&proxy);
}

#[test]
fn http2_by_prior_knowledge_carries_bodies_both_ways() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).start();
    let url = format!("http://{}/", proxy.address());
    let json = good("--http2 --streams 5 -c 10 --requests 40 --body-size 300001", &url);
    assert_eq!((origin.requests(), &json["connections_opened"]), (40, &2.into()));
    assert!(origin.seen().iter().all(|seen| seen.message.body.len() == 300_001));
    assert_eq!(count(&json["sent_bytes"]), 40 * 300_001);
    assert!(count(&json["received_bytes"]) > 40 * 300_001, "{json:#}");
    quiet(&proxy);
}

#[test]
fn http2_has_no_fields_of_a_connection() {
    let origin = Origin::start(reply::name("x"));
    for field in ["Upgrade:x", "keep-alive:1", "Proxy-Connection:x", "TE:gzip", "Connection:x"] {
        let told = load(&format!("--http2 --requests 1 -c 1 -H {field}"), &origin.url());
        assert_eq!((told.code, told.out.as_str()), (Some(2), ""), "{field}: {}", told.err);
    }
    assert_eq!(origin.accepted(), 0);
}

#[test]
fn http2_streams_that_fail_are_told() {
    let resets = H2Origin::start(|mut incoming| async move {
        incoming.respond.send_reset(Reason::INTERNAL_ERROR);
    });
    let cut = H2Origin::start(|mut incoming| async move {
        let answer = incoming.respond.send_response(Response::new(()), false);
        let mut body = answer.expect("the peer is there");
        body.send_data(Bytes::from_static(b"half"), false).expect("the peer is there");
        body.send_reset(Reason::INTERNAL_ERROR);
    });
    let hangs = H2Origin::start(|incoming| async move {
        let _incoming = incoming;
        std::future::pending::<()>().await;
    });
    for (url, kind) in [(resets.url(), "reset"), (cut.url(), "reset"), (hangs.url(), "timeout")] {
        let url = url.replace("h2c:", "http:");
        let told = load("--json --http2 --requests 4 -c 2 --timeout 300ms", &url);
        let json = told.json();
        assert_eq!((told.code, count(&json["errors"][kind])), (Some(1), 4), "{json:#}");
        assert_eq!(errors(&json), 4, "{json:#}");
    }
    assert_eq!((resets.accepted(), cut.accepted(), hangs.accepted()), (1, 1, 2));
    // It answers what it does not understand and closes: which of both is met first is chance.
    let plain = Origin::start(reply::raw("HTTP/1.1 400 Bad Request\r\n\r\n"));
    let told = load("--json --http2 --requests 4 -c 2 --timeout 300ms", &plain.url());
    let json = told.json();
    let (strange, cut) = (count(&json["errors"]["protocol"]), count(&json["errors"]["reset"]));
    assert_eq!((told.code, strange + cut, errors(&json)), (Some(1), 4, 4), "{json:#}");
}

#[test]
fn http2_requests_that_were_not_begun_are_sent_again() {
    // Five on each connection, whoever is in flight then.
    let leaves = raw_origin(b"", |mut raw, _| {
        for number in 1..=5 {
            let Some((stream, _)) = taken(&mut raw) else { return };
            raw.write(ok(stream));
            if number == 5 {
                raw.write(goaway(stream, code::NO_ERROR));
            }
        }
        while taken(&mut raw).is_some() {}
    });
    let refuses = raw_origin(b"", |mut raw, _| {
        let mut number = 0;
        while let Some((stream, _)) = taken(&mut raw) {
            number += 1;
            raw.write(if number % 2 == 0 {
                reset(stream, code::REFUSED_STREAM)
            } else {
                ok(stream)
            });
        }
    });
    for url in [leaves, refuses] {
        // More on a connection than five times those that it takes.
        let line = "--http2 --requests 300 -c 32 --streams 32";
        let json = good(line, &url.replace("h2c:", "http:"));
        assert_eq!(json["answers"], 300);
    }
    // Not for ever, if that is all it says.
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = seen.clone();
    let never = raw_origin(b"", move |mut raw, _| {
        while let Some((stream, _)) = taken(&mut raw) {
            counted.fetch_add(1, SeqCst);
            raw.write(reset(stream, code::REFUSED_STREAM));
        }
    });
    let told = load("--json --http2 --requests 3 -c 1", &never.replace("h2c:", "http:"));
    let json = told.json();
    assert_eq!((told.code, count(&json["errors"]["reset"])), (Some(1), 3), "{json:#}");
    assert_eq!(seen.load(SeqCst), 3 * 6);
}

#[test]
fn http2_goes_on_with_another_connection_after_a_timeout() {
    let url = raw_origin(b"", |mut raw, number| {
        while let Some((stream, _)) = taken(&mut raw) {
            if number > 0 {
                raw.write(ok(stream));
            }
        }
    });
    let line = "--json --http2 --requests 10 -c 2 --streams 2 --timeout 500ms";
    let json = load(line, &url.replace("h2c:", "http:")).json();
    assert_eq!((&json["answers"], &json["errors"]["timeout"]), (&8.into(), &2.into()), "{json:#}");
    assert_eq!((&json["connections_opened"], &json["reconnects"]), (&2.into(), &0.into()));
}

#[test]
fn other_tools_count_alike() {
    const AT_ONCE: u64 = 4;
    let origin = Origin::start(reply::slow("x", Duration::from_millis(50)));
    let proxy = over(&[&origin]).start();
    let (url, mut before) = (format!("http://{}/", proxy.address()), 0);
    let mut seen = || {
        quiet(&proxy);
        let all = origin.requests() as u64;
        let more = all - before;
        before = all;
        more
    };
    let json = good(&format!("--duration 1s -c {AT_ONCE}"), &url);
    assert_eq!(count(&json["answers"]), seen());
    let p50 = us(&json["latency"]["p50_us"]);

    let connections = format!("-c{AT_ONCE}");
    let wrk = run(20, "wrk", &["-t1", &connections, "-d1s", "--latency", &url], "");
    let number = |text: &str, before: &str, after: &str| -> String {
        let from = text.find(before).map_or(0, |at| at + before.len());
        let rest = &text[from..];
        rest[..rest.find(after).unwrap_or(0)].split_whitespace().last().unwrap_or("").to_owned()
    };
    let answers: u64 = number(&wrk.out, "", " requests in").parse().expect(&wrk.out);
    // It leaves at the end without waiting for what is in flight.
    let all = seen();
    assert!((answers..=answers + AT_ONCE).contains(&all), "{answers} of {all}: {}", wrk.out);
    let wrk_p50: f64 = number(&wrk.out, "50%", "ms").parse().expect(&wrk.out);
    // Of the same backend both see at least what it takes, and not many times that.
    for milliseconds in [p50 / 1e3, wrk_p50] {
        assert!((50.0..500.0).contains(&milliseconds), "{p50} us, {wrk_p50} ms");
    }

    let json = good(&format!("--http2 --streams 2 -c {AT_ONCE} --requests 40"), &url);
    assert_eq!((count(&json["answers"]), seen()), (40, 40));
    let h2load = run(20, "h2load", &["-n40", "-c2", "-m2", "-t1", &url], "");
    assert!(h2load.out.contains("40 succeeded"), "{}", h2load.out);
    assert_eq!(seen(), 40);
    assert_counts(&proxy, "proxy_requests_total", &[("status", "502")], 0.0);
}
