//! The pool: who is there, who may be chosen, and who would be.

use l7rp_core::failure::Failure;
use l7rp_core::names::Nanos;
use serde::{Deserialize, Serialize};

use crate::config::plan::{Algorithm, HashKey};
use crate::exchange::judge;
use crate::upstream::pool::Pool;

/// Choices that are tried out.
const DRAWS: u32 = 200;

/// The pool that a request goes to.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct PoolView {
    /// Its name.
    pub name: String,
    /// How it chooses.
    pub algorithm: Algorithm,
    /// What the choice goes by, where it goes by the request.
    pub tie: Option<Tie>,
    /// Its upstreams, in the order of the file.
    pub upstreams: Vec<Candidate>,
}

/// What ties a request to an upstream.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Tie {
    /// What is asked for, in the words of the configuration.
    pub by: String,
    /// What was found.
    pub found: String,
    /// The hash of its value.
    pub key: String,
}

/// An upstream of the pool.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Candidate {
    /// Its URL.
    pub url: String,
    /// Its weight.
    pub weight: u32,
    /// It stands by.
    pub backup: bool,
    /// Its limit of requests; 0: none.
    pub max_in_flight: u32,
    /// The share of 200 choices, made now, that fall on it. Without a running instance: whether
    /// the request belongs to it if all are well, where that is certain.
    pub chosen: Option<f64>,
    /// What a running instance knows of it.
    pub live: Option<Known>,
}

/// What a running instance knows of an upstream.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Known {
    /// Why it cannot be chosen; `None`: it can.
    pub obstacle: Option<String>,
    /// Requests in flight.
    pub in_flight: u32,
    /// Average latency, in milliseconds; `None`: not measured yet.
    pub latency_ms: Option<f64>,
    /// Latency × (1 + in flight): the less the better.
    pub score: Option<f64>,
    /// The share of its picks that it takes while it warms up; `None`: all.
    pub slow_start: Option<f64>,
}

impl PoolView {
    /// `tie`: see [`judge::tie`].
    pub(super) fn of(pool: &Pool, tie: Option<(&HashKey, &[u8])>) -> Self {
        let by = match pool.plan.selector.algorithm {
            Algorithm::IpHash => &HashKey::ClientIp,
            _ => &pool.plan.selector.hash_key,
        };
        Self {
            name: pool.plan.name.clone(),
            algorithm: pool.plan.selector.algorithm,
            tie: tie.map(|tie| Tie {
                by: in_words(by),
                found: in_words(tie.0),
                key: format!("{:016x}", judge::key(Some(tie))),
            }),
            upstreams: pool
                .plan
                .upstreams
                .iter()
                .map(|upstream| Candidate {
                    url: upstream.url.clone(),
                    weight: upstream.weight,
                    backup: upstream.backup,
                    max_in_flight: upstream.max_in_flight,
                    chosen: None,
                    live: None,
                })
                .collect(),
        }
    }

    /// Adds whom the request belongs to if all are well.
    pub(super) fn add_home(&mut self, pool: &Pool, key: u64) {
        let Some(home) = self.tie.as_ref().and_then(|_| pool.home(key)) else { return };
        for (ix, candidate) in self.upstreams.iter_mut().enumerate() {
            candidate.chosen = Some(if ix == home { 1.0 } else { 0.0 });
        }
    }

    /// Adds what is known now.
    ///
    /// # Errors
    /// Why nobody can be chosen.
    pub(super) fn add_live(&mut self, pool: &Pool, key: u64, now: Nanos) -> Result<(), Failure> {
        for (ix, candidate) in self.upstreams.iter_mut().enumerate() {
            let Some(upstream) = pool.upstreams.get(ix) else { continue };
            let in_flight = upstream.seat.in_flight();
            let latency_ms = pool.latency(upstream, now).map(|seconds| seconds * 1e3);
            candidate.live = Some(Known {
                obstacle: pool.obstacle(ix, now).map(|obstacle| obstacle.to_string()),
                in_flight,
                latency_ms,
                score: latency_ms.map(|ms| ms * (1.0 + f64::from(in_flight))),
                slow_start: pool.ramp(ix, now),
            });
        }
        let counts = pool.preview(key, now, (0..DRAWS).map(|_| fastrand::u64(..)))?;
        for (candidate, count) in self.upstreams.iter_mut().zip(counts) {
            candidate.chosen = Some(f64::from(count) / f64::from(DRAWS));
        }
        Ok(())
    }
}

fn in_words(key: &HashKey) -> String {
    match key {
        HashKey::Header(name) => format!("header:{name}"),
        HashKey::Cookie(name) => format!("cookie:{name}"),
        HashKey::ClientIp => "client_ip".to_owned(),
    }
}
