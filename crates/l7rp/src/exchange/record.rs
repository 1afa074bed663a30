//! What is remembered of one exchange. Dropped at its end, however it ends, it becomes
//! metrics and a line in the access log.

use std::rc::Rc;
use std::time::Duration;

use l7rp_core::attempts::Stop;
use l7rp_core::failure::{Blame, Failure};
use l7rp_core::hex;
use l7rp_core::http1::request::{Method, Request};
use l7rp_core::names::Nanos;
use l7rp_core::trace::Trace;
use smallvec::SmallVec;

use super::attempt::Fault;
use super::{grpc, judge};
use crate::live::{Listener, Route};
use crate::observe::access_log::Entry;
use crate::observe::stats::bad_reason_index;
use crate::observe::traces::Tracer;
use crate::observe::tries::{End, Link, Refusal, Try};
use crate::upstream::pool::{Place, Pool};
use crate::worker::Worker;

/// A request id: received or made, at most 128 octets.
#[derive(Clone, Copy, Debug)]
pub struct RequestId {
    octets: [u8; 128],
    len: u8,
}

impl RequestId {
    /// A received one, which must be well-formed.
    pub fn received(value: &[u8]) -> Self {
        let mut octets = [0; 128];
        let len = value.len().min(128);
        octets[..len].copy_from_slice(&value[..len]);
        Self { octets, len: len as u8 }
    }

    /// A new one: 128 random bits in hexadecimal.
    pub fn random() -> Self {
        let mut octets = [0; 128];
        octets[..32].copy_from_slice(&hex::long_digits(fastrand::u128(..)));
        Self { octets, len: 32 }
    }

    /// Its octets.
    pub fn as_bytes(&self) -> &[u8] {
        &self.octets[..self.len as usize]
    }
}

/// What is remembered of one exchange.
#[derive(Debug)]
pub struct Record<'a> {
    worker: &'a Worker,
    listener: &'a Listener,
    /// The head's buffer, and the head; none if it was refused.
    head: Option<(&'a [u8], &'a Request)>,
    arrived: Nanos,
    /// Identifies the request.
    pub id: RequestId,
    /// The client's address.
    pub client_ip: Rc<str>,
    /// The route taken.
    pub route: Option<&'a Route>,
    /// The pool used.
    pub pool: Option<&'a Pool>,
    /// All tries, in the order in which they began.
    pub tries: SmallVec<[Try<'a>; 1]>,
    /// The one that counts: the current one, or whose response is used.
    used: usize,
    /// How many of them were repeated at no cost.
    repeats: usize,
    /// Who could not be chosen, when nobody could.
    pub refused: Vec<Refusal<'a>>,
    /// Why there was no other try, if that was a question.
    pub stop: Option<Stop>,
    /// Its place in its trace, if it is traced.
    pub trace: Option<Trace>,
    /// Who makes its spans.
    pub tracer: Option<&'a Tracer>,
    /// How it was asked: `http` or `https`.
    pub scheme: &'static str,
    /// Octets of request body received.
    pub bytes_in: u64,
    /// Octets of response body sent.
    pub bytes_out: u64,
    /// Status of the answer; 0: none was sent.
    pub status: u16,
    /// How a call of gRPC went.
    pub grpc_status: Option<u8>,
    /// What went wrong.
    pub failure: Option<Failure>,
    /// The client speaks HTTP/2.
    pub is_http2: bool,
    /// Who the client is, by its certificate.
    pub identity: Option<Rc<str>>,
    /// It is known to be a call of gRPC.
    pub known_call: bool,
    /// It is no request at all, and may not be worth a line.
    pub is_noise: bool,
    /// When the exchange came to its end, good or bad.
    pub ended: Option<Nanos>,
}

impl<'a> Record<'a> {
    /// An exchange whose request has arrived.
    pub fn new(
        worker: &'a Worker,
        listener: &'a Listener,
        client_ip: Rc<str>,
        head: Option<(&'a [u8], &'a Request)>,
        arrived: Nanos,
        id: RequestId,
    ) -> Self {
        Self {
            worker,
            listener,
            head,
            arrived,
            id,
            client_ip,
            route: None,
            pool: None,
            tries: SmallVec::new(),
            used: 0,
            repeats: 0,
            refused: Vec::new(),
            stop: None,
            trace: None,
            tracer: None,
            scheme: "http",
            bytes_in: 0,
            bytes_out: 0,
            status: 0,
            grpc_status: None,
            failure: None,
            is_http2: false,
            identity: None,
            known_call: false,
            is_noise: false,
            ended: None,
        }
    }

    /// A try begins, which is the one that counts for now; its span, if it has one.
    pub fn begins(&mut self, place: &mut Place<'a>, is_hedge: bool) -> u64 {
        let upstream = place.upstream();
        let span = self.span();
        place.number = self.tries.len();
        self.used = place.number;
        self.tries.push(Try {
            url: &upstream.url,
            host: &upstream.host,
            port: upstream.port,
            began: place.began(),
            ended: None,
            link: None,
            is_hedge,
            is_repeated: false,
            span,
        });
        span
    }

    /// The try at `place` has met a connection that was as good as closed, and the request is sent
    /// again at once: a try of its own for whoever reads of it, and for nobody who counts them. Its
    /// span.
    #[cold]
    pub(super) fn begins_anew(&mut self, place: &mut Place<'_>, fault: Fault, now: Nanos) -> u64 {
        let (span, number) = (self.span(), self.tries.len());
        let Some(one) = self.tries.get_mut(place.number) else { return span };
        let anew = Try { began: now, span, ..*one };
        one.ended = Some((End::Failed(fault.failure), now.since(one.began)));
        (one.link, one.is_repeated) = (fault.link, true);
        self.tries.push(anew);
        self.repeats += 1;
        if self.used == place.number {
            self.used = number;
        }
        place.number = number;
        span
    }

    /// The span of a try that begins.
    fn span(&self) -> u64 {
        let is_sampled = self.trace.is_some_and(|trace| trace.is_sampled);
        // One that is not recorded is the whole hop's.
        let own = self.trace.map_or(0, |trace| trace.span);
        if is_sampled { fastrand::u64(1..) } else { own }
    }

    /// Tries without those that were repeated at no cost.
    pub fn counted(&self) -> usize {
        self.tries.len() - self.repeats
    }

    /// The head of a response has come to the try at `place`, and it counts.
    pub fn came_on(&mut self, place: &Place<'a>, link: Link) {
        self.uses(place);
        if let Some(one) = self.tries.get_mut(place.number) {
            one.link = Some(link);
        }
    }

    /// The try at `place` has come to nothing.
    pub(super) fn failed(&mut self, place: &Place<'a>, fault: Fault, took: Duration) {
        self.ends(place, End::Failed(fault.failure), took);
        if let Some(one) = self.tries.get_mut(place.number) {
            one.link = fault.link;
        }
    }

    /// The try at `place` has ended. An answer that was kept has so already, in its own time.
    pub fn ends(&mut self, place: &Place<'a>, end: End, took: Duration) {
        if let Some(one) = self.tries.get_mut(place.number) {
            // The place has been held since before a connection was closed under it.
            let began = place.began();
            let took =
                if one.began == began { took } else { took.saturating_sub(one.began.since(began)) };
            let took = one.ended.map_or(took, |(_, took)| took);
            one.ended = Some((end, took));
        }
    }

    /// The try at `place` is the one that counts.
    pub fn uses(&mut self, place: &Place<'a>) {
        self.used = place.number;
    }

    /// The try that counts.
    pub fn used(&self) -> Option<&Try<'a>> {
        self.tries.get(self.used)
    }

    /// Where it came in.
    pub fn listener(&self) -> &'a Listener {
        self.listener
    }

    /// Whether it is a call of gRPC: the client expects the outcome in a field and not in the
    /// status.
    pub fn is_call(&self) -> bool {
        self.known_call || self.head.is_some_and(|(buf, head)| grpc::is_call(buf, head))
    }

    fn count(&self, took: Duration, status: u16) {
        let shard = self.worker.index;
        if let Some(route) = self.route {
            let method = self.head.map_or(Method::Other, |(_, head)| head.method);
            let counts = route.stats[shard].method(method);
            counts.status.up(status);
            counts.duration.record(took);
        }
        let counts = &self.listener.stats[shard];
        match self.failure {
            Some(Failure::NoRoute) => counts.no_route.up(),
            Some(Failure::Capacity(scope)) => {
                counts.shed[scope.index()].up();
                self.worker.counts().shed[scope.index()].up();
            }
            Some(failure) => {
                if let Some(ix) = bad_reason_index(failure.meaning().reason) {
                    counts.bad[ix].up();
                }
            }
            None => {}
        }
    }

    /// Writes a line if there is an access log, and spans if it is sampled.
    fn tell(&self, ended: Nanos, took: Duration, status: u16) {
        let process = &self.worker.process;
        let traced = self.trace.filter(|trace| trace.is_sampled).zip(self.tracer);
        let is_logged = process.access_log() && (!self.is_noise || self.worker.logs_noise());
        if !is_logged && traced.is_none() {
            return;
        }
        let (method, host, path, protocol) =
            self.head.map_or((&b""[..], &b""[..], &b""[..], "HTTP/1.1"), |(buf, head)| {
                let target = head.target.of(buf);
                let path =
                    match target.split(|&b| matches!(b, b'?' | b'#')).next().unwrap_or_default() {
                        // Whatever it is, it is no path: it may have a password in it.
                        odd if matches!(self.failure, Some(Failure::BadRequest(_)))
                            && !odd.starts_with(b"/") =>
                        {
                            b""
                        }
                        b"" if head.method_text.len > 0 => &b"/"[..],
                        path => path,
                    };
                let protocol = if head.is_http10 { "HTTP/1.0" } else { "HTTP/1.1" };
                (head.method_text.of(buf), head.host.of(buf), path, protocol)
            });
        let protocol = if self.is_http2 { "HTTP/2" } else { protocol };
        let entry = Entry {
            route: self.route.map_or("", |r| &r.plan.name),
            request_id: self.id.as_bytes(),
            method,
            host,
            path,
            status,
            duration: took,
            grpc_status: self.grpc_status,
            bytes_in: self.bytes_in,
            bytes_out: self.bytes_out,
            client_ip: &self.client_ip,
            client_identity: self.identity.as_deref().unwrap_or_default(),
            protocol,
            pool: self.pool.map_or("", |p| &p.plan.name),
            attempts: self.counted(),
            tries: &self.tries,
            used: self.used(),
            refused: &self.refused,
            stop: self.stop.map_or("", Stop::name),
            trace_id: self.trace.filter(|trace| trace.is_sampled).map(|trace| trace.id),
            reason: self.failure.map_or("", |f| f.meaning().reason),
            is_fault: self.failure.is_some_and(|f| f.meaning().blame != Blame::Client),
        };
        if is_logged {
            self.worker.log(&entry, ended);
        }
        if let Some((trace, tracer)) = traced {
            let end = self.arrived.plus(took);
            tracer.request(&entry, &self.sent_path(path), trace, self.scheme, end);
        }
    }
}

impl Record<'_> {
    /// What an upstream is asked for where the client has asked for `path`.
    fn sent_path(&self, path: &[u8]) -> Vec<u8> {
        match self.route {
            // It has no path.
            Some(_) if path == b"*" => Vec::new(),
            Some(route) => {
                let (added, slash, rest) = judge::rewritten(route, path);
                [added, slash, rest].concat()
            }
            None => path.to_vec(),
        }
    }
}

impl Drop for Record<'_> {
    fn drop(&mut self) {
        // Dropped in the middle: the connection's task was ended from outside.
        if self.ended.is_none() && self.failure.is_none() {
            let panicked = std::thread::panicking();
            self.failure = Some(if panicked { Failure::Internal } else { Failure::Draining });
            if !panicked {
                self.worker.counts().cut.up();
            }
        }
        let status = match self.failure {
            Some(failure) if self.status == 0 => failure.meaning().status,
            _ => self.status,
        };
        let ended = self.ended.unwrap_or_else(|| self.worker.process.clock.now());
        let took = ended.since(self.arrived);
        self.count(took, status);
        self.tell(ended, took, status);
    }
}
