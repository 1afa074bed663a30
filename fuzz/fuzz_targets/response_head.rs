//! Response heads: what is accepted ends where anybody would say it ends, and frames the same
//! body when it is written again for the client.
#![no_main]

use l7rp_core::http1::encode::{self, Changes, ToClient};
use l7rp_core::http1::response::{Response, parse_response};
use l7rp_core::http1::{Framing, Limits};
use libfuzzer_sys::fuzz_target;

const LIMITS: Limits = Limits { max_head: 8192, max_fields: 20, max_target: 0 };
/// What is written may be longer than what was read.
const WRITTEN: Limits = Limits { max_head: 32768, max_fields: 40, max_target: 0 };

fuzz_target!(|data: &[u8]| {
    let [how, data @ ..] = data else { return };
    let (to_head, is_http10, keep_alive) = (how & 1 != 0, how & 2 != 0, how & 4 != 0);
    let mut head = Response::default();
    let Ok(Some(len)) = parse_response(data, &mut head, to_head, LIMITS) else { return };
    let buf = &data[..len];
    assert_eq!(naive_end(data), Some(len), "where the head ends");
    assert!((100..=599).contains(&head.status));
    assert!(!head.reason.of(buf).contains(&b'\r'));
    let bodiless = to_head || matches!(head.status, 100..=199 | 204 | 304);
    assert!(!bodiless || head.framing == Framing::None);

    let mut out = Vec::new();
    let to = ToClient { is_http10, keep_alive, request_id: b"id", decision: b"" };
    if head.status < 200 {
        encode::interim(&mut out, buf, &head);
    } else {
        encode::response(&mut out, buf, &head, &to, &Changes::default());
    }
    let mut again = Response::default();
    let read = parse_response(&out, &mut again, to_head, WRITTEN);
    assert_eq!(read, Ok(Some(out.len())), "{}", out.escape_ascii());
    assert_eq!(naive_end(&out), Some(out.len()));
    assert_eq!(again.status, head.status);
    assert_eq!(again.reason.of(&out), head.reason.of(buf));
    // To HTTP/1.0 chunks are taken off, and the end of the connection is the end of the body.
    let chunks_end_here = is_http10 && head.framing == Framing::Chunked;
    let framing = if chunks_end_here { Framing::UntilClose } else { head.framing };
    assert_eq!(again.framing, framing);
    if head.status >= 200 && framing != Framing::UntilClose {
        assert_eq!(again.keep_alive, keep_alive);
    }
});

/// The end of the head as lines tell it: after the first empty one. `None`: a line does not end
/// in CR LF, or a CR stands elsewhere.
fn naive_end(data: &[u8]) -> Option<usize> {
    let mut at = 0;
    for line in data.split_inclusive(|b| *b == b'\n') {
        at += line.len();
        let text = line.strip_suffix(b"\r\n")?;
        if text.contains(&b'\r') {
            return None;
        }
        if text.is_empty() {
            return Some(at);
        }
    }
    None
}
