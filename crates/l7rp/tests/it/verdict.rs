//! How upstreams stand with breakers and health, as metrics and events tell it.

use std::time::Duration;

use l7rp_testkit::{Client, Message, Origin, Proxy, SOON, Value, eventually, let_pass, within};

use crate::http2_tools::Conn;
use crate::setup::{assert_counts, assert_failed, get, in_flight, quiet};

/// Values of `proxy_circuit_breaker_state`.
pub const CLOSED: f64 = 0.0;
pub const OPEN: f64 = 1.0;
pub const HALF_OPEN: f64 = 2.0;

/// A breaker that opens at the first failure, and stays so: whatever is taken for a failure
/// shows.
pub const TOUCHY: &str =
    "circuit_breaker: { consecutive_failures: 1, open_min: 60s, open_max: 60s }";
/// A breaker that nothing opens: more than all would have to fail.
pub const NO_BREAKER: &str = "circuit_breaker: { failure_ratio: 1 }";

/// The only sample of a gauge about this upstream in the pool `b`.
#[track_caller]
fn gauge(proxy: &Proxy, name: &str, url: &str) -> f64 {
    let metrics = proxy.metrics();
    let labels = [format!("upstream=\"{url}\""), "pool=\"b\"".to_owned()];
    let mut found = metrics
        .series(name)
        .filter(|(rest, _)| labels.iter().all(|label| rest.contains(label)))
        .map(|(_, value)| value);
    let value = found.next().unwrap_or_else(|| panic!("no {name} about {url}"));
    assert!(found.next().is_none(), "several {name} about {url}");
    value
}

/// How the breaker of this upstream stands.
#[track_caller]
pub fn state(proxy: &Proxy, origin: &Origin) -> f64 {
    gauge(proxy, "proxy_circuit_breaker_state", &origin.url())
}

/// Waits until the breaker of this upstream stands so.
#[track_caller]
pub fn becomes(proxy: &Proxy, origin: &Origin, wanted: f64) {
    let mut last = f64::NAN;
    let reached = within(SOON, || {
        last = state(proxy, origin);
        (last == wanted).then_some(())
    });
    assert!(reached.is_some(), "the breaker is {last}, not {wanted}");
}

/// How often the breaker of this upstream has gone there.
#[track_caller]
pub fn turns(proxy: &Proxy, origin: &Origin, to: &str) -> f64 {
    let labels = [("pool", "b"), ("upstream", &*origin.url()), ("to", to)];
    proxy.metrics().sum("proxy_circuit_breaker_transitions_total", &labels)
}

/// Whether this upstream may be chosen.
#[track_caller]
pub fn is_eligible(proxy: &Proxy, origin: &Origin) -> bool {
    gauge(proxy, "proxy_upstream_eligible", &origin.url()) == 1.0
}

/// How many upstreams may be chosen.
#[track_caller]
pub fn eligible(proxy: &Proxy) -> f64 {
    proxy.metrics().sum("proxy_upstream_eligible", &[])
}

/// How often any upstream has become ineligible by health, for this reason.
#[track_caller]
pub fn ejections(proxy: &Proxy, reason: Option<&str>) -> f64 {
    let mut labels = vec![("to", "ineligible")];
    labels.extend(reason.map(|reason| ("reason", reason)));
    proxy.metrics().sum("proxy_health_eligibility_transitions_total", &labels)
}

/// Waits for the news that this upstream has become `eligible` or `ineligible`.
#[track_caller]
pub fn hear(proxy: &Proxy, origin: &Origin, to: &str) -> Value {
    let about = |e: &Value| e["upstream"] == origin.url() && e["to"] == to;
    proxy.wait_for_event("upstream_health_changed", about, SOON)
}

/// Nothing of what has happened so far is held against any upstream.
#[track_caller]
pub fn nobody_is_blamed(proxy: &Proxy) {
    let metrics = proxy.metrics();
    let turns = "proxy_circuit_breaker_transitions_total";
    assert_eq!(metrics.sum(turns, &[]), 0.0, "a breaker has moved");
    let states: Vec<_> = metrics.series("proxy_circuit_breaker_state").collect();
    assert!(!states.is_empty() && states.iter().all(|(_, v)| *v == CLOSED), "{states:?}");
    assert_eq!(ejections(proxy, None), 0.0);
    assert_eq!(metrics.sum("proxy_upstream_requests_total", &[("status", "err")]), 0.0);
}

/// Nothing is left of an attack by HTTP/2: no request, no place, no verdict about the upstream.
#[track_caller]
pub fn nothing_is_left(proxy: &Proxy, origin: &Origin) {
    eventually(SOON, || in_flight(proxy) == 0.0);
    assert_counts(proxy, "proxy_connections", &[], 0.0);
    assert_eq!(state(proxy, origin), CLOSED);
    nobody_is_blamed(proxy);
    quiet(proxy);
    assert_eq!(Conn::open(proxy).get("/honest").text(), "x");
}

/// What has happened is held against this upstream, by its breaker alone: one failure.
#[track_caller]
pub fn is_blamed(proxy: &Proxy, origin: &Origin) {
    becomes(proxy, origin, OPEN);
    assert_eq!(turns(proxy, origin, "open"), 1.0);
    assert_eq!(ejections(proxy, None), 0.0);
    assert!(!is_eligible(proxy, origin));
    let url = origin.url();
    let errors = [("upstream", url.as_str()), ("status", "err")];
    assert_counts(proxy, "proxy_upstream_requests_total", &errors, 1.0);
}

/// Checks that this was refused because every breaker is open; in how many seconds the client
/// is told to come again.
#[track_caller]
pub fn refused(proxy: &Proxy, answer: &Message) -> u64 {
    assert_failed(proxy, answer, 503, "destination_unavailable", "breaker_open");
    let seconds = answer.get("retry-after").and_then(|s| s.parse().ok()).expect("whole seconds");
    assert!(seconds >= 1);
    seconds
}

/// Waits until so many tries have been judged, one way or another.
#[track_caller]
pub fn judged(proxy: &Proxy, tries: usize) {
    assert_counts(proxy, "proxy_upstream_requests_total", &[], tries as f64);
}

/// Has the breaker of an upstream that does what it is told opened, and waits until its time is
/// over: the next request is the one that tries it.
#[track_caller]
pub fn half_open(proxy: &Proxy, origin: &Origin, open: Duration) {
    let opened = turns(proxy, origin, "open");
    while state(proxy, origin) != OPEN {
        proxy.get("/500");
    }
    assert_eq!(turns(proxy, origin, "open"), opened + 1.0);
    let_pass(open);
}

/// A client whose request for this path has reached the upstream.
#[track_caller]
pub fn asking(proxy: &Proxy, origin: &Origin, path: &str) -> Client {
    let before = origin.requests();
    let mut client = proxy.client();
    client.send(get("a.test", path, ""));
    eventually(SOON, || origin.requests() > before);
    client
}
