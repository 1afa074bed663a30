//! What a run has come to: the last steps, for who has to find out why it failed; and counts,
//! for a run that shows nothing proves nothing.

use std::collections::{BTreeMap, VecDeque};

use l7rp_core::attempts::Next;
use l7rp_core::failure::Failure;
use l7rp_core::names::Nanos;

use super::super::pool::End;
use super::backend::{Ended, Mood};

/// So many of them are printed.
const LAST: usize = 30;

/// Something that was done, with what came of it.
#[derive(Clone, Copy, Debug)]
#[expect(dead_code, reason = "printed")]
pub enum Step {
    Arrived { id: u64 },
    Took { ix: usize, probe: bool },
    Nobody(Failure),
    Hedged { id: u64, ix: usize },
    TryEnded { id: u64, ix: usize, ended: Ended },
    Next { id: u64, next: Next },
    Settled { ix: usize, end: End },
    Left { ix: usize, settled: bool },
    ClientLeft { id: u64 },
    Ejected(usize),
    Probed { ix: usize, good: bool },
    Resolved { ix: usize, resolved: bool },
    Behaves { ix: usize, mood: Mood },
}

/// The last steps; printed if the run fails.
pub struct Trail {
    heading: String,
    steps: VecDeque<(Nanos, Step)>,
}

impl Trail {
    pub fn new(heading: String) -> Self {
        Self { heading, steps: VecDeque::with_capacity(LAST + 1) }
    }

    pub fn note(&mut self, now: Nanos, step: Step) {
        self.steps.push_back((now, step));
        if self.steps.len() > LAST {
            self.steps.pop_front();
        }
    }
}

impl Drop for Trail {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        eprintln!("{}", self.heading);
        for (at, step) in &self.steps {
            eprintln!("{:>14.6} ms  {step:?}", at.0 as f64 / 1e6);
        }
    }
}

/// Counts, by what they count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen(BTreeMap<&'static str, u64>);

impl Seen {
    /// What a run must have shown to have shown anything.
    const ALL: [&'static str; 22] = [
        "backup taken",
        "breaker closed",
        "breaker opened",
        "client left a probe",
        "clock behind",
        "ejected",
        "ejected no more",
        "hedge",
        "hedge won",
        "moved on",
        "no budget",
        "nobody: breaker",
        "nobody: capacity",
        "nobody: unresolved",
        "nobody: none",
        "probe called good",
        "probes lost",
        "request",
        "retry",
        "second round",
        "spare given",
        "warmed up",
    ];

    pub fn count(&mut self, what: &'static str) {
        self.counts(what, 1);
    }

    pub fn counts(&mut self, what: &'static str, n: u64) {
        *self.0.entry(what).or_default() += n;
    }

    pub fn nobody(&mut self, why: Failure) {
        self.count(match why {
            Failure::Capacity(_) => "nobody: capacity",
            Failure::BreakerOpen { .. } => "nobody: breaker",
            Failure::Unresolved => "nobody: unresolved",
            _ => "nobody: none",
        });
    }

    pub fn add(&mut self, other: &Self) {
        for (what, n) in &other.0 {
            *self.0.entry(what).or_default() += n;
        }
    }

    /// What was seen less often than that.
    pub fn rare(&self, least: u64) -> Vec<&'static str> {
        let rare = |what: &&'static str| self.0.get(what).is_none_or(|&n| n < least);
        Self::ALL.into_iter().filter(rare).collect()
    }
}
