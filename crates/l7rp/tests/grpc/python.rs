//! The gRPC of Python, in a process of its own.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use l7rp_testkit::{SOON, within};

use crate::call::{Call, Outcome};

/// The system's own, which has the system's packages; another may come first on the path.
const PYTHON: &str = "/usr/bin/python3";
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/grpc/peer.py");

/// Killed when dropped. It ends by itself too when nobody is left to talk to it.
pub struct Python {
    child: Child,
    input: ChildStdin,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Python {
    fn start(role: &str) -> Self {
        let mut child = Command::new(PYTHON)
            .args([SCRIPT, role])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 runs; `cargo xtask setup` installs it");
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let to_lines = lines.clone();
        // It ends with the process.
        thread::spawn(move || {
            for line in BufReader::new(output.expect("a pipe")).lines().map_while(Result::ok) {
                to_lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        });
        Self { child, input: input.expect("a pipe"), lines }
    }

    fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    #[track_caller]
    fn line(&mut self, number: usize) -> String {
        let found = within(SOON * 2, || {
            if let Some(line) = self.lines().into_iter().nth(number) {
                return Some(Some(line));
            }
            self.child.try_wait().expect("it can be waited for").is_some().then_some(None)
        });
        found.flatten().expect("Python answers; `cargo xtask setup` installs its gRPC")
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// It as a server.
pub struct PythonServer {
    python: Python,
    address: SocketAddr,
}

impl PythonServer {
    #[track_caller]
    pub fn start() -> Self {
        let mut python = Python::start("serve");
        let port = python.line(0).parse::<u16>().expect("a port");
        Self { python, address: ([127, 0, 0, 1], port).into() }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("h2c://{}", self.address)
    }

    /// The methods of the calls that ended before their time.
    pub fn lost(&self) -> Vec<String> {
        self.python.lines().split_off(1)
    }
}

/// It as a client.
pub struct PythonClient(Mutex<Python>);

/// A call and where it goes.
#[derive(serde::Serialize)]
struct Asked<'a> {
    address: SocketAddr,
    host: &'a str,
    ca: Option<&'a str>,
    #[serde(flatten)]
    call: &'a Call,
}

impl PythonClient {
    pub fn start() -> Self {
        Self(Mutex::new(Python::start("call")))
    }

    /// Makes the call. `ca` is the file with the certificate that `host` must show, if any.
    #[track_caller]
    pub fn call(&self, address: SocketAddr, host: &str, ca: Option<&str>, call: &Call) -> Outcome {
        let asked = serde_json::to_string(&Asked { address, host, ca, call }).expect("JSON");
        let mut python = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = python.lines().len();
        writeln!(python.input, "{asked}").expect("it listens");
        serde_json::from_str(&python.line(number)).expect("an outcome")
    }
}
