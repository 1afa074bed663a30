//! When a certificate is asked for again, and how long to wait after a CA has refused one.

use std::time::Duration;

/// Between the first two failures; each further pause is four times as long. A CA like Let's
/// Encrypt takes five failures an hour for one name.
const FIRST_PAUSE: Duration = Duration::from_mins(1);
/// No pause is longer, after failures that are about a name, and about the CA as a whole.
const LONGEST_OF_NAME: Duration = Duration::from_hours(24);
const LONGEST_OF_AUTHORITY: Duration = Duration::from_hours(1);
/// Before another way of proving the same is tried.
const OTHER_WAY: Duration = Duration::from_secs(5);
/// A CA that wants to be left alone for longer than this is asked nevertheless: it may have
/// meant something else.
const LONGEST_WISH: Duration = Duration::from_hours(7 * 24);

/// What a failure is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The name.
    Name {
        /// Another way of proving that it is ours has not been tried yet.
        other_way: bool,
    },
    /// The CA, or what leads to it: other names would fare no better.
    Authority {
        /// How long it wants to be left alone, if it has said so.
        wish: Option<Duration>,
    },
}

/// The tries to get something from a CA that have failed since the last success.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tries {
    /// How many.
    pub failures: u32,
    /// In seconds since 1970: no try before.
    pub not_before: i64,
}

impl Tries {
    /// One more has failed at `now`, in seconds since 1970. `draw` is from 0 to 1: those that
    /// failed together should not come back together.
    #[must_use]
    pub fn failed(self, now: i64, fault: Fault, draw: f64) -> Self {
        let failures = self.failures.saturating_add(1);
        let grown = FIRST_PAUSE.saturating_mul(4u32.saturating_pow(failures - 1));
        let pause = match fault {
            Fault::Name { other_way: true } if failures == 1 => OTHER_WAY,
            Fault::Name { .. } => grown.min(LONGEST_OF_NAME),
            Fault::Authority { wish } => {
                grown.min(LONGEST_OF_AUTHORITY).max(wish.unwrap_or_default().min(LONGEST_WISH))
            }
        };
        let pause = pause.mul_f64(1.0 + draw / 5.0).as_secs().cast_signed();
        Self { failures, not_before: now.saturating_add(pause) }
    }

    /// The time of the next try, at `now`. Were the clock set back, what was meant as a pause
    /// would be a wait for ever.
    pub fn next(self, now: i64) -> i64 {
        let longest = LONGEST_WISH.mul_f64(1.2).as_secs().cast_signed();
        if self.not_before.saturating_sub(now) > longest { now } else { self.not_before }
    }
}

/// When a certificate that is valid from `from` to `until`, in seconds since 1970, is to be
/// replaced: the last third of its life is there for what goes wrong. `draw`, from 0 to 1, spreads
/// those that began together.
pub fn renew_at(from: i64, until: i64, draw: f64) -> i64 {
    let life = until.saturating_sub(from).max(0);
    until - life / 3 - ((life / 12) as f64 * draw) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 24 * 3600;

    #[test]
    fn a_certificate_is_replaced_in_the_last_third_of_its_life_or_a_little_before() {
        for (from, until, draw, at) in [
            (0, 90 * DAY, 0.0, 60 * DAY),
            (0, 90 * DAY, 1.0, 60 * DAY - 90 * DAY / 12),
            (10 * DAY, 16 * DAY, 0.0, 14 * DAY),
            (0, 30, 0.5, 19),
            // One that makes no sense is replaced at its end, and nothing overflows.
            (5, 5, 1.0, 5),
            (10, 5, 1.0, 5),
        ] {
            assert_eq!(renew_at(from, until, draw), at, "{from} {until} {draw}");
        }
    }

    const NAME: Fault = Fault::Name { other_way: false };

    fn pauses(fault: Fault) -> Vec<i64> {
        let mut tries = Tries::default();
        let mut pauses = Vec::new();
        for _ in 0..8 {
            tries = tries.failed(1000, fault, 0.0);
            pauses.push((tries.not_before - 1000) / 60);
        }
        pauses
    }

    #[test]
    fn pauses_grow() {
        assert_eq!(pauses(NAME), [1, 4, 16, 64, 256, 1024, 1440, 1440]);
        assert_eq!(pauses(Fault::Authority { wish: None }), [1, 4, 16, 60, 60, 60, 60, 60]);
        let most = Tries { failures: u32::MAX, not_before: 0 }.failed(0, NAME, 1.0);
        assert_eq!((most.failures, most.not_before), (u32::MAX, DAY * 6 / 5));
    }

    #[test]
    fn the_other_way_is_tried_soon_and_once() {
        let other = Fault::Name { other_way: true };
        let first = Tries::default().failed(0, other, 0.0);
        assert_eq!(first, Tries { failures: 1, not_before: 5 });
        assert_eq!(first.failed(5, other, 0.0).not_before, 5 + 4 * 60);
    }

    #[test]
    fn what_the_ca_wishes_is_obeyed() {
        let after = |seconds| {
            let wish = Some(Duration::from_secs(seconds));
            Tries::default().failed(0, Fault::Authority { wish }, 0.0).not_before
        };
        assert_eq!(after(120), 120);
        assert_eq!(after(1), 60, "our own patience is the least");
        assert_eq!(after(u64::MAX), 7 * DAY);
    }

    #[test]
    fn a_clock_that_was_set_back_does_not_stop_it() {
        let tries = Tries { failures: 3, not_before: 100 * DAY };
        assert_eq!(tries.next(99 * DAY), 100 * DAY);
        assert_eq!(tries.next(50 * DAY), 50 * DAY);
        assert_eq!(tries.next(200 * DAY), 100 * DAY);
    }
}
