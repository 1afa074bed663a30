//! A client over a raw socket: sends what it is told and says what came back.

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use crate::origin::OWN;
use crate::wire::{Body, Framing, Head, Stop, Wire};

/// Longer than every deadline of the proxy.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two parts of a message that is sent in parts.
const PAUSE: Duration = Duration::from_millis(20);

/// An answer, as far as it came.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: Head,
    pub(crate) body: Body,
    /// The framing shows that nothing is missing.
    pub(crate) complete: bool,
}

/// What became of the connection after the answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum After {
    /// Closed by the proxy.
    Closed,
    /// A further request was answered.
    Usable,
    /// Something else was answered.
    Answered(u16),
    /// Neither closed nor answering.
    Stuck,
    Garbage(String),
}

pub(crate) struct Client {
    wire: Wire,
    /// Statuses of the interim answers.
    pub(crate) interim: Vec<u16>,
}

impl Client {
    pub(crate) fn connect(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).expect("the proxy accepts");
        stream.set_nodelay(true).expect("an open socket");
        Self { wire: Wire::new(stream, PATIENCE), interim: Vec::new() }
    }

    /// Sends `raw` in the parts that `split` makes, from a thread of its own: the proxy may
    /// answer, and close, before it has read all.
    pub(crate) fn send(&self, raw: &[u8], split: &[usize], half_close: bool) {
        let mut stream = self.wire.stream.try_clone().expect("a descriptor");
        let cuts: Vec<usize> = split.iter().copied().chain([raw.len()]).collect();
        let raw = raw.to_vec();
        thread::spawn(move || {
            let mut at = 0;
            for cut in cuts {
                if at > 0 {
                    thread::sleep(PAUSE);
                }
                if stream.write_all(&raw[at..cut]).is_err() {
                    return;
                }
                at = cut;
            }
            if half_close {
                let _ = stream.shutdown(Shutdown::Write);
            }
        });
    }

    /// All octets that came.
    pub(crate) fn raw(&self) -> &[u8] {
        &self.wire.raw
    }

    /// The next final answer; with it why reading stopped, if it did before the answer's end.
    pub(crate) fn answer(&mut self, to_head: bool) -> (Option<Answer>, Option<Stop>) {
        self.wire.patience(PATIENCE);
        loop {
            let head = match self.wire.head() {
                Ok(head) => head,
                Err(Stop::Eof) if !self.wire.buf.is_empty() => {
                    let what = if speaks_http2(self.raw()) { HTTP2 } else { "half a head" };
                    return (None, Some(Stop::Garbage(what.to_owned())));
                }
                Err(stop) => return (None, Some(stop)),
            };
            let Some(status) = status(&head.start) else {
                return (None, Some(Stop::Garbage(head.start)));
            };
            if (100..200).contains(&status) && status != 101 {
                self.interim.push(status);
                continue;
            }
            return self.finish(status, head, to_head);
        }
    }

    fn finish(&mut self, status: u16, head: Head, to_head: bool) -> (Option<Answer>, Option<Stop>) {
        let framing = match head.framing() {
            _ if to_head || matches!(status, 204 | 304) => Framing::Length(0),
            Ok(framing) => framing.unwrap_or(Framing::UntilClose),
            Err(stop) => return (None, Some(stop)),
        };
        let mut answer = Answer { status, head, ..Answer::default() };
        if status == 101 {
            // What came through the tunnel until it fell silent; then the client leaves.
            self.wire.patience(Duration::from_secs(1));
            let _ = self.wire.body(Framing::UntilClose, &mut answer.body);
            let _ = self.wire.stream.shutdown(Shutdown::Both);
            answer.complete = true;
            return (Some(answer), Some(Stop::Eof));
        }
        let stop = self.wire.body(framing, &mut answer.body).err();
        answer.complete = stop.is_none();
        let ended = framing == Framing::UntilClose && answer.complete;
        (Some(answer), stop.or(ended.then_some(Stop::Eof)))
    }

    /// What becomes of the connection; `may_send`: the client's side is still open.
    pub(crate) fn after(&mut self, may_send: bool) -> After {
        self.wire.patience(PATIENCE);
        let target = format!("{OWN}after");
        if may_send {
            // A proxy that has closed is noticed by reading.
            let _ = self.wire.stream.write_all(plain(&target).as_bytes());
        }
        match self.answer(false) {
            (Some(answer), _) if answer.complete && answer.body.content == target.as_bytes() => {
                After::Usable
            }
            (Some(answer), _) => After::Answered(answer.status),
            (None, Some(Stop::Eof | Stop::Reset)) => After::Closed,
            (None, Some(Stop::Garbage(what))) => After::Garbage(what),
            (None, _) => After::Stuck,
        }
    }
}

/// What is read of a side that speaks HTTP/2.
pub(crate) const HTTP2: &str = "HTTP/2";

/// Whether all that came begins with a SETTINGS frame, as HTTP/2 does (RFC 9113 §3.4).
fn speaks_http2(octets: &[u8]) -> bool {
    matches!(octets, [_, _, _, 4, 0, 0, 0, 0, 0, ..])
}

fn status(line: &str) -> Option<u16> {
    let code = line.strip_prefix("HTTP/1.1 ")?.get(..3)?;
    let end = line.as_bytes().get(12);
    if end.is_some_and(|b| *b != b' ') { None } else { code.parse().ok() }
}

/// A request of the test itself.
fn plain(target: &str) -> String {
    format!("GET {target} HTTP/1.1\r\nHost: origin.test\r\n\r\n")
}

/// Asks on a new connection; what came in answer, or what was wrong with it. The proxy has a
/// second.
pub(crate) fn ask(addr: SocketAddr, name: &str) -> Result<Vec<u8>, String> {
    let mut client = Client::connect(addr);
    let target = format!("{OWN}{name}");
    client.send(plain(&target).as_bytes(), &[], false);
    let began = std::time::Instant::now();
    let (answer, stop) = client.answer(false);
    let took = began.elapsed();
    let good = answer
        .as_ref()
        .is_some_and(|a| a.status == 200 && a.complete && a.body.content == target.as_bytes());
    if good && took < Duration::from_secs(1) {
        Ok(client.wire.raw)
    } else {
        let status = answer.map(|a| a.status);
        Err(format!("a plain request ({name}) gave {status:?} {stop:?} after {took:?}"))
    }
}
