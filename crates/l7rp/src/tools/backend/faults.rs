//! What goes wrong on purpose, and when.

use std::time::Duration;

use l7rp_core::names::Nanos;

/// How a backend misbehaves. The default: not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults {
    /// Every request with a number that this divides suffers.
    pub every: u64,
    /// Wait this long before the answer.
    pub slow: Duration,
    /// How the exchange ends.
    pub ending: Ending,
    /// Wait this long before each octet of the body.
    pub drip: Duration,
    /// Answer with this status.
    pub status: Option<u16>,
    /// Come and go as a whole.
    pub flap: Option<Flap>,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            every: 1,
            slow: Duration::ZERO,
            ending: Ending::Answer,
            drip: Duration::ZERO,
            status: None,
            flap: None,
        }
    }
}

impl Faults {
    /// Whether request `number` suffers.
    pub(super) fn hit(&self, number: u64) -> bool {
        divides(self.every, number)
    }
}

/// Whether `every` divides `number`; 0 divides nothing.
pub(super) fn divides(every: u64, number: u64) -> bool {
    number.checked_rem(every) == Some(0)
}

/// How an exchange ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ending {
    /// With an answer, as it should.
    #[default]
    Answer,
    /// Never: the request is read and the connection stays open.
    Hang,
    /// The request is read and the connection closed.
    Close,
    /// Half of the body follows the head, then the connection is closed.
    DropMid,
}

/// Times of being up and down, in turn, beginning with up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flap {
    /// How long it is up.
    pub up: Duration,
    /// How long it is down.
    pub down: Duration,
}

impl Flap {
    /// Whether it is down this long after the start.
    pub(super) fn is_down(&self, since_start: Nanos) -> bool {
        let round = (self.up + self.down).as_nanos();
        let place = u128::from(since_start.0).checked_rem(round).unwrap_or(0);
        place >= self.up.as_nanos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_nth_is_hit() {
        let faults = Faults { every: 3, ..Faults::default() };
        let hit: Vec<u64> = (1..=9).filter(|&n| faults.hit(n)).collect();
        assert_eq!(hit, [3, 6, 9]);
        assert!(!divides(0, 7));
    }

    #[test]
    fn flapping_begins_up() {
        let flap = Flap { up: Duration::from_secs(2), down: Duration::from_secs(1) };
        let down = |ms: u64| flap.is_down(Nanos(ms * 1_000_000));
        assert_eq!(
            [0, 1999, 2000, 2999, 3000, 4999, 5000].map(down),
            [false, false, true, true, false, false, true]
        );
    }

    #[test]
    fn a_backend_can_be_down_for_good() {
        let flap = Flap { up: Duration::ZERO, down: Duration::from_secs(1) };
        assert!(flap.is_down(Nanos(0)) && flap.is_down(Nanos(123_456_789_000)));
    }
}
