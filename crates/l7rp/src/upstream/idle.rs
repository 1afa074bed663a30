//! Idle connections to upstreams: a stack for each upstream in each worker, last in, first
//! out, so that the warmest is used and the rest expire.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use foldhash::fast::FixedState;
use l7rp_core::names::Nanos;

use super::connection::Connection;
use super::pool::Upstream;

/// A request that may not be repeated takes no connection that was idle for longer, for the
/// upstream may be closing it at this moment.
const FRESH: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct Idle {
    connection: Connection,
    since: Nanos,
    expires: Nanos,
    address_generation: u32,
}

/// One worker's idle connections, by [`Upstream::id`].
#[derive(Debug, Default)]
pub struct IdlePool {
    stacks: RefCell<HashMap<usize, Vec<Idle>, FixedState>>,
}

impl IdlePool {
    /// A connection to `upstream` that nothing was heard of since it became idle. With
    /// `only_fresh`, one that became so within the last 2 s.
    pub fn take(
        &self,
        upstream: &Upstream,
        now: Nanos,
        only_fresh: bool,
        worker: usize,
    ) -> Option<Connection> {
        let mut stacks = self.stacks.borrow_mut();
        let stack = stacks.get_mut(&upstream.id)?;
        let taken = loop {
            // The last is the youngest: if it is not fresh, none is.
            if only_fresh && stack.last().is_some_and(|i| now.since(i.since) >= FRESH) {
                break None;
            }
            let Some(idle) = stack.pop() else { break None };
            if idle.is_usable(upstream, now) {
                break Some(idle.connection);
            }
        };
        upstream.stats[worker].idle.store(stack.len() as u64, Relaxed);
        taken
    }

    /// Keeps a connection for later, unless `max` are kept already.
    pub fn put(
        &self,
        connection: Connection,
        now: Nanos,
        keep_for: Duration,
        max: usize,
        worker: usize,
    ) {
        let upstream = connection.upstream().clone();
        let mut stacks = self.stacks.borrow_mut();
        let stack = stacks.entry(upstream.id).or_default();
        if stack.len() >= max || keep_for.is_zero() || upstream.is_retired() {
            return;
        }
        stack.push(Idle {
            connection,
            since: now,
            expires: now.plus(keep_for),
            address_generation: upstream.address_generation(),
        });
        upstream.stats[worker].idle.store(stack.len() as u64, Relaxed);
    }

    /// Closes all connections, because this machine lacks descriptors. False: there was none.
    pub fn make_room(&self, worker: usize) -> bool {
        let mut stacks = self.stacks.borrow_mut();
        let mut any = false;
        for idle in stacks.values_mut().flat_map(|stack| stack.drain(..)) {
            idle.connection.upstream().stats[worker].idle.store(0, Relaxed);
            any = true;
        }
        any
    }

    /// Closes connections that have expired, that the upstream has closed, or that lead to an
    /// upstream which nothing in force uses.
    pub fn sweep(&self, now: Nanos, worker: usize) {
        let mut stacks = self.stacks.borrow_mut();
        // First: an heir may share the counts of those that are closed here, and has the say.
        stacks.retain(|_, stack| {
            let retired = stack.last().map(|idle| idle.connection.upstream());
            let Some(upstream) = retired.filter(|upstream| upstream.is_retired()) else {
                return true;
            };
            upstream.stats[worker].idle.store(0, Relaxed);
            false
        });
        stacks.retain(|_, stack| {
            let Some(last) = stack.last() else { return false };
            let upstream = last.connection.upstream().clone();
            stack.retain(|idle| idle.is_usable(&upstream, now));
            upstream.stats[worker].idle.store(stack.len() as u64, Relaxed);
            !stack.is_empty()
        });
    }
}

impl Idle {
    fn is_usable(&self, upstream: &Upstream, now: Nanos) -> bool {
        now < self.expires
            && !upstream.is_retired()
            && self.address_generation == upstream.address_generation()
            && self.connection.stream.is_quiet()
    }
}
