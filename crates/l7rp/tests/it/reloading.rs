//! Configurations that change while the program runs.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering::SeqCst};

use l7rp_testkit::{Client, Gate, Origin, Proxy, Then, complete};

use crate::setup::{PROGRAM, get};

/// Any free port.
pub const ANY: &str = "127.0.0.1:0";

/// A configuration file of its own, for a program that is started with flags.
pub struct File(tempfile::TempDir);

impl File {
    pub fn with(yaml: &str) -> Self {
        let file = Self(tempfile::tempdir().expect("a directory"));
        file.write(yaml);
        file
    }

    pub fn path(&self) -> PathBuf {
        self.0.path().join("config.yaml")
    }

    pub fn write(&self, yaml: &str) {
        fs::write(self.path(), complete(yaml, self.0.path())).expect("written");
    }
}

/// Starts the program, which watches this file.
#[track_caller]
pub fn watching(file: &File) -> Proxy {
    Proxy::start_with(PROGRAM, &["--watch", "--config", &file.path().to_string_lossy()])
}

/// A port that nobody has, at any address. The system gives it to nobody else meanwhile: it is
/// not one of those that it chooses from.
#[track_caller]
pub fn free_port() -> u16 {
    static TAKEN: AtomicU16 = AtomicU16::new(0);
    // Another run of the tests begins elsewhere.
    let first = std::process::id() as u16 % 200 * 60;
    let mut next = (0..12_000).map(|_| 20_000 + (first + TAKEN.fetch_add(1, SeqCst)) % 12_000);
    next.find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok()).expect("a port")
}

/// The address of a listener at this path.
pub fn unix(path: &Path) -> String {
    format!("unix:{}", path.display())
}

/// Listeners (name and address) over one pool and one route.
pub fn listening(origin: &Origin, listeners: &[(&str, &str)]) -> String {
    let all: Vec<_> = listeners
        .iter()
        .map(|(name, bind)| format!("{{ name: {name}, bind: \"{bind}\" }}"))
        .collect();
    format!(
        "listeners: [{}]\nupstream_pools: [{{ name: b, upstreams: [{{ url: \"{}\" }}] }}]\n\
         routes: [{{ name: r, pool: b }}]\n",
        all.join(", "),
        origin.url()
    )
}

/// Answers `half`, the second half of it when `gate` opens.
pub fn in_halves(gate: &Gate) -> Origin {
    let gate = gate.clone();
    Origin::start(move |call| {
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nha");
        gate.pass();
        call.send("lf");
        Then::Next
    })
}

/// Checks that the second of two requests that came together is answered, although its connection
/// is to `end` while the first one is answered [`in_halves`].
#[track_caller]
pub fn second_is_answered(address: SocketAddr, gate: &Gate, end: impl FnOnce()) {
    let mut client = Client::connect(address);
    client.send(get("a.test", "/1", "") + &get("a.test", "/2", ""));
    let head = client.head();
    assert_eq!(client.wire.read_exact(2).expect("a half"), b"ha");
    end();
    gate.open();
    assert_eq!(client.wire.read_exact(2).expect("a half"), b"lf");
    assert_ne!(head.get("connection"), Some("close"), "it was told that more may follow");
    let second = client.try_response();
    assert!(second.is_ok(), "the second request came before and gets no answer: {second:?}");
}
