//! The request that is sent again and again, made once: as octets of HTTP/1.1, and for HTTP/2.

use std::io::Write;
use std::str::FromStr;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Uri};

/// Octets of a body that are made; a longer one repeats them.
const PIECE: u64 = 64 << 10;

/// Where requests go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    /// `https://`
    pub is_tls: bool,
    /// A name, or an IP address without brackets.
    pub host: String,
    /// As written, or the usual one of the scheme.
    pub port: u16,
    /// Host, and port if one was written.
    pub authority: String,
    /// Path and query.
    pub target: String,
}

impl FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str = "write http://HOST[:PORT]/PATH or https://HOST[:PORT]/PATH";
        let uri = text.parse::<Uri>().map_err(|e| format!("{e}; {FORM}"))?;
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(FORM.to_owned()),
        };
        let authority = uri.authority().ok_or(FORM)?.as_str().to_owned();
        if authority.contains('@') {
            return Err("a name and password in the URL are not sent; use --header".to_owned());
        }
        let host = uri.host().unwrap_or_default();
        let port = match authority.strip_prefix(host).unwrap_or_default() {
            "" if is_tls => 443,
            "" => 80,
            written => written.trim_start_matches(':').parse().map_err(|_| FORM)?,
        };
        let host = host.trim_matches(['[', ']']).to_owned();
        if host.is_empty() || port == 0 {
            return Err(FORM.to_owned());
        }
        let target = uri.path_and_query().map_or("", |target| target.as_str());
        let slash = if target.starts_with('/') { "" } else { "/" };
        let target = format!("{slash}{target}");
        Ok(Self { is_tls, host, port, authority, target })
    }
}

impl std::fmt::Display for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.is_tls { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority, self.target)
    }
}

/// A header line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    name: String,
    value: HeaderValue,
}

impl Field {
    fn is(&self, name: &str) -> bool {
        self.name.eq_ignore_ascii_case(name)
    }

    /// Whether it is of a connection, which HTTP/2 does not have in fields (RFC 9113 §8.2.2).
    pub fn is_of_connection(&self) -> bool {
        ["upgrade", "keep-alive", "proxy-connection"].iter().any(|name| self.is(name))
            || self.is("te") && self.value != "trailers"
    }
}

impl FromStr for Field {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        const OURS: [&str; 3] = ["content-length", "transfer-encoding", "connection"];
        let (name, value) = line.split_once(':').ok_or("write 'Name: value'")?;
        HeaderName::from_bytes(name.as_bytes()).map_err(|e| format!("{e}; write 'Name: value'"))?;
        let value = HeaderValue::from_str(value.trim_matches([' ', '\t']))
            .map_err(|_| "its value has a character that no field may have".to_owned())?;
        let field = Self { name: name.to_owned(), value };
        if OURS.iter().any(|name| field.is(name)) {
            return Err("it follows from --body-size, --chunked and --new-connections".to_owned());
        }
        Ok(field)
    }
}

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Method; `None`: POST if there is a body, else GET.
    pub method: Option<Method>,
    /// Header lines; a `Host` takes the place of the URL's.
    pub fields: Vec<Field>,
    /// Octets of the body.
    pub body: u64,
    /// The body goes out in chunks, without a length (HTTP/1.1).
    pub chunked: bool,
    /// `Connection: close`
    pub close: bool,
}

impl Ask {
    pub(super) fn method(&self) -> Method {
        let has_body = self.body > 0 || self.chunked;
        self.method.clone().unwrap_or(if has_body { Method::POST } else { Method::GET })
    }

    fn host<'a>(&'a self, url: &'a Url) -> &'a [u8] {
        let own = self.fields.iter().find(|field| field.is("host"));
        own.map_or(url.authority.as_bytes(), |field| field.value.as_bytes())
    }

    fn others(&self) -> impl Iterator<Item = &Field> {
        self.fields.iter().filter(|field| !field.is("host"))
    }

    /// A method that usually has a body says so when it has none (RFC 9110 §8.6).
    fn says_length(&self) -> bool {
        let method = self.method();
        !self.chunked && (self.body > 0 || method == Method::POST || method == Method::PUT)
    }
}

/// Octets of HTTP/1.1: `head`, `piece` so many times, `tail`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Octets {
    head: Vec<u8>,
    piece: Vec<u8>,
    times: u64,
    tail: Vec<u8>,
}

impl Octets {
    pub(super) fn new(url: &Url, ask: &Ask) -> Self {
        let mut head = Vec::new();
        // Writing into memory does not fail, here and below.
        let _ = write!(head, "{} {} HTTP/1.1\r\nHost: ", ask.method(), url.target);
        head.extend_from_slice(ask.host(url));
        head.extend_from_slice(b"\r\n");
        for Field { name, value } in ask.others() {
            let _ = write!(head, "{name}: ");
            head.extend_from_slice(value.as_bytes());
            head.extend_from_slice(b"\r\n");
        }
        if ask.close {
            head.extend_from_slice(b"Connection: close\r\n");
        }
        if ask.chunked {
            head.extend_from_slice(b"Transfer-Encoding: chunked\r\n");
        } else if ask.says_length() {
            let _ = write!(head, "Content-Length: {}\r\n", ask.body);
        }
        head.extend_from_slice(b"\r\n");
        let piece = |size: u64| match (size, ask.chunked) {
            (0, _) => Vec::new(),
            (_, false) => pattern(size),
            (_, true) => {
                [format!("{size:x}\r\n").as_bytes(), &pattern(size), b"\r\n".as_slice()].concat()
            }
        };
        let mut tail = piece(ask.body % PIECE);
        if ask.chunked {
            tail.extend_from_slice(b"0\r\n\r\n");
        }
        let times = ask.body / PIECE;
        if times == 0 {
            // One write.
            head.append(&mut tail);
            return Self { head, ..Self::default() };
        }
        Self { head, piece: piece(PIECE), times, tail }
    }

    pub(super) fn len(&self) -> u64 {
        (self.head.len() + self.tail.len()) as u64 + self.piece.len() as u64 * self.times
    }

    /// What begins at octet `at`: two parts, one behind the other; both are empty at the end.
    pub(super) fn from(&self, at: u64) -> (&[u8], &[u8]) {
        let Some(at) = at.checked_sub(self.head.len() as u64) else {
            let next = if self.times > 0 { &self.piece } else { &self.tail };
            return (&self.head[at as usize..], next);
        };
        let piece = self.piece.len() as u64;
        if at < piece * self.times {
            let next = if at / piece + 1 < self.times { &self.piece } else { &self.tail };
            return (&self.piece[(at % piece) as usize..], next);
        }
        let at = (at - piece * self.times) as usize;
        (self.tail.get(at..).unwrap_or_default(), &[])
    }
}

/// The same for HTTP/2.
#[derive(Clone, Debug)]
pub(super) struct Message {
    pub(super) head: http::Request<()>,
    /// Octets of the body, and those it is made of.
    pub(super) body: u64,
    pub(super) piece: Bytes,
}

impl Message {
    pub(super) fn new(url: &Url, ask: &Ask) -> Result<Self, String> {
        let scheme = if url.is_tls { "https" } else { "http" };
        let host = String::from_utf8_lossy(ask.host(url)).into_owned();
        let uri = Uri::builder().scheme(scheme).authority(host).path_and_query(&*url.target);
        let uri = uri.build().map_err(|e| format!("HTTP/2 cannot ask for this: {e}"))?;
        let mut head = http::Request::builder().method(ask.method()).uri(uri);
        for Field { name, value } in ask.others() {
            head = head.header(name, value);
        }
        if ask.says_length() {
            head = head.header(http::header::CONTENT_LENGTH, ask.body);
        }
        let head = head.body(()).map_err(|e| format!("HTTP/2 cannot ask for this: {e}"))?;
        Ok(Self { head, body: ask.body, piece: pattern(ask.body.min(PIECE)).into() })
    }
}

/// Octet `i` is the last hexadecimal digit of `i`.
fn pattern(size: u64) -> Vec<u8> {
    b"0123456789abcdef".iter().copied().cycle().take(size as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(body: u64, chunked: bool) -> Ask {
        Ask { method: None, fields: Vec::new(), body, chunked, close: false }
    }

    fn all(octets: &Octets) -> Vec<u8> {
        let mut all = Vec::new();
        while (all.len() as u64) < octets.len() {
            let (first, second) = octets.from(all.len() as u64);
            assert!(
                !first.is_empty() || !second.is_empty(),
                "at {} of {}",
                all.len(),
                octets.len()
            );
            // As if the socket took all of the one and a little of the other.
            all.extend_from_slice(first);
            all.extend_from_slice(&second[..second.len().min(1000)]);
        }
        assert_eq!(octets.from(octets.len()), (&[][..], &[][..]));
        all
    }

    #[test]
    fn urls() {
        for (text, parts) in [
            ("http://a.test", (false, "a.test", 80, "a.test", "/")),
            ("https://a.test/x?y=1", (true, "a.test", 443, "a.test", "/x?y=1")),
            ("http://127.0.0.1:9001/", (false, "127.0.0.1", 9001, "127.0.0.1:9001", "/")),
            ("http://[::1]:80?q", (false, "::1", 80, "[::1]:80", "/?q")),
        ] {
            let url: Url = text.parse().unwrap();
            let Url { is_tls, host, port, authority, target } = &url;
            let read = (*is_tls, host.as_str(), *port, authority.as_str(), target.as_str());
            assert_eq!(read, parts, "{text}");
        }
        for text in [
            "",
            "/x",
            "a.test/x",
            "ftp://a",
            "http://",
            "http://u:p@a",
            "http://a:0/",
            "http://a:99999",
        ] {
            assert!(text.parse::<Url>().is_err(), "{text}");
        }
    }

    #[test]
    fn header_lines() {
        for line in ["Host: a.test", "x-a:b", "X-Empty:", "Cookie: a=b; c=d"] {
            assert!(line.parse::<Field>().is_ok(), "{line}");
        }
        for line in [
            "",
            "no colon",
            ": x",
            "a b: c",
            "a: b\r\nc: d",
            "Content-Length: 5",
            "connection: close",
        ] {
            assert!(line.parse::<Field>().is_err(), "{line}");
        }
        for (line, expected) in [
            ("UPGRADE: x", true),
            ("Keep-Alive: timeout=5", true),
            ("Proxy-Connection: close", true),
            ("TE: gzip", true),
            ("TE: trailers", false),
            ("X-Upgrade: x", false),
        ] {
            let field: Field = line.parse().unwrap();
            assert_eq!(field.is_of_connection(), expected, "{line}");
        }
    }

    #[test]
    fn what_is_written() {
        let url: Url = "http://a.test:81/x?y".parse().unwrap();
        let lines = |ask: &Ask| String::from_utf8(all(&Octets::new(&url, ask))).unwrap();
        assert_eq!(lines(&ask(0, false)), "GET /x?y HTTP/1.1\r\nHost: a.test:81\r\n\r\n");
        let fields = ["host: b.test", "X-A: 1"].map(|line| line.parse().unwrap()).to_vec();
        let method = Some(Method::PUT);
        assert_eq!(
            lines(&Ask { method, fields, close: true, ..ask(3, false) }),
            "PUT /x?y HTTP/1.1\r\nHost: b.test\r\nX-A: 1\r\nConnection: close\r\n\
             Content-Length: 3\r\n\r\n012"
        );
        assert_eq!(
            lines(&ask(18, true)),
            "POST /x?y HTTP/1.1\r\nHost: a.test:81\r\nTransfer-Encoding: chunked\r\n\r\n\
             12\r\n0123456789abcdef01\r\n0\r\n\r\n"
        );
        assert!(lines(&ask(0, true)).ends_with("\r\n\r\n0\r\n\r\n"));
    }

    #[test]
    fn bodies_of_any_length_are_whole() {
        use l7rp_core::http1::{Framing, body::Body};
        let url: Url = "http://a.test/".parse().unwrap();
        for size in [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 5 * PIECE + 77] {
            for chunked in [false, true] {
                let octets = all(&Octets::new(&url, &ask(size, chunked)));
                let head = memchr::memmem::find(&octets, b"\r\n\r\n").unwrap() + 4;
                let framing = if chunked { Framing::Chunked } else { Framing::Length(size) };
                let mut body = Body::new(framing, 100);
                let mut content = Vec::new();
                let seen = body.decode(&octets[head..], &mut content).unwrap();
                assert!(seen.done && head + seen.used == octets.len(), "{size} {chunked}");
                assert_eq!(content, pattern(size), "{size} {chunked}");
            }
        }
    }
}
