//! Response heads (RFC 9112 §4).

use std::mem::MaybeUninit;

use super::Framing;
use super::head::{Connection, Length, Limits, USUAL_FIELDS, fields, grammar, parse_digits};
use crate::failure::{Failure, Malformed};
use crate::head::{Field, Name, Span};

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
    /// `Connection` lists names of fields (RFC 9110 §7.6.1).
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
    let usual = limits.max_fields.min(USUAL_FIELDS);
    match parse_within(&mut few[..usual], buf, head, to_head, limits) {
        Err(Failure::ResponseHeadTooLarge) if usual < limits.max_fields => {
            let mut many = Box::new_uninit_slice(limits.max_fields);
            parse_within(&mut many, buf, head, to_head, limits)
        }
        result => result,
    }
}

/// As [`parse_response`], with room for as many fields as there are in `space`.
fn parse_within<'b>(
    space: &mut [MaybeUninit<httparse::Header<'b>>],
    buf: &'b [u8],
    head: &mut Response,
    to_head: bool,
    limits: Limits,
) -> Result<Option<usize>, Failure> {
    // httparse skips empty lines here; RFC 9112 §2.2 allows that for requests only.
    if buf.first().is_some_and(|&b| b != b'H') {
        return Err(Failure::BadResponse(Malformed::StartLine));
    }
    let mut parsed = httparse::Response::new(&mut []);
    let result = httparse::ParserConfig::default().parse_response_with_uninit_headers(
        &mut parsed,
        buf,
        space,
    );
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
    let mut connection = Connection::default();
    head.keep_alive_timeout = None;
    for field in &head.fields {
        let value = field.value.of(buf);
        match field.id {
            Name::ContentLength => length.content_length(value)?,
            Name::TransferEncoding => length.transfer_encoding(value, is_http10)?,
            Name::Connection => connection.add(value),
            Name::KeepAlive => head.keep_alive_timeout = keep_alive_timeout(value),
            _ => {}
        }
    }
    head.keep_alive = connection.persists(is_http10);
    head.connection_named = connection.names;
    let framing = length.framing();
    head.framing = match head.status {
        // It has no body; a length is ignored and not passed on, chunks are beyond doubt wrong.
        100..=199 if framing == Some(Framing::Chunked) => return Err(Malformed::Interim),
        100..=199 => Framing::None,
        204 | 304 => {
            // A 204 has no body by definition; one that announces it may well send it.
            if head.status == 204 && framing.is_some_and(|f| f != Framing::Length(0)) {
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

fn keep_alive_timeout(value: &[u8]) -> Option<u32> {
    value.split(|&b| b == b',').find_map(|item| {
        let digits = item.trim_ascii().strip_prefix(b"timeout=")?;
        parse_digits(digits).and_then(|n| u32::try_from(n).ok())
    })
}

/// The reason phrase of the status line at the start of `buf`.
fn reason_span(buf: &[u8]) -> Span {
    let end = memchr::memchr(b'\r', buf).unwrap_or(0);
    // "HTTP/1.1 200 " is 13 octets long.
    if end > 13 { Span { at: 13, len: (end - 13) as u32 } } else { Span::default() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { max_head: 8192, max_fields: 10, max_target: 100 };

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
            ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n", M::ContentLength),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
                M::LengthAndChunked,
            ),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\n", M::TransferEncoding),
            ("HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", M::TransferEncoding),
            ("HTTP/1.1 100 Go\r\nTransfer-Encoding: chunked\r\n\r\n", M::Interim),
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
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n",
                false,
                Framing::Chunked,
                true,
            ),
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
            // The lines are one list, whose order says nothing.
            (
                "HTTP/1.1 204 No\r\nConnection: close\r\nConnection: keep-alive\r\n\r\n",
                false,
                Framing::None,
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
            let _ = parse_response(&raw, &mut Response::default(), false, LIMITS);
        }
    }
}
