//! Upstreams that behave well and badly, each in its own time.

use std::time::Duration;

use l7rp_core::failure::{Failure, Malformed};
use l7rp_core::names::Nanos;

use super::setup::{Setup, between, one_of};

/// How an upstream behaves for a while.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mood {
    Fast,
    Slow,
    /// Answers with this.
    Failing(u16),
    /// Good and bad by turns, this long each.
    Flapping(Duration),
    /// Refuses connections.
    Refusing,
    /// Does not answer to connections.
    Dark,
    /// Takes requests and says nothing.
    Hanging,
    /// Closes instead of an answer.
    Closing,
    /// Says what is no HTTP.
    Talking,
    /// Closes in the middle of the body.
    Truncating,
}

impl Mood {
    pub fn draw(rng: &mut fastrand::Rng) -> Self {
        match rng.u32(..20) {
            0..8 => Self::Fast,
            8..10 => Self::Slow,
            10..12 => Self::Failing(one_of(rng, &[500, 502, 503, 504, 429])),
            12..14 => Self::Flapping(between(rng, 10, 1_000)),
            14 => Self::Refusing,
            15 => Self::Dark,
            16 => Self::Hanging,
            17 => Self::Closing,
            18 => Self::Talking,
            _ => Self::Truncating,
        }
    }

    /// What it comes to at `now`.
    pub fn at(self, now: Nanos) -> Self {
        match self {
            Self::Flapping(each) if (now.0 / each.as_nanos() as u64).is_multiple_of(2) => {
                Self::Fast
            }
            Self::Flapping(_) => Self::Failing(503),
            other => other,
        }
    }

    /// Whether it passes a probe.
    pub fn is_well(self, now: Nanos) -> bool {
        matches!(self.at(now), Self::Fast | Self::Slow | Self::Truncating)
    }
}

/// Why a try gave no response.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    pub failure: Failure,
    /// The connection had served before.
    pub stale: bool,
}

/// How a try ends: with a response of this status, or not.
pub type Ended = Result<u16, Fault>;

/// What will become of a try.
#[derive(Clone, Copy, Debug)]
pub struct Fate {
    pub at: Nanos,
    pub ended: Ended,
}

/// What becomes of a request that is sent at `now`. `fresh`: on a new connection.
pub fn fate(
    rng: &mut fastrand::Rng,
    setup: &Setup,
    mood: Mood,
    now: Nanos,
    deadline: Nanos,
    fresh: bool,
) -> Fate {
    let pool = &setup.pool;
    let fail = |failure| Err(Fault { failure, stale: false });
    let quick = Duration::from_micros(rng.u64(10..3_000));
    let patience = pool.response_header_timeout;
    // One whose client sends the body slowly may take longer than any limit.
    let patient = (pool.connect_timeout + patience) * rng.u32(1..6);
    let upload = if rng.u32(..100) < setup.slow { patient } else { Duration::ZERO };
    let answer = if rng.u32(..50) == 0 { 404 } else { 200 };
    let (takes, ended) = match mood.at(now) {
        _ if !fresh && rng.u32(..30) == 0 => {
            (quick, Err(Fault { failure: Failure::UpstreamClosed, stale: true }))
        }
        _ if rng.u32(..300) == 0 => (quick, fail(Failure::LocalShortage)),
        Mood::Fast | Mood::Truncating | Mood::Flapping(_) => (quick, Ok(answer)),
        Mood::Slow => (patience.mul_f64(rng.f64() * 1.1), Ok(answer)),
        Mood::Failing(status) => (quick, Ok(status)),
        Mood::Refusing => {
            (quick, fail(one_of(rng, &[Failure::ConnectRefused, Failure::ConnectFailed])))
        }
        Mood::Dark => {
            let at = now.plus(pool.connect_timeout);
            let failure =
                if at >= deadline { Failure::TotalTimeout } else { Failure::ConnectTimeout };
            return Fate { at: at.min(deadline), ended: fail(failure) };
        }
        Mood::Hanging => (patience, fail(Failure::ResponseTimeout)),
        Mood::Closing => (quick, fail(Failure::UpstreamClosed)),
        Mood::Talking => (quick, fail(Failure::BadResponse(Malformed::StartLine))),
    };
    let late = takes >= patience;
    let at = now.plus(upload).plus(takes.min(patience));
    if at >= deadline {
        return Fate { at: deadline, ended: fail(Failure::TotalTimeout) };
    }
    Fate { at, ended: if late { fail(Failure::ResponseTimeout) } else { ended } }
}

/// How the way of a response to its client ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Finish {
    Whole,
    Cut(Failure),
}

/// When and how a response that has begun at `now` is over.
pub fn finish(
    rng: &mut fastrand::Rng,
    setup: &Setup,
    mood: Mood,
    now: Nanos,
    deadline: Nanos,
) -> (Nanos, Finish) {
    let (takes, how) = match rng.u32(..40) {
        0 => (between(rng, 1, 10_000), Finish::Cut(Failure::ClientStalled)),
        1 => (setup.pool.response_header_timeout, Finish::Cut(Failure::ResponseStalled)),
        // Events, or a download.
        2..4 => (between(rng, 100, 60_000), Finish::Whole),
        4..8 => (between(rng, 1, 100), Finish::Whole),
        _ if mood.at(now) == Mood::Truncating && rng.bool() => {
            (between(rng, 1, 100), Finish::Cut(Failure::ResponseTruncated))
        }
        _ => (Duration::from_micros(rng.u64(..200)), Finish::Whole),
    };
    let at = now.plus(takes);
    if at >= deadline { (deadline, Finish::Cut(Failure::TotalTimeout)) } else { (at, how) }
}
