//! Certificates made for one test, and both ends of TLS: what a client is shown, and upstreams
//! that speak it.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use l7rp_testkit::{Call, Client, Layer, Origin, Proxy, SOON, Then, Wire};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, PKCS_RSA_SHA256,
    RsaKeySize,
};
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    ClientConfig, ClientConnection, ConnectionCommon, HandshakeKind, RootCertStore, ServerConfig,
    ServerConnection, SideData, StreamOwned, SupportedProtocolVersion,
};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::setup::over;

/// The name that most tests ask for.
pub const HOST: &str = "a.test";

/// A CA, and a folder for what it issues.
pub struct Ca {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: tempfile::TempDir,
}

/// The files of a certificate.
#[derive(Clone)]
pub struct Pair {
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Pair {
    /// As an item of `certs`, with more keys, each after a comma.
    pub fn item(&self, keys: &str) -> String {
        format!("{{ cert: \"{}\", key: \"{}\"{keys} }}", self.cert.display(), self.key.display())
    }

    /// Puts the files of another in the place of its own.
    pub fn becomes(&self, other: &Self) {
        for (from, to) in [(&other.cert, &self.cert), (&other.key, &self.key)] {
            std::fs::copy(from, to).expect("a file");
        }
    }

    pub fn chain(&self) -> Vec<CertificateDer<'static>> {
        certificates(&self.cert)
    }

    pub fn private(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::from_pem_file(&self.key).expect("a key")
    }
}

fn certificates(file: &Path) -> Vec<CertificateDer<'static>> {
    let all = CertificateDer::pem_file_iter(file).expect("a file");
    all.collect::<Result<_, _>>().expect("certificates")
}

impl Ca {
    /// A CA whose certificate is in `ca.pem`.
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("a CA");
        let ca = Self { issuer, folder: tempfile::tempdir().expect("a folder") };
        std::fs::write(ca.file(), ca.issuer.pem()).expect("a file");
        ca
    }

    /// The file with its certificate.
    pub fn file(&self) -> PathBuf {
        self.path("ca.pem")
    }

    /// A file in its folder.
    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    /// Issues a certificate for these names to `name`.
    pub fn issue(&self, name: &str, hosts: &[&str]) -> Pair {
        self.issue_with(name, hosts, |_| {})
    }

    pub fn issue_with(
        &self,
        name: &str,
        hosts: &[&str],
        change: impl FnOnce(&mut CertificateParams),
    ) -> Pair {
        self.issue_for(&KeyPair::generate().expect("a key"), name, hosts, change)
    }

    /// As [`Ca::issue`], for a key of RSA: signing with it takes a server ten times as long.
    pub fn issue_rsa(&self, name: &str, hosts: &[&str]) -> Pair {
        self.issue_for(&rsa(), name, hosts, |_| {})
    }

    /// As [`Ca::issue_with`], for this key.
    pub fn issue_for(
        &self,
        key: &KeyPair,
        name: &str,
        hosts: &[&str],
        change: impl FnOnce(&mut CertificateParams),
    ) -> Pair {
        let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(hosts).expect("names");
        params.distinguished_name.push(DnType::CommonName, name);
        change(&mut params);
        let certificate = params.signed_by(key, &self.issuer).expect("a certificate");
        let pair = Pair {
            cert: self.path(&format!("{name}.crt")),
            key: self.path(&format!("{name}.key")),
        };
        std::fs::write(&pair.cert, certificate.pem()).expect("a file");
        std::fs::write(&pair.key, key.serialize_pem()).expect("a file");
        pair
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.file()) {
            roots.add(certificate).expect("a CA");
        }
        roots
    }

    /// A client that trusts it and resumes nothing.
    pub fn client(&self) -> ClientConfig {
        self.client_of(rustls::ALL_VERSIONS, None)
    }

    /// As [`Ca::client`], of these versions of TLS, with a certificate of its own.
    pub fn client_of(
        &self,
        versions: &[&'static SupportedProtocolVersion],
        own: Option<&Pair>,
    ) -> ClientConfig {
        let builder = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(versions)
            .expect("versions")
            .with_root_certificates(self.roots());
        let mut config = match own {
            Some(own) => {
                builder.with_client_auth_cert(own.chain(), own.private()).expect("a certificate")
            }
            None => builder.with_no_client_auth(),
        };
        config.resumption = Resumption::disabled();
        config
    }

    /// A server with this certificate. `guarded`: it asks for a certificate of this CA.
    pub fn server(&self, own: &Pair, guarded: bool, alpn: &[&str]) -> Arc<ServerConfig> {
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .expect("versions");
        let builder = if guarded {
            let roots = Arc::new(self.roots());
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
            builder.with_client_cert_verifier(verifier.expect("a CA"))
        } else {
            builder.with_no_client_auth()
        };
        let mut config =
            builder.with_single_cert(own.chain(), own.private()).expect("a certificate");
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        Arc::new(config)
    }
}

/// A key of RSA.
pub fn rsa() -> KeyPair {
    KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048).expect("a key")
}

pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// The name that a certificate was issued to.
pub fn issued_to(certificate: &CertificateDer<'_>) -> String {
    let (_, certificate) = X509Certificate::from_der(certificate).expect("a certificate");
    let name = certificate.subject().iter_common_name().next().expect("a common name");
    name.as_str().expect("text").to_owned()
}

/// Keys of a listener with these certificates, and more of `tls`, each after a comma.
pub fn tls(pairs: &[&Pair], keys: &str) -> String {
    let items: Vec<_> = pairs.iter().map(|pair| pair.item("")).collect();
    format!("tls: {{ certs: [{}]{keys} }}", items.join(", "))
}

/// A proxy for this upstream that speaks TLS as `a.test`, and a client for it.
pub fn secured(origin: &Origin) -> (Ca, Proxy, Arc<ClientConfig>) {
    let ca = Ca::new("ca");
    let pair = ca.issue("a", &[HOST]);
    let proxy = over(&[origin]).listener(&tls(&[&pair], "")).start();
    let config = Arc::new(ca.client());
    (ca, proxy, config)
}

/// A connection after its handshake.
pub struct Shaken {
    pub client: Client,
    /// To whom the certificate was issued that was shown.
    pub shown: String,
    pub alpn: Option<String>,
    pub resumed: bool,
}

/// Shakes hands and asks for `name`.
pub fn try_shake(
    config: &Arc<ClientConfig>,
    address: SocketAddr,
    name: &str,
) -> io::Result<Shaken> {
    let mut tcp = TcpStream::connect_timeout(&address, SOON)?;
    tcp.set_read_timeout(Some(SOON))?;
    let name = ServerName::try_from(name.to_owned()).expect("a name");
    let mut end = ClientConnection::new(config.clone(), name).map_err(io::Error::other)?;
    end.complete_io(&mut tcp)?;
    let shown = end.peer_certificates().and_then(<[_]>::first).expect("a certificate");
    let shown = issued_to(shown);
    let alpn = end.alpn_protocol().map(|name| String::from_utf8_lossy(name).into_owned());
    let resumed = end.handshake_kind() == Some(HandshakeKind::Resumed);
    Ok(Shaken { client: wire(end, tcp).into(), shown, alpn, resumed })
}

/// As [`try_shake`], which goes well.
#[track_caller]
pub fn shake(config: &Arc<ClientConfig>, address: SocketAddr, name: &str) -> Shaken {
    try_shake(config, address, name).expect("a handshake")
}

/// A client of the proxy that has shaken hands for `a.test`.
#[track_caller]
pub fn client(config: &Arc<ClientConfig>, proxy: &Proxy) -> Client {
    shake(config, proxy.address(), HOST).client
}

/// An upstream that speaks TLS.
pub fn upstream(
    config: Arc<ServerConfig>,
    script: impl Fn(&mut Call<'_>) -> Then + Send + Sync + 'static,
) -> Origin {
    Origin::start_through(move |tcp| accept(&config, tcp), script)
}

/// The server's side of a handshake.
pub fn accept(config: &Arc<ServerConfig>, mut tcp: TcpStream) -> io::Result<Wire> {
    let mut end = ServerConnection::new(config.clone()).map_err(io::Error::other)?;
    end.complete_io(&mut tcp)?;
    Ok(wire(end, tcp))
}

fn wire<C, S>(end: C, tcp: TcpStream) -> Wire
where
    C: DerefMut + Deref<Target = ConnectionCommon<S>> + Send + 'static,
    S: SideData + 'static,
{
    let layer: Box<dyn Layer> = Box::new(Spoken(StreamOwned::new(end, tcp)));
    layer.into()
}

/// TLS as the test kit can speak through it.
struct Spoken<C>(StreamOwned<C, TcpStream>);

impl<C> fmt::Debug for Spoken<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TLS")
    }
}

impl<C, S> Read for Spoken<C>
where
    C: DerefMut + Deref<Target = ConnectionCommon<S>>,
    S: SideData,
{
    fn read(&mut self, part: &mut [u8]) -> io::Result<usize> {
        self.0.read(part)
    }
}

impl<C, S> Write for Spoken<C>
where
    C: DerefMut + Deref<Target = ConnectionCommon<S>>,
    S: SideData,
{
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        self.0.write(part)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl<C, S> Layer for Spoken<C>
where
    C: DerefMut + Deref<Target = ConnectionCommon<S>> + Send,
    S: SideData,
{
    fn tcp(&self) -> &TcpStream {
        &self.0.sock
    }

    /// Says so in TLS only: the connection below stays open both ways.
    fn end(&mut self) -> io::Result<()> {
        self.0.conn.send_close_notify();
        self.0.flush()
    }
}
