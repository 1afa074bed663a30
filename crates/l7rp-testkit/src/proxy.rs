//! The real program, as a process.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use serde_json::Value;

use crate::{Client, Message, Metrics, SOON, lock, within};

/// A running l7rp; killed when dropped.
#[derive(Debug)]
pub struct Proxy {
    child: Child,
    lines: Arc<Mutex<Vec<Value>>>,
    reading: Arc<Mutex<()>>,
    errors: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
    started: Value,
    directory: tempfile::TempDir,
}

impl Proxy {
    /// Starts `program` with the file `yaml`, and waits until it serves. `{dir}` in the file
    /// stands for a directory of its own; without an `admin` section, the admin endpoints get
    /// any free port.
    ///
    /// # Panics
    /// It does not start.
    #[track_caller]
    pub fn start(program: impl AsRef<Path>, yaml: &str) -> Self {
        Self::spawn(program, yaml).serving(yaml)
    }

    /// Starts `program` with these flags, and waits until it serves.
    ///
    /// # Panics
    /// It does not start.
    #[track_caller]
    pub fn start_with(program: impl AsRef<Path>, flags: &[&str]) -> Self {
        Self::run(program, flags).serving(&flags.join(" "))
    }

    #[track_caller]
    fn serving(mut self, what: &str) -> Self {
        let started = within(SOON, || {
            if self.exit_code().is_some() {
                return Some(None);
            }
            self.events("proxy_started").pop().map(Some)
        });
        match started.flatten() {
            Some(event) => self.started = event,
            None => panic!("l7rp does not start:\n{what}\n{}", self.report()),
        }
        self
    }

    /// Starts `program` with the file `yaml`, and waits for nothing.
    pub fn spawn(program: impl AsRef<Path>, yaml: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("config.yaml");
        std::fs::write(&path, complete(yaml, directory.path())).expect("a file");
        let arguments = ["--config".into(), path.into_os_string()];
        Self::run_in(program, arguments, directory)
    }

    /// Runs `program` with `arguments`, and waits for nothing.
    pub fn run(
        program: impl AsRef<Path>,
        arguments: impl IntoIterator<Item = impl AsRef<std::ffi::OsStr>>,
    ) -> Self {
        Self::run_in(program, arguments, tempfile::tempdir().expect("a directory"))
    }

    /// As [`Proxy::start`], with a command whose environment, standard input and standard error
    /// are the caller's business; the last arguments name the file.
    ///
    /// # Panics
    /// It does not start.
    #[track_caller]
    pub fn start_by(command: &mut Command, yaml: &str) -> Self {
        Self::spawn_by(command, yaml).serving(yaml)
    }

    /// As [`Proxy::start_by`], and waits for nothing.
    pub fn spawn_by(command: &mut Command, yaml: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("config.yaml");
        std::fs::write(&path, complete(yaml, directory.path())).expect("a file");
        Self::watch(command.arg("--config").arg(path), directory)
    }

    fn run_in(
        program: impl AsRef<Path>,
        arguments: impl IntoIterator<Item = impl AsRef<std::ffi::OsStr>>,
        directory: tempfile::TempDir,
    ) -> Self {
        let mut command = Command::new(program.as_ref());
        command.args(arguments).stdin(Stdio::null()).stderr(Stdio::piped());
        Self::watch(&mut command, directory)
    }

    /// Runs `command` and keeps what it writes.
    fn watch(command: &mut Command, directory: tempfile::TempDir) -> Self {
        // What is held is told to the page: huge ones round it up by megabytes.
        command.env("MIMALLOC_ALLOW_THP", "0");
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the program runs");
        let lines = Arc::new(Mutex::new(Vec::new()));
        let errors = Arc::new(Mutex::new(String::new()));
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let reading = Arc::new(Mutex::new(()));
        let may_read = reading.clone();
        let (to_lines, to_errors) = (lines.clone(), errors.clone());
        let readers = vec![
            thread::spawn(move || {
                for line in BufReader::new(out.expect("a pipe")).split(b'\n').map_while(Result::ok)
                {
                    // A line that is no JSON is kept as a string, for tests to trip over.
                    let text = String::from_utf8_lossy(&line).into_owned();
                    let value = serde_json::from_slice(&line).unwrap_or(Value::String(text));
                    lock(&to_lines).push(value);
                    drop(lock(&may_read));
                }
            }),
            thread::spawn(move || {
                let mut part = [0; 4096];
                // Somebody else may have it.
                let Some(mut err) = err else { return };
                while let Ok(n @ 1..) = err.read(&mut part) {
                    lock(&to_errors).push_str(&String::from_utf8_lossy(&part[..n]));
                }
            }),
        ];
        Self { child, lines, reading, errors, readers, started: Value::Null, directory }
    }

    /// Address of the first listener.
    #[track_caller]
    pub fn address(&self) -> SocketAddr {
        let listeners = self.started["listeners"].as_array().expect("it has listeners");
        let first = listeners.first().and_then(Value::as_str).expect("it has a listener");
        let address = first.split_once('=').map_or(first, |(_, address)| address);
        address.parse().expect("an address")
    }

    /// Address of the listener `name`.
    #[track_caller]
    pub fn listener(&self, name: &str) -> SocketAddr {
        let listeners = self.started["listeners"].as_array().expect("it has listeners");
        let prefix = format!("{name}=");
        let found =
            listeners.iter().filter_map(Value::as_str).find_map(|l| l.strip_prefix(&prefix));
        found.expect("it has the listener").parse().expect("an address")
    }

    /// Address of the admin endpoints.
    #[track_caller]
    pub fn admin(&self) -> SocketAddr {
        self.started["admin"].as_str().expect("it has admin endpoints").parse().expect("an address")
    }

    /// The event that said that it serves.
    pub fn started(&self) -> &Value {
        &self.started
    }

    /// A new connection to the first listener.
    #[track_caller]
    pub fn client(&self) -> Client {
        Client::connect(self.address())
    }

    /// The answer to a GET on a connection of its own.
    #[track_caller]
    pub fn get(&self, path: &str) -> Message {
        self.client().get(path)
    }

    /// The answer of an admin endpoint.
    #[track_caller]
    pub fn ask_admin(&self, path: &str) -> Message {
        let request = format!("GET {path} HTTP/1.1\r\nHost: admin\r\nConnection: close\r\n\r\n");
        Client::connect(self.admin()).ask(request)
    }

    /// The metrics now.
    #[track_caller]
    pub fn metrics(&self) -> Metrics {
        let answer = self.ask_admin("/metrics");
        assert_eq!(answer.status(), 200);
        Metrics::parse(&answer.text())
    }

    /// Everything written to standard output; a line that is no JSON is a string.
    pub fn lines(&self) -> Vec<Value> {
        lock(&self.lines).clone()
    }

    /// Standard output is not read any more while the result lives.
    pub fn stop_reading(&self) -> impl Drop + use<'_> {
        lock(&self.reading)
    }

    /// All events of this name so far.
    pub fn events(&self, name: &str) -> Vec<Value> {
        self.lines_that(|line| line["event"] == name)
    }

    /// All lines so far that this can tell.
    pub(crate) fn lines_that(&self, is_it: impl Fn(&Value) -> bool) -> Vec<Value> {
        lock(&self.lines).iter().filter(|line| is_it(line)).cloned().collect()
    }

    /// Waits for an event.
    ///
    /// # Panics
    /// It does not come within `limit`.
    #[track_caller]
    pub fn wait_for_event(
        &self,
        name: &str,
        is_it: impl Fn(&Value) -> bool,
        limit: Duration,
    ) -> Value {
        within(limit, || self.events(name).into_iter().find(&is_it))
            .unwrap_or_else(|| panic!("no such {name} within {limit:?}\n{}", self.report()))
    }

    /// Waits for the access-log line of a request that this can tell.
    #[track_caller]
    pub fn logged(&self, is_it: impl Fn(&Value) -> bool) -> Value {
        self.wait_for_event("request_completed", is_it, SOON)
    }

    /// Waits for the access-log line of the request with this path.
    #[track_caller]
    pub fn logged_path(&self, path: &str) -> Value {
        self.logged(|line| line["path"] == path)
    }

    /// What it wrote to standard error.
    pub fn errors(&self) -> String {
        lock(&self.errors).clone()
    }

    /// Its directory; the file is `config.yaml` in it.
    pub fn directory(&self) -> PathBuf {
        self.directory.path().to_owned()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).expect("a process id");
        // It may have ended by itself.
        let _ = kill_process(pid, signal);
    }

    fn exit_code(&mut self) -> Option<i32> {
        self.child.try_wait().expect("it can be waited for").map(|s| s.code().unwrap_or(-1))
    }

    /// Waits for its end and everything that it wrote; the exit code, -1 if a signal ended it.
    ///
    /// # Panics
    /// It does not end within `limit`.
    #[track_caller]
    pub fn wait_exit(&mut self, limit: Duration) -> i32 {
        let code = self.wait_end(limit);
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        code
    }

    /// As [`Proxy::wait_exit`], but does not wait for what it wrote: another process that it has
    /// started may go on writing to the same place.
    ///
    /// # Panics
    /// It does not end within `limit`.
    #[track_caller]
    pub fn wait_end(&mut self, limit: Duration) -> i32 {
        within(limit, || self.exit_code())
            .unwrap_or_else(|| panic!("it still runs after {limit:?}\n{}", self.report()))
    }

    /// Resident memory, in octets.
    pub fn resident(&self) -> u64 {
        let path = format!("/proc/{}/status", self.pid());
        let status = std::fs::read_to_string(path).expect("it runs");
        let line = status.lines().find(|l| l.starts_with("VmRSS:")).expect("a resident size");
        line.split_ascii_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()).expect("kB") << 10
    }

    /// Time that it has spent on processors.
    pub fn processor_time(&self) -> Duration {
        let path = format!("/proc/{}/stat", self.pid());
        let stat = std::fs::read_to_string(path).expect("it runs");
        // The name in brackets may hold anything.
        let (_, after) = stat.rsplit_once(')').expect("a name");
        let fields: Vec<u64> =
            after.split_ascii_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
        let ticks = fields[11] + fields[12];
        Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
    }

    /// Open descriptors.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).map_or(0, Iterator::count)
    }

    /// Sets how many descriptors it may have open from now on.
    pub fn limit_descriptors(&self, most: usize) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).expect("a process id");
        // The hard limit stays as it is, so that this can be taken back.
        let maximum = getrlimit(Resource::Nofile).maximum;
        let limit = Rlimit { current: Some(most as u64), maximum };
        prlimit(Some(pid), Resource::Nofile, limit).expect("it can be limited");
    }

    fn report(&self) -> String {
        let lines = self.lines();
        let skip = lines.len().saturating_sub(40);
        let tail: Vec<_> = lines.iter().skip(skip).map(ToString::to_string).collect();
        format!("log:\n{}\nerrors:\n{}", tail.join("\n"), self.errors())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("l7rp {} {}", self.pid(), self.report());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `yaml` with its directory for `{dir}`, and with admin endpoints if it has none.
pub fn complete(yaml: &str, directory: &Path) -> String {
    let mut text = yaml.replace("{dir}", &directory.to_string_lossy());
    if !text.lines().any(|line| line.starts_with("admin:")) {
        text.push_str("\nadmin: { bind: \"127.0.0.1:0\" }\n");
    }
    text
}
