//! A log that nobody takes costs lines, which are counted, and never a request. A reader that stops
//! and goes on is in `observability`.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use l7rp_testkit::{
    Client, Origin, SOON, Signal, complete, eventually, own_address, reply, within,
};
use rustix::process::{Pid, kill_process};

use crate::setup::{PROGRAM, Setup, over};

const REQUESTS: u64 = 2000;

/// A running l7rp whose standard output is the test's business.
pub struct Plain {
    pub child: Child,
    pub address: SocketAddr,
    pub admin: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Plain {
    /// Starts it, and waits until it is ready.
    #[track_caller]
    pub fn start(setup: Setup, output: impl Into<Stdio>) -> Self {
        let (address, admin) = (own_address(), own_address());
        let yaml = setup.top(&format!("admin: {{ bind: \"{admin}\" }}")).yaml();
        let yaml = yaml.replace("127.0.0.1:0", &address.to_string());
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("config.yaml");
        std::fs::write(&file, complete(&yaml, folder.path())).expect("a file");
        let mut command = Command::new(PROGRAM);
        command.arg("--config").arg(file).stdin(Stdio::null()).stdout(output);
        let child = command.spawn().expect("the program runs");
        let proxy = Self { child, address, admin, _folder: folder };
        eventually(SOON, || {
            let ask = b"GET /-/ready HTTP/1.1\r\nHost: admin\r\nConnection: close\r\n\r\n";
            std::net::TcpStream::connect(admin).is_ok_and(|stream| {
                let mut client = Client::from(stream);
                client.wire.write(ask).is_ok()
                    && client.try_response().is_ok_and(|answer| answer.status() == 200)
            })
        });
        proxy
    }

    /// Sends a signal, and waits for its end.
    #[track_caller]
    pub fn end(&mut self, signal: Signal) -> Option<i32> {
        let pid = Pid::from_raw(self.child.id().cast_signed()).expect("a process id");
        kill_process(pid, signal).expect("it runs");
        within(SOON, || self.child.try_wait().expect("it can be waited for"))
            .expect("an end")
            .code()
    }

    /// All of them are answered, one after the other.
    #[track_caller]
    fn answers(&self, requests: u64) {
        let mut client = Client::connect(self.address);
        for n in 0..requests {
            assert_eq!(client.get(&format!("/{n}")).status(), 200);
        }
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How many lines were dropped, by the metrics.
#[track_caller]
pub fn dropped(admin: SocketAddr) -> u64 {
    let request = "GET /metrics HTTP/1.1\r\nHost: admin\r\nConnection: close\r\n\r\n";
    let text = Client::connect(admin).ask(request).text();
    let line = text.lines().find_map(|line| line.strip_prefix("proxy_access_log_dropped_total "));
    line.expect("it is counted").parse().expect("a number")
}

/// After that, nothing that is written is taken: every request has an answer and none has a line.
#[track_caller]
fn all_are_answered_and_counted(proxy: &mut Plain) {
    let before = dropped(proxy.admin);
    proxy.answers(REQUESTS);
    eventually(SOON, || dropped(proxy.admin) == before + REQUESTS);
    assert_eq!(proxy.end(Signal::TERM), Some(0));
}

#[test]
fn a_reader_that_has_gone() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = Plain::start(over(&[&origin]), Stdio::piped());
    let mut reader = BufReader::new(proxy.child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    while !line.contains("proxy_started") {
        line.clear();
        assert!(reader.read_line(&mut line).expect("text") > 0, "it tells that it has started");
    }
    drop(reader);
    all_are_answered_and_counted(&mut proxy);
}

#[test]
fn a_disk_that_is_full() {
    let origin = Origin::start(reply::name("x"));
    let full = OpenOptions::new().write(true).open("/dev/full").expect("it is there");
    let mut proxy = Plain::start(over(&[&origin]), full);
    // What tells of the start is lost, too.
    eventually(SOON, || dropped(proxy.admin) == 1);
    all_are_answered_and_counted(&mut proxy);
}

/// A pipe that fills up, with a reader that then leaves without having read.
#[test]
fn a_reader_that_stops_and_leaves() {
    // What a pipe holds counts as written, of which no line is shorter than this.
    const HELD: u64 = (64 << 10) / 300;
    let origin = Origin::start(reply::name("x"));
    let mut proxy = Plain::start(over(&[&origin]), Stdio::piped());
    let reader = proxy.child.stdout.take().expect("a pipe");
    // The writer waits for the reader, and requests for nobody.
    proxy.answers(REQUESTS);
    assert_eq!(dropped(proxy.admin), 0, "there is room for all of them to wait");
    drop(reader);
    eventually(SOON, || dropped(proxy.admin) + HELD > REQUESTS);
    proxy.answers(REQUESTS);
    eventually(SOON, || dropped(proxy.admin) + HELD > 2 * REQUESTS);
    assert!(dropped(proxy.admin) <= 2 * REQUESTS);
    assert_eq!(proxy.end(Signal::TERM), Some(0));
}

/// The writer has a core in common with a worker; nobody else gives way.
#[test]
fn the_writer_gives_way_to_the_workers() {
    let origin = Origin::start(reply::name("x"));
    let proxy = Plain::start(over(&[&origin]), Stdio::null());
    let nice = |name: &str| {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", proxy.child.id())).expect("tasks");
        let stats =
            tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok());
        let mut named = stats.filter_map(|stat| {
            // The name is in brackets, and may have any octet.
            let (front, fields) = stat.rsplit_once(") ")?;
            let is_it = front.split_once('(')?.1.starts_with(name);
            is_it.then(|| fields.split(' ').nth(16)?.parse::<i32>().ok()).flatten()
        });
        named.next().expect("a thread of this name")
    };
    let worker = nice("l7rp-worker");
    assert_eq!(nice("l7rp-log"), (worker + 5).min(19));
    assert_eq!(nice("l7rp-control"), worker);
}
