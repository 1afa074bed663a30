//! HTTP/2 from clients (RFC 9113): each stream becomes a connection of its own to an exchange, which
//! speaks HTTP/1.1 over a pipe.

mod crew;
mod stream;
mod wire;

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::server::{Connection, SendResponse};
use h2::{Reason, RecvStream};
use http::Request;

use crate::exchange::client::{Client, Link};
use crate::http2::meter::Flood;
use crate::live::Listener;
use crate::worker::Worker;
pub use crew::Crew;
use wire::Wire;

/// Streams of one connection at once.
const MAX_STREAMS: u32 = 100;
/// What a peer may send ahead on one stream, and on all together.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Octets that wait to be sent on one stream: a frame.
const SEND_BUFFER: usize = 16 << 10;
/// Streams that a client has reset before anybody has looked at them. Who has as many as may be
/// open may give all of them up at once; more are an attack.
const MAX_RESETS: usize = MAX_STREAMS as usize;
/// How long a connection may take to close once nothing is left on it.
const LINGER: Duration = Duration::from_secs(1);

/// Serves a connection to its end. `ahead`: what has been read of it already, the preface first.
pub async fn serve(worker: &Rc<Worker>, listener: &Arc<Listener>, client: Client, ahead: Vec<u8>) {
    let clock = worker.process.clock;
    let timeouts = listener.plan.timeouts.clone();
    let Client { stream, mut timer, peer, peer_text, door, link, .. } = client;
    let link = link.as_deref().cloned().unwrap_or_default();
    let link = Some(Rc::new(Link { is_http2: true, ..link }));
    listener.stats[worker.index].opened_h2.up();
    let flood = Rc::new(Cell::new(None));
    let wire = Wire::new(stream, ahead, listener, clock, &flood);
    let handshake = builder(listener).handshake::<_, Bytes>(wire);
    let Ok(Ok(mut connection)) = tokio::time::timeout(timeouts.read_header, handshake).await else {
        return;
    };
    let origin = Rc::new(Origin { peer, peer_text, door, link, listener: listener.clone() });
    let open = Rc::new(Cell::new(0));
    let mut until = clock.now().plus(timeouts.idle);
    let mut closing = false;
    loop {
        let event = poll_fn(|cx| {
            if let Poll::Ready(stream) = connection.poll_accept(cx) {
                let stream = stream.map(|stream| Event::Stream(stream.map(Box::new)));
                return Poll::Ready(stream.unwrap_or(Event::Closed));
            }
            if let Some(flood) = flood.get() {
                return Poll::Ready(Event::Flood(flood));
            }
            let is_leaving = worker.process.is_draining() || origin.door.is_closed();
            if !closing && is_leaving {
                return Poll::Ready(Event::Close);
            }
            timer.poll(cx, until).map(|()| Event::Time)
        });
        match event.await {
            Event::Stream(Ok(stream)) => {
                until = clock.now().plus(timeouts.idle);
                begin(worker, &origin, &open, stream);
            }
            Event::Stream(Err(e)) => return count_end(worker, listener, flood.get(), &e),
            Event::Closed => return,
            Event::Flood(flood) => {
                listener.stats[worker.index].h2_floods[flood as usize].up();
                return calm(&mut connection).await;
            }
            Event::Time if open.get() > 0 => until = clock.now().plus(timeouts.idle),
            Event::Time if closing => return,
            // Two GOAWAYs, so that no stream that is under way is lost (RFC 9113 §6.8).
            Event::Close | Event::Time => {
                connection.graceful_shutdown();
                closing = true;
                until = clock.now().plus(LINGER);
            }
        }
        if closing {
            until = until.min(clock.now().plus(LINGER));
        }
    }
}

/// Ends a connection at once, and says that it has asked for too much.
async fn calm(connection: &mut Connection<Wire, Bytes>) {
    connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
    let closed = poll_fn(|cx| connection.poll_closed(cx));
    let _ = tokio::time::timeout(LINGER, closed).await;
}

/// A request, and the way back.
type Accepted = (Request<RecvStream>, SendResponse<Bytes>);

/// Begins to serve a stream.
fn begin(worker: &Rc<Worker>, origin: &Rc<Origin>, open: &Rc<Cell<usize>>, stream: Box<Accepted>) {
    Crew::take_on(worker, Job { origin: origin.clone(), open: Open::one(open, worker), stream });
}

/// A stream to be served.
struct Job {
    origin: Rc<Origin>,
    open: Open,
    stream: Box<Accepted>,
}

impl Job {
    async fn serve(self, worker: &Rc<Worker>) {
        let _open = self.open.entered().await;
        let (request, respond) = *self.stream;
        stream::serve(worker, &self.origin, request, respond).await;
    }
}

/// What happens on a connection.
enum Event {
    Stream(Result<Box<Accepted>, h2::Error>),
    Closed,
    Flood(Flood),
    Close,
    Time,
}

fn builder(listener: &Listener) -> h2::server::Builder {
    let mut builder = h2::server::Builder::new();
    builder
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(listener.limits.max_head as u32)
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buffer_size(SEND_BUFFER)
        .max_pending_accept_reset_streams(MAX_RESETS)
        .max_concurrent_reset_streams(MAX_RESETS)
        .enable_connect_protocol();
    builder
}

/// Counts a connection that the peer's own doing has ended.
fn count_end(worker: &Worker, listener: &Listener, flood: Option<Flood>, e: &h2::Error) {
    if let Some(flood) = flood {
        // The library has noticed it at the same moment.
        listener.stats[worker.index].h2_floods[flood as usize].up();
    } else if e.is_library() && e.reason() == Some(Reason::ENHANCE_YOUR_CALM) {
        listener.stats[worker.index].h2_resets.up();
    }
}

/// Where the streams of a connection come from.
struct Origin {
    peer: Option<std::net::IpAddr>,
    peer_text: Rc<str>,
    door: Arc<crate::live::Door>,
    link: Option<Rc<Link>>,
    listener: Arc<Listener>,
}

/// A stream among those that are open, and among what is woken when the process ends.
struct Open {
    count: Rc<Cell<usize>>,
    worker: Rc<Worker>,
    id: Option<usize>,
}

impl Open {
    fn one(count: &Rc<Cell<usize>>, worker: &Rc<Worker>) -> Self {
        count.set(count.get() + 1);
        Self { count: count.clone(), worker: worker.clone(), id: None }
    }

    async fn entered(mut self) -> Self {
        let waker = poll_fn(|cx| Poll::Ready(cx.waker().clone())).await;
        self.id = Some(self.worker.connections.enter(waker));
        self
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.count.set(self.count.get() - 1);
        if let Some(id) = self.id {
            self.worker.connections.leave(id);
        }
    }
}
