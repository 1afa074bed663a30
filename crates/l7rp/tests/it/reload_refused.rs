//! A bad file is refused whole: what was in force stays in force, all that is wrong is told, and
//! `--check` says the same of the same file.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};

use l7rp_testkit::{Client, Origin, Proxy, Value, reply};

use crate::reload::simple;
use crate::setup::{PROGRAM, assert_counts, start};
use crate::verdict::{OPEN, TOUCHY, becomes, refused, state};

/// A good file, but for one line: its number, what it says instead, and a word of the complaint.
type Bad = (usize, &'static str, &'static str);

/// In the listener's place.
const LISTENERS: &[Bad] = &[
    (2, "- { name: web, bind: nowhere }", "bind"),
    (2, "- { name: web, bind: \"127.0.0.1:99999\" }", "bind"),
    (2, "- { name: web }", "bind"),
    (2, "- { bind: \"127.0.0.1:0\" }", "name"),
    (2, "- web", "listeners[0]"),
    (2, "- { name: web, bind: \"127.0.0.1:0\", bnid: x }", "bnid"),
    (2, "- { name: web, bind: \"127.0.0.1:0\", timeouts: { read: 5 parsecs } }", "parsecs"),
    (2, "- { name: web, bind: \"127.0.0.1:0\", timeouts: { idle: -1s } }", "idle"),
    (2, "- { name: web, bind: \"127.0.0.1:0\", max_connections: many }", "max_connections"),
    (2, "- { name: web, bind: \"127.0.0.1:0\", trusted_proxies: [all] }", "trusted_proxies"),
    (2, "- { name: web, bind: \"127.0.0.1:0\", enable_http3: true }", "http3"),
    (
        2,
        "- { name: web, bind: \"127.0.0.1:0\", tls: { certs: [{ cert: /none/a.crt, key: /none/a.key }] } }",
        "/none/a.crt",
    ),
];

/// In the pool's place; `{url}` is a good upstream.
const POOLS: &[Bad] = &[
    (4, "- { name: b, upstreams: [] }", "upstreams"),
    (4, "- { name: b, upstreams: [{ url: \"ftp://127.0.0.1:1\" }] }", "ftp"),
    (4, "- { name: b, upstreams: [{ url: \"http://\" }] }", "url"),
    (4, "- { name: b, upstreams: [{ url: \"http://me:pw@127.0.0.1:1\" }] }", "url"),
    (4, "- { name: b, upstreams: [{ url: \"{url}\" }, { url: \"{url}\" }] }", "{url}"),
    (4, "- { name: b, upstreams: [{ url: \"{url}\", weight: 0 }] }", "weight"),
    (4, "- { name: b, upstreams: [{ url: \"{url}\", wieght: 2 }] }", "wieght"),
    (4, "- { name: b, upstreams: [{ url: \"{url}\" }], selector: { algorithm: best } }", "best"),
    (
        4,
        "- { name: b, upstreams: [{ url: \"{url}\" }], selector: { algorithm: consistent-hash-bounded } }",
        "hash_key",
    ),
    (4, "- { name: b, upstreams: [{ url: \"{url}\" }], connect_timeout: soon }", "connect_timeout"),
    (4, "- { name: b, upstreams: [{ url: \"{url}\" }], protocol: gopher }", "gopher"),
    (
        4,
        "- { name: b, upstreams: [{ url: \"{url}\" }], health: { active: { interval: 1s, timeout: 2s } } }",
        "interval",
    ),
    (4, "- { name: b, upstreams: [{ url: \"{url}\" }], health: { passive: {} } }", "passive"),
    (
        4,
        "- { name: b, upstreams: [{ url: \"{url}\" }], upstream_tls: { client_cert_file: /none/c.pem } }",
        "client",
    ),
    (
        4,
        "- { name: b, upstreams: [{ url: \"{url}\" }], circuit_breaker: { failure_statuses: [odd] } }",
        "failure_statuses",
    ),
];

/// In the route's place, and after it.
const ROUTES: &[Bad] = &[
    (6, "- { name: r, pool: bb }", "bb"),
    (6, "- { name: r }", "pool"),
    (6, "- { name: r, pool: b, respond: { status: 200 } }", "respond"),
    (6, "- { name: r, pool: b, path_prefix: here }", "path_prefix"),
    (6, "- { name: r, pool: b, host: \"a.*.test\" }", "host"),
    (6, "- { name: r, pool: b, listeners: [wed] }", "wed"),
    (6, "- { name: r, pool: b, allow: [me] }", "allow"),
    (6, "- { name: r, pool: b, timeouts: { total: -5s } }", "total"),
    (6, "- { name: r, pool: b, middleware: [{ retires: {} }] }", "retires"),
    (6, "- { name: r, pool: b, middleware: [{ retry: { max_attempts: 0 } }] }", "max_attempts"),
    (6, "- { name: r, pool: b, middleware: [{ retry: { retry_on: [99] } }] }", "99"),
    (
        6,
        "- { name: r, pool: b, middleware: [{ rate_limit: { per_ip_rps: 0, burst: 1 } }] }",
        "per_ip_rps",
    ),
    (
        6,
        "- { name: r, pool: b, middleware: [{ headers: { add_request: { X-A: \"a\\r\\nb\" } } }] }",
        "X-A",
    ),
    (
        6,
        "- { name: r, pool: b, middleware: [{ headers: { remove_request: [Connection] } }] }",
        "onnection",
    ),
    (7, "- { name: r, path_prefix: /x, pool: b }", "`r`"),
    (7, "routse: []", "routse"),
    (7, "routes: []", "routes"),
    (7, "workers: some", "workers"),
    (7, "limits: { max_in_flight: -1 }", "max_in_flight"),
    (7, "drain: { timeout: 5 }", "timeout"),
    (7, "access_log: [", "YAML"),
    (7, "\tdrain: 5", "YAML"),
    (7, "drain: {}}", "YAML"),
    (7, "tcp_listeners: [{ name: t, bind: \"127.0.0.1:0\", pool: none }]", "none"),
];

/// The good file, with another line at `line`; those that follow move down.
fn with_line(origin: &Origin, line: usize, text: &str) -> String {
    let good = simple(&[origin], &format!(", {TOUCHY}"));
    let mut lines: Vec<_> = good.lines().map(str::to_owned).collect();
    let text = text.replace("{url}", &origin.url());
    if line <= lines.len() {
        lines[line - 1] = text;
    } else {
        lines.push(text);
    }
    // The rest of what a test needs comes before what is cut off by an open bracket.
    lines.join("\n") + "\nadmin: { bind: \"127.0.0.1:0\" }\n"
}

/// What `--check` says of the file in force: its exit code, and the titles of its complaints.
fn check(path: &Path) -> (Option<i32>, Vec<String>, String) {
    let output = Command::new(PROGRAM)
        .args(["--check", "--config"])
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .expect("it runs");
    let text = String::from_utf8(output.stderr).expect("UTF-8");
    let titles = text.lines().filter_map(|line| line.strip_prefix("error: "));
    let is_sum = |title: &str| title.contains(" problem") && title.contains(" in /");
    let titles = titles.filter(|title| !is_sum(title)).map(str::to_owned).collect();
    (output.status.code(), titles, text)
}

/// A proxy with a history, and what must not change.
struct Before {
    proxy: Proxy,
    origin: Origin,
    kept: Client,
    sockets: BTreeMap<u64, SocketAddr>,
    refusals: u32,
}

impl Before {
    fn new() -> Self {
        let origin = Origin::start(reply::told);
        let proxy = start(&simple(&[&origin], &format!(", {TOUCHY}")));
        let mut kept = proxy.client();
        assert_eq!(kept.get("/500").status(), 500);
        becomes(&proxy, &origin, OPEN);
        let sockets = proxy.listening();
        Self { proxy, origin, kept, sockets, refusals: 0 }
    }

    fn path(&self) -> std::path::PathBuf {
        self.proxy.directory().join("config.yaml")
    }

    /// Has it read its file, which must be refused; the complaints.
    #[track_caller]
    fn refuses(&mut self) -> Vec<String> {
        let proxy = &self.proxy;
        let event = proxy.hang_up();
        let what = fs::read(self.path()).unwrap_or_default();
        let what = String::from_utf8_lossy(&what[..what.len().min(2000)]).into_owned();
        assert_eq!(event["event"], "config_rejected", "{event}\n{what}");
        assert_eq!((&event["cause"], &event["generation"]), (&"SIGHUP".into(), &1.into()));
        assert_eq!(event["level"], "error", "{event}");
        self.refusals += 1;
        let rejected = [("outcome", "rejected")];
        let refusals = f64::from(self.refusals);
        assert_counts(proxy, "proxy_config_reloads_total", &rejected, refusals);
        let errors: Vec<_> = event["errors"].as_array().expect("a list").clone();
        let errors: Vec<_> = errors.iter().filter_map(Value::as_str).map(str::to_owned).collect();
        assert!(!errors.is_empty(), "{event}");
        errors
    }

    /// Checks that the complaints are those of `--check`.
    #[track_caller]
    fn as_checked(&self, errors: &[String]) {
        let (code, titles, text) = check(&self.path());
        assert_eq!(code, Some(2), "{errors:?}\n{text}");
        assert_eq!(titles.len(), errors.len(), "{errors:#?}\n{text}");
        for (title, error) in titles.iter().zip(errors) {
            assert!(error.contains(title), "{title}\n{error}");
            // Each error begins with its place, if it has one.
            let place = error.split_once(": ").map_or("", |(place, _)| place);
            assert!(text.contains(place), "{place}\n{text}");
        }
    }

    /// Checks that all is as it was.
    #[track_caller]
    fn is_unchanged(&mut self) {
        let Self { proxy, origin, kept, sockets, .. } = self;
        assert_eq!(proxy.listening(), *sockets);
        assert_eq!(state(proxy, origin), OPEN);
        let answer = kept.get("/");
        refused(proxy, &answer);
        assert_ne!(answer.get("connection"), Some("close"));
        let metrics = proxy.metrics();
        assert_eq!(metrics.sum("proxy_config_generation", &[]), 1.0);
        assert_eq!(metrics.sum("proxy_config_last_reload_successful", &[]), 0.0);
        assert_eq!(metrics.sum("proxy_config_reloads_total", &[("outcome", "ok")]), 0.0);
        assert_eq!(origin.requests(), 1);
    }
}

/// Has all of these refused, one after the other.
fn all_are_refused(all: &[Bad]) {
    let mut before = Before::new();
    for (line, text, word) in all {
        before.proxy.rewrite(with_line(&before.origin, *line, text));
        let errors = before.refuses();
        let place = format!("config.yaml:{line}:");
        let word = word.replace("{url}", &before.origin.url());
        let is_it = |e: &String| e.contains(&place) && e.contains(&word);
        assert!(errors.iter().any(is_it), "{place} {word}: {errors:#?}\n{text}");
        before.as_checked(&errors);
        before.is_unchanged();
    }
    // And a good one is still taken.
    let Before { proxy, origin, .. } = &before;
    let event = proxy.reload(&simple(&[origin], ", max_in_flight: 5"));
    assert_eq!(event["generation"], 2);
    assert_counts(proxy, "proxy_config_last_reload_successful", &[], 1.0);
}

#[test]
fn a_bad_listener_is_refused() {
    all_are_refused(LISTENERS);
}

#[test]
fn a_bad_pool_is_refused() {
    all_are_refused(POOLS);
}

#[test]
fn what_cannot_be_served_yet_is_refused() {
    let mut before = Before::new();
    let tcp = "tcp_pools: [{ name: t, upstreams: [{ address: \"127.0.0.1:1\" }] }]";
    before.proxy.rewrite(with_line(&before.origin, 7, tcp));
    let errors = before.refuses();
    assert!(errors[0].contains("config.yaml:7:") && errors[0].contains("tcp_pools"), "{errors:?}");
    // To `--check` it is a warning: there is nothing wrong with the file.
    let (_, _, text) = check(&before.path());
    assert!(text.contains("config.yaml:7:") && text.contains("tcp_pools"), "{text}");
    before.is_unchanged();
}

#[test]
fn a_bad_route_is_refused() {
    all_are_refused(ROUTES);
}

#[test]
fn what_is_no_configuration_at_all_is_refused() {
    let mut before = Before::new();
    let long = "x".repeat(4 << 20);
    let texts: &[&[u8]] = &[
        b"",
        b"# nothing\n",
        b"\n\n",
        b"7",
        b"- a\n- b\n",
        b"listeners: {}\n",
        b"\xff\xfe",
        b"routes:\n- { name: \"\xc3\x28\" }\n",
        b"routes: \0\n",
        b"routes: &a [*a]\n",
        b"routes: {a: {a: {a: {a: [",
        b"%YAML 9.9\n---\n",
        b"\x7fELF\x02\x01\x01",
        long.as_bytes(),
    ];
    for text in texts {
        before.proxy.rewrite(text);
        let errors = before.refuses();
        assert!(errors.iter().all(|e| e.contains("config.yaml")), "{errors:?}");
        assert!(errors.iter().all(|e| e.len() < 10_000), "nobody reads so much");
        before.as_checked(&errors);
        before.is_unchanged();
    }
}

#[test]
fn a_file_with_a_thousand_faults_is_refused_with_the_first_of_them() {
    let mut before = Before::new();
    let mut text = simple(&[&before.origin], "");
    for n in 0..1000 {
        let _ = writeln!(text, "- {{ name: r{n}, path_prefix: /{n}, pool: none }}");
    }
    before.proxy.rewrite_yaml(&text);
    let errors = before.refuses();
    assert!((1..=100).contains(&errors.len()), "{}", errors.len());
    assert!(errors[0].contains("config.yaml:7:"), "{}", errors[0]);
    before.as_checked(&errors);
    before.is_unchanged();
}

#[test]
fn a_file_that_cannot_be_read_is_refused() {
    let mut before = Before::new();
    let path = before.path();
    let good = fs::read(&path).expect("a file");
    let mut expect = |word: &str| {
        let errors = before.refuses();
        assert!(errors[0].contains("config.yaml") && errors[0].contains(word), "{errors:?}");
        before.as_checked(&errors);
        before.is_unchanged();
    };
    fs::remove_file(&path).expect("it goes");
    expect("o such file");
    std::os::unix::fs::symlink("nowhere", &path).expect("a link");
    expect("o such file");
    fs::remove_file(&path).expect("it goes");
    std::os::unix::fs::symlink("config.yaml", &path).expect("a link");
    expect("symbolic link");
    fs::remove_file(&path).expect("it goes");
    fs::create_dir(&path).expect("a directory");
    expect("irectory");
    fs::remove_dir(&path).expect("it goes");
    fs::write(&path, good).expect("a file");
    assert_eq!(before.proxy.hang_up()["event"], "config_reloaded");
}

#[test]
fn a_file_of_a_file_that_is_gone_is_refused() {
    let mut before = Before::new();
    let keys = ", upstream_tls: { ca_file: \"{dir}/ca.pem\" }";
    before.proxy.rewrite_yaml(&simple(&[&before.origin], keys));
    let errors = before.refuses();
    assert!(errors[0].contains("config.yaml:4:") && errors[0].contains("ca.pem"), "{errors:?}");
    before.as_checked(&errors);
    before.is_unchanged();
}
