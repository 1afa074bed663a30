//! A client that sends exactly what it is told to.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::{Message, SOON, Wire};

/// A client's connection.
#[derive(Debug)]
pub struct Client {
    /// The connection.
    pub wire: Wire,
}

impl From<TcpStream> for Client {
    fn from(stream: TcpStream) -> Self {
        Self::over(stream.into())
    }
}

impl From<Wire> for Client {
    fn from(wire: Wire) -> Self {
        Self::over(wire)
    }
}

impl Client {
    /// Connects.
    #[track_caller]
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect_timeout(&address, SOON).expect("the proxy accepts");
        Self::over(stream.into())
    }

    /// Connects from one local address, as one of several clients.
    #[track_caller]
    pub fn connect_from(local: std::net::IpAddr, address: SocketAddr) -> Self {
        let domain = socket2::Domain::for_address(address);
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None).expect("a socket");
        socket.bind(&SocketAddr::new(local, 0).into()).expect("a local address");
        socket.connect(&address.into()).expect("the proxy accepts");
        Self::over(TcpStream::from(socket).into())
    }

    /// Connects to a Unix-domain socket.
    #[track_caller]
    pub fn connect_unix(path: &Path) -> Self {
        Self::over(UnixStream::connect(path).expect("the proxy accepts").into())
    }

    fn over(wire: Wire) -> Self {
        wire.patience(Some(SOON));
        Self { wire }
    }

    /// Sends octets.
    #[track_caller]
    pub fn send(&mut self, data: impl AsRef<[u8]>) -> &mut Self {
        self.wire.write(data.as_ref()).expect("the proxy takes what is sent");
        self
    }

    /// Reads one head, interim responses included.
    #[track_caller]
    pub fn head(&mut self) -> Message {
        self.wire.read_head().expect("a head").expect("a head before the end")
    }

    /// Reads one whole final response to a request that is not HEAD.
    #[track_caller]
    pub fn response(&mut self) -> Message {
        self.try_response().expect("a whole response")
    }

    /// Reads one response, which may be cut: then the error.
    pub fn try_response(&mut self) -> io::Result<Message> {
        let mut message = loop {
            let head = self.wire.read_head()?.ok_or(io::ErrorKind::UnexpectedEof)?;
            if head.status() >= 200 {
                break head;
            }
        };
        if !matches!(message.status(), 204 | 304) {
            self.wire.read_body(&mut message, true)?;
        }
        Ok(message)
    }

    /// Sends a request and reads its response.
    #[track_caller]
    pub fn ask(&mut self, data: impl AsRef<[u8]>) -> Message {
        self.send(data).response()
    }

    /// Sends a simple GET and reads its response.
    #[track_caller]
    pub fn get(&mut self, path: &str) -> Message {
        self.ask(format!("GET {path} HTTP/1.1\r\nHost: a.test\r\n\r\n"))
    }

    /// Whether the proxy ends the connection in order within `limit`, sending nothing more.
    pub fn is_closed_within(&mut self, limit: Duration) -> bool {
        self.wire.patience(Some(limit));
        let end = matches!(self.wire.read_some(1), Ok(part) if part.is_empty());
        self.wire.patience(Some(SOON));
        end
    }

    /// Closes with a reset.
    pub fn reset(self) {
        self.wire.reset();
    }
}
