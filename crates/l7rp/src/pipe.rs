//! A connection within a thread: two ends, each of which reads what the other has written. An
//! exchange speaks HTTP/1.1 over one end; whoever has the other turns that into the frames of
//! another protocol, and back.

use std::io;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use crate::sync::lock;

/// Octets that wait in one direction at most: a writer that is ahead by more has to wait, and so
/// has whoever writes to it.
const CAPACITY: usize = 16 << 10;

/// One end. When it is dropped the other reads the end: in order from the exchange's side, as of a
/// connection, and as a reset from the far side, where being dropped means that a stream is gone.
#[derive(Debug)]
pub struct Pipe {
    incoming: Arc<Mutex<Flow>>,
    outgoing: Arc<Mutex<Flow>>,
    is_far: bool,
}

/// One direction.
#[derive(Debug, Default)]
struct Flow {
    buf: Vec<u8>,
    /// How much of `buf` has been read.
    at: usize,
    /// The writer has nothing more to say.
    ended: bool,
    /// Why there will be nothing more, if that is no end.
    broken: Option<io::ErrorKind>,
    /// The reader is gone, and this is what the writer is told.
    unread: Option<io::ErrorKind>,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Flow {
    fn wait(slot: &mut Option<Waker>, cx: &Context<'_>) {
        match slot {
            Some(waker) => waker.clone_from(cx.waker()),
            None => *slot = Some(cx.waker().clone()),
        }
    }

    fn is_empty(&self) -> bool {
        self.at == self.buf.len()
    }

    /// The end, if it is known and nothing comes before it.
    fn end(&self) -> Option<io::Result<()>> {
        match self.broken {
            _ if !self.is_empty() => None,
            Some(kind) => Some(Err(kind.into())),
            None => self.ended.then_some(Ok(())),
        }
    }

    fn wake(slot: &mut Option<Waker>) {
        if let Some(waker) = slot.take() {
            waker.wake();
        }
    }
}

impl Pipe {
    /// The two ends of one: the exchange's and the far one.
    pub fn pair() -> (Self, Self) {
        let [one, other] = std::array::from_fn(|_| Arc::<Mutex<Flow>>::default());
        (
            Self { incoming: one.clone(), outgoing: other.clone(), is_far: false },
            Self { incoming: other, outgoing: one, is_far: true },
        )
    }

    /// Ready when there is something to read, the end and an error included.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut flow = lock(&self.incoming);
        if !flow.is_empty() {
            return Poll::Ready(Ok(()));
        }
        if let Some(end) = flow.end() {
            return Poll::Ready(end);
        }
        Flow::wait(&mut flow.reader, cx);
        Poll::Pending
    }

    /// Appends what has been written to `buf`, into its spare capacity; a full one grows, and one
    /// without any is exchanged for what was written. `Ok(0)`: the end.
    pub fn poll_fill(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut Vec<u8>,
    ) -> Poll<io::Result<usize>> {
        let mut flow = lock(&self.incoming);
        if flow.is_empty() {
            if let Some(end) = flow.end() {
                return Poll::Ready(end.map(|()| 0));
            }
            Flow::wait(&mut flow.reader, cx);
            return Poll::Pending;
        }
        if buf.capacity() == 0 && flow.at == 0 {
            std::mem::swap(buf, &mut flow.buf);
            Flow::wake(&mut flow.writer);
            return Poll::Ready(Ok(buf.len()));
        }
        if buf.len() == buf.capacity() {
            buf.reserve(flow.buf.len() - flow.at);
        }
        let n = (flow.buf.len() - flow.at).min(buf.capacity() - buf.len());
        buf.extend_from_slice(&flow.buf[flow.at..flow.at + n]);
        flow.at += n;
        if flow.is_empty() {
            flow.buf.clear();
            flow.at = 0;
        }
        Flow::wake(&mut flow.writer);
        Poll::Ready(Ok(n))
    }

    /// Writes what there is room for of `first` and then `second`.
    pub fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        first: &[u8],
        second: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut flow = lock(&self.outgoing);
        if let Some(why) = flow.unread {
            return Poll::Ready(Err(why.into()));
        }
        if flow.ended || flow.broken.is_some() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let room = CAPACITY.saturating_sub(flow.buf.len() - flow.at);
        if room == 0 {
            Flow::wait(&mut flow.writer, cx);
            return Poll::Pending;
        }
        if flow.at > 0 && flow.buf.len() + first.len() + second.len() > CAPACITY {
            let read = std::mem::take(&mut flow.at);
            flow.buf.drain(..read);
        }
        let of_first = room.min(first.len());
        let of_second = (room - of_first).min(second.len());
        flow.buf.extend_from_slice(&first[..of_first]);
        flow.buf.extend_from_slice(&second[..of_second]);
        Flow::wake(&mut flow.reader);
        Poll::Ready(Ok(of_first + of_second))
    }

    /// Writes all of `message` at once, the first of what is written; nothing of it is copied.
    pub fn begin_with(&mut self, message: Vec<u8>) {
        let mut flow = lock(&self.outgoing);
        debug_assert!(flow.buf.is_empty(), "something was written before");
        flow.buf = message;
        Flow::wake(&mut flow.reader);
    }

    /// Nothing more will be written.
    pub fn shut(&mut self) {
        let mut flow = lock(&self.outgoing);
        flow.ended = true;
        Flow::wake(&mut flow.reader);
    }

    /// The other end reads an error once it has read what was written before.
    pub fn break_off(&self, why: io::ErrorKind) {
        let mut flow = lock(&self.outgoing);
        flow.broken = Some(why);
        Flow::wake(&mut flow.reader);
    }

    /// Nothing more will be read; this is what the other end is told that writes.
    pub fn give_up(&self, why: io::ErrorKind) {
        let mut flow = lock(&self.incoming);
        flow.unread = Some(why);
        Flow::wake(&mut flow.writer);
    }

    /// Ready when the other end does not read any more.
    pub fn poll_unread(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut flow = lock(&self.outgoing);
        if flow.unread.is_some() {
            return Poll::Ready(());
        }
        Flow::wait(&mut flow.writer, cx);
        Poll::Pending
    }

    /// Whether there is something to be read, and it is neither end nor error.
    pub fn has_arrived(&self) -> bool {
        !lock(&self.incoming).is_empty()
    }

    /// Whether nothing has come, not even the end.
    pub fn is_quiet(&self) -> bool {
        let flow = lock(&self.incoming);
        flow.is_empty() && flow.end().is_none()
    }

    /// Whether the other end has been dropped or has broken off.
    pub fn has_failed(&self) -> bool {
        lock(&self.outgoing).unread.is_some() || lock(&self.incoming).broken.is_some()
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        let mut outgoing = lock(&self.outgoing);
        outgoing.ended = true;
        if self.is_far && outgoing.broken.is_none() {
            outgoing.broken = Some(io::ErrorKind::ConnectionReset);
        }
        Flow::wake(&mut outgoing.reader);
        drop(outgoing);
        let mut incoming = lock(&self.incoming);
        incoming.unread.get_or_insert(io::ErrorKind::BrokenPipe);
        incoming.buf = Vec::new();
        incoming.at = 0;
        Flow::wake(&mut incoming.writer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::task::Wake;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    fn with<T>(work: impl FnOnce(&mut Context<'_>, &Woken) -> T) -> T {
        let woken = Arc::<Woken>::default();
        let waker = Waker::from(woken.clone());
        work(&mut Context::from_waker(&waker), &woken)
    }

    fn read(pipe: &mut Pipe, cx: &mut Context<'_>) -> Poll<Result<Vec<u8>, io::ErrorKind>> {
        let mut buf = Vec::with_capacity(16);
        pipe.poll_fill(cx, &mut buf).map(|n| match n {
            Ok(n) => {
                assert_eq!(n, buf.len());
                Ok(buf)
            }
            Err(e) => Err(e.kind()),
        })
    }

    #[test]
    fn what_one_writes_the_other_reads() {
        with(|cx, woken| {
            let (mut a, mut b) = Pipe::pair();
            assert!(read(&mut b, cx).is_pending() && b.is_quiet());
            assert!(matches!(a.poll_write(cx, b"one ", b"two"), Poll::Ready(Ok(7))));
            assert_eq!(woken.0.load(SeqCst), 1);
            assert!(b.has_arrived() && !b.is_quiet() && b.poll_readable(cx).is_ready());
            assert_eq!(read(&mut b, cx), Poll::Ready(Ok(b"one two".to_vec())));
            a.shut();
            assert_eq!(read(&mut b, cx), Poll::Ready(Ok(vec![])));
            assert!(matches!(b.poll_write(cx, b"", b"back"), Poll::Ready(Ok(4))));
            assert_eq!(read(&mut a, cx), Poll::Ready(Ok(b"back".to_vec())));
        });
    }

    #[test]
    fn what_is_handed_over_is_not_copied() {
        with(|cx, woken| {
            let (mut a, mut b) = Pipe::pair();
            let message = b"the head".to_vec();
            let place = message.as_ptr();
            b.begin_with(message);
            assert!(a.has_arrived());
            let mut buf = Vec::new();
            assert!(matches!(a.poll_fill(cx, &mut buf), Poll::Ready(Ok(8))));
            assert_eq!((&buf[..], buf.as_ptr()), (&b"the head"[..], place));
            assert!(a.is_quiet() && a.poll_readable(cx).is_pending());
            assert!(matches!(b.poll_write(cx, b"what ", b"follows"), Poll::Ready(Ok(12))));
            assert_eq!(woken.0.load(SeqCst), 1);
            // Of what has been read in part, the rest.
            let mut part = Vec::with_capacity(5);
            assert!(matches!(a.poll_fill(cx, &mut part), Poll::Ready(Ok(5))));
            let mut rest = Vec::new();
            assert!(matches!(a.poll_fill(cx, &mut rest), Poll::Ready(Ok(7))));
            assert_eq!((&part[..], &rest[..]), (&b"what "[..], &b"follows"[..]));
            b.shut();
            assert!(matches!(a.poll_fill(cx, &mut Vec::new()), Poll::Ready(Ok(0))));
        });
    }

    #[test]
    fn a_writer_waits_for_its_reader() {
        with(|cx, woken| {
            let (mut a, mut b) = Pipe::pair();
            let much = vec![b'x'; CAPACITY];
            assert!(matches!(a.poll_write(cx, b"y", &much), Poll::Ready(Ok(CAPACITY))));
            assert!(a.poll_write(cx, b"z", b"").is_pending());
            let mut total = 0;
            while let Poll::Ready(Ok(some)) = read(&mut b, cx) {
                total += some.len();
                assert!(lock(&b.incoming).buf.len() <= CAPACITY);
            }
            assert_eq!(total, CAPACITY);
            assert!(woken.0.load(SeqCst) >= 1);
            assert!(matches!(a.poll_write(cx, b"z", b""), Poll::Ready(Ok(1))));
        });
    }

    #[test]
    fn an_end_comes_after_what_was_written() {
        with(|cx, _| {
            let (mut a, mut b) = Pipe::pair();
            assert!(a.poll_write(cx, b"last", b"").is_ready());
            drop(a);
            assert_eq!(read(&mut b, cx), Poll::Ready(Ok(b"last".to_vec())));
            assert_eq!(read(&mut b, cx), Poll::Ready(Ok(vec![])));
            assert!(matches!(b.poll_write(cx, b"x", b""), Poll::Ready(Err(_))) && b.has_failed());
        });
    }

    #[test]
    fn the_far_end_that_is_gone_has_reset_it() {
        with(|cx, _| {
            let (mut b, mut a) = Pipe::pair();
            a.shut();
            assert!(b.poll_unread(cx).is_pending());
            drop(a);
            assert!(b.poll_unread(cx).is_ready());
            assert_eq!(read(&mut b, cx), Poll::Ready(Err(io::ErrorKind::ConnectionReset)));
            let (a, mut b) = Pipe::pair();
            a.break_off(io::ErrorKind::TimedOut);
            drop(a);
            assert_eq!(read(&mut b, cx), Poll::Ready(Err(io::ErrorKind::TimedOut)));
        });
    }
}
