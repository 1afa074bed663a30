use crate::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::window::Ewma;

/// What all workers know about one upstream and every request changes: its load and latency.
///
/// Aligned to a cache line, so that two busy upstreams do not slow each other down.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Seat {
    in_flight: AtomicU32,
    /// 0: no limit.
    limit: AtomicU32,
    /// Seconds from sending a request to the head of its response.
    pub latency: Ewma,
}

impl Seat {
    /// An idle upstream that takes at most `limit` requests at once; 0 is no limit.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self { in_flight: AtomicU32::new(0), limit: AtomicU32::new(limit), latency: Ewma::new() }
    }

    /// Takes a place unless the limit is reached. Exact: never more than `limit` at once, and
    /// nobody is refused while there is room.
    ///
    /// Each `true` is owed exactly one [`Seat::leave`].
    #[must_use]
    pub fn enter(&self) -> bool {
        let limit = self.limit.load(Relaxed);
        if limit == 0 {
            self.in_flight.fetch_add(1, Relaxed);
            return true;
        }
        self.in_flight.fetch_update(Relaxed, Relaxed, |n| (n < limit).then(|| n + 1)).is_ok()
    }

    /// Gives the place back.
    pub fn leave(&self) {
        let before = self.in_flight.fetch_sub(1, Relaxed);
        debug_assert!(before > 0, "a place was given back twice");
    }

    /// Requests in flight now.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.in_flight.load(Relaxed)
    }

    /// Changes the limit and keeps everything else, as a reload does.
    pub fn set_limit(&self, limit: u32) {
        self.limit.store(limit, Relaxed);
    }

    /// Whether [`Seat::enter`] would succeed now.
    #[must_use]
    pub fn has_room(&self) -> bool {
        let limit = self.limit.load(Relaxed);
        limit == 0 || self.in_flight() < limit
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn ten_thousand_at_once_admit_exactly_the_limit() {
        let seat = Seat::new(100);
        let admitted = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..20 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        admitted.fetch_add(usize::from(seat.enter()), Relaxed);
                    }
                });
            }
        });
        assert_eq!((admitted.into_inner(), seat.in_flight()), (100, 100));
        assert!(!seat.has_room());
        seat.set_limit(101);
        assert!(seat.has_room() && seat.enter() && !seat.enter());
        seat.leave();
        assert!(seat.has_room());
    }

    #[test]
    fn no_limit_counts() {
        let seat = Seat::new(0);
        assert!((0..1_000).all(|_| seat.enter()));
        assert!(seat.has_room());
        seat.leave();
        assert_eq!(seat.in_flight(), 999);
    }
}
