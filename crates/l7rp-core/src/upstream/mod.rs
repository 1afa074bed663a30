//! Whether an upstream may be used.

pub mod breaker;
pub mod health;
pub mod passive;
pub mod ramp;
