//! Request heads: what is accepted ends where anybody would say it ends, and says the same when
//! it is written again for the upstream.
#![no_main]

use l7rp_core::head::{Name, list_has};
use l7rp_core::http1::Limits;
use l7rp_core::http1::encode::{self, Changes, Forwarding};
use l7rp_core::http1::request::{Request, parse_request};
use l7rp_core::route::parse_host;
use libfuzzer_sys::fuzz_target;

const LIMITS: Limits = Limits { max_head: 8192, max_fields: 20, max_target: 1024 };
/// What is written may be longer than what was read.
const WRITTEN: Limits = Limits { max_head: 32768, max_fields: 40, max_target: 2048 };

fuzz_target!(|data: &[u8]| {
    let mut head = Request::default();
    let Ok(Some(len)) = parse_request(data, &mut head, LIMITS) else { return };
    let buf = &data[..len];
    assert_eq!(naive_end(data), Some(len), "where the head ends");
    for field in &head.fields {
        assert!(!field.name.of(buf).is_empty() && field.value.end() + 2 <= len);
    }

    let host = head.host.of(buf);
    if parse_host(host).is_err() && !(host.is_empty() && head.is_http10) {
        return;
    }
    let host = if host.is_empty() { b"fallback" } else { host };
    let target = head.target.of(buf);
    let slash: &[u8] = if target.starts_with(b"/") || target == b"*" { b"" } else { b"/" };
    let forwarding = Forwarding {
        peer: "2001:db8::1",
        client: "192.0.2.1",
        proto: "http",
        peer_is_trusted: len % 2 == 0,
        identity: None,
        request_id: b"id",
        trace: None,
    };
    let mut out = Vec::new();
    let parts = [slash, target];
    encode::request(&mut out, buf, &head, &parts, host, &forwarding, &Changes::default());
    let mut again = Request::default();
    let read = parse_request(&out, &mut again, WRITTEN);
    assert_eq!(read, Ok(Some(out.len())), "{}", out.escape_ascii());
    assert_eq!(naive_end(&out), Some(out.len()));
    assert_eq!(again.framing, head.framing);
    assert_eq!(again.method_text.of(&out), head.method_text.of(buf));
    assert_eq!(again.target.of(&out), parts.concat());
    assert_eq!(again.host.of(&out), host);
    assert_eq!(again.expects_continue, head.expects_continue);
    assert!(again.keep_alive && !again.is_http10);
    // Hop by hop is only what we say ourselves.
    let offers = head.upgrade.len > 0;
    assert_eq!(again.takes_trailers, head.takes_trailers);
    assert_eq!(again.upgrade.of(&out), head.upgrade.of(buf));
    assert_eq!(again.connection_named, head.takes_trailers || offers);
    same_fields(buf, &head, &out, &again);
});

/// Fields that mean nothing to the proxy pass in order and unchanged, but for those that
/// `Connection` names.
fn same_fields(buf: &[u8], head: &Request, out: &[u8], again: &Request) {
    let named = |name: &[u8]| {
        let mut all = head.fields.iter().filter(|f| f.id == Name::Connection);
        all.any(|f| list_has(f.value.of(buf), name))
    };
    let before = head
        .fields
        .iter()
        .filter(|f| f.id == Name::Other)
        .map(|f| (f.name.of(buf), f.value.of(buf)));
    let before: Vec<_> = before
        .filter(|(name, _)| !named(name) && !name.eq_ignore_ascii_case(b"http2-settings"))
        .collect();
    let after = again.fields.iter().filter(|f| f.id == Name::Other);
    let after: Vec<_> = after.map(|f| (f.name.of(out), f.value.of(out))).collect();
    assert_eq!(before, after);
}

/// The end of the head as lines tell it: after the first empty one behind the start line.
/// `None`: a line does not end in CR LF, or a CR stands elsewhere.
fn naive_end(data: &[u8]) -> Option<usize> {
    let mut at = 0;
    let mut started = false;
    for line in data.split_inclusive(|b| *b == b'\n') {
        at += line.len();
        let bare = line.strip_suffix(b"\n")?;
        let text =
            bare.strip_suffix(b"\r").or_else(|| (!started && bare.is_empty()).then_some(bare))?;
        if text.contains(&b'\r') {
            return None;
        }
        if started && text.is_empty() {
            return Some(at);
        }
        started |= !text.is_empty();
    }
    None
}
