//! One handshake with a client.

use std::io;
use std::time::Duration;

use rustls::PeerIncompatible as Incompatible;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

use super::choose::ACME;
use super::identity;
use super::server::Terminator;
use crate::stream::Tls;

/// What a handshake has agreed on.
#[derive(Debug)]
pub struct Accepted {
    /// What to talk through.
    pub stream: Tls,
    /// Whether it is HTTP/2 that is talked.
    pub alpn_h2: bool,
    /// The name that the client asked for, in lower case.
    pub sni: Option<String>,
    /// Who the client has proved to be: the subject of its certificate, or its first alternative
    /// name, in visible ASCII and spaces.
    pub client_identity: Option<String>,
}

/// A handshake that came to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandshakeFailure {
    /// One of [`REASONS`].
    pub reason: &'static str,
}

/// Every reason why a handshake fails.
pub const REASONS: [&str; 14] = [
    NOT_TLS,
    PLAINTEXT_HTTP,
    NO_SHARED_VERSION,
    NO_SHARED_CIPHER,
    NO_SHARED_PROTOCOL,
    NO_CERTIFICATE,
    CLIENT_CERTIFICATE_MISSING,
    CLIENT_CERTIFICATE_REFUSED,
    CLIENT_ALERT,
    ACME_CHALLENGE,
    CLOSED,
    RESET,
    MALFORMED,
    OTHER,
];

const NOT_TLS: &str = "not_tls";
const PLAINTEXT_HTTP: &str = "plaintext_http";
const NO_SHARED_VERSION: &str = "no_shared_version";
const NO_SHARED_CIPHER: &str = "no_shared_cipher";
/// The client speaks neither of our protocols, by ALPN.
const NO_SHARED_PROTOCOL: &str = "no_shared_protocol";
/// There is none to show: ACME has not brought one yet.
const NO_CERTIFICATE: &str = "no_certificate";
const CLIENT_CERTIFICATE_MISSING: &str = "client_certificate_missing";
const CLIENT_CERTIFICATE_REFUSED: &str = "client_certificate_refused";
/// The client ended it, because it does not trust our certificate for example.
const CLIENT_ALERT: &str = "client_alert";
/// Not a failure, but no connection either: a CA has seen what it came for.
const ACME_CHALLENGE: &str = "acme_challenge";
const CLOSED: &str = "closed";
const RESET: &str = "reset";
const MALFORMED: &str = "malformed";
const OTHER: &str = "other";

const fn failure(reason: &'static str) -> HandshakeFailure {
    HandshakeFailure { reason }
}

impl Terminator {
    /// Shakes hands. Takes as long as the client likes: the caller has the deadline.
    ///
    /// # Errors
    /// Why there is no connection. The client has been told, if it can understand it.
    pub async fn accept(&self, mut tcp: TcpStream) -> Result<Accepted, HandshakeFailure> {
        /// The first octet of a record that begins a handshake.
        const HANDSHAKE: u8 = 22;
        let mut first = [0; 16];
        let seen = tcp.peek(&mut first).await.map_err(|e| failure(broken(&e)))?;
        match first[..seen] {
            [] => return Err(failure(CLOSED)),
            [HANDSHAKE, ..] => {}
            ref first if is_http(first) => {
                refuse_http(&mut tcp).await;
                return Err(failure(PLAINTEXT_HTTP));
            }
            _ => return Err(failure(NOT_TLS)),
        }
        let shaken = TlsAcceptor::from(self.config.clone()).accept(tcp).await;
        let mut stream = shaken.map_err(|e| failure(why(&e)))?;
        let connection = stream.get_ref().1;
        if connection.alpn_protocol() == Some(ACME) {
            // Best effort: the CA knows already.
            let _ = stream.shutdown().await;
            return Err(failure(ACME_CHALLENGE));
        }
        let alpn_h2 = connection.alpn_protocol() == Some(b"h2");
        let sni = connection.server_name().map(str::to_ascii_lowercase);
        let client = connection.peer_certificates().and_then(<[_]>::first);
        let client_identity = client.and_then(identity::of);
        let stream = Tls::new(tokio_rustls::TlsStream::from(stream));
        Ok(Accepted { stream, alpn_h2, sni, client_identity })
    }
}

/// Whether this is how a request in cleartext begins: a method and a space, as far as it is there.
fn is_http(first: &[u8]) -> bool {
    let method = first.split(|b| *b == b' ').next().unwrap_or_default();
    !method.is_empty() && method.iter().all(u8::is_ascii_uppercase)
}

async fn refuse_http(tcp: &mut TcpStream) {
    const TEXT: &str = "This port speaks TLS: use https://\n";
    /// As much is read and thrown away, so that what we say is not overtaken by a reset.
    const MOST: u64 = 64 << 10;
    const PATIENCE: Duration = Duration::from_secs(1);
    let response = format!(
        "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{TEXT}",
        TEXT.len()
    );
    // Best effort, all of it: the connection is over.
    let _ = tokio::time::timeout(PATIENCE, async {
        tcp.write_all(response.as_bytes()).await?;
        tcp.shutdown().await?;
        tokio::io::copy(&mut tcp.take(MOST), &mut tokio::io::sink()).await
    })
    .await;
}

fn why(e: &io::Error) -> &'static str {
    use rustls::Error;
    match super::inner(e) {
        None => broken(e),
        Some(Error::PeerIncompatible(what)) => match what {
            Incompatible::Tls12NotOffered
            | Incompatible::Tls12NotOfferedOrEnabled
            | Incompatible::SupportedVersionsExtensionRequired
            // What clients before TLS 1.2 do not have; it is missed before the version is seen.
            | Incompatible::SignatureAlgorithmsExtensionRequired
            | Incompatible::ServerDoesNotSupportTls12Or13
            | Incompatible::ServerTlsVersionIsDisabledByOurConfig => NO_SHARED_VERSION,
            _ => NO_SHARED_CIPHER,
        },
        Some(Error::NoCertificatesPresented) => CLIENT_CERTIFICATE_MISSING,
        Some(Error::InvalidCertificate(_)) => CLIENT_CERTIFICATE_REFUSED,
        Some(Error::AlertReceived(_)) => CLIENT_ALERT,
        Some(Error::NoApplicationProtocol) => NO_SHARED_PROTOCOL,
        // This is how the library says that there is no certificate for the name.
        Some(Error::General(_)) => NO_CERTIFICATE,
        Some(
            Error::InvalidMessage(_)
            | Error::InappropriateMessage { .. }
            | Error::InappropriateHandshakeMessage { .. }
            | Error::PeerMisbehaved(_)
            | Error::PeerSentOversizedRecord
            | Error::DecryptError,
        ) => MALFORMED,
        Some(_) => OTHER,
    }
}

/// What an error of the connection itself means.
fn broken(e: &io::Error) -> &'static str {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => CLOSED,
        io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted
        | io::ErrorKind::BrokenPipe => RESET,
        _ => OTHER,
    }
}
