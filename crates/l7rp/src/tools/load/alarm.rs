//! A timer that is exact to some microseconds. That of the runtime is to a millisecond, which in an
//! open loop would be the tool's own latency in every answer.

use std::io;
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;

/// An alarm. To the runtime a timer of the system is something that is read, like a pipe.
#[derive(Debug)]
pub(super) struct Alarm(Receiver);

impl Alarm {
    pub(super) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Receiver::from_owned_fd_unchecked(timer).map(Self)
    }

    /// Waits for this long.
    pub(super) async fn after(&mut self, time: Duration) -> io::Result<()> {
        let time = Timespec {
            tv_sec: time.as_secs().cast_signed(),
            // Zero would switch it off.
            tv_nsec: time.subsec_nanos().max(1).into(),
        };
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let once = Itimerspec { it_interval: none, it_value: time };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &once)?;
        // The number of expiries has 8 octets. A read that does not fill its buffer tells the
        // runtime that there is no more.
        self.0.read(&mut [0; 16]).await.map(drop)
    }
}
