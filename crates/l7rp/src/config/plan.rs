//! The configuration as it is meant: defaults filled in, names resolved to indices, every
//! rule checked. Plans are compared with `==`; a reload is the difference of two plans.

mod tls;
mod token;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

pub use tls::{Autocert, Certificate, ClientAuth, ListenerTls, TlsVersion, UpstreamTls};
pub use token::AdminToken;

/// A whole, valid configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Where requests come in. At least one.
    pub listeners: Vec<Listener>,
    /// Groups of upstreams; routes refer to them by index.
    pub pools: Vec<Pool>,
    /// In file order; the router derives its precedence from them.
    pub routes: Vec<Route>,
    /// Layer-4 listeners.
    pub tcp_listeners: Vec<TcpListener>,
    /// Layer-4 pools; `tcp_listeners` refer to them by index.
    pub tcp_pools: Vec<TcpPool>,
    /// Where metrics and health of the proxy itself are served; `None`: nowhere.
    pub admin: Option<Bind>,
    /// What those who change something there over TCP must show; `None`: they must come from this
    /// machine.
    pub admin_token: Option<AdminToken>,
    /// Requests in progress in the whole process; 0: no limit.
    pub max_in_flight: u32,
    /// How to stop.
    pub drain: Drain,
    /// Data-plane threads; `None`: as many as there are cores.
    pub workers: Option<usize>,
    /// Whether each request writes a line.
    pub access_log: bool,
    /// Where spans go.
    pub tracing: Tracing,
    /// Keys that flags have set, whatever the file says.
    pub by_flags: Vec<&'static str>,
    /// Answer `/livez` and `/readyz` on the data listeners too (the mode without a file).
    pub probes_on_data: bool,
}

/// An address to listen on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Bind {
    /// TCP.
    Tcp(SocketAddr),
    /// A Unix-domain socket at this path.
    Unix(PathBuf),
}

impl std::fmt::Display for Bind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Where requests come in.
#[derive(Clone, Debug, PartialEq)]
pub struct Listener {
    /// Unique.
    pub name: String,
    /// Unique.
    pub bind: Bind,
    /// TLS termination; `None`: cleartext.
    pub tls: Option<ListenerTls>,
    /// Deadlines of a client connection.
    pub timeouts: ListenerTimeouts,
    /// Serve HTTP/3 too.
    pub http3: bool,
    /// Peers whose forwarding fields are believed.
    pub trusted_proxies: Vec<IpNet>,
    /// Expect PROXY protocol from the trusted.
    pub proxy_protocol: bool,
    /// Peers whose responses say what was decided.
    pub decision_header_for: Vec<IpNet>,
    /// Connections at once; 0: half of the descriptor limit.
    pub max_connections: u32,
    /// Bounds of one request.
    pub limits: MessageLimits,
    /// Requests in progress on this listener; 0: no limit.
    pub max_in_flight: u32,
}

/// Deadlines of a client connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerTimeouts {
    /// For one whole request head, and for a TLS handshake.
    pub read_header: Duration,
    /// Without progress of a request body.
    pub read: Duration,
    /// Without progress of a response that there are bytes for.
    pub write: Duration,
    /// Between requests.
    pub idle: Duration,
    /// Octets of one request head.
    pub max_header_bytes: usize,
}

/// Bounds of one request. Zero means no limit where noted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageLimits {
    /// Fields of a head.
    pub max_headers: usize,
    /// Octets of a request target.
    pub max_target_bytes: usize,
    /// Octets of a trailer section.
    pub max_trailer_bytes: usize,
    /// Octets of a request body; 0: no limit.
    pub max_body_bytes: u64,
    /// Octets a second that a request body must keep up after 10 s; 0: no limit.
    pub min_body_rate: u64,
}

/// A group of upstreams that serve the same thing.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// Unique.
    pub name: String,
    /// How an upstream is chosen.
    pub selector: Selector,
    /// At least one.
    pub upstreams: Vec<Upstream>,
    /// For a connection to be established.
    pub connect_timeout: Duration,
    /// From the last octet of the request to the end of the response head; and for silence in
    /// the middle of a body, unless that is a stream of events.
    pub response_header_timeout: Duration,
    /// HTTP version spoken to the upstreams.
    pub protocol: UpstreamProtocol,
    /// Idle connections, for each upstream.
    pub keepalive: Keepalive,
    /// The Host that upstreams see.
    pub host_header: HostHeader,
    /// Resolution of names.
    pub dns: Dns,
    /// TLS towards the upstreams.
    pub tls: UpstreamTls,
    /// Active health checks.
    pub active: Option<ActiveHealth>,
    /// Scoring of real traffic.
    pub passive: Option<PassiveHealth>,
    /// When an upstream is taken out for failing.
    pub breaker: Breaker,
    /// Extra tries that the pool may be asked for.
    pub retry_budget: RetryBudget,
    /// Requests in progress in this pool; 0: no limit.
    pub max_in_flight: u32,
    /// Ramp of an upstream that has just become eligible; 0: none.
    pub slow_start: Duration,
}

/// How an upstream is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Selector {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Half-life of the latency average.
    pub ewma_half_life: Duration,
    /// What is hashed, for the algorithms that hash.
    pub hash_key: HashKey,
    /// Load above the mean that a hashed upstream may carry (0.25 = 25 %).
    pub epsilon: f64,
    /// Points on the ring for weight 1.
    pub virtual_nodes: u32,
}

/// Balancing algorithms.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// `round-robin`
    RoundRobin,
    /// `weighted-rr`
    WeightedRr,
    /// `least-conn`
    LeastConn,
    /// `p2c-ewma`
    P2cEwma,
    /// `consistent-hash-bounded`
    ConsistentHashBounded,
    /// `ip-hash`
    IpHash,
}

/// What a hashing algorithm hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HashKey {
    /// `header:NAME`, lower case.
    Header(String),
    /// `cookie:NAME`
    Cookie(String),
    /// `client_ip`
    ClientIp,
}

/// One upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream {
    /// As written: the label of metrics and logs, unique in its pool.
    pub url: String,
    /// `http`, `https` or `h2c`.
    pub scheme: Scheme,
    /// Host without brackets: a name or an address.
    pub host: String,
    /// Explicit or the scheme's.
    pub port: u16,
    /// Host and port as in the URL, for the Host field (port absent when the URL has none).
    pub authority: String,
    /// Path of the URL without a trailing slash, put before every request path; mostly empty.
    pub base_path: String,
    /// 1 to 65535.
    pub weight: u32,
    /// Requests in progress; 0: no limit.
    pub max_in_flight: u32,
    /// Used only when no other is eligible.
    pub backup: bool,
}

/// Scheme of an upstream URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// HTTP over TCP.
    Http,
    /// HTTP over TLS.
    Https,
    /// HTTP/2 over TCP without TLS.
    H2c,
}

/// HTTP version spoken to upstreams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum UpstreamProtocol {
    /// By ALPN; HTTP/1.1 on cleartext.
    Auto,
    /// HTTP/1.1 only.
    Http1,
    /// HTTP/2 only.
    Http2,
}

/// Idle connections, for each upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// Kept by the whole process; shared out among the workers, at least one for each.
    pub max_idle: usize,
    /// Closed after.
    pub idle_timeout: Duration,
}

/// The Host that upstreams see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostHeader {
    /// What the client sent.
    Preserve,
    /// The authority of the upstream's URL.
    Upstream,
    /// This.
    Literal(String),
}

/// Resolution of names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dns {
    /// Asked again every.
    pub refresh: Duration,
    /// How long the last good answer is used while asking fails.
    pub max_stale: Duration,
}

/// Active health checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveHealth {
    /// Target.
    pub path: String,
    /// Method.
    pub method: String,
    /// From one probe to the next.
    pub interval: Duration,
    /// For one probe.
    pub timeout: Duration,
    /// Good probes in a row that make an upstream eligible.
    pub healthy_threshold: u32,
    /// Bad probes in a row that make it ineligible.
    pub unhealthy_threshold: u32,
    /// Statuses that count as good: ranges, both ends included.
    pub expected_status: Vec<(u16, u16)>,
}

/// Scoring of real traffic.
#[derive(Clone, Debug, PartialEq)]
pub struct PassiveHealth {
    /// Share of errors above which an upstream becomes ineligible.
    pub error_threshold: f64,
    /// p99 latency above which it does; zero: not judged.
    pub latency_threshold_p99: Duration,
    /// Half-life of the averages.
    pub half_life: Duration,
}

/// When an upstream is taken out for failing.
#[derive(Clone, Debug, PartialEq)]
pub struct Breaker {
    /// Opens above this share of failures.
    pub failure_ratio: f64,
    /// Not before this many outcomes.
    pub min_observations: u32,
    /// Outcomes older than this do not count.
    pub window: Duration,
    /// At most this many outcomes count.
    pub window_size: u32,
    /// First open time.
    pub open_min: Duration,
    /// Longest open time.
    pub open_max: Duration,
    /// Requests let through at once to test.
    pub half_open_probes: u32,
    /// Opens after this many failures in a row instead of by ratio; 0: by ratio.
    pub consecutive_failures: u32,
    /// Statuses that count as failures, as written: ranges, both ends included. What they come to
    /// is said by [`Breaker::is_failure`].
    pub failure_statuses: Vec<(u16, u16)>,
    /// Statuses of gRPC calls that count as failures.
    pub failure_grpc_statuses: Vec<u8>,
}

/// What is said of a request (its method, its version) by an upstream that is well.
const OF_THE_REQUEST: [u16; 2] = [501, 505];

impl Breaker {
    /// Whether a response with this status counts as a failure. A class leaves out what any client
    /// can bring about with a request; listed by itself, it counts.
    pub fn is_failure(&self, status: u16) -> bool {
        self.failure_statuses.iter().any(|&(from, to)| {
            (from..=to).contains(&status) && (from == to || !OF_THE_REQUEST.contains(&status))
        })
    }
}

/// Extra tries that a pool may be asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct RetryBudget {
    /// Share of first tries.
    pub ratio: f64,
    /// Always allowed.
    pub min_per_second: u32,
}

/// Which requests go where.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// Unique.
    pub name: String,
    /// Indices of the listeners it is bound to; empty: all.
    pub listeners: Vec<usize>,
    /// Which hosts.
    pub host: HostPattern,
    /// Which paths.
    pub path_prefix: String,
    /// Which methods; empty: all.
    pub methods: Vec<String>,
    /// Fields that must be there with this value; names in lower case.
    pub predicates: Vec<(String, String)>,
    /// What is done with the request.
    pub action: Action,
    /// Change of the path.
    pub rewrite: Rewrite,
    /// Clients let in; empty: all.
    pub allow: Vec<IpNet>,
    /// Clients kept out.
    pub deny: Vec<IpNet>,
    /// Rate limit.
    pub rate_limit: Option<RateLimit>,
    /// Retries and hedging.
    pub retry: Option<Retry>,
    /// Fields added and removed.
    pub headers: HeaderChanges,
    /// Compression.
    pub compress: Option<Compress>,
    /// For the whole exchange; zero: none.
    pub total_timeout: Duration,
    /// Octets of a request body; 0: the listener's limit.
    pub max_body_bytes: u64,
    /// Without traffic on an upgraded connection.
    pub tunnel_idle_timeout: Duration,
}

/// Which hosts a route is for. Lower case, without port and trailing dot.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HostPattern {
    /// Any.
    Any,
    /// This name or address (IPv6 in brackets, canonical form).
    Exact(String),
    /// One label in front of this: `*.example.com` is kept as `example.com`.
    Wildcard(String),
}

/// What is done with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Sent to the pool with this index.
    Pool(usize),
    /// Answered with a redirect.
    Redirect {
        /// `http` or `https`.
        scheme: String,
        /// 301, 302, 303, 307 or 308.
        code: u16,
    },
    /// Answered as it says here.
    Respond {
        /// 200 to 599.
        status: u16,
        /// Text.
        body: String,
        /// Media type.
        content_type: String,
    },
}

/// Change of the path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rewrite {
    /// Taken away from the front, first.
    pub strip_prefix: Option<String>,
    /// Put in front, then.
    pub add_prefix: Option<String>,
}

/// Rate limit of a route.
#[derive(Clone, Debug, PartialEq)]
pub struct RateLimit {
    /// One bucket for each client, instead of one for the route.
    pub per_ip: bool,
    /// Tokens a second.
    pub rps: f64,
    /// Size of the bucket.
    pub burst: u32,
    /// Client address counted from the right of X-Forwarded-For; 0: the listener's rule.
    pub trust_proxy_hops: u32,
}

/// Retries and hedging.
#[derive(Clone, Debug, PartialEq)]
pub struct Retry {
    /// Tries in all, the first included.
    pub max_attempts: u32,
    /// Methods that may be tried again.
    pub methods: Vec<String>,
    /// Statuses that are tried again.
    pub retry_on: Vec<u16>,
    /// Statuses of gRPC calls that are tried again.
    pub retry_on_grpc: Vec<u8>,
    /// Octets of body kept for another try.
    pub max_replayable_body: usize,
    /// A second try beside the first after this; zero: none.
    pub hedge_after: Duration,
    /// The same after this percentile of the route's latency; 0: none.
    pub hedge_after_percentile: f64,
    /// Methods that may be hedged.
    pub hedgeable: Vec<String>,
    /// Before the second try; doubles, with jitter.
    pub backoff: Duration,
}

/// Fields added (set or replaced) and removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderChanges {
    /// On the way to the upstream.
    pub add_request: Vec<(String, String)>,
    /// On the way to the upstream; lower case.
    pub remove_request: Vec<String>,
    /// On the way to the client.
    pub add_response: Vec<(String, String)>,
    /// On the way to the client; lower case.
    pub remove_response: Vec<String>,
}

/// Compression of responses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compress {
    /// Smaller bodies are left alone.
    pub min_bytes: u64,
    /// Media types left alone.
    pub skip_content_types: Vec<String>,
}

/// A layer-4 listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpListener {
    /// Unique.
    pub name: String,
    /// Unique among all listeners.
    pub bind: Bind,
    /// Index of the TCP pool.
    pub pool: usize,
}

/// A layer-4 pool.
#[derive(Clone, Debug, PartialEq)]
pub struct TcpPool {
    /// Unique.
    pub name: String,
    /// How an upstream is chosen.
    pub selector: Selector,
    /// For a connection to be established.
    pub connect_timeout: Duration,
    /// `host:port` and weight.
    pub upstreams: Vec<TcpUpstream>,
}

/// One upstream of a layer-4 pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpUpstream {
    /// As written.
    pub address: String,
    /// Name or address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// 1 to 65535.
    pub weight: u32,
}

/// How to stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drain {
    /// Unready but still accepting.
    pub delay: Duration,
    /// For what is in progress.
    pub timeout: Duration,
}

/// Where spans go.
#[derive(Clone, Debug, PartialEq)]
pub struct Tracing {
    /// OTLP/gRPC `host:port`; empty: nowhere.
    pub endpoint: String,
    /// Share of traces that begin here, if anybody has said.
    pub ratio: Option<f64>,
    /// Whether the caller's decision is followed, where there is one.
    pub follows_parent: bool,
    /// Without TLS.
    pub insecure: bool,
    /// CA of the collector; `None`: those of the system.
    pub ca_file: Option<String>,
    /// Certificate and key that are shown to the collector.
    pub identity: Option<(String, String)>,
    /// Spans that wait for it at most.
    pub queue: usize,
    /// How long it may take to take some.
    pub timeout: Duration,
}

impl Tracing {
    /// Share of traces that begin here.
    pub fn sample_ratio(&self) -> f64 {
        self.ratio.unwrap_or(0.01)
    }
}

impl Default for Tracing {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            ratio: None,
            follows_parent: true,
            insecure: true,
            ca_file: None,
            identity: None,
            queue: 2048,
            timeout: Duration::from_secs(10),
        }
    }
}
