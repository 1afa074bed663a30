//! TLS with upstreams: nothing is sent before it is sure who they are.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use l7rp_testkit::{Origin, Proxy, SOON, Then, eventually, reply};
use rustls::ServerConfig;
use rustls::server::ResolvesServerCertUsingSni;
use rustls::sign::CertifiedKey;

use crate::setup::{Setup, assert_counts, assert_failed, get, over, post, start};
use crate::tls_kit::{Ca, Pair, provider, upstream};
use crate::tries::{NEVER_OPENS, assert_at_rest};
use crate::upgrade::{OFFER, echo, echoes};

/// Where all upstreams of tests are.
const HERE: &str = "127.0.0.1";

/// Keys of a pool that trusts this CA; more of them, each after a comma.
pub fn trusting(ca: &Ca, keys: &str) -> String {
    format!("upstream_tls: {{ ca_file: \"{}\"{keys} }}", ca.file().display())
}

fn shown_to_upstreams(own: &Pair) -> String {
    let (cert, key) = (own.cert.display(), own.key.display());
    format!(", client_cert_file: \"{cert}\", client_key_file: \"{key}\"")
}

/// An upstream with a certificate of this CA for its address.
fn good(ca: &Ca, name: &str) -> Origin {
    let pair = ca.issue(name, &[HERE]);
    upstream(ca.server(&pair, false, &["http/1.1"]), reply::name(name))
}

/// What the log says of the upstream.
#[track_caller]
fn told(proxy: &Proxy, reason: &str) -> String {
    let event = proxy.wait_for_event("upstream_error", |e| e["reason"] == reason, SOON);
    event["error"].as_str().expect("words").to_owned()
}

/// Checks that the upstream is not believed, and what the log says of it.
#[track_caller]
fn is_refused(setup: Setup, reason: &str, words: &[&str]) -> Proxy {
    let proxy = setup.start();
    let error = format!("{reason}_error");
    assert_failed(&proxy, &proxy.get("/"), 502, &error, reason);
    let told = told(&proxy, reason);
    for word in words {
        assert!(told.contains(word), "{told}: {word}");
    }
    assert_at_rest(&proxy);
    proxy
}

#[test]
fn a_private_ca_is_believed_and_connections_are_kept() {
    let ca = Ca::new("ca");
    let pair = ca.issue("up", &[HERE]);
    for alpn in [&["http/1.1"][..], &[]] {
        let origin = upstream(ca.server(&pair, false, alpn), reply::echo);
        let proxy = over(&[&origin]).pool(&trusting(&ca, "")).one_worker().start();
        for n in 0..10 {
            let body = "b".repeat(n * 40_000);
            let answer = proxy.client().ask(post("/", &body));
            assert!(answer.status() == 200 && answer.text().ends_with(&body), "{n}");
        }
        assert_eq!((origin.requests(), origin.accepted()), (10, 1));
        assert_at_rest(&proxy);
    }
}

#[test]
fn tunnels_to_upstreams_go_through_tls() {
    let ca = Ca::new("ca");
    let pair = ca.issue("up", &[HERE]);
    let origin = upstream(ca.server(&pair, false, &["http/1.1"]), |call| {
        let then = echo(call);
        call.send("last words");
        then
    });
    let proxy = over(&[&origin]).pool(&trusting(&ca, "")).start();
    let mut client = proxy.client();
    assert_eq!(client.send(OFFER).head().status(), 101);
    echoes(&mut client, "hello");
    client.wire.half_close().expect("it is said");
    assert_eq!(client.wire.read_to_end().expect("an end in order"), b"last words");
    eventually(SOON, || origin.open() == 0);
    assert_at_rest(&proxy);
}

#[test]
fn an_answer_is_whole_only_if_its_end_is_said_in_tls() {
    let ca = Ca::new("ca");
    let pair = ca.issue("up", &[HERE]);
    let origin = upstream(ca.server(&pair, false, &["http/1.1"]), |call| {
        call.send("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nsome");
        if call.request.target() == "/cut" {
            // Anybody in between could do so.
            let _ = call.wire.shut();
        }
        Then::Close
    });
    let proxy = over(&[&origin]).pool(&trusting(&ca, "")).start();
    assert_eq!(proxy.get("/whole").text(), "some");
    assert_eq!(proxy.logged_path("/whole")["reason"], l7rp_testkit::Value::Null);
    let mut client = proxy.client();
    let cut = client.send(get("a.test", "/cut", "")).try_response();
    assert!(cut.is_err() || cut.is_ok_and(|answer| answer.status() == 502));
    assert_eq!(proxy.logged_path("/cut")["reason"], "response_truncated");
    assert_at_rest(&proxy);
}

#[test]
fn what_an_upstream_has_ended_is_not_used_again() {
    let ca = Ca::new("ca");
    let pair = ca.issue("up", &[HERE]);
    let origin = upstream(ca.server(&pair, false, &["http/1.1"]), |call| {
        call.send(reply::ok("x"));
        // The end is said in TLS only: the connection below stays open.
        let _ = call.wire.half_close();
        call.until_gone();
        Then::Close
    });
    let proxy = over(&[&origin]).pool(&trusting(&ca, "")).one_worker().start();
    let mut client = proxy.client();
    for n in 1..=2 {
        assert_eq!(client.ask(post("/", "body")).text(), "x", "{n}");
        eventually(SOON, || origin.open() == 0);
    }
    assert_eq!(origin.requests(), 2);
    assert_at_rest(&proxy);
}

#[test]
fn another_name_is_told_with_the_one_that_was_expected() {
    let ca = Ca::new("ca");
    let pair = ca.issue("up", &["found.test"]);
    let origin = upstream(ca.server(&pair, false, &[]), reply::name("x"));
    is_refused(
        over(&[&origin]).pool(&trusting(&ca, "")),
        "tls_certificate",
        &["expected 127.0.0.1", "found.test"],
    );
    is_refused(
        over(&[&origin]).pool(&trusting(&ca, ", server_name: wanted.test")),
        "tls_certificate",
        &["expected wanted.test", "found.test"],
    );
    assert_eq!(origin.requests(), 0);
}

#[test]
fn certificates_that_are_over_or_of_nobody_known_are_refused() {
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let expired = ca.issue_with("old", &[HERE], |params| {
        params.not_after = rcgen::date_time_ymd(2020, 1, 2);
    });
    let early = ca.issue_with("early", &[HERE], |params| {
        params.not_before = rcgen::date_time_ymd(2999, 1, 2);
    });
    let strange = other.issue("strange", &[HERE]);
    for (pair, words) in [
        (&expired, "has expired at 2020-01-02"),
        (&early, "not valid before 2999-01-02"),
        (&strange, "no CA in `ca_file` has issued it"),
    ] {
        let origin = upstream(ca.server(pair, false, &[]), reply::name("x"));
        is_refused(over(&[&origin]).pool(&trusting(&ca, "")), "tls_certificate", &[words]);
        assert_eq!(origin.requests(), 0);
    }
    // Without a file it is the system that knows whom to trust.
    let origin = good(&ca, "unknown");
    is_refused(over(&[&origin]), "tls_certificate", &["of the system"]);
}

#[test]
fn anybody_is_believed_only_where_that_is_asked_for_and_warned_of() {
    let ca = Ca::new("ca");
    let key = rcgen::KeyPair::generate().expect("a key");
    let own = rcgen::CertificateParams::new(vec!["own.test".into()]).expect("names");
    let own = own.self_signed(&key).expect("a certificate");
    let pair = Pair { cert: ca.path("own.crt"), key: ca.path("own.key") };
    std::fs::write(&pair.cert, own.pem()).expect("a file");
    std::fs::write(&pair.key, key.serialize_pem()).expect("a file");
    let origin = upstream(ca.server(&pair, false, &[]), reply::name("x"));
    is_refused(over(&[&origin]).pool(&trusting(&ca, "")), "tls_certificate", &["not trusted"]);
    let yaml = over(&[&origin]).pool("upstream_tls: { insecure_skip_verify: true }").yaml();
    for _ in 0..2 {
        let proxy = start(&yaml);
        assert_eq!(proxy.get("/").text(), "x");
        eventually(SOON, || {
            let log = proxy.lines().iter().map(ToString::to_string).collect::<String>();
            (proxy.errors() + &log).contains("insecure_skip_verify")
        });
    }
}

#[test]
fn upstreams_learn_who_we_are() {
    let ca = Ca::new("ca");
    let (pair, own) = (ca.issue("up", &[HERE]), ca.issue("proxy", &["proxy.test"]));
    let origin = upstream(ca.server(&pair, true, &[]), reply::name("x"));
    let keys = trusting(&ca, &shown_to_upstreams(&own));
    let proxy = over(&[&origin]).pool(&keys).start();
    assert_eq!(proxy.get("/").text(), "x");
    // TLS 1.3: we are told no only when we have begun to speak.
    let silent = over(&[&origin]).pool(&trusting(&ca, "")).start();
    assert_eq!(silent.get("/").status(), 502);
    assert_eq!(origin.requests(), 1);
    assert_at_rest(&silent);
}

#[test]
fn another_name_than_that_of_the_upstream_can_be_asked_for() {
    let ca = Ca::new("ca");
    let pair = ca.issue("svc", &["svc.internal"]);
    let mut by_name = ResolvesServerCertUsingSni::new();
    let key = provider().key_provider.load_private_key(pair.private()).expect("a key");
    by_name.add("svc.internal", CertifiedKey::new(pair.chain(), key)).expect("a name");
    let config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(by_name));
    let origin = upstream(Arc::new(config), reply::name("x"));
    let health = "health: { active: { interval: 100ms, timeout: 90ms } }";
    let named = trusting(&ca, ", server_name: svc.internal");
    // The checks ask for the same name as the requests.
    let proxy = over(&[&origin]).pool(&named).pool(health).start();
    eventually(SOON, || proxy.get("/").text() == "x");
    let proxy = over(&[&origin]).pool(&trusting(&ca, ", server_name: no.internal")).start();
    assert_failed(&proxy, &proxy.get("/"), 502, "tls_protocol_error", "tls_protocol");
    let proxy = over(&[&origin]).pool(&trusting(&ca, "")).start();
    assert_failed(&proxy, &proxy.get("/"), 502, "tls_protocol_error", "tls_protocol");
}

#[test]
fn checks_do_not_believe_what_requests_would_not() {
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let origin = good(&other, "strange");
    let health = "health: { active: { interval: 100ms, timeout: 90ms } }";
    let proxy = over(&[&origin]).pool(&trusting(&ca, "")).pool(health).start();
    eventually(SOON, || origin.accepted() > 3);
    assert_eq!(proxy.get("/").status(), 503);
    assert_eq!(origin.requests(), 0);
}

/// An upstream that speaks HTTP/2 only, and says so; how many requests it has had.
fn of_h2(config: Arc<ServerConfig>) -> (std::net::SocketAddr, Arc<AtomicUsize>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("it can be");
    let address = listener.local_addr().expect("an address");
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = requests.clone();
    // It ends with the process.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        tokio::task::LocalSet::new().block_on(&runtime.expect("a runtime"), async move {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
            while let Ok((tcp, _)) = listener.accept().await {
                let (acceptor, counted) =
                    (tokio_rustls::TlsAcceptor::from(config.clone()), counted.clone());
                tokio::task::spawn_local(async move {
                    let Ok(stream) = acceptor.accept(tcp).await else { return };
                    let Ok(mut connection) = h2::server::handshake(stream).await else { return };
                    while let Some(Ok((request, mut respond))) = connection.accept().await {
                        counted.fetch_add(1, SeqCst);
                        let head = http::Response::new(());
                        let mut body = respond.send_response(head, false).expect("a stream");
                        let text = format!("{} h2", request.uri().scheme_str().unwrap_or("none"));
                        body.send_data(text.into(), true).expect("a stream");
                    }
                });
            }
        });
    });
    (address, requests)
}

#[test]
fn the_handshake_tells_which_protocol_is_spoken() {
    let ca = Ca::new("ca");
    let pair = ca.issue("up", &[HERE]);
    let one = upstream(ca.server(&pair, false, &["http/1.1"]), reply::name("one"));
    let both = upstream(ca.server(&pair, false, &["http/1.1", "h2"]), reply::name("one"));
    let (two, requests) = of_h2(ca.server(&pair, false, &["h2", "http/1.1"]));
    let with = |url: &str, protocol: &str| {
        let setup = over(&[]).upstream(url, "weight: 1").pool(&trusting(&ca, ""));
        setup.pool(protocol).start()
    };
    let two = format!("https://{two}");
    let cases = [(one.url(), "protocol: auto", "one"), (both.url(), "protocol: http1", "one")];
    let of_two = ["protocol: auto", "protocol: http2"].map(|keys| (two.clone(), keys, "https h2"));
    for (url, keys, text) in cases.into_iter().chain(of_two) {
        let proxy = with(&url, keys);
        for _ in 0..3 {
            assert_eq!(proxy.get("/").text(), text, "{url} {keys}");
        }
        assert_counts(&proxy, "proxy_upstream_inflight", &[], 0.0);
    }
    assert_eq!(requests.load(SeqCst), 6);
    // One that does not offer what is demanded.
    let proxy = with(&one.url(), "protocol: http2");
    assert_failed(&proxy, &proxy.get("/"), 502, "tls_protocol_error", "tls_protocol");
}

#[test]
fn whom_a_new_file_does_not_believe_is_not_used_any_more() {
    let ca = Ca::new("ca");
    let pair = ca.issue("up", &[HERE]);
    let (address, requests) = of_h2(ca.server(&pair, false, &["h2"]));
    let one = good(&ca, "one");
    for url in [format!("https://{address}"), one.url()] {
        let named = |name: &str| {
            let keys = format!(", server_name: {name}");
            let setup = over(&[]).upstream(&url, "weight: 1").pool(NEVER_OPENS);
            setup.pool(&trusting(&ca, &keys)).one_worker()
        };
        let proxy = named(HERE).start();
        assert_eq!(proxy.get("/").status(), 200);
        proxy.reload(&named("other.test").yaml());
        let before = (requests.load(SeqCst), one.requests());
        assert_failed(&proxy, &proxy.get("/"), 502, "tls_certificate_error", "tls_certificate");
        assert_eq!((requests.load(SeqCst), one.requests()), before);
        proxy.reload(&named(HERE).yaml());
        assert_eq!(proxy.get("/").status(), 200);
    }
}

#[test]
fn connections_of_http2_without_requests_are_told_as_idle() {
    let ca = Ca::new("ca");
    let pair = ca.issue("up", &[HERE]);
    let (address, _) = of_h2(ca.server(&pair, false, &["h2"]));
    let setup = over(&[]).upstream(&format!("https://{address}"), "weight: 1");
    let proxy = setup.pool(&trusting(&ca, "")).one_worker().start();
    assert_eq!(proxy.get("/").text(), "https h2");
    let count = |state| ("proxy_upstream_connections", [("state", state)]);
    for ((name, labels), expected) in [(count("idle"), 1.0), (count("active"), 0.0)] {
        assert_counts(&proxy, name, &labels, expected);
    }
}

/// An upstream that does this with its connections, and never comes to speak TLS.
fn never_shaking(act: impl Fn(&mut TcpStream) + Send + Sync + 'static) -> Origin {
    let wrap = move |mut tcp| {
        act(&mut tcp);
        Err(io::ErrorKind::Other.into())
    };
    Origin::start_through(wrap, reply::name("never"))
}

/// Reads until the other side is gone.
fn hang(tcp: &mut TcpStream) {
    let _ = tcp.read_to_end(&mut Vec::new());
}

#[test]
fn what_is_no_tls_is_told() {
    let ca = Ca::new("ca");
    let plain = never_shaking(|tcp| {
        let _ = tcp.read(&mut [0; 4096]);
        let _ = tcp.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        hang(tcp);
    });
    is_refused(
        over(&[&plain]).pool(&trusting(&ca, "")),
        "tls_protocol",
        &["something else than TLS"],
    );
    let closing = never_shaking(|tcp| {
        let _ = tcp.read(&mut [0; 4096]);
    });
    is_refused(over(&[&closing]).pool(&trusting(&ca, "")), "tls_protocol", &["closed"]);
}

#[test]
fn a_handshake_that_hangs_has_an_end() {
    let ca = Ca::new("ca");
    let silent = never_shaking(hang);
    let keys = trusting(&ca, "");
    let proxy = over(&[&silent]).pool(&keys).pool("connect_timeout: 300ms").start();
    let begun = Instant::now();
    let answer = proxy.get("/");
    let took = begun.elapsed();
    assert!(took > Duration::from_millis(250) && took < Duration::from_secs(3), "{took:?}");
    assert_failed(&proxy, &answer, 504, "connection_timeout", "connect_timeout");
    eventually(SOON, || silent.open() == 0);
    assert_at_rest(&proxy);
}

#[test]
fn after_a_failed_handshake_another_upstream_is_asked() {
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let (right, wrong) = (good(&ca, "right"), good(&other, "wrong"));
    let silent = never_shaking(hang);
    for bad in [&wrong, &silent] {
        let setup = over(&[bad, &right]).pool(&trusting(&ca, ""));
        let robin = "selector: { algorithm: round-robin }, connect_timeout: 500ms";
        let proxy = setup.pool(robin).start();
        for _ in 0..3 {
            assert_eq!(proxy.get("/").text(), "right");
            assert_eq!(proxy.client().ask(post("/", "body")).text(), "right");
        }
        assert!(bad.accepted() > 0);
        assert_eq!(bad.requests(), 0);
        assert_counts(&proxy, "proxy_requests_total", &[("status", "200")], 6.0);
        assert_at_rest(&proxy);
    }
}
