//! Averages over time.

mod ewma;

pub use ewma::{Ewma, HalfLife};
