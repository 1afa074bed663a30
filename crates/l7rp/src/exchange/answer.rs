//! Answers that this proxy makes itself: failures, redirects, fixed responses.

use std::io::Write;

use l7rp_core::failure::{Blame, Failure, Malformed};
use l7rp_core::http1::body::Body;
use l7rp_core::http1::encode::{DECISION, line};
use l7rp_core::http1::request::Method;

use super::client::Client;
use super::judge::Probe;
use super::record::Record;
use super::{Done, Exchange, Next, Workspace, decision};
use crate::live::Listener;
use crate::worker::Worker;

/// An answer to be written.
#[derive(Debug)]
struct Answer<'a> {
    status: u16,
    /// Lines beside those that every answer has.
    fields: &'a [(&'a str, &'a str)],
    content_type: &'a str,
    body: &'a str,
}

/// Answers a request with what `failure` means; if the response has begun, ends it so that
/// the client notices.
pub(super) async fn failure(
    x: &Exchange<'_>,
    client: &mut Client,
    record: &mut Record<'_>,
    space: &mut Workspace<'_>,
    failure: Failure,
) -> Done {
    record.failure = Some(failure);
    let committed = record.status != 0;
    if committed || failure.meaning().blame == Blame::Client && failure.meaning().status == 499 {
        return Done { next: Next::Abort, used: 0 };
    }
    let used = body_in_rest(x);
    // After a malformed request nobody knows where the next one begins, and after a fault of
    // ours what has been read of it.
    let lost = matches!(failure, Failure::BadRequest(_) | Failure::Internal);
    let keep_alive = x.may_keep_alive(client) && used.is_some() && !lost;
    let to_head = x.incoming.head.method == Method::Head;
    let sent = refuse(x.worker, x.listener, client, record, space, failure, keep_alive, to_head);
    let next = match (sent.await, keep_alive) {
        (false, _) => Next::Abort,
        (true, true) => Next::KeepAlive,
        (true, false) => Next::Linger,
    };
    Done { next, used: used.unwrap_or_default() }
}

/// Writes the answer that `failure` means. False: the client is gone.
#[expect(
    clippy::too_many_arguments,
    reason = "two callers; a struct for it would hide what is used"
)]
pub async fn refuse(
    worker: &Worker,
    listener: &Listener,
    client: &mut Client,
    record: &mut Record<'_>,
    space: &mut Workspace<'_>,
    failure: Failure,
    keep_alive: bool,
    to_head: bool,
) -> bool {
    let meaning = failure.meaning();
    record.failure = Some(failure);
    let status = format!("l7rp; error={}; details=\"{}\"", meaning.proxy_status, meaning.reason);
    let id = String::from_utf8_lossy(record.id.as_bytes());
    let body = format!("{} {}\nrequest id: {id}\n", meaning.status, meaning.text);
    let mut fields = vec![("Proxy-Status", status.as_str())];
    let wait = failure.retry_after().map(|seconds| seconds.to_string());
    if let Some(wait) = &wait {
        fields.push(("Retry-After", wait));
    }
    if matches!(failure, Failure::RateLimited { .. }) {
        fields.push(("X-RateLimit-Remaining", "0"));
    }
    let decision = decision::of(record, client, Some(failure));
    let decision = String::from_utf8_lossy(&decision);
    if !decision.is_empty() {
        fields.push((DECISION, &decision));
    }
    if failure == Failure::MethodRefused {
        fields.push(("Allow", "GET, HEAD, POST, PUT, DELETE, OPTIONS, PATCH"));
    }
    let mut answer =
        Answer { status: meaning.status, fields: &fields, content_type: "text/plain", body: &body };
    let code = grpc_status(failure);
    let text = code.to_string();
    let mut for_grpc = fields.clone();
    if record.is_call() {
        record.grpc_status = Some(code);
        for_grpc.extend([("Grpc-Status", text.as_str()), ("Grpc-Message", meaning.text)]);
        answer =
            Answer { status: 200, fields: &for_grpc, content_type: "application/grpc", body: "" };
    }
    let until = worker.process.clock.now().plus(listener.plan.timeouts.write);
    write(space.to_client, &answer, record, keep_alive, to_head);
    record.status = meaning.status;
    record.bytes_out = if to_head { 0 } else { answer.body.len() as u64 };
    client.write_all(space.to_client, &[], until).await.is_ok()
}

/// Answers a probe.
pub(super) async fn probe(
    x: &Exchange<'_>,
    client: &mut Client,
    record: &mut Record<'_>,
    space: &mut Workspace<'_>,
    probe: Probe,
) -> Result<Done, Failure> {
    let unready = match probe {
        Probe::Alive => None,
        Probe::Ready => x.worker.process.why_unready(),
    };
    let answer = match unready {
        None => Answer { status: 204, fields: &[], content_type: "", body: "" },
        Some(why) => {
            Answer { status: 503, fields: &[], content_type: "text/plain", body: why.line() }
        }
    };
    send(x, client, record, space, &answer).await
}

/// Answers with a redirect to the same target under another scheme.
pub(super) async fn redirect(
    x: &Exchange<'_>,
    client: &mut Client,
    record: &mut Record<'_>,
    space: &mut Workspace<'_>,
    scheme: &str,
    code: u16,
) -> Result<Done, Failure> {
    let (buf, head) = (x.incoming.buf, x.incoming.head);
    if head.host.of(buf).is_empty() {
        // HTTP/1.0 may come without one, but then there is nowhere to send it.
        return Err(Failure::BadRequest(Malformed::HostMissing));
    }
    let host = String::from_utf8_lossy(head.host.of(buf)).into_owned();
    // The port was that of the other scheme.
    let host = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => &host,
    };
    // `*` is no path: it does not follow a host.
    let target = if x.incoming.target() == b"*" { b"/" } else { x.incoming.target() };
    let target = String::from_utf8_lossy(target);
    let location = format!("{scheme}://{host}{target}");
    let fields = [("Location", location.as_str())];
    let answer = Answer { status: code, fields: &fields, content_type: "", body: "" };
    send(x, client, record, space, &answer).await
}

/// Answers as the configuration says.
pub(super) async fn fixed(
    x: &Exchange<'_>,
    client: &mut Client,
    record: &mut Record<'_>,
    space: &mut Workspace<'_>,
    status: u16,
    body: &str,
    content_type: &str,
) -> Result<Done, Failure> {
    send(x, client, record, space, &Answer { status, fields: &[], content_type, body }).await
}

async fn send(
    x: &Exchange<'_>,
    client: &mut Client,
    record: &mut Record<'_>,
    space: &mut Workspace<'_>,
    answer: &Answer<'_>,
) -> Result<Done, Failure> {
    let used = body_in_rest(x);
    let keep_alive = x.may_keep_alive(client) && used.is_some();
    let to_head = x.incoming.head.method == Method::Head;
    let decision = decision::of(record, client, None);
    let decision = String::from_utf8_lossy(&decision);
    let mut fields = answer.fields.to_vec();
    if !decision.is_empty() {
        fields.push((DECISION, &decision));
    }
    let answer = &Answer { fields: &fields, ..*answer };
    write(space.to_client, answer, record, keep_alive, to_head);
    record.status = answer.status;
    record.bytes_out = if to_head { 0 } else { answer.body.len() as u64 };
    let until = x.worker.process.clock.now().plus(x.listener.plan.timeouts.write);
    client.write_all(space.to_client, &[], until).await?;
    let next = match (keep_alive, used) {
        (true, _) => Next::KeepAlive,
        (false, Some(_)) => Next::Close,
        (false, None) => Next::Linger,
    };
    Ok(Done { next, used: used.unwrap_or_default() })
}

/// The length of the request's body, if all of it came with the head.
fn body_in_rest(x: &Exchange<'_>) -> Option<usize> {
    let mut body = Body::new(x.incoming.head.framing, x.listener.plan.limits.max_trailer_bytes);
    let seen = body.scan(x.incoming.rest).ok()?;
    seen.done.then_some(seen.used)
}

fn write(
    out: &mut Vec<u8>,
    answer: &Answer<'_>,
    record: &Record<'_>,
    keep_alive: bool,
    to_head: bool,
) {
    out.clear();
    let status = answer.status;
    let _ = write!(out, "HTTP/1.1 {status} {}\r\n", reason_phrase(status));
    // What a route says of its responses goes for those that are made here, too.
    let changes = record.route.map(|route| &route.response_changes);
    let mut own = |name: &str, value: &[u8]| {
        if !changes.is_some_and(|c| c.drops(name.as_bytes())) {
            line(out, name, value);
        }
    };
    if !matches!(status, 204 | 304) {
        own("Content-Length", answer.body.len().to_string().as_bytes());
    }
    if !answer.content_type.is_empty() {
        own("Content-Type", answer.content_type.as_bytes());
    }
    for (name, value) in answer.fields {
        own(name, value.as_bytes());
    }
    own("X-Request-ID", record.id.as_bytes());
    // Said in both cases: a 1.0 client needs the one, a 1.1 client the other.
    own("Connection", if keep_alive { b"keep-alive" } else { b"close" });
    if let Some(changes) = changes {
        changes.write(out);
    }
    out.extend_from_slice(b"\r\n");
    if !to_head && !matches!(status, 204 | 304) {
        out.extend_from_slice(answer.body.as_bytes());
    }
}

/// What a failure is called in gRPC (its "HTTP to gRPC Status Code Mapping", where that is all
/// that is known).
fn grpc_status(failure: Failure) -> u8 {
    const CANCELLED: u8 = 1;
    const DEADLINE_EXCEEDED: u8 = 4;
    const PERMISSION_DENIED: u8 = 7;
    const RESOURCE_EXHAUSTED: u8 = 8;
    const UNIMPLEMENTED: u8 = 12;
    const INTERNAL: u8 = 13;
    const UNAVAILABLE: u8 = 14;
    match failure {
        Failure::TotalTimeout | Failure::DeadlineExceeded => DEADLINE_EXCEEDED,
        Failure::RateLimited { .. } | Failure::BodyTooLarge => RESOURCE_EXHAUSTED,
        Failure::Forbidden => PERMISSION_DENIED,
        failure => match failure.meaning().status {
            404 | 405 => UNIMPLEMENTED,
            499 => CANCELLED,
            502..=504 => UNAVAILABLE,
            _ => INTERNAL,
        },
    }
}

fn reason_phrase(status: u16) -> &'static str {
    match status {
        200 => "OK",
        204 => "No Content",
        301 => "Moved Permanently",
        302 => "Found",
        303 => "See Other",
        307 => "Temporary Redirect",
        308 => "Permanent Redirect",
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Content Too Large",
        414 => "URI Too Long",
        417 => "Expectation Failed",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        // The phrase carries no meaning (RFC 9112 §4); the configuration may name any status.
        _ => "",
    }
}
