//! What is checked of an upstream's certificate.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, VerifierBuilderError};
use rustls::{CertificateError, DigitallySignedStruct, Error, SignatureScheme};

use super::files::Authorities;
use super::provider;

/// Checks upstreams' certificates. Whatever it takes, the upstream must have the key.
#[derive(Debug)]
pub(super) struct Verifier {
    /// `None`: any certificate will do.
    trust: Option<Trust>,
    algorithms: WebPkiSupportedAlgorithms,
}

#[derive(Debug)]
struct Trust {
    chains: Arc<WebPkiServerVerifier>,
    /// Certificates that are trusted themselves.
    own: Vec<CertificateDer<'static>>,
}

impl Verifier {
    /// Takes what one of `authorities` has issued, or what is one of them.
    pub(super) fn new(authorities: &Authorities) -> Result<Self, VerifierBuilderError> {
        let roots = authorities.roots.clone();
        let chains = WebPkiServerVerifier::builder_with_provider(roots, provider()).build()?;
        let trust = Trust { chains, own: authorities.certificates.clone() };
        Ok(Self { trust: Some(trust), ..Self::insecure() })
    }

    /// Takes any certificate.
    pub(super) fn insecure() -> Self {
        Self { trust: None, algorithms: provider().signature_verification_algorithms }
    }
}

/// Whether a certificate was refused for being that of a CA. The library has no kind for it.
pub(super) fn is_of_ca(e: &CertificateError) -> bool {
    matches!(e, CertificateError::Other(other) if other.to_string().contains("CaUsedAsEndEntity"))
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Some(trust) = &self.trust else { return Ok(ServerCertVerified::assertion()) };
        let verdict = trust.chains.verify_server_cert(certificate, others, name, ocsp, now);
        match verdict {
            // What `openssl req -x509` makes is server and CA in one. It has been found to be in
            // force before this is found, and it is trusted to the letter: the name is left.
            Err(Error::InvalidCertificate(e))
                if is_of_ca(&e) && trust.own.contains(certificate) =>
            {
                verify_server_name(&ParsedCertificate::try_from(certificate)?, name)?;
                Ok(ServerCertVerified::assertion())
            }
            verdict => verdict,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
