//! The tasks that keep what is known of upstreams current: addresses behind names, and health.
//! A reload lets those go on whose upstream and orders are still the same.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::pool::Pool;
use super::probe::{self, Checks, keep_probed};
use super::resolve::keep_resolved;
use crate::clock::Clock;
use crate::config::plan::Dns;
use crate::observe::event::Events;

/// All such tasks, by their upstream's id.
#[derive(Debug)]
pub struct Upkeep {
    runtime: Handle,
    clock: Clock,
    events: Arc<Events>,
    tasks: HashMap<usize, Tasks>,
}

/// Those of one upstream, with what they were told.
#[derive(Debug, Default)]
struct Tasks {
    probing: Option<(Checks, AbortHandle)>,
    resolving: Option<(Dns, AbortHandle)>,
}

impl Upkeep {
    /// None yet; they will run in `runtime`.
    pub fn new(runtime: Handle, clock: Clock, events: &Arc<Events>) -> Self {
        Self { runtime, clock, events: events.clone(), tasks: HashMap::new() }
    }

    /// Sees to it that the upstreams of `pool` that are new are taken care of.
    pub fn begin(&mut self, pool: &Pool) {
        for ix in 0..pool.upstreams.len() {
            if !self.tasks.contains_key(&pool.upstreams[ix].id) {
                self.take_care(pool, ix);
            }
        }
    }

    /// Sees to it that exactly the upstreams of `pools` are taken care of, as these say.
    pub fn keep(&mut self, pools: &[Arc<Pool>]) {
        let mut before = std::mem::take(&mut self.tasks);
        for pool in pools {
            for (ix, upstream) in pool.upstreams.iter().enumerate() {
                self.tasks.insert(upstream.id, before.remove(&upstream.id).unwrap_or_default());
                self.take_care(pool, ix);
            }
        }
    }

    fn take_care(&mut self, pool: &Pool, ix: usize) {
        let (Some(upstream), Some(plan)) = (pool.upstreams.get(ix), pool.plan.upstreams.get(ix))
        else {
            return;
        };
        let tasks = self.tasks.entry(upstream.id).or_default();
        let checks = Checks::of(&pool.plan, plan);
        if tasks.probing.as_ref().map(|(checks, _)| checks) != checks.as_ref() {
            stop(tasks.probing.take());
            tasks.probing = checks.map(|checks| {
                let pause = probe::first_pause(&checks, ix, pool.upstreams.len());
                let (upstream, lineage) = (upstream.clone(), pool.lineage.clone());
                let task = keep_probed(upstream, lineage, checks.clone(), pause, self.clock);
                (checks, self.runtime.spawn(task).abort_handle())
            });
        }
        let dns = upstream.is_named().then(|| pool.plan.dns.clone());
        if tasks.resolving.as_ref().map(|(dns, _)| dns) != dns.as_ref() {
            stop(tasks.resolving.take());
            tasks.resolving = dns.map(|dns| {
                let (upstream, lineage) = (upstream.clone(), pool.lineage.clone());
                let events = self.events.clone();
                let task = keep_resolved(upstream, lineage, dns.clone(), self.clock, events);
                (dns, self.runtime.spawn(task).abort_handle())
            });
        }
    }
}

fn stop<T>(task: Option<(T, AbortHandle)>) {
    if let Some((_, task)) = task {
        task.abort();
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        stop(self.probing.take());
        stop(self.resolving.take());
    }
}
