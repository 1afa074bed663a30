//! Frames of HTTP/2, written and read by hand.

use std::io;
use std::net::TcpListener;
use std::thread;

use l7rp_testkit::{Client, Proxy, SOON, Wire};

/// The kinds of frames.
pub mod kind {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
}

/// Flags of frames.
pub mod flag {
    pub const END_STREAM: u8 = 1;
    pub const ACK: u8 = 1;
    pub const END_HEADERS: u8 = 4;
}

/// Codes of errors.
pub mod code {
    pub const NO_ERROR: u32 = 0;
    pub const PROTOCOL_ERROR: u32 = 1;
    pub const REFUSED_STREAM: u32 = 7;
    pub const CANCEL: u32 = 8;
    pub const ENHANCE_YOUR_CALM: u32 = 11;
}

/// A frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl Frame {
    /// The code in a `RST_STREAM` or GOAWAY.
    pub fn code(&self) -> u32 {
        let from = if self.kind == kind::GOAWAY { 4 } else { 0 };
        self.number(from)
    }

    /// The number in its payload at `from`.
    pub fn number(&self, from: usize) -> u32 {
        let four = self.payload.get(from..from + 4).expect("a number");
        u32::from_be_bytes(four.try_into().expect("four octets"))
    }

    /// Whether it is the last of its stream.
    pub fn ends(&self) -> bool {
        matches!(self.kind, kind::DATA | kind::HEADERS) && self.flags & flag::END_STREAM != 0
    }
}

/// A frame's octets.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    out.extend([kind, flags]);
    out.extend(stream.to_be_bytes());
    out.extend_from_slice(payload);
    out
}

/// A field section, nothing in it compressed.
pub fn section(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, value) in fields {
        out.push(0);
        for text in [name, value] {
            length(&mut out, text.len());
            out.extend_from_slice(text.as_bytes());
        }
    }
    out
}

/// A length with a prefix of seven bits (RFC 7541 §5.1).
fn length(out: &mut Vec<u8>, length: usize) {
    let Some(mut rest) = length.checked_sub(127) else { return out.push(length as u8) };
    out.push(127);
    while rest >= 128 {
        out.push((rest % 128) as u8 | 128);
        rest /= 128;
    }
    out.push(rest as u8);
}

/// The fields that a GET has at least.
pub const GET: [(&str, &str); 4] =
    [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "a.test")];

/// The frame of a GET for `/`, as a whole.
pub fn get_frame(stream: u32) -> Vec<u8> {
    frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, stream, &section(&GET))
}

/// A connection on which frames are written by hand.
#[derive(Debug)]
pub struct Raw {
    pub wire: Wire,
}

impl Raw {
    /// As a client, with these settings.
    #[track_caller]
    pub fn open(proxy: &Proxy, settings: &[u8]) -> Self {
        let mut client = Client::connect(proxy.address());
        client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        client.send(frame(kind::SETTINGS, 0, 0, settings));
        Self { wire: client.wire }
    }

    /// As a server, with these settings, of a connection that was accepted.
    pub fn accepted(mut wire: Wire, settings: &[u8]) -> io::Result<Self> {
        wire.read_exact(24)?;
        wire.write(&frame(kind::SETTINGS, 0, 0, settings))?;
        Ok(Self { wire })
    }

    /// Whether these octets are taken.
    pub fn write(&mut self, octets: impl AsRef<[u8]>) -> bool {
        self.wire.write(octets.as_ref()).is_ok()
    }

    /// The next frame; settings and pings are answered. `None`: the connection has ended.
    pub fn next(&mut self) -> Option<Frame> {
        loop {
            let head = self.wire.read_exact(9).ok()?;
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            let payload = self.wire.read_exact(length).ok()?;
            let got = Frame { kind: head[3], flags: head[4], stream, payload };
            match got.kind {
                kind::SETTINGS if got.flags & flag::ACK == 0 => {
                    self.write(frame(kind::SETTINGS, flag::ACK, 0, b""));
                }
                kind::PING if got.flags & flag::ACK == 0 => {
                    self.write(frame(kind::PING, flag::ACK, 0, &got.payload));
                }
                _ => return Some(got),
            }
        }
    }

    /// The next frame that this is looking for; others are passed over.
    pub fn find(&mut self, is_it: impl Fn(&Frame) -> bool) -> Option<Frame> {
        loop {
            let next = self.next()?;
            if is_it(&next) {
                return Some(next);
            }
        }
    }

    /// The end of a stream: its last frame, or what has reset it.
    #[track_caller]
    pub fn end_of(&mut self, stream: u32) -> Frame {
        let end = self.find(|f| f.stream == stream && (f.ends() || f.kind == kind::RST_STREAM));
        end.expect("the stream ends before the connection")
    }
}

/// An upstream whose frames are written by hand, a thread for each connection; where it listens.
pub fn raw_origin(
    settings: &'static [u8],
    script: impl Fn(Raw, usize) + Clone + Send + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    thread::spawn(move || {
        for (number, stream) in listener.incoming().map_while(Result::ok).enumerate() {
            let script = script.clone();
            thread::spawn(move || {
                let wire = Wire::from(stream);
                wire.patience(Some(SOON * 2));
                if let Ok(raw) = Raw::accepted(wire, settings) {
                    script(raw, number);
                }
            });
        }
    });
    format!("h2c://{address}")
}

/// Reads a request; its stream and its body.
pub fn taken(raw: &mut Raw) -> Option<(u32, Vec<u8>)> {
    let head = raw.find(|f| f.kind == kind::HEADERS)?;
    let (mut body, mut ends) = (Vec::new(), head.ends());
    while !ends {
        let part = raw.find(|f| f.stream == head.stream && f.kind == kind::DATA)?;
        ends = part.ends();
        body.extend(part.payload);
    }
    Some((head.stream, body))
}
