use std::time::Duration;

use super::word::GENERATION_BITS;
use super::{Trip, Verdict, millis};
use crate::names::Nanos;
use crate::sync::atomic::{
    AtomicU64,
    Ordering::{Relaxed, SeqCst},
    fence,
};

/// The last results in the closed state, one word each: generation 20 bits, time in ms 43,
/// failed 1. Results of another generation and old ones do not count, so nothing is ever
/// cleared: neither by a transition nor by a timer.
///
/// Aligned to a cache line: every result moves the cursor, and that must not slow down those
/// who only ask whether the breaker is closed.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Ring {
    cursor: AtomicU64,
    slots: Box<[AtomicU64]>,
    above: f64,
    min_observations: u32,
    /// In ms.
    window: u64,
}

const TIME_BITS: u32 = 64 - GENERATION_BITS - 1;

/// The latest time that a slot can have; 278 years. One less than fits, see `UNUSED`.
const LATEST: u64 = (1 << TIME_BITS) - 2;

/// A slot without a result: its time is later than any.
const UNUSED: u64 = u64::MAX;

impl Ring {
    pub(super) fn new(above: f64, min_observations: u32, size: u32, window: Duration) -> Self {
        Self {
            cursor: AtomicU64::new(0),
            slots: (0..size.max(1)).map(|_| AtomicU64::new(UNUSED)).collect(),
            above,
            min_observations,
            window: millis(Nanos::default().plus(window)),
        }
    }

    /// What opens the breaker.
    pub(super) fn trip(&self) -> Trip {
        Trip::Ratio { above: self.above, min_observations: self.min_observations }
    }

    /// Writes a result down and says whether the breaker must open: a success never says so.
    pub(super) fn record(&self, generation: u32, verdict: Verdict, now: Nanos) -> bool {
        let now = (now.0 / 1_000_000).min(LATEST);
        let at = self.cursor.fetch_add(1, Relaxed) % self.slots.len() as u64;
        let Some(slot) = self.slots.get(at as usize) else { return false };
        match verdict {
            Verdict::Success => {
                slot.store(pack(generation, now), Relaxed);
                false
            }
            Verdict::Failure => {
                slot.store(pack(generation, now) | 1, Relaxed);
                // Of two threads that write a failure each and then look for the other's, at
                // least one must find it, or the failure that is one too many goes unnoticed.
                // Acquire and release do not promise that; these fences do. Successes need
                // none: one that is overlooked counts as having come a moment later.
                fence(SeqCst);
                self.must_open(generation, now)
            }
        }
    }

    fn must_open(&self, generation: u32, now: u64) -> bool {
        let oldest = pack(generation, now.saturating_sub(self.window));
        let span = (pack(generation, LATEST) | 1) - oldest;
        let (mut observations, mut failures) = (0, 0);
        for slot in &self.slots {
            let slot = slot.load(Relaxed);
            // Generation and age in one comparison, without a branch.
            let counts = u64::from(slot.wrapping_sub(oldest) <= span);
            observations += counts;
            failures += counts & slot;
        }
        // Divided, not multiplied: a quotient is rounded like the number in the configuration,
        // so 29 of 100 is not above 0.29, but 0.29 × 100 is below 29.
        observations >= u64::from(self.min_observations)
            && failures as f64 / observations as f64 > self.above
    }
}

/// A slot that holds a success.
fn pack(generation: u32, millis: u64) -> u64 {
    (u64::from(generation) << TIME_BITS | millis) << 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unused_slot_never_counts() {
        let ring = Ring::new(0.0, 2, 10, Duration::from_hours(1_000_000));
        for generation in [0, 1, (1 << GENERATION_BITS) - 1] {
            assert!(!ring.must_open(generation, 0));
            assert!(!ring.must_open(generation, LATEST));
        }
        let last = (1 << GENERATION_BITS) - 1;
        assert!(!ring.record(last, Verdict::Failure, Nanos::NEVER), "one observation");
        assert!(ring.record(last, Verdict::Failure, Nanos::NEVER));
    }

    #[test]
    fn whole_percentages_are_exact() {
        for percent in 0..=100u32 {
            let above = format!("{}.{:02}", percent / 100, percent % 100).parse().unwrap();
            let ring = Ring::new(above, 100, 100, Duration::from_secs(1));
            let record = |verdict| ring.record(0, verdict, Nanos(1));
            assert!((percent..100).all(|_| !record(Verdict::Success)));
            assert!((0..percent).all(|_| !record(Verdict::Failure)), "{percent} % are not above");
            // One more, and the oldest success gives way.
            assert_eq!(record(Verdict::Failure), percent < 100, "{percent} %");
        }
    }
}
