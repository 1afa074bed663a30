//! A byte stream to a client or an upstream: one closed set of kinds, so that the engine
//! above needs no generic and no box.

use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsStream;

use crate::pipe::Pipe;

/// A connected stream.
#[derive(Debug)]
pub enum Stream {
    /// TCP.
    Tcp(TcpStream),
    /// Unix-domain.
    Unix(UnixStream),
    /// TLS over TCP, as server or as client.
    Tls(Box<Tls>),
    /// To a task that speaks another protocol.
    Pipe(Pipe),
}

/// TLS over TCP.
#[derive(Debug)]
pub struct Tls {
    stream: TlsStream<TcpStream>,
    /// Octets that TLS has taken, of which the last are not out yet. The caller was told nothing
    /// of them so far.
    taken: usize,
}

impl Tls {
    /// A stream whose handshake is over.
    pub fn new(stream: impl Into<TlsStream<TcpStream>>) -> Self {
        Self { stream: stream.into(), taken: 0 }
    }

    /// The stream itself.
    pub fn get_ref(&self) -> &TlsStream<TcpStream> {
        &self.stream
    }

    fn tcp(&self) -> &TcpStream {
        match &self.stream {
            TlsStream::Client(s) => s.get_ref().0,
            TlsStream::Server(s) => s.get_ref().0,
        }
    }

    /// Whether octets of the peer have been decrypted and not been read.
    fn has_plain(&self) -> bool {
        match &self.stream {
            TlsStream::Client(s) => has_plain(s.get_ref().1),
            TlsStream::Server(s) => has_plain(s.get_ref().1),
        }
    }

    /// Ready when all that is told to be written is in the kernel: there is nobody who would see
    /// to the rest later.
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        first: &[u8],
        second: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.taken == 0 {
            let mut stream = Pin::new(&mut self.stream);
            for part in [first, second] {
                let mut at = 0;
                while at < part.len() {
                    match stream.as_mut().poll_write(cx, &part[at..]) {
                        Poll::Ready(Ok(n)) if n > 0 => {
                            at += n;
                            self.taken += n;
                        }
                        Poll::Ready(Ok(_)) => return Poll::Ready(Ok(0)),
                        Poll::Ready(Err(e)) => return Poll::Ready(Err(e)),
                        Poll::Pending if self.taken == 0 => return Poll::Pending,
                        Poll::Pending => break,
                    }
                }
                if at < part.len() {
                    break;
                }
            }
        }
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        Poll::Ready(Ok(std::mem::take(&mut self.taken)))
    }
}

fn has_plain<D>(connection: &rustls::ConnectionCommon<D>) -> bool {
    !connection.wants_read()
}

impl Stream {
    fn tcp(&self) -> Option<&TcpStream> {
        match self {
            Self::Tcp(s) => Some(s),
            Self::Tls(s) => Some(s.tcp()),
            Self::Unix(_) | Self::Pipe(_) => None,
        }
    }

    /// Ready when there is something to read: octets, the end, or an error. Costs no system
    /// call while nothing has arrived. With TLS it may turn out to be nothing.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(s) => s.poll_read_ready(cx),
            Self::Unix(s) => s.poll_read_ready(cx),
            Self::Tls(s) if s.has_plain() => Poll::Ready(Ok(())),
            Self::Tls(s) => s.tcp().poll_read_ready(cx),
            Self::Pipe(s) => s.poll_readable(cx),
        }
    }

    /// Appends what can be read at once to `buf`, into its spare capacity; a full one grows.
    /// `Ok(0)`: the peer has ended its side.
    pub fn poll_fill(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut Vec<u8>,
    ) -> Poll<io::Result<usize>> {
        match self {
            Self::Tcp(s) => pin!(s.read_buf(buf)).poll(cx),
            Self::Unix(s) => pin!(s.read_buf(buf)).poll(cx),
            Self::Tls(s) => pin!(s.stream.read_buf(buf)).poll(cx),
            Self::Pipe(s) => s.poll_fill(cx, buf),
        }
    }

    /// Writes what can be written at once of `first` and then `second`. After `Pending` it has to
    /// be called again with what begins with the same octets.
    pub fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        first: &[u8],
        second: &[u8],
    ) -> Poll<io::Result<usize>> {
        let stream: Pin<&mut (dyn AsyncWrite + Unpin)> = match self {
            Self::Tcp(s) => Pin::new(s),
            Self::Unix(s) => Pin::new(s),
            Self::Tls(s) => return s.poll_write(cx, first, second),
            Self::Pipe(s) => return s.poll_write(cx, first, second),
        };
        match (first.is_empty(), second.is_empty()) {
            (false, true) => stream.poll_write(cx, first),
            (true, _) => stream.poll_write(cx, second),
            (false, false) => {
                stream.poll_write_vectored(cx, &[IoSlice::new(first), IoSlice::new(second)])
            }
        }
    }

    /// Says to the peer that nothing more will be sent.
    pub fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(s) => Pin::new(s).poll_shutdown(cx),
            Self::Unix(s) => Pin::new(s).poll_shutdown(cx),
            Self::Tls(s) => Pin::new(&mut s.stream).poll_shutdown(cx),
            Self::Pipe(s) => {
                s.shut();
                Poll::Ready(Ok(()))
            }
        }
    }

    /// Whether an idle stream can still be used: nothing has arrived, not even the end. Costs
    /// a system call only if the kernel has already told of something.
    pub fn is_quiet(&self) -> bool {
        let mut octet = [0u8; 1];
        let result = match self {
            Self::Tcp(s) => s.try_read(&mut octet),
            Self::Unix(s) => s.try_read(&mut octet),
            // What has come may be a part of a record, which must not be taken out.
            Self::Tls(s) => {
                let tcp = s.tcp();
                let peek = || SockRef::from(tcp).peek(&mut [std::mem::MaybeUninit::uninit()]);
                let nothing = tcp.try_io(Interest::READABLE, peek);
                return !s.has_plain()
                    && matches!(nothing, Err(e) if e.kind() == io::ErrorKind::WouldBlock);
            }
            Self::Pipe(s) => return s.is_quiet(),
        };
        matches!(result, Err(e) if e.kind() == io::ErrorKind::WouldBlock)
    }

    /// Whether the kernel has octets to be read, asked of the kernel itself: what the runtime
    /// knows may be older.
    pub fn has_arrived(&self) -> bool {
        let mut octet = [std::mem::MaybeUninit::uninit()];
        let result = match self {
            Self::Tcp(s) => SockRef::from(s).peek(&mut octet),
            Self::Unix(s) => SockRef::from(s).peek(&mut octet),
            Self::Tls(s) if s.has_plain() => return true,
            Self::Tls(s) => SockRef::from(s.tcp()).peek(&mut octet),
            Self::Pipe(s) => return s.has_arrived(),
        };
        matches!(result, Ok(n) if n > 0)
    }

    /// Whether the connection has failed, by a reset for example, since this was last asked.
    pub fn has_failed(&self) -> bool {
        let result = match self {
            Self::Tcp(s) => s.take_error(),
            Self::Unix(s) => s.take_error(),
            Self::Tls(s) => s.tcp().take_error(),
            Self::Pipe(s) => return s.has_failed(),
        };
        !matches!(result, Ok(None))
    }

    /// Writes what can be written at once, and forgets the rest. Not on TLS.
    pub fn try_say(&self, words: &[u8]) {
        let _ = match self {
            Self::Tcp(s) => s.try_write(words),
            Self::Unix(s) => s.try_write(words),
            Self::Tls(_) | Self::Pipe(_) => return,
        };
    }

    /// Makes closing this stream a reset, so that the peer cannot take what it got for whole.
    pub fn reset_on_close(&self) {
        if let Some(s) = self.tcp() {
            // Best effort: on a socket that is already dead there is nothing to reset.
            let _ = SockRef::from(s).set_linger(Some(std::time::Duration::ZERO));
        }
        if let Self::Pipe(s) = self {
            s.break_off(io::ErrorKind::ConnectionReset);
        }
    }
}

/// For libraries that drive a stream themselves. What they write they also flush.
impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(s) => Pin::new(s).poll_read(cx, buf),
            Self::Unix(s) => Pin::new(s).poll_read(cx, buf),
            Self::Tls(s) => Pin::new(&mut s.stream).poll_read(cx, buf),
            Self::Pipe(s) => {
                let mut part = Vec::with_capacity(buf.remaining().min(16 << 10));
                ready!(s.poll_fill(cx, &mut part))?;
                buf.put_slice(&part);
                Poll::Ready(Ok(()))
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(s) => Pin::new(s).poll_write(cx, buf),
            Self::Unix(s) => Pin::new(s).poll_write(cx, buf),
            Self::Tls(s) => Pin::new(&mut s.stream).poll_write(cx, buf),
            Self::Pipe(s) => s.poll_write(cx, buf, &[]),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(s) => Pin::new(s).poll_write_vectored(cx, bufs),
            Self::Unix(s) => Pin::new(s).poll_write_vectored(cx, bufs),
            Self::Tls(s) => Pin::new(&mut s.stream).poll_write_vectored(cx, bufs),
            Self::Pipe(s) => s.poll_write(cx, bufs.first().map_or(&[], |first| first), &[]),
        }
    }

    fn is_write_vectored(&self) -> bool {
        !matches!(self, Self::Pipe(_))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tls(s) => Pin::new(&mut s.stream).poll_flush(cx),
            Self::Tcp(_) | Self::Unix(_) | Self::Pipe(_) => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Self::poll_shutdown(self.get_mut(), cx)
    }
}
