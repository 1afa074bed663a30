//! The backend behind every proxy under test: HTTP/1.1, one thread, epoll, fixed answers.
//!
//!   /            128 bytes          /chunked     16 KiB in four chunks
//!   /16k         16 KiB             /slow?ms=N   128 bytes after N milliseconds
//!   /1m          1 MiB              any path with a request body: reads it all, answers its size
//!
//! Build: rustc -O backend.rs      Run: backend PORT ADDRESSES   (127.0.0.1 and the next ones, so many)

mod poll;

use poll::{Io, Poll, READ, WRITE};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::time::{Duration, Instant};

/// Keys of events from here on are listeners; those below are descriptors of connections.
const LISTENERS: u64 = 1 << 32;
const MAX_HEAD: usize = 64 * 1024;

/// The prepared answers, built once.
struct Answers {
    small: Vec<u8>,
    kib16: Vec<u8>,
    mib1: Vec<u8>,
    chunked: Vec<u8>,
}

const HEAD: &str = "HTTP/1.1 200 OK\r\nServer: backend\r\nDate: Sun, 29 Nov 2026 20:00:00 GMT\r\n\
                    Content-Type: text/plain\r\nCache-Control: no-cache\r\n";

fn sized(body: &[u8]) -> Vec<u8> {
    let mut out = format!("{HEAD}Content-Length: {}\r\n\r\n", body.len()).into_bytes();
    out.extend_from_slice(body);
    out
}

fn chunked(pieces: usize, size: usize) -> Vec<u8> {
    let mut out = format!("{HEAD}Transfer-Encoding: chunked\r\n\r\n").into_bytes();
    for _ in 0..pieces {
        out.extend_from_slice(format!("{size:x}\r\n").as_bytes());
        out.resize(out.len() + size, b'x');
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"0\r\n\r\n");
    out
}

impl Answers {
    fn new() -> Answers {
        Answers {
            small: sized(&[b'x'; 128]),
            kib16: sized(&vec![b'x'; 16 << 10]),
            mib1: sized(&vec![b'x'; 1 << 20]),
            chunked: chunked(4, 4096),
        }
    }

    fn get(&self, which: Which) -> &[u8] {
        match which {
            Which::Small => &self.small,
            Which::Kib16 => &self.kib16,
            Which::Mib1 => &self.mib1,
            Which::Chunked => &self.chunked,
            Which::Own => &[],
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Which {
    Small,
    Kib16,
    Mib1,
    Chunked,
    /// The answer is in the connection's own buffer (a body's size).
    Own,
}

/// How much of a request body is still to come.
#[derive(Clone, Copy)]
enum Body {
    Length(u64),
    Chunks(ChunkScan),
}

/// Finds the end of a chunked body; counts its payload.
#[derive(Clone, Copy)]
struct ChunkScan {
    place: Place,
    left: u64,
    total: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    Size,
    Extension,
    Data,
    AfterData,
    Trailer { empty: bool },
    End,
}

impl ChunkScan {
    /// Takes bytes from `data`; returns how many belong to the body. `place` is `End` once it is complete.
    fn feed(&mut self, data: &[u8]) -> usize {
        let mut i = 0;
        while i < data.len() && self.place != Place::End {
            if self.place == Place::Data {
                let n = self.left.min((data.len() - i) as u64);
                i += n as usize;
                self.left -= n;
                self.total += n;
                if self.left == 0 {
                    self.place = Place::AfterData;
                }
                continue;
            }
            let byte = data[i];
            i += 1;
            self.place = match (self.place, byte) {
                (Place::Size | Place::Extension, b'\n') if self.left == 0 => {
                    Place::Trailer { empty: true }
                }
                (Place::Size | Place::Extension, b'\n') => Place::Data,
                (Place::Size, b';') => Place::Extension,
                (Place::Size, _) => {
                    if let Some(digit) = (byte as char).to_digit(16) {
                        self.left = self.left.wrapping_mul(16).wrapping_add(digit as u64);
                    }
                    Place::Size
                }
                (Place::AfterData, b'\n') => Place::Size,
                (Place::Trailer { empty: true }, b'\n') => Place::End,
                (Place::Trailer { empty: true }, b'\r') => Place::Trailer { empty: true },
                (Place::Trailer { .. }, b'\n') => Place::Trailer { empty: true },
                (Place::Trailer { .. }, _) => Place::Trailer { empty: false },
                (same, _) => same,
            };
        }
        i
    }
}

struct Head {
    len: usize,
    which: Which,
    delay: u64,
    body: Option<Body>,
    keep: bool,
}

/// Reads a request head; `None` until its last line has come.
fn parse(data: &[u8]) -> Option<Head> {
    let len = data.windows(4).position(|w| w == b"\r\n\r\n")? + 4;
    let mut lines = data[..len].split(|&b| b == b'\n');
    let first = lines.next()?;
    let mut words = first.split(|&b| b == b' ');
    let target = words.nth(1).unwrap_or(b"/");
    let mut keep = !first.ends_with(b"HTTP/1.0\r");
    let mut body = None;
    for line in lines {
        let Some(colon) = line.iter().position(|&b| b == b':') else { continue };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        match name.len() {
            14 if name.eq_ignore_ascii_case(b"content-length") => {
                let n = std::str::from_utf8(value).ok().and_then(|v| v.parse().ok()).unwrap_or(0);
                body = Some(Body::Length(n)).filter(|_| n > 0);
            }
            17 if name.eq_ignore_ascii_case(b"transfer-encoding") => {
                body = Some(Body::Chunks(ChunkScan { place: Place::Size, left: 0, total: 0 }));
            }
            10 if name.eq_ignore_ascii_case(b"connection") => {
                let close = value.eq_ignore_ascii_case(b"close");
                keep = !close && (keep || value.eq_ignore_ascii_case(b"keep-alive"));
            }
            _ => {}
        }
    }
    let which = match target {
        b"/16k" => Which::Kib16,
        b"/1m" => Which::Mib1,
        b"/chunked" => Which::Chunked,
        _ => Which::Small,
    };
    let wait = target.strip_prefix(b"/slow?ms=").and_then(|v| std::str::from_utf8(v).ok());
    let delay = wait.and_then(|v| v.parse().ok()).unwrap_or(0);
    Some(Head { len, which, delay, body, keep })
}

enum State {
    Head,
    Body { left: Body, size: u64 },
    Sleep,
    Answer { sent: usize },
}

struct Conn {
    /// Tells a connection from an earlier one on the same descriptor.
    serial: u64,
    state: State,
    /// Bytes that came but were not used yet: part of a head, or a pipelined request.
    kept: Vec<u8>,
    which: Which,
    own: Vec<u8>,
    keep: bool,
    wants_write: bool,
}

struct Server {
    poll: Poll,
    answers: Answers,
    conns: Vec<Option<Conn>>,
    sleepers: BinaryHeap<Reverse<(Instant, RawFd, u64)>>,
    next_serial: u64,
}

impl Server {
    fn accept(&mut self, listener: &TcpListener) {
        while let Ok((stream, _)) = listener.accept() {
            let _ = stream.set_nonblocking(true);
            let _ = stream.set_nodelay(true);
            let fd = stream.into_raw_fd();
            if self.conns.len() <= fd as usize {
                self.conns.resize_with(fd as usize + 1, || None);
            }
            self.next_serial += 1;
            self.conns[fd as usize] = Some(Conn {
                serial: self.next_serial,
                state: State::Head,
                kept: Vec::new(),
                which: Which::Small,
                own: Vec::new(),
                keep: true,
                wants_write: false,
            });
            self.poll.add(fd, READ, fd as u64);
        }
    }

    /// Works on what has come for one connection; false when it is over.
    fn input(&mut self, fd: RawFd, room: &mut [u8]) -> bool {
        let n = match poll::read(fd, room) {
            Io::Done(n) => n,
            Io::Wait => return true,
            Io::Closed => return false,
        };
        let Some(conn) = self.conns[fd as usize].as_mut() else { return true };
        if conn.kept.is_empty() && matches!(conn.state, State::Head | State::Body { .. }) {
            let used = match self.take(fd, &room[..n]) {
                Some(used) => used,
                None => return false,
            };
            if used < n {
                if let Some(conn) = self.conns[fd as usize].as_mut() {
                    conn.kept.extend_from_slice(&room[used..n]);
                }
            }
            return true;
        }
        conn.kept.extend_from_slice(&room[..n]);
        conn.kept.len() <= MAX_HEAD + (1 << 20) && self.resume(fd)
    }

    /// Works on the bytes kept from earlier reads.
    fn resume(&mut self, fd: RawFd) -> bool {
        let Some(conn) = self.conns[fd as usize].as_mut() else { return true };
        if conn.kept.is_empty() {
            return true;
        }
        let data = std::mem::take(&mut conn.kept);
        let Some(used) = self.take(fd, &data) else { return false };
        if let Some(conn) = self.conns[fd as usize].as_mut() {
            conn.kept.extend_from_slice(&data[used..]);
        }
        true
    }

    /// Uses as much of `data` as the state allows; `None` when the connection is over.
    fn take(&mut self, fd: RawFd, data: &[u8]) -> Option<usize> {
        let mut used = 0;
        while used < data.len() {
            let conn = self.conns[fd as usize].as_mut()?;
            match &mut conn.state {
                State::Head => {
                    let Some(head) = parse(&data[used..]) else { break };
                    used += head.len;
                    conn.which = head.which;
                    conn.keep = head.keep;
                    conn.state = match head.body {
                        Some(left) => State::Body { left, size: 0 },
                        None if head.delay > 0 => {
                            let due = Instant::now() + Duration::from_millis(head.delay);
                            self.sleepers.push(Reverse((due, fd, conn.serial)));
                            State::Sleep
                        }
                        None => State::Answer { sent: 0 },
                    };
                }
                State::Body { left, size } => {
                    let over = match left {
                        Body::Length(n) => {
                            let k = (*n).min((data.len() - used) as u64);
                            used += k as usize;
                            *n -= k;
                            *size += k;
                            *n == 0
                        }
                        Body::Chunks(scan) => {
                            used += scan.feed(&data[used..]);
                            *size = scan.total;
                            scan.place == Place::End
                        }
                    };
                    if over {
                        conn.own = sized(format!("received {size}\n").as_bytes());
                        conn.which = Which::Own;
                        conn.state = State::Answer { sent: 0 };
                    }
                }
                State::Sleep | State::Answer { .. } => break,
            }
            if matches!(conn.state, State::Answer { .. }) && !self.output(fd) {
                return None;
            }
        }
        Some(used)
    }

    /// Sends what can be sent of the current answer; false when the connection is over.
    fn output(&mut self, fd: RawFd) -> bool {
        let Some(conn) = self.conns[fd as usize].as_mut() else { return true };
        let State::Answer { mut sent } = conn.state else { return true };
        let answer =
            if conn.which == Which::Own { &conn.own } else { self.answers.get(conn.which) };
        while sent < answer.len() {
            match poll::write(fd, &answer[sent..]) {
                Io::Done(n) => sent += n,
                Io::Wait => break,
                Io::Closed => return false,
            }
        }
        let unsent = sent < answer.len();
        if unsent != conn.wants_write {
            conn.wants_write = unsent;
            self.poll.change(fd, if unsent { READ | WRITE } else { READ }, fd as u64);
        }
        conn.state = if unsent { State::Answer { sent } } else { State::Head };
        unsent || conn.keep
    }

    fn drop_conn(&mut self, fd: RawFd) {
        if self.conns[fd as usize].take().is_some() {
            poll::shut(fd);
        }
    }

    /// Starts the answers whose delay is over; returns the time until the next one.
    fn wake(&mut self) -> Option<Duration> {
        loop {
            let Reverse((due, fd, serial)) = *self.sleepers.peek()?;
            let now = Instant::now();
            if due > now {
                return Some(due - now);
            }
            self.sleepers.pop();
            let same = self.conns[fd as usize].as_mut().filter(|c| c.serial == serial);
            if let Some(conn) = same {
                conn.state = State::Answer { sent: 0 };
                if !self.output(fd) || !self.resume(fd) {
                    self.drop_conn(fd);
                }
            }
        }
    }
}

fn listen(port: u16, addresses: u8) -> std::io::Result<Vec<TcpListener>> {
    let bind = |last: u8| {
        let listener = TcpListener::bind((Ipv4Addr::new(127, 0, 0, last), port))?;
        listener.set_nonblocking(true)?;
        poll::widen_backlog(listener.as_raw_fd());
        Ok(listener)
    };
    (1..=addresses).map(bind).collect()
}

fn main() -> std::io::Result<()> {
    let mut args = std::env::args().skip(1);
    let port = args.next().map_or(9000, |p| p.parse().expect("PORT is a number"));
    let addresses = args.next().map_or(1, |n| n.parse().expect("ADDRESSES is a number below 256"));
    let listeners = listen(port, addresses)?;
    let mut server = Server {
        poll: Poll::new()?,
        answers: Answers::new(),
        conns: Vec::new(),
        sleepers: BinaryHeap::new(),
        next_serial: 0,
    };
    for (key, listener) in (LISTENERS..).zip(&listeners) {
        server.poll.add(listener.as_raw_fd(), READ, key);
    }
    let mut room = vec![0u8; 128 * 1024];
    loop {
        let limit = server.wake();
        for i in 0..server.poll.wait(limit) {
            let (flags, key) = server.poll.event(i);
            if let Some(listener) =
                key.checked_sub(LISTENERS).and_then(|n| listeners.get(n as usize))
            {
                server.accept(listener);
                continue;
            }
            let fd = key as RawFd;
            let mut alive = true;
            if flags & WRITE != 0 {
                alive = server.output(fd) && server.resume(fd);
            }
            if alive && flags & !WRITE != 0 {
                alive = server.input(fd, &mut room);
            }
            if !alive {
                server.drop_conn(fd);
            }
        }
    }
}
