//! Waiting until somebody asks the process to end.

use std::io;

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT and SIGTERM, caught from the moment this is made: make it before you say that you
/// are ready, or a quick signal ends the process in the old way.
#[derive(Debug)]
pub struct Stop {
    interrupt: Signal,
    terminate: Signal,
    // After the signals: they belong to it.
    runtime: Runtime,
}

impl Stop {
    /// Begins to catch the signals.
    ///
    /// # Errors
    /// The system has no room for it.
    pub fn install() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_io().build()?;
        let (interrupt, terminate) = {
            let _inside = runtime.enter();
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
        };
        Ok(Self { interrupt, terminate, runtime })
    }

    /// Blocks until one of them comes, or returns at once if one has since the last time.
    pub fn wait(&mut self) {
        let (interrupt, terminate) = (&mut self.interrupt, &mut self.terminate);
        self.runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        });
    }
}
