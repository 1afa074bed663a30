//! The pool once more, in the plainest way: one thread, lists, and every question answered from
//! what has happened, with nothing kept beside it.

pub mod breaker;
mod budget;
mod health;

use l7rp_core::failure::{Failure, Scope};
use l7rp_core::names::Nanos;

use crate::config::plan::{self, Algorithm};

use breaker::{Breaker, Ticket};
use budget::Budget;
use health::{Probed, Scoring};

pub use breaker::Told;
pub use health::Worse;

#[derive(Debug)]
pub struct Model {
    plan: plan::Pool,
    pub upstreams: Vec<Upstream>,
    pub budget: Budget,
}

#[derive(Debug)]
pub struct Upstream {
    pub limit: usize,
    pub backup: bool,
    /// Tickets of the places that are held.
    pub held: Vec<u64>,
    pub resolved: bool,
    /// `None`: nobody probes it.
    pub probed: Option<Probed>,
    pub breaker: Breaker,
    pub scoring: Option<Scoring>,
    /// When it last came in; 0: it was in from the beginning.
    pub since: Nanos,
    /// The least and the greatest latency that was seen, in seconds.
    pub latency: Option<(f64, f64)>,
    /// Tries that were given up.
    pub cancels: u64,
    /// Tries that ended without an answer.
    pub errors: u64,
    /// Tries that ended with one.
    pub answers: u64,
}

impl Model {
    pub fn new(plan: &plan::Pool, began: Nanos) -> Self {
        let upstream = |one: &plan::Upstream| Upstream {
            limit: one.max_in_flight as usize,
            backup: one.backup,
            held: Vec::new(),
            resolved: one.host.starts_with("10."),
            probed: plan.active.as_ref().map(Probed::new),
            breaker: Breaker::new(plan),
            scoring: plan.passive.as_ref().map(Scoring::new),
            since: Nanos(0),
            latency: None,
            cancels: 0,
            errors: 0,
            answers: 0,
        };
        Self {
            plan: plan.clone(),
            upstreams: plan.upstreams.iter().map(upstream).collect(),
            budget: Budget::new(&plan.retry_budget, began),
        }
    }

    /// Positions of those of which `is` holds.
    fn those(&self, is: impl Fn(usize, &Upstream) -> bool) -> Vec<usize> {
        let all = self.upstreams.iter().enumerate();
        all.filter(|(ix, one)| is(*ix, one)).map(|(ix, _)| ix).collect()
    }

    /// To whom a request may go that has been at `tried`.
    pub fn choices(&self, now: Nanos, tried: &[usize], only_closed: bool) -> Vec<usize> {
        let among = |backup| {
            self.those(|ix, one| {
                one.backup == backup
                    && one.may_be_picked(now)
                    && one.has_room()
                    && !tried.contains(&ix)
                    && (!only_closed || one.breaker.opens_at().is_none() && !one.is_half_open())
            })
        };
        let first = among(false);
        let others =
            self.those(|ix, one| !one.backup && one.may_be_picked(now) && !tried.contains(&ix));
        if others.is_empty() { among(true) } else { first }
    }

    /// Why a request goes to nobody.
    pub fn why_none(&self, now: Nanos) -> Failure {
        if self.upstreams.iter().any(|one| one.may_be_picked(now) && !one.has_room()) {
            return Failure::Capacity(Scope::Upstream);
        }
        let well = self.upstreams.iter().filter(|one| one.is_well());
        // What a test will show may be known at any moment.
        let when = |one: &Upstream| {
            one.breaker.opens_at().map(|at| if one.is_half_open() { now } else { at })
        };
        let soonest = well.filter_map(when).min();
        if let Some(at) = soonest {
            // At least one second, and whole ones: it goes into a header field.
            let left = at.0.saturating_sub(now.0).saturating_sub(1_000_000);
            let wait = left.div_ceil(1_000_000_000).max(1);
            return Failure::BreakerOpen { wait: wait as u32 };
        }
        if self.upstreams.iter().all(|one| one.resolved) {
            Failure::NoUpstream
        } else {
            Failure::Unresolved
        }
    }

    /// Whether what is known at `later` may let somebody in whom it does not at `now`.
    pub fn differs(&self, now: Nanos, later: Nanos) -> bool {
        self.upstreams.iter().any(|one| one.may_be_picked(now) != one.may_be_picked(later))
    }

    /// Takes a place.
    pub fn enter(&mut self, ix: usize, id: u64, now: Nanos) -> Ticket {
        let one = &mut self.upstreams[ix];
        one.held.push(id);
        one.breaker.admit(id, now)
    }

    /// Gives a place back.
    pub fn leave(&mut self, ix: usize, ticket: Ticket) {
        let one = &mut self.upstreams[ix];
        one.held.retain(|&id| id != ticket.id);
        one.breaker.give_back(ticket);
    }

    /// How many scoring has taken out, and how many it may.
    pub fn ejected(&self) -> (usize, usize) {
        let out = self.those(|_, one| one.probed.as_ref().is_some_and(|p| p.ejected));
        (out.len(), (self.upstreams.len() / 2).max(1))
    }

    /// Whether scoring would take out the upstream at `ix`, if it is bad.
    pub fn may_eject(&self, ix: usize) -> bool {
        let (_, most) = self.ejected();
        let out = self.those(|_, one| one.probed.as_ref().is_some_and(|p| !p.is_in()));
        out.len() < most && self.upstreams[ix].probed.as_ref().is_some_and(Probed::is_in)
    }

    pub fn is_failure(&self, status: u16) -> bool {
        self.plan.breaker.failure_statuses.iter().any(|&(from, to)| from <= status && status <= to)
    }

    /// Whether the one at `ix` takes only a part of its picks.
    pub fn is_warming_up(&self, ix: usize, now: Nanos) -> bool {
        let since = self.upstreams[ix].since;
        since != Nanos(0) && now.since(since) < self.plan.slow_start
    }

    /// Checks what an algorithm promises of its choice among `choices`; none of those is warming
    /// up, or nothing is promised.
    pub fn check_choice(&self, ix: usize, choices: &[usize], now: Nanos) {
        if choices.iter().any(|&other| self.is_warming_up(other, now)) {
            return;
        }
        let load = |ix: usize| self.upstreams[ix].held.len();
        match self.plan.selector.algorithm {
            Algorithm::LeastConn => {
                let least = choices.iter().map(|&ix| load(ix)).min();
                assert_eq!(Some(load(ix)), least, "not the least loaded of {choices:?}");
            }
            Algorithm::ConsistentHashBounded => {
                let backup = self.upstreams[ix].backup;
                let around = self.those(|_, one| one.backup == backup && one.may_be_picked(now));
                let total: usize = around.iter().map(|&ix| load(ix)).sum();
                let mean = (total + 1) as f64 / around.len() as f64;
                let cap = ((1.0 + self.plan.selector.epsilon) * mean - 1e-9).ceil() as usize;
                let under = choices.iter().any(|&ix| load(ix) < cap);
                assert!(load(ix) < cap || !under, "{} with a cap of {cap}", load(ix));
            }
            _ => {}
        }
    }
}

impl Upstream {
    /// Whether it may be chosen if its breaker agrees.
    pub fn is_well(&self) -> bool {
        self.resolved && self.probed.as_ref().is_none_or(Probed::is_in)
    }

    /// Whether it may be chosen, were it not for its limit.
    pub fn may_be_picked(&self, now: Nanos) -> bool {
        self.is_well() && self.breaker.lets_in(now)
    }

    pub fn has_room(&self) -> bool {
        self.limit == 0 || self.held.len() < self.limit
    }

    fn is_half_open(&self) -> bool {
        self.breaker.state() == l7rp_core::upstream::breaker::State::HalfOpen
    }

    pub fn saw_latency(&mut self, seconds: f64) {
        let (low, high) = self.latency.unwrap_or((seconds, seconds));
        self.latency = Some((low.min(seconds), high.max(seconds)));
    }
}
