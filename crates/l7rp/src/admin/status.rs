//! `/status`: what a running instance is about, as one JSON value. Its shape is a public
//! contract, of which `/-/status.schema.json` is the text. Programs of other versions read it:
//! words of lists that may grow are strings here.

mod taken;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::{Deserialize, Serialize};

use crate::live::Process;

/// What a running instance of l7rp is about.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct Status {
    /// The program's version.
    pub version: String,
    /// Process id.
    pub pid: u32,
    /// Now, by the wall clock: RFC 3339, UTC.
    pub time: String,
    /// Milliseconds since the process began, by a clock that never goes back: the difference of
    /// two is what the differences of counters are to be divided by.
    pub uptime_ms: u64,
    /// Traffic should be sent here: what `/readyz` says.
    pub ready: bool,
    /// Why it should not, in words; null: it should.
    pub why_unready: Option<String>,
    /// It is about to end: connections end after their request.
    pub draining: bool,
    /// Threads that serve requests.
    pub workers: u64,
    /// Requests in progress, tunnels included.
    pub in_flight: u64,
    /// The most of these; 0: no limit.
    pub max_in_flight: u64,
    /// Clients connected.
    pub connections: u64,
    /// Upgraded connections among these.
    pub tunnels: u64,
    /// Log lines that found no room, or were not worth one.
    pub log_lines_dropped: u64,
    /// Panics that were caught.
    pub panics: u64,
    /// The configuration in force.
    pub config: Config,
    /// Listeners, in the order of the file.
    pub listeners: Vec<Listener>,
    /// Routes, in the order of the file.
    pub routes: Vec<Route>,
    /// Pools, in the order of the file.
    pub pools: Vec<Pool>,
}

/// The configuration in force, and what became of others.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct Config {
    /// 1 at the start, and one more with each reload and each other weight of an upstream.
    pub generation: u64,
    /// When it was put in force: RFC 3339, UTC.
    pub taken: String,
    /// Reloads that were put in force.
    pub reloads: u64,
    /// Reloads that were refused.
    pub rejected: u64,
    /// The last reload was refused: the file is not what is in force.
    pub last_rejected: bool,
    /// Why one was last refused, in words; null: none was.
    pub last_error: Option<String>,
}

/// A listener.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct Listener {
    /// Its name.
    pub name: String,
    /// The address as configured.
    pub bind: String,
    /// What may be spoken there: `http/1.1`, `h2`, `h3`.
    pub protocols: Vec<String>,
    /// TLS is spoken there.
    pub tls: bool,
    /// Certificates that clients are shown.
    pub certificates: Vec<Certificate>,
    /// Clients connected.
    pub connections: u64,
    /// The most of these.
    pub max_connections: u64,
    /// Requests in progress.
    pub in_flight: u64,
    /// The most of these; 0: no limit.
    pub max_in_flight: u64,
    /// Requests that no route matched.
    pub no_route: u64,
    /// Requests that were refused for what they were.
    pub bad_requests: u64,
    /// Requests and connections that were refused because something was full.
    pub shed: u64,
    /// TLS handshakes that came to nothing.
    pub tls_failures: u64,
}

/// A certificate.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct Certificate {
    /// The first name that it is served for.
    pub host: String,
    /// Until when it is valid: RFC 3339, UTC.
    pub expires: String,
    /// Seconds until then; below 0: it has expired.
    pub expires_in_s: i64,
}

/// A route.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct Route {
    /// Its name.
    pub name: String,
    /// A name, or `*.` and a domain; null: any host.
    pub host: Option<String>,
    /// Which paths.
    pub path_prefix: String,
    /// What is done with a request: `pool`, `redirect`, `respond`.
    pub action: String,
    /// The pool that requests are sent to, if they are.
    pub pool: Option<String>,
    /// Requests answered.
    pub requests: u64,
    /// The same by class of status.
    pub by_class: Classes,
    /// Requests refused because there were too many; among those with 4xx.
    pub rate_limited: u64,
    /// Upgraded connections.
    pub tunnels: u64,
}

/// Counts of answers by class of status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct Classes {
    /// 101: tunnels.
    #[serde(rename = "1xx")]
    pub informational: u64,
    /// Good.
    #[serde(rename = "2xx")]
    pub success: u64,
    /// Elsewhere, or as before.
    #[serde(rename = "3xx")]
    pub redirection: u64,
    /// Faults of clients.
    #[serde(rename = "4xx")]
    pub client_error: u64,
    /// Faults behind the proxy, or in it.
    #[serde(rename = "5xx")]
    pub server_error: u64,
}

/// A pool.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// How an upstream is chosen, in the words of the configuration.
    pub algorithm: String,
    /// Requests in progress.
    pub in_flight: u64,
    /// The most of these; 0: no limit.
    pub max_in_flight: u64,
    /// Extra tries that the budget did not allow.
    pub budget_exhausted: u64,
    /// Upstreams, in the order of the file.
    pub upstreams: Vec<Upstream>,
}

/// An upstream.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct Upstream {
    /// As configured.
    pub url: String,
    /// Its share, where the algorithm heeds it.
    pub weight: u64,
    /// Used only when no other is eligible.
    pub backup: bool,
    /// It may be chosen.
    pub eligible: bool,
    /// An operator has taken it out.
    pub drained: bool,
    /// Why it may not be chosen, in words; null: it may.
    pub why_not: Option<String>,
    /// Its circuit breaker.
    pub breaker: Breaker,
    /// Requests in progress.
    pub in_flight: u64,
    /// The most of these; 0: no limit.
    pub max_in_flight: u64,
    /// Moving average of the time to the head of an answer, in milliseconds; null: there was none
    /// lately.
    pub ewma_ms: Option<f64>,
    /// Tries, whatever came of them.
    pub requests: u64,
    /// Tries without a whole answer, or with a status that counts as a failure.
    pub failures: u64,
    /// What the last probe has found; null: there was none.
    pub last_probe: Option<Probe>,
    /// Where it is, by now.
    pub addresses: Vec<String>,
    /// Connections to it.
    pub connections: Connections,
}

/// A circuit breaker.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct Breaker {
    /// `closed`, `open` or `half_open`.
    pub state: String,
    /// An operator has forced it to be so.
    pub forced: bool,
    /// Milliseconds until it lets the next request in if nothing but time passes; 0: now; null: never.
    pub admits_in_ms: Option<u64>,
}

/// A health check.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct Probe {
    /// Milliseconds since it ended.
    pub ago_ms: u64,
    /// From its begin to the head of the answer, or to its failure, in milliseconds.
    pub took_ms: f64,
    /// A good answer.
    pub good: bool,
    /// `status:` and the status, or one of a fixed list.
    pub reason: String,
}

/// Connections to an upstream.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
pub struct Connections {
    /// Without a request.
    pub idle: u64,
    /// In use.
    pub active: u64,
}

impl Status {
    /// Of this process, now.
    pub fn of(process: &Process) -> Self {
        taken::status(process)
    }
}

/// JSON Schema of [`Status`].
pub fn schema() -> serde_json::Value {
    // As it is written: every key is there, if only as null.
    let settings = SchemaSettings::draft2020_12().for_serialize();
    settings.into_generator().into_root_schema_for::<Status>().to_value()
}
