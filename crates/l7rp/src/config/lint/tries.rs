//! Retries and hedging that never come to pass.

use std::time::Duration;

use super::{Lint, at, listed};
use crate::config::file::{KeyPath, show_duration};
use crate::config::plan::{Retry, Route};

pub(super) fn check(lint: &mut Lint<'_>) {
    for (index, route) in lint.plan.routes.iter().enumerate() {
        // Without a pool all of it is told of already.
        if let (Some(retry), Some(_)) = (&route.retry, lint.pool_of(route)) {
            let at = lint.middleware(index, "retry");
            retries(lint, route, retry, &at);
            hedges(lint, route, retry, &at);
        }
    }
    budgets(lint);
}

fn retries(lint: &mut Lint<'_>, route: &Route, retry: &Retry, at: &KeyPath) {
    const RULE: &str = "never-retried";
    if !retry.retries() {
        // A race is decided by `retry_on` too.
        let keys = ["retry_methods", "retry_on_grpc", "max_replayable_body", "backoff"];
        let mut keys = lint.written_keys(at, &keys);
        if !retry.hedges() {
            keys.extend(lint.written_keys(at, &["retry_on"]));
        }
        if !keys.is_empty() {
            let verb = if keys.len() == 1 { "does" } else { "do" };
            let message = format!(
                "with `max_attempts` 1 there is never a retry: {} {verb} nothing",
                listed(&keys)
            );
            let help = "the first try counts: write 2 or more, or leave the others out";
            lint.tell(RULE, &at.key("max_attempts"), &message, help);
        }
        return;
    }
    if retry.retry_on_grpc.is_empty() {
        let at_methods = at.key("retry_methods");
        if retry.retry_on.is_empty() && !retry.hedges() {
            let message = "there is never a retry: `retry_on` is empty";
            lint.tell(RULE, &at.key("retry_on"), message, "list statuses, like 502, 503, 504");
        } else if retry.methods.is_empty() && !retry.hedges() {
            let message = "there is never a retry: `retry_methods` is empty";
            lint.tell(RULE, &at_methods, message, "list methods, like `GET`");
        } else if lint.written(&at_methods) || !retry.hedges() {
            let what = What { key: "retry_methods", rule: RULE, made: "retry" };
            methods(lint, route, &retry.methods, at, &what);
        }
    }
    let (least, total) = (retry.backoff / 2, route.total_timeout);
    if !total.is_zero() && least >= total {
        let message = format!(
            "there is never a retry: half of `backoff` ({}) is not over before `timeouts.total` ({})",
            show_duration(retry.backoff),
            show_duration(total)
        );
        lint.tell(RULE, &at.key("backoff"), &message, "make it much shorter than `timeouts.total`");
    }
}

fn hedges(lint: &mut Lint<'_>, route: &Route, retry: &Retry, at: &KeyPath) {
    const RULE: &str = "never-hedged";
    let hedgeable = at.key("hedgeable");
    if !retry.hedges() {
        if lint.written(&hedgeable) && !retry.hedgeable.is_empty() {
            let message =
                "there is never a hedge: there is no `hedge_after` and no `hedge_after_percentile`";
            lint.tell(RULE, &hedgeable, message, "write one of them, or leave `hedgeable` out");
        }
        return;
    }
    if retry.hedgeable.is_empty() {
        let help = "list `GET`, `HEAD` or `OPTIONS`, or leave `hedge_after` out";
        lint.tell(RULE, &hedgeable, "there is never a hedge: `hedgeable` is empty", help);
        return;
    }
    let what = What { key: "hedgeable", rule: RULE, made: "hedge" };
    methods(lint, route, &retry.hedgeable, at, &what);
    let key = if retry.hedge_after.is_zero() { "hedge_after_percentile" } else { "hedge_after" };
    if let Some(pool) = lint.pool_of(route).filter(|pool| pool.upstreams.len() == 1) {
        let message =
            format!("there is never a hedge: the pool `{}` has no other upstream", pool.name);
        lint.tell(RULE, &at.key(key), &message, "a hedge goes to another upstream: add one");
    }
    if retry.hedge_after_percentile == 0.0 {
        late(lint, route, retry.hedge_after, &at.key("hedge_after"));
    }
}

/// A hedge whose time has not come when there is nothing left to hedge.
fn late(lint: &mut Lint<'_>, route: &Route, after: Duration, at: &KeyPath) {
    const RULE: &str = "never-hedged";
    let total = route.total_timeout;
    if !total.is_zero() && after >= total {
        let message = format!(
            "there is never a hedge: `hedge_after` ({}) is not over before `timeouts.total` ({})",
            show_duration(after),
            show_duration(total)
        );
        let help = "make it much shorter than `timeouts.total`";
        lint.tell(RULE, at, &message, help);
        return;
    }
    let Some(pool) = lint.pool_of(route) else { return };
    // A connection that is lost right before the end is replaced once.
    let first = (pool.connect_timeout + pool.response_header_timeout) * 2;
    if after >= first {
        let message = format!(
            "there is never a hedge: `hedge_after` ({}) is not over before the first try is, by `connect_timeout` ({}) and `response_header_timeout` ({}) of the pool `{}`",
            show_duration(after),
            show_duration(pool.connect_timeout),
            show_duration(pool.response_header_timeout),
            pool.name
        );
        lint.tell(RULE, at, &message, "make it much shorter than these");
    }
}

/// What a list of methods is for.
struct What {
    key: &'static str,
    rule: &'static str,
    made: &'static str,
}

/// Methods that the route does not let in. `around`: the `retry` that lists them.
fn methods(lint: &mut Lint<'_>, route: &Route, wanted: &[String], around: &KeyPath, what: &What) {
    if route.methods.is_empty() || wanted.is_empty() {
        return;
    }
    let help = format!("the route is for {}", listed(&route.methods));
    let comes = |method: &String| route.methods.contains(method);
    let at = around.key(what.key);
    if !wanted.iter().any(comes) {
        let message = format!(
            "there is never a {}: the route lets none of {} in (`{}`)",
            what.made,
            listed(wanted),
            what.key
        );
        lint.tell(what.rule, &at, &message, help);
    } else if lint.written(&at) {
        // HEAD is written beside GET by habit, and does no harm.
        for method in wanted.iter().filter(|method| !comes(method) && *method != "HEAD") {
            let message = format!(
                "there is never a {} of `{method}`: the route does not let it in",
                what.made
            );
            lint.tell(what.rule, &at, &message, help.as_str());
        }
    }
}

/// Pools that have nothing to spend on what their routes ask for.
fn budgets(lint: &mut Lint<'_>) {
    for (index, pool) in lint.plan.pools.iter().enumerate() {
        if pool.retry_budget.ratio > 0.0 || pool.retry_budget.min_per_second > 0 {
            continue;
        }
        let asks = |route: &Route| {
            route.retry.as_ref().is_some_and(|retry| retry.retries() || retry.hedges())
        };
        let Some((route, _)) = lint.routes_to(index).find(|(_, route)| asks(route)) else {
            continue;
        };
        let message = format!(
            "the pool `{}` has no budget for extra tries, which the route {} asks for",
            pool.name,
            lint.route_named(route)
        );
        let help = "with a `ratio` and a `min_per_second` of 0 nothing is tried again or hedged";
        lint.tell("no-budget", &at("upstream_pools", index).key("retry_budget"), &message, help);
    }
}
