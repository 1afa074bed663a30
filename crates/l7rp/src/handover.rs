//! Passes listening sockets from a running proxy to its successor, over a connected Unix stream.
//!
//! A message is 4 octets of version, 4 of length (both big-endian) and that much JSON. An offer
//! is one message and then the descriptors in its order, up to 253 with one octet. The answer is
//! one message the other way.

#[cfg(test)]
mod tests;
mod within;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, sockopt};
use serde::{Deserialize, Serialize};

use crate::serve::listen::{Bound, set_inherited};
use within::Within;

/// More than a machine has addresses times workers.
const MAX_SOCKETS: usize = 16_384;

/// Linux passes no more descriptors at once (`SCM_MAX_FD`).
const BATCH: usize = 253;

/// For an offer, or an answer, to get through. Both processes only read and write meanwhile.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a proxy hands to its successor.
#[derive(Debug)]
pub struct Offer {
    /// Its listening sockets.
    pub sockets: Vec<Offered>,
    /// The pools of which it has backends that are ready.
    pub ready: Vec<String>,
}

/// One listening socket; there is one for each worker, with the same name and address.
#[derive(Debug)]
pub struct Offered {
    /// The listener's name.
    pub name: String,
    /// The address as it was configured.
    pub bind: String,
    /// Somebody else keeps it too, and looks after it when both have ended.
    pub kept: bool,
    /// The socket.
    pub socket: OwnedFd,
}

/// What the successor says to it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// It accepts connections: the predecessor may go.
    Ready {
        /// Its process id.
        pid: u32,
        /// The [`label`]s of the sockets that it uses.
        taken: Vec<String>,
    },
    /// It ends: the predecessor must go on.
    Failed {
        /// Why, for people.
        why: String,
    },
}

/// What stands for a socket in an answer: the listener's name and its address, as offered.
pub fn label(name: &str, bind: &str) -> String {
    format!("{name} {bind}")
}

/// An [`Offer`] but for its descriptors.
#[derive(Serialize, Deserialize)]
struct Header {
    ready: Vec<String>,
    sockets: Vec<Label>,
}

#[derive(Serialize, Deserialize)]
struct Label {
    name: String,
    bind: String,
    kept: bool,
}

/// Sends `offer`, whose sockets stay open here. The channel's time limits change.
///
/// # Errors
/// The other process is gone or does not read, or the offer is too large.
pub fn send(channel: &UnixStream, offer: &Offer) -> io::Result<()> {
    check_count(offer.sockets.len())?;
    let label = |s: &Offered| Label { name: s.name.clone(), bind: s.bind.clone(), kept: s.kept };
    let sockets = offer.sockets.iter().map(label).collect();
    let mut stream = Within::new(channel, PATIENCE)?;
    stream.put(&Header { ready: offer.ready.clone(), sockets })?;
    for batch in offer.sockets.chunks(BATCH) {
        let batch: Vec<BorrowedFd<'_>> = batch.iter().map(|s| s.socket.as_fd()).collect();
        stream.put_descriptors(&batch)?;
    }
    Ok(())
}

/// Receives what [`send`] sent. What came before an error is closed again.
///
/// # Errors
/// The other process is gone, is silent, or sends something else than it announces.
pub fn receive(channel: &UnixStream) -> io::Result<Offer> {
    let mut stream = Within::new(channel, PATIENCE)?;
    let header: Header = stream.get()?;
    check_count(header.sockets.len())?;
    let mut sockets = Vec::with_capacity(header.sockets.len());
    let mut labels = header.sockets.into_iter();
    while labels.len() > 0 {
        let expected = labels.len().min(BATCH);
        let batch = stream.get_descriptors()?;
        if batch.len() != expected {
            let text = format!("{expected} sockets were announced, but {} came", batch.len());
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let offered = batch.into_iter().zip(&mut labels);
        sockets.extend(offered.map(|(socket, Label { name, bind, kept })| Offered {
            name,
            bind,
            kept,
            socket,
        }));
    }
    Ok(Offer { sockets, ready: header.ready })
}

fn check_count(sockets: usize) -> io::Result<()> {
    if sockets > MAX_SOCKETS {
        let text = format!(
            "{sockets} sockets, and at most {MAX_SOCKETS} can be handed over: use fewer workers \
             or listeners"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(())
}

/// Tells the predecessor how the start went.
///
/// # Errors
/// It is gone or does not read.
pub fn answer(channel: &UnixStream, answer: &Answer) -> io::Result<()> {
    Within::new(channel, PATIENCE)?.put(answer)
}

/// Waits for the successor's answer, for `limit` at most.
///
/// # Errors
/// The successor ended, was not ready in time, or sent something else.
pub fn await_answer(channel: &UnixStream, limit: Duration) -> io::Result<Answer> {
    Within::new(channel, limit)?.get().map_err(|error| {
        let text = match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                "the new process ended before it was ready; its own output says why".to_owned()
            }
            io::ErrorKind::TimedOut => format!("the new process was not ready within {limit:?}"),
            _ => return error,
        };
        io::Error::new(error.kind(), text)
    })
}

/// Takes over a socket that another process made, if it is one that this proxy can accept on. It
/// gets the options of our own sockets; connections that wait there already keep what they have.
///
/// # Errors
/// What it is instead, or what the system refused.
pub fn to_bound(socket: OwnedFd) -> Result<Bound, String> {
    let kind = sockopt::socket_type(&socket).map_err(|error| match error {
        Errno::NOTSOCK => format!("it is {}, not a socket", target(&socket)),
        other => refused(&other.into()),
    })?;
    let refused_errno = |error: Errno| refused(&error.into());
    let family = sockopt::socket_domain(&socket).map_err(refused_errno)?;
    let tcp = [AddressFamily::INET, AddressFamily::INET6].contains(&family);
    if kind != SocketType::STREAM || !(tcp || family == AddressFamily::UNIX) {
        return Err(format!(
            "it is a {} socket ({}), and only stream sockets of TCP or Unix are accepted on",
            kind_name(kind),
            family_name(family)
        ));
    }
    if !sockopt::socket_acceptconn(&socket).map_err(refused_errno)? {
        return Err("it is a stream socket that does not listen (in a systemd unit, Accept= must \
                    be no)"
            .to_owned());
    }
    rustix::io::ioctl_fionbio(&socket, true).map_err(refused_errno)?;
    rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC).map_err(refused_errno)?;
    if !tcp {
        return Ok(Bound::Unix(socket.into()));
    }
    set_inherited(&socket2::SockRef::from(&socket)).map_err(|e| refused(&e))?;
    Ok(Bound::Tcp(socket.into()))
}

fn refused(error: &io::Error) -> String {
    format!("it cannot be examined and set up as a listening socket: {error}")
}

/// What a descriptor stands for, as `/proc` has it: `/dev/null`, `pipe:[4711]`.
fn target(descriptor: &OwnedFd) -> String {
    std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))
        .map_or_else(|_| "something else".to_owned(), |path| path.display().to_string())
}

fn kind_name(kind: SocketType) -> String {
    match kind {
        SocketType::STREAM => "stream".to_owned(),
        SocketType::DGRAM => "datagram".to_owned(),
        SocketType::SEQPACKET => "sequential-packet".to_owned(),
        SocketType::RAW => "raw".to_owned(),
        other => format!("type {}", other.as_raw()),
    }
}

fn family_name(family: AddressFamily) -> String {
    match family {
        AddressFamily::INET => "IPv4".to_owned(),
        AddressFamily::INET6 => "IPv6".to_owned(),
        AddressFamily::UNIX => "Unix".to_owned(),
        AddressFamily::NETLINK => "netlink".to_owned(),
        AddressFamily::VSOCK => "vsock".to_owned(),
        other => format!("family {}", other.as_raw()),
    }
}
