//! Both peers on both sides of the program, with TLS and without.

use std::fmt;

use l7rp_testkit::{Proxy, SOON, eventually};
use rcgen::{CertifiedKey, generate_simple_self_signed};

use crate::call::{Call, Outcome, SERVICE};
use crate::python::{PythonClient, PythonServer};
use crate::tonic_client::endpoint;
use crate::tonic_server::TonicServer;
use crate::{PROGRAM, tonic_client, wait};

/// A pool that speaks HTTP/2 and whose breaker many failures do not open.
pub fn pool(name: &str, url: &str) -> String {
    format!(
        "- {{ name: {name}, upstreams: [{{ url: \"{url}\" }}], protocol: http2, \
         circuit_breaker: {{ failure_ratio: 1.0 }} }}\n"
    )
}

/// A proxy of one upstream, for everything.
#[track_caller]
pub fn proxy_of(url: &str) -> Proxy {
    Proxy::start(PROGRAM, &file(url, ""))
}

/// A file with a listener, an upstream, a route for everything to it, and other `routes`.
pub fn file(url: &str, routes: &str) -> String {
    format!(
        "listeners:\n- {{ name: web, bind: \"127.0.0.1:0\" }}\nupstream_pools:\n{}\
         routes:\n- {{ name: r, pool: b }}\n{routes}",
        pool("b", url)
    )
}

/// A section for many calls: all that is logged is kept for the test's own report.
pub const SILENT: &str = "access_log: { enabled: false }\n";

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Peer {
    Tonic,
    Python,
}

const PEERS: [Peer; 2] = [Peer::Tonic, Peer::Python];

impl Peer {
    /// The name by which the proxy finds it as an upstream.
    fn host(self) -> &'static str {
        match self {
            Self::Tonic => "tonic.test",
            Self::Python => "python.test",
        }
    }
}

/// Clients, the program, servers.
pub struct Bench {
    pub proxy: Proxy,
    client: PythonClient,
    tonic: TonicServer,
    python: PythonServer,
    certificate: Certificate,
}

/// What the listener with TLS shows.
struct Certificate {
    pem: String,
    file: String,
    _folder: tempfile::TempDir,
}

impl Bench {
    #[track_caller]
    pub fn start() -> Self {
        let (client, tonic, python) =
            (PythonClient::start(), TonicServer::start(), PythonServer::start());
        let hosts = PEERS.map(|peer| peer.host().to_owned()).to_vec();
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed(hosts).expect("a certificate");
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
        let (file, key) = (path("a.crt"), path("a.key"));
        std::fs::write(&file, cert.pem()).expect("a file");
        std::fs::write(&key, signing_key.serialize_pem()).expect("a file");
        let route = |peer: Peer| {
            let host = peer.host();
            format!("- {{ name: {host}, host: {host}, path_prefix: {SERVICE}, pool: {host} }}\n")
        };
        let yaml = format!(
            "listeners:\n- {{ name: plain, bind: \"127.0.0.1:0\" }}\n\
             - {{ name: secured, bind: \"127.0.0.1:0\", \
             tls: {{ certs: [{{ cert: '{file}', key: '{key}' }}] }} }}\n\
             upstream_pools:\n{}{}routes:\n{}{}",
            pool(Peer::Tonic.host(), &tonic.url()),
            pool(Peer::Python.host(), &python.url()),
            route(Peer::Tonic),
            route(Peer::Python)
        );
        let certificate = Certificate { pem: cert.pem(), file, _folder: folder };
        Self { proxy: Proxy::start(PROGRAM, &yaml), client, tonic, python, certificate }
    }

    /// Every way from a client to a server.
    pub fn ways(&self) -> impl Iterator<Item = Way<'_>> {
        let pairs = PEERS.into_iter().flat_map(|client| PEERS.map(|server| (client, server)));
        pairs.flat_map(|(client, server)| {
            [false, true].map(|secured| Way { bench: self, client, server, secured })
        })
    }
}

/// A way from a client to a server.
pub struct Way<'a> {
    bench: &'a Bench,
    pub client: Peer,
    pub server: Peer,
    secured: bool,
}

impl fmt::Display for Way<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let transport = if self.secured { "TLS" } else { "h2c" };
        write!(f, "{:?} to {:?} by {transport}", self.client, self.server)
    }
}

impl Way<'_> {
    /// Makes the call, on a connection of its own where the client is tonic.
    #[track_caller]
    pub fn call(&self, call: &Call) -> Outcome {
        let Bench { proxy, client, certificate, .. } = self.bench;
        let (listener, host) = (if self.secured { "secured" } else { "plain" }, self.server.host());
        let address = proxy.listener(listener);
        match self.client {
            Peer::Python => {
                let ca = self.secured.then_some(certificate.file.as_str());
                client.call(address, host, ca, call)
            }
            Peer::Tonic => wait(async {
                let pem = self.secured.then_some(certificate.pem.as_str());
                let channel = endpoint(address, host, pem).connect().await.expect("it accepts");
                tonic_client::call(channel, call).await
            }),
        }
    }

    fn lost(&self) -> Vec<String> {
        match self.server {
            Peer::Tonic => self.bench.tonic.lost(),
            Peer::Python => self.bench.python.lost(),
        }
    }

    /// Makes a call that the server must see coming to nothing, and no other.
    #[track_caller]
    pub fn call_in_vain(&self, call: &Call) -> Outcome {
        let before = self.lost().len();
        let outcome = self.call(call);
        eventually(SOON, || self.lost().len() > before);
        assert_eq!(self.lost()[before..], [call.method], "{self}");
        outcome
    }
}
