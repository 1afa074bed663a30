//! Tries: which upstream, on which connection, until one gives the head of a response.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use l7rp_core::attempts::{self, Next};
use l7rp_core::failure::{Blame, Failure, Malformed};
use l7rp_core::head::{self, Name};
use l7rp_core::http1::Limits;
use l7rp_core::http1::encode::{self, Forwarding, values};
use l7rp_core::http1::request::Method;
use l7rp_core::http1::response::parse_response;
use l7rp_core::names::Nanos;
use l7rp_core::pick::{Tried, key_of};

use super::client::Client;
use super::forwarded::Sender;
use super::record::{Record, Try};
use super::upload::{Upload, Waits};
use super::{Exchange, Workspace};
use crate::config::plan::{Algorithm, HashKey, HostHeader};
use crate::live::Route;
use crate::observe::event::Event;
use crate::stream::Stream;
use crate::upstream::connect::connect;
use crate::upstream::connection::Connection;
use crate::upstream::pool::{Place, Pool, Upstream};

/// Interim responses that are passed on for one request; more are an attack.
const MAX_INTERIM: u32 = 32;
/// Octets of a response head.
const MAX_RESPONSE_HEAD: Limits = Limits { max_head: 64 << 10, max_fields: 256, max_target: 0 };

/// An upstream that has sent the head of its response.
#[derive(Debug)]
pub struct Answered<'a> {
    /// The place taken there.
    pub place: Place<'a>,
    /// The connection.
    pub connection: Connection,
    /// The request, which may still be on its way.
    pub upload: Upload,
    /// What was read from the upstream; the head is at `head_at`, the body after it.
    pub buf: Vec<u8>,
    /// Where the response's head begins.
    pub head_at: usize,
    /// Where its body begins.
    pub body_at: usize,
}

/// Tries upstreams of `pool` until one answers.
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
    let mut upload = Upload::new(&x.incoming, &x.listener.plan.limits, x.max_body(route))?;
    record.bytes_in = upload.content();
    let key = hash_key(x, pool, client, sender);
    let mut tried = Tried::new();
    let mut connect_timeouts = 0;
    let mut last = None;
    loop {
        let now = x.worker.process.clock.now();
        if now >= deadline {
            return Err(Failure::TotalTimeout);
        }
        let (ix, upstream, place) =
            pool.take(&tried, key, now, fastrand::u64(..)).map_err(|none| last.unwrap_or(none))?;
        tried.insert(ix);
        record.attempts += 1;
        record.current = Some(Try { upstream, began: now, reused: false });
        let words = String::new();
        let mut attempt =
            Attempt { x, client, sender, space, route, pool, upstream, deadline, words };
        match attempt.run(record, &mut upload).await {
            Ok((connection, buf, head_at, body_at)) => {
                return Ok(Answered { place, connection, upload, buf, head_at, body_at });
            }
            Err(failure) => {
                let now = x.worker.process.clock.now();
                record.try_failed(failure, now);
                record.bytes_in = upload.content();
                connect_timeouts += u32::from(failure == Failure::ConnectTimeout);
                let request = attempts::Request { connect_timeouts, ..describe(x, &upload) };
                if attempts::after(failure, request, false) != Next::Another {
                    upload.finish(x.worker, attempt.client);
                    return Err(failure);
                }
                last = Some(failure);
            }
        }
    }
}

fn describe(x: &Exchange<'_>, upload: &Upload) -> attempts::Request {
    attempts::Request {
        idempotent: x.incoming.head.method.is_idempotent(),
        replayable: upload.is_replayable(),
        connect_timeouts: 0,
    }
}

/// The hash of what ties this request to an upstream, for the algorithms that ask for it.
fn hash_key(x: &Exchange<'_>, pool: &Pool, client: &Client, sender: &Sender) -> u64 {
    let buf = x.incoming.buf;
    let fields = &x.incoming.head.fields;
    let by = match pool.plan.selector.algorithm {
        Algorithm::ConsistentHashBounded => &pool.plan.selector.hash_key,
        Algorithm::IpHash => &HashKey::ClientIp,
        _ => return 0,
    };
    let named = |f: &head::Field, name: &str| f.name.of(buf).eq_ignore_ascii_case(name.as_bytes());
    let value = match by {
        HashKey::Header(name) => fields.iter().find(|f| named(f, name)).map(|f| f.value.of(buf)),
        HashKey::Cookie(name) => fields
            .iter()
            .filter(|f| named(f, "cookie"))
            .find_map(|f| head::cookie(f.value.of(buf), name.as_bytes())),
        HashKey::ClientIp => None,
    };
    key_of(value.unwrap_or_else(|| sender.client(client).as_bytes()))
}

/// One try at one upstream.
struct Attempt<'t, 's, 'a> {
    x: &'t Exchange<'a>,
    client: &'t mut Client,
    sender: &'t Sender,
    space: &'t mut Workspace<'s>,
    route: &'a Route,
    pool: &'a Pool,
    upstream: &'a Arc<Upstream>,
    deadline: Nanos,
    /// More about a bad response, for the event.
    words: String,
}

impl Attempt<'_, '_, '_> {
    /// Sends the request and waits for the head of a response. Gives the connection, what was
    /// read from it, and where head and body begin.
    async fn run(
        &mut self,
        record: &mut Record<'_>,
        upload: &mut Upload,
    ) -> Result<(Connection, Vec<u8>, usize, usize), Failure> {
        let worker = self.x.worker;
        let mut may_reuse = true;
        loop {
            let (mut connection, reused) = self.connection(may_reuse).await?;
            if let Some(current) = &mut record.current {
                current.reused = reused;
            }
            let began = worker.process.clock.now();
            upload.restart(began);
            self.write_head(record);
            let mut buf = Vec::new();
            let result = self.await_head(&mut connection.stream, upload, &mut buf).await;
            let now = worker.process.clock.now();
            match result {
                Ok((head_at, body_at)) => {
                    self.pool.observe_latency(self.upstream, now, now.since(began));
                    return Ok((connection, buf, head_at, body_at));
                }
                Err(failure) => {
                    let stale = reused && buf.is_empty();
                    worker.buffers.give(buf);
                    if failure == Failure::ResponseTimeout {
                        self.pool.observe_latency(self.upstream, now, now.since(began));
                    }
                    let request = describe(self.x, upload);
                    if attempts::after(failure, request, stale) != Next::SameAnew {
                        self.report(failure, &self.words);
                        return Err(failure);
                    }
                    may_reuse = false;
                }
            }
        }
    }

    /// A pooled connection, or else a new one.
    async fn connection(&self, may_reuse: bool) -> Result<(Connection, bool), Failure> {
        let worker = self.x.worker;
        let now = worker.process.clock.now();
        if may_reuse {
            let head = self.x.incoming.head;
            let only_fresh = !head.method.is_idempotent();
            if let Some(pooled) = worker.idle.take(self.upstream, now, only_fresh, worker.index) {
                return Ok((pooled, true));
            }
        }
        let left = self.deadline.since(now);
        let limit = self.pool.plan.connect_timeout.min(left);
        match connect(self.upstream, limit).await {
            Ok(stream) => Ok((Connection::new(stream, self.upstream, worker.index), false)),
            Err((Failure::ConnectTimeout, _)) if limit == left => Err(Failure::TotalTimeout),
            Err((failure, words)) => {
                self.upstream.ask_again();
                self.report(failure, &words);
                Err(failure)
            }
        }
    }

    fn write_head(&mut self, record: &Record<'_>) {
        let incoming = &self.x.incoming;
        let (buf, head) = (incoming.buf, incoming.head);
        let host = match &self.pool.plan.host_header {
            // HTTP/1.0 may come without a Host; the upstream must not.
            HostHeader::Preserve if !head.host.of(buf).is_empty() => head.host.of(buf),
            HostHeader::Preserve | HostHeader::Upstream => self.upstream.plan.authority.as_bytes(),
            HostHeader::Literal(host) => host.as_bytes(),
        };
        let target = rewritten(self.route, incoming.target());
        let parts = [self.upstream.plan.base_path.as_bytes(), target.0, target.1, target.2];
        // `*` has no path to put anything in front of.
        let parts = if incoming.target() == b"*" { &[&b"*"[..]][..] } else { &parts };
        let forwarding = Forwarding {
            peer: &self.client.peer_text,
            client: self.sender.client(self.client),
            proto: "http",
            peer_is_trusted: self.sender.is_trusted(),
            request_id: record.id.as_bytes(),
        };
        self.space.to_upstream.clear();
        encode::request(
            self.space.to_upstream,
            buf,
            head,
            parts,
            host,
            &forwarding,
            &self.route.request_changes,
        );
    }

    /// Sends while it waits, passes interim responses on, and gives where the final head and
    /// the body after it begin in `buf`.
    async fn await_head(
        &mut self,
        stream: &mut Stream,
        upload: &mut Upload,
        buf: &mut Vec<u8>,
    ) -> Result<(usize, usize), Failure> {
        let to_head = self.x.incoming.head.method == Method::Head;
        let (mut at, mut looked_at) = (0, 0);
        let mut interim = 0;
        loop {
            // Only the end of a line can change what is known of a head, so that one in many
            // pieces costs no more than one look a line.
            let news = looked_at == at || memchr::memchr(b'\n', &buf[looked_at..]).is_some();
            if !news && buf.len() - at < MAX_RESPONSE_HEAD.max_head {
                looked_at = buf.len();
                self.read_more(stream, upload, buf, interim > 0).await?;
                continue;
            }
            looked_at = buf.len();
            let parsed =
                parse_response(&buf[at..], self.space.response, to_head, MAX_RESPONSE_HEAD)
                    .inspect_err(|failure| self.words = self.describe(*failure, &buf[at..]))?;
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
                (None, _) => self.read_more(stream, upload, buf, interim > 0).await?,
            }
        }
    }

    /// What was wrong with a response's head, for the event: the fields that contradict one
    /// another, or the limit.
    fn describe(&self, failure: Failure, head: &[u8]) -> String {
        let Limits { max_head, max_fields, .. } = MAX_RESPONSE_HEAD;
        match failure {
            Failure::ResponseHeadTooLarge => {
                format!("the response's head is over {max_head} octets or {max_fields} fields")
            }
            Failure::BadResponse(
                Malformed::ContentLength
                | Malformed::TransferEncoding
                | Malformed::LengthAndChunked,
            ) => {
                let framing =
                    |f: &&head::Field| matches!(f.id, Name::ContentLength | Name::TransferEncoding);
                let fields = self.space.response.fields.iter().filter(framing).take(4);
                let words: Vec<_> = fields
                    .map(|f| {
                        let value = f.value.of(head);
                        let value = &value[..value.len().min(64)];
                        format!("{}: {}", f.name.of(head).escape_ascii(), value.escape_ascii())
                    })
                    .collect();
                format!("{}: {}", failure.meaning().reason, words.join(", "))
            }
            _ => failure.meaning().reason.to_owned(),
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
        if self.x.incoming.head.is_http10 {
            return Ok(());
        }
        let out = &mut *self.space.to_client;
        out.clear();
        encode::interim(out, head, self.space.response);
        let write = self.x.listener.plan.timeouts.write;
        let until = self.x.worker.process.clock.now().plus(write);
        self.client.write_all(out, &[], until).await
    }

    /// Waits for octets from the upstream; meanwhile the request goes out and the client is
    /// watched.
    async fn read_more(
        &mut self,
        stream: &mut Stream,
        upload: &mut Upload,
        buf: &mut Vec<u8>,
        was_told: bool,
    ) -> Result<(), Failure> {
        let Self { x, client, space, pool, deadline, .. } = self;
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
            let (at, failure) = next_deadline(x, pool, upload, was_told, *deadline);
            client.timer.poll(cx, at).map(|()| Err(failure))
        })
        .await
    }

    /// Writes an event, unless one about this upstream was written within the last second.
    fn report(&self, failure: Failure, words: &str) {
        let process = &self.x.worker.process;
        let by_us = failure == Failure::LocalShortage;
        let about = failure.meaning().blame == Blame::Upstream || by_us;
        if about && self.upstream.may_report(process.clock.now()) {
            process.events.emit(&Event::UpstreamError {
                pool: self.pool.plan.name.clone(),
                upstream: self.upstream.plan.url.clone(),
                reason: failure.meaning().reason,
                error: if words.is_empty() { failure.meaning().text } else { words }.to_owned(),
                note: "further ones within a second are not written; the access log has all",
            });
        }
    }
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
            Poll::Ready(Ok(())) => *buf = x.worker.buffers.small(),
            Poll::Ready(Err(_)) => return Poll::Ready(Err(Failure::UpstreamClosed)),
            Poll::Pending => return Poll::Pending,
        }
    }
    match stream.poll_fill(cx, buf) {
        Poll::Ready(Ok(n)) if n > 0 => Poll::Ready(Ok(())),
        Poll::Ready(_) => Poll::Ready(Err(Failure::UpstreamClosed)),
        Poll::Pending => Poll::Pending,
    }
}

/// The next deadline before the response's head, and what it means to miss it. `was_told`: an
/// interim response has been passed on.
fn next_deadline(
    x: &Exchange<'_>,
    pool: &Pool,
    upload: &Upload,
    was_told: bool,
    total: Nanos,
) -> (Nanos, Failure) {
    // A client that asked whether to send waits for the upstream's word, not we for its body.
    let asked = x.incoming.head.expects_continue && !was_told && upload.content() == 0;
    match upload.waits() {
        Waits::Client if !asked => {
            let (at, failure) = upload.client_deadline(x.listener.plan.timeouts.read);
            (at.min(total), failure)
        }
        _ => {
            let at = upload.progress.plus(pool.plan.response_header_timeout);
            if total <= at {
                (total, Failure::TotalTimeout)
            } else {
                (at, Failure::ResponseTimeout)
            }
        }
    }
}

/// The target after the route's rewrite, as parts to be put together.
fn rewritten<'a>(route: &'a Route, target: &'a [u8]) -> (&'a [u8], &'a [u8], &'a [u8]) {
    let rewrite = &route.plan.rewrite;
    let strip = rewrite.strip_prefix.as_deref().unwrap_or_default().trim_end_matches('/');
    let add = rewrite.add_prefix.as_deref().unwrap_or_default().trim_end_matches('/');
    let stripped = match target.strip_prefix(strip.as_bytes()) {
        Some(rest) if rest.is_empty() || rest.starts_with(b"/") || rest.starts_with(b"?") => rest,
        _ => target,
    };
    let slash: &[u8] = if stripped.starts_with(b"/") { b"" } else { b"/" };
    (add.as_bytes(), slash, stripped)
}
