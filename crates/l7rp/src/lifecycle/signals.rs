//! The signals that mean something to a running proxy.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::observe::event::{Event, Events};

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// To stop; the signal's name.
    Stop(&'static str),
    /// To read the configuration again.
    Reload,
    /// To let another process take over.
    Upgrade,
}

/// The signals, caught.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    user: Signal,
}

impl Signals {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            user: signal(SignalKind::user_defined2())?,
        })
    }

    pub(super) async fn next(&mut self) -> Wish {
        tokio::select! {
            _ = self.terminate.recv() => Wish::Stop("SIGTERM"),
            _ = self.interrupt.recv() => Wish::Stop("SIGINT"),
            _ = self.hang_up.recv() => Wish::Reload,
            _ = self.user.recv() => Wish::Upgrade,
        }
    }

    /// Waits for one that asks to stop; others come too late while the process drains.
    pub(super) async fn stop(&mut self, events: &Events) {
        loop {
            match self.next().await {
                Wish::Stop(_) => return,
                wish => ignore(wish, "the proxy is draining", events),
            }
        }
    }
}

/// Tells that a wish comes at the wrong time.
pub(super) fn ignore(wish: Wish, why: &'static str, events: &Events) {
    match wish {
        Wish::Reload => events.emit(&Event::ReloadIgnored { why }),
        Wish::Upgrade => events.emit(&Event::UpgradeIgnored { why }),
        Wish::Stop(_) => {}
    }
}
