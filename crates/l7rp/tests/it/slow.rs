//! slowhttptest, a client that holds connections open in every known way: whoever is honest is
//! served meanwhile, it costs a bounded amount of memory, and it does not last.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use l7rp_testkit::{Origin, Proxy, Then, let_pass, reply};

use crate::setup::{assert_counts, over};

/// Connections that are made, how many of them in a second, and for how many seconds in all;
/// longer than the time-outs.
#[derive(Clone, Copy)]
struct Crowd {
    of: u32,
    each_second: u32,
    lasts: u32,
}

const AT_ONCE: Crowd = Crowd { of: 600, each_second: 600, lasts: 11 };
/// For those that read slowly the whole way carries a megabyte first, into the kernel: at once,
/// that alone would keep a small machine busy.
const BY_AND_BY: Crowd = Crowd { of: 500, each_second: 40, lasts: 13 };

/// What an honest client waits at most.
const PROMPT: Duration = Duration::from_secs(1);
/// What a connection may cost the proxy, in octets.
const EACH: u64 = 128 << 10;

const SMALL: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx";
const TIMEOUTS: &str = "timeouts: { read_header: 2s, read: 2s, write: 2s, idle: 2s }, \
                        limits: { min_body_rate: 1KiB, max_body_bytes: 1MiB }";

/// What was seen during an attack.
#[derive(Debug)]
struct Figures {
    honest: u32,
    slowest: Duration,
    most_connections: f64,
    grown: u64,
    /// How requests had ended by then, those of honest clients too.
    ended: BTreeMap<String, u32>,
}

fn attack(crowd: Crowd, arguments: &[&str], path: &str, proxy: &Proxy) -> Figures {
    let url = format!("http://{}{path}", proxy.address());
    let (of, rate) = (crowd.of.to_string(), crowd.each_second.to_string());
    let lasts = crowd.lasts.to_string();
    let mut child = Command::new("slowhttptest")
        .args(["-c", &of, "-r", &rate, "-l", &lasts, "-p", "3", "-u", &url])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("`cargo xtask setup` installs slowhttptest");
    let before = proxy.resident();
    let end = Instant::now() + Duration::from_secs(20);
    let (mut asked, mut slowest) = (0, Duration::ZERO);
    let (mut most_connections, mut grown) = (0.0f64, 0);
    while child.try_wait().expect("a child").is_none() {
        if Instant::now() > end {
            let _ = child.kill();
            panic!("slowhttptest does not end");
        }
        let began = Instant::now();
        assert_eq!(proxy.get("/honest").status(), 200, "an honest client during the attack");
        slowest = slowest.max(began.elapsed());
        asked += 1;
        most_connections = most_connections.max(proxy.metrics().sum("proxy_connections", &[]));
        grown = grown.max(proxy.resident().saturating_sub(before));
        let_pass(Duration::from_millis(100));
    }
    let mut ended = BTreeMap::new();
    for line in proxy.events("request_completed") {
        let reason = line["reason"].as_str().unwrap_or("answered");
        *ended.entry(reason.to_owned()).or_default() += 1;
    }
    Figures { honest: asked, slowest, most_connections, grown, ended }
}

/// Attacks, and holds what was seen against the promise.
fn withstands(name: &str, crowd: Crowd, arguments: &[&str], path: &str) -> Figures {
    // One at a time: each is to be seen by itself, not the machine's limits.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // More than the kernel keeps for a reader who does not read.
    let big = reply::ok(&"x".repeat(4 << 20));
    let origin = Origin::start(move |call| {
        let is_big = call.request.target() == "/big";
        let _ = call.body();
        call.send(if is_big { big.as_bytes() } else { SMALL });
        Then::Next
    });
    let proxy = over(&[&origin]).listener(TIMEOUTS).start();
    let figures = attack(crowd, arguments, path, &proxy);
    println!("{name}: {figures:?}");
    assert!(figures.honest > 10, "{figures:?}");
    assert!(figures.slowest < PROMPT, "{figures:?}");
    assert!(figures.grown < u64::from(crowd.of) * EACH, "{figures:?}");
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
    assert_counts(&proxy, "proxy_panics_total", &[], 0.0);
    assert_eq!(proxy.get("/after").status(), 200);
    figures
}

/// The proxy has ended at least so many with this reason, and many had been there at once.
fn ended(figures: &Figures, reason: &str, least: u32) {
    assert!(figures.most_connections > 50.0, "{figures:?}");
    assert!(figures.ended.get(reason).is_some_and(|n| *n >= least), "{figures:?}");
}

#[test]
fn slow_heads() {
    let figures =
        withstands("slow heads", AT_ONCE, &["-H", "-i", "1", "-x", "24", "-t", "GET"], "/");
    ended(&figures, "head_timeout", 500);
}

#[test]
fn slow_bodies() {
    let arguments = ["-B", "-i", "1", "-x", "10", "-s", "8192", "-t", "POST"];
    let figures = withstands("slow bodies", AT_ONCE, &arguments, "/");
    ended(&figures, "body_too_slow", 200);
}

#[test]
fn slow_readers() {
    let arguments = ["-X", "-w", "512", "-y", "1024", "-n", "1", "-z", "32", "-k", "1"];
    let figures = withstands("slow readers", BY_AND_BY, &arguments, "/big");
    ended(&figures, "client_stalled", 200);
}

#[test]
fn many_ranges() {
    withstands("many ranges", AT_ONCE, &["-R", "-a", "10", "-b", "3000", "-t", "HEAD"], "/");
}
