//! A pool of the configuration, live: what all workers share of it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use l7rp_core::failure::{Failure, Scope};
use l7rp_core::limit::{RetryBudget, Slots};
use l7rp_core::names::Nanos;
use l7rp_core::pick::{self, Ask, Eligible, Member, Seat, Tried};
use l7rp_core::upstream::breaker::{Change, Permit, State, Verdict};
use l7rp_core::upstream::health::Health;
use l7rp_core::upstream::passive::Fault;
use l7rp_core::upstream::ramp;
use l7rp_core::window::HalfLife;

pub use super::member::Upstream;
pub use super::place::{End, Place};

use super::member::probe_patience;
use super::standing::Standing;
use crate::config::plan;
use crate::observe::event::{Event, Events};
use crate::observe::stats::state_name;
use crate::sync::lock;

/// A pool.
#[derive(Debug)]
pub struct Pool {
    /// As configured.
    pub plan: plan::Pool,
    /// By the position that selectors use.
    pub upstreams: Vec<Arc<Upstream>>,
    /// Requests in progress in the pool.
    pub slots: Slots,
    /// Extra tries that it may be asked for.
    pub budget: RetryBudget,
    /// Extra tries that it was asked for in vain.
    pub budget_exhausted: AtomicU64,
    pub(super) probe_patience: Duration,
    events: Arc<Events>,
    seats: Vec<Arc<Seat>>,
    /// Who may be chosen: among the first choice, and among those that stand by.
    primary: Eligible,
    backup: Eligible,
    /// Who has addresses; and who may be chosen as soon as its breaker agrees.
    resolved: Eligible,
    well: Eligible,
    standing: Mutex<Vec<Standing>>,
    /// When time alone lets somebody in again, in ns: a breaker has been open for long enough.
    wake_at: AtomicU64,
    selector: pick::Selector,
    half_life: HalfLife,
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
    /// The pool that `plan` describes; ids of its upstreams are drawn from `next_id`.
    pub fn new(
        plan: &plan::Pool,
        workers: usize,
        next_id: &mut usize,
        events: &Arc<Events>,
    ) -> Self {
        let upstreams: Vec<_> = plan
            .upstreams
            .iter()
            .map(|u| {
                *next_id += 1;
                Arc::new(Upstream::new(plan, u, *next_id, workers))
            })
            .collect();
        let members: Vec<_> =
            plan.upstreams.iter().map(|u| Member { id: &u.url, weight: u.weight }).collect();
        let health = plan.active.as_ref();
        let health = || health.map(|h| Health::new(h.healthy_threshold, h.unhealthy_threshold));
        let pool = Self {
            plan: plan.clone(),
            seats: upstreams.iter().map(|u| u.seat.clone()).collect(),
            slots: Slots::new(plan.max_in_flight),
            budget: RetryBudget::new(plan.retry_budget.ratio, plan.retry_budget.min_per_second),
            budget_exhausted: AtomicU64::new(0),
            probe_patience: probe_patience(plan),
            events: events.clone(),
            primary: Eligible::new(upstreams.len()),
            backup: Eligible::new(upstreams.len()),
            resolved: Eligible::new(upstreams.len()),
            well: Eligible::new(upstreams.len()),
            standing: Mutex::new(upstreams.iter().map(|u| Standing::new(u, health())).collect()),
            wake_at: AtomicU64::new(u64::MAX),
            selector: pick::Selector::new(
                algorithm(&plan.selector),
                &members,
                plan.selector.ewma_half_life,
            ),
            half_life: HalfLife::new(plan.selector.ewma_half_life),
            upstreams,
        };
        for ix in 0..pool.upstreams.len() {
            pool.refresh(ix);
        }
        pool
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
        if let Some(place) = self.take_among(&self.primary, wanted, now, draw) {
            return Ok(place);
        }
        let all_tried = self.primary.iter().all(|ix| wanted.tried.contains(ix));
        let stand_by = if all_tried { Some(&self.backup) } else { None };
        stand_by
            .and_then(|backup| self.take_among(backup, wanted, now, draw))
            .ok_or_else(|| self.why_none(now))
    }

    fn take_among(
        &self,
        eligible: &Eligible,
        wanted: Wanted<'_>,
        now: Nanos,
        draw: u64,
    ) -> Option<Place<'_>> {
        let mut is_warm = true;
        let cold = |ix: usize, draw| {
            let since = self.upstreams.get(ix).map_or(0, |u| u.eligible_since.load(Relaxed));
            let warm = since == 0 || ramp::accepts(Nanos(since), now, self.plan.slow_start, draw);
            is_warm &= warm;
            !warm
        };
        let taken = self.take_unless(eligible, wanted, now, draw, cold);
        if taken.is_some() || is_warm {
            return taken;
        }
        // Better one that still warms up than nobody.
        self.take_unless(eligible, wanted, now, !draw, |_, _| false)
    }

    /// A place at one that is selectable, unless `not_now` passes it over.
    fn take_unless(
        &self,
        eligible: &Eligible,
        wanted: Wanted<'_>,
        now: Nanos,
        mut draw: u64,
        mut not_now: impl FnMut(usize, u64) -> bool,
    ) -> Option<Place<'_>> {
        let mut passed = None;
        // Each round but the last loses a race for a place or passes one upstream over.
        for _ in 0..=2 * self.upstreams.len() {
            let tried = passed.as_ref().unwrap_or(wanted.tried);
            let ask = Ask { seats: &self.seats, eligible, tried, key: wanted.key, now, draw };
            let ix = self.selector.pick(&ask)?;
            let wait = not_now(ix, draw);
            draw = draw.rotate_left(29).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            if !wait {
                if let Some(place) = self.enter(ix, wanted, now) {
                    return Some(place);
                }
                if self.seats.get(ix).is_none_or(|seat| !seat.has_room()) {
                    // Another worker took its last place; the next round knows.
                    continue;
                }
            }
            passed.get_or_insert_with(|| wanted.tried.clone()).insert(ix);
        }
        None
    }

    /// Takes one extra try from the budget. False, and counted: there is none left.
    pub fn may_try_again(&self, now: Nanos) -> bool {
        let may = self.budget.withdraw(now);
        if !may {
            self.budget_exhausted.fetch_add(1, Relaxed);
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
            self.refresh(ix);
            return None;
        };
        let probe = admission.permit.is_probe();
        if let Some(change) = admission.change {
            self.breaker_changed(ix, change);
        }
        let place = Place::new(self, ix, upstream, admission.permit, wanted.worker, now);
        if probe {
            self.refresh(ix);
            if wanted.only_closed {
                place.unused();
                return None;
            }
        }
        Some(place)
    }

    fn why_none(&self, now: Nanos) -> Failure {
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
        let standing = lock(&self.standing);
        let mut wake_at = Nanos::NEVER;
        for (ix, (upstream, standing)) in self.upstreams.iter().zip(standing.iter()).enumerate() {
            let admits = upstream.breaker.admits(now);
            self.set(ix, standing, admits);
            if !admits {
                wake_at = wake_at.min(upstream.breaker.admits_at().unwrap_or(now));
            }
        }
        self.wake_at.store(wake_at.0, Relaxed);
    }

    /// Makes the bit of the upstream at `ix` anew.
    pub(super) fn refresh(&self, ix: usize) {
        self.refresh_locked(&lock(&self.standing), ix);
    }

    fn refresh_locked(&self, standing: &[Standing], ix: usize) {
        let (Some(upstream), Some(standing)) = (self.upstreams.get(ix), standing.get(ix)) else {
            return;
        };
        let later = upstream.breaker.admits_at();
        self.set(ix, standing, later.is_none());
        if let Some(at) = later {
            self.wake_at.fetch_min(at.0, Relaxed);
        }
    }

    fn set(&self, ix: usize, standing: &Standing, admits: bool) {
        self.resolved.set(ix, standing.resolved);
        self.well.set(ix, standing.is_well());
        let stands_by = self.plan.upstreams.get(ix).is_some_and(|u| u.backup);
        let bits = if stands_by { &self.backup } else { &self.primary };
        bits.set(ix, standing.is_well() && admits);
    }

    /// Whether a response with `status` counts as a failure.
    pub(super) fn is_failure(&self, status: u16) -> bool {
        self.plan.breaker.failure_statuses.iter().any(|&(from, to)| (from..=to).contains(&status))
    }

    /// Judges the try at the upstream at `ix` that holds `permit`.
    pub(super) fn judge(
        &self,
        ix: usize,
        permit: Permit<'_>,
        verdict: Verdict,
        latency: Option<Duration>,
        now: Nanos,
    ) {
        let Some(upstream) = self.upstreams.get(ix) else { return };
        let probe = permit.is_probe();
        let change = permit.settle(verdict, now, fastrand::u64(..));
        if let Some(change) = change {
            if change.to == State::Closed {
                upstream.eligible_since.store(now.0, Relaxed);
            }
            self.refresh(ix);
            self.breaker_changed(ix, change);
        } else if probe {
            self.refresh(ix);
        }
        let passive = upstream.passive.as_ref();
        let fault = passive.and_then(|p| p.answered(verdict == Verdict::Failure, latency, now));
        if let Some(fault) = fault {
            let why = match fault {
                Fault::Errors => "passive:errors",
                Fault::Latency => "passive:latency",
            };
            self.eject(ix, why);
        }
    }

    fn breaker_changed(&self, ix: usize, change: Change) {
        let Some(upstream) = self.upstreams.get(ix) else { return };
        upstream.transitions.breaker(change.to);
        self.events.emit(&Event::CircuitBreakerChanged {
            pool: self.plan.name.clone(),
            upstream: upstream.plan.url.clone(),
            from: state_name(change.from),
            to: state_name(change.to),
            open_ms: change.open_for.map(|d| d.as_millis() as u64),
        });
    }

    /// Takes the upstream at `ix` out for the way it answers, unless half of the pool is out
    /// already, whatever for: what makes all of them look bad is rather something they share.
    fn eject(&self, ix: usize, why: &'static str) {
        let mut standing = lock(&self.standing);
        let out = standing.iter().filter(|s| !s.is_healthy()).count();
        if out >= (self.upstreams.len() / 2).max(1) {
            return;
        }
        let Some(one) = standing.get_mut(ix) else { return };
        if one.health.as_mut().is_some_and(Health::eject) {
            self.refresh_locked(&standing, ix);
            drop(standing);
            self.health_changed(ix, true, false, why.to_owned());
        }
    }

    /// Takes in what a probe of the upstream at `ix` has found, and why. True: it should be
    /// probed again at once, for it is new and has not been judged yet.
    pub fn probed(&self, ix: usize, good: bool, why: String, now: Nanos) -> bool {
        let mut standing = lock(&self.standing);
        let Some(one) = standing.get_mut(ix) else { return false };
        let Some(health) = one.health.as_mut() else { return false };
        let before = health.is_eligible();
        let change = health.probed(good);
        let again = health.is_settling();
        let Some(eligible) = change else { return again };
        if let Some(upstream) = self.upstreams.get(ix).filter(|_| eligible) {
            upstream.eligible_since.store(now.0, Relaxed);
            if let Some(passive) = &upstream.passive {
                passive.reset(now);
            }
        }
        self.refresh_locked(&standing, ix);
        drop(standing);
        self.health_changed(ix, before, eligible, why);
        again
    }

    /// Tells of a change; or, where there is none, why a new upstream stays out.
    fn health_changed(&self, ix: usize, before: bool, eligible: bool, why: String) {
        let Some(upstream) = self.upstreams.get(ix) else { return };
        let word = |eligible| if eligible { "eligible" } else { "ineligible" };
        if before != eligible {
            upstream.transitions.health(word(eligible), &why);
        }
        self.events.emit(&Event::UpstreamHealthChanged {
            pool: self.plan.name.clone(),
            upstream: upstream.plan.url.clone(),
            from: word(before),
            to: word(eligible),
            why,
        });
    }

    /// Says whether the name of the upstream at `ix` has addresses.
    pub fn set_resolved(&self, ix: usize, resolved: bool) {
        let mut standing = lock(&self.standing);
        if let Some(one) = standing.get_mut(ix) {
            one.resolved = resolved;
            self.refresh_locked(&standing, ix);
        }
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

    /// Whether any may, now.
    pub fn has_eligible(&self, now: Nanos) -> bool {
        self.wake(now);
        self.primary.count() + self.backup.count() > 0
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
