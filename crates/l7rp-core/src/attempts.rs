//! The tries of one request: may there be another, when, on whom, and until when.
//!
//! [`Plan`] is asked after every outcome. It knows nothing of upstreams or budgets: it says
//! what a try may do and costs, and whoever acts looks whether there is an upstream and a
//! budget for it.

use std::time::Duration;

use crate::failure::{Again, Failure};
use crate::names::{Nanos, Status};

/// A request waits for a connection in vain at this many upstreams at most: each costs a whole
/// `connect_timeout`.
const MAX_CONNECT_TIMEOUTS: u32 = 3;
/// A request is turned away unprocessed by this many upstreams at most: where so many have too much
/// to do, it should not be asked of the rest as well.
const MAX_REFUSALS: u32 = 3;
/// A try that has less time than this before the deadline is not begun.
const FLOOR: Duration = Duration::from_millis(10);
/// Doubling of the back-off ends here.
const MAX_DOUBLINGS: u32 = 10;

/// What a route allows.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// Tries in all, the first included, of requests that were sent.
    pub max_attempts: u32,
    /// Methods that may be tried again.
    pub methods: Vec<String>,
    /// Statuses that are tried again: those of responses, and those that failures stand for.
    pub retry_on: Vec<u16>,
    /// Statuses of gRPC calls that are tried again, whatever their method, which is always POST.
    pub retry_on_grpc: Vec<u8>,
    /// Before the second try; doubles from try to try.
    pub backoff: Duration,
    /// A second try beside the first after this; zero: none.
    pub hedge_after: Duration,
    /// The same after this percentile of the route's latency; 0: none.
    pub hedge_after_percentile: f64,
    /// Methods that may be hedged.
    pub hedgeable: Vec<String>,
}

impl Rules {
    /// Whether it may come to another try of a request with this method. `grpc`: it is a call.
    #[must_use]
    pub fn may_retry(&self, method: &[u8], grpc: bool) -> bool {
        let by_status = grpc && !self.retry_on_grpc.is_empty();
        self.max_attempts > 1 && (by_status || self.lists(method))
    }

    fn lists(&self, method: &[u8]) -> bool {
        self.methods.iter().any(|m| m.as_bytes() == method)
    }

    /// Whether two tries of a request with this method may race.
    #[must_use]
    pub fn may_hedge(&self, method: &[u8]) -> bool {
        let races = !self.hedge_after.is_zero() || self.hedge_after_percentile > 0.0;
        races && self.hedgeable.iter().any(|m| m.as_bytes() == method)
    }

    /// Whether a response with `status` is one that nobody would rather have than another:
    /// it wins a race at once.
    #[must_use]
    pub fn wins(&self, status: u16) -> bool {
        status < 500 && !self.retry_on.contains(&status)
    }
}

/// What is known about one request that bears on trying it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Its method.
    pub method: &'a [u8],
    /// That method may be repeated (RFC 9110 §9.2.2).
    pub idempotent: bool,
    /// It can be sent twice at the same time: it is whole, and no upgrade.
    pub whole: bool,
    /// It is a call of gRPC.
    pub grpc: bool,
}

/// How a try ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With the head of a response.
    Answered {
        /// Its status.
        status: Status,
        /// It carries a `Retry-After`: the upstream wants to be left alone.
        stay_away: bool,
    },
    /// Without.
    Failed(Failure),
}

impl Outcome {
    /// Whether anybody would ask why there was no other try.
    fn wants_another(self, rules: Option<&Rules>) -> bool {
        let Self::Answered { status, .. } = self else { return true };
        let is_good = rules.map_or(status.http < 500, |rules| rules.wins(status.http));
        let is_listed = |grpc| rules.is_some_and(|rules| rules.retry_on_grpc.contains(&grpc));
        !is_good || status.grpc.is_some_and(is_listed)
    }
}

/// What holds at the moment a try has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "four facts that do not depend on each other")]
pub struct Situation {
    /// All that was sent so far can be sent again.
    pub whole: bool,
    /// It is also short enough for the route to try it again.
    pub replayable: bool,
    /// The client was told something that cannot be taken back: an interim response other than
    /// 100 and 103.
    pub told: bool,
    /// The process is on its way out.
    pub draining: bool,
    /// How many tries it was: two that raced are one outcome.
    pub tries: u32,
}

/// What to do after a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// What the try gave is the client's answer.
    Give,
    /// Nothing was sent: at once, on an upstream not tried yet, at no cost.
    Elsewhere,
    /// A retry, at this time, at the cost of one from the pool's budget; on an upstream not
    /// tried yet, or on one that was, if no other is left.
    Retry(Nanos),
}

/// Why a try that came to nothing good was the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The route lets no request be tried again.
    NoRule,
    /// The route does not list the method.
    Method,
    /// The route does not list what it came to.
    Outcome,
    /// No other try can help, or none is allowed after this: part of an answer is out, or the
    /// client is gone.
    Final,
    /// The route allows no more tries.
    Attempts,
    /// What was sent of the body was not kept, or it was too long for that.
    Body,
    /// The client was told something that cannot be taken back.
    Told,
    /// The process is on its way out.
    Draining,
    /// There is no time left.
    Deadline,
    /// The upstream wants to be left alone.
    StayAway,
    /// As many upstreams as is reasonable have refused it, or were not to be reached.
    Patience,
    /// The pool's budget is spent. Said by who asks it, for the plan does not know it.
    Budget,
    /// There is no other upstream that it may go to. Likewise.
    NoUpstream,
}

impl Stop {
    /// The word in the log.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NoRule => "no_rule",
            Self::Method => "method",
            Self::Outcome => "not_listed",
            Self::Final => "final",
            Self::Attempts => "attempts",
            Self::Body => "body",
            Self::Told => "told",
            Self::Draining => "draining",
            Self::Deadline => "deadline",
            Self::StayAway => "stay_away",
            Self::Patience => "patience",
            Self::Budget => "budget",
            Self::NoUpstream => "no_upstream",
        }
    }
}

/// The tries of one request.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    rules: Option<&'a Rules>,
    request: Request<'a>,
    deadline: Nanos,
    /// Tries that may have reached an upstream.
    sent: u32,
    connect_timeouts: u32,
    refusals: u32,
    /// Why the last outcome was the last.
    stop: Option<Stop>,
}

impl<'a> Plan<'a> {
    /// A plan under a route's rules, if it has any; `deadline` ends everything.
    #[must_use]
    pub fn new(rules: Option<&'a Rules>, request: Request<'a>, deadline: Nanos) -> Self {
        Self { rules, request, deadline, sent: 0, connect_timeouts: 0, refusals: 0, stop: None }
    }

    /// Until when.
    #[must_use]
    pub fn deadline(&self) -> Nanos {
        self.deadline
    }

    /// Why there was no other try, once [`Plan::after`] has said so; `None`: none was called for.
    #[must_use]
    pub fn stop(&self) -> Option<Stop> {
        self.stop
    }

    /// Whether the route lets this request be tried again, should it come to that.
    #[must_use]
    pub fn may_retry(&self) -> bool {
        let Request { method, grpc, .. } = self.request;
        self.rules.is_some_and(|rules| rules.may_retry(method, grpc))
    }

    /// Whether this request may come to cost an extra try.
    #[must_use]
    pub fn may_cost(&self) -> bool {
        self.may_retry() || self.rules.is_some_and(|r| r.may_hedge(self.request.method))
    }

    /// Whether a try may begin at `now`. A first one may have any time before the deadline.
    #[must_use]
    pub fn may_begin(&self, now: Nanos) -> bool {
        if self.sent == 0 { now < self.deadline } else { now.plus(FLOOR) <= self.deadline }
    }

    /// Decides after a try that ended at `now`. `draw`: 64 random bits.
    ///
    /// A request of which nothing was sent moves on whatever its method and rules.
    #[must_use]
    pub fn after(&mut self, outcome: Outcome, now: Nanos, at: Situation, draw: u64) -> Next {
        if let Outcome::Failed(failure) = outcome
            && failure.meaning().again == Again::Unsent
        {
            self.connect_timeouts += u32::from(failure == Failure::ConnectTimeout);
            // The other of a race was sent.
            self.sent += at.tries - 1;
            let patient = self.connect_timeouts < MAX_CONNECT_TIMEOUTS;
            self.stop = Some(if patient { Stop::Deadline } else { Stop::Patience });
            return if patient && self.may_begin(now) { Next::Elsewhere } else { Next::Give };
        }
        self.sent += at.tries;
        let refused = matches!(outcome, Outcome::Failed(failure)
            if failure.meaning().again == Again::Unprocessed);
        self.refusals += u32::from(refused);
        let patient = self.refusals < MAX_REFUSALS;
        let again = at.whole && !at.told && !at.draining;
        let otherwise = if refused && again && patient && self.may_begin(now) {
            Next::Elsewhere
        } else {
            Next::Give
        };
        let Some(rules) = self.rules else {
            self.stop = outcome.wants_another(None).then(|| self.why_not(None, outcome, at, false));
            return otherwise;
        };
        let wanted = match outcome {
            Outcome::Answered { status, stay_away } => {
                // A 101 is no answer but another protocol.
                let by_http = status.http >= 200 && rules.retry_on.contains(&status.http);
                let by_grpc = status.grpc.is_some_and(|grpc| rules.retry_on_grpc.contains(&grpc));
                !stay_away && (by_grpc || by_http && rules.lists(self.request.method))
            }
            Outcome::Failed(failure) => {
                let meaning = failure.meaning();
                matches!(meaning.again, Again::IfRepeatable | Again::Unprocessed)
                    && rules.retry_on.contains(&meaning.status)
                    && rules.lists(self.request.method)
            }
        };
        let allowed = again && at.replayable && self.sent < rules.max_attempts;
        if !(wanted && allowed) {
            let asks = outcome.wants_another(Some(rules));
            self.stop = asks.then(|| self.why_not(Some(rules), outcome, at, wanted));
            return otherwise;
        }
        self.stop = Some(Stop::Deadline);
        let begin = now.plus(self.backoff(rules, draw));
        if self.may_begin(begin) { Next::Retry(begin) } else { otherwise }
    }

    /// Which of the conditions for a retry is not met: the first, from the one that is hardest to
    /// change to the one that chance has made.
    fn why_not(
        &self,
        rules: Option<&Rules>,
        outcome: Outcome,
        at: Situation,
        wanted: bool,
    ) -> Stop {
        let (status, again, stay_away) = match outcome {
            Outcome::Answered { status, stay_away } => {
                (status.http, Again::IfRepeatable, stay_away)
            }
            Outcome::Failed(failure) => {
                let meaning = failure.meaning();
                (meaning.status, meaning.again, false)
            }
        };
        match again {
            Again::No => return Stop::Final,
            Again::Unprocessed if self.refusals >= MAX_REFUSALS => return Stop::Patience,
            _ => {}
        }
        let Some(rules) = rules.filter(|rules| rules.max_attempts > 1) else {
            return Stop::NoRule;
        };
        let unmet = [
            (!wanted && !rules.retry_on.contains(&status), Stop::Outcome),
            (!wanted && !rules.lists(self.request.method), Stop::Method),
            (stay_away, Stop::StayAway),
            (!wanted, Stop::Outcome),
            (at.told, Stop::Told),
            (at.draining, Stop::Draining),
            (!(at.whole && at.replayable), Stop::Body),
        ];
        unmet.iter().find(|(is_so, _)| *is_so).map_or(Stop::Attempts, |(_, stop)| *stop)
    }

    /// Half to all of the doubled back-off, so that clients that failed together do not come
    /// back together.
    fn backoff(&self, rules: &Rules, draw: u64) -> Duration {
        let doubled = rules.backoff.saturating_mul(1 << (self.sent - 1).min(MAX_DOUBLINGS));
        let half = doubled / 2;
        half + half.mul_f64(draw as f64 / u64::MAX as f64)
    }

    /// When a first try that began at `began` gets company; [`Nanos::NEVER`]: never.
    /// `percentile`: the one that the rules name, once it is known.
    #[must_use]
    pub fn hedge_at(&self, began: Nanos, percentile: Option<Duration>) -> Nanos {
        let Some(rules) = self.rules else { return Nanos::NEVER };
        let after = percentile.unwrap_or(rules.hedge_after);
        let may = self.request.whole && rules.may_hedge(self.request.method);
        if after.is_zero() || self.sent > 0 || !may {
            return Nanos::NEVER;
        }
        let at = began.plus(after);
        if at.plus(FLOOR) <= self.deadline { at } else { Nanos::NEVER }
    }

    /// Whether a try that died with a pooled connection, before an octet of an answer, is
    /// repeated at once on the same upstream and a new connection. It has most likely met the
    /// upstream's idle timeout; it is repeated only if its method allows, because the upstream
    /// may have acted on it (RFC 9110 §9.2.2).
    #[must_use]
    pub fn repeats_stale(&self, failure: Failure, replayable: bool) -> bool {
        let may = match failure {
            Failure::UpstreamClosed => self.request.idempotent,
            // The upstream says that it has done nothing.
            Failure::StreamRefused { .. } => true,
            _ => false,
        };
        may && replayable
    }
}

#[cfg(test)]
mod tests;
