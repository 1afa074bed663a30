//! Whom a pool would choose, and why not the others: told without taking a place or a turn.

use std::sync::Arc;

use l7rp_core::failure::Failure;
use l7rp_core::names::Nanos;
use l7rp_core::pick::{Ask, Crowd, Eligible, Seat, Tried};
use l7rp_core::upstream::ramp;

use super::pool::{Pool, Wanted};

impl Pool {
    /// How often each upstream would be chosen for a request with this key now, once for each of
    /// `draws`.
    ///
    /// # Errors
    /// Why nobody would be.
    pub fn preview(
        &self,
        key: u64,
        now: Nanos,
        draws: impl Iterator<Item = u64>,
    ) -> Result<Vec<u32>, Failure> {
        self.wake(now);
        let tried = Tried::new();
        let wanted = Wanted { tried: &tried, key, only_closed: false, worker: 0 };
        let enter = |ix: usize| {
            let upstream = self.upstreams.get(ix)?;
            (upstream.seat.has_room() && upstream.breaker.admits(now)).then_some(ix)
        };
        let mut counts = vec![0; self.upstreams.len()];
        for draw in draws {
            let chosen = self.choose(wanted, now, draw, |ask| self.selector.peek(ask), enter);
            let ix = chosen.ok_or_else(|| self.why_none(now))?;
            counts[ix] += 1;
        }
        Ok(counts)
    }

    /// Whom a request with this key belongs to where all are well and have nothing to do: for the
    /// algorithms that go by a key.
    pub fn home(&self, key: u64) -> Option<usize> {
        let eligible = Eligible::new(self.upstreams.len());
        for (ix, _) in self.plan.upstreams.iter().enumerate().filter(|(_, u)| !u.backup) {
            eligible.set(ix, true);
        }
        let (tried, now) = (Tried::new(), Nanos(0));
        // Nobody's seats: nobody has taken any of them.
        let seats: Vec<Arc<Seat>> = self.seats.iter().map(|_| Arc::default()).collect();
        let (seats, eligible) = (&seats[..], &eligible);
        let crowd = &Crowd::default();
        self.selector.peek(&Ask { seats, crowd, eligible, tried: &tried, key, now, draw: 0 })
    }

    /// The share of its picks that the upstream at `ix` takes while it warms up; `None`: it does
    /// not.
    pub fn ramp(&self, ix: usize, now: Nanos) -> Option<f64> {
        let since = self.upstreams.get(ix)?.warm_from()?;
        let share = ramp::share(since, now, self.plan.slow_start);
        (share < 1.0).then_some(share)
    }
}
