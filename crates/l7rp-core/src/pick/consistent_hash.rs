use std::fmt::Write as _;

use xxhash_rust::xxh3::xxh3_64;

use super::{Ask, Member};

/// Points of a ring, above which every member gets fewer in proportion: 12 MiB.
const MAX_POINTS: u64 = 1 << 20;

/// Points that are passed blindly before asking whether anybody is left to be found.
const BLIND: usize = 64;

/// Where a request with the key `bytes` belongs on a ring: the same on every host and in every
/// release, so that several proxies agree.
#[must_use]
pub fn key_of(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// Consistent hashing, with bounded loads if there is an ε (Mirrokni, Thorup, Zadimoghaddam,
/// "Consistent Hashing with Bounded Loads", SODA 2018).
///
/// Each member owns `virtual_nodes × weight` points of a circle of 64-bit numbers. A request
/// belongs to the first point at or after its key; from there it walks on past members that are
/// not selectable or that carry the most they may.
#[derive(Debug)]
pub(super) struct ConsistentHash {
    /// Sorted; apart from the owners, so that a search touches fewer cache lines.
    points: Box<[u64]>,
    owners: Box<[u32]>,
    epsilon: Option<f64>,
}

impl ConsistentHash {
    pub(super) fn new(members: &[Member<'_>], virtual_nodes: u32, epsilon: Option<f64>) -> Self {
        let mut ring = Vec::new();
        let mut label = String::new();
        let counts = point_counts(members, virtual_nodes);
        for ((ix, member), count) in (0u32..).zip(members).zip(counts) {
            for i in 0..count {
                label.clear();
                // Writing to a String cannot fail.
                let _ = write!(label, "{}#{i}", member.id);
                ring.push((xxh3_64(label.as_bytes()), ix));
            }
        }
        // Two points at one place are put in order by id, not by position in the file, which may
        // differ between hosts.
        let id = |ix: u32| members.get(ix as usize).map(|m| m.id);
        ring.sort_unstable_by(|a, b| (a.0, id(a.1), a.1).cmp(&(b.0, id(b.1), b.1)));
        let (points, owners): (Vec<_>, Vec<_>) = ring.into_iter().unzip();
        Self { points: points.into(), owners: owners.into(), epsilon }
    }

    pub(super) fn pick(&self, ask: &Ask<'_>) -> Option<usize> {
        let start = self.points.partition_point(|&point| point < ask.key);
        let home = self.walk(start).next()?;
        // Nothing in flight is within any cap: no need to know the cap.
        if ask.selectable(home) && (self.epsilon.is_none() || ask.load(home) == 0) {
            return Some(home);
        }
        let cap = self.epsilon.map_or(u64::MAX, |epsilon| cap(ask, epsilon));
        let under_cap = |&ix: &usize| u64::from(ask.load(ix)) < cap;
        let takes = |ix: &usize| ask.selectable(*ix) && under_cap(ix);
        if let Some(ix) = self.walk(start).take(BLIND).find(takes) {
            return Some(ix);
        }
        // Asking everybody first costs n; walking in vain would cost the whole ring, on every
        // request, just when the pool is full.
        if ask.all().any(|ix| under_cap(&ix)) {
            return self.walk(start).find(takes);
        }
        // Those under the cap have been tried or are at their own limit. Better too much load
        // than no answer.
        ask.all().next()?;
        self.walk(start).find(|&ix| ask.selectable(ix))
    }

    /// The owners of all points clockwise from `start`, once round.
    fn walk(&self, start: usize) -> impl Iterator<Item = usize> {
        let (before, after) = self.owners.split_at(start.min(self.owners.len()));
        after.iter().chain(before).map(|&ix| ix as usize)
    }
}

/// ⌈(1+ε) · mean⌉ over the eligible, the new request counted in.
///
/// Their requests in flight are those of all but the others: mostly, nobody is among the others.
fn cap(ask: &Ask<'_>, epsilon: f64) -> u64 {
    let n = ask.eligible.count();
    let sum = |members: &mut dyn Iterator<Item = usize>| -> u64 {
        members.map(|ix| u64::from(ask.load(ix))).sum()
    };
    let total = if n >= ask.eligible.len() / 2 {
        ask.crowd.total(ask.seats).saturating_sub(sum(&mut ask.eligible.others()))
    } else {
        sum(&mut ask.eligible.iter())
    };
    let bound = (1.0 + epsilon) * total.saturating_add(1) as f64 / n.max(1) as f64;
    // What is whole must stay whole: 1.1 × 50 / 5 comes out a hair above 11.
    (bound - 1e-9).ceil() as u64
}

/// How many points each member gets.
///
/// Weights are not divided by their common divisor: a new member could change the divisor, and
/// with it the points of everybody else. For the same reason scaling down is the last resort.
fn point_counts(members: &[Member<'_>], virtual_nodes: u32) -> Vec<u64> {
    let wanted = |m: &Member<'_>| u64::from(virtual_nodes.max(1)) * u64::from(m.weight.max(1));
    let total: u128 = members.iter().map(|m| u128::from(wanted(m))).sum();
    let fit = |count: u64| {
        let share = u128::from(count) * u128::from(MAX_POINTS) / total;
        (share as u64).max(1)
    };
    let fits = total <= u128::from(MAX_POINTS);
    members.iter().map(wanted).map(|count| if fits { count } else { fit(count) }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Pool, near};
    use super::super::{Algorithm, Tried};
    use super::*;

    const HASH: Algorithm = Algorithm::IpHash { virtual_nodes: 128 };
    const BOUNDED: Algorithm = Algorithm::ConsistentHash { epsilon: 0.25, virtual_nodes: 128 };

    fn ids(n: usize) -> Vec<String> {
        (0..n).map(|ix| format!("http://10.0.0.{ix}:80")).collect()
    }

    fn ring(ids: &[String]) -> ConsistentHash {
        let members: Vec<_> = ids.iter().map(|id| Member { id, weight: 1 }).collect();
        ConsistentHash::new(&members, 128, None)
    }

    fn home(ring: &ConsistentHash, key: u64) -> usize {
        ring.walk(ring.points.partition_point(|&p| p < key)).next().unwrap()
    }

    #[test]
    fn is_the_same_everywhere() {
        // Values fixed for good: another release that disagrees sends every session elsewhere.
        assert_eq!(key_of(b"session-1"), 13_870_706_736_031_703_813);
        let ids = ["http://127.0.0.1:9001", "http://127.0.0.1:9002", "http://127.0.0.1:9003"];
        let members: Vec<_> = ids.iter().map(|id| Member { id, weight: 1 }).collect();
        let ring = ConsistentHash::new(&members, 2, None);
        let points: Vec<_> = ring.points.iter().copied().zip(ring.owners.iter().copied()).collect();
        assert_eq!(
            points,
            [
                (1_352_857_241_041_484_375, 0),
                (3_971_338_166_294_062_731, 1),
                (9_835_462_141_188_529_771, 0),
                (10_722_106_101_958_072_734, 2),
                (13_288_888_327_697_957_998, 2),
                (18_324_636_460_666_464_912, 1),
            ]
        );
    }

    #[test]
    fn a_point_owns_the_keys_up_to_itself() {
        let ids = ids(5);
        let members: Vec<_> = ids.iter().map(|id| Member { id, weight: 1 }).collect();
        let ring = ConsistentHash::new(&members, 4, None);
        let pool = Pool::new(HASH, &[1; 5]);
        let tried = Tried::new();
        for (i, &point) in ring.points.iter().enumerate() {
            let owner = ring.owners[i] as usize;
            let next = ring.owners[(i + 1) % ring.owners.len()] as usize;
            let pick = |key| ring.pick(&Ask { key, ..pool.ask(&tried, 0) });
            assert_eq!(pick(point), Some(owner));
            assert_eq!(pick(point - 1), Some(owner));
            assert_eq!(pick(point + 1), Some(next));
        }
    }

    #[test]
    fn does_not_depend_on_the_order_of_the_file() {
        let forward = ids(10);
        let backward: Vec<_> = forward.iter().rev().cloned().collect();
        let (a, b) = (ring(&forward), ring(&backward));
        assert!((0..1_000u32).all(|n| {
            let key = key_of(&n.to_le_bytes());
            forward[home(&a, key)] == backward[home(&b, key)]
        }));
    }

    #[test]
    fn only_its_share_moves_when_a_member_comes_or_goes() {
        let many = ids(20);
        let (with, without) = (ring(&many), ring(&many[..19]));
        let mut moved = 0;
        for n in 0..100_000u32 {
            let key = key_of(&n.to_le_bytes());
            let (a, b) = (home(&with, key), home(&without, key));
            if a != b {
                assert_eq!(a, 19, "only keys of the one that goes may move");
                moved += 1;
            }
        }
        // A twentieth, give or take what 128 points scatter: about 1/√128 = 9 %.
        assert!((3_700..6_300).contains(&moved), "{moved}");
    }

    #[test]
    fn share_follows_weight() {
        let pool = Pool::new(Algorithm::IpHash { virtual_nodes: 1_000 }, &[1, 2, 5]);
        let counts = pool.counts(80_000);
        for (count, want) in counts.into_iter().zip([10_000.0, 20_000.0, 50_000.0]) {
            assert!((f64::from(count) / want - 1.0).abs() < 0.1, "{count} is not {want}");
        }
    }

    #[test]
    fn one_that_is_down_spreads_over_all_others() {
        let pool = Pool::new(HASH, &[1; 10]);
        let untried = Tried::new();
        let before: Vec<_> = (0..50_000).map(|n| pool.pick(&untried, n)).collect();
        pool.eligible.set(3, false);
        let mut gained = [0; 10];
        for (n, &was) in (0..).zip(&before) {
            let now = pool.pick(&untried, n);
            if was == Some(3) {
                gained[now.unwrap()] += 1;
            } else {
                assert_eq!(now, was);
            }
        }
        // 5,000 keys in 128 arcs over nine others: 14 arcs each.
        assert_eq!(gained[3], 0);
        assert!(gained.iter().filter(|&&n| (150..1_300).contains(&n)).count() == 9, "{gained:?}");
    }

    #[test]
    fn a_key_stays_with_its_upstream_and_moves_on_clockwise() {
        let pool = Pool::new(BOUNDED, &[1; 5]);
        let mut tried = Tried::new();
        let mut order = Vec::new();
        while let Some(ix) = pool.pick(&tried, 42) {
            assert_eq!(pool.pick(&tried, 42), Some(ix));
            tried.insert(ix);
            order.push(ix);
        }
        order.sort_unstable();
        assert_eq!(order, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn the_cap_counts_the_new_request() {
        // (ε, in flight, cap)
        for (epsilon, loads, want) in [
            (0.25, vec![0, 0, 0], 1),
            (0.25, vec![1, 0, 0], 1),        // 1.25 × 2/3
            (0.25, vec![1, 1, 1], 2),        // 1.25 × 4/3
            (0.25, vec![3, 0, 0, 0], 2),     // 1.25 × 4/4
            (0.1, vec![49, 0, 0, 0, 0], 11), // 1.1 × 50/5, not a hair more
            (1.0, vec![99], 200),
        ] {
            let pool = Pool::new(BOUNDED, &vec![1; loads.len()]);
            for (seat, &load) in pool.seats.iter().zip(&loads) {
                assert!((0..load).all(|_| seat.enter()));
            }
            assert_eq!(cap(&pool.ask(&Tried::new(), 0), epsilon), want, "{epsilon} {loads:?}");
        }
    }

    #[test]
    fn the_cap_is_that_of_the_eligible_however_few_they_are() {
        let pool = Pool::new(BOUNDED, &[1; 130]);
        for (ix, seat) in pool.seats.iter().enumerate() {
            assert!((0..ix % 7).all(|_| seat.enter()));
        }
        let mut rng = fastrand::Rng::with_seed(5);
        for out in [0, 1, 20, 64, 65, 66, 129, 130] {
            let mut order: Vec<_> = (0..130).collect();
            rng.shuffle(&mut order);
            for (n, &ix) in order.iter().enumerate() {
                pool.eligible.set(ix, n >= out);
            }
            let total: usize = order[out..].iter().map(|ix| ix % 7).sum();
            let want = (5 * (total + 1)).div_ceil(4 * (130 - out).max(1));
            assert_eq!(cap(&pool.ask(&Tried::new(), 0), 0.25), want as u64, "{out} are out");
        }
    }

    #[test]
    fn one_hot_key_never_passes_the_cap() {
        let pool = Pool::new(BOUNDED, &[1; 8]);
        let untried = Tried::new();
        for total in 1..=1_000u64 {
            let ix = pool.pick(&untried, 77).unwrap();
            assert!(pool.seats[ix].enter());
            let most = pool.seats.iter().map(|seat| seat.in_flight()).max().unwrap();
            assert!(u64::from(most) <= (total * 5).div_ceil(4 * 8), "{most} of {total}");
        }
        near(pool.seats.iter().map(|s| s.in_flight()).sum(), 1_000.0);
    }

    #[test]
    fn over_the_cap_is_better_than_nobody() {
        let pool = Pool::new(BOUNDED, &[1; 3]);
        assert!((0..50).all(|_| pool.seats[0].enter()));
        let mut tried = Tried::new();
        tried.insert(1);
        tried.insert(2);
        assert_eq!(pool.pick(&tried, 5), Some(0));
    }

    #[test]
    fn finds_the_only_one_of_a_thousand() {
        let pool = Pool::new(BOUNDED, &[1; 1_000]);
        for ix in (0..1_000).filter(|&ix| ix != 700) {
            pool.eligible.set(ix, false);
        }
        assert_eq!(pool.run(20), [700; 20]);
        pool.eligible.set(700, false);
        assert_eq!(pool.pick(&Tried::new(), 1), None);
    }

    #[test]
    fn huge_weights_are_scaled_down_and_small_ones_not_lost() {
        let members =
            [("a", 65_535), ("b", 65_535), ("c", 1)].map(|(id, weight)| Member { id, weight });
        let counts = point_counts(&members, 1_000);
        assert!(counts.iter().sum::<u64>() <= MAX_POINTS + 3);
        assert_eq!(counts[0], counts[1]);
        assert!(counts[2] >= 1);
        assert_eq!(point_counts(&members, 2), [131_070, 131_070, 2]);
    }
}
