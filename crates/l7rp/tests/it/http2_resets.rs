//! Rapid reset and its relatives (CVE-2023-44487, CVE-2025-8671): streams that are begun only to
//! be thrown away, by the client or, because the client provokes it, by the proxy.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use h2::Reason;
use l7rp_testkit::{Call, Gate, Origin, Proxy, SOON, Then, eventually, let_pass, reply};

use crate::bystander::{beside, beside_honest, p99};
use crate::http2_tools::{
    Conn, GET, Raw, code, frame, get_frame, kind, request, section, wait, whole,
};
use crate::setup::{assert_counts, in_flight, over};
use crate::tries::NEVER_OPENS;
use crate::verdict::{TOUCHY, nothing_is_left};

/// Streams of one connection at once.
const AT_ONCE: usize = 100;
/// Streams of a client that are reset because of what it has sent, at most.
const PROVOKED: usize = 100;
/// Streams after which a client that does nothing but reset is sent away, at the latest.
const SOON_ENOUGH: u32 = 1000;
const MOST_MEMORY: u64 = 32 << 20;
const PRIORITY: u8 = 2;

/// How many requests are in an upstream's hands, and how many were at most.
#[derive(Clone, Default)]
struct Hands(Arc<[AtomicUsize; 2]>);

impl Hands {
    fn take(&self) {
        let now = self.0[0].fetch_add(1, SeqCst) + 1;
        self.0[1].fetch_max(now, SeqCst);
    }

    fn give_back(&self) {
        self.0[0].fetch_sub(1, SeqCst);
    }

    fn most(&self) -> usize {
        self.0[1].load(SeqCst)
    }
}

/// An upstream that answers `/honest` with "x", and holds everything else until nobody waits for
/// it any more; a proxy in front of it whose breaker opens at one failure.
fn holding() -> (Origin, Hands, Proxy) {
    let hands = Hands::default();
    let held = hands.clone();
    let origin = Origin::start(move |call: &mut Call<'_>| {
        if call.request.target() == "/honest" {
            return reply::name("x")(call);
        }
        held.take();
        call.until_gone();
        held.give_back();
        Then::Close
    });
    let proxy = over(&[&origin]).pool(TOUCHY).start();
    assert_eq!(Conn::open(&proxy).get("/honest").text(), "x");
    (origin, hands, proxy)
}

/// Requests other than those of honest clients that have come to the upstream.
fn reached(origin: &Origin) -> usize {
    origin.seen().iter().filter(|seen| seen.message.target() != "/honest").count()
}

fn reset(stream: u32) -> Vec<u8> {
    frame(kind::RST_STREAM, 0, stream, &code::CANCEL.to_be_bytes())
}

/// Waits until the connection has ended; the last GOAWAY with an error that could be read.
#[track_caller]
fn sent_away(raw: &mut Raw) -> Option<u32> {
    let (mut said, since) = (None, Instant::now());
    while let Some(next) = raw.next() {
        if next.kind == kind::GOAWAY && next.code() != code::NO_ERROR {
            said = Some(next.code());
        }
    }
    // Sooner than a reader runs out of patience.
    assert!(since.elapsed() < SOON / 2, "{:?}", since.elapsed());
    said
}

/// Row D1. Not one more is sent than the proxy may need to notice: it must have by then.
#[test]
fn d1_who_resets_everything_is_sent_away_within_a_thousand_streams() {
    let (origin, hands, proxy) = holding();
    let memory = proxy.resident();
    beside_honest(&proxy, || {
        let mut raw = Raw::open(&proxy, b"");
        let streams = (0..SOON_ENOUGH).map(|n| 1 + 2 * n);
        let all: Vec<u8> =
            streams.flat_map(|stream| [get_frame(stream), reset(stream)].concat()).collect();
        // It may be gone before all is sent.
        raw.write(all);
        let said = sent_away(&mut raw);
        assert!(said.is_none_or(|said| said == code::ENHANCE_YOUR_CALM), "{said:?}");
        assert_counts(&proxy, "proxy_http2_floods_total", &[], 1.0);
    });
    let reached = reached(&origin);
    assert!(reached <= 2 * AT_ONCE, "{reached} have reached the upstream");
    assert!(hands.most() <= AT_ONCE, "{} at once", hands.most());
    let grown = proxy.resident().saturating_sub(memory);
    assert!(grown < MOST_MEMORY, "grown by {grown}");
    nothing_is_left(&proxy, &origin);
}

/// Row D1, by a client that waits until each request has cost something: more than 100 resets
/// that are more than half of its streams.
#[test]
fn d1_who_resets_what_has_reached_the_upstream_costs_no_more_than_it_may() {
    let (origin, hands, proxy) = holding();
    beside_honest(&proxy, || {
        let mut raw = Raw::open(&proxy, b"");
        for n in 0..300 {
            let before = reached(&origin);
            let stream = 1 + 2 * n;
            if !raw.write(get_frame(stream)) {
                break;
            }
            // Where the connection has ended, nothing comes any more.
            l7rp_testkit::within(Duration::from_secs(1), || {
                (reached(&origin) > before).then_some(())
            });
            raw.write(reset(stream));
            eventually(SOON, || in_flight(&proxy) <= 1.0);
        }
    });
    assert!(hands.most() <= 2, "{} at once", hands.most());
    nothing_is_left(&proxy, &origin);
}

/// Case `h2-rapid-reset`, for a shorter time.
#[test]
fn h2_rapid_reset_does_not_hurt_who_cancels_much() {
    const ROUNDS: usize = 20;
    let hands = Hands::default();
    let held = hands.clone();
    let origin = Origin::start(move |call: &mut Call<'_>| {
        held.take();
        let_pass(Duration::from_millis(200));
        held.give_back();
        reply::name("x")(call)
    });
    let proxy = over(&[&origin]).pool(NEVER_OPENS).start();
    assert_eq!(Conn::open(&proxy).get("/honest").text(), "x");
    let memory = proxy.resident();
    let attack = || {
        let mut raw = Raw::open(&proxy, b"");
        // Ends with the connection.
        for n in 0..20_000 {
            let pairs: Vec<u8> = (10 * n..10 * (n + 1))
                .flat_map(|n| [get_frame(1 + 2 * n), reset(1 + 2 * n)].concat())
                .collect();
            if !raw.write(pairs) {
                return;
            }
        }
        panic!("two hundred thousand resets were taken");
    };
    let picky = || {
        let conn = Conn::open(&proxy);
        for _ in 0..ROUNDS {
            let kept: Vec<_> =
                (0..40).map(|_| conn.begin(request("GET", "/honest"), true).0).collect();
            for _ in 0..60 {
                conn.begin(request("GET", "/honest"), true).1.send_reset(Reason::CANCEL);
            }
            for response in kept {
                assert_eq!(wait(whole(response)).expect("an answer").text(), "x");
            }
        }
        assert_eq!(conn.get("/honest").text(), "x");
    };
    let mut client = proxy.client();
    let plain = || assert_eq!(client.get("/honest").text(), "x");
    let ((), mut times) = beside(plain, || {
        thread::scope(|scope| {
            scope.spawn(attack);
            scope.spawn(picky);
        });
    });
    assert!(p99(&mut times) < Duration::from_secs(1), "{:?}", p99(&mut times));
    assert_counts(&proxy, "proxy_http2_floods_total", &[], 1.0);
    // Each of the three as many as it may have at once.
    assert!(hands.most() <= 2 * AT_ONCE + 1, "{} at once", hands.most());
    let most = 2000 + ROUNDS * 100 + 2 + times.len();
    assert!(origin.requests() < most, "{} of {most}", origin.requests());
    eventually(SOON, || in_flight(&proxy) == 0.0);
    assert!(proxy.resident() < memory + MOST_MEMORY);
}

/// How many streams of which each makes the proxy say no it takes until that ends the connection.
/// `spoils`: what follows a request that has been let in, or what is sent instead of one.
fn until_sent_away(proxy: &Proxy, stream_of: impl Fn(u32) -> Vec<u8>) -> usize {
    let mut raw = Raw::open(proxy, b"");
    for n in 0..4 * SOON_ENOUGH {
        let stream = 1 + 2 * n;
        if !raw.write(stream_of(stream)) {
            return n as usize;
        }
        let end = raw.find(|f| {
            f.kind == kind::GOAWAY
                || f.stream == stream && (f.kind == kind::RST_STREAM || f.kind == kind::HEADERS)
        });
        match end {
            Some(end) if end.kind == kind::RST_STREAM => {}
            Some(end) if end.kind == kind::HEADERS => panic!("it is answered: {end:?}"),
            _ => return n as usize,
        }
    }
    usize::MAX
}

/// Row D2.
#[test]
fn d2_heads_that_make_us_reset_are_counted_as_resets() {
    let fields = [&GET[..2], &[(":path", "")], &GET[3..]].concat();
    let bad = |stream| frame(kind::HEADERS, 5, stream, &section(&fields));
    let (origin, _, proxy) = holding();
    let taken = beside_honest(&proxy, || until_sent_away(&proxy, bad));
    assert!(taken <= PROVOKED, "{taken} were taken");
    assert_counts(&proxy, "proxy_http2_floods_total", &[], 1.0);
    assert_eq!(reached(&origin), 0);
    nothing_is_left(&proxy, &origin);
}

/// Row D3. Each request is let in; then comes a frame that forces the proxy to reset its stream.
#[track_caller]
fn d3_made(spoil: impl Fn(u32) -> Vec<u8>) {
    let (origin, hands, proxy) = holding();
    let taken = beside_honest(&proxy, || {
        until_sent_away(&proxy, |stream| [get_frame(stream), spoil(stream)].concat())
    });
    // No stream is free again before the upstream has been told.
    assert!(hands.most() <= AT_ONCE, "{} at once", hands.most());
    assert!(reached(&origin) <= taken + 1, "{} of {taken}", reached(&origin));
    nothing_is_left(&proxy, &origin);
    assert!(taken <= PROVOKED, "{taken} were taken");
}

fn window_update(stream: u32, by: u32) -> Vec<u8> {
    frame(kind::WINDOW_UPDATE, 0, stream, &by.to_be_bytes())
}

#[test]
fn d3_made_you_reset_by_a_window_that_does_not_grow() {
    d3_made(|stream| window_update(stream, 0));
}

#[test]
fn d3_made_you_reset_by_a_window_that_is_too_large() {
    d3_made(|stream| window_update(stream, u32::MAX >> 1));
}

#[test]
fn d3_made_you_reset_by_a_priority_of_the_wrong_length() {
    d3_made(|stream| frame(PRIORITY, 0, stream, &[0, 0, 0, 0]));
}

#[test]
fn d3_made_you_reset_by_a_priority_below_itself() {
    d3_made(|stream| frame(PRIORITY, 0, stream, &[&stream.to_be_bytes()[..], &[16]].concat()));
}

#[test]
fn d3_made_you_reset_by_data_after_the_end() {
    d3_made(|stream| frame(kind::DATA, 0, stream, b"more"));
}

#[test]
fn d3_made_you_reset_by_a_head_after_the_end() {
    d3_made(|stream| frame(kind::HEADERS, 5, stream, &section(&[("x", "y")])));
}

/// Row D14. All of it comes in one flight, before the client can know the limit.
#[test]
fn d14_streams_over_the_limit_of_a_first_flight_are_refused() {
    const STREAMS: usize = 1000;
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| {
        if call.request.target() != "/honest" {
            held.pass();
        }
        reply::name("x")(call)
    });
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    let mut flight = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    flight.extend(frame(kind::SETTINGS, 0, 0, b""));
    (0..STREAMS as u32).for_each(|n| flight.extend(get_frame(1 + 2 * n)));
    let mut raw = Raw {
        wire: {
            client.send(flight);
            client.wire
        },
    };
    beside_honest(&proxy, || {
        for _ in AT_ONCE..STREAMS {
            let end = raw.find(|f| f.kind == kind::RST_STREAM || f.kind == kind::GOAWAY);
            let end = end.expect("it is refused");
            assert_eq!((end.kind, end.code()), (kind::RST_STREAM, code::REFUSED_STREAM));
        }
        eventually(SOON, || reached(&origin) == AT_ONCE);
    });
    gate.open();
    for _ in 0..AT_ONCE {
        let end = raw.find(|f| f.kind == kind::HEADERS).expect("an answer");
        assert_eq!(end.payload[0], 0x88);
    }
    assert_eq!(reached(&origin), AT_ONCE);
    // It was no attack: who knows the limit now is served.
    raw.write(get_frame(1 + 2 * STREAMS as u32));
    assert!(raw.end_of(1 + 2 * STREAMS as u32).ends());
    assert_counts(&proxy, "proxy_http2_floods_total", &[], 0.0);
    eventually(SOON, || in_flight(&proxy) == 0.0);
}
