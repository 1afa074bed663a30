//! Retries and hedging.

use super::{With, clean, found, retry, route, two};

#[test]
fn retries_that_are_never_made() {
    found(&[
        (
            retry("max_attempts: 1, backoff: 1ms, retry_on: [500]", ""),
            "10:43 routes[0].middleware[0].retry.max_attempts: with `max_attempts` 1 there is never a retry: `backoff`, `retry_on` do nothing [never-retried]",
        ),
        (
            retry("max_attempts: 1, backoff: 1ms, retry_on: [500], hedge_after: 1s", ""),
            "10:43 routes[0].middleware[0].retry.max_attempts: with `max_attempts` 1 there is never a retry: `backoff` does nothing [never-retried]",
        ),
        (
            retry("retry_on: []", ""),
            "10:39 routes[0].middleware[0].retry.retry_on: there is never a retry: `retry_on` is empty [never-retried]",
        ),
        (
            retry("retry_methods: []", ""),
            "10:44 routes[0].middleware[0].retry.retry_methods: there is never a retry: `retry_methods` is empty [never-retried]",
        ),
        (
            retry("", "methods: [POST]"),
            "10:27 routes[0].middleware[0].retry.retry_methods: there is never a retry: the route lets none of `GET`, `HEAD` in (`retry_methods`) [never-retried]",
        ),
        (
            retry("retry_methods: [PUT]", "methods: [POST, PATCH]"),
            "10:44 routes[0].middleware[0].retry.retry_methods: there is never a retry: the route lets none of `PUT` in (`retry_methods`) [never-retried]",
        ),
        (
            retry("retry_methods: [PUT, GET]", "methods: [GET]"),
            "10:44 routes[0].middleware[0].retry.retry_methods: there is never a retry of `PUT`: the route does not let it in [never-retried]",
        ),
        (
            retry("backoff: 2s", "timeouts: { total: 1s }"),
            "10:38 routes[0].middleware[0].retry.backoff: there is never a retry: half of `backoff` (2s) is not over before `timeouts.total` (1s) [never-retried]",
        ),
    ]);
    clean(&[
        retry("max_attempts: 1", ""),
        retry("max_attempts: 1, retry_on: [500], hedge_after: 1s", ""),
        retry("max_attempts: 2, backoff: 1ms, retry_on: [500]", ""),
        retry("retry_on: [], retry_methods: [], hedge_after: 1s", ""),
        retry("retry_methods: [], hedge_after: 1s", "methods: [GET]"),
        retry("retry_on: [], retry_on_grpc: [UNAVAILABLE]", ""),
        retry("retry_on_grpc: [UNAVAILABLE]", "methods: [POST]"),
        retry("hedgeable: [OPTIONS], hedge_after: 1s", "methods: [OPTIONS]"),
        retry("", "methods: [GET, POST]"),
        retry("retry_methods: [PUT, GET]", ""),
        retry("backoff: 1999ms", "timeouts: { total: 1s }"),
        retry("backoff: 2s", ""),
    ]);
}

#[test]
fn pools_that_have_nothing_for_them() {
    let none = "retry_budget: { ratio: 0, min_per_second: 0 }";
    let broke = |route: &str| With { pool: none, route, ..With::default() }.text();
    found(&[
        (
            broke("middleware: [{ retry: {} }]"),
            "7:19 upstream_pools[0].retry_budget: the pool `backend` has no budget for extra tries, which the route `all` on line 9 asks for [no-budget]",
        ),
        (
            two(&broke("middleware: [{ retry: { max_attempts: 1, hedge_after: 1s } }]")),
            "7:19 upstream_pools[0].retry_budget: the pool `backend` has no budget for extra tries, which the route `all` on line 9 asks for [no-budget]",
        ),
    ]);
    clean(&[
        broke(""),
        broke("middleware: [{ retry: { max_attempts: 1 } }]"),
        broke("middleware: [{ retry: {} }]").replace("ratio: 0,", "ratio: 0.1,"),
    ]);
}

#[test]
fn hedges_that_are_never_made() {
    let alone = |keys: &str| route(&format!("middleware: [{{ retry: {{ {keys} }} }}]"));
    let slow = |after: &str| {
        let route = format!("middleware: [{{ retry: {{ hedge_after: {after} }} }}]");
        let pool = "connect_timeout: 1s\nresponse_header_timeout: 2s";
        two(&With { pool, route: &route, ..With::default() }.text())
    };
    found(&[
        (
            retry("hedgeable: [GET]", ""),
            "10:40 routes[0].middleware[0].retry.hedgeable: there is never a hedge: there is no `hedge_after` and no `hedge_after_percentile` [never-hedged]",
        ),
        (
            retry("hedgeable: [], hedge_after: 1s", ""),
            "10:40 routes[0].middleware[0].retry.hedgeable: there is never a hedge: `hedgeable` is empty [never-hedged]",
        ),
        (
            retry("hedgeable: [GET], hedge_after: 1s", "methods: [HEAD]"),
            "10:40 routes[0].middleware[0].retry.hedgeable: there is never a hedge: the route lets none of `GET` in (`hedgeable`) [never-hedged]",
        ),
        (
            retry("hedgeable: [GET, OPTIONS], hedge_after: 1s", "methods: [GET]"),
            "10:40 routes[0].middleware[0].retry.hedgeable: there is never a hedge of `OPTIONS`: the route does not let it in [never-hedged]",
        ),
        (
            retry("hedge_after: 1s", "timeouts: { total: 1s }"),
            "10:42 routes[0].middleware[0].retry.hedge_after: there is never a hedge: `hedge_after` (1s) is not over before `timeouts.total` (1s) [never-hedged]",
        ),
        (
            slow("6s"),
            "12:42 routes[0].middleware[0].retry.hedge_after: there is never a hedge: `hedge_after` (6s) is not over before the first try is, by `connect_timeout` (1s) and `response_header_timeout` (2s) of the pool `backend` [never-hedged]",
        ),
        (
            alone("hedge_after: 1s"),
            "10:42 routes[0].middleware[0].retry.hedge_after: there is never a hedge: the pool `backend` has no other upstream [never-hedged]",
        ),
        (
            alone("hedge_after_percentile: 95"),
            "10:53 routes[0].middleware[0].retry.hedge_after_percentile: there is never a hedge: the pool `backend` has no other upstream [never-hedged]",
        ),
    ]);
    clean(&[
        slow("5999ms"),
        slow("6s, hedge_after_percentile: 95"),
        retry("hedgeable: []", ""),
        retry("hedge_after: 1s", "methods: [GET]"),
        retry("hedge_after: 1s, hedgeable: [GET, HEAD]", "methods: [GET]"),
        retry("hedge_after: 1s", "timeouts: { total: 1001ms }"),
        retry("hedge_after: 1s, hedge_after_percentile: 95", "timeouts: { total: 1s }"),
        alone(""),
    ]);
}
