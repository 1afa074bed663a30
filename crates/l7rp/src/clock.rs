//! The only reader of time. Everything else is told what time it is.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use l7rp_core::names::Nanos;
use tokio::time::Instant;

/// A monotonic clock that began when it was made.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
}

impl Clock {
    /// A clock that begins now.
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]
    #[expect(clippy::new_without_default, reason = "reading the clock should be seen")]
    pub fn new() -> Self {
        Self { origin: Instant::now() }
    }

    /// Time since the clock began.
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]
    #[inline]
    pub fn now(&self) -> Nanos {
        Nanos(Instant::now().duration_since(self.origin).as_nanos() as u64)
    }

    /// The point `at` in the runtime's terms, for its timers.
    pub fn instant(&self, at: Nanos) -> Instant {
        // A timer some years ahead is as good as none, and no sum overflows.
        let ahead = Duration::from_nanos(at.0).min(Duration::from_hours(10 * 365 * 24));
        self.origin + ahead
    }
}

/// Wall-clock time, for whoever puts it together with that of other machines.
#[expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]
pub fn wall() -> SystemTime {
    SystemTime::now()
}

/// Wall-clock time, for people: milliseconds since 1970.
#[expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]
pub fn wall_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

/// How long it is until `at`, by the wall clock; nothing if that is past.
#[expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]
pub fn wall_until(at: SystemTime) -> Duration {
    at.duration_since(SystemTime::now()).unwrap_or_default()
}

/// Microseconds of the system's monotonic clock, for a service manager on the same machine.
pub fn monotonic_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}
