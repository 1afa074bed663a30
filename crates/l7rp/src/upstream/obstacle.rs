//! Why an upstream cannot be chosen: one answer for the log, the status and `l7rp explain`.

use std::fmt;
use std::time::Duration;

use l7rp_core::names::Nanos;
use l7rp_core::pick::Tried;
use l7rp_core::upstream::breaker::{Mode, State};

use super::pool::Pool;
use crate::observe::tries::Refusal;
use crate::sync::lock;

/// As many are told of in one line of the log.
const MOST_REFUSALS: usize = 16;

/// What is in the way: the first thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// An operator has taken it out.
    Drained,
    /// Its name has no address.
    Unresolved,
    /// Its health checks, or what passes for them, for this reason.
    Unhealthy(String),
    /// An operator has forced its breaker open.
    Forced,
    /// Its breaker is open, for so long.
    BreakerOpen(Duration),
    /// Its breaker is half-open, and all tests are out.
    Tested,
    /// It has as many requests as it may have.
    AtLimit,
    /// It is a backup, and another is eligible.
    StandsBy,
}

impl Obstacle {
    /// The word in the log.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Drained => "drained",
            Self::Unresolved => "unresolved",
            Self::Unhealthy(_) => "unhealthy",
            Self::Forced => "breaker_forced",
            Self::BreakerOpen(_) => "breaker_open",
            Self::Tested => "breaker_half_open",
            Self::AtLimit => "at_limit",
            Self::StandsBy => "backup",
        }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drained => f.write_str("drained by an operator"),
            Self::Unresolved => f.write_str("name not resolved"),
            Self::Unhealthy(why) => write!(f, "health checks: {why}"),
            Self::Forced => f.write_str("breaker forced open by an operator"),
            Self::BreakerOpen(left) => {
                write!(f, "breaker open for another {:.1} s", left.as_secs_f64())
            }
            Self::Tested => f.write_str("breaker half-open, and all tests are out"),
            Self::AtLimit => f.write_str("at its max_in_flight"),
            Self::StandsBy => f.write_str("stands by while another is eligible"),
        }
    }
}

impl Pool {
    /// Why the upstream at `ix` cannot be chosen now; `None`: it can.
    pub fn obstacle(&self, ix: usize, now: Nanos) -> Option<Obstacle> {
        self.wake(now);
        let upstream = self.upstreams.get(ix)?;
        let standing = lock(&upstream.standing);
        if standing.drained {
            return Some(Obstacle::Drained);
        }
        if !standing.resolved {
            return Some(Obstacle::Unresolved);
        }
        if !standing.is_healthy() {
            return Some(Obstacle::Unhealthy(standing.why_unhealthy()));
        }
        drop(standing);
        if !upstream.breaker.admits(now) {
            let left = || upstream.breaker.admits_at().map_or(Duration::ZERO, |at| at.since(now));
            return Some(match upstream.breaker.state() {
                _ if upstream.breaker.mode() == Mode::Open => Obstacle::Forced,
                State::HalfOpen => Obstacle::Tested,
                State::Open | State::Closed => Obstacle::BreakerOpen(left()),
            });
        }
        if !upstream.seat.has_room() {
            return Some(Obstacle::AtLimit);
        }
        let plans = || self.plan.upstreams.iter().enumerate();
        let stands_by = plans().any(|(at, plan)| at == ix && plan.backup);
        let others = || plans().any(|(at, plan)| !plan.backup && self.is_eligible(at));
        (stands_by && others()).then_some(Obstacle::StandsBy)
    }

    /// Who could not be chosen now, and why: those that a request has not tried.
    pub fn refusals(&self, tried: &Tried, now: Nanos) -> Vec<Refusal<'_>> {
        let untried = self.upstreams.iter().enumerate().filter(|(ix, _)| !tried.contains(*ix));
        let refused = untried.filter_map(|(ix, upstream)| {
            let obstacle = self.obstacle(ix, now)?;
            let why = obstacle.word();
            let cause = match obstacle {
                Obstacle::Unhealthy(cause) => Some(cause),
                _ => None,
            };
            Some(Refusal { url: &upstream.url, why, cause })
        });
        refused.take(MOST_REFUSALS).collect()
    }
}
