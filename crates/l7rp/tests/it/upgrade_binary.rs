//! SIGUSR2: a new process takes over the sockets and the old one ends, or nothing happens.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use l7rp_testkit::{
    Client, Gate, Origin, Proxy, SOON, Signal, Value, eventually, let_pass, reply, within,
};

use crate::family::{Family, HANGING, descriptors, is_gone, send};
use crate::load::Target;
use crate::setup::{PROGRAM, get, over};
use crate::upgrade::{self, echoes, is_stopped};

#[test]
fn a_new_process_takes_over_and_the_old_one_ends_after_its_requests() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| match call.request.target() {
        "/held" => reply::held("late", &held)(call),
        _ => reply::name("x")(call),
    });
    let mut family = Family::start(&over(&[&origin]).yaml());
    let old = family.pid;
    let mut busy = family.first.client();
    busy.send(get("a.test", "/held", ""));
    eventually(SOON, || origin.requests() == 1);
    let mut idle = family.first.client();
    assert_eq!(idle.get("/").text(), "x");
    assert_eq!(family.first.metrics().sum("proxy_took_over", &[]), 0.0);
    let new = family.upgrade();
    assert_ne!(new, old);
    let complete = family.first.wait_for_event("upgrade_complete", |e| e["pid"] == new, SOON);
    assert!(complete["took_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{complete}");
    family.first.wait_for_event("upgrade_started", |e| e["pid"] == new, SOON);
    let (before, after) = (family.started(old), family.started(new));
    assert_eq!((&before["listeners"], &before["admin"]), (&after["listeners"], &after["admin"]));
    let drains = |e: &Value| e["why"] == "SIGUSR2" && e["in_progress"] == 1;
    family.first.wait_for_event("shutdown_started", drains, SOON);
    // The old one accepts nothing any more when it closes what is idle.
    assert!(idle.is_closed_within(SOON));
    eventually(SOON, || family.first.metrics().sum("proxy_took_over", &[]) == 1.0);
    assert_eq!(family.first.get("/new").text(), "x");
    eventually(SOON, || family.first.metrics().sum("proxy_requests_total", &[]) == 1.0);
    assert_eq!(family.first.ask_admin("/readyz").status(), 204);
    assert!(!is_gone(old), "it has a request to end");
    gate.open();
    let answer = busy.response();
    assert_eq!((answer.text().as_str(), answer.get("connection")), ("late", Some("close")));
    assert!(busy.is_closed_within(SOON));
    assert_eq!(family.first.wait_end(SOON), 0);
    family.first.wait_for_event("shutdown_complete", |e| e["cut"] == 0, SOON);
    assert_eq!(family.first.get("/after").text(), "x");
    family.end();
}

/// What a proxy needs of the machine while nothing goes on.
fn settled(family: &Family, expected: usize) -> bool {
    within(SOON, || (descriptors(family.pid) <= expected).then_some(())).is_some()
}

/// Has an upgrade fail, and checks that nothing has come of it: `kept` is a connection from before.
#[track_caller]
fn fails_without_a_trace(family: &Family, kept: &mut Client, reason: &str) {
    // These endpoints open what they hold in reserve when they are first asked.
    family.first.ask_admin("/readyz");
    let before = descriptors(family.pid);
    let tried = family.upgrade_fails(reason);
    assert!(tried.is_none_or(is_gone), "who has failed has ended");
    let zombie = tried.map(|pid| format!("/proc/{pid}"));
    assert!(!zombie.is_some_and(|path| std::path::Path::new(&path).exists()), "and was waited for");
    let answer = kept.get("/kept");
    assert_eq!((answer.status(), answer.get("connection")), (200, None));
    assert_eq!(family.first.get("/new").status(), 200);
    assert_eq!(family.first.ask_admin("/readyz").status(), 204);
    assert!(
        settled(family, before),
        "{before} descriptors have become {}",
        descriptors(family.pid)
    );
}

#[test]
fn a_program_that_cannot_take_over_changes_nothing() {
    let origin = Origin::start(reply::name("x"));
    let mut family = Family::start(&over(&[&origin]).one_worker().yaml());
    let mut kept = family.first.client();
    assert_eq!(kept.get("/").status(), 200);
    family.first.ask_admin("/readyz");
    let before = descriptors(family.pid);
    family.remove_program();
    fails_without_a_trace(&family, &mut kept, "No such file");
    family.replace_program(HANGING.0, 0o644);
    fails_without_a_trace(&family, &mut kept, "Permission denied");
    family.replace_program("no program at all", 0o755);
    fails_without_a_trace(&family, &mut kept, "");
    family.replace_program("#!/bin/sh\nexit 7\n", 0o755);
    fails_without_a_trace(&family, &mut kept, "7");
    family.replace_program("#!/bin/sh\nkill -9 $$\n", 0o755);
    fails_without_a_trace(&family, &mut kept, "");
    // It says something, but nothing that a proxy would say.
    family.replace_program("#!/bin/sh\necho nonsense >&0\n", 0o755);
    fails_without_a_trace(&family, &mut kept, "");
    assert_eq!(family.first.events("upgrade_failed").len(), 6);
    assert!(settled(&family, before));
    assert!(family.first.events("shutdown_started").is_empty());
    family.restore_program();
    family.upgrade();
    assert!(kept.is_closed_within(SOON));
    assert_eq!(family.first.wait_end(SOON), 0);
    assert_eq!(family.first.get("/").status(), 200);
    family.end();
}

#[test]
fn a_file_that_cannot_be_served_changes_nothing() {
    let origin = Origin::start(reply::name("x"));
    let good = over(&[&origin]).one_worker().yaml();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = taken.local_addr().expect("an address");
    let mut family = Family::start(&good);
    let mut kept = family.first.client();
    assert_eq!(kept.get("/").status(), 200);
    let second = format!("listeners:\n- {{ name: second, bind: \"{at}\" }}");
    for (yaml, reason) in [
        (format!("{good}\nroutse: []\n"), "2"),
        ("listeners: [".to_owned(), "2"),
        (good.replace("listeners:", &second), at.to_string().as_str()),
        (format!("{good}\nadmin: {{ bind: \"{at}\" }}\n"), "in use"),
    ] {
        family.first.rewrite_yaml(&yaml);
        fails_without_a_trace(&family, &mut kept, reason);
    }
    assert!(family.first.events("proxy_started").len() == 1, "none of them has served");
    family.first.rewrite_yaml(&good);
    family.upgrade();
    assert_eq!(family.first.wait_end(SOON), 0);
    assert_eq!(family.first.get("/").status(), 200);
    family.end();
}

/// Upgrades to a program that does nothing; its process.
#[track_caller]
fn starts_one_that_hangs(family: &mut Family) -> u32 {
    family.replace_program(HANGING.0, 0o755);
    family.signal(Signal::USR2);
    let started = family.first.wait_for_event("upgrade_started", |_| true, SOON);
    u32::try_from(started["pid"].as_u64().expect("a pid")).expect("a pid")
}

#[test]
fn one_that_hangs_holds_nothing_up_and_a_second_signal_is_ignored() {
    let origin = Origin::start(reply::name("x"));
    let mut family = Family::start(&over(&[&origin]).yaml());
    let hanging = starts_one_that_hangs(&mut family);
    family.signal(Signal::USR2);
    family.first.wait_for_event("upgrade_ignored", |_| true, SOON);
    family.signal(Signal::HUP);
    family.first.wait_for_event("reload_ignored", |_| true, SOON);
    assert_eq!(family.first.get("/").status(), 200);
    send(hanging, Signal::KILL);
    family.first.wait_for_event("upgrade_failed", |_| true, SOON);
    assert!(is_gone(hanging));
    assert_eq!(family.first.events("upgrade_started").len(), 1);
    family.restore_program();
    family.upgrade();
    assert_eq!(family.first.wait_end(SOON), 0);
    family.end();
}

#[test]
fn a_stop_during_an_upgrade_comes_first() {
    let origin = Origin::start(reply::name("x"));
    let mut family = Family::start(&over(&[&origin]).yaml());
    let hanging = starts_one_that_hangs(&mut family);
    family.signal(Signal::TERM);
    family.first.wait_for_event("upgrade_failed", |e| e["why"].is_string(), SOON);
    assert_eq!(family.first.wait_end(SOON), 0);
    assert!(is_gone(hanging), "it does not outlive who started it");
    family.first.wait_for_event("shutdown_started", |e| e["why"] == "SIGTERM", SOON);
}

#[test]
fn one_that_drains_starts_no_other() {
    let origin = Origin::start(upgrade::echo);
    let mut family = Family::start(&over(&[&origin]).yaml());
    let mut tunnel = upgrade::open(&family.first);
    family.signal(Signal::TERM);
    family.first.wait_for_event("shutdown_started", |_| true, SOON);
    let_pass(Duration::from_millis(150));
    family.signal(Signal::USR2);
    family.first.wait_for_event("upgrade_ignored", |e| e["why"].is_string(), SOON);
    echoes(&mut tunnel, "still here");
    drop(tunnel);
    assert_eq!(family.first.wait_end(SOON), 0);
    assert!(family.first.events("upgrade_started").is_empty());
}

#[test]
fn the_new_process_serves_the_changed_file() {
    let (one, two) = (Origin::start(reply::name("one")), Origin::start(reply::name("two")));
    let named = |name: &str| format!("- {{ name: {name}, bind: \"127.0.0.1:0\" }}\n");
    let file = |listeners: [&str; 2], origin: &Origin| {
        let listeners = listeners.map(named).concat();
        over(&[origin]).yaml().replace("- { name: web, bind: \"127.0.0.1:0\" }\n", &listeners)
    };
    let mut family = Family::start(&file(["web", "goes"], &one));
    let goes = family.first.listener("goes");
    let web = family.first.address();
    let mut idle = Client::connect(goes);
    assert_eq!(idle.get("/").text(), "one");
    let mut kept = Client::connect(web);
    assert_eq!(kept.get("/").text(), "one");
    family.first.rewrite_yaml(&file(["comes", "web"], &two));
    let new = family.upgrade();
    let started = family.started(new);
    let listeners = started["listeners"].as_array().expect("listeners");
    let at = |name: &str| -> Option<SocketAddr> {
        let text = listeners.iter().filter_map(Value::as_str);
        text.filter_map(|l| l.split_once('=')).find(|(n, _)| *n == name)?.1.parse().ok()
    };
    assert_eq!((at("web"), at("goes")), (Some(web), None));
    let comes = at("comes").expect("it listens");
    for mut client in [idle, kept] {
        assert!(client.is_closed_within(SOON), "the old one closes in order");
    }
    for address in [web, comes] {
        assert_eq!(Client::connect(address).get("/").text(), "two");
    }
    eventually(SOON, || Target::Tcp(goes).connect().is_err());
    assert_eq!(family.first.wait_end(SOON), 0);
    assert_eq!(Client::connect(web).get("/").text(), "two");
    family.end();
}

#[test]
fn the_delay_of_a_drain_is_not_waited_for() {
    let origin = Origin::start(reply::name("x"));
    let mut family = Family::start(&over(&[&origin]).top("drain: { delay: 1m }").yaml());
    family.upgrade();
    assert_eq!(family.first.wait_end(SOON), 0);
    family.first.wait_for_event("shutdown_started", |e| e["delay_ms"] == 0, SOON);
    send(family.pid, Signal::KILL);
}

#[test]
fn the_admin_endpoints_can_move_with_an_upgrade() {
    let origin = Origin::start(reply::name("x"));
    let yaml = over(&[&origin]).yaml();
    let mut family = Family::start(&yaml);
    let before = family.first.admin();
    family.first.rewrite_yaml(&format!("{yaml}\nadmin: {{ bind: \"127.0.0.2:0\" }}\n"));
    let new = family.upgrade();
    let started = family.started(new);
    let after: SocketAddr = started["admin"].as_str().and_then(|a| a.parse().ok()).expect("one");
    assert_eq!(after.ip().to_string(), "127.0.0.2");
    assert_eq!(Client::connect(after).get("/readyz").status(), 204);
    assert_eq!(family.first.wait_end(SOON), 0);
    assert!(Target::Tcp(before).connect().is_err());
    assert_eq!(family.first.get("/").text(), "x");
    family.end();
}

#[test]
fn without_descriptors_there_is_no_upgrade_and_no_harm() {
    let origin = Origin::start(reply::name("x"));
    let mut family = Family::start(&over(&[&origin]).one_worker().yaml());
    let mut kept = family.first.client();
    assert_eq!(kept.get("/").status(), 200);
    // So few that not even the offer can be made; connections that exist need none.
    for more in [0, 1, 2] {
        family.first.limit_descriptors(descriptors(family.pid) + more);
        let tried = family.upgrade_fails("");
        assert!(tried.is_none_or(is_gone));
        assert_eq!(kept.get("/").status(), 200);
    }
    family.first.limit_descriptors(4096);
    family.upgrade();
    assert!(kept.is_closed_within(SOON));
    assert_eq!(family.first.wait_end(SOON), 0);
    family.end();
}

#[test]
fn connections_that_wait_to_be_accepted_survive_an_upgrade() {
    const MANY: usize = 100;
    let origin = Origin::start(reply::name("x"));
    let mut family = Family::start(&over(&[&origin]).top("workers: 2").yaml());
    let mut waiting = Vec::new();
    family.signal(Signal::STOP);
    eventually(SOON, || is_stopped(&family.first));
    waiting.extend((0..MANY).map(|_| family.first.client()));
    for client in &mut waiting {
        client.send(get("a.test", "/", ""));
    }
    family.signal(Signal::CONT);
    family.upgrade();
    for client in &mut waiting {
        assert_eq!(client.response().text(), "x");
    }
    drop(waiting);
    assert_eq!(family.first.wait_end(SOON), 0);
    family.end();
}

#[test]
fn a_unix_domain_socket_stays_where_it_is_until_the_last_one_ends() {
    let origin = Origin::start(reply::name("x"));
    let yaml = over(&[&origin]).yaml().replace("127.0.0.1:0", "unix:{dir}/web.sock");
    let admin = "admin: { bind: \"unix:{dir}/admin.sock\" }";
    let mut family = Family::start(&format!("{yaml}\n{admin}"));
    let files = ["web.sock", "admin.sock"].map(|name| family.first.directory().join(name));
    for _ in 0..3 {
        family.upgrade();
        assert_eq!(Client::connect_unix(&files[0]).get("/").text(), "x");
        assert_eq!(Client::connect_unix(&files[1]).get("/readyz").status(), 204);
    }
    assert_eq!(family.first.wait_end(SOON), 0);
    assert_eq!(Client::connect_unix(&files[0]).get("/").text(), "x");
    family.end();
    assert!(!files[0].exists(), "the last one takes its file away");
}

#[test]
fn what_was_started_with_flags_is_upgraded_too() {
    let origin = Origin::start(reply::name("x"));
    let url = origin.url();
    let flags = ["--listen", "127.0.0.1:0", "--metrics-bind", "127.0.0.1:0", "--backends", &url];
    let mut first = Proxy::start_with(PROGRAM, &flags);
    eventually(SOON, || first.ask_admin("/readyz").status() == 204);
    first.signal(Signal::USR2);
    let complete = first.wait_for_event("upgrade_complete", |_| true, SOON);
    let new = u32::try_from(complete["pid"].as_u64().expect("a pid")).expect("a pid");
    // Whatever fails from here on, it does not outlive the test.
    let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        assert_eq!(first.wait_end(SOON), 0);
        assert_eq!(first.get("/").text(), "x");
        assert_eq!(first.ask_admin("/readyz").status(), 204);
    }));
    send(new, Signal::TERM);
    let ended = within(SOON, || is_gone(new).then_some(()));
    send(new, Signal::KILL);
    assert!(served.is_ok() && ended.is_some());
}

#[test]
fn a_predecessor_that_is_not_there_is_told() {
    let origin = Origin::start(reply::name("x"));
    let mut command = std::process::Command::new(PROGRAM);
    command.env("L7RP_HANDOVER", "1");
    command.stdin(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
    let mut proxy = Proxy::spawn_by(&mut command, &over(&[&origin]).yaml());
    assert_eq!(proxy.wait_exit(SOON), 1);
    assert!(proxy.errors().contains("take over"), "{}", proxy.errors());
}

#[test]
fn what_a_reload_has_changed_is_handed_over() {
    let origin = Origin::start(reply::name("x"));
    let named = |name: &str, at: &str| format!("- {{ name: {name}, bind: \"{at}\" }}\n");
    let file = |listeners: &str| {
        over(&[&origin]).yaml().replace("- { name: web, bind: \"127.0.0.1:0\" }\n", listeners)
    };
    let any = "127.0.0.1:0";
    let socket = "unix:{dir}/one.sock";
    let mut family = Family::start(&file(&[named("web", any), named("one", socket)].concat()));
    let web = family.first.address();
    let path = family.first.directory().join("one.sock");
    // Another name for an address, and another address.
    family.first.rewrite_yaml(&file(
        &[named("two", socket), named("more", any), named("web", any)].concat(),
    ));
    family.signal(Signal::HUP);
    family.first.wait_for_event("config_reloaded", |_| true, SOON);
    let new = family.upgrade();
    assert_eq!(family.first.wait_end(SOON), 0);
    let started = family.started(new);
    let listeners = started["listeners"].to_string();
    assert!(listeners.contains(&format!("web={web}")), "{listeners}");
    assert!(listeners.contains("two=unix:"), "{listeners}");
    assert_eq!(Client::connect(web).get("/").text(), "x");
    assert_eq!(Client::connect_unix(&path).get("/").text(), "x");
    assert!(family.first.events("sockets_unused").is_empty());
    assert_eq!(started["listeners"].as_array().map(Vec::len), Some(3), "{listeners}");
    // One that goes with an upgrade takes its file along.
    family.first.rewrite_yaml(&file(&named("web", any)));
    let mut idle = Client::connect_unix(&path);
    assert_eq!(idle.get("/").text(), "x");
    family.upgrade();
    assert!(idle.is_closed_within(SOON));
    eventually(SOON, || !path.exists());
    family.end();
}

#[test]
#[ignore = "it takes the half minute that a new process has to get ready"]
fn one_that_is_never_ready_changes_nothing() {
    let origin = Origin::start(reply::name("x"));
    let silent = Origin::never_accepting();
    let mut family = Family::start(&over(&[&origin]).one_worker().yaml());
    let mut kept = family.first.client();
    assert_eq!(kept.get("/").status(), 200);
    let before = descriptors(family.pid);
    let check = "health: { active: { path: /, interval: 1s, timeout: 900ms } }";
    family.first.rewrite_yaml(&over(&[&silent]).pool(check).one_worker().yaml());
    family.signal(Signal::USR2);
    let_pass(Duration::from_secs(2));
    assert_eq!(family.first.get("/").text(), "x");
    assert_eq!(family.first.ask_admin("/readyz").status(), 204);
    let limit = Duration::from_secs(40);
    family.first.wait_for_event("upgrade_failed", |_| true, limit);
    assert_eq!(family.first.get("/").text(), "x");
    assert!(settled(&family, before));
    family.first.rewrite_yaml(&over(&[&origin]).one_worker().yaml());
    family.upgrade();
    assert_eq!(family.first.wait_end(SOON), 0);
    family.end();
}
