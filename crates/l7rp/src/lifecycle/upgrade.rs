//! Another process takes over: the running one starts it, hands it the listening sockets, and
//! drains once the other says that it is ready. The channel between them is the new process's
//! standard input.

use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::time::Duration;

use tokio::task::JoinHandle;

use crate::handover::{self, Answer, Offer};
use crate::serve::doors::Given;
use crate::systemd;

/// Set for the new process: its standard input is the channel.
const VARIABLE: &str = "L7RP_HANDOVER";
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
        let told = |e: std::io::Error| format!("cannot take over from the running process: {e}");
        let channel = std::io::stdin().as_fd().try_clone_to_owned().map_err(told)?;
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
    pub(super) fn begin(offer: Offer) -> Result<Self, String> {
        let told = |what: &str, e: std::io::Error| format!("cannot {what}: {e}");
        let (ours, theirs) = UnixStream::pair().map_err(|e| told("make a channel", e))?;
        let mut arguments = std::env::args_os();
        // As the program was called, so that a link that leads to a new version is followed.
        let program = arguments.next().unwrap_or_else(|| "l7rp".into());
        let mut command = Command::new(&program);
        command.args(arguments).env(VARIABLE, "1").stdin(OwnedFd::from(theirs));
        // Those are about this process.
        for variable in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID"] {
            command.env_remove(variable);
        }
        let child = command.spawn();
        let child = child.map_err(|e| told(&format!("start {}", program.display()), e))?;
        // The command still holds the other end; while it does, its end is not noticed.
        drop(command);
        let pid = child.id();
        let channel = ours.try_clone().map_err(|e| told("make a channel", e))?;
        let waiting = tokio::task::spawn_blocking(move || hand_over(child, &ours, &offer));
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

/// Talks with the new process until it is ready or has failed; then it is ended.
fn hand_over(mut child: Child, channel: &UnixStream, offer: &Offer) -> Result<Vec<String>, String> {
    let answer = handover::send(channel, offer)
        .and_then(|()| handover::await_answer(channel, ANSWER_WITHIN));
    let why = match answer {
        Ok(Answer::Ready { taken, .. }) => return Ok(taken),
        Ok(Answer::Failed { why }) => why,
        Err(e) => e.to_string(),
    };
    // If it has ended by itself, its code says more than the channel; else nothing happens here.
    let _ = child.kill();
    Err(match child.wait().ok().and_then(|status| status.code()) {
        Some(code) => format!("{why} (exit code {code}; its standard error may say more)"),
        None => why,
    })
}
