//! Counters that the data path writes: one shard for each worker, so that no cache line and
//! no lock is shared, summed when somebody asks.
//!
//! A shard lives with what it counts (a route, an upstream, a listener). When a reload
//! removes that, its series vanish with it; when a reload keeps it, they go on.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use l7rp_core::failure::Scope;
use l7rp_core::http1::request::Method;
use l7rp_core::upstream::breaker::State;
use l7rp_core::window::Percentile;

use crate::http2::meter::Flood;
use crate::sync::lock;
use crate::tls::REASONS;

/// A counter that one thread writes and any may read.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Adds one.
    #[inline]
    pub fn up(&self) {
        self.add(1);
    }

    /// Adds `n`. Not a read-modify-write: only the owning thread writes.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// The value.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Upper bounds of the duration buckets, in seconds.
pub const BUCKETS: [f64; 12] =
    [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

const BUCKETS_NS: [u64; 12] = [
    1_000_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
];

/// Durations in the buckets of [`BUCKETS`], and their sum.
#[derive(Debug, Default)]
pub struct Durations {
    /// Not cumulative; the last is above all bounds.
    buckets: [Count; 13],
    sum_ns: Count,
}

impl Durations {
    /// Records one.
    #[inline]
    pub fn record(&self, d: Duration) {
        let ns = d.as_nanos() as u64;
        // Most requests fall into the first buckets: a walk beats a binary search.
        let ix = BUCKETS_NS.iter().position(|&bound| ns <= bound).unwrap_or(BUCKETS_NS.len());
        self.buckets[ix].up();
        self.sum_ns.add(ns);
    }

    /// Adds this shard to a sum.
    pub fn add_to(&self, sum: &mut DurationSum) {
        for (to, from) in sum.buckets.iter_mut().zip(&self.buckets) {
            *to += from.get();
        }
        sum.seconds += self.sum_ns.get() as f64 / 1e9;
    }
}

/// The sum of shards.
#[derive(Debug, Default, Clone)]
pub struct DurationSum {
    /// Not cumulative.
    pub buckets: [u64; 13],
    /// Sum of all durations.
    pub seconds: f64,
}

/// Counters by status code, made as codes are first seen.
#[derive(Debug, Default)]
pub struct ByStatus {
    classes: [OnceLock<Box<[Count; 100]>>; 5],
}

impl ByStatus {
    /// Counts one answer with this status. Codes outside 100–599 do not occur.
    #[inline]
    pub fn up(&self, status: u16) {
        let class = usize::from(status / 100).wrapping_sub(1);
        if let Some(class) = self.classes.get(class) {
            let counts = class.get_or_init(|| Box::new([const { Count(AtomicU64::new(0)) }; 100]));
            counts[usize::from(status % 100)].up();
        }
    }

    /// Calls `each` with every status that was seen and its count.
    pub fn each(&self, mut each: impl FnMut(u16, u64)) {
        for (class, counts) in (1u16..).zip(&self.classes) {
            for (rest, count) in (0u16..).zip(counts.get().map(|c| &c[..]).unwrap_or_default()) {
                if count.get() > 0 {
                    each(class * 100 + rest, count.get());
                }
            }
        }
    }
}

/// The counts by status of several shards.
pub fn by_status<'a>(shards: impl Iterator<Item = &'a ByStatus>) -> Vec<(u16, u64)> {
    let mut sums = BTreeMap::new();
    for shard in shards {
        shard.each(|status, count| *sums.entry(status).or_default() += count);
    }
    sums.into_iter().collect()
}

/// Requests of one method on one route.
#[derive(Debug, Default)]
pub struct MethodStats {
    /// Answers by status.
    pub status: ByStatus,
    /// From the head's arrival to the last octet of the answer.
    pub duration: Durations,
}

/// One worker's counters of one route.
#[derive(Debug, Default)]
#[repr(align(128))] // two lines: the prefetcher pulls neighbours
pub struct RouteStats {
    methods: [OnceLock<Box<MethodStats>>; Method::ALL.len()],
    /// Tunnels opened.
    pub tunnels_opened: Count,
    /// Tunnels ended.
    pub tunnels_ended: Count,
    /// Requests that came too often.
    pub rate_limited: Count,
    /// Tries after the first whose response went to the client.
    pub retries_succeeded: Count,
    /// Tries after the first that did not help.
    pub retries_failed: Count,
    /// Second tries beside the first.
    pub hedges: Count,
    /// Races that the first try has won.
    pub won_by_primary: Count,
    /// Races that the second try has won.
    pub won_by_hedge: Count,
    /// How long upstreams took to answer, for hedging by percentile.
    pub latency: Percentile,
}

impl RouteStats {
    /// The counters of `method`.
    #[inline]
    pub fn method(&self, method: Method) -> &MethodStats {
        self.methods[method as usize].get_or_init(Box::default)
    }

    /// Those of `method`, if it was ever seen.
    pub fn seen(&self, method: Method) -> Option<&MethodStats> {
        self.methods[method as usize].get().map(AsRef::as_ref)
    }
}

/// One worker's counters of one upstream.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct UpstreamStats {
    /// Answers by status.
    pub status: ByStatus,
    /// Tries that failed without a whole answer.
    pub errors: Count,
    /// Tries that were given up because the client left.
    pub cancels: Count,
    /// From the request's first octet to the response's last.
    pub duration: Durations,
    /// Connections opened.
    pub connects: Count,
    /// Connections closed.
    pub closes: Count,
    /// Connections idle now; only ever written as a whole value.
    pub idle: AtomicU64,
    /// Of those that carry many requests, the ones without any; likewise.
    pub idle_h2: AtomicU64,
}

/// Connections to an upstream, of all its shards: idle, and in use.
pub fn connections(shards: &[UpstreamStats]) -> (u64, u64) {
    let idle = |s: &UpstreamStats| s.idle.load(Relaxed) + s.idle_h2.load(Relaxed);
    let idle: u64 = shards.iter().map(idle).sum();
    let closed: u64 = shards.iter().map(|s| s.closes.get()).sum();
    let opened: u64 = shards.iter().map(|s| s.connects.get()).sum();
    (idle, opened.saturating_sub(closed).saturating_sub(idle))
}

/// How often breaker and health of one upstream have changed. Rare, so it may lock.
#[derive(Debug, Default)]
pub struct Transitions {
    to_closed: AtomicU64,
    to_open: AtomicU64,
    to_half_open: AtomicU64,
    health: Mutex<BTreeMap<(&'static str, String), u64>>,
}

/// States of a breaker, in the order of the gauge.
pub const STATES: [State; 3] = [State::Closed, State::Open, State::HalfOpen];

/// The label of a breaker's state.
pub fn state_name(state: State) -> &'static str {
    match state {
        State::Closed => "closed",
        State::Open => "open",
        State::HalfOpen => "half_open",
    }
}

impl Transitions {
    fn of(&self, to: State) -> &AtomicU64 {
        match to {
            State::Closed => &self.to_closed,
            State::Open => &self.to_open,
            State::HalfOpen => &self.to_half_open,
        }
    }

    /// The breaker has changed.
    pub fn breaker(&self, to: State) {
        self.of(to).fetch_add(1, Relaxed);
    }

    /// How often the breaker has changed to this.
    pub fn breaker_count(&self, to: State) -> u64 {
        self.of(to).load(Relaxed)
    }

    /// The health has changed, for this reason: one of a fixed list, or a status.
    pub fn health(&self, to: &'static str, reason: &str) {
        *lock(&self.health).entry((to, reason.to_owned())).or_default() += 1;
    }

    /// Every change of health that was seen, with its count.
    pub fn health_counts(&self) -> Vec<(&'static str, String, u64)> {
        lock(&self.health).iter().map(|((to, why), n)| (*to, why.clone(), *n)).collect()
    }
}

/// One worker's counters of what belongs to the process as a whole.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct WorkerStats {
    /// Connections of clients that have begun to be served.
    pub connections_opened: Count,
    /// Those of them that have ended.
    pub connections_closed: Count,
    /// Tunnels opened, on whatever route.
    pub tunnels_opened: Count,
    /// Tunnels ended.
    pub tunnels_ended: Count,
    /// Requests that the proxy itself has cut off in their middle.
    pub cut: Count,
    /// Requests and connections shed, by [`Scope::index`]: of the process, so that no reload
    /// takes any away.
    pub shed: [Count; Scope::ALL.len()],
    /// Tunnels that it has closed because the grace of a drain was over.
    pub tunnels_closed: Count,
    /// When the worker last showed that it still works, in ns; only written as a whole value.
    pub alive_at: AtomicU64,
}

/// What reloads have come to. One thread writes.
#[derive(Debug, Default)]
pub struct Reloads {
    /// Put in force.
    pub ok: Count,
    /// Refused.
    pub rejected: Count,
    /// The last was refused.
    pub last_failed: AtomicBool,
    /// Wall-clock ms of the last that was put in force; 0: none was.
    pub last_success_ms: AtomicU64,
    /// From the signal to the end.
    pub duration: Durations,
    /// Why the last one that was refused was refused; empty: none was.
    pub last_error: Mutex<String>,
}

/// One worker's counters of one listener.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct ListenerStats {
    /// Connections accepted.
    pub opened: Count,
    /// Connections ended.
    pub closed: Count,
    /// Connections that spoke HTTP/1.
    pub opened_h1: Count,
    /// Connections that spoke HTTP/2.
    pub opened_h2: Count,
    /// HTTP/2 connections that were closed because of a flood of frames, by [`Flood`].
    pub h2_floods: [Count; Flood::ALL.len()],
    /// The same because of streams reset in a hurry.
    pub h2_resets: Count,
    /// Streams that were reset because the client did not take what it was sent.
    pub h2_stalled: Count,
    /// TLS handshakes that came to nothing, by [`tls_failure_name`].
    pub tls_failures: [Count; TLS_FAILURES],
    /// Requests that no route matched.
    pub no_route: Count,
    /// Requests shed, by [`Scope::index`].
    pub shed: [Count; Scope::ALL.len()],
    /// Requests refused as malformed or over a limit, by [`bad_reason_index`].
    pub bad: [Count; BAD_REASONS.len()],
}

/// Reasons of `proxy_tls_handshake_failures_total`, and one for what took too long.
pub const TLS_FAILURES: usize = REASONS.len() + 1;

/// The label of a place among them.
pub fn tls_failure_name(ix: usize) -> &'static str {
    REASONS.get(ix).copied().unwrap_or("timeout")
}

impl ListenerStats {
    /// A TLS handshake came to nothing.
    pub fn tls_failed(&self, reason: &str) {
        let ix = REASONS.iter().position(|known| *known == reason).unwrap_or(REASONS.len());
        self.tls_failures[ix].up();
    }
}

/// Reasons of `proxy_bad_requests_total`: those of failures with a 4xx or 505 that the
/// request itself has caused.
pub const BAD_REASONS: [&str; 27] = [
    "malformed_start_line",
    "malformed_target",
    "malformed_field_name",
    "malformed_field_value",
    "malformed_line_ending",
    "host_missing",
    "host_repeated",
    "host_invalid",
    "bad_content_length",
    "bad_transfer_encoding",
    "content_length_with_transfer_encoding",
    "bad_chunk",
    "bad_trailer",
    "early_upgrade_data",
    "target_too_long",
    "head_too_large",
    "too_many_fields",
    "version_unsupported",
    "method_refused",
    "expectation_unknown",
    "misdirected",
    "body_too_large",
    "head_timeout",
    "body_timeout",
    "body_too_slow",
    "client_stalled",
    "client_gone",
];

/// Position of a failure's reason in [`BAD_REASONS`].
pub fn bad_reason_index(reason: &str) -> Option<usize> {
    BAD_REASONS.iter().position(|r| *r == reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_their_buckets() {
        let d = Durations::default();
        for ms in [0, 1, 2, 5, 10, 11, 9_999, 10_001] {
            d.record(Duration::from_millis(ms));
        }
        let mut sum = DurationSum::default();
        d.add_to(&mut sum);
        assert_eq!(sum.buckets, [2, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]);
        assert!((sum.seconds - 20.029).abs() < 1e-9);
    }

    #[test]
    fn statuses_are_counted_where_they_belong() {
        let by = ByStatus::default();
        for status in [100, 200, 200, 404, 599, 0, 600, u16::MAX] {
            by.up(status);
        }
        let mut seen = Vec::new();
        by.each(|status, n| seen.push((status, n)));
        assert_eq!(seen, [(100, 1), (200, 2), (404, 1), (599, 1)]);
    }

    #[test]
    fn buckets_agree() {
        for (seconds, ns) in BUCKETS.iter().zip(BUCKETS_NS) {
            assert_eq!((seconds * 1e9).round() as u64, ns);
        }
    }
}
