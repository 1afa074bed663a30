//! A connection that speaks HTTP/1.1: one request after the other.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};

use l7rp_core::failure::Failure as Code;
use l7rp_core::http1::Limits;
use l7rp_core::http1::body::Body;
use l7rp_core::http1::response::parse_response;
use l7rp_core::names::Nanos;

use super::desk::{Desk, Moved};
use super::tally::{Failure, Kind};
use super::target::{broken, malformed};
use crate::stream::Stream;
use crate::timer::Timer;

const LIMITS: Limits = Limits { max_head: 64 << 10, max_fields: 256, max_target: 0 };
const MAX_TRAILER: usize = 16 << 10;
const SWITCHING: u16 = 101;

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    stream: Stream,
    /// The beginning of a head.
    left: Vec<u8>,
    /// Answers that have come.
    served: u64,
}

/// How far an exchange is.
#[derive(Debug, Default)]
struct Progress {
    moved: Moved,
    /// Writing has failed. The answer may have come nevertheless.
    write_error: Option<Failure>,
    body: Option<Body>,
    status: u16,
    keep_alive: bool,
}

/// One place in a closed or open loop, until there are no more turns. `connection`: what it begins
/// with.
pub(super) async fn client(desk: Rc<Desk>, mut connection: Option<Connection>) {
    let mut timer = Timer::new(desk.clock);
    let mut now = desk.clock.now();
    while let Some(turn) = desk.turn(now).await {
        let mut moved = Moved::default();
        let outcome = exchange(&desk, &mut connection, &mut timer, &mut moved, turn.now).await;
        let failed = outcome.as_ref().err().map(|failure| failure.kind);
        now = desk.done(turn, outcome, moved);
        if let Some(kind) = failed {
            connection = None;
            desk.rest_after(kind).await;
            now = desk.clock.now();
        }
    }
}

/// One request, on a kept connection or a new one. A kept one that the peer closes without a word,
/// or has sent something on that was not asked for, is replaced: it has only been idle for too
/// long. The new one is not.
pub(super) async fn exchange(
    desk: &Desk,
    kept: &mut Option<Connection>,
    timer: &mut Timer,
    moved: &mut Moved,
    now: Nanos,
) -> Result<u16, Failure> {
    let deadline = now.plus(desk.work.plan.timeout);
    let had_one = kept.is_some();
    loop {
        let kept_one = kept.take().filter(Connection::can_serve);
        let mut connection = if let Some(connection) = kept_one {
            connection
        } else {
            let stream = desk.open(deadline).await?;
            if had_one {
                desk.reconnects();
            }
            Connection::new(stream)
        };
        let mut progress = Progress::default();
        let answer = poll_fn(|cx| {
            let answer = connection.poll(cx, desk, &mut progress);
            if answer.is_pending() && timer.poll(cx, deadline).is_ready() {
                return Poll::Ready(Err(late()));
            }
            answer
        });
        let answer = answer.await;
        moved.sent += progress.moved.sent;
        moved.received += progress.moved.received;
        match answer {
            Ok(()) => {
                connection.served += 1;
                *kept = progress.keep_alive.then_some(connection);
                return Ok(progress.status);
            }
            Err(Failure { kind: Kind::Reset, .. })
                if connection.served > 0 && progress.moved.received == 0 => {}
            Err(failure) => return Err(failure),
        }
    }
}

/// What a request has failed with whose answer was not complete in time.
pub(super) fn late() -> Failure {
    Failure::new(Kind::Timeout, "the answer was not complete within --timeout")
}

impl Connection {
    pub(super) fn new(stream: Stream) -> Self {
        Self { stream, left: Vec::new(), served: 0 }
    }

    /// Whether the peer has left an idle connection open.
    pub(super) fn is_open(&self) -> bool {
        self.stream.is_quiet()
    }

    /// Whether what is read next is the answer to what is sent next. Before the first answer over
    /// TLS nobody knows: the peer may have sent tickets.
    fn can_serve(&self) -> bool {
        self.is_open() || self.served == 0 && matches!(self.stream, Stream::Tls(_))
    }

    /// Ready when the whole answer has come. It may come before the request is out.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        desk: &Desk,
        progress: &mut Progress,
    ) -> Poll<Result<(), Failure>> {
        self.write(cx, desk, progress);
        let mut room = desk.room.take();
        let answer = self.poll_answer(cx, desk, progress, &mut room);
        room.clear();
        desk.room.set(room);
        answer
    }

    /// Writes what can be written at once.
    fn write(&mut self, cx: &mut Context<'_>, desk: &Desk, progress: &mut Progress) {
        let octets = &desk.work.octets;
        while progress.moved.sent < octets.len() && progress.write_error.is_none() {
            let (first, second) = octets.from(progress.moved.sent);
            match self.stream.poll_write(cx, first, second) {
                Poll::Ready(Ok(n)) if n > 0 => progress.moved.sent += n as u64,
                Poll::Ready(Ok(_)) => {
                    let words = "closed while the request was written";
                    progress.write_error = Some(Failure::new(Kind::Reset, words));
                }
                Poll::Ready(Err(e)) => {
                    progress.write_error = Some(broken(&e, "while the request was written"));
                }
                Poll::Pending => return,
            }
        }
    }

    fn poll_answer(
        &mut self,
        cx: &mut Context<'_>,
        desk: &Desk,
        progress: &mut Progress,
        room: &mut Vec<u8>,
    ) -> Poll<Result<(), Failure>> {
        loop {
            room.clear();
            room.append(&mut self.left);
            match self.stream.poll_fill(cx, room) {
                Poll::Pending => {
                    self.left.extend_from_slice(room);
                    return Poll::Pending;
                }
                Poll::Ready(Ok(0)) => return Poll::Ready(progress.closed()),
                Poll::Ready(Ok(n)) => progress.moved.received += n as u64,
                Poll::Ready(Err(e)) => {
                    let read = || broken(&e, "while the answer was read");
                    return Poll::Ready(Err(progress.write_error.take().unwrap_or_else(read)));
                }
            }
            if self.take(desk, progress, room)? {
                return Poll::Ready(Ok(()));
            }
        }
    }

    /// Takes what has come. Whether the answer is complete.
    fn take(
        &mut self,
        desk: &Desk,
        progress: &mut Progress,
        octets: &[u8],
    ) -> Result<bool, Failure> {
        let mut at = 0;
        let body = loop {
            if let Some(body) = &mut progress.body {
                break body;
            }
            let head = &mut *desk.head.borrow_mut();
            let rest = &octets[at..];
            let to_head = desk.work.to_head;
            let Some(len) = parse_response(rest, head, to_head, LIMITS).map_err(malformed)? else {
                self.left.extend_from_slice(rest);
                return Ok(false);
            };
            at += len;
            match head.status {
                SWITCHING => {
                    let words = "the answer switches to a protocol that was not asked for";
                    return Err(Failure::new(Kind::Protocol, words));
                }
                ..200 => {}
                status => {
                    progress.status = status;
                    progress.keep_alive = head.keep_alive && !desk.work.plan.ask.close;
                    progress.body = Some(Body::new(head.framing, MAX_TRAILER));
                }
            }
        };
        let seen = body.scan(&octets[at..]).map_err(|e| malformed(Code::BadResponse(e)))?;
        at += seen.used;
        if !seen.done {
            return Ok(false);
        }
        if at < octets.len() {
            return Err(Failure::new(Kind::Protocol, "there is more than the answer"));
        }
        // What is left of the request would be taken for another one.
        progress.keep_alive &= progress.moved.sent == desk.work.octets.len();
        Ok(true)
    }
}

impl Progress {
    /// What it means that the peer has ended its side.
    fn closed(&mut self) -> Result<(), Failure> {
        if self.body.as_ref().is_some_and(Body::ends_with_connection) {
            return Ok(());
        }
        let words = match self.moved.received {
            0 => "closed before the answer",
            _ => "closed in the middle of the answer",
        };
        Err(self.write_error.take().unwrap_or_else(|| Failure::new(Kind::Reset, words)))
    }
}
