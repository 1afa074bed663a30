//! Averages over time, and percentiles.

mod ewma;
mod percentile;

pub use ewma::{Ewma, HalfLife};
pub use percentile::Percentile;
