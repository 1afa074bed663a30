//! Scripted upstreams: a thread for each connection, a closure for each request.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::{Message, Wire, lock};

/// What becomes of a connection after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The next request is read.
    Next,
    /// It is closed in order.
    Close,
    /// It is reset.
    Reset,
}

/// A request that was received.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Its head, and the body as far as it was read.
    pub message: Message,
    /// Number of the connection, from 0.
    pub connection: usize,
}

/// A request on its way to the closure.
#[derive(Debug)]
pub struct Call<'a> {
    /// The head; the body is read by [`Call::body`].
    pub request: Message,
    /// Number of the connection, from 0.
    pub connection: usize,
    /// Number of the request at this upstream, from 0.
    pub number: usize,
    /// Number of the request on its connection, from 0.
    pub on_connection: usize,
    /// The connection.
    pub wire: &'a mut Wire,
    shared: &'a Shared,
    body_read: bool,
}

#[derive(Debug, Default)]
struct Shared {
    seen: Mutex<Vec<Seen>>,
    accepted: AtomicUsize,
    open: AtomicUsize,
    ended: AtomicBool,
    live: Mutex<Vec<TcpStream>>,
}

/// A scripted upstream; stops when dropped.
#[derive(Debug)]
pub struct Origin {
    /// Where it listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    is_wrapped: bool,
    /// Connections that keep a queue full.
    fillers: Vec<socket2::Socket>,
}

impl Call<'_> {
    /// Reads the rest of the request and gives its body.
    pub fn body(&mut self) -> io::Result<&[u8]> {
        if !self.body_read {
            self.body_read = true;
            let result = self.wire.read_body(&mut self.request, false);
            if let Some(seen) = lock(&self.shared.seen).get_mut(self.number) {
                seen.message = self.request.clone();
            }
            result?;
        }
        Ok(&self.request.body)
    }

    /// Writes octets; a peer that is gone is none of the script's business.
    pub fn send(&mut self, data: impl AsRef<[u8]>) -> bool {
        self.wire.write(data.as_ref()).is_ok()
    }

    /// Waits until the proxy closes or resets the connection, or the test ends.
    pub fn until_gone(&mut self) {
        while self.wire.read_some(usize::MAX).is_ok_and(|part| !part.is_empty()) {}
    }
}

impl Origin {
    /// Starts one that calls `script` for each request. The request's body is read after it
    /// returns, if it has not read it.
    pub fn start(script: impl Fn(&mut Call<'_>) -> Then + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        Self::serve(listener, |tcp| Ok(tcp.into()), script)
    }

    /// As [`Origin::start`], on an address that is known before.
    pub fn start_at(
        address: SocketAddr,
        script: impl Fn(&mut Call<'_>) -> Then + Send + Sync + 'static,
    ) -> Self {
        Self::serve(TcpListener::bind(address).expect("the address"), |tcp| Ok(tcp.into()), script)
    }

    /// As [`Origin::start`], through what `wrap` makes of each connection; it may take its time.
    /// A connection of which it makes nothing is closed.
    pub fn start_through(
        wrap: impl Fn(TcpStream) -> io::Result<Wire> + Send + Sync + 'static,
        script: impl Fn(&mut Call<'_>) -> Then + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut origin = Self::serve(listener, wrap, script);
        origin.is_wrapped = true;
        origin
    }

    fn serve(
        listener: TcpListener,
        wrap: impl Fn(TcpStream) -> io::Result<Wire> + Send + Sync + 'static,
        script: impl Fn(&mut Call<'_>) -> Then + Send + Sync + 'static,
    ) -> Self {
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared::default());
        let (for_accept, script) = (shared.clone(), Arc::new((wrap, script)));
        thread::spawn(move || {
            for stream in listener.incoming() {
                if for_accept.ended.load(SeqCst) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                let number = for_accept.accepted.fetch_add(1, SeqCst);
                for_accept.open.fetch_add(1, SeqCst);
                lock(&for_accept.live).extend(stream.try_clone());
                let (shared, script) = (for_accept.clone(), script.clone());
                thread::spawn(move || {
                    let closer = stream.try_clone();
                    match script.0(stream) {
                        Ok(wire) => connection(wire, closer, number, &shared, &script.1),
                        Err(_) => end(closer.ok().as_ref(), &shared),
                    }
                    shared.open.fetch_sub(1, SeqCst);
                });
            }
        });
        Self { address, shared, is_wrapped: false, fillers: Vec::new() }
    }

    /// An address that refuses connections; it stays taken, so that no other test gets it.
    pub fn refusing() -> Self {
        let socket = tcp_socket();
        socket.bind(&local()).expect("a port");
        let address = socket.local_addr().expect("an address").as_socket().expect("TCP");
        Self { address, shared: Arc::default(), is_wrapped: false, fillers: vec![socket] }
    }

    /// An address where connections are neither accepted nor refused: its queue is full.
    pub fn never_accepting() -> Self {
        let socket = tcp_socket();
        socket.bind(&local()).expect("a port");
        socket.listen(0).expect("it listens");
        let address = socket.local_addr().expect("an address").as_socket().expect("TCP");
        let mut fillers = vec![socket];
        for _ in 0..8 {
            let filler = tcp_socket();
            let full = filler.connect_timeout(&address.into(), Duration::from_millis(100)).is_err();
            fillers.push(filler);
            if full {
                break;
            }
        }
        Self { address, shared: Arc::default(), is_wrapped: false, fillers }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("http{}://{}", if self.is_wrapped { "s" } else { "" }, self.address)
    }

    /// Every request so far.
    pub fn seen(&self) -> Vec<Seen> {
        lock(&self.shared.seen).clone()
    }

    /// How many requests so far.
    pub fn requests(&self) -> usize {
        lock(&self.shared.seen).len()
    }

    /// The last request.
    #[track_caller]
    pub fn last(&self) -> Message {
        self.seen().pop().expect("a request has arrived").message
    }

    /// How many connections were accepted so far.
    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(SeqCst)
    }

    /// How many connections are open now.
    pub fn open(&self) -> usize {
        self.shared.open.load(SeqCst)
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.shared.ended.store(true, SeqCst);
        for stream in lock(&self.shared.live).drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        if self.fillers.is_empty() {
            // Wakes the thread that accepts.
            let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
        }
    }
}

fn connection(
    mut wire: Wire,
    closer: io::Result<TcpStream>,
    number: usize,
    shared: &Shared,
    script: &(dyn Fn(&mut Call<'_>) -> Then + Send + Sync),
) {
    let mut served = 0;
    while let Ok(Some(request)) = wire.read_head() {
        let nth = {
            let mut seen = lock(&shared.seen);
            seen.push(Seen { message: request.clone(), connection: number });
            seen.len() - 1
        };
        let mut call = Call {
            request,
            connection: number,
            number: nth,
            on_connection: served,
            wire: &mut wire,
            shared,
            body_read: false,
        };
        served += 1;
        let then = script(&mut call);
        match then {
            Then::Next if call.body().is_ok() => {}
            Then::Next | Then::Close => break,
            Then::Reset => {
                // The other handles must not keep the connection open.
                forget(shared, closer.as_ref().ok());
                drop(closer);
                wire.reset();
                return;
            }
        }
    }
    // Best effort: whoever is at the other end may be gone.
    let _ = wire.half_close();
    end(closer.ok().as_ref(), shared);
}

fn end(closer: Option<&TcpStream>, shared: &Shared) {
    if let Some(closer) = closer {
        let _ = closer.shutdown(std::net::Shutdown::Both);
    }
    forget(shared, closer);
}

/// Drops the handle that is kept for the end of the test.
fn forget(shared: &Shared, stream: Option<&TcpStream>) {
    let peer = stream.and_then(|s| s.peer_addr().ok());
    lock(&shared.live).retain(|s| s.peer_addr().ok() != peer);
}

fn tcp_socket() -> socket2::Socket {
    socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket")
}

fn local() -> socket2::SockAddr {
    SocketAddr::from(([127, 0, 0, 1], 0)).into()
}
