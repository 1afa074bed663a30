//! What request and response heads have in common.
//!
//! `httparse` finds the parts; what it lets pass and a proxy must not is refused here: lines
//! not ended by CR LF and doubtful framing.

use super::Framing;
use crate::failure::Malformed;
use crate::head::{Field, Name, Span, is, list_has};

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

/// Fields that most heads stay under; more are parsed with an allocation.
pub(super) const USUAL_FIELDS: usize = 100;

/// The framing fields of one head, checked as they come.
#[derive(Default)]
pub(super) struct Length {
    content_length: Option<u64>,
    chunked: bool,
}

impl Length {
    /// RFC 9110 §8.6: digits only. A repeated field is refused even if equal.
    pub(super) fn content_length(&mut self, value: &[u8]) -> Result<(), Malformed> {
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
    pub(super) fn transfer_encoding(
        &mut self,
        value: &[u8],
        is_http10: bool,
    ) -> Result<(), Malformed> {
        if self.content_length.is_some() {
            return Err(Malformed::LengthAndChunked);
        }
        if self.chunked || is_http10 || !value.eq_ignore_ascii_case(b"chunked") {
            return Err(Malformed::TransferEncoding);
        }
        self.chunked = true;
        Ok(())
    }

    pub(super) fn framing(&self) -> Option<Framing> {
        if self.chunked { Some(Framing::Chunked) } else { self.content_length.map(Framing::Length) }
    }
}

pub(super) fn parse_digits(value: &[u8]) -> Option<u64> {
    if value.is_empty() {
        return None;
    }
    value.iter().try_fold(0u64, |n, &b| {
        let digit = b.is_ascii_digit().then(|| u64::from(b - b'0'))?;
        n.checked_mul(10)?.checked_add(digit)
    })
}

/// What the `Connection` fields of a head say together.
#[derive(Default)]
pub(super) struct Connection {
    keep_alive: bool,
    close: bool,
    /// A member may name a field.
    pub(super) names: bool,
}

impl Connection {
    /// Takes in the value of one of them.
    pub(super) fn add(&mut self, value: &[u8]) {
        for member in value.split(|&b| b == b',').map(<[u8]>::trim_ascii) {
            if is(member, b"keep-alive") {
                self.keep_alive = true;
            } else if is(member, b"close") {
                self.close = true;
            } else {
                self.names |= !member.is_empty();
            }
        }
    }

    /// Whether another message may follow (RFC 9112 §9.3): `close` wins, on whichever line.
    pub(super) fn persists(&self, is_http10: bool) -> bool {
        !self.close && (self.keep_alive || !is_http10)
    }
}

/// Whether any `Connection` field lists `name`.
pub fn is_named_by_connection(buf: &[u8], fields: &[Field], name: &[u8]) -> bool {
    fields.iter().any(|f| f.id == Name::Connection && list_has(f.value.of(buf), name))
}

/// Turns httparse's slices into ranges and checks that every line ends in CR LF.
pub(super) fn fields(
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
pub(super) fn span(buf: &[u8], part: &[u8]) -> Span {
    let at = (part.as_ptr() as usize).saturating_sub(buf.as_ptr() as usize);
    Span { at: at as u32, len: part.len() as u32 }
}

pub(super) fn grammar(e: httparse::Error) -> Malformed {
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
