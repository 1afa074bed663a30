//! Requests and their tries. Each function does what the one that its comment names does, in the
//! same order; but where that waits, this puts an event into the queue.

use std::time::Duration;

use l7rp_core::attempts::{Next, Outcome, Plan, Situation};
use l7rp_core::failure::{Again, Blame, Failure};
use l7rp_core::names::Nanos;
use l7rp_core::pick::Tried;

use super::super::pool::End;
use super::backend::{self, Ended, Fault, Finish};
use super::both::{Held, Wish};
use super::seen::Step;
use super::setup::between;
use super::world::{Due, World};

/// No try begins with less time than this before the deadline, but a first one.
const FLOOR: Duration = Duration::from_millis(10);

pub struct Request<'a> {
    pub id: u64,
    pub plan: Plan<'a>,
    pub key: u64,
    pub worker: usize,
    pub kind: Kind,
    pub tried: Tried,
    /// The same, as a list.
    pub list: Vec<usize>,
    pub again: bool,
    pub last: Option<Failure>,
    pub spare: Option<(Held<'a>, u16)>,
    pub first: Option<Running<'a>>,
    pub second: Option<Running<'a>>,
    pub flowing: Option<Flowing<'a>>,
    pub counts: Counts,
}

/// What bears on its tries.
pub struct Kind {
    /// A GET, not a POST.
    pub get: bool,
    pub replayable: bool,
    pub upgrade: bool,
}

/// What the rules bound.
#[derive(Default)]
pub struct Counts {
    /// Tries that may have reached an upstream; two that race are one.
    pub sent: u32,
    pub connect_timeouts: u32,
}

/// A try that waits for the head of a response.
pub struct Running<'a> {
    pub held: Held<'a>,
    token: u64,
    sent_at: Nanos,
    ended: Option<Ended>,
}

/// A response on its way to the client.
pub struct Flowing<'a> {
    held: Held<'a>,
    token: u64,
    status: u16,
}

impl<'a> World<'a> {
    /// `Tries::run`, to the first wait.
    pub fn begin(&mut self, mut r: Request<'a>) {
        if !r.plan.may_begin(self.both.now) {
            let failure = r.last.unwrap_or(Failure::TotalTimeout);
            return self.fail(r, failure);
        }
        let left = r.plan.deadline().since(self.both.now);
        let least = if r.counts.sent == 0 { Duration::from_nanos(1) } else { FLOOR };
        assert!(left >= least, "a try begins {left:?} before the deadline");
        match self.take(&mut r) {
            Ok(held) => self.send(r, held),
            Err(none) => {
                let failure = r.last.unwrap_or(none);
                self.fail(r, failure);
            }
        }
    }

    /// `Tries::take`.
    fn take(&mut self, r: &mut Request<'a>) -> Result<Held<'a>, Failure> {
        let at = self.worker_time();
        let (key, worker) = (r.key, r.worker);
        let wish = Wish { tried: &r.tried, list: &r.list, key, worker, only_closed: false, at };
        let taken = match self.both.take(&wish) {
            Err(_) if r.again => {
                self.both.seen.count("second round");
                self.both.take(&Wish { tried: &Tried::new(), list: &[], ..wish })
            }
            taken => taken,
        };
        let held = taken?;
        self.check_count(r, held.ix());
        r.tried.insert(held.ix());
        r.list.push(held.ix());
        Ok(held)
    }

    /// Each upstream is asked once, but for what the rules and the budget allow.
    fn check_count(&self, r: &Request<'a>, ix: usize) {
        let repeats = r.list.contains(&ix);
        assert!(!repeats || r.again, "{ix} is asked again");
        let most = self.setup.rules.as_ref().map_or(0, |rules| rules.max_attempts as usize);
        assert!(r.list.len() < self.moods.len() + most, "{:?} were asked", r.list);
    }

    /// `Tries::one`, to the first wait.
    fn send(&mut self, mut r: Request<'a>, held: Held<'a>) {
        let percentile = self.percentile();
        let hedge_at = r.plan.hedge_at(held.began(), percentile);
        let running = self.running(&r, held, false);
        if hedge_at != Nanos::NEVER {
            assert!(r.counts.sent == 0 && r.kind.get && hedge_at.plus(FLOOR) <= r.plan.deadline());
            self.after(hedge_at, Due::Hedge { id: r.id, token: running.token });
        }
        r.first = Some(running);
        self.requests.insert(r.id, r);
    }

    fn running(&mut self, r: &Request<'a>, held: Held<'a>, is_second: bool) -> Running<'a> {
        let token = self.token();
        self.draw_fate(r, held.ix(), token, false, is_second);
        Running { held, token, sent_at: self.both.now, ended: None }
    }

    fn draw_fate(&mut self, r: &Request<'a>, ix: usize, token: u64, fresh: bool, is_second: bool) {
        let (now, deadline) = (self.both.now, r.plan.deadline());
        let fate =
            backend::fate(&mut self.both.rng, self.setup, self.moods[ix], now, deadline, fresh);
        let timeout =
            |ended: Ended| ended.is_err_and(|fault| fault.failure.meaning().status == 504);
        if is_second && timeout(fate.ended) {
            return; // the race has a limit of its own
        }
        self.after(fate.at, Due::Ends { id: r.id, token, ended: fate.ended });
    }

    /// `hedge::race`, when the first has been alone for long enough.
    pub fn hedge(&mut self, id: u64, token: u64) {
        let Some(mut r) = self.requests.remove(&id) else { return };
        let waits = |one: &Running<'_>| one.token == token && one.ended.is_none();
        if r.first.as_ref().is_some_and(waits)
            && let Some(held) = self.place(&mut r)
        {
            self.both.trail.note(self.both.now, Step::Hedged { id, ix: held.ix() });
            self.both.seen.count("hedge");
            let second = self.running(&r, held, true);
            let pool = &self.setup.pool;
            let limit = pool.connect_timeout + pool.response_header_timeout;
            let late = Fault { failure: Failure::ResponseTimeout, stale: false };
            let until = self.both.now.plus(limit).min(r.plan.deadline());
            self.after(until, Due::Ends { id, token: second.token, ended: Err(late) });
            r.second = Some(second);
        }
        self.requests.insert(id, r);
    }

    /// `Second::place`.
    fn place(&mut self, r: &mut Request<'a>) -> Option<Held<'a>> {
        let (key, worker, at) = (r.key, r.worker, self.worker_time());
        let wish = Wish { tried: &r.tried, list: &r.list, key, worker, only_closed: true, at };
        let held = self.both.take(&wish).ok()?;
        if !self.both.may_try_again() {
            self.both.unused(held);
            return None;
        }
        r.tried.insert(held.ix());
        r.list.push(held.ix());
        Some(held)
    }

    /// The end of `Attempt::run`, or of `Second::exchange`.
    pub fn try_ends(&mut self, id: u64, token: u64, ended: Ended) {
        let Some(mut r) = self.requests.remove(&id) else { return };
        let now = self.both.now;
        let is_second = r.second.as_ref().is_some_and(|one| one.token == token);
        let running = if is_second { &mut r.second } else { &mut r.first };
        let waits = |one: &&mut Running<'_>| one.token == token && one.ended.is_none();
        let Some(one) = running.as_mut().filter(waits) else {
            self.requests.insert(id, r);
            return;
        };
        let ix = one.held.ix();
        self.both.trail.note(now, Step::TryEnded { id, ix, ended });
        let took = now.since(one.sent_at);
        match ended {
            Ok(_) => self.both.head_came(&mut one.held, took),
            Err(Fault { failure: Failure::ResponseTimeout, .. }) if !is_second => {
                self.both.waited(&one.held, took);
            }
            Err(fault) if fault.stale => {
                if is_second || r.plan.repeats_stale(fault.failure, r.kind.replayable) {
                    one.sent_at = now;
                    self.draw_fate(&r, ix, token, true, is_second);
                    self.requests.insert(id, r);
                    return;
                }
            }
            Err(_) => {}
        }
        one.ended = Some(ended);
        if !is_second && ended.is_ok() {
            self.learn(took);
        }
        self.go_on(r);
    }

    /// `Second::run`: whether the race is over.
    pub fn go_on(&mut self, mut r: Request<'a>) {
        let first = r.first.as_ref().and_then(|one| one.ended);
        let over = match &r.second {
            None => first.is_some(),
            Some(second) => {
                let wins = second.ended.is_some_and(|ended| ended.is_ok_and(|s| self.wins(s)));
                wins || first.is_some_and(|first| self.is_over(first) || second.ended.is_some())
            }
        };
        if over {
            let tries = 1 + u32::from(r.second.is_some());
            let (held, ended) = self.finish_race(&mut r);
            self.judge(r, held, ended, tries);
        } else {
            self.requests.insert(r.id, r);
        }
    }

    fn wins(&self, status: u16) -> bool {
        self.setup.rules.as_ref().is_none_or(|rules| rules.wins(status))
    }

    fn is_over(&self, first: Ended) -> bool {
        match first {
            Ok(status) => self.wins(status),
            Err(fault) => fault.failure.meaning().again == Again::No,
        }
    }

    /// `Second::finish`, and the end of `hedge::race`.
    fn finish_race(&mut self, r: &mut Request<'a>) -> (Held<'a>, Ended) {
        let mut first = r.first.take().expect("a first try");
        let Some(mut second) = r.second.take() else {
            return (first.held, first.ended.expect("it has ended"));
        };
        let now = self.both.now;
        let over = first.ended.is_some_and(|ended| self.is_over(ended));
        match (first.ended, second.ended) {
            (ended, Some(Ok(status)))
                if !over && (self.wins(status) || !matches!(ended, Some(Ok(_)))) =>
            {
                let waited = now.since(first.held.began());
                self.learn(waited);
                match ended {
                    None => self.both.waited(&first.held, waited),
                    Some(ended) => self.both.settle(&mut first.held, end(ended)),
                }
                self.both.leave(first.held);
                self.both.seen.count("hedge won");
                (second.held, Ok(status))
            }
            (Some(first_ended), ended) => {
                match ended {
                    None => {
                        let waited = now.since(second.held.began());
                        self.both.waited(&second.held, waited);
                    }
                    Some(ended) => self.both.settle(&mut second.held, end(ended)),
                }
                self.both.leave(second.held);
                (first.held, first_ended)
            }
            (None, _) => unreachable!("the race does not end before one has"),
        }
    }

    /// The end of `Tries::one`, and what `Tries::run` makes of it.
    fn judge(&mut self, mut r: Request<'a>, held: Held<'a>, ended: Ended, tries: u32) {
        let now = self.both.now;
        let given = match ended {
            Ok(status) => Ok((held, status)),
            Err(fault) => {
                let mut held = held;
                self.both.settle(&mut held, end(ended));
                self.both.leave(held);
                Err(fault.failure)
            }
        };
        let outcome = match ended {
            Ok(status) => Outcome::Answered {
                status: status.into(),
                stay_away: r.plan.may_retry() && self.both.rng.u32(..20) == 0,
            },
            Err(fault) => Outcome::Failed(fault.failure),
        };
        let situation = Situation {
            whole: r.kind.replayable,
            replayable: r.kind.replayable,
            told: self.both.rng.u32(..50) == 0,
            draining: self.draining,
            tries,
        };
        let next = r.plan.after(outcome, now, situation, self.both.rng.u64(..));
        self.both.trail.note(now, Step::Next { id: r.id, next });
        self.check_next(&mut r, outcome, situation, next);
        let next = match next {
            Next::Retry(_) if !self.both.may_try_again() => Next::Give,
            next => next,
        };
        match (next, given) {
            (Next::Give, Ok((held, status))) => {
                if let Some((worse, _)) = r.spare.take() {
                    self.both.leave(worse);
                }
                self.flow(r, held, status);
            }
            (Next::Give, Err(failure)) => self.fail(r, failure),
            (Next::Elsewhere, Err(failure)) => {
                self.both.seen.count("moved on");
                r.last = Some(failure);
                // It costs nothing, so nobody is asked twice.
                r.again = false;
                self.begin(r);
            }
            (Next::Elsewhere, Ok(_)) => unreachable!("a response was sent for"),
            (Next::Retry(at), given) => {
                self.both.seen.count("retry");
                match given {
                    Ok((held, status)) => self.spare(&mut r, held, status),
                    Err(failure) => r.last = Some(failure),
                }
                r.again = true;
                self.after(at, Due::Begin { id: r.id });
                self.requests.insert(r.id, r);
            }
        }
    }

    /// `Tries::spare`.
    fn spare(&mut self, r: &mut Request<'a>, mut held: Held<'a>, status: u16) {
        self.both.settle(&mut held, End::Answered(status.into()));
        if let Some((old, _)) = r.spare.replace((held, status)) {
            self.both.leave(old);
        }
    }

    /// The end of `dispatch::run` without a response of the last try.
    pub fn fail(&mut self, mut r: Request<'a>, failure: Failure) {
        match r.spare.take() {
            Some((held, status)) if failure.meaning().blame != Blame::Client => {
                self.both.seen.count("spare given");
                self.flow(r, held, status);
            }
            Some((held, _)) => self.both.leave(held),
            None => {}
        }
    }

    /// What the rules say of the next step, once more.
    fn check_next(&self, r: &mut Request<'a>, outcome: Outcome, at: Situation, next: Next) {
        let now = self.both.now;
        let left = |from: Nanos| from.plus(FLOOR) <= r.plan.deadline();
        if let Outcome::Failed(failure) = outcome
            && failure.meaning().again == Again::Unsent
        {
            r.counts.connect_timeouts += u32::from(failure == Failure::ConnectTimeout);
            r.counts.sent += at.tries - 1;
            let time = if r.counts.sent == 0 { now < r.plan.deadline() } else { left(now) };
            let wanted = r.counts.connect_timeouts < 3 && time;
            assert_eq!(next, if wanted { Next::Elsewhere } else { Next::Give });
            return;
        }
        r.counts.sent += at.tries;
        let Some(rules) = &self.setup.rules else {
            assert_eq!(next, Next::Give);
            return;
        };
        // A race is two, and what was not sent of it is tried elsewhere.
        assert!(r.counts.sent <= rules.max_attempts.max(2), "{} tries", r.counts.sent);
        let wanted = match outcome {
            Outcome::Answered { status, stay_away } => {
                rules.retry_on.contains(&status.http) && !stay_away
            }
            Outcome::Failed(failure) => {
                failure.meaning().again == Again::IfRepeatable
                    && rules.retry_on.contains(&failure.meaning().status)
            }
        };
        let listed = rules.methods.len() == 2 || r.kind.get;
        let allowed = at.replayable && !at.told && !at.draining && listed;
        let more = r.counts.sent < rules.max_attempts;
        let most = rules.backoff * 2_u32.pow(r.counts.sent - 1);
        match next {
            Next::Elsewhere => panic!("moves on although it was sent"),
            Next::Retry(begin) => {
                assert!(wanted && allowed && more, "tries again");
                let wait = begin.since(now);
                assert!(most / 2 <= wait && wait <= most, "waits {wait:?} of {most:?}");
                assert!(left(begin));
            }
            Next::Give => assert!(!(wanted && allowed && more && left(now.plus(most)))),
        }
    }

    /// `relay::run` or `tunnel::run`, to the first wait.
    fn flow(&mut self, mut r: Request<'a>, mut held: Held<'a>, status: u16) {
        let token = self.token();
        let now = self.both.now;
        let (at, finish) = if r.kind.upgrade && status == 200 {
            self.both.settle(&mut held, End::Answered(101.into()));
            (now.plus(between(&mut self.both.rng, 10, 600_000)), Finish::Whole)
        } else {
            let mood = self.moods[held.ix()];
            backend::finish(&mut self.both.rng, self.setup, mood, now, r.plan.deadline())
        };
        let good_at = held.good_at();
        if good_at < at {
            self.after(good_at.max(now), Due::Good { id: r.id, token });
        }
        self.after(at, Due::Over { id: r.id, token, finish });
        r.flowing = Some(Flowing { held, token, status });
        self.requests.insert(r.id, r);
    }

    /// `Relay::pump`, when a try that tests a breaker has gone on for long enough.
    pub fn is_good(&mut self, id: u64, token: u64) {
        let flowing = self.requests.get_mut(&id).and_then(|r| r.flowing.as_mut());
        if let Some(one) = flowing.filter(|one| one.token == token) {
            self.both.seen.count("probe called good");
            self.both.settle(&mut one.held, End::Answered(one.status.into()));
        }
    }

    /// The end of `relay::run`.
    pub fn is_over_at_last(&mut self, id: u64, token: u64, finish: Finish) {
        let Some(mut r) = self.requests.remove(&id) else { return };
        match r.flowing.take() {
            Some(Flowing { mut held, token: ours, status }) if ours == token => {
                let end = match finish {
                    Finish::Whole => End::Answered(status.into()),
                    Finish::Cut(failure) => End::Failed(failure),
                };
                self.both.settle(&mut held, end);
                self.both.leave(held);
            }
            other => {
                r.flowing = other;
                self.requests.insert(id, r);
            }
        }
    }

    /// The client leaves, which is noticed by reading from it, or by all being dropped.
    pub fn client_leaves(&mut self, id: u64) {
        let Some(mut r) = self.requests.remove(&id) else { return };
        self.both.trail.note(self.both.now, Step::ClientLeft { id });
        let noticed = self.both.rng.bool();
        if noticed && let Some(one) = r.first.as_mut() {
            if one.ended.is_none() {
                one.ended = Some(Err(Fault { failure: Failure::ClientGone, stale: false }));
                return self.go_on(r);
            }
        } else if noticed && let Some(Flowing { mut held, .. }) = r.flowing.take() {
            self.both.settle(&mut held, End::Failed(Failure::ClientGone));
            self.both.leave(held);
        }
        self.drop_all(r);
    }

    /// Whatever is held is given back.
    pub fn drop_all(&mut self, r: Request<'a>) {
        let running = [r.first, r.second].into_iter().flatten().map(|one| one.held);
        let flowing = r.flowing.into_iter().map(|one| one.held);
        let spare = r.spare.into_iter().map(|(held, _)| held);
        for held in running.chain(flowing).chain(spare) {
            self.both.leave(held);
        }
    }
}

fn end(ended: Ended) -> End {
    match ended {
        Ok(status) => End::Answered(status.into()),
        Err(Fault { failure, .. }) => End::Failed(failure),
    }
}
