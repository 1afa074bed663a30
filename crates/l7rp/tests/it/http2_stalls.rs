//! Clients that hold by HTTP/2 what they do not take: windows that open by one octet or not at
//! all, sockets that nobody reads, uploads in crumbs. What they hold is little, and not for long.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use l7rp_testkit::{Call, Origin, Proxy, SOON, Then, eventually, let_pass, reply, within};

use crate::bystander::beside_honest;
use crate::http2_tools::{
    Conn, Frame, GET, Raw, code, flag, frame, get_frame, kind, meanwhile, request, section, upload,
    wait, whole,
};
use crate::setup::{assert_counts, in_flight, over, quiet, settled};
use crate::verdict::{TOUCHY, nothing_is_left};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Streams of one connection at once.
const AT_ONCE: u32 = 100;
const STALLS: &str = "timeouts: { write: 1s }";

/// The setting that opens the windows of streams by so much (RFC 9113 §6.5.2).
fn window(octets: u32) -> Vec<u8> {
    [&[0, 4][..], &octets.to_be_bytes()].concat()
}

fn window_update(stream: u32, by: u32) -> Vec<u8> {
    frame(kind::WINDOW_UPDATE, 0, stream, &by.to_be_bytes())
}

fn streams() -> impl Iterator<Item = u32> + Clone {
    (0..AT_ONCE).map(|n| 1 + 2 * n)
}

/// An upstream that answers `/honest` with "x" and everything else with so many octets; how many
/// of them were taken in all. In front of it a proxy whose breaker opens at one failure.
fn generous(length: usize, listener: &str) -> (Origin, Arc<AtomicUsize>, Proxy) {
    let taken = Arc::new(AtomicUsize::new(0));
    let count = taken.clone();
    let origin = Origin::start(move |call: &mut Call<'_>| {
        if call.request.target() == "/honest" {
            return reply::name("x")(call);
        }
        call.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n"));
        let mut left = length;
        while left > 0 {
            let part = left.min(16 * KIB);
            if !call.send(vec![b'x'; part]) {
                return Then::Close;
            }
            left -= part;
            count.fetch_add(part, SeqCst);
        }
        Then::Next
    });
    let proxy = over(&[&origin]).pool(TOUCHY).listener(listener).start();
    assert_eq!(Conn::open(&proxy).get("/honest").text(), "x");
    (origin, taken, proxy)
}

/// Whether this tells that a stream was reset because nothing went on.
fn is_reset(f: &Frame) -> bool {
    f.kind == kind::RST_STREAM && f.code() != code::REFUSED_STREAM
}

/// Waits until each stream was reset, and no connection was ended for it.
#[track_caller]
fn all_are_reset(raw: &mut Raw) {
    let (mut left, since) = (streams().collect::<Vec<u32>>(), Instant::now());
    while !left.is_empty() {
        let next = raw.find(|f| is_reset(f) || f.kind == kind::GOAWAY);
        let Some(next) = next else {
            panic!("{} streams are not reset after {:?}", left.len(), since.elapsed())
        };
        assert_eq!(next.kind, kind::RST_STREAM, "{next:?}");
        left.retain(|stream| *stream != next.stream);
    }
}

/// Row D11.
#[test]
fn d11_streams_that_never_get_a_window_are_reset() {
    let (origin, _, proxy) = generous(MIB, STALLS);
    let before = origin.open();
    let mut raw = Raw::open(&proxy, &window(0));
    raw.write(streams().flat_map(get_frame).collect::<Vec<u8>>());
    eventually(SOON, || in_flight(&proxy) >= f64::from(AT_ONCE));
    let since = Instant::now();
    beside_honest(&proxy, || all_are_reset(&mut raw));
    assert!(since.elapsed() < SOON / 2, "{:?}", since.elapsed());
    // The upstream is told, and the connection is as good as before.
    eventually(SOON, || origin.open() <= before + 1);
    let next = 1 + 2 * AT_ONCE;
    raw.write([get_frame(next), window_update(next, MIB as u32)].concat());
    raw.write(window_update(0, MIB as u32));
    assert!(raw.end_of(next).ends());
    drop(raw);
    nothing_is_left(&proxy, &origin);
}

/// Row D11, where the upstream has long gone on to other things: the whole answer has come, and
/// waits in the proxy.
#[test]
fn d11_small_answers_that_never_get_a_window_are_reset() {
    let (origin, _, proxy) = generous(KIB, STALLS);
    let mut raw = Raw::open(&proxy, &window(0));
    raw.write(streams().flat_map(get_frame).collect::<Vec<u8>>());
    for _ in streams() {
        assert_eq!(raw.find(|f| f.kind == kind::HEADERS).expect("a head").payload[0], 0x88);
    }
    beside_honest(&proxy, || all_are_reset(&mut raw));
    let all = f64::from(AT_ONCE);
    assert_counts(&proxy, "proxy_http2_stalled_streams_total", &[("listener", "web")], all);
    drop(raw);
    nothing_is_left(&proxy, &origin);
}

/// Rows D6 and D11: a drip is no progress. One octet each tenth of a second goes to each stream,
/// for as long as anybody takes it.
#[test]
fn d6_streams_that_get_a_window_in_drips_are_reset() {
    let (origin, _, proxy) = generous(MIB, STALLS);
    let mut raw = Raw::open(&proxy, &window(0));
    raw.write(streams().flat_map(get_frame).collect::<Vec<u8>>());
    eventually(SOON, || in_flight(&proxy) >= f64::from(AT_ONCE));
    let mut drip = Raw { wire: raw.wire.twin() };
    beside_honest(&proxy, || {
        thread::scope(|scope| {
            let dripping = scope.spawn(move || {
                let began = Instant::now();
                while began.elapsed() < SOON / 2 {
                    // Fewer cheap frames than would be a flood.
                    if !drip.write(streams().flat_map(|s| window_update(s, 1)).collect::<Vec<_>>())
                    {
                        return;
                    }
                    let_pass(Duration::from_millis(600));
                }
            });
            let since = Instant::now();
            let given_up = within(SOON / 2, || (in_flight(&proxy) <= 1.0).then_some(()));
            assert!(given_up.is_some(), "they are held after {:?}", since.elapsed());
            dripping.join().expect("it ends");
        });
    });
    all_are_reset(&mut raw);
    drop(raw);
    nothing_is_left(&proxy, &origin);
}

/// Who reads slowly but does read is not cut: a kilobyte in each time-out is enough.
#[test]
fn d6_streams_that_get_a_window_in_sips_go_on() {
    let (origin, _, proxy) = generous(24 * KIB, STALLS);
    let mut raw = Raw::open(&proxy, &window(0));
    raw.write(get_frame(1));
    let mut got = 0;
    assert!(raw.find(|f| f.kind == kind::HEADERS).is_some());
    while got < 24 * KIB {
        raw.write(window_update(1, 4 * KIB as u32));
        let due = got + 4 * KIB;
        while got < due {
            let next = raw.find(|f| f.kind == kind::DATA || is_reset(f)).expect("more");
            assert_eq!(next.kind, kind::DATA, "{got} octets, then {next:?}");
            got += next.payload.len();
        }
        let_pass(Duration::from_millis(600));
    }
    drop(raw);
    nothing_is_left(&proxy, &origin);
}

/// Row D6: as many fields as are allowed, nearly all of them crumbs that cost the client an octet
/// each, on each stream, held by windows of nothing.
#[test]
fn d6_requests_of_crumbs_that_are_held_cost_little() {
    const CONNECTIONS: u64 = 5;
    const MOST: u64 = 4 * MIB as u64;
    let (origin, _, proxy) = generous(KIB, "timeouts: { write: 3s }");
    let mut packed = section(&GET);
    let mut entry = section(&[("cookie", "a=1")]);
    // With incremental indexing, then by its index, the first of the dynamic ones.
    entry[0] = 0x40;
    packed.extend(entry);
    packed.extend([0xbe; 80]);
    let memory = proxy.resident();
    let mut all: Vec<Raw> = (0..CONNECTIONS).map(|_| Raw::open(&proxy, &window(0))).collect();
    beside_honest(&proxy, || {
        for raw in &mut all {
            raw.write(
                streams().flat_map(|s| frame(kind::HEADERS, 5, s, &packed)).collect::<Vec<_>>(),
            );
        }
        for raw in &mut all {
            for _ in streams() {
                assert_eq!(raw.find(|f| f.kind == kind::HEADERS).expect("a head").payload[0], 0x88);
            }
        }
        let grown = proxy.resident().saturating_sub(memory) / CONNECTIONS;
        assert!(grown < MOST, "{grown} for each connection");
    });
    drop(all);
    nothing_is_left(&proxy, &origin);
}

/// Row D10: what is held for one stalled stream, at most. Behind it, for all of them, what the
/// process needs for a hundred requests anyway.
const HELD: u64 = (AT_ONCE as usize * 64 * KIB + 6 * MIB) as u64;

/// Row D10, where the client's windows hold the answers up.
#[test]
fn d10_answers_that_wait_for_a_window_are_not_taken_in() {
    const LENGTH: usize = 10 * MIB;
    let (origin, taken, proxy) = generous(LENGTH, "timeouts: { write: 60s }");
    let memory = proxy.resident();
    let mut raw = Raw::open(&proxy, &window(1));
    beside_honest(&proxy, || {
        raw.write(streams().flat_map(get_frame).collect::<Vec<u8>>());
        eventually(SOON, || in_flight(&proxy) >= f64::from(AT_ONCE));
        settled(&taken);
        let grown = proxy.resident().saturating_sub(memory);
        assert!(grown < HELD, "{} for each stream", grown / u64::from(AT_ONCE));
    });
    assert!(taken.load(SeqCst) < AT_ONCE as usize * LENGTH / 2, "all was taken");
    // The upstream has been made to wait, and is asked for the rest of one of them.
    raw.write([window_update(1, 1 << 30), window_update(0, 1 << 30)].concat());
    let mut got = 0;
    loop {
        let next = raw.find(|f| f.stream == 1 && f.kind != kind::HEADERS).expect("more");
        assert_eq!(next.kind, kind::DATA, "{got} octets, then {next:?}");
        got += next.payload.len();
        if next.ends() {
            break;
        }
    }
    assert_eq!(got, LENGTH);
    drop(raw);
    nothing_is_left(&proxy, &origin);
}

/// Row D10, where the client does not read its socket; by the time-out it is sent away.
#[test]
fn d10_answers_that_wait_for_a_socket_are_not_taken_in() {
    const LENGTH: usize = 10 * MIB;
    let (origin, taken, proxy) = generous(LENGTH, "timeouts: { write: 2s }");
    let memory = proxy.resident();
    let mut raw = Raw::open(&proxy, &window((1 << 31) - 1));
    beside_honest(&proxy, || {
        raw.write(window_update(0, 1 << 30));
        raw.write(streams().flat_map(get_frame).collect::<Vec<u8>>());
        eventually(SOON, || taken.load(SeqCst) > 0);
        let mut most = 0;
        // All of them are given up, though the client is still there.
        eventually(SOON * 2, || {
            most = most.max(proxy.resident().saturating_sub(memory));
            in_flight(&proxy) <= 1.0
        });
        assert!(most < HELD, "{} for each stream", most / u64::from(AT_ONCE));
    });
    assert!(taken.load(SeqCst) < AT_ONCE as usize * LENGTH / 2, "all was taken");
    drop(raw);
    nothing_is_left(&proxy, &origin);
}

/// Row D7: a client that sends this without end and reads nothing at all.
#[track_caller]
fn d7_unread(each: &[u8]) {
    let (origin, _, proxy) = generous(1, STALLS);
    let memory = proxy.resident();
    beside_honest(&proxy, || {
        let mut raw = Raw::open(&proxy, b"");
        let part = each.repeat(1000);
        // Until nobody takes them any more; far more than all buffers on the way hold.
        let taken = (0..10_000).take_while(|_| raw.write(&part)).count();
        assert!(taken < 10_000, "all were taken");
        // Nobody has to read for the connection to end.
        eventually(SOON, || proxy.metrics().sum("proxy_connections", &[]) <= 1.0);
    });
    let labels = [("reason", "control_flood")];
    assert_counts(&proxy, "proxy_http2_floods_total", &labels, 1.0);
    let grown = proxy.resident().saturating_sub(memory);
    assert!(grown < 8 * MIB as u64, "grown by {grown}");
    nothing_is_left(&proxy, &origin);
}

#[test]
fn d7_pings_of_a_client_that_does_not_read_are_not_collected() {
    d7_unread(&frame(kind::PING, 0, 0, &[0; 8]));
}

#[test]
fn d7_settings_of_a_client_that_does_not_read_are_not_collected() {
    d7_unread(&frame(kind::SETTINGS, 0, 0, b""));
}

/// Row D8: a megabyte in parts of one octet.
#[test]
fn d8_an_upload_in_crumbs_without_end_is_too_much_work() {
    let (origin, _, proxy) = generous(1, "");
    let fields = [&[(":method", "POST")], &GET[1..]].concat();
    beside_honest(&proxy, || {
        let mut raw = Raw::open(&proxy, b"");
        raw.write(frame(kind::HEADERS, flag::END_HEADERS, 1, &section(&fields)));
        let mut writer = Raw { wire: raw.wire.twin() };
        let part = frame(kind::DATA, 0, 1, b"x").repeat(1024);
        thread::scope(|scope| {
            let writing =
                scope.spawn(move || (0..1024).take_while(|_| writer.write(&part)).count());
            let said = raw.find(|f| f.kind == kind::GOAWAY);
            let parts = writing.join().expect("it ends");
            assert!(parts < 1024, "all of it was taken");
            assert!(said.is_none_or(|f| f.code() == code::ENHANCE_YOUR_CALM));
        });
    });
    assert_counts(&proxy, "proxy_http2_floods_total", &[], 1.0);
    nothing_is_left(&proxy, &origin);
}

/// Row D8, the honest side.
#[test]
fn d8_an_upload_of_some_crumbs_passes() {
    const CRUMBS: usize = 900;
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).start();
    let fields = [&[(":method", "POST")], &GET[1..]].concat();
    let mut raw = Raw::open(&proxy, b"");
    raw.write(frame(kind::HEADERS, flag::END_HEADERS, 1, &section(&fields)));
    raw.write(frame(kind::DATA, 0, 1, b"x").repeat(CRUMBS - 1));
    raw.write(frame(kind::DATA, flag::END_STREAM, 1, b"x"));
    assert_eq!(raw.find(|f| f.kind == kind::HEADERS).expect("an answer").payload[0], 0x88);
    assert!(raw.end_of(1).ends());
    assert_eq!(origin.last().text(), "x".repeat(CRUMBS));
    assert_counts(&proxy, "proxy_http2_floods_total", &[], 0.0);
}

/// Row D15: each of many uploads is refused early; the last is not, and has its window.
#[track_caller]
fn d15_refused(proxy: &Proxy, length: usize, last: usize) {
    let conn = Conn::open(proxy);
    let asked = |path: &str, length: usize| {
        let mut asked = request("POST", path);
        asked.headers_mut().insert("content-length", length.into());
        asked
    };
    for n in 0..1000 {
        let (response, mut stream) = conn.begin(asked("/refused", length), false);
        let sent = meanwhile(async move {
            let _ = upload(&mut stream, Bytes::from(vec![b'x'; 64 * KIB]), false).await;
            stream
        });
        assert_eq!(wait(whole(response)).expect("an answer").status, 413, "{n}");
        // What is still on its way comes, and is nobody's any more.
        drop(wait(sent));
    }
    for _ in 0..3 {
        let got = conn.post(asked("/taken", last), vec![b'y'; last]).expect("an answer");
        assert_eq!((got.status, got.text()), (200, last.to_string()));
    }
    quiet(proxy);
}

fn counts_octets(call: &mut Call<'_>) -> Then {
    if call.request.target() == "/refused" {
        call.send("HTTP/1.1 413 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        return Then::Close;
    }
    let Ok(length) = call.body().map(<[u8]>::len) else { return Then::Close };
    call.send(reply::ok(&length.to_string()));
    Then::Next
}

#[test]
fn d15_uploads_that_the_upstream_refuses_take_no_window_away() {
    let origin = Origin::start(counts_octets);
    let proxy = over(&[&origin]).start();
    d15_refused(&proxy, 64 * KIB, 4 * MIB);
}

#[test]
fn d15_uploads_that_the_proxy_refuses_take_no_window_away() {
    let origin = Origin::start(counts_octets);
    let proxy = over(&[&origin]).listener("limits: { max_body_bytes: 4MiB }").start();
    d15_refused(&proxy, 64 * MIB, 4 * MIB);
    assert!(origin.seen().iter().all(|seen| seen.message.target() == "/taken"));
}
