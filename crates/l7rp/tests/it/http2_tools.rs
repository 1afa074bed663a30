//! HTTP/2 for tests: clients and upstreams of a library, and a proxy between them.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use h2::client::{Builder, ResponseFuture, SendRequest};
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request, Response};
use l7rp_testkit::{Proxy, SOON};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

pub use crate::http2_frames::*;
use crate::setup::{Setup, over};
use crate::tries::{NEVER_OPENS, PLENTY};

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
});

/// Waits for what should happen at once.
#[track_caller]
pub fn wait<T>(what: impl Future<Output = T>) -> T {
    let limited = RUNTIME.block_on(async { tokio::time::timeout(SOON, what).await });
    limited.expect("it happens in time")
}

/// Goes on with this while the test does something else.
pub fn meanwhile<T: Send + 'static>(
    what: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    RUNTIME.spawn(what)
}

/// A whole answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub fields: HeaderMap,
    pub body: Vec<u8>,
    pub trailers: Option<HeaderMap>,
}

impl Answer {
    /// Body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// A field, if it is there.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(|value| value.to_str().expect("text"))
    }
}

/// Reads an answer to its end.
pub async fn whole(response: ResponseFuture) -> Result<Answer, h2::Error> {
    let (head, body) = response.await?.into_parts();
    let (body, trailers) = content(body).await?;
    Ok(Answer { status: head.status.as_u16(), fields: head.headers, body, trailers })
}

/// Reads a body to its end, and the trailers behind it.
pub async fn content(mut body: RecvStream) -> Result<(Vec<u8>, Option<HeaderMap>), h2::Error> {
    let mut all = Vec::new();
    while let Some(part) = body.data().await {
        let part = part?;
        let _ = body.flow_control().release_capacity(part.len());
        all.extend_from_slice(&part);
    }
    Ok((all, body.trailers().await?))
}

/// Sends a body as fast as its reader lets it.
pub async fn upload(
    stream: &mut SendStream<Bytes>,
    mut data: Bytes,
    ends: bool,
) -> Result<(), h2::Error> {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        let Some(room) = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await else {
            return Err(h2::Reason::CANCEL.into());
        };
        let part = data.split_to(room?.min(data.len()));
        if !part.is_empty() {
            stream.send_data(part, false)?;
        }
    }
    if ends { stream.send_data(Bytes::new(), true) } else { Ok(()) }
}

/// A request for `path` at `a.test`.
pub fn request(method: &str, path: &str) -> Request<()> {
    let uri = format!("http://a.test{path}");
    Request::builder().method(method).uri(uri).body(()).expect("a request")
}

/// A client's connection, which goes on by itself.
#[derive(Debug)]
pub struct Conn {
    pub send: SendRequest<Bytes>,
    /// What has become of the connection.
    pub end: JoinHandle<Result<(), h2::Error>>,
}

impl Conn {
    /// By prior knowledge.
    #[track_caller]
    pub fn open(proxy: &Proxy) -> Self {
        Self::open_with(proxy, &Builder::new())
    }

    /// As [`Conn::open`], with settings of its own.
    #[track_caller]
    pub fn open_with(proxy: &Proxy, builder: &Builder) -> Self {
        let stream = wait(tokio::net::TcpStream::connect(proxy.address())).expect("it accepts");
        stream.set_nodelay(true).expect("it is TCP");
        Self::over(stream, builder)
    }

    /// On a connection that is there.
    #[track_caller]
    pub fn over(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        builder: &Builder,
    ) -> Self {
        let (send, driver) = wait(builder.handshake(stream)).expect("it speaks HTTP/2");
        Self { send, end: meanwhile(driver) }
    }

    /// Sends a head. `ends`: there is no body.
    pub fn try_begin(
        &self,
        request: Request<()>,
        ends: bool,
    ) -> Result<(ResponseFuture, SendStream<Bytes>), h2::Error> {
        let send = self.send.clone();
        wait(async { send.ready().await?.send_request(request, ends) })
    }

    /// As [`Conn::try_begin`], where it is taken.
    #[track_caller]
    pub fn begin(&self, request: Request<()>, ends: bool) -> (ResponseFuture, SendStream<Bytes>) {
        self.try_begin(request, ends).expect("it is taken")
    }

    /// The answer to a request without a body.
    #[track_caller]
    pub fn ask(&self, request: Request<()>) -> Result<Answer, h2::Error> {
        wait(whole(self.try_begin(request, true)?.0))
    }

    /// The answer to a request with this body, whose length is not told.
    #[track_caller]
    pub fn post(&self, request: Request<()>, body: impl Into<Bytes>) -> Result<Answer, h2::Error> {
        let (response, mut stream) = self.try_begin(request, false)?;
        let body = body.into();
        meanwhile(async move {
            let _ = upload(&mut stream, body, true).await;
        });
        wait(whole(response))
    }

    /// The answer to a simple GET.
    #[track_caller]
    pub fn get(&self, path: &str) -> Answer {
        self.ask(request("GET", path)).expect("an answer")
    }

    /// Waits for its end.
    #[track_caller]
    pub fn ended(self) -> Result<(), h2::Error> {
        wait(self.end).expect("it goes on to its end")
    }
}

/// What an upstream's script is given.
pub struct Incoming {
    pub request: Request<RecvStream>,
    pub respond: SendResponse<Bytes>,
}

/// An upstream that speaks HTTP/2 in cleartext; stops when dropped.
#[derive(Debug)]
pub struct H2Origin {
    address: SocketAddr,
    counts: Arc<[AtomicUsize; 3]>,
    task: JoinHandle<()>,
}

impl H2Origin {
    /// Starts one that calls `script` for each request.
    pub fn start<F>(script: impl Fn(Incoming) -> F + Clone + Send + Sync + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let counts = Arc::<[AtomicUsize; 3]>::default();
        let listener = wait(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("an address");
        let for_task = counts.clone();
        let task = RUNTIME.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                for_task[0].fetch_add(1, SeqCst);
                for_task[1].fetch_add(1, SeqCst);
                let (counts, script) = (for_task.clone(), script.clone());
                tokio::spawn(async move {
                    if let Ok(mut open) = h2::server::handshake(stream).await {
                        while let Some(Ok((request, respond))) = open.accept().await {
                            counts[2].fetch_add(1, SeqCst);
                            tokio::spawn(script(Incoming { request, respond }));
                        }
                    }
                    counts[1].fetch_sub(1, SeqCst);
                });
            }
        });
        Self { address, counts, task }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("h2c://{}", self.address)
    }

    /// How many connections were accepted so far.
    pub fn accepted(&self) -> usize {
        self.counts[0].load(SeqCst)
    }

    /// How many connections are open now.
    pub fn open(&self) -> usize {
        self.counts[1].load(SeqCst)
    }

    /// How many requests so far.
    pub fn requests(&self) -> usize {
        self.counts[2].load(SeqCst)
    }
}

impl Drop for H2Origin {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A 200 with this body.
pub fn say(respond: &mut SendResponse<Bytes>, body: impl Into<Bytes>) {
    let sent = respond.send_response(Response::new(()), false);
    // Whoever has gone does not hear it.
    let _ = sent.and_then(|mut stream| stream.send_data(body.into(), true));
}

/// Answers with what was asked for, and what came with it.
pub async fn echo(incoming: Incoming) {
    let Incoming { request, mut respond } = incoming;
    let (head, body) = request.into_parts();
    let Ok((body, trailers)) = content(body).await else { return };
    let mut response = Response::new(());
    for (name, value) in &head.headers {
        let name = format!("got-{name}").parse::<http::HeaderName>().expect("a name");
        response.headers_mut().append(name, value.clone());
    }
    let line = format!("{} {}", head.method, head.uri);
    response.headers_mut().insert("got-line", line.parse().expect("a value"));
    let Ok(mut stream) = respond.send_response(response, false) else { return };
    if upload(&mut stream, body.into(), trailers.is_none()).await.is_ok()
        && let Some(trailers) = trailers
    {
        let _ = stream.send_trailers(trailers);
    }
}

/// A proxy to upstreams of HTTP/2, which take turns.
pub fn to(urls: &[&str]) -> Setup {
    let setup = urls.iter().fold(over(&[]), |setup, url| setup.upstream(url, "weight: 1"));
    setup.pool("protocol: http2, selector: { algorithm: round-robin }").pool(NEVER_OPENS)
}

/// As [`to`], whose route tries again.
pub fn retried(urls: &[&str], keys: &str) -> Setup {
    let keys = format!("middleware: [{{ retry: {{ backoff: 1ms, {keys} }} }}]");
    to(urls).pool(PLENTY).route(&keys)
}
