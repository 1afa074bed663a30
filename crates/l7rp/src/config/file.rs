//! The configuration as it is written: the structs mirror the file key by key, nothing is
//! checked beyond types. This module and its children are the only ones that know YAML.
//!
//! Keys that must be there are `Option`s all the same: their absence is found by the checks
//! of the parent module, so that one missing key does not hide what is wrong elsewhere. The
//! doc comments are the descriptions in the JSON schema.

mod fault;
mod near;
mod nodes;
mod pools;
mod reader;
mod routes;
mod units;
mod yaml;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

pub use near::nearest;
pub use nodes::{Entry, KeyPath, Kind, Node, Place, Step, Tree};
pub use pools::{
    Active, Algorithm, CircuitBreaker, DnsSection, Health, KeepaliveSection, Passive, PoolSection,
    Protocol, RetryBudgetSection, SelectorSection, TcpListenerSection, TcpPoolSection,
    TcpUpstreamSection, UpstreamSection, UpstreamTlsSection,
};
pub use reader::{Reading, read};
pub use routes::{
    CompressSection, HeadersSection, MiddlewareItem, Predicate, RateLimitSection, RedirectSection,
    RespondSection, RetrySection, RewriteSection, RouteSection, RouteTimeouts, Scope,
};
pub use units::{Fields, Size, StatusSpec, Time, WorkerCount, show_duration};
pub use yaml::parse;

/// Configuration of l7rp.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(title = "l7rp configuration")]
pub struct File {
    /// Where HTTP requests come in.
    pub listeners: Vec<ListenerSection>,
    /// Groups of upstreams that serve the same thing.
    pub upstream_pools: Vec<PoolSection>,
    /// Which requests go where. The order in the file matters only between routes whose host and
    /// path are the same.
    pub routes: Vec<RouteSection>,
    /// Where TCP connections come in. Not served yet: an entry is refused.
    pub tcp_listeners: Vec<TcpListenerSection>,
    /// Groups of upstreams for TCP connections. Not served yet: an entry is refused.
    pub tcp_pools: Vec<TcpPoolSection>,
    /// Metrics, health and status of the proxy itself.
    pub admin: AdminSection,
    /// Bounds of the whole process.
    pub limits: ProcessLimits,
    /// How to stop.
    pub drain: DrainSection,
    /// Threads that serve requests: `auto` (one for each core) or a number. Takes a new process to
    /// change.
    pub workers: WorkerCount,
    /// One log line for each request.
    pub access_log: AccessLogSection,
    /// Export of OpenTelemetry spans.
    pub tracing: TracingSection,
}

/// Where HTTP requests come in.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListenerSection {
    /// Name, unique among the listeners. Logs and metrics have it, and routes refer to it.
    #[schemars(required)]
    pub name: Option<String>,
    /// Address: `127.0.0.1:8080`, `[::]:80` or `unix:/run/l7rp.sock`. The file of a Unix-domain
    /// socket gets mode 0666: who may connect is a matter of its folder's permissions.
    #[schemars(required)]
    pub bind: Option<String>,
    /// TLS termination; absent: cleartext.
    #[serde(default, deserialize_with = "section")]
    pub tls: Option<TlsSection>,
    /// Deadlines of a client connection.
    #[serde(default)]
    pub timeouts: ListenerTimeoutsSection,
    /// Serve HTTP/3 too; needs `tls`. Not served yet: `true` is refused.
    #[serde(default)]
    pub enable_http3: bool,
    /// Addresses or CIDRs of the proxies in front whose `X-Forwarded-*`, `Forwarded` and
    /// `X-Request-ID` are believed. The client is then the first address from the right that is
    /// none of these; otherwise it is the peer.
    #[serde(default)]
    pub trusted_proxies: Vec<String>,
    /// Expect PROXY protocol v1 or v2 from `trusted_proxies`. Not served yet: `true` is refused.
    #[serde(default)]
    pub proxy_protocol: bool,
    /// Addresses or CIDRs of the peers whose responses carry `X-L7rp-Decision`: route, pool, upstream and tries.
    #[serde(default)]
    pub decision_header_for: Vec<String>,
    /// Connections at once; 0: half of the descriptor limit. Beyond it the answer is 503, and the
    /// connection is closed.
    #[serde(default)]
    pub max_connections: u32,
    /// Bounds of one request.
    #[serde(default)]
    pub limits: MessageLimitsSection,
    /// Requests in progress on this listener; 0: no limit. Beyond it the answer is 503.
    #[serde(default)]
    pub max_in_flight: u32,
}

/// TLS termination.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TlsSection {
    /// Lowest version accepted: "1.2" or "1.3", in quotes.
    pub min_version: String,
    /// Certificates from files. The one for exactly the name is shown, else the one for a wildcard,
    /// else the first. All files are read anew on each reload.
    pub certs: Vec<CertSection>,
    /// Certificates that a CA issues while the proxy runs.
    #[serde(deserialize_with = "section")]
    pub autocert: Option<AutocertSection>,
    /// Certificates asked of clients.
    #[serde(deserialize_with = "section")]
    pub client_auth: Option<ClientAuthSection>,
}

impl Default for TlsSection {
    fn default() -> Self {
        Self { min_version: "1.2".into(), certs: Vec::new(), autocert: None, client_auth: None }
    }
}

/// A certificate chain and its key.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CertSection {
    /// PEM file with the chain, the server's own certificate first. A relative path is looked for
    /// from the folder of the configuration, here and everywhere.
    #[schemars(required)]
    pub cert: Option<String>,
    /// PEM file with the key, unencrypted.
    #[schemars(required)]
    pub key: Option<String>,
    /// Names it is served for, exact or `*.example.com`; empty: those in the certificate.
    #[serde(default)]
    pub hosts: Vec<String>,
}

/// Certificates by ACME.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AutocertSection {
    /// Directory where keys and certificates are kept. Processes may share it: one asks, all serve.
    #[schemars(required)]
    pub cache_dir: Option<String>,
    /// Names that certificates are asked for, one for each.
    #[serde(default)]
    pub allowed_hosts: Vec<String>,
    /// Contact address given to the authority.
    pub email: Option<String>,
    /// Directory URL of the authority; absent: Let's Encrypt.
    pub directory_url: Option<String>,
    /// PEM file with the CA of a private ACME server.
    pub ca_file: Option<String>,
}

/// Certificates asked of clients.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ClientAuthSection {
    /// PEM file with the CAs that client certificates must come from.
    #[schemars(required)]
    pub ca_file: Option<String>,
    /// Whether a client without a certificate is refused. One that shows a wrong certificate always
    /// is.
    #[serde(default)]
    pub mode: ClientAuthMode,
    /// Field by which upstreams are told who the client is. Clients cannot send it themselves, on
    /// any listener.
    pub identity_header: Option<String>,
}

/// Whether a client without a certificate is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename = "mode", rename_all = "kebab-case")]
pub enum ClientAuthMode {
    /// It is.
    #[default]
    Require,
    /// It is let in.
    Optional,
}

/// Deadlines of a client connection.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ListenerTimeoutsSection {
    /// For one whole request head, and for a TLS handshake. Beyond it the answer is 408.
    pub read_header: Time,
    /// Without progress of a request body; not for the whole of it. Beyond it the answer is 408.
    pub read: Time,
    /// Without progress of a response that there are bytes for: the client does not read. Beyond it
    /// the connection is closed.
    pub write: Time,
    /// Between requests on one connection.
    pub idle: Time,
    /// Largest request head: request line and fields. Beyond it the answer is 431.
    pub max_header_bytes: Size,
}

impl Default for ListenerTimeoutsSection {
    fn default() -> Self {
        Self {
            read_header: Time::secs(5),
            read: Time::secs(30),
            write: Time::secs(30),
            idle: Time::secs(120),
            max_header_bytes: Size(65536),
        }
    }
}

/// Bounds of one request.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MessageLimitsSection {
    /// Fields of a head. Beyond it the answer is 431.
    #[schemars(range(min = 1))]
    pub max_headers: i64,
    /// Length of a request target: path and query. Beyond it the answer is 414.
    pub max_target_bytes: Size,
    /// Length of the fields that follow a chunked body.
    pub max_trailer_bytes: Size,
    /// Length of a request body; 0: no limit. Beyond it the answer is 413.
    pub max_body_bytes: Size,
    /// Bytes a second that a request body must keep up after 10 s; 0: no limit. Below it the answer
    /// is 408.
    pub min_body_rate: Size,
}

impl Default for MessageLimitsSection {
    fn default() -> Self {
        Self {
            max_headers: 100,
            max_target_bytes: Size(16384),
            max_trailer_bytes: Size(16384),
            max_body_bytes: Size(0),
            min_body_rate: Size(0),
        }
    }
}

/// Metrics, health and status of the proxy itself.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AdminSection {
    /// Address, like that of a listener; empty: nowhere. The file of a Unix-domain socket has what
    /// the umask leaves. The flag `--metrics-bind` wins over it.
    pub bind: String,
    /// File with the token, of 16 characters or more, that those who change something must show,
    /// unless they come by a Unix-domain socket; absent: changes are taken from this machine only.
    pub token_file: Option<String>,
}

impl Default for AdminSection {
    fn default() -> Self {
        Self { bind: "127.0.0.1:9090".into(), token_file: None }
    }
}

/// Bounds of the whole process.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProcessLimits {
    /// Requests in progress; 0: no limit. Beyond it the answer is 503.
    pub max_in_flight: u32,
}

/// How to stop.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DrainSection {
    /// How long to report unready while still accepting, so that a load balancer in front has time
    /// to see it.
    pub delay: Time,
    /// How long requests in progress may take to end. What is left is then cut.
    pub timeout: Time,
}

impl Default for DrainSection {
    fn default() -> Self {
        Self { delay: Time::secs(0), timeout: Time::secs(30) }
    }
}

/// One log line for each request.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AccessLogSection {
    /// Whether it is written, to standard output. Events are written in any case.
    pub enabled: bool,
}

impl Default for AccessLogSection {
    fn default() -> Self {
        Self { enabled: true }
    }
}

/// Export of OpenTelemetry spans.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TracingSection {
    /// OTLP/gRPC collector as `host:port`; empty: no export.
    pub endpoint: String,
    /// Share of traces that begin here: 0 to 1; 0.01 if neither this nor the environment says.
    pub sample_ratio: Option<f64>,
    /// Reach the collector without TLS.
    pub insecure: bool,
}

impl Default for TracingSection {
    fn default() -> Self {
        Self { endpoint: String::new(), sample_ratio: None, insecure: true }
    }
}

/// Reads an optional section, so that a blank one (`retry:` with nothing after it) is there,
/// with its defaults, and not absent.
pub(super) fn section<'de, D, T>(from: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    T::deserialize(from).map(Some)
}
