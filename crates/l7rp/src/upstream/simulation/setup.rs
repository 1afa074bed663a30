//! A random configuration.

use std::time::Duration;

use l7rp_core::attempts::Rules;

use crate::config::plan::{
    ActiveHealth, Algorithm, Breaker, Dns, HashKey, HostHeader, Keepalive, PassiveHealth, Pool,
    RetryBudget, Scheme, Selector, Upstream, UpstreamProtocol, UpstreamTls,
};

/// What one seed plays with.
#[derive(Debug)]
pub struct Setup {
    pub pool: Pool,
    pub rules: Option<Rules>,
    pub workers: usize,
    /// For the whole exchange; `None`: no limit.
    pub total: Option<Duration>,
    /// From one request to the next, on the average.
    pub gap: Duration,
    /// From one change of an upstream's behaviour to the next, on the average.
    pub moods: Duration,
    /// Of a hundred clients, so many leave before they have their answer.
    pub leaving: u32,
    /// Of a hundred bodies, so many come slowly.
    pub slow: u32,
}

impl Setup {
    pub fn new(rng: &mut fastrand::Rng) -> Self {
        Self {
            pool: pool(rng),
            rules: (rng.u32(..5) > 0).then(|| rules(rng)),
            workers: rng.usize(1..4),
            total: (rng.u32(..8) > 0).then(|| between(rng, 50, 20_000)),
            gap: between(rng, 1, 100),
            moods: between(rng, 200, 10_000),
            leaving: one_of(rng, &[0, 5, 20]),
            slow: one_of(rng, &[0, 2, 20]),
        }
    }
}

impl std::fmt::Display for Setup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { pool, rules, workers, total, .. } = self;
        for Upstream { url, weight, max_in_flight, backup, .. } in &pool.upstreams {
            writeln!(f, "{url}: weight {weight}, at most {max_in_flight}, backup: {backup}")?;
        }
        writeln!(f, "{:?}", pool.selector)?;
        writeln!(f, "{:?}, slow_start: {:?}", pool.breaker, pool.slow_start)?;
        writeln!(f, "{:?}, {:?}, {:?}", pool.active, pool.passive, pool.retry_budget)?;
        let (connect, head) = (pool.connect_timeout, pool.response_header_timeout);
        writeln!(f, "connect: {connect:?}, head: {head:?}, total: {total:?}, {workers} workers")?;
        write!(f, "{rules:?}")
    }
}

/// Milliseconds from `low` to `high`; short times are as likely as long ones.
pub fn between(rng: &mut fastrand::Rng, low: u64, high: u64) -> Duration {
    let span = (high as f64 / low as f64).ln();
    Duration::from_nanos((low as f64 * 1e6 * (span * rng.f64()).exp()) as u64)
}

/// The same in whole milliseconds: the breaker reckons ages in these.
fn whole(rng: &mut fastrand::Rng, low: u64, high: u64) -> Duration {
    Duration::from_millis(between(rng, low, high).as_millis() as u64)
}

pub fn one_of<T: Copy>(rng: &mut fastrand::Rng, all: &[T]) -> T {
    all[rng.usize(..all.len())]
}

fn pool(rng: &mut fastrand::Rng) -> Pool {
    let active = (rng.u32(..10) < 6).then(|| active(rng));
    let passive = (active.is_some() && rng.u32(..10) < 6).then(|| passive(rng));
    Pool {
        name: "pool".into(),
        selector: selector(rng),
        upstreams: upstreams(rng),
        connect_timeout: between(rng, 10, 1_000),
        response_header_timeout: between(rng, 50, 3_000),
        protocol: UpstreamProtocol::Http1,
        keepalive: Keepalive { max_idle: 1, idle_timeout: Duration::from_secs(1) },
        host_header: HostHeader::Preserve,
        dns: Dns { refresh: Duration::from_secs(30), max_stale: Duration::ZERO },
        tls: UpstreamTls::default(),
        active,
        passive,
        breaker: breaker(rng),
        retry_budget: RetryBudget {
            ratio: one_of(rng, &[0.0, 0.1, 0.2, 1.0]),
            min_per_second: rng.u32(..10),
        },
        max_in_flight: 0,
        slow_start: if rng.bool() { Duration::ZERO } else { between(rng, 200, 20_000) },
    }
}

fn selector(rng: &mut fastrand::Rng) -> Selector {
    use Algorithm::{ConsistentHashBounded, IpHash, LeastConn, P2cEwma, RoundRobin, WeightedRr};
    let all = [RoundRobin, WeightedRr, LeastConn, P2cEwma, ConsistentHashBounded, IpHash];
    Selector {
        algorithm: one_of(rng, &all),
        ewma_half_life: between(rng, 10, 10_000),
        hash_key: HashKey::ClientIp,
        epsilon: one_of(rng, &[0.01, 0.1, 0.25, 1.0]),
        virtual_nodes: rng.u32(1..60),
    }
}

fn upstreams(rng: &mut fastrand::Rng) -> Vec<Upstream> {
    let (weighted, limited) = (rng.bool(), rng.bool());
    let (backups, named) = (rng.u32(..3), rng.u32(..3));
    let count = rng.usize(1..=12);
    let upstream = |ix| {
        let name = rng.u32(..10) < 3 * named;
        let host = if name { format!("u{ix}.test") } else { format!("10.0.0.{ix}") };
        Upstream {
            url: format!("http://{host}"),
            scheme: Scheme::Http,
            port: 80,
            authority: host.clone(),
            host,
            base_path: String::new(),
            weight: if weighted { rng.u32(1..8) } else { 1 },
            max_in_flight: if limited { rng.u32(..12) } else { 0 },
            backup: rng.u32(..10) < 2 * backups,
        }
    };
    (0..count).map(upstream).collect()
}

fn breaker(rng: &mut fastrand::Rng) -> Breaker {
    let min_observations = rng.u32(1..20);
    let open_min = between(rng, 5, 2_000);
    Breaker {
        failure_ratio: one_of(rng, &[0.1, 0.3, 0.5, 0.9, 1.0]),
        min_observations,
        window: whole(rng, 100, 20_000),
        window_size: min_observations + rng.u32(..30),
        open_min,
        open_max: open_min + between(rng, 1, 10_000),
        half_open_probes: rng.u32(1..=5),
        consecutive_failures: if rng.bool() { 0 } else { rng.u32(1..8) },
        failure_grpc_statuses: Vec::new(),
        failure_statuses: one_of(
            rng,
            &[&[(500, 599)][..], &[(502, 504)], &[(429, 429), (500, 500)]],
        )
        .to_vec(),
    }
}

fn active(rng: &mut fastrand::Rng) -> ActiveHealth {
    let interval = between(rng, 50, 2_000);
    ActiveHealth {
        path: "/".into(),
        method: "GET".into(),
        interval,
        timeout: interval / 2,
        healthy_threshold: rng.u32(1..5),
        unhealthy_threshold: rng.u32(1..5),
        expected_status: vec![(200, 299)],
    }
}

fn passive(rng: &mut fastrand::Rng) -> PassiveHealth {
    PassiveHealth {
        error_threshold: one_of(rng, &[0.05, 0.2, 0.5, 0.9]),
        latency_threshold_p99: if rng.bool() { Duration::ZERO } else { between(rng, 10, 500) },
        half_life: between(rng, 50, 5_000),
    }
}

fn rules(rng: &mut fastrand::Rng) -> Rules {
    let words = |all: &[&str]| all.iter().map(|&word| word.to_owned()).collect();
    Rules {
        max_attempts: rng.u32(1..6),
        methods: words(one_of(rng, &[&["GET"][..], &["GET", "POST"]])),
        retry_on_grpc: Vec::new(),
        retry_on: one_of(rng, &[&[502, 503, 504][..], &[429, 500, 502, 503, 504], &[503]]).to_vec(),
        backoff: if rng.bool() { Duration::from_millis(25) } else { between(rng, 1, 300) },
        hedge_after: if rng.bool() { Duration::ZERO } else { between(rng, 2, 300) },
        hedge_after_percentile: one_of(rng, &[0.0, 0.0, 0.5, 0.95]),
        hedgeable: words(&["GET"]),
    }
}
