//! A connection to an upstream, counted from its opening to its closing.

use std::sync::Arc;

use l7rp_core::names::Nanos;

use super::pool::Upstream;
use crate::observe::stats::UpstreamStats;
use crate::stream::Stream;

/// An open connection. Dropping it closes it and takes it out of the count.
#[derive(Debug)]
pub struct Connection {
    /// To and from the upstream.
    pub stream: Stream,
    /// When it was opened.
    pub opened: Nanos,
    upstream: Arc<Upstream>,
    /// Whether it is a connection of its own, and not one request's share of one.
    counted: bool,
    worker: usize,
}

impl Connection {
    /// Counts `stream`, which `worker` has just opened.
    pub fn new(stream: Stream, upstream: &Arc<Upstream>, worker: usize, now: Nanos) -> Self {
        upstream.stats[worker].connects.up();
        Self { stream, opened: now, upstream: upstream.clone(), counted: true, worker }
    }

    /// One request's share of a connection that carries many, and was `opened` then.
    pub fn shared(stream: Stream, upstream: &Arc<Upstream>, worker: usize, opened: Nanos) -> Self {
        Self { stream, opened, upstream: upstream.clone(), counted: false, worker }
    }

    /// The counts of its upstream in its worker.
    pub fn stats(&self) -> &UpstreamStats {
        &self.upstream.stats[self.worker]
    }

    /// Whom it leads to.
    pub fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.counted {
            self.upstream.stats[self.worker].closes.up();
        }
    }
}
