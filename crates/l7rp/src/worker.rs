//! What one worker thread has to itself. Nothing here is shared with other threads, so none
//! of it needs an atomic or a lock; all of it is reused from request to request.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use l7rp_core::http1::request::Request;
use l7rp_core::http1::response::Response;
use l7rp_core::limit::{Bucket, Decision, Rate};
use l7rp_core::names::Nanos;
use tokio::sync::Notify;

use crate::live::{Door, Listener, Process, Snapshot};
use crate::observe::access_log::{Entry, Lines};
use crate::observe::stats::WorkerStats;
use crate::serve::h2::Crew;
use crate::spare::Spare;
use crate::turns::Turns;
use crate::upstream::h2::Multiplexed;
use crate::upstream::idle::IdlePool;

/// Octets of a buffer for heads and short bodies: a head and 16 KiB fit, so that such a
/// message takes one read, and a connection that waits for its upstream holds no more.
pub const SMALL: usize = 20 << 10;
/// Octets of a buffer for long bodies.
const LARGE: usize = 256 << 10;
/// Lines about requests that cannot be read: at once, and a second after that.
const NOISE_BURST: u32 = 10;
const NOISE_RATE: f64 = 5.0;
/// Buffers and scratches that are kept for later, as long as they are needed every second.
const KEPT: usize = 1024;

/// A worker.
#[derive(Debug)]
pub struct Worker {
    /// Its number; the place of its shard wherever there are shards.
    pub index: usize,
    /// What the whole process shares.
    pub process: Arc<Process>,
    /// Idle connections to upstreams.
    pub idle: IdlePool,
    /// Connections to upstreams that carry many requests.
    pub h2: Multiplexed,
    /// Whose handshake goes on next.
    pub turns: Turns,
    /// Free buffers.
    pub buffers: Buffers,
    /// Clients connected now.
    pub connections: Connections,
    /// Woken when there are access-log lines to be handed over.
    pub lines_waiting: Notify,
    lines: Lines,
    noise: Bucket,
    /// Tasks that wait for a stream of HTTP/2.
    pub crew: Crew,
    scratches: Spare<Scratch>,
    #[expect(
        clippy::redundant_allocation,
        reason = "a count of this thread's own beside the shared one"
    )]
    snapshot: RefCell<Rc<Arc<Snapshot>>>,
    generation: Cell<u64>,
}

/// What one exchange works with.
#[derive(Debug, Default)]
pub struct Scratch {
    /// The request's head.
    pub request: Request,
    /// The response's head.
    pub response: Response,
    /// The head that goes to the upstream.
    pub to_upstream: Vec<u8>,
    /// The head that goes to the client.
    pub to_client: Vec<u8>,
}

impl Worker {
    /// Worker number `index`.
    pub fn new(index: usize, process: Arc<Process>) -> Self {
        let snapshot = RefCell::new(Rc::new(process.snapshot()));
        Self {
            index,
            generation: Cell::new(process.generation()),
            process,
            idle: IdlePool::default(),
            h2: Multiplexed::default(),
            turns: Turns::default(),
            buffers: Buffers::default(),
            connections: Connections::default(),
            lines_waiting: Notify::new(),
            lines: Lines::default(),
            noise: Bucket::new(),
            crew: Crew::default(),
            scratches: Spare::new(KEPT),
            snapshot,
        }
    }

    /// The snapshot in force. Looking costs one load while none is new, and holding it no
    /// count that another thread touches.
    pub fn snapshot(&self) -> Rc<Arc<Snapshot>> {
        let generation = self.process.generation();
        if generation != self.generation.get() {
            self.snapshot.replace(Rc::new(self.process.snapshot()));
            self.generation.set(generation);
        }
        self.snapshot.borrow().clone()
    }

    /// The snapshot for an exchange on a connection that came in at `door`; `listener` becomes
    /// the one that serves it.
    /// `None`: there is none.
    pub fn pin(&self, door: &Door, listener: &mut Arc<Listener>) -> Option<Rc<Arc<Snapshot>>> {
        let in_force = self.snapshot();
        let (serving, snapshot) = door.serving(listener, &in_force)?;
        let other = (!Arc::ptr_eq(snapshot, &in_force)).then(|| Rc::new(snapshot.clone()));
        if !Arc::ptr_eq(serving, listener) {
            let serving = serving.clone();
            *listener = serving;
        }
        Some(other.unwrap_or(in_force))
    }

    /// What it counts of what belongs to the process as a whole.
    pub fn counts(&self) -> &WorkerStats {
        &self.process.counts[self.index]
    }

    /// Writes an access-log line, if there is an access log. `now`: when what it says was over.
    pub fn log(&self, entry: &Entry<'_>, now: Nanos) {
        if self.lines.add(entry, now, &self.process.events) {
            self.lines_waiting.notify_one();
        }
    }

    /// Whether one more request that is none is worth a line: anybody can send thousands of them,
    /// and they all say the same.
    pub fn logs_noise(&self) -> bool {
        let rate = Rate::new(NOISE_RATE, NOISE_BURST);
        let may = self.noise.try_take(&rate, self.process.clock.now());
        if let Decision::Refused { .. } = may {
            self.process.events.log().leave_out();
        }
        matches!(may, Decision::Allowed { .. })
    }

    /// Hands the access-log lines to the writer.
    pub fn hand_over_lines(&self) {
        self.lines.hand_over(&self.process.events);
    }

    /// A scratch to work with.
    pub fn take_scratch(&self) -> Scratch {
        self.scratches.take().unwrap_or_default()
    }

    /// Gives a scratch back.
    pub fn give_scratch(&self, mut scratch: Scratch) {
        if scratch.to_upstream.capacity() + scratch.to_client.capacity() <= SMALL {
            scratch.to_upstream.clear();
            scratch.to_client.clear();
            self.scratches.give(scratch);
        }
    }

    /// Gives up what has not been needed for a while. For once a second.
    pub fn trim(&self) {
        self.buffers.trim();
        self.scratches.trim();
        self.crew.trim();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Exchanges that were cut have just written theirs.
        self.hand_over_lines();
    }
}

/// Free buffers: the warmest is used first. Those for requests are apart: each is held until its
/// request is answered, and all of them come round; a response is in its buffer for a moment only,
/// and the next one is to find the same, which the processor's cache still has.
#[derive(Debug)]
pub struct Buffers {
    requests: Spare<Vec<u8>>,
    small: Spare<Vec<u8>>,
    large: Spare<Vec<u8>>,
}

impl Default for Buffers {
    fn default() -> Self {
        let [requests, small] = [(); 2].map(|()| Spare::new(KEPT));
        Self { requests, small, large: Spare::new(KEPT / 32) }
    }
}

impl Buffers {
    /// An empty buffer of 20 KiB for what a client asks.
    pub fn request(&self) -> Vec<u8> {
        self.requests.take().unwrap_or_else(|| Vec::with_capacity(SMALL))
    }

    /// Gives one back that was for requests, unless it has grown.
    pub fn give_request(&self, mut buffer: Vec<u8>) {
        if buffer.capacity() == SMALL {
            buffer.clear();
            self.requests.give(buffer);
        }
    }

    /// An empty buffer of 20 KiB.
    pub fn small(&self) -> Vec<u8> {
        self.small.take().unwrap_or_else(|| Vec::with_capacity(SMALL))
    }

    /// An empty buffer of 256 KiB.
    pub fn large(&self) -> Vec<u8> {
        self.large.take().unwrap_or_else(|| Vec::with_capacity(LARGE))
    }

    /// Gives a buffer back. One of another size, grown for a large head, is freed.
    pub fn give(&self, mut buffer: Vec<u8>) {
        let spare = match buffer.capacity() {
            SMALL => &self.small,
            LARGE => &self.large,
            _ => return,
        };
        buffer.clear();
        spare.give(buffer);
    }

    fn trim(&self) {
        self.requests.trim();
        self.small.trim();
        self.large.trim();
    }
}

/// The connections of clients, so that all can be woken when the process begins to drain.
#[derive(Debug, Default)]
pub struct Connections {
    /// By number; those that have left leave theirs to others.
    wakers: RefCell<Vec<Option<Waker>>>,
    free: RefCell<Vec<usize>>,
    empty: Notify,
}

impl Connections {
    /// Enters a connection whose task is woken by `waker`.
    pub fn enter(&self, waker: Waker) -> usize {
        let mut wakers = self.wakers.borrow_mut();
        if let Some(id) = self.free.borrow_mut().pop() {
            wakers[id] = Some(waker);
            return id;
        }
        wakers.push(Some(waker));
        wakers.len() - 1
    }

    /// Takes a connection out.
    pub fn leave(&self, id: usize) {
        let (mut wakers, mut free) = (self.wakers.borrow_mut(), self.free.borrow_mut());
        wakers[id] = None;
        free.push(id);
        if wakers.len() == free.len() {
            wakers.clear();
            free.clear();
            wakers.shrink_to(64);
            free.shrink_to(64);
            self.empty.notify_waiters();
        }
    }

    /// Waits until there are none.
    pub async fn all_gone(&self) {
        while self.count() > 0 {
            self.empty.notified().await;
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.wakers.borrow().len() - self.free.borrow().len()
    }

    /// Wakes every connection's task.
    pub fn wake_all(&self) {
        for waker in self.wakers.borrow().iter().flatten() {
            waker.wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_finds_the_buffer_of_the_response_before() {
        let buffers = Buffers::default();
        let (request, response) = (buffers.request(), buffers.small());
        let (of_request, of_response) = (request.as_ptr(), response.as_ptr());
        // As an exchange does it: the next response comes right after the request's is given back.
        buffers.give(response);
        buffers.give_request(request);
        let (response, request) = (buffers.small(), buffers.request());
        assert_eq!((response.as_ptr(), request.as_ptr()), (of_response, of_request));
    }
}
