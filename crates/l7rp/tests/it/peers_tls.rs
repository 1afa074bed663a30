//! Clients of TLS and HTTP/2 that are not ours: what tests with the libraries of the proxy show of
//! it could be a fault that both ends share.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use l7rp_testkit::{Origin, Proxy, reply};

use crate::setup::{assert_counts, get, over, quiet};
use crate::tls_kit::{Ca, HOST, tls};
use crate::tries::assert_at_rest;

/// A proxy with a certificate of each kind for `a.test` and for its address.
pub struct Served {
    pub ca: Ca,
    pub proxy: Proxy,
    _origin: Origin,
}

impl Served {
    fn start() -> Self {
        let origin = Origin::start(reply::echo);
        let ca = Ca::new("ca");
        let names = [HOST, "127.0.0.1"];
        let pairs = [&ca.issue("ec", &names), &ca.issue_rsa("rsa", &names)];
        let proxy = over(&[&origin]).listener(&tls(&pairs, "")).start();
        Self { ca, proxy, _origin: origin }
    }

    fn https(&self, path: &str) -> String {
        format!("https://{}{path}", self.proxy.address())
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.ca.path(name);
        std::fs::write(&path, content).expect("a file");
        path
    }
}

/// What a program has said.
#[derive(Debug)]
pub struct Said {
    pub ok: bool,
    pub out: String,
    /// Standard error too.
    pub text: String,
}

impl Said {
    #[track_caller]
    fn has(&self, words: &str) -> &Self {
        assert!(self.text.contains(words), "no `{words}` in:\n{}", self.text);
        self
    }
}

/// Runs a program for so many seconds at most; it reads `input`.
#[track_caller]
pub fn run(seconds: u32, program: &str, arguments: &[&str], input: &str) -> Said {
    let mut child = Command::new("timeout")
        .args(["-k", "1", &seconds.to_string(), program])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("coreutils are there");
    // It may have ended without reading.
    let _ = child.stdin.take().expect("a pipe").write_all(input.as_bytes());
    let output = child.wait_with_output().expect("it ends");
    let [out, err] =
        [output.stdout, output.stderr].map(|part| String::from_utf8_lossy(&part).into_owned());
    let code = output.status.code();
    assert_ne!(code, Some(127), "`cargo xtask setup` installs {program}");
    assert_ne!(code, Some(124), "{program} {arguments:?} does not end: {out}{err}");
    Said { ok: output.status.success(), text: out.clone() + &err, out }
}

/// A request over `openssl s_client` with these arguments.
#[track_caller]
fn s_client(served: &Served, arguments: &[&str]) -> Said {
    let (address, ca) = (served.proxy.address().to_string(), served.ca.file());
    let ca = ca.to_str().expect("text");
    let all = ["s_client", "-connect", &address, "-CAfile", ca, "-verify_return_error"];
    let name = ["-servername", HOST, "-verify_hostname", HOST, "-ign_eof"];
    let request = get(HOST, "/by-openssl", "Connection: close\r\n");
    run(20, "openssl", &[&all[..], &name, arguments].concat(), &request)
}

#[test]
fn openssl_asks_over_both_versions_and_both_kinds_of_certificates() {
    let served = Served::start();
    for (arguments, words) in [
        (&["-tls1_3"][..], ["New, TLSv1.3", "Peer signature type: ECDSA"]),
        (&["-tls1_2"], ["New, TLSv1.2", "Peer signature type: ECDSA"]),
        (&["-tls1_3", "-sigalgs", "RSA-PSS+SHA256"], ["TLSv1.3", "Peer signature type: RSA-PSS"]),
        (&["-tls1_2", "-cipher", "aRSA"], ["TLSv1.2", "Peer signature type: RSA-PSS"]),
        (&["-groups", "P-256"], ["TLSv1.3", "Server Temp Key: ECDH, prime256v1"]),
        (&["-groups", "X25519"], ["TLSv1.3", "Server Temp Key: X25519"]),
    ] {
        let said = s_client(&served, arguments);
        said.has("HTTP/1.1 200 OK").has("GET /by-openssl").has("Verify return code: 0 (ok)");
        for words in words {
            said.has(words);
        }
    }
    assert_counts(&served.proxy, "proxy_tls_handshake_failures_total", &[], 0.0);
    assert_at_rest(&served.proxy);
}

/// Suites that have forward secrecy and encrypt with authentication; the client would take worse.
const GOOD: [&str; 6] = [
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-ECDSA-CHACHA20-POLY1305",
    "ECDHE-RSA-AES128-GCM-SHA256",
    "ECDHE-RSA-AES256-GCM-SHA384",
    "ECDHE-RSA-CHACHA20-POLY1305",
];

/// One of each kind that must not be: without encryption, without a certificate, without forward
/// secrecy, with CBC, with a finite field.
const WEAK: [&str; 10] = [
    "NULL-SHA256",
    "ECDHE-ECDSA-NULL-SHA",
    "AECDH-AES128-SHA",
    "ADH-AES128-GCM-SHA256",
    "AES128-GCM-SHA256",
    "AES128-SHA",
    "ECDHE-ECDSA-AES128-SHA",
    "ECDHE-RSA-AES256-SHA384",
    "DHE-RSA-AES128-GCM-SHA256",
    "ECDHE-ECDSA-AES128-CCM8",
];

#[test]
fn openssl_gets_no_weak_suite() {
    let served = Served::start();
    let with = |suite: &str| {
        // At level 0 the client itself refuses nothing.
        s_client(&served, &["-tls1_2", "-cipher", &format!("{suite}:@SECLEVEL=0")])
    };
    for suite in GOOD {
        with(suite).has(&format!("Cipher is {suite}")).has("HTTP/1.1 200 OK");
    }
    for suite in WEAK {
        let said = with(suite);
        assert!(!said.ok && !said.text.contains("HTTP/1.1"), "{suite}: {}", said.text);
        said.has("alert handshake failure");
    }
    let labels = [("reason", "no_shared_cipher")];
    assert_counts(&served.proxy, "proxy_tls_handshake_failures_total", &labels, 10.0);
    assert_counts(&served.proxy, "proxy_tls_handshake_failures_total", &[], 10.0);
}

#[test]
fn openssl_gets_no_old_version() {
    let served = Served::start();
    for version in ["-tls1", "-tls1_1"] {
        let said = s_client(&served, &[version, "-cipher", "DEFAULT:@SECLEVEL=0"]);
        assert!(!said.ok && !said.text.contains("HTTP/1.1"), "{version}: {}", said.text);
        // Which alert depends on what the client has not said: `signature_algorithms`, which no
        // version before 1.2 has.
        let alerts = ["alert protocol version", "alert handshake failure"];
        assert!(alerts.iter().any(|alert| said.text.contains(alert)), "{}", said.text);
    }
    let labels = [("reason", "no_shared_version")];
    assert_counts(&served.proxy, "proxy_tls_handshake_failures_total", &labels, 2.0);
}

#[test]
fn openssl_resumes_its_sessions() {
    let served = Served::start();
    let said = s_client(&served, &["-tls1_2", "-reconnect"]);
    assert_eq!(said.text.matches("Reused, TLSv1.2").count(), 5, "{}", said.text);
    for version in ["-tls1_2", "-tls1_3"] {
        let session = served.ca.path("session");
        let session = session.to_str().expect("text");
        s_client(&served, &[version, "-sess_out", session]).has("New, TLSv1.").has("200 OK");
        let said = s_client(&served, &[version, "-sess_in", session]);
        said.has("Reused, TLSv1.").has("HTTP/1.1 200 OK");
    }
}

/// Item 15 of section D.3, by a client that would send early data.
#[test]
fn openssl_may_send_nothing_early() {
    let served = Served::start();
    let session = served.ca.path("session");
    let session = session.to_str().expect("text");
    s_client(&served, &["-tls1_3", "-sess_out", session]).has("Max Early Data: 0");
    let early = served.file("early", get(HOST, "/early", ""));
    let arguments = ["-tls1_3", "-sess_in", session, "-early_data", early.to_str().expect("text")];
    let said = s_client(&served, &arguments);
    assert!(!said.text.contains("Early data was accepted"), "{}", said.text);
    assert!(!said.text.contains("GET /early"), "{}", said.text);
    assert!(served.proxy.events("request_completed").iter().all(|line| line["path"] != "/early"));
}

#[test]
fn openssl_agrees_on_a_protocol() {
    let served = Served::start();
    for (offered, words) in [
        ("h2,http/1.1", "ALPN protocol: h2"),
        ("http/1.1", "ALPN protocol: http/1.1"),
        ("spdy/3,http/1.1", "ALPN protocol: http/1.1"),
    ] {
        s_client(&served, &["-alpn", offered]).has(words);
    }
    s_client(&served, &[]).has("No ALPN negotiated").has("HTTP/1.1 200 OK");
    s_client(&served, &["-alpn", "spdy/3"]).has("alert no application protocol");
}

/// The number of connections that `openssl s_time` has made in two seconds.
#[track_caller]
fn s_time(served: &Served, arguments: &[&str]) -> u32 {
    let (address, ca) = (served.proxy.address().to_string(), served.ca.file());
    let all = ["s_time", "-connect", &address, "-CAfile", ca.to_str().expect("text"), "-time", "2"];
    let said = run(20, "openssl", &[&all[..], arguments].concat(), "");
    assert!(said.ok, "{}", said.text);
    let line =
        said.text.lines().find(|line| line.contains(" connections in ") && line.contains("real"));
    let count = line.and_then(|line| line.split(' ').next()).and_then(|n| n.parse().ok());
    count.unwrap_or_else(|| panic!("no count in {}", said.text))
}

#[test]
fn openssl_shakes_hands_again_and_again() {
    let served = Served::start();
    for version in ["-tls1_2", "-tls1_3"] {
        for kind in ["-new", "-reuse"] {
            let count = s_time(&served, &[version, kind, "-www", "/"]);
            println!("s_time {version} {kind}: {count} connections");
            assert!(count > 20, "{version} {kind}: {count}");
        }
    }
    assert_counts(&served.proxy, "proxy_tls_handshake_failures_total", &[], 0.0);
    assert_counts(&served.proxy, "proxy_connections", &[], 0.0);
    assert_at_rest(&served.proxy);
}

/// Where a client that is not ours asks: over TLS, and without by prior knowledge.
fn both(served: &Served, plain: &Proxy, path: &str) -> [String; 2] {
    [served.https(path), format!("http://{}{path}", plain.address())]
}

#[test]
fn nghttp_asks_sends_and_hears_the_end() {
    let served = Served::start();
    let origin = Origin::start(reply::echo);
    let plain = over(&[&origin]).start();
    let body = "0123456789abcdef".repeat(20_000);
    let file = served.file("body", &body);
    for url in both(&served, &plain, "") {
        let all = ["/one", "/two", "/three"].map(|path| url.clone() + path);
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let said = run(20, "nghttp", &all, "");
        assert!(said.ok, "{}", said.text);
        for path in ["/one", "/two", "/three"] {
            said.has(&format!("GET {path} HTTP/1.1"));
        }
        let upload = url.clone() + "/up";
        let data = ["-d", file.to_str().expect("text")];
        for arguments in
            [&[][..], &["--no-content-length"], &["--no-content-length", "--trailer", "x-sum: 17"]]
        {
            let said = run(20, "nghttp", &[&data, arguments, &[&upload]].concat(), "");
            assert!(said.ok && said.out.ends_with(&body), "{arguments:?}: {}", said.text.len());
            said.has("POST /up HTTP/1.1");
        }
        // With small windows, and frames told of.
        let small = ["-nv", "-w", "14", "-W", "14", "--no-dep"];
        let said = run(20, "nghttp", &[&data[..], &small, &[&upload]].concat(), "");
        said.has(":status: 200").has("END_STREAM");
        assert!(!said.text.contains("RST_STREAM"), "{}", said.text);
    }
    let seen = origin.seen();
    let trailers: Vec<_> = seen.iter().flat_map(|seen| &seen.message.trailers).collect();
    assert_eq!(trailers, [&("x-sum".to_owned(), "17".to_owned())]);
    quiet(&plain);
    quiet(&served.proxy);
}

/// So many requests of `h2load`, all of which are answered.
#[track_caller]
fn h2load(requests: u32, arguments: &[&str], url: &str) {
    let count = requests.to_string();
    let said =
        run(60, "h2load", &[&["-n", &count, "-c", "4", "-t", "1"], arguments, &[url]].concat(), "");
    assert!(said.ok, "{}", said.text);
    said.has(&format!("{requests} succeeded, 0 failed, 0 errored, 0 timeout"));
    said.has(&format!("status codes: {requests} 2xx, 0 3xx, 0 4xx, 0 5xx"));
}

#[test]
fn h2load_is_answered_each_time() {
    const MANY: u32 = 3000;
    let served = Served::start();
    let origin = Origin::start(reply::echo);
    let plain = over(&[&origin]).start();
    for url in both(&served, &plain, "/") {
        for arguments in [&["-m", "20"][..], &["-m", "100", "-w", "16"], &["--h1"]] {
            h2load(MANY, arguments, &url);
        }
        let file = served.file("body", vec![b'x'; 20_000]);
        h2load(500, &["-m", "10", "-d", file.to_str().expect("text")], &url);
    }
    for proxy in [&plain, &served.proxy] {
        let labels = [("status", "200")];
        assert_counts(proxy, "proxy_requests_total", &labels, f64::from(3 * MANY + 500));
        assert_counts(proxy, "proxy_http2_floods_total", &[], 0.0);
        assert_at_rest(proxy);
    }
}

/// A transfer of curl: the version of HTTP, the status, and what was got.
#[track_caller]
fn curl(served: &Served, arguments: &[&str], url: &str) -> (String, String) {
    let ca = served.ca.file();
    let all = ["-sS", "--max-time", "15", "--cacert", ca.to_str().expect("text")];
    let told = ["-w", "\n%{http_version} %{response_code}"];
    let said = run(20, "curl", &[&all[..], &told, arguments, &[url]].concat(), "");
    let (body, told) = said.out.rsplit_once('\n').expect("it is told");
    (told.to_owned(), body.to_owned())
}

#[test]
fn curl_asks_by_every_version_over_tls_and_without() {
    let served = Served::start();
    let origin = Origin::start(reply::echo);
    let plain = over(&[&origin]).start();
    let body = "0123456789abcdef".repeat(1 << 16);
    let file = served.file("body", &body);
    let upload = format!("@{}", file.display());
    let [secret, open] = both(&served, &plain, "/by-curl");
    for (version, url, told) in [
        ("--http2", &secret, "2 200"),
        ("--http2-prior-knowledge", &secret, "2 200"),
        ("--http1.1", &secret, "1.1 200"),
        ("--http2-prior-knowledge", &open, "2 200"),
        ("--http1.1", &open, "1.1 200"),
        // It offers an upgrade, which nobody has to take (RFC 9113 §3.1).
        ("--http2", &open, "1.1 200"),
    ] {
        for tls in ["--tlsv1.2", "--tlsv1.3"] {
            let got = curl(&served, &[version, tls], url);
            assert_eq!(got.0, told, "{version} {url}: {}", got.1);
            assert!(got.1.starts_with("GET /by-curl HTTP/1.1\r\n"), "{}", got.1);
        }
        let got = curl(&served, &[version, "-H", "Expect:", "--data-binary", &upload], url);
        assert_eq!(got.0, told, "{version} {url}");
        assert!(got.1.ends_with(&body), "{version} {url}: {} octets", got.1.len());
        // Several on one connection: the second does not open another.
        let all = [version, "-o", "/dev/null", "-o", "/dev/null", "-w", "\n%{num_connects}", url];
        let got = curl(&served, &all, url);
        assert_eq!(got, (String::from("0"), String::from("\n1")), "{version} {url}");
    }
    quiet(&plain);
    quiet(&served.proxy);
}

/// Row P8: who does not mind is served with a certificate that is over.
#[test]
fn curl_is_served_with_an_expired_certificate_if_it_wants_to_be() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let old = ca.issue_with("old", &[HOST, "127.0.0.1"], |params| {
        params.not_after = rcgen::date_time_ymd(2020, 1, 2);
    });
    let proxy = over(&[&origin]).listener(&tls(&[&old], "")).start();
    let served = Served { ca, proxy, _origin: origin };
    let url = served.https("/");
    let (told, _) = curl(&served, &["--http2"], &url);
    assert_eq!(told, "0 000");
    let (told, body) = curl(&served, &["--http2", "--insecure"], &url);
    assert_eq!((told.as_str(), body.as_str()), ("2 200", "x"));
}
