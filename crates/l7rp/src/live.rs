//! What is in force: a plan with the live objects that it needs. An exchange pins one
//! snapshot and uses it to its end, whatever is put in force meanwhile.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use l7rp_core::attempts;
use l7rp_core::http1::{Limits, encode::Changes};
use l7rp_core::limit::Slots;
use l7rp_core::names::Nanos;
use l7rp_core::route::{self, Table};

use crate::clock::Clock;
use crate::config::plan::{self, Plan};
use crate::limiter::Limiter;
use crate::observe::event::Events;
use crate::observe::stats::{ListenerStats, Reloads, RouteStats, WorkerStats};
use crate::upstream::pool::{Making, Pool};

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
    pub limiter: Option<Arc<Limiter>>,
    /// One shard for each worker.
    pub stats: Arc<[RouteStats]>,
}

/// A listener.
#[derive(Debug)]
pub struct Listener {
    /// As configured.
    pub plan: plan::Listener,
    /// Its place among the listeners.
    pub index: usize,
    /// The [`Door::id`] of the address that it listens on.
    pub door: u64,
    /// Bounds of a request head.
    pub limits: Limits,
    /// Requests in progress.
    pub slots: Arc<Slots>,
    /// Connections.
    pub connections: Arc<Slots>,
    /// One shard for each worker.
    pub stats: Arc<[ListenerStats]>,
}

/// An address that is listened on. It outlives the plans that use it; connections remember
/// through which one they came in.
#[derive(Debug)]
pub struct Door {
    /// Never used twice in a process.
    pub id: u64,
    /// Set once nothing in force uses it: the last snapshot that did. Who came in here before
    /// is served by it where no listener has taken the place of this one.
    closed: OnceLock<Arc<Snapshot>>,
    handed_over: AtomicBool,
}

impl Door {
    /// One with this id.
    pub fn new(id: u64) -> Self {
        Self { id, closed: OnceLock::new(), handed_over: AtomicBool::new(false) }
    }

    /// Another process has its sockets too, and goes on accepting.
    pub fn hand_over(&self) {
        self.handed_over.store(true, Ordering::Relaxed);
    }

    /// Whether [`Door::hand_over`] was called.
    pub fn is_handed_over(&self) -> bool {
        self.handed_over.load(Ordering::Relaxed)
    }

    /// Nothing in force uses it any more; `last` was the last that did.
    pub fn close(&self, last: Arc<Snapshot>) {
        let _ = self.closed.set(last);
    }

    /// Whether connections that came in here end after their request.
    pub fn is_closed(&self) -> bool {
        self.closed.get().is_some()
    }

    /// The listener and the snapshot that now serve those who came in here by `listener`.
    pub fn serving<'a>(
        &'a self,
        listener: &'a Arc<Listener>,
        in_force: &'a Arc<Snapshot>,
    ) -> (&'a Arc<Listener>, &'a Arc<Snapshot>) {
        let of = |snapshot: &'a Arc<Snapshot>| {
            snapshot.listener_after(listener, self.id).map(|found| (found, snapshot))
        };
        let found = of(in_force).or_else(|| self.closed.get().and_then(of));
        found.unwrap_or((listener, in_force))
    }
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
    /// What reloads have come to.
    pub reloads: Reloads,
    /// What workers count beside what belongs to routes, upstreams and listeners.
    pub counts: Vec<WorkerStats>,
    /// What pools are made with.
    pub making: Making,
    max_open_files: u64,
    live: ArcSwap<Snapshot>,
    generation: AtomicU64,
    leaving: AtomicBool,
    /// When draining began, in ns; 0: it has not.
    draining_since: AtomicU64,
    /// What is left is ended in order.
    ending: AtomicBool,
    access_log: AtomicBool,
}

impl Process {
    /// A process that serves `plan` on `doors`, one for each listener.
    pub fn new(
        clock: Clock,
        events: &Arc<Events>,
        workers: usize,
        max_open_files: u64,
        plan: Plan,
        doors: &[Arc<Door>],
    ) -> Self {
        let making = Making::new(workers, events);
        let snapshot = Snapshot::new(plan, doors, None, &making, max_open_files, clock.now());
        Self {
            clock,
            events: events.clone(),
            workers,
            slots: Slots::new(snapshot.plan.max_in_flight),
            started_ms: crate::clock::wall_ms(),
            access_log: AtomicBool::new(snapshot.plan.access_log),
            panics: crate::observe::panics::Panics::default(),
            reloads: Reloads::default(),
            counts: (0..workers).map(|_| WorkerStats::default()).collect(),
            making,
            max_open_files,
            live: ArcSwap::from_pointee(snapshot),
            generation: AtomicU64::new(1),
            leaving: AtomicBool::new(false),
            draining_since: AtomicU64::new(0),
            ending: AtomicBool::new(false),
        }
    }

    /// What `plan` would put in force: live objects of the snapshot in force go on where nothing
    /// about them changes. Nothing changes before [`Process::put_in_force`].
    pub fn prepare(&self, plan: Plan, doors: &[Arc<Door>]) -> Snapshot {
        let old = self.snapshot();
        let now = self.clock.now();
        Snapshot::new(plan, doors, Some(&old), &self.making, self.max_open_files, now)
    }

    /// Puts a snapshot in force for every exchange that begins from now on; gives the one before.
    pub fn put_in_force(&self, new: Snapshot) -> Arc<Snapshot> {
        self.slots.set_max(new.plan.max_in_flight);
        self.access_log.store(new.plan.access_log, Ordering::Relaxed);
        let new = Arc::new(new);
        let old = self.live.swap(new.clone());
        new.take_over(&old, self.max_open_files);
        self.generation.fetch_add(1, Ordering::Release);
        old
    }

    /// The snapshot in force.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.live.load_full()
    }

    /// Whether each request writes a line.
    pub fn access_log(&self) -> bool {
        self.access_log.load(Ordering::Relaxed)
    }

    /// Changes with every snapshot that is put in force.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Whether the process is on its way out: connections end after their request.
    pub fn is_draining(&self) -> bool {
        self.draining_since.load(Ordering::Relaxed) != 0
    }

    /// When draining began.
    pub fn draining_since(&self) -> Option<Nanos> {
        match self.draining_since.load(Ordering::Relaxed) {
            0 => None,
            at => Some(Nanos(at)),
        }
    }

    /// Begins to drain.
    pub fn drain(&self) {
        let now = self.clock.now().0.max(1);
        let _ = self.draining_since.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The grace is over: tunnels are closed in order.
    pub fn end(&self) {
        self.ending.store(true, Ordering::Relaxed);
    }

    /// Whether the grace is over.
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
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
    /// Makes what `plan` needs, and takes from `old` what stays. `doors`: one for each listener.
    fn new(
        plan: Plan,
        doors: &[Arc<Door>],
        old: Option<&Self>,
        making: &Making,
        max_open_files: u64,
        now: Nanos,
    ) -> Self {
        let pools = plan.pools.iter().map(|pool| {
            let before = old.and_then(|old| old.pools.iter().find(|p| p.plan.name == pool.name));
            match before {
                Some(before) if before.plan == *pool => before.clone(),
                _ => Pool::new(pool, before.map(AsRef::as_ref), making, now),
            }
        });
        let pools = pools.collect();
        let listeners = plan.listeners.iter().zip(doors).enumerate().map(|(ix, (plan, door))| {
            let before = old
                .and_then(|old| old.listeners.iter().find(|before| before.plan.name == plan.name));
            let same = before.filter(|b| b.plan == *plan && b.index == ix && b.door == door.id);
            same.cloned().unwrap_or_else(|| {
                let before = before.map(AsRef::as_ref);
                Arc::new(Listener::new(plan, ix, door, before, making.workers, max_open_files))
            })
        });
        let listeners = listeners.collect();
        let known: HashMap<&str, &Route> = old
            .map(|old| old.routes.iter().map(|route| (route.plan.name.as_str(), route)).collect())
            .unwrap_or_default();
        let routes = plan.routes.iter().map(|route| {
            Route::new(route, known.get(route.name.as_str()).copied(), making.workers)
        });
        let routes = routes.collect();
        let rules = plan.routes.iter().map(rule).collect::<Vec<_>>();
        Self { table: Table::new(rules), routes, pools, listeners, plan }
    }

    /// Puts new rules in force for what is shared with `old`, and retires what is not.
    fn take_over(&self, old: &Self, max_open_files: u64) {
        for listener in &self.listeners {
            listener.slots.set_max(listener.plan.max_in_flight);
            listener.connections.set_max(max_connections(&listener.plan, max_open_files));
        }
        for pool in &self.pools {
            if !old.pools.iter().any(|before| Arc::ptr_eq(before, pool)) {
                pool.take_over();
            }
        }
        let used: HashSet<usize> =
            self.pools.iter().flat_map(|pool| &pool.upstreams).map(|u| u.id).collect();
        let before = old.pools.iter().flat_map(|pool| &pool.upstreams);
        for upstream in before.filter(|upstream| !used.contains(&upstream.id)) {
            upstream.retire();
        }
    }

    /// The listener of those that came in by `listener`, which may be of an older snapshot, at
    /// this door: most of the time it is the same.
    fn listener_after(&self, listener: &Arc<Listener>, door: u64) -> Option<&Arc<Listener>> {
        let same = self.listeners.get(listener.index).filter(|l| Arc::ptr_eq(l, listener));
        let all = || self.listeners.iter();
        same.or_else(|| all().find(|l| l.door == door))
            .or_else(|| all().find(|l| l.plan.name == listener.plan.name))
    }
}

impl Listener {
    fn new(
        plan: &plan::Listener,
        index: usize,
        door: &Door,
        before: Option<&Self>,
        workers: usize,
        max_open_files: u64,
    ) -> Self {
        Self {
            plan: plan.clone(),
            index,
            door: door.id,
            limits: Limits {
                max_head: plan.timeouts.max_header_bytes,
                max_fields: plan.limits.max_headers,
                max_target: plan.limits.max_target_bytes,
            },
            slots: before
                .map_or_else(|| Arc::new(Slots::new(plan.max_in_flight)), |b| b.slots.clone()),
            connections: before.map_or_else(
                || Arc::new(Slots::new(max_connections(plan, max_open_files))),
                |before| before.connections.clone(),
            ),
            stats: before.map_or_else(
                || (0..workers).map(|_| ListenerStats::default()).collect(),
                |before| before.stats.clone(),
            ),
        }
    }
}

fn max_connections(plan: &plan::Listener, max_open_files: u64) -> u32 {
    match plan.max_connections {
        // The other half is for connections to upstreams, files and the admin port.
        0 => u32::try_from(max_open_files / 2).unwrap_or(u32::MAX).max(1),
        n => n,
    }
}

impl Route {
    fn new(plan: &plan::Route, before: Option<&Self>, workers: usize) -> Self {
        let limiter = plan.rate_limit.as_ref().map(|rule| {
            let known = before.filter(|before| before.plan.rate_limit.as_ref() == Some(rule));
            let known = known.and_then(|before| before.limiter.clone());
            known.unwrap_or_else(|| Arc::new(Limiter::new(rule)))
        });
        Self {
            request_changes: changes(&plan.headers.add_request, &plan.headers.remove_request),
            response_changes: changes(&plan.headers.add_response, &plan.headers.remove_response),
            retry: plan.retry.as_ref().map(retry_rules),
            limiter,
            stats: before.map_or_else(
                || (0..workers).map(|_| RouteStats::default()).collect(),
                |before| before.stats.clone(),
            ),
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
