//! HTTPS to a CA, one connection for each request: a certificate takes a dozen of them.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body as _;
use instant_acme::{BodyWrapper, BytesResponse, Error, HttpClient};
use l7rp_core::http1::Limits;
use l7rp_core::http1::body::Body;
use l7rp_core::http1::encode::line;
use l7rp_core::http1::response::{self, parse_response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Authority;
use crate::config::plan::{UpstreamProtocol, UpstreamTls};
use crate::stream::{Stream, Tls};
use crate::sync::lock;
use crate::tls::{Originator, TlsError};

/// One request and its answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Octets of an answer; a chain has some 5 KiB.
const MOST: usize = 1 << 20;
/// A CA that names a longer time in the middle of an order means something else.
const LONGEST_WISH: Duration = Duration::from_hours(24);
const MAX_HEAD: Limits = Limits { max_head: 64 << 10, max_fields: 256, max_target: 0 };

/// How a CA is asked.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    tls: Arc<Originator>,
    /// How long the CA wants to be left alone, by what it last refused.
    wish: Arc<Mutex<Option<Duration>>>,
}

impl Caller {
    pub(super) fn new(authority: &Authority) -> Result<Self, TlsError> {
        let plan = UpstreamTls { ca_file: authority.ca_file.clone(), ..UpstreamTls::default() };
        let tls = Originator::new(&plan, UpstreamProtocol::Http1).map_err(|mut errors| {
            let none =
                || TlsError { file: None, message: "TLS cannot be set up".into(), help: None };
            errors.pop().unwrap_or_else(none)
        })?;
        Ok(Self { tls: Arc::new(tls), wish: Arc::default() })
    }

    /// How long the CA wants to be left alone. It is told once.
    pub(super) fn take_wish(&self) -> Option<Duration> {
        lock(&self.wish).take()
    }

    async fn ask(&self, request: Request<BodyWrapper<Bytes>>) -> Result<BytesResponse, String> {
        let (parts, mut body) = request.into_parts();
        // The library's bodies are one piece.
        let frame = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
        let body = frame.and_then(Result::ok).and_then(|frame| frame.into_data().ok());
        let body = body.unwrap_or_default();
        let authority = parts.uri.authority().ok_or("the CA has named a URL without a host")?;
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        let mut message = format!("{} {path} HTTP/1.1\r\n", parts.method).into_bytes();
        line(&mut message, "Host", authority.as_str().as_bytes());
        for (name, value) in &parts.headers {
            line(&mut message, name.as_str(), value.as_bytes());
        }
        line(&mut message, "Content-Length", body.len().to_string().as_bytes());
        line(&mut message, "Connection", b"close");
        message.extend_from_slice(b"\r\n");
        message.extend_from_slice(&body);
        let stream = self.connect(authority.host(), authority.port_u16().unwrap_or(443)).await?;
        let mut stream = Stream::Tls(Box::new(stream));
        stream.write_all(&message).await.map_err(|e| e.to_string())?;
        let answer = read(&mut stream).await?;
        let refused = answer.status().as_u16() >= 400;
        let (mut parts, body) = answer.into_parts();
        if let Some(wish) = retry_after(&parts.headers) {
            let is_long = wish > LONGEST_WISH;
            if refused || is_long {
                *lock(&self.wish) = Some(wish);
                // The library reckons with it, and not with what it may be.
                parts.headers.remove(http::header::RETRY_AFTER);
            }
            if is_long && !refused {
                return Err("the CA wants to be asked again only in more than a day".into());
            }
        }
        Ok(BytesResponse { parts, body: Box::new(body) })
    }

    async fn connect(&self, host: &str, port: u16) -> Result<Tls, String> {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let tcp = TcpStream::connect((bare, port)).await;
        let tcp = tcp.map_err(|e| format!("cannot connect to {host}:{port}: {e}"))?;
        let shaken = self.tls.connect(tcp, bare, true).await;
        Ok(shaken.map_err(|(_, words)| format!("{host}:{port}: {words}"))?.0)
    }
}

impl HttpClient for Caller {
    fn request(
        &self,
        request: Request<BodyWrapper<Bytes>>,
    ) -> Pin<Box<dyn Future<Output = Result<BytesResponse, Error>> + Send>> {
        let caller = self.clone();
        Box::pin(async move {
            let uri = request.uri().clone();
            let asked = tokio::time::timeout(PATIENCE, caller.ask(request)).await;
            let answer = asked.unwrap_or_else(|_| Err(format!("no answer within {PATIENCE:?}")));
            answer.map_err(|words| Error::Other(format!("{uri}: {words}").into()))
        })
    }
}

async fn read(stream: &mut Stream) -> Result<Response<Bytes>, String> {
    let malformed = "the answer is no HTTP/1.1";
    let mut buf = Vec::new();
    let mut head = response::Response::default();
    let len = loop {
        match parse_response(&buf, &mut head, false, MAX_HEAD) {
            Ok(Some(len)) if head.status >= 200 => break len,
            Ok(Some(len)) => drop(buf.drain(..len)),
            Ok(None) => read_more(stream, &mut buf).await?,
            Err(_) => return Err(malformed.into()),
        }
    };
    let mut answer = Response::builder().status(head.status);
    for field in &head.fields {
        answer = answer.header(field.name.of(&buf), field.value.of(&buf));
    }
    let mut body = Body::new(head.framing, 16 << 10);
    let mut content = Vec::new();
    let mut rest = buf.split_off(len);
    loop {
        body.decode(&rest, &mut content).map_err(|_| malformed)?;
        if body.is_done() {
            break;
        }
        if content.len() > MOST {
            return Err(format!("the answer has more than {MOST} octets"));
        }
        rest.clear();
        match read_more(stream, &mut rest).await {
            Ok(()) => {}
            Err(_) if body.ends_with_connection() => break,
            Err(words) => return Err(words),
        }
    }
    answer.body(content.into()).map_err(|_| malformed.to_owned())
}

async fn read_more(stream: &mut Stream, buf: &mut Vec<u8>) -> Result<(), String> {
    let read = stream.read_buf(buf).await.map_err(|e| e.to_string())?;
    if read == 0 {
        Err("the connection was closed in the middle of an answer".into())
    } else {
        Ok(())
    }
}

/// What `Retry-After` says (RFC 9110, section 10.2.3).
fn retry_after(fields: &http::HeaderMap) -> Option<Duration> {
    let value = fields.get(http::header::RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    httpdate::parse_http_date(value).ok().map(crate::clock::wall_until)
}
