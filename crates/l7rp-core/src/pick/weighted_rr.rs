use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::dice::Dice;
use super::{Ask, Member};

/// Slots of a schedule, above which weights are scaled down: 256 KiB.
const MAX_SLOTS: u64 = 65_536;

/// How many slots one pick may use up before it draws by weight.
const TURNS: u64 = 32;

/// Smooth weighted round-robin: weights 5, 1, 1 give a a b a c a a.
///
/// The order is that of nginx's algorithm, but it is worked out beforehand, once round, and
/// picks only move a cursor; nginx's own form needs a lock and a pass over all upstreams.
///
/// A slot whose upstream is not selectable is used up and the next one taken. The slots of the
/// others are used once per round as before, so their proportions stay exact. After 32 lost
/// slots in a row the pick is drawn at random by weight among those selectable, so that
/// proportions hold then too, and the cost is bounded when nearly all are down.
#[derive(Debug)]
pub(super) struct WeightedRr {
    schedule: Box<[u32]>,
    weights: Box<[u32]>,
    cursor: AtomicU64,
}

impl WeightedRr {
    pub(super) fn new(members: &[Member<'_>]) -> Self {
        let weights: Box<[u32]> = members.iter().map(|m| m.weight.max(1)).collect();
        Self { schedule: schedule(&slots(&weights)), weights, cursor: AtomicU64::new(0) }
    }

    pub(super) fn pick(&self, ask: &Ask<'_>) -> Option<usize> {
        self.choose(ask, || self.cursor.fetch_add(1, Relaxed))
    }

    pub(super) fn peek(&self, ask: &Ask<'_>) -> Option<usize> {
        let mut slots = self.cursor.load(Relaxed)..;
        self.choose(ask, || slots.next().unwrap_or_default())
    }

    fn choose(&self, ask: &Ask<'_>, mut next_slot: impl FnMut() -> u64) -> Option<usize> {
        let round = self.schedule.len() as u64;
        for _ in 0..TURNS.min(round) {
            let at = next_slot() % round;
            let ix = *self.schedule.get(at as usize)? as usize;
            if ask.selectable(ix) {
                return Some(ix);
            }
        }
        self.draw(ask)
    }

    /// One of those selectable, each with a chance in proportion to its weight; in one pass.
    fn draw(&self, ask: &Ask<'_>) -> Option<usize> {
        let mut dice = Dice::new(ask.draw);
        let mut total = 0;
        let mut chosen = None;
        for ix in ask.all() {
            let weight = u64::from(*self.weights.get(ix)?);
            total += weight;
            if dice.below(total) < weight {
                chosen = Some(ix);
            }
        }
        chosen
    }
}

/// How many slots each weight gets: the weight by the common divisor, or, if that makes more
/// than [`MAX_SLOTS`], the nearest share of them, at least one.
fn slots(weights: &[u32]) -> Vec<u32> {
    let divisor = weights.iter().copied().fold(0, gcd).max(1);
    let total: u64 = weights.iter().map(|&w| u64::from(w / divisor)).sum();
    let scaled = |weight: u32| {
        let share = (u64::from(weight / divisor) * MAX_SLOTS + total / 2) / total;
        share.max(1) as u32
    };
    weights.iter().map(|&w| if total > MAX_SLOTS { scaled(w) } else { w / divisor }).collect()
}

/// One round of nginx's smooth algorithm: each step, everyone's credit grows by its weight, the
/// one with the most is taken (the first of equals) and pays the sum of all weights.
///
/// Upstreams of equal weight take turns in order, so only the next one of each weight is
/// compared: there are at most 362 different weights in 65,536 slots, and usually a handful.
fn schedule(slots: &[u32]) -> Box<[u32]> {
    struct Class {
        weight: i64,
        members: Vec<u32>,
        /// Whose turn it is.
        turn: usize,
        /// What that member has paid so far.
        paid: i64,
    }

    let mut by_weight: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (ix, &count) in (0..).zip(slots) {
        by_weight.entry(count).or_default().push(ix);
    }
    let mut classes: Vec<Class> = by_weight
        .into_iter()
        .map(|(weight, members)| Class { weight: weight.into(), members, turn: 0, paid: 0 })
        .collect();
    let total: i64 = slots.iter().copied().map(i64::from).sum();
    let step = |step| {
        let best = classes.iter_mut().max_by_key(|class| {
            (class.weight * step - class.paid, Reverse(class.members[class.turn]))
        })?;
        let ix = best.members[best.turn];
        best.turn += 1;
        if best.turn == best.members.len() {
            best.turn = 0;
            best.paid += total;
        }
        Some(ix)
    };
    (1..=total).filter_map(step).collect()
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::super::Algorithm;
    use super::super::testing::{Pool, near};
    use super::*;

    /// nginx's algorithm as it is usually written down.
    fn nginx(weights: &[u32]) -> Vec<u32> {
        let total: i64 = weights.iter().copied().map(i64::from).sum();
        let mut credit = vec![0; weights.len()];
        (0..total)
            .map(|_| {
                let mut best = 0;
                for ix in 0..weights.len() {
                    credit[ix] += i64::from(weights[ix]);
                    if credit[ix] > credit[best] {
                        best = ix;
                    }
                }
                credit[best] -= total;
                best as u32
            })
            .collect()
    }

    #[test]
    fn interleaves() {
        let pool = Pool::new(Algorithm::WeightedRr, &[5, 1, 1]);
        assert_eq!(pool.run(14), [0, 0, 1, 0, 2, 0, 0, 0, 0, 1, 0, 2, 0, 0]);
        let same = Pool::new(Algorithm::WeightedRr, &[50, 10, 10]);
        assert_eq!(same.run(7), [0, 0, 1, 0, 2, 0, 0], "only the ratio counts");
        pool.eligible.set(1, false);
        assert_eq!(pool.run(6), [0, 0, 0, 2, 0, 0], "its slot is left out");
        pool.eligible.set(0, false);
        assert_eq!(pool.run(3), [2, 2, 2]);
    }

    #[test]
    fn same_order_as_nginx() {
        let mut rng = fastrand::Rng::with_seed(3);
        for round in 0..200 {
            let most = if round % 2 == 0 { 4 } else { 60 };
            let size = rng.usize(1..12);
            let weights: Vec<u32> = (0..size).map(|_| rng.u32(1..most)).collect();
            assert_eq!(*schedule(&weights), nginx(&weights), "{weights:?}");
        }
    }

    #[test]
    fn proportions_hold_with_one_down() {
        for down in 0..5 {
            let weights = [1, 7, 3, 20, 9];
            let pool = Pool::new(Algorithm::WeightedRr, &weights);
            pool.eligible.set(down, false);
            let left: u32 = (0..5).filter(|&ix| ix != down).map(|ix| weights[ix]).sum();
            let counts = pool.counts(left * 500);
            for ix in 0..5 {
                let want = if ix == down { 0 } else { weights[ix] * 500 };
                assert!(counts[ix].abs_diff(want) <= 1, "{down} down: {counts:?}");
            }
        }
    }

    #[test]
    fn proportions_hold_when_nearly_all_are_down() {
        let mut weights = vec![3; 1_000];
        weights[17] = 1;
        weights[500] = 6;
        weights[501] = 2;
        let pool = Pool::new(Algorithm::WeightedRr, &weights);
        for ix in (0..1_000).filter(|ix| ![17, 500, 501].contains(ix)) {
            pool.eligible.set(ix, false);
        }
        let counts = pool.counts(90_000);
        near(counts[17], 10_000.0);
        near(counts[500], 60_000.0);
        near(counts[501], 20_000.0);
    }

    #[test]
    fn large_weights_are_scaled_and_small_ones_not_lost() {
        let weights = [65_535, 65_534, 32_767, 1];
        let got = slots(&weights);
        assert_eq!(got[3], 1);
        assert!(got.iter().map(|&n| u64::from(n)).sum::<u64>() <= MAX_SLOTS + 4);
        near(got[0], 65_536.0 * 65_535.0 / 163_837.0);
        near(got[2], 65_536.0 * 32_767.0 / 163_837.0);
        assert_eq!(slots(&[]), []);
    }

    #[test]
    fn all_different_weights_build_quickly() {
        let weights: Vec<u32> = (0..1_000).map(|n| 1 + n * 65).collect();
        let pool = Pool::new(Algorithm::WeightedRr, &weights);
        let counts = pool.counts(65_536);
        assert!(counts.iter().all(|&n| n > 0));
        assert!(counts[999].abs_diff(131) <= 2, "{}", counts[999]);
    }
}
