//! How long the decisions of one request take: `cargo bench -p l7rp-core --bench decisions`.

mod fixtures;

use std::hint::black_box;

use criterion::Criterion;
use l7rp_core::names::Nanos;
use l7rp_core::pick::{Algorithm, key_of};
use l7rp_core::upstream::breaker::{Trip, Verdict};

use fixtures::{CONSISTENT_HASH, IP_HASH, NEVER, Pool, RATIO, next};

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    picks(&mut criterion);
    breaker(&mut criterion);
    criterion.final_summary();
}

fn picks(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pick of 4");
    // How old the latencies are: an upstream that is used all the time, or seldom.
    let (fresh, stale) = (Nanos(1_000_000), Nanos(1_000_000_000));
    for (name, algorithm, now) in [
        ("round_robin", Algorithm::RoundRobin, fresh),
        ("weighted_rr", Algorithm::WeightedRr, fresh),
        ("least_conn", Algorithm::LeastConn, fresh),
        ("p2c_ewma", Algorithm::P2cEwma, fresh),
        ("p2c_ewma, stale", Algorithm::P2cEwma, stale),
        ("consistent_hash", CONSISTENT_HASH, fresh),
        ("ip_hash", IP_HASH, fresh),
    ] {
        let pool = Pool::new(algorithm, 4);
        let mut n = 0;
        group.bench_function(name, |bencher| {
            bencher.iter(|| black_box(&pool).pick(next(&mut n), now));
        });
    }
    group.finish();
    criterion.bench_function("key_of 16 octets", |bencher| {
        bencher.iter(|| key_of(black_box(b"203.0.113.7:4000")));
    });
}

fn breaker(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("breaker");
    let breaker = fixtures::breaker(RATIO);
    group.bench_function("state", |bencher| bencher.iter(|| black_box(&breaker).state()));
    group.bench_function("admits", |bencher| {
        bencher.iter(|| black_box(&breaker).admits(black_box(Nanos(1))));
    });
    for (name, trip, verdict) in [
        ("success, ratio", RATIO, Verdict::Success),
        ("success, consecutive", Trip::Consecutive(5), Verdict::Success),
        ("failure, ratio", NEVER, Verdict::Failure),
        ("failure, consecutive", Trip::Consecutive(u32::MAX), Verdict::Failure),
    ] {
        let breaker = fixtures::breaker(trip);
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
