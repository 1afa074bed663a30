//! Whether the README's first command does what it says: it starts, answers and stops.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{ChildStdout, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use crate::run::{Done, Failed, announce, cargo, command, not_started, step, succeeds};

/// From the start of a program that is already compiled to its first answer.
const START: Duration = Duration::from_mins(1);
/// Longer than the 30 s that requests in flight are given.
const STOP: Duration = Duration::from_secs(45);
const ANSWER: Duration = Duration::from_secs(15);
/// One of the demo's backends misbehaves on purpose, so one request proves nothing.
const REQUESTS: usize = 20;

/// Runs `cargo run --release -- demo`, asks it something, and stops it as Ctrl-C would.
pub(crate) fn check() -> Done {
    // Compiled first, so that the bound on the start does not depend on the machine.
    step(cargo().args(["build", "--release"]), "mend what the compiler names")?;
    let mut demo = Demo::start()?;
    let address = demo.address()?;
    let statuses = ask(address)?;
    println!("demo-check: {REQUESTS} requests to {address} answered with {statuses:?}");
    if !statuses.contains(&200) {
        return Err(Failed::new(
            format!("the demo's proxy at {address} never answered 200: {statuses:?}"),
            "run `cargo run --release -- demo` and look at its log",
        ));
    }
    demo.stop()
}

/// The running demo. Killed if it is dropped before it stopped by itself.
struct Demo {
    pid: u32,
    address: Receiver<SocketAddr>,
    exit: Receiver<std::io::Result<ExitStatus>>,
    gone: bool,
}

impl Demo {
    fn start() -> Result<Self, Failed> {
        // cargo replaces itself by the program: the process that we signal is the demo.
        let mut run = cargo();
        run.args(["run", "--release", "--", "demo"]).stdin(Stdio::null()).stdout(Stdio::piped());
        announce(&run);
        let mut child = run.spawn().map_err(|e| not_started(&run, &e))?;
        let pid = child.id();
        let (found, address) = sync_channel(1);
        if let Some(output) = child.stdout.take() {
            thread::spawn(move || follow(output, &found));
        }
        let (ended, exit) = sync_channel(1);
        thread::spawn(move || {
            let _ = ended.send(child.wait());
        });
        Ok(Self { pid, address, exit, gone: false })
    }

    fn address(&mut self) -> Result<SocketAddr, Failed> {
        self.address.recv_timeout(START).map_err(|_| {
            // Its output may end a moment before it does.
            let ended = self.exit.recv_timeout(Duration::from_secs(1)).ok().and_then(Result::ok);
            self.gone = ended.is_some();
            let how = ended.map_or_else(
                || format!("it is still running after {START:?}"),
                |status| format!("it ended: {status}"),
            );
            Failed::new(
                format!("the demo printed no line with \"proxy\" and http://127.0.0.1:PORT; {how}"),
                "run `cargo run --release -- demo` and look at what it prints",
            )
        })
    }

    fn stop(&mut self) -> Done {
        println!("demo-check: kill -INT {}", self.pid);
        let advice = "Ctrl-C must end the demo with exit code 0";
        self.signal("-INT");
        match self.exit.recv_timeout(STOP) {
            Ok(Ok(status)) => {
                self.gone = true;
                if status.success() {
                    println!("demo-check: stopped with {status}");
                    return Ok(());
                }
                Err(Failed::new(format!("after SIGINT the demo ended with {status}"), advice))
            }
            Ok(Err(e)) => Err(Failed::new(format!("cannot wait for the demo: {e}"), advice)),
            Err(_) => Err(Failed::new(
                format!("the demo was still running {STOP:?} after SIGINT"),
                advice,
            )),
        }
    }

    fn signal(&self, signal: &str) {
        succeeds(command("kill").args([signal, &self.pid.to_string()]));
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        if !self.gone {
            self.signal("-KILL");
        }
    }
}

/// Shows what the demo prints and hands over the first address of a proxy. Reads to the end: a
/// demo whose output nobody takes would stand still.
fn follow(output: ChildStdout, found: &SyncSender<SocketAddr>) {
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        println!("  | {line}");
        if let Some(address) = proxy_address(&line) {
            // Full or closed: the first address has been taken already.
            let _ = found.try_send(address);
        }
    }
}

/// The first loopback URL of a line about the proxy.
fn proxy_address(line: &str) -> Option<SocketAddr> {
    const URL: &str = "http://127.0.0.1:";
    let at = line.to_ascii_lowercase().contains("proxy").then(|| line.find(URL)).flatten()?;
    let port = &line[at + URL.len()..];
    let digits = port.find(|c: char| !c.is_ascii_digit()).unwrap_or(port.len());
    let port: u16 = port[..digits].parse().ok()?;
    Some(SocketAddr::from(([127, 0, 0, 1], port)))
}

fn ask(address: SocketAddr) -> Result<Vec<u16>, Failed> {
    let answers: std::io::Result<Vec<u16>> = (0..REQUESTS).map(|_| request(address)).collect();
    answers.map_err(|e| {
        Failed::new(
            format!("a request to the demo's proxy at {address} got no answer: {e}"),
            "the proxy must answer every request, with an error of its own if need be",
        )
    })
}

/// One request on its own connection; the status of its answer.
fn request(address: SocketAddr) -> std::io::Result<u16> {
    let mut stream = TcpStream::connect_timeout(&address, ANSWER)?;
    stream.set_read_timeout(Some(ANSWER))?;
    write!(stream, "GET / HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    // A body that is cut short may be the misbehaving backend's doing; the status counts.
    let read = stream.read_to_end(&mut answer);
    let head = String::from_utf8_lossy(&answer);
    match head.split_whitespace().nth(1).and_then(|status| status.parse().ok()) {
        Some(status) if head.starts_with("HTTP/1.1 ") => Ok(status),
        _ => Err(read.err().unwrap_or_else(|| std::io::Error::other("not an HTTP/1.1 answer"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_address_of_the_proxy_only() {
        let at = |port| Some(SocketAddr::from(([127, 0, 0, 1], port)));
        for (line, want) in [
            ("proxy   http://127.0.0.1:8080", at(8080)),
            ("  Proxy: http://127.0.0.1:41234/ (try curl)", at(41234)),
            ("admin   http://127.0.0.1:9090", None),
            ("proxy   is starting", None),
            ("proxy   http://127.0.0.1:99999", None),
        ] {
            assert_eq!(proxy_address(line), want, "{line}");
        }
    }
}
