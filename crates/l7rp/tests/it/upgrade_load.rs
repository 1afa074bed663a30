//! Upgrades under load lose nothing, however many follow one another.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use l7rp_testkit::{Call, Client, Origin, SOON, Signal, Then, eventually, let_pass, reply, within};

use crate::family::{Family, descriptors, is_gone};
use crate::load::{self, Load, Target};
use crate::setup::{over, start};
use crate::upgrade::{self, echoes};

/// Tunnels, uploads that are sent back, and what clients of [`Load`] ask for.
fn all_kinds(call: &mut Call<'_>) -> Then {
    match call.request.target() {
        "/t" => upgrade::echo(call),
        "/up" => reply::echo(call),
        _ => load::answer(call),
    }
}

/// An upload that goes on until it is told to end; gives what came of it.
struct Upload {
    enough: Arc<AtomicBool>,
    sender: JoinHandle<()>,
}

impl Upload {
    fn start(target: &Target) -> Self {
        let enough = Arc::new(AtomicBool::new(false));
        let (stop, target) = (enough.clone(), target.clone());
        let mut client = target.connect().expect("it accepts");
        client.send("POST /up HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n");
        let sender = thread::spawn(move || {
            let mut sent = 0;
            while !stop.load(SeqCst) {
                client.send("3\r\nabc\r\n");
                sent += 1;
                let_pass(Duration::from_millis(50));
            }
            let answer = client.ask("0\r\n\r\n");
            assert_eq!(answer.get("connection"), Some("close"), "the old one is the last");
            assert!(answer.text().ends_with(&"abc".repeat(sent)), "{sent} pieces");
        });
        Self { enough, sender }
    }

    fn end(self) {
        self.enough.store(true, SeqCst);
        self.sender.join().expect("all of it is taken and sent back");
    }
}

#[test]
fn ten_upgrades_in_a_row_lose_nothing() {
    let origin = Origin::start(all_kinds);
    let mut family = Family::start(&over(&[&origin]).top("workers: 2").yaml());
    let target = Target::Tcp(family.first.address());
    let upload = Upload::start(&target);
    let mut tunnels: Vec<Client> = (0..3).map(|_| upgrade::open(&family.first)).collect();
    let load = Load::start(&target, 4, 4);
    let mut pids = vec![family.pid];
    for n in 0..10 {
        load.goes_on(40);
        pids.push(family.upgrade());
        if n % 3 == 0 {
            tunnels.push(upgrade::open(&family.first));
        }
        for tunnel in &mut tunnels {
            echoes(tunnel, "still here");
        }
    }
    load.goes_on(40);
    assert!(!is_gone(pids[0]), "it has tunnels and an upload");
    upload.end();
    let tunnels_open = tunnels.len();
    drop(tunnels);
    let last = pids.pop().expect("one that serves");
    eventually(SOON, || pids.iter().all(|pid| is_gone(*pid)));
    assert_eq!(family.first.wait_end(SOON), 0);
    load.goes_on(40);
    let sum = load.end();
    assert!(!is_gone(last));
    let complete = family.first.events("shutdown_complete");
    assert_eq!(complete.len(), pids.len());
    assert!(complete.iter().all(|e| e["cut"] == 0 && e["tunnels_closed"] == 0), "{complete:#?}");
    let lines = sum.answered + tunnels_open + 1;
    eventually(SOON, || family.first.events("request_completed").len() == lines);
    family.end();
}

#[test]
fn another_number_of_workers_takes_the_same_sockets() {
    let origin = Origin::start(load::answer);
    let file = |workers: usize| over(&[&origin]).top(&format!("workers: {workers}")).yaml();
    let mut family = Family::start(&file(2));
    let target = Target::Tcp(family.first.address());
    let load = Load::start(&target, 4, 4);
    for workers in [4, 1, 3, 2] {
        load.goes_on(40);
        family.first.rewrite_yaml(&file(workers));
        let new = family.upgrade();
        assert_eq!(family.started(new)["workers"], workers);
        load.goes_on(150);
    }
    assert_eq!(family.first.wait_end(SOON), 0);
    load.end();
    family.end();
}

#[test]
fn nothing_is_lost_at_a_unix_domain_socket() {
    let origin = Origin::start(load::answer);
    let file = |workers: usize| {
        let yaml = over(&[&origin]).top(&format!("workers: {workers}")).yaml();
        yaml.replace("127.0.0.1:0", "unix:{dir}/web.sock")
    };
    let mut family = Family::start(&file(2));
    let load = Load::start(&Target::Unix(family.first.directory().join("web.sock")), 4, 4);
    for workers in [4, 1, 2] {
        load.goes_on(40);
        family.first.rewrite_yaml(&file(workers));
        family.upgrade();
        load.goes_on(100);
    }
    load.end();
    assert_eq!(family.first.wait_end(SOON), 0);
    family.end();
}

#[test]
fn a_listener_that_goes_is_emptied_under_load() {
    let origin = Origin::start(load::answer);
    let named = |name: &str| format!("- {{ name: {name}, bind: \"127.0.0.1:0\" }}\n");
    let file = |listeners: &str| {
        over(&[&origin]).yaml().replace("- { name: web, bind: \"127.0.0.1:0\" }\n", listeners)
    };
    let mut family = Family::start(&file(&[named("web"), named("goes")].concat()));
    let stays = Load::start(&Target::Tcp(family.first.address()), 3, 3);
    let goes = Load::start(&Target::Tcp(family.first.listener("goes")), 3, 3);
    goes.goes_on(60);
    goes.expect_refusal();
    family.first.rewrite_yaml(&file(&named("web")));
    family.upgrade();
    let sum = goes.refused();
    assert_eq!(sum.refused, 6);
    stays.goes_on(60);
    stays.end();
    assert_eq!(family.first.wait_end(SOON), 0);
    family.end();
}

const CHECKED: &str = "health: { active: { path: /healthz, interval: 2s, timeout: 1s } }";

/// Health checks take a while, so that a new process is not ready at once.
fn late_checks(call: &mut Call<'_>) -> Then {
    if call.request.target() == "/healthz" {
        let_pass(Duration::from_millis(400));
        return reply::name("fine")(call);
    }
    load::answer(call)
}

#[test]
fn the_new_process_accepts_nothing_before_its_backends_are_ready() {
    let origin = Origin::start(late_checks);
    let mut family = Family::start(&over(&[&origin]).pool(CHECKED).yaml());
    eventually(SOON, || family.first.ask_admin("/readyz").status() == 204);
    let load = Load::start(&Target::Tcp(family.first.address()), 4, 4);
    for _ in 0..2 {
        load.goes_on(60);
        family.upgrade();
        load.goes_on(60);
    }
    load.end();
    assert_eq!(family.first.wait_end(SOON), 0);
    family.end();
}

/// Asks the admin endpoints all the while that upgrades go on; all that was no good answer.
fn answers_during_upgrades(mut family: Family) -> Vec<String> {
    eventually(SOON, || family.first.ask_admin("/readyz").status() == 204);
    let admin = Target::Tcp(family.first.admin());
    let enough = Arc::new(AtomicBool::new(false));
    let pollers = ["/readyz", "/livez", "/metrics", "/readyz"].map(|path| {
        let (admin, enough) = (admin.clone(), enough.clone());
        thread::spawn(move || poll(&admin, path, &enough))
    });
    for _ in 0..4 {
        family.upgrade();
        let_pass(Duration::from_millis(100));
    }
    enough.store(true, SeqCst);
    let failures = pollers.into_iter().flat_map(|p| p.join().expect("it asks")).collect();
    family.end();
    failures
}

#[test]
fn readiness_does_not_waver_during_upgrades() {
    let origin = Origin::start(reply::name("x"));
    let failures = answers_during_upgrades(Family::start(&over(&[&origin]).yaml()));
    assert!(failures.is_empty(), "{} times, at first {:?}", failures.len(), failures[0]);
}

#[test]
fn a_process_that_is_not_ready_yet_does_not_speak_for_the_one_that_is() {
    let origin = Origin::start(late_checks);
    let family = Family::start(&over(&[&origin]).pool(CHECKED).yaml());
    let failures = answers_during_upgrades(family);
    assert!(failures.is_empty(), "{} times, at first {:?}", failures.len(), failures[0]);
}

/// Asks until it is enough; all that was no good answer.
fn poll(admin: &Target, path: &str, enough: &AtomicBool) -> Vec<String> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: admin\r\nConnection: close\r\n\r\n");
    let mut failures = Vec::new();
    while !enough.load(SeqCst) {
        let answer = admin.connect().and_then(|mut client| {
            client.wire.write(request.as_bytes())?;
            client.try_response()
        });
        match answer {
            Ok(answer) if matches!(answer.status(), 200 | 204) => {}
            Ok(answer) => failures.push(format!("{path}: {} {}", answer.start, answer.text())),
            Err(e) => failures.push(format!("{path}: {e}")),
        }
        let_pass(Duration::from_millis(1));
    }
    failures
}

#[test]
fn a_connection_that_asks_for_readiness_is_not_told_to_go_elsewhere() {
    let origin = Origin::start(all_kinds);
    let mut family = Family::start(&over(&[&origin]).yaml());
    let mut balancer = Client::connect(family.first.admin());
    assert_eq!(balancer.get("/readyz").status(), 204);
    // It keeps the old one alive.
    let mut tunnel = upgrade::open(&family.first);
    family.upgrade();
    family.first.wait_for_event("shutdown_started", |_| true, SOON);
    let_pass(Duration::from_millis(100));
    // Either there is still an answer for the service, or the connection has ended in order.
    let _ = balancer.wire.write(b"GET /readyz HTTP/1.1\r\nHost: admin\r\n\r\n");
    let answer = balancer.wire.read_head().ok().flatten();
    assert!(answer.as_ref().is_none_or(|answer| answer.status() == 204), "{answer:?}");
    assert_eq!(family.first.ask_admin("/readyz").status(), 204);
    echoes(&mut tunnel, "still here");
    drop(tunnel);
    assert_eq!(family.first.wait_end(SOON), 0);
    family.end();
}

#[test]
fn the_end_of_the_new_one_closes_the_port_though_the_old_one_still_drains() {
    let origin = Origin::start(all_kinds);
    let mut family = Family::start(&over(&[&origin]).top("workers: 2").yaml());
    let address = family.first.address();
    let mut tunnel = upgrade::open(&family.first);
    let load = Load::start(&Target::Tcp(address), 4, 4);
    load.goes_on(40);
    let new = family.upgrade();
    load.goes_on(100);
    load.expect_refusal();
    family.signal(Signal::TERM);
    let sum = load.refused();
    assert_eq!(sum.refused, 8);
    eventually(SOON, || is_gone(new));
    let error = Target::Tcp(address).connect().expect_err("nobody listens");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    // It does, though.
    echoes(&mut tunnel, "still here");
    drop(tunnel);
    assert_eq!(family.first.wait_exit(SOON), 0);
}

#[test]
fn nothing_is_left_behind_by_many_upgrades() {
    let origin = Origin::start(reply::name("x"));
    let mut family = Family::start(&over(&[&origin]).top("workers: 2").yaml());
    let mut counts = Vec::new();
    for _ in 0..6 {
        let old = family.pid;
        family.upgrade();
        if old == family.first.pid() {
            assert_eq!(family.first.wait_end(SOON), 0);
        }
        eventually(SOON, || is_gone(old));
        assert_eq!(family.first.get("/").status(), 200);
        // These endpoints open what they hold in reserve when they are first asked.
        assert_eq!(family.first.ask_admin("/readyz").status(), 204);
        // A connection to the admin endpoints, or one that has just been closed, is gone soon.
        let mut least = usize::MAX;
        let _ = within(Duration::from_millis(300), || {
            least = least.min(descriptors(family.pid));
            None::<()>
        });
        counts.push(least);
    }
    assert!(counts.iter().all(|count| *count <= counts[0] + 1), "{counts:?}");
    assert!(family.first.events("sockets_unused").is_empty());
    family.end();
}

#[test]
fn what_is_not_handed_over_is_still_guarded() {
    let origin = Origin::start(reply::name("x"));
    let mut family = Family::start(&over(&[&origin]).yaml());
    family.upgrade();
    assert_eq!(family.first.wait_end(SOON), 0);
    // Somebody else who wants the port is told who has it.
    let address = family.first.address().to_string();
    let yaml = over(&[&origin]).yaml().replace("127.0.0.1:0", &address);
    let mut other = l7rp_testkit::Proxy::spawn(crate::setup::PROGRAM, &yaml);
    assert_eq!(other.wait_exit(SOON), 1);
    assert!(other.errors().contains(&format!("(pid {})", family.pid)), "{}", other.errors());
    family.end();
    // And when all have ended, the port is free.
    assert_eq!(start(&yaml).get("/").text(), "x");
}
