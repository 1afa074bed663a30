//! Panics that were caught, by where they happened.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::sync::lock;

/// Places that are told apart; panics elsewhere are counted as `other`.
const MAX_PLACES: usize = 64;

/// Counts by `file:line`.
#[derive(Debug, Default)]
pub struct Panics(Mutex<BTreeMap<String, u64>>);

impl Panics {
    /// Counts one.
    pub fn up(&self, location: &str) {
        let mut counts = lock(&self.0);
        let known = counts.contains_key(location) || counts.len() < MAX_PLACES;
        *counts.entry(if known { location } else { "other" }.to_owned()).or_default() += 1;
    }

    /// All counts.
    pub fn all(&self) -> BTreeMap<String, u64> {
        lock(&self.0).clone()
    }
}
