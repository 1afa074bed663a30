//! Routes as they are written.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::section;
use super::units::{Fields, Size, Time};

/// Which requests go where.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RouteSection {
    /// Name, unique among the routes. Logs and metrics have it.
    #[schemars(required)]
    pub name: Option<String>,
    /// Names of the listeners it is bound to; empty: all.
    #[serde(default)]
    pub listeners: Vec<String>,
    /// `api.example.com`, `*.example.com` (exactly one label), or `*` or absent: any host.
    pub host: Option<String>,
    /// Which paths: `/v1` is for `/v1` and `/v1/x`, not for `/v1x`; `/` by default. Paths are
    /// compared as they were sent.
    pub path_prefix: Option<String>,
    /// Which methods; empty: all.
    #[serde(default)]
    pub methods: Vec<String>,
    /// Request headers that must be there with this value, all of them.
    #[serde(default)]
    pub header_predicates: Vec<Predicate>,
    /// Name of the pool that requests are sent to. A route has exactly one of `pool`, `redirect` and
    /// `respond`.
    pub pool: Option<String>,
    /// Answer with a redirect to the same host, without its port, and the same path and query.
    #[serde(default, deserialize_with = "section")]
    pub redirect: Option<RedirectSection>,
    /// Answer with this; no upstream is asked.
    #[serde(default, deserialize_with = "section")]
    pub respond: Option<RespondSection>,
    /// Change of the path on the way to the upstream.
    #[serde(default)]
    pub rewrite: RewriteSection,
    /// Addresses or CIDRs of the clients that are let in; empty: all. Others get 403.
    #[serde(default)]
    pub allow: Vec<String>,
    /// Addresses or CIDRs of clients that are kept out with 403, those in `allow` too.
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
    /// How long an upgraded connection (WebSocket) or a gRPC call may be silent; `1h` by default.
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
    /// Scheme of the target: `http` or `https`.
    pub scheme: String,
    /// Status: 301, 302, 303, 307 or 308.
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
    /// Status: 200 to 599.
    pub status: i64,
    /// Text of the answer.
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
    /// Taken away from the front of the path, first: `/v1` makes `/x` of `/v1/x`.
    pub strip_prefix: Option<String>,
    /// Put in front of the path, then.
    pub add_prefix: Option<String>,
}

/// One middleware: exactly one of the keys.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MiddlewareItem {
    /// Bounds the rate of requests; beyond it the answer is 429.
    #[serde(deserialize_with = "section")]
    pub rate_limit: Option<RateLimitSection>,
    /// Tries again what has failed, and hedges what is slow.
    #[serde(deserialize_with = "section")]
    pub retry: Option<RetrySection>,
    /// Sets and removes headers.
    #[serde(deserialize_with = "section")]
    pub headers: Option<HeadersSection>,
    /// Compresses responses. Not served yet: it is refused.
    #[serde(deserialize_with = "section")]
    pub compress: Option<CompressSection>,
}

/// Bounds the rate of requests.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RateLimitSection {
    /// Whether each client has its own rate.
    pub scope: Scope,
    /// Requests a second, of each client or, in spite of the name, of all together with
    /// `scope: per-route`. May have a fraction.
    pub per_ip_rps: f64,
    /// Requests that may come at once after a silence.
    #[schemars(range(min = 1))]
    pub burst: i64,
    /// The client is this entry of `X-Forwarded-For`, counted from the right, for this limit alone;
    /// 0: by the listener's `trusted_proxies`. Not together with those.
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
    /// Methods that may be tried again. What was not sent at all is, whatever its method.
    pub retry_methods: Vec<String>,
    /// Statuses that are tried again, with the errors that stand for them: a reset connection is a
    /// 502, a timeout a 504.
    pub retry_on: Vec<i64>,
    /// Statuses of gRPC calls that are tried again, like "UNAVAILABLE"; their method need not be
    /// listed.
    pub retry_on_grpc: Vec<String>,
    /// Length of a request body that is kept for another try; a longer one is sent once. At most
    /// `1GiB`.
    pub max_replayable_body: Size,
    /// A second try is sent beside the first when that has given nothing after this time; 0: none.
    pub hedge_after: Time,
    /// The same after this percentile of the route's own latency, 95 for example; 0: none.
    pub hedge_after_percentile: f64,
    /// Methods that may be hedged: `GET`, `HEAD` and `OPTIONS` at most.
    pub hedgeable: Vec<String>,
    /// Pause before the second try; doubles with each one after it, and is shortened at random.
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
    /// Fields set on the way to the upstream, in place of what is there.
    pub add_request: Fields,
    /// Fields removed on the way to the upstream.
    pub remove_request: Vec<String>,
    /// Fields set on the way to the client, in place of what is there.
    pub add_response: Fields,
    /// Fields removed on the way to the client.
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
    /// For the whole exchange, tries and pauses included; 0: none. Beyond it the answer is 504, or
    /// is cut if it has begun.
    pub total: Time,
}
