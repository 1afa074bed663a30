use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::names::Nanos;

/// How long an [`Ewma`] remembers: the share of an old value that is left after `t` is
/// `exp(−t / half_life)`.
///
/// The configuration calls this the half-life and so do we, although the published formula
/// makes it the time after which 1/e ≈ 37 % is left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HalfLife {
    /// 1/ns, so that the hot path multiplies instead of divides.
    per_nano: f64,
}

impl HalfLife {
    /// A memory of `time`. Zero remembers nothing: every observation replaces the last one.
    #[must_use]
    pub fn new(time: Duration) -> Self {
        Self { per_nano: 1.0 / time.as_nanos() as f64 }
    }

    /// The weight that is lost in `elapsed`: 1 − exp(−elapsed / half-life), in 0..=1.
    fn lost(self, elapsed: Duration) -> f64 {
        // Beyond this exp() says nothing that its first term does not: the relative error is
        // at most x/2, 0.05 %. At thousands of requests a second nearly all calls end here.
        const TINY: f64 = 1.0 / 1024.0;
        if elapsed.is_zero() {
            return 0.0; // also keeps 0 × ∞ out
        }
        let x = elapsed.as_nanos() as f64 * self.per_nano;
        if x < TINY { x } else { -(-x).exp_m1() }
    }
}

/// A time-weighted moving average that many threads feed without a lock.
///
/// `α = 1 − exp(−Δt / half-life)`, with Δt the time since the previous observation: the
/// average forgets in real time, not per sample, so a busy upstream and a quiet one are
/// measured by the same rule.
///
/// The unit is whatever the caller observes; latencies here are seconds.
#[derive(Debug)]
pub struct Ewma {
    /// Bits of an `f64`; NaN until the first observation.
    value: AtomicU64,
    /// Nanoseconds of the last observation; 0 until the first.
    stamp: AtomicU64,
}

impl Ewma {
    /// An average that has observed nothing.
    #[must_use]
    pub fn new() -> Self {
        Self { value: AtomicU64::new(f64::NAN.to_bits()), stamp: AtomicU64::new(0) }
    }

    /// An average that begins with `value`, as if it had been observed at time zero.
    #[must_use]
    pub fn starting_at(value: f64) -> Self {
        Self { value: AtomicU64::new(value.to_bits()), stamp: AtomicU64::new(0) }
    }

    /// Takes in `value` as seen at `now`; the first one becomes the average.
    ///
    /// The average never leaves the range of what was observed, however many threads call
    /// this at once: each step moves it towards one observation and not past it. Two calls
    /// with the same `now` share one Δt, so the second has no weight; otherwise a burst
    /// would count an interval several times. Values that are not finite are ignored.
    pub fn observe(&self, now: Nanos, value: f64, half_life: HalfLife) {
        if value.is_finite() {
            self.observe_at_most(now, value, half_life, 1.0);
        }
    }

    /// The same with a weight of at most `heaviest` (α is cut off there), and gives the average
    /// after it. `value` must be finite.
    ///
    /// After a long pause α is near 1, and one observation is all that the average knows. That
    /// is right for an estimate, but not where a decision hangs on it.
    pub fn observe_at_most(
        &self,
        now: Nanos,
        value: f64,
        half_life: HalfLife,
        heaviest: f64,
    ) -> f64 {
        // Whoever moves the stamp owns the interval up to it.
        let before = Nanos(self.stamp.fetch_max(now.0, Relaxed));
        let alpha = half_life.lost(now.since(before)).min(heaviest);
        let mut bits = self.value.load(Relaxed);
        loop {
            let old = f64::from_bits(bits);
            let new = if old.is_nan() {
                value
            } else {
                // Rounding could pass the end of the range by one unit in the last place.
                (old + alpha * (value - old)).clamp(old.min(value), old.max(value))
            };
            // Most of what is averaged is a long row of equal values; spare the others the write.
            if new.to_bits() == bits {
                return new;
            }
            match self.value.compare_exchange_weak(bits, new.to_bits(), Relaxed, Relaxed) {
                Ok(_) => return new,
                Err(seen) => bits = seen,
            }
        }
    }

    /// Forgets everything before `now`: the average is `value`.
    ///
    /// An observation of another thread at the same time may still add its weight.
    pub fn restart(&self, now: Nanos, value: f64) {
        self.stamp.fetch_max(now.0, Relaxed);
        self.value.store(value.to_bits(), Relaxed);
    }

    /// The average, shrunk by the time since the last observation; `None`: never observed.
    ///
    /// Shrinking is what brings an upstream back that was slow once and therefore is no
    /// longer chosen, and so would never be measured again.
    #[must_use]
    pub fn read(&self, now: Nanos, half_life: HalfLife) -> Option<f64> {
        let value = self.raw()?;
        let age = now.since(Nanos(self.stamp.load(Relaxed)));
        Some(value * (1.0 - half_life.lost(age)))
    }

    /// The average as of the last observation, for status pages; `None`: never observed.
    #[must_use]
    pub fn raw(&self) -> Option<f64> {
        let value = f64::from_bits(self.value.load(Relaxed));
        (!value.is_nan()).then_some(value)
    }
}

impl Default for Ewma {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-12 * b.abs().max(1.0)
    }

    #[test]
    fn follows_the_formula() {
        let ten = HalfLife::new(Duration::from_secs(10));
        // (seconds, observed, average after it)
        let steps = [
            (1, 0.100, 0.1),
            (11, 0.200, 0.163_212_055_882_855_8), // Δt = half-life: α = 1 − 1/e
            (11, 9.000, 0.163_212_055_882_855_8), // no time has passed: no weight
            (16, 0.000, 0.098_993_115_927_683_7), // α = 1 − e^−0.5
            (12, 5.000, 0.098_993_115_927_683_7), // late report: its interval is already counted
            (26, 0.000, 0.036_417_532_167_296_1), // and Δt still counts from 16 s
            (1_016, 0.300, 0.3),                  // e^−100 is nothing
        ];
        let ewma = Ewma::new();
        for (at, value, want) in steps {
            ewma.observe(Nanos(at * SECOND), value, ten);
            let got = ewma.raw().unwrap();
            assert!(near(got, want), "at {at} s: {got} is not {want}");
        }
    }

    #[test]
    fn fades_while_nothing_is_observed() {
        let ten = HalfLife::new(Duration::from_secs(10));
        let ewma = Ewma::new();
        assert_eq!(ewma.read(Nanos(SECOND), ten), None);
        assert_eq!(ewma.raw(), None);
        ewma.observe(Nanos(SECOND), 2.0, ten);
        for (at, want) in [
            (0, 2.0), // a clock slightly behind
            (1, 2.0),
            (11, 2.0 * (-1.0f64).exp()),
            (21, 2.0 * (-2.0f64).exp()),
            (100_001, 0.0),
        ] {
            let got = ewma.read(Nanos(at * SECOND), ten).unwrap();
            assert!(near(got, want), "at {at} s: {got} is not {want}");
        }
        assert_eq!(ewma.raw(), Some(2.0));
    }

    #[test]
    fn short_intervals_agree_with_exp() {
        let ten = HalfLife::new(Duration::from_secs(10));
        for nanos in [1, 1_000, 1_000_000, 9_765_624, 9_765_626, 20_000_000] {
            let exact = -(-(nanos as f64) / 1e10).exp_m1();
            let got = ten.lost(Duration::from_nanos(nanos));
            assert!((got / exact - 1.0).abs() < 0.000_5, "{nanos} ns: {got} is not {exact}");
        }
    }

    #[test]
    fn no_memory_keeps_only_the_last() {
        let none = HalfLife::new(Duration::ZERO);
        let ewma = Ewma::new();
        ewma.observe(Nanos(1), 1.0, none);
        ewma.observe(Nanos(2), 3.0, none);
        assert_eq!(ewma.raw(), Some(3.0));
        assert_eq!(ewma.read(Nanos(2), none), Some(3.0));
        assert_eq!(ewma.read(Nanos(3), none), Some(0.0));
    }

    #[test]
    fn rounding_does_not_leave_the_range() {
        let one = HalfLife::new(Duration::from_secs(1));
        let ewma = Ewma::new();
        ewma.observe(Nanos(SECOND), 1e17, one);
        ewma.observe(Nanos(1_000 * SECOND), 0.1, one);
        assert_eq!(ewma.raw(), Some(0.1), "not 1e17 − 1e17");
    }

    #[test]
    fn a_weight_can_be_bounded() {
        let ten = HalfLife::new(Duration::from_secs(10));
        let ewma = Ewma::starting_at(0.0);
        // (seconds, observed, heaviest, average after it)
        for (at, value, heaviest, want) in [
            (10, 1.0, 0.25, 0.25),
            (20, 1.0, 0.25, 0.437_5),
            (1_000, 0.0, 0.5, 0.218_75),
            (1_010, 1.0, 1.0, 0.712_594_186_584_810_7), // α = 1 − 1/e
            (1_020, 1.0, 0.0, 0.712_594_186_584_810_7),
        ] {
            let got = ewma.observe_at_most(Nanos(at * SECOND), value, ten, heaviest);
            assert!(near(got, want), "at {at} s: {got} is not {want}");
            assert_eq!(ewma.raw(), Some(got));
        }
        ewma.restart(Nanos(1_025 * SECOND), 0.0);
        let got = ewma.observe_at_most(Nanos(1_030 * SECOND), 1.0, ten, 1.0);
        assert!(near(got, -(-0.5f64).exp_m1()), "the interval begins at the restart: {got}");
    }

    #[test]
    fn nonsense_is_ignored() {
        let one = HalfLife::new(Duration::from_secs(1));
        let ewma = Ewma::new();
        ewma.observe(Nanos(1), f64::NAN, one);
        ewma.observe(Nanos(1), f64::INFINITY, one);
        assert_eq!(ewma.raw(), None);
    }

    #[test]
    fn stays_in_range_when_many_observe_at_once() {
        let short = HalfLife::new(Duration::from_nanos(300));
        for round in 0..20 {
            let ewma = Ewma::new();
            std::thread::scope(|scope| {
                for thread in 0..8u64 {
                    let ewma = &ewma;
                    scope.spawn(move || {
                        let mut rng = fastrand::Rng::with_seed(round * 8 + thread);
                        for step in 0..2_000 {
                            let value = 1.0 + rng.f64();
                            ewma.observe(Nanos(1 + step * 50 + thread), value, short);
                            let seen = ewma.raw().unwrap();
                            assert!((1.0..=2.0).contains(&seen), "{seen}");
                        }
                    });
                }
            });
        }
    }
}
