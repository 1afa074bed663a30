//! The only `unsafe` of this project: owning descriptors of which nothing is known but the number.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// The first descriptor after the standard three.
pub(crate) const FIRST_PASSED: RawFd = 3;

/// The `count` descriptors from [`FIRST_PASSED`] on, which whoever started this process says it
/// left there (`LISTEN_PID` and `LISTEN_FDS`). Once for each process.
pub(crate) fn take_passed(count: u16) -> Result<Vec<OwnedFd>, String> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if std::env::var("LISTEN_PID").ok() != Some(std::process::id().to_string()) {
        return Err("LISTEN_PID is not this process: nothing was passed to it".to_owned());
    }
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Err("the passed descriptors have been taken before".to_owned());
    }
    let numbers = FIRST_PASSED..FIRST_PASSED + RawFd::from(count);
    // All of them first: none is owned if one is missing.
    for number in numbers.clone() {
        if std::fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_err() {
            return Err(format!("LISTEN_FDS={count}, but descriptor {number} is not open"));
        }
    }
    Ok(numbers.map(own).collect())
}

#[expect(unsafe_code, reason = "the protocol of socket activation has numbers only")]
fn own(number: RawFd) -> OwnedFd {
    // SAFETY: the descriptor is open, and nothing else in this process owns it. LISTEN_PID names
    // this process, so the number was in use before our first instruction and no open or socket
    // call of ours can have returned it. TAKEN lets it through here once only.
    unsafe { OwnedFd::from_raw_fd(number) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::IntoRawFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn what_is_owned_works_and_is_closed_on_drop() {
        let (passed, mut other) = UnixStream::pair().unwrap();
        let mut owned = UnixStream::from(own(passed.into_raw_fd()));
        owned.write_all(b"x").unwrap();
        drop(owned);
        let mut text = String::new();
        other.read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
    }

    #[test]
    fn nothing_is_taken_that_was_not_passed() {
        // A test runner is not started by a service manager.
        let error = take_passed(1).unwrap_err();
        assert!(error.contains("LISTEN_PID"), "{error}");
    }
}
