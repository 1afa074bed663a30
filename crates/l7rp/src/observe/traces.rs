//! Spans of OpenTelemetry: one for a request and one for each of its tries, handed to the
//! library's batch processor, which exports them from a thread of its own (OTLP over gRPC).
//! Requests that are not sampled do not come here.
//!
//! Names are those of the semantic conventions for HTTP spans, and `proxy.*` for what these do
//! not know.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use l7rp_core::names::Nanos;
use l7rp_core::trace::{Sampler, Trace};
use opentelemetry::trace::{
    SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState,
};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::tonic_types::transport::{Certificate, ClientTlsConfig, Identity};
use opentelemetry_otlp::{SpanExporter as Otlp, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanEvents, SpanExporter, SpanLinks,
    SpanProcessor,
};

use super::access_log::Entry;
use super::event::{Event, Events};
use super::tries::{End, Try};
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::clock::{self, Clock};
use crate::config::plan::Tracing;

/// Of a queue that the environment asks for: it has its memory from the start.
const LONGEST_QUEUE: usize = 1 << 16;
/// In the log, for an answer that was not sent.
const NOT_SENT: u16 = 499;
/// More than the library's own limit, which has the better words.
const MORE_TIME: Duration = Duration::from_secs(1);
/// How long the end of an exporter that nothing uses any more may take.
const LAST_SPANS: Duration = Duration::from_secs(5);
/// Failures of the export are told of this often.
const TELL_EVERY: Duration = Duration::from_mins(1);

/// Makes spans and sends them away.
#[derive(Debug)]
pub struct Tracer {
    sampler: Sampler,
    exporter: Arc<Exporter>,
    scope: InstrumentationScope,
}

/// What became of spans.
#[derive(Debug, Default)]
pub struct SpanCounts {
    /// Taken by the collector.
    pub exported: AtomicU64,
    /// Not taken by it.
    pub failed: AtomicU64,
    /// Not sent, because too many waited.
    pub dropped: AtomicU64,
}

#[derive(Debug)]
struct Exporter {
    endpoint: String,
    insecure: bool,
    /// Gone when it has ended.
    processor: Option<BatchSpanProcessor>,
    counts: Arc<SpanCounts>,
    waiting: Arc<AtomicUsize>,
    /// Spans that wait at most; more are dropped and counted. The library has the same bound and
    /// counts for nobody.
    queue: usize,
    /// What is still to be exported when this is gone is given up.
    wanted: Option<watch::Sender<()>>,
}

/// The library's exporter, watched.
#[derive(Debug)]
struct Watched {
    inner: Otlp,
    endpoint: String,
    counts: Arc<SpanCounts>,
    waiting: Arc<AtomicUsize>,
    events: Arc<Events>,
    clock: Clock,
    /// When a failure was last told of, in ns; 0: the last export was good.
    told: AtomicU64,
    runtime: Handle,
    /// For a call, with the connection that it needs.
    timeout: Duration,
    wanted: watch::Receiver<()>,
}

impl Watched {
    /// Exports in time, or not at all: the library's own limit does not count while it connects, and
    /// a collector that nobody answers at would keep its thread for as long as TCP likes.
    async fn in_time(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        // This thread is the library's, and has no clock of its own.
        let late = {
            let _control = self.runtime.enter();
            tokio::time::sleep(self.timeout)
        };
        let mut wanted = self.wanted.clone();
        tokio::select! {
            // First: at the end of the process its clock ends after the connection, and says so ill.
            biased;
            result = self.inner.export(batch) => result,
            () = late => Err(OTelSdkError::Timeout(self.timeout)),
            _ = wanted.changed() => Err(OTelSdkError::Timeout(LAST_SPANS)),
        }
    }
}

impl SpanExporter for Watched {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = batch.len();
        self.waiting.fetch_sub(count, Relaxed);
        let result = self.in_time(batch).await;
        let outcome = if result.is_ok() { &self.counts.exported } else { &self.counts.failed };
        outcome.fetch_add(count as u64, Relaxed);
        let (told, now) = (self.told.load(Relaxed), self.clock.now());
        let endpoint = self.endpoint.clone();
        match &result {
            Ok(()) if told > 0 => {
                self.told.store(0, Relaxed);
                self.events.emit(&Event::TraceExportRecovered { endpoint });
            }
            Err(e) if told == 0 || now.since(Nanos(told)) >= TELL_EVERY => {
                self.told.store(now.0.max(1), Relaxed);
                self.events.emit(&Event::TraceExportFailed {
                    endpoint,
                    error: e.to_string(),
                    effect: "spans are lost until it works again; requests are not affected",
                });
            }
            _ => {}
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

impl Exporter {
    /// To be called where there is a runtime that goes on: the connection lives there.
    fn start(
        tracing: &Tracing,
        counts: Arc<SpanCounts>,
        events: &Arc<Events>,
        clock: Clock,
    ) -> Result<Self, String> {
        let Tracing { endpoint, insecure, .. } = tracing;
        let wrong = |e: &dyn std::fmt::Display| format!("tracing to {endpoint}: {e}");
        let scheme = if *insecure { "http" } else { "https" };
        let mut builder =
            Otlp::builder().with_tonic().with_endpoint(format!("{scheme}://{endpoint}"));
        if !insecure {
            builder = builder.with_tls_config(tls(tracing)?);
        }
        let waiting = Arc::<AtomicUsize>::default();
        let (wanted, is_wanted) = watch::channel(());
        let exporter = Watched {
            inner: builder.build().map_err(|e| wrong(&e))?,
            endpoint: endpoint.clone(),
            counts: counts.clone(),
            waiting: waiting.clone(),
            events: events.clone(),
            clock,
            told: AtomicU64::new(0),
            runtime: Handle::current(),
            timeout: tracing.timeout.saturating_add(MORE_TIME),
            wanted: is_wanted,
        };
        let queue = tracing.queue.min(LONGEST_QUEUE);
        let config = BatchConfigBuilder::default().with_max_queue_size(queue).build();
        let mut processor = BatchSpanProcessor::builder(exporter).with_batch_config(config).build();
        processor.set_resource(&resource());
        let processor = Some(processor);
        let (endpoint, insecure, wanted) = (endpoint.clone(), *insecure, Some(wanted));
        Ok(Self { endpoint, insecure, processor, counts, waiting, queue, wanted })
    }

    fn send(&self, span: SpanData) {
        let Some(processor) = &self.processor else { return };
        if self.waiting.fetch_add(1, Relaxed) >= self.queue {
            self.waiting.fetch_sub(1, Relaxed);
            self.counts.dropped.fetch_add(1, Relaxed);
            return;
        }
        processor.on_end(span);
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        // Its end takes as long as the collector likes, and this may be a worker's thread. Without
        // another one, what waits is lost.
        let (Some(processor), wanted) = (self.processor.take(), self.wanted.take()) else { return };
        let _ = std::thread::Builder::new().name("l7rp-spans".into()).spawn(move || {
            let _ = processor.shutdown_with_timeout(LAST_SPANS);
            drop(wanted);
        });
    }
}

/// TLS towards the collector, with what the environment says of it (the exporter's specification
/// of OpenTelemetry).
fn tls(tracing: &Tracing) -> Result<ClientTlsConfig, String> {
    let read = |path: &str| {
        std::fs::read(path).map_err(|e| format!("tracing to {}: {path}: {e}", tracing.endpoint))
    };
    let mut tls = ClientTlsConfig::new();
    tls = match &tracing.ca_file {
        Some(path) => tls.ca_certificate(Certificate::from_pem(read(path)?)),
        None => tls.with_enabled_roots(),
    };
    if let Some((certificate, key)) = &tracing.identity {
        tls = tls.identity(Identity::from_pem(read(certificate)?, read(key)?));
    }
    Ok(tls)
}

/// Who we are, unless the environment knows better.
fn resource() -> Resource {
    let from_environment = Resource::builder().build();
    let name = opentelemetry::Key::from_static_str("service.name");
    let is_named = from_environment
        .get(&name)
        .is_some_and(|name| !name.as_str().starts_with("unknown_service"));
    let mut builder = Resource::builder();
    if !is_named {
        builder = builder.with_service_name("l7rp");
    }
    builder.with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION"))).build()
}

impl Tracer {
    /// What `tracing` asks for; `None`: nothing. It goes on from `before` where the collector stays
    /// the same. To be called where there is a runtime that goes on.
    ///
    /// # Errors
    /// The endpoint is none, or a file cannot be read: for people.
    pub fn new(
        tracing: &Tracing,
        before: Option<&Arc<Self>>,
        events: &Arc<Events>,
        clock: Clock,
    ) -> Result<Option<Arc<Self>>, String> {
        if tracing.endpoint.is_empty() {
            return Ok(None);
        }
        let same = before.filter(|before| {
            let known = &before.exporter;
            known.endpoint == tracing.endpoint && known.insecure == tracing.insecure
        });
        let exporter = if let Some(before) = same {
            before.exporter.clone()
        } else {
            // What is counted is counted for the process, wherever spans go.
            let counts = before.map(|before| before.exporter.counts.clone());
            Arc::new(Exporter::start(tracing, counts.unwrap_or_default(), events, clock)?)
        };
        let scope =
            InstrumentationScope::builder("l7rp").with_version(env!("CARGO_PKG_VERSION")).build();
        let sampler =
            Sampler { follows_parent: tracing.follows_parent, ratio: tracing.sample_ratio() };
        Ok(Some(Arc::new(Self { sampler, exporter, scope })))
    }

    /// Which requests are traced.
    pub fn sampler(&self) -> Sampler {
        self.sampler
    }

    /// What became of spans.
    pub fn counts(&self) -> &SpanCounts {
        &self.exporter.counts
    }

    /// Sends what waits; nothing is sent after it. Blocks for `limit` at most.
    pub fn finish(&self, limit: Duration) {
        if let Some(processor) = &self.exporter.processor {
            let _ = processor.shutdown_with_timeout(limit);
        }
    }

    /// Makes and sends the spans of a request that has just ended, `now`: its duration ends there,
    /// and nothing that was done since is to come between its times. `sent`: the path that upstreams
    /// were asked for, behind that of their URL.
    pub fn request(
        &self,
        told: &Entry<'_>,
        sent: &[u8],
        trace: Trace,
        scheme: &'static str,
        now: Nanos,
    ) {
        let wall = clock::wall();
        let at = |point: Nanos| wall.checked_sub(now.since(point)).unwrap_or(wall);
        for (number, one) in told.tries.iter().enumerate() {
            let took = one.ended.map_or_else(|| now.since(one.began), |(_, took)| took);
            let (start, own) = (at(one.began), (one.span, Some(trace.span)));
            let attributes = of_try(told, one, number, sent);
            let (status, kind) = (try_status(one), SpanKind::Client);
            let name = "proxy.upstream.request";
            self.send(name, kind, &trace, own, (start, start + took), attributes, status);
        }
        let start = wall.checked_sub(told.duration).unwrap_or(wall);
        let status = match (told.reason, told.grpc_status) {
            ("", Some(grpc)) if told.is_failed_call() => {
                Status::error(format!("grpc-status {grpc}"))
            }
            _ if told.status < 500 && !told.is_fault => Status::Unset,
            ("", _) => Status::error(told.status.to_string()),
            (reason, _) => Status::error(reason),
        };
        let own = (trace.span, trace.parent);
        let attributes = of_request(told, scheme);
        let (name, kind) = ("proxy.request", SpanKind::Server);
        self.send(name, kind, &trace, own, (start, wall), attributes, status);
    }

    #[expect(clippy::too_many_arguments, reason = "two callers, and each is a field of the span")]
    fn send(
        &self,
        name: &'static str,
        kind: SpanKind,
        trace: &Trace,
        (span, parent): (u64, Option<u64>),
        (start_time, end_time): (SystemTime, SystemTime),
        attributes: Vec<KeyValue>,
        status: Status,
    ) {
        let trace_id = TraceId::from(trace.id);
        self.exporter.send(SpanData {
            span_context: SpanContext::new(
                trace_id,
                SpanId::from(span),
                TraceFlags::SAMPLED,
                false,
                TraceState::NONE,
            ),
            parent_span_id: parent.map_or(SpanId::INVALID, SpanId::from),
            parent_span_is_remote: kind == SpanKind::Server && parent.is_some(),
            span_kind: kind,
            name: name.into(),
            start_time,
            end_time,
            attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status,
            instrumentation_scope: self.scope.clone(),
        });
    }
}

fn whole(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(&value[..value.len().min(1024)]).into_owned()
}

/// The method, as the conventions want it: one of the known ones, and the real one beside it.
fn method(attributes: &mut Vec<KeyValue>, method: &[u8]) {
    const KNOWN: [&str; 9] =
        ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE"];
    match KNOWN.iter().find(|known| known.as_bytes() == method) {
        Some(known) => attributes.push(KeyValue::new("http.request.method", *known)),
        None => attributes.extend([
            KeyValue::new("http.request.method", "_OTHER"),
            KeyValue::new("http.request.method_original", text(method)),
        ]),
    }
}

/// `error.type`, where there is an error.
fn error(attributes: &mut Vec<KeyValue>, reason: &'static str, status: u16, from: u16) {
    if !reason.is_empty() {
        attributes.push(KeyValue::new("error.type", reason));
    } else if status >= from {
        attributes.push(KeyValue::new("error.type", status.to_string()));
    }
}

fn of_request(told: &Entry<'_>, scheme: &'static str) -> Vec<KeyValue> {
    let mut all = Vec::with_capacity(16);
    method(&mut all, told.method);
    let host = text(told.host);
    let (name, port) = match host.rsplit_once(':').map(|(name, port)| (name, port.parse::<u16>())) {
        Some((name, Ok(port))) => (name, Some(port)),
        _ => (host.as_str(), None),
    };
    all.extend([
        KeyValue::new("url.scheme", scheme),
        KeyValue::new("url.path", text(told.path)),
        KeyValue::new("client.address", told.client_ip.to_owned()),
        KeyValue::new("network.protocol.name", "http"),
        KeyValue::new("network.protocol.version", told.protocol.trim_start_matches("HTTP/")),
        KeyValue::new("proxy.route", told.route.to_owned()),
        KeyValue::new("proxy.pool", told.pool.to_owned()),
        KeyValue::new("proxy.upstream", told.used.map_or("", |used| used.url).to_owned()),
        KeyValue::new("proxy.retry_attempt", whole(told.attempts.saturating_sub(1))),
        KeyValue::new("proxy.hedge_fired", told.tries.iter().any(|one| one.is_hedge)),
        KeyValue::new("proxy.request_id", text(told.request_id)),
    ]);
    // To a client that was gone none was sent.
    if told.status != NOT_SENT {
        all.push(KeyValue::new("http.response.status_code", i64::from(told.status)));
    }
    if let Some(grpc) = told.grpc_status {
        all.push(KeyValue::new("rpc.grpc.status_code", i64::from(grpc)));
    }
    if !name.is_empty() {
        all.push(KeyValue::new("server.address", name.to_owned()));
    }
    all.extend(port.map(|port| KeyValue::new("server.port", i64::from(port))));
    error(&mut all, told.reason, told.status, 500);
    all
}

fn of_try(told: &Entry<'_>, one: &Try<'_>, number: usize, sent: &[u8]) -> Vec<KeyValue> {
    // What is sent again at no cost is no retry.
    let counted = told.tries.iter().take(number).filter(|before| !before.is_repeated).count();
    let mut all = Vec::with_capacity(12);
    method(&mut all, told.method);
    all.extend([
        KeyValue::new("server.address", one.host.to_owned()),
        KeyValue::new("server.port", i64::from(one.port)),
        KeyValue::new("url.full", format!("{}{}", one.url.trim_end_matches('/'), text(sent))),
        KeyValue::new("proxy.route", told.route.to_owned()),
        KeyValue::new("proxy.pool", told.pool.to_owned()),
        KeyValue::new("proxy.upstream", one.url.to_owned()),
        KeyValue::new("proxy.retry_attempt", whole(counted)),
        KeyValue::new("proxy.hedge_fired", one.is_hedge),
    ]);
    if number > 0 {
        all.push(KeyValue::new("http.request.resend_count", whole(number)));
    }
    match one.ended {
        Some((End::Answered(status), _)) => {
            all.push(KeyValue::new("http.response.status_code", i64::from(status)));
            error(&mut all, "", status, 400);
        }
        Some((End::Failed(failure), _)) => error(&mut all, failure.meaning().reason, 0, 400),
        Some((End::Lost, _)) => error(&mut all, "lost_race", 0, 400),
        None => error(&mut all, "not_ended", 0, 400),
    }
    all
}

/// That a race was lost is no fault of anybody.
fn try_status(one: &Try<'_>) -> Status {
    match one.ended {
        Some((End::Answered(status), _)) if status >= 400 => Status::error(""),
        Some((End::Failed(failure), _)) => Status::error(failure.meaning().text),
        Some((End::Answered(_) | End::Lost, _)) | None => Status::Unset,
    }
}
