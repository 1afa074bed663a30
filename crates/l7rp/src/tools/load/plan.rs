//! What is to be done, and by how many threads.

use std::path::PathBuf;
use std::time::Duration;

use super::request::{Ask, Url};
use super::schedule::{End, Pace};

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where requests go.
    pub url: Url,
    /// What each of them asks.
    pub ask: Ask,
    /// When they are sent.
    pub pace: Pace,
    /// When it is over.
    pub end: End,
    /// Before that, for so long, nothing counts.
    pub warm_up: Duration,
    /// Requests at once, at most.
    pub concurrency: usize,
    /// HTTP/2 is spoken, with so many requests at once on a connection.
    pub streams: Option<usize>,
    /// Threads, at most; see [`Plan::even_threads`].
    pub threads: usize,
    /// An answer that is not complete after this long has failed.
    pub timeout: Duration,
    /// Whom to trust, for `https`.
    pub trust: Trust,
    /// Idle connections beside the busy ones (HTTP/1.1).
    pub hold: usize,
}

/// Whom to trust.
#[derive(Clone, Debug, Default)]
pub struct Trust {
    /// PEM file with CAs; `None`: those of the system.
    pub ca_file: Option<PathBuf>,
    /// Anybody.
    pub insecure: bool,
}

impl Plan {
    /// Connections that are busy.
    pub fn connections(&self) -> usize {
        self.streams.map_or(self.concurrency, |streams| self.concurrency.div_ceil(streams.max(1)))
    }

    /// As many threads as there may be, if each is to have as many places as another, so that
    /// none has more to do.
    pub fn even_threads(&self) -> usize {
        let connections = self.connections();
        let are_alike = self.streams.is_none_or(|n| self.concurrency == connections * n);
        let most = if are_alike { self.threads.min(connections) } else { 1 };
        (1..=most).rev().find(|threads| connections.is_multiple_of(*threads)).unwrap_or(1)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn plan(pace: Pace, end: End) -> Plan {
        let ask = Ask { method: None, fields: Vec::new(), body: 0, chunked: false, close: false };
        Plan {
            url: "http://a.test/".parse().unwrap(),
            ask,
            pace,
            end,
            warm_up: Duration::from_secs(1),
            concurrency: 5,
            streams: None,
            threads: 2,
            timeout: Duration::from_secs(9),
            trust: Trust::default(),
            hold: 0,
        }
    }

    #[test]
    fn threads_have_the_same_number_of_places() {
        for (concurrency, streams, threads, even) in [
            (64, None, 2, 2),
            (3, None, 2, 1),
            (3, None, 4, 3),
            (10, None, 8, 5),
            (61, None, 8, 1),
            (1, None, 8, 1),
            (64, Some(16), 8, 4),
            (96, Some(16), 4, 3),
            // The last connection has 8.
            (40, Some(16), 2, 1),
            (40, Some(16), 3, 1),
            (5, Some(16), 3, 1),
        ] {
            let plan = plan(Pace::Closed, End::Requests(1));
            let plan = Plan { concurrency, streams, threads, ..plan };
            assert_eq!(plan.even_threads(), even, "{concurrency} {streams:?} {threads}");
        }
    }
}
