//! Keys that nothing uses, and upstreams that are something else.

use super::{answering, clean, found, pool, rest, route, upstreams};

#[test]
fn keys_of_routes_that_nothing_uses() {
    let limit = |scope: &str| {
        route(&format!("middleware: [{{ rate_limit: {{ scope: {scope}, trust_proxy_hops: 1 }} }}]"))
    };
    let answer = |keys: &str| answering(&route(keys), "respond: { status: 204 }");
    found(&[
        (
            limit("per-route"),
            "10:70 routes[0].middleware[0].rate_limit.trust_proxy_hops: `trust_proxy_hops` does nothing: with `scope: per-route` all clients count as one [unused-key]",
        ),
        (
            answer("rewrite: { strip_prefix: / }"),
            "7:30 routes[0].rewrite.strip_prefix: `strip_prefix` does nothing: the route `all` sends no request to an upstream [needs-pool]",
        ),
        (
            answer("rewrite: { add_prefix: /a }"),
            "7:28 routes[0].rewrite.add_prefix: `add_prefix` does nothing: the route `all` sends no request to an upstream [needs-pool]",
        ),
        (
            answer("middleware: [{ retry: {} }]"),
            "7:27 routes[0].middleware[0].retry: `retry` does nothing: the route `all` sends no request to an upstream [needs-pool]",
        ),
        (
            answer("middleware: [{ headers: { add_request: { a: b }, add_response: { a: b } } }]"),
            "7:44 routes[0].middleware[0].headers.add_request: `add_request` does nothing: the route `all` sends no request to an upstream [needs-pool]",
        ),
        (
            answer("middleware: [{ headers: { remove_request: [a] } }]"),
            "7:47 routes[0].middleware[0].headers.remove_request: `remove_request` does nothing: the route `all` sends no request to an upstream [needs-pool]",
        ),
        (
            answer("timeouts: { total: 1s }"),
            "7:24 routes[0].timeouts.total: `total` does nothing: the route `all` sends no request to an upstream [needs-pool]",
        ),
        (
            answer("tunnel_idle_timeout: 1m"),
            "7:26 routes[0].tunnel_idle_timeout: `tunnel_idle_timeout` does nothing: the route `all` sends no request to an upstream [needs-pool]",
        ),
    ]);
    clean(&[
        limit("per-ip"),
        answer(
            "middleware: [{ rate_limit: {} }, { headers: { add_response: { a: b } } }]\nmax_body_bytes: 9\ntimeouts: {}",
        ),
        route("rewrite: { add_prefix: /a }\ntimeouts: { total: 1s }\ntunnel_idle_timeout: 1m"),
    ]);
}

#[test]
fn keys_of_pools_that_nothing_uses() {
    let selector = |keys: &str| pool(&format!("selector: {{ {keys} }}"));
    let breaker = |keys: &str| pool(&format!("circuit_breaker: {{ {keys} }}"));
    found(&[
        (
            selector("algorithm: round-robin, ewma_half_life: 1s"),
            "7:57 upstream_pools[0].selector.ewma_half_life: `ewma_half_life` does nothing: the algorithm is `round-robin` [unused-key]",
        ),
        (
            selector("hash_key: client_ip"),
            "7:27 upstream_pools[0].selector.hash_key: `hash_key` does nothing: the algorithm is `p2c-ewma` [unused-key]",
        ),
        (
            selector("algorithm: ip-hash, hash_key: 'header:a'"),
            "7:47 upstream_pools[0].selector.hash_key: `hash_key` does nothing: the algorithm is `ip-hash` [unused-key]",
        ),
        (
            selector("algorithm: ip-hash, epsilon: 1"),
            "7:46 upstream_pools[0].selector.epsilon: `epsilon` does nothing: the algorithm is `ip-hash` [unused-key]",
        ),
        (
            selector("algorithm: least-conn, virtual_nodes: 1"),
            "7:55 upstream_pools[0].selector.virtual_nodes: `virtual_nodes` does nothing: the algorithm is `least-conn` [unused-key]",
        ),
        (
            breaker("consecutive_failures: 3, failure_ratio: 0.5"),
            "7:64 upstream_pools[0].circuit_breaker.failure_ratio: `failure_ratio` does nothing: with `consecutive_failures` the breaker opens by no ratio [unused-key]",
        ),
        (
            breaker("consecutive_failures: 3, min_observations: 5"),
            "7:67 upstream_pools[0].circuit_breaker.min_observations: `min_observations` does nothing: with `consecutive_failures` the breaker opens by no ratio [unused-key]",
        ),
        (
            breaker("consecutive_failures: 3, window_size: 50"),
            "7:62 upstream_pools[0].circuit_breaker.window_size: `window_size` does nothing: with `consecutive_failures` the breaker opens by no ratio [unused-key]",
        ),
    ]);
    clean(&[
        selector("ewma_half_life: 1s"),
        selector(
            "algorithm: consistent-hash-bounded, hash_key: 'header:a', epsilon: 1, virtual_nodes: 1",
        ),
        selector("algorithm: ip-hash, hash_key: client_ip, virtual_nodes: 1"),
        selector("algorithm: least-conn, epsilon:"),
        breaker("consecutive_failures: 3, window: 5s"),
        breaker("failure_ratio: 0.4"),
    ]);
}

#[test]
fn upstreams_that_are_something_else() {
    let weighted = |algorithm: &str| {
        let text = pool(&format!("selector: {{ algorithm: {algorithm}, hash_key: }}"));
        upstreams(&text, "{ url: \"http://a\", weight: 1 }, { url: \"http://b\", weight: 2 }")
    };
    let named = |all: &str| upstreams(&rest(""), all);
    found(&[
        (
            weighted("p2c-ewma"),
            "6:76 upstream_pools[0].upstreams[1].weight: `weight` does nothing: the algorithm is `p2c-ewma` [unused-weight]",
        ),
        (
            weighted("round-robin"),
            "6:76 upstream_pools[0].upstreams[1].weight: `weight` does nothing: the algorithm is `round-robin` [unused-weight]",
        ),
        (
            weighted("least-conn"),
            "6:76 upstream_pools[0].upstreams[1].weight: `weight` does nothing: the algorithm is `least-conn` [unused-weight]",
        ),
        (
            named("{ url: \"http://a\", backup: true }, { url: \"http://b\", backup: true }"),
            "6:44 upstream_pools[0].upstreams[0].backup: `backup` does nothing: all upstreams of the pool `backend` stand by, and for nobody [backups-only]",
        ),
        (
            named("{ url: \"http://a\" }, { url: \"HTTP://A:80/\" }"),
            "6:45 upstream_pools[0].upstreams[1].url: `HTTP://A:80/` is the same upstream as `http://a` [same-upstream]",
        ),
    ]);
    clean(&[
        weighted("weighted-rr"),
        weighted("ip-hash"),
        weighted("p2c-ewma").replace("weight: 2", "weight: 1"),
        named("{ url: \"http://a\", backup: true }, { url: \"http://b\" }"),
        named(
            "{ url: \"http://a\" }, { url: \"https://a:80\" }, { url: \"http://a/b\" }, { url: \"http://a:8\" }",
        ),
    ]);
}
