//! Upstreams, live: pools, connections to them, probes, the addresses behind their names.

pub mod connect;
pub mod connection;
pub mod h2;
pub mod hold;
pub mod idle;
pub mod lineage;
mod member;
pub mod obstacle;
pub mod opening;
mod place;
pub mod pool;
mod preview;
pub mod probe;
pub mod resolve;
pub mod standing;
pub mod upkeep;

#[cfg(test)]
mod simulation;
