//! Setups of routes that try again, upstreams that fail in known ways, and what must be true
//! when all is over.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use l7rp_testkit::{Call, Origin, Proxy, Then};

use crate::setup::{Setup, assert_counts, over};

/// More retries than any test makes.
pub const PLENTY: &str = "retry_budget: { ratio: 1.0, min_per_second: 1000 }";
/// No retry at all.
pub const NOTHING_LEFT: &str = "retry_budget: { ratio: 0.0, min_per_second: 0 }";
/// A breaker that many failures do not open.
pub const NEVER_OPENS: &str = "circuit_breaker: { failure_ratio: 1.0 }";

/// A route that tries again with these keys, over upstreams that take turns.
pub fn with_retry(origins: &[&Origin], keys: &str) -> Setup {
    over(origins)
        .pool("selector: { algorithm: round-robin }")
        .pool(NEVER_OPENS)
        .route(&format!("middleware: [{{ retry: {{ {keys} }} }}]"))
}

/// As [`with_retry`], at once and as often as it likes.
pub fn retrying(origins: &[&Origin], keys: &str) -> Setup {
    with_retry(origins, &format!("backoff: 1ms, {keys}")).pool(PLENTY)
}

/// An answer with this status, these lines and this body.
pub fn answer(status: u16, lines: &str, body: &str) -> String {
    format!("HTTP/1.1 {status} Said\r\n{lines}Content-Length: {}\r\n\r\n{body}", body.len())
}

/// Takes the request and answers so.
pub fn say(call: &mut Call<'_>, status: u16, lines: &str, body: &str) -> Then {
    if call.body().is_err() {
        return Then::Close;
    }
    let whole = answer(status, lines, body);
    let is_head = call.request.method() == "HEAD";
    call.send(if is_head { &whole[..whole.len() - body.len()] } else { &whole });
    Then::Next
}

/// Always answers with this status.
pub fn says(
    status: u16,
    body: &str,
) -> impl Fn(&mut Call<'_>) -> Then + Clone + Send + Sync + use<> {
    let body = body.to_owned();
    move |call| say(call, status, "", &body)
}

/// Upstreams with one script, which is told how many requests for the same target have come
/// before, to any of them: 0 for the first try, 1 for the second.
pub fn in_turn<const N: usize>(
    script: impl Fn(&mut Call<'_>, usize) -> Then + Clone + Send + Sync + 'static,
) -> [Origin; N] {
    let counts = Arc::new(Mutex::new(HashMap::<String, usize>::new()));
    std::array::from_fn(|_| {
        let (counts, script) = (counts.clone(), script.clone());
        Origin::start(move |call| {
            let nth = {
                let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
                let count = counts.entry(call.request.target().to_owned()).or_default();
                *count += 1;
                *count - 1
            };
            script(call, nth)
        })
    })
}

/// Moments, written down by scripts.
#[derive(Clone, Debug, Default)]
pub struct Moments(Arc<Mutex<Vec<Instant>>>);

impl Moments {
    /// Adds this one.
    pub fn now(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
    }

    /// All so far.
    pub fn all(&self) -> Vec<Instant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// How many requests these have had.
pub fn requests(origins: &[Origin]) -> usize {
    origins.iter().map(Origin::requests).sum()
}

/// How many tries the log has for the request with this path.
#[track_caller]
pub fn attempts(proxy: &Proxy, path: &str) -> u64 {
    proxy.logged_path(path)["attempts"].as_u64().expect("a number of attempts")
}

/// Waits until nothing is in progress; nothing has gone wrong in us either.
#[track_caller]
pub fn assert_at_rest(proxy: &Proxy) {
    assert_counts(proxy, "proxy_upstream_inflight", &[], 0.0);
    assert_counts(proxy, "proxy_upstream_connections", &[("state", "active")], 0.0);
    assert_counts(proxy, "proxy_panics_total", &[], 0.0);
}

/// How many breakers have changed their state so far.
pub fn transitions(proxy: &Proxy) -> f64 {
    proxy.metrics().sum("proxy_circuit_breaker_transitions_total", &[])
}

/// The state of this upstream's breaker: 0 closed, 1 open, 2 half-open.
#[track_caller]
pub fn breaker(proxy: &Proxy, origin: &Origin) -> f64 {
    let metrics = proxy.metrics();
    assert!(metrics.series("proxy_circuit_breaker_state").count() > 0, "the state is told");
    metrics.sum("proxy_circuit_breaker_state", &[("upstream", &origin.url())])
}
