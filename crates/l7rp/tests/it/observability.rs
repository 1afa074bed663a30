//! What the proxy tells about itself: endpoints, metrics, the access log.

use std::io::Write;
use std::process::{Command, Stdio};

use l7rp_testkit::{Client, Metrics, Origin, Proxy, SOON, Signal, Value, eventually, reply};

use crate::setup::{assert_counts, get, over, post, start};

#[test]
fn admin_endpoints() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    for (path, status, body) in [
        ("/-/healthz", 200, "ok"),
        ("/-/ready", 200, "ready"),
        ("/livez", 204, ""),
        ("/readyz", 204, ""),
        ("/metrics", 200, "# HELP"),
        ("/-/version", 200, "l7rp "),
        ("/nothing", 404, ""),
    ] {
        let answer = proxy.ask_admin(path);
        assert_eq!(answer.status(), status, "{path}");
        assert!(answer.text().starts_with(body), "{path}: {}", answer.text());
        assert_eq!(answer.get("content-length").is_none(), status == 204, "{path}");
    }
    let metrics = proxy.ask_admin("/metrics");
    assert_eq!(metrics.get("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let mut client = Client::connect(proxy.admin());
    let put = "PUT /livez HTTP/1.1\r\nHost: admin\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(client.ask(put).status(), 405);
    // The endpoints are not on the data listener.
    assert_eq!(proxy.get("/metrics").text(), "x");
    assert_eq!(proxy.get("/livez").text(), "x");
}

#[test]
fn admin_connections_are_kept_and_pipelined() {
    let proxy = over(&[&Origin::refusing()]).start();
    let mut client = Client::connect(proxy.admin());
    let ask = |path| get("admin", path, "");
    client.send(format!("{}{}", ask("/-/healthz"), ask("/-/version")));
    assert_eq!(client.response().text(), "ok\n");
    assert!(client.response().text().starts_with("l7rp "));
    let head = client.send("HEAD /metrics HTTP/1.1\r\nHost: admin\r\n\r\n").head();
    assert_eq!(head.status(), 200);
    assert_eq!(client.ask(ask("/livez")).status(), 204);
    assert_eq!(Client::connect(proxy.admin()).ask("nonsense\r\n\r\n").status(), 400);
}

/// What Prometheus' own tool finds wrong.
pub fn promtool(metrics: &Metrics) -> String {
    let mut tool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool, of the package prometheus, is installed");
    let mut input = tool.stdin.take().expect("a pipe");
    input.write_all(metrics.text.as_bytes()).expect("it reads");
    drop(input);
    let output = tool.wait_with_output().expect("it ends");
    let words = [output.stdout, output.stderr].concat();
    format!(
        "{}{}",
        if output.status.success() { "" } else { "failed: " },
        String::from_utf8_lossy(&words)
    )
}

#[test]
fn promtool_finds_nothing() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin])
        .top("- { name: 'quoted \"name\"', path_prefix: /q, respond: { status: 204 } }")
        .start();
    assert_eq!(promtool(&proxy.metrics()), "", "before any traffic");
    for request in
        [get("a.test", "/", ""), get("a.test", "/q", ""), post("/", "x"), "BAD\r\n\r\n".into()]
    {
        proxy.client().ask(request);
    }
    assert_eq!(promtool(&proxy.metrics()), "");
}

#[test]
fn the_contract_of_metrics() {
    let origin = Origin::start(reply::name("x"));
    let url = origin.url();
    let proxy = over(&[&origin]).start();
    for _ in 0..3 {
        proxy.get("/");
    }
    assert_counts(&proxy, "proxy_requests_total", &[], 3.0);
    let metrics = proxy.metrics();
    let of_route = [("route", "r"), ("method", "GET"), ("status", "200")];
    let of_upstream = [("pool", "b"), ("upstream", url.as_str()), ("status", "200")];
    assert_eq!(metrics.sum("proxy_requests_total", &of_route), 3.0);
    assert_eq!(metrics.sum("proxy_request_duration_seconds_count", &of_route[..2]), 3.0);
    assert!(metrics.sum("proxy_request_duration_seconds_sum", &of_route[..2]) > 0.0);
    assert_eq!(metrics.sum("proxy_upstream_requests_total", &of_upstream), 3.0);
    assert_eq!(metrics.sum("proxy_upstream_duration_seconds_count", &of_upstream[..2]), 3.0);
    assert_eq!(metrics.sum("proxy_upstream_inflight", &of_upstream[..2]), 0.0);
    assert_eq!(metrics.sum("proxy_upstream_eligible", &of_upstream[..2]), 1.0);
    assert_eq!(metrics.sum("proxy_connections_total", &[("listener", "web")]), 3.0);
    assert_eq!(metrics.series("proxy_build_info").count(), 1);
    assert_eq!(metrics.sum("proxy_access_log_dropped_total", &[]), 0.0);
    let bounds: Vec<_> = metrics
        .text
        .lines()
        .filter(|l| l.starts_with("proxy_request_duration_seconds_bucket{"))
        .map(|l| l.split("le=\"").nth(1).and_then(|l| l.split('"').next()).unwrap_or_default())
        .collect();
    let expected = [
        "0.001", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1", "2.5", "5", "10",
        "+Inf",
    ];
    assert_eq!(bounds, expected);
    for name in ["process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"]
    {
        assert!(metrics.sum(name, &[]) > 0.0, "{name}");
    }
}

#[test]
fn clients_do_not_choose_how_many_series_there_are() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let ask = |n: u32| {
        let method: String = ['A', 'B', 'C', 'D', 'E']
            .iter()
            .cycle()
            .skip(n as usize % 5)
            .take(3 + n as usize / 5)
            .collect();
        let head = format!("{method} /{n}?q={n} HTTP/1.1\r\nHost: h{n}.test\r\nX-N: {n}\r\n\r\n");
        assert_eq!(proxy.client().ask(head).status(), 200);
    };
    ask(0);
    proxy.client().ask("BAD\r\n\r\n");
    assert_counts(&proxy, "proxy_requests_total", &[], 1.0);
    assert_counts(&proxy, "proxy_bad_requests_total", &[], 1.0);
    let before = proxy.metrics().count();
    (1..40).for_each(ask);
    assert_counts(&proxy, "proxy_requests_total", &[("method", "other")], 40.0);
    let after = proxy.metrics();
    assert_eq!(after.count(), before);
    for word in ["ABC", "h1.test", "q=1"] {
        assert!(!after.text.contains(word), "{word}");
    }
}

#[test]
fn gauges_return_to_nothing() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).pool("keepalive: { idle_timeout: 100ms }").start();
    let mut clients: Vec<_> = (0..8).map(|_| proxy.client()).collect();
    for client in &mut clients {
        client.get("/");
    }
    assert_eq!(proxy.metrics().sum("proxy_connections", &[]), 8.0);
    drop(clients);
    eventually(SOON, || {
        let metrics = proxy.metrics();
        ["proxy_connections", "proxy_upstream_connections", "proxy_upstream_inflight"]
            .iter()
            .all(|name| metrics.sum(name, &[]) == 0.0)
    });
}

#[test]
fn a_log_line_has_its_fields() {
    let origin = Origin::start(reply::echo);
    let url = origin.url();
    let proxy = over(&[&origin]).start();
    let body = "0123456789";
    let answer = proxy.client().ask(format!(
        "POST /p/q?secret=1 HTTP/1.1\r\nHost: A.test:81\r\nX-Request-ID: id-1\r\nContent-Length: 10\r\n\r\n{body}"
    ));
    let line = proxy.logged_path("/p/q");
    for (name, value) in [
        ("level", Value::from("info")),
        ("msg", "request_completed".into()),
        ("event", "request_completed".into()),
        ("route", "r".into()),
        ("request_id", "id-1".into()),
        ("method", "POST".into()),
        ("host", "A.test:81".into()),
        ("status", 200.into()),
        ("bytes_in", 10.into()),
        ("bytes_out", answer.body.len().into()),
        ("client_ip", "127.0.0.1".into()),
        ("protocol", "HTTP/1.1".into()),
        ("upstream", url.into()),
        ("pool", "b".into()),
        ("attempts", 1.into()),
        ("hedged", false.into()),
    ] {
        assert_eq!(line[name], value, "{name} of {line}");
    }
    for name in ["duration_ms", "upstream_ms"] {
        let ms = line[name].as_f64().expect("a number");
        assert!(ms > 0.0 && ms < 10_000.0, "{name} of {line}");
    }
    let time = line["time"].as_str().expect("a time");
    assert!(time.len() == 24 && time.ends_with('Z') && time.as_bytes()[10] == b'T', "{time}");
    assert_eq!(line.get("reason"), None);
}

#[test]
fn levels_follow_the_status() {
    let origin = Origin::start(|call| {
        let status = call.request.target()[1..].to_owned();
        call.send(format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n"));
        l7rp_testkit::Then::Next
    });
    let proxy = over(&[&origin]).start();
    for (status, level) in
        [(200, "info"), (302, "info"), (404, "warn"), (499, "warn"), (500, "error"), (599, "error")]
    {
        let path = format!("/{status}");
        assert_eq!(proxy.get(&path).status(), status);
        assert_eq!(proxy.logged_path(&path)["level"], level, "{status}");
    }
}

#[test]
fn no_secret_is_logged() {
    let origin = Origin::start(reply::echo);
    let mut proxy = over(&[&origin]).start();
    let lines = "Authorization: Bearer s3cret\r\nCookie: sid=s3cret\r\n";
    let request = format!(
        "POST /p?token=s3cret HTTP/1.1\r\nHost: a.test\r\n{lines}Content-Length: 6\r\n\r\ns3cret"
    );
    assert_eq!(proxy.client().ask(request).status(), 200);
    let target =
        format!("GET http://a.test/abs?token=s3cret HTTP/1.1\r\nHost: a.test\r\n{lines}\r\n");
    assert_eq!(proxy.client().ask(target).status(), 200);
    proxy
        .client()
        .ask(format!("GET /?token=s3cret HTTP/1.1\r\nHost: a\r\nBad Name: s3cret\r\n{lines}\r\n"));
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert_eq!(proxy.events("request_completed").len(), 3);
    for line in proxy.lines() {
        assert!(!line.to_string().contains("s3cret"), "{line}");
    }
    assert!(!proxy.errors().contains("s3cret"));
}

/// Every line that was written is a JSON object.
fn assert_lines_are_objects(proxy: &Proxy) {
    for line in proxy.lines() {
        assert!(line.is_object(), "{line}");
        assert!(
            line["event"].is_string() && line["time"].is_string() && line["level"].is_string(),
            "{line}"
        );
    }
}

#[test]
fn lines_are_valid_whatever_is_sent() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = over(&[&origin]).start();
    let hostile: [&[u8]; 6] = [
        b"/\"}{\"level\":\"x",
        b"/\\u0000\\",
        b"/%0a%0d",
        b"/\xff\xfe\xc3",
        "/\u{2028}\u{202e}".as_bytes(),
        &[b'/'; 5000],
    ];
    for path in hostile {
        let request =
            [b"GET ", path, b" HTTP/1.1\r\nHost: a.test\r\nX-Request-ID: \"\\\r\n\r\n"].concat();
        let answer = proxy.client().ask(request);
        assert!([200, 400].contains(&answer.status()), "{answer:?}");
    }
    for garbage in [
        &b"\x16\x03\x01\x02\x00\x01\x00"[..],
        b"\0\0\0\0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: \"\r\n\r\n",
    ] {
        assert_eq!(proxy.client().ask(garbage).status(), 400);
    }
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert_eq!(proxy.events("request_completed").len(), hostile.len() + 3);
    assert_lines_are_objects(&proxy);
}

#[test]
fn a_refused_head_is_logged_too() {
    let proxy = over(&[&Origin::refusing()]).start();
    proxy.client().ask("GET / HTTP/1.1\r\n\r\n");
    let line = proxy.logged(|line| line["reason"] == "host_missing");
    assert_eq!((&line["status"], &line["level"]), (&400.into(), &"warn".into()));
    assert_eq!(line["client_ip"], "127.0.0.1");
}

#[test]
fn the_access_log_can_be_off() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = over(&[&origin]).top("access_log: { enabled: false }").start();
    assert_eq!(proxy.get("/").status(), 200);
    assert_eq!(proxy.get("/").status(), 200);
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert_eq!(proxy.events("request_completed").len(), 0);
    assert_eq!(proxy.events("shutdown_complete").len(), 1);
}

#[test]
fn no_line_is_lost_at_the_end() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    let all: String = (0..300).map(|n| get("a.test", &format!("/{n}"), "")).collect();
    client.send(all);
    for _ in 0..300 {
        assert_eq!(client.response().status(), 200);
    }
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert_eq!(proxy.events("request_completed").len(), 300);
}

#[test]
fn the_start_is_told() {
    let proxy = start(
        "listeners:\n- { name: one, bind: \"127.0.0.1:0\" }\n- { name: two, bind: \"127.0.0.2:0\" }\n\
         routes:\n- { name: r, respond: { status: 204 } }\nworkers: 3\n",
    );
    let started = proxy.started();
    assert_eq!(started["workers"], 3);
    assert_eq!(started["routes"], 1);
    assert_eq!(started["level"], "info");
    assert!(started["version"].is_string());
    for name in ["one", "two"] {
        assert_ne!(proxy.listener(name).port(), 0);
        assert_eq!(Client::connect(proxy.listener(name)).get("/").status(), 204);
    }
}

#[test]
fn a_log_that_nobody_reads_holds_up_no_request() {
    const REQUESTS: usize = 8000;
    let mut proxy = start(
        "listeners:\n- { name: web, bind: \"127.0.0.1:0\" }\n\
         routes:\n- { name: r, respond: { status: 204 } }\n",
    );
    let stopped = proxy.stop_reading();
    // Long lines, so that all that may wait is soon full.
    let request = get(&format!("{}.test", "h".repeat(60)), &format!("/{}", "p".repeat(1500)), "");
    let mut client = proxy.client();
    for _ in 0..REQUESTS / 20 {
        client.send(request.repeat(20));
        for _ in 0..20 {
            assert_eq!(client.response().status(), 204);
        }
    }
    assert_counts(&proxy, "proxy_requests_total", &[], REQUESTS as f64);
    let name = "proxy_access_log_dropped_total";
    eventually(SOON, || proxy.metrics().sum(name, &[]) > 0.0);
    drop(stopped);
    // What was not dropped is all there.
    let mut last = 0.0;
    eventually(SOON, || {
        last = proxy.metrics().sum(name, &[]);
        proxy.events("request_completed").len() + last as usize == REQUESTS
    });
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert_lines_are_objects(&proxy);
}
