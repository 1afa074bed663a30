#![expect(deprecated, reason = "std has no other keyed hash, and this one is SipHash-2-4 for good")]

use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::array;
use std::hash::{Hasher, SipHasher};
use std::net::IpAddr;

use super::{Decision, Rate};
use crate::names::Nanos;

/// Ways of a set. Two are enough for loom, and eight would be too many for it.
const WAYS: usize = if cfg!(loom) { 2 } else { 8 };

/// How often a request looks for its bucket while others keep taking it away.
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
/// Nothing is locked. Where two threads move the same client in at once, or one takes a token
/// while the other gives its way away, the token may be charged to the other client or to nobody:
/// a race costs or gives one token for each thread that takes part. More are forgotten only if a
/// thread is interrupted between two instructions of an eviction, and then no more than the
/// evicted client takes in this time.
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
        let mut hasher = SipHasher::new_with_keys(self.secret[0], self.secret[1]);
        hasher.write_u128(key);
        let hash = hasher.finish();
        // As many sets as a power of two.
        let set = &self.sets[hash as usize & (self.sets.len() - 1)];
        // All of the hash is the tag, so two clients are taken for one with a chance of 2⁻⁶⁴ for
        // each pair. 0 is nobody.
        set.try_take(hash.max(1), rate, now)
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
                // Else the way was given away meanwhile, and its new owner has paid.
                if self.tags[way].load(SeqCst) == tag {
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
        self.tags.iter().position(|way| way.load(SeqCst) == tag)
    }

    /// The way that owes least, its debt and its owner.
    fn least(&self) -> (usize, u64, u64) {
        let mut least = (0, u64::MAX, 0);
        for (way, (due, tag)) in self.due.iter().zip(&self.tags).enumerate() {
            let due = due.load(SeqCst);
            if due < least.1 {
                least = (way, due, tag.load(SeqCst));
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
            && self.settle(way, tag);
        moved.then(|| rate.allowed(next, now))
    }

    /// Whether `own` is to remain the way of `tag`, if another thread has moved it in elsewhere
    /// at the same time: the first way wins. What was taken from the other is not forgotten.
    fn settle(&self, own: usize, tag: u64) -> bool {
        for (other, place) in self.tags.iter().enumerate() {
            if other == own || place.load(SeqCst) != tag {
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
                self.due[own].fetch_max(self.due[other].load(SeqCst), SeqCst);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests;
