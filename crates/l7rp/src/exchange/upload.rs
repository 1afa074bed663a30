//! The request's way to the upstream: the head, what came with it, and the rest of the body
//! as it arrives. A slow upstream stops the client, and the reverse.
//!
//! What may have to be sent again is kept while it is streamed, up to the route's bound; a
//! longer body is streamed on and can no longer be sent again.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use l7rp_core::failure::Failure;
use l7rp_core::http1::Framing;
use l7rp_core::http1::body::Body;
use l7rp_core::http1::encode::Changes;
use l7rp_core::names::Nanos;

use super::Incoming;
use super::client::{Client, poll_write_from};
use crate::config::plan::MessageLimits;
use crate::stream::Stream;
use crate::worker::{SMALL, Worker};

/// Buffers of a body that are moved before others get their turn.
pub(super) const MAX_TURNS: u32 = 8;
/// Octets of chunk framing that are kept beside as many of content and the route's bound for
/// it: chunks of any sense need less, and their number must not make the bound idle.
const FRAMING: usize = 16 << 10;
/// No body is too slow before this.
const RATE_GRACE: Duration = Duration::from_secs(10);

/// Whom an upload is waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// For nobody: it is complete, or given up.
    No,
    /// For the client to send.
    Client,
    /// For the upstream to take.
    Upstream,
}

/// A request on its way.
#[derive(Debug)]
pub struct Upload {
    body: Body,
    /// Octets of [`Incoming::rest`] that are body, and how many of them are passed on.
    first_len: usize,
    first_pass: usize,
    max_body: u64,
    /// When it began, and octets a second that it must keep up; 0: any.
    began: Nanos,
    min_rate: u64,
    /// Octets of head and first part that are out.
    sent: usize,
    /// What was read after the first part, and which range of it has to be written.
    buf: Vec<u8>,
    at: usize,
    len: usize,
    /// Octets of content that are kept in `buf`, to be sent again.
    keep: u64,
    /// All that was passed on after the first part is in `buf`.
    whole: bool,
    /// What is not passed on behind the body either.
    dropped: Option<Arc<Changes>>,
    waits: Waits,
    /// The upstream takes no more.
    broken: bool,
    /// When the last octet moved.
    pub progress: Nanos,
}

impl Upload {
    /// The upload of this request, of whose body `keep` octets may have to be sent again.
    /// `dropped`: what is not passed on behind the body.
    ///
    /// # Errors
    /// What came of the body is malformed or already too long.
    pub fn new(
        incoming: &Incoming<'_>,
        limits: &MessageLimits,
        max_body: u64,
        keep: u64,
        dropped: Option<&Arc<Changes>>,
    ) -> Result<Self, Failure> {
        let mut body = Body::new(incoming.head.framing, limits.max_trailer_bytes);
        let seen = body.scan(incoming.rest).map_err(Failure::BadRequest)?;
        if body.content() > max_body {
            return Err(Failure::BodyTooLarge);
        }
        let dropped = dropped.filter(|_| incoming.head.framing == Framing::Chunked).cloned();
        let trailer = stripped(dropped.as_deref(), body.take_trailer());
        // One that is known to be too long need not be kept in part.
        let keep =
            if body.left().is_some_and(|left| body.content() + left > keep) { 0 } else { keep };
        Ok(Self {
            body,
            first_len: seen.used,
            first_pass: seen.pass,
            max_body,
            began: incoming.arrived,
            min_rate: limits.min_body_rate,
            sent: 0,
            at: 0,
            len: trailer.len(),
            buf: trailer,
            keep,
            whole: true,
            dropped,
            waits: Waits::Upstream,
            broken: false,
            progress: incoming.arrived,
        })
    }

    /// Begins again, on another connection. Only while [`Upload::is_replayable`].
    pub fn restart(&mut self, now: Nanos) {
        (self.sent, self.at) = (0, 0);
        self.waits = Waits::Upstream;
        self.broken = false;
        self.progress = now;
    }

    /// Whether all that was sent can be sent again.
    pub fn is_replayable(&self) -> bool {
        self.whole
    }

    /// Whether it is also short enough for the route to try it again.
    pub fn is_kept(&self) -> bool {
        self.whole && self.body.content() <= self.keep
    }

    /// The body as it goes to an upstream, if all of it came with the head.
    pub fn at_once<'r>(&self, rest: &'r [u8]) -> Option<&'r [u8]> {
        (self.is_received() && self.buf.is_empty()).then(|| &rest[..self.first_pass])
    }

    /// Octets of [`Incoming::rest`] that are body.
    pub fn first_len(&self) -> usize {
        self.first_len
    }

    /// Octets of content received.
    pub fn content(&self) -> u64 {
        self.body.content()
    }

    /// Whom it is waiting for.
    pub fn waits(&self) -> Waits {
        self.waits
    }

    /// When a client that is waited for will have been too slow, and how.
    pub fn client_deadline(&self, read: Duration) -> (Nanos, Failure) {
        let silent = (self.progress.plus(read), Failure::BodyTimeout);
        if self.min_rate == 0 {
            return silent;
        }
        let earned = Duration::from_secs(self.body.content() / self.min_rate);
        let slow = (self.began.plus(earned.max(RATE_GRACE)), Failure::BodyTooSlow);
        if slow.0 < silent.0 { slow } else { silent }
    }

    /// Whether the whole request went out.
    pub fn is_sent(&self) -> bool {
        self.is_received() && self.waits == Waits::No && !self.broken
    }

    /// Whether the whole request has come in.
    pub fn is_received(&self) -> bool {
        self.body.is_done()
    }

    /// Nothing more is to be sent: all of it went out on the connection that counts, or what
    /// is missing there will not.
    pub fn ended(&mut self, sent: bool) {
        (self.waits, self.broken) = (Waits::No, !sent);
    }

    /// Moves what can be moved. Ready when the request is out, or the upstream takes no more
    /// of it; then what it says decides.
    ///
    /// # Errors
    /// The client is gone, or its body is malformed or too long.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        worker: &Worker,
        client: &mut Client,
        upstream: &mut Stream,
        head: &[u8],
        rest: &[u8],
    ) -> Poll<Result<(), Failure>> {
        let first = &rest[..self.first_pass];
        let mut turns = 0;
        loop {
            if self.waits == Waits::No {
                return Poll::Ready(Ok(()));
            }
            let unsent = self.sent < head.len() + first.len();
            if unsent || self.at < self.len {
                self.waits = Waits::Upstream;
                let written = if unsent {
                    poll_write_from(upstream, cx, head, first, self.sent)
                } else {
                    poll_write_from(upstream, cx, &self.buf[self.at..self.len], &[], 0)
                };
                match ready!(written) {
                    Ok(n) if unsent => self.sent += n,
                    Ok(n) => self.at += n,
                    // It may have answered before it closed.
                    Err(_) => (self.waits, self.broken) = (Waits::No, true),
                }
                if self.buf.capacity() > 0 {
                    self.progress = worker.process.clock.now();
                }
                continue;
            }
            if self.body.is_done() {
                self.waits = Waits::No;
                continue;
            }
            if turns == MAX_TURNS {
                // Others want their turn, too.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            turns += 1;
            self.waits = Waits::Client;
            ready!(self.poll_more(cx, worker, client))?;
        }
    }

    /// Reads more of the body.
    fn poll_more(
        &mut self,
        cx: &mut Context<'_>,
        worker: &Worker,
        client: &mut Client,
    ) -> Poll<Result<(), Failure>> {
        if self.buf.capacity() == 0 {
            if ready!(client.stream.poll_readable(cx)).is_err() {
                return Poll::Ready(Err(Failure::ClientGone));
            }
            let long = self.body.left().is_none_or(|left| left > SMALL as u64);
            self.buf = if long { worker.buffers.large() } else { worker.buffers.small() };
        }
        // What was written is kept or forgotten.
        let bound = (self.keep as usize).saturating_mul(2).saturating_add(FRAMING);
        let keep = self.whole && self.body.content() <= self.keep && self.len <= bound;
        let from = if keep { self.len } else { 0 };
        self.whole &= from == self.len;
        self.buf.truncate(from);
        (self.at, self.len) = (from, from);
        match ready!(client.stream.poll_fill(cx, &mut self.buf)) {
            Ok(n) if n > 0 => {}
            _ => return Poll::Ready(Err(Failure::ClientGone)),
        }
        self.progress = worker.process.clock.now();
        let seen = self.body.scan(&self.buf[from..]).map_err(Failure::BadRequest)?;
        if self.body.content() > self.max_body {
            return Poll::Ready(Err(Failure::BodyTooLarge));
        }
        self.len = from + seen.pass;
        let trailer = stripped(self.dropped.as_deref(), self.body.take_trailer());
        self.buf.splice(self.len..from + seen.used, trailer.iter().copied());
        self.len += trailer.len();
        Poll::Ready(Ok(()))
    }

    /// Ends the upload: what was read beyond the body is the next request's, and the buffer
    /// is given back.
    pub fn finish(mut self, worker: &Worker, client: &mut Client) {
        if self.body.is_done() && self.len < self.buf.len() {
            // It came before what was read while the upstream was waited for.
            let mut ahead = self.buf[self.len..].to_vec();
            ahead.extend_from_slice(&client.ahead);
            worker.buffers.give(std::mem::replace(&mut client.ahead, ahead));
        }
        worker.buffers.give(std::mem::take(&mut self.buf));
    }
}

fn stripped(dropped: Option<&Changes>, trailer: Vec<u8>) -> Vec<u8> {
    match dropped {
        Some(changes) => changes.strip(trailer),
        None => trailer,
    }
}
