//! A worker thread's life: accept, serve, tidy up, drain.

use std::future::poll_fn;
use std::io;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use l7rp_core::failure::Scope;
use l7rp_core::names::Nanos;
use tokio::sync::watch;
use tokio::task::unconstrained;

use super::h1;
use super::listen::{Accepting, Bound};
use crate::exchange::client::Client;
use crate::live::{Listener, Process};
use crate::observe::event::Event;
use crate::stream::Stream;
use crate::timer::Timer;
use crate::worker::Worker;

/// What a worker is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Accept and serve.
    Serve,
    /// Take what has been accepted to its end.
    Drain,
    /// Stop now.
    Stop,
}

/// How often idle connections to upstreams are looked through.
const SWEEP: Duration = Duration::from_secs(1);
/// How long an access-log line waits at most before it is handed over.
const LINE_DELAY: Duration = Duration::from_millis(50);
/// Accepting pauses for so long when this machine lacks something.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(50);

/// What a client is told for whom there is no connection left. Best effort: it is not
/// waited for.
const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\
    Proxy-Status: l7rp; error=connection_limit_reached; details=\"capacity_connections\"\r\n\
    Retry-After: 1\r\nConnection: close\r\n\r\n";

/// Runs a worker until all is drained or it is stopped; the number of connections that were
/// cut. Must run inside a `LocalSet`.
///
/// # Errors
/// A socket could not be taken over by the runtime.
pub async fn run(
    index: usize,
    process: Arc<Process>,
    sockets: Vec<(Bound, Arc<Listener>)>,
    mut phase: watch::Receiver<Phase>,
) -> io::Result<usize> {
    let worker = Rc::new(Worker::new(index, process));
    let mut accepting = Vec::new();
    for (bound, listener) in sockets {
        let socket = Accepting::new(bound)?;
        let accept = accept_all(worker.clone(), listener, socket, phase.clone());
        accepting.push(tokio::task::spawn_local(accept));
    }
    let sweeper = tokio::task::spawn_local(sweep(worker.clone()));
    let lines = tokio::task::spawn_local(hand_over_lines(worker.clone()));
    // A sender that is gone means that nobody will ever ask to drain: stop.
    let _ = phase.wait_for(|p| *p >= Phase::Drain).await;
    for task in accepting {
        // Each ends by itself once its queue is empty.
        let _ = task.await;
    }
    worker.connections.wake_all();
    tokio::select! {
        () = worker.connections.all_gone() => {}
        _ = phase.wait_for(|p| *p == Phase::Stop) => {}
    }
    sweeper.abort();
    lines.abort();
    worker.hand_over_lines();
    Ok(worker.connections.count())
}

/// Accepts until told to drain, and then what the kernel has already queued.
async fn accept_all(
    worker: Rc<Worker>,
    listener: Arc<Listener>,
    socket: Accepting,
    mut phase: watch::Receiver<Phase>,
) {
    let mut told = Nanos(0);
    loop {
        let draining = *phase.borrow() >= Phase::Drain;
        let accepted = if draining {
            // Ready at once: with a connection, or with nothing. Unconstrained, or the runtime
            // would say "nothing" once a task has done much, and what waits would be reset.
            unconstrained(poll_fn(|cx| Poll::Ready(socket.poll_accept(cx)))).await
        } else {
            tokio::select! {
                accepted = poll_fn(|cx| socket.poll_accept(cx)) => Poll::Ready(accepted),
                changed = phase.changed() => match changed {
                    Ok(()) => continue,
                    // Nobody is left who could ask to drain.
                    Err(_) => return,
                },
            }
        };
        match accepted {
            Poll::Pending => return,
            Poll::Ready(Ok((stream, peer))) => take_on(&worker, &listener, stream, peer),
            Poll::Ready(Err(e)) if is_the_peers(&e) => {}
            Poll::Ready(Err(_)) if draining => return,
            Poll::Ready(Err(e)) => {
                let now = worker.process.clock.now();
                if told == Nanos(0) || now.since(told) >= Duration::from_secs(1) {
                    told = now;
                    worker.process.events.emit(&Event::AcceptFailed {
                        listener: listener.plan.name.clone(),
                        error: e.to_string(),
                        effect: "accepting pauses for 50 ms; connections wait in the queue",
                    });
                }
                tokio::time::sleep(SHORTAGE_PAUSE).await;
            }
        }
    }
}

/// Errors of one connection that was gone before it was accepted (accept(2)).
fn is_the_peers(e: &io::Error) -> bool {
    matches!(
        e.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::Interrupted
    )
}

/// Begins to serve an accepted connection.
fn take_on(worker: &Rc<Worker>, listener: &Arc<Listener>, stream: Stream, peer: Option<IpAddr>) {
    let stats = &listener.stats[worker.index];
    if !listener.connections.try_enter() {
        stats.shed[Scope::Connections.index()].up();
        stream.try_say(FULL);
        return;
    }
    stats.opened.up();
    let entry = Entry { worker: worker.clone(), listener: listener.clone(), id: None };
    tokio::task::spawn_local(async move {
        let mut entry = entry;
        let waker = poll_fn(|cx| Poll::Ready(cx.waker().clone())).await;
        entry.id = Some(entry.worker.connections.enter(waker));
        let client = Client {
            stream,
            timer: Timer::new(entry.worker.process.clock),
            peer,
            peer_text: peer.map_or_else(|| "unix".into(), |ip| ip.to_string().into()),
            ahead: Vec::new(),
            ended: false,
            idle_since: entry.worker.process.clock.now(),
            has_spoken: false,
        };
        h1::serve(&entry.worker, &entry.listener, client).await;
    });
}

/// A connection's place in all counts, given back when dropped.
struct Entry {
    worker: Rc<Worker>,
    listener: Arc<Listener>,
    id: Option<u64>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.worker.connections.leave(id);
        }
        self.listener.connections.leave();
        self.listener.stats[self.worker.index].closed.up();
    }
}

async fn sweep(worker: Rc<Worker>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        let now = worker.process.clock.now();
        let snapshot = worker.snapshot();
        for upstream in snapshot.pools.iter().flat_map(|pool| &pool.upstreams) {
            worker.idle.sweep(upstream, now, worker.index);
        }
    }
}

async fn hand_over_lines(worker: Rc<Worker>) {
    loop {
        worker.lines_waiting.notified().await;
        tokio::time::sleep(LINE_DELAY).await;
        worker.hand_over_lines();
    }
}
