//! A connection to an upstream, counted from its opening to its closing.

use std::sync::Arc;

use super::pool::Upstream;
use crate::stream::Stream;

/// An open connection. Dropping it closes it and takes it out of the count.
#[derive(Debug)]
pub struct Connection {
    /// To and from the upstream.
    pub stream: Stream,
    upstream: Arc<Upstream>,
    worker: usize,
}

impl Connection {
    /// Counts `stream`, which `worker` has just opened.
    pub fn new(stream: Stream, upstream: &Arc<Upstream>, worker: usize) -> Self {
        upstream.stats[worker].connects.up();
        Self { stream, upstream: upstream.clone(), worker }
    }

    /// Whom it leads to.
    pub fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.upstream.stats[self.worker].closes.up();
    }
}
