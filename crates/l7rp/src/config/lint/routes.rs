//! Keys of a route that match nothing or do nothing.

use std::net::Ipv4Addr;

use ipnet::IpNet;

use super::{Lint, at, listed};
use crate::config::plan::{Action, Bind, HostPattern, Listener, Route};

pub(super) fn check(lint: &mut Lint<'_>) {
    for (index, route) in lint.plan.routes.iter().enumerate() {
        host(lint, index, route);
        allow(lint, index, route);
        redirect(lint, index, route);
        strip_prefix(lint, index, route);
        headers(lint, index, route);
        without_pool(lint, index, route);
        hops(lint, index, route);
    }
    idle_listeners(lint);
}

/// A host that no certificate of the route's listeners is for. Only the names that the
/// configuration itself has are known.
fn host(lint: &mut Lint<'_>, index: usize, route: &Route) {
    let listeners = lint.listeners_of(route);
    let mut listeners = listeners.iter().map(|&ix| &lint.plan.listeners[ix]);
    if listeners.len() == 0 || !listeners.clone().all(|l| is_for_others_only(l, &route.host)) {
        return;
    }
    let names: Vec<&String> = listeners.by_ref().map(|listener| &listener.name).collect();
    let message = format!(
        "no certificate of {} is for the host of the route `{}`: clients that ask for it by name (SNI) get 421",
        listed(&names),
        route.name
    );
    let help = "add it to the `hosts` of a certificate that is for it, or to `allowed_hosts` of `autocert`";
    lint.tell("misdirected-host", &at("routes", index).key("host"), &message, help);
}

fn is_for_others_only(listener: &Listener, host: &HostPattern) -> bool {
    let Some(tls) = &listener.tls else { return false };
    if tls.certs.iter().any(|cert| cert.hosts.is_empty()) {
        return false;
    }
    let issued = tls.autocert.iter().flat_map(|autocert| &autocert.allowed_hosts);
    let mut names = tls.certs.iter().flat_map(|cert| &cert.hosts).chain(issued);
    // A certificate for `*.b` is shown for whatever ends in `.b`.
    let ends_in = |host: &str, suffix: &str| {
        host.strip_suffix(suffix).is_some_and(|front| front.is_empty() || front.ends_with('.'))
    };
    match host {
        HostPattern::Any => false,
        // Clients ask for no address by name.
        HostPattern::Exact(host) if host.starts_with('[') || host.parse::<Ipv4Addr>().is_ok() => {
            false
        }
        HostPattern::Exact(host) => !names.any(|name| match name.strip_prefix("*.") {
            Some(suffix) => host != suffix && ends_in(host, suffix),
            None => name == host,
        }),
        HostPattern::Wildcard(domain) => !names.any(|name| match name.strip_prefix("*.") {
            Some(suffix) => ends_in(domain, suffix),
            None => name.split_once('.').is_some_and(|(_, rest)| rest == domain),
        }),
    }
}

/// Clients let in that are all kept out.
fn allow(lint: &mut Lint<'_>, index: usize, route: &Route) {
    let denied = IpNet::aggregate(&route.deny);
    let is_denied = |net: &&IpNet| denied.iter().any(|deny| deny.contains(*net));
    let nobody: Vec<usize> =
        (0..route.allow.len()).filter(|&ix| is_denied(&&route.allow[ix])).collect();
    let at = at("routes", index).key("allow");
    let help = "what is in both is kept out: `deny` goes first";
    if !nobody.is_empty() && nobody.len() == route.allow.len() {
        let message =
            format!("the route `{}` lets nobody in: `deny` has all that `allow` has", route.name);
        lint.tell("pointless-allow", &at, &message, help);
        return;
    }
    for ix in nobody {
        let message = format!("{} lets nobody in: `deny` has all of it", route.allow[ix]);
        lint.tell("pointless-allow", &at.index(ix), &message, help);
    }
}

/// A redirect to where the request comes from. A redirect goes to the default port of its scheme.
fn redirect(lint: &mut Lint<'_>, index: usize, route: &Route) {
    let Action::Redirect { scheme, .. } = &route.action else { return };
    let port = if scheme == "https" { 443 } else { 80 };
    let is_there_already = |&ix: &usize| {
        let listener: &Listener = &lint.plan.listeners[ix];
        listener.tls.is_some() == (scheme == "https")
            && matches!(listener.bind, Bind::Tcp(address) if address.port() == port)
    };
    let listeners = lint.listeners_of(route);
    if listeners.is_empty() || !listeners.iter().all(is_there_already) {
        return;
    }
    let message = format!(
        "the route `{}` redirects to the URL that was asked for: all its listeners serve `{scheme}` on port {port}",
        route.name
    );
    let help = "bind it to other `listeners`, or write the other `scheme`";
    lint.tell("redirect-loop", &at("routes", index).key("redirect"), &message, help);
}

/// A prefix that no path of the route begins with. `/` takes nothing away, which is as it says.
fn strip_prefix(lint: &mut Lint<'_>, index: usize, route: &Route) {
    let Some(strip) = &route.rewrite.strip_prefix else { return };
    let (strip, prefix) = (strip.trim_end_matches('/'), route.path_prefix.trim_end_matches('/'));
    let is_below = |path: &str, top: &str| {
        path.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    if is_below(prefix, strip) || is_below(strip, prefix) {
        return;
    }
    let message = format!(
        "`strip_prefix` never takes anything away: every path of the route `{}` begins with `{}`",
        route.name, route.path_prefix
    );
    let at = at("routes", index).key("rewrite").key("strip_prefix");
    lint.tell("never-strips", &at, &message, "write `path_prefix`, or a part of it, here");
}

/// Fields that are removed and then set all the same.
fn headers(lint: &mut Lint<'_>, index: usize, route: &Route) {
    let changes = &route.headers;
    let both = [
        ("add_request", &changes.add_request, "remove_request", &changes.remove_request),
        ("add_response", &changes.add_response, "remove_response", &changes.remove_response),
    ];
    for (add, added, remove, removed) in both {
        for (ix, name) in removed.iter().enumerate() {
            if added.iter().any(|(added, _)| added.eq_ignore_ascii_case(name)) {
                let at = lint.middleware(index, "headers").key(remove).index(ix);
                let message = format!("`{name}` is not removed, for `{add}` sets it");
                let help = format!("`{add}` replaces what was there: leave one of the two out");
                lint.tell("added-and-removed", &at, &message, help);
            }
        }
    }
}

/// What is done with a request to an upstream, in a route that sends none.
fn without_pool(lint: &mut Lint<'_>, index: usize, route: &Route) {
    if lint.pool_of(route).is_some() {
        return;
    }
    let route_at = at("routes", index);
    let headers = lint.middleware(index, "headers");
    let rewrite = route_at.key("rewrite");
    let keys = [
        (route.rewrite.strip_prefix.is_some(), rewrite.key("strip_prefix")),
        (route.rewrite.add_prefix.is_some(), rewrite.key("add_prefix")),
        (route.retry.is_some(), lint.middleware(index, "retry")),
        (!route.headers.add_request.is_empty(), headers.key("add_request")),
        (!route.headers.remove_request.is_empty(), headers.key("remove_request")),
        (!route.total_timeout.is_zero(), route_at.key("timeouts").key("total")),
        (lint.written(&route_at.key("tunnel_idle_timeout")), route_at.key("tunnel_idle_timeout")),
    ];
    for (_, at) in keys.iter().filter(|(given, _)| *given) {
        let message = format!(
            "{} does nothing: the route `{}` sends no request to an upstream",
            at.last_key(),
            route.name
        );
        lint.tell("needs-pool", at, &message, "leave it out, or give the route a `pool`");
    }
}

fn hops(lint: &mut Lint<'_>, index: usize, route: &Route) {
    if route.rate_limit.as_ref().is_some_and(|limit| !limit.per_ip && limit.trust_proxy_hops > 0) {
        let at = lint.middleware(index, "rate_limit").key("trust_proxy_hops");
        let message =
            "`trust_proxy_hops` does nothing: with `scope: per-route` all clients count as one";
        lint.tell("unused-key", &at, message, "leave it out, or write `scope: per-ip`");
    }
}

/// Listeners that no route is bound to.
fn idle_listeners(lint: &mut Lint<'_>) {
    let plan = lint.plan;
    let autocert =
        plan.listeners.iter().filter_map(|l| l.tls.as_ref()).any(|t| t.autocert.is_some());
    for (index, listener) in plan.listeners.iter().enumerate() {
        let binds = |route: &Route| route.listeners.is_empty() || route.listeners.contains(&index);
        // One without TLS may be there to prove to a CA whose the names are.
        if plan.routes.iter().any(binds) || (autocert && listener.tls.is_none()) {
            continue;
        }
        let message = format!(
            "no route is bound to the listener `{}`: every request there gets 404",
            listener.name
        );
        let help = "add it to the `listeners` of a route, or remove it";
        lint.tell("idle-listener", &at("listeners", index).key("name"), &message, help);
    }
}
