//! One upstream of a pool: its addresses, its load, its breaker, its counts.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use l7rp_core::names::Nanos;
use l7rp_core::pick::Seat;
use l7rp_core::upstream::breaker::{self, Breaker, Trip};
use l7rp_core::upstream::passive::{self, Passive};
use tokio::sync::Notify;

use super::lineage::Lineage;
use super::probe::Checks;
use super::standing::{Probed, Standing};
use crate::config::plan::{self, Scheme, UpstreamProtocol};
use crate::observe::stats::{Transitions, UpstreamStats};
use crate::sync::lock;
use crate::tls::Originator;

/// An upstream. It lives for as long as its pool has its URL, speaks to it in the same way and
/// judges it by the same rules, whatever else a reload changes.
#[derive(Debug)]
pub struct Upstream {
    /// As configured; what identifies it in its pool.
    pub url: String,
    /// A name or an address, without brackets.
    pub host: String,
    /// Where it listens.
    pub port: u16,
    /// Over TLS.
    pub is_tls: bool,
    /// How TLS is spoken, where it is.
    pub(super) tls: ArcSwapOption<Originator>,
    /// The version of HTTP.
    pub speaks: Speaks,
    /// HTTP/2 was agreed on with it last.
    pub(super) agreed_on_h2: AtomicBool,
    /// Host and port as in the URL, for the Host field.
    pub authority: String,
    /// Put before every request path; mostly empty.
    pub base_path: String,
    /// Never used twice in a process; whose idle connections are whose.
    pub id: usize,
    /// Load and latency.
    pub seat: Arc<Seat>,
    /// Takes it out while it fails.
    pub breaker: Breaker,
    /// Scores its answers, where the pool wants that.
    pub passive: Option<Passive>,
    /// One shard for each worker.
    pub stats: Arc<[UpstreamStats]>,
    /// How often breaker and health have changed.
    pub transitions: Arc<Transitions>,
    /// What is known of it beside its breaker. Locked after the lineage, see [`Lineage`].
    ///
    /// [`Lineage`]: super::lineage::Lineage
    pub(super) standing: Mutex<Standing>,
    /// A test of its breaker has lost a race and told nothing; the next one must not.
    pub(super) test_was_lost: AtomicBool,
    /// When it last became eligible, in ns; 0: from the beginning.
    pub(super) eligible_since: AtomicU64,
    /// When it was last probed and when its name was last resolved, in ns; 0: never. Whoever
    /// takes these tasks over goes on from there.
    pub(super) probed_at: AtomicU64,
    pub(super) resolved_at: AtomicU64,
    /// The resolver has answered, good or bad; or need not.
    asked: AtomicBool,
    /// Nothing in force uses it any more.
    retired: AtomicBool,
    /// Whom it takes over from, until it does.
    heir_of: Mutex<Option<Arc<Self>>>,
    /// Who has taken over from it, with the pool that it belongs to.
    heir: OnceLock<(Weak<Self>, Arc<Lineage>)>,
    addresses: ArcSwap<Vec<SocketAddr>>,
    /// Changes with the addresses, so that pooled connections to old ones are dropped.
    address_generation: AtomicU32,
    next_address: AtomicUsize,
    /// When the last event about a failure was written, in ns; 0: never.
    reported: AtomicU64,
    /// The name should be asked for again before its time.
    stale: Notify,
}

impl Upstream {
    /// One that nobody has used yet.
    pub(super) fn new(pool: &plan::Pool, plan: &plan::Upstream, id: usize, workers: usize) -> Self {
        let fixed = plan.host.parse().ok().map(|ip| SocketAddr::new(ip, plan.port));
        let resolved = fixed.is_some();
        Self {
            url: plan.url.clone(),
            host: plan.host.clone(),
            port: plan.port,
            is_tls: plan.scheme == Scheme::Https,
            tls: ArcSwapOption::empty(),
            speaks: speaks(pool.protocol, plan.scheme),
            agreed_on_h2: AtomicBool::new(false),
            authority: plan.authority.clone(),
            base_path: plan.base_path.clone(),
            id,
            seat: Arc::new(Seat::new(plan.max_in_flight)),
            breaker: Breaker::new(&breaker_rules(pool)),
            passive: pool.passive.as_ref().map(|plan| Passive::new(&passive_rules(plan))),
            stats: (0..workers).map(|_| UpstreamStats::default()).collect(),
            transitions: Arc::default(),
            standing: Mutex::new(Standing::new(resolved, Checks::of(pool, plan))),
            test_was_lost: AtomicBool::new(false),
            eligible_since: AtomicU64::new(0),
            probed_at: AtomicU64::new(0),
            resolved_at: AtomicU64::new(0),
            asked: AtomicBool::new(resolved),
            retired: AtomicBool::new(false),
            heir_of: Mutex::new(None),
            heir: OnceLock::new(),
            addresses: ArcSwap::from_pointee(fixed.into_iter().collect()),
            address_generation: AtomicU32::new(0),
            next_address: AtomicUsize::new(0),
            reported: AtomicU64::new(0),
            stale: Notify::new(),
        }
    }

    /// The same upstream, spoken to in another way or judged by other rules: it keeps load,
    /// latency, counts, addresses and standing, and its breaker goes on from where it is when it
    /// takes over. It has connections of its own.
    pub(super) fn under_other_rules(
        self: &Arc<Self>,
        pool: &plan::Pool,
        plan: &plan::Upstream,
        id: usize,
        now: Nanos,
    ) -> Self {
        let heir = Self {
            seat: self.seat.clone(),
            stats: self.stats.clone(),
            transitions: self.transitions.clone(),
            heir_of: Mutex::new(Some(self.clone())),
            ..Self::new(pool, plan, id, 0)
        };
        heir.adopt(self, now);
        heir
    }

    fn adopt(&self, old: &Self, now: Nanos) {
        self.breaker.adopt(&old.breaker, now);
        *lock(&self.standing) = lock(&old.standing).clone();
        for (to, from) in [
            (&self.eligible_since, &old.eligible_since),
            (&self.probed_at, &old.probed_at),
            (&self.resolved_at, &old.resolved_at),
        ] {
            to.store(from.load(Relaxed), Relaxed);
        }
        self.asked.store(old.has_first_answer(), Relaxed);
        self.addresses.store(old.addresses.load_full());
    }

    /// Takes over from the one before it, if there is one: with what is known by now, and with
    /// what will still come to be known of requests that were sent before.
    pub(super) fn take_over(self: &Arc<Self>, lineage: &Arc<Lineage>, now: Nanos) {
        if let Some(old) = lock(&self.heir_of).take() {
            self.adopt(&old, now);
            let _ = old.heir.set((Arc::downgrade(self), lineage.clone()));
        }
    }

    /// Who has taken over from it, and the pool of that one.
    pub(super) fn heir(&self) -> Option<(Arc<Self>, &Arc<Lineage>)> {
        let (heir, lineage) = self.heir.get()?;
        Some((heir.upgrade()?, lineage))
    }

    /// When it last became eligible; `None`: it is from the beginning.
    pub(super) fn warm_from(&self) -> Option<Nanos> {
        Some(self.eligible_since.load(Relaxed)).filter(|&since| since != 0).map(Nanos)
    }

    /// Whether probes have not judged it yet, and were all good.
    pub(super) fn is_settling(&self) -> bool {
        let standing = lock(&self.standing);
        standing.checked.as_ref().is_some_and(|(_, health)| health.is_settling())
    }

    /// What the last probe has found, if there was one.
    pub fn last_probe(&self) -> Option<Probed> {
        lock(&self.standing).last_probe.clone()
    }

    /// Nothing in force uses it any more: its connections are of no use.
    pub fn retire(&self) {
        self.retired.store(true, Relaxed);
    }

    /// Whether [`Upstream::retire`] was called.
    pub fn is_retired(&self) -> bool {
        self.retired.load(Relaxed)
    }

    /// The resolver has answered.
    pub(super) fn was_asked_for(&self) {
        self.asked.store(true, Relaxed);
    }

    /// Whether the resolver has answered, good or bad, or need not.
    pub fn has_first_answer(&self) -> bool {
        self.asked.load(Relaxed)
    }

    /// Whether its connections carry many requests.
    pub fn is_shared(&self) -> bool {
        match self.speaks {
            Speaks::Http1 => false,
            Speaks::Http2 => true,
            Speaks::AsAgreed => self.agreed_on_h2.load(Relaxed),
        }
    }

    /// Whether the host is a name that has to be resolved.
    pub fn is_named(&self) -> bool {
        self.host.parse::<std::net::IpAddr>().is_err()
    }

    /// The addresses, beginning with another one each time.
    pub fn addresses(&self) -> impl Iterator<Item = SocketAddr> + use<> {
        let all = self.addresses.load_full();
        let first = if all.len() > 1 { self.next_address.fetch_add(1, Relaxed) } else { 0 };
        (0..all.len()).map(move |i| all[first.wrapping_add(i) % all.len()])
    }

    /// The addresses as they are.
    pub fn current_addresses(&self) -> Arc<Vec<SocketAddr>> {
        self.addresses.load_full()
    }

    /// Changes with the addresses.
    pub fn address_generation(&self) -> u32 {
        self.address_generation.load(Relaxed)
    }

    /// Whether an event about a failure may be written now: one a second.
    pub fn may_report(&self, now: Nanos) -> bool {
        let last = self.reported.load(Relaxed);
        (last == 0 || now.since(Nanos(last)) >= Duration::from_secs(1))
            && self.reported.compare_exchange(last, now.0, Relaxed, Relaxed).is_ok()
    }

    /// Has the name asked for again soon: an address does not answer.
    pub fn ask_again(&self) {
        if self.is_named() {
            self.stale.notify_one();
        }
    }

    /// Waits until somebody wants the name to be asked for again.
    pub async fn is_stale(&self) {
        self.stale.notified().await;
    }

    /// Replaces the addresses.
    pub fn set_addresses(&self, addresses: Vec<SocketAddr>) {
        self.addresses.store(Arc::new(addresses));
        self.address_generation.fetch_add(1, Relaxed);
    }
}

/// The version of HTTP that is spoken to an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speaks {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2.
    Http2,
    /// What is agreed on when TLS begins.
    AsAgreed,
}

fn speaks(protocol: UpstreamProtocol, scheme: Scheme) -> Speaks {
    match (protocol, scheme) {
        (_, Scheme::H2c) | (UpstreamProtocol::Http2, _) => Speaks::Http2,
        (UpstreamProtocol::Auto, Scheme::Https) => Speaks::AsAgreed,
        (UpstreamProtocol::Auto, Scheme::Http) | (UpstreamProtocol::Http1, _) => Speaks::Http1,
    }
}

/// Whether two plans of a pool judge their upstreams by the same rules, and speak to them in the
/// same way: connections that were made in another are of no use.
pub(super) fn same_rules(a: &plan::Pool, b: &plan::Pool) -> bool {
    let judged = a.breaker == b.breaker && a.passive == b.passive;
    judged && a.protocol == b.protocol && a.tls == b.tls
}

/// Whether two upstreams are the same, however their URLs are written.
pub(super) fn same_address(a: &plan::Upstream, b: &plan::Upstream) -> bool {
    let address = |u: &plan::Upstream| (u.scheme, u.host.to_ascii_lowercase(), u.port);
    address(a) == address(b) && a.base_path == b.base_path
}

fn breaker_rules(pool: &plan::Pool) -> breaker::Rules {
    let plan = &pool.breaker;
    breaker::Rules {
        trip: match plan.consecutive_failures {
            0 => Trip::Ratio { above: plan.failure_ratio, min_observations: plan.min_observations },
            n => Trip::Consecutive(n),
        },
        window: plan.window,
        window_size: plan.window_size,
        open_min: plan.open_min,
        open_max: plan.open_max,
        half_open_probes: plan.half_open_probes,
        probe_timeout: probe_timeout(pool),
    }
}

/// After what time a test of a breaker is lost. A response that still flows is judged at half of
/// this.
pub(super) fn probe_timeout(pool: &plan::Pool) -> Duration {
    probe_patience(pool) * 2
}

/// How long a request that tests a half-open breaker may take before it is judged by what it
/// has come to.
pub(super) fn probe_patience(pool: &plan::Pool) -> Duration {
    pool.connect_timeout + pool.response_header_timeout
}

fn passive_rules(plan: &plan::PassiveHealth) -> passive::Rules {
    let slow = plan.latency_threshold_p99;
    passive::Rules {
        error_threshold: plan.error_threshold,
        slow_after: (!slow.is_zero()).then_some(slow),
        half_life: plan.half_life,
    }
}
