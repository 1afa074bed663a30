//! How many requests are in flight at the upstreams of a pool together.

use std::sync::Arc;

use super::Seat;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Picks that trust what is known, before all seats are looked at again.
const TRUSTED: u64 = 256;

/// Knows the sum over the seats of a pool without adding it up for each pick.
///
/// Seats outlive a pool that a reload replaces: some of their requests may have come by another
/// pool. Only as long as there are such requests is the sum taken anew each time; they can only
/// become fewer, but for the further tries of requests that began there, so that it is looked at
/// again now and then.
#[derive(Debug, Default)]
pub struct Crowd {
    /// Requests that have come by this pool.
    own: AtomicU64,
    /// Others that the seats had when they were last looked at.
    others: AtomicU64,
    /// How often the sum was asked for.
    asked: AtomicU64,
}

impl Crowd {
    /// Somebody has taken one of the seats, by this pool.
    pub fn enter(&self) {
        self.own.fetch_add(1, Relaxed);
    }

    /// And gives it back.
    pub fn leave(&self) {
        let before = self.own.fetch_sub(1, Relaxed);
        debug_assert!(before > 0, "a place was given back twice");
    }

    /// Has the next who asks look at all seats.
    #[cfg(test)]
    pub(super) fn look_again(&self) {
        self.asked.store(0, Relaxed);
    }

    /// Requests in flight at all of `seats`, which are those of this pool.
    pub(super) fn total(&self, seats: &[Arc<Seat>]) -> u64 {
        let asked = self.asked.fetch_add(1, Relaxed);
        let own = self.own.load(Relaxed);
        if !asked.is_multiple_of(TRUSTED) && self.others.load(Relaxed) == 0 {
            return own;
        }
        let total = seats.iter().map(|seat| u64::from(seat.in_flight())).sum::<u64>();
        // A moment's difference with what others do just now is looked at again by the next pick.
        self.others.store(total.saturating_sub(own), Relaxed);
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seats() -> Vec<Arc<Seat>> {
        (0..5).map(|_| Arc::new(Seat::new(0))).collect()
    }

    #[test]
    fn the_total_is_that_of_the_seats_whoever_took_them() {
        let seats = seats();
        let (old, new) = (Crowd::default(), Crowd::default());
        let enter = |crowd: &Crowd, ix: usize| {
            assert!(seats[ix].enter());
            crowd.enter();
        };
        let leave = |crowd: &Crowd, ix: usize| {
            seats[ix].leave();
            crowd.leave();
        };
        // By the pool before the reload, which the new one does not know of.
        (0..5).for_each(|ix| enter(&old, ix));
        assert_eq!((old.total(&seats), new.total(&seats)), (5, 5));
        enter(&new, 3);
        assert_eq!(new.total(&seats), 6);
        (0..5).for_each(|ix| leave(&old, ix));
        assert_eq!(new.total(&seats), 1);
        for _ in 0..1_000 {
            enter(&new, 1);
            assert_eq!(new.total(&seats), 2);
            leave(&new, 1);
            assert_eq!(new.total(&seats), 1);
        }
    }

    #[test]
    fn a_further_try_by_an_old_pool_is_noticed_soon() {
        let seats = seats();
        let new = Crowd::default();
        assert_eq!(new.total(&seats), 0);
        assert!(seats[2].enter());
        let noticed = (0..TRUSTED).filter(|_| new.total(&seats) == 1).count();
        assert!(noticed > 0);
        seats[2].leave();
        assert_eq!(new.total(&seats), 0);
    }
}
