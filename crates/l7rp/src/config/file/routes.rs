//! Routes as they are written.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::section;
use super::units::{Fields, Size, Time};

/// Which requests go where.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RouteSection {
    /// Name, unique among the routes.
    #[schemars(required)]
    pub name: Option<String>,
    /// Names of the listeners it is bound to; empty: all.
    #[serde(default)]
    pub listeners: Vec<String>,
    /// `api.example.com`, `*.example.com` (exactly one label), or `*` or absent: any host.
    pub host: Option<String>,
    /// Which paths: `/v1` is for `/v1` and `/v1/x`, not for `/v1x`.
    pub path_prefix: Option<String>,
    /// Which methods; empty: all.
    #[serde(default)]
    pub methods: Vec<String>,
    /// Request headers that must be there with this value.
    #[serde(default)]
    pub header_predicates: Vec<Predicate>,
    /// Name of the pool that requests are sent to; or `redirect` or `respond`.
    pub pool: Option<String>,
    /// Answer with a redirect.
    #[serde(default, deserialize_with = "section")]
    pub redirect: Option<RedirectSection>,
    /// Answer with this.
    #[serde(default, deserialize_with = "section")]
    pub respond: Option<RespondSection>,
    /// Change of the path.
    #[serde(default)]
    pub rewrite: RewriteSection,
    /// CIDRs of the clients that are let in; empty: all. Others get 403.
    #[serde(default)]
    pub allow: Vec<String>,
    /// CIDRs of clients that are kept out with 403.
    #[serde(default)]
    pub deny: Vec<String>,
    /// Each at most once; the order does not matter.
    #[serde(default)]
    pub middleware: Vec<MiddlewareItem>,
    /// Deadlines.
    #[serde(default)]
    pub timeouts: RouteTimeouts,
    /// Length of a request body; 0: the limit of the listener. Beyond it the answer is 413.
    #[serde(default)]
    pub max_body_bytes: Size,
    /// How long an upgraded connection may be silent; 1h by default.
    pub tunnel_idle_timeout: Option<Time>,
}

/// A request header that must be there with this value.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Predicate {
    /// Name of the header.
    #[schemars(required)]
    pub name: Option<String>,
    /// Its value.
    #[schemars(required)]
    pub value: Option<String>,
}

/// A redirect.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RedirectSection {
    /// `http` or `https`.
    pub scheme: String,
    /// 301, 302, 303, 307 or 308.
    pub code: i64,
}

impl Default for RedirectSection {
    fn default() -> Self {
        Self { scheme: "https".into(), code: 308 }
    }
}

/// A fixed response.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RespondSection {
    /// 200 to 599.
    pub status: i64,
    /// Text.
    pub body: String,
    /// Media type of the text.
    pub content_type: String,
}

impl Default for RespondSection {
    fn default() -> Self {
        Self { status: 200, body: String::new(), content_type: "text/plain".into() }
    }
}

/// Change of the path.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RewriteSection {
    /// Taken away from the front, first.
    pub strip_prefix: Option<String>,
    /// Put in front, then.
    pub add_prefix: Option<String>,
}

/// One middleware: exactly one of the keys.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MiddlewareItem {
    /// Bounds the rate of requests.
    #[serde(deserialize_with = "section")]
    pub rate_limit: Option<RateLimitSection>,
    /// Tries again, and hedges.
    #[serde(deserialize_with = "section")]
    pub retry: Option<RetrySection>,
    /// Sets and removes headers.
    #[serde(deserialize_with = "section")]
    pub headers: Option<HeadersSection>,
    /// Compresses responses.
    #[serde(deserialize_with = "section")]
    pub compress: Option<CompressSection>,
}

/// Bounds the rate of requests.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RateLimitSection {
    /// Whether each client has its own rate.
    pub scope: Scope,
    /// Requests a second.
    pub per_ip_rps: f64,
    /// Requests at once.
    #[schemars(range(min = 1))]
    pub burst: i64,
    /// Client address counted from the right of `X-Forwarded-For`; 0: the listener's rule.
    pub trust_proxy_hops: u32,
}

impl Default for RateLimitSection {
    fn default() -> Self {
        Self { scope: Scope::PerIp, per_ip_rps: 50.0, burst: 100, trust_proxy_hops: 0 }
    }
}

/// Whether each client has its own rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename = "scope", rename_all = "kebab-case")]
pub enum Scope {
    /// It has.
    #[default]
    PerIp,
    /// One rate for the route.
    PerRoute,
}

/// Tries again, and hedges.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RetrySection {
    /// Tries in all, the first included.
    #[schemars(range(min = 1))]
    pub max_attempts: i64,
    /// Methods that may be tried again.
    pub retry_methods: Vec<String>,
    /// Statuses that are tried again.
    pub retry_on: Vec<i64>,
    /// Statuses of gRPC calls that are tried again, like "UNAVAILABLE"; their method need not be
    /// listed.
    pub retry_on_grpc: Vec<String>,
    /// Length of a body that is kept for another try.
    pub max_replayable_body: Size,
    /// A second try beside the first after this time; 0: none.
    pub hedge_after: Time,
    /// The same after this percentile of the route's latency; 0: none.
    pub hedge_after_percentile: f64,
    /// Methods that may be hedged.
    pub hedgeable: Vec<String>,
    /// Before the second try; doubles, with jitter.
    pub backoff: Time,
}

impl Default for RetrySection {
    fn default() -> Self {
        Self {
            max_attempts: 3,
            retry_methods: vec!["GET".into(), "HEAD".into()],
            retry_on: vec![502, 503, 504],
            retry_on_grpc: Vec::new(),
            max_replayable_body: Size(65536),
            hedge_after: Time::secs(0),
            hedge_after_percentile: 0.0,
            hedgeable: vec!["GET".into(), "HEAD".into()],
            backoff: Time::millis(25),
        }
    }
}

/// Sets and removes headers.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HeadersSection {
    /// Set on the way to the upstream.
    pub add_request: Fields,
    /// Removed on the way to the upstream.
    pub remove_request: Vec<String>,
    /// Set on the way to the client.
    pub add_response: Fields,
    /// Removed on the way to the client.
    pub remove_response: Vec<String>,
}

/// Compresses responses.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CompressSection {
    /// Shorter bodies are left alone.
    pub min_bytes: Size,
    /// Media types that are left alone.
    pub skip_content_types: Vec<String>,
}

impl Default for CompressSection {
    fn default() -> Self {
        Self { min_bytes: Size(1024), skip_content_types: Vec::new() }
    }
}

/// Deadlines of a route.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RouteTimeouts {
    /// For the whole exchange; 0: none.
    pub total: Time,
}
