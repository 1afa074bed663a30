//! The log writer: a thread that owns standard output, so that a slow reader of it never
//! holds up a request. Lines that find no room are dropped and counted.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::nice;

/// What a pipe takes as a whole.
const PIPE_BUF: usize = 4096;
/// Chunks that wait at most.
const QUEUE: usize = 256;
/// Octets that wait at most, in all chunks together.
const MAX_WAITING: usize = 8 << 20;

/// How long an output that is full and does not wait is left alone.
const FULL_FOR: Duration = Duration::from_millis(2);
/// Octets of a buffer for lines: more than a worker hands over at once.
const BUFFER: usize = 68 << 10;
/// Buffers that are kept.
const KEPT: usize = 16;

/// How much nicer than the workers the writer is.
const NICER: i32 = 5;

enum Message {
    /// Whole lines, and how many.
    Lines(Vec<u8>, u64),
    /// Nothing follows; answer when all is written.
    End(SyncSender<()>),
}

/// A way to the log writer. Clones lead to the same one.
#[derive(Clone, Debug)]
pub struct Log {
    queue: SyncSender<Message>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Buffers that were written out: memory that is warm, instead of new one for each chunk.
    free: Mutex<Vec<Vec<u8>>>,
    waiting: AtomicUsize,
    dropped: AtomicU64,
    with_others: AtomicBool,
}

impl Shared {
    /// Keeps a buffer for later, if it is of the usual size.
    fn keep(&self, mut buffer: Vec<u8>) {
        if let Ok(mut free) = self.free.try_lock()
            && buffer.capacity() == BUFFER
            && free.len() < KEPT
        {
            buffer.clear();
            free.push(buffer);
        }
    }
}

impl Log {
    /// Another process writes to the same place: lines go out in pieces that no other writer of
    /// a pipe can come between (`PIPE_BUF`).
    pub fn share(&self) {
        self.shared.with_others.store(true, Relaxed);
    }

    /// Starts the thread that writes to `out`.
    ///
    /// # Errors
    /// The thread could not be started.
    pub fn start(out: impl Write + Send + 'static) -> std::io::Result<Self> {
        let (queue, messages) = sync_channel(QUEUE);
        let log = Self { queue, shared: Arc::default() };
        let shared = log.shared.clone();
        std::thread::Builder::new().name("l7rp-log".into()).spawn(move || {
            // It has a core in common with a worker, and no request is to wait for lines. Where
            // that cannot be had, it is as important as they are.
            let _ = nice(NICER);
            write_all(out, &messages, &shared);
        })?;
        Ok(log)
    }

    /// An empty buffer for lines. Never waits.
    pub fn buffer(&self) -> Vec<u8> {
        let used = self.shared.free.try_lock().ok().and_then(|mut free| free.pop());
        used.unwrap_or_else(|| Vec::with_capacity(BUFFER))
    }

    /// Hands over whole lines. Never waits.
    pub fn lines(&self, chunk: Vec<u8>, count: u64) {
        let len = chunk.len();
        if self.shared.waiting.fetch_add(len, Relaxed) + len > MAX_WAITING {
            self.give_up(len, count);
            return;
        }
        match self.queue.try_send(Message::Lines(chunk, count)) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => self.give_up(len, count),
        }
    }

    fn give_up(&self, len: usize, count: u64) {
        self.shared.waiting.fetch_sub(len, Relaxed);
        self.shared.dropped.fetch_add(count, Relaxed);
    }

    /// A line is not worth writing, and is counted as one that was dropped.
    pub fn leave_out(&self) {
        self.shared.dropped.fetch_add(1, Relaxed);
    }

    /// Lines that were dropped so far.
    pub fn dropped(&self) -> u64 {
        self.shared.dropped.load(Relaxed)
    }

    /// Waits until all is written, at most `limit`; whether it is.
    pub fn finish(&self, limit: Duration) -> bool {
        let (done, wait) = sync_channel(1);
        let queue = self.queue.clone();
        // A full queue blocks who sends to it, and that must not be us: its reader may be gone.
        let asked = std::thread::Builder::new().spawn(move || queue.send(Message::End(done)));
        asked.is_ok() && wait.recv_timeout(limit).is_ok()
    }
}

/// `lines` in pieces of whole lines, of `most` octets if no line is longer.
fn pieces(mut lines: &[u8], most: usize) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        if lines.is_empty() {
            return None;
        }
        let end = |n: usize| memchr::memrchr(b'\n', &lines[..n]).map(|at| at + 1);
        let fits = if lines.len() <= most { Some(lines.len()) } else { end(most) };
        let first = || memchr::memchr(b'\n', lines).map_or(lines.len(), |at| at + 1);
        let (piece, rest) = lines.split_at(fits.unwrap_or_else(first));
        lines = rest;
        Some(piece)
    })
}

/// As `write_all`, also where the reader has made the output one that does not wait: half a line
/// would spoil the next one, too.
fn write_whole(out: &mut impl Write, mut piece: &[u8]) -> std::io::Result<()> {
    while !piece.is_empty() {
        match patiently(|| out.write(piece))? {
            0 => return Err(std::io::ErrorKind::WriteZero.into()),
            n => piece = &piece[n..],
        }
    }
    Ok(())
}

/// Does what there is no room for yet when there is.
fn patiently<T>(mut act: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    loop {
        match act() {
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                std::thread::park_timeout(FULL_FOR);
            }
            done => return done,
        }
    }
}

fn write_all(mut out: impl Write, messages: &Receiver<Message>, shared: &Shared) {
    while let Ok(message) = messages.recv() {
        match message {
            Message::Lines(chunk, count) => {
                let whole = if shared.with_others.load(Relaxed) { PIPE_BUF } else { chunk.len() };
                let mut pieces = pieces(&chunk, whole);
                let written = pieces.try_for_each(|piece| write_whole(&mut out, piece));
                drop(pieces);
                // The end of the last line may have been kept back.
                let written = written.and_then(|()| patiently(|| out.flush()));
                shared.waiting.fetch_sub(chunk.len(), Relaxed);
                shared.keep(chunk);
                if written.is_err() {
                    shared.dropped.fetch_add(count, Relaxed);
                }
            }
            Message::End(done) => {
                let _ = done.send(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Condvar, PoisonError};

    /// A writer that does not take anything until it is let go.
    #[derive(Clone, Default)]
    struct Gate(Arc<(Mutex<bool>, Condvar)>, Arc<AtomicUsize>);

    impl Gate {
        #[expect(clippy::disallowed_methods, reason = "a test's own lock")]
        fn open(&self) {
            *self.0.0.lock().unwrap() = true;
            self.0.1.notify_all();
        }
    }

    impl Write for Gate {
        #[expect(clippy::disallowed_methods, reason = "a test's own lock")]
        fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
            let mut open = self.0.0.lock().unwrap();
            while !*open {
                open = self.0.1.wait(open).unwrap_or_else(PoisonError::into_inner);
            }
            self.1.fetch_add(data.len(), Relaxed);
            Ok(data.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn pieces_are_whole_lines() {
        for (lines, most, expected) in [
            ("", 4, vec![]),
            ("a\nb\n", 4, vec!["a\nb\n"]),
            ("a\nb\nc\n", 4, vec!["a\nb\n", "c\n"]),
            ("abcdef\nb\nc\n", 4, vec!["abcdef\n", "b\nc\n"]),
            ("a\nbcdef", 4, vec!["a\n", "bcdef"]),
            ("abc\nabc\n", 4, vec!["abc\n", "abc\n"]),
        ] {
            let all: Vec<_> = pieces(lines.as_bytes(), most).collect();
            let expected: Vec<_> = expected.into_iter().map(str::as_bytes).collect();
            assert_eq!(all, expected, "{lines:?}");
        }
    }

    #[test]
    fn a_stuck_reader_costs_lines_but_no_time() {
        let gate = Gate::default();
        let log = Log::start(gate.clone()).unwrap();
        let total = 2000u64;
        for _ in 0..total {
            log.lines(vec![b'x'; 100], 1);
        }
        let dropped = log.dropped();
        assert!(dropped >= total - QUEUE as u64 - 1, "{dropped}");
        gate.open();
        assert!(log.finish(Duration::from_secs(10)));
        let written = gate.1.load(Relaxed) as u64 / 100;
        assert_eq!(written + log.dropped(), total);
    }
}
