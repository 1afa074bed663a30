//! What is decided of a request from its head and what is in force, before anything is done
//! about it. `l7rp explain` asks the same questions, so that it cannot say one thing while the
//! proxy does another.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use l7rp_core::failure::{Failure, Malformed};
use l7rp_core::head;
use l7rp_core::http1::Framing;
use l7rp_core::http1::request::Request;
use l7rp_core::names::Nanos;
use l7rp_core::pick::key_of;
use l7rp_core::route::{self, parse_host};

use super::{Incoming, grpc};
use crate::config::plan::{Algorithm, HashKey, HostHeader, Pool};
use crate::live::{Listener, Route, Snapshot};
use crate::tls::Terminator;

/// What a probe on a data listener asks.
#[derive(Clone, Copy, Debug)]
pub enum Probe {
    /// Is the process alive?
    Alive,
    /// Should it be sent traffic?
    Ready,
}

/// `/livez` and `/readyz` on a data listener, in the mode without a file.
pub fn own_probe(snapshot: &Snapshot, incoming: &Incoming<'_>) -> Option<Probe> {
    if !snapshot.plan.probes_on_data {
        return None;
    }
    match incoming.path() {
        b"/livez" => Some(Probe::Alive),
        b"/readyz" => Some(Probe::Ready),
        _ => None,
    }
}

/// Whether a request is a call of gRPC, and how long it may take by its own word.
pub fn call(incoming: &Incoming<'_>) -> (bool, Option<Duration>) {
    let Incoming { buf, head, .. } = *incoming;
    // All calls take trailers, and hardly anything else does.
    let is_call = head.takes_trailers && grpc::is_call(buf, head);
    (is_call, is_call.then(|| grpc::timeout(buf, head)).flatten())
}

/// Whether a request can be sent twice at once as far as its head says: who asks for another
/// protocol, or waits to be told to go on, is heard out by one.
pub fn may_race(head: &Request) -> bool {
    head.upgrade.len == 0 && !head.expects_continue
}

/// Refuses a host that the client's certificate is not for: which clients are let in was decided
/// for the name that it has asked for when TLS began, `sni`.
///
/// # Errors
/// The host belongs on another connection.
pub fn admit_host(
    tls: Option<&Terminator>,
    sni: Option<&str>,
    incoming: &Incoming<'_>,
) -> Result<(), Failure> {
    let (Some(tls), Some(sni)) = (tls, sni) else { return Ok(()) };
    let host = incoming.head.host.of(incoming.buf);
    let Some(host) = std::str::from_utf8(host).ok().filter(|host| !host.is_empty()) else {
        return Ok(());
    };
    // Without the port.
    let name = if host.starts_with('[') { host } else { host.split(':').next().unwrap_or(host) };
    if tls.is_good_for(Some(sni), name) { Ok(()) } else { Err(Failure::Misdirected) }
}

/// The route that a request takes.
///
/// # Errors
/// It has none, or its host is none.
pub fn route<'a>(
    snapshot: &'a Snapshot,
    listener: &Listener,
    incoming: &Incoming<'_>,
) -> Result<&'a Route, Failure> {
    let found = with_request(snapshot, listener, incoming, |r| snapshot.table.find(r))?;
    snapshot.routes.get(found.ok_or(Failure::NoRoute)?).ok_or(Failure::Internal)
}

/// What `ask` says to the request as rules see it.
///
/// # Errors
/// Its host is none.
pub fn with_request<T>(
    snapshot: &Snapshot,
    listener: &Listener,
    incoming: &Incoming<'_>,
    ask: impl FnOnce(&route::Request<'_>) -> T,
) -> Result<T, Failure> {
    let Incoming { buf, head, .. } = *incoming;
    let host = match head.host.of(buf) {
        // Only HTTP/1.0 may come without one.
        b"" if head.is_http10 => None,
        host => Some(parse_host(host).map_err(|_| Failure::BadRequest(Malformed::HostInvalid))?),
    };
    let guarded = &snapshot.guarded;
    // What a client says of itself there is nothing to go by.
    let has_field = |name: &str, value: &str| {
        if guarded.drops(name.as_bytes()) {
            return false;
        }
        head.fields.iter().any(|f| {
            f.name.of(buf).eq_ignore_ascii_case(name.as_bytes())
                && f.value.of(buf) == value.as_bytes()
        })
    };
    Ok(ask(&route::Request {
        listener: listener.index,
        host,
        path: incoming.target(),
        method: head.method_text.of(buf),
        has_field: &has_field,
    }))
}

/// Refuses clients that the route keeps out.
///
/// # Errors
/// This is one of them.
pub fn admit_address(route: &Route, address: Option<IpAddr>) -> Result<(), Failure> {
    let (allow, deny) = (&route.plan.allow, &route.plan.deny);
    if allow.is_empty() && deny.is_empty() {
        return Ok(());
    }
    // A peer without an address, on a Unix-domain socket, is let in only where nobody in
    // particular has to be.
    let within = |nets: &[IpNet]| address.is_some_and(|a| nets.iter().any(|n| n.contains(&a)));
    if within(deny) || !(allow.is_empty() || within(allow)) {
        return Err(Failure::Forbidden);
    }
    Ok(())
}

/// Refuses a body whose announced length is over the limit before any of it is read.
///
/// # Errors
/// It is.
pub fn admit_body(
    route: &Route,
    listener: &Listener,
    incoming: &Incoming<'_>,
) -> Result<(), Failure> {
    match incoming.head.framing {
        Framing::Length(n) if n > max_body(route, listener) => Err(Failure::BodyTooLarge),
        _ => Ok(()),
    }
}

/// Octets that a body may have.
pub fn max_body(route: &Route, listener: &Listener) -> u64 {
    match (route.plan.max_body_bytes, listener.plan.limits.max_body_bytes) {
        (0, 0) => u64::MAX,
        (0, n) | (n, _) => n,
    }
}

/// When all must be over, by the route's rule or the client's own.
pub fn deadline(route: &Route, arrived: Nanos, of_client: Nanos) -> Nanos {
    let total = route.plan.total_timeout;
    let own = if total.is_zero() { Nanos::NEVER } else { arrived.plus(total) };
    own.min(of_client)
}

/// The target after the route's rewrite, as parts to be put together.
pub fn rewritten<'a>(route: &'a Route, target: &'a [u8]) -> (&'a [u8], &'a [u8], &'a [u8]) {
    let rewrite = &route.plan.rewrite;
    let strip = rewrite.strip_prefix.as_deref().unwrap_or_default().trim_end_matches('/');
    let add = rewrite.add_prefix.as_deref().unwrap_or_default().trim_end_matches('/');
    let stripped = match target.strip_prefix(strip.as_bytes()) {
        Some(rest) if rest.is_empty() || rest.starts_with(b"/") || rest.starts_with(b"?") => rest,
        _ => target,
    };
    let slash: &[u8] = if stripped.starts_with(b"/") { b"" } else { b"/" };
    (add.as_bytes(), slash, stripped)
}

/// The Host that an upstream is told whose URL has `authority`.
pub fn upstream_host<'a>(pool: &'a Pool, incoming: &Incoming<'a>, authority: &'a str) -> &'a [u8] {
    let sent = incoming.head.host.of(incoming.buf);
    match &pool.host_header {
        // HTTP/1.0 may come without a Host; the upstream must not.
        HostHeader::Preserve if !sent.is_empty() => sent,
        HostHeader::Preserve | HostHeader::Upstream => authority.as_bytes(),
        HostHeader::Literal(host) => host.as_bytes(),
    }
}

/// What ties a request to an upstream, for the algorithms that ask for it, and where it was
/// found: what is missing is replaced by the client's address, `client`.
pub fn tie<'a>(
    snapshot: &Snapshot,
    pool: &'a Pool,
    incoming: &Incoming<'a>,
    client: &'a str,
) -> Option<(&'a HashKey, &'a [u8])> {
    let Incoming { buf, head, .. } = *incoming;
    let by = match pool.selector.algorithm {
        Algorithm::ConsistentHashBounded => &pool.selector.hash_key,
        Algorithm::IpHash => &HashKey::ClientIp,
        _ => return None,
    };
    let value = match by {
        // A client must not choose by what only the proxy may say.
        HashKey::Header(name) if snapshot.guarded.drops(name.as_bytes()) => None,
        HashKey::Header(name) => head::value(&head.fields, buf, name),
        HashKey::Cookie(name) => head
            .fields
            .iter()
            .filter(|f| f.name.of(buf).eq_ignore_ascii_case(b"cookie"))
            .find_map(|f| head::cookie(f.value.of(buf), name.as_bytes())),
        HashKey::ClientIp => None,
    };
    Some(value.map_or((&HashKey::ClientIp, client.as_bytes()), |value| (by, value)))
}

/// The hash of [`tie`].
pub fn key(tie: Option<(&HashKey, &[u8])>) -> u64 {
    tie.map_or(0, |(_, value)| key_of(value))
}
