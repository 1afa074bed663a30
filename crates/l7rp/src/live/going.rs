//! What goes on in a process, summed over its workers.

use super::Process;
use crate::observe::stats::{Count, WorkerStats};

/// What goes on in a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Going {
    /// Connections of clients.
    pub connections: u64,
    /// Tunnels among them.
    pub tunnels: u64,
    /// Requests in progress, tunnels apart.
    pub requests: u64,
    /// Requests that the proxy has cut off since it began.
    pub cut: u64,
    /// Tunnels that it has closed at the end of a grace.
    pub tunnels_closed: u64,
}

impl Going {
    /// In `process`, now.
    pub fn on(process: &Process) -> Self {
        let sum = |count: fn(&WorkerStats) -> &Count| -> u64 {
            process.counts.iter().map(|counts| count(counts).get()).sum()
        };
        // What has ended is read first, so that nothing seems to have ended before it began.
        let (closed, ended) = (sum(|c| &c.connections_closed), sum(|c| &c.tunnels_ended));
        let tunnels = sum(|c| &c.tunnels_opened).saturating_sub(ended);
        Self {
            connections: sum(|c| &c.connections_opened).saturating_sub(closed),
            tunnels,
            requests: u64::from(process.slots.used()).saturating_sub(tunnels),
            cut: sum(|c| &c.cut),
            tunnels_closed: sum(|c| &c.tunnels_closed),
        }
    }
}
