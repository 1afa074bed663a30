//! Other files for a proxy that runs, and what must not change with them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering::SeqCst};

use rustix::process::Signal;
use serde_json::Value;

use crate::proxy::complete;
use crate::{Proxy, SOON, within};

impl Proxy {
    /// Puts another file in the place of its own, at one moment.
    pub fn rewrite(&self, octets: impl AsRef<[u8]>) {
        let next = self.directory().join("next.yaml");
        std::fs::write(&next, octets).expect("a file");
        std::fs::rename(next, self.directory().join("config.yaml")).expect("it is replaced");
    }

    /// As [`Proxy::rewrite`], with what [`Proxy::start`] adds to a file.
    pub fn rewrite_yaml(&self, yaml: &str) {
        self.rewrite(complete(yaml, &self.directory()));
    }

    /// What its reloads have come to so far.
    pub fn outcomes(&self) -> Vec<Value> {
        self.lines_that(|line| {
            line["event"] == "config_reloaded" || line["event"] == "config_rejected"
        })
    }

    /// Has it read its file again; what that has come to. No other reload may be on its way.
    ///
    /// # Panics
    /// It says nothing.
    #[track_caller]
    pub fn hang_up(&self) -> Value {
        let before = self.outcomes().len();
        self.signal(Signal::HUP);
        within(SOON * 2, || self.outcomes().get(before).cloned())
            .unwrap_or_else(|| panic!("it does not say what became of the reload"))
    }

    /// Has it read this file, as [`Proxy::hang_up`]; what that has come to.
    #[track_caller]
    pub fn try_reload(&self, yaml: &str) -> Value {
        self.rewrite_yaml(yaml);
        self.hang_up()
    }

    /// Puts this file in force; the event that says so.
    ///
    /// # Panics
    /// The file is refused.
    #[track_caller]
    pub fn reload(&self, yaml: &str) -> Value {
        let event = self.try_reload(yaml);
        assert_eq!(event["event"], "config_reloaded", "{event}\n{yaml}");
        event
    }

    /// How many threads it has.
    pub fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.pid())).map_or(0, Iterator::count)
    }

    /// The sockets that it listens on at addresses of version 4, by their inodes.
    pub fn listening(&self) -> BTreeMap<u64, SocketAddr> {
        let own: Vec<_> = std::fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .expect("it runs")
            .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
            .collect();
        let table = std::fs::read_to_string("/proc/net/tcp").expect("a table");
        let all = table.lines().skip(1).filter_map(listening);
        all.filter(|(inode, _)| own.contains(&format!("socket:[{inode}]").into())).collect()
    }
}

/// A line of the kernel's table, if its socket listens: inode and address.
fn listening(line: &str) -> Option<(u64, SocketAddr)> {
    const LISTEN: &str = "0A";
    let fields: Vec<_> = line.split_ascii_whitespace().collect();
    if fields.get(3) != Some(&LISTEN) {
        return None;
    }
    let (ip, port) = fields.get(1)?.split_once(':')?;
    let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?.to_ne_bytes());
    let port = u16::from_str_radix(port, 16).ok()?;
    Some((fields.get(9)?.parse().ok()?, SocketAddr::new(IpAddr::V4(ip), port)))
}

/// An address of this machine that nobody else uses, for listeners that have to be known before
/// they are opened. Its port is none that the system gives away.
///
/// # Panics
/// All of them are in use.
pub fn own_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(18_000);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    loop {
        let port = NEXT.fetch_add(1, SeqCst);
        assert!((18_000..30_000).contains(&port), "no port is left");
        // Not 127.0.0.1, where other tests are. Who listens on all addresses may have it still.
        let address = SocketAddr::from(([127, 128 | high, low, 7], port));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}
