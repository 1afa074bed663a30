//! Who the client is: the peer of the connection, unless that peer is trusted to tell.

use std::net::IpAddr;
use std::rc::Rc;

use ipnet::IpNet;
use l7rp_core::head::Name;
use l7rp_core::http1::encode::values;

use super::Incoming;
use super::client::Client;
use crate::live::Listener;

/// Who sent a request.
#[derive(Debug)]
pub struct Sender {
    trusted: bool,
    /// The client that a trusted peer names, if it names one.
    named: Option<IpAddr>,
    /// That client's address as text.
    text: Option<Rc<str>>,
}

impl Sender {
    /// Whether the peer's forwarding fields are believed.
    pub fn is_trusted(&self) -> bool {
        self.trusted
    }

    /// The client's address, where this is the peer's.
    pub fn ip(&self, peer: Option<IpAddr>) -> Option<IpAddr> {
        self.named.or(peer)
    }

    /// Whether the peer names the client.
    pub fn is_named(&self) -> bool {
        self.named.is_some()
    }

    /// The client's address as text.
    pub fn client<'a>(&'a self, client: &'a Client) -> &'a Rc<str> {
        self.text.as_ref().unwrap_or(&client.peer_text)
    }
}

/// The address of a peer as text.
pub fn peer_text(peer: Option<IpAddr>) -> Rc<str> {
    peer.map_or_else(|| "unix".into(), |ip| ip.to_string().into())
}

/// Works out who sent a request. The client is the first address from the right, beginning
/// with the peer, that is not a trusted proxy.
pub fn sender(listener: &Listener, peer: Option<IpAddr>, incoming: &Incoming<'_>) -> Sender {
    let proxies = &listener.plan.trusted_proxies;
    let trusted = |ip: IpAddr| proxies.iter().any(|net: &IpNet| net.contains(&ip.to_canonical()));
    if proxies.is_empty() || !peer.is_some_and(trusted) {
        return Sender { trusted: false, named: None, text: None };
    }
    let of = |name| values(incoming.buf, &incoming.head.fields, name);
    let is_there = |name| of(name).next().is_some();
    // Who adds to one of the two and not to the other leaves it behind; the first is the one
    // that nearly everybody adds to.
    let named = if is_there(Name::XForwardedFor) {
        first_unknown(items(of(Name::XForwardedFor)), trusted)
    } else {
        first_unknown(items(of(Name::Forwarded)).map(for_parameter), trusted)
    };
    Sender { trusted: true, named, text: named.map(|ip| ip.to_string().into()) }
}

/// The items of a list in several lines, from the right.
fn items<'a>(lines: impl DoubleEndedIterator<Item = &'a [u8]>) -> impl Iterator<Item = &'a [u8]> {
    let items = lines.rev().flat_map(|line| line.rsplit(|&b| b == b','));
    items.map(<[u8]>::trim_ascii).filter(|item| !item.is_empty())
}

/// The first address that is not trusted. What stands left of something unreadable cannot be
/// believed either.
fn first_unknown<'a>(
    items: impl Iterator<Item = &'a [u8]>,
    trusted: impl Fn(IpAddr) -> bool,
) -> Option<IpAddr> {
    items.map(parse_address).take_while(Option::is_some).flatten().find(|&ip| !trusted(ip))
}

/// The value of `for` in an element of `Forwarded` (RFC 7239 §4), without its quotes; empty if
/// there is none.
fn for_parameter(element: &[u8]) -> &[u8] {
    let value = element.split(|&b| b == b';').find_map(|pair| {
        let pair = pair.trim_ascii();
        let (name, value) = pair.split_at_checked(4)?;
        name.eq_ignore_ascii_case(b"for=").then_some(value)
    });
    let value = value.unwrap_or_default();
    value.strip_prefix(b"\"").and_then(|v| v.strip_suffix(b"\"")).unwrap_or(value)
}

/// Whom a rate limit counts a request for: the client, or, if `hops` is not 0, the address that
/// stands there in `X-Forwarded-For` counted from the right. `None`: a peer without an address.
pub fn limited_client(
    incoming: &Incoming<'_>,
    peer: Option<IpAddr>,
    sender: &Sender,
    hops: u32,
) -> Option<IpAddr> {
    let Some(before) = hops.checked_sub(1) else { return sender.ip(peer) };
    let lines = values(incoming.buf, &incoming.head.fields, Name::XForwardedFor);
    items(lines).nth(before as usize).and_then(parse_address).or_else(|| sender.ip(peer))
}

/// An address as it stands in `X-Forwarded-For`: bare, in brackets, or with a port.
fn parse_address(item: &[u8]) -> Option<IpAddr> {
    let item = std::str::from_utf8(item).ok()?;
    let bare = item.strip_prefix('[').and_then(|i| i.strip_suffix(']')).unwrap_or(item);
    bare.parse::<IpAddr>()
        .ok()
        .or_else(|| item.parse::<std::net::SocketAddr>().ok().map(|a| a.ip()))
        .map(|ip| ip.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn for_parameters_as_the_rfc_shows_them() {
        for (element, value) in [
            ("for=192.0.2.60;proto=http;by=203.0.113.43", "192.0.2.60"),
            ("For=\"[2001:db8:cafe::17]:4711\"", "[2001:db8:cafe::17]:4711"),
            ("proto=https; for=192.0.2.43", "192.0.2.43"),
            ("for=unknown", "unknown"),
            ("by=203.0.113.43", ""),
            ("for", ""),
            ("", ""),
        ] {
            assert_eq!(for_parameter(element.as_bytes()), value.as_bytes(), "{element}");
        }
    }

    #[test]
    fn addresses_as_proxies_write_them() {
        for (text, ip) in [
            ("192.0.2.1", Some("192.0.2.1")),
            ("192.0.2.1:4711", Some("192.0.2.1")),
            ("2001:db8::1", Some("2001:db8::1")),
            ("[2001:db8::1]", Some("2001:db8::1")),
            ("[2001:db8::1]:4711", Some("2001:db8::1")),
            ("::ffff:192.0.2.1", Some("192.0.2.1")),
            ("unknown", None),
            ("", None),
        ] {
            assert_eq!(parse_address(text.as_bytes()), ip.map(|i| i.parse().unwrap()), "{text}");
        }
    }
}
