use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Ask;
use super::dice::Dice;

/// How many turns one pick may use up before it goes through the pool in order.
const TURNS: usize = 8;

/// One after the other, over those that are eligible.
///
/// Turn t goes to the (t mod eligible)-th eligible upstream. Going to the t-th and on to its
/// neighbour if that one is down would give the neighbour twice its share.
#[derive(Debug, Default)]
pub(super) struct RoundRobin {
    turn: AtomicU64,
}

impl RoundRobin {
    pub(super) fn pick(&self, ask: &Ask<'_>) -> Option<usize> {
        Self::choose(ask, || self.turn.fetch_add(1, Relaxed))
    }

    pub(super) fn peek(&self, ask: &Ask<'_>) -> Option<usize> {
        let mut turns = self.turn.load(Relaxed)..;
        Self::choose(ask, || turns.next().unwrap_or_default())
    }

    fn choose(ask: &Ask<'_>, mut next_turn: impl FnMut() -> u64) -> Option<usize> {
        let eligible = ask.eligible.count();
        let mut from = 0;
        // Who was tried already or is full loses this turn, and the next turn is used, not the
        // neighbour: again, so that the neighbour gets no more than its own turns.
        let mut dice = Dice::new(ask.draw);
        for _ in 0..TURNS.min(eligible) {
            // A request that has been elsewhere takes no turn but any of the others: were it to
            // take one, every request would meet the one of two that is dead.
            let turn = if ask.tried.is_empty() {
                next_turn() % eligible as u64
            } else {
                dice.below(eligible as u64)
            };
            let Some(ix) = ask.eligible.nth(turn as usize) else { continue };
            if ask.open(ix) {
                return Some(ix);
            }
            from = ix;
        }
        let after = ask.all().find(|&ix| ix >= from);
        after.or_else(|| ask.all().next())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Pool, near};
    use super::super::{Algorithm, Tried};

    #[test]
    fn alternates_exactly_and_spreads_the_share_of_one_that_is_down() {
        let pool = Pool::new(Algorithm::RoundRobin, &[1; 4]);
        assert_eq!(pool.run(8), [0, 1, 2, 3, 0, 1, 2, 3]);
        pool.eligible.set(1, false);
        assert_eq!(pool.run(6), [3, 0, 2, 3, 0, 2]);
        let counts = pool.counts(3_000);
        assert_eq!(counts, [1_000, 0, 1_000, 1_000]);
        pool.eligible.set(1, true);
        assert_eq!(pool.counts(4_000), [1_000; 4]);
    }

    #[test]
    fn one_at_its_limit_loses_its_turn_to_all_evenly() {
        let pool = Pool::with_limits(Algorithm::RoundRobin, &[1; 4], &[0, 1, 0, 0]);
        assert!(pool.seats[1].enter());
        assert_eq!(pool.counts(3_000), [1_000, 0, 1_000, 1_000]);
    }

    #[test]
    fn retries_of_a_failing_upstream_do_not_pile_up_on_its_neighbour() {
        let pool = Pool::new(Algorithm::RoundRobin, &[1; 4]);
        let mut served = [0; 4];
        for n in 0..3_000 {
            let mut tried = Tried::new();
            let mut ix = pool.pick(&tried, n).unwrap();
            if ix == 1 {
                tried.insert(ix);
                ix = pool.pick(&tried, n).unwrap();
            }
            served[ix] += 1;
        }
        assert_eq!(served[1], 0);
        served.into_iter().filter(|&count| count > 0).for_each(|count| near(count, 1_000.0));
    }

    #[test]
    fn a_dead_one_of_two_is_met_by_every_other_request() {
        let pool = Pool::new(Algorithm::RoundRobin, &[1; 2]);
        let mut met = 0;
        for n in 0..1_000 {
            let mut tried = Tried::new();
            if pool.pick(&tried, n) == Some(0) {
                met += 1;
                tried.insert(0);
                assert_eq!(pool.pick(&tried, n), Some(1));
            }
        }
        assert_eq!(met, 500);
    }

    #[test]
    fn finds_the_only_free_one_of_many() {
        let mut limits = [1; 200];
        limits[123] = 0;
        let pool = Pool::with_limits(Algorithm::RoundRobin, &[1; 200], &limits);
        for (ix, seat) in pool.seats.iter().enumerate() {
            assert!(ix == 123 || seat.enter());
        }
        assert_eq!(pool.run(300), [123; 300]);
    }

    #[test]
    fn few_free_ones_share_what_the_others_cannot_take() {
        let mut limits = [1; 100];
        limits[10] = 0;
        limits[60] = 0;
        let pool = Pool::with_limits(Algorithm::RoundRobin, &[1; 100], &limits);
        for (ix, seat) in pool.seats.iter().enumerate() {
            assert!(limits[ix] == 0 || seat.enter());
        }
        let counts = pool.counts(10_000);
        assert!(counts[10].abs_diff(counts[60]) < 1_000, "{} {}", counts[10], counts[60]);
    }
}
