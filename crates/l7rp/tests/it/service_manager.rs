//! What the service manager is told, and the sockets that it passes.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use l7rp_testkit::{Client, Gate, Origin, Proxy, SOON, Signal, eventually, let_pass, reply};
use rustix::time::{ClockId, clock_gettime};

use crate::family::Family;
use crate::load::{self, Load, Target};
use crate::setup::{PROGRAM, get, over};

/// A service manager, as far as a service sees one.
struct Manager {
    socket: UnixDatagram,
    directory: tempfile::TempDir,
}

impl Manager {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = UnixDatagram::bind(directory.path().join("notify")).expect("a socket");
        socket.set_read_timeout(Some(SOON)).expect("a time-out");
        Self { socket, directory }
    }

    /// A command whose process is a service of this manager.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("NOTIFY_SOCKET", self.directory.path().join("notify"))
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        command
    }

    /// The next notification.
    #[track_caller]
    fn told(&self) -> String {
        let mut text = [0; 5000];
        let length = self.socket.recv(&mut text).expect("a notification");
        String::from_utf8_lossy(&text[..length]).into_owned()
    }

    /// The next notification that is not just a sign of life.
    #[track_caller]
    fn news(&self) -> String {
        loop {
            let text = self.told();
            if text != "WATCHDOG=1" {
                return text;
            }
        }
    }

    /// The next that has a line which begins like this; no other kind than these may come before.
    #[track_caller]
    fn hears(&self, line: &str, others: &[&str]) -> String {
        loop {
            let text = self.news();
            if text.lines().any(|l| l.starts_with(line)) {
                return text;
            }
            assert!(others.iter().any(|o| text.starts_with(o)), "{text:?} before {line:?}");
        }
    }

    /// All that was told and not been heard yet.
    fn rest(&self) -> Vec<String> {
        self.socket.set_nonblocking(true).expect("it can");
        let mut text = [0; 5000];
        let next = || self.socket.recv(&mut text).ok().map(|n| (n, text));
        let all = std::iter::from_fn(next);
        all.map(|(n, text)| String::from_utf8_lossy(&text[..n]).into_owned()).collect()
    }
}

fn monotonic_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec * 1_000_000 + now.tv_nsec / 1000).cast_unsigned()
}

#[test]
fn start_reload_and_stop_are_told() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let yaml = over(&[&origin]).yaml();
    let manager = Manager::new();
    let mut proxy = Proxy::start_by(&mut manager.command(Path::new(PROGRAM)), &yaml);
    let ready = manager.told();
    assert!(ready.starts_with("READY=1\nSTATUS="), "{ready:?}");
    assert!(ready.contains(&proxy.address().to_string()), "{ready:?}");
    for (change, words) in [("", "configuration 2"), ("routse: []\n", "refused"), ("", "3")] {
        let before = monotonic_us();
        proxy.rewrite_yaml(&format!("{yaml}{change}"));
        proxy.signal(Signal::HUP);
        let reloading = manager.told();
        let at = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect("it reloads");
        let at: u64 = at.trim_end().parse().expect("a time");
        assert!((before..=monotonic_us()).contains(&at), "{reloading:?}");
        let ready = manager.told();
        assert!(ready.starts_with("READY=1\nSTATUS=") && ready.contains(words), "{ready:?}");
    }
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || origin.requests() == 1);
    proxy.signal(Signal::TERM);
    // At once, not when the last request has ended.
    let stopping = manager.told();
    assert!(stopping.starts_with("STOPPING=1"), "{stopping:?}");
    gate.open();
    assert_eq!(client.response().text(), "late");
    assert_eq!(proxy.wait_exit(SOON), 0);
    let rest = manager.rest();
    assert!(rest.iter().all(|text| !text.contains("READY")), "{rest:?}");
}

#[test]
fn a_start_that_fails_is_not_called_ready() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = taken.local_addr().expect("an address").to_string();
    let good = over(&[&Origin::refusing()]).yaml();
    for yaml in [good.replace("127.0.0.1:0", &at), format!("{good}routse: []\n")] {
        let manager = Manager::new();
        let mut proxy = Proxy::spawn_by(&mut manager.command(Path::new(PROGRAM)), &yaml);
        assert_ne!(proxy.wait_exit(SOON), 0);
        let rest = manager.rest();
        assert!(rest.iter().all(|text| !text.contains("READY")), "{rest:?}");
    }
}

#[test]
fn a_manager_that_watches_sees_it_alive_to_the_end() {
    const LIMIT: Duration = Duration::from_secs(1);
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let manager = Manager::new();
    let mut command = manager.command(Path::new(PROGRAM));
    command.env("WATCHDOG_USEC", LIMIT.as_micros().to_string());
    let mut proxy = Proxy::start_by(&mut command, &over(&[&origin]).yaml());
    assert!(manager.told().starts_with("READY=1"));
    let alive = |times: usize| {
        for _ in 0..times {
            let began = Instant::now();
            while manager.told() != "WATCHDOG=1" {}
            assert!(began.elapsed() < LIMIT, "it would have been killed");
        }
    };
    alive(4);
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || origin.requests() == 1);
    proxy.signal(Signal::TERM);
    alive(3);
    gate.open();
    assert_eq!(client.response().text(), "late");
    assert_eq!(proxy.wait_exit(SOON), 0);
}

#[test]
fn a_watchdog_for_somebody_else_is_left_alone() {
    let origin = Origin::start(reply::name("x"));
    let manager = Manager::new();
    let mut command = manager.command(Path::new(PROGRAM));
    command.env("WATCHDOG_USEC", "100000").env("WATCHDOG_PID", "1");
    let mut proxy = Proxy::start_by(&mut command, &over(&[&origin]).yaml());
    assert!(manager.told().starts_with("READY=1"));
    let_pass(Duration::from_millis(400));
    proxy.signal(Signal::TERM);
    assert!(manager.told().starts_with("STOPPING=1"), "and no sign of life before");
    assert_eq!(proxy.wait_exit(SOON), 0);
}

#[test]
fn an_upgrade_tells_who_the_service_is_now() {
    let origin = Origin::start(reply::name("x"));
    let manager = Manager::new();
    let mut family = Family::start_by(&over(&[&origin]).yaml(), |program| {
        let mut command = manager.command(program);
        command.env("WATCHDOG_USEC", "1000000");
        command
    });
    assert!(manager.news().starts_with("READY=1"));
    family.remove_program();
    family.upgrade_fails("No such file");
    family.restore_program();
    let new = family.upgrade();
    // A manager waits for its own children alone, and this is told of while the old one is there.
    assert_ne!(parent_of(new), family.first.pid());
    let main = manager.hears("MAINPID=", &["READY=1", "STATUS="]);
    assert!(main.lines().any(|line| line == format!("MAINPID={new}")), "{main:?}");
    assert_eq!(family.first.wait_end(SOON), 0);
    let rest = manager.rest();
    assert!(rest.iter().all(|text| !text.starts_with("STOPPING")), "the service goes on: {rest:?}");
    manager.socket.set_nonblocking(false).expect("it can");
    // The new one is watched in its turn, and speaks for the service.
    for _ in 0..2 {
        while manager.told() != "WATCHDOG=1" {}
    }
    family.signal(Signal::HUP);
    assert!(manager.news().starts_with("RELOADING=1"));
    assert!(manager.news().starts_with("READY=1"));
    family.signal(Signal::TERM);
    assert!(manager.news().starts_with("STOPPING=1"));
    family.end();
}

/// The process whose child this one is.
fn parent_of(pid: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    parent.and_then(|pid| pid.trim().parse().ok()).expect("its parent")
}

/// A command that runs `program` with sockets passed to it as a manager does: `names` are those of
/// `one` and, if there is a second, `two`.
fn passing(program: &Path, names: &str, one: OwnedFd, two: Option<OwnedFd>) -> Command {
    let count = 1 + usize::from(two.is_some());
    let second = if two.is_some() { "4<&2 2>&1" } else { "" };
    let script = format!(
        "export LISTEN_PID=$$ LISTEN_FDS={count} LISTEN_FDNAMES={names}
         exec \"$@\" 3<&0 {second} 0</dev/null"
    );
    let mut command = Command::new("sh");
    command.args(["-c", &script, "sh"]).arg(program);
    command.stdin(one).stderr(two.map_or_else(Stdio::piped, Stdio::from));
    command
}

fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    (listener, address)
}

fn handle(listener: &TcpListener) -> OwnedFd {
    listener.try_clone().expect("a handle").into()
}

#[test]
fn a_passed_socket_is_used_by_name_or_by_address() {
    let origin = Origin::start(reply::name("x"));
    let any = over(&[&origin]).yaml();
    for (name, is_definite) in [("web", false), ("unknown", true), ("web", true)] {
        let (listener, address) = listen();
        // It waits since before the service was started.
        let mut early = Client::connect(listener.local_addr().expect("an address"));
        early.send(get("a.test", "/early", ""));
        let yaml = if is_definite { any.replace("127.0.0.1:0", &address) } else { any.clone() };
        let mut command = passing(Path::new(PROGRAM), name, handle(&listener), None);
        let proxy = Proxy::start_by(&mut command, &yaml);
        assert_eq!(proxy.address().to_string(), address);
        assert_eq!(early.response().text(), "x");
        assert_eq!(proxy.get("/").text(), "x");
        assert!(proxy.events("sockets_unused").is_empty());
    }
}

#[test]
fn the_admin_endpoints_can_be_passed_too() {
    let origin = Origin::start(reply::name("x"));
    let ((web, web_at), (admin, admin_at)) = (listen(), listen());
    for (names, first, second) in [("web:admin", &web, &admin), ("admin:web", &admin, &web)] {
        let second = Some(handle(second));
        let mut command = passing(Path::new(PROGRAM), names, handle(first), second);
        let mut proxy = Proxy::start_by(&mut command, &over(&[&origin]).yaml());
        assert_eq!(proxy.address().to_string(), web_at);
        assert_eq!(proxy.admin().to_string(), admin_at);
        assert_eq!(proxy.get("/").text(), "x");
        assert_eq!(proxy.ask_admin("/readyz").status(), 204);
        proxy.signal(Signal::TERM);
        assert_eq!(proxy.wait_exit(SOON), 0);
    }
}

#[test]
fn a_passed_socket_that_nobody_wants_is_told_and_kept_for_later() {
    let origin = Origin::start(reply::name("x"));
    let (listener, address) = listen();
    let mut command = passing(Path::new(PROGRAM), "stranger", handle(&listener), None);
    let proxy = Proxy::start_by(&mut command, &over(&[&origin]).yaml());
    assert_ne!(proxy.address().to_string(), address);
    let told = proxy.wait_for_event("sockets_unused", |_| true, SOON);
    assert!(told.to_string().contains("stranger"), "{told}");
    assert_eq!(proxy.get("/").text(), "x");
    let yaml = over(&[&origin]).yaml();
    let both = format!("listeners:\n- {{ name: more, bind: \"{address}\" }}\n");
    let event = proxy.reload(&yaml.replacen("listeners:\n", &both, 1));
    assert_eq!(event["listeners"]["added"], serde_json::json!(["more"]), "{event}");
    let at = listener.local_addr().expect("an address");
    assert_eq!(Client::connect(at).get("/").text(), "x");
}

#[test]
fn what_is_announced_wrongly_stops_the_start() {
    let origin = Origin::start(reply::name("x"));
    let (listener, _) = listen();
    let mut command = passing(Path::new(PROGRAM), "web:admin", handle(&listener), None);
    let mut proxy = Proxy::spawn_by(&mut command, &over(&[&origin]).yaml());
    assert_eq!(proxy.wait_exit(SOON), 1);
    assert!(proxy.errors().contains("LISTEN_FDNAMES"), "{}", proxy.errors());
    let datagrams = UnixDatagram::unbound().expect("a socket");
    let mut command = passing(Path::new(PROGRAM), "web", datagrams.into(), None);
    let mut proxy = Proxy::spawn_by(&mut command, &over(&[&origin]).yaml());
    assert_eq!(proxy.wait_exit(SOON), 1);
    assert!(proxy.errors().contains("datagram"), "{}", proxy.errors());
}

#[test]
fn connections_wait_for_the_next_start_while_the_manager_keeps_the_socket() {
    let origin = Origin::start(reply::name("x"));
    let (listener, _) = listen();
    let at = listener.local_addr().expect("an address");
    let mut waiting: Vec<Client> = Vec::new();
    for _ in 0..3 {
        let mut command = passing(Path::new(PROGRAM), "web", handle(&listener), None);
        let mut proxy = Proxy::start_by(&mut command, &over(&[&origin]).yaml());
        for mut client in waiting.drain(..) {
            assert_eq!(client.response().text(), "x");
        }
        let mut kept = proxy.client();
        assert_eq!(kept.get("/").text(), "x");
        proxy.signal(Signal::TERM);
        assert!(kept.is_closed_within(SOON));
        assert_eq!(proxy.wait_exit(SOON), 0);
        for _ in 0..20 {
            let mut client = Client::connect(at);
            client.send(get("a.test", "/", ""));
            waiting.push(client);
        }
    }
}

#[test]
fn a_restart_under_load_loses_nothing_while_the_manager_keeps_the_socket() {
    let origin = Origin::start(load::answer);
    let yaml = over(&[&origin]).top("workers: 2").yaml();
    let (listener, _) = listen();
    let target = Target::Tcp(listener.local_addr().expect("an address"));
    let mut served = Vec::new();
    let load = Load::start(&target, 4, 4);
    for _ in 0..4 {
        let mut command = passing(Path::new(PROGRAM), "web", handle(&listener), None);
        let mut proxy = Proxy::start_by(&mut command, &yaml);
        load.goes_on(100);
        proxy.signal(Signal::TERM);
        assert_eq!(proxy.wait_exit(SOON), 0);
        served.extend(proxy.events("request_completed"));
    }
    let mut command = passing(Path::new(PROGRAM), "web", handle(&listener), None);
    let _last = Proxy::start_by(&mut command, &yaml);
    load.goes_on(100);
    load.end();
    assert!(served.iter().all(|line| line["status"] == 200));
}

/// A Unix-domain socket of the manager's, and a file for whoever gets a handle of it.
struct Kept {
    listener: UnixListener,
    directory: tempfile::TempDir,
}

impl Kept {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(directory.path().join("web.sock")).expect("a socket");
        Self { listener, directory }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("web.sock")
    }

    fn handle(&self) -> OwnedFd {
        self.listener.try_clone().expect("a handle").into()
    }

    fn yaml(&self, origin: &Origin) -> String {
        let at = format!("unix:{}", self.path().display());
        over(&[origin]).yaml().replace("127.0.0.1:0", &at)
    }
}

#[test]
fn a_passed_unix_domain_socket_is_known_by_its_address() {
    let origin = Origin::start(reply::name("x"));
    let kept = Kept::new();
    let mut command = passing(Path::new(PROGRAM), "unknown", kept.handle(), None);
    let _proxy = Proxy::start_by(&mut command, &kept.yaml(&origin));
    assert_eq!(Client::connect_unix(&kept.path()).get("/").text(), "x");
}

#[test]
fn a_passed_unix_domain_socket_is_left_in_its_place() {
    let origin = Origin::start(reply::name("x"));
    let kept = Kept::new();
    let (yaml, path) = (kept.yaml(&origin), kept.path());
    let mut family =
        Family::start_by(&yaml, |program| passing(program, "web", kept.handle(), None));
    assert_eq!(Client::connect_unix(&path).get("/").text(), "x");
    // An heir of it must know that somebody else keeps it.
    family.upgrade();
    assert_eq!(family.first.wait_end(SOON), 0);
    assert_eq!(Client::connect_unix(&path).get("/").text(), "x");
    family.end();
    let mut late = Client::connect_unix(&path);
    late.send(get("a.test", "/late", ""));
    let mut command = passing(Path::new(PROGRAM), "web", kept.handle(), None);
    let _again = Proxy::start_by(&mut command, &yaml);
    assert_eq!(late.response().text(), "x");
}

#[test]
fn sockets_for_another_process_are_not_taken() {
    let origin = Origin::start(reply::name("x"));
    let (listener, address) = listen();
    let mut command = Command::new(PROGRAM);
    command.env("LISTEN_PID", "1").env("LISTEN_FDS", "1").env("LISTEN_FDNAMES", "web");
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    let proxy = Proxy::start_by(&mut command, &over(&[&origin]).yaml());
    assert_ne!(proxy.address().to_string(), address);
    assert_eq!(proxy.get("/").text(), "x");
    drop(listener);
}
