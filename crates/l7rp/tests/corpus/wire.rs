//! HTTP/1.1 read strictly from a socket, by the test's own means: what a client or a backend of
//! the strictest kind would make of the octets.

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Why there was nothing more to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The peer ended its side.
    Eof,
    Reset,
    Timeout,
    /// What came is not HTTP/1.1.
    Garbage(String),
}

/// The first line and the fields of a message.
#[derive(Clone, Debug, Default)]
pub(crate) struct Head {
    pub(crate) start: String,
    /// Names in lower case.
    pub(crate) fields: Vec<(String, String)>,
}

impl Head {
    pub(crate) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.fields.iter().filter(move |(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    pub(crate) fn first<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        self.all(name).next()
    }

    /// Content-Length or chunks, as the fields say; neither of them: `None`.
    pub(crate) fn framing(&self) -> Result<Option<Framing>, Stop> {
        let lengths: Vec<_> = self.all("content-length").collect();
        let codings: Vec<_> = self.all("transfer-encoding").collect();
        match (lengths.as_slice(), codings.as_slice()) {
            ([], []) => Ok(None),
            ([], [coding]) if coding.eq_ignore_ascii_case("chunked") => Ok(Some(Framing::Chunked)),
            ([digits], []) if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) => {
                let length = digits.parse().map_err(|_| garbage("length", digits.as_bytes()))?;
                Ok(Some(Framing::Length(length)))
            }
            _ => Err(Stop::Garbage(format!("framing: {lengths:?} {codings:?}"))),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    Length(usize),
    Chunked,
    UntilClose,
}

/// A body as far as it came.
#[derive(Clone, Debug, Default)]
pub(crate) struct Body {
    pub(crate) content: Vec<u8>,
    pub(crate) trailers: Vec<(String, String)>,
}

/// The reading side of a connection.
pub(crate) struct Wire {
    pub(crate) stream: TcpStream,
    /// Received and not yet read.
    pub(crate) buf: Vec<u8>,
    /// All that was received.
    pub(crate) raw: Vec<u8>,
    pub(crate) until: Instant,
}

impl Wire {
    pub(crate) fn new(stream: TcpStream, patience: Duration) -> Self {
        Self { stream, buf: Vec::new(), raw: Vec::new(), until: Instant::now() + patience }
    }

    pub(crate) fn patience(&mut self, patience: Duration) {
        self.until = Instant::now() + patience;
    }

    /// Receives more.
    pub(crate) fn fill(&mut self) -> Result<(), Stop> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() || self.stream.set_read_timeout(Some(left)).is_err() {
            return Err(Stop::Timeout);
        }
        let mut piece = [0; 16384];
        match self.stream.read(&mut piece) {
            Ok(0) => Err(Stop::Eof),
            Ok(n) => {
                self.buf.extend_from_slice(&piece[..n]);
                self.raw.extend_from_slice(&piece[..n]);
                Ok(())
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => Ok(()),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Err(Stop::Timeout)
            }
            Err(_) => Err(Stop::Reset),
        }
    }

    /// Reads on to the end of the connection and gives how it ended.
    pub(crate) fn until_end(&mut self) -> Stop {
        loop {
            if let Err(stop) = self.fill() {
                return stop;
            }
        }
    }

    /// The next line without its CR LF.
    fn line(&mut self) -> Result<Vec<u8>, Stop> {
        let mut seen = 0;
        loop {
            if let Some(at) = self.buf[seen..].iter().position(|b| *b == b'\n') {
                let at = seen + at;
                let line: Vec<u8> = self.buf.drain(..=at).collect();
                return match line.strip_suffix(b"\r\n") {
                    Some(line) if !line.contains(&b'\r') => Ok(line.to_vec()),
                    _ => Err(garbage("line end", &line)),
                };
            }
            seen = self.buf.len();
            self.fill()?;
        }
    }

    /// The next head.
    pub(crate) fn head(&mut self) -> Result<Head, Stop> {
        let start = self.line()?;
        if start.iter().any(u8::is_ascii_control) {
            return Err(garbage("first line", &start));
        }
        let mut head = Head { start: text(&start), fields: Vec::new() };
        self.fields(&mut head.fields)?;
        Ok(head)
    }

    fn fields(&mut self, fields: &mut Vec<(String, String)>) -> Result<(), Stop> {
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Ok(());
            }
            let colon = line.iter().position(|b| *b == b':').unwrap_or_default();
            let (name, value) = line.split_at(colon);
            let control = |b: &u8| *b != b'\t' && b.is_ascii_control();
            if name.is_empty() || !name.iter().all(|b| is_token(*b)) || value.iter().any(control) {
                return Err(garbage("field", &line));
            }
            fields.push((text(name).to_ascii_lowercase(), text(value[1..].trim_ascii())));
        }
    }

    /// The next octets, appended to `out` as they come.
    fn exactly(&mut self, mut count: usize, out: &mut Vec<u8>) -> Result<(), Stop> {
        loop {
            let n = count.min(self.buf.len());
            out.extend(self.buf.drain(..n));
            count -= n;
            if count == 0 {
                return Ok(());
            }
            self.fill()?;
        }
    }

    /// A whole body; `body` has what came of it even if it stopped before its end.
    pub(crate) fn body(&mut self, framing: Framing, body: &mut Body) -> Result<(), Stop> {
        match framing {
            Framing::Length(length) => self.exactly(length, &mut body.content),
            Framing::UntilClose => {
                let end = self.until_end();
                body.content.append(&mut self.buf);
                if end == Stop::Eof { Ok(()) } else { Err(end) }
            }
            Framing::Chunked => loop {
                let line = self.line()?;
                let digits = line.iter().take_while(|b| b.is_ascii_hexdigit()).count();
                let size = usize::from_str_radix(&text(&line[..digits]), 16);
                let extension = line.get(digits).is_none_or(|b| *b == b';');
                let (Ok(size), true) = (size, extension) else {
                    return Err(garbage("chunk size", &line));
                };
                if size == 0 {
                    return self.fields(&mut body.trailers);
                }
                self.exactly(size, &mut body.content)?;
                let mut end = Vec::new();
                self.exactly(2, &mut end)?;
                if end != b"\r\n" {
                    return Err(garbage("end of chunk", &end));
                }
            },
        }
    }
}

fn is_token(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b)
}

fn garbage(what: &str, octets: &[u8]) -> Stop {
    let some = &octets[..octets.len().min(80)];
    Stop::Garbage(format!("{what} \"{}\"", some.escape_ascii()))
}

/// Octet for octet, so that nothing is lost.
fn text(octets: &[u8]) -> String {
    octets.iter().map(|b| char::from(*b)).collect()
}
