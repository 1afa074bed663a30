//! Waiting for conditions.

use std::thread;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(3);

/// Waits until `condition` holds.
///
/// # Panics
/// It does not within `limit`.
#[track_caller]
pub fn eventually(limit: Duration, mut condition: impl FnMut() -> bool) {
    assert!(
        within(limit, || condition().then_some(())).is_some(),
        "the condition does not hold after {limit:?}"
    );
}

/// Waits until `ask` has an answer, at most for `limit`.
pub fn within<T>(limit: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(answer) = ask() {
            return Some(answer);
        }
        if Instant::now() >= end {
            return None;
        }
        thread::sleep(POLL);
    }
}

/// Lets time pass, for tests whose subject is time itself.
pub fn let_pass(time: Duration) {
    thread::sleep(time);
}
