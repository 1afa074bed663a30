//! One try: a connection to one upstream, the request on its way, and the head of a response.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use l7rp_core::attempts::Plan;
use l7rp_core::failure::{Blame, Failure, Malformed};
use l7rp_core::head::{self, Name};
use l7rp_core::http1::Limits;
use l7rp_core::http1::encode::{self, Forwarding, TraceFields, values};
use l7rp_core::http1::request::Method;
use l7rp_core::http1::response::{Response, parse_response};
use l7rp_core::names::{Nanos, Status};

use super::client::Client;
use super::forwarded::Sender;
use super::open::{Which, open};
use super::record::{Record, RequestId};
use super::upload::{Upload, Waits};
use super::{Exchange, Workspace, judge};
use crate::live::Route;
use crate::observe::event::Event;
use crate::observe::tries::Link;
use crate::stream::Stream;
use crate::upstream::connection::Connection;
use crate::upstream::pool::{End, Place, Pool, Upstream};

/// A client that does not go on for so long has its part in what follows.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);
/// How often a client is looked at whose request waits for the upstream.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Interim responses that are passed on for one request; more are an attack.
pub(super) const MAX_INTERIM: u32 = 32;
/// Octets of a response head.
pub(super) const MAX_RESPONSE_HEAD: Limits =
    Limits { max_head: 64 << 10, max_fields: 256, max_target: 0 };

/// Octets that are kept free in front of what is read from an upstream. There is then room for the
/// head as the client gets it, which is some fields longer, right before the body.
const ROOM: usize = 256;

/// A connection on which the head of a response has come.
#[derive(Debug)]
pub struct Lap {
    /// The connection.
    pub connection: Connection,
    /// What it was like.
    pub link: Link,
    /// The response's status.
    pub status: Status,
    /// What was read from the upstream; the head is at `head_at`, the body after it.
    pub buf: Vec<u8>,
    /// Where the response's head begins.
    pub head_at: usize,
    /// Where its body begins.
    pub body_at: usize,
    /// When the head was complete.
    pub came: Nanos,
}

/// Why a try gave none.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    pub(super) failure: Failure,
    /// The connection that it was on.
    pub(super) link: Option<Link>,
    /// The client has its part in it.
    pub(super) excused: bool,
}

impl Fault {
    /// What it says of the upstream.
    pub(super) fn end(self) -> End {
        if self.excused { End::Excused(self.failure) } else { End::Failed(self.failure) }
    }
}

impl From<Failure> for Fault {
    fn from(failure: Failure) -> Self {
        Self { failure, link: None, excused: false }
    }
}

/// What every try of one request has in common.
pub(super) struct Attempt<'t, 's, 'a> {
    pub(super) x: &'t Exchange<'a>,
    pub(super) client: &'t mut Client,
    pub(super) sender: &'t Sender,
    pub(super) space: &'t mut Workspace<'s>,
    pub(super) route: &'a Route,
    pub(super) pool: &'a Pool,
    pub(super) id: RequestId,
    /// The span of the try that is under way.
    pub(super) span: u64,
    pub(super) deadline: Nanos,
    /// The client was told something that cannot be taken back: an interim response other
    /// than 100 and 103.
    pub(super) told: bool,
    /// Interim responses are kept from the client: another try may get to answer it, and must
    /// not do so in the middle of one.
    pub(super) quiet: bool,
}

impl Attempt<'_, '_, '_> {
    /// Sends the request to the upstream of `place` and waits for the head of a response, which
    /// is then in the workspace. `may_reuse`: on a pooled connection, if there is one.
    pub(super) async fn run(
        &mut self,
        record: &RefCell<&mut Record<'_>>,
        place: &mut Place<'_>,
        upload: &mut Upload,
        plan: &Plan<'_>,
        may_reuse: bool,
    ) -> Result<Lap, Fault> {
        let worker = self.x.worker;
        let upstream = place.upstream();
        #[cfg(test)]
        super::panics::point(self.x, "in a try");
        let (mut which, mut first) = (Which::first(may_reuse), may_reuse);
        let mut now = place.began();
        loop {
            let opened = self.open(upstream, upload, which, now).await;
            let (mut connection, reused) = opened.map_err(|failure| {
                let waited = worker.process.clock.now().since(place.began());
                let excused = self.is_excused(failure, upload, waited);
                Fault { failure, link: None, excused }
            })?;
            // One that is there is taken without waiting.
            let began = if reused { now } else { worker.process.clock.now() };
            let link = Link { reused, age: began.since(connection.opened) };
            upload.restart(began);
            self.write_head(upstream);
            let mut buf = Vec::new();
            let mut words = String::new();
            let result =
                self.await_head(place, &mut connection.stream, upload, &mut buf, &mut words).await;
            now = worker.process.clock.now();
            // Not the time that the client has taken to send.
            let took = now.since(upload.progress.max(began));
            match result {
                Ok((head_at, body_at)) => {
                    if upload.is_sent() {
                        place.head_came(took, now);
                        self.learn(took, now);
                    }
                    let status = self.x.status(self.space.response, &buf[head_at..]);
                    return Ok(Lap { connection, link, status, buf, head_at, body_at, came: now });
                }
                Err(failure) => {
                    // The upstream has most likely closed it while it was idle, as it may.
                    let stale = buf.len() <= ROOM && is_stale(failure, reused, first);
                    worker.buffers.give(buf);
                    if failure == Failure::ResponseTimeout {
                        place.waited(took, now);
                        self.learn(took, now);
                    }
                    if !stale || !plan.repeats_stale(failure, upload.is_replayable()) {
                        report(self.x, self.pool, upstream, failure, &words);
                        let excused = self.is_excused(failure, upload, took);
                        return Err(Fault { failure, link: Some(link), excused });
                    }
                    let fault = Fault { failure, link: Some(link), excused: false };
                    self.span = record.borrow_mut().begins_anew(place, fault, now);
                    (which, first) = (Which::again(failure), false);
                }
            }
        }
    }

    /// Whether the client has its part in a failure that would otherwise be the upstream's:
    /// who can make others look bad can take them out. `waited`: since the request's last octet.
    fn is_excused(&self, failure: Failure, upload: &Upload, waited: Duration) -> bool {
        match failure {
            // It has tired of a client that does not go on sending.
            Failure::UpstreamClosed => upload.waits() == Waits::Client && waited >= PATIENCE,
            // It may be waiting for a body that the client does not send unasked.
            Failure::ResponseTimeout => {
                self.x.incoming.head.expects_continue && !upload.is_received()
            }
            // Others have used up the time.
            Failure::TotalTimeout => waited * 2 < self.deadline.since(self.x.incoming.arrived),
            _ => false,
        }
    }

    /// As [`open`], while the client is watched.
    async fn open(
        &mut self,
        upstream: &Arc<Upstream>,
        upload: &Upload,
        which: Which,
        now: Nanos,
    ) -> Result<(Connection, bool), Failure> {
        let mut opening = pin!(open(self.x, self.pool, upstream, self.deadline, which, now));
        let (client, buffers) = (&mut *self.client, &self.x.worker.buffers);
        poll_fn(|cx| match opening.as_mut().poll(cx) {
            Poll::Pending if client.poll_gone(cx, upload.is_received(), buffers) => {
                Poll::Ready(Err(Failure::ClientGone))
            }
            opened => opened,
        })
        .await
    }

    /// Lets the route know how long an upstream has taken, if it hedges by that.
    pub(super) fn learn(&self, took: Duration, now: Nanos) {
        if self.route.retry.as_ref().is_some_and(|rules| rules.hedge_after_percentile > 0.0) {
            self.route.stats[self.x.worker.index].latency.observe(took, now);
        }
    }

    fn write_head(&mut self, upstream: &Upstream) {
        let client = self.sender.client(self.client);
        let from = Origin {
            scheme: self.client.scheme(),
            peer: &self.client.peer_text,
            client,
            sender: self.sender,
            identity: self.client.identity().map(|identity| &**identity),
            span: self.span,
        };
        let out = &mut *self.space.to_upstream;
        write_head(out, self.x, self.pool, self.route, upstream, from, &self.id);
    }

    /// Sends while it waits, passes interim responses on, and gives where the final head and
    /// the body after it begin in `buf`.
    async fn await_head(
        &mut self,
        place: &mut Place<'_>,
        stream: &mut Stream,
        upload: &mut Upload,
        buf: &mut Vec<u8>,
        words: &mut String,
    ) -> Result<(usize, usize), Failure> {
        let to_head = self.x.incoming.head.method == Method::Head;
        let (mut at, mut looked_at) = (ROOM, ROOM);
        let mut interim = 0;
        loop {
            // Only the end of a line can change what is known of a head, so that one in many
            // pieces costs no more than one look a line.
            let unseen = buf.get(looked_at..).unwrap_or_default();
            let news = if looked_at == at {
                !unseen.is_empty()
            } else {
                memchr::memchr(b'\n', unseen).is_some()
            };
            if !news && buf.len() < at + MAX_RESPONSE_HEAD.max_head {
                looked_at = buf.len().max(ROOM);
                self.read_more(place, stream, upload, buf, interim > 0).await?;
                continue;
            }
            looked_at = buf.len();
            let parsed =
                parse_response(&buf[at..], self.space.response, to_head, MAX_RESPONSE_HEAD)
                    .inspect_err(|f| *words = describe(self.space.response, *f, &buf[at..]))?;
            match (parsed, self.space.response.status) {
                (Some(len), 200..) => return Ok((at, at + len)),
                (Some(len), 101) if self.accepts_offer(&buf[at..]) => return Ok((at, at + len)),
                (Some(len), status) => {
                    interim += 1;
                    if status == 101 || interim > MAX_INTERIM {
                        return Err(Failure::BadResponse(Malformed::Interim));
                    }
                    self.pass_interim(&buf[at..at + len]).await?;
                    at += len;
                    looked_at = at;
                }
                (None, _) => self.read_more(place, stream, upload, buf, interim > 0).await?,
            }
        }
    }

    /// Whether a 101 goes on with a protocol that the client has offered.
    fn accepts_offer(&self, response: &[u8]) -> bool {
        let incoming = &self.x.incoming;
        let offer = incoming.head.upgrade.of(incoming.buf);
        let mut chosen = values(response, &self.space.response.fields, Name::Upgrade);
        matches!((chosen.next(), chosen.next()), (Some(protocol), None)
            if !protocol.is_empty() && head::list_has(offer, protocol))
    }

    async fn pass_interim(&mut self, head: &[u8]) -> Result<(), Failure> {
        if self.quiet {
            return Ok(());
        }
        // Neither promises anything that another response could not keep.
        self.told |= !matches!(self.space.response.status, 100 | 103);
        if self.x.incoming.head.is_http10 {
            return Ok(());
        }
        let out = &mut *self.space.to_client;
        out.clear();
        encode::interim(out, head, self.space.response);
        let write = self.x.listener.plan.timeouts.write;
        let until = self.x.worker.process.clock.now().plus(write).min(self.deadline);
        self.client.write_all(out, &[], until).await
    }

    /// Waits for octets from the upstream; meanwhile the request goes out and the client is
    /// watched.
    async fn read_more(
        &mut self,
        place: &mut Place<'_>,
        stream: &mut Stream,
        upload: &mut Upload,
        buf: &mut Vec<u8>,
        was_told: bool,
    ) -> Result<(), Failure> {
        let Self { x, client, space, pool, route, deadline, .. } = self;
        let worker = x.worker;
        poll_fn(|cx| {
            let up = upload.poll(cx, worker, client, stream, space.to_upstream, x.incoming.rest);
            if let Poll::Ready(Err(failure)) = up {
                return Poll::Ready(Err(failure));
            }
            if let Poll::Ready(result) = poll_response(cx, x, stream, buf) {
                return Poll::Ready(result);
            }
            if up.is_ready()
                && let Poll::Ready(failure) = client.poll_watch(cx, &worker.buffers)
            {
                return Poll::Ready(Err(failure));
            }
            if upload.waits() == Waits::Upstream && client.poll_lost(cx) {
                return Poll::Ready(Err(Failure::ClientGone));
            }
            let (at, failure) = next_deadline(x, pool, route, upload, was_told, *deadline);
            if upload.waits() == Waits::Upstream && look_again(x, client, cx, at) {
                return Poll::Pending;
            }
            if upload.waits() == Waits::Client
                && place.waits_until() < at
                && client.timer.poll(cx, place.waits_until()).is_ready()
            {
                place.let_off();
            }
            client.timer.poll(cx, at).map(|()| Err(failure))
        })
        .await
    }
}

/// Has the task woken soon, if that is before `at`: a client whose request waits unread can break off
/// without anybody being woken for it.
pub(super) fn look_again(
    x: &Exchange<'_>,
    client: &mut Client,
    cx: &mut Context<'_>,
    at: Nanos,
) -> bool {
    let soon = x.worker.process.clock.now().plus(LOOK_EVERY);
    soon < at && client.timer.poll(cx, soon).is_pending()
}

fn poll_response(
    cx: &mut Context<'_>,
    x: &Exchange<'_>,
    stream: &mut Stream,
    buf: &mut Vec<u8>,
) -> Poll<Result<(), Failure>> {
    // No buffer is held while nothing has come.
    if buf.capacity() == 0 {
        match stream.poll_readable(cx) {
            Poll::Ready(Ok(())) => {
                *buf = x.worker.buffers.small();
                buf.resize(ROOM, 0);
            }
            Poll::Ready(Err(e)) => return Poll::Ready(Err(closed(&e))),
            Poll::Pending => return Poll::Pending,
        }
    }
    match stream.poll_fill(cx, buf) {
        Poll::Ready(Ok(n)) if n > 0 => Poll::Ready(Ok(())),
        Poll::Ready(Ok(_)) => Poll::Ready(Err(Failure::UpstreamClosed)),
        Poll::Ready(Err(e)) => Poll::Ready(Err(closed(&e))),
        Poll::Pending => Poll::Pending,
    }
}

/// What an error on reading means. The far end of a pipe tells if nothing was done.
pub(super) fn closed(e: &std::io::Error) -> Failure {
    match e.kind() {
        std::io::ErrorKind::ConnectionRefused => Failure::StreamRefused { gone: false },
        std::io::ErrorKind::ConnectionAborted => Failure::StreamRefused { gone: true },
        _ => Failure::UpstreamClosed,
    }
}

/// Whether a failure is what a connection comes to that was closed while it was idle; or says that
/// nothing was done, for the first time.
pub(super) fn is_stale(failure: Failure, reused: bool, first: bool) -> bool {
    match failure {
        Failure::UpstreamClosed => reused,
        Failure::StreamRefused { .. } => first,
        _ => false,
    }
}

/// Who sent a request, in the forms that an upstream is told.
#[derive(Clone, Copy)]
pub(super) struct Origin<'t> {
    /// The scheme that it was asked by.
    pub(super) scheme: &'static str,
    pub(super) peer: &'t str,
    pub(super) client: &'t str,
    pub(super) sender: &'t Sender,
    /// By its certificate.
    pub(super) identity: Option<&'t str>,
    /// The span that it is sent from, if it is traced.
    pub(super) span: u64,
}

/// Writes the request's head as `upstream` gets it.
pub(super) fn write_head(
    out: &mut Vec<u8>,
    x: &Exchange<'_>,
    pool: &Pool,
    route: &Route,
    upstream: &Upstream,
    from: Origin<'_>,
    id: &RequestId,
) {
    let incoming = &x.incoming;
    let (buf, head) = (incoming.buf, incoming.head);
    let host = judge::upstream_host(&pool.plan, incoming, &upstream.authority);
    let target = judge::rewritten(route, incoming.target());
    let parts = [upstream.base_path.as_bytes(), target.0, target.1, target.2];
    // `*` has no path to put anything in front of.
    let parts = if incoming.target() == b"*" { &[&b"*"[..]][..] } else { &parts };
    let traceparent = x.trace.map(|trace| trace.traceparent(from.span));
    let forwarding = Forwarding {
        peer: from.peer,
        client: from.client,
        proto: from.scheme,
        peer_is_trusted: from.sender.is_trusted(),
        request_id: id.as_bytes(),
        identity: x.listener.identity_header().zip(from.identity),
        trace: traceparent.as_ref().map(|traceparent| TraceFields {
            traceparent,
            keeps_state: x.trace.is_some_and(|trace| trace.parent.is_some()),
        }),
    };
    out.clear();
    encode::request(out, buf, head, parts, host, &forwarding, &route.request_changes);
}

/// Writes an event, unless one about this upstream was written within the last second.
pub(super) fn report(
    x: &Exchange<'_>,
    pool: &Pool,
    upstream: &Upstream,
    failure: Failure,
    words: &str,
) {
    let process = &x.worker.process;
    let by_us = failure == Failure::LocalShortage;
    let about = failure.meaning().blame == Blame::Upstream || by_us;
    if about && upstream.may_report(process.clock.now()) {
        process.events.emit(&Event::UpstreamError {
            pool: pool.plan.name.clone(),
            upstream: upstream.url.clone(),
            reason: failure.meaning().reason,
            error: if words.is_empty() { failure.meaning().text } else { words }.to_owned(),
            note: "further ones within a second are not written; the access log has all",
        });
    }
}

/// What was wrong with a response's head, for the event: the fields that contradict one
/// another, the limit, or else what stands on its first line.
fn describe(response: &Response, failure: Failure, head: &[u8]) -> String {
    let Limits { max_head, max_fields, .. } = MAX_RESPONSE_HEAD;
    match failure {
        Failure::ResponseHeadTooLarge => {
            format!("the response's head is over {max_head} octets or {max_fields} fields")
        }
        Failure::BadResponse(
            Malformed::ContentLength | Malformed::TransferEncoding | Malformed::LengthAndChunked,
        ) => {
            let framing =
                |f: &&head::Field| matches!(f.id, Name::ContentLength | Name::TransferEncoding);
            let fields = response.fields.iter().filter(framing).take(4);
            let words: Vec<_> = fields
                .map(|f| {
                    let value = f.value.of(head);
                    let value = &value[..value.len().min(64)];
                    format!("{}: {}", f.name.of(head).escape_ascii(), value.escape_ascii())
                })
                .collect();
            format!("{}: {}", failure.meaning().reason, words.join(", "))
        }
        _ => {
            let line = head.split(|&b| b == b'\n').next().unwrap_or_default().trim_ascii_end();
            let most = &line[..line.len().min(64)];
            format!("{}: it begins with `{}`", failure.meaning().reason, most.escape_ascii())
        }
    }
}

/// The next deadline before the response's head, and what it means to miss it. `was_told`: an
/// interim response has been passed on.
fn next_deadline(
    x: &Exchange<'_>,
    pool: &Pool,
    route: &Route,
    upload: &Upload,
    was_told: bool,
    total: Nanos,
) -> (Nanos, Failure) {
    // A client that asked whether to send waits for the upstream's word, not we for its body.
    let asked = x.incoming.head.expects_continue && !was_told && upload.content() == 0;
    match upload.waits() {
        Waits::Client if !asked => {
            // A call speaks when it has something to say, as what is in a tunnel does.
            let idle = route.plan.tunnel_idle_timeout;
            let patience = if x.is_call { idle } else { x.listener.plan.timeouts.read };
            x.with_client(total, upload.client_deadline(patience))
        }
        _ => {
            let at = upload.progress.plus(pool.plan.response_header_timeout);
            if total <= at { (total, x.out_of_time(total)) } else { (at, Failure::ResponseTimeout) }
        }
    }
}
