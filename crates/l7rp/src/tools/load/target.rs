//! New connections to the target.

use std::cell::Cell;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use l7rp_core::failure::Failure as Code;
use tokio::net::TcpStream;

use super::request::Url;
use super::tally::{Failure, Kind};
use super::{Plan, Trust};
use crate::config::plan::{UpstreamProtocol, UpstreamTls};
use crate::stream::Stream;
use crate::tls::Originator;

/// Where to connect, and how.
#[derive(Clone, Debug)]
pub(super) struct Target {
    host: String,
    addresses: Arc<[SocketAddr]>,
    tls: Option<Arc<Originator>>,
    /// Which address was the last to be reached.
    reached: Cell<usize>,
}

impl Target {
    /// Looks the name up and reads the files. An error is for people.
    pub(super) fn new(plan: &Plan) -> Result<Self, String> {
        let Url { host, port, is_tls, .. } = &plan.url;
        let looked_up = (host.as_str(), *port).to_socket_addrs();
        let addresses: Arc<[SocketAddr]> =
            looked_up.map_err(|e| format!("cannot look up `{host}`: {e}"))?.collect();
        let tls = is_tls.then(|| originator(&plan.trust, plan.streams.is_some())).transpose()?;
        Ok(Self { host: host.clone(), addresses, tls: tls.map(Arc::new), reached: Cell::new(0) })
    }

    /// Speaks TLS on a connection, if it is to be spoken. The caller has the deadline.
    pub(super) async fn secure(&self, tcp: TcpStream) -> Result<Stream, Failure> {
        // Best effort: without it, requests are only later.
        let _ = tcp.set_nodelay(true);
        let Some(tls) = &self.tls else { return Ok(Stream::Tcp(tcp)) };
        match tls.connect(tcp, &self.host, false).await {
            Ok((stream, _)) => Ok(Stream::Tls(Box::new(stream))),
            Err((_, words)) => Err(Failure::new(Kind::Tls, words)),
        }
    }

    /// A connection. The caller has the deadline.
    pub(super) async fn tcp(&self) -> Result<TcpStream, Failure> {
        let mut last = format!("`{}` has no address", self.host);
        for n in 0..self.addresses.len() {
            let at = (self.reached.get() + n) % self.addresses.len();
            let address = self.addresses[at];
            match TcpStream::connect(address).await {
                Ok(stream) => {
                    self.reached.set(at);
                    return Ok(stream);
                }
                Err(e) => last = format!("{address}: {e}"),
            }
        }
        Err(Failure::new(Kind::Connect, last))
    }
}

fn originator(trust: &Trust, http2: bool) -> Result<Originator, String> {
    let plan = UpstreamTls {
        ca_file: trust.ca_file.clone(),
        insecure_skip_verify: trust.insecure,
        ..UpstreamTls::default()
    };
    let protocol = if http2 { UpstreamProtocol::Http2 } else { UpstreamProtocol::Http1 };
    let made = Originator::new(&plan, protocol).map_err(|errors| {
        let words: Vec<String> = errors.iter().map(ToString::to_string).collect();
        words.join("; ")
    });
    Ok(made?.without_resumption())
}

/// What an error of an established connection means.
pub(super) fn broken(e: &io::Error, when: &str) -> Failure {
    // The TLS library tells of a malformed record as an error of its own.
    let kind = match e.kind() {
        io::ErrorKind::InvalidData => Kind::Protocol,
        _ => Kind::Reset,
    };
    Failure::new(kind, format!("{e} {when}"))
}

/// What an answer that is not HTTP/1.1 as it should be means.
pub(super) fn malformed(code: Code) -> Failure {
    let words = format!("the answer is not HTTP/1.1 as it should be: {}", code.meaning().reason);
    Failure::new(Kind::Protocol, words)
}
