//! The response's way to the client: its head commits the exchange, then the body flows as
//! the client takes it, while the rest of the request may still be going up.

use std::future::poll_fn;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use l7rp_core::attempts::Stop;
use l7rp_core::failure::Failure;
use l7rp_core::http1::Framing;
use l7rp_core::http1::body::Body;
use l7rp_core::http1::encode::{self, ToClient};
use l7rp_core::http1::response::Response;
use l7rp_core::names::{Nanos, Status};

use super::attempt::{Lap, PATIENCE, look_again, report};
use super::client::{Client, poll_write_from, unwritable};
use super::dispatch::Answered;
use super::record::Record;
use super::upload::{MAX_TURNS, Upload, Waits};
use super::{Done, Exchange, Next, Workspace, decision, grpc};
use crate::live::Route;
use crate::observe::tries;
use crate::stream::Stream;
use crate::upstream::connection::Connection;
use crate::upstream::pool::{End, Place, Pool};
use crate::worker::{Buffers, SMALL, Worker};

/// Octets of a response's trailer section.
const MAX_TRAILER: usize = 64 << 10;

/// A response on its way.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "four facts that do not depend on each other")]
struct Download {
    body: Body,
    /// Take the chunks off: the client does not know them.
    decode: bool,
    /// The client has many responses at once: none of them may hold much.
    is_shared: bool,
    /// What was read, and which range of it has to be written.
    buf: Vec<u8>,
    at: usize,
    len: usize,
    /// Content of a decoded body, written instead of `buf`.
    decoded: Vec<u8>,
    /// Octets of the head's buffer that are out.
    head_sent: usize,
    /// Octets of the head, wherever they lie.
    head_len: usize,
    /// Octets that are out, of the head and of the content; framing included where it is passed on.
    sent: u64,
    /// How a call of gRPC went, by the trailers.
    grpc: Option<u8>,
    /// The upstream has sent more than the message.
    surplus: bool,
    /// Whole reads in a row; after a few the body is taken to be long.
    full_reads: u32,
    /// The client is waited for, not the upstream.
    client_is_slow: bool,
    /// It once was for so long that the upstream may have tired.
    was_held_up: bool,
    progress: Nanos,
}

/// Relays the response. The exchange is committed with the first octet.
#[expect(
    clippy::too_many_arguments,
    reason = "one caller; a struct for it would hide what is used"
)]
pub async fn run<'a>(
    x: &Exchange<'a>,
    client: &mut Client,
    record: &mut Record<'a>,
    space: &mut Workspace<'_>,
    route: &Route,
    pool: &Pool,
    answered: Answered<'a>,
    deadline: Nanos,
) -> Result<Done, Failure> {
    let Answered { mut place, lap, mut upload } = answered;
    let Lap { mut connection, mut buf, head_at, body_at, status, came, .. } = lap;
    let response = &*space.response;
    let decode = response.framing == Framing::Chunked && x.incoming.head.is_http10;
    let by_close = decode || response.framing == Framing::UntilClose;
    // A client that is answered before it has sent all may go on sending; nobody will read it.
    let keep_alive = x.may_keep_alive(client) && !by_close && upload.is_received();
    space.to_client.clear();
    encode::response(
        space.to_client,
        &buf[head_at..],
        response,
        &ToClient {
            is_http10: x.incoming.head.is_http10,
            keep_alive,
            request_id: record.id.as_bytes(),
            decision: &decision::of(record, client, None),
        },
        &route.response_changes,
    );
    let events = is_events(response, &buf[head_at..]);
    let stall = stall_limit(events, x.is_call, route, pool);
    let mut download =
        Download::new(response.framing, decode, std::mem::take(&mut buf), body_at, came);
    download.is_shared = client.is_pipe();
    let mut result = download.first(space.to_client);
    if result.is_ok() {
        // Not before: a body that is broken from its beginning can still be answered with 502.
        record.status = response.status;
        let (stream, upload, place) = (&mut connection.stream, &mut upload, &mut place);
        let mut relay = Relay { x, stream, upload, place, events, stall, deadline };
        result = relay.pump(client, record, space, &mut download).await;
    }
    record.bytes_in = upload.content();
    let received = upload.is_received();
    let status = Status { grpc: status.grpc.or(download.grpc.filter(|_| x.is_call)), ..status };
    record.grpc_status = status.grpc;
    let end = download.end(result, status);
    let now = x.worker.process.clock.now();
    let took = place.settle(end, now);
    record.ends(&place, tried(result, status), took);
    let _ = result.inspect_err(|failure| report(x, pool, place.upstream(), *failure, ""));
    drop(place);
    let reusable = result.is_ok() && upload.is_sent() && response.keep_alive && !download.surplus;
    if reusable {
        keep(x, pool, response, connection, now);
    }
    download.give_back(&x.worker.buffers);
    let used = upload.first_len();
    upload.finish(x.worker, client);
    if let Err(failure) = result {
        record.stop = Some(Stop::Final);
        if by_close && record.status != 0 {
            client.stream.reset_on_close();
        }
        return Err(failure);
    }
    record.ended = Some(now);
    Ok(Done { next: after(keep_alive, received), used })
}

fn after(keep_alive: bool, received: bool) -> Next {
    match (keep_alive, received) {
        (true, true) => Next::KeepAlive,
        (false, true) => Next::Close,
        // The client is still sending what nobody wants any more.
        (_, false) => Next::Linger,
    }
}

/// How a try ended whose response went to the client.
fn tried(result: Result<(), Failure>, status: Status) -> tries::End {
    result.map_or_else(tries::End::Failed, |()| tries::End::Answered(status.http))
}

/// How long an upstream may be silent in the middle of a body.
fn stall_limit(events: bool, is_call: bool, route: &Route, pool: &Pool) -> Option<Duration> {
    match (events, is_call) {
        // It may be so for ever.
        (true, _) => None,
        // It speaks when it has something to say, as what is in a tunnel does.
        (false, true) => Some(route.plan.tunnel_idle_timeout),
        (false, false) => Some(pool.plan.response_header_timeout),
    }
}

/// Whether a response is a stream of events.
fn is_events(response: &Response, buf: &[u8]) -> bool {
    const EVENTS: &[u8] = b"text/event-stream";
    response.fields.iter().any(|f| {
        f.name.of(buf).eq_ignore_ascii_case(b"content-type")
            && f.value.of(buf).get(..EVENTS.len()).is_some_and(|t| t.eq_ignore_ascii_case(EVENTS))
    })
}

/// Keeps a connection for the next request, for as long as both sides want.
pub(super) fn keep(
    x: &Exchange<'_>,
    pool: &Pool,
    response: &Response,
    connection: Connection,
    now: Nanos,
) {
    let worker = x.worker;
    let ours = pool.plan.keepalive.idle_timeout;
    // Leave a second before the upstream closes, or half of the time where that is less.
    let theirs = response.keep_alive_timeout.map_or(ours, |s| {
        let s = Duration::from_secs(u64::from(s));
        s.saturating_sub(Duration::from_secs(1)).max(s / 2)
    });
    let max = pool.plan.keepalive.max_idle.div_ceil(worker.process.workers.max(1));
    worker.idle.put(connection, now, ours.min(theirs), max, worker.index);
}

struct Relay<'t, 'a> {
    x: &'t Exchange<'a>,
    stream: &'t mut Stream,
    upload: &'t mut Upload,
    place: &'t mut Place<'a>,
    /// It is a stream of events.
    events: bool,
    /// How long the upstream may be silent.
    stall: Option<Duration>,
    deadline: Nanos,
}

impl Relay<'_, '_> {
    /// Moves both directions until the response is out.
    async fn pump(
        &mut self,
        client: &mut Client,
        record: &mut Record<'_>,
        space: &Workspace<'_>,
        download: &mut Download,
    ) -> Result<(), Failure> {
        let Self { x, stream, upload, place, events, stall, deadline } = self;
        let worker = x.worker;
        let mut good_at = place.good_at();
        poll_fn(|cx| {
            let up = upload.poll(cx, worker, client, stream, space.to_upstream, x.incoming.rest);
            if let Poll::Ready(Err(failure)) = up {
                return Poll::Ready(Err(failure));
            }
            #[cfg(test)]
            super::panics::point(x, if download.body_sent() > 0 { "in the body" } else { "" });
            let down = download.poll(cx, worker, stream, client, space.to_client);
            // Kept current, for the exchange may be cut from outside.
            record.bytes_out = download.body_sent();
            if let Poll::Ready(result) = down {
                return Poll::Ready(result);
            }
            // A stream of events may pause for ever; a client that is gone is noticed anyway.
            if up.is_ready() {
                if let Poll::Ready(failure) = client.poll_watch(cx, &worker.buffers) {
                    return Poll::Ready(Err(failure));
                }
                // Who listens to events does not end its side but by leaving; a stream is always
                // ended with its request, and says it when it is given up.
                if *events && client.ended && !client.is_pipe() {
                    return Poll::Ready(Err(Failure::ClientGone));
                }
            } else if upload.waits() == Waits::Upstream && client.poll_lost(cx) {
                return Poll::Ready(Err(Failure::ClientGone));
            }
            let (at, failure) = next_deadline(x, upload, download, *stall, *deadline);
            if upload.waits() == Waits::Upstream
                && good_at == Nanos::NEVER
                && look_again(x, client, cx, at)
            {
                return Poll::Pending;
            }
            if good_at < at && client.timer.poll(cx, good_at).is_ready() {
                place.settle(End::Answered(record.status.into()), worker.process.clock.now());
                good_at = Nanos::NEVER;
            }
            client.timer.poll(cx, at).map(|()| Err(failure))
        })
        .await
    }
}

/// The next deadline of a response on its way, and what it means to miss it.
fn next_deadline(
    x: &Exchange<'_>,
    upload: &Upload,
    download: &Download,
    stall: Option<Duration>,
    total: Nanos,
) -> (Nanos, Failure) {
    let timeouts = &x.listener.plan.timeouts;
    let progress = download.progress.max(upload.progress);
    if download.client_is_slow {
        let own = (download.progress.plus(timeouts.write), Failure::ClientStalled);
        return x.with_client(total, own);
    }
    let at = stall.map_or(Nanos::NEVER, |stall| progress.plus(stall));
    if upload.waits() == Waits::Client {
        let by_call = (at, Failure::BodyTimeout);
        let by_client = || upload.client_deadline(timeouts.read);
        return x.with_client(total, if x.is_call { by_call } else { by_client() });
    }
    if total <= at { (total, x.out_of_time(total)) } else { (at, Failure::ResponseStalled) }
}

impl Download {
    fn new(framing: Framing, decode: bool, buf: Vec<u8>, body_at: usize, now: Nanos) -> Self {
        Self {
            body: Body::new(framing, MAX_TRAILER),
            decode,
            is_shared: false,
            buf,
            at: body_at,
            len: body_at,
            decoded: Vec::new(),
            head_sent: 0,
            head_len: 0,
            sent: 0,
            grpc: None,
            surplus: false,
            full_reads: 0,
            client_is_slow: false,
            was_held_up: false,
            progress: now,
        }
    }

    /// Looks at what came with the head. A short part of the body is put behind the head, and the
    /// head before a longer one where there is room, for one plain write costs less than one of
    /// two pieces.
    fn first(&mut self, head: &mut Vec<u8>) -> Result<(), Failure> {
        const SHORT: usize = 2 << 10;
        self.head_len = head.len();
        self.take_in(self.at)?;
        if self.len - self.at <= SHORT {
            let body = if self.decode { &self.decoded } else { &self.buf };
            head.extend_from_slice(&body[self.at..self.len]);
            self.at = self.len;
        } else if !self.decode && head.len() <= self.at {
            let begins = self.at - head.len();
            self.buf[begins..self.at].copy_from_slice(head);
            self.at = begins;
            head.clear();
        }
        Ok(())
    }

    /// What it comes to for the upstream.
    fn end(&self, result: Result<(), Failure>, status: Status) -> End {
        match result {
            Ok(()) => End::Answered(status),
            Err(failure @ Failure::ResponseTruncated) if self.was_held_up => End::Excused(failure),
            Err(failure) => End::Failed(failure),
        }
    }

    /// Octets of body that are out.
    fn body_sent(&self) -> u64 {
        self.sent.saturating_sub(self.head_len as u64)
    }

    /// Looks at what was read, from `from` on, and makes it the range to be written.
    fn take_in(&mut self, from: usize) -> Result<(), Failure> {
        let data = &self.buf[from..];
        let seen = if self.decode {
            self.decoded.clear();
            self.body.decode(data, &mut self.decoded)
        } else {
            self.body.scan(data)
        };
        let seen = seen.map_err(Failure::BadResponse)?;
        self.surplus |= seen.used < data.len();
        (self.at, self.len) =
            if self.decode { (0, self.decoded.len()) } else { (from, from + seen.pass) };
        if !self.decode {
            let trailer = self.body.take_trailer();
            if !trailer.is_empty() {
                self.grpc = grpc::status_in_trailer(&trailer);
                self.buf.truncate(self.len);
                self.buf.extend_from_slice(&trailer);
                self.len = self.buf.len();
            }
        }
        Ok(())
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        worker: &Worker,
        upstream: &mut Stream,
        client: &mut Client,
        head: &[u8],
    ) -> Poll<Result<(), Failure>> {
        for _ in 0..MAX_TURNS {
            while self.head_sent < head.len() || self.at < self.len {
                let body = if self.decode { &self.decoded } else { &self.buf };
                let part = &body[self.at..self.len];
                let written = poll_write_from(&mut client.stream, cx, head, part, self.head_sent);
                let was_slow = std::mem::replace(&mut self.client_is_slow, written.is_pending());
                let n = match ready!(written) {
                    Ok(n) => n,
                    Err(e) => return Poll::Ready(Err(unwritable(&e))),
                };
                self.was_held_up |=
                    was_slow && worker.process.clock.now().since(self.progress) >= PATIENCE;
                let of_head = n.min(head.len() - self.head_sent);
                self.head_sent += of_head;
                self.at += n - of_head;
                self.sent += n as u64;
                if self.at < self.len {
                    self.progress = worker.process.clock.now();
                }
            }
            if self.body.is_done() {
                return Poll::Ready(Ok(()));
            }
            if !ready!(self.poll_more(cx, worker, upstream))? {
                return Poll::Ready(Ok(()));
            }
        }
        // Others want their turn, too.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Reads more of the body; false: the connection's end is the body's.
    fn poll_more(
        &mut self,
        cx: &mut Context<'_>,
        worker: &Worker,
        upstream: &mut Stream,
    ) -> Poll<Result<bool, Failure>> {
        self.buf.clear();
        (self.at, self.len) = (0, 0);
        self.grow(&worker.buffers);
        let read = ready!(upstream.poll_fill(cx, &mut self.buf));
        self.progress = worker.process.clock.now();
        match read {
            Ok(0) if self.body.ends_with_connection() => return Poll::Ready(Ok(false)),
            Ok(n) if n > 0 => {
                self.full_reads = if n == self.buf.capacity() { self.full_reads + 1 } else { 0 };
            }
            _ => return Poll::Ready(Err(Failure::ResponseTruncated)),
        }
        Poll::Ready(self.take_in(0).map(|()| true))
    }

    /// Changes to a large buffer once the body proves long.
    fn grow(&mut self, buffers: &Buffers) {
        let small = self.buf.capacity() <= SMALL;
        let long = self.full_reads > 1 || self.body.left().is_some_and(|left| left > SMALL as u64);
        if small && long && !self.is_shared {
            buffers.give(std::mem::replace(&mut self.buf, buffers.large()));
        }
    }

    fn give_back(&mut self, buffers: &Buffers) {
        buffers.give(std::mem::take(&mut self.buf));
    }
}
