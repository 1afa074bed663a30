//! A backend for trying out a proxy: a small HTTP/1.1 server that is strict, bounded, and
//! misbehaves on demand.
//!
//! Paths are answered by `answer`, faults are chosen by `faults`, octets are moved by
//! `connection`.

mod answer;
mod connection;
mod faults;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::task::LocalSet;

pub use faults::{Ending, Faults, Flap};

use crate::clock::Clock;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;
/// How long accepting rests when the system is short of something.
const REST: Duration = Duration::from_millis(20);

/// What a backend is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Where to listen; port 0: any free one.
    pub listen: SocketAddr,
    /// What it calls itself in its answers; see [`is_name`].
    pub name: String,
    /// Every request with a number that this divides is answered with 503; 0: none.
    pub fail_every: u64,
    /// How it misbehaves.
    pub faults: Faults,
}

impl Options {
    /// A backend without faults on a free port of the loopback interface.
    pub fn new(name: &str) -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            name: name.to_owned(),
            fail_every: 0,
            faults: Faults::default(),
        }
    }
}

/// A running backend. It stops, with all of its connections, when this is dropped.
#[derive(Debug)]
pub struct Backend {
    address: SocketAddr,
    requests: Arc<AtomicU64>,
    /// Dropped to say that it is time.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Backend {
    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    /// Requests so far, those to `/healthz` not counted.
    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It ended by a panic: that has been reported, and there is nothing left to stop.
            let _ = thread.join();
        }
    }
}

/// What the connections of one backend share.
#[derive(Debug)]
struct Shared {
    options: Options,
    requests: Arc<AtomicU64>,
    /// Began when the backend did.
    clock: Clock,
}

/// Starts a backend on a thread of its own. It listens when this returns.
///
/// # Errors
/// The address is in use or not ours, or the system is short of something.
pub fn start(options: Options) -> io::Result<Backend> {
    if !is_name(&options.name) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a name is visible ASCII"));
    }
    let listener = listen(options.listen)?;
    let address = listener.local_addr()?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let requests = Arc::new(AtomicU64::new(0));
    let (stop, stopped) = oneshot::channel();
    let shared = Shared { options, requests: requests.clone(), clock: Clock::new() };
    let thread = std::thread::Builder::new().name("l7rp-backend".into()).spawn(move || {
        let tasks = LocalSet::new();
        tasks.block_on(&runtime, accept(listener, Rc::new(shared), stopped));
    })?;
    Ok(Backend { address, requests, stop: Some(stop), thread: Some(thread) })
}

/// Whether this can be the name of a backend: it is written into field lines.
pub fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic())
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // So that a backend can be started again while its old connections linger.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

async fn accept(listener: TcpListener, shared: Rc<Shared>, mut stopped: oneshot::Receiver<()>) {
    // Fails only without a runtime around, and there is one.
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    loop {
        let accepted = tokio::select! {
            _ = &mut stopped => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                tokio::task::spawn_local(connection::serve(stream, shared.clone()));
            }
            // Most likely out of descriptors; what waits in the queue is not lost.
            Err(_) => tokio::time::sleep(REST).await,
        }
    }
}
