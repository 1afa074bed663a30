//! One request off the wire, and one answer onto it: no more of HTTP/1.1 than such endpoints need.

use std::fmt::Write;
use std::net::IpAddr;

use l7rp_core::failure::Failure;
use l7rp_core::head;
use l7rp_core::http1::request::{Method, Request, parse_request};
use l7rp_core::http1::{Framing, Limits};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::stream::Stream;

const LIMITS: Limits = Limits { max_head: 8 << 10, max_fields: 50, max_target: 2 << 10 };
/// Octets of a request's body.
const MAX_BODY: u64 = 64 << 10;

pub(super) const TEXT: &str = "text/plain; charset=utf-8";
pub(super) const JSON: &str = "application/json";

/// A request.
#[derive(Debug)]
pub(super) struct Asked<'a> {
    pub(super) method: Method,
    pub(super) is_head: bool,
    /// Without the query.
    pub(super) path: &'a [u8],
    /// Who asks; `None`: somebody on a Unix-domain socket.
    pub(super) peer: Option<IpAddr>,
    pub(super) body: &'a [u8],
    /// The connection may serve another one.
    pub(super) keep_alive: bool,
    head: &'a Request,
    buf: &'a [u8],
}

impl Asked<'_> {
    /// The value of the field with this name: the first one.
    pub(super) fn field(&self, name: &str) -> Option<&[u8]> {
        head::value(&self.head.fields, self.buf, name)
    }

    /// Whether there is more than one field with this name.
    pub(super) fn repeats(&self, name: &str) -> bool {
        let names = self.head.fields.iter().map(|field| field.name.of(self.buf));
        names.filter(|one| one.eq_ignore_ascii_case(name.as_bytes())).count() > 1
    }

    /// The Host field.
    pub(super) fn host(&self) -> &[u8] {
        self.head.host.of(self.buf)
    }
}

/// An answer.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: &'static str,
    pub(super) content_type: &'static str,
    /// Whole lines beside those that every answer has.
    pub(super) fields: &'static str,
    pub(super) body: String,
}

impl Answer {
    pub(super) fn new(
        status: &'static str,
        content_type: &'static str,
        body: impl Into<String>,
    ) -> Self {
        Self { status, content_type, fields: "", body: body.into() }
    }

    pub(super) fn text(status: &'static str, body: impl Into<String>) -> Self {
        Self::new(status, TEXT, body)
    }

    /// 200, with this value.
    pub(super) fn json(value: &impl serde::Serialize) -> Self {
        match serde_json::to_string_pretty(value) {
            Ok(body) => Self::new("200 OK", JSON, body + "\n"),
            Err(e) => Self::text("500 Internal Server Error", format!("{e}\n")),
        }
    }

    fn refusal(failure: Failure) -> Self {
        let m = failure.meaning();
        let status = match m.status {
            405 => "405 Method Not Allowed",
            413 => "413 Content Too Large",
            414 => "414 URI Too Long",
            431 => "431 Request Header Fields Too Large",
            505 => "505 HTTP Version Not Supported",
            _ => "400 Bad Request",
        };
        // Of what it is asked for nothing is known yet.
        let fields = if m.status == 405 { "Allow: GET, HEAD, POST\r\n" } else { "" };
        Self { fields, ..Self::text(status, format!("{}: {}\n", m.text, m.reason)) }
    }
}

/// Reads the requests of one connection.
#[derive(Debug, Default)]
pub(super) struct Reader {
    buf: Vec<u8>,
    head: Request,
    /// Octets of the last request.
    used: usize,
}

impl Reader {
    /// The next request, or what is to be answered where it is none. `None`: the connection is
    /// over.
    pub(super) async fn next(
        &mut self,
        stream: &mut Stream,
        peer: Option<IpAddr>,
    ) -> Option<Result<Asked<'_>, Answer>> {
        self.buf.drain(..self.used);
        self.used = 0;
        let len = loop {
            if !self.buf.is_empty() {
                match parse_request(&self.buf, &mut self.head, LIMITS) {
                    Ok(Some(len)) => break len,
                    Ok(None) => {}
                    Err(failure) => return Some(Err(Answer::refusal(failure))),
                }
            }
            if stream.read_buf(&mut self.buf).await.ok()? == 0 {
                return None;
            }
        };
        let body = match self.head.framing {
            Framing::None => 0,
            Framing::Length(n) if n <= MAX_BODY => n as usize,
            Framing::Length(_) => return Some(Err(Answer::refusal(Failure::BodyTooLarge))),
            Framing::Chunked | Framing::UntilClose => {
                let why = "say Content-Length, this takes no chunks\n";
                return Some(Err(Answer::text("411 Length Required", why)));
            }
        };
        if self.head.expects_continue && self.buf.len() < len + body {
            stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.ok()?;
        }
        while self.buf.len() < len + body {
            if stream.read_buf(&mut self.buf).await.ok()? == 0 {
                return None;
            }
        }
        self.used = len + body;
        let (head, buf) = (&self.head, &self.buf[..]);
        let target = head.target.of(buf);
        Some(Ok(Asked {
            method: head.method,
            is_head: head.method == Method::Head,
            path: target.split(|&b| b == b'?').next().unwrap_or_default(),
            peer,
            body: &buf[len..len + body],
            keep_alive: head.keep_alive,
            head,
            buf,
        }))
    }
}

/// Writes an answer; `None`: the connection is over.
pub(super) async fn write(
    stream: &mut Stream,
    answer: &Answer,
    keep: bool,
    to_head: bool,
) -> Option<()> {
    let Answer { status, content_type, fields, body } = answer;
    let mut text = format!("HTTP/1.1 {status}\r\n{fields}");
    if !status.starts_with("204") {
        let _ = write!(text, "Content-Type: {content_type}\r\nContent-Length: {}\r\n", body.len());
    }
    if !keep {
        text += "Connection: close\r\n";
    }
    text += "\r\n";
    if !to_head {
        text += body;
    }
    stream.write_all(text.as_bytes()).await.ok()
}
