//! Pools as they are written.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::section;
use super::units::{StatusSpec, Time};

/// A group of upstreams that serve the same thing.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolSection {
    /// Name, unique among the pools. Routes refer to it, logs and metrics have it.
    #[schemars(required)]
    pub name: Option<String>,
    /// How an upstream is chosen.
    #[serde(default)]
    pub selector: SelectorSection,
    /// At least one. Of the addresses that a name has, connecting tries one after the other.
    #[serde(default)]
    pub upstreams: Vec<UpstreamSection>,
    /// For a connection to be established, with its TLS handshake. A request that was not sent
    /// goes to another upstream; if there is none, the answer is 504.
    #[serde(default)]
    pub connect_timeout: ConnectTimeout,
    /// From the last octet of the request to the end of the response head; and for silence in
    /// the middle of a body, unless that is a stream of events. Beyond it the answer is 504.
    #[serde(default)]
    pub response_header_timeout: ResponseHeaderTimeout,
    /// HTTP version spoken to the upstreams.
    #[serde(default)]
    pub protocol: Protocol,
    /// Connections that are kept for the next request, for each upstream.
    #[serde(default)]
    pub keepalive: KeepaliveSection,
    /// The Host that upstreams see: `preserve` (what the client sent; by default), `upstream` (that
    /// of the URL), or a literal.
    pub host_header: Option<String>,
    /// Resolution of names.
    #[serde(default)]
    pub dns: DnsSection,
    /// TLS towards `https` upstreams.
    #[serde(default)]
    pub upstream_tls: UpstreamTlsSection,
    /// Health checks.
    #[serde(default)]
    pub health: Health,
    /// When an upstream is taken out for failing.
    #[serde(default)]
    pub circuit_breaker: CircuitBreaker,
    /// How many retries and hedges the pool may be asked for.
    #[serde(default)]
    pub retry_budget: RetryBudgetSection,
    /// Requests in progress in this pool; 0: no limit. Beyond it the answer is 503.
    #[serde(default)]
    pub max_in_flight: u32,
    /// How long an upstream that has just become eligible gets less than its share; 0: none.
    #[serde(default)]
    pub slow_start: Time,
}

/// A time whose default is 5 s.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(transparent)]
pub struct ConnectTimeout(pub Time);

impl Default for ConnectTimeout {
    fn default() -> Self {
        Self(Time::secs(5))
    }
}

/// A time whose default is 30 s.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(transparent)]
pub struct ResponseHeaderTimeout(pub Time);

impl Default for ResponseHeaderTimeout {
    fn default() -> Self {
        Self(Time::secs(30))
    }
}

/// How an upstream is chosen.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SelectorSection {
    /// Which of six ways.
    pub algorithm: Algorithm,
    /// Half-life of the latency average of `p2c-ewma`.
    pub ewma_half_life: Time,
    /// What is hashed: `header:NAME`, `cookie:NAME` or `client_ip`; needed for
    /// `consistent-hash-bounded`. A request that has no such field is hashed by the client's
    /// address.
    pub hash_key: Option<String>,
    /// Share above the mean of requests in progress that a hashed upstream may carry, for
    /// `consistent-hash-bounded`: 0.25 is 25 %.
    pub epsilon: f64,
    /// Points on the hash ring for weight 1: more of them spread more evenly, and take more memory.
    #[schemars(range(min = 1))]
    pub virtual_nodes: i64,
}

impl Default for SelectorSection {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::default(),
            ewma_half_life: Time::secs(10),
            hash_key: None,
            epsilon: 0.25,
            virtual_nodes: 128,
        }
    }
}

/// Balancing algorithm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename = "algorithm", rename_all = "kebab-case")]
pub enum Algorithm {
    /// One after the other.
    RoundRobin,
    /// One after the other, by weight, interleaved.
    WeightedRr,
    /// The one with the fewest requests in progress.
    LeastConn,
    /// The better of two random ones, by latency and requests in progress.
    #[default]
    P2cEwma,
    /// By hash, past upstreams that carry too much.
    ConsistentHashBounded,
    /// By hash of the client's address.
    IpHash,
}

/// One upstream.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct UpstreamSection {
    /// `http://host:port`, `https://…` or `h2c://…`; a path is put before every request path.
    #[schemars(required)]
    pub url: Option<String>,
    /// Share beside the others, from 1 to 65535, for `weighted-rr`, `consistent-hash-bounded` and
    /// `ip-hash`.
    #[serde(default)]
    pub weight: Weight,
    /// Requests in progress; 0: no limit. Beyond it another upstream is taken; the answer is 503
    /// if all are at their limits.
    #[serde(default)]
    pub max_in_flight: u32,
    /// Used only when no other that is none is eligible.
    #[serde(default)]
    pub backup: bool,
}

/// A weight; the default is 1.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(transparent)]
pub struct Weight(#[schemars(range(min = 1, max = 65535))] pub i64);

impl Default for Weight {
    fn default() -> Self {
        Self(1)
    }
}

/// HTTP version spoken to upstreams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename = "protocol", rename_all = "kebab-case")]
pub enum Protocol {
    /// By ALPN; HTTP/1.1 on cleartext.
    #[default]
    Auto,
    /// HTTP/1.1 only.
    Http1,
    /// HTTP/2 only.
    Http2,
}

/// Idle connections, for each upstream.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct KeepaliveSection {
    /// How many are kept, by all workers together, but at least one by each.
    pub max_idle: u32,
    /// How long one is kept.
    pub idle_timeout: Time,
}

impl Default for KeepaliveSection {
    fn default() -> Self {
        Self { max_idle: 256, idle_timeout: Time::secs(60) }
    }
}

/// Resolution of names.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DnsSection {
    /// How often a name is asked for again.
    pub refresh: Time,
    /// How long the last good answer is used while asking fails.
    pub max_stale: Time,
}

impl Default for DnsSection {
    fn default() -> Self {
        Self { refresh: Time::secs(30), max_stale: Time::secs(300) }
    }
}

/// TLS towards `https` upstreams.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UpstreamTlsSection {
    /// PEM file with the CAs that are trusted; absent: those of the system.
    pub ca_file: Option<String>,
    /// PEM file with the certificate shown to upstreams.
    pub client_cert_file: Option<String>,
    /// PEM file with its key.
    pub client_key_file: Option<String>,
    /// Name that is asked for (SNI) and that the certificate must have; absent: the host of the URL.
    pub server_name: Option<String>,
    /// Accept any certificate: whoever is in between can read and change everything.
    pub insecure_skip_verify: bool,
}

/// Health checks.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Health {
    /// Requests of the proxy's own that ask each upstream how it is; absent: none.
    #[serde(deserialize_with = "section")]
    pub active: Option<Active>,
    /// Scoring of real traffic, which takes out whoever fails or is slow, at most half of a pool;
    /// needs `active`, which brings them back.
    #[serde(deserialize_with = "section")]
    pub passive: Option<Passive>,
}

/// Probes.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Active {
    /// Path that is asked for, whole: that of the upstream's URL is not put before it.
    pub path: String,
    /// Method of the probe.
    pub method: String,
    /// From one probe to the next.
    pub interval: Time,
    /// For one probe; less than `interval`.
    pub timeout: Time,
    /// Good probes in a row that make an upstream eligible.
    #[schemars(range(min = 1))]
    pub healthy_threshold: i64,
    /// Bad probes in a row that make it ineligible.
    #[schemars(range(min = 1))]
    pub unhealthy_threshold: i64,
    /// Statuses that count as good: numbers, or classes like "2xx".
    pub expected_status: Vec<StatusSpec>,
}

impl Default for Active {
    fn default() -> Self {
        Self {
            path: "/healthz".into(),
            method: "GET".into(),
            interval: Time::secs(2),
            timeout: Time::secs(1),
            healthy_threshold: 2,
            unhealthy_threshold: 3,
            expected_status: vec![StatusSpec::Code(200)],
        }
    }
}

/// Scoring of real traffic.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Passive {
    /// Share of errors above which an upstream becomes ineligible.
    pub error_threshold: f64,
    /// p99 latency above which it does; 0: not judged.
    pub latency_threshold_p99: Time,
    /// Half-life of the averages.
    pub half_life: Time,
}

impl Default for Passive {
    fn default() -> Self {
        Self {
            error_threshold: 0.5,
            latency_threshold_p99: Time::secs(0),
            half_life: Time::secs(30),
        }
    }
}

/// When an upstream is taken out for failing.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CircuitBreaker {
    /// Opens above this share of failures: 0.5 is more than half.
    pub failure_ratio: f64,
    /// Not before this many outcomes have been seen.
    #[schemars(range(min = 1))]
    pub min_observations: i64,
    /// Older outcomes do not count.
    pub window: Time,
    /// At most this many outcomes count.
    #[schemars(range(min = 1))]
    pub window_size: i64,
    /// First open time; doubles each time a test fails.
    pub open_min: Time,
    /// Longest open time.
    pub open_max: Time,
    /// Requests that test the upstream after the open time; it closes if all of them succeed.
    #[schemars(range(min = 1))]
    pub half_open_probes: i64,
    /// Opens after this many failures in a row instead of by ratio; 0: by ratio.
    pub consecutive_failures: u32,
    /// Statuses that count as failures: numbers, or classes like "5xx". A class leaves out 501 and
    /// 505, which speak of the request; whoever wants them lists them, `["5xx", 501]`.
    pub failure_statuses: Vec<StatusSpec>,
    /// Statuses of gRPC calls that count as failures, like "UNAVAILABLE".
    pub failure_grpc_statuses: Vec<String>,
}

impl Default for CircuitBreaker {
    fn default() -> Self {
        Self {
            failure_ratio: 0.5,
            min_observations: 20,
            window: Time::secs(30),
            window_size: 100,
            open_min: Time::secs(1),
            open_max: Time::secs(60),
            half_open_probes: 5,
            consecutive_failures: 0,
            failure_statuses: vec![StatusSpec::Class(5)],
            failure_grpc_statuses: Vec::new(),
        }
    }
}

/// How many retries and hedges a pool may be asked for.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RetryBudgetSection {
    /// Share of first tries: 0.2 is one more try for five requests.
    pub ratio: f64,
    /// So many each second are allowed whatever the share.
    pub min_per_second: u32,
}

impl Default for RetryBudgetSection {
    fn default() -> Self {
        Self { ratio: 0.2, min_per_second: 10 }
    }
}

/// Where TCP connections come in.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TcpListenerSection {
    /// Name, unique among the listeners of both kinds.
    #[schemars(required)]
    pub name: Option<String>,
    /// Address.
    #[schemars(required)]
    pub bind: Option<String>,
    /// Name of a TCP pool.
    #[schemars(required)]
    pub pool: Option<String>,
}

/// A group of upstreams for TCP connections.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TcpPoolSection {
    /// Name, unique among the TCP pools.
    #[schemars(required)]
    pub name: Option<String>,
    /// How an upstream is chosen.
    #[serde(default)]
    pub selector: SelectorSection,
    /// For a connection to be established.
    #[serde(default)]
    pub connect_timeout: ConnectTimeout,
    /// At least one.
    #[serde(default)]
    pub upstreams: Vec<TcpUpstreamSection>,
}

/// One upstream for TCP connections.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TcpUpstreamSection {
    /// `host:port`.
    #[schemars(required)]
    pub address: Option<String>,
    /// 1 to 65535.
    #[serde(default)]
    pub weight: Weight,
}
