//! Request heads (RFC 9112 §3).

use std::mem::MaybeUninit;

use smallvec::SmallVec;

use super::Framing;
use super::head::{
    Connection, Length, Limits, USUAL_FIELDS, fields, grammar, is_named_by_connection, span,
};
use crate::failure::{Failure, Malformed};
use crate::head::{Field, Name, Span, list_has};

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
#[expect(clippy::struct_excessive_bools, reason = "independent facts, not a state")]
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
    /// `Connection` lists names of fields (RFC 9110 §7.6.1).
    pub connection_named: bool,
    /// Protocols that the client offers to go on with (RFC 9110 §7.8). Empty: none, or an
    /// offer that is not passed on.
    pub upgrade: Span,
    /// The client takes trailers (RFC 9110 §10.1.4).
    pub takes_trailers: bool,
    /// Fields in order.
    pub fields: Vec<Field>,
}

impl Request {
    /// Forgets all but the room for fields.
    fn clear(&mut self) {
        let mut fields = std::mem::take(&mut self.fields);
        fields.clear();
        *self = Self { fields, ..Self::default() };
    }
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
            upgrade: Span::default(),
            takes_trailers: false,
            fields: Vec::new(),
        }
    }
}

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
    let usual = limits.max_fields.min(USUAL_FIELDS);
    match parse_within(&mut few[..usual], buf, head, limits) {
        Err(Failure::TooManyFields) if usual < limits.max_fields => {
            let mut many = Box::new_uninit_slice(limits.max_fields);
            parse_within(&mut many, buf, head, limits)
        }
        result => result,
    }
}

/// As [`parse_request`], with room for as many fields as there are in `space`.
fn parse_within<'b>(
    space: &mut [MaybeUninit<httparse::Header<'b>>],
    buf: &'b [u8],
    head: &mut Request,
    limits: Limits,
) -> Result<Option<usize>, Failure> {
    // Nothing of the head before may be taken for this one's, should this one be refused.
    head.clear();
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
    head.target = span(buf, target.as_bytes());
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
    let mut connection = Connection::default();
    head.expects_continue = false;
    head.takes_trailers = false;
    let mut upgrade = Span::default();
    for field in &head.fields {
        let value = field.value.of(buf);
        match field.id {
            Name::Host if host.is_some() => {
                return Err(Failure::BadRequest(Malformed::HostRepeated));
            }
            Name::Host => host = Some(field.value),
            Name::ContentLength => length.content_length(value).map_err(Failure::BadRequest)?,
            Name::TransferEncoding => {
                length.transfer_encoding(value, head.is_http10).map_err(Failure::BadRequest)?;
            }
            Name::Connection => connection.add(value),
            Name::Expect if !head.is_http10 => {
                if !value.eq_ignore_ascii_case(b"100-continue") {
                    return Err(Failure::ExpectationUnknown);
                }
                head.expects_continue = true;
            }
            Name::Upgrade => upgrade = field.value,
            Name::Te if !head.is_http10 => head.takes_trailers |= list_has(value, b"trailers"),
            Name::Other if is_twin(field.name.of(buf)) => {
                return Err(Failure::BadRequest(Malformed::FieldName));
            }
            _ => {}
        }
    }
    head.keep_alive = connection.persists(head.is_http10);
    head.connection_named = connection.names;
    if matches!(head.method, Method::Connect | Method::Trace) {
        return Err(Failure::MethodRefused);
    }
    if host.is_none() && !head.is_http10 {
        return Err(Failure::BadRequest(Malformed::HostMissing));
    }
    head.host = host.unwrap_or_default();
    set_target(buf, target, head)?;
    head.framing = length.framing().unwrap_or(Framing::None);
    head.upgrade = if is_passable_offer(buf, upgrade, head) { upgrade } else { Span::default() };
    Ok(())
}

/// Whether an offer to upgrade is passed on. Not where a body stands between the offer and
/// the other protocol, and not `h2c`, which would lead past everything that is checked here.
fn is_passable_offer(buf: &[u8], offer: Span, head: &Request) -> bool {
    offer.len > 0
        && head.connection_named
        && !head.is_http10
        && head.framing == Framing::None
        && is_named_by_connection(buf, &head.fields, b"upgrade")
        && !list_has(offer.of(buf), b"h2c")
}

/// Whether a backend that reads `_` as `-`, as CGI and its heirs do, takes the name for one that
/// we act on. Nobody sends such a name but to get a value of that field past us.
fn is_twin(name: &[u8]) -> bool {
    if !name.contains(&b'_') {
        return false;
    }
    // As long as the longest name that we know.
    let mut dashed = [0; 17];
    let Some(dashed) = dashed.get_mut(..name.len()) else { return false };
    for (to, &from) in dashed.iter_mut().zip(name) {
        *to = if from == b'_' { b'-' } else { from };
    }
    Name::of(dashed) != Name::Other
}

/// The octets that a target may have: a table, for it is asked of each.
const TARGET_OCTETS: [bool; 256] = {
    let mut table = [false; 256];
    let mut b = b'!';
    while b <= b'~' {
        table[b as usize] =
            !matches!(b, b'"' | b'#' | b'<' | b'>' | b'\\' | b'^' | b'`' | b'{' | b'|' | b'}');
        b += 1;
    }
    table
};

/// Checks the target (RFC 9112 §3.2): origin form, absolute form whose authority replaces
/// Host, or `*` for OPTIONS.
fn set_target(buf: &[u8], target: &[u8], head: &mut Request) -> Result<(), Failure> {
    const BAD: Failure = Failure::BadRequest(Malformed::Target);
    if !target.iter().all(|&b| TARGET_OCTETS[usize::from(b)]) {
        return Err(BAD);
    }
    head.target = span(buf, target);
    if target.starts_with(b"/") || (target == b"*" && head.method == Method::Options) {
        return Ok(());
    }
    let rest = after_scheme(target).ok_or(BAD)?;
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

/// What stands after `http://` or `https://` in any case.
fn after_scheme(target: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = target.split_at_checked(memchr::memchr(b':', target)?)?;
    let known = scheme.eq_ignore_ascii_case(b"http") || scheme.eq_ignore_ascii_case(b"https");
    if known { rest.strip_prefix(b"://") } else { None }
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
    matches!(
        words.as_slice(),
        [_, _, [b'H', b'T', b'T', b'P', b'/', b'0'..=b'9', b'.', b'0'..=b'9']]
    )
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
            ("GET / HTTP/1.1\r\nHost: a\r\nContent_Length: 1\r\n\r\n", M::FieldName),
            ("GET / HTTP/1.1\r\nHost: a\r\nX-forwarded_FOR: 1\r\n\r\n", M::FieldName),
            ("GET / HTTP/1.1\r\nHost: a\r\nTransfer_Encoding: chunked\r\n\r\n", M::FieldName),
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
    fn an_underscore_alone_is_no_fault() {
        for name in ["X_Custom", "user_agent", "_", "x_forwarded_for_2", "x_forwarded_protocols"] {
            let raw = format!("GET / HTTP/1.1\r\nHost: a\r\n{name}: 1\r\n\r\n");
            assert!(request(raw.as_bytes()).is_ok(), "{name}");
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

        // The lines are one list, whose order says nothing.
        let raw = b"GET / HTTP/1.0\r\nConnection: close, x-a\r\nConnection: keep-alive\r\n\r\n";
        let head = request(raw).unwrap();
        assert!(!head.keep_alive && head.connection_named);
    }

    proptest! {
        #[test]
        fn any_octets_are_read_without_panic(raw in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_request(&raw, &mut Request::default(), LIMITS);
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
