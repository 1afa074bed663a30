//! The circuit breaker: whether an upstream that has failed is left alone for a while.
//!
//! ```text
//!            too many failures             the open time is over
//!   closed ─────────────────────▶ open ─────────────────────────▶ half-open
//!     ▲                            ▲                               │     │
//!     │                            └───────── one fails ───────────┘     │
//!     └────────────────── as many probes succeed ────────────────────────┘
//! ```
//!
//! What must change together is one word, and every change is one compare-and-exchange on it.
//! Each transition begins a new generation. A permit knows the generation that it was given
//! in, and its result counts in no other: who was let in before the breaker opened can neither
//! close it nor keep it open.
//!
//! An operator can force it open or closed: then neither results nor time change anything until
//! it is left to itself again, when it begins anew.

mod ring;
mod word;

use std::time::Duration;

use crate::names::Nanos;
use crate::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use ring::Ring;
use word::Word;

/// When a breaker opens, for how long, and what closes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// What opens it.
    pub trip: Trip,
    /// How old a result may be to count for [`Trip::Ratio`]; and how long it must stay closed
    /// for the next open time to be a first one again.
    pub window: Duration,
    /// How many results [`Trip::Ratio`] looks at: the last ones. 0 is taken as 1.
    pub window_size: u32,
    /// The first open time; it doubles with each trip that follows soon.
    pub open_min: Duration,
    /// The longest open time, a year at most. It wins over a greater `open_min`.
    pub open_max: Duration,
    /// Requests let in while half-open, all of which must succeed. From 1 to 4095.
    pub half_open_probes: u32,
    /// When all probes are out for longer than this they are taken to be lost, and others are
    /// let in. Longer than any request: it is there for the case that somebody forgets one.
    pub probe_timeout: Duration,
}

/// What opens a closed breaker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Trip {
    /// A failure after which failures / observations > `above`.
    Ratio {
        /// Strictly above: at 0.5 half of the results may be failures, at 1.0 it never opens.
        above: f64,
        /// With fewer results in the window it stays closed; with more than the window holds,
        /// always.
        min_observations: u32,
    },
    /// So many failures without a success between them. 0 is taken as 1.
    Consecutive(u32),
}

/// What a breaker does with requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Lets all in.
    Closed,
    /// Lets none in.
    Open,
    /// Lets a few in, to see how they end.
    HalfOpen,
}

/// Who decides what a breaker does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Results and time.
    #[default]
    Auto,
    /// It is forced open: nobody is let in.
    Open,
    /// It is forced closed: everybody is let in, and no result changes anything.
    Closed,
}

/// How a request ended, as far as its upstream is to blame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The upstream did its part.
    Success,
    /// The upstream failed.
    Failure,
}

/// A transition, for the log and the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// What it was.
    pub from: State,
    /// What it is now.
    pub to: State,
    /// How long it stays open, if it has opened.
    pub open_for: Option<Duration>,
}

/// A request was let in.
#[derive(Debug)]
#[must_use = "dropped, it gives its probe slot back"]
pub struct Admission<'a> {
    /// Owes the breaker the result.
    pub permit: Permit<'a>,
    /// Letting it in made the breaker half-open.
    pub change: Option<Change>,
}

/// The right to use the upstream for one request.
///
/// Dropped without [`Permit::settle`], as when a client has left, it says nothing about the
/// upstream and gives its probe slot back, if it had one.
#[derive(Debug)]
#[must_use = "dropped, it gives its probe slot back"]
pub struct Permit<'a> {
    breaker: &'a Breaker,
    generation: u32,
    probe: bool,
    /// A probe whose place was given back early.
    off: bool,
}

/// One upstream's circuit breaker, shared by all workers without a lock.
#[derive(Debug)]
pub struct Breaker {
    word: AtomicU64,
    /// The last time that a probe was let in or the breaker opened, ns.
    stirred: AtomicU64,
    /// When it was closed, ns.
    closed_since: AtomicU64,
    counting: Counting,
    probes: u32,
    window: Duration,
    open_min: Duration,
    open_max: Duration,
    /// In ns.
    probe_timeout: AtomicU64,
}

#[derive(Debug)]
enum Counting {
    Ratio(Ring),
    Consecutive(u64),
}

/// Half of what [`Word::end`] can tell apart: it stays unmistakable when threads disagree about
/// the time.
const LONGEST_OPEN: Duration = Duration::from_hours(365 * 24);

impl Breaker {
    /// A closed breaker that has seen nothing.
    #[must_use]
    pub fn new(rules: &Rules) -> Self {
        let counting = match rules.trip {
            Trip::Ratio { above, min_observations } => {
                Counting::Ratio(Ring::new(above, min_observations, rules.window_size, rules.window))
            }
            Trip::Consecutive(failures) => Counting::Consecutive(u64::from(failures.max(1))),
        };
        Self {
            word: AtomicU64::new(Word::NEW.bits()),
            stirred: AtomicU64::new(0),
            closed_since: AtomicU64::new(0),
            counting,
            probes: rules.half_open_probes.clamp(1, word::MAX_PROBES),
            window: rules.window,
            open_min: rules.open_min,
            open_max: rules.open_max.min(LONGEST_OPEN),
            probe_timeout: AtomicU64::new(rules.probe_timeout.as_nanos() as u64),
        }
    }

    /// A breaker under other rules that takes over from `old`, as a reload wants it: forced stays
    /// forced; open stays
    /// open to the same end, unless `rules` allow no open time of that length; half-open is
    /// tested anew by the next request; how often it has opened is kept, and so are failures in
    /// a row. Results counted for a ratio are not: they were counted by other rules.
    #[must_use]
    pub fn taking_over(rules: &Rules, old: &Self, now: Nanos) -> Self {
        let new = Self::new(rules);
        new.adopt(old, now);
        new
    }

    /// Takes over from `old` what [`Breaker::taking_over`] does, once more; before anybody was let
    /// in here.
    pub fn adopt(&self, old: &Self, now: Nanos) {
        let was = old.load();
        let end = match was.state() {
            _ if was.mode() != Mode::Auto => None,
            State::Closed => None,
            State::Open => Some(old.wait_until(was).min(now.plus(self.open_max))),
            State::HalfOpen => Some(now),
        };
        let word = end.map_or(was, |end| was.opened(was.trips(), millis(end)));
        self.stirred.store(now.0, Relaxed);
        self.closed_since.store(old.closed_since.load(Relaxed), Relaxed);
        self.word.store(word.bits(), Release);
    }

    /// Changes after what time a probe is taken to be lost.
    pub fn set_probe_timeout(&self, timeout: Duration) {
        self.probe_timeout.store(timeout.as_nanos() as u64, Relaxed);
    }

    /// Forces it, or leaves it to itself again: then it is closed and has seen nothing. What was
    /// let in before changes nothing any more. The mode before, and the transition if that is one.
    pub fn set_mode(&self, mode: Mode, now: Nanos) -> (Mode, Option<Change>) {
        let mut word = self.load();
        loop {
            if mode != Mode::Auto && word.mode() == mode {
                return (mode, None);
            }
            self.closed_since.fetch_max(now.0, Relaxed);
            let next = word.set_to(mode);
            match self.exchange(word, next) {
                Ok(()) => return (word.mode(), change(word, next, None)),
                Err(seen) => word = seen,
            }
        }
    }

    /// What opens it.
    #[must_use]
    pub fn trip(&self) -> Trip {
        match &self.counting {
            Counting::Ratio(ring) => ring.trip(),
            Counting::Consecutive(failures) => Trip::Consecutive(*failures as u32),
        }
    }

    /// Who decides what it does.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.load().mode()
    }

    /// Lets a request in, or does not. While it is half-open, no more than the configured
    /// number of probes are out or have succeeded at any time, and nobody is refused while
    /// one of these places is free.
    pub fn admit(&self, now: Nanos) -> Option<Admission<'_>> {
        let mut word = self.load();
        loop {
            let next = self.admitted(word, now)?;
            if next == word {
                return Some(self.admission(word, false, None));
            }
            // Before the exchange, not after it: a thread that is late with this can then only
            // make others wait longer for probes that are lost, never find too early that they
            // are.
            self.stirred.fetch_max(now.0, Relaxed);
            match self.exchange(word, next) {
                Ok(()) => return Some(self.admission(next, true, change(word, next, None))),
                Err(seen) => word = seen,
            }
        }
    }

    /// The state. Open stays open until somebody is let in, however long ago its time ended.
    #[must_use]
    pub fn state(&self) -> State {
        self.load().state()
    }

    /// What [`Breaker::admit`] would say, without doing it.
    #[must_use]
    pub fn admits(&self, now: Nanos) -> bool {
        self.admitted(self.load(), now).is_some()
    }

    /// From when on it admits if nothing but time passes: at the end of the open time, or when
    /// all probes are out and will be taken to be lost. `None`: it admits now. Forced open, it
    /// never does.
    #[must_use]
    pub fn admits_at(&self) -> Option<Nanos> {
        let word = self.load();
        (!self.has_place(word)).then(|| self.wait_until(word))
    }

    /// The word after one more request has been let in, the same if that leaves no trace.
    /// `None`: it must not be let in.
    fn admitted(&self, word: Word, now: Nanos) -> Option<Word> {
        if word.state() == State::Closed {
            return Some(word);
        }
        if self.has_place(word) {
            return Some(word.probe_admitted());
        }
        (now >= self.wait_until(word)).then(|| word.half_opened())
    }

    fn has_place(&self, word: Word) -> bool {
        match word.state() {
            State::Closed => true,
            State::Open => false,
            State::HalfOpen => word.admitted() < self.probes,
        }
    }

    /// When a breaker that has no place will have one.
    fn wait_until(&self, word: Word) -> Nanos {
        let stirred = Nanos(self.stirred.load(Relaxed));
        match word.state() {
            State::Open if word.mode() == Mode::Open => Nanos::NEVER,
            State::Open => Nanos(word.end(millis(stirred)).saturating_mul(1_000_000)),
            State::Closed | State::HalfOpen => {
                stirred.plus(Duration::from_nanos(self.probe_timeout.load(Relaxed)))
            }
        }
    }

    fn admission(&self, word: Word, probe: bool, change: Option<Change>) -> Admission<'_> {
        let permit = Permit { breaker: self, generation: word.generation(), probe, off: false };
        Admission { permit, change }
    }

    /// The word after a result that is not late, and how long it says to stay open.
    /// `None`: the result changes nothing.
    fn judged(
        &self,
        word: Word,
        verdict: Verdict,
        now: Nanos,
        draw: u64,
    ) -> Option<(Word, Option<Duration>)> {
        match (word.state(), verdict) {
            _ if word.mode() != Mode::Auto => None,
            (State::Closed, Verdict::Success) => {
                (word.failures() > 0).then(|| (word.with_failures(0), None))
            }
            (State::Closed, Verdict::Failure) => {
                if let Counting::Consecutive(limit) = self.counting
                    && word.failures() + 1 < limit
                {
                    return Some((word.with_failures(word.failures() + 1), None));
                }
                let closed_for = now.since(Nanos(self.closed_since.load(Relaxed)));
                let trips = if closed_for < self.window { word.one_more_trip() } else { 1 };
                Some(self.opened(word, trips, now, draw))
            }
            (State::HalfOpen, Verdict::Success) => {
                if word.succeeded() + 1 < self.probes {
                    return Some((word.probe_succeeded(), None));
                }
                self.closed_since.fetch_max(now.0, Relaxed);
                Some((word.closed(), None))
            }
            (State::HalfOpen, Verdict::Failure) => {
                Some(self.opened(word, word.one_more_trip(), now, draw))
            }
            (State::Open, _) => None,
        }
    }

    fn opened(&self, word: Word, trips: u32, now: Nanos, draw: u64) -> (Word, Option<Duration>) {
        let open_for = self.open_time(trips, draw);
        self.stirred.fetch_max(now.0, Relaxed);
        (word.opened(trips, millis(now.plus(open_for))), Some(open_for))
    }

    /// `open_min` doubled for each trip but the first, ±20 % so that the hosts of a fleet do
    /// not all come back at once, and never outside of the configured bounds.
    fn open_time(&self, trips: u32, draw: u64) -> Duration {
        let doubled = self.open_min.saturating_mul(1 << trips.saturating_sub(1).min(31));
        let chance = (draw >> 11) as f64 / (1u64 << 53) as f64;
        let jittered = doubled.as_nanos() as f64 * (0.8 + 0.4 * chance);
        Duration::from_nanos(jittered as u64).max(self.open_min).min(self.open_max)
    }

    fn load(&self) -> Word {
        // Who sees a word must also see the times that were noted before it was written.
        Word::from_bits(self.word.load(Acquire))
    }

    fn exchange(&self, from: Word, to: Word) -> Result<(), Word> {
        self.word
            .compare_exchange(from.bits(), to.bits(), AcqRel, Acquire)
            .map(|_| ())
            .map_err(Word::from_bits)
    }
}

impl Permit<'_> {
    /// Whether the breaker is half-open and this is one of its probes.
    #[must_use]
    pub fn is_probe(&self) -> bool {
        self.probe
    }

    /// Gives a probe's place back before its end, because it waits for something else than the
    /// upstream. Its result still counts, if a place is free when it comes.
    pub fn let_off(&mut self) {
        self.give_back();
        self.off = true;
    }

    /// Whether [`Permit::let_off`] was called.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.off
    }

    /// Tells how the request ended. A result that comes after a transition changes nothing.
    /// `draw` is 64 random bits, for the case that the breaker opens.
    pub fn settle(mut self, verdict: Verdict, now: Nanos, draw: u64) -> Option<Change> {
        let mut word = self.breaker.load();
        if !self.counts_in(word) {
            return None;
        }
        let breaker = self.breaker;
        if !self.probe
            && let Counting::Ratio(ring) = &breaker.counting
            && !ring.record(self.generation, verdict, now)
        {
            return None;
        }
        while self.counts_in(word) {
            let probed = match self.off {
                true if breaker.has_place(word) => word.probe_admitted(),
                true => break,
                false => word,
            };
            let Some((next, open_for)) = breaker.judged(probed, verdict, now, draw) else { break };
            match breaker.exchange(word, next) {
                Ok(()) => {
                    self.probe = false; // its place is accounted for
                    return change(word, next, open_for);
                }
                Err(seen) => word = seen,
            }
        }
        None
    }

    /// Whether `word` is of the generation in which this was given.
    fn counts_in(&self, word: Word) -> bool {
        word.generation() == self.generation && (word.state() == State::HalfOpen) == self.probe
    }

    /// Gives a probe's place back, if it still has it.
    fn give_back(&mut self) {
        if !self.probe || self.off {
            return;
        }
        let mut word = self.breaker.load();
        while self.counts_in(word) {
            match self.breaker.exchange(word, word.probe_given_back()) {
                Ok(()) => return,
                Err(seen) => word = seen,
            }
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.give_back();
    }
}

fn change(from: Word, to: Word, open_for: Option<Duration>) -> Option<Change> {
    let (from, to) = (from.state(), to.state());
    (from != to).then_some(Change { from, to, open_for })
}

/// In ms, rounded up.
fn millis(at: Nanos) -> u64 {
    at.0.div_ceil(1_000_000)
}

#[cfg(test)]
mod tests;
