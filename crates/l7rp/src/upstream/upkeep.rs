//! The tasks that keep what is known of upstreams current: addresses behind names, and health.
//! A reload gives them other orders, and lets what is under way come to its end.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::lineage::Lineage;
use super::pool::{Pool, Upstream};
use super::probe::{self, Checks, keep_probed};
use super::resolve::keep_resolved;
use crate::clock::Clock;
use crate::config::plan::Dns;
use crate::observe::event::Events;

/// What the tasks of an upstream are to do.
#[derive(Clone, Debug)]
pub struct Orders {
    /// For whom: an heir takes the place of the one before.
    pub upstream: Arc<Upstream>,
    /// Who wants to know.
    pub lineage: Arc<Lineage>,
    /// What is asked, if anything.
    pub checks: Option<Checks>,
    /// How names are resolved.
    pub dns: Dns,
}

/// All such tasks, by the place of their upstream's seat, which heirs share.
#[derive(Debug)]
pub struct Upkeep {
    runtime: Handle,
    clock: Clock,
    events: Arc<Events>,
    tasks: HashMap<usize, Tasks>,
}

/// Those of one upstream.
#[derive(Debug)]
struct Tasks {
    orders: watch::Sender<Orders>,
    probing: Option<AbortHandle>,
    resolving: Option<AbortHandle>,
}

fn key(upstream: &Upstream) -> usize {
    Arc::as_ptr(&upstream.seat) as usize
}

impl Upkeep {
    /// None yet; they will run in `runtime`.
    pub fn new(runtime: Handle, clock: Clock, events: &Arc<Events>) -> Self {
        Self { runtime, clock, events: events.clone(), tasks: HashMap::new() }
    }

    /// Sees to it that the upstreams of `pool` that are new are taken care of.
    pub fn begin(&mut self, pool: &Pool) {
        for (ix, upstream) in pool.upstreams.iter().enumerate() {
            if !self.tasks.contains_key(&key(upstream)) {
                self.take_care(pool, ix, None);
            }
        }
    }

    /// Sees to it that exactly the upstreams of `pools` are taken care of, as these say.
    pub fn keep(&mut self, pools: &[Arc<Pool>]) {
        let mut before = std::mem::take(&mut self.tasks);
        for pool in pools {
            for (ix, upstream) in pool.upstreams.iter().enumerate() {
                self.take_care(pool, ix, before.remove(&key(upstream)));
            }
        }
    }

    fn take_care(&mut self, pool: &Pool, ix: usize, tasks: Option<Tasks>) {
        let (Some(upstream), Some(plan)) = (pool.upstreams.get(ix), pool.plan.upstreams.get(ix))
        else {
            return;
        };
        let orders = Orders {
            upstream: upstream.clone(),
            lineage: pool.lineage.clone(),
            checks: Checks::of(&pool.plan, plan),
            dns: pool.plan.dns.clone(),
        };
        let mut tasks = tasks.unwrap_or_else(|| Tasks {
            orders: watch::Sender::new(orders.clone()),
            probing: None,
            resolving: None,
        });
        let before = tasks.orders.send_replace(orders.clone());
        let same = match (&before.checks, &orders.checks) {
            (Some(before), Some(now)) => before.asks_the_same(now),
            (before, now) => before.is_none() && now.is_none(),
        };
        if !same {
            stop(tasks.probing.take());
        }
        if let Some(checks) = orders.checks.filter(|_| tasks.probing.is_none()) {
            let pause = probe::first_pause(&checks, ix, pool.upstreams.len());
            let task = keep_probed(tasks.orders.subscribe(), pause, self.clock);
            tasks.probing = Some(self.runtime.spawn(task).abort_handle());
        }
        if upstream.is_named() && tasks.resolving.is_none() {
            let task = keep_resolved(tasks.orders.subscribe(), self.clock, self.events.clone());
            tasks.resolving = Some(self.runtime.spawn(task).abort_handle());
        }
        self.tasks.insert(key(upstream), tasks);
    }
}

fn stop(task: Option<AbortHandle>) {
    if let Some(task) = task {
        task.abort();
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        stop(self.probing.take());
        stop(self.resolving.take());
    }
}
