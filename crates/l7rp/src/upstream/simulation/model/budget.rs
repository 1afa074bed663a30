//! The budget in plain arithmetic: a bucket that time fills, and another that first tries fill.

use l7rp_core::names::Nanos;

use crate::config::plan;

const SECOND: u64 = 1_000_000_000;
const MILLION: u64 = 1_000_000;

#[derive(Debug)]
pub struct Budget {
    ratio: f64,
    per_second: u64,
    began: Nanos,
    at: Nanos,
    /// Time that has not been spent on tokens yet, in ns; at most a second's tokens.
    time: u64,
    /// Millionths of a token.
    earned: u64,
    first: u64,
    extra: u64,
}

impl Budget {
    pub fn new(plan: &plan::RetryBudget, began: Nanos) -> Self {
        let per_second = u64::from(plan.min_per_second);
        let mut new = Self {
            ratio: plan.ratio,
            per_second,
            began,
            at: began,
            time: 0,
            earned: 0,
            first: 0,
            extra: 0,
        };
        new.time = new.most_time();
        new
    }

    /// What one token takes.
    fn each(&self) -> u64 {
        SECOND.div_ceil(self.per_second.max(1))
    }

    fn most_time(&self) -> u64 {
        self.each() * self.per_second
    }

    pub fn first_try(&mut self) {
        self.first += 1;
        let share = (self.ratio * MILLION as f64).round() as u64;
        self.earned = (self.earned + share).min(100 * MILLION);
    }

    /// Whether there is one more try in it, which is taken.
    pub fn take(&mut self, now: Nanos) -> bool {
        let passed = now.0.saturating_sub(self.at.0);
        self.time = (self.time + passed).min(self.most_time());
        self.at = now.max(self.at);
        let taken = if self.per_second > 0 && self.time >= self.each() {
            self.time -= self.each();
            true
        } else if self.earned >= MILLION {
            self.earned -= MILLION;
            true
        } else {
            false
        };
        self.extra += u64::from(taken);
        taken
    }

    /// What is promised about all tries so far.
    pub fn check(&self, now: Nanos) {
        let rate = self.per_second as f64;
        let seconds = now.since(self.began).as_secs_f64();
        let most = self.ratio * self.first as f64 + rate * seconds + 100.0 + rate;
        assert!(
            self.extra as f64 <= most + 1e-6,
            "{} extra tries after {} first ones in {seconds} s",
            self.extra,
            self.first
        );
    }
}
