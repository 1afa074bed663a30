//! The breaker as its documentation tells it: lists, no words and no bits.

use std::time::Duration;

use l7rp_core::names::Nanos;
use l7rp_core::upstream::breaker::State;

use crate::config::plan;

const MS: u64 = 1_000_000;

#[derive(Debug)]
pub struct Breaker {
    plan: plan::Breaker,
    /// When probes that are out are taken to be lost.
    lost_after: Duration,
    pub phase: Phase,
    /// Every phase has its own.
    number: u64,
    trips: u32,
    /// How often it has become closed, open, half-open.
    pub entered: [u64; 3],
    /// Probes were taken to be lost, so often.
    pub lost: u64,
}

#[derive(Debug)]
pub enum Phase {
    Closed {
        since: Nanos,
        /// When, and whether it was a failure.
        results: Vec<(Nanos, bool)>,
    },
    Open {
        until: Nanos,
    },
    HalfOpen {
        /// Tickets of those that are out.
        out: Vec<u64>,
        good: usize,
        last: Nanos,
        /// When one may have been let in who has gone again at once.
        touched: Nanos,
    },
}

/// The right to a result.
#[derive(Clone, Copy, Debug)]
pub struct Ticket {
    pub id: u64,
    pub probe: bool,
    phase: u64,
}

/// What a result comes to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Told {
    Nothing,
    Closes,
    Opens,
}

impl Breaker {
    pub fn new(pool: &plan::Pool) -> Self {
        Self {
            plan: pool.breaker.clone(),
            lost_after: (pool.connect_timeout + pool.response_header_timeout) * 2,
            phase: Phase::Closed { since: Nanos(0), results: Vec::new() },
            number: 0,
            trips: 0,
            entered: [0; 3],
            lost: 0,
        }
    }

    pub fn state(&self) -> State {
        match self.phase {
            Phase::Closed { .. } => State::Closed,
            Phase::Open { .. } => State::Open,
            Phase::HalfOpen { .. } => State::HalfOpen,
        }
    }

    pub fn probes(&self) -> usize {
        match &self.phase {
            Phase::HalfOpen { out, good, .. } => out.len() + good,
            _ => 0,
        }
    }

    pub fn most_probes(&self) -> usize {
        self.plan.half_open_probes as usize
    }

    /// From when on it lets somebody in; `None`: it does now.
    pub fn opens_at(&self) -> Option<Nanos> {
        match &self.phase {
            Phase::Closed { .. } => None,
            Phase::Open { until } => Some(*until),
            Phase::HalfOpen { last, .. } => {
                (self.probes() >= self.most_probes()).then(|| last.plus(self.lost_after))
            }
        }
    }

    pub fn lets_in(&self, now: Nanos) -> bool {
        self.opens_at().is_none_or(|at| at <= now)
    }

    fn enter(&mut self, phase: Phase) {
        let before = self.state();
        self.phase = phase;
        self.number += 1;
        if self.state() == before {
            self.lost += 1;
        } else {
            self.entered[self.state() as usize] += 1;
        }
    }

    /// Lets one in that is let in.
    pub fn admit(&mut self, id: u64, now: Nanos) -> Ticket {
        assert!(self.lets_in(now), "let in by a breaker that lets nobody in");
        self.touch(now);
        if let Phase::HalfOpen { out, last, .. } = &mut self.phase {
            out.push(id);
            *last = now.max(*last);
        }
        let probe = self.state() == State::HalfOpen;
        Ticket { id, probe, phase: self.number }
    }

    /// Becomes half-open, if its time has come, and nobody is in.
    pub fn touch(&mut self, now: Nanos) {
        if self.opens_at().is_some() {
            self.enter(Phase::HalfOpen { out: Vec::new(), good: 0, last: now, touched: now });
        } else if let Phase::HalfOpen { touched, .. } = &mut self.phase {
            *touched = now.max(*touched);
        }
    }

    /// Takes over until when the probes are waited for, if that can be: one that was let in and
    /// gave its place back counts as the last, if the clock of the one after it was behind.
    pub fn follow(&mut self, real: Option<Nanos>) {
        if let (Some(wanted), Some(real)) = (self.opens_at(), real)
            && let Phase::HalfOpen { last, touched, .. } = &mut self.phase
        {
            let latest = touched.plus(self.lost_after);
            assert!(real == wanted || wanted < real && real <= latest, "not {wanted:?}: {real:?}");
            *last = Nanos(last.0 + (real.0 - wanted.0));
        }
    }

    /// Takes a result in. After [`Told::Opens`], [`Breaker::open`] must be called.
    pub fn judge(&mut self, ticket: Ticket, failed: bool, now: Nanos) -> Told {
        if ticket.phase != self.number {
            return Told::Nothing;
        }
        let probes = self.most_probes();
        match &mut self.phase {
            Phase::Open { .. } => unreachable!("nobody is let in while it is open"),
            Phase::HalfOpen { out, good, .. } => {
                out.retain(|&id| id != ticket.id);
                if failed {
                    self.trips += 1;
                    return Told::Opens;
                }
                *good += 1;
                if *good < probes {
                    return Told::Nothing;
                }
                self.enter(Phase::Closed { since: now, results: Vec::new() });
                Told::Closes
            }
            Phase::Closed { since, results } => {
                let soon = now.since(*since) < self.plan.window;
                results.push((now, failed));
                if !failed || !self.is_too_much(now) {
                    return Told::Nothing;
                }
                self.trips = if soon { self.trips + 1 } else { 1 };
                Told::Opens
            }
        }
    }

    fn is_too_much(&self, now: Nanos) -> bool {
        let Phase::Closed { results, .. } = &self.phase else { return false };
        let latest = results.iter().rev();
        if self.plan.consecutive_failures > 0 {
            let in_a_row = latest.take_while(|(_, failed)| *failed).count();
            return in_a_row >= self.plan.consecutive_failures as usize;
        }
        // Ages are told in whole milliseconds.
        let counts: Vec<_> = latest
            .take(self.plan.window_size as usize)
            .filter(|(at, _)| u128::from(now.0 / MS - at.0 / MS) <= self.plan.window.as_millis())
            .collect();
        let bad = counts.iter().filter(|(_, failed)| *failed).count();
        counts.len() >= self.plan.min_observations as usize
            && bad as f64 / counts.len() as f64 > self.plan.failure_ratio
    }

    /// Stays open until `until`, which was drawn, if that can be.
    pub fn open(&mut self, now: Nanos, until: Nanos) {
        let plan::Breaker { open_min, open_max, .. } = self.plan;
        // Beyond 31 trips are not told apart, and each doubles.
        let base = (1..self.trips.min(31)).fold(open_min, |time, _| time.saturating_mul(2));
        let [low, high] = [0.8, 1.2]
            .map(|by| base.as_secs_f64() * by)
            .map(|wanted| wanted.max(open_min.as_secs_f64()).min(open_max.as_secs_f64()));
        let open_for = until.since(now).as_secs_f64();
        assert!(
            low - 1e-8 <= open_for && open_for <= high + 1e-3 + 1e-8,
            "open for {open_for} s, not {low} to {high}, after {} trips",
            self.trips
        );
        assert_eq!(until.0 % MS, 0, "the end is told in whole milliseconds");
        self.enter(Phase::Open { until });
    }

    /// One that was let in says nothing.
    pub fn give_back(&mut self, ticket: Ticket) {
        if let Phase::HalfOpen { out, .. } = &mut self.phase
            && ticket.phase == self.number
        {
            out.retain(|&id| id != ticket.id);
        }
    }
}
