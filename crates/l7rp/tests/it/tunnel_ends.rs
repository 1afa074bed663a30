//! How long a tunnel lives, how it ends, and what is counted meanwhile.

use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{
    Client, Gate, Origin, Proxy, SOON, Signal, Then, Value, eventually, let_pass, within,
};

use crate::setup::{assert_counts, assert_failed, in_flight, over};
use crate::upgrade::{ACCEPT, OFFER, echo, echoes, is_stopped, open};

/// Nothing is left of any tunnel.
#[track_caller]
fn all_is_over(proxy: &Proxy, origin: &Origin) {
    eventually(SOON, || origin.open() == 0 && in_flight(proxy) == 0.0);
    assert_counts(proxy, "proxy_tunnels", &[], 0.0);
    assert_counts(proxy, "proxy_connections", &[], 0.0);
    assert_counts(proxy, "proxy_upstream_connections", &[], 0.0);
}

#[test]
fn the_answer_goes_on_after_the_client_has_ended_its_side() {
    let origin = Origin::start(|call| {
        call.send(ACCEPT);
        let heard = call.wire.read_to_end().expect("the end of its side");
        call.send(heard.repeat(1000));
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    let mut client = open(&proxy);
    client.send("all of it");
    client.wire.half_close().expect("it can");
    let answer = client.wire.read_to_end().expect("the end");
    assert!(answer == b"all of it".repeat(1000), "{} octets", answer.len());
    let line = proxy.logged_path("/t");
    assert_eq!((&line["status"], &line["reason"]), (&101.into(), &Value::Null));
    assert_eq!((&line["bytes_in"], &line["bytes_out"]), (&9.into(), &9000.into()));
    all_is_over(&proxy, &origin);
}

#[test]
fn the_client_goes_on_after_the_upstream_has_ended_its_side() {
    let (told, heard) = channel();
    let origin = Origin::start(move |call| {
        call.send(format!("{ACCEPT}farewell"));
        call.wire.half_close().expect("it can");
        let _ = told.send(call.wire.read_to_end());
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    let mut client = open(&proxy);
    assert_eq!(client.wire.read_to_end().expect("the end of its side"), b"farewell");
    for n in 0..10 {
        client.send(format!("still here {n}\n"));
    }
    client.wire.half_close().expect("it can");
    let got = heard.recv_timeout(SOON).expect("the end").expect("an end in order");
    assert_eq!(got.split(|&b| b == b'\n').count() - 1, 10);
    assert_eq!(proxy.logged_path("/t")["reason"], Value::Null);
    all_is_over(&proxy, &origin);
}

#[test]
fn a_reset_of_the_client_closes_the_upstream() {
    let origin = Origin::start(echo);
    let proxy = over(&[&origin]).start();
    let mut client = open(&proxy);
    echoes(&mut client, "hello");
    client.reset();
    all_is_over(&proxy, &origin);
    let line = proxy.logged_path("/t");
    assert_eq!((&line["status"], &line["reason"]), (&101.into(), &"client_gone".into()));
    assert_eq!((&line["bytes_in"], &line["bytes_out"]), (&5.into(), &5.into()));
}

#[test]
fn a_reset_of_the_upstream_closes_the_client() {
    let origin = Origin::start(|call| {
        call.send(ACCEPT);
        let _ = call.wire.read_exact(3);
        Then::Reset
    });
    let proxy = over(&[&origin]).start();
    let mut client = open(&proxy);
    client.send("now");
    assert!(
        !matches!(client.wire.read_to_end(), Err(e) if e.kind() == std::io::ErrorKind::WouldBlock)
    );
    all_is_over(&proxy, &origin);
    let line = proxy.logged_path("/t");
    assert_eq!(line["status"], 101);
    assert_ne!(line["reason"], "client_gone", "{line}");
}

#[test]
fn a_reset_of_the_upstream_is_not_the_clients_doing_while_it_talks() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| {
        call.send(ACCEPT);
        held.pass();
        Then::Reset
    });
    let proxy = over(&[&origin]).start();
    let mut client = open(&proxy);
    // The proxy finds both when it runs again.
    proxy.signal(Signal::STOP);
    eventually(SOON, || is_stopped(&proxy));
    client.send("still talking");
    gate.open();
    eventually(SOON, || origin.open() == 0);
    proxy.signal(Signal::CONT);
    let line = proxy.logged_path("/t");
    assert_ne!(line["reason"], "client_gone", "{line}");
    drop(client);
    all_is_over(&proxy, &origin);
}

#[test]
fn a_reset_after_the_end_of_the_clients_side_is_noticed() {
    let gate = Gate::default();
    let held = gate.clone();
    // It waits for something else, and does not look at its connection meanwhile.
    let origin = Origin::start(move |call| {
        call.send(ACCEPT);
        held.pass();
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    let client = open(&proxy);
    client.wire.half_close().expect("it can");
    let_pass(Duration::from_millis(100));
    client.reset();
    let over = within(SOON, || (in_flight(&proxy) == 0.0).then_some(()));
    gate.open();
    assert!(over.is_some(), "the tunnel is held for a client that is gone");
}

#[test]
fn a_reset_after_the_end_of_the_upstreams_side_is_noticed() {
    let (told, heard) = channel();
    let origin = Origin::start(move |call| {
        call.send(ACCEPT);
        call.wire.half_close().expect("it can");
        let _ = told.send(());
        let_pass(Duration::from_millis(100));
        Then::Reset
    });
    let proxy = over(&[&origin]).start();
    let client = open(&proxy);
    heard.recv_timeout(SOON).expect("the end of its side");
    let over = within(SOON, || (in_flight(&proxy) == 0.0).then_some(()));
    assert!(over.is_some(), "the tunnel is held for an upstream that is gone");
    drop(client);
}

#[test]
fn an_idle_tunnel_is_cut_on_both_sides() {
    let origin = Origin::start(echo);
    let proxy = over(&[&origin]).route("tunnel_idle_timeout: 1s").start();
    let mut client = open(&proxy);
    // Whatever moves, either way, keeps it open.
    for _ in 0..6 {
        let_pass(Duration::from_millis(250));
        echoes(&mut client, "hello");
    }
    let silent = Instant::now();
    assert!(
        !matches!(client.wire.read_to_end(), Err(e) if e.kind() == std::io::ErrorKind::WouldBlock)
    );
    let took = silent.elapsed();
    assert!(took > Duration::from_millis(900) && took < SOON, "{took:?}");
    let line = proxy.logged_path("/t");
    assert_eq!((&line["status"], &line["reason"]), (&101.into(), &"tunnel_idle".into()));
    assert_eq!((&line["bytes_in"], &line["bytes_out"]), (&30.into(), &30.into()));
    all_is_over(&proxy, &origin);
    // Nobody's fault.
    assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "err")], 0.0);
}

#[test]
fn a_half_closed_tunnel_that_says_nothing_is_cut_too() {
    let held = Gate::default();
    let holding = held.clone();
    let silent = Origin::start(move |call| {
        call.send(ACCEPT);
        holding.pass();
        Then::Close
    });
    let proxy = over(&[&silent]).route("tunnel_idle_timeout: 300ms").start();
    let client = open(&proxy);
    client.wire.half_close().expect("it can");
    assert_eq!(proxy.logged_path("/t")["reason"], "tunnel_idle");
    assert_counts(&proxy, "proxy_tunnels", &[], 0.0);
    assert_eq!(in_flight(&proxy), 0.0);
    held.open();
}

#[test]
fn ws_idle_outlives_timeouts() {
    let origin = Origin::start(echo);
    let proxy = over(&[&origin])
        .listener("timeouts: { read_header: 300ms, read: 300ms, write: 300ms, idle: 300ms }")
        .pool("response_header_timeout: 300ms, keepalive: { idle_timeout: 300ms }")
        .route("timeouts: { total: 300ms }")
        .start();
    let mut client = open(&proxy);
    let_pass(Duration::from_secs(1));
    echoes(&mut client, "after the silence");
    let_pass(Duration::from_millis(500));
    echoes(&mut client, "and again");
    assert_eq!(proxy.metrics().sum("proxy_tunnels", &[]), 1.0);
}

#[test]
fn tunnels_are_counted_while_they_are_open() {
    let origin = Origin::start(echo);
    let proxy = over(&[&origin]).start();
    let mut clients: Vec<Client> = (0..5).map(|_| open(&proxy)).collect();
    for client in &mut clients {
        echoes(client, "hello");
    }
    let labels = [("route", "r")];
    assert_counts(&proxy, "proxy_tunnels", &labels, 5.0);
    assert_eq!(in_flight(&proxy), 5.0);
    let active = [("state", "active")];
    assert_eq!(proxy.metrics().sum("proxy_upstream_connections", &active), 5.0);
    // They are in progress: no line yet, and not counted as done.
    assert_eq!(proxy.events("request_completed").len(), 0);
    clients.truncate(2);
    assert_counts(&proxy, "proxy_tunnels", &labels, 2.0);
    eventually(SOON, || in_flight(&proxy) == 2.0);
    clients.clear();
    all_is_over(&proxy, &origin);
    assert_counts(&proxy, "proxy_requests_total", &[("status", "101")], 5.0);
    assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "101")], 5.0);
}

#[test]
fn a_tunnel_holds_its_places_to_its_end() {
    let origin = Origin::start(echo);
    for scope in ["process", "listener", "pool", "upstream"] {
        let one = "max_in_flight: 1";
        let setup = match scope {
            "process" => over(&[&origin]).top("limits: { max_in_flight: 1 }"),
            "listener" => over(&[&origin]).listener(one),
            "pool" => over(&[&origin]).pool(one),
            _ => over(&[]).upstream(&origin.url(), one),
        };
        let proxy = setup.start();
        for round in 0..4 {
            // The last one's place is free a moment after its end.
            let opened = within(SOON, || {
                let mut client = proxy.client();
                (client.send(OFFER).head().status() == 101).then_some(client)
            });
            let mut client = opened.expect("there is room again");
            echoes(&mut client, "hello");
            let answer = proxy.get("/full");
            let reason = format!("capacity_{scope}");
            assert_failed(&proxy, &answer, 503, "connection_limit_reached", &reason);
            if round % 2 == 0 {
                client.reset();
            }
        }
    }
}

#[test]
fn least_connections_counts_tunnels() {
    let (one, two) = (Origin::start(echo), Origin::start(echo));
    let proxy = over(&[&one, &two]).pool("selector: { algorithm: least-conn }").start();
    let clients: Vec<Client> = (0..20).map(|_| open(&proxy)).collect();
    assert_eq!((one.open(), two.open()), (10, 10));
    drop(clients);
    all_is_over(&proxy, &one);
    all_is_over(&proxy, &two);
}

#[test]
fn octets_pass_whole_both_ways_at_once() {
    const LONG: usize = 8 << 20;
    let pattern = |seed: usize| -> Vec<u8> {
        (0..LONG).map(|n| ((n ^ seed).wrapping_mul(2_654_435_761) >> 13) as u8).collect()
    };
    let origin = Origin::start(move |call| {
        call.send(ACCEPT);
        let mut sender = call.wire.twin();
        thread::scope(|scope| {
            scope.spawn(move || sender.write(&pattern(1)).expect("all is taken"));
            let got = call.wire.read_exact(LONG).expect("all of it");
            assert!(got == pattern(2));
        });
        call.send("whole");
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    let before = proxy.resident();
    let mut client = open(&proxy);
    let mut sender = client.wire.twin();
    thread::scope(|scope| {
        scope.spawn(move || sender.write(&pattern(2)).expect("all is taken"));
        let got = client.wire.read_exact(LONG).expect("all of it");
        assert!(got == pattern(1));
    });
    assert_eq!(client.wire.read_exact(5).expect("the verdict"), b"whole");
    let grown = proxy.resident().saturating_sub(before);
    assert!(grown < 4 << 20, "{grown} octets more");
    drop(client);
    let line = proxy.logged_path("/t");
    assert_eq!(line["bytes_in"], LONG);
    assert_eq!(line["bytes_out"], LONG + 5);
}

#[test]
fn a_receiver_that_does_not_read_stops_the_sender() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| {
        call.send(ACCEPT);
        held.pass();
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    let mut client = open(&proxy);
    let before = proxy.resident();
    client.wire.patience(Some(Duration::from_millis(300)));
    let part = vec![b'x'; 64 << 10];
    let mut sent = 0_usize;
    while client.wire.write(&part).is_ok() && sent < 256 << 20 {
        sent += 64 << 10;
    }
    assert!(sent < 64 << 20, "{sent} octets were taken");
    assert!(proxy.resident() < before + (1 << 20));
    gate.open();
}

#[test]
fn a_tunnel_lives_until_the_grace_ends() {
    let origin = Origin::start(echo);
    let mut proxy = over(&[&origin]).top("drain: { timeout: 1s }").start();
    let mut client = open(&proxy);
    echoes(&mut client, "before");
    proxy.signal(Signal::TERM);
    let began = Instant::now();
    let started = proxy.wait_for_event("shutdown_started", |_| true, SOON);
    assert_eq!(started["in_progress"], 1);
    echoes(&mut client, "during");
    assert_eq!(proxy.wait_exit(SOON), 0);
    let took = began.elapsed();
    assert!(took > Duration::from_millis(900) && took < SOON, "{took:?}");
    assert_eq!(client.wire.read_to_end().expect("an end in order"), b"");
    eventually(SOON, || origin.open() == 0);
    let told = |e: &Value| e["tunnels_closed"] == 1 && e["cut"] == 0;
    proxy.wait_for_event("shutdown_complete", told, SOON);
    let line = proxy.logged_path("/t");
    assert_eq!((&line["status"], &line["reason"]), (&101.into(), &"draining".into()));
}

#[test]
fn a_tunnel_that_the_grace_has_cut_is_logged_with_what_it_moved() {
    let origin = Origin::start(echo);
    let mut proxy = over(&[&origin]).top("drain: { timeout: 300ms }").start();
    let mut client = open(&proxy);
    echoes(&mut client, "before");
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    let line = proxy.logged_path("/t");
    assert_eq!((&line["status"], &line["reason"]), (&101.into(), &"draining".into()), "{line}");
    assert_eq!((&line["bytes_in"], &line["bytes_out"]), (&6.into(), &6.into()), "{line}");
}

#[test]
fn a_tunnel_that_ends_within_the_grace_ends_the_process() {
    let origin = Origin::start(echo);
    let mut proxy = over(&[&origin]).start();
    let mut client = open(&proxy);
    let mut late = proxy.client();
    assert_eq!(late.get("/").status(), 200);
    proxy.signal(Signal::TERM);
    proxy.wait_for_event("shutdown_started", |_| true, SOON);
    echoes(&mut client, "during");
    drop(client);
    assert_eq!(proxy.wait_exit(SOON), 0);
    proxy.wait_for_event("shutdown_complete", |e| e["cut"] == 0, SOON);
    assert_eq!(proxy.logged_path("/t")["bytes_in"], 6);
    assert!(late.send(OFFER).is_closed_within(SOON));
}
