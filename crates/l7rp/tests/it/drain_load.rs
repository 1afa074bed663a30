//! A drain under load loses nothing: what was sent on a connection that the proxy had taken is
//! answered whole, and what it does not want to answer is refused or closed before it is sent.

use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Client, Gate, Origin, Proxy, SOON, Signal, eventually, let_pass, reply};

use crate::load::{self, Load, Target};
use crate::setup::{get, over, start};
use crate::upgrade::is_stopped;

/// So many clients keep their connections, and so many connect for each request.
const KEPT: usize = 6;
const NEW: usize = 6;

/// Drains `proxy` while clients ask at `target`.
fn drains_under_load(proxy: &mut Proxy, target: &Target) {
    let load = Load::start(target, KEPT, NEW);
    load.goes_on(150);
    load.expect_refusal();
    proxy.signal(Signal::TERM);
    let sum = load.refused();
    assert_eq!(sum.refused, KEPT + NEW);
    // A busy client is told; it does not find its connection closed.
    assert!(sum.last >= KEPT, "{sum:?}");
    assert_eq!(proxy.wait_exit(SOON), 0);
    let complete = proxy.wait_for_event("shutdown_complete", |_| true, SOON);
    assert_eq!((&complete["cut"], &complete["tunnels_closed"]), (&0.into(), &0.into()));
    let lines = proxy.events("request_completed");
    assert_eq!(lines.len(), sum.answered, "each request has its line");
    assert!(lines.iter().all(|line| line["status"] == 200 && line["reason"].is_null()));
}

#[test]
fn nothing_is_lost_with_any_number_of_workers() {
    let origin = Origin::start(load::answer);
    for workers in [1, 2, 4, 2, 4] {
        let mut proxy = over(&[&origin]).top(&format!("workers: {workers}")).start();
        let target = Target::Tcp(proxy.address());
        drains_under_load(&mut proxy, &target);
    }
}

#[test]
fn nothing_is_lost_after_a_delay() {
    let origin = Origin::start(load::answer);
    let mut proxy = over(&[&origin]).top("workers: 2\ndrain: { delay: 300ms }").start();
    let target = Target::Tcp(proxy.address());
    drains_under_load(&mut proxy, &target);
}

#[test]
fn nothing_is_lost_at_a_unix_domain_socket() {
    let origin = Origin::start(load::answer);
    for workers in [1, 2, 2] {
        let yaml = over(&[&origin]).top(&format!("workers: {workers}")).yaml();
        let mut proxy = start(&yaml.replace("127.0.0.1:0", "unix:{dir}/web.sock"));
        let path = proxy.directory().join("web.sock");
        drains_under_load(&mut proxy, &Target::Unix(path.clone()));
        assert!(!path.exists(), "the socket's file is left");
    }
}

/// Runs `meanwhile` while the process is stopped, so that what it does finds it asleep.
fn asleep(proxy: &Proxy, meanwhile: impl FnOnce()) {
    proxy.signal(Signal::STOP);
    eventually(SOON, || is_stopped(proxy));
    meanwhile();
    proxy.signal(Signal::CONT);
}

/// Connections that nobody has accepted when the drain begins: some have sent a request, others
/// send it when no further connection is to be had.
fn serves_its_queue(proxy: &mut Proxy, target: &Target) {
    const EACH: usize = 60;
    let connect = || (0..EACH).map(|_| target.connect().expect("there is room in the queue"));
    let (mut early, mut late) = (Vec::new(), Vec::new());
    asleep(proxy, || {
        early.extend(connect());
        late.extend(connect());
        for client in &mut early {
            client.send(get("a.test", "/early", ""));
        }
        proxy.signal(Signal::TERM);
    });
    eventually(SOON, || target.connect().is_err());
    for client in &mut late {
        client.send(get("a.test", "/late", ""));
    }
    for client in early.iter_mut().chain(&mut late) {
        assert_eq!(client.response().text(), "x");
        // An early one may have had its answer before the signal was looked at.
        assert!(client.is_closed_within(SOON), "it ends in order");
    }
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert_eq!(proxy.events("request_completed").len(), 2 * EACH);
}

#[test]
fn connections_that_wait_to_be_accepted_are_served() {
    let origin = Origin::start(reply::name("x"));
    for workers in [1, 2] {
        let mut proxy = over(&[&origin]).top(&format!("workers: {workers}")).start();
        let target = Target::Tcp(proxy.address());
        serves_its_queue(&mut proxy, &target);
    }
}

#[test]
fn connections_that_wait_at_a_unix_domain_socket_are_served() {
    let origin = Origin::start(reply::name("x"));
    let yaml = over(&[&origin]).yaml().replace("127.0.0.1:0", "unix:{dir}/web.sock");
    let mut proxy = start(&yaml);
    let target = Target::Unix(proxy.directory().join("web.sock"));
    serves_its_queue(&mut proxy, &target);
}

#[test]
fn two_hundred_requests_in_progress_are_answered() {
    const MANY: usize = 200;
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let mut proxy = over(&[&origin]).start();
    let mut clients: Vec<Client> = (0..MANY).map(|_| proxy.client()).collect();
    for client in &mut clients {
        client.send(get("a.test", "/", ""));
    }
    eventually(SOON, || origin.requests() == MANY);
    proxy.signal(Signal::TERM);
    let started = proxy.wait_for_event("shutdown_started", |_| true, SOON);
    assert_eq!((&started["in_progress"], &started["connections"]), (&MANY.into(), &MANY.into()));
    eventually(SOON, || Target::Tcp(proxy.address()).connect().is_err());
    gate.open();
    for mut client in clients {
        let answer = client.response();
        assert_eq!((answer.text().as_str(), answer.get("connection")), ("late", Some("close")));
        assert!(client.is_closed_within(SOON));
    }
    assert_eq!(proxy.wait_exit(SOON), 0);
    proxy.wait_for_event("shutdown_complete", |e| e["cut"] == 0, SOON);
}

#[test]
fn a_client_that_asks_now_and_then_is_told_or_closed_before() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = over(&[&origin]).start();
    let mut idle = proxy.client();
    let mut busy = proxy.client();
    assert_eq!((idle.get("/").status(), busy.get("/").status()), (200, 200));
    proxy.signal(Signal::TERM);
    // It may have some more answers before the signal is looked at.
    eventually(SOON, || {
        let answer = busy.get("/");
        assert_eq!(answer.text(), "x");
        answer.get("connection") == Some("close")
    });
    // Both end in order, whether or not there was a last answer to say so.
    for client in [&mut idle, &mut busy] {
        assert!(client.is_closed_within(SOON));
    }
    assert_eq!(proxy.wait_exit(SOON), 0);
}

#[test]
fn slow_messages_both_ways_are_finished() {
    const PIECES: usize = 12;
    let origin = Origin::start(|call| {
        if call.request.target() == "/down" {
            call.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {PIECES}\r\n\r\n"));
            for _ in 0..PIECES {
                let_pass(Duration::from_millis(100));
                call.send("x");
            }
        }
        reply::echo(call)
    });
    let mut proxy = over(&[&origin]).start();
    let framings = [format!("Content-Length: {PIECES}"), "Transfer-Encoding: chunked".to_owned()];
    let uploads: Vec<_> = framings
        .iter()
        .map(|framing| {
            let mut client = proxy.client();
            client.send(format!("POST /up HTTP/1.1\r\nHost: a.test\r\n{framing}\r\n\r\n"));
            (client, framing.ends_with("chunked"))
        })
        .collect();
    let mut down = proxy.client();
    down.send(get("a.test", "/down", ""));
    eventually(SOON, || origin.requests() == 3);
    proxy.signal(Signal::TERM);
    let uploads: Vec<_> = uploads
        .into_iter()
        .map(|(client, is_chunked)| thread::spawn(move || upload(client, PIECES, is_chunked)))
        .collect();
    assert_eq!(down.response().text(), "x".repeat(PIECES));
    for upload in uploads {
        upload.join().expect("the upload is taken and answered");
    }
    assert_eq!(proxy.wait_exit(SOON), 0);
    proxy.wait_for_event("shutdown_complete", |e| e["cut"] == 0, SOON);
}

/// Sends so many pieces, slowly, and reads what comes of it.
fn upload(mut client: Client, pieces: usize, is_chunked: bool) {
    for _ in 0..pieces {
        let_pass(Duration::from_millis(100));
        client.send(if is_chunked { "1\r\nu\r\n" } else { "u" });
    }
    if is_chunked {
        client.send("0\r\n\r\n");
    }
    let answer = client.response();
    assert_eq!(answer.status(), 200);
    assert!(answer.text().ends_with(&"u".repeat(pieces)), "{answer:?}");
    assert_eq!(answer.get("connection"), Some("close"));
}

/// What became of a request that was sent about when its connection is closed.
#[derive(Debug, PartialEq, Eq)]
enum Late {
    Answered,
    /// The end came instead of an answer.
    Closed,
    /// It was sent so late that its client must have seen the end.
    SeenBefore,
}

/// Sends without looking, as a client does whose request is on its way when the end comes.
fn ask_late(client: &mut Client, began: Instant) -> Late {
    let sent = client.wire.write(get("a.test", "/", "").as_bytes());
    if began.elapsed() > Duration::from_millis(700) {
        return Late::SeenBefore;
    }
    match sent.and_then(|()| client.wire.read_head()) {
        Ok(Some(head)) if head.status() == 200 => Late::Answered,
        Ok(None) => Late::Closed,
        other => panic!("neither an answer nor an end in order: {other:?}"),
    }
}

#[test]
fn a_request_that_crosses_the_end_of_its_connection_is_not_reset() {
    const MANY: u32 = 400;
    let origin = Origin::start(reply::name("x"));
    let mut proxy = over(&[&origin]).start();
    let mut kept: Vec<Client> = (0..MANY).map(|_| proxy.client()).collect();
    for client in &mut kept {
        assert_eq!(client.get("/").status(), 200);
    }
    let began = Instant::now();
    proxy.signal(Signal::TERM);
    proxy.wait_for_event("shutdown_started", |_| true, SOON);
    // Idle ones are closed half a second after the beginning, and listened to a little longer.
    let (early, late) = kept.split_at_mut(20);
    let early: Vec<_> = early.iter_mut().map(|client| ask_late(client, began)).collect();
    let_pass(Duration::from_millis(480).saturating_sub(began.elapsed()));
    let late: Vec<_> = late.iter_mut().map(|client| ask_late(client, began)).collect();
    // However slow this machine is just now: who asks early is answered.
    assert!(early.iter().all(|late| *late != Late::Closed), "{early:?}");
    assert!(late.contains(&Late::Closed) || late.contains(&Late::SeenBefore), "none was closed");
    drop(kept);
    assert_eq!(proxy.wait_exit(SOON), 0);
}

/// Whether the process was stopped in time, before it closed idle connections: then requests have
/// come before the end, and are answered.
fn requests_come_just_before_the_end(origin: &Origin) -> bool {
    let mut proxy = over(&[origin]).start();
    let mut kept: Vec<Client> = (0..100).map(|_| proxy.client()).collect();
    for client in &mut kept {
        assert_eq!(client.get("/").status(), 200);
    }
    let began = Instant::now();
    proxy.signal(Signal::TERM);
    proxy.wait_for_event("shutdown_started", |_| true, SOON);
    let_pass(Duration::from_millis(200));
    let mut in_time = false;
    asleep(&proxy, || {
        in_time = began.elapsed() < Duration::from_millis(450);
        // The time to close them comes while nobody is there to do it.
        let_pass(Duration::from_millis(600).saturating_sub(began.elapsed()));
        for client in &mut kept {
            client.send(get("a.test", "/", ""));
        }
    });
    if !in_time {
        return false;
    }
    for client in &mut kept {
        let answer = client.response();
        assert_eq!((answer.text().as_str(), answer.get("connection")), ("x", Some("close")));
        assert!(client.is_closed_within(SOON));
    }
    assert_eq!(proxy.wait_exit(SOON), 0);
    true
}

#[test]
fn a_request_that_comes_before_the_end_is_answered_however_late_it_is_read() {
    let origin = Origin::start(reply::name("x"));
    // A machine that is very busy may need more than one try.
    assert!((0..5).any(|_| requests_come_just_before_the_end(&origin)));
}
