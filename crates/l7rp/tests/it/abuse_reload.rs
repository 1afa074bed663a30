//! Faults that a hostile review of reload, drain and upgrade has found: a test for each, named by
//! what should be so.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{
    Client, Gate, Origin, Proxy, SOON, Signal, Then, Value, eventually, let_pass, reply, within,
};
use rustix::process::{Pid, kill_process};

use crate::setup::{PROGRAM, get, over};

const ADMIN: &str = "admin: { bind: \"127.0.0.1:0\" }\n";

fn write(proxy: &Proxy, yaml: &str) {
    let directory = proxy.directory();
    let text = yaml.replace("{dir}", &directory.to_string_lossy());
    let admin = if text.lines().any(|l| l.starts_with("admin:")) { "" } else { ADMIN };
    fs::write(directory.join("config.yaml"), format!("{text}\n{admin}")).expect("written");
}

fn reloads(proxy: &Proxy) -> Vec<Value> {
    [proxy.events("config_reloaded"), proxy.events("config_rejected")].concat()
}

/// Reloads with this file; the event.
#[track_caller]
fn reload(proxy: &Proxy, yaml: &str) -> Value {
    let before = reloads(proxy);
    write(proxy, yaml);
    proxy.signal(Signal::HUP);
    within(SOON, || reloads(proxy).into_iter().find(|e| !before.contains(e))).expect("a reload")
}

#[track_caller]
fn reload_ok(proxy: &Proxy, yaml: &str) -> Value {
    let event = reload(proxy, yaml);
    assert_eq!(event["event"], "config_reloaded", "{event}");
    event
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("one").port()
}

/// Listeners (name and bind), over one pool and one route.
fn listening(origin: &Origin, listeners: &[(&str, String)]) -> String {
    let all: Vec<_> =
        listeners.iter().map(|(n, b)| format!("{{ name: {n}, bind: \"{b}\" }}")).collect();
    format!(
        "listeners: [{}]\nupstream_pools: [{{ name: b, upstreams: [{{ url: \"{}\" }}] }}]\n\
         routes: [{{ name: r, pool: b }}]\n",
        all.join(", "),
        origin.url()
    )
}

/// Ends, when dropped, the processes that were started to take over.
struct Heirs<'a>(&'a Proxy);

impl Heirs<'_> {
    fn pids(&self) -> Vec<i32> {
        let started = self.0.events("upgrade_started");
        started.iter().filter_map(|e| e["pid"].as_i64()).map(|pid| pid as i32).collect()
    }
}

impl Drop for Heirs<'_> {
    fn drop(&mut self) {
        for pid in self.pids() {
            let _ = kill_process(Pid::from_raw(pid).expect("a pid"), Signal::KILL);
        }
    }
}

fn is_alive(pid: i32) -> bool {
    // A zombie is not alive.
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit_once(')').is_some_and(|(_, s)| s.starts_with(" Z")))
}

fn make_fifo(path: &Path) {
    let _ = fs::remove_file(path);
    assert!(Command::new("mkfifo").arg(path).status().expect("it runs").success());
}

// ------------------------------------------------------------------ what blocks the main thread

#[test]
fn a_file_that_hangs_does_not_keep_a_signal_to_stop_from_being_heard() {
    let mut proxy = over(&[&Origin::refusing()]).start();
    make_fifo(&proxy.directory().join("config.yaml"));
    proxy.signal(Signal::HUP);
    let_pass(Duration::from_millis(300));
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(Duration::from_secs(5)), 0);
}

#[test]
fn a_watched_file_that_hangs_does_not_keep_a_signal_to_stop_from_being_heard() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("config.yaml");
    fs::write(&path, format!("{}{ADMIN}", over(&[&Origin::refusing()]).yaml())).expect("written");
    let path = path.to_str().expect("text");
    let mut proxy = Proxy::start_with(PROGRAM, &["--watch", "--config", path]);
    make_fifo(Path::new(path));
    let_pass(Duration::from_millis(1500));
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(Duration::from_secs(5)), 0);
}

#[test]
fn a_watched_file_that_is_huge_is_not_read_into_memory() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("config.yaml");
    fs::write(&path, format!("{}{ADMIN}", over(&[&Origin::refusing()]).yaml())).expect("written");
    let text = path.to_str().expect("text");
    let proxy = Proxy::start_with(PROGRAM, &["--watch", "--config", text]);
    let before = proxy.resident();
    fs::File::create(&path).expect("it").set_len(1 << 30).expect("a hole");
    let mut most = 0;
    within(Duration::from_secs(6), || {
        most = most.max(proxy.resident());
        (most > before + (512 << 20)).then_some(())
    });
    assert!(most < before + (256 << 20), "{} MiB", most >> 20);
}

#[test]
fn a_stuck_owner_of_a_unix_socket_does_not_hold_a_reload_and_the_signals() {
    let origin = Origin::start(reply::name("x"));
    let web = ("web", "127.0.0.1:0".to_owned());
    let mut proxy = Proxy::start(PROGRAM, &listening(&origin, &[web.clone()]));
    let path = proxy.directory().join("stuck.sock");
    // Somebody listens there, does not accept, and has a full queue.
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
    let address = socket2::SockAddr::unix(&path).unwrap();
    socket.bind(&address).unwrap();
    socket.listen(0).unwrap();
    let mut fillers = Vec::new();
    loop {
        let one = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
        one.set_nonblocking(true).unwrap();
        match one.connect(&address) {
            Ok(()) => fillers.push(one),
            Err(_) => break,
        }
    }
    let also = ("local", format!("unix:{}", path.display()));
    write(&proxy, &listening(&origin, &[web, also]));
    proxy.signal(Signal::HUP);
    let_pass(Duration::from_millis(300));
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(Duration::from_secs(5)), 0);
}

// ------------------------------------------------------------------ a refused reload

#[test]
fn a_refused_reload_leaves_no_unix_socket_behind() {
    let origin = Origin::start(reply::name("x"));
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let web = ("web", "127.0.0.1:0".to_owned());
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[web.clone()]));
    let path = proxy.directory().join("new.sock");
    let new = [
        web,
        ("local", format!("unix:{}", path.display())),
        ("busy", taken.local_addr().unwrap().to_string()),
    ];
    let event = reload(&proxy, &listening(&origin, &new));
    assert_eq!(event["event"], "config_rejected");
    assert!(!path.exists(), "it has left {}", path.display());
}

#[test]
fn a_bind_failure_is_told_with_file_and_line() {
    let origin = Origin::start(reply::name("x"));
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let web = ("web", "127.0.0.1:0".to_owned());
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[web.clone()]));
    let busy = ("busy", taken.local_addr().unwrap().to_string());
    let event = reload(&proxy, &listening(&origin, &[web, busy]));
    assert!(event["errors"][0].as_str().unwrap().contains("config.yaml:1"), "{event}");
}

#[test]
fn an_address_of_another_process_is_refused_even_if_an_own_one_has_the_same_port() {
    let (one, two) = (Origin::start(reply::name("one")), Origin::start(reply::name("two")));
    let port = free_port();
    let web = ("web", format!("127.0.0.1:{port}"));
    let other = ("web", format!("127.0.0.2:{port}"));
    let first = Proxy::start(PROGRAM, &listening(&one, &[web.clone()]));
    let second = Proxy::start(PROGRAM, &listening(&two, &[other]));
    let event = reload(&first, &listening(&one, &[web, ("more", format!("127.0.0.2:{port}"))]));
    let answers: Vec<_> = (0..20).map(|_| second.get("/").text()).collect();
    let stolen = answers.iter().filter(|a| *a == "one").count();
    assert_eq!(stolen, 0, "of 20 requests to another process; {event}");
    assert_eq!(event["event"], "config_rejected");
}

#[test]
fn a_live_datagram_socket_is_not_removed_for_a_listener() {
    let origin = Origin::start(reply::name("x"));
    let web = ("web", "127.0.0.1:0".to_owned());
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[web.clone()]));
    let path = proxy.directory().join("log.sock");
    let log = UnixDatagram::bind(&path).unwrap();
    let also = ("local", format!("unix:{}", path.display()));
    let event = reload(&proxy, &listening(&origin, &[web, also]));
    let sender = UnixDatagram::unbound().unwrap();
    assert!(sender.send_to(b"x", &path).is_ok(), "its owner gets nothing any more: {event}");
    drop(log);
}

// ------------------------------------------------------------------ connections

#[test]
fn an_address_that_widens_delays_no_connection() {
    let origin = Origin::start(reply::name("x"));
    let port = free_port();
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[("web", format!("127.0.0.1:{port}"))]));
    let stop = Arc::new(AtomicBool::new(false));
    let longest = Arc::new(AtomicUsize::new(0));
    let failed = Arc::new(AtomicUsize::new(0));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let (stop, longest, failed) = (stop.clone(), longest.clone(), failed.clone());
            thread::spawn(move || {
                while !stop.load(SeqCst) {
                    let began = Instant::now();
                    match TcpStream::connect(("127.0.0.1", port)) {
                        Ok(_) => {}
                        Err(_) => drop(failed.fetch_add(1, SeqCst)),
                    }
                    longest.fetch_max(began.elapsed().as_millis() as usize, SeqCst);
                    let_pass(Duration::from_millis(2));
                }
            })
        })
        .collect();
    let_pass(Duration::from_millis(200));
    reload_ok(&proxy, &listening(&origin, &[("web", format!("0.0.0.0:{port}"))]));
    let_pass(Duration::from_millis(200));
    stop.store(true, SeqCst);
    threads.into_iter().for_each(|t| t.join().unwrap());
    assert_eq!(failed.load(SeqCst), 0);
    assert!(longest.load(SeqCst) < 500, "a connection took {} ms", longest.load(SeqCst));
}

#[test]
fn a_pipelined_request_at_a_listener_that_goes_is_answered() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| {
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nha");
        held.pass();
        call.send("lf");
        Then::Next
    });
    let (stays, goes) = (("stays", "127.0.0.1:0".to_owned()), ("goes", "127.0.0.1:0".to_owned()));
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[stays.clone(), goes]));
    let mut client = Client::connect(proxy.listener("goes"));
    client.send(get("a.test", "/1", "") + &get("a.test", "/2", ""));
    let head = client.head();
    assert_eq!(client.wire.read_exact(2).unwrap(), b"ha");
    reload_ok(&proxy, &listening(&origin, &[stays]));
    gate.open();
    assert_eq!(client.wire.read_exact(2).unwrap(), b"lf");
    assert_ne!(head.get("connection"), Some("close"), "it was told that more may follow");
    let second = client.try_response();
    assert!(second.is_ok(), "the second request came before and gets no answer: {second:?}");
}

#[test]
fn max_connections_holds_when_a_listener_is_renamed() {
    let origin = Origin::start(reply::name("x"));
    let port = free_port();
    let yaml = |name: &str| {
        listening(&origin, &[(name, format!("127.0.0.1:{port}"))])
            .replace(" }], upstream", " }], upstream")
            .replace(&format!(":{port}\" }}"), &format!(":{port}\", max_connections: 2 }}"))
    };
    let proxy = Proxy::start(PROGRAM, &yaml("old"));
    let mut kept: Vec<_> = (0..2).map(|_| proxy.client()).collect();
    kept.iter_mut().for_each(|c| assert_eq!(c.get("/").status(), 200));
    assert_eq!(proxy.get("/").status(), 503);
    reload_ok(&proxy, &yaml("new"));
    kept.iter_mut().for_each(|c| assert_eq!(c.get("/").status(), 200));
    assert_eq!(proxy.get("/").status(), 503, "a third connection at max_connections: 2");
}

#[test]
fn a_kept_connection_is_never_served_by_the_routes_of_another_listener() {
    // Between the swap of snapshots and the closing of the door, indices of old listeners meet
    // tables of new ones. Many pools make that time long.
    let origin = Origin::start(reply::name("public"));
    let secret = Origin::start(reply::name("secret"));
    let (public, internal) = (free_port(), free_port());
    let pools: String = (0..1500)
        .map(|i| format!("- {{ name: p{i}, upstreams: [{{ url: \"{}\" }}] }}\n", origin.url()))
        .collect();
    let yaml = |with_public: bool| {
        let first = format!("- {{ name: public, bind: \"127.0.0.1:{public}\" }}\n");
        let route = "- { name: open, pool: p0, listeners: [public] }\n";
        format!(
            "listeners:\n{}- {{ name: internal, bind: \"127.0.0.1:{internal}\" }}\n\
             upstream_pools:\n- {{ name: s, upstreams: [{{ url: \"{}\" }}] }}\n{pools}\
             routes:\n{}- {{ name: hidden, pool: s, listeners: [internal] }}\n",
            if with_public { first.as_str() } else { "" },
            secret.url(),
            if with_public { route } else { "" },
        )
    };
    let proxy = Proxy::start(PROGRAM, &yaml(true));
    let leaked = Arc::new(AtomicUsize::new(0));
    for _ in 0..8 {
        let stop = Arc::new(AtomicBool::new(false));
        let clients: Vec<_> = (0..6)
            .map(|_| {
                let (stop, leaked) = (stop.clone(), leaked.clone());
                let mut client = Client::connect(([127, 0, 0, 1], public).into());
                thread::spawn(move || {
                    while !stop.load(SeqCst) {
                        let request = get("a.test", "/", "");
                        if client.wire.write(request.as_bytes()).is_err() {
                            return;
                        }
                        match client.try_response() {
                            Ok(answer) if answer.text() == "secret" => {
                                leaked.fetch_add(1, SeqCst);
                            }
                            Ok(_) => {}
                            Err(_) => return,
                        }
                    }
                })
            })
            .collect();
        let_pass(Duration::from_millis(50));
        reload_ok(&proxy, &yaml(false));
        stop.store(true, SeqCst);
        clients.into_iter().for_each(|t| t.join().unwrap());
        reload_ok(&proxy, &yaml(true));
    }
    assert_eq!(leaked.load(SeqCst), 0, "answers of the internal listener at the public one");
}

// ------------------------------------------------------------------ what is known of upstreams

#[test]
fn a_breaker_that_opens_while_a_reload_waits_for_new_upstreams_stays_open() {
    let origin = Origin::start(reply::told);
    let breaker = |probes: u32| {
        format!(
            "circuit_breaker: {{ consecutive_failures: 3, open_min: 30s, open_max: 60s, \
             half_open_probes: {probes}, failure_statuses: [500] }}"
        )
    };
    let old = over(&[&origin]).pool(&breaker(1)).yaml();
    let proxy = Proxy::start(PROGRAM, &old);
    // The new pool has nobody who is well: the reload waits for a second.
    let cold = "- { name: cold, upstreams: [{ url: \"http://127.0.0.1:1\" }], \
                health: { active: { path: / } } }\nroutes:";
    let new = over(&[&origin]).pool(&breaker(2)).yaml().replace("routes:", cold);
    write(&proxy, &new);
    proxy.signal(Signal::HUP);
    let_pass(Duration::from_millis(400));
    assert!(reloads(&proxy).is_empty(), "it waits");
    (0..3).for_each(|_| assert_eq!(proxy.get("/500").status(), 500));
    eventually(SOON, || proxy.events("circuit_breaker_changed").iter().any(|e| e["to"] == "open"));
    assert!(reloads(&proxy).is_empty(), "it still waits");
    proxy.wait_for_event("config_reloaded", |_| true, SOON);
    assert_eq!(proxy.get("/200").status(), 503, "the breaker has opened for 30 s");
}

#[test]
fn what_a_breaker_has_counted_outlives_a_change_of_a_timeout() {
    let origin = Origin::start(reply::told);
    let pool = |timeout: u32| {
        let keys = format!(
            "response_header_timeout: {timeout}s, circuit_breaker: {{ failure_ratio: 0.5, \
             min_observations: 10, window: 60s, open_min: 30s, open_max: 60s, \
             failure_statuses: [500] }}"
        );
        over(&[&origin]).pool(&keys).yaml()
    };
    let proxy = Proxy::start(PROGRAM, &pool(20));
    (0..9).for_each(|_| assert_eq!(proxy.get("/500").status(), 500));
    let_pass(Duration::from_millis(50));
    reload_ok(&proxy, &pool(21));
    (0..2).for_each(|_| drop(proxy.get("/500")));
    let_pass(Duration::from_millis(50));
    assert_eq!(proxy.get("/200").status(), 503, "11 failures of 11, and min_observations is 10");
}

#[test]
fn a_mended_health_check_is_asked_at_once() {
    let origin = Origin::start(reply::told);
    let pool = |path: &str| {
        let keys = format!(
            "health: {{ active: {{ path: \"{path}\", interval: 20s, timeout: 1s, \
             healthy_threshold: 1 }} }}"
        );
        over(&[&origin]).pool(&keys).yaml()
    };
    let proxy = Proxy::start(PROGRAM, &pool("/404"));
    eventually(SOON, || origin.requests() >= 1);
    assert_eq!(proxy.get("/200").status(), 503);
    reload_ok(&proxy, &pool("/200"));
    let well = within(Duration::from_secs(4), || {
        (proxy.ask_admin("/readyz").status() == 204).then_some(())
    });
    assert!(well.is_some(), "it is well and is not asked for as long as the old interval says");
}

#[test]
fn idle_connections_that_a_reload_has_closed_are_not_counted_as_idle() {
    let origin = Origin::start(reply::name("x"));
    let pool = |n: u32| {
        let keys = format!("circuit_breaker: {{ half_open_probes: {n} }}");
        over(&[&origin]).pool(&keys).one_worker().yaml()
    };
    let proxy = Proxy::start(PROGRAM, &pool(1));
    proxy.get("/");
    let idle = || proxy.metrics().sum("proxy_upstream_connections", &[("state", "idle")]);
    eventually(SOON, || idle() == 1.0);
    reload_ok(&proxy, &pool(2));
    eventually(SOON, || origin.open() == 0);
    let right = within(Duration::from_secs(3), || (idle() == 0.0).then_some(()));
    assert!(right.is_some(), "{} idle of 0 that are open", idle());
}

// ------------------------------------------------------------------ upgrade

#[test]
fn an_upgrade_waits_for_every_pool_that_has_worked() {
    let fast = Origin::start(reply::name("fast"));
    let slow = Origin::start(|call| {
        if call.request.target() == "/health" {
            let_pass(Duration::from_millis(1200));
        }
        reply::name("slow")(call)
    });
    let port = free_port();
    let active = "health: { active: { path: /health, interval: 30s, timeout: 5s, \
                  healthy_threshold: 2 } }";
    let yaml = format!(
        "listeners: [{{ name: web, bind: \"127.0.0.1:{port}\" }}]\nupstream_pools:\n\
         - {{ name: f, upstreams: [{{ url: \"{}\" }}], {active} }}\n\
         - {{ name: s, upstreams: [{{ url: \"{}\" }}], {active} }}\n\
         routes: [{{ name: s, path_prefix: /s, pool: s }}, {{ name: f, pool: f }}]\n",
        fast.url(),
        slow.url()
    );
    let proxy = Proxy::start(PROGRAM, &yaml);
    let heirs = Heirs(&proxy);
    eventually(SOON, || proxy.get("/s").status() == 200);
    proxy.signal(Signal::USR2);
    let mut bad = 0;
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end {
        bad += usize::from(proxy.get("/s").status() == 503);
        let_pass(Duration::from_millis(5));
    }
    proxy.wait_for_event("upgrade_complete", |_| true, SOON);
    assert_eq!(bad, 0, "answers of 503 from a pool that was and is well");
    drop(heirs);
}

#[test]
fn a_process_whose_upgrade_was_called_off_leaves_no_other_behind() {
    let origin = Origin::start(reply::name("x"));
    for _ in 0..6 {
        let mut proxy = over(&[&origin]).start();
        proxy.signal(Signal::USR2);
        proxy.wait_for_event("upgrade_started", |_| true, SOON);
        // The old process is not on a processor while the new one gets ready.
        proxy.signal(Signal::STOP);
        let both = within(Duration::from_secs(3), || {
            (proxy.events("proxy_started").len() == 2).then_some(())
        });
        let_pass(Duration::from_millis(100));
        proxy.signal(Signal::TERM);
        proxy.signal(Signal::CONT);
        let pid = Heirs(&proxy).pids_kept();
        // The pipes are open for as long as any of the two lives.
        let failed = within(Duration::from_secs(3), || proxy.events("upgrade_failed").pop());
        let ended = within(Duration::from_secs(5), || proxy.events("shutdown_complete").pop());
        let alive = is_alive(pid);
        // The old process told the kernel to drop what asks for a connection: on sockets that the
        // other one has too.
        let reach = TcpStream::connect_timeout(&proxy.address(), Duration::from_secs(2));
        let _ = kill_process(Pid::from_raw(pid).expect("a pid"), Signal::KILL);
        assert!(ended.is_some());
        proxy.wait_exit(SOON);
        if let Some(failed) = failed {
            assert!(
                !alive,
                "{pid} lives on although {failed} (both: {both:?}); reached: {reach:?}"
            );
        }
    }
}

impl Heirs<'_> {
    fn pids_kept(self) -> i32 {
        let pid = self.pids()[0];
        std::mem::forget(self);
        pid
    }
}

#[test]
fn the_first_signal_to_stop_an_old_process_cuts_nothing() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let proxy = over(&[&origin]).start();
    let heirs = Heirs(&proxy);
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || origin.requests() == 1);
    proxy.signal(Signal::USR2);
    proxy.wait_for_event("shutdown_started", |_| true, SOON);
    let_pass(Duration::from_millis(200));
    proxy.signal(Signal::TERM);
    let_pass(Duration::from_millis(300));
    gate.open();
    let answer = client.try_response();
    assert!(answer.is_ok(), "one SIGTERM, and a request in progress is cut: {answer:?}");
    drop(heirs);
}

// ------------------------------------------------------------------ sockets of a service manager

/// The program with a socket at descriptor 3, as a service manager passes it.
fn activated(socket: impl Into<OwnedFd>, yaml: &str, names: &str) -> (Proxy, tempfile::TempDir) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("config.yaml");
    fs::write(&path, format!("{yaml}{ADMIN}")).expect("written");
    // The shell gets the socket through a copy of itself: the kit gives no standard input.
    let fd: OwnedFd = socket.into();
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty()).expect("inheritable");
    let number = std::os::fd::AsRawFd::as_raw_fd(&fd);
    let script = format!(
        "exec 3<&{number}; export LISTEN_PID=$$ LISTEN_FDS=1 {names}; exec {PROGRAM} --config {}",
        path.display()
    );
    let proxy = Proxy::start_with("/bin/bash", &["-c", &script]);
    drop(fd);
    (proxy, directory)
}

#[test]
fn a_unix_socket_without_a_name_is_found_by_its_address() {
    let origin = Origin::start(reply::name("x"));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.sock");
    let manager = UnixListener::bind(&path).unwrap();
    let yaml = listening(&origin, &[("web", format!("unix:{}", path.display()))]);
    let (proxy, _kept) = activated(manager.try_clone().unwrap(), &yaml, "");
    assert_eq!(Client::connect_unix(&path).get("/").text(), "x");
    drop(proxy);
}

#[test]
fn a_listener_of_a_service_manager_can_go_and_come_back() {
    let origin = Origin::start(reply::name("x"));
    let manager = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = manager.local_addr().unwrap();
    let web = ("web", address.to_string());
    let other = ("other", "127.0.0.1:0".to_owned());
    let both = listening(&origin, &[web, other.clone()]);
    let (proxy, directory) = activated(manager.try_clone().unwrap(), &both, "LISTEN_FDNAMES=web");
    assert_eq!(Client::connect(address).get("/").text(), "x");
    let again = |yaml: &str| {
        let before = reloads(&proxy).len();
        fs::write(directory.path().join("config.yaml"), format!("{yaml}{ADMIN}")).unwrap();
        proxy.signal(Signal::HUP);
        within(SOON, || {
            let all = reloads(&proxy);
            (all.len() > before).then_some(all)
        })
        .expect("a reload")
        .pop()
        .unwrap()
    };
    let gone = again(&listening(&origin, &[other]));
    assert_eq!(gone["event"], "config_reloaded", "{gone}");
    let back = proxy.events("config_rejected").len();
    let event = again(&both);
    assert_eq!(proxy.events("config_rejected").len(), back, "{event}");
}

// ------------------------------------------------------------------ what is left behind

#[test]
fn an_admin_socket_that_goes_leaves_no_file() {
    let origin = Origin::start(reply::name("x"));
    let listeners = listening(&origin, &[("web", "127.0.0.1:0".to_owned())]);
    let mut proxy = Proxy::start(
        PROGRAM,
        &format!("{listeners}admin: {{ bind: \"unix:{{dir}}/one.sock\" }}\n"),
    );
    let at = |name: &str| proxy.directory().join(name);
    let (one, two) = (at("one.sock"), at("two.sock"));
    reload_ok(&proxy, &format!("{listeners}admin: {{ bind: \"unix:{{dir}}/two.sock\" }}\n"));
    let moved = one.exists();
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert_eq!((moved, two.exists()), (false, false), "after it has moved; after the end");
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
    let_pass(Duration::from_millis(20));
    let threads: Vec<_> = clients
        .drain(..)
        .map(|mut client| {
            thread::spawn(move || {
                // The queue is dropped long before that.
                let_pass(Duration::from_millis(500));
                let sent = client.wire.write(get("a.test", "/", "").as_bytes());
                sent.and_then(|()| client.try_response()).map(|answer| answer.status())
            })
        })
        .collect();
    let answers: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    let reset = answers
        .iter()
        .filter(|a| a.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset))
        .count();
    proxy.wait_exit(SOON);
    assert_eq!(reset, 0, "reset of 12 that the kernel had accepted: {answers:?}");
}

// ------------------------------------------------------------------ second round

#[test]
fn what_a_reload_takes_can_be_started() {
    let origin = Origin::start(reply::name("x"));
    let port = free_port();
    let one = ("one", format!("127.0.0.1:{port}"));
    let both = listening(&origin, &[one.clone(), ("all", format!("0.0.0.0:{port}"))]);
    let mut proxy = Proxy::start(PROGRAM, &listening(&origin, &[one]));
    reload_ok(&proxy, &both);
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    drop(Proxy::start(PROGRAM, &both));
}

#[test]
fn what_a_reload_takes_can_be_upgraded_to() {
    let origin = Origin::start(reply::name("x"));
    let port = free_port();
    let one = ("one", format!("127.0.0.1:{port}"));
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[one.clone()]));
    let heirs = Heirs(&proxy);
    write(&proxy, &listening(&origin, &[one, ("all", format!("0.0.0.0:{port}"))]));
    proxy.signal(Signal::USR2);
    let done = within(SOON, || {
        [proxy.events("upgrade_complete"), proxy.events("upgrade_failed")].concat().pop()
    });
    assert_eq!(done.as_ref().expect("an end")["event"], "upgrade_complete", "{done:?}");
    drop(heirs);
}

#[test]
fn upgrades_that_fail_leave_nothing_behind() {
    let origin = Origin::start(reply::name("x"));
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let web = ("web", "127.0.0.1:0".to_owned());
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[web.clone()]));
    let path = proxy.directory().join("new.sock");
    let new = [
        web,
        ("local", format!("unix:{}", path.display())),
        ("busy", taken.local_addr().unwrap().to_string()),
    ];
    write(&proxy, &listening(&origin, &new));
    let mut before = 0;
    for n in 1..=10 {
        proxy.signal(Signal::USR2);
        eventually(SOON, || proxy.events("upgrade_failed").len() == n);
        if n == 2 {
            let_pass(Duration::from_millis(100));
            before = proxy.descriptors();
        }
    }
    let_pass(Duration::from_millis(100));
    assert_eq!(proxy.descriptors(), before);
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", proxy.pid())).unwrap();
    assert_eq!(children.trim(), "", "children");
    assert_eq!(proxy.get("/").text(), "x");
    assert!(!path.exists(), "a socket of a process that is gone");
}

#[test]
fn an_upstream_whose_url_is_only_written_otherwise_keeps_its_breaker() {
    let origin = Origin::start(reply::told);
    let keys = "circuit_breaker: { consecutive_failures: 1, open_min: 30s, open_max: 60s, \
                failure_statuses: [500] }";
    let yaml = over(&[&origin]).pool(keys).yaml();
    let proxy = Proxy::start(PROGRAM, &yaml);
    assert_eq!(proxy.get("/500").status(), 500);
    eventually(SOON, || proxy.get("/200").status() == 503);
    reload_ok(&proxy, &yaml.replace(&origin.url(), &format!("{}/", origin.url())));
    assert_eq!(proxy.get("/200").status(), 503, "the same machine, open for 30 s");
}

#[test]
fn an_upstream_of_a_pool_that_is_renamed_keeps_its_breaker() {
    let origin = Origin::start(reply::told);
    let keys = "circuit_breaker: { consecutive_failures: 1, open_min: 30s, open_max: 60s, \
                failure_statuses: [500] }";
    let yaml = over(&[&origin]).pool(keys).yaml();
    let proxy = Proxy::start(PROGRAM, &yaml);
    assert_eq!(proxy.get("/500").status(), 500);
    eventually(SOON, || proxy.get("/200").status() == 503);
    reload_ok(&proxy, &yaml.replace("name: b,", "name: c,").replace("pool: b", "pool: c"));
    assert_eq!(proxy.get("/200").status(), 503, "the same machine, open for 30 s");
}

#[test]
fn a_change_that_is_watched_and_told_by_a_signal_is_taken_once() {
    let origin = Origin::start(reply::name("x"));
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("config.yaml");
    let yaml = |n: u32| {
        format!(
            "{}{ADMIN}",
            over(&[&origin]).top(&format!("limits: {{ max_in_flight: {n} }}")).yaml()
        )
    };
    fs::write(&path, yaml(10)).expect("written");
    let text = path.to_str().expect("text");
    let proxy = Proxy::start_with(PROGRAM, &["--watch", "--config", text]);
    fs::write(&path, yaml(11)).expect("written");
    proxy.signal(Signal::HUP);
    let_pass(Duration::from_secs(4));
    assert_eq!(reloads(&proxy).len(), 1, "{:?}", reloads(&proxy));
}

#[test]
fn a_refusal_with_very_many_errors_is_told() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let mut yaml = over(&[&origin]).yaml();
    let long = "x".repeat(180);
    for n in 0..60_000 {
        yaml.push_str(&format!("{long}{n}: 1\n"));
    }
    write(&proxy, &yaml);
    proxy.signal(Signal::HUP);
    eventually(SOON * 3, || {
        proxy.metrics().sum("proxy_config_reloads_total", &[("outcome", "rejected")]) == 1.0
    });
    let told = within(Duration::from_secs(5), || proxy.events("config_rejected").pop());
    assert!(told.is_some(), "the line was dropped");
}

#[test]
fn a_failure_in_progress_while_breaker_rules_change_counts() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| {
        if call.request.target() == "/500" {
            held.pass();
        }
        reply::told(call)
    });
    let pool = |probes: u32| {
        let keys = format!(
            "circuit_breaker: {{ consecutive_failures: 3, open_min: 30s, open_max: 60s, \
             failure_statuses: [500], half_open_probes: {probes} }}"
        );
        over(&[&origin]).pool(&keys).yaml()
    };
    let proxy = Proxy::start(PROGRAM, &pool(1));
    let mut clients: Vec<_> = (0..6).map(|_| proxy.client()).collect();
    clients.iter_mut().for_each(|c| drop(c.send(get("a.test", "/500", ""))));
    eventually(SOON, || origin.requests() == 6);
    reload_ok(&proxy, &pool(2));
    gate.open();
    clients.iter_mut().for_each(|c| assert_eq!(c.response().status(), 500));
    let_pass(Duration::from_millis(100));
    let told = proxy.events("circuit_breaker_changed");
    let shown = proxy.metrics().sum("proxy_circuit_breaker_state", &[]);
    let status = proxy.get("/200").status();
    assert!(
        told.is_empty() || status == 503,
        "{told:?}, but the upstream is used: {status}, state {shown}"
    );
}

#[test]
fn many_reloads_of_every_kind_leave_nothing_behind() {
    let origin = Origin::start(reply::told);
    let (a, b) = (free_port(), free_port());
    let yaml = |n: usize, dir: &Path| {
        let extra = match n % 4 {
            0 => String::new(),
            1 => format!("- {{ name: x, bind: \"127.0.0.1:{b}\" }}\n"),
            2 => format!("- {{ name: u, bind: \"unix:{}/u.sock\" }}\n", dir.display()),
            _ => format!("- {{ name: y, bind: \"127.0.0.1:{b}\", max_connections: 9 }}\n"),
        };
        let pools: String = (0..20)
            .map(|i| {
                let url = if n % 3 == 0 { origin.url() } else { format!("{}/{n}", origin.url()) };
                format!(
                    "- {{ name: p{i}, upstreams: [{{ url: \"{url}\", weight: {} }}], \
                     circuit_breaker: {{ half_open_probes: {} }}, \
                     health: {{ active: {{ path: \"/{n}\", interval: 1s, timeout: 500ms }} }} }}\n",
                    1 + n % 2,
                    1 + n % 5
                )
            })
            .collect();
        format!(
            "listeners:\n- {{ name: web, bind: \"127.0.0.1:{a}\" }}\n{extra}\
             upstream_pools:\n{pools}routes:\n- {{ name: r, pool: p0, middleware: [{{ rate_limit: \
             {{ per_ip_rps: {}, burst: 1000 }} }}] }}\n",
            1000 + n % 3
        )
    };
    let directory = tempfile::tempdir().unwrap();
    let proxy = Proxy::start(PROGRAM, &yaml(0, directory.path()));
    let threads = || fs::read_dir(format!("/proc/{}/task", proxy.pid())).map_or(0, Iterator::count);
    let mut seen = Vec::new();
    let began = Instant::now();
    for n in 1..=100_000 {
        reload_ok(&proxy, &yaml(n, directory.path()));
        let mut client = proxy.client();
        let _ = client.send(get("a.test", "/200", "")).try_response();
        if n % 80 == 0 {
            let_pass(Duration::from_millis(2200));
            seen.push((n, proxy.resident() >> 10, proxy.descriptors(), threads()));
            if began.elapsed() > Duration::from_secs(25) {
                break;
            }
        }
    }
    println!("reloads, KiB, descriptors, threads: {seen:?}");
    let (first, last) = (seen[seen.len() / 2], seen[seen.len() - 1]);
    assert!(last.1 < first.1 + first.1 / 4, "{seen:?}");
    assert!(last.2 <= first.2 + 20, "{seen:?}");
}

#[test]
fn a_lack_of_descriptors_is_called_so_by_a_reload() {
    let origin = Origin::start(reply::name("x"));
    let web = ("web", "127.0.0.1:0".to_owned());
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[web.clone()]));
    let port = free_port();
    let new = listening(&origin, &[web, ("new", format!("127.0.0.1:{port}"))]);
    let before = proxy.descriptors();
    for more in 1..8 {
        proxy.limit_descriptors(before + more);
        let event = reload(&proxy, &new);
        if event["event"] == "config_reloaded" {
            return;
        }
        let why = event["errors"][0].as_str().unwrap();
        assert!(!why.contains("thread"), "{more} left: {why}");
    }
}

#[test]
fn a_pipelined_request_is_answered_by_a_drain() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| {
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nha");
        held.pass();
        call.send("lf");
        Then::Next
    });
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/1", "") + &get("a.test", "/2", ""));
    let head = client.head();
    assert_eq!(client.wire.read_exact(2).unwrap(), b"ha");
    proxy.signal(Signal::TERM);
    proxy.wait_for_event("shutdown_started", |_| true, SOON);
    let_pass(Duration::from_millis(50));
    gate.open();
    assert_eq!(client.wire.read_exact(2).unwrap(), b"lf");
    assert_ne!(head.get("connection"), Some("close"), "it was told that more may follow");
    let second = client.try_response();
    assert!(second.is_ok(), "the second request came before and gets no answer: {second:?}");
}

#[test]
fn connections_of_a_listener_that_goes_are_not_called_kept() {
    let origin = Origin::start(reply::name("x"));
    let (stays, goes) = (("stays", "127.0.0.1:0".to_owned()), ("goes", "127.0.0.1:0".to_owned()));
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[stays.clone(), goes]));
    let mut clients: Vec<_> = (0..3).map(|_| Client::connect(proxy.listener("goes"))).collect();
    clients.iter_mut().for_each(|c| assert_eq!(c.get("/").status(), 200));
    let event = reload_ok(&proxy, &listening(&origin, &[stays]));
    let shown = proxy.metrics().sum("proxy_connections_leaving", &[]);
    clients.iter_mut().for_each(|c| assert_eq!(c.get("/").get("connection"), Some("close")));
    assert_eq!((&event["kept_connections"], shown), (&0.into(), 3.0), "{event}");
    assert_eq!(event["leaving_connections"], 3);
}

#[test]
fn other_signals_do_not_keep_the_watch_from_looking_at_files() {
    // A wrong file is there, and an upgrade is tried each 700 ms (which fails for that reason).
    let origin = Origin::start(reply::name("x"));
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("config.yaml");
    fs::write(&path, format!("{}{ADMIN}", over(&[&origin]).yaml())).expect("written");
    let text = path.to_str().expect("text");
    let proxy = Proxy::start_with(PROGRAM, &["--watch", "--config", text]);
    fs::write(&path, "nonsense").unwrap();
    for _ in 0..10 {
        proxy.signal(Signal::USR2);
        let_pass(Duration::from_millis(700));
    }
    let looked = reloads(&proxy).len();
    assert!(looked > 0, "not looked at for 7 s");
}

#[test]
fn a_reload_while_a_new_upstream_is_being_judged_does_not_stop_that() {
    let good = Origin::start(reply::name("good"));
    let slow = Origin::start(|call| {
        if call.request.target() == "/health" {
            let_pass(Duration::from_millis(400));
        }
        reply::name("new")(call)
    });
    let yaml = |with_new: bool, probes: u32| {
        let keys = format!(
            "health: {{ active: {{ path: /health, interval: 25s, timeout: 5s, \
             healthy_threshold: 2 }} }}, circuit_breaker: {{ half_open_probes: {probes} }}"
        );
        let origins: &[&Origin] = if with_new { &[&good, &slow] } else { &[&good] };
        over(origins).pool(&keys).yaml()
    };
    let proxy = Proxy::start(PROGRAM, &yaml(false, 1));
    eventually(SOON, || proxy.get("/").status() == 200);
    reload_ok(&proxy, &yaml(true, 1));
    eventually(SOON, || slow.requests() >= 1);
    reload_ok(&proxy, &yaml(true, 2));
    let used = within(Duration::from_secs(6), || (proxy.get("/").text() == "new").then_some(()));
    assert!(used.is_some(), "it is well, and is not probed again before a whole interval is over");
}

#[test]
fn sockets_of_one_unit_go_to_the_listeners_with_their_addresses() {
    // FileDescriptorName= is one for all ListenStream= of a unit.
    let origin = Origin::start(reply::name("x"));
    let (one, two) =
        (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let at = [one.local_addr().unwrap(), two.local_addr().unwrap()];
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.yaml");
    let listeners = [("web", at[0].to_string()), ("other", at[1].to_string())];
    fs::write(&path, format!("{}{ADMIN}", listening(&origin, &listeners))).unwrap();
    let numbers = [&one, &two].map(|socket| {
        rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::empty()).unwrap();
        std::os::fd::AsRawFd::as_raw_fd(socket)
    });
    // By way of numbers that are free, for the two may be 3 and 4 themselves.
    let script = format!(
        "exec 103<&{} 104<&{} 3<&103 4<&104 103<&- 104<&-; \
         export LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=web:web; exec {PROGRAM} --config {}",
        numbers[0],
        numbers[1],
        path.display()
    );
    let proxy = Proxy::start_with("/bin/bash", &["-c", &script]);
    for address in at {
        assert_eq!(Client::connect(address).get("/").text(), "x");
    }
    drop(proxy);
}
