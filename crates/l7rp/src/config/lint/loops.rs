//! Upstreams that are the proxy itself.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Lint, SELF_LOOP, at};
use crate::config::plan::{Bind, HostHeader, Listener, Pool, Rewrite, Route, Scheme, Upstream};

/// Only what comes back as it came takes the same way again for certain.
pub(super) fn check(lint: &mut Lint<'_>) {
    for (index, pool) in lint.plan.pools.iter().enumerate() {
        if pool.host_header != HostHeader::Preserve {
            continue;
        }
        for (ix, upstream) in pool.upstreams.iter().enumerate() {
            if upstream.base_path.is_empty() {
                self::upstream(lint, index, pool, ix);
            }
        }
    }
}

fn upstream(lint: &mut Lint<'_>, index: usize, pool: &Pool, ix: usize) {
    let upstream = &pool.upstreams[ix];
    let Some(own) = own_listener(&lint.plan.listeners, upstream) else { return };
    let again = lint.routes_to(index).find(|(nth, route)| comes_again(lint, own, *nth, route));
    let Some((_, route)) = again else { return };
    let message = format!(
        "`{}` is the listener `{}` itself: what the route `{}` sends there comes back to it",
        upstream.url, lint.plan.listeners[own].name, route.name
    );
    let at = at("upstream_pools", index).key("upstreams").index(ix).key("url");
    let help = "write the address of a server, or bind the listener to another port";
    lint.tell(SELF_LOOP, &at, &message, help);
}

/// The listener at which connections to `upstream` come in.
fn own_listener(listeners: &[Listener], upstream: &Upstream) -> Option<usize> {
    let addresses: Vec<IpAddr> = match upstream.host.as_str() {
        "localhost" => vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
        host => vec![host.parse::<IpAddr>().ok()?.to_canonical()],
    };
    let own = addresses.into_iter().find_map(|ip| at_address(listeners, ip, upstream.port))?;
    let speaks_tls = listeners[own].tls.is_some();
    (!speaks_tls && upstream.scheme != Scheme::Https).then_some(own)
}

/// Of several that cover an address, the kernel takes the one that is most exact about it.
fn at_address(listeners: &[Listener], ip: IpAddr, port: u16) -> Option<usize> {
    // "Any" leads to this machine.
    let ip = match ip {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    let exactness = |listener: &Listener| {
        let Bind::Tcp(bind) = listener.bind else { return None };
        let own = bind.ip().to_canonical();
        let covers = own.is_unspecified() && ip.is_loopback() && (own.is_ipv6() || ip.is_ipv4());
        let same_family = own.is_ipv4() == ip.is_ipv4();
        (bind.port() == port && (own == ip || covers)).then_some((own == ip, same_family))
    };
    let covering = listeners.iter().enumerate().filter_map(|(ix, l)| Some((exactness(l)?, ix)));
    covering.max().map(|(_, ix)| ix)
}

/// Whether a request that has taken `route` takes it again when it comes in at the listener `own`.
fn comes_again(lint: &Lint<'_>, own: usize, nth: usize, route: &Route) -> bool {
    let binds = |route: &Route| route.listeners.is_empty() || route.listeners.contains(&own);
    // One with the same host and prefix may ask for what the proxy itself has added.
    let has_rival = lint.plan.routes.iter().enumerate().any(|(other, rival)| {
        other != nth
            && binds(rival)
            && rival.host == route.host
            && rival.path_prefix == route.path_prefix
    });
    binds(route)
        && !has_rival
        && route.rewrite == Rewrite::default()
        && route.predicates.is_empty()
        && route.allow.is_empty()
        && route.deny.is_empty()
}
