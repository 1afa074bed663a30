//! Limits and times.

use super::{With, and_listener, clean, found, listener, pool, rest, upstreams};

const PROCESS: &str = "limits: { max_in_flight: 10 }\n";

#[test]
fn limits_of_listeners_that_are_never_reached() {
    let on_listener = |limit: &str| {
        With { listener: &format!("max_in_flight: {limit}"), rest: PROCESS, ..With::default() }
            .text()
    };
    found(&[
        (
            on_listener("10"),
            "4:20 listeners[0].max_in_flight: `max_in_flight` 10 is never reached: the process takes no more than 10 at once [unreached-limit]",
        ),
        (
            on_listener("9"),
            "11:26 limits.max_in_flight: `max_in_flight` 10 is never reached: all listeners together take no more than 9 at once [unreached-limit]",
        ),
    ]);
    clean(&[
        and_listener(&on_listener("9"), "name: other, bind: '127.0.0.1:8081'"),
        and_listener(&on_listener("9"), "name: other, bind: '127.0.0.1:8081', max_in_flight: 2"),
        on_listener("0"),
    ]);
}

#[test]
fn limits_of_pools_that_are_never_reached() {
    let in_pool = |limit: &str, each: &str, rest: &str, route: &str| {
        let pool = format!("max_in_flight: {limit}");
        let text = With { pool: &pool, rest, route, ..With::default() }.text();
        upstreams(
            &text,
            &format!(
                "{{ url: \"http://a\", max_in_flight: {each} }}, {{ url: \"http://b\", max_in_flight: 4 }}"
            ),
        )
    };
    found(&[
        (
            in_pool("11", "5", PROCESS, ""),
            "7:20 upstream_pools[0].max_in_flight: `max_in_flight` 11 is never reached: the process takes no more than 10 at once [unreached-limit]",
        ),
        (
            in_pool("5", "5", "", ""),
            "6:51 upstream_pools[0].upstreams[0].max_in_flight: `max_in_flight` 5 is never reached: the pool takes no more than 5 at once [unreached-limit]",
        ),
        (
            in_pool("0", "10", PROCESS, ""),
            "6:51 upstream_pools[0].upstreams[0].max_in_flight: `max_in_flight` 10 is never reached: the process takes no more than 10 at once [unreached-limit]",
        ),
        (
            in_pool("10", "5", "", ""),
            "7:20 upstream_pools[0].max_in_flight: `max_in_flight` 10 is never reached: all its upstreams together take no more than 9 at once [unreached-limit]",
        ),
    ]);
    clean(&[
        in_pool("8", "5", "", ""),
        in_pool("9", "0", "", ""),
        // While a retry is waited for, a request has no place at an upstream.
        in_pool("9", "5", "", "middleware: [{ retry: {} }]"),
        in_pool("0", "9", PROCESS, ""),
    ]);
}

#[test]
fn limits_of_pools_that_their_listeners_never_reach() {
    let text = |listener: &str, own: &str| {
        let (listener, pool) =
            (format!("max_in_flight: {listener}"), format!("max_in_flight: {own}"));
        With { listener: &listener, pool: &pool, ..With::default() }.text()
    };
    found(&[(
        text("5", "5"),
        "8:20 upstream_pools[0].max_in_flight: `max_in_flight` 5 is never reached: the listeners before it together take no more than 5 at once [unreached-limit]",
    )]);
    clean(&[
        text("5", "4"),
        text("0", "5"),
        text("5", "0"),
        and_listener(&text("5", "6"), "name: other, bind: '127.0.0.1:8081'"),
        and_listener(&text("5", "6"), "name: other, bind: '127.0.0.1:8081', max_in_flight: 2"),
    ]);
}

#[test]
fn targets_that_are_never_so_long() {
    let lengths = |head: &str, target: &str| {
        listener(&format!(
            "timeouts: {{ max_header_bytes: {head} }}\nlimits: {{ max_target_bytes: {target} }}"
        ))
    };
    found(&[(
        lengths("4096", "4096"),
        "5:33 listeners[0].limits.max_target_bytes: `max_target_bytes` 4096 is never reached: a head, with the target in it, has 4096 octets at most [unreached-limit]",
    )]);
    clean(&[
        lengths("4096", "4095"),
        // The other one is a default.
        listener("timeouts: { max_header_bytes: 4096 }"),
    ]);
}

#[test]
fn copies_of_bodies_that_are_never_so_long() {
    let kept = |route: &str, listener: &str| {
        let route = format!("{route}\nmiddleware: [{{ retry: {{ max_replayable_body: 2KiB }} }}]");
        With { listener, route: &route, ..With::default() }.text()
    };
    found(&[
        (
            kept("max_body_bytes: 1KiB", "limits: { max_body_bytes: 4KiB }"),
            "12:50 routes[0].middleware[0].retry.max_replayable_body: `max_replayable_body` 2048 is never reached: a body has 1024 octets at most [unreached-limit]",
        ),
        (
            kept("", "limits: { max_body_bytes: 1KiB }"),
            "12:50 routes[0].middleware[0].retry.max_replayable_body: `max_replayable_body` 2048 is never reached: a body has 1024 octets at most [unreached-limit]",
        ),
    ]);
    clean(&[
        kept("max_body_bytes: 4KiB", "limits: { max_body_bytes: 1KiB }"),
        kept("", ""),
        kept("max_body_bytes: 1KiB", "").replace("max_replayable_body: 2KiB", ""),
        and_listener(
            &kept("", "limits: { max_body_bytes: 1KiB }"),
            "name: other, bind: '127.0.0.1:8081'",
        ),
    ]);
}

#[test]
fn tokens_that_nobody_is_asked_for() {
    let admin = |keys: &str| rest(&format!("admin: {{ {keys} }}\n"));
    found(&[
        (
            admin("bind: 'unix:/run/a.sock', token_file: t"),
            "10:48 admin.token_file: nobody is asked for the token: who comes over a Unix-domain socket is let in by its permissions [unused-key]",
        ),
        (
            admin("bind: '', token_file: t"),
            "10:32 admin.token_file: nobody is asked for the token: nothing listens at `admin.bind` [unused-key]",
        ),
    ]);
    clean(&[
        admin("bind: '127.0.0.1:9090', token_file: t"),
        admin("token_file: t"),
        admin("bind: 'unix:/run/a.sock'"),
    ]);
}

#[test]
fn times_that_contradict_each_other() {
    let total = |pool: &str, total: &str, rest: &str| {
        let route = format!("timeouts: {{ total: {total} }}");
        With { pool, route: &route, rest, ..With::default() }.text()
    };
    let other = "  - { name: other, host: a.test, pool: backend, timeouts: { total: 4s } }\n";
    let dns =
        |keys: &str| upstreams(&pool(&format!("dns: {{ {keys} }}")), "{ url: \"http://a.test\" }");
    found(&[
        (
            total("connect_timeout: 4s", "3s", other),
            "7:22 upstream_pools[0].connect_timeout: `connect_timeout` (4s) never ends a try: `timeouts.total` of each route to the pool `backend` is over by then (4s at most) [unreached-timeout]",
        ),
        (
            total("response_header_timeout: 3s", "3s", ""),
            "7:30 upstream_pools[0].response_header_timeout: `response_header_timeout` (3s) never ends a try: `timeouts.total` of each route to the pool `backend` is over by then (3s at most) [unreached-timeout]",
        ),
        (
            dns("refresh: 1m, max_stale: 30s"),
            "7:36 upstream_pools[0].dns.max_stale: `max_stale` (30s) is over before names are asked for again (`refresh`, 1m): the first answer that fails to come takes an upstream out [stale-before-refresh]",
        ),
        (
            dns("refresh: 10m"),
            "7:21 upstream_pools[0].dns.refresh: `max_stale` (5m) is over before names are asked for again (`refresh`, 10m): the first answer that fails to come takes an upstream out [stale-before-refresh]",
        ),
        (
            total("", "11s", "drain: { timeout: 10s }\n"),
            "10:24 routes[0].timeouts.total: `timeouts.total` (11s) of the route `all` is longer than `drain.timeout` (10s): a shutdown cuts what the route allows [cut-by-drain]",
        ),
    ]);
    clean(&[
        total("connect_timeout: 3s", "3s", other),
        total("connect_timeout: 4s", "0s", other),
        total("response_header_timeout: 3s", "3001ms", ""),
        // It says only what is so anyway.
        total("", "3s", ""),
        dns("refresh: 30s, max_stale: 30s"),
        dns("max_stale: 0s"),
        dns("refresh: 10m").replace("a.test", "192.0.2.1"),
        total("", "30s", ""),
        total("", "0s", "drain: { timeout: 0s }\n"),
    ]);
}
