//! Asks a running instance, at its admin address.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use l7rp_core::names::Nanos;
use serde_json::Value;

use crate::clock::Clock;

/// How long an answer may take, and how long it may be.
#[derive(Clone, Copy)]
struct Limits {
    /// For a connection, and for silence on it.
    patience: Duration,
    /// For all of it: somebody who sends an octet now and then is never silent.
    all_within: Duration,
    /// Octets; a larger answer is none of ours.
    most: u64,
}

/// For what people ask.
const QUESTION: Limits = Limits {
    patience: Duration::from_secs(5),
    all_within: Duration::from_secs(30),
    most: 256 << 20,
};
/// For what somebody asks every few seconds, and would rather have no than nothing.
const CHECK: Limits =
    Limits { patience: Duration::from_secs(2), all_within: Duration::from_secs(3), most: 64 << 10 };
const NOT_OURS: &str = "so it is no admin address of this version of l7rp";

/// The admin address of a running instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Instance {
    /// `HOST:PORT`.
    Tcp(String),
    /// A Unix-domain socket.
    Unix(PathBuf),
}

impl std::fmt::Display for Instance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for Instance {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:/") {
            return Ok(Self::Unix(format!("/{path}").into()));
        }
        let address = text.strip_prefix("http://").unwrap_or(text);
        let address = address.strip_suffix('/').unwrap_or(address);
        match address.rsplit_once(':').map(|(host, port)| (host, port.parse::<u16>())) {
            Some((host, Ok(1..))) if !host.is_empty() && !host.contains(['/', '@']) => {
                Ok(Self::Tcp(address.to_owned()))
            }
            _ => Err(NO_INSTANCE.to_owned()),
        }
    }
}

const NO_INSTANCE: &str = "write http://HOST:PORT, HOST:PORT or unix:/PATH, an admin address";

impl Instance {
    /// The JSON object at `path`, if it has `key`. An error says why there is none.
    pub(super) fn get(&self, path: &str, key: &str) -> Result<Value, String> {
        self.ask("GET", path, "", key)
    }

    /// The same of an answer to this body.
    pub(super) fn post(&self, path: &str, body: &Value, key: &str) -> Result<Value, String> {
        self.ask("POST", path, &body.to_string(), key)
    }

    fn ask(&self, method: &str, path: &str, body: &str, key: &str) -> Result<Value, String> {
        object(&self.answer(method, path, body, QUESTION)?, path, key)
    }

    /// Whether `path`, of which there is to be known but yes and no, says yes. An error says why
    /// not.
    pub(super) fn check(&self, path: &str) -> Result<(), String> {
        yes(&self.answer("GET", path, "", CHECK)?, path)
    }

    fn answer(
        &self,
        method: &str,
        path: &str,
        body: &str,
        limits: Limits,
    ) -> Result<Vec<u8>, String> {
        let host = match self {
            Self::Tcp(address) => address,
            Self::Unix(_) => "localhost",
        };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        let answer = match self {
            Self::Tcp(address) => connect(address, limits).and_then(|stream| {
                stream.set_read_timeout(Some(limits.patience))?;
                stream.set_write_timeout(Some(limits.patience))?;
                exchange(stream, &head, limits)
            }),
            Self::Unix(path) => UnixStream::connect(path).and_then(|stream| {
                stream.set_read_timeout(Some(limits.patience))?;
                stream.set_write_timeout(Some(limits.patience))?;
                exchange(stream, &head, limits)
            }),
        };
        answer.map_err(|e| in_words(&e, limits))
    }
}

fn connect(address: &str, limits: Limits) -> io::Result<TcpStream> {
    let mut failure = io::Error::other("the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, limits.patience) {
            Ok(stream) => return Ok(stream),
            Err(e) => failure = e,
        }
    }
    Err(failure)
}

fn exchange(mut stream: impl Read + Write, request: &str, limits: Limits) -> io::Result<Vec<u8>> {
    stream.write_all(request.as_bytes())?;
    let clock = Clock::new();
    let (mut answer, mut part) = (Vec::new(), vec![0; 64 << 10]);
    while answer.len() as u64 <= limits.most {
        match stream.read(&mut part)? {
            0 => break,
            n => answer.extend_from_slice(&part[..n]),
        }
        if clock.now().since(Nanos(0)) > limits.all_within {
            let seconds = limits.all_within.as_secs();
            let words = format!("its answer was not complete within {seconds} s");
            return Err(io::Error::other(words));
        }
    }
    if answer.len() as u64 > limits.most {
        let words = format!("its answer is larger than {} KiB", limits.most >> 10);
        return Err(io::Error::other(words));
    }
    Ok(answer)
}

fn in_words(e: &io::Error, limits: Limits) -> String {
    match e.kind() {
        // What a socket says whose time is over.
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            format!("it was silent for {} s", limits.patience.as_secs())
        }
        _ => e.to_string(),
    }
}

/// The first line of an answer, and its body.
fn parts(answer: &[u8]) -> (&[u8], &[u8]) {
    let end = memchr::memmem::find(answer, b"\r\n\r\n");
    let (head, body) = end.map_or((answer, &answer[..0]), |at| (&answer[..at], &answer[at + 4..]));
    (head.split(|&b| b == b'\r' || b == b'\n').next().unwrap_or_default(), body)
}

/// The beginning of what somebody else has written, on one line.
fn short(text: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(text).chars().take(200).collect();
    text.trim_end().escape_debug().to_string()
}

/// The JSON object in an answer that has come to its end; one that has `key`.
fn object(answer: &[u8], path: &str, key: &str) -> Result<Value, String> {
    let (line, body) = parts(answer);
    if !line.starts_with(b"HTTP/1.1 200 ") {
        let ours = line.starts_with(b"HTTP/1.1 4") && !line.starts_with(b"HTTP/1.1 404 ");
        if ours && !body.is_empty() {
            return Err(format!("it answers `{}`: {}", short(line), short(body)));
        }
        return Err(format!("it answers `{}` to {path}, {NOT_OURS}", short(line)));
    }
    match serde_json::from_slice::<Value>(body) {
        Ok(value) if value.get(key).is_some() => Ok(value),
        _ => Err(format!("its answer to {path} is not what it should be, {NOT_OURS}")),
    }
}

/// Whether an answer is yes, which is 204; 503 is no, and says why.
fn yes(answer: &[u8], path: &str) -> Result<(), String> {
    let (line, body) = parts(answer);
    if line.starts_with(b"HTTP/1.1 204 ") {
        return Ok(());
    }
    if line.starts_with(b"HTTP/1.1 503 ") && !body.is_empty() {
        return Err(short(body));
    }
    Err(format!("it answers `{}` to {path}, {NOT_OURS}", short(line)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_answer_is_taken() {
        let good = "HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{\"listeners\":[]}";
        let plan = |answer: &[u8]| object(answer, "/-/plan", "listeners");
        assert_eq!(plan(good.as_bytes()), Ok(serde_json::json!({ "listeners": [] })));
        for (answer, says) in [
            ("", "``"),
            ("HTTP/1.1 404 Not Found\r\n\r\nnot found\n", "`HTTP/1.1 404 Not Found`"),
            ("SSH-2.0-\u{1b}[2J\r\n", "`SSH-2.0-\\u{1b}[2J`"),
            (&good[..good.len() - 1], "is not what"),
            ("HTTP/1.1 200 OK\r\n", "is not what"),
            ("HTTP/1.1 200 OK\r\n\r\n{}", "is not what"),
            ("HTTP/1.1 200 OK\r\n\r\n[]", "is not what"),
            ("HTTP/1.1 403 Forbidden\r\n\r\nno token\n", "403 Forbidden`: no token"),
        ] {
            let why = plan(answer.as_bytes()).unwrap_err();
            assert!(why.contains(says), "{answer:?}: {why}");
        }
    }
    #[test]
    fn only_204_is_yes() {
        assert_eq!(yes(b"HTTP/1.1 204 No Content\r\n\r\n", "/livez"), Ok(()));
        for (answer, says) in [
            ("", "`` to /livez"),
            (
                "HTTP/1.1 503 Service Unavailable\r\n\r\nnot ready: draining\n",
                "not ready: draining",
            ),
            ("HTTP/1.1 503 Service Unavailable\r\n\r\n", "no admin address"),
            ("HTTP/1.1 200 OK\r\n\r\n", "no admin address"),
            ("HTTP/1.1 404 Not Found\r\n\r\nnot found\n", "`HTTP/1.1 404 Not Found`"),
            ("SSH-2.0-\u{1b}[2J\r\n", "`SSH-2.0-\\u{1b}[2J`"),
        ] {
            let why = yes(answer.as_bytes(), "/livez").unwrap_err();
            assert!(why.contains(says), "{answer:?}: {why}");
        }
    }

    #[test]
    fn an_answer_has_an_end() {
        let long = io::Cursor::new(vec![b'x'; 100 << 10]);
        let e = exchange(long, "", CHECK).unwrap_err();
        assert!(in_words(&e, CHECK).contains("larger than 64 KiB"), "{e}");
    }
}
