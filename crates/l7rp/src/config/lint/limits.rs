//! Limits that are never reached, because another one is first.
//!
//! A request takes a place in the process, then on its listener, then in its pool, then at an
//! upstream, and keeps all of them; a limit is never reached if one before it is as low, or if all
//! those behind it are together.

use std::collections::BTreeSet;

use super::{Lint, at};
use crate::config::file::KeyPath;
use crate::config::plan::{Listener, Pool, Retry, Route};

const RULE: &str = "unreached-limit";

pub(super) fn check(lint: &mut Lint<'_>) {
    let process = lint.plan.max_in_flight;
    let mut any = false;
    for (index, listener) in lint.plan.listeners.iter().enumerate() {
        if is_over(listener.max_in_flight, process) {
            any = true;
            let at = at("listeners", index).key("max_in_flight");
            outer(lint, &at, listener.max_in_flight, "the process", process);
        }
        target(lint, index, listener);
    }
    let limits = lint.plan.listeners.iter().map(|listener| listener.max_in_flight);
    if !any && let Some(sum) = sum(limits).filter(|sum| process > 0 && *sum < process.into()) {
        let at = KeyPath::root().key("limits").key("max_in_flight");
        inner(lint, &at, process, "all listeners", sum);
    }
    for (index, pool) in lint.plan.pools.iter().enumerate() {
        self::pool(lint, index, pool, process);
    }
    for (index, route) in lint.plan.routes.iter().enumerate() {
        replayable(lint, index, route);
    }
}

fn is_over(limit: u32, outer: u32) -> bool {
    outer > 0 && limit >= outer
}

/// The sum of limits, if each is one.
fn sum(limits: impl Iterator<Item = u32> + Clone) -> Option<u64> {
    let all = limits.clone().all(|limit| limit > 0) && limits.clone().next().is_some();
    all.then(|| limits.map(u64::from).sum())
}

fn pool(lint: &mut Lint<'_>, index: usize, pool: &Pool, process: u32) {
    let pool_at = at("upstream_pools", index);
    let own_at = pool_at.key("max_in_flight");
    let own = pool.max_in_flight;
    let mut any = false;
    if is_over(own, process) {
        outer(lint, &own_at, own, "the process", process);
    } else if let Some(before) = before(lint, index).filter(|sum| own > 0 && *sum <= own.into()) {
        any = true;
        inner(lint, &own_at, own, "the listeners before it", before);
    }
    for (ix, upstream) in pool.upstreams.iter().enumerate() {
        let limit = upstream.max_in_flight;
        let at = pool_at.key("upstreams").index(ix).key("max_in_flight");
        if is_over(limit, own) {
            any = true;
            outer(lint, &at, limit, "the pool", own);
        } else if is_over(limit, process) {
            outer(lint, &at, limit, "the process", process);
        }
    }
    // Between two tries a request has its place in the pool alone.
    let retries = |route: &Route| route.retry.as_ref().is_some_and(Retry::retries);
    let limits = pool.upstreams.iter().map(|upstream| upstream.max_in_flight);
    if !any
        && own > 0
        && !is_over(own, process)
        && let Some(sum) = sum(limits).filter(|sum| *sum < own.into())
        && !lint.routes_to(index).any(|(_, route)| retries(route))
    {
        inner(lint, &own_at, own, "all its upstreams", sum);
    }
}

/// What the listeners take together that lead to a pool, if each has a limit.
fn before(lint: &Lint<'_>, pool: usize) -> Option<u64> {
    let leading: BTreeSet<_> =
        lint.routes_to(pool).flat_map(|(_, route)| lint.listeners_of(route)).collect();
    sum(leading.iter().map(|&listener| lint.plan.listeners[listener].max_in_flight))
}

fn outer(lint: &mut Lint<'_>, at: &KeyPath, limit: u32, who: &str, most: u32) {
    let message = format!(
        "`max_in_flight` {limit} is never reached: {who} takes no more than {most} at once"
    );
    lint.tell(RULE, at, &message, "make it lower, or leave it out");
}

fn inner(lint: &mut Lint<'_>, at: &KeyPath, limit: u32, who: &str, sum: u64) {
    let message = format!(
        "`max_in_flight` {limit} is never reached: {who} together take no more than {sum} at once"
    );
    lint.tell(RULE, at, &message, "make it lower, or leave it out");
}

/// A bound for targets that only a head could have which is refused for its own length.
fn target(lint: &mut Lint<'_>, index: usize, listener: &Listener) {
    let at = at("listeners", index).key("limits").key("max_target_bytes");
    let (target, head) = (listener.limits.max_target_bytes, listener.timeouts.max_header_bytes);
    if lint.written(&at) && target >= head {
        let message = format!(
            "`max_target_bytes` {target} is never reached: a head, with the target in it, has {head} octets at most"
        );
        lint.tell(RULE, &at, &message, "make it less than `timeouts.max_header_bytes`");
    }
}

/// A bound for the copy of a body that no body can come to.
fn replayable(lint: &mut Lint<'_>, index: usize, route: &Route) {
    let Some(retry) = &route.retry else { return };
    let at = lint.middleware(index, "retry").key("max_replayable_body");
    let most = lint.listeners_of(route).into_iter().map(|listener| {
        let of_listener = lint.plan.listeners[listener].limits.max_body_bytes;
        let most = if route.max_body_bytes > 0 { route.max_body_bytes } else { of_listener };
        if most == 0 { u64::MAX } else { most }
    });
    let Some(most) = most.max() else { return };
    if lint.written(&at) && retry.max_replayable_body as u64 > most {
        let message = format!(
            "`max_replayable_body` {} is never reached: a body has {most} octets at most",
            retry.max_replayable_body
        );
        let help = "`max_body_bytes` of the route, or of its listeners, is lower";
        lint.tell(RULE, &at, &message, help);
    }
}
