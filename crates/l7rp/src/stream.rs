//! A byte stream to a client or an upstream: one closed set of kinds, so that the engine
//! above needs no generic and no box.

use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// A connected stream.
#[derive(Debug)]
pub enum Stream {
    /// TCP.
    Tcp(TcpStream),
    /// Unix-domain.
    Unix(UnixStream),
}

impl Stream {
    /// Ready when there is something to read: octets, the end, or an error. Costs no system
    /// call while nothing has arrived.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(s) => s.poll_read_ready(cx),
            Self::Unix(s) => s.poll_read_ready(cx),
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
        }
    }

    /// Writes what can be written at once of `first` and then `second`.
    pub fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        first: &[u8],
        second: &[u8],
    ) -> Poll<io::Result<usize>> {
        let stream: Pin<&mut (dyn AsyncWrite + Unpin)> = match self {
            Self::Tcp(s) => Pin::new(s),
            Self::Unix(s) => Pin::new(s),
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
        }
    }

    /// Whether an idle stream can still be used: nothing has arrived, not even the end. Costs
    /// a system call only if the kernel has already told of something.
    pub fn is_quiet(&self) -> bool {
        let mut octet = [0u8; 1];
        let result = match self {
            Self::Tcp(s) => s.try_read(&mut octet),
            Self::Unix(s) => s.try_read(&mut octet),
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
        };
        matches!(result, Ok(n) if n > 0)
    }

    /// Whether the connection has failed, by a reset for example, since this was last asked.
    pub fn has_failed(&self) -> bool {
        let result = match self {
            Self::Tcp(s) => s.take_error(),
            Self::Unix(s) => s.take_error(),
        };
        !matches!(result, Ok(None))
    }

    /// Writes what can be written at once, and forgets the rest.
    pub fn try_say(&self, words: &[u8]) {
        let _ = match self {
            Self::Tcp(s) => s.try_write(words),
            Self::Unix(s) => s.try_write(words),
        };
    }

    /// Makes closing this stream a reset, so that the peer cannot take what it got for whole.
    pub fn reset_on_close(&self) {
        if let Self::Tcp(s) = self {
            // Best effort: on a socket that is already dead there is nothing to reset.
            let _ = SockRef::from(s).set_linger(Some(std::time::Duration::ZERO));
        }
    }
}
