//! The queue of what is to happen, and the clock, which jumps from one event to the next.

use std::collections::BTreeMap;
use std::time::Duration;

use l7rp_core::attempts::{self, Plan};
use l7rp_core::names::Nanos;
use l7rp_core::pick::{Tried, key_of};
use l7rp_core::upstream::breaker::State;
use l7rp_core::window::Percentile;

use super::super::pool::{End, Pool};
use super::backend::{Ended, Finish, Mood};
use super::both::Both;
use super::requests::{Counts, Kind, Request};
use super::seen::{Seen, Step, Trail};
use super::setup::{Setup, between, one_of};

/// Something that will happen.
#[derive(Clone, Copy, Debug)]
pub enum Due {
    Arrive,
    Begin {
        id: u64,
    },
    Hedge {
        id: u64,
        token: u64,
    },
    Ends {
        id: u64,
        token: u64,
        ended: Ended,
    },
    Good {
        id: u64,
        token: u64,
    },
    Over {
        id: u64,
        token: u64,
        finish: Finish,
    },
    Leaves {
        id: u64,
    },
    Probe {
        ix: usize,
    },
    Behave {
        ix: usize,
    },
    Resolve {
        ix: usize,
    },
    Pace,
    /// Somebody looks whether the pool is ready.
    Look,
}

pub struct World<'a> {
    // First, so that the last steps are printed before anything else is dropped.
    pub both: Both<'a>,
    pub setup: &'a Setup,
    pub requests: BTreeMap<u64, Request<'a>>,
    pub moods: Vec<Mood>,
    pub draining: bool,
    queue: BTreeMap<(Nanos, u64), Due>,
    /// Numbers of events, requests and tries.
    serial: u64,
    latency: Percentile,
    gap: Duration,
    /// How far a worker that has been kept waiting is behind.
    behind: Duration,
}

impl<'a> World<'a> {
    pub fn new(setup: &'a Setup, pool: &'a Pool, mut rng: fastrand::Rng, trail: Trail) -> Self {
        // Points in time are never 0: to some it means "never".
        let began = Nanos(rng.u64(1..2_000_000_000_000));
        let count = setup.pool.upstreams.len();
        let mut world = Self {
            both: Both::new(pool, rng, began, trail),
            setup,
            requests: BTreeMap::new(),
            moods: vec![Mood::Fast; count],
            draining: false,
            queue: BTreeMap::new(),
            serial: 0,
            latency: Percentile::default(),
            gap: setup.gap,
            behind: Duration::ZERO,
        };
        for ix in 0..count {
            if setup.pool.active.is_some() {
                world.later(1, 100, Due::Probe { ix });
            }
            if pool.upstreams[ix].is_named() {
                world.later(1, 100, Due::Resolve { ix });
            }
            world.later(100, 5_000, Due::Behave { ix });
        }
        world.later(1, 50, Due::Arrive);
        world.later(1, 1_000, Due::Look);
        world.later(500, 5_000, Due::Pace);
        world
    }

    pub fn after(&mut self, at: Nanos, due: Due) {
        let serial = self.token();
        self.queue.insert((at.max(self.both.now), serial), due);
    }

    fn later(&mut self, low: u64, high: u64, due: Due) {
        let time = between(&mut self.both.rng, low, high);
        self.after(self.both.now.plus(time), due);
    }

    pub fn token(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// What a worker takes the time to be: it may have read the clock some time ago.
    pub fn worker_time(&mut self) -> Nanos {
        let behind = std::mem::take(&mut self.behind);
        Nanos(self.both.now.0.saturating_sub(behind.as_nanos() as u64))
    }

    pub fn percentile(&self) -> Option<Duration> {
        let of = self.setup.rules.as_ref()?.hedge_after_percentile;
        (of > 0.0).then(|| self.latency.read(of)).flatten()
    }

    pub fn learn(&self, took: Duration) {
        self.latency.observe(took, self.both.now);
    }

    /// The next event.
    pub fn step(&mut self) {
        let ((at, _), due) = self.queue.pop_first().expect("requests go on arriving");
        self.both.now = at;
        match due {
            Due::Arrive => {
                let gap = self.gap.mul_f64(2.0 * self.both.rng.f64());
                self.after(at.plus(gap), Due::Arrive);
                self.arrive();
            }
            Due::Begin { id } => {
                if let Some(r) = self.requests.remove(&id) {
                    self.begin(r);
                }
            }
            Due::Hedge { id, token } => self.hedge(id, token),
            Due::Ends { id, token, ended } => self.try_ends(id, token, ended),
            Due::Good { id, token } => self.is_good(id, token),
            Due::Over { id, token, finish } => self.is_over_at_last(id, token, finish),
            Due::Leaves { id } => self.client_leaves(id),
            Due::Probe { ix } => self.probe(ix),
            Due::Behave { ix } => self.behave(ix),
            Due::Resolve { ix } => self.resolve(ix),
            Due::Pace => self.pace(),
            Due::Look => self.look(),
        }
        self.both.compare();
    }

    fn arrive(&mut self) {
        let rules: Option<&'a attempts::Rules> = self.setup.rules.as_ref();
        let id = self.token();
        let now = self.both.now;
        let rng = &mut self.both.rng;
        let get = rng.u32(..4) > 0;
        let upgrade = rng.u32(..40) == 0;
        let request = attempts::Request {
            grpc: false,
            method: if get { b"GET" } else { b"POST" },
            idempotent: get,
            whole: !upgrade && rng.u32(..10) > 0,
        };
        let deadline = self.setup.total.map_or(Nanos::NEVER, |total| now.plus(total));
        let r = Request {
            id,
            plan: Plan::new(rules, request, deadline),
            key: key_of(&[rng.u8(..20)]),
            worker: rng.usize(..self.setup.workers),
            kind: Kind { get, replayable: rng.u32(..8) > 0, upgrade },
            tried: Tried::new(),
            list: Vec::new(),
            again: false,
            last: None,
            spare: None,
            first: None,
            second: None,
            flowing: None,
            counts: Counts::default(),
        };
        let leaves = rng.u32(..100) < self.setup.leaving;
        self.both.trail.note(now, Step::Arrived { id });
        self.both.seen.count("request");
        if r.plan.may_cost() {
            self.both.first_try();
        }
        if leaves {
            self.later(1, 2_000, Due::Leaves { id });
        }
        self.begin(r);
    }

    fn probe(&mut self, ix: usize) {
        let Some(active) = &self.setup.pool.active else { return };
        let good = self.moods[ix].is_well(self.both.now) == (self.both.rng.u32(..30) > 0);
        let pause = if self.both.probed(ix, good) {
            Duration::from_millis(1)
        } else {
            active.interval.mul_f64(0.95 + self.both.rng.f64() / 10.0)
        };
        self.after(self.both.now.plus(pause), Due::Probe { ix });
    }

    fn behave(&mut self, ix: usize) {
        let mood = Mood::draw(&mut self.both.rng);
        let pause = self.setup.moods.mul_f64(2.0 * self.both.rng.f64());
        self.after(self.both.now.plus(pause), Due::Behave { ix });
        self.both.trail.note(self.both.now, Step::Behaves { ix, mood });
        self.moods[ix] = mood;
        // And so for all of them.
        if self.both.rng.u32(..20) == 0 {
            self.moods.fill(mood);
        }
    }

    fn resolve(&mut self, ix: usize) {
        let resolved = !self.both.model.upstreams[ix].resolved || self.both.rng.bool();
        self.both.set_resolved(ix, resolved);
        let longest = if resolved { 20_000 } else { 1_000 };
        self.later(10, longest, Due::Resolve { ix });
    }

    fn pace(&mut self) {
        self.gap = self.setup.gap.mul_f64(self.both.rng.f64() * 2.0);
        // It does not end in truth, but then there would be nothing more to see.
        self.draining = self.both.rng.u32(..10) == 0;
        let rng = &mut self.both.rng;
        match rng.u32(..10) {
            // What they share fails, in a way that retries make worse.
            0 | 1 => self.moods.fill(Mood::Failing(one_of(rng, &[429, 500, 503]))),
            // Nobody asks for a while: the next arrival is put off.
            2 => self.gap = between(rng, 1_000, 30_000),
            _ => {}
        }
        self.later(100, 10_000, Due::Pace);
    }

    /// Looks when a breaker's time has come, and often a worker that has read the clock before
    /// comes after that.
    fn look(&mut self) {
        self.both.has_eligible();
        match self.both.rng.u32(..4) {
            0 => self.both.ask_for_each(),
            1 | 2 => {
                self.behind = Duration::from_micros(self.both.rng.u64(..2_000));
                self.arrive();
            }
            _ => {}
        }
        let soon = Duration::from_micros(self.both.rng.u64(..500));
        match self.both.next_opening() {
            Some(at) if at > self.both.now => self.after(at.plus(soon), Due::Look),
            _ => self.later(10, 1_000, Due::Look),
        }
    }

    /// Ends the run: all is given back, everybody is well again, and all must be as it was.
    pub fn finish(mut self) -> Seen {
        while let Some((_, r)) = self.requests.pop_first() {
            self.drop_all(r);
        }
        self.both.compare();
        for ix in 0..self.moods.len() {
            assert_eq!(self.both.pool.upstreams[ix].seat.in_flight(), 0, "at {ix}");
            self.both.set_resolved(ix, true);
            while self.both.model.upstreams[ix].probed.as_ref().is_some_and(|p| !p.is_in()) {
                self.both.probed(ix, true);
            }
        }
        self.both.now = self.both.now.plus(Duration::from_hours(1));
        for ix in 0..self.moods.len() {
            self.recovers(ix);
        }
        self.both.compare();
        self.check_counts();
        let lost = self.both.model.upstreams.iter().map(|one| one.breaker.lost).sum();
        self.both.seen.counts("probes lost", lost);
        self.both.seen
    }

    /// The upstream at `ix` can be tested, closes, and can be filled to its limit.
    fn recovers(&mut self, ix: usize) {
        for _ in 0..self.setup.pool.breaker.half_open_probes {
            let mut held = self.both.take_only(ix).expect("its time has come");
            self.both.settle(&mut held, End::Answered(200.into()));
            self.both.leave(held);
        }
        assert_eq!(self.both.pool.upstreams[ix].breaker.state(), State::Closed);
        let limit = self.both.model.upstreams[ix].limit;
        let most = if limit == 0 { 10 } else { limit };
        let places: Vec<_> = (0..most).map(|_| self.both.take_only(ix).expect("a place")).collect();
        assert!(limit == 0 || self.both.take_only(ix).is_err());
        for held in places {
            self.both.leave(held);
        }
    }

    fn check_counts(&self) {
        for (one, real) in self.both.model.upstreams.iter().zip(&self.both.pool.upstreams) {
            let mut answers = 0;
            real.stats.iter().for_each(|shard| shard.status.each(|_, n| answers += n));
            assert_eq!(answers, one.answers);
            assert_eq!(real.stats.iter().map(|s| s.errors.get()).sum::<u64>(), one.errors);
            assert_eq!(real.stats.iter().map(|s| s.cancels.get()).sum::<u64>(), one.cancels);
        }
    }
}
