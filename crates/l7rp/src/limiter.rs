//! A route's rate limit, live.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;

use l7rp_core::limit::{Bucket, Buckets, Decision, Rate, client_key};
use l7rp_core::names::Nanos;

use crate::config::plan;

/// Clients of one route that are told apart. More share what is owed, see [`Buckets`].
const CLIENTS: usize = 65_536;

/// A route's rate limit.
#[derive(Debug)]
pub struct Limiter {
    /// Where in `X-Forwarded-For` the client stands, from the right; 0: elsewhere.
    pub hops: u32,
    rate: Rate,
    counted: Counted,
}

/// For whom requests are counted.
#[derive(Debug)]
enum Counted {
    Everybody(Bucket),
    EachClient(Buckets),
}

impl Limiter {
    /// The limit that `plan` describes.
    pub fn new(plan: &plan::RateLimit) -> Self {
        Self {
            hops: plan.trust_proxy_hops,
            rate: Rate::new(plan.rps, plan.burst),
            counted: if plan.per_ip {
                let secret = || RandomState::new().hash_one(0);
                Counted::EachClient(Buckets::new(CLIENTS, [secret(), secret()]))
            } else {
                Counted::Everybody(Bucket::default())
            },
        }
    }

    /// Lets a request in.
    ///
    /// # Errors
    /// Seconds until the next would be.
    pub fn admit(&self, who: impl FnOnce() -> Option<IpAddr>, now: Nanos) -> Result<(), u32> {
        let decision = match &self.counted {
            Counted::Everybody(bucket) => bucket.try_take(&self.rate, now),
            Counted::EachClient(buckets) => buckets.try_take(key(who()), &self.rate, now),
        };
        allowed(decision).map(|_| ())
    }

    /// What [`Limiter::admit`] would say now, and how many more could follow. Nothing is counted.
    ///
    /// # Errors
    /// Seconds until the next would be let in.
    pub fn look(&self, who: Option<IpAddr>, now: Nanos) -> Result<u32, u32> {
        let decision = match &self.counted {
            Counted::Everybody(bucket) => bucket.peek(&self.rate, now),
            Counted::EachClient(buckets) => buckets.peek(key(who), &self.rate, now),
        };
        allowed(decision)
    }
}

/// Peers without an address, on a Unix-domain socket, are one client.
fn key(who: Option<IpAddr>) -> u128 {
    who.map_or(u128::MAX, client_key)
}

/// How many more could follow, or in how many seconds one could.
fn allowed(decision: Decision) -> Result<u32, u32> {
    match decision {
        Decision::Allowed { remaining } => Ok(remaining),
        Decision::Refused { retry_after } => {
            Err(retry_after.as_secs_f64().ceil().clamp(1.0, f64::from(u32::MAX)) as u32)
        }
    }
}
