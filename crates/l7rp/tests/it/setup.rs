//! Configurations, and what every answer of the proxy itself must have.

use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use l7rp_testkit::{Client, Message, Origin, Proxy, SOON, within};

/// A configuration with one listener, one pool and one route, and what is added to each.
#[derive(Default)]
pub struct Setup {
    upstreams: Vec<String>,
    listener: String,
    pool: String,
    route: String,
    top: String,
}

/// A pool of these upstreams.
pub fn over(origins: &[&Origin]) -> Setup {
    let upstreams = origins.iter().map(|o| format!("{{ url: \"{}\" }}", o.url())).collect();
    Setup { upstreams, ..Setup::default() }
}

impl Setup {
    /// Another upstream, with keys of its own.
    pub fn upstream(mut self, url: &str, keys: &str) -> Self {
        self.upstreams.push(format!("{{ url: \"{url}\", {keys} }}"));
        self
    }

    /// Keys for the listener.
    pub fn listener(mut self, keys: &str) -> Self {
        let _ = write!(self.listener, ", {keys}");
        self
    }

    /// Keys for the pool.
    pub fn pool(mut self, keys: &str) -> Self {
        let _ = write!(self.pool, ", {keys}");
        self
    }

    /// Keys for the route.
    pub fn route(mut self, keys: &str) -> Self {
        let _ = write!(self.route, ", {keys}");
        self
    }

    /// Sections of the file.
    pub fn top(mut self, section: &str) -> Self {
        let _ = writeln!(self.top, "{section}");
        self
    }

    /// One worker, so that connections to upstreams and their order are certain.
    pub fn one_worker(self) -> Self {
        self.top("workers: 1")
    }

    pub fn yaml(&self) -> String {
        let Self { upstreams, listener, pool, route, top } = self;
        format!(
            "listeners:\n- {{ name: web, bind: \"127.0.0.1:0\"{listener} }}\n\
             upstream_pools:\n- {{ name: b, upstreams: [{}]{pool} }}\n\
             routes:\n- {{ name: r, pool: b{route} }}\n{top}",
            upstreams.join(", ")
        )
    }

    #[track_caller]
    pub fn start(self) -> Proxy {
        start(&self.yaml())
    }
}

/// Starts the program with this file.
#[track_caller]
pub fn start(yaml: &str) -> Proxy {
    Proxy::start(PROGRAM, yaml)
}

/// The program.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_l7rp");

/// A GET for `path` at `host`, and more lines.
pub fn get(host: &str, path: &str, lines: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n{lines}\r\n")
}

/// A POST with this body.
pub fn post(path: &str, body: &str) -> String {
    let length = body.len();
    format!("POST {path} HTTP/1.1\r\nHost: a.test\r\nContent-Length: {length}\r\n\r\n{body}")
}

/// A client from one of the addresses of this machine, `127.0.0.last`.
#[track_caller]
pub fn client_from(last: u8, proxy: &Proxy) -> Client {
    Client::connect_from([127, 0, 0, last].into(), proxy.address())
}

/// Checks an answer that the proxy has made because something failed: its status, its reason
/// in `Proxy-Status` and in the log, and the request id in the body for who reads it.
#[track_caller]
pub fn assert_failed(proxy: &Proxy, answer: &Message, status: u16, error: &str, reason: &str) {
    assert_eq!(answer.status(), status, "{answer:?}");
    let expected = format!("l7rp; error={error}; details=\"{reason}\"");
    assert_eq!(answer.get("proxy-status"), Some(expected.as_str()), "{answer:?}");
    let id = answer.get("x-request-id").expect("an id");
    assert!(answer.text().contains(id), "{answer:?}");
    assert!(answer.text().starts_with(&status.to_string()), "{answer:?}");
    let line = proxy.logged(|line| line["request_id"] == id);
    assert_eq!(line["reason"], reason, "{line}");
    assert_eq!(line["status"], status, "{line}");
}

/// Waits until the samples with these labels add up to `expected`: a request is counted just
/// after its last octet is out.
#[track_caller]
pub fn assert_counts(proxy: &Proxy, name: &str, labels: &[(&str, &str)], expected: f64) {
    let mut last = f64::NAN;
    let reached = within(SOON, || {
        last = proxy.metrics().sum(name, labels);
        (last == expected).then_some(())
    });
    assert!(reached.is_some(), "{name} {labels:?} is {last}, not {expected}");
}

/// The sum of requests in progress at all upstreams.
pub fn in_flight(proxy: &Proxy) -> f64 {
    proxy.metrics().sum("proxy_upstream_inflight", &[])
}

/// Waits until nothing is in progress any more: no request at any upstream, no tunnel, and every
/// try that was logged is counted once, with a status or without.
#[track_caller]
pub fn quiet(proxy: &Proxy) {
    let mut seen = String::new();
    let is_quiet = within(Duration::from_secs(2), || {
        let metrics = proxy.metrics();
        let (in_flight, tunnels) =
            (metrics.sum("proxy_upstream_inflight", &[]), metrics.sum("proxy_tunnels", &[]));
        let counted = metrics.sum("proxy_upstream_requests_total", &[]);
        let logged: u64 = proxy
            .events("request_completed")
            .iter()
            .filter_map(|line| line["attempts"].as_u64())
            .sum();
        seen = format!("{in_flight} in flight, {tunnels} tunnels, {counted} of {logged} tries");
        (in_flight == 0.0 && tunnels == 0.0 && counted == logged as f64).then_some(())
    });
    assert!(is_quiet.is_some(), "{seen}");
}

/// The count once it has not changed for a while.
#[track_caller]
pub fn settled(count: &AtomicUsize) -> usize {
    let mut last = (0, Instant::now());
    within(SOON * 2, || {
        let now = count.load(SeqCst);
        if now != last.0 || now == 0 {
            last = (now, Instant::now());
        }
        (last.1.elapsed() > Duration::from_millis(500)).then_some(now)
    })
    .expect("it settles")
}
