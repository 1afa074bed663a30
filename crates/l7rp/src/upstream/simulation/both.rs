//! The real pool and the model, side by side: whatever is done to one is done to the other, and
//! what they say of it is compared.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use l7rp_core::failure::{Blame, Failure};
use l7rp_core::names::Nanos;
use l7rp_core::pick::Tried;
use l7rp_core::upstream::breaker::State;

use super::super::pool::{End, Place, Pool, Wanted};
use super::model::breaker::{Phase, Ticket};
use super::model::{Model, Told, Worse};
use super::seen::{Seen, Step, Trail};

const STATES: [State; 3] = [State::Closed, State::Open, State::HalfOpen];

pub struct Both<'a> {
    pub pool: &'a Pool,
    pub model: Model,
    pub rng: fastrand::Rng,
    pub now: Nanos,
    pub seen: Seen,
    pub trail: Trail,
    /// The latest time for which somebody has asked.
    asked: Nanos,
    tickets: u64,
}

/// A place in both.
pub struct Held<'a> {
    place: Place<'a>,
    ticket: Ticket,
    settled: bool,
    latency: Option<Duration>,
}

impl Held<'_> {
    pub fn ix(&self) -> usize {
        self.place.ix()
    }

    pub fn began(&self) -> Nanos {
        self.place.began()
    }

    pub fn good_at(&self) -> Nanos {
        self.place.good_at()
    }
}

/// Whom a try may go to.
pub struct Wish<'t> {
    pub tried: &'t Tried,
    /// The same, as a list.
    pub list: &'t [usize],
    pub key: u64,
    pub worker: usize,
    pub only_closed: bool,
    /// What the worker takes the time to be.
    pub at: Nanos,
}

impl<'a> Both<'a> {
    pub fn new(pool: &'a Pool, rng: fastrand::Rng, now: Nanos, trail: Trail) -> Self {
        let model = Model::new(&pool.plan, now);
        let seen = Seen::default();
        Self { pool, model, rng, now, seen, trail, asked: now, tickets: 0 }
    }

    pub fn take(&mut self, wish: &Wish<'_>) -> Result<Held<'a>, Failure> {
        let &Wish { tried, list, key, worker, only_closed, at } = wish;
        let choices = self.model.choices(at, list, only_closed);
        // Who has just been let in for one worker is not yet for another that has read the
        // clock a moment before.
        self.asked = self.asked.max(at);
        let unclear = self.model.differs(at, self.asked);
        if unclear {
            self.seen.count("clock behind");
        }
        let wanted = Wanted { tried, key, only_closed, worker };
        let taken = self.pool.take(wanted, at, self.rng.u64(..));
        if only_closed {
            self.follow_touched(wish);
        }
        let place = match taken {
            Ok(place) => place,
            Err(why) => {
                self.trail.note(self.now, Step::Nobody(why));
                self.seen.nobody(why);
                assert!(choices.is_empty(), "{choices:?} could be taken");
                if !unclear {
                    assert_eq!(why, self.model.why_none(at));
                }
                self.compare_bits(at);
                return Err(why);
            }
        };
        let ix = place.ix();
        self.trail.note(self.now, Step::Took { ix, probe: place.is_probe() });
        assert!(choices.contains(&ix), "{ix} was taken, and only {choices:?} may be");
        assert_eq!(place.began(), at);
        if !unclear {
            self.model.check_choice(ix, &choices, at);
        }
        self.tickets += 1;
        let ticket = self.model.enter(ix, self.tickets, at);
        self.model.upstreams[ix].breaker.follow(self.pool.upstreams[ix].breaker.admits_at());
        if self.model.is_warming_up(ix, at) {
            self.seen.count("warmed up");
        }
        if self.model.upstreams[ix].backup {
            self.seen.count("backup taken");
        }
        assert_eq!(place.is_probe(), ticket.probe);
        self.compare_bits(at);
        Ok(Held { place, ticket, settled: false, latency: None })
    }

    /// A try that is only for closed breakers may make one half-open whose time has come, and go
    /// on elsewhere.
    fn follow_touched(&mut self, wish: &Wish<'_>) {
        for (ix, one) in self.model.upstreams.iter_mut().enumerate() {
            let could = one.may_be_picked(wish.at) && one.has_room() && !wish.list.contains(&ix);
            let real = &self.pool.upstreams[ix].breaker;
            if could && real.state() == State::HalfOpen && real.admits_at().is_none() {
                one.breaker.touch(wish.at);
            }
        }
    }

    /// Right after somebody has asked, all whom time lets in are in.
    fn compare_bits(&self, at: Nanos) {
        if at < self.asked {
            return;
        }
        for (ix, one) in self.model.upstreams.iter().enumerate() {
            assert_eq!(self.pool.is_eligible(ix), one.may_be_picked(at), "of {ix}");
        }
    }

    pub fn has_eligible(&mut self) {
        self.asked = self.now;
        let any = self.model.upstreams.iter().any(|one| one.may_be_picked(self.now));
        assert_eq!(self.pool.has_eligible(self.now), any);
        self.compare_bits(self.now);
    }

    pub fn head_came(&mut self, held: &mut Held<'a>, latency: Duration) {
        held.place.head_came(latency, self.now);
        held.latency = Some(latency);
        self.model.upstreams[held.ix()].saw_latency(latency.as_secs_f64());
    }

    pub fn waited(&mut self, held: &Held<'a>, time: Duration) {
        let ix = held.ix();
        let known = self.pool.latency(&self.pool.upstreams[ix], self.now);
        held.place.waited(time, self.now);
        if known.is_none_or(|known| known < time.as_secs_f64()) {
            self.model.upstreams[ix].saw_latency(time.as_secs_f64());
        }
    }

    pub fn settle(&mut self, held: &mut Held<'a>, end: End) {
        let ix = held.ix();
        self.trail.note(self.now, Step::Settled { ix, end });
        let ejections = self.real_ejections(ix);
        let took = held.place.settle(end, self.now);
        assert_eq!(took, self.now.since(held.began()));
        if std::mem::replace(&mut held.settled, true) {
            return;
        }
        let one = &mut self.model.upstreams[ix];
        let failed = match end {
            End::Answered(status) => {
                one.answers += 1;
                Some(self.model.is_failure(status.http))
            }
            End::Failed(failure) if failure.meaning().blame == Blame::Upstream => {
                one.errors += 1;
                Some(true)
            }
            End::Failed(_) | End::Excused(_) => {
                one.cancels += 1;
                None
            }
        };
        let Some(failed) = failed else {
            self.model.upstreams[ix].breaker.give_back(held.ticket);
            return;
        };
        self.judge(ix, held.ticket, failed);
        self.score(ix, failed, held.latency, ejections);
    }

    fn judge(&mut self, ix: usize, ticket: Ticket, failed: bool) {
        let now = self.now;
        let one = &mut self.model.upstreams[ix];
        match one.breaker.judge(ticket, failed, now) {
            Told::Nothing => {}
            Told::Closes => {
                one.since = now;
                self.seen.count("breaker closed");
            }
            Told::Opens => {
                let until = self.pool.upstreams[ix].breaker.admits_at();
                let until = until.expect("the breaker did not open");
                one.breaker.open(now, until);
                self.seen.count("breaker opened");
            }
        }
    }

    fn score(&mut self, ix: usize, failed: bool, latency: Option<Duration>, before: u64) {
        let Some(scoring) = &mut self.model.upstreams[ix].scoring else { return };
        let worse = scoring.answered(failed, latency, self.now);
        let ejected = self.real_ejections(ix) > before;
        if worse == Worse::Yes {
            let may = self.model.may_eject(ix);
            let (out, most) = self.model.ejected();
            if out == most {
                self.seen.count("ejected no more");
            }
            assert_eq!(ejected, may, "whether {ix} was taken out, with {out} out");
        }
        if ejected {
            assert!(worse != Worse::No && self.model.may_eject(ix), "{ix} was taken out");
            self.trail.note(self.now, Step::Ejected(ix));
            self.seen.count("ejected");
            let probed = &mut self.model.upstreams[ix].probed;
            probed.as_mut().expect("scoring comes with probes").eject();
        }
    }

    /// How often the real one was taken out by scoring.
    fn real_ejections(&self, ix: usize) -> u64 {
        if self.pool.plan.passive.is_none() {
            return 0;
        }
        let counts = self.pool.upstreams[ix].transitions.health_counts();
        counts.iter().filter(|(_, why, _)| why.starts_with("passive")).map(|(_, _, n)| n).sum()
    }

    /// Gives a place back, settled or not.
    pub fn leave(&mut self, held: Held<'a>) {
        let Held { place, ticket, settled, .. } = held;
        let ix = place.ix();
        self.trail.note(self.now, Step::Left { ix, settled });
        drop(place);
        self.model.leave(ix, ticket);
        self.model.upstreams[ix].cancels += u64::from(!settled);
        if !settled && ticket.probe {
            self.seen.count("client left a probe");
        }
    }

    /// Gives back a place that was not used.
    pub fn unused(&mut self, held: Held<'a>) {
        self.model.leave(held.ix(), held.ticket);
        held.place.unused();
    }

    pub fn may_try_again(&mut self) -> bool {
        let may = self.pool.may_try_again(self.now);
        assert_eq!(may, self.model.budget.take(self.now), "whether the budget has one more");
        self.model.budget.check(self.now);
        if !may {
            self.seen.count("no budget");
        }
        may
    }

    pub fn first_try(&mut self) {
        self.pool.budget.deposit();
        self.model.budget.first_try();
    }

    /// A probe of health; whether the next should follow at once.
    pub fn probed(&mut self, ix: usize, good: bool) -> bool {
        self.trail.note(self.now, Step::Probed { ix, good });
        let upstream = &self.pool.upstreams[ix];
        self.pool.lineage.probed(upstream, good, "status".into(), self.now);
        let again = upstream.is_settling();
        let one = &mut self.model.upstreams[ix];
        let Some(probed) = &mut one.probed else { return false };
        if probed.answer(good) {
            one.since = self.now;
            if let Some(scoring) = &mut one.scoring {
                scoring.reset(self.now);
            }
        }
        let probed = one.probed.as_ref().expect("it was there");
        let counts = self.pool.upstreams[ix].transitions.health_counts();
        assert_eq!(counts.iter().map(|(_, _, n)| n).sum::<u64>(), probed.changes);
        assert_eq!(again, probed.is_settling());
        again
    }

    pub fn set_resolved(&mut self, ix: usize, resolved: bool) {
        self.trail.note(self.now, Step::Resolved { ix, resolved });
        self.pool.lineage.set_resolved(&self.pool.upstreams[ix], resolved);
        self.model.upstreams[ix].resolved = resolved;
    }

    /// Compares all that can be seen from outside.
    pub fn compare(&self) {
        for (ix, one) in self.model.upstreams.iter().enumerate() {
            let real = &self.pool.upstreams[ix];
            assert_eq!(real.seat.in_flight() as usize, one.held.len(), "in flight at {ix}");
            assert!(one.limit == 0 || one.held.len() <= one.limit, "{ix} is over its limit");
            assert_eq!(real.breaker.state(), one.breaker.state(), "of {ix}");
            assert_eq!(real.breaker.admits_at(), one.breaker.opens_at(), "of {ix}");
            assert!(one.breaker.probes() <= one.breaker.most_probes(), "probes at {ix}");
            let entered = STATES.map(|state| real.transitions.breaker_count(state));
            assert_eq!(entered, one.breaker.entered, "transitions of {ix}");
            assert_eq!(real.eligible_since.load(Relaxed), one.since.0, "since when {ix} is in");
            self.compare_bit(ix);
            self.compare_latency(ix);
        }
        let (out, most) = self.model.ejected();
        assert!(out <= most, "{out} are out, of at most {most}");
    }

    /// Whom only time lets in may be in as soon as somebody has asked.
    fn compare_bit(&self, ix: usize) {
        let one = &self.model.upstreams[ix];
        if self.pool.is_eligible(ix) {
            assert!(one.may_be_picked(self.asked), "{ix} is in");
        } else {
            let by_time = one.is_well() && one.breaker.opens_at().is_none();
            assert!(!by_time, "{ix} is out");
        }
    }

    fn compare_latency(&self, ix: usize) {
        let real = &self.pool.upstreams[ix];
        match (real.seat.latency.raw(), self.model.upstreams[ix].latency) {
            (None, None) => {}
            (Some(average), Some((low, high))) => {
                assert!((low..=high).contains(&average), "{average} of {low} to {high}");
                let faded = self.pool.latency(real, self.now).unwrap_or(f64::NAN);
                assert!((0.0..=average).contains(&faded), "{faded} of {average}");
            }
            (real, wanted) => panic!("the latency of {ix} is {real:?}, seen was {wanted:?}"),
        }
    }

    /// Takes the upstream at `ix`, which nobody else is asked for; it is there, if the model says
    /// so.
    pub fn take_only(&mut self, ix: usize) -> Result<Held<'a>, Failure> {
        let list: Vec<_> = (0..self.model.upstreams.len()).filter(|&other| other != ix).collect();
        let mut tried = Tried::new();
        for &other in &list {
            tried.insert(other);
        }
        let key = self.rng.u64(..);
        let at = self.now;
        self.take(&Wish { tried: &tried, list: &list, key, worker: 0, only_closed: false, at })
    }

    /// Asks for each one, and gives it back.
    pub fn ask_for_each(&mut self) {
        for ix in 0..self.model.upstreams.len() {
            // A backup has its turn when all others have been tried.
            if let Ok(held) = self.take_only(ix) {
                assert_eq!(held.ix(), ix);
                self.unused(held);
            }
        }
    }

    /// When the next breaker will let somebody in.
    pub fn next_opening(&self) -> Option<Nanos> {
        let open = |phase: &Phase| matches!(phase, Phase::Open { .. });
        let all = self.model.upstreams.iter().filter(|one| open(&one.breaker.phase));
        all.filter_map(|one| one.breaker.opens_at()).min()
    }
}
