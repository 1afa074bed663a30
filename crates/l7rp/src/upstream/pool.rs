//! A pool of the configuration, live: what all workers share of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use l7rp_core::failure::{Failure, Scope};
use l7rp_core::limit::RetryBudget;
use l7rp_core::names::{Nanos, Status};
use l7rp_core::pick::{self, Ask, Crowd, Eligible, Member, Seat, Tried};
use l7rp_core::upstream::breaker::State;
use l7rp_core::upstream::ramp;
use l7rp_core::window::HalfLife;

pub use super::member::{Speaks, Upstream};
pub use super::place::{End, Place};

use super::lineage::Lineage;
use super::member::{probe_patience, probe_timeout, same_address, same_rules};
use super::probe::Checks;
use crate::config::plan;
use crate::observe::event::Events;
use crate::sync::lock;
use crate::tls::Originator;

/// A pool: one generation of it, which a reload that changes it replaces.
#[derive(Debug)]
pub struct Pool {
    /// As configured.
    pub plan: plan::Pool,
    /// By the position that selectors use.
    pub upstreams: Vec<Arc<Upstream>>,
    /// What it shares with the generations before and after it.
    pub lineage: Arc<Lineage>,
    /// Extra tries that it may be asked for.
    pub budget: Arc<RetryBudget>,
    pub(super) probe_patience: Duration,
    pub(super) seats: Vec<Arc<Seat>>,
    pub(super) crowd: Crowd,
    /// Who may be chosen: among the first choice, and among those that stand by.
    primary: Eligible,
    backup: Eligible,
    /// Who has addresses; and who may be chosen as soon as its breaker agrees.
    resolved: Eligible,
    well: Eligible,
    /// When time alone lets somebody in again, in ns: a breaker has been open for long enough.
    wake_at: AtomicU64,
    pub(super) selector: pick::Selector,
    half_life: HalfLife,
}

/// What a pool is made with beside its plan.
#[derive(Debug)]
pub struct Making {
    /// Number of workers, and of shards.
    pub workers: usize,
    /// Where its events go.
    pub events: Arc<Events>,
    last_id: AtomicUsize,
}

impl Making {
    /// For a process with so many workers.
    pub fn new(workers: usize, events: &Arc<Events>) -> Self {
        Self { workers, events: events.clone(), last_id: AtomicUsize::new(0) }
    }
}

/// Whom a try may go to.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Not to these.
    pub tried: &'a Tried,
    /// Hash of what ties the request to an upstream.
    pub key: u64,
    /// Only where the breaker is closed: no test of one that has just been open.
    pub only_closed: bool,
    /// The worker that asks.
    pub worker: usize,
}

impl Pool {
    /// The pool that `plan` describes. It takes over from `old` what both have: upstreams with
    /// the same address keep load, latency, breaker and health, each by its own identity. Nothing
    /// that `old` does changes before [`Pool::take_over`].
    pub fn new(plan: &plan::Pool, old: Option<&Self>, making: &Making, now: Nanos) -> Arc<Self> {
        let upstreams: Vec<_> =
            plan.upstreams.iter().map(|u| upstream(plan, u, old, making, now)).collect();
        let members: Vec<_> =
            plan.upstreams.iter().map(|u| Member { id: &u.url, weight: u.weight }).collect();
        let lineage = old.filter(|old| old.plan.name == plan.name).map_or_else(
            || Arc::new(Lineage::new(&plan.name, plan.max_in_flight, &making.events)),
            |old| old.lineage.clone(),
        );
        let rule = &plan.retry_budget;
        let budget = old.filter(|old| old.plan.retry_budget == *rule).map_or_else(
            || Arc::new(RetryBudget::new(rule.ratio, rule.min_per_second)),
            |old| old.budget.clone(),
        );
        let none = || Eligible::new(upstreams.len());
        let pool = Arc::new(Self {
            plan: plan.clone(),
            lineage,
            budget,
            probe_patience: probe_patience(plan),
            crowd: Crowd::default(),
            seats: upstreams.iter().map(|u| u.seat.clone()).collect(),
            primary: none(),
            backup: none(),
            resolved: none(),
            well: none(),
            wake_at: AtomicU64::new(u64::MAX),
            selector: pick::Selector::new(
                algorithm(&plan.selector),
                &members,
                plan.selector.ewma_half_life,
            ),
            half_life: HalfLife::new(plan.selector.ewma_half_life),
            upstreams,
        });
        pool.lineage.join(&pool);
        pool
    }

    /// Puts its rules in force for what it shares with the generation before it.
    pub fn take_over(&self, now: Nanos) {
        self.lineage.slots.set_max(self.plan.max_in_flight);
        for (upstream, plan) in self.upstreams.iter().zip(&self.plan.upstreams) {
            upstream.seat.set_limit(plan.max_in_flight);
            upstream.breaker.set_probe_timeout(probe_timeout(&self.plan));
            self.lineage.locked(|| {
                upstream.take_over(&self.lineage, now);
                let mut standing = lock(&upstream.standing);
                if standing.set_checks(Checks::of(&self.plan, plan)) {
                    // Something else is asked: the answer is not waited for.
                    upstream.probed_at.store(0, Relaxed);
                }
            });
            self.lineage.refresh(upstream);
        }
    }

    /// Gives upstreams that have no TLS yet, and need it, what it takes.
    pub fn begin_tls(&self, tls: Option<&Arc<Originator>>) {
        for upstream in self.upstreams.iter().filter(|u| u.is_tls && u.tls.load().is_none()) {
            upstream.tls.store(tls.cloned());
        }
    }

    /// Changes TLS towards its upstreams, for connections made from now on.
    pub fn set_tls(&self, tls: Option<&Arc<Originator>>) {
        for upstream in self.upstreams.iter().filter(|upstream| upstream.is_tls) {
            upstream.tls.store(tls.cloned());
        }
    }

    /// Whether it has upstreams that `plan` has too.
    pub fn shares_upstreams(&self, plan: &plan::Pool) -> bool {
        plan.upstreams.iter().any(|u| self.plan.upstreams.iter().any(|own| same_address(own, u)))
    }

    /// Chooses an upstream and takes a place at it. `draw`: 64 random bits.
    ///
    /// Those that stand by are chosen only if no other is eligible, or the request has tried
    /// every one that is.
    ///
    /// # Errors
    /// Why there is none: all at their limits, breakers open, not resolved, or none eligible.
    pub fn take(&self, wanted: Wanted<'_>, now: Nanos, draw: u64) -> Result<Place<'_>, Failure> {
        self.wake(now);
        let enter = |ix| self.enter(ix, wanted, now);
        self.choose(wanted, now, draw, |ask| self.selector.pick(ask), enter)
            .ok_or_else(|| self.why_none(now))
    }

    /// What `enter` gives for the first upstream that `pick` names and that it gives something
    /// for.
    pub(super) fn choose<T>(
        &self,
        wanted: Wanted<'_>,
        now: Nanos,
        draw: u64,
        pick: impl Fn(&Ask<'_>) -> Option<usize>,
        mut enter: impl FnMut(usize) -> Option<T>,
    ) -> Option<T> {
        let primary = self.choose_among(&self.primary, wanted, now, draw, &pick, &mut enter);
        if primary.is_some() || !self.primary.iter().all(|ix| wanted.tried.contains(ix)) {
            return primary;
        }
        self.choose_among(&self.backup, wanted, now, draw, &pick, &mut enter)
    }

    fn choose_among<T>(
        &self,
        eligible: &Eligible,
        wanted: Wanted<'_>,
        now: Nanos,
        draw: u64,
        pick: &impl Fn(&Ask<'_>) -> Option<usize>,
        enter: &mut impl FnMut(usize) -> Option<T>,
    ) -> Option<T> {
        let mut is_warm = true;
        let taken = self.choose_one(eligible, wanted, now, draw, pick, |ix, draw| {
            let warm = self.is_warm(ix, now, draw);
            is_warm &= warm;
            if warm { enter(ix) } else { None }
        });
        if taken.is_some() || is_warm {
            return taken;
        }
        // Better one that still warms up than nobody.
        self.choose_one(eligible, wanted, now, !draw, pick, |ix, _| enter(ix))
    }

    fn is_warm(&self, ix: usize, now: Nanos, draw: u64) -> bool {
        let since = self.upstreams.get(ix).and_then(|u| u.warm_from());
        since.is_none_or(|since| ramp::accepts(since, now, self.plan.slow_start, draw))
    }

    fn choose_one<T>(
        &self,
        eligible: &Eligible,
        wanted: Wanted<'_>,
        now: Nanos,
        mut draw: u64,
        pick: &impl Fn(&Ask<'_>) -> Option<usize>,
        mut enter: impl FnMut(usize, u64) -> Option<T>,
    ) -> Option<T> {
        let mut passed = None;
        // Each round but the last loses a race for a place or passes one upstream over.
        for _ in 0..=2 * self.upstreams.len() {
            let tried = passed.as_ref().unwrap_or(wanted.tried);
            let key = wanted.key;
            let ask =
                Ask { seats: &self.seats, crowd: &self.crowd, eligible, tried, key, now, draw };
            let ix = pick(&ask)?;
            let entered = enter(ix, draw);
            if entered.is_some() {
                return entered;
            }
            draw = draw.rotate_left(29).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            if self.seats.get(ix).is_none_or(|seat| !seat.has_room()) {
                // Another worker took its last place; the next round knows.
                continue;
            }
            passed.get_or_insert_with(|| wanted.tried.clone()).insert(ix);
        }
        None
    }

    /// Takes one extra try from the budget. False, and counted: there is none left.
    pub fn may_try_again(&self, now: Nanos) -> bool {
        let may = self.budget.withdraw(now);
        if !may {
            self.lineage.budget_exhausted.fetch_add(1, Relaxed);
        }
        may
    }

    /// Takes a place at the upstream at `ix`, if there is one and the breaker agrees.
    fn enter(&self, ix: usize, wanted: Wanted<'_>, now: Nanos) -> Option<Place<'_>> {
        let upstream = self.upstreams.get(ix)?;
        // A test is for a request that has no other way.
        let unfit = wanted.only_closed && upstream.breaker.state() != State::Closed;
        if unfit || !upstream.seat.enter() {
            return None;
        }
        let Some(admission) = upstream.breaker.admit(now) else {
            upstream.seat.leave();
            self.lineage.refresh(upstream);
            return None;
        };
        let probe = admission.permit.is_probe();
        if let Some(change) = admission.change {
            self.lineage.breaker_changed(upstream, change, None);
        }
        let place = Place::new(self, ix, upstream, admission.permit, wanted.worker, now);
        if probe {
            self.lineage.refresh(upstream);
            if wanted.only_closed {
                place.unused();
                return None;
            }
        }
        Some(place)
    }

    pub(super) fn why_none(&self, now: Nanos) -> Failure {
        let mut eligible = self.primary.iter().chain(self.backup.iter());
        if eligible.any(|ix| !self.seats[ix].has_room()) {
            return Failure::Capacity(Scope::Upstream);
        }
        let soonest = self
            .well
            .iter()
            .filter_map(|ix| self.upstreams.get(ix))
            .filter_map(|upstream| match upstream.breaker.state() {
                // The result of a test may come at any moment.
                State::HalfOpen => upstream.breaker.admits_at().map(|_| now),
                State::Open | State::Closed => upstream.breaker.admits_at(),
            })
            .min();
        match soonest {
            // Forced open: nobody knows until when.
            Some(Nanos::NEVER) => {
                let wait = self.plan.breaker.open_max.as_secs_f64().ceil().max(1.0);
                Failure::BreakerOpen { wait: wait as u32 }
            }
            Some(at) => {
                // The end is rounded up to a ms; a second more would be too much to wait for that.
                let wait = at.since(now).saturating_sub(Duration::from_millis(1));
                Failure::BreakerOpen { wait: wait.as_secs_f64().ceil().max(1.0) as u32 }
            }
            None if self.resolved.count() < self.upstreams.len() => Failure::Unresolved,
            None => Failure::NoUpstream,
        }
    }

    /// Lets in whom time lets in.
    pub fn wake(&self, now: Nanos) {
        if now.0 < self.wake_at.load(Relaxed) {
            return;
        }
        self.lineage.locked(|| {
            let mut wake_at = Nanos::NEVER;
            for (ix, upstream) in self.upstreams.iter().enumerate() {
                let admits = upstream.breaker.admits(now);
                self.set(ix, upstream, admits);
                if !admits {
                    wake_at = wake_at.min(upstream.breaker.admits_at().unwrap_or(now));
                }
            }
            self.wake_at.store(wake_at.0, Relaxed);
        });
    }

    /// Makes the bits of the upstream at `ix` anew. The lineage is locked by the caller.
    pub(super) fn set_bits(&self, ix: usize) {
        let Some(upstream) = self.upstreams.get(ix) else { return };
        let later = upstream.breaker.admits_at();
        self.set(ix, upstream, later.is_none());
        if let Some(at) = later {
            self.wake_at.fetch_min(at.0, Relaxed);
        }
    }

    fn set(&self, ix: usize, upstream: &Upstream, admits: bool) {
        let standing = lock(&upstream.standing);
        self.resolved.set(ix, standing.resolved);
        self.well.set(ix, standing.is_well());
        let stands_by = self.plan.upstreams.get(ix).is_some_and(|u| u.backup);
        let bits = if stands_by { &self.backup } else { &self.primary };
        bits.set(ix, standing.is_well() && admits);
    }

    /// Whether a response with `status` counts as a failure.
    pub fn is_failure(&self, status: Status) -> bool {
        let breaker = &self.plan.breaker;
        breaker.is_failure(status.http)
            || status.grpc.is_some_and(|grpc| breaker.failure_grpc_statuses.contains(&grpc))
    }

    /// Feeds the latency of `upstream`: from sending a request to the head of its response.
    pub(super) fn observe_latency(&self, upstream: &Upstream, now: Nanos, latency: Duration) {
        upstream.seat.latency.observe(now, latency.as_secs_f64(), self.half_life);
    }

    /// The latency average of `upstream` now, in seconds.
    pub fn latency(&self, upstream: &Upstream, now: Nanos) -> Option<f64> {
        upstream.seat.latency.read(now, self.half_life)
    }

    /// Whether the upstream at `ix` may be chosen.
    pub fn is_eligible(&self, ix: usize) -> bool {
        self.primary.get(ix) || self.backup.get(ix)
    }

    /// How many may, as far as anybody has looked.
    pub fn eligible(&self) -> usize {
        self.primary.count() + self.backup.count()
    }

    /// Whether any may, now.
    pub fn has_eligible(&self, now: Nanos) -> bool {
        self.wake(now);
        self.eligible() > 0
    }
}

/// The upstream that `plan` describes: that of `old` with the same address, if it is the same
/// pool and judges it by the same rules; or else its heir.
fn upstream(
    pool: &plan::Pool,
    plan: &plan::Upstream,
    old: Option<&Pool>,
    making: &Making,
    now: Nanos,
) -> Arc<Upstream> {
    let id = || making.last_id.fetch_add(1, Relaxed);
    let known = old.and_then(|old| {
        let all = || old.plan.upstreams.iter();
        let known = all().position(|u| u.url == plan.url);
        let known = known.or_else(|| all().position(|u| same_address(u, plan)))?;
        Some((old, old.upstreams.get(known)?))
    });
    let Some((old, known)) = known else {
        return Arc::new(Upstream::new(pool, plan, id(), making.workers));
    };
    let same_name = old.plan.name == pool.name && known.url == plan.url;
    if same_name && same_rules(&old.plan, pool) {
        known.clone()
    } else {
        Arc::new(known.under_other_rules(pool, plan, id(), now))
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
