//! Examples about what fails, takes long, or is too much.

use std::time::Duration;

use l7rp_testkit::{Client, SOON, Signal, Value, eventually};

use crate::examples::start;
use crate::setup::{assert_counts, assert_failed, client_from};

/// The statuses that `l7rp load` has counted, `200: 5  503: 15` for example.
fn statuses(load: &str) -> &str {
    let line = load.lines().find_map(|line| line.strip_prefix("statuses"));
    line.expect("a line with statuses").trim()
}

#[test]
fn retries() {
    let mut example = start("retries");
    let [printed] = example.rest();
    let expected = (1..=6).map(|n| format!("three request={n}\n")).collect::<Vec<_>>().concat();
    assert_eq!(printed, expected);
    // They take turns in being asked first; who is asked next is drawn.
    for (what, how) in [("status", Value::from(503)), ("error", "upstream_closed".into())] {
        example.proxy.logged(|line| line["status"] == 200 && line["tries"][0][what] == how);
    }
    // What may not be done twice is not.
    let post = "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\n\r\n";
    let answers: Vec<_> =
        (0..3).map(|_| Client::connect(example.example.at(8080)).ask(post).status()).collect();
    assert!(answers.contains(&503), "{answers:?}");
}

#[test]
fn hedging() {
    let mut example = start("hedging");
    let [printed] = example.rest();
    let (answers, times): (Vec<_>, Vec<_>) =
        printed.lines().partition(|line| line.contains("request="));
    assert_eq!(answers.len(), 4, "{printed}");
    assert!(answers.iter().all(|line| line.starts_with("fast ")), "{printed}");
    let slowest = times.iter().filter_map(|t| t.trim_end_matches('s').parse::<f64>().ok());
    // The slow one takes 5 s.
    assert!(slowest.fold(0.0, f64::max) < 4.0, "{printed}");
    assert!(example.proxy.metrics().sum("proxy_hedge_fired_total", &[]) >= 1.0);
}

#[test]
fn circuit_breaker() {
    let mut example = start("circuit-breaker");
    let [printed] = example.rest();
    let lines: Vec<_> = printed.lines().map(str::trim).collect();
    let open = "503 l7rp; error=destination_unavailable; details=\"breaker_open\"";
    assert_eq!(lines, ["500", "500", "500", "500", "500", open, open, open]);
    assert_eq!(example.tries(9001), 5.0, "the others were not sent");
}

#[test]
fn timeouts() {
    let [soon, later] = start("timeouts").rest();
    for answer in [soon, later] {
        assert!(answer.starts_with("HTTP/1.1 504 "), "{answer}");
        assert!(answer.contains("details=\"response_timeout\""), "{answer}");
    }
    // Shorter than the second, longer than the first.
    let example = start("timeouts");
    let path = "/slow?ms=1000";
    assert_failed(
        &example.proxy,
        &example.get(8080, path),
        504,
        "http_response_timeout",
        "response_timeout",
    );
    assert_eq!(example.get(8080, &format!("/report{path}")).text(), "waited 1000 ms\n");
}

#[test]
fn request_limits() {
    let mut example = start("request-limits");
    let [_, other, upload] = example.rest();
    assert_eq!((other.as_str(), upload.as_str()), ("413\n", "200\n"));
    assert_eq!(example.get(8080, &format!("/{}", "x".repeat(5000))).status(), 414);
    let fields = "X: y\r\n".repeat(60);
    let request = format!("GET / HTTP/1.1\r\nHost: a.test\r\n{fields}\r\n");
    assert_eq!(Client::connect(example.example.at(8080)).ask(request).status(), 431);
}

#[test]
fn per_route_rate_limit() {
    let mut example = start("per-route-rate-limit");
    let [printed] = example.rest();
    let lines: Vec<_> = printed.lines().map(str::trim).collect();
    assert_eq!(lines.len(), 20);
    assert_eq!(lines[..10], ["200"; 10], "{printed}");
    assert!(lines.contains(&"429 1"), "{printed}");
    // It is the route's limit, whoever asks; other routes have none.
    let others: Vec<_> = (2..32).map(|last| client_from(last, &example.proxy)).collect();
    let refused = others.into_iter().any(|mut other| other.get("/search").status() == 429);
    assert!(refused, "thirty clients get more than one would");
    assert!((0..30).all(|_| example.get(8080, "/").status() == 200));
}

#[test]
fn per_client_rate_limit() {
    let mut example = start("per-client-rate-limit");
    let [printed, other] = example.rest();
    let lines: Vec<_> = printed.lines().map(str::trim).collect();
    assert_eq!(lines[..10], ["200"; 10], "{printed}");
    assert!(lines.contains(&"429 1"), "{printed}");
    assert_eq!(other, "200\n");
}

#[test]
fn overload() {
    let mut example = start("overload");
    let [load] = example.rest();
    assert_eq!(statuses(&load), "200: 5  503: 15", "{load}");
    let shed = example.proxy.logged(|line| line["status"] == 503);
    assert_eq!(shed["reason"], "capacity_pool", "{shed}");
}

#[test]
fn drain() {
    let mut running = start("drain");
    let mut waiting = Client::connect(running.example.at(8080));
    waiting.send("GET /slow?ms=3000 HTTP/1.1\r\nHost: a.test\r\n\r\n");
    assert_counts(&running.proxy, "proxy_upstream_inflight", &[], 1.0);
    running.proxy.signal(Signal::TERM);
    eventually(SOON, || running.proxy.ask_admin("/readyz").status() == 503);
    assert_eq!(running.get(8080, "/").status(), 200, "whoever still comes is served");
    assert_eq!(waiting.response().text(), "waited 3000 ms\n");
    assert_eq!(running.proxy.wait_exit(Duration::from_secs(20)), 0);
    let end = running.proxy.events("shutdown_complete").pop().expect("a last word");
    assert_eq!(end["cut"], 0, "{end}");
}
