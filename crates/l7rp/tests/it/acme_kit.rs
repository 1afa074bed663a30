//! A CA to be asked: pebble (Debian package), with names that all lead to this machine.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use l7rp_testkit::{Origin, Proxy, Then, eventually, within};
use rustls::ClientConfig;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, Error, SignatureScheme};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::reloading::free_port;
use crate::tls_kit::{Ca, Pair, provider, upstream};

/// What a CA takes to issue: it looks at a challenge, waits, and is asked again.
pub const ISSUED: Duration = Duration::from_secs(40);

/// A CA that issues for whatever it can reach at these ports.
pub struct Pebble {
    child: Child,
    port: u16,
    folder: tempfile::TempDir,
    /// Of the CA's own server.
    pub ca: Ca,
}

impl Pebble {
    /// `http` and `tls`: where it looks at challenges. `seconds`: how long certificates live.
    pub fn start(http: u16, tls: u16, seconds: u64) -> Self {
        let ca = Ca::new("of-pebble");
        let own = ca.issue("pebble", &["localhost", "127.0.0.1"]);
        let folder = tempfile::tempdir().expect("a folder");
        let port = free_port();
        let config = serde_json::json!({ "pebble": {
            "listenAddress": format!("127.0.0.1:{port}"),
            "managementListenAddress": format!("127.0.0.1:{}", free_port()),
            "certificate": own.cert, "privateKey": own.key,
            "httpPort": http, "tlsPort": tls,
            "ocspResponderURL": "", "externalAccountBindingRequired": false,
            "certificateValidityPeriod": seconds,
        }});
        let file = folder.path().join("config.json");
        fs::write(&file, config.to_string()).expect("a file");
        let log = fs::File::create(folder.path().join("log")).expect("a file");
        let child = Command::new("pebble")
            .args(["-strict", "-dnsserver", &names().to_string(), "-config"])
            .arg(file)
            // Else it dawdles for up to 15 s before it looks.
            .env("PEBBLE_VA_NOSLEEP", "1")
            // Orders that it refuses at random would be counted.
            .env("PEBBLE_WFE_NONCEREJECT", "0")
            .stdout(log.try_clone().expect("a handle"))
            .stderr(log)
            .stdin(Stdio::null())
            .spawn()
            .expect("pebble, of the Debian package of that name");
        let pebble = Self { child, port, folder, ca };
        eventually(ISSUED, || pebble.log().contains("Listening on"));
        pebble
    }

    /// The section that asks it for these names.
    pub fn autocert(&self, cache: &Path, hosts: &[&str]) -> String {
        autocert(self.port, &self.ca, cache, hosts)
    }

    /// Where it is asked.
    pub fn directory(&self) -> String {
        directory(self.port)
    }

    /// Its log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// How often it was asked for a certificate.
    pub fn orders(&self) -> usize {
        self.log().lines().filter(|line| line.contains("POST /order-plz")).count()
    }

    /// It is not there any more.
    pub fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Pebble {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The section that asks a CA at this port for these names.
fn autocert(port: u16, ca: &Ca, cache: &Path, hosts: &[&str]) -> String {
    format!(
        "autocert: {{ cache_dir: \"{}\", allowed_hosts: [{}], email: ops@example.test, \
         directory_url: \"{}\", ca_file: \"{}\" }}",
        cache.display(),
        hosts.join(", "),
        directory(port),
        ca.file().display()
    )
}

fn directory(port: u16) -> String {
    format!("https://localhost:{port}/dir")
}

/// A server of names that says of each that it is here.
fn names() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let address = socket.local_addr().expect("an address");
    thread::spawn(move || {
        let mut query = [0; 512];
        // To the end of the tests: nobody else is told the port.
        while let Ok((len, from)) = socket.recv_from(&mut query) {
            let _ = socket.send_to(&answer(&query[..len]), from);
        }
    });
    address
}

/// The answer to a question (RFC 1035, section 4): an address to one for type A, else none.
fn answer(query: &[u8]) -> Vec<u8> {
    const HEAD: usize = 12;
    let name = query[HEAD..].iter().position(|b| *b == 0).expect("the end of a name");
    let question = &query[HEAD..HEAD + name + 5];
    let is_a = question[name + 1..name + 3] == [0, 1];
    let mut out = query[..2].to_vec();
    out.extend([0x81, 0x80, 0, 1, 0, u8::from(is_a), 0, 0, 0, 0]);
    out.extend(question);
    if is_a {
        out.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4, 127, 0, 0, 1]);
    }
    out
}

/// A CA that refuses all orders, and wants to be left alone for so many seconds.
pub struct Refusing {
    _origin: Origin,
    port: u16,
    ca: Ca,
    orders: Arc<AtomicUsize>,
}

impl Refusing {
    pub fn start(seconds: u64) -> Self {
        let ca = Ca::new("of-refusing");
        let own = ca.issue("refusing", &["localhost"]);
        let orders = Arc::new(AtomicUsize::new(0));
        let counted = orders.clone();
        let origin = upstream(ca.server(&own, false, &[]), move |call| {
            let base = format!("https://{}", call.request.get("host").expect("a host"));
            let fields = "Replay-Nonce: bm9uY2U\r\nConnection: close\r\n";
            let say = |status: &str, more: &str, body: &str| {
                let length = body.len();
                format!("HTTP/1.1 {status}\r\n{fields}{more}Content-Length: {length}\r\n\r\n{body}")
            };
            let _ = call.body();
            let reply = match call.request.target() {
                "/dir" => {
                    let body = format!(
                        "{{\"newNonce\":\"{base}/n\",\"newAccount\":\"{base}/a\",\"newOrder\":\"{base}/o\",\"revokeCert\":\"{base}/r\",\"keyChange\":\"{base}/k\"}}"
                    );
                    say("200 OK", "", &body)
                }
                "/n" => format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: 0\r\n\r\n"),
                "/a" => say("201 Created", &format!("Location: {base}/a/1\r\n"), "{}"),
                _ => {
                    counted.fetch_add(1, SeqCst);
                    let body = "{\"type\":\"urn:ietf:params:acme:error:rateLimited\",\"detail\":\"too many new orders recently\",\"status\":429}";
                    say("429 Too Many Requests", &format!("Retry-After: {seconds}\r\n"), body)
                }
            };
            call.send(reply);
            Then::Close
        });
        let port = origin.url().rsplit(':').next().and_then(|port| port.parse().ok());
        Self { port: port.expect("a port"), _origin: origin, ca, orders }
    }

    pub fn autocert(&self, cache: &Path, hosts: &[&str]) -> String {
        autocert(self.port, &self.ca, cache, hosts)
    }

    pub fn orders(&self) -> usize {
        self.orders.load(SeqCst)
    }
}

/// A certificate that a client was shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    pub issuer: String,
    pub serial: String,
    pub names: Vec<String>,
}

impl Shown {
    pub fn is_pebbles(&self) -> bool {
        self.issuer.contains("Pebble")
    }
}

/// What the proxy shows at this port to who asks for `name`.
pub fn shown(port: u16, name: &str) -> Option<Shown> {
    let mut tcp = std::net::TcpStream::connect(("127.0.0.1", port)).ok()?;
    let name = ServerName::try_from(name.to_owned()).expect("a name");
    let mut end = rustls::ClientConnection::new(trusting_anybody(), name).expect("a client");
    end.complete_io(&mut tcp).ok()?;
    let first = end.peer_certificates()?.first()?.clone();
    let (_, certificate) = X509Certificate::from_der(&first).ok()?;
    let names = certificate.subject_alternative_name().ok()??.value.general_names.iter();
    Some(Shown {
        issuer: certificate.issuer().to_string(),
        serial: certificate.raw_serial_as_string(),
        names: names.map(ToString::to_string).collect(),
    })
}

/// Waits until a certificate for `name` and no other is shown that is what is waited for.
#[track_caller]
pub fn until_shown(port: u16, name: &str, is_it: impl Fn(&Shown) -> bool) -> Shown {
    let names = [format!("DNSName({name})")];
    let is_it = |shown: &Shown| shown.names == names && is_it(shown);
    let found = within(ISSUED, || shown(port, name).filter(is_it));
    found.unwrap_or_else(|| panic!("{name} is still shown {:?}", shown(port, name)))
}

/// Asks for `/` over a connection whose certificate is not looked at.
pub fn is_served(port: u16, name: &str) -> bool {
    let Ok(tcp) = std::net::TcpStream::connect(("127.0.0.1", port)) else { return false };
    let server = ServerName::try_from(name.to_owned()).expect("a name");
    let end = rustls::ClientConnection::new(trusting_anybody(), server).expect("a client");
    let mut stream = rustls::StreamOwned::new(end, tcp);
    let request = format!("GET / HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n");
    let mut answer = Vec::new();
    let asked = stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_end(&mut answer));
    asked.is_ok() && answer.starts_with(b"HTTP/1.1 200")
}

fn trusting_anybody() -> Arc<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(provider());
    let builder = builder.with_safe_default_protocol_versions().expect("versions");
    let anybody = Arc::new(Anybody);
    let builder = builder.dangerous().with_custom_certificate_verifier(anybody);
    Arc::new(builder.with_no_client_auth())
}

/// Takes any certificate: a test looks at it itself.
#[derive(Debug)]
struct Anybody;

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = provider().signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, &algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = provider().signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}

/// Listeners at these ports, one with TLS and one without, and a route that answers by itself.
/// `fallback`: a certificate from a file.
pub fn file(tls: u16, plain: u16, fallback: Option<&Pair>, autocert: &str) -> String {
    let certs = fallback.map(|pair| format!("certs: [{}], ", pair.item(""))).unwrap_or_default();
    format!(
        "listeners:\n- {{ name: tls, bind: \"127.0.0.1:{tls}\", tls: {{ {certs}{autocert} }} }}\n\
         - {{ name: web, bind: \"127.0.0.1:{plain}\" }}\n\
         routes: [{{ name: r, respond: {{ status: 200, body: here }} }}]\n"
    )
}

/// The events about certificates that have failed.
pub fn failures(proxy: &Proxy) -> Vec<serde_json::Value> {
    proxy.events("certificate_failed")
}
