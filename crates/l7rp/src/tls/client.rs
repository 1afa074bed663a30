//! TLS with upstreams.

use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use l7rp_core::failure::Failure;
use rustls::client::Resumption;
use rustls::pki_types::ServerName;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{CertificateError, ClientConfig, Error, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::files::{self, Authorities, Named};
use super::verify::{self, Verifier};
use super::{TlsError, date, provider};
use crate::config::plan::{UpstreamProtocol, UpstreamTls};
use crate::stream::Tls;

/// The TLS of a pool.
#[derive(Debug)]
pub struct Originator {
    config: Arc<ClientConfig>,
    /// The same, without an offer of HTTP/2.
    only_h1: Arc<ClientConfig>,
    /// Asked for and checked instead of the upstream's host.
    name: Option<String>,
    /// HTTP/2 or nothing.
    needs_h2: bool,
    /// Whom an upstream's certificate must come from, for people.
    trusted: &'static str,
}

impl Originator {
    /// Reads the files of `plan`. The system's CAs are read once in the life of the process; the
    /// environment may say where they are (`SSL_CERT_FILE`, `SSL_CERT_DIR`).
    ///
    /// # Errors
    /// Everything that is wrong with the files.
    pub fn new(plan: &UpstreamTls, protocol: UpstreamProtocol) -> Result<Self, Vec<TlsError>> {
        let mut errors = Vec::new();
        let verifier = if plan.insecure_skip_verify {
            Ok(Verifier::insecure())
        } else {
            verifier(plan.ca_file.as_deref())
        };
        let client = plan.client_cert.as_ref().map(|(cert, key)| certificate(cert, key));
        let client = client.transpose().map_err(|mut wrong| errors.append(&mut wrong));
        let verifier = verifier.map_err(|wrong| errors.push(wrong));
        let (Ok(verifier), Ok(client)) = (verifier, client) else { return Err(errors) };
        let config = config(verifier, client, protocol).map_err(|e| {
            vec![TlsError { file: None, message: format!("cannot set up TLS: {e}"), help: None }]
        })?;
        let mut only_h1 = config.clone();
        only_h1.alpn_protocols.retain(|protocol| protocol != b"h2");
        Ok(Self {
            config: Arc::new(config),
            only_h1: Arc::new(only_h1),
            name: plan.server_name.clone(),
            needs_h2: protocol == UpstreamProtocol::Http2,
            trusted: if plan.ca_file.is_some() { "in `ca_file`" } else { "of the system" },
        })
    }

    /// The same, but each handshake is a full one.
    #[must_use]
    pub fn without_resumption(mut self) -> Self {
        for config in [&mut self.config, &mut self.only_h1] {
            Arc::make_mut(config).resumption = Resumption::disabled();
        }
        self
    }

    /// Shakes hands with the upstream `host`, a name or an IP address without brackets. Whether
    /// it is HTTP/2 that is talked comes with the stream. `only_h1`: it is not offered. The caller
    /// has the deadline.
    ///
    /// # Errors
    /// The failure, and which check has failed. Nothing of a request has been sent.
    pub async fn connect(
        &self,
        tcp: TcpStream,
        host: &str,
        only_h1: bool,
    ) -> Result<(Tls, bool), (Failure, String)> {
        let config = if only_h1 { &self.only_h1 } else { &self.config };
        let wanted = self.name.as_deref().unwrap_or(host);
        let name = ServerName::try_from(wanted.to_owned()).map_err(|_| {
            (Failure::TlsCertificate, format!("no certificate can be for the name `{wanted}`"))
        })?;
        let shaken = TlsConnector::from(config.clone()).connect(name, tcp).await;
        let stream = shaken.map_err(|e| self.why(&e))?;
        let alpn_h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        if self.needs_h2 && !alpn_h2 {
            let words = "the upstream does not offer HTTP/2 in its TLS handshake";
            return Err((Failure::TlsProtocol, words.to_owned()));
        }
        Ok((Tls::new(tokio_rustls::TlsStream::from(stream)), alpn_h2))
    }

    fn why(&self, e: &io::Error) -> (Failure, String) {
        match super::inner(e) {
            Some(Error::InvalidCertificate(what)) => {
                let words = format!("the upstream's certificate {}", self.fault(what));
                (Failure::TlsCertificate, words)
            }
            Some(Error::AlertReceived(alert)) => {
                (Failure::TlsProtocol, format!("the upstream refused the TLS handshake: {alert:?}"))
            }
            Some(Error::InvalidMessage(_)) => {
                let words = "the upstream answered the TLS handshake with something else than TLS";
                (Failure::TlsProtocol, words.to_owned())
            }
            Some(other) => (Failure::TlsProtocol, format!("TLS handshake: {other}")),
            None if e.kind() == io::ErrorKind::UnexpectedEof => {
                let words = "the upstream closed the connection in the TLS handshake";
                (Failure::TlsProtocol, words.to_owned())
            }
            None => (Failure::TlsProtocol, format!("TLS handshake: {e}")),
        }
    }

    /// What is wrong with an upstream's certificate.
    fn fault(&self, what: &CertificateError) -> String {
        match what {
            CertificateError::UnknownIssuer => {
                format!("is not trusted: no CA {} has issued it", self.trusted)
            }
            CertificateError::ExpiredContext { not_after, .. } => {
                format!("has expired at {}", date(not_after.as_secs().cast_signed()))
            }
            CertificateError::NotValidYetContext { not_before, .. } => {
                format!("is not valid before {}", date(not_before.as_secs().cast_signed()))
            }
            CertificateError::NotValidForNameContext { expected, presented } => {
                let names: Vec<&str> = presented.iter().map(|name| bare(name)).collect();
                let names =
                    if names.is_empty() { "no name at all".into() } else { names.join(", ") };
                format!("is for another name: expected {}, it is for {names}", expected.to_str())
            }
            other if verify::is_of_ca(other) => {
                "is that of a CA: a server needs one of its own, issued by it".to_owned()
            }
            other => format!("is refused: {other}"),
        }
    }
}

/// `a.test` of `DnsName("a.test")`, which is how the library tells names.
fn bare(name: &str) -> &str {
    let inner = name.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
    inner.unwrap_or(name).trim_matches('"')
}

fn verifier(ca_file: Option<&Path>) -> Result<Verifier, TlsError> {
    let name = ca_file.map(|path| path.display().to_string());
    let authorities = match (ca_file, &name) {
        (Some(path), Some(name)) => files::authorities(Named { path, name })?,
        _ => system().clone(),
    };
    Verifier::new(&authorities).map_err(|_| TlsError {
        file: ca_file.map(Path::to_owned),
        message: "the system has no CA certificates".into(),
        help: Some("install those of your distribution, or name a `ca_file`".into()),
    })
}

/// The CAs of the system. None of them is an upstream.
fn system() -> &'static Authorities {
    static SYSTEM: OnceLock<Authorities> = OnceLock::new();
    SYSTEM.get_or_init(|| {
        let mut roots = RootCertStore::empty();
        let certificates = rustls_native_certs::load_native_certs().certs;
        let (_, ignored) = roots.add_parsable_certificates(certificates);
        Authorities { roots: Arc::new(roots), certificates: Vec::new(), ignored }
    })
}

fn certificate(cert: &Path, key: &Path) -> Result<CertifiedKey, Vec<TlsError>> {
    let (cert_name, key_name) = (cert.display().to_string(), key.display().to_string());
    let cert = Named { path: cert, name: &cert_name };
    let (_, certified) = files::both(cert, Named { path: key, name: &key_name })?;
    Ok(certified)
}

fn config(
    verifier: Verifier,
    client: Option<CertifiedKey>,
    protocol: UpstreamProtocol,
) -> Result<ClientConfig, Error> {
    /// Tickets kept: 8 for each of 128 names.
    const TICKETS: usize = 1024;
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match client {
        Some(client) => builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(client))),
        None => builder.with_no_client_auth(),
    };
    config.resumption = Resumption::in_memory_sessions(TICKETS);
    let protocols: &[&[u8]] = match protocol {
        UpstreamProtocol::Http1 => &[b"http/1.1"],
        UpstreamProtocol::Http2 => &[b"h2"],
        UpstreamProtocol::Auto => &[b"h2", b"http/1.1"],
    };
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    Ok(config)
}
