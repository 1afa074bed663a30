//! Which upstream of a pool.
//!
//! A pick allocates nothing and takes no lock, for any size of pool: what the workers share
//! are a few atomics. Picking does not take a place: the caller calls [`Seat::enter`] on what
//! was picked, and picks again if that place has just gone.
//!
//! | file | algorithm | cost for n upstreams |
//! |---|---|---|
//! | `round_robin` | exact alternation | 1, or n/64 while some are out |
//! | `weighted_rr` | smooth, like nginx | 1 |
//! | `least_conn` | lowest in-flight, random among equals | 1 while many are idle, else n |
//! | `p2c_ewma` | the better of two by latency × load | 1, or n/64 while some are out |
//! | `consistent_hash` | a ring, with or without bounded load | log of the ring, and under load those who are out |

mod consistent_hash;
mod crowd;
mod dice;
mod eligible;
mod least_conn;
mod p2c_ewma;
mod round_robin;
mod seat;
mod weighted_rr;

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use crate::names::Nanos;
use crate::window::HalfLife;

pub use consistent_hash::key_of;
pub use crowd::Crowd;
pub use eligible::Eligible;
pub use seat::Seat;

use consistent_hash::ConsistentHash;
use p2c_ewma::P2cEwma;
use round_robin::RoundRobin;
use weighted_rr::WeightedRr;

/// How the upstream of a request is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Algorithm {
    /// One after the other over those eligible.
    RoundRobin,
    /// In proportion to the weights, interleaved.
    WeightedRr,
    /// The one with the fewest requests in flight.
    LeastConn,
    /// The better of two drawn at random, by latency × (1 + in flight).
    P2cEwma,
    /// By the request's key on a hash ring, past those that carry too much.
    ConsistentHash {
        /// Load above the mean that is tolerated: 0.25 is a quarter.
        epsilon: f64,
        /// Points on the ring per unit of weight.
        virtual_nodes: u32,
    },
    /// By the request's key on a hash ring, whatever the load.
    IpHash {
        /// Points on the ring per unit of weight.
        virtual_nodes: u32,
    },
}

/// An upstream as an algorithm sees it.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// What places it on a hash ring; the same on every host, such as its URL.
    pub id: &'a str,
    /// Its share in `WeightedRr` and on the ring; 0 is taken as 1.
    pub weight: u32,
}

/// What a pick is made from. Everything is indexed by the position of the upstream in the
/// members that the [`Selector`] was built from.
#[derive(Debug)]
pub struct Ask<'a> {
    /// Load and latency, one per member.
    pub seats: &'a [Arc<Seat>],
    /// Requests in flight at all members together.
    pub crowd: &'a Crowd,
    /// Whom health and breaker let in.
    pub eligible: &'a Eligible,
    /// Whom this request has tried already.
    pub tried: &'a Tried,
    /// Well mixed hash of what ties a client to an upstream, see [`key_of`].
    pub key: u64,
    /// The time, for latencies to fade.
    pub now: Nanos,
    /// 64 random bits, fresh for every pick.
    pub draw: u64,
}

impl Ask<'_> {
    /// Eligible, not tried yet, and below its own limit.
    fn selectable(&self, ix: usize) -> bool {
        self.eligible.get(ix) && self.open(ix)
    }

    /// The same for one that is known to be eligible.
    fn open(&self, ix: usize) -> bool {
        self.seats.get(ix).is_some_and(|seat| seat.has_room()) && !self.tried.contains(ix)
    }

    /// All that are selectable, in order.
    fn all(&self) -> impl Iterator<Item = usize> {
        self.eligible.iter().filter(|&ix| self.open(ix))
    }

    /// Requests in flight at `ix`.
    fn load(&self, ix: usize) -> u32 {
        self.seats.get(ix).map_or(0, |seat| seat.in_flight())
    }
}

/// One pool's choice of upstream.
#[derive(Debug)]
pub struct Selector(Kind);

#[derive(Debug)]
enum Kind {
    RoundRobin(RoundRobin),
    WeightedRr(WeightedRr),
    LeastConn,
    P2cEwma(P2cEwma),
    ConsistentHash(ConsistentHash),
}

impl Selector {
    /// Prepares `algorithm` for `members`; `half_life` is used by `P2cEwma` only.
    #[must_use]
    pub fn new(algorithm: Algorithm, members: &[Member<'_>], half_life: Duration) -> Self {
        Self(match algorithm {
            Algorithm::RoundRobin => Kind::RoundRobin(RoundRobin::default()),
            Algorithm::WeightedRr => Kind::WeightedRr(WeightedRr::new(members)),
            Algorithm::LeastConn => Kind::LeastConn,
            Algorithm::P2cEwma => Kind::P2cEwma(P2cEwma::new(HalfLife::new(half_life))),
            Algorithm::ConsistentHash { epsilon, virtual_nodes } => {
                Kind::ConsistentHash(ConsistentHash::new(members, virtual_nodes, Some(epsilon)))
            }
            Algorithm::IpHash { virtual_nodes } => {
                Kind::ConsistentHash(ConsistentHash::new(members, virtual_nodes, None))
            }
        })
    }

    /// The index of the upstream to use; `None`: nobody is selectable.
    #[must_use]
    pub fn pick(&self, ask: &Ask<'_>) -> Option<usize> {
        match &self.0 {
            Kind::RoundRobin(it) => it.pick(ask),
            Kind::WeightedRr(it) => it.pick(ask),
            Kind::LeastConn => least_conn::pick(ask),
            Kind::P2cEwma(it) => it.pick(ask),
            Kind::ConsistentHash(it) => it.pick(ask),
        }
    }

    /// What [`Selector::pick`] would answer to the same question now, without it being anybody's
    /// turn after that.
    #[must_use]
    pub fn peek(&self, ask: &Ask<'_>) -> Option<usize> {
        match &self.0 {
            Kind::RoundRobin(it) => it.peek(ask),
            Kind::WeightedRr(it) => it.peek(ask),
            Kind::LeastConn | Kind::P2cEwma(_) | Kind::ConsistentHash(_) => self.pick(ask),
        }
    }
}

/// The upstreams that a request has tried already. Up to four cost no allocation.
#[derive(Clone, Debug, Default)]
pub struct Tried(SmallVec<[u32; 4]>);

impl Tried {
    /// Nobody yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the upstream at `ix`.
    pub fn insert(&mut self, ix: usize) {
        let ix = ix as u32;
        if !self.0.contains(&ix) {
            self.0.push(ix);
        }
    }

    /// Whether the upstream at `ix` has been tried.
    #[must_use]
    pub fn contains(&self, ix: usize) -> bool {
        self.0.contains(&(ix as u32))
    }

    /// How many have been tried.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether this is the first try.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
