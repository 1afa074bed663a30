//! What the decisions of one request cost: `cargo bench -p l7rp-core`.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::Criterion;
use l7rp_core::names::Nanos;
use l7rp_core::pick::{Algorithm, Ask, Eligible, Member, Seat, Selector, Tried, key_of};
use l7rp_core::upstream::breaker::{Breaker, Rules, Trip, Verdict};
use l7rp_core::window::HalfLife;

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    picks(&mut criterion);
    breaker(&mut criterion);
    criterion.final_summary();
}

/// Four upstreams, all eligible, two of them busy, all with a latency.
fn picks(criterion: &mut Criterion) {
    let ids: Vec<String> = (0..4).map(|ix| format!("http://10.0.0.{ix}:80")).collect();
    let members: Vec<_> = ids.iter().zip(1..).map(|(id, weight)| Member { id, weight }).collect();
    let eligible = Eligible::new(4);
    let seats: Vec<_> = (0..4).map(|_| Arc::new(Seat::new(0))).collect();
    let life = HalfLife::new(Duration::from_secs(10));
    for (ix, seat) in seats.iter().enumerate() {
        eligible.set(ix, true);
        seat.latency.observe(Nanos(1 + ix as u64), 0.01, life);
        let _ = ix % 2 == 0 && seat.enter();
    }
    let mut group = criterion.benchmark_group("pick of 4");
    // How old the latencies are: an upstream that is used all the time, or seldom.
    let (fresh, stale) = (Nanos(1_000_000), Nanos(1_000_000_000));
    for (name, algorithm, now) in [
        ("round_robin", Algorithm::RoundRobin, fresh),
        ("weighted_rr", Algorithm::WeightedRr, fresh),
        ("least_conn", Algorithm::LeastConn, fresh),
        ("p2c_ewma", Algorithm::P2cEwma, fresh),
        ("p2c_ewma, stale", Algorithm::P2cEwma, stale),
        ("consistent_hash", Algorithm::ConsistentHash { epsilon: 0.25, virtual_nodes: 128 }, fresh),
        ("ip_hash", Algorithm::IpHash { virtual_nodes: 128 }, fresh),
    ] {
        let selector = Selector::new(algorithm, &members, Duration::from_secs(10));
        let tried = Tried::new();
        let mut n = 0u64;
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                // Well mixed and nearly free, so that what is measured is the pick.
                n = n.wrapping_add(0x9E37_79B9_7F4A_7C15);
                let ask =
                    Ask { seats: &seats, eligible: &eligible, tried: &tried, key: n, now, draw: n };
                selector.pick(black_box(&ask))
            });
        });
    }
    group.finish();
    criterion.bench_function("key_of 16 octets", |bencher| {
        bencher.iter(|| key_of(black_box(b"203.0.113.7:4000")));
    });
}

const RATIO: Trip = Trip::Ratio { above: 0.5, min_observations: 20 };

fn closed(trip: Trip) -> Breaker {
    Breaker::new(&Rules {
        trip,
        window: Duration::from_secs(10),
        window_size: 100,
        open_min: Duration::from_secs(1),
        open_max: Duration::from_mins(1),
        half_open_probes: 3,
        probe_timeout: Duration::from_mins(1),
    })
}

fn breaker(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("breaker");
    let breaker = closed(RATIO);
    group.bench_function("state", |bencher| bencher.iter(|| black_box(&breaker).state()));
    group.bench_function("admits", |bencher| {
        bencher.iter(|| black_box(&breaker).admits(black_box(Nanos(1))));
    });
    for (name, trip, verdict) in [
        ("success, ratio", RATIO, Verdict::Success),
        ("success, consecutive", Trip::Consecutive(5), Verdict::Success),
        // A ratio that is never passed, and a ring that is full: all of it is added up.
        ("failure, ratio", Trip::Ratio { above: 1.0, min_observations: 20 }, Verdict::Failure),
        ("failure, consecutive", Trip::Consecutive(u32::MAX), Verdict::Failure),
    ] {
        let breaker = closed(trip);
        let mut now = 0;
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                now += 1_000;
                let admission = black_box(&breaker).admit(Nanos(now))?;
                admission.permit.settle(black_box(verdict), Nanos(now), now)
            });
        });
    }
    group.finish();
}
