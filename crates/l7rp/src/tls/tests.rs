//! Handshakes over loopback, with certificates made on the spot.

mod choosing;
mod clients;
mod loading;
mod resuming;
mod upstreams;

use std::sync::Arc;

use l7rp_core::failure::Failure;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, HandshakeKind, SupportedProtocolVersion};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsConnector, TlsStream};

use super::files::{self, Authorities, Named};
use super::testing::Ca;
use super::{Accepted, HandshakeFailure, Originator, Resumption, Terminator, provider};
use crate::config::plan::{ListenerTls, UpstreamProtocol, UpstreamTls};
use crate::stream::{Stream, Tls};

fn terminator(plan: &ListenerTls) -> Terminator {
    Terminator::new(plan, &Resumption::new().unwrap(), None).unwrap()
}

fn originator(plan: &UpstreamTls) -> Originator {
    Originator::new(plan, UpstreamProtocol::Auto).unwrap()
}

fn trusting(ca: &Ca) -> UpstreamTls {
    UpstreamTls { ca_file: Some(ca.path("ca.pem")), ..UpstreamTls::default() }
}

/// Both ends of a connection.
async fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (server, client) = tokio::join!(listener.accept(), TcpStream::connect(address));
    (server.unwrap().0, client.unwrap())
}

type Outcome = Result<Accepted, HandshakeFailure>;
type Connected = Result<(Tls, bool), (Failure, String)>;

async fn shake(server: &Terminator, client: &Originator, host: &str) -> (Outcome, Connected) {
    let (at_server, at_client) = connected().await;
    tokio::join!(server.accept(at_server), client.connect(at_client, host, false))
}

/// What the client is told, and the certificate that it was shown.
async fn shake_with(
    server: &Terminator,
    client: Arc<ClientConfig>,
    host: &str,
) -> (Outcome, std::io::Result<tokio_rustls::client::TlsStream<TcpStream>>) {
    let (at_server, at_client) = connected().await;
    let name = ServerName::try_from(host.to_owned()).unwrap();
    tokio::join!(server.accept(at_server), TlsConnector::from(client).connect(name, at_client))
}

fn authorities(ca: &Ca) -> Authorities {
    files::authorities(Named { path: &ca.path("ca.pem"), name: "ca.pem" }).unwrap()
}

/// A client that trusts `ca`, as it likes otherwise.
fn client(
    ca: &Ca,
    versions: &[&'static SupportedProtocolVersion],
    change: impl FnOnce(&mut ClientConfig),
) -> Arc<ClientConfig> {
    let roots = authorities(ca).roots;
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    change(&mut config);
    Arc::new(config)
}

/// Lets the client read what the server sends of its own accord: session tickets.
async fn a_word(server: Tls, client: Tls) -> HandshakeKind {
    let kind = match client.get_ref() {
        TlsStream::Client(stream) => stream.get_ref().1.handshake_kind().unwrap(),
        TlsStream::Server(_) => unreachable!("the client's end"),
    };
    let (mut server, mut client) = (Stream::Tls(Box::new(server)), Stream::Tls(Box::new(client)));
    server.write_all(b"word").await.unwrap();
    let mut word = [0; 4];
    client.read_exact(&mut word).await.unwrap();
    assert_eq!(&word, b"word");
    kind
}

fn reason(accepted: Outcome) -> &'static str {
    let reason = accepted.map(|one| one.sni).unwrap_err().reason;
    assert!(super::REASONS.contains(&reason));
    reason
}
