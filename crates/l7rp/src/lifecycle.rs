//! The process from its start to its exit: signals, reload, drain, exit code.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use l7rp_core::names::Nanos;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::clock::wall_ms;
use crate::config::plan::Plan;
use crate::config::watch::Watch;
use crate::live::Process;
use crate::observe::event::{Event, Events, Level};
use crate::observe::log::Log;
use crate::running::{self, Going, Running};

/// Exit code of a start or run that failed.
const FAILED: u8 = 1;
/// Exit code when a second signal ended the drain.
const FORCED: u8 = 3;
/// Signals that come together are one.
const SAME_SIGNAL: Duration = Duration::from_millis(100);
/// How long tunnels have to be closed in order when the grace is over.
const ORDERLY: Duration = Duration::from_secs(1);
/// How long the last log lines may take.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Reads the configuration, as at the start.
///
/// # Errors
/// What is wrong with it, and where: a line for each.
pub type Source = Arc<dyn Fn() -> Result<Plan, Vec<String>> + Send + Sync>;

/// What a process does.
pub struct Task {
    /// What to serve at first.
    pub plan: Plan,
    /// Where another plan comes from.
    pub source: Source,
    /// Looks whether the files have changed.
    pub watch: Option<Watch>,
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
    log.finish(LAST_LINES);
    code
}

#[expect(clippy::print_stderr, reason = "a start that fails is told to whoever started it")]
fn fail(words: &str) -> ExitCode {
    eprintln!("error: {words}");
    ExitCode::from(FAILED)
}

/// The signals that mean something to a running proxy.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

/// What a signal asks for.
enum Wish {
    /// To stop; the signal's name.
    Stop(&'static str),
    Reload,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Wish {
        tokio::select! {
            _ = self.terminate.recv() => Wish::Stop("SIGTERM"),
            _ = self.interrupt.recv() => Wish::Stop("SIGINT"),
            _ = self.hang_up.recv() => Wish::Reload,
        }
    }

    /// Waits for one that asks to stop, while the process drains.
    async fn stop(&mut self, events: &Events) {
        loop {
            match self.next().await {
                Wish::Stop(_) => return,
                Wish::Reload => events.emit(&Event::ReloadIgnored {
                    why: "the proxy is draining; start it again to put a changed file in force",
                }),
            }
        }
    }
}

async fn run(task: Task, events: &Arc<Events>) -> Result<ExitCode, String> {
    let Task { plan, source, mut watch, .. } = task;
    // Before the start, so that no signal finds the process without an answer.
    let mut signals = Signals::new().map_err(|e| format!("cannot catch signals: {e}"))?;
    let mut running = running::start(plan, events, Vec::new()).map_err(|e| e.to_string())?;
    count_panics(running.process());
    let why = loop {
        let changed = async {
            match &mut watch {
                Some(watch) => watch.changed().await,
                None => std::future::pending().await,
            }
        };
        let cause = tokio::select! {
            wish = signals.next() => match wish {
                Wish::Stop(why) => break why,
                Wish::Reload => "SIGHUP",
            },
            () = changed => "file",
        };
        reload(&mut running, &source, cause).await;
        if let Some(watch) = &mut watch {
            watch.also(&running.process().snapshot().plan);
        }
    };
    Ok(drain(running, &mut signals, why).await)
}

/// Reads the configuration again and puts it in force, or says why not.
async fn reload(running: &mut Running, source: &Source, cause: &'static str) {
    let process = running.process().clone();
    let began = process.clock.now();
    let read = source.clone();
    // A file system that hangs must not keep signals from being heard for longer than it takes.
    let plan = tokio::task::spawn_blocking(move || read()).await;
    let plan = plan.unwrap_or_else(|e| Err(vec![format!("reading was given up: {e}")]));
    let done = plan.and_then(|plan| running.reload(plan).map_err(|e| vec![e.to_string()]));
    let took = process.clock.now().since(began);
    let reloads = &process.reloads;
    reloads.duration.record(took);
    reloads.last_failed.store(done.is_err(), Relaxed);
    let took_ms = took.as_secs_f64() * 1000.0;
    match done {
        Ok(done) => {
            reloads.ok.up();
            reloads.last_success_ms.store(wall_ms(), Relaxed);
            let Going { connections, tunnels, requests, .. } = done.going;
            process.events.emit(&Event::ConfigReloaded {
                cause,
                generation: done.generation,
                took_ms,
                kept_connections: connections,
                kept_tunnels: tunnels,
                in_flight: requests,
                closed: done.closed,
            });
        }
        Err(errors) => {
            reloads.rejected.up();
            let generation = process.generation();
            process.events.emit(&Event::ConfigRejected { cause, generation, took_ms, errors });
        }
    }
}

/// Drains and stops; the exit code.
async fn drain(mut running: Running, signals: &mut Signals, why: &'static str) -> ExitCode {
    let process = running.process().clone();
    let plan = process.snapshot().plan.drain.clone();
    let events = process.events.clone();
    let began = process.clock.now();
    let before = Going::on(&process);
    running.leave();
    events.emit(&Event::ShutdownStarted {
        why,
        in_progress: before.requests + before.tunnels,
        tunnels: before.tunnels,
        connections: before.connections,
        delay_ms: plan.delay.as_millis() as u64,
        grace_ms: plan.timeout.as_millis() as u64,
    });
    let again = async {
        // Some supervisors signal a process and then its group: that is one signal.
        while process.clock.now().since(began) < SAME_SIGNAL {
            signals.stop(&events).await;
        }
    };
    let orderly = tokio::select! {
        () = drained(&mut running, &plan) => true,
        () = again => false,
    };
    running.stop();
    let after = Going::on(&process);
    let (took_ms, cut) = (since(&process, began), after.cut);
    if orderly {
        let tunnels_closed = after.tunnels_closed;
        events.emit(&Event::ShutdownComplete { took_ms, cut, tunnels_closed });
        ExitCode::SUCCESS
    } else {
        // Tunnels are among what was cut.
        events.emit(&Event::ShutdownForced { took_ms, cut });
        ExitCode::from(FORCED)
    }
}

fn since(process: &Process, began: Nanos) -> u64 {
    process.clock.now().since(began).as_millis() as u64
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
