//! Clients that shake hands badly, slowly or not at all, and clients that have to say who they
//! are.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use l7rp_testkit::{Client, Origin, Proxy, SOON, eventually, reply};
use rustls::ClientConfig;
use rustls::client::Resumption;

use crate::setup::{assert_counts, get, over, start};
use crate::tls::{fails, plainly};
use crate::tls_kit::{Ca, HOST, Pair, client, secured, shake, tls, try_shake};
use crate::tries::assert_at_rest;

/// A record that begins a handshake, and only a part of it.
const HALF_HELLO: &[u8] = &[22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3, 7, 7, 7, 7, 7];

/// What comes back until the end; `None`: a reset.
fn answer(tcp: &mut TcpStream) -> Option<Vec<u8>> {
    let mut answer = Vec::new();
    match tcp.read_to_end(&mut answer) {
        Ok(_) => Some(answer),
        Err(e) if e.kind() == io::ErrorKind::ConnectionReset => None,
        Err(e) => panic!("it is not closed: {e}"),
    }
}

#[test]
fn half_a_handshake_is_let_go() {
    const LIMIT: Duration = Duration::from_secs(1);
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let pair = ca.issue("a", &[HOST]);
    let timeouts = "timeouts: { read_header: 1s }";
    let proxy = over(&[&origin]).listener(&tls(&[&pair], "")).listener(timeouts).start();
    let mut parts = [&[][..], &[22], HALF_HELLO].map(|part| {
        let mut tcp = plainly(&proxy);
        tcp.write_all(part).expect("it is taken");
        (tcp, Instant::now())
    });
    for (tcp, begun) in &mut parts {
        answer(tcp);
        let took = begun.elapsed();
        assert!(took > LIMIT / 2 && took < SOON, "{took:?}");
    }
    fails(&proxy, "timeout", 3.0);
    // After the handshake the time for the head begins.
    let mut silent = client(&Arc::new(ca.client()), &proxy);
    assert_eq!(silent.send("GET / HT").response().status(), 408);
    assert!(silent.is_closed_within(SOON));
    drop(silent);
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
}

#[test]
fn slow_octets_do_not_lengthen_the_time_for_a_handshake() {
    let origin = Origin::start(reply::name("x"));
    let pair = Ca::new("ca");
    let issued = pair.issue("a", &[HOST]);
    let timeouts = "timeouts: { read_header: 400ms }";
    let proxy = over(&[&origin]).listener(&tls(&[&issued], "")).listener(timeouts).start();
    let mut tcp = plainly(&proxy);
    tcp.write_all(HALF_HELLO).expect("it is taken");
    let begun = Instant::now();
    // Octets go on until nobody takes them any more.
    eventually(SOON, || {
        l7rp_testkit::let_pass(Duration::from_millis(20));
        tcp.write_all(&[7]).is_err()
    });
    assert!(begun.elapsed() < SOON / 2, "{:?}", begun.elapsed());
    fails(&proxy, "timeout", 1.0);
}

#[test]
fn many_halves_of_handshakes_hold_up_nobody() {
    const MANY: usize = 500;
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let pair = ca.issue("a", &[HOST]);
    let timeouts = "timeouts: { read_header: 60s }";
    let proxy = over(&[&origin]).listener(&tls(&[&pair], "")).listener(timeouts).start();
    let config = Arc::new(ca.client());
    let halves: Vec<_> = (0..MANY)
        .map(|n| {
            let mut tcp = plainly(&proxy);
            tcp.write_all(if n % 2 == 0 { HALF_HELLO } else { &[] }).expect("it is taken");
            tcp
        })
        .collect();
    assert_counts(&proxy, "proxy_connections", &[], MANY as f64);
    // Much shorter than the time that the others have.
    let begun = Instant::now();
    for _ in 0..20 {
        assert_eq!(client(&config, &proxy).get("/").text(), "x");
    }
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    drop(halves);
    fails(&proxy, "closed", MANY as f64);
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
    assert_at_rest(&proxy);
}

#[test]
fn http_to_the_port_of_tls_is_told_so() {
    let origin = Origin::start(reply::name("x"));
    let (_ca, proxy, config) = secured(&origin);
    let large = format!("POST / HTTP/1.1\r\nContent-Length: 50000\r\n\r\n{}", "x".repeat(50_000));
    for (n, request) in [get(HOST, "/", ""), "GET".into(), large].into_iter().enumerate() {
        let mut client = proxy.client();
        let answer = client.ask(&request);
        assert_eq!(answer.status(), 400, "{answer:?}");
        assert_eq!(answer.text(), "This port speaks TLS: use https://\n");
        assert_eq!(answer.get("connection"), Some("close"));
        assert!(client.is_closed_within(SOON));
        drop(client);
        fails(&proxy, "plaintext_http", n as f64 + 1.0);
    }
    assert_eq!(origin.requests(), 0);
    assert_eq!(client(&config, &proxy).get("/").text(), "x");
}

#[test]
fn what_is_no_tls_is_closed_and_counted() {
    let origin = Origin::start(reply::name("x"));
    let (_ca, proxy, config) = secured(&origin);
    let count =
        |reason| proxy.metrics().sum("proxy_tls_handshake_failures_total", &[("reason", reason)]);
    // Nothing that begins as a handshake or a request does.
    for first in [0, 1, 20, 21, 23, 0x80, 0xff] {
        let mut tcp = plainly(&proxy);
        tcp.write_all(&[first; 100]).expect("it is taken");
        assert!(answer(&mut tcp).is_none_or(|answer| answer.is_empty()), "{first}");
    }
    eventually(SOON, || count("not_tls") == 7.0);
    // A record of a handshake in which there is none.
    for rest in [[3, 1, 0, 4, 99, 0, 0, 0], [3, 3, 0, 4, 11, 0, 0, 0], [9, 9, 0, 4, 1, 0, 0, 0]] {
        let mut tcp = plainly(&proxy);
        tcp.write_all(&[22]).expect("it is taken");
        tcp.write_all(&rest).expect("it is taken");
        // At most an alert.
        assert!(answer(&mut tcp).is_none_or(|answer| matches!(answer.len(), 0 | 7)));
    }
    eventually(SOON, || count("malformed") == 3.0);
    plainly(&proxy);
    eventually(SOON, || count("closed") == 1.0);
    Client::from(plainly(&proxy)).reset();
    eventually(SOON, || count("reset") == 1.0);
    // Nothing of all this is a line in the log.
    assert!(proxy.lines().iter().all(|line| line["event"] != "request_completed"));
    assert_eq!(client(&config, &proxy).get("/").text(), "x");
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
}

#[test]
fn tls_to_a_port_without_it_is_refused() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let config = Arc::new(Ca::new("ca").client());
    assert!(try_shake(&config, proxy.address(), HOST).is_err());
    assert_counts(&proxy, "proxy_bad_requests_total", &[], 1.0);
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
    assert_eq!((proxy.get("/").text().as_str(), origin.requests()), ("x", 1));
}

/// A proxy that asks for certificates of the CA; in this mode.
fn guarded(origin: &Origin, ca: &Ca, mode: &str) -> Proxy {
    let auth = format!(", client_auth: {{ ca_file: \"{}\", mode: {mode} }}", ca.file().display());
    over(&[origin]).listener(&tls(&[&ca.issue("a", &[HOST])], &auth)).start()
}

/// Both versions of TLS of a client that shows this certificate.
fn showing(ca: &Ca, own: Option<&Pair>) -> [Arc<ClientConfig>; 2] {
    [&rustls::version::TLS12, &rustls::version::TLS13]
        .map(|version| Arc::new(ca.client_of(&[version], own)))
}

/// What comes of a request; in TLS 1.3 it is sent before the client knows.
fn outcome(config: &Arc<ClientConfig>, proxy: &Proxy) -> Result<u16, String> {
    let ask = || {
        let mut client = try_shake(config, proxy.address(), HOST)?.client;
        // It may be closed already.
        let _ = client.wire.write(get(HOST, "/", "").as_bytes());
        client.try_response()
    };
    ask().map(|answer| answer.status()).map_err(|e| e.to_string())
}

#[test]
fn clients_say_who_they_are_where_they_must() {
    let origin = Origin::start(reply::name("x"));
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let (good, bad) = (ca.issue("alice", &["alice.test"]), other.issue("eve", &["eve.test"]));
    let old = ca.issue_with("old", &["old.test"], |params| {
        params.not_after = rcgen::date_time_ymd(2020, 1, 2);
    });
    let proxy = guarded(&origin, &ca, "require");
    let count =
        |reason| proxy.metrics().sum("proxy_tls_handshake_failures_total", &[("reason", reason)]);
    for config in &showing(&ca, Some(&good)) {
        assert_eq!(outcome(config, &proxy), Ok(200));
    }
    for config in &showing(&ca, None) {
        assert!(outcome(config, &proxy).is_err());
    }
    eventually(SOON, || count("client_certificate_missing") == 2.0);
    for config in [&bad, &old].iter().flat_map(|own| showing(&ca, Some(own))) {
        assert!(outcome(&config, &proxy).is_err());
    }
    eventually(SOON, || count("client_certificate_refused") == 4.0);
    assert_eq!(origin.requests(), 2, "nothing of the others has come here");
    assert_counts(&proxy, "proxy_requests_total", &[], 2.0);
}

#[test]
fn clients_may_say_who_they_are() {
    let origin = Origin::start(reply::name("x"));
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let (good, bad) = (ca.issue("alice", &["alice.test"]), other.issue("eve", &["eve.test"]));
    let proxy = guarded(&origin, &ca, "optional");
    for config in [Some(&good), None].iter().flat_map(|own| showing(&ca, *own)) {
        assert_eq!(outcome(&config, &proxy), Ok(200));
    }
    for config in &showing(&ca, Some(&bad)) {
        assert!(outcome(config, &proxy).is_err());
    }
    fails(&proxy, "client_certificate_refused", 2.0);
    assert_eq!(origin.requests(), 4);
}

#[test]
fn a_ticket_of_an_open_door_opens_no_other() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let pair = ca.issue("a", &[HOST]);
    let auth = format!(", client_auth: {{ ca_file: \"{}\", mode: require }}", ca.file().display());
    let open = over(&[&origin]).listener(&tls(&[&pair], "")).yaml();
    let closed = over(&[&origin]).listener(&tls(&[&pair], &auth)).yaml();
    let proxy = start(&open);
    let mut configs = showing(&ca, None);
    for config in &mut configs {
        let mut resuming = ClientConfig::clone(config);
        resuming.resumption = Resumption::in_memory_sessions(32);
        *config = Arc::new(resuming);
        for resumed in [false, true] {
            let mut shaken = shake(config, proxy.address(), HOST);
            assert_eq!((shaken.resumed, shaken.client.get("/").status()), (resumed, 200));
        }
    }
    proxy.reload(&closed);
    for config in &configs {
        assert!(outcome(config, &proxy).is_err());
    }
    fails(&proxy, "client_certificate_missing", 2.0);
}

#[test]
fn cas_of_clients_at_the_same_path_are_replaced() {
    let origin = Origin::start(reply::name("x"));
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let (alice, eve) = (ca.issue("alice", &["alice.test"]), other.issue("eve", &["eve.test"]));
    let [alice, eve] =
        [&alice, &eve].map(|own| Arc::new(ca.client_of(rustls::ALL_VERSIONS, Some(own))));
    let served = ca.path("clients.pem");
    std::fs::copy(ca.file(), &served).expect("a file");
    let auth = format!(", client_auth: {{ ca_file: \"{}\", mode: require }}", served.display());
    let proxy = over(&[&origin]).listener(&tls(&[&ca.issue("a", &[HOST])], &auth)).start();
    let mut open = client(&alice, &proxy);
    assert_eq!((outcome(&alice, &proxy), outcome(&eve, &proxy).is_err()), (Ok(200), true));
    std::fs::copy(other.file(), &served).expect("a file");
    assert_eq!(proxy.hang_up()["event"], "config_reloaded");
    assert_eq!((outcome(&alice, &proxy).is_err(), outcome(&eve, &proxy)), (true, Ok(200)));
    assert_eq!(open.get("/").status(), 421, "what was proved to the ones before is no proof now");
    std::fs::write(&served, "nobody").expect("a file");
    let event = proxy.hang_up();
    assert_eq!(event["event"], "config_rejected", "{event}");
    assert!(event["errors"].to_string().contains("clients.pem"), "{event}");
    assert_eq!(outcome(&eve, &proxy), Ok(200));
}
