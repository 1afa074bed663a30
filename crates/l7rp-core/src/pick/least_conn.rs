use super::Ask;
use super::dice::Dice;

/// Upstreams that are drawn blindly before all are gone through.
const BLIND: usize = 8;

/// The upstream with the fewest requests in flight; among equals, each is as likely.
///
/// Nobody has fewer than none: of many, one that is idle is found by drawing, where there are
/// enough of them. Else it takes one pass: of k equals seen so far the last is kept with
/// probability 1/k (reservoir sampling), which is uniform without a list of them.
pub(super) fn pick(ask: &Ask<'_>) -> Option<usize> {
    let mut dice = Dice::new(ask.draw);
    let eligible = ask.eligible.count();
    if eligible > BLIND {
        for _ in 0..BLIND {
            let drawn = ask.eligible.nth(dice.below(eligible as u64) as usize);
            if let Some(ix) = drawn.filter(|&ix| ask.load(ix) == 0 && ask.open(ix)) {
                return Some(ix);
            }
        }
    }
    let mut best = None;
    let mut least = u32::MAX;
    let mut equals = 0;
    for ix in ask.all() {
        let load = ask.load(ix);
        if load < least || best.is_none() {
            (best, least, equals) = (Some(ix), load, 1);
        } else if load == least {
            equals += 1;
            if dice.below(equals) == 0 {
                best = Some(ix);
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Pool, even};
    use super::super::{Algorithm, Tried};

    #[test]
    fn fewest_in_flight_wins() {
        let pool = Pool::new(Algorithm::LeastConn, &[1; 3]);
        for (ix, load) in [(0, 2), (1, 1), (2, 3)] {
            assert!((0..load).all(|_| pool.seats[ix].enter()));
        }
        assert_eq!(pool.counts(100), [0, 100, 0]);
        let mut tried = Tried::new();
        tried.insert(1);
        assert_eq!(pool.pick(&tried, 0), Some(0));
    }

    #[test]
    fn equals_are_equally_likely() {
        let pool = Pool::new(Algorithm::LeastConn, &[1; 5]);
        assert!(pool.seats[2].enter());
        let counts = pool.counts(40_000);
        assert_eq!(counts[2], 0);
        even(&[counts[0], counts[1], counts[3], counts[4]]);
    }

    #[test]
    fn idle_ones_among_many_are_equally_likely() {
        for busy in [0, 3, 15] {
            let pool = Pool::with_limits(Algorithm::LeastConn, &[1; 20], &[0; 20]);
            assert!((0..busy).all(|ix| pool.seats[ix].enter()));
            assert!(pool.eligible.set(19, false));
            let counts = pool.counts(60_000);
            assert_eq!(counts[..busy].iter().sum::<u32>() + counts[19], 0);
            even(&counts[busy..19]);
            let mut tried = Tried::new();
            tried.insert(18);
            assert!((0..1_000).all(|draw| pool.pick(&tried, draw) != Some(18)));
        }
    }

    #[test]
    fn fills_all_to_the_same_level() {
        let pool = Pool::new(Algorithm::LeastConn, &[1; 7]);
        for _ in 0..70 {
            let ix = pool.pick(&Tried::new(), fastrand::Rng::with_seed(1).u64(..)).unwrap();
            assert!(pool.seats[ix].enter());
        }
        assert!(pool.seats.iter().all(|seat| seat.in_flight() == 10));
    }
}
