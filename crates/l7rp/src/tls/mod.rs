//! TLS: files with certificates and keys ([`files`]), handshakes with clients ([`server`]), which
//! certificate a client is shown ([`choose`], [`issued`]), handshakes with upstreams ([`client`]).

pub mod choose;
pub mod client;
pub mod files;
mod handshake;
mod identity;
pub mod issued;
mod material;
pub mod server;
mod verify;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;

use rustls::crypto::{CryptoProvider, aws_lc_rs};

pub use client::Originator;
pub use handshake::{Accepted, HandshakeFailure, REASONS};
pub use issued::Issued;
pub use material::{Material, MaterialError};
pub use server::{Resumption, Shown, Terminator};

/// Why TLS cannot be set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsError {
    /// The file that it is about; `None`: what the system has.
    pub file: Option<PathBuf>,
    /// What is wrong, with the name of the file. Nothing of what is in a key.
    pub message: String,
    /// What was expected, or what to do.
    pub help: Option<String>,
}

impl std::fmt::Display for TlsError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        self.help.as_ref().map_or(Ok(()), |help| write!(f, " ({help})"))
    }
}

impl std::error::Error for TlsError {}

/// The one provider of cryptography. Named each time, so that nothing depends on what a library
/// may have made the default of the process.
fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: std::sync::OnceLock<Arc<CryptoProvider>> = std::sync::OnceLock::new();
    PROVIDER.get_or_init(|| Arc::new(aws_lc_rs::default_provider())).clone()
}

/// A time in seconds since 1970, for people.
fn date(seconds: i64) -> String {
    let milliseconds = u64::try_from(seconds).unwrap_or(0).saturating_mul(1000);
    crate::observe::event::timestamp(milliseconds).replace(".000Z", "Z")
}

/// What the TLS library has said, if it was that which failed and not the connection.
fn inner(e: &std::io::Error) -> Option<&rustls::Error> {
    e.get_ref()?.downcast_ref()
}
