//! Tells whenever it changes whether traffic should be sent here.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::live::{Process, Unready};
use crate::observe::event::Event;
use crate::sync::lock;

/// How often it is looked at.
const EVERY: Duration = Duration::from_millis(250);

/// What was told last.
#[derive(Debug)]
pub(super) struct Readiness {
    process: Arc<Process>,
    was_ready: Mutex<bool>,
}

impl Readiness {
    pub(super) fn new(process: Arc<Process>) -> Arc<Self> {
        Arc::new(Self { process, was_ready: Mutex::default() })
    }

    /// From here on changes are told.
    pub(super) fn begin(&self) {
        *lock(&self.was_ready) = self.process.is_ready();
    }

    /// Looks again and again.
    pub(super) async fn watch(self: Arc<Self>) {
        loop {
            tokio::time::sleep(EVERY).await;
            self.look();
        }
    }

    /// Tells if it has changed.
    pub(super) fn look(&self) {
        // Held while it is looked at: what another has seen before must not be told after.
        let mut was_ready = lock(&self.was_ready);
        let why = self.process.why_unready();
        let word = |is_ready| if is_ready { "ready" } else { "unready" };
        let before = std::mem::replace(&mut *was_ready, why.is_none());
        if before != why.is_none() {
            self.process.events.emit(&Event::ReadinessChanged {
                from: word(before),
                to: word(why.is_none()),
                why: why.map_or("an upstream can be chosen", Unready::words),
            });
        }
    }
}
