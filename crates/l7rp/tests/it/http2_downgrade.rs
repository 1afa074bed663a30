//! Heads and bodies of HTTP/2 that could become something else in HTTP/1.1: items of section D.3
//! that `http2_heads.rs` has not got. What is refused is not seen by any upstream.

use l7rp_testkit::{Origin, Proxy, SOON, Then, eventually, reply};

use crate::http2_tools::{Conn, Frame, GET, Raw, code, flag, frame, get_frame, kind, section};
use crate::setup::{in_flight, over, quiet};
use crate::verdict::{TOUCHY, nobody_is_blamed};

type Fields<'a> = Vec<(&'a str, &'a str)>;

/// GET, with this field in the place of the one with its name, or behind them.
fn with<'a>(name: &'a str, value: &'a str) -> Fields<'a> {
    let mut all = GET.to_vec();
    match all.iter_mut().find(|(n, _)| *n == name) {
        Some(old) => old.1 = value,
        None => all.push((name, value)),
    }
    all
}

fn echoing() -> (Origin, Proxy) {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).pool(TOUCHY).one_worker().start();
    (origin, proxy)
}

/// Whether the stream or the connection ends for what was said, or the answer is a 400.
fn refuses(f: &Frame) -> bool {
    match f.kind {
        kind::HEADERS => f.payload.first() == Some(&0x8c),
        kind::RST_STREAM => f.code() == code::PROTOCOL_ERROR,
        kind::GOAWAY => f.code() != code::NO_ERROR,
        _ => false,
    }
}

/// Each of these sections is refused, and no upstream sees it.
#[track_caller]
fn none_passes<'a>(sections: impl IntoIterator<Item = (&'a str, Vec<u8>)>) {
    let (origin, proxy) = echoing();
    for (what, packed) in sections {
        let mut raw = Raw::open(&proxy, b"");
        raw.write(frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 1, &packed));
        let first = raw.find(|f| f.stream == 1 || f.kind == kind::GOAWAY).expect("a reason");
        assert!(refuses(&first), "{what}: {first:?}");
        assert_eq!(origin.requests(), 0, "{what}: {:?}", origin.seen());
    }
    assert_eq!(Conn::open(&proxy).get("/").status, 200);
    nobody_is_blamed(&proxy);
    quiet(&proxy);
}

/// Item 1: in every place where the library or we could forget it.
#[test]
fn d3_1_no_part_of_a_head_ends_a_line() {
    const ENDS: [&str; 4] = ["\r\n", "\r", "\n", "\0"];
    let names = [":path", ":authority", ":method", ":scheme", "x-value", "cookie", "host"];
    let all = names.iter().flat_map(|name| {
        ENDS.iter().map(move |end| {
            let value = match *name {
                ":path" => format!("/a{end}b: c"),
                ":method" => format!("GET{end}"),
                ":scheme" => format!("http{end}"),
                _ => format!("a.test{end}b: c"),
            };
            (*name, section(&with(name, &value)))
        })
    });
    none_passes(all);
}

/// The codes of RFC 7541, appendix B, of what these tests need: octet, code and its length in
/// bits.
const HUFFMAN: [(u8, u32, u32); 6] = [
    (b'a', 0x3, 5),
    (b'b', 0x23, 6),
    (b':', 0x5c, 7),
    (b'\r', 0x3fff_fffe, 30),
    (b'\n', 0x3fff_fffc, 30),
    (0, 0x1ff8, 13),
];

/// A literal value in Huffman code.
fn huffman(text: &[u8]) -> Vec<u8> {
    let (mut bits, mut count, mut out) = (0u64, 0, Vec::new());
    for octet in text {
        let (_, code, length) = HUFFMAN.iter().find(|(o, ..)| o == octet).expect("a known octet");
        bits = bits << length | u64::from(*code);
        count += length;
        while count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
        }
    }
    if count > 0 {
        // Padded with ones.
        out.push(((bits << (8 - count)) | ((1 << (8 - count)) - 1)) as u8);
    }
    out.insert(0, 0x80 | out.len() as u8);
    out
}

/// A field whose value is in Huffman code.
fn coded(name: &str, value: &[u8]) -> Vec<u8> {
    let mut packed = section(&[(name, "")]);
    packed.pop();
    packed.extend(huffman(value));
    packed
}

/// Item 1, where it cannot be seen before it is decoded.
#[test]
fn d3_1_no_coded_value_ends_a_line() {
    let values: [&[u8]; 4] = [b"a\r\nb:a", b"a\nb", b"a\rb", b"a\0b"];
    none_passes(values.map(|value| {
        let packed = [section(&GET), coded("x-value", value)].concat();
        ("a coded value", packed)
    }));
    // What is coded is not refused for that.
    let (origin, proxy) = echoing();
    let mut raw = Raw::open(&proxy, b"");
    let packed = [section(&GET), coded("x-value", b"a:b")].concat();
    raw.write(frame(kind::HEADERS, 5, 1, &packed));
    assert!(raw.end_of(1).ends());
    assert_eq!(origin.last().get("x-value"), Some("a:b"));
}

/// Item 3, what is left of it.
#[test]
fn d3_3_what_is_about_another_connection_is_refused() {
    none_passes([
        ("two codings", section(&with("te", "trailers, gzip"))),
        ("an empty coding", section(&with("transfer-encoding", ""))),
        ("an identity", section(&with("transfer-encoding", "identity"))),
    ]);
}

/// Item 3: nothing but an upgrade from HTTP/1.1 has this field, and it is of one connection.
#[test]
fn d3_3_settings_of_an_upgrade_are_refused() {
    let name = "http2-settings";
    none_passes([(name, section(&with(name, "AAMAAABkAAQAAP__")))]);
}

/// Item 5: what an upstream gets of a body that is not what was said is no whole request, and is
/// followed by nothing on the same connection.
#[test]
fn d3_5_a_request_with_another_length_is_aborted_at_the_upstream() {
    let (origin, proxy) = echoing();
    assert_eq!(proxy.get("/").status(), 200);
    // A clean end would make the beginning of this the rest of the body before it.
    for (n, (length, body)) in
        [("10", &b"GET /"[..]), ("5", b"GET / HTTP"), ("0", b"x"), ("10", b"")]
            .into_iter()
            .enumerate()
    {
        let fields = [&[(":method", "POST"), ("content-length", length)], &GET[1..]].concat();
        // The library wants pseudo-fields first.
        let mut fields = fields;
        let told = fields.remove(1);
        fields.push(told);
        let mut raw = Raw::open(&proxy, b"");
        raw.write(frame(kind::HEADERS, flag::END_HEADERS, 1, &section(&fields)));
        raw.write(frame(kind::DATA, flag::END_STREAM, 1, body));
        let end = raw.end_of(1);
        let is_error = end.kind == kind::RST_STREAM || end.kind == kind::HEADERS;
        assert!(is_error || length == "0", "{length}: {end:?}");
        eventually(SOON, || in_flight(&proxy) == 0.0);
        let next = proxy.get("/next");
        assert!(next.text().starts_with("GET /next HTTP/1.1\r\n"), "{length}: {next:?}");
        let seen = origin.seen();
        let broken: Vec<_> = seen.iter().filter(|s| s.message.method() == "POST").collect();
        let whole = broken.iter().filter(|s| s.message.complete && length != "0").count();
        assert_eq!(whole, 0, "{n}: {broken:?}");
        let last = seen.last().expect("a request");
        assert!(
            broken.iter().all(|one| one.message.complete || one.connection != last.connection),
            "{n}: the connection was used again"
        );
    }
    nobody_is_blamed(&proxy);
    quiet(&proxy);
}

/// Item 7, what is left of it.
#[test]
fn d3_7_what_is_no_path_or_scheme_is_refused() {
    none_passes(
        [(":path", "/\u{1}"), (":path", "/\u{7f}"), (":path", "/a\tb"), (":path", "?x")]
            .into_iter()
            .chain([(":scheme", "http://x/?"), (":scheme", "ht tp")])
            .chain([(":method", "G(T"), (":method", "GET\t")])
            .map(|(name, value)| (value, section(&with(name, value)))),
    );
}

/// Item 7: a fragment is for the client alone. The library cuts it off, and what is left is what is
/// routed, logged and passed on: nobody sees another path than anybody else.
#[test]
fn d3_7_a_fragment_is_seen_by_nobody() {
    let (origin, proxy) = echoing();
    for (n, (path, left)) in [("/a#b", "/a"), ("/b?c#d", "/b?c")].into_iter().enumerate() {
        let mut raw = Raw::open(&proxy, b"");
        raw.write(frame(kind::HEADERS, 5, 1, &section(&with(":path", path))));
        raw.end_of(1);
        assert_eq!((origin.requests(), origin.last().target()), (n + 1, left));
        proxy.logged_path(left.split('?').next().unwrap_or_default());
    }
}

/// Items 9 and 11: fields of a head have no business behind a body, and what is allowed there
/// becomes one trailer section behind the one last chunk.
#[test]
fn d3_11_a_body_in_many_parts_has_one_end() {
    let (origin, proxy) = echoing();
    let mut raw = Raw::open(&proxy, b"");
    let fields = [&[(":method", "POST")], &GET[1..]].concat();
    for (n, trailers) in [false, true].into_iter().enumerate() {
        let stream = 1 + 4 * n as u32;
        raw.write(frame(kind::HEADERS, flag::END_HEADERS, stream, &section(&fields)));
        for _ in 0..50 {
            raw.write(frame(kind::DATA, 0, stream, b"0\r\n\r\n"));
            raw.write(frame(kind::DATA, 0, stream, b""));
        }
        if trailers {
            raw.write(frame(kind::HEADERS, 5, stream, &section(&[("x-sum", "1")])));
        } else {
            raw.write(frame(kind::DATA, flag::END_STREAM, stream, b""));
        }
        assert!(raw.end_of(stream).ends());
        let seen = origin.last();
        assert_eq!((seen.text(), seen.is_chunked()), ("0\r\n\r\n".repeat(50), true));
        assert_eq!(seen.trailers.len(), usize::from(trailers));
        // On the same connection: nothing was left on it.
        raw.write(get_frame(stream + 2));
        assert!(raw.end_of(stream + 2).ends());
        assert!(origin.last().start.starts_with("GET / "));
    }
    assert_eq!(origin.accepted(), 1);
    quiet(&proxy);
}

/// Item 12: a tunnel begins with the upstream's word, not before.
#[test]
fn d3_12_nothing_is_tunnelled_before_the_upstream_agrees() {
    let origin = Origin::start(|call| {
        // It reads on as of the same connection: nothing may come that it has not agreed to.
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno");
        Then::Next
    });
    let proxy = over(&[&origin]).start();
    let mut raw = Raw::open(&proxy, b"");
    let mut fields = GET.to_vec();
    fields[0].1 = "CONNECT";
    fields.insert(1, (":protocol", "websocket"));
    fields.push(("sec-websocket-version", "13"));
    raw.write(frame(kind::HEADERS, flag::END_HEADERS, 1, &section(&fields)));
    raw.write(frame(kind::DATA, 0, 1, b"GET /smuggled HTTP/1.1\r\nHost: a.test\r\n\r\n"));
    raw.end_of(1);
    raw.write(get_frame(3));
    assert!(raw.end_of(3).ends());
    let targets: Vec<_> = origin.seen().iter().map(|s| s.message.target().to_owned()).collect();
    let logged: Vec<_> = proxy.events("request_completed");
    assert_eq!(targets, ["/", "/"], "{logged:#?}");
    quiet(&proxy);
}

/// Case `h2-cookie-crumbs`: what the cookie decides, it decides in whichever crumb it is.
#[test]
fn h2_cookie_crumbs_are_found_by_the_hash() {
    let origins = ["one", "two", "three"].map(|name| Origin::start(reply::name(name)));
    let key = "selector: { algorithm: consistent-hash-bounded, hash_key: \"cookie:session_id\" }";
    let proxy = over(&[&origins[0], &origins[1], &origins[2]]).pool(key).start();
    let conn = Conn::open(&proxy);
    let mut used = std::collections::BTreeSet::new();
    for n in 0..60 {
        let session = format!("session_id={n}");
        let split = ["a=1", session.as_str(), "b=\"x; y\""];
        let joined = split.join("; ");
        let mut chosen = std::collections::BTreeSet::new();
        for crumbs in [&split[..], &[joined.as_str()]].repeat(3) {
            let mut asked = crate::http2_tools::request("GET", "/");
            for crumb in crumbs {
                asked.headers_mut().append("cookie", crumb.parse().expect("a value"));
            }
            chosen.insert(conn.ask(asked).expect("an answer").text());
        }
        assert_eq!(chosen.len(), 1, "{session}: {chosen:?}");
        used.extend(chosen);
    }
    assert_eq!(used.len(), 3, "{used:?}");
}
