//! Outgoing heads: one pass over the incoming one, appended to one buffer.
//!
//! Fields that pass through unchanged are copied in runs of whole lines, so that a head of
//! many fields costs a few copies.

use super::request::Request;
use super::response::Response;
use super::{Framing, is_named_by_connection};
use crate::head::{Field, Name, Span};

/// What the upstream is told about the client (requirement: values from a peer that is not
/// trusted are replaced, those from a trusted one extended).
#[derive(Clone, Copy, Debug)]
pub struct Forwarding<'a> {
    /// Address of the peer that the connection came from.
    pub peer: &'a str,
    /// Address of the client; the peer's, or one that a trusted peer has named.
    pub client: &'a str,
    /// `http` or `https`.
    pub proto: &'a str,
    /// Whether the peer's own forwarding fields are believed.
    pub peer_is_trusted: bool,
    /// Written as `X-Request-ID`.
    pub request_id: &'a [u8],
    /// The field that says who the client has proved to be, and what it says.
    pub identity: Option<(&'a str, &'a str)>,
    /// What is said of the trace instead of what the client has said; `None`: that is passed on.
    pub trace: Option<TraceFields<'a>>,
}

/// What an upstream is told of the trace that a request is part of.
#[derive(Clone, Copy, Debug)]
pub struct TraceFields<'a> {
    /// Written as `traceparent`.
    pub traceparent: &'a [u8],
    /// The trace is the client's, and so `tracestate` is passed on.
    pub keeps_state: bool,
}

/// Fields that a route adds and removes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Names, in any case, that are not passed on; those of `add` among them.
    pub drop: Vec<String>,
    /// Lines written at the end.
    pub add: Vec<(String, String)>,
    /// Names by which only the proxy may speak. What many servers would take for the same is not
    /// passed on either: they make one variable of `x-a` and `x_a`.
    pub guarded: Vec<String>,
}

impl Changes {
    /// Whether a field of this name is not passed on.
    pub fn drops(&self, name: &[u8]) -> bool {
        self.drop.iter().any(|d| d.as_bytes().eq_ignore_ascii_case(name))
            || self.guarded.iter().any(|g| is_alike(g.as_bytes(), name))
    }

    /// A trailer section without the fields that are not passed on.
    pub fn strip(&self, trailer: Vec<u8>) -> Vec<u8> {
        let dropped = |line: &[u8]| {
            let colon = line.iter().position(|&b| b == b':');
            colon.is_some_and(|colon| self.drops(&line[..colon]))
        };
        if !trailer.split(|&b| b == b'\n').any(dropped) {
            return trailer;
        }
        let lines = trailer.split_inclusive(|&b| b == b'\n').filter(|line| !dropped(line));
        lines.flatten().copied().collect()
    }

    /// Appends the lines that are added.
    pub fn write(&self, out: &mut Vec<u8>) {
        for (name, value) in &self.add {
            line(out, name, value.as_bytes());
        }
    }
}

fn is_alike(one: &[u8], other: &[u8]) -> bool {
    let same = |octet: &u8| if *octet == b'_' { b'-' } else { octet.to_ascii_lowercase() };
    one.len() == other.len() && one.iter().map(same).eq(other.iter().map(same))
}

/// Appends the head that goes to the upstream. `buf`: what `head` was parsed from. The
/// request target is the concatenation of `target`.
pub fn request(
    out: &mut Vec<u8>,
    buf: &[u8],
    head: &Request,
    target: &[&[u8]],
    host: &[u8],
    forwarding: &Forwarding<'_>,
    changes: &Changes,
) {
    out.extend_from_slice(head.method_text.of(buf));
    out.push(b' ');
    for part in target {
        out.extend_from_slice(part);
    }
    out.extend_from_slice(b" HTTP/1.1\r\n");
    line(out, "Host", host);
    copy(out, buf, &head.fields, |field| {
        let id = field.id;
        if id.is_hop_by_hop() {
            return false;
        }
        match id {
            Name::Host
            | Name::XForwardedFor
            | Name::XForwardedProto
            | Name::XForwardedHost
            | Name::XRealIp
            | Name::Forwarded
            | Name::XRequestId => false,
            Name::Traceparent if forwarding.trace.is_some() => false,
            Name::Tracestate if forwarding.trace.is_some_and(|trace| !trace.keeps_state) => false,
            Name::Expect => head.expects_continue,
            Name::Other if is_http2_settings(field.name.of(buf)) => false,
            _ => passes(buf, &head.fields, head.connection_named, field, changes),
        }
    });
    forwarding_fields(out, buf, head, forwarding, changes);
    if head.framing == Framing::Chunked {
        out.extend_from_slice(b"Transfer-Encoding: chunked\r\n");
    }
    let offer = head.upgrade.of(buf);
    match (offer.is_empty(), head.takes_trailers) {
        (true, false) => {}
        (true, true) => out.extend_from_slice(b"TE: trailers\r\nConnection: TE\r\n"),
        (false, _) => {
            line(out, "Upgrade", offer);
            out.extend_from_slice(b"Connection: Upgrade\r\n");
        }
    }
    changes.write(out);
    out.extend_from_slice(b"\r\n");
}

/// The companion of `Upgrade: h2c`, which ends here: without it the offer stays one
/// (RFC 7540 §3.2.1), whether or not `Connection` names it as it must.
fn is_http2_settings(name: &[u8]) -> bool {
    name.eq_ignore_ascii_case(b"http2-settings")
}

/// Writes what we say of the client, but for what the route drops or sets itself.
fn forwarding_fields(
    out: &mut Vec<u8>,
    buf: &[u8],
    head: &Request,
    f: &Forwarding<'_>,
    changes: &Changes,
) {
    let mut write = |name: &str, believed: &[Name], separator: &[u8], own: &[u8]| {
        if changes.drops(name.as_bytes()) {
            return;
        }
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(b": ");
        if f.peer_is_trusted {
            for value in believed.iter().flat_map(|id| values(buf, &head.fields, *id)) {
                if !value.is_empty() {
                    out.extend_from_slice(value);
                    out.extend_from_slice(separator);
                }
            }
        }
        out.extend_from_slice(own);
        out.extend_from_slice(b"\r\n");
    };
    write("X-Forwarded-For", &[Name::XForwardedFor], b", ", f.peer.as_bytes());
    let last = |name| values(buf, &head.fields, name).next_back().filter(|_| f.peer_is_trusted);
    let proto = last(Name::XForwardedProto).unwrap_or(f.proto.as_bytes());
    write("X-Forwarded-Proto", &[], b"", proto);
    let host = last(Name::XForwardedHost).unwrap_or_else(|| head.host.of(buf));
    // HTTP/1.0 may come without one.
    if !host.is_empty() {
        write("X-Forwarded-Host", &[], b"", host);
    }
    write("X-Real-IP", &[], b"", f.client.as_bytes());
    if last(Name::Forwarded).is_some() {
        // RFC 7239 §6: an IPv6 address is put in brackets and quotes.
        let (open, close) = if f.peer.contains(':') { ("\"[", "]\"") } else { ("", "") };
        let own = format!("for={open}{}{close};proto={}", f.peer, f.proto);
        write("Forwarded", &[Name::Forwarded], b", ", own.as_bytes());
    }
    write("X-Request-ID", &[], b"", f.request_id);
    if let Some(trace) = f.trace {
        write("traceparent", &[], b"", trace.traceparent);
    }
    let is_of_route = |name: &str| changes.drop.iter().any(|d| d.eq_ignore_ascii_case(name));
    if let Some((name, value)) = f.identity
        && !is_of_route(name)
    {
        line(out, name, value.as_bytes());
    }
}

/// What the client must know of this hop.
#[derive(Clone, Copy, Debug)]
pub struct ToClient<'a> {
    /// The client speaks HTTP/1.0: no chunks, and a connection is kept only by request.
    pub is_http10: bool,
    /// Whether another request may follow on this connection.
    pub keep_alive: bool,
    /// Written as `X-Request-ID`.
    pub request_id: &'a [u8],
    /// Written as `X-L7rp-Decision`; empty: it is not. What an upstream says there was for this
    /// proxy, and is not passed on in any case.
    pub decision: &'a [u8],
}

/// Appends the head that goes to the client. `buf`: what `head` was parsed from.
pub fn response(
    out: &mut Vec<u8>,
    buf: &[u8],
    head: &Response,
    to: &ToClient<'_>,
    changes: &Changes,
) {
    status_line(out, buf, head);
    copy(out, buf, &head.fields, |field| {
        let id = field.id;
        !id.is_hop_by_hop()
            && id != Name::XRequestId
            && id != Name::XL7rpDecision
            && !(id == Name::ContentLength && head.status == 204)
            && passes(buf, &head.fields, head.connection_named, field, changes)
    });
    if head.framing == Framing::Chunked && !to.is_http10 {
        out.extend_from_slice(b"Transfer-Encoding: chunked\r\n");
    }
    if head.status == 101 {
        for protocol in values(buf, &head.fields, Name::Upgrade) {
            line(out, "Upgrade", protocol);
        }
        out.extend_from_slice(b"Connection: Upgrade\r\n");
    } else if !to.keep_alive {
        out.extend_from_slice(b"Connection: close\r\n");
    } else if to.is_http10 {
        out.extend_from_slice(b"Connection: keep-alive\r\n");
    }
    if !changes.drops(b"X-Request-ID") {
        line(out, "X-Request-ID", to.request_id);
    }
    if !to.decision.is_empty() && !changes.drops(DECISION.as_bytes()) {
        line(out, DECISION, to.decision);
    }
    changes.write(out);
    out.extend_from_slice(b"\r\n");
}

/// The field that says what was decided about a request.
pub const DECISION: &str = "X-L7rp-Decision";

/// Appends an interim (1xx) response without anything that frames or belongs to one hop.
pub fn interim(out: &mut Vec<u8>, buf: &[u8], head: &Response) {
    status_line(out, buf, head);
    copy(out, buf, &head.fields, |field| {
        !field.id.is_hop_by_hop()
            && field.id != Name::ContentLength
            && passes(buf, &head.fields, head.connection_named, field, &Changes::default())
    });
    out.extend_from_slice(b"\r\n");
}

fn status_line(out: &mut Vec<u8>, buf: &[u8], head: &Response) {
    out.extend_from_slice(b"HTTP/1.1 ");
    let s = head.status;
    out.extend([s / 100, s / 10 % 10, s % 10].map(|d| b'0' + d as u8));
    out.push(b' ');
    out.extend_from_slice(head.reason.of(buf));
    out.extend_from_slice(b"\r\n");
}

/// Appends `name: value` and a line end.
pub fn line(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

/// The values of all fields with this name, in order.
pub fn values<'a>(
    buf: &'a [u8],
    fields: &'a [Field],
    name: Name,
) -> impl DoubleEndedIterator<Item = &'a [u8]> {
    fields.iter().filter(move |f| f.id == name).map(|f| f.value.of(buf))
}

/// Whether a field that is not ours passes: neither `Connection` nor the route drops it.
fn passes(
    buf: &[u8],
    fields: &[Field],
    connection_named: bool,
    field: &Field,
    changes: &Changes,
) -> bool {
    if changes.drop.is_empty() && changes.guarded.is_empty() && !connection_named {
        return true;
    }
    let name = field.name.of(buf);
    let named = connection_named
        && field.id.may_be_named_by_connection()
        && is_named_by_connection(buf, fields, name);
    !named && !changes.drops(name)
}

/// Appends the lines of the fields that `keep` wants, whole runs at a time.
fn copy(out: &mut Vec<u8>, buf: &[u8], fields: &[Field], keep: impl Fn(&Field) -> bool) {
    let mut run = Span::default();
    for field in fields.iter().filter(|f| keep(f)) {
        let start = field.name.at as usize;
        let end = field.value.end() + 2;
        let tidy = field.value.at as usize == field.name.end() + 2
            && buf.get(field.name.end()..field.name.end() + 2) == Some(b": ")
            && buf.get(field.value.end()..end) == Some(b"\r\n");
        if tidy && run.end() == start && run.len > 0 {
            run.len += (end - start) as u32;
            continue;
        }
        out.extend_from_slice(run.of(buf));
        if tidy {
            run = Span { at: field.name.at, len: (end - start) as u32 };
        } else {
            run = Span::default();
            out.extend_from_slice(field.name.of(buf));
            out.extend_from_slice(b": ");
            out.extend_from_slice(field.value.of(buf));
            out.extend_from_slice(b"\r\n");
        }
    }
    out.extend_from_slice(run.of(buf));
}

#[cfg(test)]
mod tests {
    use super::super::Limits;
    use super::super::request::parse_request;
    use super::super::response::parse_response;
    use super::*;

    const LIMITS: Limits = Limits { max_head: 65536, max_fields: 100, max_target: 16384 };

    fn forwarded(raw: &str, trusted: bool) -> String {
        let mut head = Request::default();
        let len = parse_request(raw.as_bytes(), &mut head, LIMITS).unwrap().unwrap();
        assert_eq!(len, raw.len());
        let forwarding = Forwarding {
            peer: "192.0.2.1",
            client: if trusted { "203.0.113.7" } else { "192.0.2.1" },
            proto: "http",
            peer_is_trusted: trusted,
            request_id: b"id-1",
            identity: None,
            trace: None,
        };
        let changes = Changes { drop: vec!["x-secret".into()], ..Changes::default() };
        let mut out = Vec::new();
        let target = head.target.of(raw.as_bytes());
        request(
            &mut out,
            raw.as_bytes(),
            &head,
            &[target],
            head.host.of(raw.as_bytes()),
            &forwarding,
            &changes,
        );
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn what_is_dropped_is_no_trailer_either() {
        let changes = Changes {
            drop: vec!["X-Gone".into()],
            guarded: vec!["x-who".into()],
            ..Changes::default()
        };
        let strip = |text: &str| String::from_utf8(changes.strip(text.into())).unwrap();
        let all = "0\r\nx-gone: 1\r\nX: 2\r\nX_Who: eve\r\nx-who:eve\r\n\r\n";
        assert_eq!(strip(all), "0\r\nX: 2\r\n\r\n");
        assert_eq!(strip("0\r\nX: 2\r\n\r\n"), "0\r\nX: 2\r\n\r\n");
        assert_eq!(strip(""), "");
    }

    #[test]
    fn only_the_proxy_says_who_a_client_is() {
        let raw = "GET / HTTP/1.1\r\nHost: a\r\nX-Who: eve\r\nx_WHO: eve\r\nX-Whom: 1\r\n\r\n";
        let mut head = Request::default();
        parse_request(raw.as_bytes(), &mut head, LIMITS).unwrap().unwrap();
        let told = |identity: Option<(&str, &str)>, changes: &Changes| {
            let forwarding = Forwarding {
                trace: None,
                peer: "192.0.2.1",
                client: "192.0.2.1",
                proto: "https",
                peer_is_trusted: true,
                request_id: b"id-1",
                identity,
            };
            let mut out = Vec::new();
            request(&mut out, raw.as_bytes(), &head, &[b"/"], b"a", &forwarding, changes);
            let out = String::from_utf8(out).unwrap();
            let fields = out.lines().filter(|line| line.to_lowercase().starts_with("x-who"));
            fields.map(str::to_owned).collect::<Vec<_>>()
        };
        let guarded = Changes { guarded: vec!["x-who".into()], ..Changes::default() };
        assert_eq!(told(None, &guarded), ["X-Whom: 1"]);
        assert_eq!(told(Some(("x-who", "CN=a")), &guarded), ["X-Whom: 1", "x-who: CN=a"]);
        let set = Changes {
            drop: vec!["X-Who".into()],
            add: vec![("X-Who".into(), "none".into())],
            ..guarded
        };
        assert_eq!(told(Some(("x-who", "CN=a")), &set), ["X-Whom: 1", "X-Who: none"]);
    }

    #[test]
    fn request_keeps_order_case_and_bytes_and_drops_what_ends_here() {
        let out = forwarded(
            "POST /a?b HTTP/1.1\r\nhost: example.test\r\nX-One:  1 \r\nx-two: 2\r\n\
             X-Secret: s\r\nConnection: X-Named, Content-Length, close\r\nX-Named: n\r\n\
             TE: trailers\r\nKeep-Alive: 5\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\nX-Empty:\r\n\
             X-Forwarded-For: 6.6.6.6\r\nForwarded: for=6.6.6.6\r\nX-Real-IP: 6.6.6.6\r\n\
             X-Forwarded-Host: evil\r\nX-Forwarded-Proto: https\r\nContent-Length: 3\r\n\
             X-Request-ID: old\r\n\r\n",
            false,
        );
        assert_eq!(
            out,
            "POST /a?b HTTP/1.1\r\nHost: example.test\r\nX-One: 1\r\nx-two: 2\r\nX-Empty: \r\n\
             Content-Length: 3\r\nX-Forwarded-For: 192.0.2.1\r\nX-Forwarded-Proto: http\r\n\
             X-Forwarded-Host: example.test\r\nX-Real-IP: 192.0.2.1\r\nX-Request-ID: id-1\r\n\
             TE: trailers\r\nConnection: TE\r\n\r\n"
        );
    }

    #[test]
    fn request_extends_what_a_trusted_peer_says() {
        let out = forwarded(
            "GET / HTTP/1.1\r\nHost: a.test\r\nX-Forwarded-For: 203.0.113.7\r\n\
             X-Forwarded-For: 198.51.100.2\r\nX-Forwarded-Proto: https\r\n\
             X-Forwarded-Host: front.test\r\nForwarded: for=203.0.113.7\r\n\r\n",
            true,
        );
        assert_eq!(
            out,
            "GET / HTTP/1.1\r\nHost: a.test\r\n\
             X-Forwarded-For: 203.0.113.7, 198.51.100.2, 192.0.2.1\r\n\
             X-Forwarded-Proto: https\r\nX-Forwarded-Host: front.test\r\n\
             X-Real-IP: 203.0.113.7\r\n\
             Forwarded: for=203.0.113.7, for=192.0.2.1;proto=http\r\n\
             X-Request-ID: id-1\r\n\r\n"
        );
    }

    fn answered(raw: &str, is_http10: bool, keep_alive: bool) -> String {
        let mut head = Response::default();
        parse_response(raw.as_bytes(), &mut head, false, LIMITS).unwrap().unwrap();
        let to = ToClient { is_http10, keep_alive, request_id: b"id-1", decision: b"" };
        let mut out = Vec::new();
        response(&mut out, raw.as_bytes(), &head, &to, &Changes::default());
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn response_is_framed_for_its_receiver() {
        let raw = "HTTP/1.1 200 Fine\r\nTransfer-Encoding: chunked\r\nSet-Cookie: a\r\n\
                   Set-Cookie: b\r\nKeep-Alive: timeout=5\r\nX-Request-ID: theirs\r\n\r\n";
        assert_eq!(
            answered(raw, false, true),
            "HTTP/1.1 200 Fine\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n\
             Transfer-Encoding: chunked\r\nX-Request-ID: id-1\r\n\r\n"
        );
        assert_eq!(
            answered(raw, true, false),
            "HTTP/1.1 200 Fine\r\nSet-Cookie: a\r\nSet-Cookie: b\r\nConnection: close\r\n\
             X-Request-ID: id-1\r\n\r\n"
        );
    }

    #[test]
    fn a_204_announces_no_body() {
        let out = answered("HTTP/1.1 204 No\r\nContent-Length: 5\r\n\r\n", false, true);
        assert_eq!(out, "HTTP/1.1 204 No\r\nX-Request-ID: id-1\r\n\r\n");
    }
}
