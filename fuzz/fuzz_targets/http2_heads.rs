//! Heads that come by HTTP/2, as HTTP/1.1: whatever they say, it is one message with nothing behind
//! it, for the host that they name.

#![no_main]

use http::request;
use l7rp::http2::heads::{Body, request_to_h1, response_to_h1};
use l7rp_core::http1::Limits;
use l7rp_core::http1::request::{Request, parse_request};
use l7rp_core::http1::response::{Response, parse_response};
use libfuzzer_sys::fuzz_target;

const ANY: Limits = Limits { max_head: 1 << 20, max_fields: 1 << 10, max_target: 1 << 20 };
const FIELDS: usize = 1 << 10;

/// Fields as the library lets them through, each from a line `name: value`.
fn fields<'a>(lines: impl Iterator<Item = &'a [u8]>, add: &mut impl FnMut(&[u8], &[u8])) {
    for line in lines {
        if let Some(colon) = line.iter().position(|b| *b == b':') {
            add(&line[..colon], &line[colon + 1..]);
        }
    }
}

fn asked(data: &[u8]) -> Option<request::Parts> {
    let mut lines = data.split(|b| *b == b'\n');
    let method = http::Method::from_bytes(lines.next()?).ok()?;
    let target = http::Uri::try_from(lines.next()?).ok()?;
    let mut request = http::Request::new(());
    *request.method_mut() = method;
    *request.uri_mut() = target;
    let all = request.headers_mut();
    fields(lines, &mut |name, value| {
        let name = http::HeaderName::from_lowercase(name);
        if let (Ok(name), Ok(value)) = (name, http::HeaderValue::from_bytes(value)) {
            all.append(name, value);
        }
    });
    Some(request.into_parts().0)
}

fuzz_target!(|data: &[u8]| {
    let Some((first, data)) = data.split_first() else { return };
    let body = [Body::None, Body::Length, Body::Chunked][usize::from(first % 3)];
    if let Some(parts) = asked(data)
        && let Ok(out) = request_to_h1(&parts, body, FIELDS)
    {
        let mut head = Request::default();
        // What the exchange then refuses is refused.
        if let Ok(len) = parse_request(&out, &mut head, ANY) {
            assert_eq!(len, Some(out.len()), "{}", out.escape_ascii());
            let named = parts.uri.authority().map(|authority| authority.as_str().as_bytes());
            let named = named.or_else(|| parts.headers.get("host").map(|host| host.as_bytes()));
            // Spaces around a value are none of it (RFC 9110, section 5.5).
            assert_eq!(Some(head.host.of(&out)), named.map(<[u8]>::trim_ascii));
        }
    }
    let mut response = http::Response::new(());
    *response.status_mut() =
        http::StatusCode::from_u16(100 + u16::from(*first) * 2).unwrap_or_default();
    let all = response.headers_mut();
    fields(data.split(|b| *b == b'\n'), &mut |name, value| {
        let name = http::HeaderName::from_lowercase(name);
        if let (Ok(name), Ok(value)) = (name, http::HeaderValue::from_bytes(value)) {
            all.append(name, value);
        }
    });
    let to_head = first & 1 == 0;
    let out = response_to_h1(&response.into_parts().0, body, to_head);
    let mut head = Response::default();
    if let Ok(len) = parse_response(&out, &mut head, to_head, ANY) {
        assert_eq!(len, Some(out.len()), "{}", out.escape_ascii());
    }
});
