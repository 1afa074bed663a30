//! Clients invent methods, hosts, paths, versions and server names, upstreams invent statuses:
//! there are no more series for it.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::Arc;
use std::thread;

use l7rp_testkit::{Call, Client, Metrics, Origin, Proxy, Then};
use rustls::ClientConfig;

use crate::everything::{Series, samples};
use crate::http2_tools::{Conn, Raw, flag, frame, kind, section, wait, whole};
use crate::observability::promtool;
use crate::pipelining::Draw;
use crate::setup::{assert_counts, get, start};
use crate::tls_kit::{Ca, tls, try_shake};
use crate::verdict::NO_BREAKER;

/// How many requests are sent together.
const BATCH: usize = 100;
/// Octets that a method may have.
const TOKEN: &[u8] =
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+-.^_`|~";
const STANDARD: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"];

/// Answers with the status in the path, be it one or not.
fn odd(call: &mut Call<'_>) -> Then {
    let status = call.request.target().rsplit('/').next().unwrap_or_default().to_owned();
    let length = if status == "204" { "" } else { "Content-Length: 0\r\n" };
    call.send(format!("HTTP/1.1 {status} Odd\r\n{length}\r\n"));
    Then::Next
}

fn word(draw: &mut Draw, length: u64) -> String {
    let length = 3 + draw.below(length);
    (0..length).map(|_| char::from(TOKEN[draw.below(TOKEN.len() as u64) as usize])).collect()
}

/// A request in which everything is odd that may be; one time in eight its method is none of the
/// odd ones.
fn request(draw: &mut Draw, to: &mut String) {
    let method = match draw.below(8 * STANDARD.len() as u64) as usize {
        n @ 0..7 => STANDARD[n].to_owned(),
        _ => word(draw, 12),
    };
    let (host, path, name) = (draw.below(u64::MAX), draw.below(u64::MAX), draw.below(u64::MAX));
    let _ = write!(
        to,
        "{method} /{path:x}/{path}?q={name} HTTP/1.1\r\nHost: h{host}.test\r\nX-{name}: {host}\r\n\r\n"
    );
}

/// Sends so many on one connection, some at a time, and counts their answers.
fn ask(proxy: &Proxy, count: usize, seed: u64) {
    let (mut client, mut draw) = (proxy.client(), Draw(seed));
    let mut left = count;
    let mut text = String::new();
    while left > 0 {
        let batch = left.min(BATCH);
        text.clear();
        (0..batch).for_each(|_| request(&mut draw, &mut text));
        client.send(&text);
        for _ in 0..batch {
            let head = client.wire.read_until(b"\r\n\r\n").expect("an answer");
            assert!(head.starts_with(b"HTTP/1.1 204 "), "{}", String::from_utf8_lossy(&head));
        }
        left -= batch;
    }
}

/// A proxy that answers nearly everything by itself, with whom to ask by TLS.
fn odd_proxy(origin: &Origin) -> (Proxy, Ca, Arc<ClientConfig>) {
    let ca = Ca::new("ca");
    let pair = ca.issue("wild", &["*.w.test"]);
    let url = origin.url();
    let secure = tls(&[&pair], "");
    let proxy = start(&format!(
        "listeners:\n- {{ name: web, bind: \"127.0.0.1:0\" }}\n\
         - {{ name: https, bind: \"127.0.0.1:0\", {secure} }}\n\
         upstream_pools: [{{ name: b, upstreams: [{{ url: \"{url}\" }}], {NO_BREAKER} }}]\n\
         routes:\n- {{ name: itself, respond: {{ status: 204 }} }}\n\
         - {{ name: up, path_prefix: /up, pool: b }}\n\
         access_log: {{ enabled: false }}\n"
    ));
    let client = Arc::new(ca.client());
    (proxy, ca, client)
}

/// Other oddities: names in TLS, versions, pseudo fields of HTTP/2.
fn other_oddities(proxy: &Proxy, client: &Arc<ClientConfig>, count: u64, seed: u64) {
    let mut draw = Draw(seed);
    let https = proxy.listener("https");
    let conn = Conn::open(proxy);
    for _ in 0..count {
        let n = draw.below(u64::MAX);
        let name = format!("n{n}.w.test");
        let mut known = try_shake(client, https, &name).expect("a certificate for it").client;
        assert_eq!(known.ask(get(&name, "/", "")).status(), 204);
        assert!(try_shake(client, https, &format!("n{n}.test")).is_err(), "there is none for it");
        let version =
            format!("GET / HTTP/{}.{}\r\nHost: a\r\n\r\n", draw.below(10), draw.below(10));
        assert!([204, 400, 505].contains(&proxy.client().ask(version).status()));
        let word = format!("{}/{n}\r\n\r\n", word(&mut draw, 30));
        assert_eq!(proxy.client().ask(word).status(), 400);
        let method = format!("M{n}");
        let odd = http::Request::builder().method(&*method).uri(format!("http://h{n}.test/{n}"));
        let (response, _) = conn.begin(odd.body(()).expect("a request"), true);
        assert_eq!(wait(whole(response)).expect("an answer").status, 204);
        let (pseudo, value) = (format!(":p{n}"), format!("v{n}"));
        let fields = section(&[(":method", "GET"), (&*pseudo, &*value), (":path", "x y")]);
        let mut raw = Raw::open(proxy, b"");
        raw.write(frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 1, &fields));
        assert!(raw.find(|f| [kind::RST_STREAM, kind::GOAWAY].contains(&f.kind)).is_some());
    }
}

/// What the proxy makes of an upstream's status.
fn status(client: &mut Client, status: &str) -> u16 {
    client.ask(get("a.test", &format!("/up/{status}"), "")).status()
}

/// The series without their statuses.
fn without_status(series: &BTreeSet<Series>) -> BTreeSet<Series> {
    let all = series.iter().cloned().map(|(name, mut labels)| {
        labels.remove("status");
        (name, labels)
    });
    all.collect()
}

fn series(metrics: &Metrics) -> BTreeSet<Series> {
    samples(metrics).into_keys().collect()
}

/// Waits until so many requests to the upstream, and tries at it, are counted.
fn counted(proxy: &Proxy, count: f64) {
    assert_counts(proxy, "proxy_requests_total", &[("route", "up")], count);
    assert_counts(proxy, "proxy_upstream_requests_total", &[], count);
}

#[test]
fn a_million_odd_requests_make_no_series_that_a_thousand_do_not() {
    const THREADS: usize = 4;
    const MANY: usize = 999_000;
    const INVALID: [&str; 8] = ["999", "600", "099", "000", "20", "2000", "-20", "2x0"];
    let origin = Origin::start(odd);
    let (proxy, _ca, client) = odd_proxy(&origin);
    let mut asking = proxy.client();
    ask(&proxy, 1000, 1);
    other_oddities(&proxy, &client, 5, 2);
    assert_eq!(status(&mut asking, "200"), 200);
    assert_eq!(status(&mut asking, "999"), 502);
    counted(&proxy, 2.0);
    let before = series(&proxy.metrics());
    thread::scope(|scope| {
        for n in 0..THREADS {
            let proxy = &proxy;
            scope.spawn(move || ask(proxy, MANY / THREADS, 10 + n as u64));
        }
    });
    other_oddities(&proxy, &client, 100, 3);
    let metrics = proxy.metrics();
    assert_eq!(series(&metrics), before);
    let asked = metrics.sum("proxy_requests_total", &[("route", "itself")]);
    assert!(asked >= 1e6, "{asked}");
    // Statuses are the one thing that may be new.
    for n in 200..600 {
        assert_eq!(status(&mut asking, &n.to_string()), n);
    }
    for invalid in INVALID {
        assert_eq!(status(&mut asking, invalid), 502, "{invalid}");
    }
    counted(&proxy, 2.0 + 400.0 + INVALID.len() as f64);
    let metrics = proxy.metrics();
    let after = series(&metrics);
    assert_eq!(without_status(&after), without_status(&before));
    let of = |family: &str| after.iter().filter(|(name, _)| name == family).count();
    assert_eq!(of("proxy_upstream_requests_total"), 400 + 2, "each status, err and cancel");
    assert!(after.len() <= before.len() + 2 * 400, "{} of {}", after.len(), before.len());
    assert!(metrics.text.len() < 2 << 20, "{} octets", metrics.text.len());
    assert_eq!(promtool(&metrics), "");
}
