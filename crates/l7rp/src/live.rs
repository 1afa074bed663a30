//! What is in force: a plan with the live objects that it needs. An exchange pins one
//! snapshot and uses it to its end, whatever is put in force meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use l7rp_core::attempts;
use l7rp_core::http1::{Limits, encode::Changes};
use l7rp_core::limit::Slots;
use l7rp_core::route::{self, Table};

use crate::clock::Clock;
use crate::config::plan::{self, Plan};
use crate::limiter::Limiter;
use crate::observe::event::Events;
use crate::observe::stats::{ListenerStats, RouteStats};
use crate::upstream::pool::Pool;

/// A plan in force.
#[derive(Debug)]
pub struct Snapshot {
    /// As configured.
    pub plan: Plan,
    /// Finds the route of a request; gives indices of `routes`.
    pub table: Table,
    /// In file order.
    pub routes: Vec<Route>,
    /// By the index that routes use.
    pub pools: Vec<Arc<Pool>>,
    /// By the index that routes use.
    pub listeners: Vec<Arc<Listener>>,
}

/// A route.
#[derive(Debug)]
pub struct Route {
    /// As configured.
    pub plan: plan::Route,
    /// Fields on the way to the upstream.
    pub request_changes: Changes,
    /// Fields on the way to the client.
    pub response_changes: Changes,
    /// What may be tried again.
    pub retry: Option<attempts::Rules>,
    /// How often clients may come.
    pub limiter: Option<Limiter>,
    /// One shard for each worker.
    pub stats: Vec<RouteStats>,
}

/// A listener.
#[derive(Debug)]
pub struct Listener {
    /// As configured.
    pub plan: plan::Listener,
    /// Its place among the listeners.
    pub index: usize,
    /// Bounds of a request head.
    pub limits: Limits,
    /// Requests in progress.
    pub slots: Slots,
    /// Connections.
    pub connections: Slots,
    /// One shard for each worker.
    pub stats: Vec<ListenerStats>,
}

/// What the whole process shares.
#[derive(Debug)]
pub struct Process {
    /// The only reader of time.
    pub clock: Clock,
    /// Where events go.
    pub events: Arc<Events>,
    /// Number of workers.
    pub workers: usize,
    /// Requests in progress.
    pub slots: Slots,
    /// Wall-clock ms when the process began to serve.
    pub started_ms: u64,
    /// Panics that were caught.
    pub panics: crate::observe::panics::Panics,
    live: ArcSwap<Snapshot>,
    generation: AtomicU64,
    leaving: AtomicBool,
    draining: AtomicBool,
    access_log: bool,
}

impl Process {
    /// A process that serves `snapshot`.
    pub fn new(clock: Clock, events: Arc<Events>, workers: usize, snapshot: Snapshot) -> Self {
        Self {
            clock,
            events,
            workers,
            slots: Slots::new(snapshot.plan.max_in_flight),
            started_ms: crate::clock::wall_ms(),
            access_log: snapshot.plan.access_log,
            panics: crate::observe::panics::Panics::default(),
            live: ArcSwap::from_pointee(snapshot),
            generation: AtomicU64::new(1),
            leaving: AtomicBool::new(false),
            draining: AtomicBool::new(false),
        }
    }

    /// The snapshot in force.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.live.load_full()
    }

    /// Whether each request writes a line.
    pub fn access_log(&self) -> bool {
        self.access_log
    }

    /// Changes with every snapshot that is put in force.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Whether the process is on its way out: connections end after their request.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Begins to drain.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Says that no more traffic should be sent here, while all that comes is still served.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Relaxed);
    }

    /// Whether the process should be sent traffic: not draining, and some pool that a route
    /// uses has an upstream that can be chosen.
    pub fn is_ready(&self) -> bool {
        let snapshot = self.live.load();
        let mut pools = snapshot
            .routes
            .iter()
            .filter_map(|route| match route.plan.action {
                plan::Action::Pool(ix) => snapshot.pools.get(ix),
                _ => None,
            })
            .peekable();
        // Routes that answer by themselves need no upstream.
        let can_answer =
            pools.peek().is_none() || pools.any(|pool| pool.has_eligible(self.clock.now()));
        !self.leaving.load(Ordering::Relaxed) && !self.is_draining() && can_answer
    }
}

impl Snapshot {
    /// Makes what `plan` needs.
    pub fn new(plan: Plan, workers: usize, max_open_files: u64, events: &Arc<Events>) -> Self {
        let mut next_id = 0;
        let pools = plan
            .pools
            .iter()
            .map(|pool| Arc::new(Pool::new(pool, workers, &mut next_id, events)))
            .collect();
        let listeners = plan
            .listeners
            .iter()
            .enumerate()
            .map(|(ix, listener)| Arc::new(Listener::new(listener, ix, workers, max_open_files)))
            .collect();
        let rules = plan.routes.iter().map(rule).collect::<Vec<_>>();
        let routes = plan.routes.iter().map(|route| Route::new(route, workers)).collect();
        Self { table: Table::new(rules), routes, pools, listeners, plan }
    }
}

impl Listener {
    fn new(plan: &plan::Listener, index: usize, workers: usize, max_open_files: u64) -> Self {
        let max_connections = match plan.max_connections {
            // The other half is for connections to upstreams, files and the admin port.
            0 => u32::try_from(max_open_files / 2).unwrap_or(u32::MAX).max(1),
            n => n,
        };
        Self {
            plan: plan.clone(),
            index,
            limits: Limits {
                max_head: plan.timeouts.max_header_bytes,
                max_fields: plan.limits.max_headers,
                max_target: plan.limits.max_target_bytes,
            },
            slots: Slots::new(plan.max_in_flight),
            connections: Slots::new(max_connections),
            stats: (0..workers).map(|_| ListenerStats::default()).collect(),
        }
    }
}

impl Route {
    fn new(plan: &plan::Route, workers: usize) -> Self {
        Self {
            request_changes: changes(&plan.headers.add_request, &plan.headers.remove_request),
            response_changes: changes(&plan.headers.add_response, &plan.headers.remove_response),
            retry: plan.retry.as_ref().map(retry_rules),
            limiter: plan.rate_limit.as_ref().map(Limiter::new),
            stats: (0..workers).map(|_| RouteStats::default()).collect(),
            plan: plan.clone(),
        }
    }
}

fn retry_rules(plan: &plan::Retry) -> attempts::Rules {
    attempts::Rules {
        max_attempts: plan.max_attempts,
        methods: plan.methods.clone(),
        retry_on: plan.retry_on.clone(),
        backoff: plan.backoff,
        hedge_after: plan.hedge_after,
        hedge_after_percentile: plan.hedge_after_percentile,
        hedgeable: plan.hedgeable.clone(),
    }
}

fn changes(add: &[(String, String)], remove: &[String]) -> Changes {
    let added = add.iter().map(|(name, _)| name);
    Changes { drop: remove.iter().chain(added).cloned().collect(), add: add.to_vec() }
}

fn rule(route: &plan::Route) -> route::Rule {
    route::Rule {
        host: match &route.host {
            plan::HostPattern::Any => route::HostPattern::Any,
            plan::HostPattern::Exact(host) => route::HostPattern::Exact(host.clone()),
            plan::HostPattern::Wildcard(suffix) => route::HostPattern::Wildcard(suffix.clone()),
        },
        prefix: route.path_prefix.clone(),
        methods: route.methods.clone(),
        predicates: route.predicates.clone(),
        listeners: route.listeners.clone(),
    }
}
