//! What holds for every algorithm.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use proptest::prelude::*;

use super::testing::Pool;
use super::{Algorithm, Tried};
use crate::names::Nanos;
use crate::window::HalfLife;

const ALL: [Algorithm; 6] = [
    Algorithm::RoundRobin,
    Algorithm::WeightedRr,
    Algorithm::LeastConn,
    Algorithm::P2cEwma,
    Algorithm::ConsistentHash { epsilon: 0.25, virtual_nodes: 16 },
    Algorithm::IpHash { virtual_nodes: 16 },
];

/// (weight, limit, in flight, eligible, latency in ms if measured)
type Upstream = (u32, u32, u32, bool, Option<u32>);

fn upstream() -> impl Strategy<Value = Upstream> {
    (1..20u32, 0..3u32, 0..6u32, prop::bool::weighted(0.6), prop::option::of(1..500u32))
}

fn pool(algorithm: Algorithm, upstreams: &[Upstream]) -> Pool {
    let weights: Vec<_> = upstreams.iter().map(|u| u.0).collect();
    let limits: Vec<_> = upstreams.iter().map(|u| u.1).collect();
    let pool = Pool::with_limits(algorithm, &weights, &limits);
    for (ix, &(_, _, load, eligible, latency)) in upstreams.iter().enumerate() {
        pool.eligible.set(ix, eligible);
        for _ in 0..load {
            let _ = pool.seats[ix].enter();
        }
        if let Some(ms) = latency {
            let life = HalfLife::new(std::time::Duration::from_secs(10));
            pool.seats[ix].latency.observe(Nanos(1), f64::from(ms) / 1e3, life);
        }
    }
    pool
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn picks_only_who_is_selectable_and_somebody_if_there_is_one(
        upstreams in prop::collection::vec(upstream(), 0..150),
        tried_ix in prop::collection::vec(0..150usize, 0..6),
        draws in prop::collection::vec(any::<u64>(), 5),
    ) {
        for algorithm in ALL {
            let pool = pool(algorithm, &upstreams);
            let mut tried = Tried::new();
            for &ix in &tried_ix {
                tried.insert(ix);
            }
            let selectable: Vec<usize> = (0..upstreams.len())
                .filter(|&ix| {
                    let (_, limit, load, eligible, _) = upstreams[ix];
                    eligible && !tried_ix.contains(&ix) && (limit == 0 || load < limit)
                })
                .collect();
            for &draw in &draws {
                match pool.pick(&tried, draw) {
                    Some(ix) => prop_assert!(selectable.contains(&ix), "{algorithm:?} took {ix}"),
                    None => prop_assert!(selectable.is_empty(), "{algorithm:?} took nobody"),
                }
            }
        }
    }

    #[test]
    fn a_peek_tells_the_next_pick_and_moves_nothing(
        upstreams in prop::collection::vec(upstream(), 0..150),
        tried_ix in prop::collection::vec(0..150usize, 0..3),
        draws in prop::collection::vec(any::<u64>(), 20),
    ) {
        for algorithm in ALL {
            let (pool, twin) = (pool(algorithm, &upstreams), pool(algorithm, &upstreams));
            for (n, &draw) in draws.iter().enumerate() {
                let mut tried = Tried::new();
                for &ix in tried_ix.iter().filter(|_| n % 3 == 2) {
                    tried.insert(ix);
                }
                let ask = pool.ask(&tried, draw);
                let told = pool.selector.peek(&ask);
                prop_assert_eq!(pool.selector.peek(&ask), told, "{:?}", algorithm);
                prop_assert_eq!(pool.selector.pick(&ask), told, "{:?}", algorithm);
                // Whoever was never peeked at goes the same way.
                prop_assert_eq!(twin.pick(&tried, draw), told, "{:?}", algorithm);
            }
        }
    }

    #[test]
    fn bounded_load_is_never_passed(
        size in 1..40usize,
        epsilon in 0.01..2.0f64,
        keys in prop::collection::vec(0..8u64, 1..200),
        leave in prop::collection::vec(any::<prop::sample::Index>(), 1..200),
    ) {
        let algorithm = Algorithm::ConsistentHash { epsilon, virtual_nodes: 16 };
        let pool = Pool::new(algorithm, &vec![1; size]);
        let mut inside = Vec::new();
        for (&key, leave) in keys.iter().zip(leave.iter().cycle()) {
            let ix = pool.pick(&Tried::new(), key).unwrap();
            prop_assert!(pool.seats[ix].enter());
            inside.push(ix);
            let cap = ((1.0 + epsilon) * inside.len() as f64 / size as f64 - 1e-9).ceil();
            prop_assert!(f64::from(pool.seats[ix].in_flight()) <= cap);
            if inside.len() > 20 {
                pool.seats[inside.swap_remove(leave.index(inside.len()))].leave();
            }
        }
    }
}

#[test]
fn an_empty_pool_has_nobody() {
    for algorithm in ALL {
        assert_eq!(Pool::new(algorithm, &[]).pick(&Tried::new(), 1), None, "{algorithm:?}");
    }
}

#[test]
fn many_threads_never_pass_a_limit_and_lose_no_place() {
    for algorithm in ALL {
        let pool = Pool::with_limits(algorithm, &[1; 4], &[2; 4]);
        let (selector, eligible, seats) = (&pool.selector, &pool.eligible, &pool.seats);
        let inside: Vec<_> = (0..4).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let inside = &inside;
                scope.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(thread);
                    let tried = Tried::new();
                    for _ in 0..2_000 {
                        let ask = super::Ask {
                            seats,
                            crowd: &super::Crowd::default(),
                            eligible,
                            tried: &tried,
                            key: rng.u64(..),
                            now: Nanos(1),
                            draw: rng.u64(..),
                        };
                        let Some(ix) = selector.pick(&ask) else { continue };
                        if seats[ix].enter() {
                            assert!(inside[ix].fetch_add(1, Relaxed) < 2);
                            inside[ix].fetch_sub(1, Relaxed);
                            seats[ix].leave();
                        }
                        if rng.u32(..16) == 0 {
                            eligible.set(rng.usize(..4), rng.bool());
                        }
                    }
                });
            }
        });
        assert!(seats.iter().all(|seat: &Arc<_>| seat.in_flight() == 0), "{algorithm:?}");
    }
}
