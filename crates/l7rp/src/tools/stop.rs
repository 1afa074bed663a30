//! Waiting until somebody asks the process to end.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals, caught from the moment this is made: make it before you say that you are ready, or a
/// quick signal ends the process in the old way.
#[derive(Debug)]
pub struct Stop {
    signals: Vec<Signal>,
    // After the signals: they belong to it.
    runtime: Runtime,
}

impl Stop {
    /// Begins to catch SIGINT and SIGTERM. SIGHUP stays as it is: `nohup` has it ignored.
    ///
    /// # Errors
    /// The system has no room for it.
    pub fn install() -> io::Result<Self> {
        Self::catch(&[SignalKind::interrupt(), SignalKind::terminate()])
    }

    /// The same, and SIGHUP and SIGQUIT: for those who have a terminal to give back.
    ///
    /// # Errors
    /// The system has no room for it.
    pub fn install_on_terminal() -> io::Result<Self> {
        Self::catch(&[
            SignalKind::interrupt(),
            SignalKind::terminate(),
            SignalKind::hangup(),
            SignalKind::quit(),
        ])
    }

    fn catch(kinds: &[SignalKind]) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_io().build()?;
        let signals = {
            let _inside = runtime.enter();
            kinds.iter().map(|kind| signal(*kind)).collect::<Result<_, _>>()?
        };
        Ok(Self { signals, runtime })
    }

    /// Blocks until one of them comes, or returns at once if one has since the last time.
    pub fn wait(&mut self) {
        let signals = &mut self.signals;
        self.runtime.block_on(poll_fn(|cx| {
            let came = signals.iter_mut().any(|one| one.poll_recv(cx).is_ready());
            if came { Poll::Ready(()) } else { Poll::Pending }
        }));
    }
}
