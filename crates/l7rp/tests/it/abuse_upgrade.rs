//! Whoever takes over, is taken over from, or ends: nothing is cut, and nothing is left behind.

use std::fmt::Write;
use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use l7rp_testkit::{
    Client, Gate, Origin, Proxy, SOON, Signal, Value, eventually, let_pass, reply, within,
};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, kill_process};

use crate::reloading::{ANY, File, free_port, in_halves, listening, second_is_answered, unix};
use crate::setup::{PROGRAM, get, over, start};

/// Ends, when dropped, the processes that were started to take over.
struct Heirs<'a>(&'a Proxy);

impl Drop for Heirs<'_> {
    fn drop(&mut self) {
        for event in self.0.events("upgrade_started") {
            let _ = kill_process(pid_of(&event), Signal::KILL);
        }
    }
}

#[track_caller]
fn pid_of(event: &Value) -> Pid {
    let pid = event["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
    pid.and_then(Pid::from_raw).expect("a process id")
}

fn is_alive(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    // What has ended and was not asked for its exit code has the state Z.
    stat.is_ok_and(|stat| !stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" Z")))
}

/// Waits for the end of the first upgrade.
#[track_caller]
fn outcome(proxy: &Proxy) -> Value {
    let ends = || [proxy.events("upgrade_complete"), proxy.events("upgrade_failed")].concat();
    within(SOON, || ends().pop()).expect("an end of the upgrade")
}

#[test]
fn an_upgrade_waits_for_every_pool_that_has_worked() {
    let fast = Origin::start(reply::name("fast"));
    let slow = Origin::start(|call| {
        if call.request.target() == "/health" {
            let_pass(Duration::from_millis(1200));
        }
        reply::name("slow")(call)
    });
    let active = "health: { active: { path: /health, interval: 30s, timeout: 5s, \
                  healthy_threshold: 2 } }";
    let proxy = start(&format!(
        "listeners: [{{ name: web, bind: \"127.0.0.1:{}\" }}]\nupstream_pools:\n\
         - {{ name: f, upstreams: [{{ url: \"{}\" }}], {active} }}\n\
         - {{ name: s, upstreams: [{{ url: \"{}\" }}], {active} }}\n\
         routes: [{{ name: s, path_prefix: /s, pool: s }}, {{ name: f, pool: f }}]\n",
        free_port(),
        fast.url(),
        slow.url()
    ));
    let _heirs = Heirs(&proxy);
    eventually(SOON, || proxy.get("/s").status() == 200);
    proxy.signal(Signal::USR2);
    let mut refused = 0;
    let mut ask = || refused += usize::from(proxy.get("/s").status() == 503);
    eventually(SOON, || {
        ask();
        !proxy.events("upgrade_complete").is_empty()
    });
    // The new process would need a second more to find out that the slow one is well.
    for _ in 0..100 {
        ask();
        let_pass(Duration::from_millis(5));
    }
    assert_eq!(refused, 0, "answers of 503 from a pool that was and is well");
}

#[test]
fn a_process_whose_upgrade_was_called_off_leaves_no_other_behind() {
    let origin = Origin::start(reply::name("x"));
    for _ in 0..6 {
        let mut proxy = over(&[&origin]).start();
        let heirs = Heirs(&proxy);
        proxy.signal(Signal::USR2);
        let heir = pid_of(&proxy.wait_for_event("upgrade_started", |_| true, SOON));
        // The old process is not on a processor while the new one gets ready.
        proxy.signal(Signal::STOP);
        let serves = || (proxy.events("proxy_started").len() == 2).then_some(());
        let both = within(Duration::from_secs(1), serves).is_some();
        // Time to tell the old one.
        let_pass(Duration::from_millis(100));
        proxy.signal(Signal::TERM);
        proxy.signal(Signal::CONT);
        let outcome = outcome(&proxy);
        proxy.wait_for_event("shutdown_complete", |_| true, Duration::from_secs(5));
        if outcome["event"] == "upgrade_failed" {
            let reached = || TcpStream::connect_timeout(&proxy.address(), Duration::from_secs(2));
            let lives = is_alive(heir).then(reached);
            assert!(lives.is_none(), "{heir:?} lives, {outcome} (both: {both}): {lives:?}");
        }
        // If not, the new one had taken over before the signal was looked at, and lives rightly.
        let called_off = proxy.events("shutdown_started").iter().all(|e| e["why"] == "SIGTERM");
        if called_off {
            eventually(SOON, || !is_alive(heir));
        }
        drop(heirs);
        proxy.wait_exit(SOON);
    }
}

#[test]
fn the_first_signal_to_stop_an_old_process_cuts_nothing() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let proxy = over(&[&origin]).start();
    let _heirs = Heirs(&proxy);
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || origin.requests() == 1);
    proxy.signal(Signal::USR2);
    proxy.wait_for_event("shutdown_started", |_| true, SOON);
    // Signals within 100 ms are one.
    let_pass(Duration::from_millis(200));
    proxy.signal(Signal::TERM);
    within(Duration::from_millis(300), || proxy.events("shutdown_forced").pop());
    gate.open();
    let answer = client.try_response();
    assert!(answer.is_ok(), "one SIGTERM, and a request in progress is cut: {answer:?}");
}

#[test]
fn what_a_reload_takes_can_be_upgraded_to() {
    let origin = Origin::start(reply::name("x"));
    let port = free_port();
    let (one, all) = (format!("127.0.0.1:{port}"), format!("0.0.0.0:{port}"));
    let proxy = start(&listening(&origin, &[("one", &one)]));
    let _heirs = Heirs(&proxy);
    proxy.rewrite_yaml(&listening(&origin, &[("one", &one), ("all", &all)]));
    proxy.signal(Signal::USR2);
    let done = outcome(&proxy);
    assert_eq!(done["event"], "upgrade_complete", "{done}");
}

#[test]
fn upgrades_that_fail_leave_nothing_behind() {
    let origin = Origin::start(reply::name("x"));
    let taken = TcpListener::bind(ANY).expect("a port");
    let busy = taken.local_addr().expect("an address").to_string();
    let web = ("web", ANY);
    let proxy = start(&listening(&origin, &[web]));
    let path = proxy.directory().join("new.sock");
    proxy.rewrite_yaml(&listening(&origin, &[web, ("local", &unix(&path)), ("busy", &busy)]));
    let upgrade = |n: usize| {
        proxy.signal(Signal::USR2);
        eventually(SOON, || proxy.events("upgrade_failed").len() == n);
    };
    // What the first ones have opened for good is no leak; their channels may still be closing.
    (1..=2).for_each(upgrade);
    let_pass(Duration::from_millis(100));
    let before = proxy.descriptors();
    (3..=10).for_each(upgrade);
    eventually(SOON, || proxy.descriptors() == before);
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", proxy.pid()));
    assert_eq!(children.expect("it runs").trim(), "", "children");
    assert_eq!(proxy.get("/").text(), "x");
    assert!(!path.exists(), "a socket of a process that is gone");
}

/// The program with these sockets at descriptors 3 and on, as a service manager passes them.
/// `names`: settings of variables for the shell.
#[track_caller]
fn activated(sockets: &[BorrowedFd<'_>], names: &str, file: &File) -> Proxy {
    let inheritable = |flags: FdFlags| {
        for socket in sockets {
            fcntl_setfd(socket, flags).expect("it can be set");
        }
    };
    // By way of numbers that are free, for their own may be among those that they are to get.
    let (mut aside, mut moved) = (String::new(), String::new());
    for ((to, free), socket) in (3..).zip(103..).zip(sockets) {
        let _ = write!(aside, " {free}<&{}", socket.as_raw_fd());
        let _ = write!(moved, " {to}<&{free} {free}<&-");
    }
    let script = format!(
        "exec{aside}{moved}; export LISTEN_PID=$$ LISTEN_FDS={} {names}; exec {PROGRAM} --config {}",
        sockets.len(),
        file.path().display()
    );
    // The kit gives no standard input, so the shell has them from the test itself.
    inheritable(FdFlags::empty());
    let proxy = Proxy::start_with("/bin/bash", &["-c", &script]);
    inheritable(FdFlags::CLOEXEC);
    proxy
}

/// A socket of a service manager, and its address.
fn managed() -> (TcpListener, SocketAddr) {
    let socket = TcpListener::bind(ANY).expect("a port");
    let address = socket.local_addr().expect("an address");
    (socket, address)
}

#[test]
fn a_unix_socket_without_a_name_is_found_by_its_address() {
    let origin = Origin::start(reply::name("x"));
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("web.sock");
    let manager = UnixListener::bind(&path).expect("nobody has it");
    let file = File::with(&listening(&origin, &[("web", &unix(&path))]));
    let _proxy = activated(&[manager.as_fd()], "", &file);
    assert_eq!(Client::connect_unix(&path).get("/").text(), "x");
}

#[test]
fn a_listener_of_a_service_manager_can_go_and_come_back() {
    let origin = Origin::start(reply::name("x"));
    let (manager, address) = managed();
    let other = ("other", ANY);
    let both = listening(&origin, &[("web", &address.to_string()), other]);
    let file = File::with(&both);
    let proxy = activated(&[manager.as_fd()], "LISTEN_FDNAMES=web", &file);
    assert_eq!(Client::connect(address).get("/").text(), "x");
    for yaml in [listening(&origin, &[other]), both] {
        file.write(&yaml);
        let event = proxy.hang_up();
        assert_eq!(event["event"], "config_reloaded", "{event}");
    }
}

#[test]
fn sockets_of_one_unit_go_to_the_listeners_with_their_addresses() {
    let origin = Origin::start(reply::name("x"));
    let ((one, first), (two, second)) = (managed(), managed());
    let listeners = [("web", &*first.to_string()), ("other", &*second.to_string())];
    let file = File::with(&listening(&origin, &listeners));
    // FileDescriptorName= is one for all ListenStream= of a unit.
    let _proxy = activated(&[one.as_fd(), two.as_fd()], "LISTEN_FDNAMES=web:web", &file);
    for address in [first, second] {
        assert_eq!(Client::connect(address).get("/").text(), "x");
    }
}

/// Whether anybody listens there: without a connection, which would have to be accepted.
fn is_listening(address: SocketAddr) -> bool {
    let local = format!("{:08X}:{:04X}", u32::from_ne_bytes([127, 0, 0, 1]), address.port());
    let table = fs::read_to_string("/proc/net/tcp").expect("it is there");
    table.lines().any(|line| {
        let fields: Vec<_> = line.split_ascii_whitespace().collect();
        fields.get(1) == Some(&&*local) && fields.get(3) == Some(&"0A")
    })
}

#[test]
fn what_waits_for_descriptors_is_served_by_a_drain() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = over(&[&origin]).listener("max_connections: 10000").one_worker().start();
    // Room for a few connections; the others wait in the queue.
    proxy.limit_descriptors(proxy.descriptors() + 6);
    let mut clients: Vec<_> = (0..12).map(|_| proxy.client()).collect();
    proxy.wait_for_event("accept_failed", |_| true, SOON);
    proxy.signal(Signal::TERM);
    // If the queue is dropped, it is so by now.
    within(Duration::from_millis(500), || (!is_listening(proxy.address())).then_some(()));
    let request = get("a.test", "/", "");
    let sent: Vec<_> = clients.iter_mut().map(|c| c.wire.write(request.as_bytes())).collect();
    let answers: Vec<_> = clients
        .iter_mut()
        .zip(sent)
        .map(|(client, sent)| sent.and_then(|()| client.try_response()).map(|a| a.status()))
        .collect();
    let is_reset = |e: &std::io::Error| e.kind() == std::io::ErrorKind::ConnectionReset;
    let reset = answers.iter().filter(|answer| answer.as_ref().is_err_and(is_reset)).count();
    proxy.wait_exit(SOON);
    assert_eq!(reset, 0, "reset of 12 that the kernel had accepted: {answers:?}");
}

#[test]
fn a_pipelined_request_is_answered_by_a_drain() {
    let gate = Gate::default();
    let origin = in_halves(&gate);
    let proxy = over(&[&origin]).start();
    second_is_answered(proxy.address(), &gate, || {
        proxy.signal(Signal::TERM);
        eventually(SOON, || !is_listening(proxy.address()));
    });
}
