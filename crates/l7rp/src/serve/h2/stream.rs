//! One stream: an exchange at the one end of a pipe, and HTTP/2 at the other.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::{Method, Request, Response, request};
use l7rp_core::failure::Failure;
use l7rp_core::grpc;
use l7rp_core::http1::response::{self as h1_response, parse_response};
use l7rp_core::names::Nanos;

use super::Origin;
use crate::clock::Clock;
use crate::exchange::client::Client;
use crate::http2::flow::{Broken, Inflow, Outflow};
use crate::http2::heads::{self, Body, request_to_h1, response_to_h2};
use crate::pipe::Pipe;
use crate::serve::h1;
use crate::stream::Stream;
use crate::timer::Timer;
use crate::worker::Worker;

/// A client that waits for more octets than this, and takes fewer of them within the time that a
/// response may be without progress, does not want them.
const LEAST: u64 = 1 << 10;
/// Bounds of a response head; the exchange has kept to those of the upstream's.
const MAX_HEAD: l7rp_core::http1::Limits =
    l7rp_core::http1::Limits { max_head: 128 << 10, max_fields: 512, max_target: 0 };

/// Serves it to its end.
pub(super) async fn serve(
    worker: &Rc<Worker>,
    origin: &Origin,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) {
    let (head, mut body) = request.into_parts();
    let patience = origin.listener.plan.timeouts.read;
    // The client may have reset the stream meanwhile.
    let Ok(first) = first_part(&head, &mut body, patience).await else { return };
    let ends = first.is_none() && body.is_end_stream();
    // What follows an extended CONNECT is of another protocol: nothing of it is framed here.
    let is_tunnel = head.method == Method::CONNECT;
    let framing = if is_tunnel { Body::Length } else { Body::of(&head.headers, ends) };
    // What is known to be malformed goes nowhere (RFC 9113 §8.1.1).
    if poll_fn(|cx| Poll::Ready(respond.poll_reset(cx).is_ready())).await {
        return;
    }
    let (near, mut far) = Pipe::pair();
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
    let text = request_to_h1(&head, framing, origin.listener.limits.max_fields);
    let kind = head.headers.get(http::header::CONTENT_TYPE);
    let is_call = kind.is_some_and(|kind| grpc::is_content_type(kind.as_bytes()));
    // What was asked is kept once, as the exchange reads it.
    drop(head);
    let refusal = text.as_ref().err().copied();
    if let Ok(text) = text {
        far.begin_with(text);
    }
    let listener = origin.listener.clone();
    let exchange = pin!(async move {
        match refusal {
            None => h1::serve_stream(worker, listener, client).await,
            Some(failure) => h1::refuse_all(worker, &listener, client, failure, is_call).await,
        }
    });
    let mut inflow = Inflow::new(body, framing);
    if let Some(first) = first {
        inflow.begin_with(first);
    }
    let far = Far {
        pipe: far,
        inflow: Some(inflow),
        respond,
        to_head,
        patience: origin.listener.plan.timeouts.write,
        clock,
    };
    if both(exchange, pin!(far.run())).await {
        origin.listener.stats[worker.index].h2_stalled.up();
    }
}

/// Has both ends of a stream go on until both have ended. True: the client did not take the answer.
async fn both(
    mut exchange: Pin<&mut impl Future<Output = ()>>,
    mut far: Pin<&mut impl Future<Output = bool>>,
) -> bool {
    let (mut is_served, mut stalled) = (false, None);
    poll_fn(|cx| {
        is_served = is_served || exchange.as_mut().poll(cx).is_ready();
        if stalled.is_none()
            && let Poll::Ready(end) = far.as_mut().poll(cx)
        {
            stalled = Some(end);
        }
        match stalled {
            Some(stalled) if is_served => Poll::Ready(stalled),
            _ => Poll::Pending,
        }
    })
    .await
}

/// Whether a request may well have no body, although its head is not the end of the stream: many
/// clients say it with an empty DATA frame behind.
fn may_have_none(head: &request::Parts) -> bool {
    let rarely =
        matches!(head.method, Method::GET | Method::HEAD | Method::DELETE | Method::OPTIONS);
    rarely && !head.headers.contains_key(http::header::CONTENT_LENGTH)
}

/// The first part of a body that may well not be there; none if it is not.
async fn first_part(
    head: &request::Parts,
    body: &mut RecvStream,
    patience: Duration,
) -> Result<Option<Bytes>, h2::Error> {
    if !may_have_none(head) || body.is_end_stream() {
        return Ok(None);
    }
    let part = async {
        loop {
            match poll_fn(|cx| body.poll_data(cx)).await.transpose()? {
                Some(part) if part.is_empty() && !body.is_end_stream() => {}
                Some(part) if part.is_empty() => return Ok(None),
                part => return Ok(part),
            }
        }
    };
    // There may be a body after all. The exchange waits for it, and says that it has not come.
    tokio::time::timeout(patience, part).await.unwrap_or(Ok(None))
}

/// What becomes of a stream on which an answer has begun.
enum End {
    /// It is through, or the client has given it up.
    Over,
    /// The exchange has broken off.
    Broken,
    /// The client does not take it.
    Stalled,
}

/// The far end of a stream's pipe.
struct Far {
    pipe: Pipe,
    /// The request's body, until all of it has come.
    inflow: Option<Inflow>,
    respond: SendResponse<Bytes>,
    to_head: bool,
    /// How long the client may take nothing of what it is sent.
    patience: Duration,
    clock: Clock,
}

/// Watches whether a client takes what it is sent: octets count, and not that its window opens.
struct Taking {
    timer: Timer,
    /// When it was last seen to go on, and how much it had taken by then.
    since: Nanos,
    taken: u64,
    waited: bool,
}

impl Taking {
    /// Ready when the client has waited for octets for so long without taking them.
    fn poll_stalled(
        &mut self,
        cx: &mut Context<'_>,
        (waits, taken): (bool, u64),
        patience: Duration,
        now: Nanos,
    ) -> Poll<()> {
        if !waits || !self.waited || taken - self.taken >= LEAST {
            (self.since, self.taken) = (now, taken);
        }
        self.waited = waits;
        if waits { self.timer.poll(cx, self.since.plus(patience)) } else { Poll::Pending }
    }
}

impl Far {
    /// Moves everything in both directions, until the answer is out or one side has gone. True: the
    /// client did not take it.
    async fn run(mut self) -> bool {
        let mut buf = Vec::new();
        let mut head = h1_response::Response::default();
        let began = poll_fn(|cx| {
            if self.respond.poll_reset(cx).is_ready() || self.poll_request(cx).is_ready() {
                return Poll::Ready(None);
            }
            self.poll_head(cx, &mut buf, &mut head).map(Some)
        });
        let Some(result) = began.await else { return false };
        let Ok((response, rest)) = result else {
            // It has ended without an answer: nothing was committed, and nothing may look so.
            self.respond.send_reset(Reason::INTERNAL_ERROR);
            return false;
        };
        let is_tunnel = head.status == 101;
        let ends = !is_tunnel && !heads::has_body(head.framing);
        let Ok(stream) = self.respond.send_response(response, ends) else { return false };
        if ends {
            self.take_rest().await;
            return false;
        }
        let framing = if is_tunnel { l7rp_core::http1::Framing::UntilClose } else { head.framing };
        let mut outflow = Outflow::new(stream, framing, rest);
        let (clock, patience) = (self.clock, self.patience);
        let now = clock.now();
        let mut taking = Taking { timer: Timer::new(clock), since: now, taken: 0, waited: false };
        let end = poll_fn(|cx| {
            let is_reset = outflow.stream().poll_reset(cx).is_ready();
            if is_reset || self.poll_request(cx).is_ready() {
                return Poll::Ready(End::Over);
            }
            match outflow.poll(cx, &mut self.pipe) {
                Poll::Ready(Err(Broken::Exchange)) => Poll::Ready(End::Broken),
                Poll::Ready(_) => Poll::Ready(End::Over),
                // What is in a tunnel may wait for as long as both want.
                Poll::Pending if is_tunnel => Poll::Pending,
                Poll::Pending => taking
                    .poll_stalled(cx, outflow.waits(), patience, clock.now())
                    .map(|()| End::Stalled),
            }
        });
        let end = end.await;
        match end {
            End::Over if is_tunnel => {}
            End::Over => self.take_rest().await,
            End::Broken => outflow.reset(Reason::INTERNAL_ERROR),
            End::Stalled => {
                self.pipe.give_up(io::ErrorKind::TimedOut);
                outflow.reset(Reason::CANCEL);
            }
        }
        matches!(end, End::Stalled)
    }

    /// Goes on taking the request once the answer is out, for as long as the exchange does: clients
    /// throw away an answer that they have whole, if the stream is reset while they send.
    async fn take_rest(&mut self) {
        let Self { pipe, inflow: Some(inflow), .. } = self else { return };
        poll_fn(|cx| {
            if pipe.poll_unread(cx).is_ready() {
                return Poll::Ready(());
            }
            inflow.poll(cx, pipe).map(|_| ())
        })
        .await;
    }

    /// Moves the request on. Ready: the client has given the stream up.
    fn poll_request(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(inflow) = &mut self.inflow else { return Poll::Pending };
        match ready!(inflow.poll(cx, &mut self.pipe)) {
            Ok(()) => self.inflow = None,
            Err(Broken::Exchange) => {}
            Err(Broken::Stream(_)) => return Poll::Ready(()),
        }
        Poll::Pending
    }

    /// Reads the head of the answer, and passes on what is interim. The answer's head as HTTP/2,
    /// and what has come behind it.
    fn poll_head(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut Vec<u8>,
        head: &mut h1_response::Response,
    ) -> Poll<Result<(Response<()>, Bytes), Failure>> {
        loop {
            let parsed = if buf.is_empty() {
                Ok(None)
            } else {
                parse_response(buf, head, self.to_head, MAX_HEAD)
            };
            match parsed {
                Ok(Some(len)) => {
                    let mut all = Bytes::from(std::mem::take(buf));
                    let response = response_to_h2(&all, head);
                    let rest = all.split_off(len);
                    if head.status >= 200 || head.status == 101 {
                        return Poll::Ready(response.map(|head| (head, rest)));
                    }
                    if let Ok(interim) = response {
                        let _ = self.respond.send_informational(interim);
                    }
                    buf.extend_from_slice(&rest);
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
