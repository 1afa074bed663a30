//! The process from its start to its exit: signals, drain, exit code.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::plan::Plan;
use crate::live::Process;
use crate::observe::event::{Event, Events, Level};
use crate::observe::log::Log;
use crate::running::{self, Running};

/// Exit code of a start or run that failed.
const FAILED: u8 = 1;
/// Exit code when a second signal ended the drain.
const FORCED: u8 = 3;
/// Signals that come together are one.
const SAME_SIGNAL: Duration = Duration::from_millis(100);
/// How long the last log lines may take.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Serves `plan` until a signal ends it. Events and access log go to standard output,
/// failures of the start to standard error.
pub fn serve(plan: Plan, level: Level) -> ExitCode {
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
    let events = Arc::new(Events::new(log.clone(), level));
    let code = runtime.block_on(run(plan, &events)).unwrap_or_else(|e| fail(&e));
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

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for one that asks to stop; its name.
    async fn stop(&mut self, events: &Events) -> &'static str {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return "SIGTERM",
                _ = self.interrupt.recv() => return "SIGINT",
                // Caught although it cannot be obeyed: by default it would end the process.
                _ = self.hang_up.recv() => events.emit(&Event::ReloadIgnored {
                    why: "this version cannot reload; restart to put a changed file in force",
                }),
            }
        }
    }
}

async fn run(plan: Plan, events: &Arc<Events>) -> Result<ExitCode, String> {
    let drain = plan.drain.clone();
    // Before the start, so that no signal finds the process without an answer.
    let mut signals = Signals::new().map_err(|e| format!("cannot catch signals: {e}"))?;
    let mut running = running::start(plan, events.clone()).map_err(|e| e.to_string())?;
    count_panics(running.process());
    let why = signals.stop(events).await;
    let clock = running.process().clock;
    let began = clock.now();
    events.emit(&Event::ShutdownStarted {
        why,
        in_progress: u64::from(running.process().slots.used()),
        grace_ms: drain.timeout.as_millis() as u64,
    });
    running.leave();
    let again = async {
        // Some supervisors signal a process and then its group: that is one signal.
        while clock.now().since(began) < SAME_SIGNAL {
            signals.stop(events).await;
        }
    };
    let orderly = tokio::select! {
        () = drained(&mut running, &drain) => true,
        () = again => false,
    };
    let cut = running.stop() as u64;
    if orderly {
        let took_ms = clock.now().since(began).as_millis() as u64;
        events.emit(&Event::ShutdownComplete { took_ms, cut });
        Ok(ExitCode::SUCCESS)
    } else {
        events.emit(&Event::ShutdownForced { cut });
        Ok(ExitCode::from(FORCED))
    }
}

/// Waits the delay, then until all is drained or the grace is over.
async fn drained(running: &mut Running, drain: &crate::config::plan::Drain) {
    tokio::time::sleep(drain.delay).await;
    running.drain();
    let _ = tokio::time::timeout(drain.timeout, running.drained()).await;
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
