use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::names::Nanos;

/// Earned tokens are counted in millionths, so that a small ratio is not lost to rounding.
const TOKEN: u32 = 1_000_000;

/// No more than this can be saved up: what a pool earned in an hour of peace must not become
/// a storm of retries in its first bad second.
const MOST: u32 = 100 * TOKEN;

/// How many extra tries, retries and hedges together, a pool may be asked for.
///
/// Retries help against the failure of one upstream and make the overload of all of them worse:
/// without a budget, three tries for each request triple the load just when the pool cannot
/// bear what it has. With it, the extra load is a share of the first tries.
///
/// There are two sources. Each first try earns `ratio` tokens; and `min_per_second` tokens
/// come with time, so that a pool with little traffic can be retried at all. Over any span,
/// extra tries ≤ `ratio` × first tries + `min_per_second` × seconds + 100 + `min_per_second`.
#[derive(Debug)]
#[repr(align(64))]
pub struct RetryBudget {
    /// Millionths of a token; at most [`MOST`].
    earned: AtomicU32,
    /// Millionths of a token that a first try earns.
    share: u32,
    /// Nanoseconds; 0: nothing comes with time.
    interval: u64,
    /// How far `due` may be ahead of the clock: one second's worth of tokens.
    ahead: Duration,
    /// When the next token would come if those taken had come evenly (GCRA).
    due: AtomicU64,
}

impl RetryBudget {
    /// A budget that has earned nothing yet. `ratio` is rounded to a millionth; a
    /// `min_per_second` of 0 leaves only what is earned.
    #[must_use]
    pub fn new(ratio: f64, min_per_second: u32) -> Self {
        // Rounded up: never more than the configured rate.
        let interval = match min_per_second {
            0 => 0,
            n => 1_000_000_000_u64.div_ceil(u64::from(n)),
        };
        Self {
            earned: AtomicU32::new(0),
            share: (ratio * f64::from(TOKEN)).round() as u32,
            interval,
            ahead: Duration::from_nanos(interval * u64::from(min_per_second)),
            due: AtomicU64::new(0),
        }
    }

    /// One first try was made.
    ///
    /// A pool whose tries succeed is saved up soon, and from then on this reads one word that
    /// nobody writes.
    pub fn deposit(&self) {
        let _ = self.earned.fetch_update(Relaxed, Relaxed, |had| {
            let has = had.saturating_add(self.share).min(MOST);
            (has != had).then_some(has)
        });
    }

    /// Takes a token for one extra try; `false`: none is left.
    ///
    /// What comes with time is taken first, because it does not keep.
    #[must_use]
    pub fn withdraw(&self, now: Nanos) -> bool {
        self.take_due(now) || self.take_earned()
    }

    fn take_due(&self, now: Nanos) -> bool {
        let last = now.plus(self.ahead).0;
        self.interval > 0
            && self
                .due
                .fetch_update(Relaxed, Relaxed, |due| {
                    let next = due.max(now.0).checked_add(self.interval)?;
                    (next <= last).then_some(next)
                })
                .is_ok()
    }

    fn take_earned(&self) -> bool {
        self.earned.fetch_update(Relaxed, Relaxed, |had| had.checked_sub(TOKEN)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Tokens that can be taken at one moment.
    fn drain(budget: &RetryBudget, now: Nanos) -> u32 {
        (0..100_000).take_while(|_| budget.withdraw(now)).count() as u32
    }

    #[test]
    fn first_tries_earn_a_share() {
        // (ratio, first tries, extra tries they pay for)
        for (ratio, tries, want) in [
            (0.2, 4, 0),
            (0.2, 5, 1),
            (0.2, 499, 99),
            (0.2, 500, 100),
            (0.2, 100_000, 100),
            (0.1, 10, 1),
            (0.001, 999, 0),
            (0.001, 1_000, 1),
            (0.0125, 80, 1),
            (1.0, 7, 7),
            (2.0, 7, 14),
            (0.0, 1_000_000, 0),
            (1e9, 1, 100),
            (-1.0, 1_000, 0),
            (f64::NAN, 1_000, 0),
        ] {
            let budget = RetryBudget::new(ratio, 0);
            assert_eq!(drain(&budget, Nanos(SECOND)), 0, "nothing is earned before the first try");
            (0..tries).for_each(|_| budget.deposit());
            assert_eq!(drain(&budget, Nanos(SECOND)), want, "{ratio} × {tries}");
            assert_eq!(drain(&budget, Nanos(2 * SECOND)), 0, "and time adds nothing");
        }
    }

    #[test]
    fn time_gives_at_most_a_second_at_once() {
        for rate in [1, 3, 10, 7_777] {
            let budget = RetryBudget::new(0.0, rate);
            assert_eq!(drain(&budget, Nanos(0)), rate, "full from the beginning");
            assert_eq!(drain(&budget, Nanos(SECOND / 2)), rate / 2);
            assert_eq!(drain(&budget, Nanos(1_000 * SECOND)), rate, "a long rest saves a second");
            let slightly_earlier = Nanos(1_000 * SECOND - 10);
            assert_eq!(drain(&budget, slightly_earlier), 0, "a clock behind gives nothing");
            assert_eq!(drain(&budget, Nanos::NEVER), 0, "nor does one that has run out");
        }
    }

    #[test]
    fn time_goes_first() {
        let budget = RetryBudget::new(1.0, 2);
        (0..3).for_each(|_| budget.deposit());
        assert!((0..2).all(|_| budget.withdraw(Nanos(0))));
        assert!((0..2).all(|_| budget.withdraw(Nanos(SECOND))), "the earned ones were not touched");
        assert_eq!(drain(&budget, Nanos(SECOND)), 3);
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 300, failure_persistence: None, ..ProptestConfig::default()
        })]

        #[test]
        fn no_span_has_more_extra_tries_than_promised(
            thousandths in 0..1_500_u32,
            rate in prop_oneof![Just(0), 1..30_u32],
            steps in prop::collection::vec((0..60_u32, 0..40_u32, 0..SECOND), 1..60),
        ) {
            let budget = RetryBudget::new(f64::from(thousandths) / 1_000.0, rate);
            let mut now = 0;
            // (time, first tries so far, extra tries so far), before each step and after it
            let mut seen = vec![(0, 0, 0)];
            for (deposits, wishes, rest) in steps {
                now += rest;
                let (_, first, extra) = seen[seen.len() - 1];
                seen.push((now, first, extra));
                (0..deposits).for_each(|_| budget.deposit());
                let got = (0..wishes).filter(|_| budget.withdraw(Nanos(now))).count() as u64;
                seen.push((now, first + u64::from(deposits), extra + got));
            }
            for (at, from) in seen.iter().enumerate() {
                for to in &seen[at..] {
                    let earned = f64::from(thousandths) / 1_000.0 * (to.1 - from.1) as f64;
                    let came = f64::from(rate) * (to.0 - from.0) as f64 / SECOND as f64;
                    let most = earned + came + 100.0 + f64::from(rate);
                    prop_assert!((to.2 - from.2) as f64 <= most + 1e-6, "{from:?} to {to:?}");
                }
            }
        }
    }

    #[test]
    fn many_threads_get_exactly_what_there_is() {
        for round in 0..20 {
            let budget = RetryBudget::new(0.5, 7);
            let granted = AtomicU32::new(0);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| (0..25).for_each(|_| budget.deposit()));
                    scope.spawn(|| {
                        for _ in 0..40 {
                            let got = budget.withdraw(Nanos(SECOND));
                            granted.fetch_add(u32::from(got), Relaxed);
                        }
                    });
                }
            });
            let left = drain(&budget, Nanos(SECOND));
            assert_eq!(granted.into_inner() + left, 50 + 7, "round {round}");
        }
    }

    #[test]
    fn many_threads_do_not_pass_the_cap() {
        let budget = RetryBudget::new(0.7, 0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..1_000).for_each(|_| budget.deposit()));
            }
        });
        assert_eq!(budget.earned.load(Relaxed), MOST);
        assert_eq!(drain(&budget, Nanos(SECOND)), 100);
    }
}
