//! Listening sockets: one for each worker and address, so that the kernel spreads new
//! connections and no worker waits for another.

use std::fs::{File, Permissions};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use socket2::{Domain, Protocol, SockAddr, SockFilter, SockRef, Socket, TcpKeepalive, Type};

use crate::config::plan::Bind;
use crate::stream::Stream;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 4096;

/// A silent connection is probed after this; a quarter of it between probes.
const KEEPALIVE: Duration = Duration::from_mins(1);

/// A socket that listens, before a worker's runtime takes it.
#[derive(Debug)]
pub enum Bound {
    /// TCP.
    Tcp(std::net::TcpListener),
    /// Unix-domain.
    Unix(std::os::unix::net::UnixListener),
}

/// The same, in a runtime's hands.
#[derive(Debug)]
pub enum Accepting {
    /// TCP.
    Tcp(tokio::net::TcpListener),
    /// Unix-domain.
    Unix(tokio::net::UnixListener),
}

impl Accepting {
    /// Hands `bound` to the runtime that this is called in.
    ///
    /// # Errors
    /// The runtime does not take it.
    pub fn new(bound: Bound) -> io::Result<Self> {
        match bound {
            Bound::Tcp(l) => tokio::net::TcpListener::from_std(l).map(Self::Tcp),
            Bound::Unix(l) => tokio::net::UnixListener::from_std(l).map(Self::Unix),
        }
    }

    /// Has the kernel begin no more connections, while those whose handshake is under way come
    /// to be accepted: a socket that is closed in between would reset them. False: that cannot
    /// be had, or need not, for a Unix-domain socket knows no handshake.
    pub fn refuse_new(&self) -> bool {
        // Offset 13 of a TCP header has the flags: a lone SYN asks for a connection.
        const SYN: u32 = 0x02;
        const ACK: u32 = 0x10;
        let drop_syn = [
            SockFilter::new(0x30, 0, 0, 13),        // load the octet at 13
            SockFilter::new(0x54, 0, 0, SYN | ACK), // and
            SockFilter::new(0x15, 0, 1, SYN),       // is it a SYN alone?
            SockFilter::new(0x06, 0, 0, 0),         // then nothing of it is kept
            SockFilter::new(0x06, 0, 0, u32::MAX),  // else all
        ];
        match self {
            Self::Tcp(l) => SockRef::from(l).attach_filter(&drop_syn).is_ok(),
            Self::Unix(_) => false,
        }
    }

    /// Whether there are connections that are not established yet.
    pub async fn has_handshakes(&self) -> bool {
        let Self::Tcp(l) = self else { return false };
        let Ok(address) = l.local_addr() else { return false };
        // A table of all connections: nothing that a worker should read by itself.
        let asked =
            tokio::task::spawn_blocking(move || crate::holder::has_handshakes(address.port()));
        asked.await.unwrap_or(false)
    }

    /// The next connection, and its peer's address if it has one.
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Stream, Option<IpAddr>)>> {
        match self {
            Self::Tcp(l) => l
                .poll_accept(cx)
                .map_ok(|(stream, peer)| (Stream::Tcp(stream), Some(peer.ip().to_canonical()))),
            Self::Unix(l) => l.poll_accept(cx).map_ok(|(stream, _)| (Stream::Unix(stream), None)),
        }
    }
}

/// A failure to listen: which address, and why, for people.
#[derive(Debug)]
pub struct BindError {
    /// The address.
    pub bind: Bind,
    /// What went wrong.
    pub error: io::Error,
    /// Who has it, if that could be found out.
    pub holder: Option<String>,
}

impl std::fmt::Display for BindError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot listen on {}: ", self.bind)?;
        match (self.error.kind(), &self.holder) {
            (io::ErrorKind::AddrInUse, Some(holder)) => {
                write!(f, "the address is in use by {holder}")
            }
            (io::ErrorKind::AddrInUse, None) => write!(f, "the address is in use"),
            (io::ErrorKind::PermissionDenied, _) => {
                write!(f, "permission denied; ports below 1024 need CAP_NET_BIND_SERVICE or root")
            }
            (io::ErrorKind::AddrNotAvailable, _) => {
                write!(f, "this machine does not have the address")
            }
            _ => self.error.fmt(f),
        }
    }
}

/// Sockets for `bind`, one for each of `workers`; clients can connect after [`Bound::listen`].
/// `beside_own`: this process itself has an address that covers it, or is covered by it.
///
/// # Errors
/// The address cannot be bound. It is tried without `SO_REUSEPORT` first: with it a second
/// process of the same user would get its share of the connections in silence.
pub fn bind(bind: &Bind, workers: usize, beside_own: bool) -> Result<Vec<Bound>, BindError> {
    let all = match bind {
        Bind::Tcp(address) => bind_tcp(*address, workers, beside_own),
        Bind::Unix(path) => bind_unix(path, workers),
    };
    all.map_err(|error| {
        let holder = match (bind, error.kind()) {
            (Bind::Tcp(address), io::ErrorKind::AddrInUse) => crate::holder::of_port(*address),
            _ => None,
        };
        BindError { bind: bind.clone(), error, holder }
    })
}

/// As [`bind`], for clients: whoever can reach the file of a Unix-domain socket may connect.
///
/// # Errors
/// As [`bind`].
pub fn bind_for_clients(
    at: &Bind,
    workers: usize,
    beside_own: bool,
) -> Result<Vec<Bound>, BindError> {
    let all = bind(at, workers, beside_own)?;
    if let Bind::Unix(path) = at
        && let Err(e) = let_everybody_connect(path)
    {
        // Nobody is to find a socket that is not served.
        let _ = std::fs::remove_file(path);
        let error = io::Error::other(format!("its mode cannot be set: {e}"));
        return Err(BindError { bind: at.clone(), error, holder: None });
    }
    Ok(all)
}

/// A single socket for `bind`.
///
/// # Errors
/// As [`bind`].
pub fn bind_one(at: &Bind, beside_own: bool) -> Result<Bound, BindError> {
    let none =
        || BindError { bind: at.clone(), error: io::ErrorKind::NotFound.into(), holder: None };
    bind(at, 1, beside_own)?.pop().ok_or_else(none)
}

fn bind_tcp(mut address: SocketAddr, workers: usize, beside_own: bool) -> io::Result<Vec<Bound>> {
    if !beside_own {
        let alone = tcp_socket(address)?;
        alone.bind(&address.into())?;
        // Port 0 means any; all sockets must get the same.
        address = alone.local_addr()?.as_socket().unwrap_or(address);
    }
    (0..workers)
        .map(|_| {
            let socket = tcp_socket(address)?;
            socket.set_reuse_port(true)?;
            socket.bind(&address.into())?;
            set_inherited(&socket)?;
            Ok(Bound::Tcp(socket.into()))
        })
        .collect()
}

/// Sets what accepted connections inherit, which saves a call for each of them.
pub(crate) fn set_inherited(socket: &Socket) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    // A client that has vanished is noticed even where nothing is due to be sent.
    let probes = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 4);
    socket.set_tcp_keepalive(&probes)
}

fn tcp_socket(address: SocketAddr) -> io::Result<Socket> {
    let socket =
        Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    // A server that starts again must not wait for old connections to fade.
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        // "[::]" takes IPv4 too, as on most systems; some distributions change the default.
        socket.set_only_v6(false)?;
    }
    Ok(socket)
}

/// All workers share one Unix-domain socket: there is no `SO_REUSEPORT` for them.
fn bind_unix(path: &Path, workers: usize) -> io::Result<Vec<Bound>> {
    let other = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
    match other.connect(&SockAddr::unix(path)?) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        // A socket file that nobody answers on is left over from a crash.
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused && is_socket(path) => {
            std::fs::remove_file(path)?;
        }
        // No stream socket at all: `bind` says what is wrong with that.
        Err(e) if !is_socket(path) && e.kind() == io::ErrorKind::ConnectionRefused => {}
        // Somebody answers, or would if its queue were not full, or has another kind of socket.
        _ => return Err(io::ErrorKind::AddrInUse.into()),
    }
    let first = std::os::unix::net::UnixListener::bind(path)?;
    first.set_nonblocking(true)?;
    let mut all = vec![];
    for _ in 1..workers {
        all.push(Bound::Unix(first.try_clone()?));
    }
    all.push(Bound::Unix(first));
    Ok(all)
}

fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket())
}

/// Leaves it to the permissions of the folder who may connect, whatever the umask is.
fn let_everybody_connect(path: &Path) -> io::Result<()> {
    // Who else may write to the folder could have put a link to another file there.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if !file.metadata()?.file_type().is_socket() {
        return Err(io::Error::other("somebody has put something else in its place"));
    }
    // By its descriptor: a path would be followed anew.
    let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
    std::fs::set_permissions(itself, Permissions::from_mode(0o666))
}

/// Whether two addresses have something in common.
pub fn overlap(a: &Bind, b: &Bind) -> bool {
    covers(a, b) || covers(b, a)
}

/// Whether whoever listens at `wide` also gets what comes to `narrow`.
pub fn covers(wide: &Bind, narrow: &Bind) -> bool {
    match (wide, narrow) {
        (Bind::Tcp(wide), Bind::Tcp(narrow)) => {
            let any = wide.ip().is_unspecified() && (wide.is_ipv6() || narrow.is_ipv4());
            wide.port() == narrow.port() && wide.port() != 0 && (any || wide.ip() == narrow.ip())
        }
        (wide, narrow) => wide == narrow,
    }
}

impl From<Bound> for OwnedFd {
    fn from(bound: Bound) -> Self {
        match bound {
            Bound::Tcp(listener) => listener.into(),
            Bound::Unix(listener) => listener.into(),
        }
    }
}

impl Bound {
    /// Another handle of the same socket.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(listener) => Self::Tcp(listener.try_clone()?),
            Self::Unix(listener) => Self::Unix(listener.try_clone()?),
        })
    }

    /// Lets clients connect.
    ///
    /// # Errors
    /// The system's.
    pub fn listen(&self) -> io::Result<()> {
        match self {
            Self::Tcp(listener) => SockRef::from(listener).listen(BACKLOG),
            // It has done so from the beginning.
            Self::Unix(_) => Ok(()),
        }
    }

    /// The address that it listens on, as a configuration would have it.
    pub fn local(&self) -> Option<Bind> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok().map(Bind::Tcp),
            Self::Unix(listener) => {
                let address = listener.local_addr().ok()?;
                Some(Bind::Unix(address.as_pathname()?.to_owned()))
            }
        }
    }
}
