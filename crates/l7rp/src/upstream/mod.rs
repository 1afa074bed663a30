//! Upstreams, live: pools, connections to them, the addresses behind their names.

pub mod connect;
pub mod connection;
pub mod idle;
pub mod pool;
pub mod resolve;
