//! Panics that were caught, by where they happened.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Places that are told apart; panics elsewhere are counted as `other`.
const MAX_PLACES: usize = 64;

/// Counts by `file:line`.
#[derive(Debug, Default)]
pub struct Panics(Mutex<BTreeMap<String, u64>>);

impl Panics {
    /// Counts one.
    #[expect(clippy::disallowed_methods, reason = "poison is handled right here")]
    pub fn up(&self, location: &str) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = counts.contains_key(location) || counts.len() < MAX_PLACES;
        *counts.entry(if known { location } else { "other" }.to_owned()).or_default() += 1;
    }

    /// All counts.
    #[expect(clippy::disallowed_methods, reason = "poison is handled right here")]
    pub fn all(&self) -> BTreeMap<String, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
