//! What a client may send in heads and frames of HTTP/2, to the octet: what the settings say, what
//! is refused on one stream, and what ends the connection.

use std::time::{Duration, Instant};

use l7rp_testkit::{Origin, Proxy, SOON, eventually, reply};

use crate::bystander::beside_honest;
use crate::http2_tools::{Conn, Frame, GET, Raw, code, flag, frame, get_frame, kind, section};
use crate::setup::{assert_counts, in_flight, over, quiet};

const MIB: u64 = 1 << 20;
const KIB: usize = 1 << 10;
/// What the tests allow a head to have.
const LIMITS: &str = "timeouts: { max_header_bytes: 32768 }, limits: { max_headers: 100 }";
const COMPRESSION_ERROR: u32 = 9;
const STREAM_CLOSED: u32 = 5;
const FRAME_SIZE_ERROR: u32 = 6;
const FLOW_CONTROL_ERROR: u32 = 3;
const PRIORITY: u8 = 2;

fn echoing() -> (Origin, Proxy) {
    let origin = Origin::start(|call| match call.request.target() {
        "/honest" => reply::name("x")(call),
        _ => reply::echo(call),
    });
    let proxy = over(&[&origin]).listener(LIMITS).start();
    assert_eq!(Conn::open(&proxy).get("/honest").text(), "x");
    (origin, proxy)
}

/// Requests of others than honest clients.
fn reached(origin: &Origin) -> usize {
    origin.seen().iter().filter(|seen| seen.message.target() != "/honest").count()
}

/// One entry with incremental indexing, and the index of the first of the dynamic ones so often.
fn again(name: &str, value: &str, times: usize) -> Vec<u8> {
    let mut entry = section(&[(name, value)]);
    entry[0] = 0x40;
    entry.extend(std::iter::repeat_n(0xbe, times));
    entry
}

/// A GET with this behind its fields, in as many frames as it takes.
fn get_with(stream: u32, more: &[u8]) -> Vec<u8> {
    let all = [section(&GET), more.to_vec()].concat();
    let mut parts = all.chunks(16 * KIB).peekable();
    let mut out = Vec::new();
    let mut first = true;
    while let Some(part) = parts.next() {
        let kind = if first { kind::HEADERS } else { kind::CONTINUATION };
        let end = if parts.peek().is_none() { flag::END_HEADERS } else { 0 };
        let ends = if first { flag::END_STREAM } else { 0 };
        out.extend(frame(kind, end | ends, stream, part));
        first = false;
    }
    out
}

/// What comes first on a stream, or the end of the connection.
#[track_caller]
fn first(raw: &mut Raw, stream: u32) -> Frame {
    let found = raw.find(|f| f.kind == kind::GOAWAY || f.stream == stream && f.kind != 8);
    found.expect("something comes")
}

/// Whether this is how a stream is refused for its head alone: a reset, or an answer whose status
/// is not 200, which has an index of its own (RFC 7541, appendix A).
fn refuses(f: &Frame) -> bool {
    let is_answer = f.kind == kind::HEADERS && f.payload.first() != Some(&0x88);
    is_answer || f.kind == kind::RST_STREAM
}

/// Section D.1: the numbers that a client is told before it has sent anything.
#[test]
fn the_settings_say_what_is_allowed() {
    let (_origin, proxy) = echoing();
    let mut client = proxy.client();
    client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    client.send(frame(kind::SETTINGS, 0, 0, b""));
    let head = client.wire.read_exact(9).expect("a frame");
    assert_eq!(head[3..5], [kind::SETTINGS, 0]);
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
    let payload = client.wire.read_exact(length).expect("settings");
    let setting = |id: u16| {
        let found = payload.chunks(6).find(|one| one[..2] == id.to_be_bytes())?;
        Some(u32::from_be_bytes(found[2..].try_into().expect("four octets")))
    };
    assert_eq!(setting(1).unwrap_or(4096), 4096, "the table of HPACK");
    assert_eq!(setting(3), Some(100), "streams at once");
    assert_eq!(setting(4), Some(256 << 10), "the window of a stream");
    assert_eq!(setting(6), Some(32 << 10), "a head");
    // The window of the connection is opened by a frame of its own, to a megabyte in all.
    let mut raw = Raw { wire: client.wire };
    let update = raw.find(|f| f.kind == kind::WINDOW_UPDATE).expect("a window");
    assert_eq!((update.stream, update.number(0)), (0, (1 << 20) - 65_535));
}

/// Row D4: the limit of pieces is reached with the sixth frame, whatever else would follow.
#[test]
fn d4_the_sixth_piece_of_a_head_is_one_too_many() {
    let (origin, proxy) = echoing();
    let used = proxy.processor_time();
    beside_honest(&proxy, || {
        for piece in [section(&[("x", "y")]), vec![]] {
            let mut raw = Raw::open(&proxy, b"");
            raw.write(frame(kind::HEADERS, flag::END_STREAM, 1, &section(&GET)));
            raw.write(frame(kind::CONTINUATION, 0, 1, &piece).repeat(6));
            let since = Instant::now();
            // The library may have its own word for it, if it is the first to notice.
            let _ = raw.find(|f| f.kind == kind::GOAWAY && f.code() != code::NO_ERROR);
            assert!(raw.find(|_| false).is_none());
            // Sooner than any time-out: it is closed for this.
            assert!(since.elapsed() < SOON / 3, "{:?}", since.elapsed());
        }
    });
    assert_counts(&proxy, "proxy_http2_floods_total", &[("reason", "continuation_flood")], 2.0);
    assert_eq!(reached(&origin), 0);
    // An honest head in five frames passes.
    let mut raw = Raw::open(&proxy, b"");
    let more = section(&[("x-long", &"v".repeat(3000))]);
    raw.write(frame(kind::HEADERS, flag::END_STREAM, 1, &section(&GET)));
    for (n, piece) in more.chunks(more.len().div_ceil(4)).enumerate() {
        let flags = if n == 3 { flag::END_HEADERS } else { 0 };
        raw.write(frame(kind::CONTINUATION, flags, 1, piece));
    }
    assert_eq!(first(&mut raw, 1).payload[0], 0x88);
    let worked = proxy.processor_time().saturating_sub(used);
    assert!(worked < Duration::from_secs(2), "{worked:?}");
    quiet(&proxy);
}

/// Row D5: small on the wire, large when it is unpacked.
#[test]
fn d5_what_is_over_the_limit_when_unpacked_is_refused_and_not_unpacked() {
    let (origin, proxy) = echoing();
    let memory = proxy.resident();
    beside_honest(&proxy, || {
        for _ in 0..20 {
            let mut raw = Raw::open(&proxy, b"");
            // 4,000 times 4 KiB: what would come of it is 16 MB, each time.
            raw.write(get_with(1, &again("x-bomb", &"v".repeat(4000), 4000)));
            let end = first(&mut raw, 1);
            assert!(refuses(&end) || end.code() != code::NO_ERROR, "{end:?}");
        }
    });
    let grown = proxy.resident().saturating_sub(memory);
    assert!(grown < 8 * MIB, "grown by {grown}");
    assert_eq!(reached(&origin), 0);
    quiet(&proxy);
}

/// Each of these is refused on its stream, and the next request on the connection is served.
#[track_caller]
fn refused_alone(what: &[(&str, Vec<u8>)]) {
    let (origin, proxy) = echoing();
    let mut raw = Raw::open(&proxy, b"");
    let mut stream = 1;
    for (name, more) in what {
        raw.write(get_with(stream, more));
        let end = first(&mut raw, stream);
        assert!(refuses(&end), "{name}: {end:?}");
        assert_eq!(reached(&origin), (stream as usize - 1) / 4, "{name}");
        raw.write(get_frame(stream + 2));
        let next = first(&mut raw, stream + 2);
        assert_eq!(next.payload[0], 0x88, "{name}");
        raw.end_of(stream + 2);
        stream += 4;
    }
    quiet(&proxy);
}

fn fields(name: &str, value: &str, count: usize) -> Vec<u8> {
    section(&vec![(name, value); count])
}

/// Row D12, by size.
#[test]
fn d12_a_head_over_the_size_is_refused_alone() {
    refused_alone(&[
        ("one large field", section(&[("x-long", &"v".repeat(40 * KIB))])),
        ("forty fields of a kilobyte", fields("x-some", &"v".repeat(KIB), 40)),
        ("unpacked", again("x-some", &"v".repeat(KIB), 39)),
    ]);
}

/// Row D12, by number.
#[test]
fn d12_a_head_with_too_many_fields_is_refused_alone() {
    refused_alone(&[
        ("two hundred fields", fields("x-ten", "0123456789", 200)),
        ("two hundred indexed fields", again("x-ten", "0123456789", 199)),
    ]);
}

/// Rows D6 and D12: each crumb costs us as much as a field does, and is counted as one.
#[test]
fn d6_crumbs_of_cookies_are_fields() {
    refused_alone(&[
        ("two hundred crumbs", fields("cookie", "a=1", 200)),
        ("two hundred indexed crumbs", again("cookie", "", 199)),
    ]);
    let (origin, proxy) = echoing();
    let mut raw = Raw::open(&proxy, b"");
    raw.write(get_with(1, &fields("cookie", "a=1", 60)));
    assert_eq!(first(&mut raw, 1).payload[0], 0x88);
    assert_eq!(origin.last().all("cookie"), [vec!["a=1"; 60].join("; ")]);
}

/// Row D12: whoever goes far over the limit is not listened to any more.
#[test]
fn d12_four_times_the_limit_ends_the_connection() {
    let (origin, proxy) = echoing();
    beside_honest(&proxy, || {
        let mut raw = Raw::open(&proxy, b"");
        // It may be closed before all is sent.
        raw.write(get_with(1, &section(&[("x-long", &"v".repeat(129 * KIB))])));
        let since = Instant::now();
        assert!(raw.find(|f| f.kind == kind::HEADERS && f.payload[0] == 0x88).is_none());
        assert!(since.elapsed() < SOON / 3, "{:?}", since.elapsed());
    });
    assert_eq!(reached(&origin), 0);
    quiet(&proxy);
}

/// Section D.1: nobody makes the table larger than it was said to be.
#[test]
fn a_larger_table_than_was_allowed_is_an_error() {
    let (origin, proxy) = echoing();
    let mut raw = Raw::open(&proxy, b"");
    // A size update to 4097 (RFC 7541 §6.3): five bits of ones, and the rest in seven bits each.
    let update = [0x3f, 0xe2, 0x1f];
    assert_eq!(31 + (0xe2 & 0x7f) + (0x1f << 7), 4097);
    raw.write(frame(kind::HEADERS, 5, 1, &[&update[..], &section(&GET)].concat()));
    let end = first(&mut raw, 1);
    assert_eq!(end.kind, kind::GOAWAY);
    assert!([code::PROTOCOL_ERROR, COMPRESSION_ERROR].contains(&end.code()), "{end:?}");
    assert_eq!(reached(&origin), 0);
}

/// The connection is ended for these frames, with `PROTOCOL_ERROR` or the code for this.
#[track_caller]
fn ends_with(proxy: &Proxy, what: &str, octets: &[u8], better: u32) {
    // The row wants `PROTOCOL_ERROR`; the RFC has a better one for some.
    let codes = [code::PROTOCOL_ERROR, better];
    let mut raw = Raw::open(proxy, b"");
    raw.write(octets);
    let end = raw.find(|f| f.kind == kind::GOAWAY && f.code() != code::NO_ERROR);
    let said = end.map(|f| f.code());
    assert!(said.is_some_and(|said| codes.contains(&said)), "{what}: {said:?}");
    assert!(raw.find(|_| false).is_none());
}

/// Row D13, with the code of each.
#[test]
fn d13_frames_that_cannot_be_end_the_connection_and_say_why() {
    let (origin, proxy) = echoing();
    let error = code::PROTOCOL_ERROR;
    let post = [&[(":method", "POST")], &GET[1..]].concat();
    let open = frame(kind::HEADERS, flag::END_HEADERS, 1, &section(&post));
    beside_honest(&proxy, || {
        ends_with(&proxy, "an even stream", &get_frame(2), error);
        ends_with(&proxy, "data on an idle stream", &frame(kind::DATA, 0, 7, b"x"), error);
        ends_with(&proxy, "no stream at all", &frame(kind::HEADERS, 5, 0, &section(&GET)), error);
        ends_with(&proxy, "data on the connection", &frame(kind::DATA, 0, 0, b"x"), error);
        ends_with(
            &proxy,
            "a reset of an idle stream",
            &frame(kind::RST_STREAM, 0, 9, &[0; 4]),
            error,
        );
        let idle = frame(kind::WINDOW_UPDATE, 0, 9, &[0, 0, 0, 1]);
        ends_with(&proxy, "a window of an idle stream", &idle, error);
        let padded = frame(kind::DATA, 8, 1, &[200, 1]);
        ends_with(&proxy, "more padding than frame", &[open.clone(), padded].concat(), error);
        let between =
            [frame(kind::HEADERS, 1, 1, &section(&GET)), frame(kind::PING, 0, 0, &[0; 8])];
        ends_with(&proxy, "a frame in the middle of a head", &between.concat(), error);
        ends_with(&proxy, "a promise", &frame(5, 4, 1, &[0, 0, 0, 2]), error);
        let push = frame(kind::SETTINGS, 0, 0, &[0, 2, 0, 0, 0, 2]);
        ends_with(&proxy, "half a push", &push, error);
        let huge = frame(kind::SETTINGS, 0, 0, &[0, 4, 0xff, 0xff, 0xff, 0xff]);
        ends_with(&proxy, "a window over the limit", &huge, FLOW_CONTROL_ERROR);
        let over = frame(kind::WINDOW_UPDATE, 0, 0, &[0x7f, 0xff, 0xff, 0xff]);
        ends_with(&proxy, "a window that runs over", &over, FLOW_CONTROL_ERROR);
        let sizes = [&frame(kind::PING, 0, 0, &[0; 7]), &frame(kind::SETTINGS, 0, 0, &[0; 5])];
        for octets in sizes {
            ends_with(&proxy, "a wrong size", octets, FRAME_SIZE_ERROR);
        }
        let bad = frame(kind::HEADERS, 5, 1, &[0xff; 40]);
        ends_with(&proxy, "no field section", &bad, COMPRESSION_ERROR);
    });
    assert_eq!(reached(&origin), 0, "{:?}", origin.seen());
    eventually(SOON, || in_flight(&proxy) == 0.0);
}

/// Row D13: numbers of streams only grow.
#[test]
fn d13_streams_are_not_used_again() {
    let (origin, proxy) = echoing();
    for (what, again) in [("a lower one", 3), ("the same", 5)] {
        let mut raw = Raw::open(&proxy, b"");
        raw.write(get_frame(5));
        raw.end_of(5);
        let before = reached(&origin);
        raw.write(get_frame(again));
        let end = raw.find(|f| {
            f.kind == kind::GOAWAY && f.code() != code::NO_ERROR || f.kind == kind::RST_STREAM
        });
        let end = end.unwrap_or_else(|| panic!("{what}: it is told why"));
        assert!([code::PROTOCOL_ERROR, STREAM_CLOSED].contains(&end.code()), "{what}: {end:?}");
        assert_eq!(reached(&origin), before, "{what}");
    }
    // What is known of no stream yet is not of one that will be.
    let mut raw = Raw::open(&proxy, b"");
    raw.write(frame(PRIORITY, 0, 9, &[0, 0, 0, 0, 16]));
    raw.write(get_frame(9));
    assert_eq!(first(&mut raw, 9).payload[0], 0x88);
    quiet(&proxy);
}
