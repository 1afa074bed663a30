//! HTTP/2 ⇄ HTTP/1.1: heads, and bodies with their trailers. An exchange knows HTTP/1.1 only; what
//! cannot be said in it, or could be taken for something else there, is refused here.
//!
//! | file | does |
//! |---|---|
//! | `heads` | a head of one version from a head of the other |
//! | `flow` | a stream's octets in both directions, between a pipe and HTTP/2 |
//! | `meter` | counts frames, so that a peer that floods is noticed |

pub mod flow;
pub mod heads;
pub mod meter;

/// What a client begins with that knows without asking that it may speak HTTP/2 (RFC 9113 §3.4).
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
