//! One connection: requests in, answers out, in order.
//!
//! There is one buffer in each direction. Bodies pass through them and are never stored;
//! answers to pipelined requests are gathered and leave when the connection has to wait.

use std::io::{self, Write};
use std::rc::Rc;
use std::time::Duration;

use l7rp_core::failure::Failure;
use l7rp_core::http1::body::Body;
use l7rp_core::http1::request::{Method, Request, parse_request};
use l7rp_core::http1::{Framing, Limits};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::Shared;
use super::answer::{Answer, Content, choose, has_body, has_content, phrase};
use super::faults::Ending;

/// Wider than a proxy's own limits, since a proxy adds fields to what it has let through.
const LIMITS: Limits = Limits { max_head: 128 * 1024, max_fields: 256, max_target: 32 * 1024 };
const MAX_TRAILER: usize = 16 * 1024;
/// What the input buffer has room for, unless a head needs more.
const INPUT: usize = 16 * 1024;
/// What the output gathers at most.
const OUTPUT: usize = 16 * 1024;
/// How long a closed connection waits for the peer to read what it was sent.
const LINGER: Duration = Duration::from_secs(1);

/// The pattern of generated bodies: octet `i` is the last hexadecimal digit of `i`.
static PATTERN: [u8; 64 * 1024] = {
    let mut pattern = [0; 64 * 1024];
    let mut i = 0;
    while i < pattern.len() {
        pattern[i] = b"0123456789abcdef"[i % 16];
        i += 1;
    }
    pattern
};

/// Serves a connection to its end.
pub(super) async fn serve(stream: TcpStream, shared: Rc<Shared>) {
    // Best effort: without it, answers are only later.
    let _ = stream.set_nodelay(true);
    let mut connection =
        Connection { stream, input: Vec::with_capacity(INPUT), at: 0, output: Vec::new() };
    // An error means that the peer is gone; there is nobody to tell.
    let _ = connection.run(&shared).await;
}

struct Connection {
    stream: TcpStream,
    input: Vec<u8>,
    /// Octets of `input` that have been dealt with.
    at: usize,
    output: Vec<u8>,
}

/// What reading a head led to.
enum Read {
    /// A head of this many octets.
    Head(usize),
    /// The peer has ended its side.
    End,
    /// Something that is not a request.
    Refused(Failure),
}

/// What of a request is needed after its head has left the buffer.
#[derive(Clone, Copy)]
struct Asked {
    method: Method,
    is_http10: bool,
    keep_alive: bool,
    framing: Framing,
    expects_continue: bool,
}

/// How the octets of a body are let go.
struct Pace {
    drip: Duration,
    /// How many may still go.
    left: u64,
}

impl Connection {
    async fn run(&mut self, shared: &Shared) -> io::Result<()> {
        let mut head = Request::default();
        loop {
            let len = match self.read_head(&mut head).await? {
                Read::Head(len) => len,
                Read::End => return Ok(()),
                Read::Refused(failure) => return self.refuse(failure, shared).await,
            };
            let answer = choose(&self.input[self.at..], &head, shared);
            let ends_by_closing = answer.ending == Ending::DropMid
                // HTTP/1.0 knows no chunks: the end of the connection is the end of the body.
                || head.is_http10 && matches!(answer.content, Content::Chunked { .. });
            let asked = Asked {
                method: head.method,
                is_http10: head.is_http10,
                keep_alive: head.keep_alive && !ends_by_closing,
                framing: head.framing,
                expects_continue: head.expects_continue,
            };
            self.at += len;
            let body_length = match self.discard_body(&asked).await? {
                Ok(length) => length,
                Err(failure) => return self.refuse(failure, shared).await,
            };
            if !answer.wait.is_zero() {
                self.flush().await?;
                sleep(answer.wait).await;
            }
            match answer.ending {
                Ending::Hang => return self.hang().await,
                Ending::Close => return self.flush().await,
                Ending::Answer | Ending::DropMid => {}
            }
            self.send(answer, &asked, body_length, &shared.options.name).await?;
            if !asked.keep_alive {
                return self.end().await;
            }
        }
    }

    async fn read_head(&mut self, head: &mut Request) -> io::Result<Read> {
        loop {
            let rest = &self.input[self.at..];
            if !rest.is_empty() {
                match parse_request(rest, head, LIMITS) {
                    Ok(Some(len)) => return Ok(Read::Head(len)),
                    Ok(None) => {}
                    Err(failure) => return Ok(Read::Refused(failure)),
                }
            }
            if self.fill().await? == 0 {
                return Ok(Read::End);
            }
        }
    }

    /// Reads and counts the body of a request. The inner error: it is malformed.
    async fn discard_body(&mut self, asked: &Asked) -> io::Result<Result<u64, Failure>> {
        let mut body = Body::new(asked.framing, MAX_TRAILER);
        if asked.expects_continue && !body.is_done() && self.at == self.input.len() {
            self.output.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
        }
        while !body.is_done() {
            if self.at == self.input.len() && self.fill().await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            match body.scan(&self.input[self.at..]) {
                Ok(seen) => self.at += seen.used,
                Err(malformed) => return Ok(Err(Failure::BadRequest(malformed))),
            }
        }
        Ok(Ok(body.content()))
    }

    /// Reads more. What was answered leaves first: the peer may wait for it.
    async fn fill(&mut self) -> io::Result<usize> {
        self.flush().await?;
        self.input.drain(..self.at);
        self.at = 0;
        if self.input.is_empty() {
            // A long head is rare, and the next request most likely a short one.
            self.input.shrink_to(INPUT);
        }
        // The parser refuses a head before the buffer can grow past its limit by much.
        self.input.reserve(1);
        self.stream.read_buf(&mut self.input).await
    }

    async fn flush(&mut self) -> io::Result<()> {
        if !self.output.is_empty() {
            self.stream.write_all(&self.output).await?;
            self.output.clear();
        }
        Ok(())
    }

    async fn send(
        &mut self,
        answer: Answer,
        asked: &Asked,
        body_length: u64,
        name: &str,
    ) -> io::Result<()> {
        let content = match answer.content {
            Content::Measured(mut text) => {
                // Writing into memory does not fail.
                let _ = writeln!(text, "body={body_length}");
                Content::Text(text)
            }
            other => other,
        };
        write_head(&mut self.output, answer.status, &content, asked, name);
        if !has_body(answer.status, asked.method) {
            return Ok(());
        }
        let n = match &content {
            Content::Text(text) | Content::Measured(text) => text.len() as u64,
            Content::Bytes(n) | Content::Chunked { n, .. } => *n,
        };
        let left = if answer.ending == Ending::DropMid { n / 2 } else { u64::MAX };
        let mut pace = Pace { drip: answer.drip, left };
        match content {
            Content::Text(text) | Content::Measured(text) => self.put(&text, &mut pace).await,
            Content::Chunked { n, chunk } if !asked.is_http10 => {
                self.put_chunks(n, chunk, &mut pace).await
            }
            Content::Bytes(n) | Content::Chunked { n, .. } => {
                self.put_pattern(0, n, &mut pace).await
            }
        }
    }

    async fn put_chunks(&mut self, n: u64, chunk: u64, pace: &mut Pace) -> io::Result<()> {
        let mut sent = 0;
        while sent < n && pace.left > 0 {
            let size = chunk.min(n - sent);
            self.put(format!("{size:x}\r\n").as_bytes(), pace).await?;
            self.put_pattern(sent, size, pace).await?;
            self.put(b"\r\n", pace).await?;
            sent += size;
        }
        self.put(b"0\r\n\r\n", pace).await
    }

    /// Sends `n` octets of the pattern, from octet `from` on.
    async fn put_pattern(&mut self, from: u64, n: u64, pace: &mut Pace) -> io::Result<()> {
        let mut left = n;
        while left > 0 && pace.left > 0 {
            let start = ((from + (n - left)) % 16) as usize;
            let part = &PATTERN[start..];
            let part = &part[..usize::try_from(left).unwrap_or(usize::MAX).min(part.len())];
            self.put(part, pace).await?;
            left -= part.len() as u64;
        }
        Ok(())
    }

    /// Sends octets at the pace that is left to them.
    async fn put(&mut self, octets: &[u8], pace: &mut Pace) -> io::Result<()> {
        let n = usize::try_from(pace.left).unwrap_or(usize::MAX).min(octets.len());
        let octets = &octets[..n];
        pace.left -= n as u64;
        if !pace.drip.is_zero() {
            for &octet in octets {
                self.flush().await?;
                sleep(pace.drip).await;
                self.output.push(octet);
            }
            return self.flush().await;
        }
        if self.output.len() + n <= OUTPUT {
            self.output.extend_from_slice(octets);
            return Ok(());
        }
        self.flush().await?;
        self.stream.write_all(octets).await
    }

    /// Says why what came is not a request, and closes: where the next one would begin is not
    /// known.
    async fn refuse(&mut self, failure: Failure, shared: &Shared) -> io::Result<()> {
        let meaning = failure.meaning();
        let answer = Answer::text(meaning.status, format!("{}\n", meaning.text));
        let asked = Asked {
            method: Method::Other,
            is_http10: false,
            keep_alive: false,
            framing: Framing::None,
            expects_continue: false,
        };
        self.send(answer, &asked, 0, &shared.options.name).await?;
        self.end().await
    }

    /// Never answers. Ends when the peer has had enough.
    async fn hang(&mut self) -> io::Result<()> {
        while self.fill().await? > 0 {
            self.at = self.input.len();
        }
        Ok(())
    }

    /// Closes so that the peer gets what was sent: a socket closed with something unread in it
    /// is reset, and takes with it what is still on its way.
    async fn end(&mut self) -> io::Result<()> {
        self.flush().await?;
        self.stream.shutdown().await?;
        // Whatever comes of it, the connection is closed afterwards.
        let _ = timeout(LINGER, self.hang()).await;
        Ok(())
    }
}

fn write_head(out: &mut Vec<u8>, status: u16, content: &Content, asked: &Asked, name: &str) {
    // Writing into memory does not fail.
    let _ = write!(out, "HTTP/1.1 {status} {}\r\nX-Backend: {name}\r\n", phrase(status));
    if has_content(status) {
        let (kind, length) = match content {
            Content::Text(text) | Content::Measured(text) => {
                ("text/plain; charset=utf-8", Some(text.len() as u64))
            }
            Content::Bytes(n) => ("application/octet-stream", Some(*n)),
            Content::Chunked { .. } => ("application/octet-stream", None),
        };
        let _ = write!(out, "Content-Type: {kind}\r\n");
        match length {
            Some(length) => {
                let _ = write!(out, "Content-Length: {length}\r\n");
            }
            None if asked.is_http10 => {}
            None => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
        }
    } else if status == 205 {
        // Unlike 204 and 304 it does not say by itself that nothing follows.
        out.extend_from_slice(b"Content-Length: 0\r\n");
    }
    if !asked.keep_alive {
        out.extend_from_slice(b"Connection: close\r\n");
    } else if asked.is_http10 {
        out.extend_from_slice(b"Connection: keep-alive\r\n");
    }
    out.extend_from_slice(b"\r\n");
}
