//! Where a message body ends.
//!
//! A [`Body`] looks at octets as they pass and says how many of them belong to the message.
//! Chunked framing passes through unchanged: it is checked, not decoded and encoded again. Only
//! a trailer section is held back until its end, for some fields have no business in one.
//! [`Body::decode`] takes the framing off, for a receiver that does not know chunks.

use super::Framing;
use crate::failure::Malformed;
use crate::head::{Name, is_token_octet};

/// Octets of one chunk-size line, extensions included.
const MAX_CHUNK_LINE: u32 = 1024;

/// The state of one body.
#[derive(Clone, Debug)]
pub struct Body {
    state: State,
    /// Octets of content seen, framing excluded.
    content: u64,
    /// Octets that the trailer section may still have.
    trailer_left: u32,
    /// What is passed on in the place of the trailer section; empty while none came.
    trailer: Vec<u8>,
}

#[derive(Clone, Debug)]
enum State {
    Done,
    Length(u64),
    UntilClose,
    Chunk(Chunk),
}

/// Position in chunked framing (RFC 9112 §7.1).
#[derive(Clone, Debug)]
enum Chunk {
    /// In the digits of a size.
    Size { value: u64, digits: u8, line: u32 },
    /// In extensions.
    Extension { value: u64, line: u32, quoted: bool },
    /// After the CR of a size line.
    SizeLf { value: u64 },
    /// In the data.
    Data { left: u64 },
    /// After the data.
    DataCr,
    /// After the CR behind the data.
    DataLf,
    /// At the start of a trailer line.
    TrailerStart,
    /// In the name of a trailer field; what was read of it so far, if it can be a known one.
    TrailerName { name: [u8; 17], len: u8 },
    /// In the value of a trailer field that is passed on or not.
    TrailerValue { pass: bool },
    /// After the CR of a trailer line.
    TrailerLf { pass: bool },
    /// After the CR of the last line.
    EndLf,
}

const SIZE: Chunk = Chunk::Size { value: 0, digits: 0, line: 0 };

/// What a look at some octets told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// This many octets at the front belong to the body.
    pub used: usize,
    /// This many of them are passed on as they are. Fewer: a trailer section has begun, and
    /// [`Body::take_trailer`] has what follows them once the body is done.
    pub pass: usize,
    /// The body ends after them.
    pub done: bool,
}

impl Body {
    /// A body framed like this, whose trailer section has at most `max_trailer` octets.
    pub fn new(framing: Framing, max_trailer: usize) -> Self {
        let state = match framing {
            Framing::None | Framing::Length(0) => State::Done,
            Framing::Length(n) => State::Length(n),
            Framing::Chunked => State::Chunk(SIZE),
            Framing::UntilClose => State::UntilClose,
        };
        Self {
            state,
            content: 0,
            trailer_left: u32::try_from(max_trailer).unwrap_or(u32::MAX),
            trailer: Vec::new(),
        }
    }

    /// Whether the end was reached.
    pub fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Whether the end of the connection is the end of the body.
    pub fn ends_with_connection(&self) -> bool {
        matches!(self.state, State::Done | State::UntilClose)
    }

    /// Octets of content seen so far.
    pub fn content(&self) -> u64 {
        self.content
    }

    /// Octets of content still to come, where the framing tells.
    pub fn left(&self) -> Option<u64> {
        match self.state {
            State::Done => Some(0),
            State::Length(n) => Some(n),
            State::UntilClose | State::Chunk(_) => None,
        }
    }

    /// Looks at the next octets, to be passed on as they are.
    ///
    /// # Errors
    /// The framing is broken; nothing of `data` may be passed on.
    pub fn scan(&mut self, data: &[u8]) -> Result<Seen, Malformed> {
        self.read(data, |_| {})
    }

    /// Looks at the next octets and appends their content, without framing and trailers, to
    /// `out`.
    ///
    /// # Errors
    /// The framing is broken; `out` may have content from before the fault.
    pub fn decode(&mut self, data: &[u8], out: &mut Vec<u8>) -> Result<Seen, Malformed> {
        self.read(data, |content| out.extend_from_slice(content))
    }

    /// What follows the octets that were passed on once the body is done; most often nothing, else
    /// its trailer section, to its end, without the fields that may not stand in one (RFC 9110
    /// §6.5.1 lets a recipient discard them). Before that, nothing.
    pub fn take_trailer(&mut self) -> Vec<u8> {
        if self.is_done() { std::mem::take(&mut self.trailer) } else { Vec::new() }
    }

    fn read(&mut self, data: &[u8], mut sink: impl FnMut(&[u8])) -> Result<Seen, Malformed> {
        let mut pass = None;
        let used = match &mut self.state {
            State::Done => 0,
            State::UntilClose => {
                self.content += data.len() as u64;
                sink(data);
                data.len()
            }
            State::Length(left) => {
                let n = usize::try_from(*left).unwrap_or(usize::MAX).min(data.len());
                *left -= n as u64;
                self.content += n as u64;
                sink(&data[..n]);
                if *left == 0 {
                    self.state = State::Done;
                }
                n
            }
            State::Chunk(_) => self.read_chunks(data, sink, &mut pass)?,
        };
        Ok(Seen { used, pass: pass.unwrap_or(used), done: self.is_done() })
    }

    fn read_chunks(
        &mut self,
        data: &[u8],
        mut sink: impl FnMut(&[u8]),
        pass: &mut Option<usize>,
    ) -> Result<usize, Malformed> {
        let mut at = 0;
        while at < data.len() {
            let State::Chunk(chunk) = &mut self.state else {
                break;
            };
            if let Chunk::Data { left } = chunk {
                let n = usize::try_from(*left).unwrap_or(usize::MAX).min(data.len() - at);
                *left -= n as u64;
                self.content += n as u64;
                sink(&data[at..at + n]);
                at += n;
                if *left == 0 {
                    *chunk = Chunk::DataCr;
                }
                continue;
            }
            if chunk.is_trailer() {
                self.trailer_left = self.trailer_left.checked_sub(1).ok_or(Malformed::Trailer)?;
            }
            let next = chunk.step(data[at])?;
            let in_trailer = chunk.is_trailer() || next.as_ref().is_some_and(Chunk::is_trailer);
            if in_trailer || pass.is_some() || !self.trailer.is_empty() {
                pass.get_or_insert(at);
                hold_back(&mut self.trailer, chunk, next.as_ref(), data[at]);
            }
            match next {
                Some(next) => *chunk = next,
                None => self.state = State::Done,
            }
            at += 1;
        }
        Ok(at)
    }
}

impl Chunk {
    fn is_trailer(&self) -> bool {
        matches!(
            self,
            Self::TrailerName { .. } | Self::TrailerValue { .. } | Self::TrailerLf { .. }
        )
    }

    /// The state after one octet of framing; `None`: the body is complete.
    fn step(&self, b: u8) -> Result<Option<Self>, Malformed> {
        let next = match (self, b) {
            (&Self::Size { value, digits, line }, _) => return size(value, digits, line, b),
            (&Self::Extension { value, line, quoted }, _) => {
                return extension(value, line, quoted, b);
            }
            (Self::SizeLf { value }, b'\n') if *value > 0 => Self::Data { left: *value },
            (Self::DataCr, b'\r') => Self::DataLf,
            (Self::DataLf, b'\n') => SIZE,
            (Self::TrailerStart, b'\r') => Self::EndLf,
            (Self::TrailerStart, _) => return trailer_name([0; 17], 0, b).map(Some),
            (Self::TrailerName { name, len }, _) => return trailer_name(*name, *len, b).map(Some),
            (&Self::TrailerValue { pass }, b'\r') => Self::TrailerLf { pass },
            (&Self::TrailerValue { pass }, b'\t' | b' '..=b'~' | 0x80..) => {
                Self::TrailerValue { pass }
            }
            (Self::SizeLf { .. } | Self::TrailerLf { .. }, b'\n') => Self::TrailerStart,
            (Self::EndLf, b'\n') => return Ok(None),
            (Self::TrailerValue { .. } | Self::TrailerLf { .. } | Self::EndLf, _) => {
                return Err(Malformed::Trailer);
            }
            _ => return Err(Malformed::Chunk),
        };
        Ok(Some(next))
    }
}

/// Adds an octet of the trailer section to what is passed on of it, or takes the line back whose
/// name has just proved to be a forbidden one.
fn hold_back(trailer: &mut Vec<u8>, chunk: &Chunk, next: Option<&Chunk>, octet: u8) {
    match (chunk, next) {
        (_, Some(Chunk::TrailerValue { pass: false })) => {
            let begin = memchr::memrchr(b'\n', trailer).map_or(0, |end| end + 1);
            trailer.truncate(begin);
        }
        (Chunk::TrailerValue { pass: false } | Chunk::TrailerLf { pass: false }, _) => {}
        _ => trailer.push(octet),
    }
}

fn size(value: u64, digits: u8, line: u32, b: u8) -> Result<Option<Chunk>, Malformed> {
    let digit = match b {
        b'0'..=b'9' => b - b'0',
        b'a'..=b'f' => b - b'a' + 10,
        b'A'..=b'F' => b - b'A' + 10,
        b'\r' if digits > 0 => return Ok(Some(Chunk::SizeLf { value })),
        b';' if digits > 0 => {
            return Ok(Some(Chunk::Extension { value, line, quoted: false }));
        }
        _ => return Err(Malformed::Chunk),
    };
    // 16 digits are all that 64 bits can hold; more, even of zeros, is somebody probing.
    if digits == 16 {
        return Err(Malformed::Chunk);
    }
    Ok(Some(Chunk::Size {
        value: (value << 4) | u64::from(digit),
        digits: digits + 1,
        line: line + 1,
    }))
}

/// Extensions are passed on unread, so only what could end the line early matters.
fn extension(value: u64, line: u32, quoted: bool, b: u8) -> Result<Option<Chunk>, Malformed> {
    let line = line + 1;
    if line > MAX_CHUNK_LINE {
        return Err(Malformed::Chunk);
    }
    match b {
        b'\r' if !quoted => Ok(Some(Chunk::SizeLf { value })),
        b'"' => Ok(Some(Chunk::Extension { value, line, quoted: !quoted })),
        b'\t' | b' '..=b'~' | 0x80.. => Ok(Some(Chunk::Extension { value, line, quoted })),
        _ => Err(Malformed::Chunk),
    }
}

/// One octet of a trailer field's name. Fields that frame, route or authenticate have no
/// business in a trailer (RFC 9110 §6.5.1).
fn trailer_name(mut name: [u8; 17], len: u8, b: u8) -> Result<Chunk, Malformed> {
    let known = name.get(..len as usize);
    match b {
        b':' if len == 0 => Err(Malformed::Trailer),
        b':' => Ok(Chunk::TrailerValue { pass: !known.is_some_and(is_forbidden_in_trailer) }),
        _ if !is_token_octet(b) => Err(Malformed::Trailer),
        _ => {
            if let Some(place) = name.get_mut(len as usize) {
                *place = b;
            }
            // A name longer than the buffer is none that we know.
            Ok(Chunk::TrailerName { name, len: len.saturating_add(1).min(18) })
        }
    }
}

fn is_forbidden_in_trailer(name: &[u8]) -> bool {
    const OTHERS: [&str; 8] = [
        "authorization",
        "cookie",
        "set-cookie",
        "content-type",
        "content-range",
        "content-encoding",
        "www-authenticate",
        "cache-control",
    ];
    // "Date" in a trailer is harmless, and gRPC-like protocols send odd names: only these.
    !matches!(
        Name::of(name),
        Name::Other | Name::Date | Name::Traceparent | Name::Tracestate | Name::XL7rpDecision
    ) || OTHERS.iter().any(|o| name.eq_ignore_ascii_case(o.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scans `data` cut at `cut`; the number of octets used and whether the end was found.
    fn scan_cut(framing: Framing, data: &[u8], cut: usize) -> Result<Seen, Malformed> {
        let mut body = Body::new(framing, 1000);
        let first = body.scan(&data[..cut])?;
        if first.done {
            return Ok(first);
        }
        assert_eq!(first.used, cut);
        let second = body.scan(&data[cut..])?;
        Ok(Seen { used: cut + second.used, pass: first.pass + second.pass, done: second.done })
    }

    fn scan_every_cut(framing: Framing, data: &[u8]) -> Result<Seen, Malformed> {
        let whole = Body::new(framing, 1000).scan(data);
        // How much is held back depends on the cut.
        let without_pass = |seen: Result<Seen, Malformed>| seen.map(|s| (s.used, s.done));
        for cut in 0..=data.len() {
            let seen = scan_cut(framing, data, cut);
            assert_eq!(without_pass(seen), without_pass(whole), "cut at {cut}");
        }
        whole
    }

    #[test]
    fn well_formed_bodies_end_where_they_end_at_every_cut() {
        for (data, used) in [
            (&b"0\r\n\r\nNEXT"[..], 5),
            (b"5\r\nhello\r\n0\r\n\r\nGET /", 15),
            (b"A\r\n0123456789\r\na\r\n0123456789\r\n000\r\n\r\n", 37),
            (b"1;name=value\r\nx\r\n0;last\r\n\r\n", 27),
            (b"1;q=\"a;b\"\r\nx\r\n0\r\n\r\n", 19),
            (b"1\r\nx\r\n0\r\nX-Sum: abc\r\nX-Empty:\r\n\r\nrest", 33),
        ] {
            let seen = scan_every_cut(Framing::Chunked, data);
            let seen = seen.map(|s| (s.used, s.done));
            assert_eq!(seen, Ok((used, true)), "{}", data.escape_ascii());
        }
        let seen = |used, done| Ok(Seen { used, pass: used, done });
        assert_eq!(scan_every_cut(Framing::Length(3), b"abcd"), seen(3, true));
        assert_eq!(scan_every_cut(Framing::UntilClose, b"abcd"), seen(4, false));
        assert_eq!(scan_every_cut(Framing::Chunked, b"1\r\nx\r\n0\r\n\r\nmore"), seen(11, true));
    }

    #[test]
    fn broken_framing_is_refused_at_every_cut() {
        for data in [
            &b"x\r\n"[..],
            b"\r\n",
            b";a\r\n",
            b"-1\r\n",
            b"+1\r\n",
            b"0x1\r\n",
            b" 1\r\n",
            b"1 \r\n",
            b"1\nx",
            b"1\r\rx",
            b"1\r\nxx\r\n",
            b"1\r\nx\n",
            b"1\r\nx0\r\n",
            b"11111111111111111\r\n",
            b"00000000000000000\r\n",
            b"1;a\nb\r\n",
            b"0\r\n X: 1\r\n",
            b"0\r\nX : 1\r\n",
            b"0\r\n: 1\r\n",
            b"0\r\nX: a\nb\r\n",
            b"0\r\nX: a\0b\r\n",
            b"0\r\n\rx",
        ] {
            assert!(scan_every_cut(Framing::Chunked, data).is_err(), "{}", data.escape_ascii());
        }
    }

    /// What is passed on of `data`, cut at `first` and at `second`.
    fn passed(data: &[u8], first: usize, second: usize) -> Vec<u8> {
        let mut body = Body::new(Framing::Chunked, 1000);
        let mut out = Vec::new();
        for piece in [&data[..first], &data[first..second], &data[second..]] {
            let seen = body.scan(piece).unwrap();
            out.extend_from_slice(&piece[..seen.pass]);
        }
        assert!(body.is_done());
        out.extend(body.take_trailer());
        out
    }

    #[test]
    fn a_trailer_passes_without_the_fields_that_may_not_stand_in_one() {
        for (trailer, kept) in [
            ("X-Sum: 9\r\n", "X-Sum: 9\r\n"),
            ("X-A:\r\nx-b: 2\r\n", "X-A:\r\nx-b: 2\r\n"),
            ("Content-Length: 1\r\n", ""),
            ("transfer-encoding: chunked\r\nX: 1\r\n", "X: 1\r\n"),
            ("X: 1\r\nHost: a\r\nY: 2\r\nset-cookie: a=b\r\n", "X: 1\r\nY: 2\r\n"),
            ("Set-Cookie: a\r\nX-Forwarded-For: 1\r\n", ""),
        ] {
            let data = format!("1\r\nx\r\n0\r\n{trailer}\r\nNEXT");
            let wanted = format!("1\r\nx\r\n0\r\n{kept}\r\n");
            for first in 0..data.len() {
                for second in first..data.len() {
                    let got = passed(data.as_bytes(), first, second);
                    assert_eq!(got.escape_ascii().to_string(), wanted.escape_debug().to_string());
                }
            }
        }
    }

    #[test]
    fn decoding_takes_the_framing_off_at_every_cut() {
        let data = b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nX-T: 1\r\n\r\nmore";
        for cut in 0..=data.len() {
            let mut out = Vec::new();
            let mut body = Body::new(Framing::Chunked, 100);
            let first = body.decode(&data[..cut], &mut out).unwrap();
            body.decode(&data[first.used..], &mut out).unwrap();
            assert!(body.is_done(), "cut at {cut}");
            assert_eq!(out, b"abcde", "cut at {cut}");
            assert_eq!(body.content(), 5);
        }
    }

    #[test]
    fn lines_and_trailers_are_bounded() {
        let mut long = b"1;".to_vec();
        long.resize(3000, b'a');
        assert_eq!(Body::new(Framing::Chunked, 100).scan(&long), Err(Malformed::Chunk));

        let mut trailer = b"0\r\nX-A: ".to_vec();
        trailer.resize(300, b'a');
        assert_eq!(Body::new(Framing::Chunked, 100).scan(&trailer), Err(Malformed::Trailer));
        assert!(Body::new(Framing::Chunked, 1000).scan(&trailer).is_ok());
    }
}
