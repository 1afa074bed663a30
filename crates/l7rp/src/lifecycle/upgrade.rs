//! Another process takes over: the running one starts it, hands it the listening sockets, and
//! drains once the other says that it is ready. The channel between them is the new process's
//! standard input.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::task::JoinHandle;

use crate::handover::{self, Answer, Offer};
use crate::serve::doors::Given;
use crate::systemd;

/// Set for the new process: its standard input is the channel.
const VARIABLE: &str = "L7RP_HANDOVER";
/// Its value for a process that only starts the new one and ends.
const BETWEEN: &str = "between";
/// This program, whatever is in its place by now.
const OURSELVES: &str = "/proc/self/exe";
/// How long the old process waits for the answer. The new one gives up sooner.
const ANSWER_WITHIN: Duration = Duration::from_secs(45);

/// What a process was given by who started it.
pub(super) struct Inheritance {
    /// Listening sockets.
    pub(super) given: Vec<Given>,
    predecessor: Option<Predecessor>,
}

/// The process whose place this one takes.
struct Predecessor {
    channel: UnixStream,
    /// The pools that it serves well.
    ready: Vec<String>,
}

impl Inheritance {
    /// Receives what there is. Once for each process, before anything else is opened.
    pub(super) fn receive() -> Result<Self, String> {
        if std::env::var_os(VARIABLE).is_none() {
            let given = systemd::take_sockets()?
                .into_iter()
                .map(|one| Given { name: one.name, bind: None, kept: true, socket: one.socket })
                .collect();
            return Ok(Self { given, predecessor: None });
        }
        let told = |e: io::Error| format!("cannot take over from the running process: {e}");
        let channel = io::stdin().as_fd().try_clone_to_owned().map_err(told)?;
        let channel = UnixStream::from(channel);
        let offer = handover::receive(&channel).map_err(told)?;
        let given = offer.sockets.into_iter().map(|one| {
            let socket = handover::to_bound(one.socket)?;
            Ok(Given { name: one.name, bind: Some(one.bind), kept: one.kept, socket })
        });
        let given = given.collect::<Result<_, String>>()?;
        Ok(Self { given, predecessor: Some(Predecessor { channel, ready: offer.ready }) })
    }

    /// Whether this process takes the place of another one.
    pub(super) fn has_predecessor(&self) -> bool {
        self.predecessor.is_some()
    }

    /// The pools that are to be ready before anything is accepted.
    pub(super) fn ready(&self) -> Option<Vec<String>> {
        self.predecessor.as_ref().map(|predecessor| predecessor.ready.clone())
    }

    /// Tells the predecessor, if there is one, that this process serves on the sockets that it
    /// has `taken`, or why it does not.
    pub(super) fn answer(&self, taken: Result<Vec<String>, &str>) {
        let Some(Predecessor { channel, .. }) = &self.predecessor else { return };
        let answer = match taken {
            Ok(taken) => Answer::Ready { pid: std::process::id(), taken },
            Err(why) => Answer::Failed { why: why.to_owned() },
        };
        // If it is gone, nobody is left who could be told.
        let _ = handover::answer(channel, &answer);
    }
}

/// An upgrade under way.
pub(super) struct Upgrade {
    /// The new process.
    pub(super) pid: u32,
    waiting: JoinHandle<Result<Vec<String>, String>>,
    channel: UnixStream,
}

impl Upgrade {
    /// Starts the program again, with the same arguments, and offers it what `offer` has.
    /// `managed`: by a service manager, to which the new process must not be our child.
    pub(super) fn begin(offer: Offer, managed: bool) -> Result<Self, String> {
        let told = |e: io::Error| format!("cannot make a channel: {e}");
        let (ours, theirs) = UnixStream::pair().map_err(told)?;
        let program = called().0;
        let started = if managed { Started::aside(&ours, theirs) } else { Started::child(theirs) };
        let (started, pid) =
            started.map_err(|e| format!("cannot start {}: {e}", program.display()))?;
        let channel = ours.try_clone().map_err(told)?;
        let waiting = tokio::task::spawn_blocking(move || hand_over(started, &ours, &offer));
        Ok(Self { pid, waiting, channel })
    }

    /// Waits for the new process: the sockets that it has taken, or why it has failed. It has
    /// ended then.
    pub(super) async fn outcome(&mut self) -> Result<Vec<String>, String> {
        let outcome = (&mut self.waiting).await;
        outcome.unwrap_or_else(|e| Err(format!("waiting for the new process was given up: {e}")))
    }

    /// Has the new process ended, and waits for that; unless it serves already: what it has taken.
    pub(super) async fn give_up(mut self) -> Result<Vec<String>, String> {
        // As if it had ended.
        let _ = self.channel.shutdown(Shutdown::Both);
        self.outcome().await
    }
}

/// The program as it was called, so that a link that leads to a new version is followed, and its
/// arguments.
fn called() -> (OsString, impl Iterator<Item = OsString>) {
    let mut arguments = std::env::args_os();
    (arguments.next().unwrap_or_else(|| "l7rp".into()), arguments)
}

/// A new process.
enum Started {
    Child(Child),
    /// The child of whoever adopts what has lost its parent.
    Aside(OwnedFd),
}

impl Started {
    /// Starts it as a child; its id.
    fn child(channel: UnixStream) -> io::Result<(Self, u32)> {
        let (program, arguments) = called();
        let child = command(program, arguments, "1").stdin(OwnedFd::from(channel)).spawn()?;
        let pid = child.id();
        Ok((Self::Child(child), pid))
    }

    /// Starts it by a process that ends at once. systemd waits for the end of its own children
    /// alone: a main process that was another one's child when it was named (`MAINPID=`) is killed
    /// as soon as it has been asked to stop.
    fn aside(mut ours: &UnixStream, theirs: UnixStream) -> io::Result<(Self, u32)> {
        let (program, arguments) = called();
        let mut between = command(OURSELVES.into(), arguments, BETWEEN);
        let ended = between.arg0(program).stdin(OwnedFd::from(theirs)).status()?;
        // It still holds the other end; while it does, its end is not noticed.
        drop(between);
        match ended.code() {
            Some(0) => {}
            Some(code) => return Err(io::Error::from_raw_os_error(code)),
            None => return Err(io::ErrorKind::Interrupted.into()),
        }
        let mut pid = [0; 4];
        ours.read_exact(&mut pid)?;
        let pid = u32::from_be_bytes(pid);
        let named = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let named = named.ok_or(io::ErrorKind::InvalidData)?;
        Ok((Self::Aside(pidfd_open(named, PidfdFlags::empty())?), pid))
    }

    /// Ends it; its exit code, if it had ended by itself and that can be known.
    fn end(self) -> Option<i32> {
        match self {
            // If it has ended by itself, nothing happens here.
            Self::Child(mut child) => {
                let _ = child.kill();
                child.wait().ok().and_then(|status| status.code())
            }
            Self::Aside(process) => {
                let _ = pidfd_send_signal(process, Signal::KILL);
                None
            }
        }
    }
}

fn command(
    program: OsString,
    arguments: impl Iterator<Item = OsString>,
    handover: &str,
) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).env(VARIABLE, handover);
    // Those are about this process.
    for variable in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID"] {
        command.env_remove(variable);
    }
    command
}

/// Where this process was started only to start another one ([`Started::aside`]): does that, and
/// with which code to end. It tells the channel that both have as standard input who it is.
pub(crate) fn start_aside() -> Option<ExitCode> {
    if std::env::var_os(VARIABLE)? != BETWEEN {
        return None;
    }
    let (program, arguments) = called();
    let started = command(program, arguments, "1").spawn().and_then(|child| {
        let channel = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        (&channel).write_all(&child.id().to_be_bytes())
    });
    let errno = started
        .err()
        .map_or(0, |e| e.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error()));
    Some(ExitCode::from(u8::try_from(errno).unwrap_or(u8::MAX)))
}

/// Talks with the new process until it is ready or has failed; then it is ended.
fn hand_over(started: Started, channel: &UnixStream, offer: &Offer) -> Result<Vec<String>, String> {
    let answer = handover::send(channel, offer)
        .and_then(|()| handover::await_answer(channel, ANSWER_WITHIN));
    let why = match answer {
        Ok(Answer::Ready { taken, .. }) => return Ok(taken),
        Ok(Answer::Failed { why }) => why,
        Err(e) => e.to_string(),
    };
    // Its code says more than the channel.
    Err(match started.end() {
        Some(code) => format!("{why} (exit code {code}; its standard error may say more)"),
        None => why,
    })
}
