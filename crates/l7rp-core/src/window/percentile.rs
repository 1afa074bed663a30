use crate::sync::atomic::{AtomicU16, AtomicU64, Ordering::Relaxed};
use std::array;
use std::time::Duration;

use crate::names::Nanos;

/// 2¹⁶ ns ≈ 66 µs: what is shorter counts as this.
const SHORTEST: u32 = 16;

/// 2³⁶ ns ≈ 69 s: what is longer counts as this.
const LONGEST: u32 = 36;

/// Each doubling has eight buckets of equal width.
const PARTS: u32 = 3;

const BUCKETS: usize = ((LONGEST - SHORTEST) << PARTS) as usize;

/// Observations that count at most; then all counts are halved.
const MOST: u16 = 4_096;

/// Observations without which nothing is said.
const FEWEST: u16 = 50;

/// As often as this all counts are halved anyway, so that what was busy yesterday is not judged
/// by yesterday.
const HALVED_EVERY: u64 = 10_000_000_000;

/// An answer is good for this many observations.
const KEPT: u16 = 32;

/// A percentile of the latest latencies: a histogram that forgets.
///
/// It is fed and read by one thread; each worker has its own. Another thread may look at it
/// without harm, but what it reads may be that of another percentile.
///
/// The buckets are log-linear: eight to the doubling, so a bucket is 9 % wide, and an eighth at
/// most. All counts are halved whenever they are 4,096 together, and every ten seconds.
#[derive(Debug)]
#[repr(align(64))]
pub struct Percentile {
    counts: [AtomicU16; BUCKETS],
    /// Sum of the counts.
    total: AtomicU16,
    /// When all counts are halved next; 0: nothing has been observed.
    halve_at: AtomicU64,
    /// The latest answer: bits of the percentile, and nanoseconds.
    asked: AtomicU64,
    answer: AtomicU64,
    /// Observations for which the answer is still good.
    kept: AtomicU16,
}

impl Percentile {
    /// One that has observed nothing.
    #[must_use]
    pub fn new() -> Self {
        Self {
            counts: array::from_fn(|_| AtomicU16::new(0)),
            total: AtomicU16::new(0),
            halve_at: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            answer: AtomicU64::new(0),
            kept: AtomicU16::new(0),
        }
    }

    /// Takes in a latency as seen at `now`.
    pub fn observe(&self, latency: Duration, now: Nanos) {
        self.forget(now);
        // Loads and stores and no read-modify-write: only the owning thread writes.
        let count = &self.counts[bucket(latency)];
        count.store(count.load(Relaxed).saturating_add(1), Relaxed);
        self.kept.store(self.kept.load(Relaxed).saturating_sub(1), Relaxed);
        let total = self.total.load(Relaxed).saturating_add(1);
        self.total.store(total, Relaxed);
        if total >= MOST {
            self.halve();
        }
    }

    /// The latency that `percentile` (0..=100) of a hundred observations do not exceed, at most one
    /// bucket too high; `None`: fewer than 50 observations.
    ///
    /// The answer is up to 32 observations old. It does not age while nothing is observed.
    #[must_use]
    pub fn read(&self, percentile: f64) -> Option<Duration> {
        let total = self.total.load(Relaxed);
        if total < FEWEST {
            return None;
        }
        if self.kept.load(Relaxed) == 0 || self.asked.load(Relaxed) != percentile.to_bits() {
            self.answer.store(self.find(percentile, total), Relaxed);
            self.asked.store(percentile.to_bits(), Relaxed);
            self.kept.store(KEPT, Relaxed);
        }
        Some(Duration::from_nanos(self.answer.load(Relaxed)))
    }

    /// The upper end of the bucket in which the percentile is, by nearest rank.
    fn find(&self, percentile: f64, total: u16) -> u64 {
        // Rounding must not make the hundredth of a hundred the hundred-and-first.
        let rank = (percentile / 100.0 * f64::from(total) - 1e-6).ceil() as u16;
        // From the top, where the percentiles are that anybody asks for.
        let mut above = total.saturating_sub(rank.max(1));
        for (bucket, count) in self.counts.iter().enumerate().rev() {
            match above.checked_sub(count.load(Relaxed)) {
                Some(less) => above = less,
                None => return upper_end(bucket),
            }
        }
        upper_end(0)
    }

    fn forget(&self, now: Nanos) {
        let at = self.halve_at.load(Relaxed);
        if now.0 < at {
            return;
        }
        if at > 0 {
            let periods = 1 + (now.0 - at) / HALVED_EVERY;
            // 2¹² is all that there can be.
            (0..periods.min(12)).for_each(|_| self.halve());
        }
        self.halve_at.store(now.0.saturating_add(HALVED_EVERY), Relaxed);
    }

    /// Halves all counts. What does not divide goes to the next bucket: single observations far
    /// apart, as the slow ones are, would otherwise all be lost at once.
    fn halve(&self) {
        let (mut rest, mut total) = (0, 0);
        for count in &self.counts {
            let has = count.load(Relaxed) + rest;
            rest = has % 2;
            total += has / 2;
            count.store(has / 2, Relaxed);
        }
        self.total.store(total, Relaxed);
        self.kept.store(0, Relaxed);
    }
}

impl Default for Percentile {
    fn default() -> Self {
        Self::new()
    }
}

fn bucket(latency: Duration) -> usize {
    let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
    let nanos = nanos.clamp(1 << SHORTEST, (1 << LONGEST) - 1);
    let doubling = nanos.ilog2();
    let part = (nanos >> (doubling - PARTS)) as u32 & ((1 << PARTS) - 1);
    (((doubling - SHORTEST) << PARTS) + part) as usize
}

/// The shortest latency, in nanoseconds, that is too long for a bucket.
fn upper_end(bucket: usize) -> u64 {
    let (doubling, part) = (bucket >> PARTS, bucket as u64 & ((1 << PARTS) - 1));
    ((1 << PARTS) + part + 1) << (doubling + (SHORTEST - PARTS) as usize)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const PERCENTILES: [f64; 9] = [0.0, 1.0, 25.0, 50.0, 90.0, 95.0, 99.0, 99.9, 100.0];

    /// By nearest rank, as in the definition.
    fn exact(sorted: &[u64], percentile: f64) -> u64 {
        let rank = (percentile / 100.0 * sorted.len() as f64 - 1e-6).ceil() as usize;
        sorted[rank.max(1) - 1]
    }

    fn micros(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    #[test]
    fn buckets_are_contiguous_and_narrow() {
        let mut from = 1_u64 << SHORTEST;
        for at in 0..BUCKETS {
            let to = upper_end(at);
            assert_eq!(bucket(Duration::from_nanos(from)), at);
            assert_eq!(bucket(Duration::from_nanos(to - 1)), at);
            assert!(from < to && to - from <= from / 8, "{at}: {from}..{to}");
            from = to;
        }
        assert_eq!(from, 1 << LONGEST);
        assert_eq!(bucket(Duration::ZERO), 0);
        assert_eq!(bucket(Duration::MAX), BUCKETS - 1);
    }

    #[test]
    fn says_nothing_before_there_is_something_to_say() {
        let latencies = Percentile::new();
        for n in 0..50 {
            assert_eq!(latencies.read(50.0), None, "{n}");
            latencies.observe(micros(100), Nanos(SECOND));
        }
        assert!(latencies.read(50.0).is_some());
    }

    #[test]
    fn an_answer_is_kept_for_a_while() {
        let latencies = Percentile::new();
        (0..50).for_each(|_| latencies.observe(micros(100), Nanos(SECOND)));
        let before = latencies.read(100.0);
        for n in 0..32 {
            assert_eq!(latencies.read(100.0), before, "{n}");
            latencies.observe(micros(200), Nanos(SECOND));
        }
        assert!(latencies.read(100.0) > before);
        assert_eq!(latencies.read(10.0), before, "another percentile is another answer");
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 300, failure_persistence: None, ..ProptestConfig::default()
        })]

        #[test]
        fn same_as_sorting(
            // Even over the doublings, some beyond the ends.
            latencies in prop::collection::vec(
                (12..40_u32, 0..4_096_u64).prop_map(|(d, m)| (1 << d) + (m << d >> 12)), 50..1_000
            ),
            some in 0.0..100.0_f64,
        ) {
            let histogram = Percentile::new();
            let mut sorted = Vec::new();
            for latency in latencies {
                histogram.observe(Duration::from_nanos(latency), Nanos(SECOND));
                sorted.push(latency.clamp(1 << SHORTEST, (1 << LONGEST) - 1));
            }
            sorted.sort_unstable();
            for percentile in PERCENTILES.into_iter().chain([some]) {
                let got = histogram.read(percentile).unwrap().as_nanos() as u64;
                let exact = exact(&sorted, percentile);
                prop_assert!(exact < got && got <= exact + exact / 8 + 1, "{percentile}: {got} is not {exact}");
            }
        }
    }

    #[test]
    fn halving_keeps_the_shape() {
        let mut rng = fastrand::Rng::with_seed(3);
        let latencies = Percentile::new();
        let mut sorted = Vec::new();
        // Two minutes at 1,000/s; a long tail: the square of a square.
        for n in 0..120_000 {
            let latency = 1_000_000 + (rng.f64().powi(8) * 1e9) as u64;
            latencies.observe(Duration::from_nanos(latency), Nanos(n * SECOND / 1_000));
            sorted.push(latency);
        }
        sorted.sort_unstable();
        for percentile in [5.0, 50.0, 90.0, 95.0, 99.0] {
            let got = latencies.read(percentile).unwrap().as_nanos() as f64;
            // Of a few thousand the percentile itself is not exact.
            let around = [percentile - 1.0, percentile + 0.8]
                .map(|percentile| exact(&sorted, percentile) as f64);
            assert!(around[0] < got && got < around[1] * 1.13, "{percentile}: {got} {around:?}");
        }
    }

    #[test]
    fn what_is_past_is_forgotten() {
        let latencies = Percentile::new();
        let feed = |count: u64, latency, at: u64| {
            (0..count).for_each(|_| latencies.observe(latency, Nanos(at)));
        };
        let near = |percentile, want: Duration| {
            let got = latencies.read(percentile).unwrap();
            assert!(want < got && got <= want * 9 / 8, "{got:?} is not {want:?}");
        };
        let (slow, fast) = (micros(90_000), micros(700));
        feed(10_000, slow, SECOND);
        near(50.0, slow);
        feed(5_000, fast, SECOND);
        near(50.0, fast);
        near(90.0, slow);
        feed(20_000, fast, SECOND);
        near(99.0, fast);
        // By time: of 3,000 slow ones 93 are left after five halvings.
        let later = 1_000 * SECOND;
        feed(3_000, slow, later);
        for step in 1..=5 {
            feed(1, fast, later + step * 10 * SECOND);
        }
        feed(93, fast, later + 50 * SECOND);
        near(45.0, fast);
        near(55.0, slow);
        // A day later there is too little to say.
        feed(49, fast, 86_400 * SECOND);
        assert_eq!(latencies.read(50.0), None);
        feed(1, fast, 86_400 * SECOND);
        near(100.0, fast);
    }

    #[test]
    fn nonsense_is_borne() {
        let latencies = Percentile::new();
        (0..100).for_each(|_| latencies.observe(micros(100), Nanos(0)));
        latencies.observe(micros(100), Nanos::NEVER);
        (0..100).for_each(|_| latencies.observe(micros(100), Nanos(5)));
        for percentile in [f64::NAN, -1.0, 101.0, f64::INFINITY, f64::NEG_INFINITY] {
            assert_eq!(latencies.read(percentile), latencies.read(50.0), "{percentile}");
        }
    }

    #[test]
    fn other_threads_may_look() {
        let latencies = Percentile::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..100_000 {
                    latencies.observe(micros(100 + n % 1_000), Nanos(n * SECOND / 1_000));
                }
            });
            for _ in 0..3 {
                scope.spawn(|| {
                    for seen in (0..100_000).filter_map(|_| latencies.read(90.0)) {
                        assert!(seen > micros(64) && seen < micros(1_300), "{seen:?}");
                    }
                });
            }
        });
    }
}
