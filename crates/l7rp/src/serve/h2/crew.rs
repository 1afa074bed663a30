//! Tasks that serve streams, one after the other. A task is some KiB of state: to make one, to move
//! it to its place and to take it apart again costs as much as many a request.

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::Job;
use crate::spare::Spare;
use crate::worker::Worker;

/// Tasks that wait for a stream, at most.
const KEPT: usize = 512;

/// The tasks of one worker that have nothing to do.
#[derive(Debug)]
pub struct Crew(Spare<Idle>);

impl Default for Crew {
    fn default() -> Self {
        Self(Spare::new(KEPT))
    }
}

impl Crew {
    /// Has a stream served: by a task that is idle, or by a new one.
    pub(super) fn take_on(worker: &Rc<Worker>, job: Job) {
        match worker.crew.0.take() {
            Some(idle) => idle.0.next.set(Next::Serve(job)),
            None => drop(tokio::task::spawn_local(work(worker.clone(), job))),
        }
    }

    /// Ends tasks that have not been needed for a while. For once a second.
    pub fn trim(&self) {
        self.0.trim();
    }
}

async fn work(worker: Rc<Worker>, first: Job) {
    let seat = Rc::new(Seat::default());
    let mut job = first;
    loop {
        job.serve(&worker).await;
        worker.crew.0.give(Idle(seat.clone()));
        match poll_fn(|cx| seat.poll_next(cx)).await {
            Some(next) => job = next,
            None => return,
        }
    }
}

/// What a task is to do next.
#[derive(Default)]
enum Next {
    #[default]
    Wait,
    Serve(Job),
    End,
}

/// Where a task waits.
#[derive(Default)]
struct Seat {
    next: Cell<Next>,
    waker: Cell<Option<Waker>>,
}

impl Seat {
    fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Option<Job>> {
        match self.next.take() {
            Next::Serve(job) => Poll::Ready(Some(job)),
            Next::End => Poll::Ready(None),
            Next::Wait => {
                self.waker.set(Some(cx.waker().clone()));
                Poll::Pending
            }
        }
    }
}

/// A task that waits. Dropped, it goes on with what it has been given, or else ends.
struct Idle(Rc<Seat>);

impl std::fmt::Debug for Idle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Idle")
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        let next = match self.0.next.take() {
            Next::Wait => Next::End,
            given => given,
        };
        self.0.next.set(next);
        if let Some(waker) = self.0.waker.take() {
            waker.wake();
        }
    }
}
