//! The little that the standard library lacks here: Linux epoll and a send that raises no SIGPIPE.
//! Declared by hand, so that plain `rustc` builds the tools without any crate.

use std::io;
use std::os::fd::RawFd;

pub const READ: u32 = 0x001;
pub const WRITE: u32 = 0x004;

const ADD: i32 = 1;
const MODIFY: i32 = 3;
const MSG_NOSIGNAL: i32 = 0x4000;
const BATCH: usize = 512;

/// Matches the kernel's `struct epoll_event`, which is packed on x86-64 only.
#[derive(Clone, Copy)]
#[cfg_attr(target_arch = "x86_64", repr(C, packed))]
#[cfg_attr(not(target_arch = "x86_64"), repr(C))]
pub struct Event {
    pub flags: u32,
    pub key: u64,
}

#[repr(C)]
struct Timespec {
    sec: i64,
    nsec: i64,
}

unsafe extern "C" {
    fn epoll_create1(flags: i32) -> i32;
    fn epoll_ctl(epoll: i32, op: i32, fd: i32, event: *mut Event) -> i32;
    fn epoll_pwait2(
        epoll: i32,
        events: *mut Event,
        max: i32,
        timeout: *const Timespec,
        mask: *const u8,
    ) -> i32;
    fn send(fd: i32, data: *const u8, len: usize, flags: i32) -> isize;
    fn recv(fd: i32, data: *mut u8, len: usize, flags: i32) -> isize;
    fn close(fd: i32) -> i32;
    fn listen(fd: i32, backlog: i32) -> i32;
}

pub struct Poll {
    epoll: RawFd,
    events: Vec<Event>,
}

impl Poll {
    pub fn new() -> io::Result<Poll> {
        let epoll = unsafe { epoll_create1(0) };
        if epoll < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Poll { epoll, events: vec![Event { flags: 0, key: 0 }; BATCH] })
    }

    fn control(&self, op: i32, fd: RawFd, flags: u32, key: u64) {
        let mut event = Event { flags, key };
        unsafe { epoll_ctl(self.epoll, op, fd, &mut event) };
    }

    pub fn add(&self, fd: RawFd, flags: u32, key: u64) {
        self.control(ADD, fd, flags, key);
    }

    pub fn change(&self, fd: RawFd, flags: u32, key: u64) {
        self.control(MODIFY, fd, flags, key);
    }

    /// Waits for events; `None` waits without limit. The events stay in place for `event()`.
    pub fn wait(&mut self, limit: Option<std::time::Duration>) -> usize {
        let spec =
            limit.map(|d| Timespec { sec: d.as_secs() as i64, nsec: d.subsec_nanos() as i64 });
        let timeout = spec.as_ref().map_or(std::ptr::null(), |s| s as *const Timespec);
        let n = unsafe {
            epoll_pwait2(
                self.epoll,
                self.events.as_mut_ptr(),
                BATCH as i32,
                timeout,
                std::ptr::null(),
            )
        };
        n.max(0) as usize
    }

    pub fn event(&self, i: usize) -> (u32, u64) {
        let e = self.events[i];
        (e.flags, e.key)
    }
}

/// The result of one non-blocking transfer.
pub enum Io {
    Done(usize),
    Wait,
    Closed,
}

fn outcome(n: isize) -> Io {
    if n >= 0 {
        return Io::Done(n as usize);
    }
    match io::Error::last_os_error().kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Io::Wait,
        _ => Io::Closed,
    }
}

pub fn write(fd: RawFd, data: &[u8]) -> Io {
    outcome(unsafe { send(fd, data.as_ptr(), data.len(), MSG_NOSIGNAL) })
}

pub fn read(fd: RawFd, room: &mut [u8]) -> Io {
    match outcome(unsafe { recv(fd, room.as_mut_ptr(), room.len(), 0) }) {
        Io::Done(0) => Io::Closed,
        other => other,
    }
}

pub fn shut(fd: RawFd) {
    unsafe { close(fd) };
}

/// Widens a listener's backlog beyond the 128 that the standard library asks for.
pub fn widen_backlog(fd: RawFd) {
    unsafe { listen(fd, 4096) };
}
