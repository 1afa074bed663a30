//! A stream's octets in both directions, between the far end of a pipe and HTTP/2. Each side reads
//! no more than the other takes: the window of a stream grows when the exchange has read.

use std::io;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use h2::{Reason, RecvStream, SendStream};
use l7rp_core::http1::Framing;
use l7rp_core::http1::body;

use super::heads::{self, trailers_to_h1, trailers_to_h2};
use crate::pipe::Pipe;

/// Octets of a trailer section.
const MAX_TRAILER: usize = 16 << 10;

/// Why a stream has ended before its time.
#[derive(Debug)]
pub enum Broken {
    /// The HTTP/2 side: the peer has reset the stream, or the connection is gone.
    Stream(h2::Error),
    /// The exchange has broken off, or does not read any more.
    Exchange,
}

impl From<h2::Error> for Broken {
    fn from(e: h2::Error) -> Self {
        Self::Stream(e)
    }
}

/// From HTTP/2 into the pipe, as the body of an HTTP/1.1 message.
#[derive(Debug)]
pub struct Inflow {
    body: RecvStream,
    framing: heads::Body,
    /// What is being written: in front of, of, and behind a part of the body.
    before: Vec<u8>,
    part: Bytes,
    behind: &'static [u8],
    /// Octets of the part that the peer may send anew once it is written.
    owed: usize,
    ended: bool,
}

impl Inflow {
    /// The body of a message that is framed so.
    pub fn new(body: RecvStream, framing: heads::Body) -> Self {
        let (before, part) = (Vec::new(), Bytes::new());
        Self { body, framing, before, part, behind: b"", owed: 0, ended: false }
    }

    /// A part of it that was read already.
    pub fn begin_with(&mut self, part: Bytes) {
        self.take(part);
    }

    /// Moves what can be moved. Ready at the end of the body, which the pipe's reader has been
    /// told.
    pub fn poll(&mut self, cx: &mut Context<'_>, pipe: &mut Pipe) -> Poll<Result<(), Broken>> {
        loop {
            ready!(self.poll_written(cx, pipe)).map_err(|_| Broken::Exchange)?;
            if self.owed > 0 {
                // A stream that was reset meanwhile has no window any more.
                let _ = self.body.flow_control().release_capacity(self.owed);
                self.owed = 0;
            }
            if self.ended {
                pipe.shut();
                return Poll::Ready(Ok(()));
            }
            match ready!(self.body.poll_data(cx)) {
                Some(part) => self.take(part?),
                None if self.framing == heads::Body::Chunked => {
                    let trailers = ready!(self.body.poll_trailers(cx))?;
                    self.before = trailers_to_h1(trailers.as_ref());
                    self.ended = true;
                }
                None => self.ended = true,
            }
        }
    }

    fn take(&mut self, part: Bytes) {
        self.owed = part.len();
        // An empty part is no chunk: that would be the last one.
        if self.framing == heads::Body::Chunked && !part.is_empty() {
            self.before = format!("{:x}\r\n", part.len()).into_bytes();
            self.behind = b"\r\n";
        }
        self.part = part;
    }

    fn poll_written(&mut self, cx: &mut Context<'_>, pipe: &mut Pipe) -> Poll<io::Result<()>> {
        while !self.before.is_empty() || !self.part.is_empty() {
            let n = ready!(pipe.poll_write(cx, &self.before, &self.part))?;
            let of_before = n.min(self.before.len());
            self.before.drain(..of_before);
            self.part.advance(n - of_before);
        }
        while !self.behind.is_empty() {
            let n = ready!(pipe.poll_write(cx, self.behind, b""))?;
            self.behind = &self.behind[n..];
        }
        Poll::Ready(Ok(()))
    }
}

/// From the pipe into HTTP/2: the body of an HTTP/1.1 message.
#[derive(Debug)]
pub struct Outflow {
    stream: SendStream<Bytes>,
    body: body::Body,
    is_chunked: bool,
    /// What was read and is not taken apart yet.
    ahead: Bytes,
    /// What waits for the peer's window.
    part: Bytes,
    /// What is left to be said once that is out; `None`: more will be read.
    last: Option<Last>,
    /// The end has been said.
    said: bool,
    /// Octets of content that the peer has taken.
    sent: u64,
}

#[derive(Debug)]
enum Last {
    End,
    Trailers(http::HeaderMap),
}

impl Outflow {
    /// The body of a message that is framed so in HTTP/1.1; `ahead`: the begin of it.
    pub fn new(stream: SendStream<Bytes>, framing: Framing, ahead: Bytes) -> Self {
        let body = body::Body::new(framing, MAX_TRAILER);
        let is_chunked = framing == Framing::Chunked;
        let part = Bytes::new();
        Self { stream, body, is_chunked, ahead, part, last: None, said: false, sent: 0 }
    }

    /// The stream that it writes to.
    pub fn stream(&mut self) -> &mut SendStream<Bytes> {
        &mut self.stream
    }

    /// Whether it is the peer that is waited for; and how many octets it has taken so far.
    pub fn waits(&self) -> (bool, u64) {
        (!self.part.is_empty(), self.sent)
    }

    /// Moves what can be moved. Ready when the end of the message has been said.
    pub fn poll(&mut self, cx: &mut Context<'_>, pipe: &mut Pipe) -> Poll<Result<(), Broken>> {
        loop {
            if !self.part.is_empty() {
                ready!(self.poll_sent(cx))?;
                continue;
            }
            if self.said {
                return Poll::Ready(Ok(()));
            }
            match self.last.take() {
                Some(Last::End) => {
                    self.stream.send_data(Bytes::new(), true)?;
                    return Poll::Ready(Ok(()));
                }
                Some(Last::Trailers(trailers)) => {
                    self.stream.send_trailers(trailers)?;
                    return Poll::Ready(Ok(()));
                }
                None => {}
            }
            if self.ahead.is_empty() {
                // Whoever waits long should hold little.
                let mut buf = Vec::new();
                let read = ready!(pipe.poll_fill(cx, &mut buf));
                let ended = matches!(read, Ok(0)) && self.body.ends_with_connection();
                if ended {
                    self.last = Some(Last::End);
                    continue;
                }
                if !matches!(read, Ok(n) if n > 0) {
                    return Poll::Ready(Err(Broken::Exchange));
                }
                self.ahead = buf.into();
            }
            self.take_apart()?;
        }
    }

    /// Takes apart what was read. What is not in chunks is passed on as it is.
    fn take_apart(&mut self) -> Result<(), Broken> {
        let mut data = std::mem::take(&mut self.ahead);
        let seen = if self.is_chunked {
            let mut content = Vec::with_capacity(data.len());
            let seen = self.body.decode(&data, &mut content).map_err(|_| Broken::Exchange)?;
            self.part = content.into();
            data.advance(seen.used);
            seen
        } else {
            let seen = self.body.scan(&data).map_err(|_| Broken::Exchange)?;
            self.part = data.split_to(seen.used);
            seen
        };
        self.ahead = data;
        if seen.done {
            let trailer = self.body.take_trailer();
            self.last = Some(match trailers_to_h2(&trailer) {
                fields if fields.is_empty() => Last::End,
                fields => Last::Trailers(fields),
            });
        }
        Ok(())
    }

    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        self.stream.reserve_capacity(self.part.len());
        if self.stream.capacity() == 0 {
            match ready!(self.stream.poll_capacity(cx)) {
                Some(capacity) => {
                    if capacity? == 0 {
                        return Poll::Pending;
                    }
                }
                // It was reset; whoever waits for the response reads why.
                None => return Poll::Ready(Err(Broken::Stream(Reason::CANCEL.into()))),
            }
        }
        let n = self.stream.capacity().min(self.part.len());
        let part = self.part.split_to(n);
        self.sent += n as u64;
        // One frame less where the last part and the end go out together.
        let end = self.part.is_empty() && matches!(self.last, Some(Last::End));
        self.said = end;
        self.stream.send_data(part, end)?;
        Poll::Ready(Ok(()))
    }

    /// Ends the stream so that the peer cannot take what it got for whole.
    pub fn reset(&mut self, why: Reason) {
        self.stream.send_reset(why);
    }
}
