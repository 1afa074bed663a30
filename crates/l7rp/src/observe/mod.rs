//! What is told to the outside: metrics, log lines, events. The only place that knows their
//! names.

pub mod access_log;
pub mod event;
pub mod log;
pub mod metrics;
pub mod panics;
pub mod stats;
pub mod traces;
pub mod tries;
