//! Addresses, hosts and URLs.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use ipnet::IpNet;

use super::{Complaint, words};
use crate::config::plan::{Bind, HostPattern, Scheme};

/// An address to listen on.
pub(in crate::config) fn bind(text: &str) -> Result<Bind, Complaint> {
    if let Some(path) = text.strip_prefix("unix:") {
        if path.starts_with('/') {
            return Ok(Bind::Unix(PathBuf::from(path)));
        }
        let complaint =
            Complaint::new(format!("the path of a Unix socket must be absolute: `{path}`"));
        return Err(complaint.help("write it like `unix:/run/l7rp.sock`"));
    }
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok(Bind::Tcp(address));
    }
    let complaint =
        Complaint::new(format!("`{}` is not an address to listen on", text.escape_debug()));
    Err(complaint.help(match text.rsplit_once(':') {
        Some(("" | "*", port)) if is_port(port) => {
            format!("write `0.0.0.0:{port}` for all IPv4 addresses, `[::]:{port}` for all addresses")
        }
        Some(("localhost", port)) if is_port(port) => format!("write `127.0.0.1:{port}`"),
        Some((_, port)) if !port.is_empty() && port.parse::<u16>().is_err() && port.bytes().all(|b| b.is_ascii_digit()) => {
            "a port is a number from 0 to 65535".to_owned()
        }
        _ => "write an IP address and a port, like `127.0.0.1:8080` or `[::]:80`, or `unix:/run/l7rp.sock`"
            .to_owned(),
    }))
}

fn is_port(text: &str) -> bool {
    text.parse::<u16>().is_ok()
}

/// A range of addresses; an address alone is a range of one.
/// An IPv4 network written as a mapped IPv6 one, as the IPv4 network it is: clients' addresses
/// are compared in that form.
fn unmapped(net: IpNet) -> IpNet {
    let IpNet::V6(v6) = net else { return net };
    let prefix = v6.prefix_len().checked_sub(96);
    match (v6.addr().to_ipv4_mapped(), prefix) {
        (Some(v4), Some(prefix)) => IpNet::new(v4.into(), prefix).unwrap_or(net),
        _ => net,
    }
}

pub(super) fn cidr(text: &str) -> Result<IpNet, Complaint> {
    if let Ok(net) = text.parse::<IpNet>().map(unmapped) {
        return Ok(net.trunc());
    }
    text.parse::<IpAddr>().map(|ip| IpNet::from(ip.to_canonical())).map_err(|_| {
        let complaint =
            Complaint::new(format!("`{}` is not a range of addresses", text.escape_debug()));
        complaint.help("write it like `10.0.0.0/8`, `2001:db8::/32` or `192.0.2.1`")
    })
}

/// The hosts of a route.
pub(super) fn host_pattern(text: &str) -> Result<HostPattern, Complaint> {
    if text == "*" {
        return Ok(HostPattern::Any);
    }
    if let Some(rest) = text.strip_prefix("*.")
        && !rest.contains('*')
    {
        return match host(rest)? {
            Host::Name(name) => Ok(HostPattern::Wildcard(name)),
            _ => Err(Complaint::new(format!("an address cannot have a wildcard: `{text}`"))),
        };
    }
    if text.contains('*') {
        let complaint = Complaint::new(format!(
            "a wildcard stands for the whole leftmost label, nothing else: `{}`",
            text.escape_debug()
        ));
        return Err(complaint.help("write it like `*.example.com`"));
    }
    match host(text)? {
        Host::Name(name) => Ok(HostPattern::Exact(name)),
        Host::V4(address) => Ok(HostPattern::Exact(address)),
        Host::V6(address) => Ok(HostPattern::Exact(format!("[{address}]"))),
    }
}

/// A host in canonical form.
enum Host {
    Name(String),
    V4(String),
    V6(Ipv6Addr),
}

fn host(text: &str) -> Result<Host, Complaint> {
    if text.contains('/') {
        return Err(not_a_host(text).help("only the host goes here, without scheme and path"));
    }
    let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
    if let Ok(address) = bare.parse::<Ipv6Addr>() {
        return Ok(Host::V6(address));
    }
    if let Some((name, port)) = text.rsplit_once(':') {
        let what = Complaint::new(format!("a host has no port here: `{}`", text.escape_debug()));
        let known = port.bytes().all(|b| b.is_ascii_digit()) && !name.is_empty();
        return Err(if known { what.help(format!("write `{name}`")) } else { not_a_host(text) });
    }
    let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    if name.parse::<std::net::Ipv4Addr>().is_ok() {
        return Ok(Host::V4(name));
    }
    if !name.is_ascii() {
        return Err(
            not_a_host(text).help("write it in its ASCII form (`xn--…`), as clients send it")
        );
    }
    let good = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if name.len() > 253 || !name.split('.').all(good) {
        return Err(not_a_host(text));
    }
    // An address with an octet too large is no name: the last label of names is no number.
    if name.rsplit('.').next().is_some_and(|label| label.bytes().all(|b| b.is_ascii_digit())) {
        return Err(not_a_host(text));
    }
    Ok(Host::Name(name))
}

fn not_a_host(text: &str) -> Complaint {
    Complaint::new(format!("`{}` is not a host name or address", text.escape_debug()))
}

/// A name for TLS: exact, or with a wildcard as the leftmost label.
pub(super) fn tls_name(text: &str, wildcards: bool) -> Result<String, Complaint> {
    match host_pattern(text)? {
        HostPattern::Exact(name) => Ok(name),
        HostPattern::Wildcard(name) if wildcards => Ok(format!("*.{name}")),
        HostPattern::Wildcard(_) | HostPattern::Any => {
            Err(Complaint::new(format!("a wildcard is not possible here: `{text}`")))
        }
    }
}

/// `host` or `host:port`. The host comes back without brackets.
pub(super) fn authority(text: &str) -> Result<(String, Option<u16>), Complaint> {
    if text.is_empty() {
        return Err(Complaint::new("there is no host"));
    }
    let (name, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, after) = rest.split_once(']').ok_or_else(|| not_a_host(text))?;
            (address, after.strip_prefix(':').or(if after.is_empty() { None } else { Some("?") }))
        }
        None => match text.split_once(':') {
            Some((_, port)) if port.contains(':') => {
                let complaint = not_a_host(text);
                return Err(
                    complaint.help("an IPv6 address must be in brackets, like `[::1]:8080`")
                );
            }
            Some((name, port)) => (name, Some(port)),
            None => (text, None),
        },
    };
    if name.is_empty() {
        return Err(Complaint::new("there is no host"));
    }
    let name = match host(name)? {
        Host::Name(name) | Host::V4(name) => name,
        Host::V6(address) => address.to_string(),
    };
    let port = match port {
        None => None,
        Some(port) => match port.parse::<u16>() {
            Ok(number) if number > 0 && !port.starts_with('+') => Some(number),
            _ => {
                let complaint = Complaint::new(format!("`{}` is not a port", port.escape_debug()));
                return Err(complaint.help("a port is a number from 1 to 65535"));
            }
        },
    };
    Ok((name, port))
}

/// `host:port`, both needed.
pub(super) fn host_port(text: &str) -> Result<(String, u16), Complaint> {
    if text.contains("://") {
        let complaint =
            Complaint::new(format!("expected `host:port`, found a URL: `{}`", text.escape_debug()));
        return Err(complaint.help("leave out the scheme and the path"));
    }
    let (host, port) = authority(text)?;
    let port = port.ok_or_else(|| {
        let complaint = Complaint::new(format!("there is no port: `{}`", text.escape_debug()));
        complaint.help("write it like `10.0.0.10:6379`")
    })?;
    Ok((host, port))
}

/// The parts of an upstream's URL.
pub(in crate::config) struct Url {
    pub(in crate::config) scheme: Scheme,
    pub(in crate::config) host: String,
    pub(in crate::config) port: u16,
    pub(in crate::config) authority: String,
    pub(in crate::config) base_path: String,
}

/// An upstream's URL.
pub(in crate::config) fn upstream_url(text: &str) -> Result<Url, Complaint> {
    const SCHEMES: &str = "the schemes are `http`, `https` and `h2c`";
    if text.starts_with("unix:") || text.contains("://unix:/") {
        let complaint = Complaint::new("upstreams at Unix-domain sockets are not supported");
        return Err(
            complaint.help("have the server listen on a port, and write `http://HOST:PORT`")
        );
    }
    let Some((scheme, rest)) = text.split_once("://") else {
        let complaint =
            Complaint::new(format!("`{}` is not a URL: it has no scheme", text.escape_debug()));
        return Err(complaint.help(format!("write `http://{}`", text.escape_debug())));
    };
    let (scheme, default_port) = match scheme.to_ascii_lowercase().as_str() {
        "http" => (Scheme::Http, 80),
        "https" => (Scheme::Https, 443),
        "h2c" => (Scheme::H2c, 80),
        other => {
            let complaint = Complaint::new(format!("unknown scheme `{}`", other.escape_debug()));
            return Err(complaint.help(SCHEMES));
        }
    };
    if rest.contains('#') {
        return Err(Complaint::new("the URL of an upstream cannot have a fragment (`#…`)"));
    }
    if rest.contains('?') {
        return Err(Complaint::new("the URL of an upstream cannot have a query (`?…`)"));
    }
    let (place, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    if place.contains('@') {
        let complaint =
            Complaint::new("the URL of an upstream cannot have user info (`user:password@`)");
        return Err(complaint.help("add an `Authorization` header with the `headers` middleware"));
    }
    let (host, port) = authority(place)?;
    if !path.is_empty() {
        words::path(path)?;
    }
    Ok(Url {
        scheme,
        host,
        port: port.unwrap_or(default_port),
        authority: place.to_ascii_lowercase(),
        base_path: path.trim_end_matches('/').to_owned(),
    })
}
