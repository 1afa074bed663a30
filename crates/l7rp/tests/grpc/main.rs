//! gRPC through the running program, between peers that know nothing of it and share no code:
//! tonic, and the one of Python, which is C at heart. A test target of its own, where the program
//! is built beforehand, and where only those who run it wait for tonic.

#![allow(clippy::disallowed_methods, reason = "tests read the time and poll conditions")]
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests fail loudly")]
#![allow(clippy::float_cmp, reason = "counts in metrics are whole numbers")]
#![allow(clippy::print_stdout, reason = "measurements are told to who asks for them")]

mod bench;
mod call;
mod calls;
mod drain;
mod faults;
mod python;
mod raw;
mod reload;
mod tap;
mod tonic_client;
mod tonic_server;

use std::future::Future;
use std::sync::LazyLock;
use std::time::Duration;

use l7rp_testkit::SOON;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

/// The program.
const PROGRAM: &str = env!("CARGO_BIN_EXE_l7rp");

/// More than any message here has; gRPC's own limit is 4 MiB.
const LONGEST: usize = 16 << 20;

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
});

/// Waits for what should happen at once.
#[track_caller]
fn wait<T>(what: impl Future<Output = T>) -> T {
    wait_for(SOON, what)
}

/// Waits for what must happen within `limit`.
#[track_caller]
fn wait_for<T>(limit: Duration, what: impl Future<Output = T>) -> T {
    let limited = RUNTIME.block_on(async { tokio::time::timeout(limit, what).await });
    limited.expect("it happens in time")
}

/// Goes on with this while the test does something else.
fn meanwhile<T: Send + 'static>(what: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    RUNTIME.spawn(what)
}
