//! systemd's protocols: what it is told (`sd_notify`), the watchdog, and the sockets that it
//! passes. Other service managers speak them too.

#[cfg(test)]
mod tests;

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use crate::handover::to_bound;
use crate::serve::listen::Bound;
use crate::sys::{FIRST_PASSED, take_passed};

/// systemd drops a whole notification of more than 4096 octets.
const MAX_STATUS: usize = 1024;

/// Tells the service manager how this process is, if there is one. Nothing here waits or fails:
/// a manager that is gone or busy must not hold the proxy up.
#[derive(Debug)]
pub struct Notify(Option<(UnixDatagram, SocketAddr)>);

impl Notify {
    /// To the manager that `NOTIFY_SOCKET` names.
    pub fn from_env() -> Self {
        let address = std::env::var_os("NOTIFY_SOCKET");
        Self(address.and_then(|address| Self::open(address.as_bytes())))
    }

    /// A path, or a name after `@` that is in no file system.
    fn open(address: &[u8]) -> Option<(UnixDatagram, SocketAddr)> {
        let address = match address {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
            path => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(path)),
        };
        // Not connected: a manager that starts again has a new socket at the same address.
        let socket = UnixDatagram::unbound().ok()?;
        socket.set_nonblocking(true).ok()?;
        Some((socket, address.ok()?))
    }

    /// Whether there is one.
    pub fn is_there(&self) -> bool {
        self.0.is_some()
    }

    fn tell(&self, assignments: &str) {
        if let Some((socket, address)) = &self.0 {
            let _ = socket.send_to_addr(assignments.as_bytes(), address);
        }
    }

    /// It has started, or the reload is over.
    pub fn ready(&self, status: &str) {
        self.tell(&format!("READY=1\nSTATUS={}", one_line(status)));
    }

    /// It reloads, until [`Self::ready`].
    pub fn reloading(&self) {
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={}", crate::clock::monotonic_us()));
    }

    /// It is about to end.
    pub fn stopping(&self, status: &str) {
        self.tell(&format!("STOPPING=1\nSTATUS={}", one_line(status)));
    }

    /// One line for people.
    pub fn status(&self, status: &str) {
        self.tell(&format!("STATUS={}", one_line(status)));
    }

    /// Another process is the service from now on.
    pub fn main_pid(&self, pid: u32) {
        self.tell(&format!("MAINPID={pid}"));
    }

    /// It is alive; due every [`watchdog_interval`].
    pub fn watchdog(&self) {
        self.tell("WATCHDOG=1");
    }

    /// Starting or stopping takes `more` from now.
    pub fn extend_timeout(&self, more: Duration) {
        self.tell(&format!("EXTEND_TIMEOUT_USEC={}", more.as_micros()));
    }
}

/// `status` without what would begin another assignment, and not too long.
fn one_line(status: &str) -> String {
    let end = status.floor_char_boundary(MAX_STATUS);
    status[..end].replace(char::is_control, " ")
}

/// How often [`Notify::watchdog`] is due, if the manager watches this process: half of the time
/// after which it acts.
pub fn watchdog_interval() -> Option<Duration> {
    let (limit, pid) = (variable("WATCHDOG_USEC"), variable("WATCHDOG_PID"));
    interval(limit.as_deref(), pid.as_deref(), std::process::id())
}

fn interval(limit: Option<&str>, pid: Option<&str>, own: u32) -> Option<Duration> {
    let limit: u64 = limit?.parse().ok().filter(|&limit| limit > 0)?;
    let ours = pid.is_none_or(|pid| pid.parse() == Ok(own));
    ours.then(|| Duration::from_micros(limit) / 2)
}

/// A socket that was open before this process began.
#[derive(Debug)]
pub struct Inherited {
    /// Its name in the socket unit (`FileDescriptorName=`), or `unknown`.
    pub name: String,
    /// The socket.
    pub socket: Bound,
}

/// The listening sockets that the service manager passed to this process; none if there is no
/// such manager. To be called once, and before another process is started from this one.
///
/// # Errors
/// What was passed is not what was announced, or is not a listening stream socket.
pub fn take_sockets() -> Result<Vec<Inherited>, String> {
    let [pid, count, names] = ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"].map(variable);
    let names = announced(pid.as_deref(), count.as_deref(), names.as_deref(), std::process::id())?;
    if names.is_empty() {
        return Ok(vec![]);
    }
    let passed = take_passed(names.len() as u16)?;
    let numbered = (FIRST_PASSED..).zip(names).zip(passed);
    let inherited = numbered.map(|((number, name), socket)| match to_bound(socket) {
        Ok(socket) => Ok(Inherited { name, socket }),
        Err(why) => Err(format!(
            "descriptor {number} ({name:?}), passed as a socket by the service manager: {why}"
        )),
    });
    inherited.collect()
}

/// The names of the descriptors that are passed to the process `own`.
fn announced(
    pid: Option<&str>,
    count: Option<&str>,
    names: Option<&str>,
    own: u32,
) -> Result<Vec<String>, String> {
    let Some(count) = count.filter(|_| pid.is_some_and(|pid| pid.parse() == Ok(own))) else {
        return Ok(vec![]);
    };
    let wrong = |_| format!("LISTEN_FDS={count} is not a number of descriptors");
    let count = usize::from(count.parse::<u16>().map_err(wrong)?);
    let Some(names) = names else {
        return Ok(vec!["unknown".to_owned(); count]);
    };
    let names: Vec<String> = names.split(':').filter(|_| count > 0).map(str::to_owned).collect();
    if names.len() != count {
        return Err(format!(
            "LISTEN_FDS={count}, but LISTEN_FDNAMES has {} names: whoever starts this process \
             must set both or no names",
            names.len()
        ));
    }
    Ok(names)
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}
