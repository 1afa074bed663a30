//! Pools and their upstreams.

use std::path::PathBuf;

use l7rp_core::head::is_token;

use super::files::Mention;
use super::{Check, Complaint, Unique, headers, health, net};
use crate::config::file::{
    Algorithm as Written, File, KeyPath, PoolSection, Protocol, SelectorSection, UpstreamSection,
    UpstreamTlsSection,
};
use crate::config::plan::{
    Algorithm, Dns, HashKey, HostHeader, Keepalive, Pool, RetryBudget, Scheme, Selector, Upstream,
    UpstreamProtocol, UpstreamTls,
};

pub(super) fn check(check: &mut Check<'_>, file: &File) -> Vec<Pool> {
    let mut names = Unique::new("pool name");
    let around = KeyPath::root().key("upstream_pools");
    let mut pools = Vec::with_capacity(file.upstream_pools.len());
    for (i, written) in file.upstream_pools.iter().enumerate() {
        let at = around.index(i);
        let pool = pool(check, written, &at, &mut names);
        let used =
            |route: &crate::config::file::RouteSection| route.pool.as_ref() == Some(&pool.name);
        if !pool.name.is_empty() && !file.routes.iter().any(used) && !check.doubtful("routes") {
            check.warn(&at.key("name"), format!("no route uses the pool `{}`", pool.name));
        }
        pools.push(pool);
    }
    pools
}

fn pool(check: &mut Check<'_>, written: &PoolSection, at: &KeyPath, names: &mut Unique) -> Pool {
    let name = check.name(written.name.as_ref(), at, names);
    let health = health::check(check, &written.health, &at.key("health"));
    let keepalive_at = at.key("keepalive");
    let dns_at = at.key("dns");
    let budget_at = at.key("retry_budget");
    Pool {
        name,
        selector: selector(check, &written.selector, &at.key("selector")),
        upstreams: upstreams(check, written, at),
        connect_timeout: check
            .time_above_zero(written.connect_timeout.0, &at.key("connect_timeout")),
        response_header_timeout: check
            .time_above_zero(written.response_header_timeout.0, &at.key("response_header_timeout")),
        protocol: match written.protocol {
            Protocol::Auto => UpstreamProtocol::Auto,
            Protocol::Http1 => UpstreamProtocol::Http1,
            Protocol::Http2 => UpstreamProtocol::Http2,
        },
        keepalive: Keepalive {
            max_idle: written.keepalive.max_idle as usize,
            idle_timeout: check
                .time_above_zero(written.keepalive.idle_timeout, &keepalive_at.key("idle_timeout")),
        },
        host_header: host_header(check, written.host_header.as_deref(), &at.key("host_header")),
        dns: Dns {
            refresh: check.time_above_zero(written.dns.refresh, &dns_at.key("refresh")),
            max_stale: check.time(written.dns.max_stale, &dns_at.key("max_stale")),
        },
        tls: upstream_tls(check, &written.upstream_tls, &at.key("upstream_tls")),
        active: health.active,
        passive: health.passive,
        breaker: health::breaker(check, &written.circuit_breaker, &at.key("circuit_breaker")),
        retry_budget: RetryBudget {
            ratio: check.share(written.retry_budget.ratio, &budget_at.key("ratio")),
            min_per_second: written.retry_budget.min_per_second,
        },
        max_in_flight: written.max_in_flight,
        slow_start: check.time(written.slow_start, &at.key("slow_start")),
    }
}

pub(super) fn selector(check: &mut Check<'_>, written: &SelectorSection, at: &KeyPath) -> Selector {
    let key_at = at.key("hash_key");
    let hash_key = match &written.hash_key {
        Some(text) => check.or_complain(hash_key(text), &key_at),
        None => None,
    };
    if written.algorithm == Written::ConsistentHashBounded
        && written.hash_key.is_none()
        && !check.doubtful_key(at, "hash_key")
    {
        let complaint = Complaint::new("`consistent-hash-bounded` needs `hash_key`");
        let help = "write `hash_key: client_ip`, `header:NAME` or `cookie:NAME`";
        check.complain(&at.key("algorithm"), complaint.help(help));
    }
    if written.epsilon.is_nan() || written.epsilon <= 0.0 {
        let message = format!("`epsilon` must be above 0, is {}", written.epsilon);
        check.wrong(&at.key("epsilon"), message);
    }
    Selector {
        algorithm: match written.algorithm {
            Written::RoundRobin => Algorithm::RoundRobin,
            Written::WeightedRr => Algorithm::WeightedRr,
            Written::LeastConn => Algorithm::LeastConn,
            Written::P2cEwma => Algorithm::P2cEwma,
            Written::ConsistentHashBounded => Algorithm::ConsistentHashBounded,
            Written::IpHash => Algorithm::IpHash,
        },
        ewma_half_life: check.time_above_zero(written.ewma_half_life, &at.key("ewma_half_life")),
        hash_key: hash_key.unwrap_or(HashKey::ClientIp),
        epsilon: written.epsilon,
        virtual_nodes: check.at_least_one(written.virtual_nodes, &at.key("virtual_nodes")),
    }
}

fn hash_key(text: &str) -> Result<HashKey, Complaint> {
    const HELP: &str = "write `client_ip`, `header:NAME` or `cookie:NAME`";
    match text.split_once(':') {
        None if text == "client_ip" => Ok(HashKey::ClientIp),
        Some((kind @ ("header" | "cookie"), "")) => {
            Err(Complaint::new(format!("there is no name after `{kind}:`")))
        }
        Some(("header", name)) => headers::name(name).map(HashKey::Header),
        Some(("cookie", name)) if is_token(name.as_bytes()) => Ok(HashKey::Cookie(name.to_owned())),
        Some(("cookie", name)) => {
            Err(Complaint::new(format!("`{}` is not the name of a cookie", name.escape_debug())))
        }
        _ => Err(Complaint::new(format!("unknown hash key `{}`", text.escape_debug())).help(HELP)),
    }
}

fn upstreams(check: &mut Check<'_>, written: &PoolSection, at: &KeyPath) -> Vec<Upstream> {
    let around = at.key("upstreams");
    check.not_empty(written.upstreams.is_empty(), at, written.name.as_deref());
    let mut urls = Unique::new("upstream URL");
    written
        .upstreams
        .iter()
        .enumerate()
        .map(|(i, one)| upstream(check, one, written.protocol, &around.index(i), &mut urls))
        .collect()
}

impl Check<'_> {
    /// Complains about a pool with no upstreams.
    pub(super) fn not_empty(&mut self, empty: bool, at: &KeyPath, name: Option<&str>) {
        if empty && !self.doubtful_key(at, "upstreams") {
            let list = at.key("upstreams");
            let at = if self.tree.get(&list).is_some() { &list } else { at };
            self.wrong(at, format!("the pool `{}` has no upstreams", name.unwrap_or_default()));
        }
    }

    pub(super) fn weight(&mut self, weight: i64, at: &KeyPath) -> u32 {
        if !(1..=65535).contains(&weight) {
            self.wrong(at, format!("`weight` must be from 1 to 65535, is {weight}"));
        }
        u32::try_from(weight).unwrap_or(1)
    }
}

fn upstream(
    check: &mut Check<'_>,
    written: &UpstreamSection,
    protocol: Protocol,
    around: &KeyPath,
    urls: &mut Unique,
) -> Upstream {
    let at = around.key("url");
    let text = check.need(written.url.as_ref(), around, "url").unwrap_or_default();
    let url = if text.is_empty() { None } else { check.or_complain(net::upstream_url(text), &at) };
    if url.is_some() {
        urls.add(check, text, &at);
    }
    let url = url.unwrap_or(net::Url {
        scheme: Scheme::Http,
        host: String::new(),
        port: 0,
        authority: String::new(),
        base_path: String::new(),
    });
    if url.scheme == Scheme::H2c && protocol == Protocol::Http1 {
        check.wrong(&at, "an `h2c` upstream cannot be in a pool with `protocol: http1`");
    }
    Upstream {
        url: text.to_owned(),
        scheme: url.scheme,
        host: url.host,
        port: url.port,
        authority: url.authority,
        base_path: url.base_path,
        weight: check.weight(written.weight.0, &around.key("weight")),
        max_in_flight: written.max_in_flight,
        backup: written.backup,
    }
}

fn host_header(check: &mut Check<'_>, written: Option<&str>, at: &KeyPath) -> HostHeader {
    match written {
        None | Some("preserve") => HostHeader::Preserve,
        Some("upstream") => HostHeader::Upstream,
        Some(literal) => {
            let good = net::authority(literal).map_err(|_| {
                let complaint =
                    Complaint::new(format!("`{}` cannot be a Host", literal.escape_debug()));
                complaint.help("write `preserve`, `upstream`, or a host with or without a port")
            });
            check.or_complain(good, at);
            HostHeader::Literal(literal.to_owned())
        }
    }
}

fn upstream_tls(check: &mut Check<'_>, written: &UpstreamTlsSection, at: &KeyPath) -> UpstreamTls {
    let (cert_at, key_at) = (at.key("client_cert_file"), at.key("client_key_file"));
    let (cert, key, _) = check.pair(
        &Mention { file: written.client_cert_file.as_deref(), at: &cert_at },
        &Mention { file: written.client_key_file.as_deref(), at: &key_at },
    );
    if cert.is_some() && key.is_none() && !check.doubtful_key(at, "client_key_file") {
        check.wrong(&cert_at, "`client_cert_file` needs `client_key_file`");
    }
    if key.is_some() && cert.is_none() && !check.doubtful_key(at, "client_cert_file") {
        check.wrong(&key_at, "`client_key_file` needs `client_cert_file`");
    }
    if written.insecure_skip_verify {
        let message = "with `insecure_skip_verify` anybody between here and the upstream can read and change everything";
        check.warn(&at.key("insecure_skip_verify"), message);
    }
    let ca_at = at.key("ca_file");
    let ca_file: Option<PathBuf> = written.ca_file.as_ref().map(|file| check.ca(file, &ca_at));
    if let Some(name) = &written.server_name {
        check.or_complain(net::tls_name(name, false), &at.key("server_name"));
    }
    UpstreamTls {
        ca_file,
        client_cert: cert.zip(key),
        server_name: written.server_name.clone(),
        insecure_skip_verify: written.insecure_skip_verify,
    }
}
