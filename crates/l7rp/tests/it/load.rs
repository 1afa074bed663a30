//! Clients that never pause, and what became of each of their requests.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use l7rp_testkit::{Call, Client, SOON, Then, Wire, eventually, let_pass};

/// How long a connection may take. The system repeats a SYN that was dropped after a second.
const CONNECT: Duration = Duration::from_millis(600);
/// Between two requests of a client, so that a test is not about the speed of this machine.
const PAUSE: Duration = Duration::from_millis(2);
/// The answer to a path is so many times the path.
const TIMES: usize = 200;

/// Answers with the request's path many times, each way that a body can be framed, and some of
/// them late.
pub fn answer(call: &mut Call<'_>) -> Then {
    if call.body().is_err() {
        return Then::Close;
    }
    let body = call.request.target().repeat(TIMES);
    if call.number.is_multiple_of(5) {
        let_pass(Duration::from_millis(10));
    }
    let (half, rest) = body.split_at(body.len() / 2);
    if call.number.is_multiple_of(2) {
        call.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{half}", body.len()));
        call.send(rest);
    } else {
        call.send(format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{}", chunk(half)));
        call.send(format!("{}0\r\n\r\n", chunk(rest)));
    }
    Then::Next
}

fn chunk(part: &str) -> String {
    format!("{:x}\r\n{part}\r\n", part.len())
}

/// Where clients connect.
#[derive(Clone, Debug)]
pub enum Target {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl Target {
    /// A connection, or why there is none.
    pub fn connect(&self) -> io::Result<Client> {
        let wire: Wire = match self {
            Self::Tcp(address) => TcpStream::connect_timeout(address, CONNECT)?.into(),
            Self::Unix(path) => UnixStream::connect(path)?.into(),
        };
        wire.patience(Some(SOON));
        Ok(Client { wire })
    }
}

/// What became of all requests.
#[derive(Debug, Default)]
struct Told {
    answered: AtomicUsize,
    /// Connections that ended in order, after an answer which said that it is the last.
    last: AtomicUsize,
    refused: AtomicUsize,
    failures: Mutex<Vec<String>>,
    refusal_is_expected: AtomicBool,
    ended: AtomicBool,
}

impl Told {
    fn failed(&self, what: &str, error: &io::Error) {
        let failures = &mut self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.push(format!("{what}: {:?} {error}", error.kind()));
    }

    /// A connection, unless it is refused and may be: then the client has nothing left to do.
    fn connect(&self, target: &Target) -> Option<Client> {
        loop {
            // Asked for before: a refusal may be older than the permission.
            let may_be_refused = self.refusal_is_expected.load(SeqCst);
            match target.connect() {
                Ok(client) => return Some(client),
                Err(_) if may_be_refused => {
                    self.refused.fetch_add(1, SeqCst);
                    return None;
                }
                Err(e) => self.failed("connect", &e),
            }
            if self.ended.load(SeqCst) {
                return None;
            }
            let_pass(PAUSE);
        }
    }

    /// Asks once. Whether the connection can be used again.
    fn ask(&self, client: &mut Client, who: &str, number: usize) -> bool {
        let path = format!("/{who}-{number}");
        let request = if number.is_multiple_of(2) {
            format!("GET {path} HTTP/1.1\r\nHost: a.test\r\n\r\n")
        } else {
            let body = "x".repeat(number % 3000);
            let length = body.len();
            format!(
                "POST {path} HTTP/1.1\r\nHost: a.test\r\nContent-Length: {length}\r\n\r\n{body}"
            )
        };
        let answer = client.wire.write(request.as_bytes()).and_then(|()| client.try_response());
        let answer = match answer {
            Ok(answer) => answer,
            Err(e) => {
                self.failed(&path, &e);
                return false;
            }
        };
        let is_right = answer.status() == 200 && answer.text() == path.repeat(TIMES);
        if is_right && answer.complete {
            self.answered.fetch_add(1, SeqCst);
        } else {
            self.failed(&path, &io::Error::other(answer.start.clone()));
        }
        if answer.get("connection") != Some("close") {
            return true;
        }
        match client.wire.read_some(1) {
            Ok(end) if end.is_empty() => {
                self.last.fetch_add(1, SeqCst);
            }
            Ok(_) => self.failed(&path, &io::Error::other("more than the last answer")),
            Err(e) => self.failed(&path, &e),
        }
        false
    }
}

/// Clients that ask until they are refused or the test is over.
#[derive(Debug)]
pub struct Load {
    told: Arc<Told>,
    clients: Vec<JoinHandle<()>>,
}

/// The sum of it.
#[derive(Debug)]
pub struct Sum {
    /// Requests that got the whole answer.
    pub answered: usize,
    /// Connections that ended in order, after an answer which said that it is the last.
    pub last: usize,
    /// Clients that were refused when that was expected.
    pub refused: usize,
}

impl Load {
    /// Starts `kept` clients that keep their connections, and `new` that connect for each request.
    pub fn start(target: &Target, kept: usize, new: usize) -> Self {
        let told = Arc::new(Told::default());
        let client = |n: usize| {
            let (told, target, keeps) = (told.clone(), target.clone(), n < kept);
            let who = if keeps { format!("kept-{n}") } else { format!("new-{n}") };
            thread::spawn(move || ask_for_ever(&told, &target, keeps, &who))
        };
        let clients = (0..kept + new).map(client).collect();
        Self { told, clients }
    }

    /// Waits until so many more requests have been answered.
    #[track_caller]
    pub fn goes_on(&self, more: usize) {
        let before = self.told.answered.load(SeqCst);
        eventually(SOON, || self.told.answered.load(SeqCst) >= before + more);
    }

    /// From now on a client whose connection is refused has nothing left to do.
    pub fn expect_refusal(&self) {
        self.told.refusal_is_expected.store(true, SeqCst);
    }

    /// Waits until each client was refused. Nothing may have failed.
    #[track_caller]
    pub fn refused(self) -> Sum {
        eventually(SOON, || self.clients.iter().all(JoinHandle::is_finished));
        self.end()
    }

    /// Stops. Nothing may have failed.
    #[track_caller]
    pub fn end(mut self) -> Sum {
        self.told.ended.store(true, SeqCst);
        for client in self.clients.drain(..) {
            client.join().expect("a client does not panic");
        }
        let failures = self.told.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let answered = self.told.answered.load(SeqCst);
        assert!(failures.is_empty(), "{answered} were answered, but {failures:#?}");
        let (last, refused) = (self.told.last.load(SeqCst), self.told.refused.load(SeqCst));
        Sum { answered, last, refused }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // A test that has failed must not leave them to the others.
        self.told.ended.store(true, SeqCst);
    }
}

fn ask_for_ever(told: &Told, target: &Target, keeps: bool, who: &str) {
    let mut kept = None;
    for number in 0.. {
        if told.ended.load(SeqCst) {
            return;
        }
        let Some(mut client) = kept.take().or_else(|| told.connect(target)) else { return };
        if told.ask(&mut client, who, number) && keeps {
            kept = Some(client);
        }
        let_pass(PAUSE);
    }
}
