//! HTTP/1.1 from clients: octets become request heads, and each head an exchange.

use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use l7rp_core::failure::Failure;
use l7rp_core::http1::request::parse_request;
use l7rp_core::names::Nanos;

use super::h2;
use crate::exchange::client::Client;
use crate::exchange::record::{Record, RequestId};
use crate::exchange::{self, Done, Incoming, Next, Workspace, answer};
use crate::http2::PREFACE;
use crate::live::Listener;
use crate::worker::{SMALL, Scratch, Worker};

/// How long a refused client has to read the answer.
const LINGER: Duration = Duration::from_secs(2);
/// How long a draining process waits for one more request on a connection that has carried some:
/// a client that is busy with it then reads that it is the last, and sends none into its closing.
const LAST_CALL: Duration = Duration::from_millis(500);
/// Octets of the buffer for a head that comes in pieces, at first.
const PIECE: usize = 4 << 10;

/// What came of waiting for a head.
enum Head {
    /// It is complete and this long.
    Complete(usize),
    /// It is refused, and began then.
    Refused(Failure, Nanos),
    /// It is the beginning of HTTP/2.
    Http2,
    /// Nothing of one has come.
    Nothing,
    /// There will be none: the client has left.
    None,
}

/// Serves a client's connection to its end. Ten thousand of them wait at a time, so this is small:
/// what a busy one needs is there for as long as it is busy.
#[expect(clippy::manual_async_fn, reason = "an async fn keeps what it was given twice")]
pub fn serve(
    worker: &Rc<Worker>,
    mut listener: Arc<Listener>,
    mut client: Client,
) -> impl Future<Output = ()> {
    async move {
        let mut is_counted = false;
        while client.wait(worker, &listener).await {
            let busy = serve_busy(worker, &mut listener, &mut client, &mut is_counted);
            let (next, ahead) = Box::pin(busy).await;
            if next == Next::Http2 {
                return Box::pin(h2::serve(worker, &listener, client, ahead)).await;
            }
            if next != Next::KeepAlive {
                return Box::pin(end(worker, client, next)).await;
            }
        }
        Box::pin(end_quietly(worker, client)).await;
    }
}

/// Serves a stream of another protocol, which is counted with its connection.
pub async fn serve_stream(worker: &Rc<Worker>, mut listener: Arc<Listener>, mut client: Client) {
    let mut is_counted = true;
    while client.wait(worker, &listener).await {
        let busy = serve_busy(worker, &mut listener, &mut client, &mut is_counted);
        let (next, _) = busy.await;
        if next != Next::KeepAlive {
            return end(worker, client, next).await;
        }
    }
    end_quietly(worker, client).await;
}

/// Serves a burst: what comes after that, and what has been read of another protocol.
async fn serve_busy(
    worker: &Rc<Worker>,
    listener: &mut Arc<Listener>,
    client: &mut Client,
    is_counted: &mut bool,
) -> (Next, Vec<u8>) {
    // Everything that a burst needs is taken here and given back below.
    let mut buf = take_buffer(worker, client);
    let mut scratch = worker.take_scratch();
    let next = serve_burst(worker, listener, client, &mut buf, &mut scratch, is_counted).await;
    worker.give_scratch(scratch);
    if next == Next::Http2 {
        return (next, buf);
    }
    worker.buffers.give_request(buf);
    (next, Vec::new())
}

/// Ends a connection as its last exchange says.
async fn end(worker: &Worker, mut client: Client, next: Next) {
    match next {
        Next::Close => client.close().await,
        Next::Linger => {
            let until = worker.process.clock.now().plus(LINGER);
            client.linger(&worker.buffers, until).await;
        }
        Next::KeepAlive | Next::Abort | Next::Http2 => {}
    }
}

/// Ends a connection on which nothing more has come.
async fn end_quietly(worker: &Worker, mut client: Client) {
    // Whoever is just sending a request into the end of a drain should read that the connection
    // ends, and not that it breaks.
    if worker.process.is_draining() {
        let until = worker.process.clock.now().plus(LAST_CALL / 2);
        client.linger(&worker.buffers, until).await;
    } else {
        client.close().await;
    }
}

/// What arrived during the last exchange, or an empty buffer.
fn take_buffer(worker: &Worker, client: &mut Client) -> Vec<u8> {
    if client.ahead.capacity() > 0 {
        std::mem::take(&mut client.ahead)
    } else if client.is_pipe() {
        // There may be many of them on one connection; each gets the head itself.
        Vec::new()
    } else {
        worker.buffers.request()
    }
}

/// Serves requests until there is nothing left of what has arrived.
async fn serve_burst(
    worker: &Rc<Worker>,
    listener: &mut Arc<Listener>,
    client: &mut Client,
    buf: &mut Vec<u8>,
    scratch: &mut Scratch,
    is_counted: &mut bool,
) -> Next {
    let mut offered = false;
    loop {
        let head = read_head(worker, listener, client, buf, scratch).await;
        if matches!(head, Head::Complete(_) | Head::Refused(..)) && !*is_counted {
            // Not before: it could have been the other protocol.
            listener.stats[worker.index].opened_h1.up();
            *is_counted = true;
        }
        let len = match head {
            Head::Complete(len) => len,
            // What stands behind an offer to upgrade that was not taken up may be of the offered
            // protocol; it is owed no answer.
            Head::Refused(..) if offered => return Next::Abort,
            Head::Refused(failure, began) => {
                let refused = (failure, began);
                return refuse(worker, listener, client, buf, scratch, refused, false).await;
            }
            Head::Http2 => return Next::Http2,
            Head::Nothing => return Next::KeepAlive,
            Head::None => return Next::Abort,
        };
        let (head, rest) = buf.split_at(len);
        let Scratch { request, response, to_upstream, to_client } = scratch;
        let incoming =
            Incoming { buf: head, head: request, rest, arrived: worker.process.clock.now() };
        let space = Workspace { response, to_upstream, to_client };
        let Some(pinned) = worker.pin(&client.door, listener) else { return Next::Close };
        let Done { next, used } =
            exchange::run(worker, &pinned, listener, client, incoming, space).await;
        drop(pinned);
        match next {
            // A stream carries one request. What stands behind it may be of another protocol, which
            // was offered and not taken up.
            Next::KeepAlive if client.is_pipe() => return Next::Close,
            Next::KeepAlive => {}
            // Closing over octets that nobody read would reset the connection, and the client
            // might lose the end of the answer.
            Next::Close if buf.len() > len + used || !client.ahead.is_empty() => {
                return Next::Linger;
            }
            Next::Close | Next::Linger | Next::Abort | Next::Http2 => return next,
        }
        offered = scratch.request.upgrade.len > 0;
        buf.drain(..len + used);
        if client.ahead.capacity() > 0 {
            buf.extend_from_slice(&client.ahead);
            worker.buffers.give_request(std::mem::take(&mut client.ahead));
        }
        skip_empty_lines(buf);
        if buf.is_empty() {
            return if client.ended { Next::Close } else { Next::KeepAlive };
        }
        // Even while draining: the answer before has promised that this one would be read.
    }
}

/// Reads until the head of a request is complete.
async fn read_head(
    worker: &Worker,
    listener: &Listener,
    client: &mut Client,
    buf: &mut Vec<u8>,
    scratch: &mut Scratch,
) -> Head {
    let mut looked_at = 0;
    let mut began = Nanos::NEVER;
    loop {
        if skip_empty_lines(buf) {
            looked_at = 0;
        }
        // The first octets may show that this is no HTTP at all; after that, only the end of
        // a line can change what is known, so that a head in many pieces costs no more than
        // one look a line.
        let mut news = looked_at == 0 || memchr::memchr(b'\n', &buf[looked_at..]).is_some();
        if !client.has_spoken && buf.starts_with(&PREFACE[..4]) && !client.is_pipe() {
            if buf.starts_with(PREFACE) {
                return Head::Http2;
            }
            if buf.len() < PREFACE.len() && PREFACE.starts_with(buf) {
                // Whatever it is, it is not all there.
                news = false;
            }
        }
        if !buf.is_empty() && (news || buf.len() >= listener.limits.max_head) {
            match parse_request(buf, &mut scratch.request, listener.limits) {
                Ok(Some(len)) => {
                    client.has_spoken = true;
                    return Head::Complete(len);
                }
                Ok(None) => {}
                Err(failure) => return Head::Refused(failure, began),
            }
        }
        looked_at = buf.len();
        if began == Nanos::NEVER && !buf.is_empty() {
            began = worker.process.clock.now();
        }
        if buf.len() == buf.capacity() {
            buf.reserve(buf.len());
        }
        if client.ended {
            return Head::None;
        }
        let Client { stream, timer, .. } = client;
        let read = poll_fn(|cx| match stream.poll_fill(cx, buf) {
            Poll::Ready(result) => Poll::Ready(Read::Some(result.unwrap_or(0))),
            Poll::Pending if buf.is_empty() => Poll::Ready(Read::Nothing),
            Poll::Pending => {
                shrink(worker, buf);
                let deadline = began.plus(listener.plan.timeouts.read_header);
                timer.poll(cx, deadline).map(|()| Read::TooLate)
            }
        });
        match read.await {
            Read::Some(0) => return Head::None,
            Read::Some(_) => {}
            // A new connection is said to be readable before the kernel was ever asked.
            Read::Nothing => return Head::Nothing,
            Read::TooLate => return Head::Refused(Failure::HeadTimeout, began),
        }
    }
}

/// What came of waiting for octets.
enum Read {
    /// So many; 0: the end.
    Some(usize),
    Nothing,
    TooLate,
}

/// Keeps a head that comes in pieces in little memory while the next piece is waited for.
fn shrink(worker: &Worker, buf: &mut Vec<u8>) {
    if buf.capacity() >= SMALL && buf.len() <= PIECE / 2 {
        let mut little = Vec::with_capacity(PIECE);
        little.extend_from_slice(buf);
        worker.buffers.give_request(std::mem::replace(buf, little));
    }
}

/// Empty lines before a request are nothing (RFC 9112 §2.2). Whether there were any.
fn skip_empty_lines(buf: &mut Vec<u8>) -> bool {
    let mut empty = 0;
    while buf[empty..].starts_with(b"\r\n") {
        empty += 2;
    }
    buf.drain(..empty);
    empty > 0
}

/// Answers a request whose head cannot be said in HTTP/1.1. `is_call`: it is one of gRPC.
pub async fn refuse_all(
    worker: &Worker,
    listener: &Listener,
    mut client: Client,
    failure: Failure,
    is_call: bool,
) {
    let mut scratch = worker.take_scratch();
    let refused = (failure, Nanos::NEVER);
    refuse(worker, listener, &mut client, b"", &mut scratch, refused, is_call).await;
    worker.give_scratch(scratch);
}

/// Answers a head that is refused, and which began then; [`Nanos::NEVER`]: just now.
async fn refuse(
    worker: &Worker,
    listener: &Listener,
    client: &mut Client,
    buf: &[u8],
    scratch: &mut Scratch,
    (failure, began): (Failure, Nanos),
    is_call: bool,
) -> Next {
    let Scratch { request, response, to_upstream, to_client } = scratch;
    let mut space = Workspace { response, to_upstream, to_client };
    let arrived = began.min(worker.process.clock.now());
    let ip = client.peer_text.clone();
    let mut record =
        Record::new(worker, listener, ip, Some((buf, request)), arrived, RequestId::random());
    record.is_http2 = client.is_http2();
    record.known_call = is_call;
    record.is_noise = matches!(failure, Failure::BadRequest(_));
    answer::refuse(worker, listener, client, &mut record, &mut space, failure, false, false).await;
    Next::Linger
}

impl Client {
    /// Waits for the next request without holding a buffer. False: there will be none.
    async fn wait(&mut self, worker: &Worker, listener: &Listener) -> bool {
        if !self.ahead.is_empty() {
            return true;
        }
        if self.ended {
            return false;
        }
        let timeouts = &listener.plan.timeouts;
        // A client that has just connected is expected to speak.
        let patience = if self.has_spoken { timeouts.idle } else { timeouts.read_header };
        let deadline = self.idle_since.plus(patience);
        let Self { stream, timer, has_spoken, .. } = self;
        let in_time = poll_fn(|cx| {
            if stream.poll_readable(cx).is_ready() {
                return Poll::Ready(true);
            }
            // A new connection may carry a request that was sent before the drain began.
            let last_call = match worker.process.draining_since() {
                Some(at) if *has_spoken => at.plus(LAST_CALL),
                _ => Nanos::NEVER,
            };
            timer.poll(cx, deadline.min(last_call)).map(|()| false)
        });
        if in_time.await {
            return true;
        }
        // A process that was not on a processor may hear of the time before it hears of what
        // came before that. The runtime gets to look once more.
        let came = stream.has_arrived();
        if came {
            tokio::task::yield_now().await;
        }
        came
    }
}
