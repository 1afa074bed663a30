//! What the end-to-end tests of l7rp stand on: the real program as a process, scripted
//! upstreams, and clients that send exactly the octets they are told to. Plain threads and
//! blocking sockets; every wait is for a condition and has an end.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "a test kit fails loudly, reads the time and polls conditions"
)]

mod client;
mod gate;
mod message;
mod metrics;
mod origin;
mod proxy;
mod reload;
pub mod reply;
mod wait;
mod wire;

pub use client::Client;
pub use gate::Gate;
pub use message::Message;
pub use metrics::Metrics;
pub use origin::{Call, Origin, Seen, Then};
pub use proxy::{Proxy, complete};
pub use reload::own_address;
pub use rustix::process::Signal;
pub use serde_json::Value;
pub use wait::{eventually, let_pass, within};
pub use wire::{Layer, Wire};

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a test waits for something that should happen at once.
pub const SOON: Duration = Duration::from_secs(10);

/// A lock whatever became of its last holder: a test that failed must still be able to report.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
