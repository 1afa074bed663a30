//! A pool for the tests of the algorithms.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use super::{Algorithm, Ask, Crowd, Eligible, Member, Seat, Selector, Tried, key_of};
use crate::names::Nanos;

/// All upstreams eligible; draws and keys come from a fixed seed.
pub(super) struct Pool {
    pub(super) selector: Selector,
    pub(super) seats: Vec<Arc<Seat>>,
    pub(super) eligible: Eligible,
    crowd: Crowd,
    rng: RefCell<fastrand::Rng>,
}

impl Pool {
    pub(super) fn new(algorithm: Algorithm, weights: &[u32]) -> Self {
        Self::with_limits(algorithm, weights, &vec![0; weights.len()])
    }

    pub(super) fn with_limits(algorithm: Algorithm, weights: &[u32], limits: &[u32]) -> Self {
        let ids: Vec<String> = (0..weights.len()).map(|ix| format!("http://u{ix}:80")).collect();
        let members: Vec<Member<'_>> =
            ids.iter().zip(weights).map(|(id, &weight)| Member { id, weight }).collect();
        let eligible = Eligible::new(weights.len());
        for ix in 0..weights.len() {
            eligible.set(ix, true);
        }
        Self {
            selector: Selector::new(algorithm, &members, Duration::from_secs(10)),
            seats: limits.iter().map(|&limit| Arc::new(Seat::new(limit))).collect(),
            eligible,
            crowd: Crowd::default(),
            rng: RefCell::new(fastrand::Rng::with_seed(11)),
        }
    }

    pub(super) fn ask<'a>(&'a self, tried: &'a Tried, draw: u64) -> Ask<'a> {
        // Tests take seats without telling it.
        self.crowd.look_again();
        Ask {
            seats: &self.seats,
            crowd: &self.crowd,
            eligible: &self.eligible,
            tried,
            key: key_of(&draw.to_le_bytes()),
            now: Nanos(1),
            draw,
        }
    }

    pub(super) fn pick(&self, tried: &Tried, draw: u64) -> Option<usize> {
        self.selector.pick(&self.ask(tried, draw))
    }

    /// The next `n` picks.
    pub(super) fn run(&self, n: usize) -> Vec<usize> {
        let draw = || self.rng.borrow_mut().u64(..);
        (0..n).map(|_| self.pick(&Tried::new(), draw()).unwrap()).collect()
    }

    /// How often each upstream is among the next `n` picks.
    pub(super) fn counts(&self, n: u32) -> Vec<u32> {
        let mut counts = vec![0; self.seats.len()];
        for ix in self.run(n as usize) {
            counts[ix] += 1;
        }
        counts
    }
}

/// Fails unless `counts` look drawn evenly: χ² within five standard deviations of its mean.
#[track_caller]
pub(super) fn even(counts: &[u32]) {
    let total: u32 = counts.iter().sum();
    let want = f64::from(total) / counts.len() as f64;
    let chi2: f64 = counts.iter().map(|&n| (f64::from(n) - want).powi(2) / want).sum();
    let freedom = counts.len() as f64 - 1.0;
    assert!(chi2 < freedom + 5.0 * (2.0 * freedom).sqrt(), "χ² is {chi2} for {counts:?}");
}

/// Fails unless `count` is within 3 % of `want`.
#[track_caller]
pub(super) fn near(count: u32, want: f64) {
    assert!((f64::from(count) / want - 1.0).abs() < 0.03, "{count} is not near {want}");
}
