//! `l7rp healthcheck`: the exit code that a container's HEALTHCHECK or an exec probe goes by.

use std::process::{Command, Stdio};

use l7rp_testkit::{Gate, Origin, Proxy, SOON, Signal, eventually, reply};

use crate::setup::{PROGRAM, get, over};

/// The exit code, and what was said: one line, on standard output or error.
fn check(admin: &str, more: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(PROGRAM);
    command.args(["healthcheck", "--admin", admin]).args(more).stdin(Stdio::null());
    let output = command.output().expect("it runs");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(text).expect("UTF-8");
    assert_eq!(text.lines().count(), 1, "{text:?}");
    (output.status.code(), text)
}

#[test]
fn it_tells_alive_from_ready() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let admin = format!("http://{}", proxy.admin());
    assert_eq!(check(&admin, &[]), (Some(0), "alive\n".to_owned()));
    assert_eq!(check(&admin, &["--ready"]), (Some(0), "ready\n".to_owned()));

    let probe = "health: { active: { path: /healthz, interval: 2s, timeout: 1s } }";
    let nobody = over(&[&Origin::refusing()]).pool(probe).start();
    let admin = format!("http://{}", nobody.admin());
    assert_eq!(check(&admin, &[]).0, Some(0));
    let (code, said) = check(&admin, &["--ready"]);
    assert_eq!(code, Some(1));
    assert!(said.starts_with(&format!("error: {admin} is not ready: ")), "{said}");
    let why = nobody.ask_admin("/readyz").text();
    assert!(said.contains(why.trim_end()), "{said} does not say {why}");
}

#[test]
fn a_process_that_drains_is_alive_and_not_ready() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let mut proxy = over(&[&origin]).start();
    let admin = format!("http://{}", proxy.admin());
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || origin.requests() == 1);
    proxy.signal(Signal::TERM);
    eventually(SOON, || check(&admin, &["--ready"]).0 == Some(1));
    assert_eq!(check(&admin, &[]).0, Some(0));
    gate.open();
    assert_eq!(client.response().text(), "late");
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert_eq!(check(&admin, &[]).0, Some(1));
}

#[test]
fn a_unix_domain_socket_is_asked_too() {
    let origin = Origin::start(reply::name("x"));
    let folder = tempfile::tempdir().expect("a folder");
    let at = format!("unix:{}", folder.path().join("admin.sock").display());
    let (code, said) = check(&at, &[]);
    assert_eq!(code, Some(1), "{said}");
    let yaml = over(&[&origin]).yaml();
    let mut command = Command::new(PROGRAM);
    command.args(["--metrics-bind", &at]).stderr(Stdio::piped());
    let _proxy = Proxy::spawn_by(&mut command, &yaml);
    eventually(SOON, || check(&at, &["--ready"]).0 == Some(0));
}

#[test]
fn nobody_and_somebody_else_are_not_alive() {
    let nobody = Origin::refusing().url();
    let (code, said) = check(&nobody, &[]);
    assert_eq!(code, Some(1));
    assert!(said.starts_with(&format!("error: {nobody} is not alive: ")), "{said}");
    let other = Origin::start(reply::raw(reply::ok("x")));
    let (code, said) = check(&other.url(), &[]);
    assert_eq!(code, Some(1));
    assert!(said.contains("no admin address of this version"), "{said}");
    let hostile = reply::raw("HTTP/1.1 503 No\r\nContent-Length: 8\r\n\r\n\u{1b}[2Jab\r\n");
    let (code, said) = check(&Origin::start(hostile).url(), &[]);
    assert_eq!(code, Some(1));
    assert!(!said.contains('\u{1b}'), "{said:?}");
}

#[test]
fn who_is_silent_is_not_waited_for() {
    // Connections are made by the kernel, and nobody answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let admin = format!("http://{}", silent.local_addr().expect("an address"));
    let (code, said) = check(&admin, &[]);
    assert_eq!(code, Some(1));
    assert!(said.contains("silent for 2 s"), "{said}");
}
