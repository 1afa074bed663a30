//! Certificates by ACME (RFC 8555): asked for, kept on disk, served, and replaced before they
//! expire. Several processes may share a cache directory: one asks at a time, and all serve what
//! it gets.
//!
//! | file | does |
//! |---|---|
//! | `cache` | files: certificates, the account, challenges, what has failed |
//! | `client` | HTTPS to the CA |
//! | `order` | one certificate, from the order to the chain |
//! | `keeper` | the task that sees to it that there is always one |
//!
//! When it is time, and how long to wait after a failure, is decided in `l7rp_core::renewal`.

mod cache;
mod client;
mod keeper;
mod order;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;

use crate::config::plan::{Autocert, Plan};
use crate::observe::event::Events;
use crate::tls::{Issued, MaterialError, TlsError};
use cache::Cache;
use keeper::{Around, Keeper};

/// Where certificates come from unless the configuration says otherwise.
const LETS_ENCRYPT: &str = "https://acme-v02.api.letsencrypt.org/directory";

/// What is answered to a CA that looks at an HTTP-01 challenge, by its token.
pub type Tokens = ArcSwap<HashMap<String, String>>;

/// A CA, and who we are to it: certificates are kept for each of these.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Authority {
    directory_url: String,
    ca_file: Option<PathBuf>,
    cache_dir: PathBuf,
    email: Option<String>,
}

impl Authority {
    fn of(plan: &Autocert) -> Self {
        Self {
            directory_url: plan.directory_url.clone().unwrap_or_else(|| LETS_ENCRYPT.to_owned()),
            ca_file: plan.ca_file.clone(),
            cache_dir: plan.cache_dir.clone(),
            email: plan.email.clone(),
        }
    }
}

/// What a keeper is to do.
#[derive(Clone, Debug, Default)]
struct Orders {
    /// Names, in lower case.
    hosts: Vec<String>,
    /// There is a listener without TLS, so that the CA may look there.
    has_plain: bool,
}

/// All that is asked of CAs.
#[derive(Debug, Default)]
pub struct Acme {
    kept: HashMap<Authority, Kept>,
    thread: Option<Thread>,
}

/// The certificates of one CA.
#[derive(Debug)]
struct Kept {
    issued: Arc<Issued>,
    orders: watch::Sender<Orders>,
    /// Until its task begins.
    keeper: Option<Keeper>,
    task: Option<AbortHandle>,
}

/// A thread of its own, for disks may be slow and networks stand behind some: what waits for them
/// must not hold up anything else.
#[derive(Debug)]
struct Thread {
    runtime: Handle,
    /// It ends when this is dropped.
    _end: oneshot::Sender<()>,
}

impl Thread {
    fn start() -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel::<()>();
        std::thread::Builder::new().name("l7rp-acme".into()).spawn(move || {
            let _ = runtime.block_on(ended);
            runtime.shutdown_background();
        })?;
        Ok(Self { runtime: handle, _end: end })
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

impl Acme {
    /// Where the certificates of each listener of `plan` are to be had. Those that are in a cache
    /// are there at once; nothing is asked for before [`Acme::keep`].
    ///
    /// # Errors
    /// A cache directory that cannot be used, or a `ca_file`.
    pub fn open(&mut self, plan: &Plan) -> Result<Vec<Option<Arc<Issued>>>, MaterialError> {
        let mut all = Vec::with_capacity(plan.listeners.len());
        for listener in &plan.listeners {
            let Some(autocert) = listener.tls.as_ref().and_then(|tls| tls.autocert.as_ref()) else {
                all.push(None);
                continue;
            };
            let authority = Authority::of(autocert);
            // One whose task has ended, as only a panic does, is begun anew.
            let alive = self
                .kept
                .get(&authority)
                .is_some_and(|kept| kept.task.as_ref().is_none_or(|task| !task.is_finished()));
            if !alive {
                let whose = format!("listener {}", listener.name);
                let told = |e| MaterialError { whose, errors: vec![e] };
                let kept = Kept::open(&authority, hosts_of(plan, &authority)).map_err(told)?;
                self.kept.insert(authority.clone(), kept);
            }
            all.push(self.kept.get(&authority).map(|kept| kept.issued.clone()));
        }
        Ok(all)
    }

    /// Sees to it that exactly what `plan` asks for is kept.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn keep(
        &mut self,
        plan: &Plan,
        events: &Arc<Events>,
        tokens: &Arc<Tokens>,
    ) -> std::io::Result<()> {
        let has_plain = plan.listeners.iter().any(|listener| listener.tls.is_none());
        self.kept.retain(|authority, _| !hosts_of(plan, authority).is_empty());
        if self.kept.is_empty() {
            self.thread = None;
            return Ok(());
        }
        let thread = match self.thread.take() {
            Some(thread) => thread,
            None => Thread::start()?,
        };
        for (authority, kept) in &mut self.kept {
            let orders = Orders { hosts: hosts_of(plan, authority), has_plain };
            kept.orders.send_replace(orders);
            if let Some(keeper) = kept.keeper.take() {
                let around = Around { events: events.clone(), tokens: tokens.clone() };
                let task = keeper.run(kept.orders.subscribe(), around);
                kept.task = Some(thread.runtime.spawn(task).abort_handle());
            }
        }
        self.thread = Some(thread);
        Ok(())
    }

    /// Asks for nothing any more: another process does, or none. What there is stays.
    pub fn stop(&mut self) {
        self.thread = None;
    }
}

impl Kept {
    fn open(authority: &Authority, hosts: Vec<String>) -> Result<Self, TlsError> {
        let cache = Cache::open(&authority.cache_dir, &authority.directory_url)?;
        let issued = Arc::new(Issued::default());
        let keeper = Keeper::new(authority.clone(), cache, issued.clone(), &hosts)?;
        let orders = watch::Sender::new(Orders { hosts, has_plain: false });
        Ok(Self { issued, orders, keeper: Some(keeper), task: None })
    }
}

/// The names that listeners want from `authority`.
fn hosts_of(plan: &Plan, authority: &Authority) -> Vec<String> {
    let all = plan.listeners.iter().filter_map(|listener| listener.tls.as_ref()?.autocert.as_ref());
    let mut seen = HashSet::new();
    let hosts = all.filter(|autocert| Authority::of(autocert) == *authority);
    hosts
        .flat_map(|autocert| &autocert.allowed_hosts)
        .map(|host| host.to_ascii_lowercase())
        .filter(|host| seen.insert(host.clone()))
        .collect()
}

/// The answer to a CA that asks for `path`, if it looks at a challenge of ours.
pub fn answer(tokens: &Tokens, path: &[u8]) -> Option<String> {
    let token = path.strip_prefix(b"/.well-known/acme-challenge/")?;
    tokens.load().get(std::str::from_utf8(token).ok()?).cloned()
}
