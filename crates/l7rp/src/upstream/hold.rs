//! What an operator wants of an upstream, whatever probes and results say of it. It lasts until
//! the operator wants something else, the pool loses the upstream, or the process ends.

use std::sync::atomic::Ordering::Relaxed;

use l7rp_core::names::Nanos;
use l7rp_core::upstream::breaker::{Change, Mode, State};

use super::lineage::Lineage;
use super::member::Upstream;
use super::pool::Pool;
use crate::sync::lock;

/// What an operator wants of an upstream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hold {
    /// It gets no new requests; those in progress end, and probes go on.
    pub drained: bool,
    /// Who decides what its breaker does.
    pub breaker: Mode,
}

/// What has become of a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forced {
    /// Who decided before.
    pub before: Mode,
    /// The transition, if it was one.
    pub change: Option<Change>,
    /// The state now.
    pub state: State,
}

impl Upstream {
    /// What an operator wants of it.
    pub fn hold(&self) -> Hold {
        Hold { drained: lock(&self.standing).drained, breaker: self.breaker.mode() }
    }
}

impl Pool {
    /// Keeps new requests away from the upstreams with this URL, or lets them come again, in all
    /// generations of the pool: whether that is news.
    pub fn set_drained(&self, url: &str, drained: bool, now: Nanos) -> bool {
        let mut is_news = false;
        self.lineage.change(url, |upstream| {
            let mut standing = lock(&upstream.standing);
            if std::mem::replace(&mut standing.drained, drained) != drained {
                is_news = true;
                if !drained {
                    // It comes back as one that has been mended.
                    upstream.eligible_since.store(now.0, Relaxed);
                }
            }
        });
        is_news
    }

    /// Forces the breakers of the upstreams with this URL, or leaves them to themselves, in all
    /// generations of the pool. `None`: it has none.
    pub fn set_breaker(&self, url: &str, mode: Mode, now: Nanos) -> Option<Forced> {
        let mut told = None;
        self.lineage.change(url, |upstream| {
            let (before, change) = upstream.breaker.set_mode(mode, now);
            if change.is_some_and(|change| change.to == State::Closed) {
                // It comes back as one that has been mended.
                upstream.eligible_since.store(now.0, Relaxed);
            }
            // Generations come oldest first: what is told, and counted, is the last.
            let forced = Forced { before, change, state: upstream.breaker.state() };
            told = Some((forced, upstream.transitions.clone()));
        });
        let (forced, transitions) = told?;
        if let Some(change) = forced.change {
            transitions.breaker(change.to);
        }
        Some(forced)
    }
}

impl Lineage {
    /// Does `change` to each upstream with this URL, once, and makes its bits anew.
    fn change(&self, url: &str, mut change: impl FnMut(&Upstream)) {
        self.in_all(|generations| {
            let mut seen = Vec::new();
            for pool in generations {
                for (ix, upstream) in pool.upstreams.iter().enumerate() {
                    if upstream.url != url {
                        continue;
                    }
                    if !seen.contains(&upstream.id) {
                        seen.push(upstream.id);
                        change(upstream);
                    }
                    pool.set_bits(ix);
                }
            }
        });
    }
}
