use super::{Mode, State};

/// All of a breaker that must change together: state 2 bits, generation 20, trips in a row 5,
/// payload 37.
///
/// | state | payload |
/// |---|---|
/// | closed | failures in a row |
/// | open | end of the open time, in ms |
/// | half-open | how many were ever let in (13 bits), probes out or succeeded (12), succeeded (12) |
/// | forced | 1: open; 0: closed |
///
/// The first of the three only makes each admission a new word: a thread that found all probes
/// out, and out for too long, must not act on that when one has since come back and another
/// gone out.
///
/// A generation comes round again after a million transitions. A result would have to be that
/// late to be taken for a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word(u64);

pub(super) const GENERATION_BITS: u32 = 20;
const TRIPS_BITS: u32 = 5;
const PAYLOAD_BITS: u32 = 37;
const PROBE_BITS: u32 = 12;

const CLOSED: u64 = 0;
const OPEN: u64 = 1;
const HALF_OPEN: u64 = 2;
const FORCED: u64 = 3;

/// How many probes can be counted.
pub(super) const MAX_PROBES: u32 = (1 << PROBE_BITS) - 1;

impl Word {
    /// Closed, and has never been anything else.
    pub(super) const NEW: Self = Self(0);

    pub(super) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub(super) fn bits(self) -> u64 {
        self.0
    }

    pub(super) fn state(self) -> State {
        match self.kind() {
            CLOSED => State::Closed,
            OPEN => State::Open,
            HALF_OPEN => State::HalfOpen,
            _ if self.payload() == 0 => State::Closed,
            _ => State::Open,
        }
    }

    pub(super) fn mode(self) -> Mode {
        match (self.kind(), self.state()) {
            (FORCED, State::Closed) => Mode::Closed,
            (FORCED, _) => Mode::Open,
            _ => Mode::Auto,
        }
    }

    pub(super) fn generation(self) -> u32 {
        (self.0 >> (PAYLOAD_BITS + TRIPS_BITS)) as u32 & ((1 << GENERATION_BITS) - 1)
    }

    /// How often it has opened without having been closed for long.
    pub(super) fn trips(self) -> u32 {
        (self.0 >> PAYLOAD_BITS) as u32 & ((1 << TRIPS_BITS) - 1)
    }

    /// Failures in a row, if closed.
    pub(super) fn failures(self) -> u64 {
        self.payload()
    }

    /// Probes that are out or have succeeded, if half-open.
    pub(super) fn admitted(self) -> u32 {
        (self.payload() >> PROBE_BITS) as u32 & MAX_PROBES
    }

    /// Probes that have succeeded, if half-open.
    pub(super) fn succeeded(self) -> u32 {
        self.payload() as u32 & MAX_PROBES
    }

    /// End of the open time in ms, if open. `near` is a time in ms that is less than two years
    /// away from it and says which of the times that look alike in 37 bits is meant.
    pub(super) fn end(self, near: u64) -> u64 {
        const SPARE: u32 = 64 - PAYLOAD_BITS;
        let apart = (self.payload().wrapping_sub(near) << SPARE).cast_signed() >> SPARE;
        near.saturating_add_signed(apart)
    }

    /// Still closed, after so many failures in a row.
    pub(super) fn with_failures(self, failures: u64) -> Self {
        self.with_payload(failures)
    }

    /// Still half-open, and one more probe is out.
    pub(super) fn probe_admitted(self) -> Self {
        self.with_payload(self.payload() + (1 << (2 * PROBE_BITS)) + (1 << PROBE_BITS))
    }

    /// Still half-open, and a probe is back that says nothing.
    pub(super) fn probe_given_back(self) -> Self {
        self.with_payload(self.payload().saturating_sub(1 << PROBE_BITS))
    }

    /// Still half-open, and a probe has succeeded.
    pub(super) fn probe_succeeded(self) -> Self {
        self.with_payload(self.payload() + 1)
    }

    /// The next generation: closed.
    pub(super) fn closed(self) -> Self {
        self.next(CLOSED, self.trips(), 0)
    }

    /// The next generation: what somebody wants it to be, with no trips behind it.
    pub(super) fn set_to(self, mode: Mode) -> Self {
        match mode {
            Mode::Auto => self.next(CLOSED, 0, 0),
            Mode::Closed => self.next(FORCED, 0, 0),
            Mode::Open => self.next(FORCED, 0, 1),
        }
    }

    /// The next generation: open until `end` ms.
    pub(super) fn opened(self, trips: u32, end: u64) -> Self {
        self.next(OPEN, trips, end)
    }

    /// The next generation: half-open with one probe out.
    pub(super) fn half_opened(self) -> Self {
        self.next(HALF_OPEN, self.trips(), 0).probe_admitted()
    }

    /// One more trip in a row; beyond 31 they are not told apart.
    pub(super) fn one_more_trip(self) -> u32 {
        (self.trips() + 1).min((1 << TRIPS_BITS) - 1)
    }

    fn payload(self) -> u64 {
        self.0 & ((1 << PAYLOAD_BITS) - 1)
    }

    fn with_payload(self, payload: u64) -> Self {
        let mask = (1 << PAYLOAD_BITS) - 1;
        Self(self.0 & !mask | payload & mask)
    }

    fn kind(self) -> u64 {
        self.0 >> (64 - 2)
    }

    fn next(self, kind: u64, trips: u32, payload: u64) -> Self {
        let generation = (u64::from(self.generation()) + 1) & ((1 << GENERATION_BITS) - 1);
        let head = (kind << GENERATION_BITS | generation) << TRIPS_BITS | u64::from(trips);
        Self(head << PAYLOAD_BITS).with_payload(payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_spill_into_one_another() {
        let open = Word::NEW.with_failures(u64::MAX).opened(31, u64::MAX);
        assert_eq!((open.state(), open.generation(), open.trips()), (State::Open, 1, 31));
        assert_eq!(open.one_more_trip(), 31);
        let mut half = open.half_opened();
        for _ in 1..MAX_PROBES {
            half = half.probe_admitted().probe_succeeded();
        }
        assert_eq!((half.state(), half.generation(), half.trips()), (State::HalfOpen, 2, 31));
        assert_eq!((half.admitted(), half.succeeded()), (MAX_PROBES, MAX_PROBES - 1));
        for _ in 0..10_000 {
            let again = half.probe_given_back().probe_admitted();
            assert_ne!(again, half);
            half = again;
        }
        assert_eq!((half.state(), half.generation(), half.trips()), (State::HalfOpen, 2, 31));
        assert_eq!((half.admitted(), half.succeeded()), (MAX_PROBES, MAX_PROBES - 1));
        let closed = half.closed();
        assert_eq!((closed.state(), closed.generation(), closed.trips()), (State::Closed, 3, 31));
        assert_eq!(closed.failures(), 0);
        for (mode, state) in [(Mode::Open, State::Open), (Mode::Closed, State::Closed)] {
            let forced = open.set_to(mode);
            assert_eq!((forced.mode(), forced.state()), (mode, state));
            assert_eq!((forced.generation(), forced.trips()), (2, 0));
            let auto = forced.set_to(Mode::Auto);
            assert_eq!(
                (auto.mode(), auto.state(), auto.generation()),
                (Mode::Auto, State::Closed, 3)
            );
        }
    }

    #[test]
    fn generations_come_round() {
        let mut word = Word::NEW;
        for n in 1..=1 << GENERATION_BITS {
            word = word.opened(3, 5);
            assert_eq!(word.generation(), n % (1 << GENERATION_BITS));
            assert_eq!((word.state(), word.trips(), word.end(0)), (State::Open, 3, 5));
        }
    }

    #[test]
    fn the_end_is_found_on_both_sides_of_a_turn_of_the_clock() {
        let turn = 1u64 << PAYLOAD_BITS;
        for end in [0, 1, 999, turn - 1, turn, turn + 1, 5 * turn - 3, 5 * turn + 3] {
            let word = Word::NEW.opened(1, end);
            for apart in [0, 1, 1_000, turn / 2 - 1] {
                assert_eq!(word.end(end + apart), end, "{end}, {apart} later");
                if apart <= end {
                    assert_eq!(word.end(end - apart), end, "{end}, {apart} earlier");
                }
            }
        }
    }
}
