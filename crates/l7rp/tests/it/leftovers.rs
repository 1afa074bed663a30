//! Connections that ended badly, on either side and at any moment, leave nothing behind: no
//! descriptor, no socket that waits for ever, no memory, no count.

use std::collections::HashSet;
use std::thread;
use std::time::Duration;

use l7rp_testkit::{Call, Client, Origin, Proxy, SOON, Then, eventually, let_pass, reply};

use crate::setup::{assert_counts, get, in_flight, over};
use crate::verdict::NO_BREAKER;

const THREADS: usize = 32;
const EACH: usize = 30;

/// Numbers that look random, the same ones each time.
fn draw(n: usize) -> usize {
    let mixed = (n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33) as usize
}

/// Ends in order or by a reset, at any moment of the exchange.
fn erratic(call: &mut Call<'_>) -> Then {
    let (how, when) = (draw(call.number), draw(call.number + 7919) % 6);
    let end = if how.is_multiple_of(2) { Then::Reset } else { Then::Close };
    let parts = ["HTTP/1.1 200 OK\r\nConte", "nt-Length: 8\r\n\r\n", "half", "half"];
    for part in &parts[..when.min(4)] {
        call.send(part);
    }
    if when == 5 { reply::hang(call) } else { end }
}

/// A client that ends at some moment: in order, by a reset, or only its own side.
fn leave_somewhere(proxy: &Proxy, n: usize) {
    let mut client = proxy.client();
    client.wire.patience(Some(Duration::from_secs(3)));
    let whole = if n.is_multiple_of(3) {
        format!("PUT /{n} HTTP/1.1\r\nHost: a.test\r\nContent-Length: 4\r\n\r\nbody")
    } else {
        get("a.test", &format!("/{n}"), "")
    };
    let sent = match draw(n) % 4 {
        0 => draw(n + 1) % whole.len(),
        _ => whole.len(),
    };
    // The proxy may have closed already.
    let _ = client.wire.write(&whole.as_bytes()[..sent]);
    if draw(n + 2).is_multiple_of(2) {
        let_pass(Duration::from_millis(draw(n + 3) as u64 % 30));
    }
    end(client, draw(n + 4));
}

fn end(mut client: Client, how: usize) {
    match how % 4 {
        0 => client.reset(),
        1 => drop(client),
        2 => drop(client.wire.half_close().and_then(|()| client.wire.read_to_end())),
        _ => drop(client.try_response()),
    }
}

/// The states of the TCP sockets of the proxy, as the kernel numbers them.
pub fn tcp_states(proxy: &Proxy) -> Vec<u8> {
    let directory = format!("/proc/{}/fd", proxy.pid());
    let held: HashSet<String> = std::fs::read_dir(directory)
        .expect("it runs")
        .flatten()
        .filter_map(|entry| {
            let link = std::fs::read_link(entry.path()).ok()?;
            let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            Some(inode.to_owned())
        })
        .collect();
    let table = std::fs::read_to_string(format!("/proc/{}/net/tcp", proxy.pid())).expect("a table");
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let fields: Vec<_> = line.split_ascii_whitespace().collect();
            let is_ours = held.contains(*fields.get(9)?);
            is_ours.then(|| u8::from_str_radix(fields[3], 16).ok()).flatten()
        })
        .collect()
}

#[test]
fn nothing_is_left_of_connections_that_ended_badly() {
    const LISTENING: u8 = 10;
    let (a, black_hole) = (Origin::start(erratic), Origin::never_accepting());
    let proxy = over(&[&a, &black_hole])
        .listener("timeouts: { read_header: 500ms, read: 500ms, write: 500ms, idle: 500ms }")
        .pool("selector: { algorithm: round-robin }, connect_timeout: 50ms")
        .pool("response_header_timeout: 150ms, keepalive: { idle_timeout: 500ms }")
        .pool(NO_BREAKER)
        .start();
    // What is needed once is there before.
    for n in 0..20 {
        leave_somewhere(&proxy, n);
    }
    settle(&proxy);
    let (descriptors, resident) = (proxy.descriptors(), proxy.resident());
    thread::scope(|scope| {
        for of in 0..THREADS {
            let proxy = &proxy;
            scope.spawn(move || (0..EACH).for_each(|n| leave_somewhere(proxy, of * EACH + n)));
        }
    });
    settle(&proxy);
    eventually(SOON, || proxy.descriptors() <= descriptors);
    // Of sockets, only those that listen.
    eventually(SOON, || tcp_states(&proxy).iter().all(|state| *state == LISTENING));
    assert!(tcp_states(&proxy).len() >= 2, "the table is read");
    let grown = proxy.resident().saturating_sub(resident);
    assert!(grown < 16 << 20, "{grown} octets");
    assert_counts(&proxy, "proxy_panics_total", &[], 0.0);
    assert!(a.requests() > THREADS * EACH / 4, "most of them got somewhere");
}

/// Waits until all gauges say that there is nothing.
#[track_caller]
fn settle(proxy: &Proxy) {
    eventually(SOON, || in_flight(proxy) == 0.0);
    for name in ["proxy_connections", "proxy_upstream_connections", "proxy_tunnels"] {
        assert_counts(proxy, name, &[], 0.0);
    }
}
