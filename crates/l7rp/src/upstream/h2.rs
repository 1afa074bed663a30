//! HTTP/2 to upstreams (RFC 9113): a few connections for each worker and upstream, each of which
//! carries many requests. An exchange has a pipe for its own, as if it were a connection.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::io::ErrorKind;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use foldhash::fast::FixedState;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Ping, PingPong, Reason};
use http::uri::Scheme;
use l7rp_core::failure::Failure;
use l7rp_core::http1::Limits;
use l7rp_core::http1::request::{self as h1_request, parse_request};
use l7rp_core::names::Nanos;

use super::connection::Connection;
use super::opening::{Openings, Turn};
use super::pool::Upstream;
use crate::http2::flow::{Broken, Inflow, Outflow};
use crate::http2::heads::{self, Body, request_to_h2, response_to_h1};
use crate::pipe::Pipe;
use crate::stream::Stream;

/// Requests on one connection at once; more open another, so that one loss costs no more.
const MAX_STREAMS: usize = 100;
/// What an upstream may send ahead on one stream, and on all together.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 4 << 20;
/// Octets of a response's field section.
const MAX_FIELDS: u32 = 64 << 10;
/// A connection with requests on it is asked this often whether it lives.
const PING_EVERY: Duration = Duration::from_secs(10);
/// And is given up when it has not answered for so long.
const PONG_WITHIN: Duration = Duration::from_secs(10);
/// So long others wait for what an upstream says of itself.
const SETTLED_WITHIN: Duration = Duration::from_secs(1);
/// Bounds of a request head; the exchange has kept to the listener's.
const MAX_HEAD: Limits = Limits { max_head: 1 << 20, max_fields: 1 << 10, max_target: 1 << 20 };

/// One worker's HTTP/2 connections, by [`Upstream::id`].
#[derive(Debug, Default)]
pub struct Multiplexed {
    open: RefCell<HashMap<usize, Vec<Rc<Shared>>, FixedState>>,
    /// Those that are being opened.
    pub openings: Openings,
}

/// A connection that carries many requests.
#[derive(Debug)]
struct Shared {
    send: SendRequest<Bytes>,
    /// Counts it among the upstream's; its stream is elsewhere.
    counted: Connection,
    requests: Rc<Cell<usize>>,
    /// When it was last seen with a request, and for how long it is kept from then on.
    idle_since: Cell<Nanos>,
    keep_for: Cell<Duration>,
    closed: Rc<Cell<bool>>,
    /// The upstream has said how many requests it takes at once.
    settled: Rc<Cell<bool>>,
    had_requests: Cell<bool>,
    address_generation: u32,
}

impl Shared {
    /// One request more or less; and how many connections have none.
    fn change(&self, change: impl Fn(usize) -> usize) {
        let before = self.requests.get();
        let now = change(before);
        self.requests.set(now);
        let idle = &self.counted.stats().idle_h2;
        match (before, now) {
            (0, 1..) if self.had_requests.replace(true) => {
                idle.store(idle.load(Relaxed).saturating_sub(1), Relaxed);
            }
            (1.., 0) => idle.store(idle.load(Relaxed) + 1, Relaxed),
            _ => {}
        }
    }

    fn is_usable(&self, upstream: &Upstream) -> bool {
        !self.closed.get()
            && self.settled.get()
            && !upstream.is_retired()
            && self.address_generation == upstream.address_generation()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // One that never had a request does not count.
        if self.had_requests.get() {
            let idle = &self.counted.stats().idle_h2;
            idle.store(idle.load(Relaxed).saturating_sub(1), Relaxed);
        }
    }
}

impl Multiplexed {
    /// A request's way on a connection that is there and has room. `keep_for`: how long it may
    /// be idle after it. With it comes when that connection was opened.
    pub fn take(
        &self,
        upstream: &Upstream,
        now: Nanos,
        keep_for: Duration,
    ) -> Option<(Stream, Nanos)> {
        let open = self.open.borrow();
        let all = open.get(&upstream.id)?;
        let usable = all.iter().filter(|one| one.is_usable(upstream));
        let room = |one: &&Rc<Shared>| {
            one.requests.get() < MAX_STREAMS.min(one.send.current_max_send_streams())
        };
        // The fullest that has room, so that those that are not needed become idle.
        let best = usable.filter(room).max_by_key(|one| one.requests.get())?;
        Some((begin(best, now, keep_for), best.counted.opened))
    }

    /// Speaks HTTP/2 on a new connection, and gives a request's way on it. `keep_for`: how long it
    /// may be idle after it. The `turn` ends when others may use it, too.
    ///
    /// # Errors
    /// What the upstream has said instead.
    pub async fn open(
        &self,
        mut connection: Connection,
        now: Nanos,
        keep_for: Duration,
        turn: Option<Turn>,
    ) -> Result<Stream, h2::Error> {
        // Its place is taken by one that leads nowhere: the library has it from now on.
        let stream = std::mem::replace(&mut connection.stream, Stream::Pipe(Pipe::pair().0));
        let (send, mut driver) = h2::client::Builder::new()
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(MAX_FIELDS)
            .enable_push(false)
            .handshake::<_, Bytes>(stream)
            .await?;
        let upstream = connection.upstream().clone();
        let pings = driver.ping_pong();
        let shared = Rc::new(Shared {
            send,
            counted: connection,
            requests: Rc::default(),
            idle_since: Cell::new(now),
            keep_for: Cell::new(keep_for),
            closed: Rc::default(),
            settled: Rc::default(),
            had_requests: Cell::default(),
            address_generation: upstream.address_generation(),
        });
        // It ends when nobody has a request on the connection, or would have another.
        let (requests, closed) = (shared.requests.clone(), shared.closed.clone());
        let settled = shared.settled.clone();
        tokio::task::spawn_local(async move {
            let asking = look_after(pings, &requests, || {
                settled.set(true);
                drop(turn);
            });
            tokio::select! {
                _ = driver => {}
                () = asking => {}
            }
            closed.set(true);
        });
        self.open.borrow_mut().entry(upstream.id).or_default().push(shared.clone());
        Ok(begin(&shared, now, keep_for))
    }

    /// Forgets connections that are closed, of no use, or idle for too long.
    pub fn sweep(&self, now: Nanos) {
        self.open.borrow_mut().retain(|_, all| {
            all.retain(|one| {
                let upstream = one.counted.upstream();
                if one.requests.get() > 0 {
                    one.idle_since.set(now);
                }
                // One that has just been opened is not settled yet.
                let is_new = !one.settled.get() && !one.closed.get();
                (is_new || one.is_usable(upstream))
                    && now.since(one.idle_since.get()) < one.keep_for.get()
            });
            !all.is_empty()
        });
    }
}

/// Sends one request without a body on a connection of its own; the status of the answer.
///
/// # Errors
/// There was none.
pub async fn ask(stream: Stream, text: &str, is_tls: bool) -> Result<u16, Failure> {
    let mut head = h1_request::Request::default();
    parse_request(text.as_bytes(), &mut head, MAX_HEAD)?;
    let scheme = if is_tls { Scheme::HTTPS } else { Scheme::HTTP };
    let request = request_to_h2(&Bytes::copy_from_slice(text.as_bytes()), &head, scheme)?;
    let closed = |_| Failure::UpstreamClosed;
    let builder = h2::client::Builder::new().enable_push(false).clone();
    let (send, driver) = builder.handshake::<_, Bytes>(stream).await.map_err(closed)?;
    let answer = async {
        let mut send = send.ready().await.map_err(closed)?;
        let (response, _) = send.send_request(request, true).map_err(closed)?;
        Ok(response.await.map_err(closed)?.status().as_u16())
    };
    tokio::select! {
        answer = answer => answer,
        _ = driver => Err(Failure::UpstreamClosed),
    }
}

/// Asks the upstream at once, and then again and again while there are requests, whether it is
/// there. Ready when it has not answered. `settled` is called when it has answered for the first
/// time, and so has said before what it takes (RFC 9113 §3.4): a request beyond that would have to
/// wait for another to end. Others do not wait for that for long.
async fn look_after(pings: Option<PingPong>, requests: &Cell<usize>, settled: impl FnOnce()) {
    let Some(mut pings) = pings else {
        settled();
        return std::future::pending().await;
    };
    {
        let mut pong = pin!(pings.ping(Ping::opaque()));
        let early = tokio::time::timeout(SETTLED_WITHIN, &mut pong).await;
        settled();
        // One is asked for at a time.
        if early.is_err() && !matches!(tokio::time::timeout(PONG_WITHIN, pong).await, Ok(Ok(_))) {
            return;
        }
    }
    loop {
        tokio::time::sleep(PING_EVERY).await;
        if requests.get() == 0 {
            continue;
        }
        let pong = tokio::time::timeout(PONG_WITHIN, pings.ping(Ping::opaque())).await;
        if !matches!(pong, Ok(Ok(_))) {
            return;
        }
    }
}

/// A request on a connection: the near end of a pipe, whose far end is looked after by a task.
fn begin(shared: &Rc<Shared>, now: Nanos, keep_for: Duration) -> Stream {
    let is_tls = shared.counted.upstream().is_tls;
    let scheme = if is_tls { Scheme::HTTPS } else { Scheme::HTTP };
    let (near, far) = Pipe::pair();
    shared.change(|requests| requests + 1);
    shared.idle_since.set(now);
    shared.keep_for.set(keep_for);
    let place = Place(shared.clone());
    tokio::task::spawn_local(async move {
        let far = Far { pipe: far, send: place.0.send.clone(), scheme };
        if far.run().await {
            // Whoever comes next should not be sent away as well.
            place.0.closed.set(true);
        }
        drop(place);
    });
    Stream::Pipe(near)
}

/// A request among those on a connection.
struct Place(Rc<Shared>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.change(|requests| requests.saturating_sub(1));
    }
}

/// The far end of a request's pipe.
struct Far {
    pipe: Pipe,
    send: SendRequest<Bytes>,
    scheme: Scheme,
}

/// What a failed stream means to the exchange: [`ErrorKind::ConnectionRefused`] if the upstream
/// has done nothing with the request, [`ErrorKind::ConnectionAborted`] if the same goes for all that
/// come after it on this connection.
fn kind(e: &h2::Error) -> ErrorKind {
    if e.reason() == Some(Reason::REFUSED_STREAM) {
        return ErrorKind::ConnectionRefused;
    }
    // The library says this of streams beyond the last one that the upstream has begun, whatever
    // the reason for its going away; of the others it says that the connection has broken.
    let is_gone = e.is_go_away() && e.is_remote();
    if is_gone { ErrorKind::ConnectionAborted } else { ErrorKind::ConnectionReset }
}

impl Far {
    /// Moves a request and its response, until both are through or one side has gone. True: the
    /// connection takes no more requests.
    async fn run(mut self) -> bool {
        let mut buf = Vec::new();
        let mut head = h1_request::Request::default();
        let Some(len) = poll_fn(|cx| self.poll_head(cx, &mut buf, &mut head)).await else {
            return false;
        };
        let mut all = Bytes::from(buf);
        let Ok(request) = request_to_h2(&all, &head, self.scheme.clone()) else {
            self.pipe.break_off(ErrorKind::InvalidData);
            return false;
        };
        let ends = !heads::has_body(head.framing);
        let to_head = head.method == h1_request::Method::Head;
        let sent = match poll_fn(|cx| self.send.poll_ready(cx)).await {
            Ok(()) => self.send.send_request(request, ends),
            Err(e) => Err(e),
        };
        // The connection has ended; nothing was sent.
        let Ok((response, stream)) = sent else {
            self.pipe.break_off(ErrorKind::ConnectionAborted);
            return true;
        };
        let outflow = (!ends).then(|| Outflow::new(stream, head.framing, all.split_off(len)));
        let mut way = Way {
            pipe: self.pipe,
            outflow,
            response: Some(response),
            to_head,
            answer: Vec::new(),
            inflow: None,
        };
        let Err(kind) = poll_fn(|cx| way.poll(cx)).await else { return false };
        way.pipe.break_off(kind);
        kind == ErrorKind::ConnectionAborted
    }

    /// Reads the head of the request; its length in `buf`. `None`: there will be none.
    fn poll_head(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut Vec<u8>,
        head: &mut h1_request::Request,
    ) -> Poll<Option<usize>> {
        loop {
            match parse_request(buf, head, MAX_HEAD) {
                Ok(Some(len)) => return Poll::Ready(Some(len)),
                Ok(None) => match ready!(self.pipe.poll_fill(cx, buf)) {
                    Ok(n) if n > 0 => {}
                    _ => return Poll::Ready(None),
                },
                Err(_) => {
                    self.pipe.break_off(ErrorKind::InvalidData);
                    return Poll::Ready(None);
                }
            }
        }
    }
}

/// A request that is on its way, and its response.
struct Way {
    pipe: Pipe,
    /// The request's body, until it is out.
    outflow: Option<Outflow>,
    /// Until the response's head has come.
    response: Option<ResponseFuture>,
    to_head: bool,
    /// What is left to be written of the response's head.
    answer: Vec<u8>,
    inflow: Option<Inflow>,
}

impl Way {
    /// Moves everything in both directions. Ready when the response is through, or with what
    /// the exchange is to read.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ErrorKind>> {
        // Looked at each time, also while the request waits for the upstream: nobody else would wake
        // this task when it is given up.
        if self.pipe.poll_unread(cx).is_ready() {
            return Poll::Ready(Ok(()));
        }
        if let Some(outflow) = &mut self.outflow {
            match outflow.poll(cx, &mut self.pipe) {
                // The exchange has given up; dropping the stream says so.
                Poll::Ready(Err(Broken::Exchange)) => return Poll::Ready(Ok(())),
                // Where it was cut off, the response may say why.
                Poll::Ready(Ok(()) | Err(Broken::Stream(_))) => self.outflow = None,
                Poll::Pending => {}
            }
        }
        if let Some(response) = &mut self.response {
            while let Poll::Ready(Some(interim)) = response.poll_informational(cx) {
                // An error is said each time; the answer below says it once.
                let Ok(interim) = interim else { break };
                let (parts, ()) = interim.into_parts();
                self.answer.extend(response_to_h1(&parts, Body::None, true));
            }
            match std::pin::Pin::new(response).poll(cx) {
                Poll::Ready(Ok(response)) => self.take_head(response),
                Poll::Ready(Err(e)) => return Poll::Ready(Err(kind(&e))),
                Poll::Pending => {}
            }
        }
        while !self.answer.is_empty() {
            match ready!(self.pipe.poll_write(cx, &self.answer, b"")) {
                Ok(n) => drop(self.answer.drain(..n)),
                Err(_) => return Poll::Ready(Ok(())),
            }
        }
        let Some(inflow) = &mut self.inflow else { return Poll::Pending };
        match ready!(inflow.poll(cx, &mut self.pipe)) {
            Ok(()) | Err(Broken::Exchange) => Poll::Ready(Ok(())),
            Err(Broken::Stream(e)) => Poll::Ready(Err(kind(&e))),
        }
    }

    fn take_head(&mut self, response: http::Response<h2::RecvStream>) {
        self.response = None;
        let (parts, body) = response.into_parts();
        let framing = Body::of(&parts.headers, body.is_end_stream() || self.to_head);
        self.answer.extend(response_to_h1(&parts, framing, self.to_head));
        self.inflow = Some(Inflow::new(body, framing));
    }
}
