use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use crate::names::Nanos;

/// A rate that a client, or all clients of a route, must keep.
///
/// The rule is the generic cell rate algorithm in its virtual-scheduling form (ITU-T I.371,
/// Annex A; ATM Forum Traffic Management 4.0, §4.4.2). It lets through exactly what a token
/// bucket does that holds `burst` tokens and gains `rps` of them a second, but all that it
/// remembers is one point in time, and nothing has to run when nobody asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Nanoseconds that one token takes.
    interval: u64,
    /// Nanoseconds that a whole burst takes; at most [`LONGEST`].
    burst: u64,
}

/// About 146 years: sums of two such times do not overflow.
const LONGEST: u64 = 1 << 62;

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It may pass.
    Allowed {
        /// As many could follow it at once.
        remaining: u32,
    },
    /// It may not, and it has cost nothing.
    Refused {
        /// When the same request would pass, if nobody else asks meanwhile.
        retry_after: Duration,
    },
}

impl Rate {
    /// `burst` requests at once, `rps` a second in the long run. The time for one is rounded up
    /// to a whole nanosecond.
    ///
    /// The configuration sees to it that both are above zero. Here a `burst` of 0 counts as 1,
    /// and an `rps` of 0 lets nothing follow the first burst.
    #[must_use]
    pub fn new(rps: f64, burst: u32) -> Self {
        let burst = u64::from(burst.max(1));
        let interval = ((1e9 / rps.max(0.0)).ceil() as u64).clamp(1, LONGEST / burst);
        Self { interval, burst: interval * burst }
    }

    /// A request at `now` where `due` is the theoretical arrival time. `Ok`: it passes, and this
    /// is the time after it. `Err`: it is refused.
    pub(super) fn judge(&self, due: u64, now: Nanos) -> Result<u64, Decision> {
        let last = now.0.saturating_add(self.burst);
        let next = due.max(now.0).saturating_add(self.interval);
        // At the end of time nothing passes, rather than everything.
        if next <= last && next < u64::MAX {
            return Ok(next);
        }
        Err(Decision::Refused { retry_after: Nanos(next).since(Nanos(last)) })
    }

    /// What a request at `now` is told that passed and made `due` the theoretical arrival time.
    pub(super) fn allowed(&self, due: u64, now: Nanos) -> Decision {
        let left = now.0.saturating_add(self.burst).saturating_sub(due);
        Decision::Allowed { remaining: (left / self.interval) as u32 }
    }

    /// What [`Rate::take`] would decide, without taking.
    pub(super) fn peek(&self, due: u64, now: Nanos) -> Decision {
        self.judge(due, now).map_or_else(|refused| refused, |next| self.allowed(next, now))
    }

    /// Takes a token where `due` is the theoretical arrival time. Exact, however many threads
    /// do it.
    pub(super) fn take(&self, due: &AtomicU64, now: Nanos) -> Decision {
        // For one bucket any order would do; those of a table are in order with their tags.
        let mut before = due.load(SeqCst);
        loop {
            let next = match self.judge(before, now) {
                Ok(next) => next,
                Err(refused) => return refused,
            };
            match due.compare_exchange_weak(before, next, SeqCst, SeqCst) {
                Ok(_) => return self.allowed(next, now),
                Err(seen) => before = seen,
            }
        }
    }
}

/// One bucket of tokens, full at first.
#[derive(Debug)]
pub struct Bucket {
    /// Theoretical arrival time: when the bucket will be full again.
    due: AtomicU64,
}

impl Bucket {
    /// A full one.
    #[must_use]
    pub fn new() -> Self {
        Self { due: AtomicU64::new(0) }
    }

    /// Takes a token for one request, if there is one.
    ///
    /// What was taken is remembered as time. Whoever changes the rate begins with a new bucket,
    /// or the hours that a token took may go on being owed where it now takes a millisecond.
    pub fn try_take(&self, rate: &Rate, now: Nanos) -> Decision {
        rate.take(&self.due, now)
    }

    /// What [`Bucket::try_take`] would decide now. Nothing is taken.
    #[must_use]
    pub fn peek(&self, rate: &Rate, now: Nanos) -> Decision {
        rate.peek(self.due.load(SeqCst), now)
    }
}

impl Default for Bucket {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn allowed(remaining: u32) -> Decision {
        Decision::Allowed { remaining }
    }

    fn refused(nanos: u64) -> Decision {
        Decision::Refused { retry_after: Duration::from_nanos(nanos) }
    }

    /// Requests that pass at one moment.
    fn drain(bucket: &Bucket, rate: &Rate, now: u64) -> u32 {
        let passes =
            |_: &u32| matches!(bucket.try_take(rate, Nanos(now)), Decision::Allowed { .. });
        (0..100_000).take_while(passes).count() as u32
    }

    #[test]
    fn table() {
        let rate = Rate::new(10.0, 3);
        let bucket = Bucket::new();
        let tenth = SECOND / 10;
        for (now, want) in [
            (SECOND, allowed(2)),
            (SECOND, allowed(1)),
            (SECOND, allowed(0)),
            (SECOND, refused(tenth)),
            (SECOND + 1, refused(tenth - 1)),
            (SECOND + tenth - 1, refused(1)),
            (SECOND + tenth, allowed(0)), // what was refused has cost nothing
            (SECOND + tenth, refused(tenth)),
            (SECOND, refused(2 * tenth)), // a clock that is behind
            (SECOND + 3 * tenth, allowed(1)),
            (SECOND + 3 * tenth + tenth / 2, allowed(0)), // one and a half were there
            (SECOND + 3 * tenth + tenth / 2, refused(tenth / 2)),
            (100 * SECOND, allowed(2)), // full again, and no fuller
        ] {
            let passes = matches!(want, Decision::Allowed { .. });
            let decision = bucket.peek(&rate, Nanos(now));
            assert_eq!(matches!(decision, Decision::Allowed { .. }), passes, "{now}");
            assert_eq!(bucket.try_take(&rate, Nanos(now)), want, "{now}");
        }
    }

    #[test]
    fn a_burst_and_then_the_rate() {
        for (rps, burst) in [(0.1, 1), (0.3, 7), (1.0, 1), (50.0, 100), (333.3, 1_000), (1e6, 5)] {
            let rate = Rate::new(rps, burst);
            let bucket = Bucket::new();
            assert_eq!(drain(&bucket, &rate, 5), burst, "{rps} {burst}");
            let mut passed = 0;
            // Ten bursts' worth of time, asking all the time.
            let span = (10.0 * f64::from(burst) / rps * 1e9).ceil() as u64;
            for step in 1..=1_000 {
                passed += drain(&bucket, &rate, 5 + span * step / 1_000);
            }
            // Rounded up to whole nanoseconds, a token may come just after the end.
            assert!((burst * 10 - 1..=burst * 10).contains(&passed), "{rps} {burst}: {passed}");
        }
    }

    #[test]
    fn numbers_that_no_configuration_has() {
        for (rps, burst, first) in [
            (0.0, 3, 3),
            (-1.0, 3, 3),
            (f64::NAN, 3, 3),
            (1e-300, 3, 3),
            (1e-300, u32::MAX, 100_000),
            (10.0, 0, 1),
        ] {
            let rate = Rate::new(rps, burst);
            let bucket = Bucket::new();
            assert_eq!(drain(&bucket, &rate, SECOND), first, "{rps} {burst}");
            if burst == 3 {
                assert_eq!(drain(&bucket, &rate, 100_000 * SECOND), 0, "{rps} {burst}");
            }
        }
        let fast = Rate::new(f64::INFINITY, 3);
        assert_eq!(drain(&Bucket::new(), &fast, SECOND), 3);
        assert_eq!(drain(&Bucket::new(), &fast, u64::MAX), 0, "time has run out");
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 500, failure_persistence: None, ..ProptestConfig::default()
        })]

        #[test]
        fn same_as_a_token_bucket(
            micros in 1..2_000_000_u64, // for one token, so that the model rounds nothing
            burst in 1..50_u32,
            requests in prop::collection::vec((0..3_u64, 0..3_000_000_u64), 1..300),
        ) {
            let rate = Rate::new(1e6 / micros as f64, burst);
            prop_assert!(rate.interval.abs_diff(micros * 1_000) <= 1);
            let bucket = Bucket::new();
            let (mut now, mut last, mut tokens) = (0, 0, f64::from(burst));
            for (kind, gap) in requests {
                now += if kind == 0 { gap * 1_000 } else { 0 };
                tokens = (tokens + (now - last) as f64 / rate.interval as f64).min(f64::from(burst));
                last = now;
                match bucket.try_take(&rate, Nanos(now)) {
                    Decision::Allowed { remaining } => {
                        tokens -= 1.0;
                        prop_assert!(tokens > -1e-6, "{}", tokens);
                        prop_assert!((f64::from(remaining) - tokens.floor()).abs() < 1e-6
                            || (tokens - tokens.round()).abs() < 1e-6, "{} {}", remaining, tokens);
                    }
                    Decision::Refused { retry_after } => {
                        prop_assert!(tokens < 1.0 + 1e-6, "{}", tokens);
                        let want = (1.0 - tokens) * rate.interval as f64;
                        prop_assert!((retry_after.as_nanos() as f64 - want).abs() < 100.0);
                        // And that is true.
                        let then = Nanos(now).plus(retry_after);
                        let copy = |now| {
                            let due = AtomicU64::new(bucket.due.load(SeqCst));
                            Bucket { due }.try_take(&rate, now)
                        };
                        prop_assert_eq!(copy(then), allowed(0));
                        let before = Nanos(then.0 - 1);
                        prop_assert_eq!(copy(before), refused(1));
                    }
                }
            }
        }
    }

    #[test]
    fn many_threads_get_exactly_the_burst() {
        let rate = Rate::new(1_000.0, 777);
        let bucket = Bucket::new();
        let passed = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (rate, bucket, passed) = (&rate, &bucket, &passed);
                scope.spawn(move || {
                    // Their clocks differ by less than one token.
                    let now = SECOND + thread * 1_000;
                    passed.fetch_add(drain(bucket, rate, now), SeqCst);
                });
            }
        });
        assert_eq!(passed.into_inner(), 777);
    }
}
