//! Units that must not be confused.

use std::time::Duration;

/// A point on the monotonic clock, in nanoseconds since the process began.
///
/// Core code never asks for the time: whoever calls it passes one of these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Later than any point that occurs.
    pub const NEVER: Self = Self(u64::MAX);

    /// Time passed since `earlier`; zero if `earlier` is in fact later, as it can be by a
    /// few ns when two threads report.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// This point plus `d`, at most [`Nanos::NEVER`].
    #[must_use]
    pub fn plus(self, d: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// How a response says that it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// In its status line.
    pub http: u16,
    /// In a field, if gRPC was asked for.
    pub grpc: Option<u8>,
}

impl From<u16> for Status {
    fn from(http: u16) -> Self {
        Self { http, grpc: None }
    }
}
