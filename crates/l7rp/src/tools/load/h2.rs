//! A connection that speaks HTTP/2 and carries many requests at once. One that the peer has closed,
//! or has not answered on in time, is opened again by whoever needs it first.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use bytes::Bytes;
use h2::client::{Builder, ResponseFuture, SendRequest};
use h2::{Reason, SendStream};
use l7rp_core::names::Nanos;
use tokio::sync::Mutex;
use tokio::task::{spawn_local, yield_now};

use super::desk::{Desk, Moved};
use super::h1::late;
use super::request::Message;
use super::tally::{Failure, Kind};
use crate::stream::Stream;
use crate::timer::Timer;

/// What the peer may send ahead, on a stream and in all.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Octets of an answer's field section.
const MAX_FIELDS: u32 = 64 << 10;
/// How often a request that the peer has not begun with is sent again after connections on which
/// it has answered nothing.
const AGAIN: u32 = 5;

/// A connection, or the next one in its place.
#[derive(Debug, Default)]
pub(super) struct Link {
    open: Mutex<Option<Open>>,
    /// The peer has closed one that had served.
    was_closed: Cell<bool>,
}

#[derive(Clone, Debug)]
struct Open {
    send: SendRequest<Bytes>,
    /// Answers that have come.
    served: Rc<Cell<u64>>,
}

/// Why an exchange has ended without an answer.
enum Broken {
    /// The peer has said that it has not begun with it.
    NotBegun(Failure),
    /// The connection cannot be used any more. Nothing of the answer has come.
    Gone(Failure),
    Failed(Failure),
}

impl Broken {
    /// The answer has not come because of this.
    fn of(e: &h2::Error) -> Self {
        let failure = failure(e);
        // Of streams beyond the last one that the peer has begun the library says that it goes
        // away, of the others that the connection has broken.
        let is_beyond = e.is_go_away() && e.is_remote();
        if is_beyond || e.is_reset() && e.reason() == Some(Reason::REFUSED_STREAM) {
            Self::NotBegun(failure)
        } else if e.is_io() || e.is_go_away() {
            Self::Gone(failure)
        } else {
            Self::Failed(failure)
        }
    }

    /// The request could not even be sent.
    fn unsent(e: &h2::Error) -> Self {
        match Self::of(e) {
            Self::Failed(failure) => Self::Gone(failure),
            other => other,
        }
    }
}

impl Link {
    /// Speaks HTTP/2 on this.
    pub(super) async fn begin(&self, stream: Stream) -> Result<(), Failure> {
        *self.open.lock().await = Some(Open::new(stream).await?);
        Ok(())
    }

    async fn open(&self, desk: &Desk, deadline: Nanos) -> Result<Open, Failure> {
        let mut place = self.open.lock().await;
        if let Some(open) = &*place {
            return Ok(open.clone());
        }
        let open = Open::new(desk.open(deadline).await?).await?;
        if self.was_closed.take() {
            desk.reconnects();
        }
        Ok(place.insert(open).clone())
    }

    /// The connection is not used for more requests; `was_closed` by the peer.
    async fn forget(&self, gone: &Open, was_closed: bool) {
        let mut place = self.open.lock().await;
        if place.as_ref().is_some_and(|open| Rc::ptr_eq(&open.served, &gone.served)) {
            *place = None;
            self.was_closed.set(was_closed && gone.served.get() > 0);
        }
    }
}

impl Open {
    async fn new(stream: Stream) -> Result<Self, Failure> {
        let shaken = Builder::new()
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(MAX_FIELDS)
            .enable_push(false)
            .handshake(stream)
            .await;
        let (send, connection) = shaken.map_err(|e| failure(&e))?;
        spawn_local(async move {
            // Its requests are told what has become of it.
            let _ = connection.await;
        });
        Ok(Self { send, served: Rc::default() })
    }
}

/// One place in a closed or open loop, until there are no more turns.
pub(super) async fn client(desk: Rc<Desk>, link: Rc<Link>) {
    let mut timer = Timer::new(desk.clock);
    let mut now = desk.clock.now();
    while let Some(turn) = desk.turn(now).await {
        let deadline = turn.now.plus(desk.work.plan.timeout);
        let moved = Cell::new(Moved::default());
        let used = RefCell::new(None);
        let outcome = {
            let mut exchange = pin!(exchange(&desk, &link, &used, &moved, deadline));
            poll_fn(|cx| match exchange.as_mut().poll(cx) {
                Poll::Pending if timer.poll(cx, deadline).is_ready() => Poll::Ready(Err(late())),
                other => other,
            })
            .await
        };
        let failed = outcome.as_ref().err().map(|failure| failure.kind);
        now = desk.done(turn, outcome, moved.get());
        if let Some(kind) = failed {
            if let (Kind::Timeout, Some(silent)) = (kind, used.take()) {
                // Others on it may still be answered. HTTP/1.1 does not go on with its own, either.
                link.forget(&silent, false).await;
            }
            desk.rest_after(kind).await;
            now = desk.clock.now();
        }
    }
}

/// One request; with another connection, once, if that which served before was closed on it, and
/// again and again if the peer has not begun with it. `used`: the last connection.
async fn exchange(
    desk: &Desk,
    link: &Link,
    used: &RefCell<Option<Open>>,
    moved: &Cell<Moved>,
    deadline: Nanos,
) -> Result<u16, Failure> {
    let (mut again, mut not_begun) = (true, 0);
    loop {
        used.take();
        let open = link.open(desk, deadline).await?;
        used.replace(Some(open.clone()));
        match ask(open.send.clone(), &desk.work.message, moved).await {
            Ok(status) => {
                open.served.set(open.served.get() + 1);
                return Ok(status);
            }
            Err(Broken::NotBegun(failure)) => {
                link.forget(&open, true).await;
                not_begun += u32::from(open.served.get() == 0);
                if not_begun > AGAIN {
                    return Err(failure);
                }
            }
            Err(Broken::Gone(failure)) => {
                link.forget(&open, true).await;
                if open.served.get() == 0 || !std::mem::take(&mut again) {
                    return Err(failure);
                }
            }
            Err(Broken::Failed(failure)) => return Err(failure),
        }
    }
}

async fn ask(
    send: SendRequest<Bytes>,
    message: &Message,
    moved: &Cell<Moved>,
) -> Result<u16, Broken> {
    let has_body = message.body > 0;
    let begun = match send.ready().await {
        Ok(mut send) => send.send_request(message.head.clone(), !has_body),
        Err(e) => Err(e),
    };
    let (answer, stream) = match begun {
        Ok(both) => both,
        Err(e) => {
            // First on the next connection are those that were on this one.
            yield_now().await;
            return Err(Broken::unsent(&e));
        }
    };
    if !has_body {
        return read(answer, moved).await;
    }
    let mut upload = pin!(upload(stream, message, moved));
    let mut answer = pin!(read(answer, moved));
    let mut uploaded = false;
    // The answer may come before the request is out, and is then the end of it.
    poll_fn(|cx| {
        uploaded = uploaded || upload.as_mut().poll(cx).is_ready();
        answer.as_mut().poll(cx)
    })
    .await
}

async fn read(answer: ResponseFuture, moved: &Cell<Moved>) -> Result<u16, Broken> {
    let (head, mut body) = answer.await.map_err(|e| Broken::of(&e))?.into_parts();
    let failed = |e: h2::Error| Broken::Failed(failure(&e));
    while let Some(part) = body.data().await {
        let part = part.map_err(failed)?;
        // A stream that was reset meanwhile has no window any more.
        let _ = body.flow_control().release_capacity(part.len());
        let so_far = moved.get();
        moved.set(Moved { received: so_far.received + part.len() as u64, ..so_far });
    }
    body.trailers().await.map_err(failed)?;
    Ok(head.status.as_u16())
}

/// Sends the body as fast as the peer lets it. What goes wrong is read with the answer.
async fn upload(
    mut stream: SendStream<Bytes>,
    message: &Message,
    moved: &Cell<Moved>,
) -> Result<(), h2::Error> {
    let mut left = message.body;
    while left > 0 {
        let wanted = left.min(message.piece.len() as u64) as usize;
        stream.reserve_capacity(wanted);
        let Some(room) = poll_fn(|cx| stream.poll_capacity(cx)).await else {
            return Err(Reason::CANCEL.into());
        };
        let n = room?.min(wanted);
        left -= n as u64;
        stream.send_data(message.piece.slice(..n), left == 0)?;
        let so_far = moved.get();
        moved.set(Moved { sent: so_far.sent + n as u64, ..so_far });
    }
    Ok(())
}

fn failure(e: &h2::Error) -> Failure {
    // What the library itself has objected to, or what the peer says that we have done.
    let is_protocol = e.is_library() || e.reason() == Some(Reason::PROTOCOL_ERROR);
    Failure::new(if is_protocol { Kind::Protocol } else { Kind::Reset }, e.to_string())
}
