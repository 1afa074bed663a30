//! The upstream: answers each request with what the input has for it, and holds against the
//! proxy whatever it sends.

use std::collections::HashSet;
use std::io::Read;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::input::Input;
use crate::strict::{self, Fault, Framing};

/// Threads are made once: the leak check takes one that is just being made for a leak.
const THREADS: usize = 8;
/// Connections that wait for one of them.
const MAX_WAITING: usize = 64;

/// What has arrived for one input.
#[derive(Default)]
pub struct Seen {
    /// By `X-Request-ID`: a request that was tried twice is one.
    pub begun: HashSet<Vec<u8>>,
    pub whole: HashSet<Vec<u8>>,
    pub faults: Vec<Fault>,
}

#[derive(Default)]
struct State {
    /// Which input it is; connections of an earlier one have nothing to add.
    turn: u64,
    input: Arc<Input>,
    seen: Seen,
    answered: usize,
    streams: Vec<TcpStream>,
    accepted: Vec<SocketAddr>,
    /// Connections of this turn whose threads run.
    running: usize,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub struct Upstream {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

impl Upstream {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::<Shared>::default();
        let (queue, connections) = sync_channel(MAX_WAITING);
        let of_thread = shared.clone();
        std::thread::spawn(move || {
            while let Ok((stream, from)) = listener.accept() {
                let _ = queue.send(Connection::accept(of_thread.clone(), stream, from));
            }
        });
        let connections = Arc::new(Mutex::new(connections));
        for _ in 0..THREADS {
            let connections = connections.clone();
            std::thread::spawn(move || {
                let next = || connections.lock().unwrap_or_else(PoisonError::into_inner).recv();
                while let Ok(connection) = next() {
                    connection.serve();
                }
            });
        }
        Self { address, shared }
    }

    pub fn begin(&self, input: Arc<Input>) {
        let mut state = self.shared.lock();
        *state = State { turn: state.turn + 1, input, ..State::default() };
    }

    /// Ends all connections once what the proxy has sent is read, and says what that was.
    pub fn end(&self, patience: Duration) -> Seen {
        // Connections are accepted in order: once this one is, so are all before it.
        let last = TcpStream::connect(self.address).expect("the upstream accepts");
        let own = last.local_addr().expect("an address");
        let until = Instant::now() + patience;
        let mut state = self.shared.lock();
        while !state.accepted.contains(&own) {
            state = self.wait(state, until);
        }
        for stream in &state.streams {
            // What has arrived can still be read.
            let _ = stream.shutdown(Shutdown::Read);
        }
        while state.running > 0 {
            state = self.wait(state, until);
        }
        state.streams.clear();
        std::mem::take(&mut state.seen)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, until: Instant) -> MutexGuard<'a, State> {
        let left = until.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "the upstream does not come to an end");
        self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
    }
}

struct Connection {
    shared: Arc<Shared>,
    stream: TcpStream,
    buf: Vec<u8>,
    turn: u64,
    input: Arc<Input>,
}

impl Connection {
    fn accept(shared: Arc<Shared>, stream: TcpStream, from: SocketAddr) -> Self {
        let _ = stream.set_nodelay(true);
        let mut state = shared.lock();
        state.accepted.push(from);
        state.streams.extend(stream.try_clone());
        state.running += 1;
        let (turn, input) = (state.turn, state.input.clone());
        drop(state);
        shared.changed.notify_all();
        Self { shared, stream, buf: Vec::new(), turn, input }
    }

    fn serve(mut self) {
        while self.request().is_some() {}
        let Self { shared, stream, turn, input, .. } = self;
        let peer = stream.peer_addr().ok();
        let mut state = shared.lock();
        let current = state.turn == turn;
        if current {
            // The other handle would keep it open.
            state.streams.retain(|s| s.peer_addr().ok() != peer);
        }
        if input.resets {
            let _ = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
        }
        drop(stream);
        if current {
            state.running -= 1;
        }
        drop(state);
        shared.changed.notify_all();
    }

    /// Serves one request. `None`: there is no other.
    fn request(&mut self) -> Option<()> {
        let head = self.whole(strict::head)?;
        let mut id = Vec::new();
        let mut faults = Vec::new();
        for name in ["x-request-id", "host"] {
            let all: Vec<_> = head.all(name).collect();
            if all.len() != 1 {
                faults.push(format!("{} times {name}", all.len()));
            } else if name == "x-request-id" {
                id = all[0].to_vec();
            }
        }
        let offers = head.all("upgrade").next().is_some();
        let number = self.note(|state| {
            state.seen.faults.extend(faults);
            state.seen.begun.insert(id.clone());
            state.answered += 1;
            state.answered - 1
        })?;
        self.buf.drain(..head.len);
        let framing = head.framing();
        let framing = framing.map_err(|e| self.note(|state| state.seen.faults.push(e))).ok()?;
        let early = self.input.early;
        let closes = early && self.answer(number, offers);
        self.body(framing, id, early)?;
        let closes = if early { closes } else { self.answer(number, offers) };
        (!closes).then_some(())
    }

    fn body(&mut self, framing: Framing, id: Vec<u8>, answered: bool) -> Option<()> {
        let len = self.whole(|octets| strict::body(octets, framing))?;
        self.buf.drain(..len);
        let more = (!answered && !self.buf.is_empty())
            .then(|| format!("behind a request: \"{}\"", self.buf.escape_ascii()));
        self.note(|state| {
            state.seen.whole.insert(id);
            state.seen.faults.extend(more);
        })
    }

    /// Answers the request with this number; whether the connection ends then.
    fn answer(&mut self, number: usize, offers: bool) -> bool {
        let (answer, closes) = self.input.answer(number);
        answer.play(&mut self.stream);
        let octets = answer.octets();
        if offers && !closes && octets.windows(4).any(|w| w == b" 101") {
            // Behind it may come anything: it is the client's own protocol.
            while matches!(self.stream.read(&mut [0; 4096]), Ok(1..)) {}
            return true;
        }
        closes
    }

    /// Reads until `read` finds something whole. `None`: it does not come.
    fn whole<T>(&mut self, read: impl Fn(&[u8]) -> Result<Option<T>, Fault>) -> Option<T> {
        let mut part = [0; 16 << 10];
        loop {
            match read(&self.buf) {
                Ok(Some(found)) => return Some(found),
                Ok(None) => {}
                Err(fault) => {
                    self.note(|state| state.seen.faults.push(fault));
                    return None;
                }
            }
            let n = self.stream.read(&mut part).unwrap_or(0);
            if n == 0 {
                return None;
            }
            self.buf.extend_from_slice(&part[..n]);
        }
    }

    /// `None`: the turn is over, and nobody wants to know.
    fn note<T>(&self, change: impl FnOnce(&mut State) -> T) -> Option<T> {
        let mut state = self.shared.lock();
        (state.turn == self.turn).then(|| change(&mut state))
    }
}
