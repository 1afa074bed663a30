//! A pool of the configuration, live: what all workers share of it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::ArcSwap;
use l7rp_core::failure::{Failure, Scope};
use l7rp_core::limit::Slots;
use l7rp_core::names::Nanos;
use l7rp_core::pick::{self, Ask, Eligible, Member, Seat, Tried};
use l7rp_core::window::HalfLife;
use tokio::sync::Notify;

use crate::config::plan;
use crate::observe::stats::UpstreamStats;

/// A pool.
#[derive(Debug)]
pub struct Pool {
    /// As configured.
    pub plan: plan::Pool,
    /// By the position that selectors use.
    pub upstreams: Vec<Arc<Upstream>>,
    /// Requests in progress in the pool.
    pub slots: Slots,
    seats: Vec<Arc<Seat>>,
    eligible: Eligible,
    selector: pick::Selector,
    half_life: HalfLife,
}

/// An upstream.
#[derive(Debug)]
pub struct Upstream {
    /// As configured.
    pub plan: plan::Upstream,
    /// Unique in the process; the place of its idle connections in each worker.
    pub id: usize,
    /// Load and latency.
    pub seat: Arc<Seat>,
    /// One shard for each worker.
    pub stats: Vec<UpstreamStats>,
    addresses: ArcSwap<Vec<SocketAddr>>,
    /// Changes with the addresses, so that pooled connections to old ones are dropped.
    address_generation: AtomicU32,
    next_address: AtomicUsize,
    resolved: AtomicBool,
    /// When the last event about a failure was written, in ns; 0: never.
    reported: AtomicU64,
    /// The name should be asked for again before its time.
    stale: Notify,
}

/// A place at an upstream, given back when dropped.
#[derive(Debug)]
pub struct Place<'a> {
    upstream: &'a Upstream,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.upstream.seat.leave();
    }
}

impl Upstream {
    fn new(plan: &plan::Upstream, id: usize, workers: usize) -> Self {
        let fixed = plan.host.parse().ok().map(|ip| SocketAddr::new(ip, plan.port));
        Self {
            plan: plan.clone(),
            id,
            seat: Arc::new(Seat::new(plan.max_in_flight)),
            stats: (0..workers).map(|_| UpstreamStats::default()).collect(),
            resolved: AtomicBool::new(fixed.is_some()),
            addresses: ArcSwap::from_pointee(fixed.into_iter().collect()),
            address_generation: AtomicU32::new(0),
            next_address: AtomicUsize::new(0),
            reported: AtomicU64::new(0),
            stale: Notify::new(),
        }
    }

    /// Whether the host is a name that has to be resolved.
    pub fn is_named(&self) -> bool {
        self.plan.host.parse::<std::net::IpAddr>().is_err()
    }

    /// The addresses, beginning with another one each time.
    pub fn addresses(&self) -> impl Iterator<Item = SocketAddr> + use<> {
        let all = self.addresses.load_full();
        let first = if all.len() > 1 { self.next_address.fetch_add(1, Relaxed) } else { 0 };
        (0..all.len()).map(move |i| all[first.wrapping_add(i) % all.len()])
    }

    /// The addresses as they are.
    pub fn current_addresses(&self) -> Arc<Vec<SocketAddr>> {
        self.addresses.load_full()
    }

    /// Changes with the addresses.
    pub fn address_generation(&self) -> u32 {
        self.address_generation.load(Relaxed)
    }

    /// Whether an event about a failure may be written now: one a second.
    pub fn may_report(&self, now: Nanos) -> bool {
        let last = self.reported.load(Relaxed);
        (last == 0 || now.since(Nanos(last)) >= Duration::from_secs(1))
            && self.reported.compare_exchange(last, now.0, Relaxed, Relaxed).is_ok()
    }

    /// Has the name asked for again soon: an address does not answer.
    pub fn ask_again(&self) {
        if self.is_named() {
            self.stale.notify_one();
        }
    }

    /// Waits until somebody wants the name to be asked for again.
    pub async fn is_stale(&self) {
        self.stale.notified().await;
    }

    /// Replaces the addresses.
    pub fn set_addresses(&self, addresses: Vec<SocketAddr>) {
        self.addresses.store(Arc::new(addresses));
        self.address_generation.fetch_add(1, Relaxed);
    }
}

impl Pool {
    /// The pool that `plan` describes; ids of its upstreams are drawn from `next_id`.
    pub fn new(plan: &plan::Pool, workers: usize, next_id: &mut usize) -> Self {
        let upstreams: Vec<_> = plan
            .upstreams
            .iter()
            .map(|u| {
                *next_id += 1;
                Arc::new(Upstream::new(u, *next_id, workers))
            })
            .collect();
        let members: Vec<_> =
            plan.upstreams.iter().map(|u| Member { id: &u.url, weight: u.weight }).collect();
        let eligible = Eligible::new(upstreams.len());
        for (ix, upstream) in upstreams.iter().enumerate() {
            eligible.set(ix, upstream.resolved.load(Relaxed));
        }
        Self {
            plan: plan.clone(),
            seats: upstreams.iter().map(|u| u.seat.clone()).collect(),
            upstreams,
            slots: Slots::new(plan.max_in_flight),
            eligible,
            selector: pick::Selector::new(
                algorithm(&plan.selector),
                &members,
                plan.selector.ewma_half_life,
            ),
            half_life: HalfLife::new(plan.selector.ewma_half_life),
        }
    }

    /// Chooses an upstream and takes a place at it.
    ///
    /// # Errors
    /// Why there is none: not resolved, none eligible, or all at their limits.
    pub fn take(
        &self,
        tried: &Tried,
        key: u64,
        now: Nanos,
        draw: u64,
    ) -> Result<(usize, &Arc<Upstream>, Place<'_>), Failure> {
        let ask = Ask { seats: &self.seats, eligible: &self.eligible, tried, key, now, draw };
        // Between pick and entry another worker may take the last place of an upstream with
        // a limit of its own; then it is no longer selectable and the next round knows.
        for _ in 0..=self.upstreams.len() {
            let Some((ix, upstream)) =
                self.selector.pick(&ask).and_then(|ix| Some((ix, self.upstreams.get(ix)?)))
            else {
                break;
            };
            if upstream.seat.enter() {
                return Ok((ix, upstream, Place { upstream }));
            }
        }
        Err(self.why_none())
    }

    fn why_none(&self) -> Failure {
        let full = self.eligible.iter().any(|ix| !self.seats[ix].has_room());
        if full {
            Failure::Capacity(Scope::Upstream)
        } else if self.upstreams.iter().any(|u| !u.resolved.load(Relaxed)) {
            Failure::Unresolved
        } else {
            Failure::NoUpstream
        }
    }

    /// Feeds the latency of `upstream`: from sending a request to the head of its response.
    pub fn observe_latency(&self, upstream: &Upstream, now: Nanos, latency: Duration) {
        upstream.seat.latency.observe(now, latency.as_secs_f64(), self.half_life);
    }

    /// The latency average of `upstream` now, in seconds.
    pub fn latency(&self, upstream: &Upstream, now: Nanos) -> Option<f64> {
        upstream.seat.latency.read(now, self.half_life)
    }

    /// Whether the upstream at `ix` may be chosen.
    pub fn is_eligible(&self, ix: usize) -> bool {
        self.eligible.get(ix)
    }

    /// Whether any may.
    pub fn has_eligible(&self) -> bool {
        self.eligible.count() > 0
    }

    /// Says whether the name of the upstream at `ix` has addresses. True: that is news.
    pub fn set_resolved(&self, ix: usize, resolved: bool) -> bool {
        if let Some(upstream) = self.upstreams.get(ix) {
            upstream.resolved.store(resolved, Relaxed);
        }
        self.eligible.set(ix, resolved)
    }
}

fn algorithm(selector: &plan::Selector) -> pick::Algorithm {
    let virtual_nodes = selector.virtual_nodes;
    match selector.algorithm {
        plan::Algorithm::RoundRobin => pick::Algorithm::RoundRobin,
        plan::Algorithm::WeightedRr => pick::Algorithm::WeightedRr,
        plan::Algorithm::LeastConn => pick::Algorithm::LeastConn,
        plan::Algorithm::P2cEwma => pick::Algorithm::P2cEwma,
        plan::Algorithm::ConsistentHashBounded => {
            pick::Algorithm::ConsistentHash { epsilon: selector.epsilon, virtual_nodes }
        }
        plan::Algorithm::IpHash => pick::Algorithm::IpHash { virtual_nodes },
    }
}
