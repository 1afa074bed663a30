//! What a plan says of TLS.

use std::path::PathBuf;

/// TLS of a listener.
#[derive(Clone, Debug, PartialEq)]
pub struct ListenerTls {
    /// Lowest version accepted.
    pub min_version: TlsVersion,
    /// Certificates from files; the first is the fallback.
    pub certs: Vec<Certificate>,
    /// Certificates by ACME.
    pub autocert: Option<Autocert>,
    /// Certificates asked of clients.
    pub client_auth: Option<ClientAuth>,
}

/// A TLS version that may be the minimum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsVersion {
    /// TLS 1.2.
    V12,
    /// TLS 1.3.
    V13,
}

/// A certificate chain and its key, as files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// PEM chain.
    pub cert: PathBuf,
    /// PEM key.
    pub key: PathBuf,
    /// Names it is served for; empty: those in the certificate.
    pub hosts: Vec<String>,
}

/// Certificates by ACME.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Autocert {
    /// Where keys and certificates are kept.
    pub cache_dir: PathBuf,
    /// Names that may be asked for.
    pub allowed_hosts: Vec<String>,
    /// Contact.
    pub email: Option<String>,
    /// ACME directory; `None`: Let's Encrypt.
    pub directory_url: Option<String>,
    /// CA of a private ACME server.
    pub ca_file: Option<PathBuf>,
}

/// Client certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientAuth {
    /// CA bundle that clients are checked against.
    pub ca_file: PathBuf,
    /// Refuse clients without one.
    pub required: bool,
    /// Name of the field that tells upstreams who the client is, in lower case.
    pub identity_header: Option<String>,
}

/// TLS towards upstreams.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpstreamTls {
    /// CA bundle; `None`: the system's.
    pub ca_file: Option<PathBuf>,
    /// Certificate and key shown to upstreams.
    pub client_cert: Option<(PathBuf, PathBuf)>,
    /// Name asked for and checked; `None`: the URL's host.
    pub server_name: Option<String>,
    /// Accept any certificate.
    pub insecure_skip_verify: bool,
}
