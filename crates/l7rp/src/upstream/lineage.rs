//! What a pool's generations share: a reload that changes a pool puts a new one in its place,
//! while exchanges go on with the old one. Requests in progress, and who may be chosen, are
//! known to all of them.
//!
//! Who may be chosen is a bit in each pool, read by every pick and written rarely: health, name
//! and breaker of an upstream come together in it. Whoever changes what a bit is made from has
//! it made anew in every generation, under the lineage's lock: the last to do so sees what all
//! others have changed.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use l7rp_core::limit::Slots;
use l7rp_core::names::{Nanos, Status};
use l7rp_core::upstream::breaker::{Change, Mode, Permit, State, Trip, Verdict};
use l7rp_core::upstream::health::Health;
use l7rp_core::upstream::passive::Fault;

use super::member::Upstream;
use super::place::End;
use super::pool::Pool;
use super::standing::Probed;
use crate::observe::event::{Event, Events};
use crate::observe::stats::state_name;
use crate::sync::lock;

/// All generations of the pool with one name.
#[derive(Debug)]
pub struct Lineage {
    /// The pool's name.
    pub name: String,
    /// Requests in progress in the pool.
    pub slots: Slots,
    /// Extra tries that it was asked for in vain.
    pub budget_exhausted: AtomicU64,
    events: Arc<Events>,
    /// Those that anybody still uses; the newest is the last.
    generations: Mutex<Vec<Weak<Pool>>>,
}

impl Lineage {
    pub(super) fn new(name: &str, max_in_flight: u32, events: &Arc<Events>) -> Self {
        Self {
            name: name.to_owned(),
            slots: Slots::new(max_in_flight),
            budget_exhausted: AtomicU64::new(0),
            events: events.clone(),
            generations: Mutex::default(),
        }
    }

    /// Takes in a new generation: from now on its bits are kept current.
    pub(super) fn join(&self, pool: &Arc<Pool>) {
        let mut generations = lock(&self.generations);
        generations.retain(|pool| pool.strong_count() > 0);
        generations.push(Arc::downgrade(pool));
        for ix in 0..pool.upstreams.len() {
            pool.set_bits(ix);
        }
    }

    /// Has `work` done while nobody else makes bits.
    pub(super) fn locked<T>(&self, work: impl FnOnce() -> T) -> T {
        let _all = lock(&self.generations);
        work()
    }

    /// Has `work` done with all generations, oldest first, while nobody else makes bits.
    pub(super) fn in_all(&self, work: impl FnOnce(&[Arc<Pool>])) {
        let generations = lock(&self.generations);
        let all: Vec<_> = generations.iter().filter_map(Weak::upgrade).collect();
        work(&all);
    }

    /// Makes the bits of `upstream` anew.
    pub(super) fn refresh(&self, upstream: &Upstream) {
        refresh(&lock(&self.generations), upstream);
    }

    /// Judges a try at `upstream` that holds `permit`, and how it ended.
    pub(super) fn judge(
        &self,
        upstream: &Upstream,
        permit: Permit<'_>,
        (verdict, end): (Verdict, End),
        latency: Option<Duration>,
        now: Nanos,
    ) {
        if let Some((heir, lineage)) = upstream.heir() {
            // It is judged elsewhere now. What it has done before says something as well, but is
            // no test of a breaker that has changed meanwhile.
            drop(permit);
            if heir.breaker.state() == State::Closed
                && let Some(admission) = heir.breaker.admit(now)
            {
                lineage.judge(&heir, admission.permit, (verdict, end), latency, now);
            }
            return;
        }
        let probe = permit.is_probe();
        let change = permit.settle(verdict, now, fastrand::u64(..));
        if let Some(change) = change {
            if change.to == State::Closed {
                upstream.eligible_since.store(now.0, Relaxed);
            }
            self.refresh(upstream);
            self.breaker_changed(upstream, change, Some(end));
        } else if probe {
            self.refresh(upstream);
        }
        let passive = upstream.passive.as_ref();
        let fault = passive.and_then(|p| p.answered(verdict == Verdict::Failure, latency, now));
        if let Some(fault) = fault {
            let why = match fault {
                Fault::Errors => "passive:errors",
                Fault::Latency => "passive:latency",
            };
            self.eject(upstream, why);
        }
    }

    /// A breaker has changed: tells it. `end`: of the try that has made it so, if one has.
    pub(super) fn breaker_changed(&self, upstream: &Upstream, change: Change, end: Option<End>) {
        upstream.transitions.breaker(change.to);
        self.events.emit(&Event::CircuitBreakerChanged {
            pool: self.name.clone(),
            upstream: upstream.url.clone(),
            from: state_name(change.from),
            to: state_name(change.to),
            why: why_changed(upstream, change, end),
            open_ms: change.open_for.map(|d| d.as_millis() as u64),
        });
    }

    /// Takes `upstream` out for the way it answers, unless half of the pool is out already,
    /// whatever for: what makes all of them look bad is rather something they share.
    pub(super) fn eject(&self, upstream: &Upstream, why: &'static str) {
        let generations = lock(&self.generations);
        let newest = generations.iter().rev().find_map(Weak::upgrade);
        let all = newest.as_ref().map_or(&[][..], |pool| &pool.upstreams);
        let is_out =
            |u: &Upstream| u.breaker.mode() == Mode::Open || lock(&u.standing).is_taken_out();
        let out = all.iter().filter(|u| is_out(u)).count();
        if out >= (all.len() / 2).max(1) {
            return;
        }
        let mut standing = lock(&upstream.standing);
        if standing.health().is_some_and(Health::eject) {
            standing.out_for = Some(why.to_owned());
            drop(standing);
            refresh(&generations, upstream);
            drop(generations);
            self.health_changed(upstream, true, false, why.to_owned());
        }
    }

    /// Takes in what a probe of `upstream` has found, and why.
    pub fn probed(&self, upstream: &Upstream, good: bool, why: String, now: Nanos) {
        let generations = lock(&self.generations);
        let (before, change) = {
            let mut standing = lock(&upstream.standing);
            let Some(health) = standing.health() else { return };
            let (before, change) = (health.is_eligible(), health.probed(good));
            if change == Some(false) {
                standing.out_for = Some(why.clone());
            }
            let took = now.since(Nanos(upstream.probed_at.load(Relaxed)));
            standing.last_probe = Some(Probed { at: now, took, good, why: why.clone() });
            (before, change)
        };
        let Some(eligible) = change else { return };
        if eligible {
            upstream.eligible_since.store(now.0, Relaxed);
            if let Some(passive) = &upstream.passive {
                passive.reset(now);
            }
        }
        refresh(&generations, upstream);
        drop(generations);
        self.health_changed(upstream, before, eligible, why);
    }

    /// Tells of a change; or, where there is none, why a new upstream stays out.
    fn health_changed(&self, upstream: &Upstream, before: bool, eligible: bool, why: String) {
        let word = |eligible| if eligible { "eligible" } else { "ineligible" };
        let is_first = before == eligible;
        if !is_first {
            upstream.transitions.health(word(eligible), &why);
        }
        self.events.emit(&Event::UpstreamHealthChanged {
            pool: self.name.clone(),
            upstream: upstream.url.clone(),
            from: if is_first { "new" } else { word(before) },
            to: word(eligible),
            why,
        });
    }

    /// Says whether the name of `upstream` has addresses.
    pub fn set_resolved(&self, upstream: &Upstream, resolved: bool) {
        let generations = lock(&self.generations);
        lock(&upstream.standing).resolved = resolved;
        refresh(&generations, upstream);
    }
}

/// Why a breaker has changed, in words.
fn why_changed(upstream: &Upstream, change: Change, end: Option<End>) -> String {
    let what = match end {
        Some(End::Answered(Status { http, grpc: None })) => format!("status {http}"),
        Some(End::Answered(Status { http, grpc: Some(grpc) })) => {
            format!("status {http} and grpc-status {grpc}")
        }
        Some(End::Failed(failure) | End::Excused(failure)) => failure.meaning().reason.to_owned(),
        None => String::new(),
    };
    match (change.from, change.to, upstream.breaker.trip()) {
        (_, State::HalfOpen, _) => "its open time is over: a test is let in".to_owned(),
        (_, State::Closed, _) => format!("all tests were good, the last with {what}"),
        (State::HalfOpen, State::Open, _) => format!("a test failed with {what}"),
        (_, State::Open, Trip::Consecutive(failures)) => {
            format!("{failures} failures in a row, the last with {what}")
        }
        (_, State::Open, Trip::Ratio { above, .. }) => {
            let percent = above * 100.0;
            format!("more than {percent} % of the last results failed, the last with {what}")
        }
    }
}

fn refresh(generations: &[Weak<Pool>], upstream: &Upstream) {
    for pool in generations.iter().filter_map(Weak::upgrade) {
        if let Some(ix) = pool.upstreams.iter().position(|u| u.id == upstream.id) {
            pool.set_bits(ix);
        }
    }
}
