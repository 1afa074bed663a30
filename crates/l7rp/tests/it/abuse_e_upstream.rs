//! Upstreams of HTTP/2 that are slow, few-handed, or on their way out.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Client, let_pass};

use crate::http2_tools::{
    Conn, Frame, H2Origin, Raw, code, flag, frame, kind, raw_origin, say, taken, to,
};
use crate::setup::{get, over, post, quiet};
use crate::tls_kit::{Ca, upstream};
use crate::tls_upstream::trusting;
use crate::tries::PLENTY;
use crate::upgrade::{OFFER, echo, echoes};

fn ok(stream: u32) -> Vec<u8> {
    frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, stream, &[0x88])
}

/// The next frame as it is: nothing is answered.
fn bare(raw: &mut Raw) -> Option<Frame> {
    let head = raw.wire.read_exact(9).ok()?;
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
    let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
    let payload = raw.wire.read_exact(length).ok()?;
    Some(Frame { kind: head[3], flags: head[4], stream, payload })
}

/// An upstream that answers each PING after `pong`, and each request after `answer`; how many
/// connections it was offered.
fn slow(settings: &'static [u8], pong: Duration, answer: Duration) -> (String, Arc<AtomicUsize>) {
    let accepted = Arc::new(AtomicUsize::new(0));
    let counted = accepted.clone();
    let url = raw_origin(settings, move |mut raw, _| {
        counted.fetch_add(1, SeqCst);
        raw.wire.patience(Some(Duration::from_mins(1)));
        let twin = Arc::new(Mutex::new(Raw { wire: raw.wire.twin() }));
        let later = |time: Duration, octets: Vec<u8>| {
            let twin = twin.clone();
            thread::spawn(move || {
                let_pass(time);
                twin.lock().unwrap_or_else(PoisonError::into_inner).write(octets);
            });
        };
        while let Some(next) = bare(&mut raw) {
            let acknowledges = next.flags & flag::ACK != 0;
            match next.kind {
                kind::SETTINGS if !acknowledges => {
                    later(Duration::ZERO, frame(kind::SETTINGS, flag::ACK, 0, b""));
                }
                kind::PING if !acknowledges => {
                    later(pong, frame(kind::PING, flag::ACK, 0, &next.payload));
                }
                _ if next.ends() => later(answer, ok(next.stream)),
                _ => {}
            }
        }
    });
    (url, accepted)
}

/// A first PONG that takes more than a second (a cold or busy upstream, a long way) does not cut
/// what is in progress 11 s after the connection was opened.
#[test]
fn an_upstream_whose_first_pong_is_late_loses_no_request() {
    let (url, _) = slow(b"", Duration::from_millis(1500), Duration::from_secs(14));
    let proxy = to(&[&url]).pool(PLENTY).one_worker().start();
    let began = Instant::now();
    let mut client = proxy.client();
    client.wire.patience(Some(Duration::from_secs(25)));
    let answer = client.ask(post("/late", "body"));
    let line = proxy.logged_path("/late");
    assert_eq!(answer.status(), 200, "after {:?}: {line}", began.elapsed());
}

/// As before, with a first PONG in time: what the test above differs in.
#[test]
fn an_upstream_whose_pongs_are_in_time_loses_no_request() {
    let (url, _) = slow(b"", Duration::from_millis(500), Duration::from_secs(14));
    let proxy = to(&[&url]).pool(PLENTY).one_worker().start();
    let mut client = proxy.client();
    client.wire.patience(Some(Duration::from_secs(25)));
    assert_eq!(client.ask(post("/late", "body")).status(), 200);
}

/// Many at once and an upstream that takes one request at a time on a connection: whoever waits for
/// somebody else's connection, of which nothing is left for him, is not told that the upstream
/// cannot be connected to, and nor is its breaker. Each connection is there within 300 ms.
#[test]
fn whoever_waits_for_connections_that_others_take_is_not_turned_away() {
    const ONE: &[u8] = &[0, 3, 0, 0, 0, 1];
    const MANY: usize = 30;
    let (url, accepted) = slow(ONE, Duration::from_millis(300), Duration::from_secs(3));
    let proxy = over(&[])
        .upstream(&url, "weight: 1")
        .pool("protocol: http2, connect_timeout: 2s")
        .one_worker()
        .start();
    let statuses = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for n in 0..MANY {
            let (proxy, statuses) = (&proxy, &statuses);
            scope.spawn(move || {
                let mut client = proxy.client();
                client.wire.patience(Some(Duration::from_secs(30)));
                let answer = client.get(&format!("/{n}"));
                let why = answer.get("proxy-status").unwrap_or_default().to_owned();
                let of = statuses.lock();
                of.unwrap_or_else(PoisonError::into_inner).push((answer.status(), why));
            });
        }
    });
    let statuses = statuses.into_inner().unwrap_or_else(PoisonError::into_inner);
    let failed: Vec<_> = statuses.iter().filter(|(status, _)| *status != 200).collect();
    let open = proxy.metrics().sum("proxy_circuit_breaker_state", &[]);
    assert!(
        failed.is_empty(),
        "{} of {MANY} have failed on {} connections; breaker {open}: {:?}",
        failed.len(),
        accepted.load(SeqCst),
        failed.first()
    );
}

/// "multiplexed with a small number of connections per worker": also when an upstream sends a
/// connection's requests away, as each does that is restarted.
#[test]
fn what_is_sent_away_shares_a_new_connection() {
    const MANY: usize = 60;
    let accepted = Arc::new(AtomicUsize::new(0));
    let counted = accepted.clone();
    let url = raw_origin(b"", move |mut raw, number| {
        counted.fetch_add(1, SeqCst);
        let mut held = 0;
        while let Some((stream, _)) = taken(&mut raw) {
            if number > 0 {
                raw.write(ok(stream));
                continue;
            }
            held += 1;
            if held == MANY {
                // None of them was begun.
                raw.write(frame(kind::GOAWAY, 0, 0, &[0; 8]));
            }
        }
    });
    let proxy = to(&[&url]).one_worker().start();
    thread::scope(|scope| {
        for n in 0..MANY {
            let proxy = &proxy;
            scope.spawn(move || assert_eq!(proxy.get(&format!("/{n}")).status(), 200));
        }
    });
    quiet(&proxy);
    let new = accepted.load(SeqCst) - 1;
    assert!(new <= 4, "{new} new connections for {MANY} requests, of which one carries 100");
}

/// Row D17: what is above the last id of a GOAWAY was not processed, whatever its code.
#[test]
fn d17_the_code_of_a_goaway_does_not_matter() {
    let mut statuses = Vec::new();
    for reason in [code::NO_ERROR, code::ENHANCE_YOUR_CALM, 2] {
        let url = raw_origin(b"", move |mut raw, _| {
            let Some((first, _)) = taken(&mut raw) else { return };
            raw.write(ok(first));
            let Some(_) = taken(&mut raw) else { return };
            let payload = [first.to_be_bytes(), reason.to_be_bytes()].concat();
            raw.write(frame(kind::GOAWAY, 0, 0, &payload));
            while raw.next().is_some() {}
        });
        let proxy = to(&[&url]).one_worker().start();
        let mut client = proxy.client();
        assert_eq!(client.ask(post("/1", "body")).status(), 200);
        statuses.push((reason, client.ask(post("/2", "body")).status()));
    }
    assert!(statuses.iter().all(|(_, status)| *status == 200), "{statuses:?}");
}

/// WebSocket to `https://`, `protocol: auto`: an upstream that speaks both is asked for an upgrade
/// in the one that has it.
#[test]
fn an_upgrade_goes_to_an_upstream_that_speaks_both_by_http1() {
    let ca = Ca::new("ca");
    let pair = ca.issue("up", &["127.0.0.1"]);
    // It prefers HTTP/2, as most do, and what it serves is HTTP/1.1: the upgrade must get there.
    let origin = upstream(ca.server(&pair, false, &["h2", "http/1.1"]), echo);
    let proxy = over(&[&origin]).pool(&trusting(&ca, "")).start();
    let mut client = proxy.client();
    let head = client.send(OFFER).head();
    let seen: Vec<_> = origin.seen().iter().map(|s| s.message.start.clone()).collect();
    assert_eq!(head.status(), 101, "{head:?}; the upstream read {seen:?}");
    echoes(&mut client, "hello");
}

/// Held: a client that opens the connection for others and leaves does not take them along.
#[test]
fn an_opener_that_leaves_takes_nobody_along() {
    let (url, _) = slow(b"", Duration::from_millis(600), Duration::from_millis(50));
    let proxy = to(&[&url]).one_worker().start();
    let mut first: Client = proxy.client();
    first.send(get("a.test", "/first", ""));
    let_pass(Duration::from_millis(100));
    thread::scope(|scope| {
        for n in 0..10 {
            let proxy = &proxy;
            scope.spawn(move || assert_eq!(proxy.get(&format!("/{n}")).status(), 200));
        }
        let_pass(Duration::from_millis(100));
        first.reset();
    });
    let conn = Conn::open(&proxy);
    assert_eq!(conn.get("/").status, 200);
    quiet(&proxy);
}

/// What an HTTP/1.1 client may say and HTTP/2 cannot is the client's doing: nobody takes an upstream
/// out by it.
#[test]
fn a_target_that_http2_cannot_have_is_not_held_against_the_upstream() {
    let origin = H2Origin::start(|mut incoming| async move { say(&mut incoming.respond, "x") });
    let proxy = over(&[])
        .upstream(&origin.url(), "weight: 1")
        .pool("protocol: http2, circuit_breaker: { min_observations: 20, open_min: 60s }")
        .one_worker()
        .start();
    let mut seen = Vec::new();
    let hosts = ["a.test", "a%2e.test", "a'b.test", "a_b.test", "a!b.test", "a;b.test"];
    let targets =
        ["/a|b", "/?q=\"a\"", "/<b>", "/a`b", "/a^b", "/a{b}", "/?q=<b>", "/a\\b", "/%zz"];
    let asked = targets.iter().map(|target| ("a.test", *target));
    for (host, target) in asked.chain(hosts.map(|host| (host, "/"))) {
        let answer = proxy.client().ask(get(host, target, ""));
        seen.push((host, target, answer.status()));
    }
    let blamed: Vec<_> = seen.iter().filter(|(_, _, status)| *status >= 500).collect();
    // One of these, again and again.
    if let Some((host, target, _)) = blamed.first() {
        for _ in 0..40 {
            let _ = proxy.client().ask(get(host, target, ""));
        }
    }
    let after = proxy.get("/").status();
    assert_eq!((after, blamed.len()), (200, 0), "{blamed:?}");
}

/// An upload for which the upstream has no window is given up with its exchange: the upstream is told,
/// and the stream's place is free. `leave`: how the exchange ends.
#[track_caller]
fn a_stuck_upload_is_cancelled(pool: &str, leave: impl FnOnce(Client)) {
    let ends = Arc::new(Mutex::new(Vec::new()));
    let told = ends.clone();
    let url = raw_origin(b"", move |mut raw, _| {
        raw.wire.patience(Some(Duration::from_secs(30)));
        while let Some(next) = raw.next() {
            if next.kind == kind::RST_STREAM {
                told.lock().unwrap_or_else(PoisonError::into_inner).push(next.code());
            }
        }
    });
    let proxy = to(&[&url]).pool(pool).one_worker().start();
    let mut client = proxy.client();
    client.send(post("/stuck", &"b".repeat(200 << 10)).get(..150 << 10).expect("a part"));
    let_pass(Duration::from_millis(300));
    leave(client);
    let is_told = l7rp_testkit::within(Duration::from_secs(3), || {
        let ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
        (!ends.is_empty()).then_some(())
    });
    let lines = proxy.events("request_completed");
    assert!(
        is_told.is_some(),
        "nobody wants it any more, and the upstream is not told: {lines:#?}"
    );
}

#[test]
fn an_upload_without_a_window_is_cancelled_when_its_client_leaves() {
    a_stuck_upload_is_cancelled("response_header_timeout: 20s", Client::reset);
}

#[test]
fn an_upload_without_a_window_is_cancelled_when_its_time_is_over() {
    a_stuck_upload_is_cancelled("response_header_timeout: 500ms", |mut client| {
        assert!(matches!(client.response().status(), 502 | 504));
    });
}
