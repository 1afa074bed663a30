//! l7rp: a layer-7 reverse proxy and load balancer.
//!
//! | module | duty |
//! |---|---|
//! | [`cli`] | arguments; one file for each subcommand |
//! | [`config`] | the configuration as written, as meant, and what is wrong with it |
//! | [`orders`] | what the admin endpoints ask of the main thread |
//! | [`running`] | starts workers and control thread, and stops them |
//! | [`systemd`], [`handover`] | the service manager; sockets of the process before this one |
//! | [`live`] | the snapshot in force |
//! | [`serve`] | sockets and protocols: octets ⇄ exchanges |
//! | [`exchange`] | one exchange, from head to last octet: read `exchange/mod.rs` first |
//! | [`explain`] | what would become of a request, and why: asks what the exchange asks |
//! | [`acme`] | certificates that a CA issues while the proxy runs |
//! | [`tls`] | certificates and keys; handshakes with clients and upstreams |
//! | [`upstream`] | pools, connections, names |
//! | [`observe`] | metrics, log lines, events |
//! | [`admin`] | endpoints about the proxy itself |
//! | [`tools`] | what proves a configuration: test backend, load generator, demo |
//!
//! Dependencies run one way: cli → running → {config, live, serve, admin}; serve → exchange →
//! upstream; all → clock, observe, `l7rp_core`.

pub mod acme;
pub mod admin;
pub mod cli;
pub mod clock;
pub mod config;
pub mod exchange;
pub mod explain;
pub mod handover;
mod holder;
pub mod http2;
pub mod lifecycle;
mod limiter;
pub mod live;
pub mod observe;
pub mod orders;
pub mod pipe;
pub mod running;
pub mod serve;
pub mod spare;
pub mod stream;
mod sync;
mod sys;
pub mod systemd;
mod timer;
pub mod tls;
pub mod tools;
mod turns;
pub mod upstream;
pub mod worker;
