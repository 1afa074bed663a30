//! What l7rp promises, shown on the running program: a file for each promise.

#![allow(clippy::disallowed_methods, reason = "tests read the time and poll conditions")]
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests fail loudly")]
#![allow(clippy::float_cmp, reason = "counts in metrics are whole numbers")]
#![allow(clippy::print_stdout, reason = "measurements are told to who asks for them")]

mod abuse;
mod abuse_listeners;
mod abuse_reload;
mod abuse_reload_state;
mod abuse_upgrade;
mod backup;
mod balancing;
mod bodies;
mod body_rate;
mod breaker;
mod capacity;
mod cases_framing;
mod cases_limits;
mod connections;
mod corners;
mod drain;
mod drain_cases;
mod drain_load;
mod failures;
mod family;
mod faults_client;
mod faults_proxy;
mod faults_upstream;
mod fields;
mod forwarding;
mod half_open;
mod health;
mod hedge;
mod hedge_when;
mod leftovers;
mod limits;
mod load;
mod measure;
mod memory;
mod observability;
mod passive;
mod pipelining;
mod plan;
mod rate_limit;
mod reload;
mod reload_health;
mod reload_listeners;
mod reload_load;
mod reload_often;
mod reload_refused;
mod reload_state;
mod reloading;
mod retry;
mod retry_bodies;
mod retry_budget;
mod retry_times;
mod reuse;
mod routing;
mod service_manager;
mod setup;
mod shedding;
mod slow;
mod starting;
mod storm;
mod trailers;
mod tries;
mod tunnel_ends;
mod upgrade;
mod upgrade_binary;
mod upgrade_load;
mod verdict;
mod websocket;
mod without_file;
