//! Routes.

use std::time::Duration;

use super::precedence::Earlier;
use super::{Check, Complaint, Unique, headers, middleware, net, words};
use crate::config::file::{File, KeyPath, RespondSection, RouteSection};
use crate::config::plan::{Action, HostPattern, Rewrite, Route};

const TUNNEL_IDLE: Duration = Duration::from_hours(1);

pub(super) fn check(check: &mut Check<'_>, file: &File) -> Vec<Route> {
    let mut names = Unique::new("route name");
    let around = KeyPath::root().key("routes");
    let mut earlier = Earlier::default();
    let mut routes = Vec::with_capacity(file.routes.len());
    for (i, written) in file.routes.iter().enumerate() {
        let at = around.index(i);
        let route = route(check, file, written, &at, &mut names);
        earlier.meet(check, i, &route);
        routes.push(route);
    }
    routes
}

fn route(
    check: &mut Check<'_>,
    file: &File,
    written: &RouteSection,
    at: &KeyPath,
    names: &mut Unique,
) -> Route {
    let name = check.name(written.name.as_ref(), at, names);
    let listeners = listeners(check, file, written, at);
    let path_at = at.key("path_prefix");
    let path_prefix = written.path_prefix.as_deref().unwrap_or("/");
    check.or_complain(words::path(path_prefix), &path_at);
    let chain = middleware::check(check, &written.middleware, &at.key("middleware"));
    if chain.rate_limit.as_ref().is_some_and(|limit| limit.trust_proxy_hops > 0) {
        hops(check, file, &listeners, written, at);
    }
    Route {
        name,
        listeners,
        host: host(check, written.host.as_deref(), &at.key("host")),
        path_prefix: path_prefix.to_owned(),
        methods: check.methods(&written.methods, &at.key("methods")),
        predicates: predicates(check, written, &at.key("header_predicates")),
        action: action(check, file, written, at),
        rewrite: rewrite(check, written, &at.key("rewrite")),
        allow: check.cidrs(&written.allow, &at.key("allow")),
        deny: check.cidrs(&written.deny, &at.key("deny")),
        rate_limit: chain.rate_limit,
        retry: chain.retry,
        headers: chain.headers,
        compress: chain.compress,
        total_timeout: check.time(written.timeouts.total, &at.key("timeouts").key("total")),
        max_body_bytes: written.max_body_bytes.0,
        tunnel_idle_timeout: match written.tunnel_idle_timeout {
            Some(time) => check.time_above_zero(time, &at.key("tunnel_idle_timeout")),
            None => TUNNEL_IDLE,
        },
    }
}

impl Check<'_> {
    pub(super) fn methods(&mut self, written: &[String], at: &KeyPath) -> Vec<String> {
        let mut methods: Vec<String> = Vec::with_capacity(written.len());
        for (i, method) in written.iter().enumerate() {
            self.or_complain(words::method(method), &at.index(i));
            if !methods.contains(method) {
                methods.push(method.clone());
            }
        }
        methods
    }
}

fn listeners(
    check: &mut Check<'_>,
    file: &File,
    written: &RouteSection,
    at: &KeyPath,
) -> Vec<usize> {
    let at = at.key("listeners");
    let mut indices = Vec::with_capacity(written.listeners.len());
    for (i, name) in written.listeners.iter().enumerate() {
        let known = file.listeners.iter().map(|l| l.name.as_deref().unwrap_or_default());
        let index = check.named("listener", name, known, "listeners", &at.index(i));
        if let Some(index) = index
            && !indices.contains(&index)
        {
            indices.push(index);
        }
    }
    indices
}

fn host(check: &mut Check<'_>, written: Option<&str>, at: &KeyPath) -> HostPattern {
    match written {
        None => HostPattern::Any,
        Some("") => {
            let complaint = Complaint::new("`host` is empty");
            check.complain(at, complaint.help("leave it out, or write `*`, for any host"));
            HostPattern::Any
        }
        Some(text) => check.or_complain(net::host_pattern(text), at).unwrap_or(HostPattern::Any),
    }
}

fn predicates(
    check: &mut Check<'_>,
    written: &RouteSection,
    at: &KeyPath,
) -> Vec<(String, String)> {
    let mut predicates = Vec::with_capacity(written.header_predicates.len());
    for (i, predicate) in written.header_predicates.iter().enumerate() {
        let at = at.index(i);
        let name = check.need(predicate.name.as_ref(), &at, "name").unwrap_or_default();
        if !name.is_empty() {
            check.or_complain(headers::name(name), &at.key("name"));
        }
        let value_at = at.key("value");
        if predicate.value.is_none() && !check.doubtful_key(&at, "value") {
            check.wrong(&at, "`value` is missing");
        }
        let value = predicate.value.as_deref().unwrap_or_default();
        check.or_complain(headers::value(value), &value_at);
        predicates.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    predicates
}

fn action(check: &mut Check<'_>, file: &File, written: &RouteSection, at: &KeyPath) -> Action {
    let given: Vec<&str> = [
        ("pool", written.pool.is_some()),
        ("redirect", written.redirect.is_some()),
        ("respond", written.respond.is_some()),
    ]
    .into_iter()
    .filter_map(|(key, given)| given.then_some(key))
    .collect();
    let doubtful = ["pool", "redirect", "respond"].iter().any(|key| check.doubtful_key(at, key));
    match given.as_slice() {
        [] if !doubtful => {
            let complaint = Complaint::new("the route does nothing: `pool` is missing");
            check.complain(at, complaint.help("a route has one of `pool`, `redirect`, `respond`"));
        }
        [first, second, ..] => {
            let message = format!("`{first}` and `{second}` cannot be together");
            let complaint = Complaint::new(message);
            let help = "a route has one of `pool`, `redirect`, `respond`";
            check.complain(&at.key(second), complaint.help(help));
        }
        _ => {}
    }
    if let Some(redirect) = &written.redirect {
        return self::redirect(check, &redirect.scheme, redirect.code, &at.key("redirect"));
    }
    if let Some(respond) = &written.respond {
        return self::respond(check, respond, &at.key("respond"));
    }
    let known = file.upstream_pools.iter().map(|pool| pool.name.as_deref().unwrap_or_default());
    let name = written.pool.as_deref().unwrap_or_default();
    if written.pool.is_some() && name.is_empty() {
        check.wrong(&at.key("pool"), "`pool` is empty");
    }
    let pool = check.named("pool", name, known, "upstream_pools", &at.key("pool"));
    Action::Pool(pool.unwrap_or_default())
}

fn redirect(check: &mut Check<'_>, scheme: &str, code: i64, at: &KeyPath) -> Action {
    if !matches!(scheme, "http" | "https") {
        let message = format!("`scheme` must be `http` or `https`, is `{}`", scheme.escape_debug());
        check.wrong(&at.key("scheme"), message);
    }
    if !matches!(code, 301 | 302 | 303 | 307 | 308) {
        let message = format!("`code` must be 301, 302, 303, 307 or 308, is {code}");
        check.wrong(&at.key("code"), message);
    }
    Action::Redirect { scheme: scheme.to_owned(), code: u16::try_from(code).unwrap_or(308) }
}

fn respond(check: &mut Check<'_>, written: &RespondSection, at: &KeyPath) -> Action {
    let status = check.between(written.status, 200, 599, &at.key("status"));
    if matches!(status, 204 | 205 | 304) && !written.body.is_empty() {
        check.wrong(&at.key("body"), format!("a {status} response has no body"));
    }
    check.or_complain(headers::value(&written.content_type), &at.key("content_type"));
    Action::Respond {
        status: status as u16,
        body: written.body.clone(),
        content_type: written.content_type.clone(),
    }
}

fn rewrite(check: &mut Check<'_>, written: &RouteSection, at: &KeyPath) -> Rewrite {
    let prefixes = [
        ("strip_prefix", &written.rewrite.strip_prefix),
        ("add_prefix", &written.rewrite.add_prefix),
    ];
    for (key, prefix) in prefixes {
        if let Some(prefix) = prefix {
            check.or_complain(words::path(prefix), &at.key(key));
        }
    }
    Rewrite {
        strip_prefix: written.rewrite.strip_prefix.clone(),
        add_prefix: written.rewrite.add_prefix.clone(),
    }
}

/// Two rules for the client's address would contradict each other.
fn hops(
    check: &mut Check<'_>,
    file: &File,
    listeners: &[usize],
    written: &RouteSection,
    at: &KeyPath,
) {
    let mut bound = file.listeners.iter().enumerate().filter(|(i, listener)| {
        (listeners.is_empty() || listeners.contains(i)) && !listener.trusted_proxies.is_empty()
    });
    let Some((_, listener)) = bound.next() else { return };
    let item = written.middleware.iter().position(|item| item.rate_limit.is_some());
    let at = at.key("middleware").index(item.unwrap_or_default());
    let message = format!(
        "`trust_proxy_hops` cannot be together with `trusted_proxies` of the listener `{}`",
        listener.name.as_deref().unwrap_or_default()
    );
    let help = "`trusted_proxies` finds the client already; leave `trust_proxy_hops` out";
    check.complain(
        &at.key("rate_limit").key("trust_proxy_hops"),
        Complaint::new(message).help(help),
    );
}
