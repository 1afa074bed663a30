//! `l7rp status` and `l7rp top`: what `/status` says, on a terminal.

use std::io::{Read, Write};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use l7rp_testkit::{Origin, Proxy, SOON, Value, eventually, reply, within};

use crate::setup::{PROGRAM, get, over};

fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } =
        Command::new(PROGRAM).args(arguments).stdin(Stdio::null()).output().expect("it runs");
    let text = |octets| String::from_utf8(octets).expect("UTF-8");
    (status.code(), text(stdout), text(stderr))
}

fn busy(origin: &Origin) -> (Proxy, String) {
    let proxy = over(&[origin])
        .upstream("http://nobody.invalid", "weight: 1")
        .top("- { name: gone, host: '*.test', path_prefix: /gone, respond: { status: 410 } }")
        .start();
    proxy.client().ask(get("a.test", "/gone", ""));
    eventually(SOON, || proxy.metrics().sum("proxy_requests_total", &[("route", "gone")]) == 1.0);
    let admin = format!("http://{}", proxy.admin());
    (proxy, admin)
}

#[test]
fn status_prints_it_for_people_and_for_programs() {
    let origin = Origin::start(reply::name("x"));
    let (proxy, admin) = busy(&origin);
    let (code, out, err) = run(&["status", "--admin", &admin]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.starts_with("l7rp 0.1.0 ready, up "), "{out}");
    let words = |begin: &str| -> Vec<&str> {
        let line = out.lines().find(|line| line.trim_start().starts_with(begin));
        line.unwrap_or_else(|| panic!("no {begin} in\n{out}")).split_whitespace().collect()
    };
    assert_eq!(words("web")[..4], ["web", "127.0.0.1:0", "http/1.1", "h2"]);
    assert_eq!(words("gone"), ["gone", "*.test/gone", "respond", "1", "0", "0", "1", "0", "0"]);
    assert_eq!(
        words("POOL b"),
        "POOL b p2c-ewma, 1 of 2 in, 0 in flight".split(' ').collect::<Vec<_>>()
    );
    assert_eq!(words(&origin.url())[1..], ["in", "0", "-", "0", "0"]);
    assert_eq!(words("http://nobody.invalid")[1..5], ["out:", "name", "not", "resolved"]);
    assert!(out.lines().all(|line| line.chars().count() <= 100), "{out}");
    let (code, out, _) = run(&["status", "--json", &format!("--admin={admin}/")]);
    let status: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!((code, &status["pid"]), (Some(0), &proxy.pid().into()));
}

#[test]
fn status_says_that_nobody_is_there() {
    let nobody = Origin::refusing().url();
    let (code, out, err) = run(&["status", "--admin", &nobody]);
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(err.starts_with(&format!("error: cannot ask {nobody}: ")), "{err}");
    // Something else than an instance.
    let other = Origin::start(reply::raw(reply::ok("x")));
    let (code, _, err) = run(&["status", "--admin", &other.url()]);
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("no admin address of this version"), "{err}");
}

#[test]
fn what_an_instance_says_does_nothing_to_the_terminal() {
    let origin = Origin::start(reply::name("x"));
    let (proxy, _) = busy(&origin);
    let mut status: Value = serde_json::from_str(&proxy.ask_admin("/status").text()).expect("JSON");
    for place in [
        "/version",
        "/config/taken",
        "/routes/0/name",
        "/routes/1/host",
        "/routes/1/action",
        "/listeners/0/bind",
        "/listeners/0/protocols/0",
        "/pools/0/name",
        "/pools/0/algorithm",
        "/pools/0/upstreams/0/url",
        "/pools/0/upstreams/1/why_not",
    ] {
        *status.pointer_mut(place).expect("it is there") = "\u{1b}[2J\u{9b}31m\r\u{7f}".into();
    }
    let hostile = Origin::start(reply::raw(reply::ok(&status.to_string())));
    for arguments in [&["status", "--admin"][..], &["status", "--json", "--admin"]] {
        let (code, out, err) = run(&[arguments, &[&hostile.url()]].concat());
        assert_eq!((code, err.as_str()), (Some(0), ""));
        assert!(!out.chars().any(|c| c.is_control() && c != '\n'), "{out:?}");
        assert!(out.contains("[2J"), "{out}");
    }
}

#[test]
fn top_needs_a_terminal() {
    let (code, out, err) = run(&["top"]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(err.contains("`l7rp status`"), "{err}");
}

/// A program on a terminal of its own, which util-linux' `script` makes.
struct OnTerminal {
    child: Child,
    seen: Arc<Mutex<String>>,
}

impl OnTerminal {
    fn start(command: &str) -> Self {
        let mut child = Command::new("script")
            .args(["-qefc", &format!("stty rows 40 cols 120; exec {command}"), "/dev/null"])
            .env("TERM", "xterm-256color")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("script, of the package bsdutils, is installed");
        let seen = Arc::new(Mutex::new(String::new()));
        let (mut out, to) = (child.stdout.take().expect("a pipe"), seen.clone());
        thread::spawn(move || {
            let mut part = [0; 4096];
            while let Ok(n @ 1..) = out.read(&mut part) {
                let text = String::from_utf8_lossy(&part[..n]);
                to.lock().unwrap_or_else(PoisonError::into_inner).push_str(&text);
            }
        });
        Self { child, seen }
    }

    fn seen(&self) -> String {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn press(&mut self, keys: &[u8]) {
        let keyboard = self.child.stdin.as_mut().expect("a pipe");
        keyboard.write_all(keys).and_then(|()| keyboard.flush()).expect("it reads");
    }

    /// The process on the terminal.
    fn inner(&self) -> String {
        let pid = self.child.id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        children.expect("it runs").trim().to_owned()
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn top_shows_it_live_and_gives_the_terminal_back() {
    const ENTER: &str = "\u{1b}[?1049h";
    const LEAVE: &str = "\u{1b}[?1049l";
    let origin = Origin::start(reply::name("x"));
    let (_proxy, admin) = busy(&origin);
    for how in ["q", "\u{3}", "\u{1b}", "-TERM", "-HUP", "-QUIT"] {
        let mut top = OnTerminal::start(&format!("{PROGRAM} top --interval 100ms --admin {admin}"));
        let shown = |what: &str| within(SOON, || top.seen().contains(what).then_some(()));
        for what in [ENTER, "UPSTREAM", "http://nobody.invalid", "out: name not resolved"] {
            assert!(shown(what).is_some(), "{what} is not in {:?}", top.seen());
        }
        match how {
            "-TERM" | "-HUP" | "-QUIT" => {
                let sent = Command::new("kill").args([how, &top.inner()]).status();
                assert!(sent.expect("it runs").success());
            }
            key => top.press(key.as_bytes()),
        }
        let ended = within(SOON, || top.child.try_wait().expect("it can be waited for"));
        let seen = top.seen();
        assert!(ended.is_some_and(|status| status.success()), "{how:?}: {ended:?} {seen:?}");
        eventually(SOON, || top.seen().contains(LEAVE));
    }
}
