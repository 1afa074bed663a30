use std::collections::HashMap;
use std::sync::atomic::AtomicU32;

use proptest::prelude::*;

use super::super::Bucket;
use super::*;

const SECOND: u64 = 1_000_000_000;
const SECRET: [u64; 2] = [0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210];

fn passes(buckets: &Buckets, key: u128, rate: &Rate, now: u64) -> bool {
    matches!(buckets.try_take(key, rate, Nanos(now)), Decision::Allowed { .. })
}

/// What the clients of a run have got, compared with what a rate promises in the worst case:
/// over any span of `t` seconds, at most `burst + rps × t`.
#[derive(Default)]
struct Ledger {
    /// By client: the highest number of grants beyond the rate in any span that ends at the time.
    excess: HashMap<u128, (f64, u64)>,
}

impl Ledger {
    /// Notes a grant; gives the excess after it.
    fn granted(&mut self, key: u128, rps: f64, now: u64) -> f64 {
        let (excess, last) = self.excess.entry(key).or_insert((0.0, now));
        *excess = (*excess - (now - *last) as f64 * rps / SECOND as f64).max(0.0) + 1.0;
        *last = now;
        *excess
    }
}

#[test]
fn one_client_is_one_key() {
    // (first address, second address, the same client)
    for (one, other, same) in [
        ("192.0.2.1", "192.0.2.1", true),
        ("192.0.2.1", "192.0.2.2", false),
        ("192.0.2.1", "::ffff:192.0.2.1", true),
        ("192.0.2.1", "::192.0.2.1", false),
        ("192.0.2.1", "64:ff9b::192.0.2.1", false),
        ("0.0.0.0", "::", false),
        ("0.0.0.1", "::1", false),
        ("0.0.0.0", "0:0:0:1::", false),
        ("255.255.255.255", "0:0:0:1::", false),
        ("2001:db8::1", "2001:db8::2", true),
        ("2001:db8::", "2001:db8::ffff:ffff:ffff:ffff", true),
        ("2001:db8::", "2001:db8::ffff:192.0.2.1", true),
        ("2001:db8::1", "2001:db8:0:1::1", false),
        ("2001:db8::1", "2001:db9::1", false),
        ("::", "::1", true),
    ] {
        let key = |ip: &str| client_key(ip.parse().unwrap());
        assert_eq!(key(one) == key(other), same, "{one} {other}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn families_never_collide(v4: [u8; 4], v6: [u16; 8], low: [u16; 8]) {
        let (one, other) = (IpAddr::from(v4), IpAddr::from(v6));
        if other.to_canonical().is_ipv6() {
            prop_assert_ne!(client_key(one), client_key(other));
            // The last 64 bits make no difference, the first do.
            let neighbour: [u16; 8] =
                array::from_fn(|at| if at < 4 { v6[at] } else { low[at] });
            if v6[..4] != [0; 4] {
                prop_assert_eq!(client_key(IpAddr::from(neighbour)), client_key(other));
            }
        }
        prop_assert_eq!(client_key(one), client_key(one));
    }

    #[test]
    fn while_nobody_is_evicted_each_has_its_own_bucket(
        rps in 0.5..100.0_f64,
        burst in 1..20_u32,
        requests in prop::collection::vec((0..40_u128, 0..100_000_000_u64), 1..600),
    ) {
        let rate = Rate::new(rps, burst);
        let interval = (1e9 / rps).ceil();
        // 40 clients in 512 sets of eight ways.
        let buckets = Buckets::new(4_096, SECRET);
        let exact: Vec<Bucket> = (0..40).map(|_| Bucket::new()).collect();
        let mut model: HashMap<u128, (f64, u64)> = HashMap::new();
        let mut now = SECOND;
        for (key, gap) in requests {
            now += gap / 40;
            let got = buckets.try_take(key, &rate, Nanos(now));
            prop_assert_eq!(got, exact[key as usize].try_take(&rate, Nanos(now)));
            let (tokens, last) = model.entry(key).or_insert((f64::from(burst), now));
            *tokens = (*tokens + (now - *last) as f64 / interval).min(f64::from(burst));
            *last = now;
            if let Decision::Allowed { .. } = got {
                *tokens -= 1.0;
                prop_assert!(*tokens > -1e-6, "{key} at {now}: {tokens}");
            } else {
                prop_assert!(*tokens < 1.0 + 1e-6, "{key} at {now}: {tokens}");
            }
        }
    }
}

#[test]
fn clients_do_not_know_their_set() {
    let set = |secret, key: u128| {
        let buckets = Buckets::new(65_536, secret);
        buckets.try_take(key, &Rate::new(1.0, 1), Nanos(SECOND));
        buckets.sets.iter().position(|set| set.way_of(0).is_none() || set.tags[0].load(SeqCst) > 0)
    };
    let sets: Vec<_> = (0..20).map(|n| set([n, 7], 1)).collect();
    let distinct: std::collections::HashSet<_> = sets.iter().collect();
    assert!(distinct.len() > 15, "{sets:?}");
    assert_ne!(set([7, 1], 1), set([7, 2], 1), "both halves of the secret count");
}

#[test]
fn the_hash_is_the_published_one() {
    // Appendix A of the SipHash paper and vectors.h of its authors: the key 00 01 … 0f, the
    // message 00 01 … 0f of 16 octets.
    let key = u128::from_ne_bytes(array::from_fn(|at| at as u8));
    let secret = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
    let buckets = Buckets::new(1, secret);
    buckets.try_take(key, &Rate::new(1.0, 1), Nanos(SECOND));
    assert_eq!(buckets.sets[0].tags[0].load(SeqCst), 0x3f2a_cc7f_57c2_9bdb);
}

#[test]
fn memory_is_what_was_asked_for() {
    assert_eq!(size_of::<Set>(), 8 * 16);
    for (capacity, sets) in [(0, 1), (1, 1), (8, 1), (9, 2), (1_000, 128), (65_536, 8_192)] {
        assert_eq!(Buckets::new(capacity, SECRET).sets.len(), sets, "{capacity}");
    }
}

/// Ways whose bucket is not full, as `owner` and `due`.
fn ways(set: &Set) -> Vec<(u64, u64)> {
    set.tags.iter().zip(&set.due).map(|(tag, due)| (tag.load(SeqCst), due.load(SeqCst))).collect()
}

#[test]
fn a_newcomer_owes_what_it_displaces() {
    let rate = Rate::new(1.0, 5);
    let set = Set::new();
    let left = |tag, now| match set.try_take(tag, &rate, Nanos(now * SECOND)) {
        Decision::Allowed { remaining } => remaining,
        Decision::Refused { .. } => 99,
    };
    // Eight clients; the first takes one token, the second two, …
    for tag in 1..=8 {
        for taken in 1..=tag.min(5) as u32 {
            assert_eq!(left(tag, 100), 5 - taken);
        }
    }
    assert_eq!(left(9, 100), 3, "in place of the first, which owed one");
    assert_eq!(left(10, 100), 2, "in place of the second, which owed two; the ninth owes as much");
    assert_eq!(left(9, 100), 2, "and is still here");
    assert_eq!(left(1, 100), 1, "the first owes more than before: three");
    for tag in 11..100 {
        left(tag, 100);
    }
    let before = ways(&set);
    for tag in [1, 2, 9, 200, 201] {
        assert_eq!(left(tag, 100), 99, "all ways owe everything");
    }
    assert_eq!(ways(&set), before, "who is refused takes nobody's place");
    assert_eq!(left(300, 101), 0, "a second later each way has a token");
    assert_eq!(left(301, 1_000), 4, "and in the end all are as good as empty");
}

#[test]
fn of_two_ways_the_first_remains_with_both_debts() {
    const FREE: u64 = 100;
    // (debt of the third way, debt of the sixth, whose thread comes last, debt that remains)
    for (third, sixth, own, want) in [
        (130, 140, 2, 170),
        (150, 120, 2, 170),
        (150, 90, 2, 150),
        // What was paid in its own way does not count for a thread that goes: it pays again.
        (130, 140, 5, 130),
        (150, 120, 5, 150),
    ] {
        let set = Set::new();
        for (way, due) in [(2, third), (5, sixth)] {
            set.tags[way].store(7, SeqCst);
            set.due[way].store(due, SeqCst);
        }
        assert_eq!(set.settle(own, 7, FREE), own == 2, "{third} {sixth} {own}");
        assert_eq!(ways(&set)[2], (7, want), "{third} {sixth} {own}");
        assert_eq!(ways(&set)[5], (0, sixth), "debts without an owner stay");
    }
}

#[test]
fn what_is_full_again_goes_first() {
    let rate = Rate::new(1.0, 10);
    let set = Set::new();
    for tag in 1..=8 {
        set.try_take(tag, &rate, Nanos(tag * SECOND));
    }
    let at = Nanos(5 * SECOND + 1);
    assert_eq!(set.try_take(9, &rate, at), Decision::Allowed { remaining: 9 });
    let tags: Vec<u64> = ways(&set).into_iter().map(|(tag, _)| tag).collect();
    assert_eq!(tags, [9, 2, 3, 4, 5, 6, 7, 8]);
}

/// A million addresses, some honest clients, and one that tries to have its own debt forgotten:
/// between its requests it uses all the other addresses of its network.
#[test]
fn nobody_gets_more_whatever_is_evicted() {
    for (capacity, requests, seed) in
        [(64, 100_000, 1), (1_024, 200_000, 2), (65_536, 1_000_000, 3)]
    {
        let (rps, burst) = (2.0, 10);
        let rate = Rate::new(rps, burst);
        let buckets = Buckets::new(capacity, [seed, !seed]);
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut ledger = Ledger::default();
        let mut now = SECOND;
        let attacker = client_key("2001:db8::1".parse().unwrap());
        let mut attempts = 0_u64;
        let mut ask = |key, now| {
            if passes(&buckets, key, &rate, now) {
                let excess = ledger.granted(key, rps, now);
                assert!(excess <= f64::from(burst) + 1.0, "{key:x}: {excess}; seed {seed}");
            }
        };
        while attempts < requests {
            // 200,000 requests a second in all.
            now += rng.u64(0..10_000);
            let key = match rng.u8(0..10) {
                0 => u128::from(rng.u32(0..100)),
                1 => attacker,
                // Its other addresses, in turn.
                2..6 => attacker + (u128::from(attempts % 200_000 + 1) << 64),
                _ => u128::from(rng.u64(..)) << 64,
            };
            ask(key, now);
            attempts += 1;
        }
        assert_eq!(buckets.sets.len() * WAYS, capacity, "fixed");
    }
}

/// The worst case of the same: one set only, so that each newcomer evicts.
#[test]
fn nobody_is_forgotten_in_a_crowded_set() {
    for seed in 0..30 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (rps, burst) = (f64::from(rng.u32(1..50)), rng.u32(1..30));
        let rate = Rate::new(rps, burst);
        let buckets = Buckets::new(8, [seed, 1]);
        let mut ledger = Ledger::default();
        let mut now = SECOND;
        for _ in 0..10_000 {
            now += rng.u64(0..SECOND / 1_000);
            let key = u128::from(rng.u8(0..20) & rng.u8(..));
            if passes(&buckets, key, &rate, now) {
                let excess = ledger.granted(key, rps, now);
                // Exactly: with one thread there is no race that could give one away.
                assert!(excess <= f64::from(burst) + 1e-6, "{key}: {excess}; seed {seed}");
            }
        }
    }
}

#[test]
fn threads_that_move_a_client_in_at_once_agree_on_its_bucket() {
    const THREADS: u64 = 4;
    const CLIENTS: usize = 300;
    let (burst, rate) = (20, Rate::new(0.001, 20));
    for round in 0..20 {
        // Three clients for each set: collisions, but nobody is evicted for long.
        let buckets = Buckets::new(800, [round, 5]);
        let passed: Vec<AtomicU32> = (0..CLIENTS).map(|_| AtomicU32::new(0)).collect();
        let start = std::sync::Barrier::new(THREADS as usize);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (buckets, passed, start) = (&buckets, &passed, &start);
                scope.spawn(move || {
                    start.wait();
                    for (key, passed) in passed.iter().enumerate() {
                        for _ in 0..burst {
                            if passes(buckets, key as u128, &rate, SECOND + thread) {
                                passed.fetch_add(1, SeqCst);
                            }
                        }
                    }
                });
            }
        });
        for set in &buckets.sets {
            let mut tags: Vec<u64> =
                ways(set).into_iter().map(|w| w.0).filter(|&t| t > 0).collect();
            let all = tags.len();
            tags.sort_unstable();
            tags.dedup();
            assert_eq!(tags.len(), all, "a client has two ways; round {round}");
        }
        for (key, passed) in passed.iter().enumerate() {
            let passed = passed.load(SeqCst);
            assert!(
                passed.abs_diff(burst) <= THREADS as u32,
                "{key}: {passed} of {burst}; round {round}"
            );
        }
    }
}

#[test]
fn many_threads_in_one_set_give_little_away() {
    const THREADS: u32 = 4;
    let (burst, rate) = (50, Rate::new(0.001, 50));
    for round in 0..20 {
        let buckets = Buckets::new(8, [round, 9]);
        let passed: Vec<AtomicU32> = (0..24).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (buckets, passed) = (&buckets, &passed);
                scope.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(round * 8 + u64::from(thread));
                    for _ in 0..5_000 {
                        let key = rng.usize(..passed.len());
                        if passes(buckets, key as u128, &rate, SECOND) {
                            passed[key].fetch_add(1, SeqCst);
                        }
                    }
                });
            }
        });
        for (key, passed) in passed.iter().enumerate() {
            let passed = passed.load(SeqCst);
            assert!(passed <= burst + THREADS, "{key}: {passed} of {burst}; round {round}");
        }
    }
}

#[test]
fn a_peek_tells_what_comes_and_takes_nothing() {
    let (buckets, rate) = (Buckets::new(WAYS, SECRET), Rate::new(1.0, 2));
    let mut rng = fastrand::Rng::with_seed(3);
    // More clients than ways, so that some are strangers to a full set.
    for n in 0..1_000 {
        let (key, now) = (rng.u128(1..2 * WAYS as u128), Nanos(n * SECOND / 10));
        let told = buckets.peek(key, &rate, now);
        assert_eq!(buckets.peek(key, &rate, now), told);
        assert_eq!(buckets.try_take(key, &rate, now), told, "{n}");
    }
    let bucket = Bucket::new();
    for _ in 0..3 {
        let told = bucket.peek(&rate, Nanos(1));
        assert_eq!(bucket.try_take(&rate, Nanos(1)), told);
    }
}
