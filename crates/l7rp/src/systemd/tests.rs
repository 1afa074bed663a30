//! Notifications at a socket as systemd has one; the variables as tables; and the passing of
//! sockets to this test program, started again as a service.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use super::*;
use crate::clock::monotonic_us;

/// The text of the next notification.
fn told(manager: &UnixDatagram) -> String {
    let mut text = [0; 5000];
    let length = manager.recv(&mut text).unwrap();
    String::from_utf8(text[..length].to_vec()).unwrap()
}

#[test]
fn the_manager_is_told_at_a_path_or_an_abstract_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let name = format!("l7rp-test-{}", std::process::id());
    let abstract_name = SocketAddr::from_abstract_name(&name).unwrap();
    for (manager, address) in [
        (UnixDatagram::bind(&path), path.as_os_str().as_bytes().to_vec()),
        (UnixDatagram::bind_addr(&abstract_name), format!("@{name}").into_bytes()),
    ] {
        let manager = manager.unwrap();
        let notify = Notify(Notify::open(&address));
        notify.ready("serving 2 listeners");
        assert_eq!(told(&manager), "READY=1\nSTATUS=serving 2 listeners");
        notify.stopping("draining");
        assert_eq!(told(&manager), "STOPPING=1\nSTATUS=draining");
        notify.status("");
        assert_eq!(told(&manager), "STATUS=");
        notify.main_pid(4711);
        assert_eq!(told(&manager), "MAINPID=4711");
        notify.watchdog();
        assert_eq!(told(&manager), "WATCHDOG=1");
        notify.extend_timeout(Duration::from_millis(1500));
        assert_eq!(told(&manager), "EXTEND_TIMEOUT_USEC=1500000");
        let before = monotonic_us();
        notify.reloading();
        let text = told(&manager);
        let at = text.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap();
        assert!((before..=monotonic_us()).contains(&at.parse().unwrap()), "{text}");
    }
}

#[test]
fn a_status_is_one_line_and_not_too_long() {
    assert_eq!(one_line("a\nREADY=1\r\n\0b"), "a READY=1   b");
    assert_eq!(one_line("Größe"), "Größe");
    let long = one_line(&"ß".repeat(3000));
    assert_eq!(long, "ß".repeat(MAX_STATUS / 2));
}

#[test]
fn a_manager_that_is_absent_or_does_not_read_holds_nobody_up() {
    Notify(None).ready("nobody asked");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let notify = Notify(Notify::open(path.as_os_str().as_bytes()));
    notify.ready("not there yet");
    let manager = UnixDatagram::bind(&path).unwrap();
    for _ in 0..10_000 {
        notify.watchdog();
    }
    assert_eq!(told(&manager), "WATCHDOG=1");
    // It starts again.
    drop(manager);
    notify.watchdog();
    std::fs::remove_file(&path).unwrap();
    let manager = UnixDatagram::bind(&path).unwrap();
    notify.status("still here");
    assert_eq!(told(&manager), "STATUS=still here");
}

#[test]
fn the_watchdog_is_for_this_process_and_has_a_limit() {
    let half = Some(Duration::from_secs(15));
    for (limit, pid, expected) in [
        (Some("30000000"), None, half),
        (Some("30000000"), Some("7"), half),
        (Some("30000000"), Some("8"), None),
        (Some("30000000"), Some("x"), None),
        (Some("0"), None, None),
        (Some("-1"), None, None),
        (Some("30s"), None, None),
        (None, Some("7"), None),
        (Some("1"), None, Some(Duration::from_nanos(500))),
    ] {
        assert_eq!(interval(limit, pid, 7), expected, "{limit:?} {pid:?}");
    }
}

#[test]
fn what_was_passed_is_announced_to_this_process_only() {
    let none: &[&str] = &[];
    for (pid, count, names, expected) in [
        (Some("7"), Some("2"), Some("web:admin"), Ok(["web", "admin"].as_slice())),
        (Some("7"), Some("2"), Some(":"), Ok(&["", ""])),
        (Some("7"), Some("2"), None, Ok(&["unknown", "unknown"])),
        (Some("7"), Some("0"), None, Ok(none)),
        (Some("7"), Some("0"), Some(""), Ok(none)),
        (Some("7"), None, None, Ok(none)),
        (Some("8"), Some("2"), None, Ok(none)),
        (Some("seven"), Some("2"), None, Ok(none)),
        (None, Some("2"), None, Ok(none)),
        (Some("7"), Some("2"), Some("web"), Err("LISTEN_FDNAMES has 1 names")),
        (Some("7"), Some("-1"), None, Err("not a number")),
        (Some("7"), Some("4000000000"), None, Err("not a number")),
    ] {
        let got = announced(pid, count, names, 7);
        match expected {
            Ok(names) => assert_eq!(got.unwrap(), names),
            Err(text) => assert!(got.unwrap_err().contains(text), "{count:?} {names:?}"),
        }
    }
}

/// Starts the test below once more, as a service that `socket` is passed to.
fn start_with(socket: OwnedFd) -> String {
    let script = "export LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES='the web'
        exec \"$@\" 3<&0 0</dev/null";
    let again = "systemd::tests::passed_sockets_are_taken_once";
    let output = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args([again, "--exact", "--nocapture"])
        .stdin(Stdio::from(socket))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn passed_sockets_are_taken_once() {
    if std::env::var_os("LISTEN_PID").is_some() {
        match take_sockets() {
            Err(error) => println!("error: {error}"),
            Ok(sockets) => {
                let [Inherited { name, socket: Bound::Tcp(listener) }] = &sockets[..] else {
                    panic!("{sockets:?}");
                };
                let (mut client, _) = listener.accept().unwrap();
                client.write_all(name.as_bytes()).unwrap();
                println!("again: {}", take_sockets().unwrap_err());
            }
        }
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let text = start_with(listener.into());
    let mut greeting = String::new();
    client.read_to_string(&mut greeting).unwrap();
    assert_eq!(greeting, "the web");
    assert!(text.contains("again: the passed descriptors have been taken before"), "{text}");

    let text = start_with(UdpSocket::bind("127.0.0.1:0").unwrap().into());
    assert!(text.contains("error: descriptor 3 (\"the web\")"), "{text}");
    assert!(text.contains("it is a datagram socket (IPv4)"), "{text}");
}
