//! A worker thread's life: accept, serve, tidy up, drain.

use std::future::poll_fn;
use std::io;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;
use std::time::Duration;

use l7rp_core::failure::Scope;
use l7rp_core::names::Nanos;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, unconstrained};

use super::listen::{Accepting, Bound};
use super::{h1, h2};
use crate::exchange::client::{Client, Link};
use crate::exchange::forwarded::peer_text;
use crate::live::{Door, Listener, Process};
use crate::observe::event::Event;
use crate::stream::Stream;
use crate::timer::Timer;
use crate::tls::Accepted;
use crate::worker::Worker;

/// What a worker is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Accept and serve.
    Serve,
    /// Take what has been accepted to its end.
    Drain,
    /// The grace is over: close in order what can be.
    End,
    /// Stop now.
    Stop,
}

/// What a worker is told while it serves.
#[derive(Debug)]
pub enum Order {
    /// Accept connections on `socket`.
    Open {
        /// Its address.
        door: Arc<Door>,
        /// Who serves those that come in.
        listener: Arc<Listener>,
        /// The worker's own, or its handle of one that workers share.
        socket: Bound,
    },
    /// Accept what has come in at the door with this id, and then no more.
    Close {
        /// [`Door::id`].
        door: u64,
        /// Dropped when the sockets are closed.
        done: mpsc::Sender<()>,
    },
}

/// Connections whose handshake is under way when a socket is to be closed have so long to end it;
/// and if the kernel knows of some then, this long.
const SETTLE: Duration = Duration::from_millis(100);
const SETTLE_LIMIT: Duration = Duration::from_secs(1);
/// What waits to be accepted in a socket that is to be closed waits so long for descriptors.
const SHORTAGE_LIMIT: Duration = Duration::from_secs(10);
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

/// Runs a worker until all is drained or it is stopped. Must run inside a `LocalSet`.
pub async fn run(
    index: usize,
    process: Arc<Process>,
    mut orders: mpsc::UnboundedReceiver<Order>,
    mut phase: watch::Receiver<Phase>,
) {
    let worker = Rc::new(Worker::new(index, process));
    let sweeper = tokio::task::spawn_local(sweep(worker.clone()));
    let lines = tokio::task::spawn_local(hand_over_lines(worker.clone()));
    let mut accepting = Vec::new();
    loop {
        tokio::select! {
            // A sender that is gone means that nobody will ever ask to drain: stop.
            _ = phase.wait_for(|p| *p >= Phase::Drain) => break,
            Some(order) = orders.recv() => follow(order, &worker, &mut accepting),
        }
    }
    // Sockets that were still to be opened may have connections in their queues.
    while let Ok(order) = orders.try_recv() {
        follow(order, &worker, &mut accepting);
    }
    worker.connections.wake_all();
    let drained = async {
        let closing: Vec<_> = accepting.into_iter().map(AcceptTask::close).collect();
        for task in closing {
            // Each ends by itself once its queue is empty.
            let _ = task.await;
        }
        worker.connections.all_gone().await;
    };
    let stopped = async {
        let _ = phase.wait_for(|p| *p >= Phase::End).await;
        worker.connections.wake_all();
        let _ = phase.wait_for(|p| *p == Phase::Stop).await;
    };
    tokio::select! {
        () = drained => {}
        () = stopped => {}
    }
    sweeper.abort();
    lines.abort();
    worker.hand_over_lines();
}

/// A task that accepts on one socket.
struct AcceptTask {
    door: u64,
    close: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl AcceptTask {
    /// Has it empty its queue and end.
    fn close(self) -> JoinHandle<()> {
        let _ = self.close.send(());
        self.task
    }
}

fn follow(order: Order, worker: &Rc<Worker>, accepting: &mut Vec<AcceptTask>) {
    match order {
        Order::Open { door, listener, socket } => match Accepting::new(socket) {
            Ok(socket) => {
                let (close, closed) = oneshot::channel();
                let id = door.id;
                let task = accept_all(worker.clone(), door, listener, socket, closed);
                let task = tokio::task::spawn_local(task);
                accepting.push(AcceptTask { door: id, close, task });
            }
            Err(e) => worker
                .process
                .events
                .emit(&Event::WorkerFailed { worker: worker.index, error: e.to_string() }),
        },
        Order::Close { door, done } => {
            for task in accepting.extract_if(.., |task| task.door == door) {
                let (task, done) = (task.close(), done.clone());
                tokio::task::spawn_local(async move {
                    let _ = task.await;
                    drop(done);
                });
            }
        }
    }
}

/// Accepts until told to close, and then what the kernel has already queued.
async fn accept_all(
    worker: Rc<Worker>,
    door: Arc<Door>,
    mut listener: Arc<Listener>,
    socket: Accepting,
    mut close: oneshot::Receiver<()>,
) {
    let mut told = Nanos(0);
    loop {
        let accepted = tokio::select! {
            accepted = poll_fn(|cx| socket.poll_accept(cx)) => accepted,
            _ = &mut close => break,
        };
        match accepted {
            Ok((stream, peer)) => take_on(&worker, &door, &mut listener, stream, peer),
            Err(e) if is_the_peers(&e) => {}
            Err(e) => {
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
    // Somebody else has the socket too, and accepts what waits in it.
    if !door.is_kept() {
        empty(&worker, &door, &mut listener, &socket).await;
    }
}

/// Accepts what is on its way to a socket that is about to be closed.
async fn empty(
    worker: &Rc<Worker>,
    door: &Arc<Door>,
    listener: &mut Arc<Listener>,
    socket: &Accepting,
) {
    let refuses = socket.refuse_new();
    let began = worker.process.clock.now();
    loop {
        // Ready at once: with a connection, or with nothing. Unconstrained, or the runtime would
        // say "nothing" once a task has done much, and what waits would be reset.
        let accepted = unconstrained(poll_fn(|cx| Poll::Ready(socket.poll_accept(cx)))).await;
        let time = worker.process.clock.now().since(began);
        match accepted {
            Poll::Ready(Ok((stream, peer))) => take_on(worker, door, listener, stream, peer),
            Poll::Ready(Err(e)) if is_the_peers(&e) => {}
            // Descriptors become free as connections end.
            Poll::Ready(Err(_)) if time < SHORTAGE_LIMIT => {
                worker.idle.make_room(worker.index);
                tokio::time::sleep(SHORTAGE_PAUSE).await;
            }
            Poll::Pending if refuses && time < SETTLE => tokio::time::sleep(SETTLE / 20).await,
            Poll::Pending if refuses && time < SETTLE_LIMIT && socket.has_handshakes().await => {
                tokio::time::sleep(SETTLE / 20).await;
            }
            Poll::Ready(Err(_)) | Poll::Pending => return,
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
fn take_on(
    worker: &Rc<Worker>,
    door: &Arc<Door>,
    listener: &mut Arc<Listener>,
    stream: Stream,
    peer: Option<IpAddr>,
) {
    let _ = worker.pin(door, listener);
    let stats = &listener.stats[worker.index];
    if !listener.connections.try_enter() {
        stats.shed[Scope::Connections.index()].up();
        worker.counts().shed[Scope::Connections.index()].up();
        // Over TLS there is nobody yet who could read it.
        if listener.tls.is_none() {
            stream.try_say(FULL);
        }
        return;
    }
    stats.opened.up();
    worker.counts().connections_opened.up();
    door.inside.fetch_add(1, Relaxed);
    let (listener, door) = (listener.clone(), door.clone());
    let entry = Entry { worker: worker.clone(), listener, door, id: None };
    tokio::task::spawn_local(attend(entry, stream, peer));
}

/// A connection's life.
#[expect(clippy::manual_async_fn, reason = "an async fn keeps what it was given twice")]
fn attend(mut entry: Entry, stream: Stream, peer: Option<IpAddr>) -> impl Future<Output = ()> {
    async move {
        let waker = poll_fn(|cx| Poll::Ready(cx.waker().clone())).await;
        entry.id = Some(entry.worker.connections.enter(waker));
        let Some((stream, link, is_http2)) = secured(&entry.worker, &entry.listener, stream).await
        else {
            return;
        };
        let clock = entry.worker.process.clock;
        let client = Client {
            stream,
            door: entry.door.clone(),
            link,
            timer: Timer::new(clock),
            peer,
            peer_text: peer_text(peer),
            ahead: Vec::new(),
            ended: false,
            idle_since: clock.now(),
            has_spoken: false,
        };
        if is_http2 {
            Box::pin(h2::serve(&entry.worker, &entry.listener, client, Vec::new())).await;
        } else {
            h1::serve(&entry.worker, entry.listener.clone(), client).await;
        }
    }
}

/// Speaks TLS where a listener does; and whether HTTP/2 follows. `None`: it came to nothing.
async fn secured(
    worker: &Worker,
    listener: &Listener,
    stream: Stream,
) -> Option<(Stream, Option<Rc<Link>>, bool)> {
    let (tls, tcp) = match (&listener.tls, stream) {
        (Some(tls), Stream::Tcp(tcp)) => (tls, tcp),
        (_, stream) => return Some((stream, None, false)),
    };
    let limit = listener.plan.timeouts.read_header;
    let shaking = Box::pin(worker.turns.take(tls.accept(tcp)));
    let reason = match tokio::time::timeout(limit, shaking).await {
        Ok(Ok(accepted)) => {
            let Accepted { stream, alpn_h2, sni, client_identity } = accepted;
            let identity = client_identity.map(Into::into);
            let tls = Some(tls.clone());
            let link = Link { is_http2: false, is_tls: true, tls, sni, identity };
            return Some((Stream::Tls(Box::new(stream)), Some(Rc::new(link)), alpn_h2));
        }
        Ok(Err(failure)) => failure.reason,
        Err(_) => "timeout",
    };
    listener.stats[worker.index].tls_failed(reason);
    None
}

/// A connection's place in all counts, given back when dropped.
struct Entry {
    worker: Rc<Worker>,
    listener: Arc<Listener>,
    door: Arc<Door>,
    id: Option<usize>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.worker.connections.leave(id);
        }
        self.door.inside.fetch_sub(1, Relaxed);
        self.listener.connections.leave();
        self.listener.stats[self.worker.index].closed.up();
        self.worker.counts().connections_closed.up();
    }
}

async fn sweep(worker: Rc<Worker>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        let now = worker.process.clock.now();
        worker.counts().alive_at.store(now.0, Relaxed);
        worker.idle.sweep(now, worker.index);
        worker.h2.sweep(now);
        worker.trim();
        // A worker that nobody asks anything of must not keep an old snapshot.
        let _ = worker.snapshot();
    }
}

async fn hand_over_lines(worker: Rc<Worker>) {
    loop {
        worker.lines_waiting.notified().await;
        tokio::time::sleep(LINE_DELAY).await;
        worker.hand_over_lines();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of what `f` returns.
    fn size<A, B, C, F>(_f: impl Fn(A, B, C) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_connection_that_waits_is_small() {
        let size = size(attend);
        assert!(size <= 416, "{size} octets for each idle connection");
    }
}
