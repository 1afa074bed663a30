//! The process from its start to its exit: signals, reload, upgrade, drain, exit code.

mod signals;
mod upgrade;
mod weight;

use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use l7rp_core::names::Nanos;
use rustix::pipe::fcntl_setpipe_size;
use rustix::process::{Pid, kill_process};
use tokio::sync::{mpsc, oneshot};

use crate::clock::wall_ms;
use crate::config::watch::{Known, Watch, look_at};
use crate::config::{Diff, Places, Plan, view};
use crate::handover::label;
use crate::live::{Going, Process};
use crate::observe::event::{AllChanges, BY_ADMIN, Changes, Event, Events, Level};
use crate::observe::log::Log;
use crate::orders::{Desk, Order, Outcome};
use crate::running::{self, Reloaded, Running};
use crate::serve::doors::Given;
use crate::sync::lock;
use crate::systemd::{self, Notify};
use signals::{Signals, Wish, ignore};
pub(crate) use upgrade::start_aside;
use upgrade::{Inheritance, Upgrade};

/// Exit code of a start or run that failed.
const FAILED: u8 = 1;
/// Exit code when a second signal ended the drain.
const FORCED: u8 = 3;
/// Signals that come together are one.
const SAME_SIGNAL: Duration = Duration::from_millis(100);
/// How long tunnels have to be closed in order when the grace is over.
const ORDERLY: Duration = Duration::from_secs(1);
/// A worker that has not shown itself for so long is stuck. It does so every second.
const STUCK: Duration = Duration::from_secs(5);
/// Why a process ends that another one has taken over from.
const UPGRADED: &str = "SIGUSR2";
/// How long reading the configuration may take.
const READ_WITHIN: Duration = Duration::from_secs(30);
/// What is changed where the token is.
const TOKEN_FILE: &str = "admin.token_file";
/// How long the last log lines may take.
const LAST_LINES: Duration = Duration::from_secs(1);
/// Octets that a pipe may hold, where nobody has said otherwise (`fs.pipe-max-size`).
const MOST_ROOM: usize = 1 << 20;

/// Reads the configuration, as at the start.
///
/// # Errors
/// What is wrong with it, and where: a line for each.
pub type Source = Arc<dyn Fn() -> Result<Fresh, Vec<String>> + Send + Sync>;

/// What was read anew.
#[derive(Debug)]
pub struct Fresh {
    /// What is to be put in force.
    pub plan: Plan,
    /// Where the file has its addresses.
    pub places: Places,
    /// What is worth a look, a line for each.
    pub warnings: Vec<String>,
}

/// What a process does.
pub struct Task {
    /// What to serve at first.
    pub plan: Plan,
    /// Where its addresses are written.
    pub places: Places,
    /// Where another plan comes from.
    pub source: Source,
    /// The file whose changes are to be put in force by themselves.
    pub watched: Option<PathBuf>,
    /// The least severity of lines.
    pub level: Level,
}

/// Serves until a signal ends it. Events and access log go to standard output, failures of the
/// start to standard error.
pub fn serve(task: Task) -> ExitCode {
    let started = Log::start(std::io::stdout())
        .and_then(|log| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            Ok((log, runtime))
        })
        .map_err(|e| e.to_string());
    let (log, runtime) = match started {
        Ok(started) => started,
        Err(e) => return fail(&e),
    };
    let events = Arc::new(Events::new(log.clone(), task.level));
    let code = runtime.block_on(run(task, &events)).unwrap_or_else(|e| fail(&e));
    // A file that hangs must not hold the exit.
    runtime.shutdown_background();
    // A reader that is late would find half a line at the end: with more room in the pipe, what is
    // being written goes out as a whole. What cannot be given room was no pipe, or is left as it is.
    if !log.finish(LAST_LINES) && fcntl_setpipe_size(std::io::stdout(), MOST_ROOM).is_ok() {
        log.finish(LAST_LINES / 4);
    }
    code
}

#[expect(clippy::print_stderr, reason = "a start that fails is told to whoever started it")]
fn fail(words: &str) -> ExitCode {
    eprintln!("error: {words}");
    ExitCode::from(FAILED)
}

async fn run(task: Task, events: &Arc<Events>) -> Result<ExitCode, String> {
    let Task { plan, places, source, watched, .. } = task;
    // Before the start, so that no signal finds the process without an answer.
    let mut signals = Signals::new().map_err(|e| format!("cannot catch signals: {e}"))?;
    let max_open_files = running::raise_open_files();
    let mut inherited = Inheritance::receive()?;
    if inherited.has_predecessor() {
        events.log().share();
    }
    let watch = watched.map(|file| Watch::start(&file, &plan)).transpose();
    let watch = watch.map_err(|e| format!("cannot start a thread that watches files: {e}"))?;
    let offered: Vec<_> = inherited.given.iter().map(label_of).collect();
    let ready = inherited.ready();
    let given = &mut inherited.given;
    // The admin endpoints answer before the start is complete: an order is done right after it.
    let (desk, orders) = Desk::open();
    let started = running::start(plan, events, max_open_files, given, ready, desk);
    let running = started.map_err(|e| {
        let why = e.with_place(&places);
        inherited.answer(Err(&why));
        why
    })?;
    count_panics(running.process());
    let left: Vec<_> = inherited.given.drain(..).map(|given| label_of(&given)).collect();
    let spare: Vec<_> = running.spare().map(label_of).collect();
    inherited.answer(Ok(offered.into_iter().filter(|label| !left.contains(label)).collect()));
    if !left.is_empty() || !spare.is_empty() {
        let sockets = left.into_iter().chain(spare).collect();
        events.emit(&Event::SocketsUnused { sockets });
    }
    let manager = Notify::from_env();
    manager.ready(&serving(&running));
    if let Some(every) = systemd::watchdog_interval() {
        running.spawn(keep_watched(running.process().clone(), every));
    }
    let events = events.clone();
    let mut service = Service { running, source, watch, orders, manager, events };
    let why = service.serve(&mut signals).await;
    Ok(service.drain(&mut signals, why).await)
}

fn label_of(given: &Given) -> String {
    label(&given.name, given.bind.as_deref().unwrap_or("from the service manager"))
}

/// A line for people who ask the service manager.
fn serving(running: &Running) -> String {
    let listeners: Vec<_> = running.listeners().map(|(name, at)| format!("{name} {at}")).collect();
    let generation = running.process().generation();
    format!("serving configuration {generation} on {}", listeners.join(", "))
}

/// Says that the process is alive for as long as its workers are, from the control thread.
async fn keep_watched(process: Arc<Process>, every: Duration) {
    let manager = Notify::from_env();
    loop {
        let now = process.clock.now();
        if process.counts.iter().all(|c| now.since(Nanos(c.alive_at.load(Relaxed))) < STUCK) {
            manager.watchdog();
        }
        tokio::time::sleep(every).await;
    }
}

/// A running proxy, and what it takes to change it.
struct Service {
    running: Running,
    source: Source,
    watch: Option<Watch>,
    /// From the admin endpoints.
    orders: mpsc::Receiver<Order>,
    manager: Notify,
    events: Arc<Events>,
}

/// Why the configuration is read again.
struct Cause {
    word: &'static str,
    /// Who asked for it over the admin address, and waits to be answered.
    asked: Option<(String, oneshot::Sender<Outcome>)>,
}

impl From<&'static str> for Cause {
    fn from(word: &'static str) -> Self {
        Self { word, asked: None }
    }
}

impl Service {
    /// Does what signals and orders ask for, until a signal ends it; why.
    async fn serve(&mut self, signals: &mut Signals) -> &'static str {
        loop {
            let cause = tokio::select! {
                wish = signals.next() => match wish {
                    Wish::Stop(why) => return why,
                    Wish::Upgrade => match self.upgrade(signals).await {
                        Some(why) => return why,
                        None => continue,
                    },
                    Wish::Reload => Cause::from("SIGHUP"),
                },
                () = changed(&mut self.watch) => Cause::from("file"),
                Some(order) = self.orders.recv() => match order {
                    Order::Reload { by, reply } => Cause { word: BY_ADMIN, asked: Some((by, reply)) },
                    Order::Weight { weight, by, reply } => {
                        // Whoever asked may have left; it is done all the same.
                        let _ = reply.send(self.weigh(&weight, by));
                        continue;
                    }
                },
            };
            if let Some(why) = self.reload(cause, signals).await {
                return why;
            }
        }
    }

    /// Reads the configuration again and puts it in force, or says why not. `Some`: the process
    /// is to end, and why.
    async fn reload(&mut self, cause: Cause, signals: &mut Signals) -> Option<&'static str> {
        let process = self.running.process().clone();
        let mut began = process.clock.now();
        self.manager.reloading();
        let read = loop {
            let reading = read(&self.source, self.watch.as_ref());
            let mut reading = pin!(tokio::time::timeout(READ_WITHIN, reading));
            tokio::select! {
                read = &mut reading => break read,
                wish = signals.next() => match wish {
                    Wish::Stop(why) => return Some(why),
                    // The file may have changed since it was begun to be read.
                    Wish::Reload => began = process.clock.now(),
                    Wish::Upgrade => {
                        ignore(wish, "the configuration is being read", &self.events);
                    }
                },
            }
        };
        let (seen, plan) = read.unwrap_or_else(|_| {
            let why = format!("reading the configuration took longer than {READ_WITHIN:?}");
            (Known::new(), Err(vec![why]))
        });
        let done = plan.and_then(|Fresh { plan, places, warnings }| {
            let done = self.running.reload(plan).map_err(|e| vec![e.with_place(&places)]);
            done.map(|done| (done, warnings))
        });
        if let Some(watch) = &mut self.watch {
            watch.were_read(seen, &process.snapshot().plan);
        }
        self.tell(cause, began, done);
        None
    }

    /// Tells what a reload has come to.
    fn tell(&self, cause: Cause, began: Nanos, done: Result<(Reloaded, Vec<String>), Vec<String>>) {
        let process = self.running.process();
        let now = process.clock.now();
        let in_force = done.as_ref().map_or(now, |(done, _)| done.in_force);
        let took = in_force.since(began);
        let reloads = &process.reloads;
        reloads.duration.record(took);
        reloads.last_failed.store(done.is_err(), Relaxed);
        let took_ms = millis(took);
        let (by, reply) = cause.asked.unzip();
        let cause = cause.word;
        let outcome = match done {
            Ok((done, warnings)) => {
                reloads.ok.up();
                reloads.last_success_ms.store(wall_ms(), Relaxed);
                self.manager.ready(&serving(&self.running));
                let changes = Box::new(changes(&done, &process.snapshot().plan));
                let generation = done.generation;
                let (saw, all) = (warnings.clone(), changes.clone());
                self.events.emit(&told(cause, by, took_ms, &done, saw, all));
                Outcome::Ok { generation, took_ms, warnings, changes }
            }
            Err(errors) => {
                reloads.rejected.up();
                let generation = process.generation();
                let why = errors.first().map_or("", String::as_str);
                why.clone_into(&mut lock(&reloads.last_error));
                self.manager.ready(&format!("{}; reload refused: {why}", serving(&self.running)));
                let saw = errors.clone();
                let event = Event::ConfigRejected { cause, by, generation, took_ms, errors: saw };
                self.events.emit(&event);
                Outcome::Rejected { generation, took_ms, errors }
            }
        };
        if let Some(reply) = reply {
            // Whoever asked may have left.
            let _ = reply.send(outcome);
        }
    }

    /// Lets another process take over. `Some`: this one is to end, and why.
    async fn upgrade(&mut self, signals: &mut Signals) -> Option<&'static str> {
        let clock = self.running.process().clock;
        let began = clock.now();
        // Before it learns what is.
        self.running.process().set_upgrading(true);
        let offer = self.running.offer().map_err(|e| format!("cannot offer the sockets: {e}"));
        let mut upgrade =
            match offer.and_then(|offer| Upgrade::begin(offer, self.manager.is_there())) {
                Ok(upgrade) => upgrade,
                Err(why) => {
                    self.running.process().set_upgrading(false);
                    self.events.emit(&Event::UpgradeFailed { why });
                    return None;
                }
            };
        let pid = upgrade.pid;
        self.events.log().share();
        self.events.emit(&Event::UpgradeStarted { pid });
        let outcome = loop {
            tokio::select! {
                // First: whoever asks to stop means the service, and not this process.
                biased;
                wish = signals.next() => match wish {
                    Wish::Stop(why) => {
                        self.call_off(upgrade, began, why).await;
                        return Some(why);
                    }
                    wish => ignore(wish, "another process is about to take over", &self.events),
                },
                outcome = upgrade.outcome() => break outcome,
            }
        };
        match outcome {
            Ok(taken) => {
                self.running.hand_over(&taken);
                self.manager.main_pid(pid);
                let took_ms = millis(clock.now().since(began));
                self.events.emit(&Event::UpgradeComplete { pid, took_ms });
                Some(UPGRADED)
            }
            Err(why) => {
                self.running.process().set_upgrading(false);
                self.events.emit(&Event::UpgradeFailed { why });
                None
            }
        }
    }

    /// The process is to stop, and so is the one that is about to take its place.
    async fn call_off(&mut self, upgrade: Upgrade, began: Nanos, why: &'static str) {
        let pid = upgrade.pid;
        let Ok(taken) = upgrade.give_up().await else {
            self.events.emit(&Event::UpgradeFailed { why: format!("{why} came first") });
            return;
        };
        // It serves already: it drains as well, and what waits in the sockets is its.
        self.running.hand_over(&taken);
        let took_ms = millis(self.running.process().clock.now().since(began));
        self.events.emit(&Event::UpgradeComplete { pid, took_ms });
        if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, rustix::process::Signal::TERM);
        }
    }

    /// Drains and stops; the exit code.
    async fn drain(mut self, signals: &mut Signals, why: &'static str) -> ExitCode {
        // Who waits for something else is told that it will not be done.
        drop(self.orders);
        let process = self.running.process().clone();
        let mut plan = process.snapshot().plan.drain.clone();
        if why == UPGRADED {
            // The address stays; nobody has to be told to go elsewhere first.
            plan.delay = Duration::ZERO;
        } else {
            self.manager.stopping("draining");
            self.manager.extend_timeout(plan.delay + plan.timeout + ORDERLY + LAST_LINES * 2);
        }
        let began = process.clock.now();
        let before = Going::on(&process);
        // The end comes when it comes: what is out by then are whole lines.
        self.events.log().share();
        if why != UPGRADED {
            self.running.leave();
        }
        self.events.emit(&Event::ShutdownStarted {
            why,
            in_progress: before.requests + before.tunnels,
            tunnels: before.tunnels,
            connections: before.connections,
            delay_ms: plan.delay.as_millis() as u64,
            grace_ms: plan.timeout.as_millis() as u64,
        });
        let events = &self.events;
        let again = async {
            if why == UPGRADED {
                // The first that asks to stop: that is under way.
                signals.stop(events).await;
            }
            let first = if why == UPGRADED { process.clock.now() } else { began };
            // Some supervisors signal a process and then its group: that is one signal.
            loop {
                signals.stop(events).await;
                if process.clock.now().since(first) >= SAME_SIGNAL {
                    return;
                }
            }
        };
        let orderly = tokio::select! {
            () = drained(&mut self.running, &plan) => true,
            () = again => false,
        };
        self.running.stop();
        let after = Going::on(&process);
        let took_ms = millis(process.clock.now().since(began));
        let cut = after.cut - before.cut;
        if orderly {
            let tunnels_closed = after.tunnels_closed;
            self.events.emit(&Event::ShutdownComplete { took_ms, cut, tunnels_closed });
            ExitCode::SUCCESS
        } else {
            // Tunnels are among what was cut.
            self.events.emit(&Event::ShutdownForced { took_ms, cut });
            ExitCode::from(FORCED)
        }
    }
}

/// Reads the configuration, and before that what its files are like.
async fn read(source: &Source, watch: Option<&Watch>) -> (Known, Result<Fresh, Vec<String>>) {
    let source = source.clone();
    let paths = watch.map(|watch| watch.paths().to_vec()).unwrap_or_default();
    // Where the file is may hang.
    let read = move || (look_at(&paths, &Known::new()), source());
    let read = tokio::task::spawn_blocking(read).await;
    read.unwrap_or_else(|e| (Known::new(), Err(vec![format!("reading was given up: {e}")])))
}

/// Waits until the files have changed; for ever, if nobody looks.
async fn changed(watch: &mut Option<Watch>) {
    match watch {
        Some(watch) => watch.changed().await,
        None => std::future::pending().await,
    }
}

fn millis(took: Duration) -> f64 {
    (took.as_secs_f64() * 1e6).round() / 1000.0
}

/// What a reload has changed and what it has cost, in a line.
fn told(
    cause: &'static str,
    by: Option<String>,
    took_ms: f64,
    done: &Reloaded,
    warnings: Vec<String>,
    changes: Box<AllChanges>,
) -> Event {
    let Going { connections, tunnels, requests, .. } = done.going;
    Event::ConfigReloaded {
        cause,
        by,
        generation: done.generation,
        took_ms,
        kept_connections: connections.saturating_sub(done.leaving),
        leaving_connections: done.leaving,
        kept_tunnels: tunnels,
        in_flight: requests,
        closed: done.closed,
        warnings,
        changes,
    }
}

/// What is not as it was before.
fn changes(done: &Reloaded, plan: &Plan) -> AllChanges {
    let diff = Diff::between(&view(&done.before.plan), &view(plan));
    let mut needs_restart = diff.needs_restart();
    needs_restart.extend(done.workers_stay.then(|| "workers".to_owned()));
    let mut settings: Vec<_> = diff.settings.iter().map(|change| change.key.clone()).collect();
    // Its path says nothing about what is in it.
    let is_other_token = done.before.plan.admin_token != plan.admin_token;
    if is_other_token && !settings.iter().any(|key| key == TOKEN_FILE) {
        settings.push(TOKEN_FILE.to_owned());
    }
    AllChanges {
        listeners: Changes::of(&diff.listeners),
        routes: Changes::of(&diff.routes),
        pools: Changes::of(&diff.pools),
        upstreams: Changes::of(&diff.upstreams),
        settings,
        needs_restart,
    }
}

/// Waits the delay, then until all is drained or the grace is over.
async fn drained(running: &mut Running, drain: &crate::config::plan::Drain) {
    tokio::time::sleep(drain.delay).await;
    running.drain();
    if tokio::time::timeout(drain.timeout, running.drained()).await.is_err() {
        running.end();
        let _ = tokio::time::timeout(ORDERLY, running.drained()).await;
    }
}

/// Has panics counted and written as events. What a panic took is given back as it unwinds; the
/// process goes on.
pub(crate) fn count_panics(process: &Arc<Process>) {
    let process = process.clone();
    std::panic::set_hook(Box::new(move |info| {
        let location =
            info.location().map_or_else(String::new, |l| format!("{}:{}", l.file(), l.line()));
        process.panics.up(&location);
        process.events.emit(&Event::ExchangePanicked {
            location,
            message: info.payload_as_str().unwrap_or("no message").to_owned(),
        });
    }));
}
