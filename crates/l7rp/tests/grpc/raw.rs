//! Ends of HTTP/2 that know little of gRPC: what goes over the wire, and what should not.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use h2::{Reason, RecvStream};
use http::{HeaderMap, Request, Response};
use l7rp_testkit::Proxy;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::{RUNTIME, wait};

/// A message as it is on the wire.
pub fn framed(message: &str) -> Bytes {
    let length = u32::try_from(message.len()).expect("a short message").to_be_bytes();
    [&[0], &length[..], message.as_bytes()].concat().into()
}

/// What a server does with every call.
#[derive(Clone, Copy, Debug)]
pub enum Script {
    /// Sends the head, answers so many messages with [`REPLY`], and one more with `RST_STREAM`.
    Resets(Reason, usize),
    /// Waits until the client resets it.
    Waits,
}

/// A message.
pub const REPLY: &str = "a message";

/// Stops to accept when dropped.
pub struct RawServer {
    address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
    task: JoinHandle<()>,
}

/// What a server has seen.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub heads: Vec<HeaderMap>,
    pub resets: Vec<Reason>,
}

impl RawServer {
    pub fn start(script: Script) -> Self {
        let listener = wait(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("an address");
        let seen = Arc::<Mutex<Seen>>::default();
        let to_seen = seen.clone();
        let task = RUNTIME.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, script, to_seen.clone()));
            }
        });
        Self { address, seen, task }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("h2c://{}", self.address)
    }

    pub fn seen(&self) -> Seen {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for RawServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(stream: TcpStream, script: Script, seen: Arc<Mutex<Seen>>) {
    let Ok(mut open) = h2::server::handshake(stream).await else { return };
    while let Some(Ok((request, mut respond))) = open.accept().await {
        let (head, body) = request.into_parts();
        note(&seen, |seen| seen.heads.push(head.headers));
        let seen = seen.clone();
        tokio::spawn(async move {
            match script {
                Script::Waits => {
                    let reset = std::future::poll_fn(|cx| respond.poll_reset(cx)).await;
                    note(&seen, |seen| seen.resets.extend(reset));
                }
                Script::Resets(reason, replies) => {
                    let head = Response::builder().header("content-type", "application/grpc");
                    let head = head.body(()).expect("a head");
                    let Ok(mut stream) = respond.send_response(head, false) else { return };
                    let mut messages = Messages { body, buf: Vec::new() };
                    for _ in 0..replies {
                        messages.next().await;
                        let _ = stream.send_data(framed(REPLY), false);
                    }
                    messages.next().await;
                    stream.send_reset(reason);
                }
            }
        });
    }
}

fn note(seen: &Mutex<Seen>, change: impl FnOnce(&mut Seen)) {
    change(&mut seen.lock().unwrap_or_else(PoisonError::into_inner));
}

/// The messages of a call.
struct Messages {
    body: RecvStream,
    buf: Vec<u8>,
}

impl Messages {
    /// Waits for the next one to be whole, or for the end.
    async fn next(&mut self) {
        loop {
            if let Some(length) = self.buf.get(1..5) {
                let length = length.iter().fold(0, |sum, octet| sum << 8 | usize::from(*octet));
                if self.buf.len() >= 5 + length {
                    self.buf.drain(..5 + length);
                    return;
                }
            }
            let Some(Ok(part)) = self.body.data().await else { return };
            let _ = self.body.flow_control().release_capacity(part.len());
            self.buf.extend_from_slice(&part);
        }
    }
}

/// The head of the answer to a call of one message, and whether there is nothing behind it.
#[track_caller]
pub fn head_of(proxy: &Proxy, host: &str, path: &str, message: &str) -> (HeaderMap, bool) {
    wait(async {
        let stream = TcpStream::connect(proxy.address()).await.expect("it accepts");
        let (send, connection) = h2::client::handshake(stream).await.expect("it speaks HTTP/2");
        tokio::spawn(connection);
        let request = Request::post(format!("http://{host}{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .expect("a request");
        let mut send = send.ready().await.expect("it takes one");
        let (response, mut stream) = send.send_request(request, false).expect("it is taken");
        stream.send_data(framed(message), true).expect("it is taken");
        let (head, body) = response.await.expect("an answer").into_parts();
        assert_eq!(head.status, 200);
        (head.headers, body.is_end_stream())
    })
}
