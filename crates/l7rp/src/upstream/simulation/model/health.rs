//! Probes and scores of one upstream: what was seen, in a row.

use std::time::Duration;

use l7rp_core::names::Nanos;

use crate::config::plan;

#[derive(Debug)]
pub struct Probed {
    good_for_in: usize,
    bad_for_out: usize,
    /// Since the beginning, or since it was ejected.
    answers: Vec<bool>,
    /// `None`: not judged yet.
    judged: Option<bool>,
    ever_bad: bool,
    /// Scoring has taken it out.
    pub ejected: bool,
    /// Judgements that were told.
    pub changes: u64,
}

impl Probed {
    pub fn new(plan: &plan::ActiveHealth) -> Self {
        Self {
            good_for_in: plan.healthy_threshold as usize,
            bad_for_out: plan.unhealthy_threshold as usize,
            answers: Vec::new(),
            judged: None,
            ever_bad: false,
            ejected: false,
            changes: 0,
        }
    }

    pub fn is_in(&self) -> bool {
        self.judged == Some(true)
    }

    /// Whether it should be asked again at once.
    pub fn is_settling(&self) -> bool {
        self.judged.is_none() && !self.ever_bad
    }

    /// Takes an answer in; whether the upstream comes in with it.
    pub fn answer(&mut self, good: bool) -> bool {
        self.answers.push(good);
        self.ever_bad |= !good;
        let enough = if good { self.good_for_in } else { self.bad_for_out };
        let in_a_row = self.answers.iter().rev().take_while(|&&answer| answer == good).count();
        if in_a_row < enough || self.judged == Some(good) {
            return false;
        }
        // A new one that is bad stays out: no change.
        self.changes += u64::from(self.judged == Some(true) || good);
        self.judged = Some(good);
        if good {
            self.ejected = false;
        }
        good
    }

    pub fn eject(&mut self) {
        self.judged = Some(false);
        self.answers.clear();
        self.ejected = true;
        self.changes += 1;
    }
}

/// Whether an upstream is worse than allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Worse {
    No,
    /// Too close to the limit for two ways to reckon.
    Unsure,
    Yes,
}

#[derive(Debug)]
pub struct Scoring {
    errors: Share,
    slow: Share,
    slow_after: Duration,
    half_life: f64,
}

impl Scoring {
    pub fn new(plan: &plan::PassiveHealth) -> Self {
        Self {
            errors: Share::new(plan.error_threshold),
            slow: Share::new(0.01),
            slow_after: plan.latency_threshold_p99,
            half_life: plan.half_life.as_secs_f64(),
        }
    }

    pub fn answered(&mut self, failed: bool, latency: Option<Duration>, now: Nanos) -> Worse {
        let errors = self.errors.take_in(failed, now, self.half_life);
        let slow = match latency {
            Some(latency) if !self.slow_after.is_zero() => {
                self.slow.take_in(latency > self.slow_after, now, self.half_life)
            }
            _ => Worse::No,
        };
        errors.max(slow)
    }

    pub fn reset(&mut self, now: Nanos) {
        for share in [&mut self.errors, &mut self.slow] {
            (share.value, share.at) = (0.0, now.max(share.at));
        }
    }
}

#[derive(Debug)]
struct Share {
    threshold: f64,
    value: f64,
    at: Nanos,
}

impl Share {
    fn new(threshold: f64) -> Self {
        Self { threshold, value: 0.0, at: Nanos(0) }
    }

    fn take_in(&mut self, bad: bool, now: Nanos, half_life: f64) -> Worse {
        // For short times the real one takes x for 1 − exp(−x).
        const BLUR: f64 = 4e-4;
        let weight = 1.0 - (-now.since(self.at).as_secs_f64() / half_life).exp();
        self.at = now.max(self.at);
        let aim = if bad { 1.0 } else { 0.0 };
        self.value += weight.min(self.threshold / 10.0).min(0.1) * (aim - self.value);
        if !bad || self.value < self.threshold - BLUR {
            Worse::No
        } else if self.value > self.threshold + BLUR {
            Worse::Yes
        } else {
            Worse::Unsure
        }
    }
}
