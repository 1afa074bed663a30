//! A running proxy: its threads and sockets, and how they are started and stopped. `reload`
//! puts another plan in force.

mod readiness;
mod reload;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;

use crate::acme::Acme;
use crate::admin;
use crate::clock::Clock;
use crate::config::plan::{Bind, Plan};
use crate::config::{Places, WITHOUT_FILE};
use crate::handover::{Offer, Offered, label};
use crate::live::{Made, Process};
use crate::observe::event::{Event, Events};
use crate::observe::traces::Tracer;
use crate::orders::Desk;
use crate::serve::doors::{Given, OpenError, Opened, real_address, remove_file, take_given};
use crate::serve::listen::{self, BindError, Bound};
use crate::serve::run_worker::{self, Order, Phase};
use crate::tls::{Material, MaterialError, Resumption};
use crate::upstream::pool::Pool;
use crate::upstream::upkeep::Upkeep;

use readiness::Readiness;
pub use reload::Reloaded;

/// How long a start or a reload waits until names of new upstreams have addresses, and pools
/// that are new have somebody who passes their checks.
const FIRST_ANSWERS: Duration = Duration::from_secs(1);
/// How long a process that takes over waits until what worked before works with it.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// How long the last spans may take.
const LAST_SPANS: Duration = Duration::from_secs(1);
/// The name of the admin endpoints' socket.
const ADMIN: &str = "admin";
/// How often it looks.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Why a proxy did not start.
#[derive(Debug)]
pub enum StartError {
    /// A listener's address cannot be had.
    Listener(OpenError),
    /// The address of the admin endpoints cannot be had.
    Admin(BindError),
    /// TLS cannot be set up.
    Tls(MaterialError),
    /// Spans cannot be sent where they are to go.
    Tracing(String),
    /// The system gives no thread, runtime or descriptor.
    System(std::io::Error),
    /// The pool with this name had no backend that was ready in time.
    NotReady(String),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listener(e) => e.fmt(f),
            Self::Admin(e) => write!(f, "admin: {e}"),
            Self::Tls(e) => e.fmt(f),
            Self::Tracing(e) => e.fmt(f),
            Self::NotReady(pool) => {
                write!(f, "pool {pool}: no backend was ready within {READY_WITHIN:?}")
            }
            Self::System(e) => write!(f, "the system has no more to give: {e}"),
        }
    }
}

impl StartError {
    /// For people, with the place in the configuration if it is about one.
    pub fn with_place(&self, places: &Places) -> String {
        let place = match self {
            Self::Listener(e) => places.listener(&e.listener),
            Self::Admin(_) => places.admin(),
            Self::System(_) | Self::NotReady(_) | Self::Tls(_) | Self::Tracing(_) => None,
        };
        place.map_or_else(|| self.to_string(), |place| format!("{place}: {self}"))
    }
}

impl From<OpenError> for StartError {
    fn from(e: OpenError) -> Self {
        Self::Listener(e)
    }
}

impl From<MaterialError> for StartError {
    fn from(e: MaterialError) -> Self {
        Self::Tls(e)
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
    ended: mpsc::Receiver<()>,
    workers: Vec<Worker>,
    control: JoinHandle<()>,
    /// The control thread ends when this is dropped.
    control_end: oneshot::Sender<()>,
    runtime: Handle,
    upkeep: Upkeep,
    doors: Vec<Opened>,
    last_door: u64,
    resumption: Resumption,
    acme: Acme,
    /// Addresses that are being given up.
    closing: Vec<reload::Closing>,
    /// Sockets that a service manager has handed to the process, and that nothing uses.
    spare: Vec<Given>,
    admin: Option<AdminDoor>,
    readiness: Arc<Readiness>,
}

/// A worker's thread, and how it is told something.
#[derive(Debug)]
struct Worker {
    thread: JoinHandle<()>,
    orders: mpsc::UnboundedSender<Order>,
}

/// The admin endpoints.
#[derive(Debug)]
struct AdminDoor {
    bind: Bind,
    socket: Bound,
    /// Somebody else has the socket too.
    kept: bool,
    task: AbortHandle,
}

impl AdminDoor {
    /// Nobody shall come in any more; who is there is served.
    fn close(self) {
        self.task.abort();
        if !self.kept {
            remove_file(&self.bind);
        }
    }
}

/// A socket for the admin endpoints.
#[derive(Debug)]
struct AdminSocket {
    bind: Bind,
    socket: Bound,
    /// The same socket, for whoever serves.
    handle: Bound,
    kept: bool,
}

/// Starts what `plan` describes. Of the sockets that were `given` it takes those that fit. With
/// `ready`, nothing is accepted before the pools with these names have backends that are ready.
/// Orders of the admin endpoints go to `desk`.
///
/// # Errors
/// An address cannot be had, the system gives no thread, or no backend is ready in time; then
/// nothing is left running.
#[expect(clippy::too_many_lines, reason = "one list of steps, whose order is the point")]
pub fn start(
    plan: Plan,
    events: &Arc<Events>,
    max_open_files: u64,
    given: &mut Vec<Given>,
    ready: Option<Vec<String>>,
    desk: Desk,
) -> Result<Running, StartError> {
    let clock = Clock::new();
    let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let count = plan.workers.unwrap_or_else(cores);
    let resumption = Resumption::new().map_err(|e| {
        StartError::Tls(MaterialError { whose: "tickets".to_owned(), errors: vec![e] })
    })?;
    let mut acme = Acme::default();
    let issued = acme.open(&plan)?;
    let tls = Material::read(&plan, &resumption, &issued)?;
    let mut doors = Vec::new();
    let (handles, mut admin) = open_all(&plan, given, count, &mut doors).inspect_err(|_| {
        for opened in &mut doors {
            given.extend(opened.forget());
        }
    })?;
    let (phase, phases) = watch::channel(Phase::Serve);
    let (control_end, ended) = oneshot::channel();
    let (runtime, control) = start_control(ended)?;
    let tracer = tracer(&plan, None, events, clock, &runtime)?;
    let made =
        Made { doors: doors.iter().map(|opened| vec![opened.door.id]).collect(), tls, tracer };
    let mut process = Process::new(clock, events, count, max_open_files, plan, made);
    process.desk = desk;
    process.took_over.store(ready.is_some(), Relaxed);
    let process = Arc::new(process);
    let (workers, ended) = start_workers(&process, &phases)?;
    let mut upkeep = Upkeep::new(runtime.clone(), clock, events);
    upkeep.keep(&process.snapshot().pools);
    let last_door = doors.len() as u64;
    let readiness = Readiness::new(process.clone());
    let mut running = Running {
        process,
        phase,
        ended,
        workers,
        control,
        control_end,
        runtime,
        upkeep,
        doors,
        last_door,
        resumption,
        acme,
        closing: Vec::new(),
        spare: Vec::new(),
        admin: None,
        readiness,
    };
    if ready.is_none() {
        running.admin = admin.take().map(|socket| running.serve_admin(socket));
    }
    // A name that takes longer does not hold the start; its upstream is ineligible meanwhile.
    let pools = running.process.snapshot().pools.clone();
    running.wait_until(FIRST_ANSWERS, move || pools.iter().all(|pool| has_first_answers(pool)));
    if let Err(e) = ready.map_or(Ok(()), |ready| running.get_ready(&ready)) {
        running.stop();
        return Err(e);
    }
    // Not before: it would say of the service that it is not ready, while another process is.
    if let Some(socket) = admin {
        running.admin = Some(running.serve_admin(socket));
    }
    // What a service manager has passed, and nothing uses yet.
    running.spare.extend(given.extract_if(.., |given| given.kept));
    for (opened, handles) in running.doors.iter().zip(handles) {
        running.accept(opened, handles);
    }
    running.keep_certificates();
    running.announce(max_open_files);
    Ok(running)
}

/// What makes spans, if `plan` wants any.
fn tracer(
    plan: &Plan,
    before: Option<&Arc<Tracer>>,
    events: &Arc<Events>,
    clock: Clock,
    runtime: &Handle,
) -> Result<Option<Arc<Tracer>>, StartError> {
    // The connection to the collector lives on the control thread.
    let _control = runtime.enter();
    Tracer::new(&plan.tracing, before, events, clock).map_err(StartError::Tracing)
}

/// A socket for the admin endpoints.
fn open_admin(
    bind: Bind,
    given: &mut Vec<Given>,
    beside_own: bool,
) -> Result<AdminSocket, StartError> {
    let given = take_given(ADMIN, &bind, given);
    let kept = given.as_ref().is_some_and(|(_, kept)| *kept);
    let socket = match given.and_then(|(mut sockets, _)| sockets.pop()) {
        Some(socket) => socket,
        None => listen::bind_one(&bind, beside_own).map_err(StartError::Admin)?,
    };
    socket.listen()?;
    let handle = socket.try_clone()?;
    Ok(AdminSocket { bind, socket, handle, kept })
}

/// Handles of the sockets of each listener, and the socket of the admin endpoints.
type AllOpened = (Vec<Vec<Vec<Bound>>>, Option<AdminSocket>);

/// Opens all addresses of a plan; nobody can connect before all are had.
fn open_all(
    plan: &Plan,
    given: &mut Vec<Given>,
    workers: usize,
    doors: &mut Vec<Opened>,
) -> Result<AllOpened, StartError> {
    for (id, listener) in (0..).zip(&plan.listeners) {
        // Those that were given are of somebody who has more of the kind.
        let of_given = given.iter().filter_map(|given| given.socket.local());
        let own = doors.iter().map(|opened: &Opened| opened.bind.clone()).chain(of_given);
        let beside_own = own.into_iter().any(|own| listen::overlap(&own, &listener.bind));
        doors.push(Opened::open(listener, given, id, workers, beside_own)?);
    }
    let admin = plan.admin.clone().map(|bind| open_admin(bind, given, false)).transpose()?;
    let handles = doors.iter_mut().map(|opened| opened.handles(workers));
    Ok((handles.collect::<Result<_, _>>()?, admin))
}

fn has_first_answers(pool: &Pool) -> bool {
    pool.upstreams.iter().all(|upstream| upstream.has_first_answer())
}

/// Raises the soft limit of open files to the hard one; what it is then.
pub fn raise_open_files() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    // Not allowed in some sandboxes; then the soft limit is what there is.
    let _ = setrlimit(Resource::Nofile, raised);
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The thread for everything that is not a request: names, probes, admin endpoints.
fn start_control(end: oneshot::Receiver<()>) -> std::io::Result<(Handle, JoinHandle<()>)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    let thread = std::thread::Builder::new().name("l7rp-control".into()).spawn(move || {
        // The admin endpoints answer to the very end of a drain.
        let _ = runtime.block_on(end);
        // A look-up that hangs must not hold the exit.
        runtime.shutdown_background();
    })?;
    Ok((handle, thread))
}

type Workers = (Vec<Worker>, mpsc::Receiver<()>);

fn start_workers(
    process: &Arc<Process>,
    phases: &watch::Receiver<Phase>,
) -> std::io::Result<Workers> {
    let (end, ended) = mpsc::channel(process.workers.max(1));
    let mut workers = Vec::new();
    for index in 0..process.workers {
        let (process, phases, end) = (process.clone(), phases.clone(), end.clone());
        let (orders, received) = mpsc::unbounded_channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread =
            std::thread::Builder::new().name(format!("l7rp-worker-{index}")).spawn(move || {
                let local = tokio::task::LocalSet::new();
                local.block_on(&runtime, run_worker::run(index, process, received, phases));
                // Dropping the tasks gives back what they hold, and writes their records.
                drop(local);
                let _ = end.blocking_send(());
            })?;
        workers.push(Worker { thread, orders });
    }
    Ok((workers, ended))
}

impl Running {
    /// Names and real addresses of the listeners.
    pub fn listeners(&self) -> impl Iterator<Item = (&str, String)> {
        self.doors.iter().map(|opened| (opened.name.as_str(), opened.real_address()))
    }

    /// Real address of the admin endpoints.
    pub fn admin(&self) -> Option<String> {
        self.admin.as_ref().map(|admin| real_address(&admin.bind, Some(&admin.socket)))
    }

    /// Sockets that a service manager has passed, and that nothing uses.
    pub fn spare(&self) -> impl Iterator<Item = &Given> {
        self.spare.iter()
    }

    /// What all threads share.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// Has the workers accept at a door; `handles`: of its sockets, for each worker.
    fn accept(&self, opened: &Opened, handles: Vec<Vec<Bound>>) {
        let snapshot = self.process.snapshot();
        let listener = snapshot.listeners.iter().find(|l| l.uses(opened.door.id));
        let Some(listener) = listener else { return };
        for (worker, handles) in self.workers.iter().zip(handles) {
            for socket in handles {
                let (door, listener) = (opened.door.clone(), listener.clone());
                let _ = worker.orders.send(Order::Open { door, listener, socket });
            }
        }
    }

    /// Waits until the pools with these names can serve requests, those that there are.
    fn get_ready(&self, names: &[String]) -> Result<(), StartError> {
        let (pools, clock) = (self.process.snapshot().pools.clone(), self.process.clock);
        let mut wanted: Vec<_> =
            pools.into_iter().filter(|pool| names.contains(&pool.plan.name)).collect();
        let cold = wanted.clone();
        self.wait_until(READY_WITHIN, move || cold.iter().all(|p| p.has_eligible(clock.now())));
        wanted.retain(|pool| !pool.has_eligible(clock.now()));
        match wanted.first() {
            None => Ok(()),
            Some(pool) => Err(StartError::NotReady(pool.plan.name.clone())),
        }
    }

    /// Sees to it that CAs are asked for what is in force; they look at the listeners.
    fn keep_certificates(&mut self) {
        let Process { events, tokens, .. } = &*self.process;
        if let Err(e) = self.acme.keep(&self.process.snapshot().plan, events, tokens) {
            events.emit(&Event::CertificateFailed {
                host: String::new(),
                authority: String::new(),
                error: format!("the system gives no thread to ask for certificates: {e}"),
                next_try: "at the next reload".to_owned(),
            });
        }
    }

    /// What another process needs to take over.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn offer(&self) -> std::io::Result<Offer> {
        let mut sockets = Vec::new();
        let mut add = |name: &str, bind: &Bind, kept: bool, socket: &Bound| {
            let (name, bind) = (name.to_owned(), bind.to_string());
            let socket = socket.try_clone()?.into();
            sockets.push(Offered { name, bind, kept, socket });
            Ok::<_, std::io::Error>(())
        };
        for opened in &self.doors {
            let kept = opened.door.is_kept();
            opened.sockets.iter().try_for_each(|s| add(&opened.name, &opened.bind, kept, s))?;
        }
        if let Some(admin) = &self.admin {
            add(ADMIN, &admin.bind, admin.kept, &admin.socket)?;
        }
        for spare in &self.spare {
            let bind = spare.socket.local().map_or_else(String::new, |bind| bind.to_string());
            let socket = spare.socket.try_clone()?.into();
            sockets.push(Offered { name: spare.name.clone(), bind, kept: true, socket });
        }
        let pools = self.process.snapshot().pools.clone();
        let ready = pools.iter().filter(|pool| pool.has_eligible(self.process.clock.now()));
        Ok(Offer { sockets, ready: ready.map(|pool| pool.plan.name.clone()).collect() })
    }

    /// Another process has `taken` sockets and accepts on them: this one leaves that to it.
    pub fn hand_over(&mut self, taken: &[String]) {
        self.process.set_succeeded();
        self.acme.stop();
        let is_taken = |name, bind: &Bind| taken.contains(&label(name, &bind.to_string()));
        for opened in &self.doors {
            if is_taken(&opened.name, &opened.bind) {
                opened.door.keep_for_another();
            }
        }
        if let Some(admin) = self.admin.take_if(|admin| is_taken(ADMIN, &admin.bind)) {
            admin.task.abort();
        }
    }

    /// Has the control thread do something until the process stops.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(work);
    }

    /// Serves the admin endpoints.
    fn serve_admin(&self, socket: AdminSocket) -> AdminDoor {
        let AdminSocket { bind, socket, handle, kept } = socket;
        let task = self.runtime.spawn(admin::serve(handle, self.process.clone()));
        AdminDoor { bind, socket, kept, task: task.abort_handle() }
    }

    /// Waits until `is_so`, at most for so long. It is asked on the control thread.
    fn wait_until(&self, limit: Duration, is_so: impl Fn() -> bool + Send + 'static) {
        if is_so() {
            return;
        }
        let (done, wait) = sync_channel(1);
        let looking = self.runtime.spawn(async move {
            while !is_so() {
                tokio::time::sleep(LOOK_EVERY).await;
            }
            let _ = done.try_send(());
        });
        let _ = wait.recv_timeout(limit);
        looking.abort();
    }

    /// Tells that it serves, and from now on whenever it is ready for that, or no more.
    fn announce(&self, max_open_files: u64) {
        let snapshot = self.process.snapshot();
        self.process.events.emit(&Event::ProxyStarted {
            version: env!("CARGO_PKG_VERSION"),
            pid: std::process::id(),
            listeners: self.listeners().map(|(n, a)| format!("{n}={a}")).collect(),
            admin: self.admin(),
            workers: self.process.workers,
            routes: snapshot.routes.len(),
            pools: snapshot.pools.len(),
            max_open_files,
            note: snapshot.plan.probes_on_data.then_some(WITHOUT_FILE),
        });
        self.readiness.begin();
        self.spawn(self.readiness.clone().watch());
    }

    /// Says that no more traffic should be sent here.
    pub fn leave(&self) {
        self.process.leave();
        self.readiness.look();
    }

    /// Begins to drain: accepting ends, connections end after their request.
    pub fn drain(&mut self) {
        self.process.drain();
        self.acme.stop();
        for opened in &mut self.doors {
            let _ = opened.forget();
        }
        self.phase.send_replace(Phase::Drain);
    }

    /// Waits until all workers have drained.
    pub async fn drained(&mut self) {
        // Each worker says once that it has nothing left.
        for _ in 0..self.workers.len() {
            let _ = self.ended.recv().await;
        }
    }

    /// The grace is over: tunnels are closed in order.
    pub fn end(&self) {
        self.process.end();
        self.phase.send_replace(Phase::End);
    }

    /// Stops everything now; what is still in progress is cut. The spans of all that was are sent,
    /// which blocks for a moment where the collector does not take them.
    pub fn stop(self) {
        self.process.drain();
        self.phase.send_replace(Phase::Stop);
        let Self { workers, control, control_end, admin, process, .. } = self;
        if let Some(admin) = admin {
            admin.close();
        }
        for worker in workers {
            let _ = worker.thread.join();
        }
        // Not before: the workers have just written what they cut.
        if let Some(tracer) = &process.snapshot().tracer {
            tracer.finish(LAST_SPANS);
        }
        drop(control_end);
        let _ = control.join();
    }
}
