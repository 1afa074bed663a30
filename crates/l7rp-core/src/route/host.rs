use std::fmt;
use std::io::Write as _;
use std::net::Ipv6Addr;

use memchr::memchr;

/// The longest host that is accepted, in octets, without port. DNS allows 253.
pub const MAX_HOST: usize = 255;

/// A valid host as it was sent, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host<'a> {
    name: Name<'a>,
    port: Option<u16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name<'a> {
    /// A registered name or IPv4 address, without a trailing dot.
    Named(&'a [u8]),
    V6(Ipv6Addr),
}

impl Host<'_> {
    /// The port, if one was sent. `example.com:` has none (RFC 3986 §3.2.3).
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        self.port
    }

    /// What is compared: lower case, no port, no trailing dot, IPv6 in the form of RFC 5952 in
    /// brackets. Written to `buffer`, which is large enough for every host that parses.
    #[must_use]
    pub fn normal<'b>(&self, buffer: &'b mut [u8; MAX_HOST]) -> &'b [u8] {
        let len = match self.name {
            Name::Named(name) => {
                for (to, from) in buffer.iter_mut().zip(name) {
                    *to = from.to_ascii_lowercase();
                }
                name.len()
            }
            Name::V6(address) => {
                let mut rest = &mut buffer[..];
                // 47 octets at most: it fits.
                let _ = write!(rest, "[{address}]");
                MAX_HOST - rest.len()
            }
        };
        &buffer[..len.min(MAX_HOST)]
    }
}

/// Why a Host field or authority is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadHost {
    /// Nothing, or nothing before the port.
    Empty,
    /// More than [`MAX_HOST`] octets.
    TooLong,
    /// An octet that no host name has.
    Octet(u8),
    /// Two dots in a row or a dot in front.
    EmptyLabel,
    /// Square brackets that do not hold an IPv6 address.
    Address,
    /// Not digits, or above 65535.
    Port,
}

impl fmt::Display for BadHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the host is empty"),
            Self::TooLong => write!(f, "the host is longer than {MAX_HOST} octets"),
            Self::Octet(octet) => {
                write!(f, "the host contains '{}'", octet.escape_ascii())
            }
            Self::EmptyLabel => f.write_str("the host has an empty label"),
            Self::Address => f.write_str("the host is not a valid IPv6 address"),
            Self::Port => f.write_str("the port is not a number up to 65535"),
        }
    }
}

impl std::error::Error for BadHost {}

/// Takes apart `uri-host [":" port]` (RFC 9110 §7.2), more strictly than RFC 3986 would have it.
///
/// Refused although legal there: percent-encoding (two spellings of one name), commas (what is
/// left of a joined list), empty labels. User information, blanks, controls and octets above
/// 0x7f are refused by both.
pub fn parse_host(raw: &[u8]) -> Result<Host<'_>, BadHost> {
    if raw.first() == Some(&b'[') {
        return parse_v6(raw);
    }
    let (name, port) = match memchr(b':', raw) {
        Some(colon) => (&raw[..colon], parse_port(&raw[colon + 1..])),
        None => (raw, Ok(None)),
    };
    if let Some(&octet) = name.iter().find(|&&octet| !NAME_OCTETS[usize::from(octet)]) {
        return Err(BadHost::Octet(octet));
    }
    let port = port?;
    let name = name.strip_suffix(b".").unwrap_or(name);
    if name.is_empty() {
        return Err(BadHost::Empty);
    }
    if name.len() > MAX_HOST {
        return Err(BadHost::TooLong);
    }
    if name.starts_with(b".") || name.ends_with(b".") || name.windows(2).any(|w| w == b"..") {
        return Err(BadHost::EmptyLabel);
    }
    Ok(Host { name: Name::Named(name), port })
}

fn parse_v6(raw: &[u8]) -> Result<Host<'_>, BadHost> {
    let end = memchr(b']', raw).ok_or(BadHost::Address)?;
    let text = std::str::from_utf8(&raw[1..end]).map_err(|_| BadHost::Address)?;
    let address = text.parse().map_err(|_| BadHost::Address)?;
    let port = match &raw[end + 1..] {
        [] => None,
        [b':', digits @ ..] => parse_port(digits)?,
        _ => return Err(BadHost::Address),
    };
    Ok(Host { name: Name::V6(address), port })
}

fn parse_port(digits: &[u8]) -> Result<Option<u16>, BadHost> {
    if digits.is_empty() {
        return Ok(None);
    }
    let digit = |port: u16, octet: &u8| {
        let value = octet.is_ascii_digit().then(|| u16::from(octet - b'0'))?;
        port.checked_mul(10)?.checked_add(value)
    };
    digits.iter().try_fold(0, digit).map(Some).ok_or(BadHost::Port)
}

/// unreserved / sub-delims of RFC 3986 §2, without the comma: a table, for it is asked of each.
const NAME_OCTETS: [bool; 256] = {
    let mut table = [false; 256];
    let mut octet = 0;
    while octet < 128 {
        table[octet] = (octet as u8).is_ascii_alphanumeric()
            || matches!(
                octet as u8,
                b'-' | b'.'
                    | b'_'
                    | b'~'
                    | b'!'
                    | b'$'
                    | b'&'
                    | b'\''
                    | b'('
                    | b')'
                    | b'*'
                    | b'+'
                    | b';'
                    | b'='
            );
        octet += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(raw: &str, want: &str, port: Option<u16>) {
        let host = parse_host(raw.as_bytes()).unwrap();
        let mut buffer = [b'?'; MAX_HOST];
        assert_eq!(host.normal(&mut buffer).escape_ascii().to_string(), want, "{raw}");
        assert_eq!(host.port(), port, "{raw}");
    }

    #[test]
    fn spellings_of_one_host_are_one() {
        for (raw, port) in [
            ("admin.example.com", None),
            ("ADMIN.EXAMPLE.COM", None),
            ("admin.example.com:8080", Some(8080)),
            ("admin.example.com.", None),
            ("admin.example.com.:80", Some(80)),
            ("Admin.Example.com:", None),
            ("admin.example.com:65535", Some(65_535)),
            ("admin.example.com:00080", Some(80)),
        ] {
            check(raw, "admin.example.com", port);
        }
        for (raw, port) in [
            ("[::1]", None),
            ("[::1]:8080", Some(8080)),
            ("[0:0:0:0:0:0:0:1]", None),
            ("[0000:0000::0001]:", None),
        ] {
            check(raw, "[::1]", port);
        }
        check("[2001:DB8:0:0:1:0:0:1]", "[2001:db8::1:0:0:1]", None);
        check("[::FFFF:1.2.3.4]", "[::ffff:1.2.3.4]", None);
        check("[::ffff:102:304]", "[::ffff:1.2.3.4]", None);
        let longest = "[1111:2222:3333:4444:5555:6666:7777:8888]";
        check(longest, longest, None);
        check("127.0.0.1:80", "127.0.0.1", Some(80));
        check("localhost", "localhost", None);
        check("xn--bcher-kva.example", "xn--bcher-kva.example", None);
        check("under_score.example", "under_score.example", None);
        check("a:0", "a", Some(0));
        check(&"a".repeat(255), &"a".repeat(255), None);
    }

    #[test]
    fn what_is_no_host_is_refused() {
        use BadHost::{Address, Empty, EmptyLabel, Octet, Port, TooLong};
        let long = "a".repeat(256);
        for (raw, want) in [
            ("", Empty),
            (":80", Empty),
            (".", Empty),
            (".:80", Empty),
            (" admin.example.com", Octet(b' ')),
            ("a b", Octet(b' ')),
            ("a\tb", Octet(b'\t')),
            ("a\0b", Octet(0)),
            ("a\x7f", Octet(0x7f)),
            ("admin%2eexample.com", Octet(b'%')),
            ("b\u{fc}cher.example", Octet(0xc3)),
            ("user@a", Octet(b'@')),
            ("user:pw@a", Port),
            ("a/b", Octet(b'/')),
            ("a?b", Octet(b'?')),
            ("a#b", Octet(b'#')),
            ("a\\b", Octet(b'\\')),
            ("a,b", Octet(b',')),
            ("http://a", Port),
            ("a:http", Port),
            ("a:99999", Port),
            ("a:65536", Port),
            ("a:-1", Port),
            ("a:+1", Port),
            ("a:80:80", Port),
            ("a:80 ", Port),
            ("::1", Port),
            ("1::1", Port),
            ("a..b", EmptyLabel),
            (".a", EmptyLabel),
            ("a..", EmptyLabel),
            ("[::1", Address),
            ("[]", Address),
            ("[::1]x", Address),
            ("[::1]:x", Port),
            ("[::1].", Address),
            ("[1.2.3.4]", Address),
            ("[v1.a]", Address),
            ("[fe80::1%25eth0]", Address),
            ("[a]", Address),
            ("a]", Octet(b']')),
            (&long, TooLong),
        ] {
            assert_eq!(parse_host(raw.as_bytes()), Err(want), "{raw:?}");
        }
    }
}
