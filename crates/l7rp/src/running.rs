//! A running proxy: its threads, and how they are started and stopped.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use crate::admin;
use crate::clock::Clock;
use crate::config::plan::{Bind, Plan};
use crate::live::{Listener, Process, Snapshot};
use crate::observe::event::{Event, Events};
use crate::serve::listen::{self, BindError, Bound};
use crate::serve::run_worker::{self, Phase};
use crate::upstream::pool::Pool;
use crate::upstream::{probe, resolve};

/// How long the start waits for the first answers about names of upstreams.
const FIRST_ANSWERS: Duration = Duration::from_secs(1);

/// Why a proxy did not start.
#[derive(Debug)]
pub enum StartError {
    /// A listening address cannot be had.
    Bind(BindError),
    /// The system gives no thread or runtime.
    System(std::io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bind(e) => e.fmt(f),
            Self::System(e) => write!(f, "cannot start a thread: {e}"),
        }
    }
}

impl From<BindError> for StartError {
    fn from(e: BindError) -> Self {
        Self::Bind(e)
    }
}

impl From<std::io::Error> for StartError {
    fn from(e: std::io::Error) -> Self {
        Self::System(e)
    }
}

/// A running proxy.
#[derive(Debug)]
pub struct Running {
    process: Arc<Process>,
    phase: watch::Sender<Phase>,
    ended: mpsc::Receiver<usize>,
    workers: Vec<JoinHandle<()>>,
    control: JoinHandle<()>,
    listeners: Vec<(String, String)>,
    admin: Option<String>,
}

/// Starts what `plan` describes.
///
/// # Errors
/// An address cannot be had, or the system gives no thread; then nothing is left running.
pub fn start(plan: Plan, events: Arc<Events>) -> Result<Running, StartError> {
    let clock = Clock::new();
    let max_open_files = raise_open_files();
    let count = plan
        .workers
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    let mut bound = Vec::new();
    for listener in &plan.listeners {
        bound.push(listen::bind(&listener.bind, count)?);
    }
    let admin_socket = match &plan.admin {
        Some(bind) => listen::bind(bind, 1)?.pop(),
        None => None,
    };
    let listeners = plan
        .listeners
        .iter()
        .zip(&bound)
        .map(|(l, sockets)| (l.name.clone(), real_address(&l.bind, sockets.first())))
        .collect::<Vec<_>>();
    let admin = plan.admin.as_ref().map(|bind| real_address(bind, admin_socket.as_ref()));
    let snapshot = Snapshot::new(plan, count, max_open_files, &events);
    let process = Arc::new(Process::new(clock, events, count, snapshot));
    let (phase, phases) = watch::channel(Phase::Serve);
    let (first_answers, answered) = sync_channel(1);
    let control = start_control(&process, admin_socket, phases.clone(), first_answers)?;
    // A name that takes longer does not hold the start; its upstream is ineligible meanwhile.
    let _ = answered.recv_timeout(FIRST_ANSWERS);
    let (workers, ended) = start_workers(&process, bound, &phases)?;
    let running = Running { process, phase, ended, workers, control, listeners, admin };
    running.announce(max_open_files);
    Ok(running)
}

/// The address as configured, or the one that the system chose for port 0.
fn real_address(bind: &Bind, socket: Option<&Bound>) -> String {
    socket.and_then(Bound::local).map_or_else(|| bind.to_string(), |a| a.to_string())
}

/// Raises the soft limit of open files to the hard one; what it is then.
fn raise_open_files() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    // Not allowed in some sandboxes; then the soft limit is what there is.
    let _ = setrlimit(Resource::Nofile, raised);
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The thread for everything that is not a request: names, probes, admin endpoints.
fn start_control(
    process: &Arc<Process>,
    admin_socket: Option<Bound>,
    mut phases: watch::Receiver<Phase>,
    first_answers: SyncSender<()>,
) -> std::io::Result<JoinHandle<()>> {
    let process = process.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("l7rp-control".into()).spawn(move || {
        runtime.block_on(async {
            let (each, mut all) = mpsc::channel::<()>(1);
            for pool in &process.snapshot().pools {
                keep_current(pool, &process, &each);
            }
            drop(each);
            if let Some(socket) = admin_socket {
                tokio::spawn(admin::serve(socket, process.clone()));
            }
            // Ends when each resolver has dropped its end, after its first answer.
            let _ = all.recv().await;
            let _ = first_answers.try_send(());
            // The admin endpoints answer to the very end of a drain.
            let _ = phases.wait_for(|p| *p == Phase::Stop).await;
        });
        // A look-up that hangs must not hold the exit.
        runtime.shutdown_background();
    })
}

/// Starts what keeps a pool's knowledge of its upstreams current: their addresses and health.
fn keep_current(pool: &Arc<Pool>, process: &Process, each: &mpsc::Sender<()>) {
    for (ix, upstream) in pool.upstreams.iter().enumerate() {
        if upstream.is_named() {
            let (events, each) = (process.events.clone(), each.clone());
            let task = resolve::keep_resolved(pool.clone(), ix, process.clock, events, each);
            tokio::spawn(task);
        }
        if pool.plan.active.is_some() {
            tokio::spawn(probe::keep_probed(pool.clone(), ix, process.clock));
        }
    }
}

type Workers = (Vec<JoinHandle<()>>, mpsc::Receiver<usize>);

fn start_workers(
    process: &Arc<Process>,
    bound: Vec<Vec<Bound>>,
    phases: &watch::Receiver<Phase>,
) -> std::io::Result<Workers> {
    let snapshot = process.snapshot();
    let mut sockets: Vec<Vec<(Bound, Arc<Listener>)>> =
        (0..process.workers).map(|_| Vec::new()).collect();
    for (listener, bound) in snapshot.listeners.iter().zip(bound) {
        for (of_worker, socket) in sockets.iter_mut().zip(bound) {
            of_worker.push((socket, listener.clone()));
        }
    }
    let (end, ended) = mpsc::channel(process.workers.max(1));
    let mut threads = Vec::new();
    for (index, sockets) in sockets.into_iter().enumerate() {
        let (process, phases, end) = (process.clone(), phases.clone(), end.clone());
        let events = process.events.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread =
            std::thread::Builder::new().name(format!("l7rp-worker-{index}")).spawn(move || {
                let local = tokio::task::LocalSet::new();
                let run = run_worker::run(index, process, sockets, phases);
                let cut = local.block_on(&runtime, run).unwrap_or_else(|e| {
                    events.emit(&Event::WorkerFailed { worker: index, error: e.to_string() });
                    0
                });
                // Dropping the tasks gives back what they hold, and writes their records.
                drop(local);
                let _ = end.blocking_send(cut);
            })?;
        threads.push(thread);
    }
    Ok((threads, ended))
}

impl Running {
    /// Names and real addresses of the listeners.
    pub fn listeners(&self) -> &[(String, String)] {
        &self.listeners
    }

    /// Real address of the admin endpoints.
    pub fn admin(&self) -> Option<&str> {
        self.admin.as_deref()
    }

    /// What all threads share.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    fn announce(&self, max_open_files: u64) {
        let snapshot = self.process.snapshot();
        self.process.events.emit(&Event::ProxyStarted {
            version: env!("CARGO_PKG_VERSION"),
            listeners: self.listeners.iter().map(|(n, a)| format!("{n}={a}")).collect(),
            admin: self.admin.clone(),
            workers: self.process.workers,
            routes: snapshot.routes.len(),
            pools: snapshot.pools.len(),
            max_open_files,
        });
    }

    /// Says that no more traffic should be sent here.
    pub fn leave(&self) {
        self.process.leave();
    }

    /// Begins to drain: accepting ends, connections end after their request.
    pub fn drain(&self) {
        self.process.drain();
        self.phase.send_replace(Phase::Drain);
    }

    /// Waits until all workers have drained.
    pub async fn drained(&mut self) {
        // Each worker says once how many connections it has cut; after a drain, none.
        for _ in 0..self.workers.len() {
            let _ = self.ended.recv().await;
        }
    }

    /// Stops everything now; the number of connections that were cut.
    pub fn stop(self) -> usize {
        self.process.drain();
        self.phase.send_replace(Phase::Stop);
        let Self { workers, control, mut ended, .. } = self;
        for thread in workers.into_iter().chain([control]) {
            let _ = thread.join();
        }
        std::iter::from_fn(|| ended.try_recv().ok()).sum()
    }
}
