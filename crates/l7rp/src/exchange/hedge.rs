//! A race of two tries: when the first is slow, a second begins at another upstream (Dean and
//! Barroso, "The Tail at Scale", CACM 2013). A good response wins at once; anything else waits
//! for the other. The loser is given up, and nothing is held against it.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};

use l7rp_core::attempts::Plan;
use l7rp_core::failure::{Again, Failure, Malformed};
use l7rp_core::http1::request::Method;
use l7rp_core::http1::response::{Response, parse_response};
use l7rp_core::names::Nanos;
use l7rp_core::pick::Tried;

use super::Exchange;
use super::attempt::{
    Attempt, Fault, Lap, MAX_INTERIM, MAX_RESPONSE_HEAD, Origin, closed, is_stale, report,
    write_head,
};
use super::client::poll_write_from;
use super::forwarded::Sender;
use super::open::{Which, open};
use super::record::{Record, RequestId};
use super::upload::Upload;
use crate::live::Route;
use crate::observe::tries::{self, Link};
use crate::stream::Stream;
use crate::upstream::connection::Connection;
use crate::upstream::pool::{End, Place, Pool, Wanted};

/// What came of a try.
type Ended = Result<Lap, Fault>;
/// The same of the second, which has a response of its own.
type SecondEnded = Result<(Lap, Response), Fault>;

/// Runs the first try at `place` and, if it has given nothing at `hedge_at`, a second beside
/// it. Gives what the client is to have or what is to be judged; the response's head is in the
/// workspace.
#[expect(
    clippy::too_many_arguments,
    reason = "one caller; a struct for it would hide what is used"
)]
pub(super) async fn race<'a>(
    attempt: &mut Attempt<'_, '_, 'a>,
    record: &mut Record<'a>,
    mut place: Place<'a>,
    upload: &mut Upload,
    plan: &Plan<'a>,
    hedge_at: Nanos,
    key: u64,
    tried: &mut Tried,
) -> (Place<'a>, Ended) {
    let second = Second::new(attempt, upload, key);
    // Both write down what becomes of their connections.
    let record = RefCell::new(record);
    let x = attempt.x;
    let clock = x.worker.process.clock;
    let ended = {
        let result = Cell::new(None);
        let future = pin!(async {
            result.set(Some(attempt.run(&record, &mut place, upload, plan, true).await));
            // It has the client: it hears of its leaving after its own end, too.
            poll_fn(|cx| attempt.client.poll_watch(cx, &x.worker.buffers)).await
        });
        let mut first = First { future, result: &result };
        match first.alone_until(clock.instant(hedge_at)).await {
            Some(ended) => Finish::First(ended, clock.now()),
            None => match second.place(tried) {
                None => {
                    let ended = poll_fn(|cx| first.poll(cx)).await;
                    Finish::First(ended, clock.now())
                }
                Some(mut other) => {
                    let span = record.borrow_mut().begins(&mut other, true);
                    second.stats().hedges.up();
                    second.run(&record, first, other, span).await
                }
            },
        }
    };
    let record = record.into_inner();
    let now = clock.now();
    let waited = now.since(place.began());
    match ended {
        Finish::First(ended, at) => {
            // Not the time at which the race was over.
            if let Err(fault) = &ended {
                let took = place.settle(fault.end(), at);
                record.failed(&place, *fault, took);
            }
            (place, ended)
        }
        Finish::Second(won) => {
            let Won { lap, response, place: other, first } = *won;
            attempt.learn(waited, now);
            settle_loser(x, record, &mut place, first, now);
            // What the first had not sent yet must not go out on the second's connection.
            upload.ended(true);
            *attempt.space.response = response;
            record.uses(&other);
            (other, Ok(lap))
        }
    }
}

/// Settles the first where the second counts: as what it came to, when it came, or as lost.
fn settle_loser<'a>(
    x: &Exchange<'a>,
    record: &mut Record<'a>,
    place: &mut Place<'a>,
    first: Option<(Ended, Nanos)>,
    now: Nanos,
) {
    let waited = now.since(place.began());
    match first {
        None => {
            place.waited(waited, now);
            place.has_lost();
            record.ends(place, tries::End::Lost, waited);
        }
        Some((Ok(lap), at)) => {
            let took = place.settle(End::Answered(lap.status), at);
            record.ends(place, tries::End::Answered(lap.status.http), took);
            x.worker.buffers.give(lap.buf);
        }
        Some((Err(fault), at)) => {
            let took = place.settle(fault.end(), at);
            record.failed(place, fault, took);
        }
    }
}

/// The first try, on its way.
struct First<'t, F> {
    /// Ready when the client has left.
    future: Pin<&'t mut F>,
    result: &'t Cell<Option<Ended>>,
}

impl<F: Future<Output = Failure>> First<'_, F> {
    /// Ready with what came of it, and later, if polled on, with the client's leaving.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Ended> {
        match self.future.as_mut().poll(cx) {
            Poll::Ready(gone) => Poll::Ready(Err(gone.into())),
            Poll::Pending => self.result.take().map_or(Poll::Pending, Poll::Ready),
        }
    }

    /// Waits for it, but not longer than until `then`.
    async fn alone_until(&mut self, then: tokio::time::Instant) -> Option<Ended> {
        let mut company = pin!(tokio::time::sleep_until(then));
        poll_fn(|cx| match self.poll(cx) {
            Poll::Ready(ended) => Poll::Ready(Some(ended)),
            Poll::Pending => company.as_mut().poll(cx).map(|()| None),
        })
        .await
    }
}

/// How a race ended: whose result counts.
enum Finish<'a> {
    /// And when it came.
    First(Ended, Nanos),
    Second(Box<Won<'a>>),
}

/// The second's result, and what had come of the first until then.
struct Won<'a> {
    lap: Lap,
    response: Response,
    place: Place<'a>,
    first: Option<(Ended, Nanos)>,
}

/// What a second try needs.
struct Second<'t, 'a> {
    x: &'t Exchange<'a>,
    pool: &'a Pool,
    route: &'a Route,
    sender: &'t Sender,
    scheme: &'static str,
    identity: Option<Rc<str>>,
    peer: Rc<str>,
    client: Rc<str>,
    id: RequestId,
    deadline: Nanos,
    key: u64,
    body: &'a [u8],
}

impl<'t, 'a> Second<'t, 'a> {
    fn new(attempt: &Attempt<'t, '_, 'a>, upload: &Upload, key: u64) -> Self {
        let Attempt { x, pool, route, sender, id, deadline, .. } = attempt;
        Self {
            x,
            pool,
            route,
            sender,
            scheme: attempt.client.scheme(),
            identity: attempt.client.identity().cloned(),
            peer: attempt.client.peer_text.clone(),
            client: sender.client(attempt.client).clone(),
            id: *id,
            deadline: *deadline,
            key,
            body: upload.at_once(x.incoming.rest).unwrap_or_default(),
        }
    }

    fn stats(&self) -> &'a crate::observe::stats::RouteStats {
        &self.route.stats[self.x.worker.index]
    }

    /// A place at another upstream that is in good order, if there is one and the budget
    /// allows it.
    fn place(&self, tried: &mut Tried) -> Option<Place<'a>> {
        let worker = self.x.worker;
        let now = worker.process.clock.now();
        let wanted = Wanted { tried, key: self.key, only_closed: true, worker: worker.index };
        let place = self.pool.take(wanted, now, fastrand::u64(..)).ok()?;
        if !self.pool.may_try_again(now) {
            place.unused();
            return None;
        }
        tried.insert(place.ix());
        Some(place)
    }

    /// Runs both to the end of the race.
    async fn run(
        &self,
        record: &RefCell<&mut Record<'a>>,
        mut first: First<'_, impl Future<Output = Failure>>,
        mut place: Place<'a>,
        span: u64,
    ) -> Finish<'a> {
        let clock = self.x.worker.process.clock;
        let limit = self.pool.plan.connect_timeout + self.pool.plan.response_header_timeout;
        let until = clock.now().plus(limit).min(self.deadline);
        let mut first_ended = None;
        let mut second_ended = None;
        {
            let mut second = pin!(self.exchange(record, &mut place, span));
            let mut late = pin!(tokio::time::sleep_until(clock.instant(until)));
            poll_fn(|cx| {
                if let Poll::Ready(ended) = first.poll(cx) {
                    let over = self.is_over(&ended);
                    first_ended = Some((ended, clock.now()));
                    if over {
                        return Poll::Ready(());
                    }
                }
                if second_ended.is_none() {
                    if let Poll::Ready(ended) = second.as_mut().poll(cx) {
                        let wins = ended.as_ref().is_ok_and(|(lap, _)| self.wins(lap.status.http));
                        second_ended = Some((ended, clock.now()));
                        if wins {
                            return Poll::Ready(());
                        }
                    } else if late.as_mut().poll(cx).is_ready() {
                        let late = Err(Failure::ResponseTimeout.into());
                        second_ended = Some((late, clock.now()));
                    }
                }
                if first_ended.is_some() && second_ended.is_some() {
                    return Poll::Ready(());
                }
                Poll::Pending
            })
            .await;
        }
        self.finish(&mut record.borrow_mut(), first_ended, second_ended, place)
    }

    fn wins(&self, status: u16) -> bool {
        self.route.retry.as_ref().is_none_or(|rules| rules.wins(status))
    }

    /// Whether nothing that the second can bring would be better.
    fn is_over(&self, first: &Ended) -> bool {
        match first {
            Ok(lap) => self.wins(lap.status.http),
            Err(fault) => fault.failure.meaning().again == Again::No,
        }
    }

    /// Decides, and settles the second where the first counts.
    fn finish(
        &self,
        record: &mut Record<'a>,
        first: Option<(Ended, Nanos)>,
        second: Option<(SecondEnded, Nanos)>,
        mut place: Place<'a>,
    ) -> Finish<'a> {
        let now = self.x.worker.process.clock.now();
        let over = first.as_ref().is_some_and(|(first, _)| self.is_over(first));
        match (first, second) {
            // It is good, or neither is, and then a response is better than none, and the
            // first one's better than the second's.
            (first, Some((Ok((lap, response)), _)))
                if !over && (self.wins(lap.status.http) || !matches!(first, Some((Ok(_), _)))) =>
            {
                if self.wins(lap.status.http) {
                    self.stats().won_by_hedge.up();
                }
                Finish::Second(Box::new(Won { lap, response, place, first }))
            }
            (Some((first, at)), second) => {
                match second {
                    None => {
                        let waited = now.since(place.began());
                        place.waited(waited, now);
                        // What ends the first without an answer is the end of both.
                        let end = first.as_ref().map_or_else(
                            |fault| tries::End::Failed(fault.failure),
                            |_| tries::End::Lost,
                        );
                        record.ends(&place, end, waited);
                    }
                    Some((Ok((lap, _)), at)) => {
                        let took = place.settle(End::Answered(lap.status), at);
                        record.ends(&place, tries::End::Answered(lap.status.http), took);
                    }
                    Some((Err(fault), at)) => {
                        let took = place.settle(fault.end(), at);
                        record.failed(&place, fault, took);
                    }
                }
                if first.as_ref().is_ok_and(|lap| self.wins(lap.status.http)) {
                    self.stats().won_by_primary.up();
                }
                Finish::First(first, at)
            }
            // The race does not end before one has.
            (None, _) => Finish::First(Err(Failure::Internal.into()), now),
        }
    }

    /// The second try: a connection, the request, the head of a response.
    async fn exchange(
        &self,
        record: &RefCell<&mut Record<'_>>,
        place: &mut Place<'_>,
        span: u64,
    ) -> SecondEnded {
        let worker = self.x.worker;
        let clock = worker.process.clock;
        let upstream = place.upstream();
        let mut head = Vec::new();
        let mut from = Origin {
            scheme: self.scheme,
            peer: &self.peer,
            client: &self.client,
            sender: self.sender,
            identity: self.identity.as_deref(),
            span,
        };
        let (mut which, mut first) = (Which::Pooled, true);
        loop {
            let (mut connection, reused) =
                open(self.x, self.pool, upstream, self.deadline, which, clock.now()).await?;
            write_head(&mut head, self.x, self.pool, self.route, upstream, from, &self.id);
            let began = clock.now();
            let link = Link { reused, age: began.since(connection.opened) };
            let mut buf = worker.buffers.small();
            match self.ask(&mut connection, &head, &mut buf).await {
                Ok((response, head_at, body_at)) => {
                    let now = clock.now();
                    place.head_came(now.since(began), now);
                    let status = self.x.status(&response, &buf[head_at..]);
                    let lap = Lap { connection, link, status, buf, head_at, body_at, came: now };
                    return Ok((lap, response));
                }
                Err(failure) => {
                    let stale = buf.is_empty() && is_stale(failure, reused, first);
                    worker.buffers.give(buf);
                    let fault = Fault { failure, link: Some(link), excused: false };
                    if !stale {
                        report(self.x, self.pool, upstream, failure, "");
                        return Err(fault);
                    }
                    // Only what may be done twice is hedged: it is asked anew.
                    from.span = record.borrow_mut().begins_anew(place, fault, clock.now());
                    (which, first) = (Which::again(failure), false);
                }
            }
        }
    }

    /// Sends the request and reads to the end of the response's head; what comes before it is
    /// dropped, for the client may be hearing the first one's.
    async fn ask(
        &self,
        connection: &mut Connection,
        head: &[u8],
        buf: &mut Vec<u8>,
    ) -> Result<(Response, usize, usize), Failure> {
        let stream = &mut connection.stream;
        let total = head.len() + self.body.len();
        let mut sent = 0;
        while sent < total {
            let write = poll_fn(|cx| poll_write_from(stream, cx, head, self.body, sent)).await;
            sent += write.map_err(|_| Failure::UpstreamClosed)?;
        }
        let to_head = self.x.incoming.head.method == Method::Head;
        let mut response = Response::default();
        let (mut at, mut interim, mut looked_at) = (0, 0, 0);
        loop {
            // As in the first try: one look a line.
            let news = looked_at <= at || memchr::memchr(b'\n', &buf[looked_at..]).is_some();
            looked_at = buf.len();
            if !news && buf.len() - at < MAX_RESPONSE_HEAD.max_head {
                fill(stream, buf).await?;
                continue;
            }
            match parse_response(&buf[at..], &mut response, to_head, MAX_RESPONSE_HEAD)? {
                Some(len) if response.status >= 200 => return Ok((response, at, at + len)),
                Some(len) => {
                    interim += 1;
                    if response.status == 101 || interim > MAX_INTERIM {
                        return Err(Failure::BadResponse(Malformed::Interim));
                    }
                    at += len;
                    // What came with it has not been looked at.
                    looked_at = at;
                }
                None => fill(stream, buf).await?,
            }
        }
    }
}

async fn fill(stream: &mut Stream, buf: &mut Vec<u8>) -> Result<(), Failure> {
    match poll_fn(|cx| stream.poll_fill(cx, buf)).await {
        Ok(n) if n > 0 => Ok(()),
        Ok(_) => Err(Failure::UpstreamClosed),
        Err(e) => Err(closed(&e)),
    }
}
