//! Heads of one version from heads of the other (RFC 9113 §8). Names and values have been checked
//! by the library: no controls, names in lower case, no field that is about a connection.

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, COOKIE, DATE, HOST, HeaderMap, HeaderName, HeaderValue, TE};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, Request, Response, StatusCode, Uri, Version, request};
use l7rp_core::failure::{Failure, Malformed};
use l7rp_core::head::{Field, Name, is_token};
use l7rp_core::http1::Framing;
use l7rp_core::http1::{request as h1_request, response as h1_response};

/// How the body of a message is framed in HTTP/1.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// There is none.
    None,
    /// Its length is in the head.
    Length,
    /// In chunks, with trailers behind them.
    Chunked,
}

impl Body {
    /// Of a message with these fields. `ends`: nothing follows the head.
    pub fn of(fields: &HeaderMap, ends: bool) -> Self {
        match (ends, fields.contains_key(CONTENT_LENGTH)) {
            (true, _) => Self::None,
            (false, true) => Self::Length,
            (false, false) => Self::Chunked,
        }
    }
}

/// A request that came by HTTP/2, as HTTP/1.1. `max_fields`: more are refused; crumbs of a cookie
/// cost as much as other fields do.
///
/// # Errors
/// What is wrong with it beyond what the library has refused.
pub fn request_to_h1(
    head: &request::Parts,
    body: Body,
    max_fields: usize,
) -> Result<Vec<u8>, Failure> {
    let upgrade = head.extensions.get::<h2::ext::Protocol>();
    let refused = |what| Err(Failure::BadRequest(what));
    if head.method == Method::CONNECT && upgrade.is_none() {
        return Err(Failure::MethodRefused);
    }
    if head.headers.len() > max_fields {
        return Err(Failure::TooManyFields);
    }
    // Of HTTP/1.1 alone: it belongs to an offer that cannot be made here (RFC 7540, section 3.2.1).
    if head.headers.contains_key(const { HeaderName::from_static("http2-settings") }) {
        return refused(Malformed::FieldName);
    }
    let target = head.uri.path_and_query().map_or("", PathAndQuery::as_str);
    if !(target.starts_with('/') || target == "*" && head.method == Method::OPTIONS) {
        return refused(Malformed::Target);
    }
    let host = host_of(head)?;
    let method = if upgrade.is_some() { "GET" } else { head.method.as_str() };
    let mut out = Vec::with_capacity(512);
    for part in [method.as_bytes(), b" ", target.as_bytes(), b" HTTP/1.1\r\nHost: ", host, b"\r\n"]
    {
        out.extend_from_slice(part);
    }
    let mut cookies = Vec::new();
    for (name, value) in &head.headers {
        if *name == COOKIE {
            // Crumbs of one field, which HTTP/1.1 has to be given as one (§8.2.3).
            if !cookies.is_empty() {
                cookies.extend_from_slice(b"; ");
            }
            cookies.extend_from_slice(value.as_bytes());
        } else if *name != HOST {
            field(&mut out, name.as_str().as_bytes(), value.as_bytes());
        }
    }
    if !cookies.is_empty() {
        field(&mut out, b"cookie", &cookies);
    }
    match (upgrade, body) {
        // The library does not look at what it says.
        (Some(protocol), _) if !is_token(protocol.as_str().as_bytes()) => {
            return refused(Malformed::FieldValue);
        }
        (Some(protocol), _) => {
            field(&mut out, b"connection", b"upgrade");
            field(&mut out, b"upgrade", protocol.as_str().as_bytes());
            // The answer to it is checked by nobody: HTTP/2 has no such key (RFC 8441 §5).
            if !head.headers.contains_key(http::header::SEC_WEBSOCKET_KEY) {
                field(&mut out, b"sec-websocket-key", b"bDdycCBvdmVyIEhUVFAvMg==");
            }
        }
        (None, Body::Chunked) => field(&mut out, b"transfer-encoding", b"chunked"),
        (None, Body::None | Body::Length) => {}
    }
    out.extend_from_slice(b"\r\n");
    Ok(out)
}

/// The host that a request is for.
fn host_of(head: &request::Parts) -> Result<&[u8], Failure> {
    let refused = |what| Err(Failure::BadRequest(what));
    let authority = head.uri.authority().map(Authority::as_str);
    let mut hosts = head.headers.get_all(HOST).iter();
    match (authority, hosts.next(), hosts.next()) {
        (_, _, Some(_)) => refused(Malformed::HostRepeated),
        // RFC 9113 §8.3.1: a host beside the authority has to be the same.
        (Some(authority), Some(host), None) if host.as_bytes() != authority.as_bytes() => {
            refused(Malformed::HostInvalid)
        }
        (Some(authority), _, None) => Ok(authority.as_bytes()),
        (None, Some(host), None) => Ok(host.as_bytes()),
        (None, None, None) => refused(Malformed::HostMissing),
    }
}

/// A response of HTTP/1.1, as HTTP/2. `buf` is what `head` was parsed from. A 101 is a 200, for
/// there is nothing to switch to (RFC 8441 §4).
///
/// # Errors
/// A name or value that HTTP/2 cannot have.
pub fn response_to_h2(buf: &Bytes, head: &h1_response::Response) -> Result<Response<()>, Failure> {
    let bad = || Failure::BadResponse(Malformed::FieldValue);
    let status = if head.status == 101 { 200 } else { head.status };
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::from_u16(status).map_err(|_| bad())?;
    *response.version_mut() = Version::HTTP_2;
    add_fields(response.headers_mut(), buf, &head.fields, bad)?;
    if head.status == 101 {
        response.headers_mut().remove("sec-websocket-accept");
    }
    Ok(response)
}

/// A request of HTTP/1.1, as HTTP/2; and how its body is framed. `buf` is what `head` was parsed
/// from.
///
/// # Errors
/// A name or value that HTTP/2 cannot have.
pub fn request_to_h2(
    buf: &Bytes,
    head: &h1_request::Request,
    scheme: Scheme,
) -> Result<Request<()>, Failure> {
    let bad = || Failure::BadRequest(Malformed::FieldValue);
    let mut request = Request::new(());
    *request.version_mut() = Version::HTTP_2;
    *request.method_mut() =
        Method::from_bytes(head.method_text.of(buf)).map_err(|_| Failure::MethodRefused)?;
    let target = head.target.of(buf);
    let uri = Uri::builder()
        .scheme(scheme)
        .authority(head.host.of(buf))
        .path_and_query(if target.is_empty() { b"/" } else { target });
    *request.uri_mut() = uri.build().map_err(|_| Failure::BadRequest(Malformed::Target))?;
    let fields = request.headers_mut();
    add_fields(fields, buf, &head.fields, bad)?;
    fields.remove(HOST);
    // Of what a client may ask for, only trailers are known here (RFC 9113 §8.2.2).
    if fields.get_all(TE).iter().any(|te| te.as_bytes().eq_ignore_ascii_case(b"trailers")) {
        fields.insert(TE, HeaderValue::from_static("trailers"));
    } else {
        fields.remove(TE);
    }
    Ok(request)
}

/// A response that came by HTTP/2, as HTTP/1.1. `to_head`: it answers a HEAD request.
pub fn response_to_h1(head: &http::response::Parts, body: Body, to_head: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(512);
    let status = head.status.as_u16();
    let reason = head.status.canonical_reason().unwrap_or_default();
    out.extend_from_slice(format!("HTTP/1.1 {status} {reason}\r\n").as_bytes());
    for (name, value) in &head.headers {
        field(&mut out, name.as_str().as_bytes(), value.as_bytes());
    }
    let has_length = head.headers.contains_key(CONTENT_LENGTH);
    let never_has_body = to_head || status < 200 || status == 204 || status == 304;
    match body {
        Body::Chunked => field(&mut out, b"transfer-encoding", b"chunked"),
        Body::None if !never_has_body && !has_length => field(&mut out, b"content-length", b"0"),
        Body::None | Body::Length => {}
    }
    // The pipe that it comes through serves one exchange.
    if status >= 200 {
        field(&mut out, b"connection", b"close");
    }
    out.extend_from_slice(b"\r\n");
    out
}

/// A trailer section of HTTP/1.1, from the last chunk on.
pub fn trailers_to_h1(trailers: Option<&HeaderMap>) -> Vec<u8> {
    let mut out = b"0\r\n".to_vec();
    for (name, value) in trailers.into_iter().flatten() {
        field(&mut out, name.as_str().as_bytes(), value.as_bytes());
    }
    out.extend_from_slice(b"\r\n");
    out
}

/// The fields of a trailer section of HTTP/1.1, which begins behind the line of the last chunk.
pub fn trailers_to_h2(section: &[u8]) -> HeaderMap {
    let mut fields = HeaderMap::new();
    for line in section.split(|&b| b == b'\n') {
        let Some(colon) = memchr::memchr(b':', line) else { continue };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        // What HTTP/2 cannot have is left out, as a recipient of trailers may (RFC 9110 §6.5.1).
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name), HeaderValue::from_bytes(value))
        {
            fields.append(name, value);
        }
    }
    fields
}

/// How the body of an HTTP/1.1 message comes out here.
pub fn has_body(framing: Framing) -> bool {
    !matches!(framing, Framing::None | Framing::Length(0))
}

fn field(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    for part in [name, b": ", value, b"\r\n"] {
        out.extend_from_slice(part);
    }
}

/// Octets of a head whose values are kept as parts of the whole. They may outlive it, in the table
/// of the compression, and keep what lies around them.
const SHORT: usize = 1 << 10;

/// Adds what is not about the connection.
fn add_fields(
    to: &mut HeaderMap,
    buf: &Bytes,
    fields: &[Field],
    bad: impl Fn() -> Failure,
) -> Result<(), Failure> {
    to.try_reserve(fields.len()).map_err(|_| bad())?;
    for field in fields {
        if is_of_the_connection(field.id) {
            continue;
        }
        let name = match field.id {
            // What is in nearly every answer need not be looked up by its octets.
            Name::Date => DATE,
            Name::ContentLength => CONTENT_LENGTH,
            Name::XRequestId => const { HeaderName::from_static("x-request-id") },
            _ => HeaderName::from_bytes(field.name.of(buf)).map_err(|_| bad())?,
        };
        let octets = field.value.of(buf);
        let value = if buf.len() <= SHORT {
            HeaderValue::from_maybe_shared(buf.slice_ref(octets))
        } else {
            HeaderValue::from_bytes(octets)
        };
        let mut value = value.map_err(|_| bad())?;
        // Another each time: it would only push out of the table what is worth a place there.
        value.set_sensitive(matches!(field.id, Name::XRequestId | Name::Traceparent));
        to.append(name, value);
    }
    Ok(())
}

fn is_of_the_connection(name: Name) -> bool {
    matches!(
        name,
        Name::Connection
            | Name::KeepAlive
            | Name::ProxyConnection
            | Name::TransferEncoding
            | Name::Upgrade
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use l7rp_core::http1::Limits;

    /// A response of HTTP/1.1 with a field of this many octets, as HTTP/2.
    fn translated(filler: usize) -> Response<()> {
        const LIMITS: Limits = Limits { max_head: 1 << 16, max_fields: 10, max_target: 0 };
        let text = format!(
            "HTTP/1.1 200 OK\r\nX-Request-ID: r1\r\nConnection: close\r\nX-A: {}\r\n\r\n",
            "a".repeat(filler)
        );
        let mut head = h1_response::Response::default();
        let len = h1_response::parse_response(text.as_bytes(), &mut head, false, LIMITS);
        assert_eq!(len, Ok(Some(text.len())));
        response_to_h2(&Bytes::from(text), &head).unwrap()
    }

    #[test]
    fn what_is_another_each_time_is_kept_out_of_the_table() {
        // Parts of the head, and copies of them.
        for filler in [10, 10_000] {
            let response = translated(filler);
            let fields = response.headers();
            assert_eq!(fields.len(), 2, "{fields:?}");
            assert_eq!(
                (&fields["x-request-id"], fields["x-a"].len()),
                (&"r1".parse().unwrap(), filler)
            );
            assert!(fields["x-request-id"].is_sensitive() && !fields["x-a"].is_sensitive());
        }
    }
}
