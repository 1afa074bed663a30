//! HTTP/2 from clients (RFC 9113): each stream becomes a connection of its own to an exchange, which
//! speaks HTTP/1.1 over a pipe.

use std::cell::Cell;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::{Method, Request, Response, request};
use l7rp_core::failure::Failure;
use l7rp_core::http1::response::{self as h1_response, parse_response};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::h1;
use crate::clock::Clock;
use crate::exchange::client::{Client, Link};
use crate::http2::flow::{Broken, Inflow, Outflow};
use crate::http2::heads::{self, Body, request_to_h1, response_to_h2};
use crate::http2::meter::{Flood, Meter};
use crate::live::Listener;
use crate::pipe::Pipe;
use crate::stream::Stream;
use crate::timer::Timer;
use crate::worker::Worker;

/// Streams of one connection at once.
const MAX_STREAMS: u32 = 250;
/// What a peer may send ahead on one stream, and on all together.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Octets that wait to be sent on one stream.
const SEND_BUFFER: usize = 128 << 10;
/// Streams that a client has reset before anybody has looked at them. Who has as many as may be
/// open may give all of them up at once; more are an attack.
const MAX_RESETS: usize = MAX_STREAMS as usize;
/// How long a connection may take to close once nothing is left on it.
const LINGER: Duration = Duration::from_secs(1);
/// Bounds of a response head; the exchange has kept to those of the upstream's.
const MAX_HEAD: l7rp_core::http1::Limits =
    l7rp_core::http1::Limits { max_head: 128 << 10, max_fields: 512, max_target: 0 };

/// Serves a connection to its end. `ahead`: what has been read of it already, the preface first.
pub async fn serve(worker: &Rc<Worker>, listener: &Arc<Listener>, client: Client, ahead: Vec<u8>) {
    let clock = worker.process.clock;
    let timeouts = listener.plan.timeouts.clone();
    let Client { stream, mut timer, peer, peer_text, door, link, .. } = client;
    let link = link.as_deref().cloned().unwrap_or_default();
    let link = Some(Rc::new(Link { is_http2: true, ..link }));
    listener.stats[worker.index].opened_h2.up();
    let flood = Rc::new(Cell::new(None));
    let meter = Meter::new(crate::http2::PREFACE.len(), listener.limits.max_head, clock.now());
    let wire = Wire { stream, ahead, meter, flood: flood.clone(), clock };
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
            if !closing && (worker.process.is_draining() || origin.door.is_closed()) {
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
                connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                let closed = poll_fn(|cx| connection.poll_closed(cx));
                let _ = tokio::time::timeout(LINGER, closed).await;
                return;
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

/// A request, and the way back.
type Accepted = (Request<RecvStream>, SendResponse<Bytes>);

/// Begins to serve a stream.
fn begin(worker: &Rc<Worker>, origin: &Rc<Origin>, open: &Rc<Cell<usize>>, stream: Box<Accepted>) {
    let (worker, origin) = (worker.clone(), origin.clone());
    let open = Open::one(open, &worker);
    tokio::task::spawn_local(async move {
        let _open = open.entered().await;
        let (request, respond) = *stream;
        serve_stream(&worker, &origin, request, respond).await;
    });
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
    id: Option<u64>,
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

/// Serves one stream: an exchange at the one end of a pipe, and HTTP/2 at the other.
async fn serve_stream(
    worker: &Rc<Worker>,
    origin: &Origin,
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
) {
    let (head, mut body) = request.into_parts();
    let patience = origin.listener.plan.timeouts.read;
    let first = tokio::time::timeout(patience, first_part(&head, &mut body)).await;
    // A client that has reset the stream meanwhile, or says nothing, has no answer to wait for.
    let Ok(Ok(first)) = first else { return };
    let ends = first.is_none() && body.is_end_stream();
    // What follows an extended CONNECT is of another protocol: nothing of it is framed here.
    let is_tunnel = head.method == Method::CONNECT;
    let framing = if is_tunnel { Body::Length } else { Body::of(&head.headers, ends) };
    let (near, far) = Pipe::pair();
    let clock = worker.process.clock;
    let client = Client {
        stream: Stream::Pipe(near),
        door: origin.door.clone(),
        link: origin.link.clone(),
        timer: Timer::new(clock),
        peer: origin.peer,
        peer_text: origin.peer_text.clone(),
        ahead: Vec::new(),
        ended: false,
        idle_since: clock.now(),
        has_spoken: false,
    };
    let to_head = head.method == Method::HEAD;
    let text = request_to_h1(&head, framing);
    let refusal = text.as_ref().err().copied();
    let listener = origin.listener.clone();
    let exchange = async move {
        match refusal {
            None => h1::serve(worker, listener, client).await,
            Some(failure) => h1::refuse_all(worker, &listener, client, failure).await,
        }
    };
    let mut inflow = Inflow::new(body, framing);
    if let Some(first) = first {
        inflow.begin_with(first);
    }
    let far =
        Far { pipe: far, head: text.unwrap_or_default(), inflow: Some(inflow), respond, to_head };
    tokio::join!(exchange, far.run());
}

/// Whether a request that may well have no body has one: what a head without the end of the
/// stream does not tell, for many clients say it with an empty DATA frame behind.
async fn first_part(
    head: &request::Parts,
    body: &mut RecvStream,
) -> Result<Option<Bytes>, h2::Error> {
    let rarely =
        matches!(head.method, Method::GET | Method::HEAD | Method::DELETE | Method::OPTIONS);
    let is_framed = head.headers.contains_key(http::header::CONTENT_LENGTH);
    if !rarely || is_framed || body.is_end_stream() {
        return Ok(None);
    }
    loop {
        match poll_fn(|cx| body.poll_data(cx)).await.transpose()? {
            Some(part) if part.is_empty() && !body.is_end_stream() => {}
            Some(part) if part.is_empty() => return Ok(None),
            part => return Ok(part),
        }
    }
}

/// The far end of a stream's pipe.
struct Far {
    pipe: Pipe,
    /// What is left of the request's head.
    head: Vec<u8>,
    /// The request's body, until all of it has come.
    inflow: Option<Inflow>,
    respond: SendResponse<Bytes>,
    to_head: bool,
}

impl Far {
    /// Moves everything in both directions, until the answer is out or one side has gone.
    async fn run(mut self) {
        let mut buf = Vec::new();
        let mut head = h1_response::Response::default();
        let began = poll_fn(|cx| {
            if self.respond.poll_reset(cx).is_ready() || self.poll_request(cx).is_ready() {
                return Poll::Ready(None);
            }
            self.poll_head(cx, &mut buf, &mut head).map(Some)
        });
        let Some(result) = began.await else { return };
        let Ok((response, len)) = result else {
            // It has ended without an answer: nothing was committed, and nothing may look so.
            self.respond.send_reset(Reason::INTERNAL_ERROR);
            return;
        };
        let is_tunnel = head.status == 101;
        let ends = !is_tunnel && !heads::has_body(head.framing);
        let Ok(stream) = self.respond.send_response(response, ends) else { return };
        if ends {
            return;
        }
        let framing = if is_tunnel { l7rp_core::http1::Framing::UntilClose } else { head.framing };
        let mut outflow = Outflow::new(stream, framing, buf.split_off(len));
        let end = poll_fn(|cx| {
            let is_reset = outflow.stream().poll_reset(cx).is_ready();
            if is_reset || self.poll_request(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            outflow.poll(cx, &mut self.pipe)
        });
        if let Err(Broken::Exchange) = end.await {
            outflow.reset(Reason::INTERNAL_ERROR);
        }
    }

    /// Moves the request on. Ready: the client has given the stream up.
    fn poll_request(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while !self.head.is_empty() {
            if let Ok(n) = ready!(self.pipe.poll_write(cx, &self.head, b"")) {
                self.head.drain(..n);
            } else {
                // The exchange reads no further; what it says about that is on its way.
                self.head.clear();
                self.inflow = None;
            }
        }
        let Some(inflow) = &mut self.inflow else { return Poll::Pending };
        match ready!(inflow.poll(cx, &mut self.pipe)) {
            Ok(()) => self.inflow = None,
            Err(Broken::Exchange) => {}
            Err(Broken::Stream(_)) => return Poll::Ready(()),
        }
        Poll::Pending
    }

    /// Reads the head of the answer, and passes on what is interim. The answer's head as HTTP/2,
    /// and its length in `buf`.
    fn poll_head(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut Vec<u8>,
        head: &mut h1_response::Response,
    ) -> Poll<Result<(Response<()>, usize), Failure>> {
        loop {
            match parse_response(buf, head, self.to_head, MAX_HEAD) {
                Ok(Some(len)) if head.status < 200 && head.status != 101 => {
                    if let Ok(interim) = response_to_h2(buf, head) {
                        let _ = self.respond.send_informational(interim);
                    }
                    buf.drain(..len);
                }
                Ok(Some(len)) => {
                    return Poll::Ready(response_to_h2(buf, head).map(|head| (head, len)));
                }
                Ok(None) => match ready!(self.pipe.poll_fill(cx, buf)) {
                    Ok(n) if n > 0 => {}
                    _ => return Poll::Ready(Err(Failure::UpstreamClosed)),
                },
                Err(failure) => return Poll::Ready(Err(failure)),
            }
        }
    }
}

/// A client's stream, as the library reads and writes it; what it reads is counted.
struct Wire {
    stream: Stream,
    /// What was read before the library was asked.
    ahead: Vec<u8>,
    meter: Meter,
    flood: Rc<Cell<Option<Flood>>>,
    clock: Clock,
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.flood.get().is_some() {
            // Nothing more is taken in; what is to be said about it can still go out.
            return Poll::Pending;
        }
        let before = buf.filled().len();
        if this.ahead.is_empty() {
            ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        } else {
            let n = this.ahead.len().min(buf.remaining());
            buf.put_slice(&this.ahead[..n]);
            this.ahead.drain(..n);
        }
        let now = this.clock.now();
        if let Some(flood) = this.meter.read(&buf.filled()[before..], now) {
            this.flood.set(Some(flood));
            cx.waker().wake_by_ref();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let n = ready!(Pin::new(&mut this.stream).poll_write_vectored(cx, bufs))?;
        this.meter.sent(n);
        Poll::Ready(Ok(n))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_shutdown(Pin::new(&mut self.get_mut().stream), cx)
    }
}
