//! Scoring of real traffic: an upstream that passes its probes may still fail its clients.

use std::time::Duration;

use crate::names::Nanos;
use crate::window::{Ewma, HalfLife};

/// When real traffic counts against an upstream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// Share of answers that may be failures, in 0..=1.
    pub error_threshold: f64,
    /// The 99th percentile of the latency may not be above this; `None`: latency is not judged.
    pub slow_after: Option<Duration>,
    /// Memory of the averages.
    pub half_life: Duration,
}

/// What an upstream is guilty of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Too many failures.
    Errors,
    /// Too many slow answers.
    Latency,
}

/// How an upstream has treated its requests; all workers feed it, without a lock.
///
/// Both rules are averages of noughts and ones with [`Ewma`]'s weights, in real time. "The 99th
/// percentile is above T" is the same as "more than one answer in a hundred took longer than T",
/// so latency needs no histogram here.
///
/// An upstream begins as a healthy one. No single answer moves an average by more than a tenth
/// of its threshold, or the first failure after a quiet hour would be all that is known: an
/// upstream without history takes eleven failures in a row at least, however far apart.
#[derive(Debug)]
#[repr(align(64))]
pub struct Passive {
    errors: Share,
    slow: Share,
    slow_after: Option<Duration>,
    half_life: HalfLife,
}

/// One answer in a hundred: what is beyond the 99th percentile.
const ONE_PERCENT: f64 = 0.01;

impl Passive {
    /// A healthy upstream. An `error_threshold` of 0 or less, which nothing could keep, is not
    /// judged.
    #[must_use]
    pub fn new(rules: &Rules) -> Self {
        Self {
            errors: Share::new(rules.error_threshold),
            slow: Share::new(ONE_PERCENT),
            slow_after: rules.slow_after,
            half_life: HalfLife::new(rules.half_life),
        }
    }

    /// Takes in what became of one request. `latency`: until the head of the answer, if there
    /// was one.
    ///
    /// `Some`: the upstream is worse than allowed. A good answer is never the one that says so;
    /// and it is said again with each bad one until [`Passive::reset`].
    pub fn answered(&self, failed: bool, latency: Option<Duration>, now: Nanos) -> Option<Fault> {
        let errors = self.errors.exceeded(failed, now, self.half_life);
        let slow = match (latency, self.slow_after) {
            (Some(latency), Some(most)) => self.slow.exceeded(latency > most, now, self.half_life),
            _ => false,
        };
        match (errors, slow) {
            (true, _) => Some(Fault::Errors),
            (false, true) => Some(Fault::Latency),
            (false, false) => None,
        }
    }

    /// Forgets everything: an upstream that comes in again is judged by what it does from now on.
    pub fn reset(&self, now: Nanos) {
        self.errors.average.restart(now, 0.0);
        self.slow.average.restart(now, 0.0);
    }
}

/// The share of answers that were bad in one way.
#[derive(Debug)]
struct Share {
    average: Ewma,
    threshold: f64,
    /// An observation moves the average by its weight at most, because all are 0 or 1. Cutting
    /// the weight and not the step keeps the average a share, on a quiet upstream too.
    heaviest: f64,
}

impl Share {
    fn new(threshold: f64) -> Self {
        let heaviest = (threshold / 10.0).clamp(0.0, 0.1);
        Self { average: Ewma::starting_at(0.0), threshold, heaviest }
    }

    /// Takes in an answer; whether it was bad and one too many.
    fn exceeded(&self, bad: bool, now: Nanos, half_life: HalfLife) -> bool {
        let value = f64::from(u8::from(bad));
        let share = self.average.observe_at_most(now, value, half_life, self.heaviest);
        bad && self.threshold > 0.0 && share > self.threshold
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const MILLI: Duration = Duration::from_millis(1);

    fn rules(error_threshold: f64) -> Rules {
        Rules {
            error_threshold,
            slow_after: Some(Duration::from_millis(100)),
            half_life: Duration::from_secs(10),
        }
    }

    /// Failures in a row, `gap` apart, that it takes.
    fn failures_until_fault(passive: &Passive, from: u64, gap: u64) -> Option<u64> {
        (1..=100_000)
            .find(|n| passive.answered(true, None, Nanos(from + n * gap)) == Some(Fault::Errors))
    }

    #[test]
    fn a_quiet_upstream_is_not_taken_out_for_a_few_failures() {
        // (threshold, failures that it takes when they are a minute apart)
        for (threshold, want) in
            [(0.01, Some(11)), (0.1, Some(11)), (0.5, Some(14)), (0.9, Some(25)), (1.0, None)]
        {
            let passive = Passive::new(&rules(threshold));
            let took = failures_until_fault(&passive, 3_600 * SECOND, 60 * SECOND);
            assert_eq!(took, want, "{threshold}");
        }
    }

    #[test]
    fn a_busy_upstream_is_judged_in_time_and_not_by_numbers() {
        for (gap, per_second) in [(SECOND / 100, 100.0), (SECOND / 10_000, 10_000.0)] {
            let passive = Passive::new(&rules(0.5));
            let took = failures_until_fault(&passive, 0, gap).unwrap() as f64 / per_second;
            // 1 − exp(−t / 10 s) passes one half after ln 2 × 10 s.
            assert!((took - 6.93).abs() < 0.02, "{took} s");
        }
    }

    #[test]
    fn a_share_below_the_threshold_is_borne() {
        // One failure among `of` answers, for ten minutes at 100/s.
        for (of, want) in [(3, false), (8, false), (12, true), (100, true)] {
            let passive = Passive::new(&rules(0.1));
            let faults = (1..=60_000)
                .filter(|n| passive.answered(n % of == 0, None, Nanos(n * SECOND / 100)).is_some());
            assert_eq!(faults.count() == 0, want, "one in {of}");
        }
    }

    #[test]
    fn more_than_one_slow_answer_in_a_hundred_is_a_fault() {
        let play = |every: u64| {
            let passive = Passive::new(&rules(0.5));
            (1..=200_000).find_map(|n: u64| {
                let latency = if n.is_multiple_of(every) { 101 * MILLI } else { 100 * MILLI };
                passive.answered(false, Some(latency), Nanos(n * SECOND / 1_000))
            })
        };
        assert_eq!(play(120), None);
        assert_eq!(play(90), Some(Fault::Latency));
        assert_eq!(play(1), Some(Fault::Latency));
        assert_eq!(play(u64::MAX), None, "exactly the limit is not slow");
    }

    #[test]
    fn only_what_is_bad_says_so() {
        let passive = Passive::new(&rules(0.1));
        let mut now = 0;
        let mut next = |failed, latency| {
            now += SECOND;
            passive.answered(failed, latency, Nanos(now))
        };
        let slow = Some(Duration::from_secs(1));
        (0..50).for_each(|_| _ = next(true, slow));
        assert_eq!(next(true, slow), Some(Fault::Errors), "of two faults, the worse");
        assert_eq!(next(false, slow), Some(Fault::Latency));
        assert_eq!(next(false, Some(MILLI)), None);
        assert_eq!(next(false, None), None);
        assert_eq!(next(true, None), Some(Fault::Errors), "still, and said again");
        assert_eq!(next(true, Some(MILLI)), Some(Fault::Errors));
    }

    #[test]
    fn a_reset_begins_anew() {
        let passive = Passive::new(&rules(0.1));
        let slow = Some(Duration::from_secs(1));
        for n in 1..50 {
            passive.answered(true, slow, Nanos(n * SECOND));
        }
        passive.reset(Nanos(50 * SECOND));
        assert_eq!(passive.answered(true, slow, Nanos(60 * SECOND)), None);
        assert_eq!(failures_until_fault(&passive, 60 * SECOND, 60 * SECOND), Some(10));
    }

    #[test]
    fn without_rules_nothing_is_a_fault() {
        for error_threshold in [0.0, -1.0, f64::NAN, 1.0] {
            let passive = Passive::new(&Rules { slow_after: None, ..rules(error_threshold) });
            for n in 1..1_000 {
                let fault = passive.answered(true, Some(Duration::MAX), Nanos(n * SECOND));
                assert_eq!(fault, None, "{error_threshold}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 500, failure_persistence: None, ..ProptestConfig::default()
        })]

        #[test]
        fn shares_stay_shares_and_move_in_small_steps(
            threshold in 0.001..1.0_f64,
            half_life in 0..100 * SECOND,
            answers in prop::collection::vec((any::<bool>(), any::<bool>(), 0..100 * SECOND), 1..200),
        ) {
            let half_life = Duration::from_nanos(half_life);
            let passive = Passive::new(&Rules { half_life, ..rules(threshold) });
            let shares = || [&passive.errors, &passive.slow].map(|s| s.average.raw().unwrap());
            let mut now = 0;
            for (failed, slow, rest) in answers {
                now += rest;
                let before = shares();
                let latency = if slow { Duration::from_secs(1) } else { MILLI };
                let fault = passive.answered(failed, Some(latency), Nanos(now));
                let after = shares();
                for ((before, after), threshold) in before.into_iter().zip(after).zip([threshold, 0.01]) {
                    prop_assert!((0.0..=1.0).contains(&after));
                    prop_assert!((after - before).abs() <= threshold / 10.0 + 1e-12);
                }
                let want = if failed && after[0] > threshold {
                    Some(Fault::Errors)
                } else if slow && after[1] > 0.01 {
                    Some(Fault::Latency)
                } else {
                    None
                };
                prop_assert_eq!(fault, want);
            }
        }
    }

    #[test]
    fn many_threads_agree_on_the_share() {
        let passive = Passive::new(&rules(0.5));
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let passive = &passive;
                scope.spawn(move || {
                    for n in 0..20_000_u64 {
                        let failed = (n + thread).is_multiple_of(4);
                        let at = Nanos(n * SECOND / 200 + thread);
                        assert_eq!(passive.answered(failed, Some(MILLI), at), None, "25 % < 50 %");
                        let share = passive.errors.average.raw().unwrap();
                        assert!((0.0..=1.0).contains(&share), "{share}");
                    }
                });
            }
        });
        let share = passive.errors.average.raw().unwrap();
        assert!((0.2..0.3).contains(&share), "{share}");
    }
}
