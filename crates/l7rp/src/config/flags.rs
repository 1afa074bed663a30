//! The plan of the mode without a file: one listener, one pool, one route.

use std::time::Duration;

use super::plan::{
    Action, ActiveHealth, Algorithm, Bind, Breaker, Dns, Drain, HashKey, HeaderChanges, HostHeader,
    HostPattern, Keepalive, Listener, ListenerTimeouts, MessageLimits, Plan, Pool, RetryBudget,
    Rewrite, Route, Selector, Tracing, Upstream, UpstreamProtocol, UpstreamTls,
};
use super::validate::{bind, upstream_url};

/// What is done to backends in this mode, of which the flags say nothing.
pub const WITHOUT_FILE: &str = "without a file upstreams are probed by GET /healthz every 5 s, and \
    get requests only while they answer 2xx; for another probe, or none, write a file: l7rp init";

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// The plan for `--listen`, `--backends` (URLs with commas between them) and
/// `--max-in-flight`; or everything that is wrong with them.
pub fn from_flags(listen: &str, backends: &str, max_in_flight: u32) -> Result<Plan, Vec<String>> {
    let mut wrongs = Vec::new();
    let bind = bind_address("--listen", listen).map_err(|wrong| wrongs.push(wrong)).ok();
    let upstreams = upstreams(backends, &mut wrongs);
    if max_in_flight == 0 {
        wrongs.push("--max-in-flight: must be at least 1".to_owned());
    }
    match bind {
        Some(bind) if wrongs.is_empty() => Ok(Plan {
            listeners: vec![listener(bind)],
            pools: vec![pool(upstreams)],
            routes: vec![route()],
            tcp_listeners: Vec::new(),
            tcp_pools: Vec::new(),
            admin: super::validate::bind("127.0.0.1:9090").ok(),
            admin_token: None,
            max_in_flight,
            drain: Drain { delay: secs(0), timeout: secs(10) },
            workers: None,
            access_log: true,
            tracing: Tracing::default(),
            by_flags: Vec::new(),
            probes_on_data: true,
        }),
        _ => Err(wrongs),
    }
}

/// An address to listen on that was given as a flag.
pub fn bind_address(flag: &str, text: &str) -> Result<Bind, String> {
    bind(text).map_err(|complaint| told(flag, &complaint))
}

fn told(flag: &str, complaint: &super::validate::Complaint) -> String {
    match &complaint.help {
        Some(help) => format!("{flag}: {} ({help})", complaint.message),
        None => format!("{flag}: {}", complaint.message),
    }
}

fn upstreams(backends: &str, wrongs: &mut Vec<String>) -> Vec<Upstream> {
    let mut upstreams: Vec<Upstream> = Vec::new();
    for text in backends.split(',').map(str::trim).filter(|text| !text.is_empty()) {
        let url = match upstream_url(text) {
            Ok(url) => url,
            Err(complaint) => {
                wrongs.push(told(&format!("--backends {text}"), &complaint));
                continue;
            }
        };
        if upstreams.iter().any(|other| other.url == text) {
            wrongs.push(format!("--backends {text}: is there twice"));
            continue;
        }
        upstreams.push(Upstream {
            url: text.to_owned(),
            scheme: url.scheme,
            host: url.host,
            port: url.port,
            authority: url.authority,
            base_path: url.base_path,
            weight: 1,
            max_in_flight: 0,
            backup: false,
        });
    }
    if upstreams.is_empty() && wrongs.is_empty() {
        wrongs.push("--backends: at least one URL is needed".to_owned());
    }
    upstreams
}

fn listener(bind: Bind) -> Listener {
    Listener {
        name: "main".to_owned(),
        bind,
        tls: None,
        timeouts: ListenerTimeouts {
            read_header: secs(5),
            read: secs(30),
            write: secs(30),
            idle: secs(60),
            max_header_bytes: 65536,
        },
        http3: false,
        trusted_proxies: Vec::new(),
        proxy_protocol: false,
        decision_header_for: Vec::new(),
        max_connections: 0,
        limits: MessageLimits {
            max_headers: 100,
            max_target_bytes: 16384,
            max_trailer_bytes: 16384,
            max_body_bytes: 0,
            min_body_rate: 0,
        },
        max_in_flight: 0,
    }
}

fn pool(upstreams: Vec<Upstream>) -> Pool {
    Pool {
        name: "backends".to_owned(),
        selector: Selector {
            algorithm: Algorithm::RoundRobin,
            ewma_half_life: secs(10),
            hash_key: HashKey::ClientIp,
            epsilon: 0.25,
            virtual_nodes: 128,
        },
        upstreams,
        connect_timeout: secs(2),
        response_header_timeout: secs(5),
        protocol: UpstreamProtocol::Auto,
        keepalive: Keepalive { max_idle: 256, idle_timeout: secs(60) },
        host_header: HostHeader::Upstream,
        dns: Dns { refresh: secs(30), max_stale: secs(300) },
        tls: UpstreamTls::default(),
        active: Some(ActiveHealth {
            path: "/healthz".to_owned(),
            method: "GET".to_owned(),
            interval: secs(5),
            timeout: secs(1),
            healthy_threshold: 1,
            unhealthy_threshold: 1,
            expected_status: vec![(200, 299)],
        }),
        passive: None,
        breaker: Breaker {
            failure_ratio: 0.5,
            min_observations: 20,
            window: secs(30),
            window_size: 100,
            open_min: secs(15),
            open_max: secs(15),
            half_open_probes: 1,
            consecutive_failures: 5,
            failure_statuses: vec![(500, 599)],
            failure_grpc_statuses: Vec::new(),
        },
        retry_budget: RetryBudget { ratio: 0.2, min_per_second: 10 },
        max_in_flight: 0,
        slow_start: secs(0),
    }
}

fn route() -> Route {
    Route {
        name: "all".to_owned(),
        listeners: Vec::new(),
        host: HostPattern::Any,
        path_prefix: "/".to_owned(),
        methods: Vec::new(),
        predicates: Vec::new(),
        action: Action::Pool(0),
        rewrite: Rewrite::default(),
        allow: Vec::new(),
        deny: Vec::new(),
        rate_limit: None,
        retry: None,
        headers: HeaderChanges::default(),
        compress: None,
        total_timeout: secs(0),
        max_body_bytes: 0,
        tunnel_idle_timeout: secs(3600),
    }
}
