//! HTTP/2 over TLS: chosen by ALPN, with clients and with upstreams.

use std::sync::Arc;

use h2::client::Builder;
use l7rp_testkit::{Origin, Proxy, reply};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::http2_tools::{Conn, meanwhile, request, say, wait};
use crate::setup::{Setup, over, quiet};

/// A certificate for `a.test` that vouches for itself, and where its files are.
struct Identity {
    folder: tempfile::TempDir,
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl Identity {
    fn new() -> Self {
        let names = vec!["a.test".to_owned()];
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed(names).expect("a certificate");
        let folder = tempfile::tempdir().expect("a directory");
        std::fs::write(folder.path().join("a.crt"), cert.pem()).expect("a file");
        std::fs::write(folder.path().join("a.key"), signing_key.serialize_pem()).expect("a file");
        let key = PrivateKeyDer::try_from(signing_key.serialize_der()).expect("a key");
        Self { folder, certificate: cert.der().clone(), key }
    }

    fn path(&self, file: &str) -> String {
        self.folder.path().join(file).to_string_lossy().into_owned()
    }

    /// A listener that shows it.
    fn shown(&self, setup: Setup) -> Proxy {
        let (cert, key) = (self.path("a.crt"), self.path("a.key"));
        setup.listener(&format!("tls: {{ certs: [{{ cert: '{cert}', key: '{key}' }}] }}")).start()
    }

    /// A connection of a client that offers these protocols.
    fn connect(&self, proxy: &Proxy, protocols: &[&[u8]]) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone()).expect("a certificate");
        let mut config =
            ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        let connector = TlsConnector::from(Arc::new(config));
        let address = proxy.address();
        wait(async {
            let stream = TcpStream::connect(address).await.expect("it accepts");
            let name = ServerName::try_from("a.test").expect("a name");
            connector.connect(name, stream).await.expect("a handshake")
        })
    }

    /// An upstream that shows it, and speaks HTTP/2 if it is asked for; its URL.
    fn upstream(&self) -> String {
        let mut config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![self.certificate.clone()], self.key.clone_key())
            .expect("a key that fits");
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = wait(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("an address");
        meanwhile(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                meanwhile(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let chosen = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
                    assert_eq!(chosen.as_deref(), Some(&b"h2"[..]));
                    let mut open = h2::server::handshake(stream).await.expect("a preface");
                    while let Some(Ok((request, mut respond))) = open.accept().await {
                        let scheme = request.uri().scheme_str().unwrap_or_default();
                        say(&mut respond, format!("{scheme} {}", request.uri().path()));
                    }
                });
            }
        });
        format!("https://{address}")
    }
}

#[test]
fn a_client_that_offers_it_gets_it() {
    let origin = Origin::start(reply::echo);
    let identity = Identity::new();
    let proxy = identity.shown(over(&[&origin]));
    let stream = identity.connect(&proxy, &[b"h2", b"http/1.1"]);
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let conn = Conn::over(stream, &Builder::new());
    let mut asked = request("POST", "/in");
    *asked.uri_mut() = "https://a.test/in".parse().expect("a target");
    let body = "x".repeat(1 << 20);
    let got = conn.post(asked, body.clone()).expect("an answer");
    assert!(got.status == 200 && got.text().ends_with(&body), "{}", got.status);
    assert_eq!(origin.last().get("x-forwarded-proto"), Some("https"));
    assert_eq!(proxy.logged_path("/in")["protocol"], "HTTP/2");
    quiet(&proxy);
}

#[test]
fn a_client_that_does_not_offer_it_speaks_the_other() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let origin = Origin::start(reply::name("x"));
    let identity = Identity::new();
    let proxy = identity.shown(over(&[&origin]));
    for protocols in [&[][..], &[&b"http/1.1"[..]]] {
        let mut stream = identity.connect(&proxy, protocols);
        assert!(stream.get_ref().1.alpn_protocol().is_none_or(|name| name == b"http/1.1"));
        let asked = b"GET /one HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n";
        let mut answer = Vec::new();
        wait(async {
            stream.write_all(asked).await.expect("it is taken");
            while !answer.ends_with(b"\r\n\r\nx") {
                assert!(stream.read_buf(&mut answer).await.expect("an answer") > 0);
            }
        });
        assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n"));
    }
    assert_eq!(proxy.logged_path("/one")["protocol"], "HTTP/1.1");
}

#[test]
fn an_upstream_that_chooses_it_gets_it() {
    let identity = Identity::new();
    let ca = identity.path("a.crt");
    let tls = format!("upstream_tls: {{ ca_file: '{ca}', server_name: a.test }}");
    for protocol in ["", ", protocol: http2"] {
        let proxy = over(&[])
            .upstream(&identity.upstream(), "weight: 1")
            .pool(&format!("{tls}{protocol}"))
            .start();
        for _ in 0..3 {
            let answer = proxy.get("/up");
            assert_eq!((answer.status(), answer.text().as_str()), (200, "https /up"), "{protocol}");
        }
        let got = Conn::open(&proxy).get("/two");
        assert_eq!(got.text(), "https /two");
        quiet(&proxy);
    }
}
