//! A proxy and those that took over from it. They write to one log, and all end with the test.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use l7rp_testkit::{Proxy, SOON, Signal, Value, within};
use rustix::process::{Pid, kill_process};

use crate::setup::PROGRAM;

/// How long an upgrade may take: the new process starts and waits for its upstreams.
const TAKEOVER: Duration = Duration::from_secs(10);

/// A proxy and its successors.
pub struct Family {
    /// The first of them, and everybody's log.
    pub first: Proxy,
    /// The one that serves now.
    pub pid: u32,
    /// The program's name as it was started: a link in a directory of its own.
    link: PathBuf,
    _directory: tempfile::TempDir,
}

impl Family {
    /// Starts the first one with this file.
    pub fn start(yaml: &str) -> Self {
        Self::start_by(yaml, |program| {
            let mut command = Command::new(program);
            command.stdin(Stdio::null()).stderr(Stdio::piped());
            command
        })
    }

    /// As [`Family::start`], with a command that runs the program at this path.
    pub fn start_by(yaml: &str, command: impl FnOnce(&Path) -> Command) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let link = directory.path().join("l7rp");
        std::os::unix::fs::symlink(PROGRAM, &link).expect("a link");
        let first = Proxy::start_by(&mut command(&link), yaml);
        Self { pid: first.pid(), first, link, _directory: directory }
    }

    /// Sends a signal to the one that serves.
    pub fn signal(&self, signal: Signal) {
        send(self.pid, signal);
    }

    /// Has another one take over; its pid.
    #[track_caller]
    pub fn upgrade(&mut self) -> u32 {
        let before = self.first.events("upgrade_complete").len();
        self.signal(Signal::USR2);
        let complete =
            within(TAKEOVER, || self.first.events("upgrade_complete").into_iter().nth(before));
        let complete = complete.unwrap_or_else(|| panic!("no upgrade: {:#?}", self.last_events()));
        self.pid = pid_of(&complete);
        self.pid
    }

    /// Asks for another one, which must fail for such a reason; the pid of who tried, if any did.
    #[track_caller]
    pub fn upgrade_fails(&self, reason: &str) -> Option<u32> {
        let before = ["upgrade_failed", "upgrade_started"].map(|e| self.first.events(e).len());
        self.signal(Signal::USR2);
        let failed =
            within(TAKEOVER, || self.first.events("upgrade_failed").into_iter().nth(before[0]));
        let failed = failed.unwrap_or_else(|| panic!("no failure: {:#?}", self.last_events()));
        let why = failed["why"].as_str().unwrap_or_default();
        assert!(why.contains(reason), "{why:?} has no {reason:?}");
        self.first.events("upgrade_started").get(before[1]).map(pid_of)
    }

    /// What the one with this pid said when it served.
    #[track_caller]
    pub fn started(&self, pid: u32) -> Value {
        self.first.wait_for_event("proxy_started", |e| e["pid"] == pid, SOON)
    }

    /// Puts a program with this text in the place of the real one.
    pub fn replace_program(&self, text: &str, mode: u32) {
        self.remove_program();
        std::fs::write(&self.link, text).expect("a file");
        std::fs::set_permissions(&self.link, Permissions::from_mode(mode)).expect("its mode");
    }

    /// Takes the program away.
    pub fn remove_program(&self) {
        let _ = std::fs::remove_file(&self.link);
    }

    /// Puts the real program in its place again.
    pub fn restore_program(&self) {
        self.remove_program();
        std::os::unix::fs::symlink(PROGRAM, &self.link).expect("a link");
    }

    /// Ends the one that serves in order, and waits for the end of all.
    #[track_caller]
    pub fn end(&mut self) {
        self.signal(Signal::TERM);
        assert!(within(SOON, || is_gone(self.pid).then_some(())).is_some(), "{} runs", self.pid);
        assert_eq!(self.first.wait_exit(SOON), 0);
        let torn: Vec<_> = self.first.lines().into_iter().filter(Value::is_string).collect();
        assert!(torn.is_empty(), "lines of several processes are mixed: {torn:#?}");
    }

    fn last_events(&self) -> Vec<String> {
        let lines = self.first.lines();
        let events = lines.iter().filter(|line| line["event"] != "request_completed");
        let mut last: Vec<_> = events.rev().take(12).map(ToString::to_string).collect();
        last.reverse();
        last
    }

    /// Whether the process with this pid is one of us and runs: pids are used again.
    fn is_ours(&self, pid: u32) -> bool {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let directory = self.first.directory();
        let mark = directory.to_string_lossy();
        line.windows(mark.len()).any(|part| part == mark.as_bytes())
    }
}

/// A program that never says anything, and what it is called then.
pub const HANGING: (&str, &[u8]) = ("#!/bin/sh\nexec sleep 97\n", b"sleep\x0097\0");

impl Drop for Family {
    fn drop(&mut self) {
        // The first one must not start another one meanwhile.
        if self.is_ours(self.first.pid()) {
            self.first.signal(Signal::KILL);
        }
        let hangs = |pid: &u32| {
            std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line == HANGING.1)
        };
        let told = self.first.events("upgrade_started");
        let hanging: Vec<u32> = told.iter().map(pid_of).filter(hangs).collect();
        // The log that names the others is read a moment after it was written.
        let processes = std::fs::read_dir("/proc").expect("it can be read");
        let pids = processes.flatten().filter_map(|p| p.file_name().to_str()?.parse().ok());
        for pid in pids.filter(|pid| self.is_ours(*pid)).chain(hanging) {
            send(pid, Signal::KILL);
        }
    }
}

#[track_caller]
fn pid_of(event: &Value) -> u32 {
    event["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("a pid")
}

/// Sends a signal to a process, which may have ended by itself.
pub fn send(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.cast_signed()).expect("a process id");
    let _ = kill_process(pid, signal);
}

/// Whether the process has ended. Nobody may have asked for its exit code.
pub fn is_gone(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, None | Some('Z' | 'X'))
}

/// Open descriptors of a process.
pub fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd"))
        .map_or(0, Iterator::count)
}
