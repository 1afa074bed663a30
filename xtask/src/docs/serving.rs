//! Whether programs that a page has started listen already, as the system tells it of any
//! process, also of one in another network.

use std::fs;
use std::path::{Path, PathBuf};

/// Commands of ours that never listen.
const ASKING: [&str; 3] = ["load", "top", "explain"];

/// Whether every `l7rp` of the process group `group` that is to serve has a socket that listens.
pub(super) fn all_listen(group: u32) -> bool {
    members(group).iter().all(|process| listens(process.as_path()))
}

/// Whether this process is the program, or gone.
pub(super) fn has_begun(process: u32) -> bool {
    fs::read_to_string(format!("/proc/{process}/comm")).map_or(true, |name| name.trim() == "l7rp")
}

/// The folders in `/proc` of the processes that have to listen.
fn members(group: u32) -> Vec<PathBuf> {
    let Ok(all) = fs::read_dir("/proc") else { return Vec::new() };
    let mut members: Vec<PathBuf> = all.filter_map(|entry| Some(entry.ok()?.path())).collect();
    members.retain(|process| {
        let stat = fs::read_to_string(process.join("stat")).unwrap_or_default();
        let line = fs::read_to_string(process.join("cmdline")).unwrap_or_default();
        let asks = line.split('\0').nth(1).is_some_and(|word| ASKING.contains(&word));
        is_ours(&stat, group) && !asks
    });
    members
}

/// By a line of `/proc/PID/stat`: the name in parentheses, state, parent, group.
fn is_ours(stat: &str, group: u32) -> bool {
    let Some((name, rest)) = stat.rsplit_once(") ") else { return false };
    let mut words = rest.split(' ');
    let alive = words.next().is_some_and(|state| state != "Z");
    let in_group = words.nth(1).is_some_and(|word| word == group.to_string());
    alive && in_group && name.ends_with("(l7rp")
}

fn listens(process: &Path) -> bool {
    let mut sockets = Vec::new();
    for table in ["net/tcp", "net/tcp6", "net/unix"] {
        let table = fs::read_to_string(process.join(table)).unwrap_or_default();
        sockets
            .extend(table.lines().filter_map(listening).map(|inode| format!("socket:[{inode}]")));
    }
    let Ok(files) = fs::read_dir(process.join("fd")) else { return false };
    files.filter_map(|file| fs::read_link(file.ok()?.path()).ok()).any(|link| {
        let link = link.display().to_string();
        sockets.contains(&link)
    })
}

/// The inode of a socket that listens, by a line of such a table.
fn listening(line: &str) -> Option<&str> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words.as_slice() {
        // TCP: number, addresses, state, queues, timer, retransmits, user, timeout, inode. Unix:
        // number, references, protocol, flags, type, state, inode.
        [_, _, _, "0A", _, _, _, _, _, inode, ..] | [_, _, _, "00010000", _, _, inode, ..] => {
            Some(inode)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_system_tells() {
        let tcp = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 26532 1 00000000 100 0 0 10 0";
        assert_eq!(listening(tcp), Some("26532"));
        assert_eq!(listening(&tcp.replace(" 0A ", " 01 ")), None);
        let unix = "0000000000000000: 00000002 00000000 00010000 0001 01 17290 /run/a.sock";
        assert_eq!(listening(unix), Some("17290"));
        assert_eq!(listening("Num       RefCount Protocol Flags    Type St Inode Path"), None);
        assert!(is_ours("7 (l7rp) S 1 42 42 0 -1", 42));
        assert!(!is_ours("7 (l7rp) Z 1 42 42 0 -1", 42));
        assert!(!is_ours("7 (l7rp) S 42 7 42 0 -1", 42));
        assert!(!is_ours("7 (curl) S 1 42 42 0 -1", 42));
    }
}
