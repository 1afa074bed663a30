//! Times that contradict each other.

use std::net::IpAddr;
use std::time::Duration;

use super::{Lint, at};
use crate::config::file::{KeyPath, show_duration};
use crate::config::plan::Pool;

pub(super) fn check(lint: &mut Lint<'_>) {
    for (index, pool) in lint.plan.pools.iter().enumerate() {
        totals(lint, index, pool);
        dns(lint, index, pool);
    }
    drain(lint);
}

/// Deadlines of a try that the deadline of the whole exchange is always before.
fn totals(lint: &mut Lint<'_>, index: usize, pool: &Pool) {
    let mut totals = lint.routes_to(index).map(|(_, route)| match route.total_timeout {
        Duration::ZERO => Duration::MAX,
        total => total,
    });
    let Some(first) = totals.next() else { return };
    let longest = totals.fold(first, Duration::max);
    for (key, time) in [
        ("connect_timeout", pool.connect_timeout),
        ("response_header_timeout", pool.response_header_timeout),
    ] {
        let at = at("upstream_pools", index).key(key);
        if lint.written(&at) && longest <= time {
            let message = format!(
                "`{key}` ({}) never ends a try: `timeouts.total` of each route to the pool `{}` is over by then ({} at most)",
                show_duration(time),
                pool.name,
                show_duration(longest)
            );
            let help = "make it shorter than `timeouts.total`, or leave it out";
            lint.tell("unreached-timeout", &at, &message, help);
        }
    }
}

/// Answers that are too old as soon as one look-up has failed. None at all is as it says.
fn dns(lint: &mut Lint<'_>, index: usize, pool: &Pool) {
    let (refresh, stale) = (pool.dns.refresh, pool.dns.max_stale);
    let is_name = |host: &str| host.parse::<IpAddr>().is_err();
    if stale.is_zero() || stale >= refresh || !pool.upstreams.iter().any(|u| is_name(&u.host)) {
        return;
    }
    let dns = at("upstream_pools", index).key("dns");
    let key = if lint.written(&dns.key("max_stale")) { "max_stale" } else { "refresh" };
    let message = format!(
        "`max_stale` ({}) is over before names are asked for again (`refresh`, {}): the first answer that fails to come takes an upstream out",
        show_duration(stale),
        show_duration(refresh)
    );
    lint.tell("stale-before-refresh", &dns.key(key), &message, "make `refresh` the shorter one");
}

/// Requests that may take longer than the end of the process leaves them.
fn drain(lint: &mut Lint<'_>) {
    // A default is held against nobody.
    if !lint.written(&KeyPath::root().key("drain").key("timeout")) {
        return;
    }
    let drain = lint.plan.drain.timeout;
    for (index, route) in lint.plan.routes.iter().enumerate() {
        if lint.pool_of(route).is_some() && route.total_timeout > drain {
            let message = format!(
                "`timeouts.total` ({}) of the route `{}` is longer than `drain.timeout` ({}): a shutdown cuts what the route allows",
                show_duration(route.total_timeout),
                route.name,
                show_duration(drain)
            );
            let at = at("routes", index).key("timeouts").key("total");
            lint.tell("cut-by-drain", &at, &message, "make `drain.timeout` the longer one");
        }
    }
}
