//! What one thread counts; added up at the end. Its size does not depend on the length of a run.

use std::time::Duration;

use hdrhistogram::{CreationError, Histogram};
use l7rp_core::names::Nanos;

/// The longest latency that is told apart from a longer one.
const LONGEST: Duration = Duration::from_hours(1);
/// Significant digits of a latency.
const DIGITS: u8 = 3;
/// Statuses are below.
const STATUSES: usize = 1000;

/// Why a request has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// There was no connection.
    Connect,
    /// There was one, but TLS could not be spoken on it.
    Tls,
    /// The answer was not complete in time.
    Timeout,
    /// The connection, or the stream, was closed or reset before the answer was complete.
    Reset,
    /// The answer was not HTTP as it should be.
    Protocol,
}

impl Kind {
    /// All kinds, by number.
    pub const ALL: [Self; 5] =
        [Self::Connect, Self::Tls, Self::Timeout, Self::Reset, Self::Protocol];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Tls => "tls",
            Self::Timeout => "timeout",
            Self::Reset => "reset",
            Self::Protocol => "protocol",
        }
    }
}

/// Why a request has failed, and in which words.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) kind: Kind,
    pub(super) words: String,
}

impl Failure {
    pub(super) fn new(kind: Kind, words: impl Into<String>) -> Self {
        Self { kind, words: words.into() }
    }
}

/// The counts.
#[derive(Clone, Debug)]
pub(super) struct Tally {
    /// Nanoseconds of each answer that counts.
    pub(super) latency: Histogram<u64>,
    /// Answers by status.
    pub(super) statuses: Vec<u64>,
    /// Failed requests by kind, and what the first of each was like.
    pub(super) errors: [u64; Kind::ALL.len()],
    pub(super) examples: [Option<String>; Kind::ALL.len()],
    /// Answers within the time that the rate is taken of.
    pub(super) measured: u64,
    /// When the last request that counts was answered.
    pub(super) last: Nanos,
    pub(super) warm_up: u64,
    pub(super) opened: u64,
    pub(super) reconnects: u64,
    /// Octets on the wire, without those of TLS.
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) never_started: u64,
    /// Requests in flight that were given up when the run was ended by force.
    pub(super) cut: u64,
}

impl Tally {
    pub(super) fn new() -> Result<Self, CreationError> {
        Ok(Self {
            latency: Histogram::new_with_bounds(1, LONGEST.as_nanos() as u64, DIGITS)?,
            statuses: vec![0; STATUSES],
            errors: [0; Kind::ALL.len()],
            examples: [const { None }; Kind::ALL.len()],
            measured: 0,
            last: Nanos(0),
            warm_up: 0,
            opened: 0,
            reconnects: 0,
            sent: 0,
            received: 0,
            never_started: 0,
            cut: 0,
        })
    }

    pub(super) fn answered(&mut self, status: u16, latency: Duration) {
        self.latency.saturating_record(latency.as_nanos() as u64);
        if let Some(count) = self.statuses.get_mut(usize::from(status)) {
            *count += 1;
        }
    }

    pub(super) fn failed(&mut self, failure: Failure) {
        let kind = failure.kind as usize;
        self.errors[kind] += 1;
        self.examples[kind].get_or_insert(failure.words);
    }

    pub(super) fn answers(&self) -> u64 {
        self.latency.len()
    }

    /// Adds another thread's.
    pub(super) fn add(&mut self, other: &Self) {
        // All have the same bounds.
        let _ = self.latency.add(&other.latency);
        for (one, more) in self.statuses.iter_mut().zip(&other.statuses) {
            *one += more;
        }
        for kind in Kind::ALL {
            self.errors[kind as usize] += other.errors[kind as usize];
            let example = &mut self.examples[kind as usize];
            *example = example.take().or_else(|| other.examples[kind as usize].clone());
        }
        self.measured += other.measured;
        self.last = self.last.max(other.last);
        self.warm_up += other.warm_up;
        self.opened += other.opened;
        self.reconnects += other.reconnects;
        self.sent += other.sent;
        self.received += other.received;
        self.never_started += other.never_started;
        self.cut += other.cut;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_their_numbers() {
        for (number, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, number);
        }
    }

    #[test]
    fn threads_are_added_up() {
        let mut one = Tally::new().unwrap();
        let mut other = one.clone();
        one.answered(200, Duration::from_micros(100));
        other.answered(200, Duration::from_micros(300));
        other.answered(503, Duration::from_hours(9));
        other.failed(Failure::new(Kind::Reset, "first"));
        other.failed(Failure::new(Kind::Reset, "second"));
        (one.last, other.last) = (Nanos(4), Nanos(3));
        one.add(&other);
        assert_eq!((one.answers(), one.statuses[200], one.statuses[503]), (3, 2, 1));
        assert_eq!((one.errors[Kind::Reset as usize], one.last), (2, Nanos(4)));
        assert_eq!(one.examples[Kind::Reset as usize].as_deref(), Some("first"));
        // A latency beyond all bounds is the longest there is, and nothing is lost.
        assert!(one.latency.max() >= LONGEST.as_nanos() as u64);
    }
}
