//! Whether an upstream may be used.

pub mod health;
pub mod passive;
pub mod ramp;
