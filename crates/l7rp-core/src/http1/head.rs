//! Request and response heads.
//!
//! `httparse` finds the parts; what it lets pass and a proxy must not is refused here: lines
//! not ended by CR LF, targets outside the grammar, doubtful framing, doubtful Host.

use std::mem::MaybeUninit;

use smallvec::SmallVec;

use super::Framing;
use crate::failure::{Failure, Malformed};
use crate::head::{Field, Name, Span, list_has};

/// Bounds of a head.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Octets of the whole head.
    pub max_head: usize,
    /// Number of fields.
    pub max_fields: usize,
    /// Octets of the request target.
    pub max_target: usize,
}

/// Methods that a metric label may have; all others are [`Method::Other`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the methods of RFC 9110 §9 and RFC 5789 under their own names")]
pub enum Method {
    Get,
    Head,
    Post,
    Put,
    Delete,
    Options,
    Patch,
    Connect,
    Trace,
    Other,
}

impl Method {
    /// Every method, in the order of `as usize`.
    pub const ALL: [Self; 10] = [
        Self::Get,
        Self::Head,
        Self::Post,
        Self::Put,
        Self::Delete,
        Self::Options,
        Self::Patch,
        Self::Connect,
        Self::Trace,
        Self::Other,
    ];

    /// The method with exactly these octets; case matters (RFC 9110 §9.1).
    pub fn of(octets: &[u8]) -> Self {
        match octets {
            b"GET" => Self::Get,
            b"HEAD" => Self::Head,
            b"POST" => Self::Post,
            b"PUT" => Self::Put,
            b"DELETE" => Self::Delete,
            b"OPTIONS" => Self::Options,
            b"PATCH" => Self::Patch,
            b"CONNECT" => Self::Connect,
            b"TRACE" => Self::Trace,
            _ => Self::Other,
        }
    }

    /// The label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Head => "HEAD",
            Self::Post => "POST",
            Self::Put => "PUT",
            Self::Delete => "DELETE",
            Self::Options => "OPTIONS",
            Self::Patch => "PATCH",
            Self::Connect => "CONNECT",
            Self::Trace => "TRACE",
            Self::Other => "other",
        }
    }

    /// Whether repeating the request has the effect of sending it once (RFC 9110 §9.2.2).
    pub fn is_idempotent(self) -> bool {
        matches!(
            self,
            Self::Get | Self::Head | Self::Options | Self::Put | Self::Delete | Self::Trace
        )
    }
}

/// A request head. Spans are relative to the buffer it was parsed from.
#[derive(Clone, Debug)]
pub struct Request {
    /// Method as a known one.
    pub method: Method,
    /// Method as sent.
    pub method_text: Span,
    /// Target as sent, query included, without the scheme and authority of an absolute one.
    /// Empty where an absolute target has no path.
    pub target: Span,
    /// Host field, or the authority of an absolute target. Empty: none (HTTP/1.0).
    pub host: Span,
    /// HTTP/1.0.
    pub is_http10: bool,
    /// Whether the client will send another request on this connection.
    pub keep_alive: bool,
    /// `Expect: 100-continue`, which HTTP/1.0 clients cannot ask for.
    pub expects_continue: bool,
    /// Where the body ends.
    pub framing: Framing,
    /// Field names, in lower case or not, that `Connection` lists (RFC 9110 §7.6.1).
    pub connection_named: bool,
    /// Fields in order.
    pub fields: Vec<Field>,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            method: Method::Other,
            method_text: Span::default(),
            target: Span::default(),
            host: Span::default(),
            is_http10: false,
            keep_alive: false,
            expects_continue: false,
            framing: Framing::None,
            connection_named: false,
            fields: Vec::new(),
        }
    }
}

/// A response head. Spans are relative to the buffer it was parsed from.
#[derive(Clone, Debug)]
pub struct Response {
    /// 100 to 599.
    pub status: u16,
    /// Reason phrase as sent; may be empty.
    pub reason: Span,
    /// Whether the upstream will take another request on this connection.
    pub keep_alive: bool,
    /// Seconds after which the upstream closes an idle connection, if it says
    /// (`Keep-Alive: timeout=`).
    pub keep_alive_timeout: Option<u32>,
    /// Where the body ends.
    pub framing: Framing,
    /// See [`Request::connection_named`].
    pub connection_named: bool,
    /// Fields in order.
    pub fields: Vec<Field>,
}

impl Default for Response {
    fn default() -> Self {
        Self {
            status: 0,
            reason: Span::default(),
            keep_alive: false,
            keep_alive_timeout: None,
            framing: Framing::None,
            connection_named: false,
            fields: Vec::new(),
        }
    }
}

/// Fields that most heads stay under; more are parsed with an allocation.
const USUAL_FIELDS: usize = 100;

/// Parses a request head at the start of `buf` into `head`.
///
/// `Ok(Some(n))`: it is complete and `n` octets long. `Ok(None)`: more octets are needed.
///
/// # Errors
/// The failure that the client is answered with; the connection must be closed after it,
/// for where the next message begins is not known.
pub fn parse_request(
    buf: &[u8],
    head: &mut Request,
    limits: Limits,
) -> Result<Option<usize>, Failure> {
    let mut few = [const { MaybeUninit::uninit() }; USUAL_FIELDS];
    let mut many;
    let space: &mut [MaybeUninit<httparse::Header<'_>>] = if limits.max_fields <= USUAL_FIELDS {
        &mut few[..limits.max_fields]
    } else {
        many = Box::new_uninit_slice(limits.max_fields);
        &mut many
    };
    let mut parsed = httparse::Request::new(&mut []);
    let len = match parsed.parse_with_uninit_headers(buf, space) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) => return partial_request(buf, limits),
        Err(e) => return Err(request_error(buf, e)),
    };
    if len > limits.max_head {
        return Err(Failure::HeadTooLarge);
    }
    let (Some(method), Some(target), Some(minor)) = (parsed.method, parsed.path, parsed.version)
    else {
        return Err(Failure::BadRequest(Malformed::StartLine));
    };
    if target.len() > limits.max_target {
        return Err(Failure::TargetTooLong);
    }
    head.method = Method::of(method.as_bytes());
    head.method_text = span(buf, method.as_bytes());
    head.is_http10 = minor == 0;
    fields(buf, len, parsed.headers, &mut head.fields).map_err(Failure::BadRequest)?;
    request_meaning(buf, target.as_bytes(), head)?;
    Ok(Some(len))
}

/// What is known of a request head that is not complete yet.
fn partial_request(buf: &[u8], limits: Limits) -> Result<Option<usize>, Failure> {
    let start = buf.iter().take_while(|&&b| b == b'\r' || b == b'\n').count();
    if memchr::memchr(b'\n', &buf[start..]).is_none() && buf.len() > limits.max_target + 64 {
        return Err(Failure::TargetTooLong);
    }
    if buf.len() >= limits.max_head {
        return Err(Failure::HeadTooLarge);
    }
    Ok(None)
}

/// Reads what the fields of a request mean: host, framing, connection.
fn request_meaning(buf: &[u8], target: &[u8], head: &mut Request) -> Result<(), Failure> {
    let mut host = None;
    let mut length = Length::default();
    head.keep_alive = !head.is_http10;
    head.expects_continue = false;
    head.connection_named = false;
    for field in &head.fields {
        let value = field.value.of(buf);
        match field.id {
            Name::Host => {
                if host.replace(field.value).is_some() {
                    return Err(Failure::BadRequest(Malformed::HostRepeated));
                }
            }
            Name::ContentLength => length.content_length(value).map_err(Failure::BadRequest)?,
            Name::TransferEncoding => {
                length.transfer_encoding(value, head.is_http10).map_err(Failure::BadRequest)?;
            }
            Name::Connection => {
                connection(value, &mut head.keep_alive, &mut head.connection_named);
            }
            Name::Expect if !head.is_http10 => {
                if !value.eq_ignore_ascii_case(b"100-continue") {
                    return Err(Failure::ExpectationUnknown);
                }
                head.expects_continue = true;
            }
            _ => {}
        }
    }
    if matches!(head.method, Method::Connect | Method::Trace) {
        return Err(Failure::MethodRefused);
    }
    if host.is_none() && !head.is_http10 {
        return Err(Failure::BadRequest(Malformed::HostMissing));
    }
    head.host = host.unwrap_or_default();
    set_target(buf, target, head)?;
    head.framing = length.framing().unwrap_or(Framing::None);
    Ok(())
}

/// Checks the target (RFC 9112 §3.2): origin form, absolute form whose authority replaces
/// Host, or `*` for OPTIONS.
fn set_target(buf: &[u8], target: &[u8], head: &mut Request) -> Result<(), Failure> {
    const BAD: Failure = Failure::BadRequest(Malformed::Target);
    if target.iter().any(|&b| !b.is_ascii_graphic() || b"\"#<>\\^`{|}".contains(&b)) {
        return Err(BAD);
    }
    head.target = span(buf, target);
    if target.starts_with(b"/") || (target == b"*" && head.method == Method::Options) {
        return Ok(());
    }
    let rest = match target {
        [b'h' | b'H', b't' | b'T', b't' | b'T', b'p' | b'P', b':', b'/', b'/', rest @ ..]
        | [
            b'h' | b'H',
            b't' | b'T',
            b't' | b'T',
            b'p' | b'P',
            b's' | b'S',
            b':',
            b'/',
            b'/',
            rest @ ..,
        ] => rest,
        _ => return Err(BAD),
    };
    let end = rest.iter().position(|&b| b == b'/' || b == b'?').unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    if authority.is_empty() {
        return Err(Failure::BadRequest(Malformed::HostInvalid));
    }
    // RFC 9112 §3.2.2 lets the authority win over Host; a Host that disagrees is refused,
    // for someone on the way may have believed it.
    let host = head.host.of(buf);
    if !host.is_empty() && !host.eq_ignore_ascii_case(authority) {
        return Err(Failure::BadRequest(Malformed::HostInvalid));
    }
    head.host = span(buf, authority);
    head.target = span(buf, path);
    Ok(())
}

/// Parses a response head at the start of `buf` into `head`. `to_head`: it answers a HEAD
/// request.
///
/// `Ok(Some(n))`: it is complete and `n` octets long. `Ok(None)`: more octets are needed.
///
/// # Errors
/// The failure that the client is answered with; the connection must not be used again.
pub fn parse_response(
    buf: &[u8],
    head: &mut Response,
    to_head: bool,
    limits: Limits,
) -> Result<Option<usize>, Failure> {
    let mut few = [const { MaybeUninit::uninit() }; USUAL_FIELDS];
    let mut many;
    let space: &mut [MaybeUninit<httparse::Header<'_>>] = if limits.max_fields <= USUAL_FIELDS {
        &mut few[..limits.max_fields]
    } else {
        many = Box::new_uninit_slice(limits.max_fields);
        &mut many
    };
    // httparse skips empty lines here; RFC 9112 §2.2 allows that for requests only.
    if buf.first().is_some_and(|&b| b != b'H') {
        return Err(Failure::BadResponse(Malformed::StartLine));
    }
    let mut parsed = httparse::Response::new(&mut []);
    let result = httparse::ParserConfig::default()
        .parse_response_with_uninit_headers(&mut parsed, buf, space);
    let len = match result {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) if buf.len() >= limits.max_head => {
            return Err(Failure::ResponseHeadTooLarge);
        }
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(Failure::ResponseHeadTooLarge),
        Err(e) => return Err(Failure::BadResponse(grammar(e))),
    };
    if len > limits.max_head {
        return Err(Failure::ResponseHeadTooLarge);
    }
    let (Some(status), Some(minor)) = (parsed.code, parsed.version) else {
        return Err(Failure::BadResponse(Malformed::StartLine));
    };
    if !(100..=599).contains(&status) {
        return Err(Failure::BadResponse(Malformed::StatusCode));
    }
    head.status = status;
    // httparse gives an empty phrase for one outside ASCII; take it from the line itself.
    head.reason = reason_span(buf);
    fields(buf, len, parsed.headers, &mut head.fields).map_err(Failure::BadResponse)?;
    response_meaning(buf, head, to_head, minor == 0).map_err(Failure::BadResponse)?;
    Ok(Some(len))
}

/// Reads what the fields of a response mean: framing, connection.
fn response_meaning(
    buf: &[u8],
    head: &mut Response,
    to_head: bool,
    is_http10: bool,
) -> Result<(), Malformed> {
    let mut length = Length::default();
    head.keep_alive = !is_http10;
    head.keep_alive_timeout = None;
    head.connection_named = false;
    for field in &head.fields {
        let value = field.value.of(buf);
        match field.id {
            Name::ContentLength => length.content_length(value)?,
            Name::TransferEncoding => length.transfer_encoding(value, is_http10)?,
            Name::Connection => {
                connection(value, &mut head.keep_alive, &mut head.connection_named);
            }
            Name::KeepAlive => head.keep_alive_timeout = keep_alive_timeout(value),
            _ => {}
        }
    }
    let framing = length.framing();
    head.framing = match head.status {
        100..=199 if framing.is_some_and(|f| f != Framing::Length(0)) => {
            return Err(Malformed::Interim);
        }
        100..=199 => Framing::None,
        204 | 304 => {
            // A 204 has no body by definition; one that announces it may well send it.
            if head.status == 204 && framing.is_some() {
                head.keep_alive = false;
            }
            Framing::None
        }
        _ if to_head => Framing::None,
        _ => framing.unwrap_or(Framing::UntilClose),
    };
    if head.framing == Framing::UntilClose {
        head.keep_alive = false;
    }
    Ok(())
}

/// The framing fields of one head, checked as they come.
#[derive(Default)]
struct Length {
    content_length: Option<u64>,
    chunked: bool,
}

impl Length {
    /// RFC 9110 §8.6: digits only. A repeated field is refused even if equal.
    fn content_length(&mut self, value: &[u8]) -> Result<(), Malformed> {
        if self.chunked {
            return Err(Malformed::LengthAndChunked);
        }
        let number = parse_digits(value).ok_or(Malformed::ContentLength)?;
        match self.content_length.replace(number) {
            None => Ok(()),
            Some(_) => Err(Malformed::ContentLength),
        }
    }

    /// RFC 9112 §6.1: nothing but exactly `chunked`, once, in HTTP/1.1.
    fn transfer_encoding(&mut self, value: &[u8], is_http10: bool) -> Result<(), Malformed> {
        if self.content_length.is_some() {
            return Err(Malformed::LengthAndChunked);
        }
        if self.chunked || is_http10 || !value.eq_ignore_ascii_case(b"chunked") {
            return Err(Malformed::TransferEncoding);
        }
        self.chunked = true;
        Ok(())
    }

    fn framing(&self) -> Option<Framing> {
        if self.chunked { Some(Framing::Chunked) } else { self.content_length.map(Framing::Length) }
    }
}

fn parse_digits(value: &[u8]) -> Option<u64> {
    if value.is_empty() {
        return None;
    }
    value.iter().try_fold(0u64, |n, &b| {
        let digit = b.is_ascii_digit().then(|| u64::from(b - b'0'))?;
        n.checked_mul(10)?.checked_add(digit)
    })
}

/// Reads a `Connection` value: `close` wins over `keep-alive`; any other member may name a
/// field.
fn connection(value: &[u8], keep_alive: &mut bool, named: &mut bool) {
    for member in value.split(|&b| b == b',').map(<[u8]>::trim_ascii) {
        if member.eq_ignore_ascii_case(b"keep-alive") {
            *keep_alive = true;
        } else if !member.is_empty() && !member.eq_ignore_ascii_case(b"close") {
            *named = true;
        }
    }
    if list_has(value, b"close") {
        *keep_alive = false;
    }
}

/// Whether any `Connection` field lists `name`.
pub fn is_named_by_connection(buf: &[u8], fields: &[Field], name: &[u8]) -> bool {
    fields.iter().any(|f| f.id == Name::Connection && list_has(f.value.of(buf), name))
}

fn keep_alive_timeout(value: &[u8]) -> Option<u32> {
    value.split(|&b| b == b',').find_map(|item| {
        let digits = item.trim_ascii().strip_prefix(b"timeout=")?;
        parse_digits(digits).and_then(|n| u32::try_from(n).ok())
    })
}

/// Turns httparse's slices into ranges and checks that every line ends in CR LF.
fn fields(
    buf: &[u8],
    len: usize,
    headers: &[httparse::Header<'_>],
    out: &mut Vec<Field>,
) -> Result<(), Malformed> {
    out.clear();
    if !buf[..len].ends_with(b"\r\n\r\n") {
        return Err(Malformed::LineEnding);
    }
    for header in headers {
        let name = span(buf, header.name.as_bytes());
        let at = name.at as usize;
        if at < 2 || &buf[at - 2..at] != b"\r\n" {
            return Err(Malformed::LineEnding);
        }
        // An empty value may be a slice of nowhere; keep the range inside the line.
        let value = if header.value.is_empty() {
            Span { at: name.at + name.len + 1, len: 0 }
        } else {
            span(buf, header.value)
        };
        out.push(Field { name, value, id: Name::of(header.name.as_bytes()) });
    }
    Ok(())
}

/// Where `part`, a slice of `buf`, lies in it.
fn span(buf: &[u8], part: &[u8]) -> Span {
    let at = (part.as_ptr() as usize).saturating_sub(buf.as_ptr() as usize);
    Span { at: at as u32, len: part.len() as u32 }
}

/// The reason phrase of the status line at the start of `buf`.
fn reason_span(buf: &[u8]) -> Span {
    let end = memchr::memchr(b'\r', buf).unwrap_or(0);
    // "HTTP/1.1 200 " is 13 octets long.
    if end > 13 { Span { at: 13, len: (end - 13) as u32 } } else { Span::default() }
}

fn request_error(buf: &[u8], e: httparse::Error) -> Failure {
    match e {
        httparse::Error::TooManyHeaders => Failure::TooManyFields,
        httparse::Error::Version if is_other_http(buf) => Failure::VersionUnsupported,
        other => Failure::BadRequest(grammar(other)),
    }
}

/// Whether the request line ends in a well-formed HTTP version (RFC 9112 §2.3) that we do
/// not speak.
fn is_other_http(buf: &[u8]) -> bool {
    let words: SmallVec<[&[u8]; 4]> = buf
        .split(|&b| b == b'\r' || b == b'\n')
        .find(|line| !line.is_empty())
        .unwrap_or_default()
        .splitn(4, |&b| b == b' ')
        .collect();
    matches!(words.as_slice(), [_, _, [b'H', b'T', b'T', b'P', b'/', b'0'..=b'9', b'.', b'0'..=b'9']])
}

fn grammar(e: httparse::Error) -> Malformed {
    match e {
        httparse::Error::HeaderName => Malformed::FieldName,
        httparse::Error::HeaderValue => Malformed::FieldValue,
        httparse::Error::NewLine => Malformed::LineEnding,
        httparse::Error::Status => Malformed::StatusCode,
        httparse::Error::Token | httparse::Error::TooManyHeaders | httparse::Error::Version => {
            Malformed::StartLine
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { max_head: 8192, max_fields: 10, max_target: 100 };

    fn request(raw: &[u8]) -> Result<Request, Failure> {
        let mut head = Request::default();
        // Cut anywhere, a head is either incomplete or already refused; never complete.
        for cut in 0..raw.len() {
            assert!(
                !matches!(parse_request(&raw[..cut], &mut head, LIMITS), Ok(Some(_)))
                    || raw[..cut].windows(4).any(|w| w == b"\r\n\r\n"),
                "{} complete at {cut}",
                raw.escape_ascii()
            );
        }
        match parse_request(raw, &mut head, LIMITS)? {
            Some(_) => Ok(head),
            None => panic!("{} is incomplete", raw.escape_ascii()),
        }
    }

    fn refused(raw: &str) -> Failure {
        request(raw.as_bytes()).unwrap_err()
    }

    #[test]
    fn requests_that_are_refused() {
        use Malformed as M;
        for (raw, why) in [
            ("GET / HTTP/1.1\r\n\r\n", M::HostMissing),
            ("GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", M::HostRepeated),
            ("GET / HTTP/1.1\nHost: a\r\n\r\n", M::LineEnding),
            ("GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", M::LineEnding),
            ("GET / HTTP/1.1\r\nHost: a\r\n\n", M::LineEnding),
            ("GET / HTTP/1.1\r\nHost : a\r\n\r\n", M::FieldName),
            ("GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", M::FieldName),
            ("GET / HTTP/1.1\r\nHost: a\r\nX: a\0\r\n\r\n", M::FieldValue),
            ("GET  / HTTP/1.1\r\nHost: a\r\n\r\n", M::StartLine),
            ("GET * HTTP/1.1\r\nHost: a\r\n\r\n", M::Target),
            ("GET a/b HTTP/1.1\r\nHost: a\r\n\r\n", M::Target),
            ("GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n", M::Target),
            ("GET /\\ HTTP/1.1\r\nHost: a\r\n\r\n", M::Target),
            ("GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", M::Target),
            ("GET http:///x HTTP/1.1\r\nHost: a\r\n\r\n", M::HostInvalid),
            ("GET http://b/x HTTP/1.1\r\nHost: a\r\n\r\n", M::HostInvalid),
            ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\n", M::ContentLength),
            ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\n", M::ContentLength),
            ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 1\r\n\r\n", M::ContentLength),
            (
                "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
                M::ContentLength,
            ),
            (
                "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 18446744073709551616\r\n\r\n",
                M::ContentLength,
            ),
            (
                "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
                M::LengthAndChunked,
            ),
            (
                "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n",
                M::LengthAndChunked,
            ),
            (
                "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
                M::TransferEncoding,
            ),
            (
                "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
                M::TransferEncoding,
            ),
            (
                "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
                M::TransferEncoding,
            ),
        ] {
            assert_eq!(refused(raw), Failure::BadRequest(why), "{}", raw.escape_debug());
        }
    }

    #[test]
    fn requests_refused_with_another_status() {
        let long = format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "a".repeat(100));
        let many = format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "X: y\r\n".repeat(10));
        let big = format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "y".repeat(9000));
        for (raw, failure) in [
            ("CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", Failure::MethodRefused),
            ("TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", Failure::MethodRefused),
            ("GET / HTTP/2.0\r\nHost: a\r\n\r\n", Failure::VersionUnsupported),
            ("GET / HTTP/1.1\r\nHost: a\r\nExpect: tea\r\n\r\n", Failure::ExpectationUnknown),
            (&long, Failure::TargetTooLong),
            (&many, Failure::TooManyFields),
            (&big, Failure::HeadTooLarge),
        ] {
            assert_eq!(refused(raw), failure, "{}", &raw[..40]);
        }
    }

    #[test]
    fn a_start_line_without_end_is_cut_off() {
        let mut head = Request::default();
        let raw = format!("GET /{}", "a".repeat(400));
        let result = parse_request(raw.as_bytes(), &mut head, LIMITS);
        assert_eq!(result, Err(Failure::TargetTooLong));
    }

    #[test]
    fn meaning_of_a_request() {
        let raw = b"\r\nGET http://A.test:80?q HTTP/1.0\r\nConnection: Keep-Alive, X-A\r\n\r\n";
        let head = request(raw).unwrap();
        assert_eq!(head.host.of(raw), b"A.test:80");
        assert_eq!(head.target.of(raw), b"?q");
        assert!(head.is_http10 && head.keep_alive && head.connection_named);

        let raw = b"OPTIONS * HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, close\r\n\
                    Expect: 100-Continue\r\nContent-Length: 7\r\n\r\n";
        let head = request(raw).unwrap();
        assert_eq!(head.target.of(raw), b"*");
        assert_eq!(head.framing, Framing::Length(7));
        assert!(!head.keep_alive && head.expects_continue && !head.connection_named);
    }

    fn response(raw: &str, to_head: bool) -> Result<Response, Failure> {
        let mut head = Response::default();
        match parse_response(raw.as_bytes(), &mut head, to_head, LIMITS)? {
            Some(_) => Ok(head),
            None => panic!("{raw} is incomplete"),
        }
    }

    #[test]
    fn responses_that_are_refused() {
        use Malformed as M;
        for (raw, why) in [
            ("\r\nHTTP/1.1 200 OK\r\n\r\n", M::StartLine),
            ("ICY 200 OK\r\n\r\n", M::StartLine),
            ("HTTP/1.1 099 X\r\n\r\n", M::StatusCode),
            ("HTTP/1.1 999 X\r\n\r\n", M::StatusCode),
            ("HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\n", M::ContentLength),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
                M::ContentLength,
            ),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
                M::LengthAndChunked,
            ),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\n", M::TransferEncoding),
            ("HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", M::TransferEncoding),
            ("HTTP/1.1 100 Go\r\nContent-Length: 5\r\n\r\n", M::Interim),
            ("HTTP/1.1 200 OK\r\nX : y\r\n\r\n", M::FieldName),
            ("HTTP/1.1 200 OK\nX: y\r\n\r\n", M::LineEnding),
        ] {
            let got = response(raw, false).unwrap_err();
            assert_eq!(got, Failure::BadResponse(why), "{}", raw.escape_debug());
        }
    }

    #[test]
    fn framing_of_responses() {
        for (raw, to_head, framing, keep) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", false, Framing::Length(5), true),
            ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", true, Framing::None, true),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n", false, Framing::Chunked, true),
            ("HTTP/1.1 200 OK\r\n\r\n", false, Framing::UntilClose, false),
            ("HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", false, Framing::Length(0), true),
            ("HTTP/1.1 204 No\r\n\r\n", false, Framing::None, true),
            ("HTTP/1.1 204 No\r\nContent-Length: 5\r\n\r\n", false, Framing::None, false),
            ("HTTP/1.1 304 No\r\nContent-Length: 5\r\n\r\n", false, Framing::None, true),
            ("HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n", false, Framing::Length(5), false),
            (
                "HTTP/1.0 200 OK\r\nContent-Length: 5\r\nConnection: keep-alive\r\n\r\n",
                false,
                Framing::Length(5),
                true,
            ),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\n",
                false,
                Framing::Length(5),
                false,
            ),
        ] {
            let head = response(raw, to_head).unwrap();
            assert_eq!((head.framing, head.keep_alive), (framing, keep), "{}", raw.escape_debug());
        }
    }

    #[test]
    fn reason_and_keep_alive_timeout() {
        let raw = "HTTP/1.1 404 Nicht gef\u{fc}nden\r\nKeep-Alive: max=3, timeout=7\r\n\r\n";
        let head = response(raw, false).unwrap();
        assert_eq!(head.reason.of(raw.as_bytes()), "Nicht gef\u{fc}nden".as_bytes());
        assert_eq!(head.keep_alive_timeout, Some(7));
    }

    proptest! {
        #[test]
        fn any_octets_are_read_without_panic(raw in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_request(&raw, &mut Request::default(), LIMITS);
            let _ = parse_response(&raw, &mut Response::default(), false, LIMITS);
        }

        #[test]
        fn what_is_written_again_is_read_the_same(
            names in proptest::collection::vec("[A-Za-z][A-Za-z0-9-]{0,12}", 0..6),
            value in "[ -~]{0,20}",
        ) {
            let mut raw = b"GET /x HTTP/1.1\r\nHost: a.test\r\n".to_vec();
            for name in &names {
                raw.extend(format!("{name}Z: {value}\r\n").bytes());
            }
            raw.extend(b"\r\n");
            let mut head = Request::default();
            let len = parse_request(&raw, &mut head, LIMITS).unwrap().unwrap();
            prop_assert_eq!(len, raw.len());
            for (field, name) in head.fields[1..].iter().zip(&names) {
                let name = format!("{name}Z");
                prop_assert_eq!(field.name.of(&raw), name.as_bytes());
                prop_assert_eq!(field.value.of(&raw), value.trim_matches(' ').as_bytes());
            }
        }
    }
}
