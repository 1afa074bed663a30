//! tonic as a server.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_stream::{Stream, StreamExt};
use tonic::body::Body;
use tonic::metadata::{KeyAndValueRef, MetadataMap};
use tonic::server::{Grpc, StreamingService};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Response, Status, Streaming};
use tower_service::Service;

use crate::call::SERVICE;
use crate::tonic_client::Octets;
use crate::{LONGEST, RUNTIME, wait};

/// Stops to accept when dropped.
pub struct TonicServer {
    address: SocketAddr,
    log: Log,
    task: JoinHandle<()>,
}

/// What a server has seen.
#[derive(Clone, Default)]
struct Log {
    begun: Arc<AtomicUsize>,
    lost: Arc<Mutex<Vec<String>>>,
}

impl TonicServer {
    pub fn start() -> Self {
        let listener = wait(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("an address");
        let log = Log::default();
        let echo = Echo { log: log.clone() };
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let task = RUNTIME.spawn(async move {
            Server::builder().serve_with_incoming(echo, incoming).await.expect("it serves");
        });
        Self { address, log, task }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("h2c://{}", self.address)
    }

    /// How many calls have begun.
    pub fn begun(&self) -> usize {
        self.log.begun.load(SeqCst)
    }

    /// The methods of the calls that ended before their time.
    pub fn lost(&self) -> Vec<String> {
        self.log.lost.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for TonicServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Notes that a call was lost, if it is dropped before that is known to be wrong.
struct Watch {
    method: String,
    log: Log,
    done: bool,
}

impl Watch {
    fn disarm(&mut self) {
        self.done = true;
    }

    /// How the call ends, with this metadata behind the messages.
    fn ends(mut self, mut status: Status, trailing: MetadataMap) -> impl Stream<Item = Item> {
        *status.metadata_mut() = trailing;
        let mut last = Some(status);
        tokio_stream::iter([()]).map(move |()| {
            self.disarm();
            Err(last.take().unwrap_or_else(|| Status::ok("")))
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.done {
            let method = self.method.clone();
            self.log.lost.lock().unwrap_or_else(PoisonError::into_inner).push(method);
        }
    }
}

type Item = Result<Bytes, Status>;
type Answer = Pin<Box<dyn Stream<Item = Item> + Send>>;
type Later<T> = Pin<Box<dyn Future<Output = T> + Send>>;

#[derive(Clone)]
struct Echo {
    log: Log,
}

impl Service<http::Request<Body>> for Echo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Later<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let path = request.uri().path();
        let method = path.strip_prefix(SERVICE).unwrap_or_default().to_owned();
        self.log.begun.fetch_add(1, SeqCst);
        let method = Method { method, log: self.log.clone() };
        Box::pin(async move {
            let mut grpc = Grpc::new(Octets)
                .max_decoding_message_size(LONGEST)
                .max_encoding_message_size(LONGEST);
            // All kinds of calls are this one on the wire.
            Ok(grpc.streaming(method, request).await)
        })
    }
}

struct Method {
    method: String,
    log: Log,
}

impl StreamingService<Bytes> for Method {
    type Response = Bytes;
    type ResponseStream = Answer;
    type Future = Later<Result<Response<Answer>, Status>>;

    fn call(&mut self, request: Request<Streaming<Bytes>>) -> Self::Future {
        let watch = Watch { method: self.method.clone(), log: self.log.clone(), done: false };
        Box::pin(answer(watch, request))
    }
}

async fn answer(
    mut watch: Watch,
    request: Request<Streaming<Bytes>>,
) -> Result<Response<Answer>, Status> {
    let initial = renamed(request.metadata(), "got-");
    let trailing = renamed(request.metadata(), "end-");
    let mut messages = request.into_inner();
    let method = watch.method.clone();
    let mut status = Status::new(Code::Ok, "");
    let answer: Answer = match method.as_str() {
        "Chat" => Box::pin(messages),
        "Hold" => Box::pin(messages.chain(tokio_stream::pending())),
        "Collect" => {
            let mut all = Vec::new();
            while let Some(message) = messages.message().await? {
                all.extend_from_slice(&message);
            }
            Box::pin(tokio_stream::iter([Ok(all.into())]))
        }
        method => {
            let message = messages.message().await?.unwrap_or_default();
            let text = String::from_utf8_lossy(&message).into_owned();
            match method {
                "Missing" => {
                    watch.disarm();
                    return Err(Status::not_found(text));
                }
                "Expand" => Box::pin(expand(&text)),
                "Partial" => {
                    status = Status::aborted("half way");
                    Box::pin(tokio_stream::iter([Ok(message.clone()), Ok(message)]))
                }
                _ => {
                    if method == "Late" {
                        tokio::time::sleep(millis(&text)).await;
                    }
                    Box::pin(tokio_stream::iter([Ok(message)]))
                }
            }
        }
    };
    let mut response =
        Response::new(Box::pin(answer.chain(watch.ends(status, trailing))) as Answer);
    *response.metadata_mut() = initial;
    Ok(response)
}

fn expand(text: &str) -> impl Stream<Item = Item> + use<> {
    let (count, pause) = text.split_once(' ').expect("two numbers");
    let (count, pause) = (count.parse().expect("a number"), millis(pause));
    tokio_stream::iter(0..count).then(move |number: u64| async move {
        tokio::time::sleep(pause).await;
        Ok(number.to_string().into())
    })
}

fn millis(text: &str) -> Duration {
    Duration::from_millis(text.parse().expect("a number"))
}

/// The metadata that the tests have made up, by other names.
fn renamed(metadata: &MetadataMap, before: &str) -> MetadataMap {
    let mut renamed = MetadataMap::new();
    for field in metadata.iter() {
        match field {
            KeyAndValueRef::Ascii(name, value) if name.as_str().starts_with("peer-") => {
                let name = format!("{before}{name}");
                renamed.append(name.parse::<AsciiKey>().expect("a name"), value.clone());
            }
            KeyAndValueRef::Binary(name, value) if name.as_str().starts_with("peer-") => {
                let name = format!("{before}{name}");
                renamed.append_bin(name.parse::<BinaryKey>().expect("a name"), value.clone());
            }
            _ => {}
        }
    }
    renamed
}

type AsciiKey = tonic::metadata::AsciiMetadataKey;
type BinaryKey = tonic::metadata::BinaryMetadataKey;
