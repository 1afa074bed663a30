//! Clients that cost much by HTTP/2 and pay little are sent away; others do not notice.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use h2::Reason;
use l7rp_testkit::{Gate, Origin, Proxy, SOON, Then, eventually, reply, within};

use crate::http2_tools::{
    Conn, GET, Raw, code, flag, frame, get_frame, kind, request, section, wait, whole,
};
use crate::setup::{assert_counts, in_flight, over, quiet};

const MIB: u64 = 1 << 20;
const MOST_MEMORY: u64 = 32 * MIB;

/// An upstream with the answer "x" and a proxy in front of it, which has served before.
fn served() -> (Origin, Proxy) {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[]).upstream(&origin.url(), "max_in_flight: 64").start();
    assert_eq!(Conn::open(&proxy).get("/").text(), "x");
    (origin, proxy)
}

/// Does this while a client on a connection of its own asks all the time, and is served.
fn beside_others<T>(proxy: &Proxy, abuse: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let (conn, mut slowest, mut count) = (Conn::open(proxy), Duration::ZERO, 0);
            while !over.load(SeqCst) || count < 10 {
                let began = Instant::now();
                assert_eq!(conn.get("/honest").text(), "x");
                slowest = slowest.max(began.elapsed());
                count += 1;
            }
            slowest
        });
        let result = abuse();
        over.store(true, SeqCst);
        let slowest = asking.join().expect("it is served");
        assert!(slowest < Duration::from_secs(3), "{slowest:?}");
        result
    })
}

/// Waits until the proxy has counted one connection that was closed for `reason`.
#[track_caller]
fn counted(proxy: &Proxy, reason: &str) {
    let labels = [("listener", "web"), ("reason", reason)];
    assert_counts(proxy, "proxy_http2_floods_total", &labels, 1.0);
    assert_counts(proxy, "proxy_http2_floods_total", &[], 1.0);
}

/// Sends as much of this as is taken, reading meanwhile; the code of the GOAWAY, if one could be
/// read before the connection was gone.
fn flood(proxy: &Proxy, begin: &[u8], parts: impl Iterator<Item = Vec<u8>> + Send) -> Option<u32> {
    let mut raw = Raw::open(proxy, b"");
    // Its settings are answered before: that must not come in the middle of a head.
    assert!(raw.find(|f| f.kind == kind::SETTINGS).is_some());
    assert!(raw.write(begin));
    let mut writer = Raw { wire: raw.wire.twin() };
    thread::scope(|scope| {
        let writing = scope.spawn(move || {
            for part in parts {
                if !writer.write(part) {
                    return;
                }
            }
        });
        // An honest client would answer settings and pings; this one only waits for its end.
        let goaway = raw.find(|f| f.kind == kind::GOAWAY && f.code() != code::NO_ERROR);
        let ended = within(SOON, || raw.next().is_none().then_some(()));
        assert!(ended.is_some(), "the connection goes on");
        let _ = raw.wire.shut();
        writing.join().expect("it ends");
        goaway.map(|f| f.code())
    })
}

/// As [`ends`], and it is counted for this reason.
#[track_caller]
fn ends_counted(reason: &str, begin: &[u8], parts: impl Iterator<Item = Vec<u8>> + Send) {
    let (proxy, said) = ends(begin, parts);
    assert!(said.is_none_or(|code| code == code::ENHANCE_YOUR_CALM), "{said:?}");
    counted(&proxy, reason);
}

/// The flood ends with the connection and costs little; the proxy, and what it has said.
#[track_caller]
fn ends(begin: &[u8], parts: impl Iterator<Item = Vec<u8>> + Send) -> (Proxy, Option<u32>) {
    let (_origin, proxy) = served();
    let (memory, used) = (proxy.resident(), proxy.processor_time());
    let since = Instant::now();
    let said = beside_others(&proxy, || flood(&proxy, begin, parts));
    assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
    let grown = proxy.resident().saturating_sub(memory);
    assert!(grown < MOST_MEMORY, "grown by {grown}");
    let worked = proxy.processor_time().saturating_sub(used);
    assert!(worked < Duration::from_secs(4), "{worked:?}");
    eventually(SOON, || in_flight(&proxy) == 0.0);
    (proxy, said)
}

/// Many parts of 100 of these each.
fn again_and_again(each: &[u8]) -> impl Iterator<Item = Vec<u8>> + Send + use<> {
    std::iter::repeat_n(each.repeat(100), 1000)
}

#[test]
fn pings_without_end_are_not_answered() {
    ends_counted("control_flood", b"", again_and_again(&frame(kind::PING, 0, 0, &[0; 8])));
}

#[test]
fn settings_without_end_are_not_answered() {
    ends_counted("control_flood", b"", again_and_again(&frame(kind::SETTINGS, 0, 0, b"")));
}

#[test]
fn windows_that_are_opened_without_end_are_closed() {
    let update = frame(kind::WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1]);
    ends_counted("control_flood", b"", again_and_again(&update));
}

#[test]
fn priorities_without_end_are_not_listened_to() {
    let priority = frame(2, 0, 1, &[0, 0, 0, 0, 16]);
    ends_counted("control_flood", b"", again_and_again(&priority));
}

/// The head of a POST, whose body is to come.
fn upload_begins() -> Vec<u8> {
    let fields = [&[(":method", "POST")], &GET[1..]].concat();
    frame(kind::HEADERS, flag::END_HEADERS, 1, &section(&fields))
}

#[test]
fn empty_parts_without_end_are_no_upload() {
    let (_origin, proxy) = served();
    let each = frame(kind::DATA, 0, 1, b"");
    let said = beside_others(&proxy, || flood(&proxy, &upload_begins(), again_and_again(&each)));
    assert!(said.is_none_or(|code| code == code::ENHANCE_YOUR_CALM), "{said:?}");
    eventually(SOON, || in_flight(&proxy) == 0.0);
    assert_counts(&proxy, "proxy_http2_floods_total", &[], 1.0);
}

/// The head of a GET without its end, and what goes on with it.
fn pieces(piece: &[u8]) -> (Vec<u8>, impl Iterator<Item = Vec<u8>> + Send + use<>) {
    let head = frame(kind::HEADERS, flag::END_STREAM, 1, &section(&GET));
    (head, again_and_again(&frame(kind::CONTINUATION, 0, 1, piece)))
}

#[test]
fn a_head_in_pieces_without_end_is_given_up() {
    for piece in [section(&[("x", "y")]), vec![]] {
        let (head, parts) = pieces(&piece);
        ends(&head, parts);
    }
}

#[test]
fn a_head_in_pieces_without_end_is_counted_as_one() {
    let (head, parts) = pieces(&section(&[("x", "y")]));
    // The library has a word of its own for it, if it is the first to notice.
    let (proxy, _) = ends(&head, parts);
    counted(&proxy, "continuation_flood");
}

#[test]
fn requests_that_are_reset_at_once_are_too_many_soon() {
    let (origin, proxy) = served();
    let (memory, before) = (proxy.resident(), origin.requests());
    let parts = (0..2000u32).map(|n| {
        let pair = |nth| {
            let stream = 1 + 2 * (n * 10 + nth);
            [get_frame(stream), frame(kind::RST_STREAM, 0, stream, &[0, 0, 0, 8])].concat()
        };
        (0..10).flat_map(pair).collect()
    });
    let said = flood(&proxy, b"", parts);
    assert!(said.is_none_or(|code| code == code::ENHANCE_YOUR_CALM), "{said:?}");
    let reached = origin.requests() - before;
    assert!(reached < 2000, "{reached} have reached the upstream");
    assert_counts(&proxy, "proxy_http2_floods_total", &[], 1.0);
    eventually(SOON, || in_flight(&proxy) == 0.0);
    assert!(proxy.resident() < memory + MOST_MEMORY);
    assert_eq!(Conn::open(&proxy).get("/").text(), "x");
}

#[test]
fn who_cancels_many_of_many_is_no_attacker() {
    let gate = Gate::default();
    let held = gate.clone();
    let origin = Origin::start(move |call| {
        if call.request.target() == "/held" {
            held.pass();
        }
        reply::name("x")(call)
    });
    let proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    for _ in 0..10 {
        let mut all: Vec<_> = (0..60).map(|_| conn.begin(request("GET", "/held"), true)).collect();
        let kept: Vec<_> = (0..40).map(|_| conn.begin(request("GET", "/kept"), true).0).collect();
        for (_, stream) in &mut all {
            stream.send_reset(Reason::CANCEL);
        }
        for response in kept {
            assert_eq!(wait(whole(response)).expect("an answer").text(), "x");
        }
    }
    gate.open();
    assert_counts(&proxy, "proxy_http2_floods_total", &[], 0.0);
    eventually(SOON, || in_flight(&proxy) == 0.0);
}

/// A field section that grows when it is unpacked: an entry of the table that is named often.
fn bomb(value: usize, times: usize) -> Vec<u8> {
    let mut packed = section(&GET);
    // With incremental indexing, then by its index, the first of the dynamic ones.
    let mut entry = section(&[("x-bomb", &"v".repeat(value))]);
    entry[0] = 0x40;
    packed.extend(entry);
    packed.extend(std::iter::repeat_n(0xbe, times));
    packed
}

#[test]
fn a_head_that_grows_when_it_is_unpacked_is_refused() {
    let (origin, proxy) = served();
    let before = origin.requests();
    let memory = proxy.resident();
    beside_others(&proxy, || {
        for (value, times) in [(3000, 4000), (1, 12_000)] {
            let mut raw = Raw::open(&proxy, b"");
            for n in 0..50 {
                let packed = bomb(value, times);
                let stream = 1 + 2 * n;
                if !raw.write(frame(kind::HEADERS, 5, stream, &packed)) {
                    break;
                }
                let end = raw.find(|f| {
                    f.kind == kind::GOAWAY || f.kind == kind::RST_STREAM || f.kind == kind::HEADERS
                });
                let Some(end) = end else { break };
                // A 200 would be this.
                assert!(end.kind != kind::HEADERS || end.payload[0] != 0x88, "{end:?}");
            }
        }
    });
    let all = origin.seen();
    assert!(all[before..].iter().all(|seen| seen.message.target() == "/honest"));
    let grown = proxy.resident().saturating_sub(memory);
    assert!(grown < MOST_MEMORY, "grown by {grown}");
    quiet(&proxy);
}

#[test]
fn crumbs_of_cookies_are_counted() {
    let (origin, proxy) = served();
    let before = origin.requests();
    let mut raw = Raw::open(&proxy, b"");
    let mut packed = section(&GET);
    let mut entry = section(&[("cookie", "")]);
    entry[0] = 0x40;
    packed.extend(entry);
    packed.extend(std::iter::repeat_n(0xbe, 16_000));
    raw.write(frame(kind::HEADERS, 5, 1, &packed));
    let end = raw.find(|f| matches!(f.kind, kind::GOAWAY | kind::RST_STREAM | kind::HEADERS));
    assert!(end.is_none_or(|f| f.kind != kind::HEADERS || f.payload[0] != 0x88));
    assert_eq!(origin.requests(), before);
}

/// The setting that opens no window (RFC 9113 §6.5.2).
const NO_WINDOW: &[u8] = &[0, 4, 0, 0, 0, 0];

#[test]
fn a_client_that_opens_no_window_does_not_hold_places_for_ever() {
    const STREAMS: u32 = 50;
    let origin = Origin::start(|call| match call.request.target() {
        "/" => {
            let part = vec![b'x'; 64 << 10];
            call.send("HTTP/1.1 200 OK\r\nContent-Length: 67108864\r\n\r\n");
            if (0..1024).all(|_| call.send(&part)) { Then::Next } else { Then::Close }
        }
        _ => reply::name("x")(call),
    });
    let proxy = over(&[&origin]).listener("timeouts: { write: 1s, idle: 2s }").start();
    assert_eq!(Conn::open(&proxy).get("/honest").text(), "x");
    let memory = proxy.resident();
    let mut raw = Raw::open(&proxy, NO_WINDOW);
    for n in 0..STREAMS {
        raw.write(get_frame(1 + 2 * n));
    }
    eventually(SOON, || in_flight(&proxy) == f64::from(STREAMS));
    beside_others(&proxy, || {
        eventually(SOON * 2, || in_flight(&proxy) <= 1.0);
    });
    let grown = proxy.resident().saturating_sub(memory);
    assert!(grown < u64::from(STREAMS) * MIB, "grown by {grown}");
    eventually(SOON, || in_flight(&proxy) == 0.0);
}

#[test]
fn a_preface_that_does_not_go_on_is_closed() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).listener("timeouts: { read_header: 300ms, idle: 1s }").start();
    let whole = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    beside_others(&proxy, || {
        // All of it without settings behind is not enough either.
        for length in [2, 4, 16, 20, 24] {
            let mut client = proxy.client();
            client.send(&whole[..length]);
            let began = Instant::now();
            let _ = client.wire.read_to_end();
            assert!(began.elapsed() < Duration::from_secs(5), "{length}: {:?}", began.elapsed());
        }
        // Nor are settings that no request follows.
        let mut raw = Raw::open(&proxy, b"");
        let began = Instant::now();
        assert!(raw.find(|_| false).is_none());
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    });
}

#[test]
fn a_head_that_does_not_go_on_is_closed() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).listener("timeouts: { read_header: 300ms, idle: 1s }").start();
    let mut raw = Raw::open(&proxy, b"");
    raw.write(frame(kind::HEADERS, flag::END_STREAM, 1, &section(&GET)));
    let began = Instant::now();
    assert!(raw.find(|_| false).is_none());
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn streams_over_the_limit_are_refused() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("x", &gate));
    let proxy = over(&[&origin]).start();
    let mut raw = Raw::open(&proxy, b"");
    let streams = 300;
    for n in 0..streams {
        raw.write(get_frame(1 + 2 * n));
    }
    let mut refused = 0;
    let mut next = || raw.find(|f| f.kind == kind::RST_STREAM || f.kind == kind::GOAWAY);
    while refused < 50 {
        let end = next().expect("it is refused");
        assert_eq!((end.kind, end.code()), (kind::RST_STREAM, code::REFUSED_STREAM));
        refused += 1;
    }
    eventually(SOON, || origin.requests() == 100);
    gate.open();
    for _ in 0..100 {
        let end = raw.find(|f| f.kind == kind::HEADERS).expect("an answer");
        assert_eq!(end.payload[0], 0x88);
    }
    assert_eq!(origin.requests(), 100);
    assert_counts(&proxy, "proxy_http2_floods_total", &[], 0.0);
    eventually(SOON, || in_flight(&proxy) == 0.0);
}

#[test]
fn errors_that_a_client_provokes_without_end_are_too_many() {
    let (origin, proxy) = served();
    let before = origin.requests();
    let fields = [&GET[..], &[("connection", "close")]].concat();
    let parts = (0..20_000u32).map(|n| frame(kind::HEADERS, 5, 1 + 2 * n, &section(&fields)));
    let said = flood(&proxy, b"", parts);
    assert!(said.is_none_or(|code| code == code::ENHANCE_YOUR_CALM), "{said:?}");
    assert_eq!(origin.requests(), before);
    assert_eq!(Conn::open(&proxy).get("/").text(), "x");
}

#[test]
fn streams_that_cannot_be_are_errors_of_the_connection() {
    let (origin, proxy) = served();
    let before = origin.requests();
    for octets in [
        get_frame(2),
        frame(kind::DATA, 0, 7, b"x"),
        frame(kind::WINDOW_UPDATE, 0, 0, &[0; 4]),
        frame(kind::SETTINGS, 0, 1, b""),
        frame(kind::PING, 0, 0, &[0; 7]),
        frame(kind::CONTINUATION, 4, 1, b""),
        frame(kind::HEADERS, 5, 0, b""),
        [get_frame(5), get_frame(3)].concat(),
        [0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1].to_vec(),
    ] {
        let mut raw = Raw::open(&proxy, b"");
        raw.write(&octets);
        let end = raw.find(|f| f.kind == kind::GOAWAY);
        assert!(end.is_none_or(|f| f.code() != code::NO_ERROR), "{octets:?}");
        assert!(raw.find(|_| false).is_none(), "{octets:?}");
    }
    assert!(origin.requests() <= before + 1);
    assert_eq!(Conn::open(&proxy).get("/").text(), "x");
    eventually(SOON, || in_flight(&proxy) == 0.0);
}
