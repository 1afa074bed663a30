//! One exchange, from a request's head to the last octet of its answer. Read [`run`] first:
//! it is the path of a request, verbs in order.

pub mod answer;
mod attempt;
pub mod client;
mod decision;
mod dispatch;
pub mod forwarded;
mod grpc;
mod hedge;
pub mod judge;
mod open;
pub mod record;
mod relay;
mod tunnel;
mod upload;

#[cfg(test)]
mod panics;

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use l7rp_core::failure::{Failure, Scope};
use l7rp_core::head::{self, Name};
use l7rp_core::http1::encode::values;
use l7rp_core::http1::request::Request;
use l7rp_core::http1::response::Response;
use l7rp_core::limit::Slots;
use l7rp_core::names::{Nanos, Status};
use l7rp_core::trace::{Parent, Sampler, Trace};

use crate::acme;
use crate::config::plan::Action;
use crate::live::{Listener, Route, Snapshot};
use crate::worker::Worker;
use client::Client;
use record::{Record, RequestId};

/// A call's deadline is told to its server, which has the word for so long; and its client has a
/// clock of its own.
const GRACE: Duration = Duration::from_millis(200);

/// A request as it came in.
#[derive(Clone, Copy, Debug)]
pub struct Incoming<'a> {
    /// What `head` was parsed from.
    pub buf: &'a [u8],
    /// The head.
    pub head: &'a Request,
    /// Octets that came with the head: body, and perhaps the next request.
    pub rest: &'a [u8],
    /// When the head was complete.
    pub arrived: Nanos,
}

/// What becomes of the client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Another request may follow.
    KeepAlive,
    /// It is closed: the answer was the last.
    Close,
    /// It is closed after the client had the time to read the answer, although it is still
    /// sending.
    Linger,
    /// It is cut, so that the client notices.
    Abort,
    /// It turns out to speak HTTP/2.
    Http2,
}

/// How an exchange ended.
#[derive(Debug)]
pub struct Done {
    /// What becomes of the connection.
    pub next: Next,
    /// Octets of [`Incoming::rest`] that belonged to this request.
    pub used: usize,
}

/// What an exchange works on.
struct Exchange<'a> {
    worker: &'a Worker,
    snapshot: &'a Snapshot,
    listener: &'a Listener,
    incoming: Incoming<'a>,
    /// It is a call of gRPC.
    is_call: bool,
    /// Until when the client itself wants an answer.
    client_deadline: Nanos,
    /// Its place in its trace, if requests are traced.
    trace: Option<Trace>,
}

/// The buffers for outgoing heads, and the response's head.
#[derive(Debug)]
pub struct Workspace<'a> {
    /// The response's head.
    pub response: &'a mut Response,
    /// The head that goes to the upstream.
    pub to_upstream: &'a mut Vec<u8>,
    /// The head that goes to the client.
    pub to_client: &'a mut Vec<u8>,
}

/// Serves one request, to its end by what is in force at its beginning.
pub async fn run(
    worker: &Worker,
    snapshot: &Snapshot,
    listener: &Listener,
    client: &mut Client,
    incoming: Incoming<'_>,
    mut space: Workspace<'_>,
) -> Done {
    let exchange = Exchange::new(worker, snapshot, listener, incoming);
    let sender = forwarded::sender(listener, client.peer, &incoming);
    let mut record = Record::new(
        worker,
        listener,
        sender.client(client).clone(),
        Some((incoming.buf, incoming.head)),
        incoming.arrived,
        exchange.request_id(&sender),
    );
    record.trace = exchange.trace;
    record.tracer = snapshot.tracer.as_deref();
    record.scheme = client.scheme();
    record.is_http2 = client.is_http2();
    record.identity = client.identity().cloned();
    let served = {
        let mut serve = pin!(exchange.serve(client, &sender, &mut record, &mut space));
        poll_fn(|cx| poll_unharmed(serve.as_mut(), cx)).await
    };
    let done = match served {
        Ok(done) => done,
        Err(failure) => answer::failure(&exchange, client, &mut record, &mut space, failure).await,
    };
    client.idle_since = *record.ended.get_or_insert_with(|| worker.process.clock.now());
    done
}

/// A request's place in its trace; `None`: what the client says of it will do, for nothing is
/// recorded here.
fn begin_trace(sampler: Sampler, incoming: &Incoming<'_>) -> Option<Trace> {
    let mut parents = values(incoming.buf, &incoming.head.fields, Name::Traceparent);
    // Of two that say something else, neither is believed.
    let parent = parents.next().filter(|_| parents.next().is_none()).and_then(Parent::parse);
    let trace = Trace::begin(sampler, parent, fastrand::u128(..), fastrand::u64(..));
    (trace.is_sampled || parent.is_none()).then_some(trace)
}

/// Polls what serves a request. A panic in it is a failure of this one alone: it gives back what
/// it holds as it unwinds, and what it may leave half-done belongs to the exchange, which ends.
/// It is counted where panics are caught.
fn poll_unharmed(
    serve: Pin<&mut impl Future<Output = Result<Done, Failure>>>,
    cx: &mut Context<'_>,
) -> Poll<Result<Done, Failure>> {
    catch_unwind(AssertUnwindSafe(|| serve.poll(cx))).unwrap_or(Poll::Ready(Err(Failure::Internal)))
}

impl<'a> Exchange<'a> {
    fn new(
        worker: &'a Worker,
        snapshot: &'a Snapshot,
        listener: &'a Listener,
        incoming: Incoming<'a>,
    ) -> Self {
        let (is_call, timeout) = judge::call(&incoming);
        let client_deadline =
            timeout.map_or(Nanos::NEVER, |timeout| incoming.arrived.plus(timeout).plus(GRACE));
        let trace =
            snapshot.tracer.as_ref().and_then(|tracer| begin_trace(tracer.sampler(), &incoming));
        Self { worker, snapshot, listener, incoming, is_call, client_deadline, trace }
    }

    async fn serve(
        &self,
        client: &mut Client,
        sender: &forwarded::Sender,
        record: &mut Record<'a>,
        space: &mut Workspace<'_>,
    ) -> Result<Done, Failure> {
        if let Some(probe) = judge::own_probe(self.snapshot, &self.incoming) {
            return answer::probe(self, client, record, space, probe).await;
        }
        if let Some(proof) = acme::answer(&self.worker.process.tokens, self.incoming.path()) {
            return answer::fixed(self, client, record, space, 200, &proof, "text/plain").await;
        }
        self.admit_proof(client)?;
        let sni = client.link.as_ref().and_then(|link| link.sni.as_deref());
        judge::admit_host(self.listener.tls.as_deref(), sni, &self.incoming)?;
        let route = judge::route(self.snapshot, self.listener, &self.incoming)?;
        record.route = Some(route);
        judge::admit_address(route, sender.ip(client.peer))?;
        self.admit_rate(route, client, sender)?;
        let _process = Slot::take(&self.worker.process.slots, Scope::Process)?;
        let _listener = Slot::take(&self.listener.slots, Scope::Listener)?;
        judge::admit_body(route, self.listener, &self.incoming)?;
        let pool = match &route.plan.action {
            Action::Pool(ix) => self.snapshot.pools.get(*ix).ok_or(Failure::Internal)?,
            Action::Redirect { scheme, code } => {
                return answer::redirect(self, client, record, space, scheme, *code).await;
            }
            Action::Respond { status, body, content_type } => {
                return answer::fixed(self, client, record, space, *status, body, content_type)
                    .await;
            }
        };
        record.pool = Some(pool);
        let _pool = Slot::take(&pool.lineage.slots, Scope::Pool)?;
        #[cfg(test)]
        panics::point(self, "before dispatch");
        let deadline = judge::deadline(route, self.incoming.arrived, self.client_deadline);
        let answered =
            dispatch::run(self, client, sender, record, space, route, pool, deadline).await?;
        if space.response.status == 101 {
            return tunnel::run(self, client, record, space, route, answered).await;
        }
        relay::run(self, client, record, space, route, pool, answered, deadline).await
    }

    /// Whether the connection may serve another request, as far as client and process go.
    fn may_keep_alive(&self, client: &Client) -> bool {
        let leaving = self.worker.process.is_draining() || client.door.is_closed();
        self.incoming.head.keep_alive && !leaving
    }

    /// Refuses a client that has proved who it is under another rule than the one in force, or has
    /// not had to: a reload may have changed it since.
    fn admit_proof(&self, client: &Client) -> Result<(), Failure> {
        let Some(now) = &self.listener.tls else { return Ok(()) };
        let then = client.link.as_ref().and_then(|link| link.tls.as_ref());
        let same = then.is_some_and(|then| Arc::ptr_eq(now, then));
        if same || now.accepts_proof_of(then.map(AsRef::as_ref)) {
            return Ok(());
        }
        Err(Failure::Misdirected)
    }

    /// Refuses clients that come too often.
    fn admit_rate(
        &self,
        route: &Route,
        client: &Client,
        sender: &forwarded::Sender,
    ) -> Result<(), Failure> {
        let Some(limiter) = &route.limiter else { return Ok(()) };
        let now = self.incoming.arrived;
        let who = || forwarded::limited_client(&self.incoming, client.peer, sender, limiter.hops);
        limiter.admit(who, now).map_err(|wait| {
            route.stats[self.worker.index].rate_limited.up();
            Failure::RateLimited { wait }
        })
    }

    /// How a response says that it went, as far as its head tells.
    fn status(&self, head: &Response, buf: &[u8]) -> Status {
        let grpc = self.is_call.then(|| grpc::status(buf, &head.fields)).flatten();
        Status { http: head.status, grpc }
    }

    /// What it means that `deadline` is over.
    fn out_of_time(&self, deadline: Nanos) -> Failure {
        if deadline == self.client_deadline {
            Failure::DeadlineExceeded
        } else {
            Failure::TotalTimeout
        }
    }

    /// The earlier of `deadline` and the time that a client has which is waited for; and what it
    /// means to miss it. That it takes too long is then the client's doing, by its own deadline or
    /// by ours.
    fn with_client(&self, deadline: Nanos, own: (Nanos, Failure)) -> (Nanos, Failure) {
        let (at, failure) = own;
        if deadline <= at && deadline == self.client_deadline {
            return (deadline, Failure::DeadlineExceeded);
        }
        (at.min(deadline), failure)
    }

    /// The client's own id if it is well-formed and the client may choose, else a new one.
    fn request_id(&self, sender: &forwarded::Sender) -> RequestId {
        let Incoming { buf, head, .. } = self.incoming;
        let may_choose = self.listener.plan.trusted_proxies.is_empty() || sender.is_trusted();
        match values(buf, &head.fields, Name::XRequestId).next() {
            Some(id) if may_choose && head::request_id_is_well_formed(id) => {
                RequestId::received(id)
            }
            _ => RequestId::random(),
        }
    }
}

impl<'a> Incoming<'a> {
    /// Request target in origin form; `/` where an absolute one has no path.
    pub fn target(&self) -> &'a [u8] {
        let target = self.head.target.of(self.buf);
        if target.is_empty() { b"/" } else { target }
    }

    /// The target without its query.
    pub fn path(&self) -> &'a [u8] {
        let target = self.target();
        &target[..memchr::memchr(b'?', target).unwrap_or(target.len())]
    }
}

/// A slot, given back when dropped.
struct Slot<'a>(&'a Slots);

impl<'a> Slot<'a> {
    fn take(slots: &'a Slots, scope: Scope) -> Result<Self, Failure> {
        if slots.try_enter() { Ok(Self(slots)) } else { Err(Failure::Capacity(scope)) }
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}
