#![expect(deprecated, reason = "std has no other keyed hash, and this one is SipHash-2-4 for good")]

use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::array;
use std::hash::{Hasher, SipHasher};
use std::net::IpAddr;

use super::{Decision, Rate};
use crate::names::Nanos;

/// Ways of a set. Two are enough for loom, and eight would be too many for it.
const WAYS: usize = if cfg!(loom) { 2 } else { 8 };

/// How often a request tries to move in while others are faster.
const ROUNDS: usize = 8;

/// One bucket of tokens for each client, in memory that does not grow.
///
/// The table is set-associative, as a processor's cache is: a client belongs to one set and may
/// be in any of its ways. Which set is decided by a hash with a secret, or clients could choose
/// addresses that share a set with somebody.
///
/// A client that is new to a full set takes the way that owes least, **and owes that much from
/// the beginning** (as the counters of the Space-Saving algorithm do; Metwally, Agrawal,
/// El Abbadi, ICDT 2005). What any way owes never shrinks but by time, so a client that was
/// evicted finds no better place when it comes back: filling the table is no way to get rid of
/// a debt. The price is that while more clients than ways are busy, new ones have less than a
/// whole burst. A way whose bucket is full again is as good as empty.
///
/// Nothing is locked. Threads that move the same client in at once agree on one way; at worst a
/// token is paid twice. One that is taken just while its way is given away may be forgotten, or
/// charged to the new owner: one for each thread that takes part in the race. More can be
/// forgotten only if a thread is interrupted between the two instructions of an eviction: what
/// the evicted client takes in that time.
#[derive(Debug)]
pub struct Buckets {
    sets: Box<[Set]>,
    secret: [u64; 2],
}

impl Buckets {
    /// Room for `capacity` clients, rounded up to a power of two: 16 octets for each. `secret`
    /// must be random.
    #[must_use]
    pub fn new(capacity: usize, secret: [u64; 2]) -> Self {
        let sets = capacity.div_ceil(WAYS).next_power_of_two();
        Self { sets: (0..sets).map(|_| Set::new()).collect(), secret }
    }

    /// Takes a token of the client `key` (see [`client_key`]), if there is one.
    ///
    /// All keys of a table have the same rate; see [`Bucket`](super::Bucket) about changing it.
    pub fn try_take(&self, key: u128, rate: &Rate, now: Nanos) -> Decision {
        let (set, tag) = self.place_of(key);
        set.try_take(tag, rate, now)
    }

    /// What [`Buckets::try_take`] would decide now, if nobody else asks meanwhile. Nothing is
    /// taken, and nobody moves in or out.
    #[must_use]
    pub fn peek(&self, key: u128, rate: &Rate, now: Nanos) -> Decision {
        let (set, tag) = self.place_of(key);
        let due = set.way_of(tag).map_or_else(|| set.least().1, |way| latest(&set.due[way]));
        rate.peek(due, now)
    }

    fn place_of(&self, key: u128) -> (&Set, u64) {
        let mut hasher = SipHasher::new_with_keys(self.secret[0], self.secret[1]);
        hasher.write_u128(key);
        let hash = hasher.finish();
        // As many sets as a power of two.
        let set = &self.sets[hash as usize & (self.sets.len() - 1)];
        // All of the hash is the tag, so two clients are taken for one with a chance of 2⁻⁶⁴ for
        // each pair. 0 is nobody.
        (set, hash.max(1))
    }
}

/// What counts as one client: an IPv4 address; of IPv6 the first 64 bits, because whoever has one
/// address of a network has all of them (RFC 4291 §2.5.4).
///
/// An IPv4 address that is written as IPv6 (`::ffff:192.0.2.1`) is the same client.
#[must_use]
pub fn client_key(ip: IpAddr) -> u128 {
    match ip.to_canonical() {
        // Mapped: the upper half is 0 and the lower is not, as in no key of the other family.
        IpAddr::V4(ip) => ip.to_ipv6_mapped().to_bits(),
        IpAddr::V6(ip) => ip.to_bits() >> 64 << 64,
    }
}

/// Two cache lines: one to find the way, one to take the token.
#[derive(Debug)]
#[repr(align(64))]
struct Set {
    /// Who has the way; 0: nobody.
    tags: [AtomicU64; WAYS],
    /// What it owes: a theoretical arrival time (see [`Rate`]). It only ever grows.
    due: [AtomicU64; WAYS],
}

impl Set {
    fn new() -> Self {
        let zeros = || array::from_fn(|_| AtomicU64::new(0));
        Self { tags: zeros(), due: zeros() }
    }

    fn try_take(&self, tag: u64, rate: &Rate, now: Nanos) -> Decision {
        for _ in 0..ROUNDS {
            if let Some(way) = self.way_of(tag) {
                let decision = rate.take(&self.due[way], now);
                // Else the way was given away meanwhile, and somebody else has paid.
                if latest(&self.tags[way]) == tag {
                    return decision;
                }
            } else if let Some(decision) = self.move_in(tag, rate, now) {
                return decision;
            }
        }
        // So much is going on here that whoever owes least pays for it.
        rate.take(&self.due[self.least().0], now)
    }

    fn way_of(&self, tag: u64) -> Option<usize> {
        self.tags.iter().position(|way| latest(way) == tag)
    }

    /// The way that owes least, its debt and its owner.
    fn least(&self) -> (usize, u64, u64) {
        let mut least = (0, u64::MAX, 0);
        for (way, (due, tag)) in self.due.iter().zip(&self.tags).enumerate() {
            let due = latest(due);
            if due < least.1 {
                least = (way, due, latest(tag));
            }
        }
        least
    }

    /// Takes a token for somebody who is not here, and a way if it gets one. `None`: another
    /// thread was faster.
    fn move_in(&self, tag: u64, rate: &Rate, now: Nanos) -> Option<Decision> {
        let (way, due, owner) = self.least();
        let next = match rate.judge(due, now) {
            Ok(next) => next,
            // All the others owe more. Nobody has to go for one who would get nothing.
            Err(refused) => return Some(refused),
        };
        // To pay first shows the others that the way is not free any more, and fails if its
        // owner has taken a token since, which would be forgotten.
        let swap =
            |place: &AtomicU64, old, new| place.compare_exchange(old, new, SeqCst, SeqCst).is_ok();
        let moved = swap(&self.due[way], due, next)
            && swap(&self.tags[way], owner, tag)
            && self.settle(way, tag, due.max(now.0));
        moved.then(|| rate.allowed(next, now))
    }

    /// Whether `own` is to remain the way of `tag`, if another thread has moved it in elsewhere
    /// at the same time: the first way wins. It takes over what was taken from the other, which
    /// is what that owes beyond `free`.
    fn settle(&self, own: usize, tag: u64, free: u64) -> bool {
        for (other, place) in self.tags.iter().enumerate() {
            if other == own || latest(place) != tag {
                continue;
            }
            // Fails if the other thread has done the same already.
            let leave = |place: &AtomicU64| place.compare_exchange(tag, 0, SeqCst, SeqCst).is_ok();
            if other < own {
                leave(&self.tags[own]);
                return false;
            }
            // In this order: who takes a token from it afterwards sees that it is gone.
            if leave(place) {
                let taken = latest(&self.due[other]).saturating_sub(free);
                self.due[own].fetch_add(taken, SeqCst);
            }
        }
        true
    }
}

/// What is there in the one order that all threads agree on. loom does not know that order for
/// loads, and would try old values that cannot be read.
fn latest(place: &AtomicU64) -> u64 {
    if cfg!(loom) { place.fetch_add(0, SeqCst) } else { place.load(SeqCst) }
}

#[cfg(test)]
mod tests;
