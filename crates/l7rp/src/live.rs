//! What is in force: a plan with the live objects that it needs. An exchange pins one
//! snapshot and uses it to its end, whatever is put in force meanwhile.

mod going;
mod pools;
mod unready;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use l7rp_core::attempts;
use l7rp_core::http1::{Limits, encode::Changes};
use l7rp_core::limit::{Bucket, Slots};
use l7rp_core::names::Nanos;
use l7rp_core::route::{self, Table};

use crate::acme::Tokens;
use crate::clock::{Clock, wall_ms};
use crate::config::plan::{self, Plan};
use crate::limiter::Limiter;
use crate::observe::event::Events;
use crate::observe::stats::{ListenerStats, Reloads, RouteStats, WorkerStats};
use crate::observe::traces::Tracer;
use crate::orders::Desk;
use crate::tls::{Material, Originator, Terminator};
use crate::upstream::pool::{Making, Pool};

pub use going::Going;
pub use unready::Unready;

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
    /// Names of fields by which only the proxy may speak.
    pub guarded: Changes,
    /// Makes spans, if anybody wants them.
    pub tracer: Option<Arc<Tracer>>,
    /// 1 at the start, and one more with each that is put in force.
    pub generation: u64,
    /// Wall-clock ms when it was put in force.
    pub taken_ms: u64,
    /// TLS towards the upstreams of each pool.
    tls: Vec<Option<Arc<Originator>>>,
}

/// What a plan needs that was opened, read or begun for it.
#[derive(Debug)]
pub struct Made {
    /// The [`Door::id`]s of each listener.
    pub doors: Vec<Vec<u64>>,
    /// Certificates and keys.
    pub tls: Material,
    /// Makes spans.
    pub tracer: Option<Arc<Tracer>>,
}

/// A route.
#[derive(Debug)]
pub struct Route {
    /// As configured.
    pub plan: plan::Route,
    /// Fields on the way to the upstream.
    pub request_changes: Changes,
    /// The same, if it takes anything away: for trailers.
    pub dropped: Option<Arc<Changes>>,
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
    /// The [`Door::id`]s of the addresses that it listens on: its own, and others that are open
    /// and part of it.
    pub doors: Vec<u64>,
    /// TLS, if it is spoken here.
    pub tls: Option<Arc<Terminator>>,
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
    /// Connections that came in here.
    pub inside: AtomicUsize,
    /// Set before nothing in force uses it any more.
    closed: OnceLock<Closed>,
    kept: AtomicBool,
}

/// Who serves those that came in at a door which is closed.
#[derive(Debug)]
struct Closed {
    /// The door that its listener has moved to, if it has.
    moved_to: Option<u64>,
    /// The last snapshot that used it.
    last: Arc<Snapshot>,
}

impl Door {
    /// One with this id.
    pub fn new(id: u64) -> Self {
        Self {
            id,
            inside: AtomicUsize::new(0),
            closed: OnceLock::new(),
            kept: AtomicBool::new(false),
        }
    }

    /// Another process has its sockets too, a successor or a service manager: what waits in them
    /// is its, once this process does not accept any more.
    pub fn keep_for_another(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }

    /// Whether [`Door::keep_for_another`] was called.
    pub fn is_kept(&self) -> bool {
        self.kept.load(Ordering::Relaxed)
    }

    /// Nothing will use it any more after `last`. To be called before something else is put in
    /// force, so that nobody is ever without a listener. `moved_to`: the [`Door::id`] of the
    /// address that its listener has from then on.
    pub fn close(&self, last: Arc<Snapshot>, moved_to: Option<u64>) {
        let _ = self.closed.set(Closed { moved_to, last });
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
    ) -> Option<(&'a Arc<Listener>, &'a Arc<Snapshot>)> {
        let at = |snapshot: &'a Arc<Snapshot>, door| {
            snapshot.listener_at(listener, door).map(|found| (found, snapshot))
        };
        at(in_force, self.id).or_else(|| {
            let Closed { moved_to, last } = self.closed.get()?;
            moved_to.and_then(|door| at(in_force, door)).or_else(|| at(last, self.id))
        })
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
    /// Where the admin endpoints leave what only the main thread can do. In a new process nobody
    /// comes for it.
    pub desk: Desk,
    /// How often the token of the admin endpoints may be guessed wrong.
    pub guesses: Bucket,
    /// What workers count beside what belongs to routes, upstreams and listeners.
    pub counts: Vec<WorkerStats>,
    /// What pools are made with.
    pub making: Making,
    /// What CAs are answered that look at a challenge.
    pub tokens: Arc<Tokens>,
    /// It has taken over from another one.
    pub took_over: AtomicBool,
    max_open_files: u64,
    live: ArcSwap<Snapshot>,
    generation: AtomicU64,
    leaving: AtomicBool,
    /// When draining began, in ns; 0: it has not.
    draining_since: AtomicU64,
    /// What is left is ended in order.
    ending: AtomicBool,
    /// Another process is about to serve in the place of this one.
    upgrading: AtomicBool,
    /// Another process serves in the place of this one.
    succeeded: AtomicBool,
    access_log: AtomicBool,
}

impl Process {
    /// A process that serves `plan` on `doors`: their ids, for each listener.
    pub fn new(
        clock: Clock,
        events: &Arc<Events>,
        workers: usize,
        max_open_files: u64,
        plan: Plan,
        made: Made,
    ) -> Self {
        let making = Making::new(workers, events);
        let now = clock.now();
        let snapshot = Snapshot::new(plan, made, None, &making, max_open_files, now);
        Self {
            clock,
            events: events.clone(),
            workers,
            slots: Slots::new(snapshot.plan.max_in_flight),
            started_ms: wall_ms(),
            access_log: AtomicBool::new(snapshot.plan.access_log),
            panics: crate::observe::panics::Panics::default(),
            reloads: Reloads::default(),
            desk: Desk::default(),
            guesses: Bucket::default(),
            counts: (0..workers).map(|_| WorkerStats::default()).collect(),
            making,
            tokens: Arc::default(),
            took_over: AtomicBool::new(false),
            max_open_files,
            live: ArcSwap::from_pointee(snapshot),
            generation: AtomicU64::new(1),
            leaving: AtomicBool::new(false),
            draining_since: AtomicU64::new(0),
            ending: AtomicBool::new(false),
            upgrading: AtomicBool::new(false),
            succeeded: AtomicBool::new(false),
        }
    }

    /// What `plan` would put in force: live objects of the snapshot in force go on where nothing
    /// about them changes. Nothing changes before [`Process::put_in_force`].
    pub fn prepare(&self, plan: Plan, made: Made) -> Snapshot {
        let old = self.snapshot();
        let now = self.clock.now();
        Snapshot::new(plan, made, Some(&old), &self.making, self.max_open_files, now)
    }

    /// Puts a snapshot in force for every exchange that begins from now on; gives the one before.
    pub fn put_in_force(&self, mut new: Snapshot) -> Arc<Snapshot> {
        (new.generation, new.taken_ms) = (self.generation() + 1, wall_ms());
        self.slots.set_max(new.plan.max_in_flight);
        self.access_log.store(new.plan.access_log, Ordering::Relaxed);
        let new = Arc::new(new);
        let old = self.live.swap(new.clone());
        new.take_over(&old, self.max_open_files, self.clock.now());
        self.generation.store(new.generation, Ordering::Release);
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

    /// Says whether another process is about to serve in the place of this one: it does not hear
    /// of what an operator wants in the meantime.
    pub fn set_upgrading(&self, upgrading: bool) {
        self.upgrading.store(upgrading, Ordering::Relaxed);
    }

    /// What was said last to [`Process::set_upgrading`].
    pub fn is_upgrading(&self) -> bool {
        self.upgrading.load(Ordering::Relaxed)
    }

    /// Another process serves in the place of this one from now on.
    pub fn set_succeeded(&self) {
        self.succeeded.store(true, Ordering::Relaxed);
    }

    /// Whether [`Process::set_succeeded`] was called.
    pub fn is_succeeded(&self) -> bool {
        self.succeeded.load(Ordering::Relaxed)
    }

    /// Whether the service should be sent traffic: not draining, and some pool that a route
    /// uses has an upstream that can be chosen.
    pub fn is_ready(&self) -> bool {
        self.why_unready().is_none()
    }

    /// Why it should not be; `None`: it should.
    pub fn why_unready(&self) -> Option<Unready> {
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
        let is_leaving = self.leaving.load(Ordering::Relaxed) || self.is_draining();
        // With a successor, whoever still asks here asks about the service, which goes on.
        if is_leaving && !self.is_succeeded() {
            return Some(Unready::Leaving);
        }
        (!can_answer).then_some(Unready::NoBackend)
    }
}

impl Snapshot {
    /// What was opened, read or begun for it: for a plan that needs nothing else.
    pub fn made(&self) -> Made {
        let listeners = self.listeners.iter();
        let tls = Material {
            listeners: listeners.clone().map(|listener| listener.tls.clone()).collect(),
            pools: self.tls.clone(),
        };
        let doors = listeners.map(|listener| listener.doors.clone()).collect();
        Made { doors, tls, tracer: self.tracer.clone() }
    }

    /// Makes what `plan` needs, and takes from `old` what stays.
    fn new(
        plan: Plan,
        Made { doors, tls, tracer }: Made,
        old: Option<&Self>,
        making: &Making,
        max_open_files: u64,
        now: Nanos,
    ) -> Self {
        let pools = pools::of_plan(&plan, old.map_or(&[], |old| &old.pools), making, now);
        for (pool, tls) in pools.iter().zip(&tls.pools) {
            // New ones are probed before they are in force.
            pool.begin_tls(tls.as_ref());
        }
        let by_name: HashMap<&str, &Arc<Listener>> = old
            .map(|old| old.listeners.iter().map(|l| (l.plan.name.as_str(), l)).collect())
            .unwrap_or_default();
        let listeners = plan.listeners.iter().zip(doors).enumerate().map(|(ix, (plan, doors))| {
            let named = by_name.get(plan.name.as_str()).copied();
            let tls = tls.listeners.get(ix).cloned().flatten();
            let same_tls =
                |b: &Listener| b.tls.as_ref().map(Arc::as_ptr) == tls.as_ref().map(Arc::as_ptr);
            let same = named
                .filter(|b| same_tls(b) && b.plan == *plan && b.index == ix && b.doors == doors);
            same.cloned().unwrap_or_else(|| {
                let mut listener = Listener::new(plan, ix, doors, making.workers, max_open_files);
                listener.tls = tls;
                if let Some(named) = named {
                    listener.stats = named.stats.clone();
                }
                // Connections and requests in progress are those of an address.
                let all = || old.into_iter().flat_map(|old| &old.listeners);
                let here = all().find(|b| listener.doors.first().is_some_and(|d| b.uses(*d)));
                if let Some(before) = here.or(named) {
                    listener.slots = before.slots.clone();
                    listener.connections = before.connections.clone();
                }
                Arc::new(listener)
            })
        });
        let listeners: Vec<Arc<Listener>> = listeners.collect();
        // On all listeners: the pool behind them cannot tell by which one a request came.
        let guarded = listeners.iter().filter_map(|listener| listener.identity_header());
        let guarded: Vec<_> = guarded.map(str::to_owned).collect();
        let known: HashMap<&str, &Route> = old
            .map(|old| old.routes.iter().map(|route| (route.plan.name.as_str(), route)).collect())
            .unwrap_or_default();
        let routes = plan.routes.iter().map(|route| {
            let before = known.get(route.name.as_str()).copied();
            Route::new(route, before, making.workers, &guarded)
        });
        let routes = routes.collect();
        let rules = plan.routes.iter().map(rule).collect::<Vec<_>>();
        Self {
            table: Table::new(rules),
            routes,
            pools,
            listeners,
            guarded: Changes { guarded, ..Changes::default() },
            tls: tls.pools,
            tracer,
            generation: 1,
            taken_ms: wall_ms(),
            plan,
        }
    }

    /// Puts new rules in force for what is shared with `old`, and retires what is not.
    fn take_over(&self, old: &Self, max_open_files: u64, now: Nanos) {
        for listener in &self.listeners {
            listener.slots.set_max(listener.plan.max_in_flight);
            listener.connections.set_max(max_connections(&listener.plan, max_open_files));
        }
        let kept: HashSet<*const Pool> = old.pools.iter().map(Arc::as_ptr).collect();
        for pool in self.pools.iter().filter(|pool| !kept.contains(&Arc::as_ptr(pool))) {
            pool.take_over(now);
        }
        for (pool, tls) in self.pools.iter().zip(&self.tls) {
            pool.set_tls(tls.as_ref());
        }
        let used: HashSet<usize> =
            self.pools.iter().flat_map(|pool| &pool.upstreams).map(|u| u.id).collect();
        let before = old.pools.iter().flat_map(|pool| &pool.upstreams);
        for upstream in before.filter(|upstream| !used.contains(&upstream.id)) {
            upstream.retire();
        }
    }

    /// The listener that uses a door: most of the time it is the same as before.
    fn listener_at(&self, before: &Arc<Listener>, door: u64) -> Option<&Arc<Listener>> {
        let same = self.listeners.get(before.index).filter(|l| Arc::ptr_eq(l, before));
        same.or_else(|| self.listeners.iter().find(|l| l.uses(door)))
    }
}

impl Listener {
    /// The name of the field that tells upstreams who the client is, by its certificate.
    pub fn identity_header(&self) -> Option<&str> {
        self.plan.tls.as_ref()?.client_auth.as_ref()?.identity_header.as_deref()
    }

    /// Whether it listens at the door with this id.
    pub fn uses(&self, door: u64) -> bool {
        self.doors.contains(&door)
    }

    fn new(
        plan: &plan::Listener,
        index: usize,
        doors: Vec<u64>,
        workers: usize,
        max_open_files: u64,
    ) -> Self {
        Self {
            plan: plan.clone(),
            index,
            doors,
            tls: None,
            limits: Limits {
                max_head: plan.timeouts.max_header_bytes,
                max_fields: plan.limits.max_headers,
                max_target: plan.limits.max_target_bytes,
            },
            slots: Arc::new(Slots::new(plan.max_in_flight)),
            connections: Arc::new(Slots::new(max_connections(plan, max_open_files))),
            stats: (0..workers).map(|_| ListenerStats::default()).collect(),
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
    fn new(plan: &plan::Route, before: Option<&Self>, workers: usize, guarded: &[String]) -> Self {
        let limiter = plan.rate_limit.as_ref().map(|rule| {
            let known = before.filter(|before| before.plan.rate_limit.as_ref() == Some(rule));
            let known = known.and_then(|before| before.limiter.clone());
            known.unwrap_or_else(|| Arc::new(Limiter::new(rule)))
        });
        let mut request_changes = changes(&plan.headers.add_request, &plan.headers.remove_request);
        request_changes.guarded = guarded.to_vec();
        let takes_away = !request_changes.drop.is_empty() || !guarded.is_empty();
        Self {
            dropped: takes_away.then(|| Arc::new(request_changes.clone())),
            request_changes,
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
        retry_on_grpc: plan.retry_on_grpc.clone(),
        backoff: plan.backoff,
        hedge_after: plan.hedge_after,
        hedge_after_percentile: plan.hedge_after_percentile,
        hedgeable: plan.hedgeable.clone(),
    }
}

fn changes(add: &[(String, String)], remove: &[String]) -> Changes {
    let added = add.iter().map(|(name, _)| name);
    let drop = remove.iter().chain(added).cloned().collect();
    Changes { drop, add: add.to_vec(), guarded: Vec::new() }
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
