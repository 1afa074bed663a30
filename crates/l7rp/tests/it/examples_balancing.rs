//! Examples about who gets a request.

use std::time::Duration;

use l7rp_testkit::{Client, Message, eventually};

use crate::examples::{Running, start};
use crate::setup::{assert_counts, client_from, get};

/// The backends that have answered, in the order of what curl has printed.
fn names(printed: &str) -> Vec<&str> {
    printed.lines().filter_map(|line| line.split_once(" request=")).map(|(name, _)| name).collect()
}

/// The backend that has answered.
fn name(answer: &Message) -> &str {
    answer.get("x-backend").expect("a backend's answer")
}

/// Waits until the pool has so many upstreams that may get requests.
#[track_caller]
fn until_eligible(example: &Running, count: f64) {
    assert_counts(&example.proxy, "proxy_upstream_eligible", &[], count);
}

#[test]
fn two_backends() {
    let mut example = start("two-backends");
    let [printed] = example.rest();
    assert_eq!(printed, "one request=1\ntwo request=1\n");
    let answers: Vec<_> = (0..8).map(|_| example.get(8080, "/")).collect();
    assert!(answers.windows(2).all(|pair| name(&pair[0]) != name(&pair[1])));
}

#[test]
fn weights() {
    let [printed] = start("weights").rest();
    let count = |name: &str| names(&printed).iter().filter(|n| **n == name).count();
    assert_eq!((count("big"), count("small")), (6, 2), "{printed}");
    assert!(!printed.contains("small request=1\nsmall"), "they are interleaved: {printed}");
}

#[test]
fn least_connections() {
    let mut example = start("least-connections");
    let [load, status] = example.rest();
    assert!(load.contains("200: 40"), "{load}");
    assert!(status.contains("POOL backend least-conn, 2 of 2 in"), "{status}");
    let (one, two) = (example.tries(9001), example.tries(9002));
    assert_eq!(one + two, 40.0);
    assert!(one * 2.0 < two, "{one} went to the one that is busy, {two} to the other");
}

#[test]
fn consistent_hash() {
    let mut example = start("consistent-hash");
    // One request in flight is more than a share of one among three.
    let until_idle =
        |example: &Running| assert_counts(&example.proxy, "proxy_upstream_inflight", &[], 0.0);
    for _ in 0..2 {
        let printed = example.run();
        until_idle(&example);
        let names = names(&printed);
        assert_eq!(names.len(), 5, "{printed}");
        assert!(names.iter().all(|name| *name == names[0]), "{printed}");
    }
    let of = |session: usize| {
        let cookie = format!("Cookie: session_id=s{session}\r\n");
        let mut client = Client::connect(example.example.at(8080));
        let answer = client.ask(get("a.test", "/", &cookie));
        until_idle(&example);
        name(&answer).to_owned()
    };
    let first: Vec<_> = (0..40).map(of).collect();
    let again: Vec<_> = (0..40).map(of).collect();
    assert_eq!(first, again, "each session stays where it was");
    for name in ["one", "two", "three"] {
        assert!(first.iter().any(|n| n == name), "nobody is at {name}");
    }
}

#[test]
fn ip_hash() {
    let mut example = start("ip-hash");
    for printed in example.rest::<2>() {
        let names = names(&printed);
        assert_eq!(names.len(), 5, "{printed}");
        assert!(names.iter().all(|name| *name == names[0]), "{printed}");
    }
    let of = |last: u8| name(&client_from(last, &example.proxy).get("/")).to_owned();
    let all: Vec<_> = (1..40).map(of).collect();
    assert_eq!(all, (1..40).map(of).collect::<Vec<_>>(), "each client stays where it was");
    assert!(all.iter().any(|name| *name != all[0]), "all of them are at {}", all[0]);
}

#[test]
fn backup() {
    let mut example = start("backup");
    assert_eq!(example.run(), "standby request=1\n");
    let [_] = example.rest();
    until_eligible(&example, 2.0);
    for _ in 0..10 {
        assert_eq!(name(&example.get(8080, "/")), "main");
    }
}

#[test]
fn slow_start() {
    let mut example = start("slow-start");
    // That `warm` is warm, and the other comes.
    assert_eq!([example.run(), example.run()], ["", ""]);
    until_eligible(&example, 2.0);
    let [load, status] = example.rest();
    assert!(load.contains("200: "), "{load}");
    assert!(status.contains("2 of 2 in"), "{status}");
    // However late the load was: when the ramp is over, they take turns.
    let (warm, cold) = (example.tries(9001), example.tries(9002));
    assert!(cold < warm, "{cold} went to the one that has just come, {warm} to the other");
}

#[test]
fn dns() {
    let mut example = start("dns");
    let [printed] = example.rest();
    assert_eq!(printed, "one request=1\n");
    let url = format!("http://localhost:{}", example.example.at(9001).port());
    let line = example.proxy.logged_path("/");
    assert_eq!(line["upstream"], url, "{line}");
}

#[test]
fn health_checks() {
    let mut example = start("health-checks");
    let [printed, status] = example.rest();
    assert_eq!(names(&printed), ["one"; 4]);
    assert!(status.contains("1 of 2 in"), "{status}");
    assert_eq!(example.tries(9002), 0.0);
}

#[test]
fn passive_health() {
    let mut example = start("passive-health");
    until_eligible(&example, 2.0);
    let [load, printed] = example.rest();
    assert!(load.contains("500: "), "{load}");
    assert_eq!(names(&printed), ["one"; 4], "{load}");
    eventually(Duration::from_secs(1), || {
        let told = example.proxy.events("upstream_health_changed");
        told.iter().any(|event| event["to"] == "ineligible")
    });
}
