//! Slow start: an upstream that has just come in warms its caches and compiles its code; the
//! full load at once would make it slow, or take it out again.

use std::time::Duration;

use crate::names::Nanos;

/// The share of its picks that an upstream takes at the beginning. Not zero, or one that is the
/// only upstream, or has few requests, would never warm up.
const LEAST: f64 = 0.05;

/// Whether an upstream that became eligible at `since` takes this pick. `draw` is even over all
/// of `u64`.
///
/// The share of picks that it takes grows in proportion to the time, from 5 % to all of them
/// after `ramp`.
#[must_use]
pub fn accepts(since: Nanos, now: Nanos, ramp: Duration, draw: u64) -> bool {
    let share = share(since, now, ramp);
    // A share of all draws; the product is below 2⁶⁴ because the share is below 1.
    share >= 1.0 || draw < (share * TWO_TO_64) as u64
}

/// The share of its picks that an upstream takes which became eligible at `since`; 1: all.
#[must_use]
pub fn share(since: Nanos, now: Nanos, ramp: Duration) -> f64 {
    let elapsed = now.since(since);
    if elapsed >= ramp {
        return 1.0; // also keeps 0 / 0 out
    }
    (elapsed.as_nanos() as f64 / ramp.as_nanos() as f64).max(LEAST)
}

/// 2⁶⁴: as many draws are there.
const TWO_TO_64: f64 = 18_446_744_073_709_551_616.0;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const TEN: Duration = Duration::from_secs(10);

    #[test]
    fn the_share_grows_with_time() {
        let mut rng = fastrand::Rng::with_seed(5);
        let began = 77 * SECOND;
        // (tenths of a second since, share in thousandths)
        for (tenths, want) in
            [(0, 50), (1, 50), (5, 50), (6, 60), (10, 100), (25, 250), (50, 500), (90, 900)]
        {
            let now = Nanos(began + tenths * SECOND / 10);
            let took = (0..100_000).filter(|_| accepts(Nanos(began), now, TEN, rng.u64(..)));
            // Five standard deviations: 5 × √(0.25 × 100,000) < 800.
            let difference = took.count().abs_diff(want * 100);
            assert!(difference < 800, "after {tenths} tenths: {difference} off, seed 5");
        }
    }

    #[test]
    fn borders() {
        // (since, now, ramp, draw, accepted)
        let half = u64::MAX / 2;
        for (since, now, ramp, draw, want) in [
            (0, 0, Duration::ZERO, u64::MAX, true),
            (9, 5, Duration::ZERO, u64::MAX, true),
            (0, 10 * SECOND, TEN, u64::MAX, true),
            (0, 10 * SECOND - 1, TEN, u64::MAX, false),
            (0, u64::MAX, TEN, u64::MAX, true),
            (0, 5 * SECOND, TEN, half, true),
            (0, 5 * SECOND, TEN, half + 1, false),
            (0, 0, TEN, u64::MAX / 20 - 2_000, true),
            (0, 0, TEN, u64::MAX / 20 + 2_000, false),
            // A clock that is behind counts as the beginning.
            (9, 5, TEN, u64::MAX / 20 - 2_000, true),
            (9, 5, TEN, u64::MAX / 20 + 2_000, false),
            (0, u64::MAX - 1, Duration::MAX, 0, true),
        ] {
            let got = accepts(Nanos(since), Nanos(now), ramp, draw);
            assert_eq!(got, want, "{since} {now} {ramp:?} {draw}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn who_accepts_goes_on_accepting(
            since: u64,
            ramp in 0..100 * SECOND,
            draw: u64,
            (sooner, later) in (0..200 * SECOND, 0..200 * SECOND),
        ) {
            let at = |after| {
                let now = Nanos(since.saturating_add(after));
                accepts(Nanos(since), now, Duration::from_nanos(ramp), draw)
            };
            prop_assert!(!at(sooner.min(later)) || at(sooner.max(later)));
        }
    }
}
