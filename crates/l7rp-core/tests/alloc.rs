//! Decisions made for every request allocate nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use l7rp_core::limit::{Bucket, Buckets, Rate, RetryBudget, client_key};
use l7rp_core::names::Nanos;
use l7rp_core::pick::{Algorithm, Ask, Crowd, Eligible, Member, Seat, Selector, Tried, key_of};
use l7rp_core::route::{HostPattern, Request, Rule, Table, parse_host};
use l7rp_core::upstream::breaker::{self, Breaker, State, Trip, Verdict};
use l7rp_core::upstream::health::Health;
use l7rp_core::upstream::passive::{self, Passive};
use l7rp_core::upstream::ramp;
use l7rp_core::window::{HalfLife, Percentile};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting by thread, because the test harness has threads of its own.
struct Counting;

#[expect(unsafe_code, reason = "the only way to see that nothing is allocated")]
// SAFETY: every call is handed to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Allocations by this thread while `work` runs.
fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(std::hint::black_box(Box::new(1)))), 1);
}

#[test]
fn picking() {
    let algorithms = [
        Algorithm::RoundRobin,
        Algorithm::WeightedRr,
        Algorithm::LeastConn,
        Algorithm::P2cEwma,
        Algorithm::ConsistentHash { epsilon: 0.25, virtual_nodes: 128 },
        Algorithm::IpHash { virtual_nodes: 128 },
    ];
    for size in [1, 3, 64, 1_000] {
        let ids: Vec<String> = (0..size).map(|ix| format!("http://u{ix}")).collect();
        let members: Vec<_> =
            ids.iter().zip(1..).map(|(id, weight)| Member { id, weight }).collect();
        for algorithm in algorithms {
            let selector = Selector::new(algorithm, &members, Duration::from_secs(10));
            let seats: Vec<_> = (0..size).map(|ix| Arc::new(Seat::new(ix % 3))).collect();
            let eligible = Eligible::new(size as usize);
            for ix in 0..size as usize {
                eligible.set(ix, ix % 5 != 1);
            }
            let count = allocations(|| drive(&selector, &seats, &eligible));
            assert_eq!(count, 0, "{algorithm:?}, {size} upstreams");
        }
    }
}

/// Requests of four tries each, from an idle pool to a full one.
fn drive(selector: &Selector, seats: &[Arc<Seat>], eligible: &Eligible) {
    let life = HalfLife::new(Duration::from_secs(10));
    let mut rng = fastrand::Rng::with_seed(1);
    let crowd = Crowd::default();
    for n in 1..200 {
        let mut tried = Tried::new();
        for _ in 0..4 {
            let now = Nanos(n * 1_000_000);
            let key = key_of(&(n % 10).to_le_bytes());
            let ask =
                Ask { seats, crowd: &crowd, eligible, tried: &tried, key, now, draw: rng.u64(..) };
            let Some(ix) = selector.pick(&ask) else { break };
            let _ = seats[ix].enter();
            seats[ix].latency.observe(now, 0.01, life);
            tried.insert(ix);
        }
    }
}

#[test]
fn limiting() {
    let rate = Rate::new(100.0, 10);
    let bucket = Bucket::new();
    // Few, so that clients are evicted.
    let buckets = Buckets::new(64, [1, 2]);
    let budget = RetryBudget::new(0.2, 10);
    let count = allocations(|| {
        for n in 0..10_000_u32 {
            let now = Nanos(u64::from(n) * 100_000);
            bucket.try_take(&rate, now);
            let ip = Ipv4Addr::from_bits(if n % 2 == 0 { n % 7 } else { n });
            buckets.try_take(client_key(ip.into()), &rate, now);
            budget.deposit();
            let _ = budget.withdraw(now);
        }
    });
    assert_eq!(count, 0);
}

#[test]
fn judging_upstreams() {
    let slow = Duration::from_millis(20);
    let rules = passive::Rules {
        error_threshold: 0.5,
        slow_after: Some(slow),
        half_life: Duration::from_secs(10),
    };
    let passive = Passive::new(&rules);
    let latencies = Percentile::new();
    let mut health = Health::new(2, 3);
    let mut rng = fastrand::Rng::with_seed(1);
    let count = allocations(|| {
        for n in 0..20_000 {
            let now = Nanos(n * 10_000_000);
            let latency = slow * rng.u32(0..100) / 50;
            passive.answered(n % 3 == 0, Some(latency), now);
            latencies.observe(latency, now);
            let _ = latencies.read(99.0);
            health.probed(n % 5 < 3);
            let _ = ramp::accepts(Nanos(0), now, Duration::from_secs(100), rng.u64(..));
        }
        passive.reset(Nanos(0));
    });
    assert_eq!(count, 0);
}

#[test]
fn routing() {
    let rule = |host: HostPattern, prefix: &str| Rule {
        host,
        prefix: prefix.into(),
        methods: vec!["GET".into()],
        predicates: vec![("x-canary".into(), "1".into())],
        listeners: vec![0],
    };
    let table = Table::new(vec![
        rule(HostPattern::Exact("a.example".into()), "/v1"),
        rule(HostPattern::Wildcard("example".into()), "/v1/x"),
        rule(HostPattern::Any, "/"),
    ]);
    let slashes = vec![b'/'; 16_384];
    let count = allocations(|| {
        for host in [&b"A.example:80"[..], b"b.example.", b"[0:0::1]:80", b"c"] {
            for path in [&b"/v1/x?y"[..], b"/", b"*", &slashes] {
                let request = Request {
                    listener: 0,
                    host: parse_host(host).ok(),
                    path,
                    method: b"GET",
                    has_field: &|_, _| true,
                };
                assert!(table.find(&request).is_some());
            }
        }
    });
    assert_eq!(count, 0);
}

#[test]
fn breaking() {
    for trip in [Trip::Consecutive(5), Trip::Ratio { above: 0.5, min_observations: 10 }] {
        let breaker = Breaker::new(&breaker::Rules {
            trip,
            window: Duration::from_secs(10),
            window_size: 100,
            open_min: Duration::from_secs(1),
            open_max: Duration::from_secs(1),
            half_open_probes: 3,
            probe_timeout: Duration::from_secs(30),
        });
        let mut seen = [false; 3];
        let count = allocations(|| {
            for n in 0..1_000 {
                let now = Nanos(n * 100_000_000);
                seen[breaker.state() as usize] = true;
                if !breaker.admits(now) {
                    assert!(breaker.admits_at().is_some());
                }
                let Some(admission) = breaker.admit(now) else { continue };
                let failed = n % 100 < 30;
                match n % 7 {
                    0 => drop(admission),
                    _ if failed => drop(admission.permit.settle(Verdict::Failure, now, n)),
                    _ => drop(admission.permit.settle(Verdict::Success, now, n)),
                }
            }
        });
        let all = [State::Closed, State::Open, State::HalfOpen];
        assert!(all.iter().all(|&state| seen[state as usize]), "{trip:?}");
        assert_eq!(count, 0, "{trip:?}");
    }
}
