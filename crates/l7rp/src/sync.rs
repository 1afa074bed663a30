//! Locks, for what is rare. A panic while one is held must not take the others with it.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, whether or not somebody has panicked while holding it: what these locks guard
/// is never left half-changed.
#[expect(clippy::disallowed_methods, reason = "poison is handled right here")]
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
