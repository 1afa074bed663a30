//! l7rp: a layer-7 reverse proxy and load balancer.

pub mod config;
