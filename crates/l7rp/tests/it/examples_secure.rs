//! Examples about TLS, other protocols, and what is told to operators.

use l7rp_testkit::SOON;

use crate::acme_kit::{Pebble, Shown, is_served, until_shown};
use crate::collector::Collector;
use crate::examples::{Example, start};
use crate::grpc::{UNAVAILABLE, call, echoing, refusing, status};
use crate::http2_tools::{Conn, H2Origin};
use crate::setup::get;

#[test]
fn tls() {
    let [printed] = start("tls").rest();
    assert_eq!(printed, "one request=1\n2 HTTPS\n");
}

#[test]
fn tls_autocert() {
    let letsencrypt = "https://acme-staging-v02.api.letsencrypt.org/directory";
    let example = Example::read("tls-autocert");
    let (secure, plain) = (example.at(8443).port(), example.at(8080));
    let pebble = Pebble::start(plain.port(), secure, 90 * 24 * 3600);
    let ours = format!("{}\n        ca_file: {}", pebble.directory(), pebble.ca.file().display());
    let example = example.replace(letsencrypt, &ours).start();
    until_shown(secure, "www.example.com", Shown::is_pebbles);
    assert!(is_served(secure, "www.example.com"));
    example.proxy.wait_for_event("certificate_obtained", |_| true, SOON);
    let answer = l7rp_testkit::Client::connect(plain).ask(get("www.example.com", "/a", ""));
    assert_eq!(answer.status(), 308);
    assert_eq!(answer.get("location"), Some("https://www.example.com/a"));
}

#[test]
fn https_redirect() {
    let [redirect, answer] = start("https-redirect").rest();
    assert_eq!(redirect, "308 https://127.0.0.1/a?b=c\n");
    assert_eq!(answer, "one request=1\n");
}

#[test]
fn client_certificates() {
    let mut example = start("client-certificates");
    let [known, unknown] = example.rest();
    assert!(known.contains("x-client-identity: CN=client,O=Example\n"), "{known}");
    assert_eq!(unknown, "refused\n");
    assert_eq!(example.proxy.logged_path("/echo")["client_identity"], "CN=client,O=Example");
}

#[test]
fn upstream_tls() {
    let [printed] = start("upstream-tls").rest();
    assert_eq!(printed, "200\n");
    // The name counts.
    let name = "server_name: backend.example.test";
    let [printed] =
        Example::read("upstream-tls").replace(name, "server_name: a.test").start().rest();
    assert_eq!(printed, "502\n");
}

#[test]
fn upstream_mtls() {
    let [page] = start("upstream-mtls").rest();
    assert!(page.contains("Subject: O=Example, CN=client\n"), "{page}");
    // Without a certificate of the proxy there is no page.
    let example = Example::read("upstream-mtls")
        .replace("      client_cert_file: client.crt\n", "")
        .replace("      client_key_file: client.key\n", "")
        .start();
    assert_eq!(example.get(8080, "/").status(), 502);
}

#[test]
fn http2_upstream() {
    let mut example = start("http2-upstream");
    let [printed] = example.rest();
    assert_eq!(printed, "one request=1\n");
    let upstream = &example.beside[1];
    assert_eq!(upstream.logged_path("/")["protocol"], "HTTP/2");
    assert_eq!(example.proxy.logged_path("/")["protocol"], "HTTP/1.1");
}

#[test]
fn grpc() {
    let port = |origin: &H2Origin| {
        let url = origin.url();
        url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port")
    };
    let (bad, good) = (refusing(status(UNAVAILABLE)), echoing());
    let served = [(9001, port(&bad)), (9002, port(&good))];
    let example = Example::with("grpc", &served).start();
    let conn = Conn::open(&example.proxy);
    for _ in 0..10 {
        let answer = conn.post(call("/svc/Echo", &[]), "hello").expect("an answer");
        assert_eq!(answer.text(), "hello");
        assert_eq!(answer.trailers.expect("trailers")["grpc-status"], "0");
    }
    assert!(bad.requests() > 0 && good.requests() == 10, "some calls were made again");
    // Without a server.
    let example = start("grpc");
    let answer = Conn::open(&example.proxy).post(call("/svc/Echo", &[]), "hello");
    let answer = answer.expect("an answer");
    assert_eq!((answer.status, answer.get("grpc-status")), (200, Some("14")));
}

#[test]
fn admin_token() {
    let mut example = start("admin-token");
    let [without, with] = example.rest();
    assert_eq!(without, "401\n");
    assert!(with.contains("\"outcome\": \"ok\""), "{with}");
    example.proxy.wait_for_event("config_reloaded", |event| event["cause"] == "admin", SOON);
}

#[test]
fn tracing() {
    let collector = Collector::start();
    let address = collector.address();
    let port = address.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
    let mut example = Example::with("tracing", &[(4317, port)]).start();
    let [printed] = example.rest();
    let parent = printed.lines().find_map(|line| line.strip_prefix("traceparent: 00-"));
    let trace = parent.and_then(|parent| parent.split('-').next()).expect("a traceparent");
    let spans = collector.trace(trace, 2);
    let names = spans.iter().map(|span| &span["name"]).collect::<Vec<_>>();
    assert_eq!(names, ["proxy.request", "proxy.upstream.request"]);
}

#[test]
fn decision_header() {
    let mut example = start("decision-header");
    let [printed] = example.rest();
    let lines: Vec<_> =
        printed.lines().filter_map(|line| line.strip_prefix("X-L7rp-Decision: ")).collect();
    assert_eq!(lines.len(), 2, "{printed}");
    let two = format!(
        "route=\"all\", pool=\"backend\", upstream=\"http://{}\"",
        example.example.at(9002)
    );
    assert!(lines.iter().all(|line| line.starts_with(&two)), "{printed}");
    let failed = format!("failed=(\"http://{}\";why=503)", example.example.at(9001));
    assert_eq!(lines.iter().filter(|line| line.ends_with(&failed)).count(), 1, "{printed}");
}
