//! A plan as it may be shown, in the words of the configuration file.
//!
//! The patterns name every field: a new one does not compile until someone decides how it is
//! shown, and whether it may be.

use std::time::Duration;

use l7rp_core::grpc;
use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::file::show_duration;
use super::plan::{
    Action, ActiveHealth, Autocert, Breaker, Certificate, ClientAuth, Compress, Dns, Drain,
    HashKey, HeaderChanges, HostHeader, HostPattern, Keepalive, Listener, ListenerTimeouts,
    ListenerTls, MessageLimits, PassiveHealth, Plan, Pool, RateLimit, Retry, RetryBudget, Rewrite,
    Route, Selector, TcpListener, TcpPool, TcpUpstream, TlsVersion, Tracing, Upstream, UpstreamTls,
};

/// The plan as a JSON object. Routes name their pool and listeners, so that a place that has
/// moved is no change. Values of header fields may be secrets: a digest stands for them.
pub fn view(plan: &Plan) -> Value {
    let Plan {
        listeners,
        pools,
        routes,
        tcp_listeners,
        tcp_pools,
        admin,
        admin_token,
        max_in_flight,
        drain: Drain { delay, timeout },
        workers,
        access_log,
        tracing: traced,
        by_flags,
        probes_on_data,
    } = plan;
    // The last two are never the file's.
    let Tracing {
        endpoint,
        ratio: _,
        follows_parent,
        insecure,
        ca_file,
        identity,
        queue: _,
        timeout: _,
    } = traced;
    json!({
        "listeners": listeners.iter().map(listener).collect::<Vec<_>>(),
        "upstream_pools": pools.iter().map(pool).collect::<Vec<_>>(),
        "routes": routes.iter().map(|one| route(one, plan)).collect::<Vec<_>>(),
        "tcp_listeners": tcp_listeners.iter().map(|one| tcp_listener(one, plan)).collect::<Vec<_>>(),
        "tcp_pools": tcp_pools.iter().map(tcp_pool).collect::<Vec<_>>(),
        "admin": {
            "bind": admin.as_ref().map(ToString::to_string),
            // Not even a digest: who can read it could guess.
            "token_file": admin_token.as_ref().map(|token| token.path.to_string_lossy()),
        },
        "limits": { "max_in_flight": max_in_flight },
        "drain": { "delay": time(*delay), "timeout": time(*timeout) },
        "workers": workers.map_or(json!("auto"), |n| json!(n)),
        "access_log": { "enabled": access_log },
        "tracing": {
            "endpoint": endpoint,
            "sample_ratio": traced.sample_ratio(),
            "follows_parent": follows_parent,
            "insecure": insecure,
            "ca_file": ca_file,
            "certificate_file": identity.as_ref().map(|(certificate, _)| certificate),
        },
        "by_flags": by_flags,
        "probes_on_data": probes_on_data,
    })
}

fn time(time: Duration) -> Value {
    show_duration(time).into()
}

fn texts<T: ToString>(list: &[T]) -> Vec<String> {
    list.iter().map(ToString::to_string).collect()
}

/// Stands for a secret: tells that it has changed, and not what it is.
fn digest(secret: &str) -> Value {
    format!("digest:{:016x}", xxh3_64(secret.as_bytes())).into()
}

fn grpc_names(statuses: &[u8]) -> Vec<&'static str> {
    statuses.iter().filter_map(|status| grpc::STATUSES.get(usize::from(*status)).copied()).collect()
}

/// As the file has them: `503`, `"5xx"`.
pub(crate) fn statuses(ranges: &[(u16, u16)]) -> Vec<Value> {
    let one = |&(first, last): &(u16, u16)| match (first, last) {
        _ if first == last => first.into(),
        _ if first % 100 == 0 && last == first + 99 => format!("{}xx", first / 100).into(),
        _ => format!("{first}-{last}").into(),
    };
    ranges.iter().map(one).collect()
}

fn listener(of: &Listener) -> Value {
    let Listener {
        name,
        bind,
        tls,
        timeouts: ListenerTimeouts { read_header, read, write, idle, max_header_bytes },
        http3,
        trusted_proxies,
        proxy_protocol,
        decision_header_for,
        max_connections,
        limits:
            MessageLimits {
                max_headers,
                max_target_bytes,
                max_trailer_bytes,
                max_body_bytes,
                min_body_rate,
            },
        max_in_flight,
    } = of;
    json!({
        "name": name,
        "bind": bind.to_string(),
        "tls": tls.as_ref().map(listener_tls),
        "timeouts": {
            "read_header": time(*read_header),
            "read": time(*read),
            "write": time(*write),
            "idle": time(*idle),
            "max_header_bytes": max_header_bytes,
        },
        "enable_http3": http3,
        "trusted_proxies": texts(trusted_proxies),
        "proxy_protocol": proxy_protocol,
        "decision_header_for": texts(decision_header_for),
        "max_connections": max_connections,
        "limits": {
            "max_headers": max_headers,
            "max_target_bytes": max_target_bytes,
            "max_trailer_bytes": max_trailer_bytes,
            "max_body_bytes": max_body_bytes,
            "min_body_rate": min_body_rate,
        },
        "max_in_flight": max_in_flight,
    })
}

fn listener_tls(of: &ListenerTls) -> Value {
    let ListenerTls { min_version, certs, autocert, client_auth } = of;
    let cert = |Certificate { cert, key, hosts }: &Certificate| json!({ "cert": cert.to_string_lossy(), "key": key.to_string_lossy(), "hosts": hosts });
    let acme = |of: &Autocert| {
        let Autocert { cache_dir, allowed_hosts, email, directory_url, ca_file } = of;
        json!({
            "cache_dir": cache_dir.to_string_lossy(),
            "allowed_hosts": allowed_hosts,
            "email": email,
            "directory_url": directory_url,
            "ca_file": ca_file.as_ref().map(|path| path.to_string_lossy()),
        })
    };
    let clients = |ClientAuth { ca_file, required, identity_header }: &ClientAuth| {
        let mode = if *required { "require" } else { "optional" };
        json!({ "ca_file": ca_file.to_string_lossy(), "mode": mode, "identity_header": identity_header })
    };
    json!({
        "min_version": match min_version {
            TlsVersion::V12 => "1.2",
            TlsVersion::V13 => "1.3",
        },
        "certs": certs.iter().map(cert).collect::<Vec<_>>(),
        "autocert": autocert.as_ref().map(acme),
        "client_auth": client_auth.as_ref().map(clients),
    })
}

fn pool(of: &Pool) -> Value {
    let Pool {
        name,
        selector: chosen,
        upstreams,
        connect_timeout,
        response_header_timeout,
        protocol,
        keepalive: Keepalive { max_idle, idle_timeout },
        host_header,
        dns: Dns { refresh, max_stale },
        tls,
        active,
        passive,
        breaker: breaks,
        retry_budget: RetryBudget { ratio, min_per_second },
        max_in_flight,
        slow_start,
    } = of;
    json!({
        "name": name,
        "selector": selector(chosen),
        "upstreams": upstreams.iter().map(upstream).collect::<Vec<_>>(),
        "connect_timeout": time(*connect_timeout),
        "response_header_timeout": time(*response_header_timeout),
        "protocol": protocol,
        "keepalive": { "max_idle": max_idle, "idle_timeout": time(*idle_timeout) },
        "host_header": match host_header {
            HostHeader::Preserve => "preserve",
            HostHeader::Upstream => "upstream",
            HostHeader::Literal(host) => host,
        },
        "dns": { "refresh": time(*refresh), "max_stale": time(*max_stale) },
        "upstream_tls": upstream_tls(tls),
        "health": {
            "active": active.as_ref().map(active_health),
            "passive": passive.as_ref().map(passive_health),
        },
        "circuit_breaker": breaker(breaks),
        "retry_budget": { "ratio": ratio, "min_per_second": min_per_second },
        "max_in_flight": max_in_flight,
        "slow_start": time(*slow_start),
    })
}

fn selector(of: &Selector) -> Value {
    let Selector { algorithm, ewma_half_life, hash_key, epsilon, virtual_nodes } = of;
    json!({
        "algorithm": algorithm,
        "ewma_half_life": time(*ewma_half_life),
        "hash_key": match hash_key {
            HashKey::Header(name) => format!("header:{name}"),
            HashKey::Cookie(name) => format!("cookie:{name}"),
            HashKey::ClientIp => "client_ip".to_owned(),
        },
        "epsilon": epsilon,
        "virtual_nodes": virtual_nodes,
    })
}

fn upstream(of: &Upstream) -> Value {
    let Upstream {
        url,
        // These are in the URL.
        scheme: _,
        host: _,
        port: _,
        authority: _,
        base_path: _,
        weight,
        max_in_flight,
        backup,
    } = of;
    json!({ "url": url, "weight": weight, "max_in_flight": max_in_flight, "backup": backup })
}

fn upstream_tls(of: &UpstreamTls) -> Value {
    let UpstreamTls { ca_file, client_cert, server_name, insecure_skip_verify } = of;
    json!({
        "ca_file": ca_file.as_ref().map(|path| path.to_string_lossy()),
        "client_cert_file": client_cert.as_ref().map(|(cert, _)| cert.to_string_lossy()),
        "client_key_file": client_cert.as_ref().map(|(_, key)| key.to_string_lossy()),
        "server_name": server_name,
        "insecure_skip_verify": insecure_skip_verify,
    })
}

fn active_health(of: &ActiveHealth) -> Value {
    let ActiveHealth {
        path,
        method,
        interval,
        timeout,
        healthy_threshold,
        unhealthy_threshold,
        expected_status,
    } = of;
    json!({
        "path": path,
        "method": method,
        "interval": time(*interval),
        "timeout": time(*timeout),
        "healthy_threshold": healthy_threshold,
        "unhealthy_threshold": unhealthy_threshold,
        "expected_status": statuses(expected_status),
    })
}

fn passive_health(of: &PassiveHealth) -> Value {
    let PassiveHealth { error_threshold, latency_threshold_p99, half_life } = of;
    json!({
        "error_threshold": error_threshold,
        "latency_threshold_p99": time(*latency_threshold_p99),
        "half_life": time(*half_life),
    })
}

fn breaker(of: &Breaker) -> Value {
    let Breaker {
        failure_ratio,
        min_observations,
        window,
        window_size,
        open_min,
        open_max,
        half_open_probes,
        consecutive_failures,
        failure_statuses,
        failure_grpc_statuses,
    } = of;
    json!({
        "failure_ratio": failure_ratio,
        "min_observations": min_observations,
        "window": time(*window),
        "window_size": window_size,
        "open_min": time(*open_min),
        "open_max": time(*open_max),
        "half_open_probes": half_open_probes,
        "consecutive_failures": consecutive_failures,
        "failure_statuses": statuses(failure_statuses),
        "failure_grpc_statuses": grpc_names(failure_grpc_statuses),
    })
}

fn route(of: &Route, plan: &Plan) -> Value {
    let Route {
        name,
        listeners,
        host,
        path_prefix,
        methods,
        predicates,
        action,
        rewrite: Rewrite { strip_prefix, add_prefix },
        allow,
        deny,
        rate_limit: rate,
        retry: tries,
        headers: changes,
        compress: packed,
        total_timeout,
        max_body_bytes,
        tunnel_idle_timeout,
    } = of;
    let listener = |&ix: &usize| plan.listeners.get(ix).map(|listener| &listener.name);
    let predicate =
        |(name, value): &(String, String)| json!({ "name": name, "value": digest(value) });
    let mut shown = json!({
        "name": name,
        "listeners": listeners.iter().map(listener).collect::<Vec<_>>(),
        "host": match host {
            HostPattern::Any => "*".to_owned(),
            HostPattern::Exact(host) => host.clone(),
            HostPattern::Wildcard(suffix) => format!("*.{suffix}"),
        },
        "path_prefix": path_prefix,
        "methods": methods,
        "header_predicates": predicates.iter().map(predicate).collect::<Vec<_>>(),
        "rewrite": { "strip_prefix": strip_prefix, "add_prefix": add_prefix },
        "allow": texts(allow),
        "deny": texts(deny),
        "middleware": {
            "rate_limit": rate.as_ref().map(rate_limit),
            "retry": tries.as_ref().map(retry),
            "headers": headers(changes),
            "compress": packed.as_ref().map(compress),
        },
        "timeouts": { "total": time(*total_timeout) },
        "max_body_bytes": max_body_bytes,
        "tunnel_idle_timeout": time(*tunnel_idle_timeout),
    });
    let (key, value) = match action {
        Action::Pool(ix) => ("pool", json!(plan.pools.get(*ix).map(|pool| &pool.name))),
        Action::Redirect { scheme, code } => {
            ("redirect", json!({ "scheme": scheme, "code": code }))
        }
        Action::Respond { status, body, content_type } => {
            ("respond", json!({ "status": status, "body": body, "content_type": content_type }))
        }
    };
    shown[key] = value;
    shown
}

fn rate_limit(of: &RateLimit) -> Value {
    let RateLimit { per_ip, rps, burst, trust_proxy_hops } = of;
    json!({
        "scope": if *per_ip { "per-ip" } else { "per-route" },
        "per_ip_rps": rps,
        "burst": burst,
        "trust_proxy_hops": trust_proxy_hops,
    })
}

fn retry(of: &Retry) -> Value {
    let Retry {
        max_attempts,
        methods,
        retry_on,
        retry_on_grpc,
        max_replayable_body,
        hedge_after,
        hedge_after_percentile,
        hedgeable,
        backoff,
    } = of;
    json!({
        "max_attempts": max_attempts,
        "retry_methods": methods,
        "retry_on": retry_on,
        "retry_on_grpc": grpc_names(retry_on_grpc),
        "max_replayable_body": max_replayable_body,
        "hedge_after": time(*hedge_after),
        "hedge_after_percentile": hedge_after_percentile,
        "hedgeable": hedgeable,
        "backoff": time(*backoff),
    })
}

fn headers(of: &HeaderChanges) -> Value {
    let HeaderChanges { add_request, remove_request, add_response, remove_response } = of;
    let added = |fields: &[(String, String)]| -> Map<String, Value> {
        fields.iter().map(|(name, value)| (name.clone(), digest(value))).collect()
    };
    json!({
        "add_request": added(add_request),
        "remove_request": remove_request,
        "add_response": added(add_response),
        "remove_response": remove_response,
    })
}

fn compress(of: &Compress) -> Value {
    let Compress { min_bytes, skip_content_types } = of;
    json!({ "min_bytes": min_bytes, "skip_content_types": skip_content_types })
}

fn tcp_listener(of: &TcpListener, plan: &Plan) -> Value {
    let TcpListener { name, bind, pool } = of;
    let pool = plan.tcp_pools.get(*pool).map(|pool| &pool.name);
    json!({ "name": name, "bind": bind.to_string(), "pool": pool })
}

fn tcp_pool(of: &TcpPool) -> Value {
    let TcpPool { name, selector: chosen, connect_timeout, upstreams } = of;
    let upstream = |of: &TcpUpstream| {
        // Both are in the address.
        let TcpUpstream { address, host: _, port: _, weight } = of;
        json!({ "address": address, "weight": weight })
    };
    json!({
        "name": name,
        "selector": selector(chosen),
        "connect_timeout": time(*connect_timeout),
        "upstreams": upstreams.iter().map(upstream).collect::<Vec<_>>(),
    })
}
