//! What `/proc` knows of ports: who holds one, for an error message that saves a search, and
//! whether anybody is about to connect to one.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;

/// The process that listens on `address`, as `name (pid 123)`, if it can be found out.
pub fn of_port(address: SocketAddr) -> Option<String> {
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .find_map(|table| listening_inode(&table, address.port()))?;
    let wanted = format!("socket:[{inode}]");
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let holds = fs::read_dir(entry.path().join("fd"))
            .ok()?
            .flatten()
            .any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.as_os_str() == wanted.as_str()));
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        holds.then(|| format!("{} (pid {pid})", name.trim()))
    })
}

/// Whether the kernel knows of connections to `port` whose handshake is under way.
pub fn has_handshakes(port: u16) -> bool {
    const SYN_RECV: &str = "03";
    let suffix = format!(":{port:04X}");
    let is_one = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (local, state) = (words.nth(1), words.nth(1));
        local.is_some_and(|local| local.ends_with(&suffix)) && state == Some(SYN_RECV)
    };
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let Ok(table) = fs::File::open(table) else { return false };
        BufReader::new(table).lines().map_while(Result::ok).any(|line| is_one(&line))
    })
}

/// The inode of a socket in state LISTEN (0A) on `port`, from a table of `/proc/net`.
fn listening_inode(table: &str, port: u16) -> Option<String> {
    let suffix = format!(":{port:04X}");
    table.lines().skip(1).find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let local = words.nth(1)?;
        let state = words.nth(1)?;
        (local.ends_with(&suffix) && state == "0A").then(|| words.nth(5))?.map(str::to_owned)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_ourselves() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let holder = of_port(listener.local_addr().unwrap()).unwrap();
        assert!(holder.contains(&format!("(pid {})", std::process::id())), "{holder}");
    }
}
