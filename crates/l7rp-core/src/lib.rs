//! The decisions of l7rp.
//!
//! Nothing in this crate does I/O, reads a clock, draws a random number, starts a task or
//! writes a log line: time and chance are arguments, and what changed is a return value.
//! That is why every rule here can be tested as a table, and why the same seed always gives
//! the same run.
//!
//! | module | decides |
//! |---|---|
//! | [`names`] | units that must not be confused |
//! | [`failure`] | every way an exchange can fail, and what each means |
//! | [`head`] | fields of a message: which are forwarded, which are ours |
//! | [`grpc`] | what gRPC says in fields of its own |
//! | [`http1`] | where an HTTP/1.1 message begins and ends, and how one is written |
//! | [`route`] | which route a request takes |
//! | [`pick`] | which upstream of a pool |
//! | [`limit`] | whether a request may come in at all, and how many tries it may cost |
//! | [`attempts`] | the tries of one request: another, a second beside it, when, until when |
//! | [`trace`] | whether a request is traced, and how the next hop is told |
//! | [`renewal`] | when a certificate is asked for again |
//! | [`upstream`] | whether an upstream may be used: breaker, health, scoring, ramp |
//! | [`window`] | averages and percentiles over time |
//!
//! `names`, `failure`, `head`, `window` and `sync` are shared ground; the other modules do
//! not know one another.

pub mod attempts;
pub mod failure;
pub mod grpc;
pub mod head;
pub mod hex;
pub mod http1;
pub mod limit;
pub mod names;
pub mod pick;
pub mod renewal;
pub mod route;
mod sync;
pub mod trace;
pub mod upstream;
pub mod window;
