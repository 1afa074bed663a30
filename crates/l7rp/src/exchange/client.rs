//! The client's side of an exchange: its connection and what is known of it.

use std::future::poll_fn;
use std::io;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use l7rp_core::failure::Failure;
use l7rp_core::names::Nanos;

use crate::live::Door;
use crate::stream::Stream;
use crate::timer::Timer;
use crate::tls::Terminator;
use crate::worker::Buffers;

/// What is special about a connection.
#[derive(Clone, Debug, Default)]
pub struct Link {
    /// It speaks HTTP/2, and this is a stream of it.
    pub is_http2: bool,
    /// It is encrypted.
    pub is_tls: bool,
    /// By what its handshake was.
    pub tls: Option<Arc<Terminator>>,
    /// The name that the client has asked for in its TLS handshake.
    pub sni: Option<String>,
    /// Who the client is, by its certificate.
    pub identity: Option<Rc<str>>,
}

/// A client's connection.
#[derive(Debug)]
pub struct Client {
    /// To and from the client.
    pub stream: Stream,
    /// Where it came in.
    pub door: Arc<Door>,
    /// What is known of the connection; `None`: HTTP/1.1 without TLS.
    pub link: Option<Rc<Link>>,
    /// The one timer of the connection and of what is done for it.
    pub timer: Timer,
    /// Address of the peer; `None` on a Unix-domain socket.
    pub peer: Option<IpAddr>,
    /// The same, as text.
    pub peer_text: Rc<str>,
    /// Octets that arrived while a request was in progress and belong to the next one.
    pub ahead: Vec<u8>,
    /// The client has ended its side.
    pub ended: bool,
    /// When it began to have nothing to say, and whether it ever had.
    pub idle_since: Nanos,
    /// A request has come in.
    pub has_spoken: bool,
}

impl Client {
    /// Ends the connection in order: with TLS that has to be said, or the client cannot tell the
    /// end from a cut.
    pub async fn close(&mut self) {
        const PATIENCE: Duration = Duration::from_secs(1);
        if let Stream::Tls(_) = self.stream {
            let shut = poll_fn(|cx| self.stream.poll_shutdown(cx));
            let _ = tokio::time::timeout(PATIENCE, shut).await;
        }
    }

    /// Whether it is a stream of some other protocol.
    pub fn is_pipe(&self) -> bool {
        matches!(self.stream, Stream::Pipe(_))
    }

    /// The scheme that it uses.
    pub fn scheme(&self) -> &'static str {
        if self.link.as_ref().is_some_and(|link| link.is_tls) { "https" } else { "http" }
    }

    /// Who it is, by its certificate.
    pub fn identity(&self) -> Option<&Rc<str>> {
        self.link.as_ref()?.identity.as_ref()
    }

    /// Whether it speaks HTTP/2.
    pub fn is_http2(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.is_http2)
    }

    /// Notices, while an upstream is waited for, what the client does: a reset ends the
    /// exchange; the end of its side does not, for it may still read the answer; the next
    /// request is kept.
    ///
    /// Never ready but with an error.
    pub fn poll_watch(&mut self, cx: &mut Context<'_>, buffers: &Buffers) -> Poll<Failure> {
        if self.ended
            && let Stream::Pipe(pipe) = &self.stream
            && pipe.poll_unread(cx).is_ready()
        {
            // The stream was reset; the end of the request before that was none of the client.
            return Poll::Ready(Failure::ClientGone);
        }
        loop {
            // One buffer is enough to notice a reset; a client that sends more has to wait.
            if self.ended
                || (self.ahead.capacity() > 0 && self.ahead.len() == self.ahead.capacity())
            {
                return Poll::Pending;
            }
            if ready!(self.stream.poll_readable(cx)).is_err() {
                return Poll::Ready(Failure::ClientGone);
            }
            if self.ahead.capacity() == 0 {
                self.ahead = buffers.small();
            }
            match ready!(self.stream.poll_fill(cx, &mut self.ahead)) {
                Ok(0) => self.ended = true,
                Ok(_) => {}
                Err(_) => return Poll::Ready(Failure::ClientGone),
            }
        }
    }

    /// Whether it has broken off in the middle of its request, as far as that can be told without
    /// reading on. Nobody is woken for that while what it has sent waits unread.
    pub fn poll_lost(&self, cx: &mut Context<'_>) -> bool {
        if let Stream::Pipe(pipe) = &self.stream {
            return pipe.poll_unread(cx).is_ready();
        }
        let _ = self.stream.poll_readable(cx);
        self.stream.has_failed()
    }

    /// Whether it has left, as far as that can be told. `whole`: all of its request has come.
    pub fn poll_gone(&mut self, cx: &mut Context<'_>, whole: bool, buffers: &Buffers) -> bool {
        if whole {
            return self.poll_watch(cx, buffers).is_ready();
        }
        // What still belongs to the body must not be taken for the next request, but a reset
        // can be told without reading.
        let _ = self.stream.poll_readable(cx);
        self.stream.has_failed()
    }

    /// Writes all of `first` and then `second` before `deadline`.
    ///
    /// # Errors
    /// The client is gone or does not read.
    pub async fn write_all(
        &mut self,
        first: &[u8],
        second: &[u8],
        deadline: Nanos,
    ) -> Result<(), Failure> {
        let mut sent = 0;
        let Self { stream, timer, .. } = self;
        poll_fn(|cx| {
            while sent < first.len() + second.len() {
                match poll_write_from(stream, cx, first, second, sent) {
                    Poll::Ready(Ok(n)) => sent += n,
                    Poll::Ready(Err(e)) => return Poll::Ready(Err(unwritable(&e))),
                    Poll::Pending => {
                        return timer.poll(cx, deadline).map(|()| Err(Failure::ClientStalled));
                    }
                }
            }
            Poll::Ready(Ok(()))
        })
        .await
    }

    /// Closes in a way that lets the client read what was sent: says that nothing follows,
    /// then takes and drops what still comes, for a while and within bounds.
    pub async fn linger(&mut self, buffers: &Buffers, until: Nanos) {
        const MOST: usize = 1 << 20;
        let mut buffer = buffers.small();
        let mut taken = 0;
        let mut shut = false;
        let Self { stream, timer, .. } = self;
        poll_fn(|cx| {
            if !shut {
                match stream.poll_shutdown(cx) {
                    Poll::Ready(Ok(())) => shut = true,
                    Poll::Ready(Err(_)) => return Poll::Ready(()),
                    Poll::Pending => return timer.poll(cx, until),
                }
            }
            loop {
                buffer.clear();
                match stream.poll_fill(cx, &mut buffer) {
                    Poll::Ready(Ok(n)) if n > 0 && taken + n <= MOST => taken += n,
                    Poll::Ready(_) => return Poll::Ready(()),
                    Poll::Pending => return timer.poll(cx, until),
                }
            }
        })
        .await;
        buffers.give(buffer);
    }
}

/// What it means that a client cannot be written to.
pub fn unwritable(e: &io::Error) -> Failure {
    match e.kind() {
        io::ErrorKind::TimedOut => Failure::ClientStalled,
        _ => Failure::ClientGone,
    }
}

/// Writes what can be written of `first` and then `second`, of which `sent` octets are out.
/// Zero octets written is an error.
pub fn poll_write_from(
    stream: &mut Stream,
    cx: &mut Context<'_>,
    first: &[u8],
    second: &[u8],
    sent: usize,
) -> Poll<io::Result<usize>> {
    let of_first = sent.min(first.len());
    let of_second = sent - of_first;
    match ready!(stream.poll_write(cx, &first[of_first..], &second[of_second..])) {
        Ok(0) => Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
        other => Poll::Ready(other),
    }
}
