//! Tries: which upstream, and which after it, until there is an answer for the client.

use std::cell::RefCell;
use std::future::poll_fn;
use std::task::Poll;

use l7rp_core::attempts::{Next, Outcome, Plan, Request, Situation, Stop};
use l7rp_core::failure::{Blame, Failure};
use l7rp_core::http1::body::Body;
use l7rp_core::http1::response::Response;
use l7rp_core::names::{Nanos, Status};
use l7rp_core::pick::Tried;

use super::attempt::{Attempt, Lap};
use super::client::Client;
use super::forwarded::Sender;
use super::record::Record;
use super::upload::Upload;
use super::{Exchange, Workspace, grpc, hedge, judge, relay};
use crate::live::Route;
use crate::observe::tries;
use crate::upstream::pool::{End, Place, Pool, Wanted};

/// The answer of an upstream, as far as its head.
#[derive(Debug)]
pub struct Answered<'a> {
    /// The place taken there.
    pub place: Place<'a>,
    /// The connection, and what was read from it. The head is parsed in the workspace.
    pub lap: Lap,
    /// The request, which may still be on its way.
    pub upload: Upload,
}

/// An answer that may be replaced by a better one.
struct Given<'a> {
    place: Place<'a>,
    lap: Lap,
    /// The whole request went out on this connection.
    sent: bool,
}

/// One that is kept while others are asked.
struct Spare<'a> {
    given: Given<'a>,
    /// Its parsed head; the workspace has that of another.
    response: Response,
}

/// Tries upstreams of `pool` until one gives what the client is to have.
#[expect(
    clippy::too_many_arguments,
    reason = "one caller; a struct for it would hide what is used"
)]
pub async fn run<'a>(
    x: &Exchange<'a>,
    client: &mut Client,
    sender: &Sender,
    record: &mut Record<'a>,
    space: &mut Workspace<'_>,
    route: &'a Route,
    pool: &'a Pool,
    deadline: Nanos,
) -> Result<Answered<'a>, Failure> {
    let tie = judge::tie(x.snapshot, &pool.plan, &x.incoming, sender.client(client));
    let key = judge::key(tie);
    let method = x.incoming.head.method_text.of(x.incoming.buf);
    let keep = match (&route.retry, &route.plan.retry) {
        (Some(rules), Some(retry)) if rules.may_retry(method, x.is_call) => {
            retry.max_replayable_body as u64
        }
        _ => 0,
    };
    let (limits, dropped) = (&x.listener.plan.limits, route.dropped.as_ref());
    let mut upload =
        Upload::new(&x.incoming, limits, judge::max_body(route, x.listener), keep, dropped)?;
    record.bytes_in = upload.content();
    let mut plan = Plan::new(route.retry.as_ref(), request(x, &upload), deadline);
    if plan.may_cost() {
        pool.budget.deposit();
    }
    let id = record.id;
    let (told, quiet) = (false, false);
    let attempt =
        Attempt { x, client, sender, space, route, pool, id, span: 0, deadline, told, quiet };
    let tried = Tried::new();
    let mut all = Tries { attempt, record, key, tried, may_reuse: true, given: None, spare: None };
    let mut result = all.run(&mut plan, &mut upload).await;
    let Tries { attempt, record, spare, .. } = all;
    record.bytes_in = upload.content();
    if let Some(spare) = spare {
        match result {
            // Better an upstream's own words than ours, while there is a client to read them.
            Err(failure) if failure.meaning().blame != Blame::Client => {
                let Spare { mut given, response } = *spare;
                // The connection of the last try may have got less or more of the request.
                upload.ended(given.sent);
                given.lap.came = x.worker.process.clock.now();
                *attempt.space.response = response;
                result = Ok(given);
            }
            _ => put_back(x, pool, *spare),
        }
    }
    match result {
        Ok(Given { place, lap, .. }) => {
            record.uses(&place);
            Ok(Answered { place, lap, upload })
        }
        Err(failure) => {
            upload.finish(x.worker, attempt.client);
            Err(failure)
        }
    }
}

fn request<'a>(x: &Exchange<'a>, upload: &Upload) -> Request<'a> {
    let head = x.incoming.head;
    Request {
        method: head.method_text.of(x.incoming.buf),
        idempotent: head.method.is_idempotent(),
        whole: upload.at_once(x.incoming.rest).is_some() && judge::may_race(head),
        grpc: x.is_call,
    }
}

/// The tries of one request.
struct Tries<'t, 's, 'a> {
    attempt: Attempt<'t, 's, 'a>,
    record: &'t mut Record<'a>,
    key: u64,
    tried: Tried,
    /// The try may use a pooled connection.
    may_reuse: bool,
    /// The answer of the try that has just ended; its parsed head is in the workspace.
    given: Option<Given<'a>>,
    /// The last answer that was not good enough.
    spare: Option<Box<Spare<'a>>>,
}

impl<'a> Tries<'_, '_, 'a> {
    async fn run(
        &mut self,
        plan: &mut Plan<'a>,
        upload: &mut Upload,
    ) -> Result<Given<'a>, Failure> {
        let process = &self.attempt.x.worker.process;
        let mut last = None;
        let mut again = false;
        // Nothing was waited for so far.
        let mut now = self.attempt.x.incoming.arrived;
        loop {
            if !plan.may_begin(now) {
                self.record.stop = last.map(|_| Stop::Deadline);
                let out_of_time = self.attempt.x.out_of_time(plan.deadline());
                return Err(last.unwrap_or(out_of_time));
            }
            // Once for each retry: one that is refused there does not go round and round.
            let anywhere = std::mem::take(&mut again);
            let place = self.take(anywhere, now).map_err(|none| self.nobody(last, none))?;
            let before = self.record.counted();
            let result = self.one(place, plan, upload).await;
            let outcome;
            (now, outcome) = match result {
                Ok((came, status)) => {
                    let stay_away = plan.may_retry() && self.asks_to_stay_away();
                    (came, Outcome::Answered { status, stay_away })
                }
                Err(failure) => (process.clock.now(), Outcome::Failed(failure)),
            };
            let situation = Situation {
                whole: upload.is_replayable(),
                replayable: upload.is_kept(),
                told: self.attempt.told,
                draining: process.is_draining(),
                tries: (self.record.counted() - before) as u32,
            };
            let next = self.affordable(plan.after(outcome, now, situation, fastrand::u64(..)), now);
            if next == Next::Give && self.record.stop.is_none() {
                self.record.stop = plan.stop();
            }
            if before > 0 {
                self.count_retry(next == Next::Give && result.is_ok());
            }
            let Next::Retry(at) = next else {
                match (next, result) {
                    (Next::Elsewhere, Err(failure)) => last = Some(failure),
                    (_, Err(failure)) => return Err(failure),
                    (_, Ok(_)) => return self.given.take().ok_or(Failure::Internal),
                }
                continue;
            };
            match result {
                Ok(_) => self.spare(now),
                Err(failure) => last = Some(failure),
            }
            self.pause(upload, at).await.inspect_err(|_| self.record.stop = Some(Stop::Final))?;
            if process.is_draining() {
                self.record.stop = Some(Stop::Draining);
                return Err(last.unwrap_or(Failure::Draining));
            }
            now = process.clock.now();
            again = true;
        }
    }

    /// What is to be done next, if the pool's budget allows it.
    fn affordable(&mut self, next: Next, now: Nanos) -> Next {
        if matches!(next, Next::Retry(_)) && !self.attempt.pool.may_try_again(now) {
            self.record.stop = Some(Stop::Budget);
            return Next::Give;
        }
        next
    }

    /// There is nobody to try: what it comes to, after `last` or for `none`.
    fn nobody(&mut self, last: Option<Failure>, none: Failure) -> Failure {
        let (pool, now) = (self.attempt.pool, self.attempt.x.worker.process.clock.now());
        self.record.refused = pool.refusals(&self.tried, now);
        let had_one = last.is_some() || self.spare.is_some();
        self.record.stop = had_one.then_some(Stop::NoUpstream);
        if had_one && self.record.refused.is_empty() {
            // It was the only one, and may not be asked again.
            self.record.refused = pool.refusals(&Tried::new(), now);
        }
        last.unwrap_or(none)
    }

    /// A place at an upstream that was not tried yet. `anywhere`: or at one that was.
    fn take(&mut self, anywhere: bool, now: Nanos) -> Result<Place<'a>, Failure> {
        let pool = self.attempt.pool;
        let worker = self.attempt.x.worker;
        let wanted =
            Wanted { tried: &self.tried, key: self.key, only_closed: false, worker: worker.index };
        let none = Tried::new();
        let taken = match pool.take(wanted, now, fastrand::u64(..)) {
            Err(_) if anywhere => {
                // Why it goes where it was already.
                self.record.refused = pool.refusals(&self.tried, now);
                pool.take(Wanted { tried: &none, ..wanted }, now, fastrand::u64(..))
            }
            taken => taken,
        };
        let place = taken?;
        // What has just failed there is not to be met again on a connection of the same age.
        self.may_reuse = !self.tried.contains(place.ix());
        self.tried.insert(place.ix());
        Ok(place)
    }

    /// One try, or two that race: when an answer came, and what it says of how it went.
    async fn one(
        &mut self,
        mut place: Place<'a>,
        plan: &Plan<'a>,
        upload: &mut Upload,
    ) -> Result<(Nanos, Status), Failure> {
        self.attempt.span = self.record.begins(&mut place, false);
        let x = self.attempt.x;
        let hedge_at = if place.must_be_judged() {
            Nanos::NEVER
        } else {
            plan.hedge_at(place.began(), self.percentile())
        };
        self.attempt.quiet = hedge_at != Nanos::NEVER;
        let (mut place, ended) = if hedge_at == Nanos::NEVER {
            let record = RefCell::new(&mut *self.record);
            let ended = self.attempt.run(&record, &mut place, upload, plan, self.may_reuse).await;
            (place, ended)
        } else {
            let Self { attempt, record, key, tried, .. } = self;
            // Boxed, so that connections that never race do not hold the room for it.
            Box::pin(hedge::race(attempt, record, place, upload, plan, hedge_at, *key, tried)).await
        };
        match ended {
            Ok(lap) => {
                self.record.came_on(&place, lap.link);
                let came = (lap.came, lap.status);
                self.given = Some(Given { place, lap, sent: upload.is_sent() });
                Ok(came)
            }
            Err(fault) => {
                let now = x.worker.process.clock.now();
                let took = place.settle(fault.end(), now);
                self.record.uses(&place);
                self.record.failed(&place, fault, took);
                Err(fault.failure)
            }
        }
    }

    fn percentile(&self) -> Option<std::time::Duration> {
        let rules = self.attempt.route.retry.as_ref()?;
        let latency = &self.attempt.route.stats[self.attempt.x.worker.index].latency;
        (rules.hedge_after_percentile > 0.0)
            .then(|| latency.read(rules.hedge_after_percentile))
            .flatten()
    }

    fn count_retry(&self, is_answer: bool) {
        // One that another try was wanted for has not helped, although the client gets it.
        let helped = is_answer && self.record.stop.is_none();
        let stats = &self.attempt.route.stats[self.attempt.x.worker.index];
        if helped { stats.retries_succeeded.up() } else { stats.retries_failed.up() }
    }

    /// Whether the answer asks to be asked again only later.
    fn asks_to_stay_away(&self) -> bool {
        let Some(Given { lap, .. }) = &self.given else { return false };
        let (head, fields) = (&lap.buf[lap.head_at..], &self.attempt.space.response.fields);
        if lap.status.grpc.is_some() && grpc::pushes_back(head, fields) {
            return true;
        }
        fields.iter().any(|field| {
            field.name.of(head).eq_ignore_ascii_case(b"retry-after") && field.value.of(head) != b"0"
        })
    }

    /// Keeps the answer in case that no better one comes.
    fn spare(&mut self, now: Nanos) {
        let Some(mut given) = self.given.take() else { return };
        // What it is worth is known: its status.
        let took = given.place.settle(End::Answered(given.lap.status), now);
        self.record.ends(&given.place, tries::End::Answered(given.lap.status.http), took);
        given.place.rise();
        let response = std::mem::take(&mut *self.attempt.space.response);
        if let Some(old) = self.spare.replace(Box::new(Spare { given, response })) {
            put_back(self.attempt.x, self.attempt.pool, *old);
        }
    }

    /// Waits for the time of the next try, the client's leaving, or the begin of a drain.
    async fn pause(&mut self, upload: &Upload, until: Nanos) -> Result<(), Failure> {
        let worker = self.attempt.x.worker;
        let client = &mut *self.attempt.client;
        poll_fn(|cx| {
            if client.poll_gone(cx, upload.is_received(), &worker.buffers) {
                return Poll::Ready(Err(Failure::ClientGone));
            }
            if worker.process.is_draining() {
                return Poll::Ready(Ok(()));
            }
            client.timer.poll(cx, until).map(Ok)
        })
        .await
    }
}

/// Keeps the connection of an answer that nobody wants, if the answer is whole already.
fn put_back(x: &Exchange<'_>, pool: &Pool, spare: Spare<'_>) {
    let Spare { given: Given { lap, sent, .. }, response } = spare;
    let mut body = Body::new(response.framing, 0);
    let rest = &lap.buf[lap.body_at..];
    let whole = body.scan(rest).is_ok_and(|seen| seen.done && seen.used == rest.len());
    if whole && sent && response.keep_alive {
        relay::keep(x, pool, &response, lap.connection, x.worker.process.clock.now());
    }
    x.worker.buffers.give(lap.buf);
}
