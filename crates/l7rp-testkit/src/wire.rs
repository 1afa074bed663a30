//! A connection with what was read ahead of it; both ends of the tests speak through it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::Duration;

use crate::lock;
use crate::message::{Message, split_field};

/// A stream of any kind.
#[derive(Debug)]
enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
    Other(Mutex<Box<dyn Layer>>),
}

/// What a test brings to speak through over TCP: TLS, for example.
pub trait Layer: Read + Write + Send + std::fmt::Debug {
    /// The connection below.
    fn tcp(&self) -> &TcpStream;
    /// Says that nothing more will be sent.
    fn end(&mut self) -> io::Result<()>;
}

/// A connection.
#[derive(Debug)]
pub struct Wire {
    socket: Socket,
    ahead: Vec<u8>,
}

impl From<TcpStream> for Wire {
    fn from(stream: TcpStream) -> Self {
        let _ = stream.set_nodelay(true);
        Self { socket: Socket::Tcp(stream), ahead: Vec::new() }
    }
}

impl From<UnixStream> for Wire {
    fn from(stream: UnixStream) -> Self {
        Self { socket: Socket::Unix(stream), ahead: Vec::new() }
    }
}

impl From<Box<dyn Layer>> for Wire {
    fn from(layer: Box<dyn Layer>) -> Self {
        let _ = layer.tcp().set_nodelay(true);
        Self { socket: Socket::Other(Mutex::new(layer)), ahead: Vec::new() }
    }
}

impl Wire {
    /// Bounds every read and write from now on.
    pub fn patience(&self, limit: Option<Duration>) {
        let set = match &self.socket {
            Socket::Tcp(s) => s.set_read_timeout(limit).and_then(|()| s.set_write_timeout(limit)),
            Socket::Unix(s) => s.set_read_timeout(limit).and_then(|()| s.set_write_timeout(limit)),
            Socket::Other(s) => {
                let s = lock(s);
                s.tcp().set_read_timeout(limit).and_then(|()| s.tcp().set_write_timeout(limit))
            }
        };
        set.expect("time-outs can be set");
    }

    /// A second handle, for a thread that sends while this one reads.
    #[must_use]
    pub fn twin(&self) -> Self {
        let socket = match &self.socket {
            Socket::Tcp(s) => Socket::Tcp(s.try_clone().expect("a handle can be cloned")),
            Socket::Unix(s) => Socket::Unix(s.try_clone().expect("a handle can be cloned")),
            Socket::Other(_) => panic!("what is spoken through has one handle only"),
        };
        Self { socket, ahead: Vec::new() }
    }

    /// Writes all of `data`.
    pub fn write(&mut self, data: &[u8]) -> io::Result<()> {
        match &mut self.socket {
            Socket::Tcp(s) => s.write_all(data),
            Socket::Unix(s) => s.write_all(data),
            Socket::Other(s) => {
                let mut s = lock(s);
                s.write_all(data).and_then(|()| s.flush())
            }
        }
    }

    /// Ends our side; the other may go on.
    pub fn half_close(&self) -> io::Result<()> {
        match &self.socket {
            Socket::Tcp(s) => s.shutdown(Shutdown::Write),
            Socket::Unix(s) => s.shutdown(Shutdown::Write),
            Socket::Other(s) => lock(s).end(),
        }
    }

    /// Ends both sides, whoever else has a handle.
    pub fn shut(&self) -> io::Result<()> {
        match &self.socket {
            Socket::Tcp(s) => s.shutdown(Shutdown::Both),
            Socket::Unix(s) => s.shutdown(Shutdown::Both),
            Socket::Other(s) => lock(s).tcp().shutdown(Shutdown::Both),
        }
    }

    /// Closes with a reset.
    pub fn reset(self) {
        let socket = match &self.socket {
            Socket::Tcp(s) => s.try_clone(),
            Socket::Other(s) => lock(s).tcp().try_clone(),
            Socket::Unix(_) => return,
        };
        let socket = socket2::Socket::from(socket.expect("a handle can be cloned"));
        socket.set_linger(Some(Duration::ZERO)).expect("linger can be set");
    }

    /// Reads what comes next into the look-ahead; 0 at the end.
    fn fill(&mut self) -> io::Result<usize> {
        let mut part = [0; 16 << 10];
        let n = match &mut self.socket {
            Socket::Tcp(s) => s.read(&mut part)?,
            Socket::Unix(s) => s.read(&mut part)?,
            Socket::Other(s) => lock(s).read(&mut part)?,
        };
        self.ahead.extend_from_slice(&part[..n]);
        Ok(n)
    }

    /// Takes up to `most` octets, at least one unless the connection has ended.
    pub fn read_some(&mut self, most: usize) -> io::Result<Vec<u8>> {
        if self.ahead.is_empty() && self.fill()? == 0 {
            return Ok(Vec::new());
        }
        let n = most.min(self.ahead.len());
        Ok(self.ahead.drain(..n).collect())
    }

    /// Takes exactly `n` octets.
    pub fn read_exact(&mut self, n: usize) -> io::Result<Vec<u8>> {
        while self.ahead.len() < n {
            self.fill_or_fail()?;
        }
        Ok(self.ahead.drain(..n).collect())
    }

    /// Takes everything up to the end of the connection.
    pub fn read_to_end(&mut self) -> io::Result<Vec<u8>> {
        while self.fill()? > 0 {}
        Ok(std::mem::take(&mut self.ahead))
    }

    fn fill_or_fail(&mut self) -> io::Result<()> {
        if self.fill()? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    /// Takes everything up to and with `mark`.
    pub fn read_until(&mut self, mark: &[u8]) -> io::Result<Vec<u8>> {
        let mut from = 0;
        loop {
            let found = self.ahead[from..].windows(mark.len()).position(|w| w == mark);
            if let Some(at) = found {
                return Ok(self.ahead.drain(..from + at + mark.len()).collect());
            }
            from = self.ahead.len().saturating_sub(mark.len() - 1);
            self.fill_or_fail()?;
        }
    }

    /// Takes a head; `None` if the connection ended before its first octet.
    pub fn read_head(&mut self) -> io::Result<Option<Message>> {
        if self.ahead.is_empty() && self.fill()? == 0 {
            return Ok(None);
        }
        self.read_until(b"\r\n\r\n").map(|head| Some(Message::parse(&head)))
    }

    /// Takes the body of `message` by its framing. `to_end`: without framing it goes to the
    /// connection's end, as a response's does.
    pub fn read_body(&mut self, message: &mut Message, to_end: bool) -> io::Result<()> {
        message.complete = true;
        if message.is_chunked() {
            return self.read_chunks(message);
        }
        if let Some(length) = message.get("content-length") {
            let length: usize = length.parse().expect("a length is a number");
            message.complete = false;
            while message.body.len() < length {
                let part = self.read_some(length - message.body.len())?;
                if part.is_empty() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                message.body.extend(part);
            }
            message.complete = true;
        } else if to_end {
            message.complete = false;
            message.body = self.read_to_end()?;
        }
        Ok(())
    }

    fn read_chunks(&mut self, message: &mut Message) -> io::Result<()> {
        message.complete = false;
        loop {
            let line = self.read_until(b"\r\n")?;
            let line = String::from_utf8_lossy(&line).into_owned();
            let digits = line.trim_end().split(';').next().unwrap_or_default();
            let size = usize::from_str_radix(digits, 16).expect("a chunk size is hexadecimal");
            if size == 0 {
                break;
            }
            let chunk = self.read_exact(size)?;
            message.body.extend(chunk);
            assert_eq!(self.read_exact(2)?, b"\r\n", "a chunk ends with CR LF");
        }
        loop {
            let line = self.read_until(b"\r\n")?;
            if line == b"\r\n" {
                message.complete = true;
                return Ok(());
            }
            message.trailers.push(split_field(String::from_utf8_lossy(&line).trim_end()));
        }
    }
}
