//! A client's connection, as the library reads and writes it; its frames are counted.

use std::cell::Cell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::clock::Clock;
use crate::http2::PREFACE;
use crate::http2::meter::{Flood, Meter};
use crate::live::Listener;
use crate::stream::Stream;

/// A client's connection.
pub(super) struct Wire {
    stream: Stream,
    /// What was read before the library was asked.
    ahead: Vec<u8>,
    meter: Meter,
    flood: Rc<Cell<Option<Flood>>>,
    clock: Clock,
}

impl Wire {
    /// `ahead`: what was read of it before. `flood`: where it is told that a peer floods.
    pub(super) fn new(
        stream: Stream,
        ahead: Vec<u8>,
        listener: &Listener,
        clock: Clock,
        flood: &Rc<Cell<Option<Flood>>>,
    ) -> Self {
        let meter = Meter::new(PREFACE.len(), listener.limits.max_head, clock.now());
        Self { stream, ahead, meter, flood: flood.clone(), clock }
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.flood.get().is_some() {
            // Nothing more is taken in; what is to be said about it can still go out.
            return Poll::Pending;
        }
        let before = buf.filled().len();
        if this.ahead.is_empty() {
            ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        } else {
            let n = this.ahead.len().min(buf.remaining());
            buf.put_slice(&this.ahead[..n]);
            this.ahead.drain(..n);
        }
        let now = this.clock.now();
        if let Some(flood) = this.meter.read(&buf.filled()[before..], now) {
            this.flood.set(Some(flood));
            cx.waker().wake_by_ref();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let n = ready!(Pin::new(&mut this.stream).poll_write_vectored(cx, bufs))?;
        let mut left = n;
        for buf in bufs {
            let part = &buf[..left.min(buf.len())];
            left -= part.len();
            if let Some(flood) = this.meter.sent(part) {
                this.flood.set(Some(flood));
                cx.waker().wake_by_ref();
            }
        }
        Poll::Ready(Ok(n))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_shutdown(Pin::new(&mut self.get_mut().stream), cx)
    }
}
