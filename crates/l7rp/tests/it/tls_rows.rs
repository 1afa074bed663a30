//! Crowds at the door of TLS, and rows of the table of faults that other files show in part only:
//! C7, C8, P8, P12, U11, item 15 of section D.3, and cases of the area `tls`.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use l7rp_testkit::{Origin, Proxy, SOON, eventually, reply, within};
use rustls::client::Resumption;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, HandshakeKind};

use crate::bystander::{beside, p99, times_until};
use crate::http2_tools::{GET, Raw, frame, kind, section};
use crate::setup::{assert_counts, assert_failed, get, over};
use crate::tls::{fails, plainly};
use crate::tls_kit::{Ca, HOST, Pair, client, secured, shake, tls, try_shake};
use crate::tls_upstream::trusting;
use crate::tries::assert_at_rest;

/// A record that begins a handshake, and only a part of it.
const HALF_HELLO: &[u8] = &[22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3, 7, 7, 7, 7, 7];

/// Row C7, all of it: a thousand who begin and do not go on, and who are closed in time; others
/// shake hands meanwhile as if they were not there.
#[test]
fn c7_a_thousand_halves_of_handshakes_delay_nobody_and_end() {
    const MANY: usize = 1000;
    const LIMIT: Duration = Duration::from_secs(3);
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let timeouts = "timeouts: { read_header: 3s }";
    let keys = tls(&[&ca.issue("a", &[HOST])], "");
    let proxy = over(&[&origin]).listener(&keys).listener(timeouts).start();
    let config = Arc::new(ca.client());
    let ask = || assert_eq!(client(&config, &proxy).get("/").text(), "x");
    let idle = p99(&mut times_until(&AtomicBool::new(true), 50, ask));
    let (memory, used) = (proxy.resident(), proxy.processor_time());
    let (began, mut times) = beside(ask, || {
        let began = Instant::now();
        let halves: Vec<_> = (0..MANY)
            .map(|n| {
                let mut tcp = plainly(&proxy);
                tcp.write_all(if n % 2 == 0 { HALF_HELLO } else { &[] }).expect("it is taken");
                tcp
            })
            .collect();
        let grown = proxy.resident().saturating_sub(memory);
        assert!(grown < MANY as u64 * (32 << 10), "grown by {grown}");
        // They are still there: it is the proxy that lets go of them.
        eventually(SOON, || proxy.metrics().sum("proxy_connections", &[]) <= 1.0);
        drop(halves);
        began
    });
    let took = began.elapsed();
    assert!(took > LIMIT && took < LIMIT * 3, "{took:?}");
    let busy = p99(&mut times);
    assert!(busy < idle * 2 + Duration::from_millis(400), "{busy:?}, and {idle:?} without");
    fails(&proxy, "timeout", MANY as f64);
    // Who only waits costs no time of a processor; the honest ones do.
    let worked = proxy.processor_time().saturating_sub(used);
    assert!(worked < took + Duration::from_secs(1), "{worked:?}");
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
    assert_at_rest(&proxy);
}

/// Octets of a generator that needs no seed: what they are does not matter.
fn noise(seed: u32, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// Sends this on a connection of its own, and reads to the end: there is one, at once.
#[track_caller]
fn is_let_go(proxy: &Proxy, octets: &[u8]) -> Vec<u8> {
    let mut tcp = plainly(proxy);
    // It may be closed before all of it is taken.
    let _ = tcp.write_all(octets);
    let _ = tcp.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    match tcp.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::ConnectionReset => {}
        Err(e) => panic!("it is not closed: {e}"),
    }
    answer
}

/// How many lines three hundred of these make the proxy write. Nobody's error is worth a line each.
const FEW_LINES: usize = 50;

/// Row C8, at a port without TLS.
#[test]
fn c8_noise_at_a_port_in_cleartext_is_answered_or_closed_without_a_flood_of_lines() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let hello = [HALF_HELLO, &[7; 500]].concat();
    for n in 0..300 {
        let octets = if n % 3 == 0 { hello.clone() } else { noise(n, 600) };
        let answer = is_let_go(&proxy, &octets);
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 400 "), "{answer:?}");
    }
    assert_eq!(proxy.get("/").text(), "x");
    // The last line: all before it are there.
    proxy.logged_path("/");
    let lines = proxy.lines().len();
    assert!(lines < FEW_LINES, "{lines} lines, the last: {:?}", proxy.lines().last());
    assert_eq!(origin.requests(), 1);
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
}

/// Row C8, at a port with TLS.
#[test]
fn c8_noise_at_a_port_with_tls_is_closed_without_a_flood_of_lines() {
    let origin = Origin::start(reply::name("x"));
    let (_ca, proxy, config) = secured(&origin);
    for n in 0..300 {
        let mut octets = noise(n, 600);
        match n % 3 {
            0 => octets[0] = 22,
            1 => octets.splice(0..0, *b"GET / HTTP/1.1\r\n\r\n").for_each(drop),
            _ => {}
        }
        let answer = is_let_go(&proxy, &octets);
        let is_alert = answer.len() == 7 && answer[0] == 21;
        assert!(
            answer.is_empty() || is_alert || answer.starts_with(b"HTTP/1.1 400 "),
            "{answer:?}"
        );
    }
    assert_eq!(client(&config, &proxy).get("/").text(), "x");
    proxy.logged_path("/");
    let lines = proxy.lines().len();
    assert!(lines < FEW_LINES, "{lines} lines, the last: {:?}", proxy.lines().last());
    let failed = proxy.metrics().sum("proxy_tls_handshake_failures_total", &[]);
    assert_eq!(failed, 300.0);
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
}

/// How often it was said that the certificate of P8 is over, wherever somebody looks.
fn warned(proxy: &Proxy) -> usize {
    let lines: String = proxy.lines().iter().map(ToString::to_string).collect();
    (proxy.errors() + &lines).matches("expired at 2020-01-02").count()
}

/// Seconds until the certificate for `a.test` is over.
fn left(proxy: &Proxy) -> f64 {
    let name = "proxy_certificate_expiry_timestamp_seconds";
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_secs_f64();
    proxy.metrics().sum(name, &[("listener", "web"), ("host", HOST)]) - now
}

/// The certificate that is shown is the one that is over.
#[track_caller]
fn is_expired(config: &Arc<ClientConfig>, proxy: &Proxy) {
    let refusal = try_shake(config, proxy.address(), HOST).err().expect("it has expired");
    assert!(refusal.to_string().contains("xpired"), "{refusal}");
    assert!(left(proxy) < 0.0, "{}", left(proxy));
}

/// A certificate that is over, and one that is not.
fn of_two_ages(ca: &Ca) -> [Pair; 2] {
    let old = ca.issue_with("old", &[HOST], |params| {
        params.not_after = rcgen::date_time_ymd(2020, 1, 2);
    });
    [old, ca.issue("good", &[HOST])]
}

/// Row P8: an expired certificate is better than none, and is told of where somebody looks.
/// `peers_tls.rs` has a client that takes it.
#[test]
fn p8_an_expired_certificate_is_served_and_warned_of() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let [old, good] = of_two_ages(&ca);
    let served = Pair { cert: ca.path("served.crt"), key: ca.path("served.key") };
    served.becomes(&old);
    let proxy = over(&[&origin]).listener(&tls(&[&served], "")).start();
    let config = Arc::new(ca.client());
    is_expired(&config, &proxy);
    eventually(SOON, || warned(&proxy) == 1);
    // A better one takes its place.
    served.becomes(&good);
    assert_eq!(proxy.hang_up()["event"], "config_reloaded");
    assert_eq!(client(&config, &proxy).get("/").text(), "x");
    assert!(left(&proxy) > 0.0, "{}", left(&proxy));
}

/// Row P8, where the certificate comes with a reload: nobody looks at a terminal then.
#[test]
fn p8_a_reload_that_brings_an_expired_certificate_warns_of_it() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let [old, good] = of_two_ages(&ca);
    let served = Pair { cert: ca.path("served.crt"), key: ca.path("served.key") };
    served.becomes(&good);
    let proxy = over(&[&origin]).listener(&tls(&[&served], "")).start();
    let config = Arc::new(ca.client());
    assert_eq!((client(&config, &proxy).get("/").status(), warned(&proxy)), (200, 0));
    served.becomes(&old);
    assert_eq!(proxy.hang_up()["event"], "config_reloaded");
    is_expired(&config, &proxy);
    let told = within(SOON / 5, || (warned(&proxy) > 0).then_some(()));
    assert!(told.is_some(), "neither the log nor standard error has a word of it");
}

/// The first flight of a client, which costs the client nothing to send again.
fn hello(config: &Arc<ClientConfig>) -> Vec<u8> {
    let name = ServerName::try_from(HOST).expect("a name");
    let mut end = ClientConnection::new(config.clone(), name).expect("a client");
    let mut flight = Vec::new();
    end.write_tls(&mut flight).expect("a flight");
    flight
}

/// So many clients say hello at once; how long it takes until all have an answer.
fn burst(proxy: &Proxy, flight: &[u8], many: usize) -> Duration {
    let mut all: Vec<TcpStream> = (0..many).map(|_| plainly(proxy)).collect();
    let open = |proxy: &Proxy| proxy.metrics().sum("proxy_connections", &[]);
    // Otherwise they would come one by one, as they are accepted.
    eventually(SOON, || open(proxy) >= many as f64);
    let began = Instant::now();
    for tcp in &mut all {
        tcp.write_all(flight).expect("it is taken");
    }
    for tcp in &mut all {
        let mut first = [0];
        tcp.read_exact(&mut first).expect("an answer");
        assert_eq!(first, [22], "a record of a handshake");
    }
    let took = began.elapsed();
    drop(all);
    eventually(SOON, || open(proxy) <= 1.0);
    took
}

/// Row P12: many handshakes at once, each of which keeps a worker busy, do not go before those who
/// are there. Somebody who had to wait for all of them would wait as long as they take.
#[test]
fn p12_established_connections_are_not_held_up_by_handshakes() {
    const MANY: usize = 300;
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let pair = ca.issue_rsa("a", &[HOST]);
    let proxy = over(&[&origin]).listener(&tls(&[&pair], "")).one_worker().start();
    let config = Arc::new(ca.client());
    let flight = hello(&config);
    let mut kept = client(&config, &proxy);
    let mut ask = || assert_eq!(kept.get("/").text(), "x");
    let idle = p99(&mut times_until(&AtomicBool::new(true), 200, &mut ask));
    let waits = Mutex::new(Vec::new());
    // Only what falls into a burst counts.
    let is_burst = AtomicBool::new(false);
    let ask_and_note = || {
        let (during, began) = (is_burst.load(SeqCst), Instant::now());
        ask();
        if during || is_burst.load(SeqCst) {
            waits.lock().unwrap_or_else(PoisonError::into_inner).push(began.elapsed());
        }
    };
    let (mut bursts, _) = beside(ask_and_note, || {
        let one = |_| {
            is_burst.store(true, SeqCst);
            let took = burst(&proxy, &flight, MANY);
            is_burst.store(false, SeqCst);
            took
        };
        (0..5).map(one).collect::<Vec<_>>()
    });
    bursts.sort_unstable();
    let usual = bursts[2];
    let mut waits = waits.into_inner().unwrap_or_else(PoisonError::into_inner);
    let busy = p99(&mut waits);
    println!("p12: {idle:?} idle, {busy:?} of {} in bursts of {usual:?}", waits.len());
    // Five times as long as otherwise; or a small part of them all, where the machine is busy.
    assert!(busy < (idle * 5).max(usual / 3), "{busy:?}: {idle:?} idle, a burst takes {usual:?}");
}

/// Item 15 of section D.3: nothing of a request is taken before the handshake is over, so nobody
/// can send it again.
#[test]
fn d3_15_no_ticket_allows_early_data() {
    let origin = Origin::start(reply::name("x"));
    let (ca, proxy, _) = secured(&origin);
    let mut config = ca.client();
    config.enable_early_data = true;
    config.resumption = Resumption::in_memory_sessions(32);
    let config = Arc::new(config);
    for resumed in [false, true] {
        let mut tcp = plainly(&proxy);
        let name = ServerName::try_from(HOST).expect("a name");
        let mut end = ClientConnection::new(config.clone(), name).expect("a client");
        assert!(end.early_data().is_none(), "a ticket allows it");
        end.complete_io(&mut tcp).expect("a handshake");
        assert_eq!(end.handshake_kind() == Some(HandshakeKind::Resumed), resumed);
        // Tickets come with the answer.
        end.writer().write_all(get(HOST, "/", "").as_bytes()).expect("it is taken");
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\nx") {
            end.complete_io(&mut tcp).expect("an answer");
            let mut part = [0; 4096];
            match end.reader().read(&mut part) {
                Ok(n) => answer.extend_from_slice(&part[..n]),
                Err(e) => assert_eq!(e.kind(), io::ErrorKind::WouldBlock),
            }
        }
    }
    assert_eq!(origin.requests(), 2);
}

/// A connection of HTTP/2 for `sni`, on which nothing has been asked yet.
fn of_h2(ca: &Ca, proxy: &Proxy, sni: Option<&str>) -> Raw {
    let mut config = ca.client();
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.enable_sni = sni.is_some();
    let shaken = shake(&Arc::new(config), proxy.address(), sni.unwrap_or("a.example.com"));
    assert_eq!(shaken.alpn.as_deref(), Some("h2"));
    let mut raw = Raw { wire: shaken.client.wire };
    raw.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    raw.write(frame(kind::SETTINGS, 0, 0, b""));
    raw
}

/// Case `tls-sni-host-mismatch`, 8443: the same answer by both versions of HTTP, with another name
/// in the handshake and with none.
#[test]
fn tls_sni_host_mismatch_is_misdirected_by_both_versions() {
    let origin = Origin::start(|call| {
        let host = call.request.get("host").unwrap_or_default().to_owned();
        call.send(reply::ok(&host));
        l7rp_testkit::Then::Next
    });
    let ca = Ca::new("ca");
    let wild = ca.issue("wild", &["*.example.com"]);
    let proxy = over(&[&origin]).listener(&tls(&[&wild], "")).start();
    for sni in [Some("a.example.com"), None] {
        let mut raw = of_h2(&ca, &proxy, sni);
        let mut config = ca.client();
        config.enable_sni = sni.is_some();
        let mut old = shake(&Arc::new(config), proxy.address(), "a.example.com").client;
        for (n, host) in ["a.example.com", "b.example.com", "other.test"].into_iter().enumerate() {
            let status = old.ask(get(host, "/one", "")).status();
            match (sni, host) {
                (Some(_), "other.test") => assert_eq!(status, 421),
                // Who asks for no name may mean an address, which no certificate has to be for.
                (None, "other.test") => assert!(matches!(status, 200 | 421), "{status}"),
                _ => assert_eq!(status, 200, "{sni:?} {host}"),
            }
            let stream = 1 + 2 * n as u32;
            let mut fields = GET.to_vec();
            (fields[1].1, fields[3].1) = ("https", host);
            let path = format!("/two/{n}/{}", sni.is_some());
            fields[2].1 = &path;
            raw.write(frame(kind::HEADERS, 5, stream, &section(&fields)));
            raw.end_of(stream);
            assert_eq!(proxy.logged_path(&path)["status"], status, "{sni:?} {host}");
        }
    }
}

/// Case `tls-sni-host-mismatch`, 8444: without a certificate nobody is answered, whatever name is
/// asked for, in the handshake or after it.
#[test]
fn tls_sni_host_mismatch_opens_no_door_that_asks_for_certificates() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let wild = ca.issue("wild", &["*.example.com"]);
    let auth = format!(", client_auth: {{ ca_file: \"{}\", mode: require }}", ca.file().display());
    let proxy = over(&[&origin]).listener(&tls(&[&wild], &auth)).start();
    for sni in ["a.example.com", "admin.example.com", "other.test"] {
        let mut config = ca.client();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        // In TLS 1.3 the client has shaken hands before it is told.
        let Ok(shaken) = try_shake(&Arc::new(config), proxy.address(), sni) else { continue };
        let mut wire = shaken.client.wire;
        let _ = wire.write(get("admin.example.com", "/", "").as_bytes());
        let got = wire.read_to_end();
        assert!(got.is_err(), "{sni}: {got:?}");
    }
    assert_eq!(origin.requests(), 0);
    assert_counts(&proxy, "proxy_requests_total", &[], 0.0);
}

/// Everything that comes, until the other side is gone or waits for an answer.
type Heard = Arc<Mutex<Vec<Vec<u8>>>>;

/// An upstream that writes down what it hears first, answers `say`, and hangs.
fn listening(say: &'static [u8]) -> (Origin, Heard) {
    let heard = Heard::default();
    let for_origin = heard.clone();
    let origin = Origin::start_through(
        move |mut tcp: TcpStream| {
            let mut all = vec![0; 64 << 10];
            let n = tcp.read(&mut all).unwrap_or_default();
            all.truncate(n);
            let _ = tcp.write_all(say);
            let _ = tcp.read_to_end(&mut all);
            for_origin.lock().unwrap_or_else(PoisonError::into_inner).push(all);
            Err(io::ErrorKind::Other.into())
        },
        reply::name("never"),
    );
    (origin, heard)
}

/// A hello of a server that speaks TLS 1.0 and nothing newer.
const OLD_HELLO: &[u8] = &{
    // A record of a handshake: a hello of 38 octets, TLS 1.0, AES-128 with SHA, no extensions.
    let mut hello = [7; 5 + 4 + 38];
    let head = [22, 3, 1, 0, 42, 2, 0, 0, 38, 3, 1];
    let mut n = 0;
    while n < head.len() {
        hello[n] = head[n];
        n += 1;
    }
    // Behind 32 octets of chance: no session, the suite, no compression.
    hello[43] = 0;
    hello[44] = 0;
    hello[45] = 0x2f;
    hello[46] = 0;
    hello
};

/// Case `tls-upstream-name`, E, and row U11: whatever an upstream of TLS says, nothing of a request
/// is sent to it in the clear.
#[test]
fn u11_nothing_is_said_in_the_clear_to_an_upstream_of_tls() {
    let ca = Ca::new("ca");
    let alert: &[u8] = &[21, 3, 1, 0, 2, 2, 70];
    for say in [OLD_HELLO, alert, b"HTTP/1.1 200 OK\r\n\r\n", b""] {
        let (origin, heard) = listening(say);
        let keys = trusting(&ca, "");
        let proxy = over(&[&origin]).pool(&keys).pool("connect_timeout: 1s").start();
        let began = Instant::now();
        let answer = proxy.client().ask(get("a.test", "/secret", "X-Token: secret\r\n"));
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        if say.is_empty() {
            assert_failed(&proxy, &answer, 504, "connection_timeout", "connect_timeout");
        } else {
            assert_failed(&proxy, &answer, 502, "tls_protocol_error", "tls_protocol");
        }
        eventually(SOON, || origin.open() == 0);
        let all = heard.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(!all.is_empty());
        for one in all.iter() {
            assert_eq!(one.first(), Some(&22), "a record of a handshake");
            let has = |text: &[u8]| one.windows(text.len()).any(|part| part == text);
            assert!(!has(b"secret") && !has(b"HTTP/1"), "{one:?}");
        }
        assert_at_rest(&proxy);
    }
}
