//! Whatever clients and upstreams do, and whatever is reloaded meanwhile: what counts what is there
//! now says nothing when there is nothing, and is never below it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Call, Client, Origin, Proxy, SOON, Then, eventually, let_pass, reply};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};

use crate::http2_tools::{Conn, request};
use crate::leftovers::tcp_states;
use crate::pipelining::Draw;
use crate::reload::Over;
use crate::setup::{assert_counts, get, over};
use crate::storm::{misbehave, misbehaving};
use crate::tls_kit::{Ca, HOST, tls, try_shake};
use crate::upgrade::{ACCEPT, OFFER, echo};
use crate::verdict::NO_BREAKER;

const THREADS: u64 = 8;
/// Idle connections that may be kept to each upstream.
const MAX_IDLE: f64 = 4.0;
/// What counts what is there now.
const GAUGES: [&str; 5] = [
    "proxy_connections",
    "proxy_connections_leaving",
    "proxy_tunnels",
    "proxy_upstream_inflight",
    "proxy_upstream_connections",
];

/// Fails in every way, and so do its tunnels.
fn mixed(call: &mut Call<'_>) -> Then {
    if call.request.get("upgrade").is_none() {
        return misbehaving(call);
    }
    match Draw(call.number as u64).below(4) {
        0 => reply::raw("HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n")(call),
        1 => {
            call.send(ACCEPT);
            Then::Reset
        }
        _ => echo(call),
    }
}

/// Leaves in order, by a reset, or with its own side first.
fn leave(mut client: Client, draw: &mut Draw) {
    match draw.below(3) {
        0 => client.reset(),
        1 => drop(client),
        _ => drop(client.wire.half_close().and_then(|()| client.wire.read_to_end())),
    }
}

/// Opens a tunnel, if the upstream wants one, and leaves it.
fn tunnel(proxy: &Proxy, draw: &mut Draw) {
    let mut client = proxy.client();
    client.wire.patience(Some(Duration::from_secs(2)));
    client.send(OFFER);
    if draw.below(4) > 0 && client.wire.read_head().is_ok() {
        // It may be none any more.
        let _ = client.wire.write(b"words");
        let _ = client.wire.read_some(5);
    }
    leave(client, draw);
}

/// Requests by HTTP/2, some of which are waited for.
fn streams(proxy: &Proxy, draw: &mut Draw) {
    let conn = Conn::open(proxy);
    let begun: Vec<_> = (0..draw.below(5))
        .filter_map(|_| conn.try_begin(request("GET", "/storm"), true).ok())
        .collect();
    if draw.below(2) == 0 {
        let _ = conn.ask(request("GET", "/storm"));
    }
    drop(begun);
}

/// Resets somewhere in a handshake.
fn shake_and_go(config: &Arc<ClientConfig>, address: SocketAddr, draw: &mut Draw) {
    let name = ServerName::try_from(HOST).expect("a name");
    let mut end = ClientConnection::new(config.clone(), name).expect("a client");
    let mut hello = Vec::new();
    end.write_tls(&mut hello).expect("it is written");
    let mut tcp = TcpStream::connect(address).expect("the proxy accepts");
    tcp.set_read_timeout(Some(SOON)).expect("a time-out");
    let cut = draw.below(hello.len() as u64 * 2) as usize;
    // What is not taken is not needed.
    let _ = tcp.write_all(&hello[..cut.min(hello.len())]);
    if cut >= hello.len() {
        let mut part = vec![0; 1 + draw.below(2000) as usize];
        let _ = tcp.read_exact(&mut part);
    }
    Client::from(tcp).reset();
}

/// Leaves somewhere in a request, after a handshake or without one.
fn ask_and_go(proxy: &Proxy, config: &Arc<ClientConfig>, draw: &mut Draw) {
    let secured = draw.below(2) == 0;
    let mut client = if secured {
        match try_shake(config, proxy.listener("https"), HOST) {
            Ok(shaken) => shaken.client,
            Err(_) => return,
        }
    } else {
        proxy.client()
    };
    client.wire.patience(Some(Duration::from_secs(2)));
    let whole = get("a.test", "/storm", "");
    let sent = draw.below(whole.len() as u64 + 1) as usize;
    let _ = client.wire.write(&whole.as_bytes()[..sent]);
    if secured {
        // TLS that ends its own side only is a client that waits.
        client.reset();
    } else {
        leave(client, draw);
    }
}

/// Clients of all kinds, until it is over.
fn clients(proxy: &Proxy, config: &Arc<ClientConfig>, seed: u64, over: &AtomicBool) -> u64 {
    let (mut draw, mut count) = (Draw(seed), 0);
    while !over.load(SeqCst) {
        match draw.below(6) {
            0 => streams(proxy, &mut draw),
            1 => tunnel(proxy, &mut draw),
            2 => shake_and_go(config, proxy.listener("https"), &mut draw),
            3 => ask_and_go(proxy, config, &mut draw),
            4 => leave(proxy.client(), &mut draw),
            _ => misbehave(proxy, &mut draw),
        }
        count += 1;
    }
    count
}

/// No gauge is below nothing, or so large that it has been.
fn watch(proxy: &Proxy, over: &AtomicBool) -> u64 {
    let mut count = 0;
    while !over.load(SeqCst) {
        let metrics = proxy.metrics();
        for name in GAUGES {
            for (labels, value) in metrics.series(name) {
                assert!((0.0..10_000.0).contains(&value), "{name}{labels} is {value}");
            }
        }
        count += 1;
        let_pass(Duration::from_millis(10));
    }
    count
}

fn for_so_long(length: Duration) {
    let origins = [Origin::start(mixed), Origin::start(mixed)];
    let ca = Ca::new("ca");
    let secure = tls(&[&ca.issue("a", &[HOST])], "");
    let with = |timeout: &str| {
        over(&[&origins[0], &origins[1]])
            .listener("timeouts: { read_header: 1s, read: 300ms, write: 1s, idle: 2s }")
            .pool(&format!("response_header_timeout: {timeout}, {NO_BREAKER}"))
            .pool(&format!("keepalive: {{ max_idle: {MAX_IDLE}, idle_timeout: 60s }}"))
            .route("tunnel_idle_timeout: 1s")
            .yaml()
            .replace(
                "\nupstream_pools:",
                &format!("\n- {{ name: https, bind: \"127.0.0.1:0\", {secure} }}\nupstream_pools:"),
            )
    };
    let files = [with("200ms"), with("250ms")];
    let proxy = crate::setup::start(&files[0]);
    let listening = proxy.listening();
    let config = Arc::new(ca.client());
    let end = Instant::now() + length;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let (proxy, config, is_over) = (&proxy, &config, &is_over);
        let _over = Over(is_over);
        let all: Vec<_> =
            (0..THREADS).map(|n| scope.spawn(move || clients(proxy, config, n, is_over))).collect();
        let watching = scope.spawn(move || watch(proxy, is_over));
        let mut reloads = 0;
        while Instant::now() < end {
            reloads += 1;
            proxy.reload(&files[reloads % 2]);
            let_pass(Duration::from_millis(100));
        }
        is_over.store(true, SeqCst);
        let asked: u64 = all.into_iter().map(|each| each.join().expect("a client")).sum();
        let seen = watching.join().expect("the gauges");
        assert!(asked > 50 && seen > 5 && reloads > 3, "{asked} {seen} {reloads}");
    });
    for name in &GAUGES[..4] {
        assert_counts(&proxy, name, &[], 0.0);
    }
    assert_counts(&proxy, GAUGES[4], &[("state", "active")], 0.0);
    assert_counts(&proxy, "proxy_panics_total", &[], 0.0);
    for origin in &origins {
        let url = origin.url();
        let labels = [("upstream", &*url), ("state", "idle")];
        let idle = proxy.metrics().sum(GAUGES[4], &labels);
        assert!(idle <= MAX_IDLE, "{idle} idle connections to {url}");
    }
    // Nothing is open but what listens and what is idle.
    assert_eq!(proxy.listening(), listening);
    eventually(SOON, || {
        let idle = proxy.metrics().sum(GAUGES[4], &[]) as usize;
        tcp_states(&proxy).len() == listening.len() + idle
    });
}

#[test]
fn gauges_return_to_nothing_after_all_that_can_go_wrong() {
    for_so_long(Duration::from_secs(3));
}

#[test]
#[ignore = "a minute"]
fn gauges_return_to_nothing_after_a_minute_of_it() {
    for_so_long(Duration::from_mins(1));
}
