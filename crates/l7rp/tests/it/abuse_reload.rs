//! What holds up a reload or has it refused must not hold up anything else, and is told.

use std::fmt::Write;
use std::fs::{self, OpenOptions};
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use l7rp_testkit::{Origin, Proxy, SOON, Signal, eventually, reply, within};
use socket2::{Domain, SockAddr, Socket, Type};

use crate::reloading::{ANY, File, free_port, listening, unix, watching};
use crate::setup::{PROGRAM, over};

/// As Linux has it on x86-64 and ARM.
const O_NONBLOCK: i32 = 0o4000;

/// Puts a pipe in the place of a file: who reads it waits for ever.
fn make_pipe(path: &Path) {
    fs::remove_file(path).expect("a file");
    assert!(Command::new("mkfifo").arg(path).status().expect("it runs").success());
}

/// Waits until the proxy reads that pipe, or has refused to. It reads for as long as the result
/// lives.
fn being_read(proxy: &Proxy, pipe: &Path) -> Option<fs::File> {
    let mut writer = None;
    eventually(SOON, || {
        // Nobody can write to a pipe before somebody reads it.
        writer = OpenOptions::new().write(true).custom_flags(O_NONBLOCK).open(pipe).ok();
        writer.is_some() || !proxy.outcomes().is_empty()
    });
    writer
}

#[test]
fn a_file_that_hangs_does_not_keep_a_signal_to_stop_from_being_heard() {
    let mut proxy = over(&[&Origin::refusing()]).start();
    let path = proxy.directory().join("config.yaml");
    make_pipe(&path);
    proxy.signal(Signal::HUP);
    let _writer = being_read(&proxy, &path);
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(Duration::from_secs(5)), 0);
}

#[test]
fn a_watched_file_that_hangs_does_not_keep_a_signal_to_stop_from_being_heard() {
    let file = File::with(&over(&[&Origin::refusing()]).yaml());
    let mut proxy = watching(&file);
    make_pipe(&file.path());
    let _writer = being_read(&proxy, &file.path());
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(Duration::from_secs(5)), 0);
}

#[test]
fn a_watched_file_that_is_huge_is_not_read_into_memory() {
    let file = File::with(&over(&[&Origin::refusing()]).yaml());
    let proxy = watching(&file);
    let before = proxy.resident();
    fs::File::create(file.path()).expect("the file").set_len(1 << 30).expect("a hole");
    let mut most = 0;
    // The watch has looked at it, and the reload has, when that is refused.
    within(Duration::from_secs(6), || {
        most = most.max(proxy.resident());
        (most > before + (512 << 20) || !proxy.outcomes().is_empty()).then_some(())
    });
    assert!(most < before + (256 << 20), "{} MiB", most >> 20);
}

/// Somebody who listens there, does not accept, and has a full queue.
fn stuck(path: &Path) -> Vec<Socket> {
    let socket = || Socket::new(Domain::UNIX, Type::STREAM, None).expect("a socket");
    let address = SockAddr::unix(path).expect("an address");
    let owner = socket();
    owner.bind(&address).expect("nobody has it");
    owner.listen(0).expect("it listens");
    let mut all = vec![owner];
    loop {
        let filler = socket();
        filler.set_nonblocking(true).expect("it can");
        if filler.connect(&address).is_err() {
            return all;
        }
        all.push(filler);
    }
}

#[test]
fn a_stuck_owner_of_a_unix_socket_does_not_hold_a_reload_and_the_signals() {
    let origin = Origin::start(reply::name("x"));
    let web = ("web", ANY);
    let mut proxy = Proxy::start(PROGRAM, &listening(&origin, &[web]));
    let path = proxy.directory().join("stuck.sock");
    let _owner = stuck(&path);
    proxy.rewrite_yaml(&listening(&origin, &[web, ("local", &unix(&path))]));
    proxy.signal(Signal::HUP);
    // It is refused, or is stuck too.
    within(Duration::from_millis(300), || proxy.outcomes().pop());
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(Duration::from_secs(5)), 0);
}

#[test]
fn a_bind_failure_is_told_with_file_and_line() {
    let origin = Origin::start(reply::name("x"));
    let taken = TcpListener::bind(ANY).expect("a port");
    let busy = taken.local_addr().expect("an address").to_string();
    let web = ("web", ANY);
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[web]));
    let event = proxy.try_reload(&listening(&origin, &[web, ("busy", &busy)]));
    let why = event["errors"][0].as_str().expect("an error");
    assert!(why.contains("config.yaml:1"), "{event}");
}

#[test]
fn a_lack_of_descriptors_is_called_so_by_a_reload() {
    let origin = Origin::start(reply::name("x"));
    let web = ("web", ANY);
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[web]));
    let new = format!("127.0.0.1:{}", free_port());
    let yaml = listening(&origin, &[web, ("new", &new)]);
    let before = proxy.descriptors();
    for more in 1..8 {
        proxy.limit_descriptors(before + more);
        let event = proxy.try_reload(&yaml);
        if event["event"] == "config_reloaded" {
            return;
        }
        let why = event["errors"][0].as_str().expect("an error");
        assert!(!why.contains("thread"), "{more} left: {why}");
    }
}

#[test]
fn a_refusal_with_very_many_errors_is_told() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let mut yaml = over(&[&origin]).yaml();
    let long = "x".repeat(180);
    for n in 0..60_000 {
        let _ = writeln!(yaml, "{long}{n}: 1");
    }
    proxy.rewrite_yaml(&yaml);
    proxy.signal(Signal::HUP);
    let rejected = [("outcome", "rejected")];
    eventually(SOON * 3, || proxy.metrics().sum("proxy_config_reloads_total", &rejected) == 1.0);
    let told = within(Duration::from_secs(5), || proxy.events("config_rejected").pop());
    assert!(told.is_some(), "the line was dropped");
}

#[test]
fn a_change_that_is_watched_and_told_by_a_signal_is_taken_once() {
    let origin = Origin::start(reply::name("x"));
    let yaml =
        |most: u32| over(&[&origin]).top(&format!("limits: {{ max_in_flight: {most} }}")).yaml();
    let file = File::with(&yaml(10));
    let proxy = watching(&file);
    file.write(&yaml(11));
    proxy.signal(Signal::HUP);
    // The watch looks once a second, and takes a change that is still there at the next look.
    within(Duration::from_secs(3), || (proxy.outcomes().len() > 1).then_some(()));
    assert_eq!(proxy.outcomes().len(), 1, "{:?}", proxy.outcomes());
}

#[test]
fn other_signals_do_not_keep_the_watch_from_looking_at_files() {
    let origin = Origin::start(reply::name("x"));
    let file = File::with(&over(&[&origin]).yaml());
    let proxy = watching(&file);
    // An upgrade fails for the same reason as the reload.
    fs::write(file.path(), "nonsense").expect("written");
    let looked = (0..10).find_map(|_| {
        proxy.signal(Signal::USR2);
        within(Duration::from_millis(700), || proxy.outcomes().pop())
    });
    assert!(looked.is_some(), "not looked at for 7 s");
}
