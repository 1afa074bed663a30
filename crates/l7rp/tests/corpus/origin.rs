//! A backend that records all it sees, reads it strictly, and answers as a case says.

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use crate::case::{ResponseCase, Then, When};
use crate::wire::{Body, Framing, Head, Stop, Wire};

/// Requests of the test itself have targets that begin so; they are answered plainly, with their
/// own target as content.
pub(crate) const OWN: &str = "/-own-";

/// Longer than any case takes.
const A_CASE: Duration = Duration::from_mins(1);

/// A request as it arrived.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) head: Head,
    pub(crate) body: Body,
    /// All of it has arrived.
    pub(crate) complete: bool,
}

impl Seen {
    pub(crate) fn is_own(&self) -> bool {
        self.target.starts_with(OWN)
    }

    /// Whether the proxy has put its name on it; what is smuggled past it has none.
    pub(crate) fn is_marked(&self) -> bool {
        let one = |name| self.head.all(name).count() == 1;
        one("x-request-id")
            && one("x-real-ip")
            && one("x-forwarded-for")
            && self.head.first("x-forwarded-for").is_some_and(|v| v.ends_with("127.0.0.1"))
    }
}

/// A connection from the proxy.
#[derive(Clone, Debug, Default)]
pub(crate) struct Connection {
    pub(crate) seen: Vec<Seen>,
    /// What could not be read, or stood where nothing should.
    pub(crate) leftover: Vec<String>,
    pub(crate) ended: bool,
}

#[derive(Default)]
struct State {
    connections: Vec<Connection>,
    /// By the index of the connection.
    streams: Vec<Option<TcpStream>>,
    /// Which connections are being worked on, by index.
    busy: Vec<bool>,
    /// Where connections came from, in the order in which they were accepted.
    accepted: Vec<SocketAddr>,
    /// Which case it is; connections of an earlier one have nothing to add.
    turn: u64,
    script: Option<Arc<ResponseCase>>,
    /// Tries that the script has answered.
    tries: usize,
    /// The idle connection was sent what the script has for it.
    said_when_idle: bool,
}

impl State {
    /// Takes a connection up; which case it belongs to, and its index.
    fn enter(&mut self, stream: &TcpStream, from: SocketAddr) -> (u64, usize) {
        self.accepted.push(from);
        self.streams.push(stream.try_clone().ok());
        self.busy.push(false);
        self.connections.push(Connection::default());
        (self.turn, self.connections.len() - 1)
    }

    fn is_quiet(&self) -> bool {
        let half = |c: &Connection| c.seen.last().is_some_and(|s| !s.complete);
        let unread = |stream: &Option<TcpStream>| {
            stream.as_ref().is_some_and(|s| rustix::io::ioctl_fionread(s).is_ok_and(|n| n > 0))
        };
        let mut all = self.connections.iter().zip(&self.busy).zip(&self.streams);
        all.all(|((c, busy), stream)| c.ended || !(*busy || unread(stream) || half(c)))
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread of the backend panics")
    }

    fn change<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let result = act(&mut self.lock());
        self.changed.notify_all();
        result
    }
}

pub(crate) struct Origin {
    pub(crate) addr: SocketAddr,
    shared: Arc<Shared>,
}

impl Origin {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let addr = listener.local_addr().expect("the port");
        let shared = Arc::new(Shared::default());
        let of_thread = shared.clone();
        thread::spawn(move || {
            while let Ok((stream, from)) = listener.accept() {
                let (turn, id) = of_thread.change(|state| state.enter(&stream, from));
                let shared = of_thread.clone();
                thread::spawn(move || serve(&shared, stream, turn, id));
            }
        });
        Self { addr, shared }
    }

    /// Forgets the last case, with all connections, and takes up the next.
    pub(crate) fn begin(&self, script: Option<Arc<ResponseCase>>) {
        self.shared.change(|state| {
            for stream in state.streams.drain(..).flatten() {
                // One that has ended already is as good.
                let _ = stream.shutdown(Shutdown::Both);
            }
            *state = State { script, turn: state.turn + 1, ..State::default() };
        });
    }

    pub(crate) fn connections(&self) -> Vec<Connection> {
        self.shared.lock().connections.clone()
    }

    /// Waits until all that the proxy has sent was read and recorded, and no request is half
    /// there on an open connection. False: one still is.
    pub(crate) fn settle(&self, patience: Duration) -> bool {
        // Connections are accepted in order: once this one is, so are all that were opened
        // before it.
        let last = TcpStream::connect(self.addr).expect("the backend accepts");
        let own = last.local_addr().expect("a port");
        let accepted = self.wait(patience, |state| state.accepted.contains(&own));
        drop(last);
        accepted && self.wait(patience, State::is_quiet)
    }

    pub(crate) fn wait_until_idle_was_told(&self) -> bool {
        self.wait(Duration::from_secs(5), |state| state.said_when_idle)
    }

    fn wait(&self, patience: Duration, done: impl Fn(&State) -> bool) -> bool {
        let until = Instant::now() + patience;
        let mut state = self.shared.lock();
        while !done(&state) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            // What has arrived in the kernel tells nobody.
            let left = left.min(Duration::from_millis(2));
            state = self.shared.changed.wait_timeout(state, left).expect("no panic").0;
        }
        true
    }
}

fn serve(shared: &Shared, stream: TcpStream, turn: u64, id: usize) {
    let _ = stream.set_nodelay(true);
    let mut server = Server { shared, wire: Wire::new(stream, A_CASE), turn, id };
    let stop = loop {
        if let Err(stop) = server.request() {
            break stop;
        }
    };
    let half_a_head = stop == Stop::Eof && !server.wire.buf.is_empty();
    server.note(|connection| {
        if let Stop::Garbage(what) = &stop {
            connection.leftover.push(what.clone());
        }
        if half_a_head {
            connection.leftover.push("half a head".to_owned());
        }
        connection.ended = true;
    });
}

struct Server<'a> {
    shared: &'a Shared,
    wire: Wire,
    turn: u64,
    id: usize,
}

impl Server<'_> {
    /// Changes the connection's record, unless it belongs to a case that is over.
    fn note(&self, act: impl FnOnce(&mut Connection)) {
        self.shared.change(|state| {
            let current = state.turn == self.turn;
            state.connections.get_mut(self.id).filter(|_| current).map(act)
        });
    }

    /// Says whether this thread has octets in hand that are in no record yet. Idle ones wait
    /// without taking them.
    fn busy(&self, busy: bool) {
        self.shared.change(|state| {
            let current = state.turn == self.turn;
            state.busy.get_mut(self.id).filter(|_| current).map(|b| *b = busy)
        });
    }

    fn request(&mut self) -> Result<(), Stop> {
        self.wire.patience(A_CASE);
        if self.wire.buf.is_empty() {
            self.busy(false);
            let _ = self.wire.stream.set_read_timeout(Some(A_CASE));
            // What is wrong with the connection, reading will tell as well.
            let _ = self.wire.stream.peek(&mut [0]);
            self.busy(true);
        }
        let head = self.wire.head()?;
        let words: Vec<&str> = head.start.split(' ').collect();
        let [method, target, "HTTP/1.1"] = words[..] else {
            return Err(Stop::Garbage(format!("request line {:?}", head.start)));
        };
        let seen = Seen {
            method: method.to_owned(),
            target: target.to_owned(),
            head: head.clone(),
            ..Seen::default()
        };
        let own = seen.is_own();
        self.note(|connection| connection.seen.push(seen.clone()));
        let script = if own { None } else { self.shared.lock().script.clone() };
        let framing = head.framing()?.unwrap_or(Framing::Length(0));
        match script {
            Some(case) if case.when == When::AfterHead => {
                self.play(&case)?;
                self.body(framing, true)
            }
            Some(case) => {
                self.body(framing, false)?;
                self.play(&case)
            }
            None => {
                if head.all("expect").any(|v| v.eq_ignore_ascii_case("100-continue")) {
                    self.send(b"HTTP/1.1 100 Continue\r\n\r\n");
                }
                self.body(framing, false)?;
                self.answer(&seen);
                Ok(())
            }
        }
    }

    fn body(&mut self, framing: Framing, answered: bool) -> Result<(), Stop> {
        let mut body = Body::default();
        let result = self.wire.body(framing, &mut body);
        let complete = result.is_ok();
        // The proxy sends no request before the last was answered: more is what it took for a
        // body.
        let more = (complete && !answered && !self.wire.buf.is_empty())
            .then(|| format!("after the request: \"{}\"", self.wire.buf.escape_ascii()));
        self.note(|connection| {
            if let Some(seen) = connection.seen.last_mut() {
                seen.body = body;
                seen.complete = complete;
            }
            connection.leftover.extend(more);
        });
        result
    }

    fn answer(&mut self, seen: &Seen) {
        let content = if seen.method == "HEAD" { "" } else { seen.target.as_str() };
        let length = seen.target.len();
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{content}");
        self.send(answer.as_bytes());
    }

    /// A proxy that is gone is noticed by reading.
    fn send(&mut self, octets: &[u8]) {
        let _ = self.wire.stream.write_all(octets);
    }

    /// Says what the case says, and does what it does then.
    fn play(&mut self, case: &ResponseCase) -> Result<(), Stop> {
        let first = self.shared.change(|state| {
            state.tries += 1;
            state.tries == 1
        });
        if let (false, Some(raw)) = (first, &case.retry_raw) {
            self.send(&raw.0);
            return Ok(());
        }
        self.send(&case.raw.0);
        match case.then {
            Then::Keep => {}
            Then::Fin => {
                let _ = self.wire.stream.shutdown(Shutdown::Write);
            }
            Then::Rst => {
                let _ = socket2::SockRef::from(&self.wire.stream).set_linger(Some(Duration::ZERO));
                self.shared.change(|state| state.streams.get_mut(self.id).map(Option::take));
                return Err(Stop::Reset);
            }
        }
        if let Some(octets) = &case.after_idle {
            thread::sleep(Duration::from_millis(250));
            self.send(&octets.0);
            self.shared.change(|state| state.said_when_idle = true);
        }
        Ok(())
    }
}
