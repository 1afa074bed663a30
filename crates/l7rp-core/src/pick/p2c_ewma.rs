use super::Ask;
use super::dice::Dice;
use crate::window::HalfLife;

/// Pairs that are drawn blindly before all candidates are gone through.
const BLIND: usize = 4;

/// The better of two upstreams drawn at random (Mitzenmacher, "The Power of Two Choices in
/// Randomized Load Balancing", IEEE TPDS 2001), by latency × (1 + in flight).
#[derive(Debug)]
pub(super) struct P2cEwma {
    half_life: HalfLife,
}

impl P2cEwma {
    pub(super) fn new(half_life: HalfLife) -> Self {
        Self { half_life }
    }

    pub(super) fn pick(&self, ask: &Ask<'_>) -> Option<usize> {
        let mut dice = Dice::new(ask.draw);
        let (first, second) = pair(ask, &mut dice)?;
        match second {
            Some(second) if self.better(ask, second, first) => Some(second),
            _ => Some(first),
        }
    }

    /// Whether `a` is strictly the better choice. An upstream never measured is taken to be as
    /// fast as its rival: it neither draws all traffic to itself nor waits for a first request.
    fn better(&self, ask: &Ask<'_>, a: usize, b: usize) -> bool {
        let latency = |ix: usize| ask.seats.get(ix)?.latency.read(ask.now, self.half_life);
        let (load_a, load_b) = (f64::from(ask.load(a)) + 1.0, f64::from(ask.load(b)) + 1.0);
        match (latency(a), latency(b)) {
            (Some(fast_a), Some(fast_b)) => fast_a * load_a < fast_b * load_b,
            _ => load_a < load_b,
        }
    }
}

/// Two different selectable upstreams, every ordered pair as likely as any other; or the only
/// one there is.
fn pair(ask: &Ask<'_>, dice: &mut Dice) -> Option<(usize, Option<usize>)> {
    let eligible = ask.eligible.count();
    // Draw from all eligible and reject a pair of which one is not selectable: as uniform as
    // listing the selectable ones, and nearly always the first pair will do.
    if eligible >= 2 + ask.tried.len() {
        for _ in 0..BLIND {
            let a = dice.below(eligible as u64) as usize;
            let b = dice.below(eligible as u64 - 1) as usize;
            let b = b + usize::from(b >= a);
            if let (Some(a), Some(b)) = (ask.eligible.nth(a), ask.eligible.nth(b))
                && a != b // the set may have changed in between
                && ask.open(a)
                && ask.open(b)
            {
                return Some((a, Some(b)));
            }
        }
    }
    sample(ask, dice)
}

/// The same by one pass over the candidates: reservoir sampling of two.
fn sample(ask: &Ask<'_>, dice: &mut Dice) -> Option<(usize, Option<usize>)> {
    let mut candidates = ask.all();
    let first = candidates.next()?;
    let Some(second) = candidates.next() else { return Some((first, None)) };
    let mut kept = [first, second];
    for (seen, ix) in (3..).zip(candidates) {
        if let Some(place) = kept.get_mut(dice.below(seen) as usize) {
            *place = ix;
        }
    }
    // The first place favours early candidates; which of the two counts as drawn first is
    // decided now.
    if dice.below(2) == 1 {
        kept.swap(0, 1);
    }
    Some((kept[0], Some(kept[1])))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::testing::{Pool, even};
    use super::super::{Algorithm, Tried};
    use super::*;
    use crate::names::Nanos;

    const LIFE: Duration = Duration::from_secs(10);

    fn observe(pool: &Pool, ix: usize, seconds: f64) {
        pool.seats[ix].latency.observe(Nanos(1), seconds, HalfLife::new(LIFE));
    }

    /// How often each ordered pair is drawn.
    fn pairs(pool: &Pool, tried: &Tried, draws: u64) -> Vec<u32> {
        let n = pool.seats.len();
        let mut counts = vec![0; n * n];
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..draws {
            let ask = pool.ask(tried, rng.u64(..));
            let (a, b) = pair(&ask, &mut Dice::new(ask.draw)).unwrap();
            counts[a * n + b.unwrap()] += 1;
        }
        counts
    }

    fn check_pairs(pool: &Pool, tried: &Tried) {
        let n = pool.seats.len();
        let counts = pairs(pool, tried, 100_000);
        let ask = pool.ask(tried, 0);
        let (mut used, mut other) = (Vec::new(), 0);
        for (i, &count) in counts.iter().enumerate() {
            let (a, b) = (i / n, i % n);
            if a != b && ask.selectable(a) && ask.selectable(b) {
                used.push(count);
            } else {
                other += count;
            }
        }
        even(&used);
        assert_eq!(other, 0);
    }

    #[test]
    fn every_pair_is_as_likely() {
        check_pairs(&Pool::new(Algorithm::P2cEwma, &[1; 6]), &Tried::new());
    }

    #[test]
    fn every_pair_is_as_likely_with_some_tried_down_or_full() {
        let pool = Pool::with_limits(Algorithm::P2cEwma, &[1; 9], &[0, 0, 1, 1, 1, 0, 0, 0, 0]);
        let mut tried = Tried::new();
        tried.insert(8);
        for ix in 2..5 {
            assert!(pool.seats[ix].enter());
        }
        pool.eligible.set(6, false);
        check_pairs(&pool, &tried);
    }

    #[test]
    fn every_pair_is_as_likely_when_blind_draws_nearly_always_fail() {
        let mut limits = [1; 100];
        limits[10] = 0;
        limits[50] = 0;
        limits[99] = 0;
        let pool = Pool::with_limits(Algorithm::P2cEwma, &[1; 100], &limits);
        for (ix, seat) in pool.seats.iter().enumerate() {
            assert!(limits[ix] == 0 || seat.enter());
        }
        check_pairs(&pool, &Tried::new());
    }

    #[test]
    fn lower_score_wins() {
        let pool = Pool::new(Algorithm::P2cEwma, &[1; 2]);
        observe(&pool, 0, 0.030);
        observe(&pool, 1, 0.010);
        assert_eq!(pool.counts(100), [0, 100], "faster");
        assert!((0..3).all(|_| pool.seats[1].enter()));
        assert_eq!(pool.counts(100), [100, 0], "0.03 × 1 against 0.01 × 4");
        assert!(pool.seats[0].enter());
        assert_eq!(pool.counts(100), [0, 100], "0.03 × 2 against 0.01 × 4");
    }

    #[test]
    fn unmeasured_is_judged_by_load() {
        let pool = Pool::new(Algorithm::P2cEwma, &[1; 2]);
        even(&pool.counts(10_000));
        observe(&pool, 0, 5.0);
        even(&pool.counts(10_000));
        assert!(pool.seats[1].enter());
        assert_eq!(pool.counts(100), [100, 0]);
    }

    #[test]
    fn the_slowest_of_many_gets_nothing_until_its_latency_has_faded() {
        let pool = Pool::new(Algorithm::P2cEwma, &[1; 4]);
        for ix in 0..4 {
            observe(&pool, ix, if ix == 2 { 1.0 } else { 0.01 });
        }
        assert_eq!(pool.counts(1_000)[2], 0);
        let untried = Tried::new();
        let later = Nanos(60_000_000_000);
        for ix in [0, 1, 3] {
            pool.seats[ix].latency.observe(later, 0.01, HalfLife::new(LIFE));
        }
        let ask = Ask { now: later, ..pool.ask(&untried, 0) };
        let picked =
            (0..1_000).filter(|&n| pool.selector.pick(&Ask { draw: n * 7_919, ..ask }) == Some(2));
        assert!(picked.count() > 300, "1 s has faded to 2.5 ms in six half-lives");
    }

    #[test]
    fn the_only_one_left_is_taken() {
        let pool = Pool::new(Algorithm::P2cEwma, &[1; 3]);
        let mut tried = Tried::new();
        tried.insert(0);
        tried.insert(2);
        assert_eq!(pool.pick(&tried, 9), Some(1));
        tried.insert(1);
        assert_eq!(pool.pick(&tried, 9), None);
    }
}
