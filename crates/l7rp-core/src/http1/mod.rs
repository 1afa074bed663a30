//! HTTP/1.1 messages (RFC 9112): octets in, head and body boundaries out, and the reverse.
//!
//! Strict where leniency would let two hops disagree on where a message ends; the head stays
//! in the buffer it was read into, as ranges.

pub mod body;
pub mod encode;
mod head;
pub mod request;
pub mod response;

pub use head::{Limits, is_named_by_connection};

/// How the end of a message body is known (RFC 9112 §6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// No body.
    None,
    /// This many octets.
    Length(u64),
    /// Chunks.
    Chunked,
    /// All until the connection closes. Responses only.
    UntilClose,
}
