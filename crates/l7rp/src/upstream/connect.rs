//! New connections to upstreams.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use l7rp_core::failure::Failure;
use tokio::net::TcpStream;

use super::pool::{Speaks, Upstream};
use crate::stream::Stream;

/// A new connection.
#[derive(Debug)]
pub struct Connected {
    /// The connection.
    pub stream: Stream,
    /// Whether HTTP/2 is spoken on it.
    pub is_http2: bool,
}

/// Connects to `upstream`, trying its addresses in turn, within `limit` in all. `only_h1`: HTTP/2 is
/// not offered where it might be agreed on.
///
/// # Errors
/// The failure and the system's words for it.
pub async fn connect(
    upstream: &Upstream,
    limit: Duration,
    only_h1: bool,
) -> Result<Connected, (Failure, String)> {
    let mut last = (Failure::Unresolved, format!("{} has no address", upstream.host));
    let all = async {
        for address in upstream.addresses() {
            match TcpStream::connect(address).await {
                Ok(stream) => {
                    // Best effort: a socket without it works, only later.
                    let _ = stream.set_nodelay(true);
                    match secured(upstream, stream, only_h1).await {
                        Ok(connected) => return Ok(connected),
                        Err(e) => last = e,
                    }
                }
                Err(e) => last = (meaning(&e), format!("{address}: {e}")),
            }
        }
        Err(())
    };
    match tokio::time::timeout(limit, all).await {
        Ok(Ok(connected)) => Ok(connected),
        Ok(Err(())) => Err(last),
        Err(_) => {
            Err((Failure::ConnectTimeout, format!("no connection within {} ms", limit.as_millis())))
        }
    }
}

/// Speaks TLS where that is asked for.
async fn secured(
    upstream: &Upstream,
    stream: TcpStream,
    only_h1: bool,
) -> Result<Connected, (Failure, String)> {
    if !upstream.is_tls {
        let is_http2 = upstream.speaks == Speaks::Http2;
        return Ok(Connected { stream: Stream::Tcp(stream), is_http2 });
    }
    let Some(tls) = upstream.tls.load_full() else {
        return Err((Failure::TlsProtocol, "TLS is not set up".to_owned()));
    };
    let (stream, is_http2) = tls.connect(stream, &upstream.host, only_h1).await?;
    if !only_h1 {
        upstream.agreed_on_h2.store(is_http2, Relaxed);
    }
    Ok(Connected { stream: Stream::Tls(Box::new(stream)), is_http2 })
}

/// What an error on connecting means. What this machine lacks is not the upstream's fault.
fn meaning(e: &io::Error) -> Failure {
    use rustix::io::Errno;
    match Errno::from_io_error(e) {
        Some(Errno::CONNREFUSED) => Failure::ConnectRefused,
        Some(Errno::TIMEDOUT) => Failure::ConnectTimeout,
        Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::ADDRNOTAVAIL) => {
            Failure::LocalShortage
        }
        _ => Failure::ConnectFailed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_trouble_is_not_blamed_on_the_upstream() {
        use l7rp_core::failure::Blame;
        use rustix::io::Errno;
        for (errno, failure) in [
            (Errno::CONNREFUSED, Failure::ConnectRefused),
            (Errno::MFILE, Failure::LocalShortage),
            (Errno::ADDRNOTAVAIL, Failure::LocalShortage),
            (Errno::HOSTUNREACH, Failure::ConnectFailed),
            (Errno::TIMEDOUT, Failure::ConnectTimeout),
        ] {
            assert_eq!(meaning(&errno.into()), failure);
        }
        assert_eq!(Failure::LocalShortage.meaning().blame, Blame::Proxy);
    }
}
