//! Which route a request takes.
//!
//! Rules stand in one total order: exact hosts before wildcards before any host; then the longer
//! path prefix; then those with methods or predicates before those without; then the order of the
//! file. A request takes the first rule in that order that matches it wholly, so a rule that
//! refuses its method lets it fall through to a shorter prefix or a laxer host.
//!
//! Hosts are compared as names: without port and trailing dot, in lower case, IPv6 addresses in
//! their short form. Paths are compared as sent: `%2F` is three octets and never a slash.

mod explain;
mod host;
mod matcher;
mod table;

#[cfg(test)]
mod tests;

pub use explain::{Outcome, Verdict};
pub use host::{BadHost, Host, MAX_HOST, parse_host};
pub use matcher::Request;
pub use table::{HostPattern, Rule, Table};
