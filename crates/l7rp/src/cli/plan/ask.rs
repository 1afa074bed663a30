//! Asks a running instance for the plan in force.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use l7rp_core::names::Nanos;
use serde_json::Value;

use crate::clock::Clock;

/// For a connection, and for silence on it.
const PATIENCE: Duration = Duration::from_secs(5);
/// For all of it: somebody who sends an octet now and then is never silent.
const ALL_WITHIN: Duration = Duration::from_secs(30);
/// Octets of an answer; a larger one is no plan.
const MOST: u64 = 256 << 20;
const NOT_OURS: &str = "so it is no admin address of this version of l7rp";

/// Asks at `HOST:PORT`. An error says why there is no plan.
pub(super) fn tcp(address: &str) -> Result<Value, String> {
    let answer = connect(address).and_then(|stream| {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        exchange(stream, address)
    });
    plan(&answer.map_err(|e| in_words(&e))?)
}

/// Asks at a Unix-domain socket. An error says why there is no plan.
pub(super) fn unix(path: &Path) -> Result<Value, String> {
    let answer = UnixStream::connect(path).and_then(|stream| {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        exchange(stream, "localhost")
    });
    plan(&answer.map_err(|e| in_words(&e))?)
}

fn connect(address: &str) -> io::Result<TcpStream> {
    let mut failure = io::Error::other("the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => return Ok(stream),
            Err(e) => failure = e,
        }
    }
    Err(failure)
}

fn exchange(mut stream: impl Read + Write, host: &str) -> io::Result<Vec<u8>> {
    write!(stream, "GET /-/plan HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")?;
    let clock = Clock::new();
    let (mut answer, mut part) = (Vec::new(), vec![0; 64 << 10]);
    while answer.len() as u64 <= MOST {
        match stream.read(&mut part)? {
            0 => break,
            n => answer.extend_from_slice(&part[..n]),
        }
        if clock.now().since(Nanos(0)) > ALL_WITHIN {
            let words = format!("its answer was not complete within {} s", ALL_WITHIN.as_secs());
            return Err(io::Error::other(words));
        }
    }
    Ok(answer)
}

fn in_words(e: &io::Error) -> String {
    match e.kind() {
        // What a socket says whose time is over.
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            format!("it was silent for {} s", PATIENCE.as_secs())
        }
        _ => e.to_string(),
    }
}

/// The plan in an answer that has come to its end.
fn plan(answer: &[u8]) -> Result<Value, String> {
    if answer.len() as u64 > MOST {
        return Err(format!("its answer is larger than {} MiB", MOST >> 20));
    }
    let end = memchr::memmem::find(answer, b"\r\n\r\n");
    let (head, body) = end.map_or((answer, &answer[..0]), |at| (&answer[..at], &answer[at + 4..]));
    let line = head.split(|&b| b == b'\r' || b == b'\n').next().unwrap_or_default();
    if !line.starts_with(b"HTTP/1.1 200 ") {
        let line: String = String::from_utf8_lossy(line).chars().take(80).collect();
        let line = line.escape_debug();
        return Err(format!("it answers `{line}` to /-/plan, {NOT_OURS}"));
    }
    match serde_json::from_slice::<Value>(body) {
        Ok(plan) if plan["listeners"].is_array() => Ok(plan),
        _ => Err(format!("its answer to /-/plan is no plan, {NOT_OURS}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_plan_is_taken() {
        let good = "HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{\"listeners\":[]}";
        assert_eq!(plan(good.as_bytes()), Ok(serde_json::json!({ "listeners": [] })));
        for (answer, says) in [
            ("", "``"),
            ("HTTP/1.1 404 Not Found\r\n\r\nnot found\n", "`HTTP/1.1 404 Not Found`"),
            ("SSH-2.0-\u{1b}[2J\r\n", "`SSH-2.0-\\u{1b}[2J`"),
            (&good[..good.len() - 1], "no plan"),
            ("HTTP/1.1 200 OK\r\n", "no plan"),
            ("HTTP/1.1 200 OK\r\n\r\n{}", "no plan"),
            ("HTTP/1.1 200 OK\r\n\r\n[]", "no plan"),
        ] {
            let why = plan(answer.as_bytes()).unwrap_err();
            assert!(why.contains(says), "{answer:?}: {why}");
        }
    }
}
